"""Seconds of an operation from the tables that `gradus calibrate` measured on this very machine.

`Device.measured` holds text tables, one point per line (`FIELDS`), because they are long and a person may want to read
them:

    matmul      name dtype layout batch m n k seconds spread        on a grid of m, n and k
    attention   direction dtype causal batch heads queries keys head_dim seconds spread
    memory      name dtype bytes seconds spread

and `dispatch`: phase → seconds that the framework spends around one operation (views, modules, autograd). Between
points the logarithm of the time is interpolated over the logarithms of the sizes, which is exact where time is a power
of the sizes.

What was not measured takes what is nearest, by these rules: a matrix product without a layout has that of its phase
(`layout_of`); a dtype without its own table takes fp32's place in `LIKE`; a memory-bound operation without a table
takes that of `add` at as many bytes; beyond the ends of a table, time grows with the operations or bytes, and below
them it stays. This file imports no torch.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable

from gradus.errors import UserError
from gradus.hardware import Device
from gradus.plan.work import Op

FIELDS = {
    "matmul": "name dtype layout batch m n k seconds spread",
    "attention": "direction dtype causal batch heads queries keys head_dim seconds spread",
    "memory": "name dtype bytes seconds spread",
}
LIKE = {"tf32": ("fp32",), "fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32"), "fp8": ("bf16", "fp16", "fp32")}
PRODUCTS = {  # others: as mm
    "mm": ("mm", "addmm"), "addmm": ("addmm", "mm"), "bmm": ("bmm", "mm"), "baddbmm": ("bmm", "mm"),
}  # fmt: skip
Grid = dict[tuple[int, ...], float]  # sizes → ln of seconds (of an operation, or of all)


def seconds(op: Op, device: Device) -> float:
    """Seconds of one `op` (not of its count) on a device with `measured` tables.

    On a CPU the framework's own time is added: nothing overlaps it. Elsewhere the longer of the two counts: while a
    kernel runs the next one is launched. Raises UserError for tables that cannot be read.
    """
    grids = _grids(device.measured[op.kind], op.kind)
    kernel = {"matmul": _matmul, "attention": _attention, "memory": _memory}[op.kind](op, grids)
    dispatch = device.measured.get("dispatch", {})
    around = op.launches * dispatch.get(op.phase, dispatch.get("forward", 0.0))
    return kernel + around if device.kind == "cpu" else max(kernel, around)


def layout_of(op: Op) -> str:
    """How the operands of a matrix product lie in memory: what the trace says, else what its phase and shape suggest.

    A linear layer multiplies by its transposed weight (nt). Backward, the gradient of the weight sums over all tokens,
    which are mostly the longest dimension (tn); that of the input does not (nn).
    """
    if op.layout:
        return op.layout
    if op.phase in ("forward", "recompute"):
        return "nt"
    _, m, n, k = op.shape
    return "tn" if k >= max(m, n) else "nn"


# ---------------------------------------------------------------- by kind


def _matmul(op: Op, grids: dict[tuple, Grid]) -> float:
    names = PRODUCTS.get(op.name, ("bmm", "mm") if op.shape[0] > 1 else ("mm", "addmm"))
    keys = itertools.product(_like(op.dtype), names, (layout_of(op), "nn", "nt", "tn"))
    grid = _first(((name, dtype, layout) for dtype, name, layout in keys), grids, op)
    sizes, rate = _at(grid, op.shape[1:])
    return rate * 2 * op.shape[0] * math.prod(sizes) * max(1.0, op.flops / (2 * math.prod(op.shape)))


def _attention(op: Op, grids: dict[tuple, Grid]) -> float:
    batch, heads, queries, keys, dim = op.shape
    backward = op.phase == "backward" or "backward" in op.name
    causal = "causal" if op.flops < 0.75 * (10 if backward else 4) * math.prod(op.shape) else "full"
    direction = "backward" if backward else "forward"
    wanted = itertools.product((direction,), _like(op.dtype), (causal, "full", "causal"))
    (seq, dim), rate = _at(_first(wanted, grids, op), (math.sqrt(queries * keys), dim))
    return rate * batch * heads * seq * seq * dim


def _memory(op: Op, grids: dict[tuple, Grid]) -> float:
    like = (*_like(op.dtype), "fp32")
    keys = ((name, dtype) for name, last in ((op.name, "bf16"), ("add", "fp32")) for dtype in (*like, last))
    (size,), rate = _at(_first(keys, grids, op), (op.bytes,))
    return rate * size


def _like(dtype: str) -> tuple[str, ...]:
    return dtype, *LIKE.get(dtype, ())


def _first(keys: Iterable[tuple], grids: dict[tuple, Grid], op: Op) -> Grid:
    for key in keys:
        if key in grids:
            return grids[key]
    what = f"{op.name} in {op.dtype} ({op.kind})"
    raise UserError(f"the measured tables have nothing for {what}. Run gradus calibrate again.")


# ---------------------------------------------------------------- interpolation


def _at(grid: Grid, sizes: tuple[float, ...]) -> tuple[list[float], float]:
    """(sizes, not less than the smallest measured; seconds of an operation, or of a byte, there): multilinear in
    logarithms on a grid."""
    floors, weighted = [], []  # of each size the points on both sides, with their weights
    for i, value in enumerate(sizes):
        axis = sorted({point[i] for point in grid})
        value = max(value, axis[0])
        floors.append(value)
        j = bisect.bisect_right(axis, value)
        if j == len(axis):  # beyond the last point, the rate stays
            weighted.append(((axis[-1], 1.0),))
        else:
            part = math.log(value / axis[j - 1]) / math.log(axis[j] / axis[j - 1])
            weighted.append(((axis[j - 1], 1 - part), (axis[j], part)))
    log = 0.0
    for corner in itertools.product(*weighted):
        if weight := math.prod(w for _, w in corner):
            log += weight * _known(grid, tuple(point for point, _ in corner))
    return floors, math.exp(log)


def _known(grid: Grid, point: tuple[int, ...]) -> float:
    """The rate at a corner of the grid; at one too large to measure, that at the largest measured below it: the longest
    side is cut."""
    while point not in grid:
        longest = max(range(len(point)), key=lambda i: point[i])
        below = max(p[longest] for p in grid if p[longest] < point[longest])
        point = (*point[:longest], below, *point[longest + 1 :])
    return grid[point]


# ---------------------------------------------------------------- the text


def rows(text: str, kind: str) -> list[list[str]]:
    """The lines of a table as fields. Raises UserError for a line that has not the fields of its kind."""
    lines, fields = [line.split() for line in text.splitlines() if line.strip()], FIELDS[kind]
    for line in lines:
        if len(line) != len(fields.split()):
            wrong = f"{' '.join(line)!r} does not have the fields {fields}"
            raise UserError(f"measured.{kind}: {wrong}. Run gradus calibrate again.")
    return lines


@functools.lru_cache(maxsize=8)
def _grids(text: str, kind: str) -> dict[tuple, Grid]:
    """What names the operation → sizes → ln of the seconds of an operation (of attention: a score and channel; of
    memory: a byte); variants of one size are averaged in the logarithm."""
    names = 2 if kind == "memory" else 3
    logs: dict[tuple, dict[tuple, list[float]]] = {}
    for line in rows(text, kind):
        *sizes, time, _ = (float(x) for x in line[names:])
        operations = math.prod(sizes) * (2 if kind == "matmul" else 1)
        point = {"matmul": sizes[1:], "attention": sizes[3:], "memory": sizes}[kind]
        of_point = logs.setdefault(tuple(line[:names]), {}).setdefault(tuple(point), [])
        of_point.append(math.log(time / operations))
    return {name: {point: sum(each) / len(each) for point, each in grid.items()} for name, grid in logs.items()}
