"""Seconds of one operation on one device: a roofline whose efficiency depends on the shape (Williams et al. 2009).

`kernels.yaml` holds what single kernels say of a chip, `fitted.yaml` what whole runs say of chips without and of
softwares. A chip without its own takes the nearest one's, and the plan says so. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradus import files
from gradus.errors import UserError
from gradus.hardware import Device
from gradus.plan.work import Op

FITTED, KERNELS = (Path(__file__).with_name(name) for name in ("fitted.yaml", "kernels.yaml"))

# Tiles that matrix libraries cut a product into, and the share of the best rate that each reaches (its operations per
# byte of shared memory); and into how many parts they cut k where tiles are few.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 128, 0.8), (64, 64, 0.65))
SPLITS = (1, 2, 4, 8, 16, 32)
# Softmax's exponentials take as long as products of so much of a head's width, by a multiprocessor's operations/s: 16
# exponentials a cycle, for each four operations and the width, at 1.7 GHz (Shah et al. 2024, section 1).
EXPONENTIALS = 1.1e11

# units: multiprocessors by device family; nearest: the chip whose parameters are used where one has none; both as
# patterns of names
CHIPS = files.packaged("plan/chips.yaml")
NAMED = re.compile(
    r"RTX[ -]?\d+(.*LAPTOP)?|TPU[ -]?V\d\w*|GAUDI ?\d|TRAINIUM\d|INFERENTIA\d|GB\d+|GH\d+|MI\d+|L40S|[A-Z]\d+"
)  # of chips
# dtype → those that stand in for it, fp32 last
SIMILAR = {"bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",), "fp8": ("bf16", "fp16"), "fp4": ("fp8", "bf16")}
MEASURED_WELL = 4  # parameters of its own, with which a chip is no longer another
UNITS_ASSUMED = 108  # an A100's, for a GPU whose number is not known

# Element-wise operations that a compiler or a hand-written kernel fuses; not normalisation, softmax, look-ups, copies.
FUSIBLE = re.compile(
    r"add|sub|mul|div|neg|exp|log|pow|rsqrt|sqrt|mean|sum|amax|clone|to_copy|to|gelu_.*|gelu|silu.*|sigmoid.*|relu.*|"
    r"where|masked_fill|native_dropout.*|log_softmax.*|nll_loss.*|zeros_like|index_put|ne|threshold_backward"
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The fitted parameters: of a chip's kernels, then of all chips and the network, then of a software. Shares are of
    the vendor's figure."""

    matmul: float = 0.8  # share of the dense peak that a large matrix product reaches
    depth: float = 100.0  # added to k: filling and emptying a kernel's pipeline takes as long
    fp8: float = 0.7  # as `matmul`, of the dense peak in fp8 or fp4; casts apart
    attention: float = 0.55  # share of the dense peak that fused attention reaches, of the operations it does
    keys: float = 800.0  # keys at which it reaches half of that
    bandwidth: float = 0.8  # share of the memory's bandwidth that memory-bound operations reach
    kernel: float = 3e-6  # s that a kernel takes on the device whatever its size
    decode: float = 1e-5  # s, as `kernel`, of attention of one query a row: some kernels
    # rate of half-precision products with rows that are no multiple of 8 long (a vocabulary of 50,257), by the others'
    misaligned: float = 0.33
    grouped: float = 0.8  # rate of products of rows by group (experts), by the others'
    network: float = 0.8  # share of the network's bandwidth that collectives between nodes reach
    latency: float = 2e-5  # s of a collective between nodes, per doubling of the nodes
    # rate of products in a whole step by the kernel's alone: older libraries, cold caches, a clock that power limits
    products: float = 1.0
    # rate of the software's fused attention, backward passes counted, by the chip's `attention` of forward passes
    fused: float = 1.0
    cast: float = 4.0  # bytes read and written an element to cast the first matrix of an fp8 product
    elementwise: float = 1.0  # bytes and kernels of fusible operations, by those of one kernel per operation
    host: float = 8e-6  # s that the host needs to launch one kernel
    wait: float = 2e-5  # s that the ranks of a group wait for one another at an exposed collective
    overlap: float = 0.9  # share of the computing time that can hide communication
    contention: float = 0.1  # slowdown of computing while communication overlaps it
    straggle: float = 0.0  # slowdown per doubling of the nodes: waiting for the slowest


FIELDS = [f.name for f in dataclasses.fields(Parameters)]
OF_CHIP, OF_NETWORK, OF_SOFTWARE = FIELDS[:8], FIELDS[8:12], FIELDS[12:]


@functools.cache
def fitted(path: Path = FITTED) -> dict[str, Any]:
    """A file of fitted parameters: FITTED of whole runs, KERNELS of single kernels."""
    import yaml

    if not Path(path).exists():
        return {}
    return yaml.load(Path(path).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def chip_of(device: Device | str) -> str:
    """The name of a device's chip: A100-80GB-SXM → A100, "RTX 3090" → RTX3090."""
    name = device if isinstance(device, str) else device.name
    chip = NAMED.search(name.upper())
    return re.sub(r"(?<=\d)[ -]TI\b|[ -]", "", chip.group()) if chip else name


def nearest(chip: str) -> str:
    """The chip whose parameters are used for those that `chip` lacks; "": those of all measured ones."""
    found = (name for name, pattern in CHIPS["nearest"].items() if re.fullmatch(pattern, chip))
    return next(found, "")


def family(chip: str) -> str:
    """The chip itself or the nearest one whose kernels were measured; "": none."""
    return chip if not chip or chip in fitted(KERNELS)["chips"] else family(nearest(chip))


def of_chip(chip: str, whole_runs: dict[str, Any]) -> dict[str, float]:
    """A chip's own parameters over those of the nearest, over those of all chips; of its kernels over those that whole
    runs say."""
    kernels, near = fitted(KERNELS)["chips"], nearest(chip)
    return (of_chip(near, whole_runs) if near else kernels["any"]) | whole_runs.get(chip, {}) | kernels.get(chip, {})


@functools.lru_cache(maxsize=256)
def find_parameters(chip: str, software: str, path: Path) -> tuple[Parameters, tuple[str, ...]]:
    """The parameters of a chip and a software, and notes on where they come from."""
    file = fitted(path)
    chips, near = file.get("chips", {}), nearest(chip)
    own = chips.get(chip, {}) | fitted(KERNELS)["chips"].get(chip, {})
    others = f"those of {near}" if near else "general ones"
    note = ""
    if not own:
        expected = "20 % and more" if near else "30 % and more"
        note = f"no fitted parameters for {chip}: {others} are used, expect errors of {expected}"
    elif len(own) < MEASURED_WELL:
        note = f"of {chip} only {', '.join(own)} was measured: {others} are used for the rest"
    values = file.get("network", {}) | of_chip(chip, chips)
    for name in (software, f"{software}@{family(chip)}"):
        values |= file.get("software", {}).get(name, {})
    values = {key: value for key, value in values.items() if key in FIELDS}
    return Parameters(**values), (f"{note}; gradus calibrate measures it",) if note else ()


def parameters(device: Device, software: str = "gradus", path: Path = FITTED) -> tuple[Parameters, tuple[str, ...]]:
    """The parameters for a device and a software (gradus, megatron, mosaic, ...), and notes on where they come from."""
    fit, notes = find_parameters(chip_of(device), software, path)
    if device.measured is not None:  # see `measured_seconds`: the chip's parameters are not used
        return fit, ()
    if not _units(device.name):
        notes += (f"the number of multiprocessors of {device.name} is not known: {UNITS_ASSUMED} are assumed",)
    return fit, notes


@functools.lru_cache(maxsize=256)
def _units(name: str) -> int:
    """The number of multiprocessors; 0: not known."""
    for chip, count in sorted(CHIPS["units"].items(), key=lambda item: -len(item[0])):
        if chip.replace(" ", "") in name.upper().replace(" ", "").replace("-", ""):
            return count
    return 1 if "CPU" in name.upper() else 0


def units(device: Device) -> int:
    """The number of multiprocessors, else an A100's."""
    return _units(device.name) or UNITS_ASSUMED


def peak_flops(device: Device, dtype: str) -> float:
    """Dense operations/s in a dtype: its own peak, else that of the nearest dtype that the device has.

    Without tensor cores (P100: fp16 at twice fp32, no bf16) fp16 has fp32's peak: PyTorch's products sum in fp32.
    """
    without_tensor_cores = device.measured is None and "bf16" not in device.peaks
    if dtype == "fp16" and without_tensor_cores and 0 < device.peaks.get("fp16", 0) <= 2 * device.peaks.get("fp32", 0):
        dtype = "fp32"
    for name in (dtype, *SIMILAR.get(dtype, ()), "fp32"):
        if device.peaks.get(name):
            return device.peaks[name]
    return max(device.peaks.values())


@functools.lru_cache(maxsize=65536)
def matmul_share(batch: float, m: float, n: float, k: float, units: int, depth: float) -> float:
    """Share of a large product's rate that `batch` products of m × k by k × n reach.

    Tiles are whole, and so are waves of tiles over the multiprocessors (`units`); depth: see `Parameters`.
    """
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        for parts in SPLITS:
            waves = -(-tiles * parts // units)
            used = batch * m * n * parts / (waves * units * rows * columns)
            best = max(best, min(used, 1.0) * rate * k / (k + depth * parts))
    return best


def attention_share(keys: float, head_dim: float, half: float, peak: float) -> float:
    """Share of the best rate, at heads of 128, of fused attention to `keys`.

    half: `Parameters.keys`. peak: operations/s of a multiprocessor.
    """
    width = peak / EXPONENTIALS
    return keys / (keys + half) * head_dim / (head_dim + width) * (128 + width) / 128


def together(computing: float, moving: float) -> float:
    """Seconds of a kernel that computes and moves at once: a little more than the longer of the two."""
    return (computing**3 + moving**3) ** (1 / 3)


@functools.lru_cache(maxsize=4096)
def _fusible(name: str) -> bool:
    return FUSIBLE.fullmatch(name) is not None


def fusible(op: Op) -> bool:
    """Whether a compiler or a hand-written kernel fuses this operation with its neighbours."""
    return op.kind == "memory" and op.phase != "optimizer" and _fusible(op.name)


def op_seconds(op: Op, device: Device, fit: Parameters | None = None) -> float:
    """Seconds of one `op` (not of its count) on the device, its launches on the device included, the host's not.

    A matrix product takes its operations over peak × matmul × share by shape together with its bytes over bandwidth; a
    fused attention likewise; all else its bytes over bandwidth. Of a device that `gradus calibrate` measured: see
    `measured_seconds`.
    """
    if device.measured is not None:
        return measured_seconds(op, device)
    fit = fit or parameters(device)[0]
    speed = device.bandwidth * fit.bandwidth
    memory = op.bytes / speed
    launching = fit.kernel * op.launches
    if fusible(op):
        return (memory + launching) * fit.elementwise
    if op.kind == "matmul":
        batch, m, n, k = op.shape
        low = op.dtype in ("fp8", "fp4")
        share = matmul_share(batch, m, n, k, units(device), fit.depth)
        rate = peak_flops(device, op.dtype) * (fit.fp8 if low else fit.matmul) * share * fit.products
        if op.dtype in ("bf16", "fp16") and n % 8 and min(m, n, k) > 64:
            rate *= fit.misaligned
        if op.name.startswith("grouped"):
            rate *= fit.grouped
        cast = fit.cast * batch * m * k / speed if low else 0.0
        return together(op.flops / rate, memory) + launching + cast
    if op.kind == "attention":
        _, _, queries, keys, head_dim, *_ = op.shape
        peak = peak_flops(device, op.dtype)
        share = fit.attention * attention_share(keys, head_dim, fit.keys, peak / units(device)) * fit.fused
        launching = launching if queries > 1 else fit.decode
        return together(op.flops / (peak * share), memory) + launching
    return memory + launching


# ---------------------------------------------------------------- a measured machine


def fit_key(kind: str, dtype: str) -> str:
    """The name of a fit in `Device.measured["fits"]`."""
    return f"{kind} {dtype}"


def kernel_seconds(op: Op, numbers: Sequence[float]) -> float:
    """Seconds of one `op` by what was fitted to its kind: a launch, and operations (else bytes) over the rate of large
    ones, which a product halves where m, n or k is as short as its length.

    numbers: seconds of the launch; operations/s or bytes/s; of products the lengths of m, n and k.
    """
    launch, rate, *lengths = numbers
    slower = math.prod(1 + length / side for length, side in zip(lengths, op.shape[1:]))
    return launch + (op.flops or op.bytes) / rate * slower


def measured_seconds(op: Op, device: Device) -> float:
    """Seconds of one `op` (not of its count) on a device that `gradus calibrate` measured.

    measured["dispatch"]: phase → seconds that the framework spends around one operation (views, modules, autograd). On
    a CPU they are added, as nothing overlaps them. Elsewhere the longer of the two counts: while a kernel runs the next
    one is launched. Raises UserError for what cannot be read.
    """
    try:
        fits, dispatch = device.measured["fits"], device.measured.get("dispatch", {})
        keys = (fit_key(op.kind, dtype) for dtype in (op.dtype, *SIMILAR.get(op.dtype, ()), "fp32"))
        kernel = kernel_seconds(op, next(fits[key] for key in keys if key in fits))
        framework = op.launches * dispatch.get(op.phase, dispatch.get("forward", 0.0))
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError):
        problem = f"measured.fits: nothing usable for {op.name} in {op.dtype} ({op.kind})"
        raise UserError(f"{device.name}: {problem}. Run gradus calibrate again.") from None
    return kernel + framework if device.kind == "cpu" else max(kernel, framework)
