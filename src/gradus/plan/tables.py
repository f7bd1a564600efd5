"""Seconds of an operation from the tables that `gradus calibrate` measured on this very machine.

`Device.measured` holds text tables, one point a line (`FIELDS`), because they are long and a person may want to read
them:

    matmul      name dtype layout batch m n k seconds spread        on a grid of m, n and k
    attention   direction dtype causal batch heads queries keys head_dim seconds spread
    memory      name dtype bytes seconds spread

and `dispatch`: phase → seconds that the framework spends around one operation (views, modules, autograd). Between
points the logarithm of the time is interpolated over the logarithms of the sizes, which is exact where time is a power
of the sizes.

What was not measured takes the nearest table: a matrix product without a layout takes that of its phase (`layout_of`);
a dtype without a table the first of `SIMILAR_DTYPES` that has one; a memory-bound operation without a table that of
`add` at as many bytes. Beyond the ends of a table time grows with the operations or bytes; below them it stays. Nothing
here imports torch.
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
SIMILAR_DTYPES = {
    "tf32": ("fp32",), "fp16": ("bf16", "fp32"), "bf16": ("fp16", "fp32"), "fp8": ("bf16", "fp16", "fp32"),
}  # fmt: skip
PRODUCTS = {  # product → names of the tables that may time it
    "mm": ("mm", "addmm"), "addmm": ("addmm", "mm"), "bmm": ("bmm", "mm"), "baddbmm": ("bmm", "mm"),
}  # fmt: skip
Grid = dict[tuple[int, ...], float]  # sizes → ln of seconds per operation, attention score or byte


def seconds(op: Op, device: Device) -> float:
    """Seconds of one `op` (not of its count) on a device with `measured` tables.

    On a CPU the framework's own time is added, as nothing overlaps it. Elsewhere the longer of the two counts: while a
    kernel runs the next one is launched. Raises UserError for tables that cannot be read.
    """
    kernel_of = {"matmul": _matmul, "attention": _attention, "memory": _memory}[op.kind]
    table, dispatch = device.measured.get(op.kind), device.measured.get("dispatch", {})
    if not isinstance(table, str) or not isinstance(dispatch, dict):
        raise UserError(f"{device.name}: measured.{op.kind}: no table. Run gradus calibrate again.")
    kernel = kernel_of(op, _grids(table, op.kind))
    framework = op.launches * dispatch.get(op.phase, dispatch.get("forward", 0.0))
    return kernel + framework if device.kind == "cpu" else max(kernel, framework)


def layout_of(op: Op) -> str:
    """How the operands of a matrix product lie in memory: what the trace says, else what its phase and shape suggest.

    A linear layer multiplies by its transposed weight (nt). Backward, the weight's gradient sums over all tokens, which
    are mostly the longest dimension (tn); the input's does not (nn).
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
    keys = itertools.product(_similar(op.dtype), names, (layout_of(op), "nn", "nt", "tn"))
    grid = _first_grid(((name, dtype, layout) for dtype, name, layout in keys), grids, op)
    sizes, per_operation = _interpolate(grid, op.shape[1:])
    return per_operation * 2 * op.shape[0] * math.prod(sizes) * max(1.0, op.flops / (2 * math.prod(op.shape)))


def _attention(op: Op, grids: dict[tuple, Grid]) -> float:
    batch, heads, queries, keys, dim = op.shape
    backward = op.phase == "backward" or "backward" in op.name
    causal = "causal" if op.flops < 0.75 * (10 if backward else 4) * math.prod(op.shape) else "full"
    names = itertools.product(("backward" if backward else "forward",), _similar(op.dtype), (causal, "full", "causal"))
    (seq, dim), per_score = _interpolate(_first_grid(names, grids, op), (math.sqrt(queries * keys), dim))
    return per_score * batch * heads * seq * seq * dim


def _memory(op: Op, grids: dict[tuple, Grid]) -> float:
    dtypes = (*_similar(op.dtype), "fp32")
    keys = ((name, dtype) for name, last in ((op.name, "bf16"), ("add", "fp32")) for dtype in (*dtypes, last))
    (nbytes,), per_byte = _interpolate(_first_grid(keys, grids, op), (op.bytes,))
    return per_byte * nbytes


def _similar(dtype: str) -> tuple[str, ...]:
    return dtype, *SIMILAR_DTYPES.get(dtype, ())


def _first_grid(keys: Iterable[tuple], grids: dict[tuple, Grid], op: Op) -> Grid:
    for key in keys:
        if key in grids:
            return grids[key]
    operation = f"{op.name} in {op.dtype} ({op.kind})"
    raise UserError(f"the measured tables have nothing for {operation}. Run gradus calibrate again.")


# ---------------------------------------------------------------- interpolation


def _interpolate(grid: Grid, sizes: tuple[float, ...]) -> tuple[list[float], float]:
    """(sizes, raised to the smallest measured; seconds per operation or byte there), multilinear in logarithms."""
    raised, neighbours = [], []
    for i, size in enumerate(sizes):
        axis = sorted({point[i] for point in grid})
        size = max(size, axis[0])
        raised.append(size)
        j = bisect.bisect_right(axis, size)
        if j == len(axis):  # beyond the last point the rate stays
            neighbours.append(((axis[-1], 1.0),))
        else:
            part = math.log(size / axis[j - 1]) / math.log(axis[j] / axis[j - 1])
            neighbours.append(((axis[j - 1], 1 - part), (axis[j], part)))
    logarithm = 0.0
    for corner in itertools.product(*neighbours):
        if weight := math.prod(w for _, w in corner):
            logarithm += weight * _at_corner(grid, tuple(point for point, _ in corner))
    return raised, math.exp(logarithm)


def _at_corner(grid: Grid, point: tuple[int, ...]) -> float:
    """The grid's value at a corner; one too large to measure takes the largest below it: its longest side is cut."""
    while point not in grid:
        longest = max(range(len(point)), key=lambda i: point[i])
        below = max(p[longest] for p in grid if p[longest] < point[longest])
        point = (*point[:longest], below, *point[longest + 1 :])
    return grid[point]


# ---------------------------------------------------------------- the text


def parse(text: str, kind: str) -> list[list[str]]:
    """The lines of a table as lists of fields. Raises UserError for a line without the fields of its kind."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    for line in lines:
        if len(line) != len(FIELDS[kind].split()):
            lacks = f"{' '.join(line)!r} does not have the fields {FIELDS[kind]}"
            raise UserError(f"measured.{kind}: {lacks}. Run gradus calibrate again.")
    return lines


@functools.lru_cache(maxsize=8)
def _grids(text: str, kind: str) -> dict[tuple, Grid]:
    """The name of an operation → its grid. Variants of one size are averaged in the logarithm."""
    n_names = 2 if kind == "memory" else 3
    logs: dict[tuple, dict[tuple, list[float]]] = {}
    for line in parse(text, kind):
        *sizes, time, _ = (float(x) for x in line[n_names:])
        work = math.prod(sizes) * (2 if kind == "matmul" else 1)
        point = {"matmul": sizes[1:], "attention": sizes[3:], "memory": sizes}[kind]
        logs.setdefault(tuple(line[:n_names]), {}).setdefault(tuple(point), []).append(math.log(time / work))
    return {name: {point: sum(of) / len(of) for point, of in points.items()} for name, points in logs.items()}
