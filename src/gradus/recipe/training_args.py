"""Hugging Face TrainingArguments in a JSON file, in this recipe's words.

The file holds names and values, in an object "TrainingArgs" or as they are (TrainingArguments.to_json_string()). Only
what it names is taken over: an argument that is left out keeps the recipe's value, not Hugging Face's default.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.recipe.fields import NAMES, SAME, expected
from gradus.recipe.schema import Layout

KEY = "TrainingArgs"
NOT_TAKEN = "it has no counterpart here and is ignored"

ADVICE: dict[str, str] = NAMES["advice"]


def from_training_args(
    path: str | Path, processes: int = 1, on_host: int | None = None, layout: Layout = Layout(), resuming: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """What a file of TrainingArguments asks for: dotted keys of a recipe with their values, and a line for everything
    in the file that is not taken over as it stands. The values go into `load(recipe, **overrides)`.

    processes, on_host: of the run, and of them on this host (None: all); what is said of one device is of each. layout:
    which of them work on the same samples. resuming: a run goes on, and its batch holds.
    Raises UserError in one line for a file that is not JSON or has no TrainingArguments, and for a value that cannot be
    worked with.
    """
    arguments, above, notes = read(path)
    stated = {k: v for k, v in arguments.items() if v is not None}
    mapping = Arguments(f"{path}: {above}", stated, notes, resuming)
    mapping.data_parallel = max(1, processes // (layout.pipeline * layout.context * layout.tensor))
    mapping.shard_group = max(1, mapping.data_parallel // layout.expert)
    mapping.on_host = min(mapping.shard_group, on_host or mapping.shard_group)
    mapping.run()
    if not above and not arguments.keys() & mapping.known:
        raise _no_arguments(path)
    return mapping.settings, notes


def read(path: str | Path) -> tuple[dict[str, Any], str, list[str]]:
    """The arguments in a file, what stands before their names in it ("TrainingArgs." or nothing), and a line for what
    else it holds."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = [k for i, k in enumerate(keys) if k in keys[:i]]
        if twice:
            raise UserError(f"{path}: {twice[0]}: given twice. Keep one.")
        return dict(pairs)

    content = limits.read_json(path, limits.RECIPE_FILE, object_pairs_hook=once)
    if not isinstance(content, dict) or not isinstance(content.get(KEY, {}), dict):
        raise _no_arguments(path)
    if KEY not in content:
        return content, "", []
    return content[KEY], f"{KEY}.", [f"{key}: only {KEY} is read from this file" for key in content if key != KEY]


def _no_arguments(path: str | Path) -> UserError:
    example = f'{{"learning_rate": 5e-5}}, or {{"{KEY}": {{"learning_rate": 5e-5}}}}'
    return UserError(f"{path}: expected an object of TrainingArguments, such as {example}.")


class Arguments:
    """Translates the arguments one group after another; those that remain have no counterpart."""

    data_parallel: int  # processes that see samples of their own
    shard_group: int  # of them, those that can share weights
    on_host: int  # and of these, those on this host

    def __init__(self, where: str, arguments: dict[str, Any], notes: list[str], resuming: bool):
        self.where, self.arguments, self.notes, self.resuming = where, arguments, notes, resuming
        self.settings: dict[str, Any] = {}
        self.known = {*SAME, *ADVICE}  # and what was read

    def run(self) -> None:
        self.settings |= {key: self.arguments.pop(name) for name, key in SAME.items() if name in self.arguments}
        groups = (self.length, self.batch, self.optimizer, self.schedule, self.strategies, self.report, self.data)
        for group in (*groups, self.layout):
            group()
        _layouts(self)
        for name, value in self.arguments.items():
            near = difflib.get_close_matches(name, self.known - {name}, n=1, cutoff=0.9)
            if near and name not in ADVICE:
                raise self.wrong(name, f": not a name of TrainingArguments. Did you mean {near[0]}?")
            self.note(name, value, ADVICE.get(name, NOT_TAKEN))

    # ---- reading

    def wrong(self, name: str, text: str) -> UserError:
        return UserError(f"{self.where}{name}{text}")

    def pop(self, name: str, kind: type | None = None) -> Any:
        """The argument's value, of this kind; None where it is not given."""
        self.known.add(name)
        value = self.arguments.pop(name, None)
        if kind is str and value is False:
            return "no"
        if kind is None or value is None:
            return value
        with contextlib.suppress(ValidationError):
            if isinstance(value, bool) == (kind is bool):
                return TypeAdapter(FiniteFloat if kind is float else kind).validate_python(value)
        words = "a word in quotes" if kind is str else expected(kind)
        raise self.wrong(name, f": expected {words}, got {json.dumps(value)}.")

    def note(self, name: str, value: Any, text: str) -> None:
        self.notes.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}: {text}")

    # ---- groups

    def length(self) -> None:
        steps = self.pop("max_steps", int)
        self.steps = steps if steps is not None and steps > 0 else None  # -1: no limit
        if self.steps and "train.epochs" in self.settings:
            self.note("num_train_epochs", self.settings.pop("train.epochs"), f"max_steps={self.steps} is used instead")
        if self.steps:
            self.settings["train.steps"] = self.steps

    def batch(self) -> None:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        batch, accumulation = (self.pop(name, int) for name in names)
        for name, value in zip(names, (batch, accumulation)):
            if value is not None and value < 1:
                raise self.wrong(name, f": must be at least 1, got {value}.")
        if batch is not None:
            self.settings["layout.micro_batch"] = batch
        if batch is None and accumulation not in (None, 1):
            self.note(names[1], accumulation, f"it needs {names[0]}. Or set batch.samples and layout.micro_batch")
        elif batch and self.resuming:
            self.note(names[0], batch, "a resumed run keeps its batch; this sets layout.micro_batch")
        elif batch:
            samples = self.settings["batch.samples"] = batch * (accumulation or 1) * self.data_parallel
            of = f"{batch} × {self.data_parallel} process{'es' if self.data_parallel > 1 else ''}"
            of += f" × accumulation {accumulation}" if accumulation else ""
            text = f"a step sees batch.samples={samples}: {of}; {batch} at a time (layout.micro_batch)"
            self.note(names[0], batch, text)

    def optimizer(self) -> None:
        optim, betas = self.pop("optim", str), [self.pop(f"adam_beta{i}", float) for i in (1, 2)]
        if optim in NAMES["optimizers"]:
            self.settings["optimizer.name"] = NAMES["optimizers"][optim]
        elif optim is not None:
            self.note("optim", optim, "the recipe's stays. There are adamw, adam and sgd (optimizer.name)")
        if betas != [None, None]:
            self.settings["optimizer.betas"] = [usual if b is None else b for b, usual in zip(betas, (0.9, 0.999))]
        for key in ("optimizer.betas", "optimizer.eps"):
            if optim == "sgd" and key in self.settings:
                self.note(key, self.settings.pop(key), "it has no effect with optim=sgd")
        clip = self.pop("max_grad_norm", float)
        if clip is not None:
            self.settings["train.clip_norm"] = clip or None  # 0: no clipping

    def schedule(self) -> None:
        name = self.pop("lr_scheduler_type", str)
        steps, ratio = self.pop("warmup_steps", float), self.pop("warmup_ratio", float)
        self.settings |= NAMES["schedules"].get(name, {})
        if name is not None and name not in NAMES["schedules"]:
            stays = "the recipe's stays. There are constant, linear, cosine and noam (schedule.name)"
            self.note("lr_scheduler_type", name, stays)
        if name == "constant":
            if steps or ratio:
                self.notes.append("warmup_steps, warmup_ratio: use lr_scheduler_type=constant_with_warmup")
            return
        if steps and ratio and steps >= 1:
            self.note("warmup_ratio", ratio, f"warmup_steps={steps:g} is used instead, as with Hugging Face")
        if steps and steps >= 1:
            self.every("warmup_steps", steps, "schedule.warmup_steps")
        elif steps or ratio:  # transformers 5: warmup_steps may be a fraction of all steps, as warmup_ratio
            self.settings["schedule.warmup_ratio"] = steps or ratio
        elif steps is not None or ratio is not None:
            self.settings["schedule.warmup_steps"] = 0

    def every(self, name: str, value: float, key: str) -> None:
        """A number of steps, or below 1 a fraction of all steps."""
        fraction = 0 < value < 1
        if fraction and self.steps is None:
            self.note(name, value, f"the number of steps depends on the data. Set {key}, or max_steps")
        elif fraction:
            self.settings[key] = math.ceil(value * (self.steps or 0))
        else:
            self.settings[key] = int(value) if value % 1 == 0 else value

    def strategies(self) -> None:
        self.arguments.setdefault("eval_strategy", self.pop("evaluation_strategy"))
        shown = self.arguments.get("logging_steps")
        for name, of in NAMES["strategies"].items():
            strategy, steps = self.pop(f"{name}_strategy", str), self.pop(f"{name}_steps", float)
            if strategy == "steps" or (strategy is None and steps is not None and name != "eval"):
                usual = shown if name == "eval" and isinstance(shown, int | float) else 500
                self.every(f"{name}_steps", usual if steps is None else steps, of["key"])
                continue
            if strategy in of["unset"]:
                self.settings[of["key"]] = None
            if strategy is not None and (name, strategy) != ("eval", "epoch"):
                self.note(f"{name}_strategy", strategy, of["note"])
            if steps is not None:
                self.note(f"{name}_steps", steps, f"no effect without {name}_strategy=steps. Set {of['key']}")

    def report(self) -> None:
        named = self.pop("report_to")
        if named is None:
            return
        listed = named if isinstance(named, list) else [named]
        listed = ["tensorboard", "wandb"] if listed == ["all"] else [] if listed == ["none"] else listed
        self.settings["log.tensorboard"] = "tensorboard" in listed
        self.settings["log.wandb"] = str(self.arguments.pop("project", "huggingface")) if "wandb" in listed else None
        for other in (word for word in listed if word not in ("tensorboard", "wandb")):
            self.note("report_to", other, "there are tensorboard and wandb; metrics.jsonl is always written")

    def data(self) -> None:
        for name, key in (("dataloader_prefetch_factor", "prefetch"), ("dataloader_persistent_workers", "persistent")):
            value = self.pop(name)
            if value is not None and str(self.settings.get("data.workers", 0)) == "0":
                self.note(name, value, "no effect without dataloader_num_workers")
            elif value is not None:
                self.settings[f"data.{key}"] = value
        for name, grouped in (("group_by_length", True), ("train_sampling_strategy", "group_by_length")):
            value = self.pop(name)
            if value == grouped:
                self.settings["data.pad"] = "bucket"
            elif value is not None:
                self.note(name, value, "the order is a shuffle from train.seed; data.pad=bucket groups by length")

    def layout(self) -> None:
        names = ("fp16", "bf16", "gradient_checkpointing", "torch_compile", "use_cpu", "no_cuda")
        fp16, bf16, checkpointing, compiled, *cpu = (self.pop(name, bool) for name in names)
        if fp16 and bf16:
            raise self.wrong("fp16", f" and {KEY}.bf16 are both true. Keep one.")
        if fp16 is not None or bf16 is not None:
            self.settings["layout.precision"] = "fp16" if fp16 else "bf16" if bf16 else "fp32"
        if checkpointing is not None:
            self.settings["layout.checkpointing"] = "full" if checkpointing else "none"
        mode = self.pop("torch_compile_mode", str)
        if compiled is not None or mode is not None:  # Hugging Face compiles where only the mode is named
            self.settings["layout.compile"] = "none" if compiled is False else mode or "default"
        if cpu != [None, None]:
            self.settings["layout.device"] = "cpu" if True in cpu else "auto"


# ---------------------------------------------------------------- several processes

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")  # of fsdp
GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")  # those that keep the gathered weights for the backward pass
WORDS = (*STRATEGIES, "no_shard", "offload", "auto_wrap")
WRAPPING = ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "version")


def _layouts(m: Arguments) -> None:
    """Take the arguments of several processes. Raises UserError for values that mean nothing, and for fsdp beside
    deepspeed."""
    backend, bucket = m.pop("ddp_backend", str), m.pop("ddp_bucket_cap_mb", float)
    sharding, config, deepspeed = m.pop("fsdp"), m.pop("fsdp_config"), m.pop("deepspeed")
    if sharding and deepspeed:
        raise m.wrong("fsdp", f" and {KEY}.deepspeed are both given. Keep one.")
    if backend == "mpi" and m.data_parallel > 1:
        m.settings |= {"layout.replicate": "manual", "layout.transport": "mpi"}
    elif backend is not None:
        m.note("ddp_backend", backend, "it is nccl on GPUs, gloo on processors; layout.transport=mpi under mpirun")
    if bucket is not None and (sharding or deepspeed or m.data_parallel == 1 or backend == "mpi"):
        m.note("ddp_bucket_cap_mb", bucket, "no effect here: it is for replicas of DDP (layout.bucket_mb)")
    elif bucket is not None:
        m.settings["layout.bucket_mb"] = bucket
    if sharding:
        _fsdp(m, sharding, _object(m, "fsdp_config", config or {}))
    elif config:
        m.note("fsdp_config", config, "no effect without fsdp, as with Hugging Face")
    if deepspeed:
        _deepspeed(m, _object(m, "deepspeed", deepspeed))


def _object(m: Arguments, name: str, value: Any) -> dict[str, Any]:
    """The object itself, or the JSON file that is named, from the working folder as with Hugging Face."""
    try:
        content = limits.read_json(value, limits.RECIPE_FILE) if isinstance(value, str) else value
    except UserError as e:
        raise m.wrong(name, f": {e}") from None
    if not isinstance(content, dict):
        raise m.wrong(name, f": expected an object or the name of a JSON file with one, got {json.dumps(value)}.")
    return dict(content)


def _shared(m: Arguments, what: str, processes: int, keys: Mapping[str, Any]) -> None:
    """Keys of the layout by which so many processes share what they hold; one has nobody to share with, also where the
    run that it goes on with had several."""
    if processes > 1:
        m.settings |= keys
        return
    m.notes.append(f"{what}: one process has nothing to share with. Start several: --processes 2 or a launcher")
    if m.resuming:
        m.settings |= {key: Layout.model_fields[key.removeprefix("layout.")].default for key in keys}


def _fsdp(m: Arguments, value: Any, config: dict[str, Any]) -> None:
    words = ["full_shard"] if value is True else value if isinstance(value, list) else str(value).split()
    for word in words:
        if word not in WORDS:
            raise m.wrong("fsdp", f": {word} is not one of its options.{did_you_mean(str(word), WORDS)}")
    strategy = next((word for word in words if word in STRATEGIES), None if "no_shard" in words else "full_shard")
    config = {name.removeprefix("fsdp_"): v for name, v in config.items()}
    if config.pop("activation_checkpointing", False):
        m.settings["layout.checkpointing"] = "full"
    reshard = config.pop("reshard_after_forward", None)
    offload = "offload" in words or config.pop("cpu_offload", False) or config.pop("offload_params", False)
    if blocks := [name for name in WRAPPING if config.pop(name, None)]:
        m.notes.append(f"fsdp_config ({', '.join(blocks)}): sharding is FSDP2, and every block is wrapped")
    if strategy is None:
        m.note("fsdp", value, "replicas of whole weights, as without it")
    else:
        keep = str(strategy if reshard is None else reshard).lower()
        if keep not in ("true", "false", *STRATEGIES):
            raise m.wrong("fsdp_config.reshard_after_forward", f": expected true or false, got {json.dumps(reshard)}.")
        keys = {"layout.shard": m.on_host if strategy.startswith("hybrid") else m.shard_group}
        keys |= {"layout.offload": True} if offload else {}
        if reshard is not None or keep in GATHERED_ONCE:
            keys["layout.reshard"] = keep not in ("false", *GATHERED_ONCE)
        _shared(m, f"fsdp={strategy}", keys["layout.shard"], keys)
    for name, v in config.items():
        m.note(f"fsdp_config.{name}", v, NOT_TAKEN)


def _deepspeed(m: Arguments, config: dict[str, Any]) -> None:
    def part(of: dict[str, Any], name: str) -> dict[str, Any]:
        return _object(m, f"deepspeed.{name}", of.pop(name, None) or {})

    zero = part(config, "zero_optimization")
    stage = zero.pop("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise m.wrong("deepspeed.zero_optimization.stage", f": expected 0, 1, 2 or 3, got {json.dumps(stage)}.")
    if stage == 1:
        _shared(m, "deepspeed, ZeRO stage 1", m.data_parallel, {"layout.shard_optimizer": True})
    elif stage:
        keys = {"layout.shard": m.shard_group} | ({"layout.reshard": False} if stage == 2 else {})
        _shared(m, f"deepspeed, ZeRO stage {stage}", m.shard_group, keys)
    for name in ("offload_optimizer", "offload_param"):
        device = part(zero, name).get("device", "none")
        if device == "cpu" and m.settings.get("layout.shard", 1) > 1:
            m.settings["layout.offload"] = True
        elif device != "none":
            m.notes.append(f"deepspeed.{name}={device}: only cpu, with stage 2 or 3 among several processes")
    for name in ("fp16", "bf16"):
        if part(config, name).get("enabled", "auto") is True:
            m.settings["layout.precision"] = name
    clip = config.pop("gradient_clipping", "auto")
    if clip != "auto":
        m.settings["train.clip_norm"] = clip or None
    left = {**{f"zero_optimization.{k}": v for k, v in zero.items()}, **config}
    batch = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    for name, value in left.items():
        if name not in batch:
            m.note(f"deepspeed.{name}", value, NOT_TAKEN)
        elif value != "auto":
            m.note(f"deepspeed.{name}", value, "set per_device_train_batch_size, gradient_accumulation_steps")
