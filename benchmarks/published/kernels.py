"""Single kernels that others measured → what `kernels.yaml` says of a chip: a fit of the very formulas that price a plan's operations.

What is fitted is the logarithm of seconds, which is that of utilisation. Beside a chip's parameters a benchmark has its own: launches around
the kernel, and inputs that stay in a large cache from one repetition to the next.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from gradus import hardware
from gradus.errors import UserError
from gradus.hardware import Device
from gradus.plan import roofline
from gradus.plan.collectives import ring_factor
from gradus.plan.roofline import OF_CHIP, Parameters, op_seconds
from gradus.plan.work import Op
from published import fit as fitting
from published.points import read_yaml

HEAD = "# Fitted by `python benchmarks/groundtruth.py KERNELS.json --kernels`: do not edit. Units are SI. What each parameter means: roofline.Parameters.\n"
READ = read_yaml("kernel-words.yaml")
CHIPS, DTYPES, ARRAYS, PRIOR, NCCL = (READ[name] for name in ("chips", "dtypes", "arrays", "priors", "nccl"))
SIGMA = 0.08
FOLDS = 5
LARGE = 1e9  # operations


class Kernel(NamedTuple):
    """What was measured. kind: product, fp8, prefill, decode, memory."""

    kind: str
    op: Op
    seconds: float
    block: int  # of shapes that are left out together


def _block(*sizes: float) -> int:
    return sum(weight * (math.frexp(size)[1] // 2) for weight, size in zip((7, 3, 1), sizes)) % FOLDS


def _product(row: dict[str, Any]) -> Kernel:
    dtype, (m, n, k) = DTYPES[row["dtype"]], (row[name] for name in "mnk")
    width = 1 if dtype == "fp8" else 2
    op = Op("matmul", "mm", dtype, "forward", 2.0 * m * n * k, width * (m * k + n * k) + 2.0 * m * n, (1, m, n, k))
    return Kernel("fp8" if dtype == "fp8" else "product", op, row["time_s"], _block(m, n, k))


def _attention(row: dict[str, Any]) -> Kernel:
    batch, queries, heads, dim = row["batch"], row["seq"], row["heads"], row["head_dim"]
    keys = queries + row["step"]
    looks = queries * (row["step"] + (queries + 1) / 2)
    moved = 2.0 * batch * dim * (2 * queries * heads + 2 * keys * row["kv_heads"])
    op = Op("attention", "flash", "bf16", "forward", 4.0 * batch * heads * dim * looks, moved, (batch, heads, queries, keys, dim))
    return Kernel("decode" if queries == 1 else "prefill", op, row["time_s"], _block(keys, batch, heads))


def _memory(row: dict[str, Any]) -> Kernel:
    shape, x, name = json.loads(row["shape"]), row["x"], row["op"].removeprefix("fused_")
    elements = shape["B"] * shape["T"] * x if name == "cross_entropy" else x * shape["hidden_size"] * 1.25 if name == "rope" else shape["M"] * x
    width = 2 if "bfloat16" in shape.get("dtype", "") else 4
    return Kernel("memory", Op("memory", name, "bf16", "forward", 0.0, ARRAYS[name] * elements * width), row["time_s"], _block(x))


def kernels(rows: list[dict[str, Any]]) -> dict[str, list[Kernel]]:
    """By chip: products in bf16 and fp8, attention over keys and values in bf16 with heads of at most 256, and Liger's memory-bound operators."""
    found: dict[str, list[Kernel]] = {}
    for row in rows:
        if row.get("hardware") not in CHIPS or not row.get("op"):
            continue
        mine, op = found.setdefault(roofline.chip_of(CHIPS[row["hardware"]]), []), row["op"]
        if op == "gemm" and row["dtype"] in DTYPES:
            mine.append(_product(row))
        elif op.startswith("attention") and row["kv_dtype"] == "bfloat16" and row["head_dim"] <= 256:
            mine.append(_attention(row))
        elif op.removeprefix("fused_") in ARRAYS and "time_s" in row and row["pass_"] == "forward" and row["kernel"] in READ["liger"]:
            mine.append(_memory(row))
    return found


# ---------------------------------------------------------------- the fit


def modelled(kernel: Kernel, values: dict[str, float], device: Device) -> float:
    """Seconds, by the plan's own formula and what the benchmark adds."""
    parameters = Parameters(**{name: values[name] for name in (*OF_CHIP, "cast")})
    op = kernel.op
    if op.kind == "matmul" and op.bytes < READ["caches"].get(roofline.chip_of(device), 0.0):
        op = op._replace(bytes=op.bytes / values["cache"])
    return op_seconds(op, device, parameters) + values.get(f"around {kernel.kind}", 0.0)


class ChipFit:
    """Of the kernels of one chip. What no kernel of its own says is left out of `own`."""

    def __init__(self, device: Device, measured: list[Kernel]):
        self.device, self.measured = device, measured
        kinds = {kernel.kind for kernel in measured}
        by = {"fp8": {"fp8", "cast", "around fp8"}, "prefill": {"attention", "keys", "around prefill"}, "decode": {"decode"}, "memory": {"around memory"},
              "product": {"matmul", "depth", "bandwidth", "kernel"}}  # fmt: skip
        tuned = not any(kernel.op.flops < LARGE for kernel in measured)  # a few large products, the casts apart
        self.own = {name for kind in kinds for name in by[kind]} - ({"depth", "bandwidth", "kernel", "cast", "around fp8"} if tuned else set())
        if roofline.chip_of(device) in READ["caches"]:
            self.own.add("cache")
        self.names = list(PRIOR)
        self.fixed = {"cast": 0.0, "around fp8": 0.0} if tuned else {}
        self.prior = np.log([PRIOR[name][0] for name in self.names])
        self.spread = np.array([PRIOR[name][1] if name in self.own else 0.0 for name in self.names])

    def values(self, x: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, map(float, np.exp(x)))) | self.fixed

    def errors(self, x: np.ndarray, chosen: list[Kernel] | None = None) -> np.ndarray:
        """Logarithms of modelled over measured seconds."""
        values = self.values(x)
        return np.array([math.log(modelled(k, values, self.device) / k.seconds) for k in (self.measured if chosen is None else chosen)])

    def solve(self, chosen: list[Kernel], start: np.ndarray | None = None) -> np.ndarray:
        errors: Callable = lambda x: self.errors(x, chosen) / SIGMA  # noqa: E731
        return fitting.minimise(errors, self.prior, self.spread, np.ones(len(chosen)), self.prior if start is None else start)

    def left_out(self, x: np.ndarray) -> np.ndarray:
        """As `errors`, each by what the kernels of other shapes say."""
        blocks, out = np.array([k.block for k in self.measured]), np.zeros(len(self.measured))
        for block in sorted(set(blocks)):
            without = self.solve([k for k in self.measured if k.block != block], x)
            out[blocks == block] = self.errors(without)[blocks == block]
        return out


def residuals(errors: np.ndarray) -> list[float]:
    """n, median, 90 % and worst."""
    size = np.abs(errors)
    return [len(size), *(round(float(v), 3) for v in (np.median(size), np.quantile(size, 0.9), size.max()))]


def table(fit: ChipFit, errors: np.ndarray, out: np.ndarray) -> Iterator[tuple[str, list[float]]]:
    """(operator, residuals in and left out)."""
    names = np.array([k.kind if k.kind in ("decode", "memory") else f"{k.kind} {'≥' if k.op.flops >= LARGE else '<'} {LARGE:.0e}" for k in fit.measured])
    for name in sorted(set(names)):
        yield name, residuals(errors[names == name]) + residuals(out[names == name])[1:]


# ---------------------------------------------------------------- collectives

BEND = 0.65  # see collectives.intra_node_seconds: of NCCL 2.27 to 2.29, which changes its protocol with the size


def links(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """chip → latency and bandwidth by ranks, and the errors; of chips but A100, whose older NCCL whole runs had."""
    found: dict[str, Any] = {}
    errors: dict[str, np.ndarray] = {}
    for hw, name in CHIPS.items():
        chip = roofline.chip_of(name)
        mine = [row for row in rows if row["hardware"] == hw and row["op"] in NCCL]
        if not mine or chip == "A100":
            continue
        link = hardware.find(name).link
        entry: dict[str, Any] = found.setdefault(chip, {"link": link.name, "bend": BEND, "latency": {}, "bandwidth": {}})
        for ranks in sorted({row["ranks"] for row in mine}):
            chosen = [row for row in mine if row["ranks"] == ranks]
            part = np.array([1.0 if row["op"] == "all_reduce" else (ranks + 2) / (2 * ranks) for row in chosen])
            crossed = np.array([ring_factor(NCCL[row["op"]], ranks) * row["bytes"] for row in chosen])
            seconds = np.array([row["time_s"] for row in chosen])

            def error(x: np.ndarray, part=part, crossed=crossed, seconds=seconds) -> np.ndarray:
                return np.log(((math.exp(x[0]) * part) ** BEND + (crossed / math.exp(x[1])) ** BEND) ** (1 / BEND) / seconds)

            prior, spread = np.log([2e-5, 0.5 * link.bandwidth]), np.array([1.0, 2.0])
            x = fitting.minimise(lambda x, error=error: error(x) / SIGMA, prior, spread, np.ones(len(chosen)), prior)
            entry["latency"][ranks], entry["bandwidth"][ranks] = (fitting.short(math.exp(v)) for v in x)
            errors[f"{chip} {ranks} ranks"] = error(x)
    return found, errors


# ---------------------------------------------------------------- what is kept


def fitted(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], Iterator[str]]:
    """What `kernels.yaml` holds, and lines to print. Raises UserError where a chip's kernels are not in the file."""
    chips: dict[str, dict[str, float]] = {}
    measured = kernels(rows)
    if missing := sorted({roofline.chip_of(name) for name in CHIPS.values()} - measured.keys()):
        raise UserError(f"no kernels of {', '.join(missing)} in the file: what is kept of them would be lost.")
    lines = [f"{'chip, operator':28}{'n':>5}{'median':>8}{'90 %':>8}{'worst':>8}{'unseen shapes: median':>24}{'90 %':>8}{'worst':>8}"]
    for name in CHIPS.values():
        chip = roofline.chip_of(name)
        fit = ChipFit(hardware.find(name), measured[chip])
        x = fit.solve(fit.measured)
        values = fit.values(x)
        chips[chip] = {field: fitting.short(values[field]) for field in OF_CHIP if field in fit.own}
        beside = {field: fitting.short(values[field]) for field in PRIOR if field in fit.own and field not in OF_CHIP}
        for operator, row in table(fit, fit.errors(x), fit.left_out(x)):
            lines.append(f"{chip + ' ' + operator:28}{row[0]:5d}" + "".join(f"{v:{w}.3f}" for v, w in zip(row[1:], (8, 8, 8, 24, 8, 8))))
        lines.append(f"{chip:8} {chips[chip]}; of the benchmark {beside}")
    every = [entry for entry in chips.values() if "decode" in entry]
    means = {field: fitting.short(math.exp(np.mean([math.log(e[field]) for e in every if field in e]))) for field in OF_CHIP}
    found, errors = links(rows)
    for name, error in errors.items():
        row = residuals(error)
        lines.append(f"{name:28}{row[0]:5d}" + "".join(f"{v:8.3f}" for v in row[1:]))
    return {"chips": {"any": means} | chips, "links": found}, iter(lines)
