"""What TrainingArguments say of several processes (ddp_*, fsdp, deepspeed), in the words of a layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gradus import limits
from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import Layout

if TYPE_CHECKING:
    from gradus.recipe.training_args import Arguments

STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2")  # of fsdp
GATHERED_ONCE = ("shard_grad_op", "hybrid_shard_zero2")  # those that keep the gathered weights for the backward pass
WORDS = (*STRATEGIES, "no_shard", "offload", "auto_wrap")


def layouts(m: Arguments) -> None:
    """Take the arguments of several processes. Raises UserError for values that mean nothing, and for fsdp beside
    deepspeed."""
    sharding, config, deepspeed = m.take("fsdp"), m.take("fsdp_config"), m.take("deepspeed")
    if sharding and deepspeed:
        raise m.wrong("fsdp", f" and {m.key}.deepspeed are both given. Keep one.")
    _ddp(m, sharded=bool(sharding or deepspeed))
    if sharding:
        _fsdp(m, sharding, _read(m, "fsdp_config", config or {}))
    elif config:
        m.note("fsdp_config", config, "no effect without fsdp, as with Hugging Face")
    if deepspeed:
        _deepspeed(m, _read(m, "deepspeed", deepspeed))


def _read(m: Arguments, name: str, value: Any) -> dict[str, Any]:
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
