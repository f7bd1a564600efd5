"""What TrainingArguments say of several processes (ddp_*, fsdp, deepspeed), in the words of a layout."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError, did_you_mean
from gradus.recipe.schema import Layout

if TYPE_CHECKING:
    from gradus.recipe.training_args import Arguments

NAMES = ("ddp_backend", "ddp_bucket_cap_mb", "ddp_timeout", "deepspeed", "fsdp", "fsdp_config")
STRATEGIES = {  # of fsdp → keys of the layout besides layout.shard
    "full_shard": {},
    "shard_grad_op": {"layout.reshard": False},
    "hybrid_shard": {},
    "hybrid_shard_zero2": {"layout.reshard": False},
}
WORDS = (*STRATEGIES, "no_shard", "offload", "auto_wrap")


def layouts(m: Arguments) -> None:
    """Take the arguments of several processes. Raises UserError for values that mean nothing, and for fsdp beside deepspeed."""
    sharding, config, deepspeed = m.take("fsdp"), m.take("fsdp_config"), m.take("deepspeed")
    if sharding and deepspeed:
        raise UserError(f"{m.where}: {m.key}.fsdp and {m.key}.deepspeed are both given. Keep one.")
    _ddp(m, sharded=bool(sharding or deepspeed))
    if sharding:
        _fsdp(m, sharding, _read(m, "fsdp_config", config or {}))
    elif config:
        m.note("fsdp_config", config, "no effect without fsdp, as with Hugging Face")
    if deepspeed:
        _deepspeed(m, _read(m, "deepspeed", deepspeed))


def _read(m: Arguments, name: str, value: Any) -> dict[str, Any]:
    """The object itself, or the JSON file that is named, from the working folder as with Hugging Face."""
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        raise UserError(
            f"{m.where}: {m.key}.{name}: expected an object or the name of a JSON file, got {json.dumps(value)}."
        )
    try:
        found = json.loads(Path(os.path.expanduser(value)).read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(
            f"{m.where}: {m.key}.{name}={value}: cannot be read ({e.strerror}). Give its path from here, or its content."
        ) from None
    except ValueError as e:
        raise UserError(f"{m.where}: {m.key}.{name}={value}: not readable as JSON ({e}).") from None
    if not isinstance(found, dict):
        raise UserError(f"{m.where}: {m.key}.{name}={value}: not a JSON object.")
    return found


def _ddp(m: Arguments, sharded: bool) -> None:
    backend = m.word("ddp_backend")
    if backend == "mpi" and m.shares > 1:
        m.ours |= {"layout.replicate": "manual", "layout.transport": "mpi"}
    elif backend is not None:
        m.note(
            "ddp_backend",
            backend,
            "the backend follows from layout.device: nccl on GPUs, gloo on processors; layout.transport=mpi under mpirun",
        )
    bucket = m.number("ddp_bucket_cap_mb")
    if bucket is not None and (sharded or m.shares == 1 or backend == "mpi"):
        m.note(
            "ddp_bucket_cap_mb",
            bucket,
            "no effect here: it is for replicas whose gradients DDP sends (layout.bucket_mb)",
        )
    elif bucket is not None:
        m.ours["layout.bucket_mb"] = bucket
    timeout = m.number("ddp_timeout")
    if timeout is not None:
        m.ours["layout.timeout"] = timeout


def _among(m: Arguments, what: str, processes: int, keys: Mapping[str, Any]) -> None:
    """Keys of the layout by which so many processes share what they hold; one has nobody to share with, also where the run that it goes
    on with had several."""
    if processes > 1:
        m.ours |= keys
        return
    m.notes.append(
        f"{what}: one process has nobody to share with. Start several: --processes 2, torchrun, mpirun or srun"
    )
    if m.resuming:
        m.ours |= {key: Layout.model_fields[key.removeprefix("layout.")].default for key in keys}


def _fsdp(m: Arguments, value: Any, config: dict[str, Any]) -> None:
    words = ["full_shard"] if value is True else value.split() if isinstance(value, str) else value
    wrong = [word for word in words if word not in WORDS] if isinstance(words, list) else [value]
    if wrong:
        raise UserError(
            f"{m.where}: {m.key}.fsdp: {json.dumps(wrong[0])} is no option of it.{did_you_mean(str(wrong[0]), WORDS)}"
        )
    strategy = next((word for word in words if word in STRATEGIES), None if "no_shard" in words else "full_shard")
    config = {name.removeprefix("fsdp_"): v for name, v in config.items()}
    if config.pop("activation_checkpointing", False):
        m.ours["layout.checkpointing"] = "full"
    reshard = config.pop("reshard_after_forward", None)
    offload = "offload" in words or config.pop("cpu_offload", False) or config.pop("offload_params", False)
    wrapping = ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params", "version")
    blocks = [name for name in wrapping if config.pop(name, None)]
    if blocks:
        m.notes.append(f"fsdp_config ({', '.join(blocks)}): sharding is FSDP2, and every block is wrapped")
    if strategy is None:
        m.note("fsdp", value, "replicas of whole weights, as without it")
    else:
        more = dict(STRATEGIES[strategy])
        if reshard is not None and not isinstance(reshard, bool) and str(reshard).lower() not in STRATEGIES:
            raise UserError(
                f"{m.where}: {m.key}.fsdp_config.reshard_after_forward: expected true or false, got {json.dumps(reshard)}."
            )
        if reshard is not None:
            more["layout.reshard"] = (
                reshard if isinstance(reshard, bool) else str(reshard).lower() in ("full_shard", "hybrid_shard")
            )
        if offload:
            more["layout.offload"] = True
        among = m.on_host if strategy.startswith("hybrid") else m.sharing
        _among(m, f"fsdp={strategy}", among, {"layout.shard": among, **more})
    for name, given in config.items():
        m.note(f"fsdp_config.{name}", given, "it has no counterpart here and is not taken over")


def _part(m: Arguments, config: dict[str, Any], name: str) -> dict[str, Any]:
    """Take an object out of the configuration of DeepSpeed."""
    value = config.pop(name, None) or {}
    if not isinstance(value, dict):
        raise UserError(f"{m.where}: {m.key}.deepspeed.{name}: expected an object, got {json.dumps(value)}.")
    return dict(value)


def _deepspeed(m: Arguments, config: dict[str, Any]) -> None:
    zero = _part(m, config, "zero_optimization")
    stage = zero.pop("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise UserError(
            f"{m.where}: {m.key}.deepspeed.zero_optimization.stage: expected 0, 1, 2 or 3, got {json.dumps(stage)}."
        )
    devices = {name: _part(m, zero, name).get("device", "none") for name in ("offload_optimizer", "offload_param")}
    what = f"deepspeed, ZeRO stage {stage}"
    if stage == 1:
        _among(m, what, m.shares, {"layout.shard_optimizer": True})
    elif stage:
        _among(m, what, m.sharing, {"layout.shard": m.sharing, **({"layout.reshard": False} if stage == 2 else {})})
    for name, device in devices.items():
        if device == "cpu" and m.ours.get("layout.shard", 1) > 1:
            m.ours["layout.offload"] = True
        elif device != "none":
            m.notes.append(
                f"deepspeed.{name}={device}: only with stage 2 or 3, among several processes, and to the host's memory (layout.offload)"
            )
    for name in ("fp16", "bf16"):
        if _part(m, config, name).get("enabled", "auto") is True:
            m.ours["layout.precision"] = name
    clip = config.pop("gradient_clipping", "auto")
    if clip != "auto":
        m.ours["train.clip_norm"] = clip or None
    for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"):
        given = config.pop(name, "auto")
        if given != "auto":
            m.note(
                f"deepspeed.{name}",
                given,
                "the batch is per_device_train_batch_size × gradient_accumulation_steps × the devices",
            )
    for name, given in {**{f"zero_optimization.{k}": v for k, v in zero.items()}, **config}.items():
        m.note(f"deepspeed.{name}", given, "it has no counterpart here and is not taken over")
