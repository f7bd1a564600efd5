"""What the hardware file holds: devices, links, prices and grids, in bytes, seconds, operations and watts."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between devices, as one device sees it, in one direction."""

    name: str
    bandwidth: float  # bytes/s, one direction, per device, nominal
    efficiency: float = 0.8  # of it, that collectives reach with large payloads
    latency: float = 5e-6  # s, for one hop of a collective
    both: float | None = None  # bytes/s, the vendors' figure for both directions together, where they advertise that
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator (or the processor of this machine). Peaks are dense. What is not known is absent, never
    guessed."""

    name: str  # as in the file: A100-80GB
    peaks: dict[str, float]  # fp32, tf32, bf16, fp16, fp8 -> operations/s
    memory: float  # bytes that the vendor states
    bandwidth: float  # bytes/s of its memory
    power: float | None = None  # W
    memory_type: str | None = None
    year: int | None = None
    kind: str = "gpu"  # gpu, tpu, cpu
    node: int = 8  # devices a node
    link: Link | None = None  # within the node
    network: Link | None = None  # between nodes
    usable: float = 1.0  # part of `memory` that a program gets
    source: str = ""
    measured: dict | None = None  # tables that `gradus calibrate` made of this very machine
    bridge: Link | None = None  # between two cards only
    aliases: tuple[str, ...] = ()
    driver: str | None = None  # pattern of whole names as the driver gives them
    date: str = ""  # of the entry

    @property
    def capacity(self) -> float:
        """Bytes that a program gets."""
        return self.memory * self.usable


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`n` devices of one kind, in nodes."""

    device: Device
    n: int

    def link_of(self, group: int, stride: int) -> tuple[int, int]:
        """How a group of `group` ranks, `stride` apart, lies on the nodes: (ranks a node, nodes)."""
        within = max(1, min(group, self.device.node // stride)) if stride < self.device.node else 1
        return within, -(-group // within)


@dataclasses.dataclass(frozen=True)
class Price:
    """Money a device-hour."""

    low: float
    expected: float
    high: float
    currency: str
    date: str
    source: str


@dataclasses.dataclass(frozen=True)
class Grid:
    """What electricity emits."""

    name: str
    intensity: float  # kg CO2-equivalent per joule
    year: int
    source: str
