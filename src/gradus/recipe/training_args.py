"""Hugging Face TrainingArguments in a JSON file, in this recipe's words.

The file holds an object "TrainingArgs" of names and values. Only what it names is taken over: an argument that is left
out keeps the recipe's value, not Hugging Face's default.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import Layout

KEY = "TrainingArgs"
NOT_TAKEN = "it has no counterpart here and is not taken over"

# Names that say the same as a key of ours, whatever their value.
SAME = {
    "output_dir": "log.dir",
    "num_train_epochs": "train.epochs",
    "learning_rate": "optimizer.lr",
    "adam_epsilon": "optimizer.eps",
    "weight_decay": "optimizer.weight_decay",
    "per_device_eval_batch_size": "evaluate.batch",
    "eval_on_start": "evaluate.at_start",
    "label_smoothing_factor": "task.label_smoothing",
    "seed": "train.seed",
    "save_total_limit": "train.keep",
    "dataloader_num_workers": "data.workers",
    "dataloader_pin_memory": "data.pin",
    "tf32": "layout.tf32",
}

# Names without a counterpart: what to do instead.
ADVICE = {
    "adafactor": "there is no Adafactor. Use optimizer.name=adamw",
    "auto_find_batch_size": "set layout.micro_batch to what fits; the batch of a step stays as it is",
    "data_seed": "the data's order comes from train.seed",
    "dataloader_drop_last": "the last, smaller batch is always kept and weighs what it holds",
    "ddp_find_unused_parameters": "every weight has a gradient in every step: there is none to look for",
    "disable_tqdm": "a live line is shown in a terminal only; write the output to a file for plain lines",
    "do_eval": "the verb says what is done: gradus train, evaluate, predict",
    "do_predict": "the verb says what is done: gradus train, evaluate, predict",
    "do_train": "the verb says what is done: gradus train, evaluate, predict",
    "eval_delay": "the first evaluation is after evaluate.every steps, or after the first epoch",
    "greater_is_better": "known of every metric; choose one with evaluate.best=valid/loss, for example",
    "load_best_model_at_end": "the best checkpoint is kept below checkpoints/best; evaluate.best chooses its metric",
    "local_rank": "the launcher tells each process its rank: --processes N, torchrun, mpirun or srun",
    "logging_dir": "everything a run writes is in its folder, log.dir",
    "logging_first_step": "every row is in metrics.jsonl, from step log.every on",
    "metric_for_best_model": "choose it with evaluate.best=valid/loss or evaluate.best=valid/accuracy, for example",
    "parallelism_config": "set layout.tensor, layout.context, layout.shard; the rest of the processes are replicas",
    "overwrite_output_dir": "a run never overwrites another; give another log.dir, or none",
    "push_to_hub": "nothing is uploaded",
    "resume_from_checkpoint": "give the run's folder with --resume",
    "sharded_ddp": "set fsdp, or layout.shard_optimizer=true, or layout.shard",
    "run_name": "name the run with name=...",
}

# eval_strategy, logging_strategy and save_strategy: the key that their *_steps become, and of a strategy other than
# steps whether it unsets the key, and a note.
KEPT = "the last and the best checkpoint are kept"
ROWS = "a row is written to metrics.jsonl and shown every log.every steps"
WHEN: dict[str, tuple[str, dict[str, tuple[bool, str]]]] = {
    "eval": ("evaluate.every", {
        "epoch": (True, ""),
        "no": (False, "the model is always evaluated at the end. Set evaluate.every=1000000 for the end only")}),
    "logging": ("log.every", {"no": (False, ROWS), "epoch": (False, ROWS)}),
    "save": ("train.checkpoint_every", {
        "no": (True, f"{KEPT}; none is written in between"),
        "best": (False, "the best checkpoint is always kept; evaluate.best chooses its metric"),
        "epoch": (False, f"{KEPT}. Set train.checkpoint_every to a number of steps for more")}),
}  # fmt: skip


def from_training_args(
    path: str | Path, processes: int = 1, on_host: int | None = None, layout: Layout = Layout(), resuming: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """What a file of TrainingArguments asks for: dotted keys of a recipe with their values, and a line for everything
    in the file that is not taken over as it stands. The values go into `load(recipe, **overrides)`.

    processes, on_host: of the run, and of them on this host (None: all); what is said of one device is of each. layout:
    which of them work on the same samples. resuming: a run goes on, and its batch holds.
    Raises UserError in one line for a file that is not JSON or has no "TrainingArgs", and for a value that cannot be
    worked with.
    """
    arguments, notes = _read(Path(path))
    mapping = Arguments(str(path), {k: v for k, v in arguments.items() if v is not None}, notes, resuming)
    mapping.shares = max(1, processes // (layout.pipeline * layout.context * layout.tensor))
    mapping.sharing = max(1, mapping.shares // layout.expert)
    mapping.on_host = min(mapping.sharing, on_host or mapping.sharing)
    mapping.run()
    return mapping.ours, notes


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [k for k, _ in pairs]
        twice = [k for i, k in enumerate(keys) if k in keys[:i]]
        if twice:
            raise UserError(f"{path}: {twice[0]}: given twice. Keep one.")
        return dict(pairs)

    content = limits.read_json(path, limits.RECIPE_FILE, object_pairs_hook=once)
    if not isinstance(content, dict) or not isinstance(content.get(KEY), dict):
        example = f'such as {{"{KEY}": {{"learning_rate": 5e-5}}}}'
        raise UserError(f'{path}: expected an object "{KEY}" with TrainingArguments in it, {example}.')
    return content[KEY], [f"{key}: only {KEY} is read from this file" for key in content if key != KEY]


class Arguments:
    """Takes the arguments one group after another; what is left has no counterpart."""

    shares: int  # processes that see samples of their own
    sharing: int  # of them, those that can share weights
    on_host: int  # and of these, those on this host

    def __init__(self, where: str, arguments: dict[str, Any], notes: list[str], resuming: bool):
        self.where, self.left, self.notes, self.resuming = where, arguments, notes, resuming
        self.ours: dict[str, Any] = {}
        self.known = {*SAME, *ADVICE}  # and what is taken

    def run(self) -> None:
        self.ours |= {key: self.left.pop(name) for name, key in SAME.items() if name in self.left}
        groups = (self.length, self.batch, self.optimizer, self.schedule, self.strategies, self.report, self.data)
        for group in (*groups, self.layout):
            group()
        _layouts(self)
        for name, value in self.left.items():
            near = difflib.get_close_matches(name, self.known - {name}, n=1, cutoff=0.9)
            misspelt = f"not a name of TrainingArguments. Did you mean {near[0]}?" if near else NOT_TAKEN
            self.note(name, value, ADVICE.get(name, misspelt))

    # ---- taking

    def take(self, name: str) -> Any:
        self.known.add(name)
        return self.left.pop(name, None)

    def wrong(self, name: str, text: str) -> UserError:
        return UserError(f"{self.where}: {KEY}.{name}{text}")

    def number(self, name: str, whole: bool = False) -> Any:
        value = self.take(name)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = math.nan if isinstance(value, bool) else float(value)
            if math.isfinite(number) and not (whole and number % 1):
                return int(number) if whole else number
        if value is not None:
            raise self.wrong(name, f": expected a {'whole ' if whole else ''}number, got {json.dumps(value)}.")
        return None

    def flag(self, name: str) -> bool | None:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f": expected true or false, got {json.dumps(value)}.")
        return value

    def word(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and value is not False and not isinstance(value, str):
            raise self.wrong(name, f": expected a word in quotes, got {json.dumps(value)}.")
        return "no" if value is False else value

    def note(self, name: str, value: Any, text: str) -> None:
        self.notes.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}: {text}")

    def no_counterpart(self, name: str, left: dict[str, Any]) -> None:
        for key, value in left.items():
            self.note(f"{name}.{key}", value, NOT_TAKEN)

    # ---- groups

    def length(self) -> None:
        self.steps = self.number("max_steps", whole=True)
        if self.steps is None or self.steps <= 0:  # -1: no limit
            self.steps = None
            return
        if "train.epochs" in self.ours:
            text = f"max_steps={self.steps} holds instead, as with Hugging Face"
            self.note("num_train_epochs", self.ours.pop("train.epochs"), text)
        self.ours["train.steps"] = self.steps

    def batch(self) -> None:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        batch, accumulation = (self.number(name, whole=True) for name in names)
        for name, value in zip(names, (batch, accumulation)):
            if value is not None and value < 1:
                raise self.wrong(name, f": must be at least 1, got {value}.")
        if batch is not None:
            self.ours["layout.micro_batch"] = batch
        if batch is None and accumulation not in (None, 1):
            self.note(names[1], accumulation, f"it needs {names[0]}. Or set batch.samples and layout.micro_batch")
        elif batch and self.resuming:
            self.note(names[0], batch, "a resumed run keeps its batch; this sets layout.micro_batch")
        elif batch:
            samples = self.ours["batch.samples"] = batch * (accumulation or 1) * self.shares
            of = f"{batch} × {self.shares} process{'es' if self.shares > 1 else ''}"
            of += f" × accumulation {accumulation}" if accumulation else ""
            text = f"a step sees batch.samples={samples}: {of}; {batch} at a time (layout.micro_batch)"
            self.note(names[0], batch, text)

    def optimizer(self) -> None:
        optim, (one, two) = self.word("optim"), (self.number("adam_beta1"), self.number("adam_beta2"))
        if optim == "sgd" or ((optim or "").startswith(("adamw_torch", "adamw_hf")) and not optim.endswith("bit")):
            self.ours["optimizer.name"] = "sgd" if optim == "sgd" else "adamw"
        elif optim is not None:
            text = "the recipe's optimizer stays. There are adamw, adam and sgd (optimizer.name)"
            self.note("optim", optim, f"not available in Gradus; {text}")
        if (one, two) != (None, None):
            self.ours["optimizer.betas"] = [0.9 if one is None else one, 0.999 if two is None else two]
        for key, name in (("optimizer.betas", "adam_beta1, adam_beta2"), ("optimizer.eps", "adam_epsilon")):
            if optim == "sgd" and key in self.ours:
                self.note(name, self.ours.pop(key), "it has no effect with optim=sgd")
        clip = self.number("max_grad_norm")
        if clip is not None:
            self.ours["train.clip_norm"] = clip or None  # 0: no clipping

    def schedule(self) -> None:
        name = self.word("lr_scheduler_type")
        steps, ratio = self.number("warmup_steps"), self.number("warmup_ratio")
        if name in ("linear", "cosine"):
            self.ours |= {"schedule.name": name, "schedule.final": 0.0}
        elif name == "constant":
            self.ours |= {"schedule.name": "constant", "schedule.warmup_steps": 0}
            if steps or ratio:
                text = "no effect with lr_scheduler_type=constant. Use constant_with_warmup"
                self.notes.append(f"warmup_steps, warmup_ratio: {text}")
            return
        elif name == "constant_with_warmup":
            self.ours["schedule.name"] = "constant"
        elif name is not None:
            text = "the recipe's schedule stays. There are constant, linear, cosine and noam (schedule.name)"
            self.note("lr_scheduler_type", name, f"not available in Gradus; {text}")
        if steps and ratio and steps >= 1:
            self.note("warmup_ratio", ratio, f"warmup_steps={steps:g} holds instead, as with Hugging Face")
        if steps or ratio:  # transformers 5: warmup_steps may be a fraction of all steps, as warmup_ratio
            self.every("warmup_steps" if steps else "warmup_ratio", steps or ratio, "schedule.warmup_steps")
        elif steps is not None or ratio is not None:
            self.ours["schedule.warmup_steps"] = 0

    def every(self, name: str, value: float | None, key: str, default: int | None = None) -> None:
        """A number of steps, or below 1 (warmup_ratio: always) a fraction of all steps."""
        if value is not None and (0 < value < 1 or name == "warmup_ratio"):
            if self.steps is None:
                self.note(name, value, f"the number of steps depends on the data. Set {key}, or max_steps")
                return
            value = math.ceil(value * self.steps)
        value = default if value is None else value
        if value is not None:
            self.ours[key] = int(value) if value == int(value) else value

    def strategies(self) -> None:
        old = self.take("evaluation_strategy")
        self.left.setdefault("eval_strategy", old)
        shown = self.left.get("logging_steps")
        for name, (key, others) in WHEN.items():
            strategy, steps = self.word(f"{name}_strategy"), self.number(f"{name}_steps")
            if strategy == "steps" and name == "eval" and steps is None and isinstance(shown, int | float):
                steps = shown
            if strategy == "steps" or (strategy is None and steps is not None and name != "eval"):
                self.every(f"{name}_steps", steps, key, 500)
                continue
            unset, text = others.get(strategy, (False, f"expected steps or {' or '.join(others)}. Set {key}"))
            if unset:
                self.ours[key] = None
            if strategy is not None and text:
                self.note(f"{name}_strategy", strategy, text)
            if steps is not None:
                self.note(f"{name}_steps", steps, f"no effect without {name}_strategy=steps. Set {key}")

    def report(self) -> None:
        named = self.take("report_to")
        if named is None:
            return
        listed = named if isinstance(named, list) else [named]
        listed = ["tensorboard", "wandb"] if listed == ["all"] else [] if listed == ["none"] else listed
        self.ours["log.tensorboard"] = "tensorboard" in listed
        self.ours["log.wandb"] = str(self.left.pop("project", "huggingface")) if "wandb" in listed else None
        known = "There are tensorboard (log.tensorboard) and wandb (log.wandb); metrics.jsonl is always written"
        for other in listed:
            if other not in ("tensorboard", "wandb"):
                self.note("report_to", other, f"not available in Gradus. {known}")

    def data(self) -> None:
        for name, key in (("dataloader_prefetch_factor", "prefetch"), ("dataloader_persistent_workers", "persistent")):
            value = self.take(name)
            if value is not None and str(self.ours.get("data.workers", 0)) == "0":
                self.note(name, value, "no effect without dataloader_num_workers")
            elif value is not None:
                self.ours[f"data.{key}"] = value
        grouped, strategy = self.flag("group_by_length"), self.word("train_sampling_strategy")
        name, value = ("group_by_length", grouped) if grouped is not None else ("train_sampling_strategy", strategy)
        if grouped or strategy == "group_by_length":
            self.ours["data.pad"] = "bucket"
        elif value is not None:
            self.note(name, value, "the order is a shuffle from train.seed; data.pad=bucket groups by length")

    def layout(self) -> None:
        fp16, bf16, checkpointing = self.flag("fp16"), self.flag("bf16"), self.flag("gradient_checkpointing")
        if fp16 and bf16:
            raise self.wrong("fp16", f" and {KEY}.bf16 are both true. Keep one.")
        if fp16 is not None or bf16 is not None:
            self.ours["layout.precision"] = "fp16" if fp16 else "bf16" if bf16 else "fp32"
        if checkpointing is not None:
            self.ours["layout.checkpointing"] = "full" if checkpointing else "none"
        compiled, mode = self.flag("torch_compile"), self.word("torch_compile_mode")
        if compiled is not None or mode is not None:  # Hugging Face compiles where only the mode is named
            self.ours["layout.compile"] = "none" if compiled is False else mode or "default"
            if compiled is False and mode:
                self.note("torch_compile_mode", mode, "no effect with torch_compile=false")
        cpu = [self.flag(name) for name in ("use_cpu", "no_cuda")]
        if cpu != [None, None]:
            self.ours["layout.device"] = "cpu" if True in cpu else "auto"


# ---------------------------------------------------------------- several processes

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")  # of fsdp
GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")  # those that keep the gathered weights for the backward pass
WORDS = (*STRATEGIES, "no_shard", "offload", "auto_wrap")


def _layouts(m: Arguments) -> None:
    """Take the arguments of several processes. Raises UserError for values that mean nothing, and for fsdp beside
    deepspeed."""
    sharding, config, deepspeed = m.take("fsdp"), m.take("fsdp_config"), m.take("deepspeed")
    if sharding and deepspeed:
        raise m.wrong("fsdp", f" and {KEY}.deepspeed are both given. Keep one.")
    _ddp(m, sharded=bool(sharding or deepspeed))
    if sharding:
        _fsdp(m, sharding, _object(m, "fsdp_config", config or {}))
    elif config:
        m.note("fsdp_config", config, "no effect without fsdp, as with Hugging Face")
    if deepspeed:
        _deepspeed(m, _object(m, "deepspeed", deepspeed))


def _object(m: Arguments, name: str, value: Any) -> dict[str, Any]:
    """The object itself, or the JSON file that is named, from the working folder as with Hugging Face."""
    try:
        found = limits.read_json(value, limits.RECIPE_FILE) if isinstance(value, str) else value
    except UserError as e:
        raise m.wrong(name, f": {e}") from None
    if not isinstance(found, dict):
        raise m.wrong(name, f": expected an object or the name of a JSON file with one, got {json.dumps(value)}.")
    return dict(found)


def _ddp(m: Arguments, sharded: bool) -> None:
    backend, bucket, timeout = m.word("ddp_backend"), m.number("ddp_bucket_cap_mb"), m.number("ddp_timeout")
    if backend == "mpi" and m.shares > 1:
        m.ours |= {"layout.replicate": "manual", "layout.transport": "mpi"}
    elif backend is not None:
        follows = "the backend follows from layout.device: nccl on GPUs, gloo on processors"
        m.note("ddp_backend", backend, f"{follows}; layout.transport=mpi under mpirun")
    if bucket is not None and (sharded or m.shares == 1 or backend == "mpi"):
        text = "no effect here: it is for replicas whose gradients DDP sends (layout.bucket_mb)"
        m.note("ddp_bucket_cap_mb", bucket, text)
    elif bucket is not None:
        m.ours["layout.bucket_mb"] = bucket
    if timeout is not None:
        m.ours["layout.timeout"] = timeout


def _among(m: Arguments, what: str, processes: int, keys: Mapping[str, Any]) -> None:
    """Keys of the layout by which so many processes share what they hold; one has nobody to share with, also where the
    run that it goes on with had several."""
    if processes > 1:
        m.ours |= keys
        return
    text = "one process has nobody to share with. Start several: --processes 2, torchrun, mpirun or srun"
    m.notes.append(f"{what}: {text}")
    if m.resuming:
        m.ours |= {key: Layout.model_fields[key.removeprefix("layout.")].default for key in keys}


def _fsdp(m: Arguments, value: Any, config: dict[str, Any]) -> None:
    words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else value
    wrong = [word for word in words if word not in WORDS] if isinstance(words, list) else [value]
    if wrong:
        near = did_you_mean(str(wrong[0]), WORDS)
        raise m.wrong("fsdp", f": {json.dumps(wrong[0])} is no option of it.{near}")
    strategy = next((word for word in words if word in STRATEGIES), None if "no_shard" in words else "full_shard")
    config = {name.removeprefix("fsdp_"): v for name, v in config.items()}
    if config.pop("activation_checkpointing", False):
        m.ours["layout.checkpointing"] = "full"
    reshard = config.pop("reshard_after_forward", None)
    offload = "offload" in words or config.pop("cpu_offload", False) or config.pop("offload_params", False)
    wrapping = ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "version")
    if blocks := [name for name in wrapping if config.pop(name, None)]:
        m.notes.append(f"fsdp_config ({', '.join(blocks)}): sharding is FSDP2, and every block is wrapped")
    if strategy is None:
        m.note("fsdp", value, "replicas of whole weights, as without it")
    else:
        keep = str(strategy if reshard is None else reshard).lower()
        if keep not in ("true", "false", *STRATEGIES):
            raise m.wrong("fsdp_config.reshard_after_forward", f": expected true or false, got {json.dumps(reshard)}.")
        among = m.on_host if strategy.startswith("hybrid") else m.sharing
        keys = {"layout.shard": among, "layout.offload": True} if offload else {"layout.shard": among}
        if reshard is not None or keep in GATHERED_ONCE:
            keys["layout.reshard"] = keep not in ("false", *GATHERED_ONCE)
        _among(m, f"fsdp={strategy}", among, keys)
    m.no_counterpart("fsdp_config", config)


def _deepspeed(m: Arguments, config: dict[str, Any]) -> None:
    def part(of: dict[str, Any], name: str) -> dict[str, Any]:
        value = of.pop(name, None) or {}
        if not isinstance(value, dict):
            raise m.wrong(f"deepspeed.{name}", f": expected an object, got {json.dumps(value)}.")
        return dict(value)

    zero = part(config, "zero_optimization")
    stage = zero.pop("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise m.wrong("deepspeed.zero_optimization.stage", f": expected 0, 1, 2 or 3, got {json.dumps(stage)}.")
    devices = {name: part(zero, name).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    what = f"deepspeed, ZeRO stage {stage}"
    if stage == 1:
        _among(m, what, m.shares, {"layout.shard_optimizer": True})
    elif stage:
        _among(m, what, m.sharing, {"layout.shard": m.sharing, **({"layout.reshard": False} if stage == 2 else {})})
    for name, device in devices.items():
        if device == "cpu" and m.ours.get("layout.shard", 1) > 1:
            m.ours["layout.offload"] = True
        elif device != "none":
            where = "among several processes, and to the host's memory (layout.offload)"
            m.notes.append(f"deepspeed.{name}={device}: only with stage 2 or 3, {where}")
    for name in ("fp16", "bf16"):
        if part(config, name).get("enabled", "auto") is True:
            m.ours["layout.precision"] = name
    clip = config.pop("gradient_clipping", "auto")
    if clip != "auto":
        m.ours["train.clip_norm"] = clip or None
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        given = config.pop(name, "auto")
        if given != "auto":
            text = "the batch is per_device_train_batch_size × gradient_accumulation_steps × the devices"
            m.note(f"deepspeed.{name}", given, text)
    m.no_counterpart("deepspeed", {**{f"zero_optimization.{k}": v for k, v in zero.items()}, **config})
