"""A step of Gradus as another program does it: the same profiles of blocks, with what `software.yaml` says of that program."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from gradus.plan import engine
from gradus.plan.engine import Process
from gradus.plan.work import Op, Transfer, Work
from gradus.recipe.schema import Layout, Recipe

MASKS = {"masked_fill", "tril", "ones", "bitwise_not", "randint", "where"}  # of scores; where it is fused with the softmax
CORE = {"softmax", "native_dropout"}


@dataclasses.dataclass(frozen=True)
class Software:
    """See software.yaml."""

    name: str
    precision: str = "bf16"
    attention: str = "fused"
    mask: bool = False
    optimizer: float | None = None
    state: float | None = None
    gradients: str = "buckets"
    reduced: float | None = None
    distributed: bool = False
    hidden: tuple[str, ...] = ()


@functools.cache
def table() -> dict[str, Software]:
    found = yaml.safe_load(Path(__file__).with_name("software.yaml").read_text())
    return {name: Software(name, **{**entry, "hidden": tuple(entry.get("hidden", ()))}) for name, entry in found.items()}


@dataclasses.dataclass(frozen=True)
class Traced:
    """What is kept of the engine's processes: the work of the busiest and of the first, elements of the busiest."""

    busiest: Work
    first: Work | None  # of a pipeline: without the head
    held: float  # elements of its parameters
    replicas: int


_kept: dict[str, Traced] = {}


def whole(run: Any) -> Work:
    """The traced work of a run, of the whole model: what its metrics count."""
    work = traced(run.recipe, run.cluster.n // run.stages).busiest
    if run.stages == 1:
        return work
    model = run.recipe.model
    layers = model.n_layers * run.stages
    alone = run.recipe.model_copy(update={"model": model.model_copy(update={"n_layers": layers}), "layout": Layout(device="cuda", micro_batch=1),
                                          "batch": run.recipe.batch.model_copy(update={"samples": 1})})  # fmt: skip
    return dataclasses.replace(work, model_flops=traced(alone, 1).busiest.model_flops * work.samples)


def traced(recipe: Recipe, n: int) -> Traced:
    key = f"{n} {recipe.model_dump_json()}"
    if key not in _kept:
        found = engine.processes(recipe, n, "cuda", None)
        busiest = max(found, key=lambda p: sum(op.flops * op.count for op in p.work.micro))
        layout = recipe.layout
        replicas = n // (layout.tensor * layout.pipeline * layout.context * layout.expert * layout.shard)
        first = found[0].work if found[0] is not busiest else None
        _kept[key] = Traced(busiest.work, first, busiest.own / busiest.width, replicas)
    return _kept[key]


# ---------------------------------------------------------------- the step


def _known(op: Op) -> tuple:
    return op.kind, op.name, op.dtype, op.phase, op.flops, op.bytes, op.shape


def _head(work: Work, first: Work | None) -> list[Op]:
    """Operations that only the last stage has are named so that the pipeline's bubble leaves them out (step.HEAD)."""
    if first is None:
        return work.micro
    others = Counter()
    for op in first.micro:
        others[_known(op)] += op.count
    out = []
    for op in work.micro:
        alike = min(op.count, others[_known(op)])
        others[_known(op)] -= alike
        if alike:
            out.append(dataclasses.replace(op, count=alike))
        if op.count > alike:
            out.append(dataclasses.replace(op, name="logits_" + op.name, count=op.count - alike))
    return out


def _scores(ops: list[Op]) -> set[float]:
    """Elements of the attention's scores: of batched products of the forward pass, queries × keys."""
    return {float(op.shape[0] * op.shape[1] * op.shape[2]) for op in ops if op.kind == "matmul" and op.shape[0] > 1 and op.phase == "forward"}


def _of_scores(op: Op, scores: set[float]) -> bool:
    return op.kind == "memory" and any(1 <= op.bytes / size <= 16 for size in scores)


def _fused_mask(ops: list[Op]) -> list[Op]:
    return [op for op in ops if not (op.kind == "memory" and op.name in MASKS and op.bytes > 1e6)]


def _selective(ops: list[Op]) -> list[Op]:
    """Attention's inner part once more in the backward pass (Korthikanti et al. 2022, section 5)."""
    scores = _scores(ops)
    again = [op for op in ops if op.phase == "forward" and (op.kind == "attention" or (op.kind == "matmul" and op.shape[0] > 1)
             or (op.name in CORE and _of_scores(op, scores)))]  # fmt: skip
    return ops + [dataclasses.replace(op, phase="recompute") for op in again]


def _lower(ops: list[Op], dtype: str, vocab: int) -> list[Op]:
    """Products of linear layers, but for the head's, in fp8 or fp4."""
    def linear(op: Op) -> bool:
        return op.kind == "matmul" and op.shape[0] == 1 and not any(size and vocab % size == 0 and size * 64 > vocab for size in op.shape[1:])

    return [dataclasses.replace(op, dtype=dtype) if linear(op) else op for op in ops]


def _frozen(ops: list[Op], tokens: float) -> list[Op]:
    """Only small adapters are trained: no gradients of the weights."""
    return [op for op in ops if not (op.kind == "matmul" and op.phase == "backward" and op.shape[0] == 1 and op.shape[3] == tokens)]


def _sums(software: Software, t: Traced, width: float) -> list[Transfer]:
    """Collectives between replicas: of the whole gradient after the backward pass, or beside it; of a distributed optimizer in two halves."""
    found = [x for x in t.busiest.transfers if x.axis in ("replicate", "context") and x.kind in ("all_reduce", "broadcast") and x.payload > 1e4]
    rest = [x for x in t.busiest.transfers if x not in found]
    reduced = [x for x in found if x.kind == "all_reduce"]
    if not reduced:
        return rest + found
    payload = sum(x.payload * x.calls for x in reduced) * (software.reduced or width) / width
    hidden = "backward" if software.gradients == "buckets" else ""
    one = dataclasses.replace(reduced[0], payload=payload, calls=1, phase="backward" if hidden else "optimizer", hidden_by=hidden)
    if not software.distributed:
        return [*rest, one]
    return [*rest, dataclasses.replace(one, kind="reduce_scatter"),
            dataclasses.replace(one, kind="all_gather", payload=payload * 2 / (software.reduced or width), phase="forward", hidden_by="forward")]  # fmt: skip


def _beside(transfers: list[Transfer], axes: tuple[str, ...]) -> list[Transfer]:
    def hidden(t: Transfer) -> str:
        if t.axis not in axes or t.phase == "optimizer":
            return t.hidden_by
        if t.axis == "pipeline":
            return "both" if t.phase == "backward" or "tensor" in axes else t.hidden_by  # travels while another micro-batch is computed
        return "both"

    return [dataclasses.replace(t, hidden_by=hidden(t)) for t in transfers]


def _optimizer(software: Software, t: Traced, ops: list[Op]) -> list[Op]:
    if software.optimizer is None:
        return ops
    share = t.replicas if software.distributed else 1
    small = [op for op in ops if op.bytes * op.count < 1e6]
    return small[:20] + [Op("memory", "adam", "fp32", "optimizer", 0.0, software.optimizer * t.held / share, launches=8)]


def _pipelined(run: Any, work: Work, transfers: list[Transfer], ops: list[Op]) -> tuple[list[Transfer], list[Op]]:
    """Interleaved stages send as many times as often; a pipeline that was left out of the trace sends the hidden states of its part of a
    sequence, and its head (products with the vocabulary) is the last stage's alone."""
    if run.stages == 1:
        return [dataclasses.replace(x, calls=x.calls * run.virtual) if x.axis == "pipeline" and x.phase != "optimizer" else x for x in transfers], ops
    layout, model = run.recipe.layout, run.recipe.model
    vocab = model.vocab_size / (layout.tensor if layout.vocab_parallel else 1)
    ops = [dataclasses.replace(op, name="logits_" + op.name) if op.kind == "matmul" and vocab in op.shape else op for op in ops]
    payload = 2.0 * work.tokens / run.replicas / work.micro_batches / layout.context * model.d_model / layout.tensor
    sends = [Transfer("pipeline", "send", payload, work.micro_batches * run.virtual, run.stages, run.cluster.n // run.stages, phase, "both")
             for phase in ("forward", "backward")]  # fmt: skip
    return transfers + sends, ops


def work_of(run: Any) -> Work:
    """The work of a run (`runs.Run`): the engine's, as the run's software does it."""
    software, layout = table()[run.software], run.recipe.layout
    t = traced(run.recipe, run.cluster.n // run.stages)
    ops = _head(t.busiest, t.first)
    if software.mask:
        ops = _fused_mask(ops)
    if run.recompute == "selective" and layout.checkpointing == "none":
        ops = _selective(ops)
    if run.dtype:
        ops = _lower(ops, run.dtype, getattr(run.recipe.model, "vocab_size", 0) or 0)
    width = 2.0 if layout.precision.startswith("pure_") else 4.0
    step, transfers = _optimizer(software, t, t.busiest.step), _sums(software, t, width)
    if run.frozen:
        ops, step = _frozen(ops, t.busiest.tokens / (run.replicas * t.busiest.micro_batches)), []
        transfers = [x for x in transfers if x.axis != "replicate" and not (x.axis == "shard" and x.kind == "reduce_scatter")]
    if layout.tensor > 1 and software.precision.startswith("pure_"):  # each tensor rank sends its part (Narayanan et al. 2021, section 4.1)
        transfers = [dataclasses.replace(x, payload=x.payload / (1 if layout.sequence_parallel else layout.tensor)) if x.axis == "pipeline" and x.phase != "optimizer" else x for x in transfers]
    transfers = _beside(transfers, software.hidden)
    if run.asynchronous:  # products and their gathers run in pieces beside one another
        transfers = [dataclasses.replace(x, hidden_by="both") if x.axis == "tensor" else x for x in transfers]
    if run.stages > 1 or run.virtual > 1:
        transfers, ops = _pipelined(run, t.busiest, transfers, ops)
    if layout.pipeline > 1 and layout.shard > 1:  # gathered weights stay through a pipelined step
        transfers = [dataclasses.replace(x, calls=x.calls / t.busiest.micro_batches) if x.axis == "shard" else x for x in transfers]
    stages = max(layout.pipeline, run.stages)
    return dataclasses.replace(whole(run), micro=ops, step=step, transfers=transfers, software=software.name, stages=stages, virtual=run.virtual,
                               schedule="interleaved" if run.virtual > 1 else "1f1b", data_bytes=0.0 if software.name == "timm" else t.busiest.data_bytes)  # fmt: skip


# ---------------------------------------------------------------- memory


class _Theirs(Process):
    """A process whose optimizer's state is another's: bytes a parameter, a part of which each replica has (ZeRO-1)."""

    each: float = 12.0

    @property
    def state(self) -> float:
        layout = self.recipe.layout
        replicas = self.n // (layout.tensor * layout.pipeline * layout.context * layout.shard)
        return self.stepped * self.each / replicas


def memory_of(run: Any) -> float:
    """Bytes that the caching allocator takes on the process that needs most; gradients that are added up in fp32 are four bytes more."""
    software = table()[run.software]
    most = 0.0
    for p in engine.processes(run.recipe, run.cluster.n, "cuda", None):
        theirs = _Theirs(**{f.name: getattr(p, f.name) for f in dataclasses.fields(Process)})
        if software.state:
            theirs.each = software.state
        wide = 4.0 * theirs.own / theirs.width if run.wide_gradients else 0.0
        most = max(most, max(theirs.alive.reserved, theirs.alive.bytes) + wide)
    return most
