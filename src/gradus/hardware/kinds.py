"""What the hardware files hold, in bytes, seconds, operations and watts, and what each of their keys may be."""

from __future__ import annotations

import dataclasses
import datetime
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo

from gradus import limits
from gradus.errors import did_you_mean
from gradus.hardware.units import in_unit, quantity

Numbers = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8"]
NUMBERS = get_args(Numbers)


def plain(name: str) -> str:
    """A name without what people write differently: case, spaces, hyphens, the maker and the make."""
    return re.sub(r"[\s_-]+", "", re.sub(r"\b(nvidia|amd|google|tesla|geforce|instinct)\b", "", name.lower()))


def _day(date: Any) -> str:
    try:
        return "" if date == "" else str(datetime.date.fromisoformat(str(date)))
    except ValueError:
        raise ValueError(f"{date!r} is not a date; write it as 2026-05-31.") from None


def _pattern(pattern: str | None) -> str | None:
    try:
        re.compile(pattern or "")
    except re.error as e:
        raise ValueError(f"{pattern!r} is not a pattern ({e}).") from None
    return pattern


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _cited(source: Any, info: ValidationInfo) -> str:
    """The texts that an entry's `source` names in the file's `sources`; what is not named there is a text itself."""
    texts = _several(source)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{source!r} is not text or a list of texts.")
    return "; ".join(info.context["sources"].get(text, text) for text in texts)


def _linked(link: Any, info: ValidationInfo) -> Any:
    """A device's link: a name of the links, or written out as a mapping."""
    if isinstance(link, dict):
        return {"name": f"{info.data.get('name')} {info.field_name}", **link}
    if not isinstance(link, str):
        return link
    known: dict[str, Link] = info.context["links"]
    same = [one for key, one in known.items() if plain(key) == plain(link)]
    if not same:
        raise ValueError(f"{link!r} is not a known link.{did_you_mean(link, known)}")
    return known.get(link, same[0])


def _in(what: str, unit: str) -> Any:
    """A number that a file states with its unit; written in this one."""
    read = BeforeValidator(lambda text: quantity(text, what))
    return Annotated[float, read, PlainSerializer(lambda value: in_unit(value, what, unit))]


Rate, Bytes, Speed = _in("operations/s", "TFLOP/s"), _in("bytes", "GiB"), _in("bytes/s", "GB/s")
Watts, Seconds, Intensity = _in("watts", "W"), _in("seconds", "us"), _in("kg/J", "g/kWh")
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Money = Annotated[Number, Field(ge=0)]
Ratio = Annotated[Number, Field(ge=1, le=10)]
Whole = Annotated[int, Field(strict=True, ge=1, le=limits.AXIS)]
Day = Annotated[str, BeforeValidator(_day)]
Source = Annotated[str, BeforeValidator(_cited)]
FORBID = ConfigDict(extra="forbid")


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between devices, as one device sees it, in one direction."""

    __pydantic_config__ = FORBID
    name: str
    bandwidth: Speed  # one direction, per device, nominal
    efficiency: Annotated[Number, Field(ge=1e-3, le=1)] = 0.8  # of it, that collectives reach with large payloads
    latency: Seconds = 5e-6  # for one hop of a collective
    # the vendors' figure for both directions together, where they advertise that
    both: Speed | None = None
    source: Source = ""


Linked = Annotated[Link | None, BeforeValidator(_linked)]


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator (or the processor of this machine). Peaks are dense. What is not known is absent, never
    guessed."""

    __pydantic_config__ = FORBID
    name: str  # as in the file: A100-80GB
    peaks: Annotated[dict[Numbers, Rate], Field(min_length=1)]
    memory: Bytes  # that the vendor states
    bandwidth: Speed  # of its memory
    power: Watts | None = None
    memory_type: str | None = None
    year: Whole | None = None
    kind: Literal["gpu", "tpu", "npu", "cpu"] = "gpu"
    vendor: str | None = None
    node: Whole = 8  # devices per node
    link: Linked = None  # within the node
    network: Linked = None  # between nodes
    usable: Bytes = 1.0  # part of `memory` that a program gets; in the file, bytes
    source: Source = ""
    measured: dict | None = None  # what `gradus calibrate` found of this very machine
    bridge: Linked = None  # between two cards only
    aliases: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    driver: Annotated[str | None, AfterValidator(_pattern)] = None  # pattern of whole names as the driver gives them
    # figures that its maker does not state: computed, or of others' pages; `usable` is measured
    inferred: Annotated[tuple[str, ...], BeforeValidator(_several)] = ()
    date: Day = ""  # of the entry

    @property
    def runs(self) -> bool:
        """Whether Gradus runs on it."""
        return self.kind in ("gpu", "cpu")

    @property
    def capacity(self) -> float:
        """Bytes that a program gets."""
        return self.memory * self.usable


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`n` devices of one kind, in nodes."""

    device: Device
    n: int

    @property
    def capacity(self) -> float:
        """Bytes for one of the n processes: of a host's memory its share."""
        return self.device.capacity / (min(self.n, self.device.node) if self.device.kind == "cpu" else 1)

    def link_of(self, group: int, stride: int) -> tuple[int, int]:
        """How a group of `group` ranks, `stride` apart, lies on the nodes: (ranks a node, nodes)."""
        within = max(1, min(group, self.device.node // stride)) if stride < self.device.node else 1
        return within, -(-group // within)


class Rising:
    """Three figures that do not fall."""

    def __post_init__(self) -> None:
        if not self.low <= self.expected <= self.high:
            figures = f"{self.low:g}, {self.expected:g}, {self.high:g}"
            raise ValueError(f"low, expected, high must not decrease: {figures}.")


@dataclasses.dataclass(frozen=True)
class Price(Rising):
    """Money per device-hour."""

    __pydantic_config__ = FORBID
    low: Money
    expected: Money
    high: Money
    currency: str
    date: Day
    source: Source = ""


@dataclasses.dataclass(frozen=True)
class Grid:
    """What electricity emits."""

    __pydantic_config__ = FORBID
    name: str
    intensity: Intensity  # CO2-equivalent
    year: Whole | None  # None: as stated on the command line
    source: Source = ""


@dataclasses.dataclass(frozen=True)
class Building(Rising):
    """The power of a building over its computers' (PUE)."""

    __pydantic_config__ = FORBID
    low: Ratio
    expected: Ratio
    high: Ratio
    source: Source = ""


# ---------------------------------------------------------------- whole files


@dataclasses.dataclass(kw_only=True)
class File:
    __pydantic_config__ = FORBID
    date: Day = ""
    sources: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Devices(File):
    links: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    devices: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Prices(File):
    currency: str = "USD"
    rate: Annotated[Number, Field(gt=0)] | None = None  # what one dollar costs in the currency
    prices: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Grids(File):
    year: Whole | None = None
    pue: dict[str, Any] | None = None
    grids: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
