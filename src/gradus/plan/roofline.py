"""Seconds of one operation on one device: a roofline whose efficiency depends on the shape (Williams et al. 2009).

The few parameters of each device and software are in `fitted.yaml`, each with its meaning, its unit and the data it comes from; what was
not fitted for a device comes from the nearest that was, and the plan says so. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

from gradus.hardware import Device
from gradus.plan.work import Op

FITTED = Path(__file__).with_name("fitted.yaml")

# Tiles that matrix libraries cut a product into, and the part of the best rate that one reaches (its operations per byte of shared memory).
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))

# Streaming multiprocessors (or what plays their part) by device family: NVIDIA's whitepapers; AMD's compute units.
UNITS = {"P100": 56, "V100": 80, "T4": 40, "A100": 108, "A800": 108, "A10": 72, "A40": 84, "L4": 58, "L40": 142, "H100": 132, "H800": 132,
         "H200": 132, "H20": 78, "GH200": 132, "B200": 148, "B300": 148, "GB200": 148, "GB300": 148, "RTX 3090": 82, "RTX 4090": 128,
         "RTX 5090": 170, "MI250": 104, "MI300": 304, "MI325": 304, "MI355": 256}  # fmt: skip

# Whose parameters a device without its own takes: the nearest of the same maker.
NEAREST = {"P100": "V100", "T4": "V100", "A800": "A100", "A10": "RTX3090", "A40": "RTX3090", "L4": "RTX3090", "L40": "RTX3090",
           "RTX4090": "RTX3090", "RTX5090": "RTX3090", "H800": "H100", "H200": "H100", "H20": "H100", "GH200": "H100", "B300": "B200"}  # fmt: skip
MAKERS = (("amd", r"MI\d"), ("intel", r"GAUDI"), ("nvidia", r"([APVHBTL]|RTX|G[BH])\d"))  # by the name of a chip
UNITS_ASSUMED = 108  # an A100's, of a GPU whose number is not known

# Chains of element-wise operations that a compiler or hand-written kernels make one of; not normalisation, softmax, look-ups and copies.
CHAINED = re.compile(r"add|sub|mul|div|neg|exp|log|pow|rsqrt|sqrt|mean|sum|amax|clone|to_copy|to|gelu_.*|gelu|silu.*|sigmoid.*|relu.*|where|masked_fill|"
                     r"native_dropout.*|log_softmax.*|nll_loss.*|zeros_like|index_put|ne|threshold_backward")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What is fitted, of a chip, then of the network, then of a software. Shares are of the vendor's figure; seconds and bytes are plain."""

    matmul: float = 0.8  # share of the dense peak that a large matrix product reaches
    depth: float = 120.0  # products are as slow as if k were longer by this: filling and emptying of the pipeline
    attention: float = 0.35  # share of the dense peak that fused attention reaches, of the operations it does
    bandwidth: float = 0.8  # share of the memory's bandwidth that memory-bound operations reach
    kernel: float = 3e-6  # s that a kernel takes on the device whatever its size
    misaligned: float = 0.33  # rate of half-precision products whose rows are no multiples of 8 long (a vocabulary of 50,257), by that of the others
    low: float = 0.75  # rate of fp8 and fp4 products, of what matmul says of their peak
    network: float = 0.8  # share of the network's bandwidth that collectives between nodes reach
    latency: float = 2e-5  # s of a collective between nodes, for each doubling of the nodes
    fused: float = 1.0  # rate of the software's fused attention, by the chip's `attention` (FlashAttention in Triton or CUDA, cuDNN)
    elementwise: float = 1.0  # bytes and kernels of chains of element-wise operations, by those of one kernel an operation
    host: float = 8e-6  # s that the host needs to launch one kernel
    wait: float = 2e-5  # s that the ranks of a group wait for one another at a collective that nothing hides
    overlap: float = 0.9  # part of the computing time beside which communication can be hidden
    contention: float = 0.1  # slowing of the computing while communication runs beside it
    straggle: float = 0.0  # slowing for each doubling of the nodes: waiting for the slowest


FIELDS = [f.name for f in dataclasses.fields(Parameters)]
OF_CHIP, OF_NETWORK, OF_SOFTWARE = FIELDS[:7], FIELDS[7:9], FIELDS[9:]


@functools.cache
def fitted(path: Path = FITTED) -> dict[str, Any]:
    """The file of fitted parameters."""
    import yaml

    if not Path(path).exists():
        return {"profiles": {}}
    return yaml.load(Path(path).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def family(device: Device | str) -> str:
    """A100-80GB-SXM → A100, "RTX 3090" → RTX3090: what names the chip."""
    name = device if isinstance(device, str) else device.name
    found = re.search(r"(RTX[ -]?\d+|TPU[ -]?V\d\w*|GAUDI ?\d|GB\d+|GH\d+|MI\d+|[A-Z]\d+)", name.upper())
    return found.group(1).replace(" ", "").replace("-", "") if found else name


@functools.lru_cache(maxsize=256)
def find_parameters(chip: str, software: str, path: Path) -> tuple[Parameters, tuple[str, ...]]:
    """Of a chip, and of a software on any chip."""
    file = fitted(path)
    chips, maker = file.get("chips", {}), next((maker for maker, names in MAKERS if re.match(names, chip)), "")
    found = next((name for name in (chip, NEAREST.get(chip, chip), maker) if name in chips), None)
    notes = []
    if found is None:
        notes.append(f"no fitted parameters for {chip} or its maker: general ones are used, expect errors of 30 % and more; gradus calibrate measures it")
    elif found != chip:
        notes.append(f"no fitted parameters for {chip}: those of {found} are used, expect errors of 20 % and more; gradus calibrate measures it")
    elif set(chips[chip]) < set(chips.get("nvidia", ())):
        notes.append(f"of {chip} only {', '.join(chips[chip])} was measured: other chips' parameters are used for the rest; gradus calibrate measures it")
    values = {**chips.get("nvidia", {}), **chips.get(maker, {}), **chips.get(NEAREST.get(chip, ""), {}), **chips.get(found, {}), **file.get("network", {}), **file.get("software", {}).get(software, {})}
    return Parameters(**{k: v for k, v in values.items() if k in FIELDS}), tuple(notes)


def parameters(device: Device, software: str = "gradus", path: Path = FITTED) -> tuple[Parameters, tuple[str, ...]]:
    """The parameters for a device and a software (gradus, megatron, mosaic, ...), and what is to be said about where they come from."""
    found, notes = find_parameters(family(device), software, path)
    if device.measured is not None:  # its operations come from tables: nothing of the chip is taken from here
        return found, ()
    if not _units(device.name):
        notes += (f"the number of multiprocessors of {device.name} is not known: {UNITS_ASSUMED} are assumed",)
    return found, notes


@functools.lru_cache(maxsize=256)
def _units(name: str) -> int:
    """0: not known."""
    for chip, count in sorted(UNITS.items(), key=lambda item: -len(item[0])):
        if chip.replace(" ", "") in name.upper().replace(" ", "").replace("-", ""):
            return count
    return 1 if "CPU" in name.upper() else 0


def peak(device: Device, dtype: str) -> float:
    """Dense operations/s in a dtype: its own peak, else that of the nearest dtype that the device has. Without tensor cores (P100: fp16 at
    twice fp32, no bf16) fp16's is fp32's: PyTorch's products sum in fp32."""
    without = device.measured is None and "bf16" not in device.peaks
    if dtype == "fp16" and without and 0 < device.peaks.get("fp16", 0) <= 2 * device.peaks.get("fp32", 0):
        dtype = "fp32"
    other = {"bf16": ("fp16",), "fp16": ("bf16",), "tf32": ("fp32",), "fp8": ("bf16", "fp16"), "fp4": ("fp8", "bf16")}
    for name in (dtype, *other.get(dtype, ()), "fp32"):
        if device.peaks.get(name):
            return device.peaks[name]
    return max(device.peaks.values())


def matmul_share(batch: float, m: float, n: float, k: float, units: int, depth: float) -> float:
    """Part of a large product's rate that this one reaches: whole tiles, whole waves of tiles over the units, and `depth`."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = batch * -(-m // rows) * -(-n // columns)
        waves = -(-tiles // units)
        used = batch * m * n / (waves * units * rows * columns) * rate
        best = max(best, used)
    return min(best, 1.0) * k / (k + depth)


@functools.lru_cache(maxsize=4096)
def _chained(name: str) -> bool:
    return CHAINED.fullmatch(name) is not None


def chained(op: Op) -> bool:
    """Whether an operation is one of those that fused kernels save."""
    return op.kind == "memory" and op.phase != "optimizer" and _chained(op.name)


def op_seconds(op: Op, device: Device, fit: Parameters | None = None) -> float:
    """Seconds of one `op` (not of its count) on the device, launches on the device included, the host's part not.

    A matrix product takes the longer of its operations over peak × matmul × share by shape, and its bytes over bandwidth; a fused
    attention likewise; the rest its bytes over bandwidth. Where the device was measured here, its tables are asked instead.
    """
    if device.measured is not None:
        from gradus.plan import tables

        return tables.seconds(op, device)
    fit = fit or parameters(device)[0]
    memory = op.bytes / (device.bandwidth * fit.bandwidth)
    base = fit.kernel * op.launches
    if chained(op):
        return (memory + base) * fit.elementwise
    if op.kind == "matmul":
        batch, m, n, k = op.shape
        rate = peak(device, op.dtype) * fit.matmul * matmul_share(batch, m, n, k, _units(device.name) or UNITS_ASSUMED, fit.depth)
        if op.dtype in ("bf16", "fp16") and n % 8 and min(m, n, k) > 64:
            rate *= fit.misaligned
        if op.dtype in ("fp8", "fp4"):
            rate *= fit.low
        return max(op.flops / rate, memory) + base
    if op.kind == "attention":
        return max(op.flops / (peak(device, op.dtype) * fit.attention * fit.fused), memory) + base
    return memory + base
