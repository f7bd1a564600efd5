"""Seconds of an operation from the tables that `gradus calibrate` measured on this very machine.

`Device.measured` holds text tables, one point a line (`FIELDS`), because they are long and a person may want to read them:

    matmul      name dtype layout batch m n k seconds spread        on a grid of m, n and k
    attention   direction dtype causal batch heads queries keys head_dim seconds spread
    memory      name dtype bytes seconds spread

and `dispatch`: phase → seconds that the framework spends around one operation (views, modules, autograd). Between points the logarithm
of the time is interpolated over the logarithms of the sizes, which is exact where time is a power of the sizes.

What was not measured takes what is nearest, by these rules: a matrix product without a layout has that of its phase (`layout_of`); a
dtype without its own table takes fp32's place in `LIKE`; a memory-bound operation without a table takes that of `add` at as many bytes;
beyond the ends of a table, time grows with the operations or bytes, and below them it stays. Nothing here imports torch.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math

from gradus.errors import UserError
from gradus.hardware import Device
from gradus.plan.work import Op

FIELDS = {
    "matmul": "name dtype layout batch m n k seconds spread",
    "attention": "direction dtype causal batch heads queries keys head_dim seconds spread",
    "memory": "name dtype bytes seconds spread",
}
LIKE = {"tf32": ("fp32",), "fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32"), "fp8": ("bf16", "fp16", "fp32")}
PRODUCTS = {"mm": ("mm", "addmm"), "addmm": ("addmm", "mm"), "bmm": ("bmm", "mm"), "baddbmm": ("bmm", "mm")}  # others: as mm
Grid = dict[tuple[int, ...], float]


def seconds(op: Op, device: Device) -> float:
    """Seconds of one `op` (not of its count) on a device with `measured` tables.

    On a CPU the framework's own time is added: nothing runs beside it. Elsewhere the longer of the two counts: while a kernel runs the
    next one is launched. Raises UserError for tables that cannot be read.
    """
    assert device.measured is not None, f"{device.name} was not measured"
    found = {"matmul": _matmul, "attention": _attention, "memory": _memory}[op.kind](op, device.measured)
    dispatch = device.measured.get("dispatch", {})
    around = op.launches * dispatch.get(op.phase, dispatch.get("forward", 0.0))
    return found + around if device.kind == "cpu" else max(found, around)


def layout_of(op: Op) -> str:
    """How the operands of a matrix product lie in memory: what the trace says, else what its phase and shape suggest.

    A linear layer multiplies by its transposed weight (nt). Backward, the gradient of the weight sums over all tokens, which are mostly
    the longest dimension (tn); that of the input does not (nn).
    """
    if op.layout:
        return op.layout
    if op.phase in ("forward", "recompute"):
        return "nt"
    _, m, n, k = op.shape
    return "tn" if k >= max(m, n) else "nn"


# ---------------------------------------------------------------- by kind


def _matmul(op: Op, measured: dict) -> float:
    tables = _matmuls(measured["matmul"])
    _, m, n, k = op.shape
    names = PRODUCTS.get(op.name, ("bmm", "mm") if op.shape[0] > 1 else ("mm", "addmm"))
    layout = layout_of(op)
    keys = [(name, dtype, lay) for dtype in _like(op.dtype) for name in names for lay in (layout, "nn", "nt", "tn")]
    grid = _first(keys, tables, "matmul", op)
    (m, n, k), rate = _rate(grid, (m, n, k))
    return rate * 2 * op.shape[0] * m * n * k * max(1.0, op.flops / (2 * math.prod(op.shape)))


def _attention(op: Op, measured: dict) -> float:
    tables = _attentions(measured["attention"])
    batch, heads, queries, keys, dim = op.shape
    backward = op.phase == "backward" or "backward" in op.name
    full = (10 if backward else 4) * math.prod(op.shape)
    causal = "causal" if op.flops < 0.75 * full else "full"
    wanted = [("backward" if backward else "forward", dtype, c) for dtype in _like(op.dtype) for c in (causal, "full", "causal")]
    grid = _first(wanted, tables, "attention", op)
    (seq, dim), rate = _rate(grid, (math.sqrt(queries * keys), dim))
    return rate * batch * heads * seq * seq * dim


def _memory(op: Op, measured: dict) -> float:
    tables = _memories(measured["memory"])
    keys = [(op.name, dtype) for dtype in (*_like(op.dtype), "fp32", "bf16")] + [("add", dtype) for dtype in (*_like(op.dtype), "fp32")]
    sizes, logs = _first(keys, tables, "memory", op)
    if op.bytes <= sizes[0]:
        return math.exp(logs[0])
    if op.bytes >= sizes[-1]:
        return math.exp(logs[-1]) * op.bytes / sizes[-1]
    i = bisect.bisect_right(sizes, op.bytes)
    part = math.log(op.bytes / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
    return math.exp(logs[i - 1] * (1 - part) + logs[i] * part)


def _like(dtype: str) -> tuple[str, ...]:
    return dtype, *LIKE.get(dtype, ())


def _first(keys: list[tuple], tables: dict, kind: str, op: Op):
    for key in keys:
        if key in tables:
            return tables[key]
    raise UserError(f"the measured tables have nothing for {op.name} in {op.dtype} ({kind}). Run gradus calibrate again.")


# ---------------------------------------------------------------- interpolation


def _rate(grid: Grid, at: tuple[float, ...]) -> tuple[list[float], float]:
    """(sizes, not less than the smallest measured; seconds an operation there): multilinear in logarithms on a grid."""
    floors, places = [], []
    for i, value in enumerate(at):
        axis = _axis(tuple(sorted({point[i] for point in grid})))
        value = max(value, axis[0])
        floors.append(value)
        j = min(bisect.bisect_right(axis, value), len(axis) - 1)
        if j == 0 or value >= axis[-1]:  # beyond the last point, the rate stays
            places.append(((axis[-1] if j else axis[0], 1.0),))
        else:
            part = math.log(value / axis[j - 1]) / math.log(axis[j] / axis[j - 1])
            places.append(((axis[j - 1], 1 - part), (axis[j], part)))
    total = 0.0
    for corner in itertools.product(*places):
        weight = math.prod(w for _, w in corner)
        if weight:
            total += weight * math.log(_known(grid, tuple(p for p, _ in corner)))
    return floors, math.exp(total)


@functools.lru_cache(maxsize=64)
def _axis(values: tuple[int, ...]) -> tuple[int, ...]:
    return values


def _known(grid: Grid, point: tuple[int, ...]) -> float:
    """The rate at a corner of the grid; at one too large to measure, that at the largest measured below it: the longest side is cut."""
    while point not in grid:
        longest = max(range(len(point)), key=lambda i: point[i])
        below = [p[longest] for p in grid if p[longest] < point[longest]]
        assert below, f"no point of the grid below {point}"
        point = (*point[:longest], max(below), *point[longest + 1 :])
    return grid[point]


# ---------------------------------------------------------------- the text


def rows(text: str, kind: str) -> list[list[str]]:
    """The lines of a table as fields. Raises UserError for a line that has not the fields of its kind."""
    n = len(FIELDS[kind].split())
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for line in lines:
        if len(line) != n:
            raise UserError(f"measured.{kind}: {' '.join(line)!r} does not have the fields {FIELDS[kind]}. Run gradus calibrate again.")
    return lines


@functools.lru_cache(maxsize=8)
def _matmuls(text: str) -> dict[tuple[str, str, str], Grid]:
    tables: dict[tuple[str, str, str], Grid] = {}
    for name, dtype, layout, *numbers in rows(text, "matmul"):
        batch, m, n, k = map(int, numbers[:4])
        tables.setdefault((name, dtype, layout), {})[m, n, k] = float(numbers[4]) / (2 * batch * m * n * k)
    return tables


@functools.lru_cache(maxsize=8)
def _attentions(text: str) -> dict[tuple[str, str, str], Grid]:
    tables: dict[tuple[str, str, str], Grid] = {}
    for direction, dtype, causal, *numbers in rows(text, "attention"):
        batch, heads, queries, keys, dim = map(int, numbers[:5])
        assert queries == keys
        tables.setdefault((direction, dtype, causal), {})[queries, dim] = float(numbers[5]) / (batch * heads * queries * keys * dim)
    return tables


@functools.lru_cache(maxsize=8)
def _memories(text: str) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """(name, dtype) → (bytes, ln seconds), ascending; several variants of one size are averaged in the logarithm."""
    found: dict[tuple[str, str], dict[float, list[float]]] = {}
    for name, dtype, n_bytes, time, _ in rows(text, "memory"):
        found.setdefault((name, dtype), {}).setdefault(float(n_bytes), []).append(math.log(float(time)))
    return {key: (sorted(points), [sum(points[b]) / len(points[b]) for b in sorted(points)]) for key, points in found.items()}
