"""What people estimate a device's peak memory with instead of a planner: published formulas, in our words. Bytes of a device; None: the formula says
nothing of such a run. Those that know one device only are taken over the devices that share the weights, as their readers do."""

from __future__ import annotations

from collections.abc import Callable

from gradus import models
from gradus.recipe.schema import LlamaConfig
from published.memory import Question, widths

GB, GIB = 1e9, 2**30


def _sizes(q: Question) -> tuple[float, float, int]:
    """(parameters without an adapter's, trained ones, devices that share them)."""
    layout = q.recipe.layout
    total = float(models.count(q.base)["total"])
    return total, q.frozen.trained if q.frozen else total, layout.tensor * layout.pipeline * layout.shard


def _per_parameter(q: Question, each: float) -> float:
    """Frozen parameters as they are stored."""
    total, trained, over = _sizes(q)
    return (each * trained + (total * q.frozen.bits / 8 if q.frozen else 0.0)) / over


def sixteen(q: Question) -> float:
    """Half weights and gradients, fp32 copy and two moments (Rajbhandari et al. 2020, section 3.1)."""
    return _per_parameter(q, 16)


def twenty(q: Question) -> float:
    """The same with fp32 gradients (Smith et al. 2022, section 3.1)."""
    return _per_parameter(q, 20)


def accelerate(q: Question) -> float | None:
    """`accelerate estimate-memory`, of Adam in half: at most the two moments, 8 bytes a parameter; of a batch of one, of full training
    (huggingface/accelerate, commands/estimate.py)."""
    total, _, over = _sizes(q)
    return None if q.frozen else 8 * total / over


def deepspeed(q: Question) -> float | None:
    """Model states alone, of ZeRO-2 (half weights whole, 16 bytes a parameter split) and ZeRO-3 (18 bytes split, the largest layer whole);
    deepspeedai/DeepSpeed, runtime/zero/stage_1_and_2.py and stage3.py."""
    total, _, _ = _sizes(q)
    model, layout = q.base, q.recipe.layout
    parts = layout.tensor * layout.pipeline
    if q.frozen or not q.zero:
        return None
    if layout.shard > 1 or q.zero == 3:
        return 4.0 * model.vocab_size * model.d_model + 18 * total / q.n
    return 4 * total / parts + 16 * total / q.n


def llamafactory(q: Question) -> float:
    """GB of all devices a billion parameters: 18 of full training in mixed precision, 8 in half alone, 2 with an adapter, 1 or 1/2 where the base
    is stored in 8 or 4 bits (hiyouga/LLaMA-Factory, README)."""
    total, _, over = _sizes(q)
    each = {16.0: 2.0, 8.0: 1.0}.get(q.frozen.bits, 0.5) if q.frozen else 8.0 if q.state <= 4 and q.keeps.half else 18.0
    return each * total / over


def unsloth(q: Question) -> float | None:
    """Weights, adapter, optimizer (6 bytes a trained parameter), gradients with a floor, activations of some layers, 1.4 GiB
    (unslothai/unsloth, studio/backend/utils/hardware/VRAM_ESTIMATION.md)."""
    total, trained, over = _sizes(q)
    model, layout = q.base, q.recipe.layout
    if not isinstance(model, LlamaConfig) or layout.tensor * layout.pipeline > 1:
        return None
    named, layers = widths(model), model.n_layers
    h, kv, f = model.d_model, named["to_k"][1], named["up"][1]
    body = (2 * h * h + 2 * h * kv + 3 * h * f * (model.n_experts or 1)) * layers
    weights = 2 * total if not q.frozen or q.frozen.bits == 16 else 2 * body / 3.2 + 2 * (total - body)
    tokens = layout.micro_batch * model.seq_len
    each = (tokens * (h + 2 * kv) + 2 * tokens + 2 * tokens * f) * 2.5
    activations = each * (layers if q.recompute == "none" else 1.0 if q.frozen else 2.0)
    optimizer, adapter = 6 * trained, 2 * trained * bool(q.frozen)
    floor = 0.15 * weights
    gradients = max(2 * trained, min(floor, max(activations, optimizer)) if q.frozen else floor)
    return (weights + adapter + optimizer + gradients) / over + activations + 1.4 * GIB


RIVALS: dict[str, Callable[[Question], float | None]] = {
    "accelerate estimate-memory": accelerate, "DeepSpeed's estimators": deepspeed, "LLaMA-Factory's table": llamafactory, "Unsloth's formula": unsloth,
    "16 bytes a parameter": sixteen, "20 bytes a parameter": twenty,
}  # fmt: skip
