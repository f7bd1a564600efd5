"""Seconds of one operation on one device: a roofline whose efficiency depends on the shape (Williams et al. 2009).

`fitted.yaml` holds the few parameters of each device and software, each with its meaning, its unit and the data it
comes from. A device without its own takes the nearest one's, and the plan says so. Nothing here imports torch.
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

FITTED = Path(__file__).with_name("fitted.yaml")

# Tiles that matrix libraries cut a product into, and the share of the best rate that each reaches (its operations per
# byte of shared memory).
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))

# units: multiprocessors by device family; nearest: the chip whose parameters are used where one has none; makers:
# patterns of chip names
CHIPS = files.packaged("plan/chips.yaml")
# dtype → those that stand in for it, fp32 last
SIMILAR = {"bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",), "fp8": ("bf16", "fp16"), "fp4": ("fp8", "bf16")}
UNITS_ASSUMED = 108  # an A100's, for a GPU whose number is not known

# Element-wise operations that a compiler or a hand-written kernel fuses; not normalisation, softmax, look-ups, copies.
FUSIBLE = re.compile(
    r"add|sub|mul|div|neg|exp|log|pow|rsqrt|sqrt|mean|sum|amax|clone|to_copy|to|gelu_.*|gelu|silu.*|sigmoid.*|relu.*|"
    r"where|masked_fill|native_dropout.*|log_softmax.*|nll_loss.*|zeros_like|index_put|ne|threshold_backward"
)


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The fitted parameters: of a chip, then of the network, then of a software. Shares are of the vendor's figure."""

    matmul: float = 0.8  # share of the dense peak that a large matrix product reaches
    depth: float = 120.0  # added to k: filling and emptying a kernel's pipeline takes as long
    attention: float = 0.35  # share of the dense peak that fused attention reaches, of the operations it does
    bandwidth: float = 0.8  # share of the memory's bandwidth that memory-bound operations reach
    kernel: float = 3e-6  # s that a kernel takes on the device whatever its size
    # rate of half-precision products with rows that are no multiple of 8 long (a vocabulary of 50,257), by the others'
    misaligned: float = 0.33
    low: float = 0.75  # rate of fp8 and fp4 products, by what `matmul` says of their peak
    network: float = 0.8  # share of the network's bandwidth that collectives between nodes reach
    latency: float = 2e-5  # s of a collective between nodes, per doubling of the nodes
    # rate of the software's fused attention (FlashAttention in Triton or CUDA, cuDNN), by the chip's `attention`
    fused: float = 1.0
    elementwise: float = 1.0  # bytes and kernels of fusible operations, by those of one kernel per operation
    host: float = 8e-6  # s that the host needs to launch one kernel
    wait: float = 2e-5  # s that the ranks of a group wait for one another at an exposed collective
    overlap: float = 0.9  # share of the computing time that can hide communication
    contention: float = 0.1  # slowdown of computing while communication overlaps it
    straggle: float = 0.0  # slowdown per doubling of the nodes: waiting for the slowest


FIELDS = [f.name for f in dataclasses.fields(Parameters)]
OF_CHIP, OF_NETWORK, OF_SOFTWARE = FIELDS[:7], FIELDS[7:9], FIELDS[9:]


@functools.cache
def fitted(path: Path = FITTED) -> dict[str, Any]:
    """The file of fitted parameters."""
    import yaml

    if not Path(path).exists():
        return {}
    return yaml.load(Path(path).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def chip_of(device: Device | str) -> str:
    """The name of a device's chip: A100-80GB-SXM → A100, "RTX 3090" → RTX3090."""
    name = device if isinstance(device, str) else device.name
    chip = re.search(r"(RTX[ -]?\d+|TPU[ -]?V\d\w*|GAUDI ?\d|GB\d+|GH\d+|MI\d+|[A-Z]\d+)", name.upper())
    return chip.group(1).replace(" ", "").replace("-", "") if chip else name


@functools.lru_cache(maxsize=256)
def find_parameters(chip: str, software: str, path: Path) -> tuple[Parameters, tuple[str, ...]]:
    """The parameters of a chip and a software, and notes on where they come from."""
    file = fitted(path)
    chips = file.get("chips", {})
    maker = next((maker for maker, names in CHIPS["makers"].items() if re.match(names, chip)), "")
    nearest = CHIPS["nearest"].get(chip, "")
    source = next((name for name in (chip, nearest, maker) if name in chips), None)
    note = ""
    if source is None:
        note = f"no fitted parameters for {chip} or its maker: general ones are used, expect errors of 30 % and more"
    elif source != chip:
        note = f"no fitted parameters for {chip}: those of {source} are used, expect errors of 20 % and more"
    elif set(chips[chip]) < set(chips.get("nvidia", ())):
        measured = ", ".join(chips[chip])
        note = f"of {chip} only {measured} was measured: other chips' parameters are used for the rest"
    sections = [chips.get(name, {}) for name in ("nvidia", maker, nearest, source)]
    sections += [file.get("network", {}), file.get("software", {}).get(software, {})]
    values = {key: value for section in sections for key, value in section.items() if key in FIELDS}
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


def matmul_share(batch: float, m: float, n: float, k: float, units: int, depth: float) -> float:
    """Share of a large product's rate that `batch` products of m × k by k × n reach.

    Tiles are whole, and so are waves of tiles over the multiprocessors (`units`); depth: see `Parameters`.
    """
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // units)
        best = max(best, batch * m * n / (waves * units * rows * columns) * rate)
    return min(best, 1.0) * k / (k + depth)


@functools.lru_cache(maxsize=4096)
def _fusible(name: str) -> bool:
    return FUSIBLE.fullmatch(name) is not None


def fusible(op: Op) -> bool:
    """Whether a compiler or a hand-written kernel fuses this operation with its neighbours."""
    return op.kind == "memory" and op.phase != "optimizer" and _fusible(op.name)


def op_seconds(op: Op, device: Device, fit: Parameters | None = None) -> float:
    """Seconds of one `op` (not of its count) on the device, its launches on the device included, the host's not.

    A matrix product takes the longer of its operations over peak × matmul × share by shape, and its bytes over
    bandwidth; a fused attention likewise; all else its bytes over bandwidth. Of a device that `gradus calibrate`
    measured: see `measured_seconds`.
    """
    if device.measured is not None:
        return measured_seconds(op, device)
    fit = fit or parameters(device)[0]
    memory = op.bytes / (device.bandwidth * fit.bandwidth)
    launching = fit.kernel * op.launches
    if fusible(op):
        return (memory + launching) * fit.elementwise
    if op.kind == "matmul":
        batch, m, n, k = op.shape
        share = matmul_share(batch, m, n, k, _units(device.name) or UNITS_ASSUMED, fit.depth)
        rate = peak_flops(device, op.dtype) * fit.matmul * share
        if op.dtype in ("bf16", "fp16") and n % 8 and min(m, n, k) > 64:
            rate *= fit.misaligned
        if op.dtype in ("fp8", "fp4"):
            rate *= fit.low
        return max(op.flops / rate, memory) + launching
    if op.kind == "attention":
        rate = peak_flops(device, op.dtype) * fit.attention * fit.fused
        return max(op.flops / rate, memory) + launching
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
