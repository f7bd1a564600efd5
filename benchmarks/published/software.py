"""A step of Gradus as another program does it: the same profiles of blocks, with what `software.yaml` says of that program."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.process import local_bytes
from gradus.plan.work import Op, Transfer, Work
from gradus.recipe.schema import Layout, Recipe
from published.points import Program, programs

MASKS = {"masked_fill", "tril", "ones", "bitwise_not", "randint", "where"}  # of scores; where it is fused with the softmax
LOSS = {"log_softmax", "nll_loss_forward", "nll_loss_backward", "log_softmax_backward_data"}
CORE = {"softmax", "native_dropout"}
MOVES = {"index", "index_put", "new_zeros", "mul", "sum", "add", "to_copy", "expand"}  # of rows to experts and back
OFFLOADED = 6.0  # bytes between host and device a parameter and step: half weights for either pass, gradients
NARROW = 64  # an adapter's rank is less


def table() -> dict[str, Program]:
    return programs("software.yaml")


@dataclasses.dataclass(frozen=True)
class Traced:
    """What is kept of the engine's processes: the work of the busiest and of the first, elements of the busiest's parameters."""

    busiest: Work
    first: Work | None  # of a pipeline: without the head
    held: float
    shared: float  # of them as each replica steps its part: experts are split already


_kept: dict[str, Traced] = {}


def whole(run: Any) -> Work:
    """The traced work of a run as its metrics count it: the attention of whole sequences, where processes share them."""
    work = traced(run.recipe, run.cluster.n // run.sliced).busiest
    if run.sliced > 1:
        whole, part = (sum(op.flops * op.count for op in ops) for ops in (work.micro, _marked(work.micro, run)))
        work = dataclasses.replace(work, model_flops=work.model_flops * run.sliced * part / whole, stages=run.sliced)
    if run.context == 1:
        return work
    model = run.recipe.model
    more = 12.0 * model.n_layers * model.n_heads * model.head_dim * model.seq_len * (run.context - 1)  # a token (Chowdhery et al. 2022)
    return dataclasses.replace(work, model_flops=work.model_flops + more * work.tokens, samples=work.samples / run.context)


def _marked(ops: list[Op], run: Any) -> list[Op]:
    """Of a stage traced as a model of its own: what the last stage alone does, by the number of words. Layers are dealt so that this counts too: a
    stage does its part of them and of it."""
    model, layers = run.recipe.model, run.layers / (run.sliced * run.recipe.model.n_layers)
    logits = 1.8 * model.vocab_size * model.seq_len * (run.recipe.layout.micro_batch or 1)  # bytes
    last = [model.vocab_size in op.shape or (op.kind == "memory" and op.bytes >= logits) for op in ops]
    return [op._replace(stage_only=only, count=op.count * (1 / run.sliced if only else layers)) for op, only in zip(ops, last)]


def model_flops(case: Case) -> float:
    """Operations of a step over all devices, forward and backward: no recomputation, attention's full matrix (Chowdhery
    et al. 2022, appendix B)."""
    batches, plain = case.batches, dataclasses.replace(case.at(Layout(device="cpu")), target="cuda")
    ops = engine.operations_of(plain, batches.full)
    each = (n * engine.products(key.kind, key.name, key.flops, key.shape, 2, 4) for key, n in ops.items())
    return case.data_parallel * batches.parts * sum(each)


def traced(recipe: Recipe, n: int) -> Traced:
    key = f"{n} {recipe.model_dump_json()}"
    if key not in _kept:
        case = Case.of(recipe, n, "cuda")
        found = [(engine.step_work(p), p) for p in engine.processes(case)]
        work, busiest = max(found, key=lambda pair: sum(op.flops * op.count for op in pair[0].micro))
        layout = recipe.layout
        replicas = n // (layout.tensor * layout.pipeline * layout.context * layout.expert * layout.shard)
        first = found[0][0] if found[0][1] is not busiest else None
        weights = [(local_bytes(w, layout) / busiest.width * times, replicas * (1 if w.expert else layout.expert)) for w, times in busiest.weights]
        held, shared = sum(size for size, _ in weights), sum(size / ways for size, ways in weights)
        _kept[key] = Traced(dataclasses.replace(work, model_flops=model_flops(case)), first, held, shared)
    return _kept[key]


# ---------------------------------------------------------------- the step


def _scores(ops: list[Op]) -> set[float]:
    """Elements of the attention's scores: of batched products of the forward pass, queries × keys."""
    return {float(op.shape[0] * op.shape[1] * op.shape[2]) for op in ops if op.kind == "matmul" and op.shape[0] > 1 and op.phase == "forward"}


def _of_scores(op: Op, scores: set[float]) -> bool:
    return op.kind == "memory" and any(1 <= op.bytes / size <= 16 for size in scores)


def _fused_mask(ops: list[Op]) -> list[Op]:
    return [op for op in ops if not (op.kind == "memory" and op.name in MASKS and op.bytes > 1e6)]


def _fused_loss(ops: list[Op]) -> list[Op]:
    """Cross-entropy reads the logits, and writes their gradient in their place, in half."""
    logits = sum(op.bytes * op.count / 8 for op in ops if op.name == "log_softmax")  # elements
    rest = [op for op in ops if not (op.name in LOSS or (op.name == "to_copy" and logits and op.bytes * op.count == 6 * logits))]
    size = {"forward": 2.0 * logits, "backward": 4.0 * logits}
    return rest + [Op("memory", "cross_entropy", "bf16", phase, 0.0, nbytes, stage_only=True) for phase, nbytes in size.items() if nbytes]


def _selective(ops: list[Op]) -> list[Op]:
    """Attention's inner part once more in the backward pass (Korthikanti et al. 2022, section 5)."""
    scores = _scores(ops)
    again = [op for op in ops if op.phase == "forward" and (op.kind == "attention" or (op.kind == "matmul" and op.shape[0] > 1)
             or (op.name in CORE and _of_scores(op, scores)))]  # fmt: skip
    return ops + [op._replace(phase="recompute") for op in again]


def _linear(op: Op, words: int = 0) -> bool:
    """Whether a product is of a linear layer, or of experts': not of scores, not of the head over a process's words, not of an adapter's narrow matrices."""
    if op.kind != "matmul" or op.name.startswith("grouped"):
        return op.kind == "matmul"
    return op.shape[0] == 1 and min(op.shape[1:]) >= NARROW and words not in op.shape[1:]


def _lower(ops: list[Op], dtype: str, words: int) -> list[Op]:
    """Products of linear layers, but for the head's, in fp8 or fp4."""
    return [op._replace(dtype=dtype) if _linear(op, words) else op for op in ops]


def _again(ops: list[Op], share: float) -> list[Op]:
    """A share of the forward pass's linear layers once more in the backward pass."""
    return ops + [op._replace(phase="recompute", count=op.count * share) for op in ops if op.phase == "forward" and _linear(op)]


def _of_weights(op: Op, tokens: float) -> bool:
    """Whether a product gives the gradient of a weight."""
    return op.phase == "backward" and (op.name == "grouped_outer" or (op.kind == "matmul" and op.shape[0] == 1 and op.shape[3] == tokens))


def _accumulated(ops: list[Op], tokens: float) -> list[Op]:
    """Gradients of weights are added up by the products that give them, not by additions (three half tensors of their size)."""
    sizes = {6.0 * op.shape[0] * op.shape[1] * op.shape[2] for op in ops if _of_weights(op, tokens)}
    return [op for op in ops if not (op.kind == "memory" and op.name == "add" and op.phase == "backward" and op.bytes in sizes)]


def _dispatched(run: Any, ops: list[Op], transfers: list[Transfer]) -> tuple[list[Op], list[Transfer]]:
    """Rows go to their experts and back by kernels that read and write them once, where Gradus gathers, zeroes, weighs and adds them; a token goes
    once to a node, or within one to a process, that has several of its experts (DeepEP; NVIDIA's HybridEP)."""
    model, layout = run.recipe.model, run.recipe.layout
    rows = 2.0 * (layout.micro_batch or 1) * model.seq_len * model.top_k * model.d_model  # bytes
    kept = [op for op in ops if not (op.kind == "memory" and op.name in MOVES and 0.9 <= op.bytes / rows <= 4)]
    layers = sum(map(model.has_experts, range(model.n_layers)))
    if table()[run.software].loops:
        each = 3 if run.dtype else 1  # the product, and roundings of both its matrices
        kept = [op._replace(launches=op.shape[0] * each) if op.name.startswith("grouped") else op for op in kept]
    kept += [Op("memory", "permute", "bf16", phase, 0.0, 2 * rows, (), 2.0 * layers) for phase in sorted({op.phase for op in ops if op.name == "grouped_mm"})]
    nodes = run.cluster.link_of(layout.expert, 1)[1]
    places = nodes if nodes > 1 else layout.expert
    sent = places * (1 - (1 - 1 / places) ** model.top_k) / model.top_k  # places that a token's experts are at, by them
    exchanges = [dataclasses.replace(x, payload=x.payload * sent) for x in transfers if (x.axis, x.kind) == ("expert", "all_to_all")]
    rest = [x for x in transfers if (x.axis, x.kind) != ("expert", "all_to_all")]
    return kept, rest + [x for x in exchanges if x.payload > 1e5]  # their sizes go with them


def _sums(software: Program, t: Traced, width: float) -> list[Transfer]:
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


def _beside(transfers: list[Transfer], axes: Collection[str]) -> list[Transfer]:
    def hidden(t: Transfer) -> str:
        if t.axis not in axes or t.phase == "optimizer":
            return t.hidden_by
        if t.axis == "pipeline":
            return "both" if t.phase == "backward" or "tensor" in axes else t.hidden_by  # travels while another micro-batch is computed
        return "both"

    return [dataclasses.replace(t, hidden_by=hidden(t)) for t in transfers]


def _optimizer(software: Program, t: Traced, ops: list[Op]) -> list[Op]:
    if software.optimizer is None:
        return ops
    stepped = t.shared if software.distributed else t.held
    small = [op for op in ops if op.bytes * op.count < 1e6]
    return small[:20] + [Op("memory", "adam", "fp32", "optimizer", 0.0, software.optimizer * stepped, launches=8)]


def _together(run: Any, ops: list[Op], transfers: list[Transfer], micro_batches: int) -> tuple[list[Op], list[Transfer]]:
    """Processes that share a sequence: each part's queries see all keys (half of them, balanced), which go round while they do; beside experts,
    which tensor parallelism does not split, all its tokens come together before attention and part after it."""
    if run.context == 1:
        return ops, transfers
    model, layout, k = run.recipe.model, run.recipe.layout, run.context
    ops = [op._replace(flops=op.flops * k, bytes=op.bytes * k) if op.kind == "attention" else op for op in ops]
    heads = getattr(model, "n_kv_heads", None) or model.n_heads
    tokens, calls = (layout.micro_batch or 1) * model.seq_len, micro_batches * model.n_layers / layout.pipeline
    if run.gathered:
        sent = [("tensor", kind, 2.0 * tokens * k * model.d_model, calls, 1, phase) for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")]
    else:
        payload = 4.0 * tokens * model.head_dim * max(1, heads // layout.tensor)
        sent = [("context", "send", payload * times, (k - 1) * calls, layout.tensor, phase) for phase, times in (("forward", 1), ("backward", 2))]
    return ops, transfers + [Transfer(axis, kind, size, n, k, stride, phase, phase) for axis, kind, size, n, stride, phase in sent]


def _between_stages(run: Any, software: Program, transfers: list[Transfer]) -> list[Transfer]:
    """Interleaved stages send as many times as often; each tensor rank sends its part (Narayanan et al. 2021, section 4.1)."""
    layout = run.recipe.layout
    if run.sliced > 1:
        model, m = run.recipe.model, run.recipe.batch.samples / (run.replicas * (layout.micro_batch or 1))
        sent = 2.0 * (layout.micro_batch or 1) * model.seq_len * model.d_model, m, run.sliced, run.cluster.n // run.sliced
        transfers = [*transfers, *(Transfer("pipeline", "send", *sent, phase) for phase in ("forward", "backward"))]
    part = layout.tensor if software.precision.startswith("pure_") and not layout.sequence_parallel else 1
    return [dataclasses.replace(x, payload=x.payload / part, calls=x.calls * run.virtual) if x.axis == "pipeline" and x.phase != "optimizer" else x
            for x in transfers]  # fmt: skip


def work_of(run: Any, plain: bool = False) -> Work:
    """The work of a run (`runs.Run`): the engine's, as the run's software does it, or plain."""
    software, layout = table()["any" if plain else run.software], run.recipe.layout
    t = traced(run.recipe, run.cluster.n // run.sliced)
    ops = engine.mark_stage_only(t.busiest.micro, t.first.micro) if t.first else t.busiest.micro
    ops = _marked(ops, run) if run.sliced > 1 else ops
    if software.mask:
        ops = _fused_mask(ops)
    if software.loss == "fused":
        ops = _fused_loss(ops)
    if run.recompute == "selective":
        ops = _selective(ops)
    if run.recompute == "half":
        ops = _again(ops, 0.5)
    width = 2.0 if layout.precision.startswith("pure_") else 4.0
    m = max(1, round(run.recipe.batch.samples / (run.replicas * (layout.micro_batch or run.recipe.batch.samples))))
    step, transfers = _optimizer(software, t, t.busiest.step), _sums(software, t, width)
    if m < t.busiest.micro_batches:  # a schedule of Gradus runs at least one a stage
        transfers = [dataclasses.replace(x, calls=x.calls * m / t.busiest.micro_batches) if x.phase != "optimizer" and x.axis not in ("replicate", "shard") else x for x in transfers]
    tokens = t.busiest.tokens / (run.replicas * m)
    if run.dtype:
        ops = _lower(ops, run.dtype, -(-(run.recipe.model.vocab_size or 0) // layout.tensor))
    if software.accumulated:
        ops = _accumulated(ops, tokens)
    if software.dispatch and getattr(run.recipe.model, "n_experts", None):
        ops, transfers = _dispatched(run, ops, transfers)
    transfers = _between_stages(run, software, transfers)
    if layout.pipeline > 1 and layout.shard > 1:  # gathered weights stay through a pipelined step
        transfers = [dataclasses.replace(x, calls=x.calls / t.busiest.micro_batches) if x.axis == "shard" else x for x in transfers]
    ops, transfers = _together(run, ops, _beside(transfers, (*software.hidden, *("tensor", "sequence") * run.asynchronous)), m)
    return dataclasses.replace(whole(run), micro=ops, step=step, transfers=transfers, micro_batches=m, software=run.software, virtual=run.virtual,
                               schedule="interleaved" if run.virtual > 1 else "1f1b",
                               data_bytes=0.0 if run.software == "timm" else t.busiest.data_bytes + OFFLOADED * layout.offload * t.held)  # fmt: skip
