"""Reads the hardware files and finds what is asked for by name."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import os
import re
import statistics
from pathlib import Path
from typing import Any

from gradus import files, limits
from gradus.errors import UserError, did_you_mean
from gradus.hardware.kinds import Cluster, Device, Grid, Link, Price
from gradus.hardware.units import in_unit, quantity

HERE = Path(__file__).parent
NUMBERS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
THIS = ("this", "here", "cpu")  # what the calibrated entry of this machine is called by


def user_file(kind: str) -> Path:
    """Where the user's own file of a kind (hardware, prices, grid) is: $GRADUS_HARDWARE and so on, else
    ~/.config/gradus."""
    given = os.environ.get(f"GRADUS_{kind.upper()}")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(given) if given else home / "gradus" / f"{kind}.yaml"


# ---------------------------------------------------------------- strict reading


class Table:
    """A mapping of a file that is read key by key; what nobody asked for is an unknown key."""

    def __init__(self, found: Any, file: Path, where: str = ""):
        self.file, self.where, self.known = file, where, []
        if not isinstance(found, dict):
            raise UserError(f"{self.at()}: expected keys with values, not {found!r}.")
        self.found = found

    def at(self, key: str = "") -> str:
        return f"{self.file}: " + ".".join(k for k in (self.where, key) if k) if self.where or key else str(self.file)

    def get(self, key: str, default: Any = None) -> Any:
        self.known.append(key)
        return self.found.get(key, default)

    def table(self, key: str) -> Table | None:
        found = self.get(key)
        return None if found is None else Table(found, self.file, f"{self.where}.{key}".lstrip("."))

    def size(self, key: str, what: str, required: bool = False) -> float | None:
        found = self.get(key)
        if found is None:
            if required:
                raise UserError(f"{self.at()}: {key} is missing; it has {', '.join(map(str, self.found))}.")
            return None
        return quantity(found, what, self.at(key))

    def number(self, key: str, low: float, high: float = float("inf"), required: bool = False) -> float | None:
        found = self.get(key)
        if found is None and not required:
            return None
        if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high:
            limits = f"from {low:g} to {high:g}" if high < float("inf") else f"of at least {low:g}"
            raise UserError(f"{self.at(key)}: {found!r} is not a number {limits}.")
        return found

    def whole(self, key: str) -> int | None:
        found = self.number(key, 1)
        if found is not None and found != int(found):
            raise UserError(f"{self.at(key)}: {found!r} is not a whole number.")
        return None if found is None else int(found)

    def text(self, key: str, default: str | None = None) -> str | None:
        found = self.get(key, default)
        if found is not None and not isinstance(found, str):
            raise UserError(f"{self.at(key)}: {found!r} is not text; put it in quotes.")
        return found

    def texts(self, key: str) -> list[str]:
        found = self.get(key) or []
        found = [found] if isinstance(found, str) else found
        if not isinstance(found, list) or not all(isinstance(x, str) for x in found):
            raise UserError(f"{self.at(key)}: {found!r} is not text or a list of texts.")
        return found

    def day(self, key: str) -> str | None:
        found = self.get(key)
        if found is None:
            return None
        try:
            return str(datetime.date.fromisoformat(str(found)))
        except ValueError:
            raise UserError(f"{self.at(key)}: {found!r} is not a date; write it as 2026-05-31.") from None

    def done(self) -> None:
        for key in self.found:
            if key not in self.known:
                raise UserError(f"{self.at(str(key))}: unknown key.{did_you_mean(str(key), self.known)}")


@functools.lru_cache(maxsize=16)
def _parsed(file: Path, stamp: int) -> Any:
    return limits.parse_yaml(limits.read_text(file, limits.HARDWARE_FILE), file)


def read(file: Path) -> Table:
    """A file as it is now."""
    try:
        found = _parsed(file, file.stat().st_mtime_ns)
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}.") from None
    return Table({} if found is None else found, file)


def sources_of(table: Table, names: dict[str, str]) -> str:
    """The texts that an entry's `source` names in the file's `sources`; what is not named there is a text itself."""
    return "; ".join(names.get(name, name) for name in table.texts("source"))


def entries(table: Table, key: str) -> dict[str, Any]:
    part = table.table(key)
    if part is not None:
        for name in part.found:
            if not isinstance(name, str):
                raise UserError(f"{part.at()}: {name!r} is not text; put the name in quotes.")
    return {} if part is None else part.found


def head(table: Table) -> tuple[str, dict[str, str]]:
    """(date, sources) of a file."""
    return table.day("date") or "", {k: str(v) for k, v in entries(table, "sources").items()}


# ---------------------------------------------------------------- devices and links


def link_from(name: str, t: Table, names: dict[str, str]) -> Link:
    extra = {
        "efficiency": t.number("efficiency", 1e-3, 1),
        "latency": t.size("latency", "seconds"),
        "both": t.size("both", "bytes/s"),
    }
    made = Link(
        name, t.size("bandwidth", "bytes/s", required=True), source=sources_of(t, names),
        **{k: v for k, v in extra.items() if v is not None},
    )  # fmt: skip
    t.done()
    return made


def link_named(t: Table, key: str, known: dict[str, Link]) -> Link | None:
    """A device's link: a name of the links, or written out as a mapping."""
    found = t.get(key)
    if found is None:
        return None
    if isinstance(found, str):
        return pick(found, known, t.at(key), "link")
    inner = Table(found, t.file, f"{t.where}.{key}")
    return link_from(inner.text("name") or f"{t.where.split('.')[-1]} {key}", inner, {})


def device_from(name: str, t: Table, known: dict[str, Link], names: dict[str, str], date: str) -> Device:
    peaks = t.table("peaks")
    if peaks is None or not peaks.found:
        raise UserError(f"{t.at()}: peaks is missing; write e.g. peaks: {{fp32: 10 TFLOP/s}}.")
    rates = {numbers: peaks.size(numbers, "operations/s") for numbers in NUMBERS}
    peaks.done()
    kind = t.text("kind", "gpu")
    if kind not in ("gpu", "tpu", "cpu"):
        raise UserError(f"{t.at('kind')}: {kind!r} is no kind of device.{did_you_mean(kind, ('gpu', 'tpu', 'cpu'))}")
    memory, usable = t.size("memory", "bytes", required=True), t.size("usable", "bytes")
    if usable is not None and usable > memory:
        raise UserError(f"{t.at('usable')}: more than memory.")
    driver = t.text("driver")
    try:
        re.compile(driver or "")
    except re.error as e:
        raise UserError(f"{t.at('driver')}: {driver!r} is not a pattern ({e}).") from None
    measured = t.get("measured")
    if measured is not None and not isinstance(measured, dict):
        raise UserError(f"{t.at('measured')}: {measured!r} is not tables.")
    made = Device(
        name=name,
        peaks={k: v for k, v in rates.items() if v is not None},
        memory=memory,
        bandwidth=t.size("bandwidth", "bytes/s", required=True),
        power=t.size("power", "watts"),
        memory_type=t.text("memory_type"),
        year=t.whole("year"),
        kind=kind,
        node=t.whole("node") or (1 if kind == "cpu" else 8),
        link=link_named(t, "link", known),
        network=link_named(t, "network", known),
        usable=1.0 if usable is None else usable / memory,
        source=sources_of(t, names),
        measured=measured,
        bridge=link_named(t, "bridge", known),
        aliases=tuple(t.texts("aliases")),
        driver=driver,
        date=t.day("date") or date,
    )
    t.done()
    return made


@functools.lru_cache(maxsize=8)
def _load(file: Path | None, stamp: float | None) -> tuple[dict[str, Device], dict[str, Link]]:
    """All devices and links: the packaged ones, then the user's over them. `stamp`: when the user's file was changed,
    so that it is read again."""
    all_links: dict[str, Link] = {}
    all_devices: dict[str, Device] = {}
    raw: dict[str, Any] = {}
    for one in (HERE / "links.yaml", HERE / "devices.yaml", file):
        if one is None:
            continue
        t = read(one)
        date, names = head(t)
        for name, found in entries(t, "links").items():
            all_links[name] = link_from(name, Table(found, one, f"links.{name}"), names)
        mine: dict[str, str] = {}
        for name, found in entries(t, "devices").items():
            if name in raw and isinstance(found, dict):  # the user's figures over the packaged ones, and said so
                changed = f"{one}: {', '.join(found)}"
                found = {
                    **raw[name],
                    "source": [*([all_devices[name].source] if "source" not in found else []), changed],
                    **found,
                }
            raw[name] = found
            device = device_from(name, Table(found, one, f"devices.{name}"), all_links, names, date)
            for alias in device.aliases:
                if mine.setdefault(alias.lower(), name) != name:
                    raise UserError(f"{one}: devices.{name}.aliases: {alias} is {mine[alias.lower()]}'s alias already.")
            all_devices.pop(name, None)
            all_devices[name] = device
        t.done()
    return all_devices, all_links


def load(path: str | Path | None = None) -> tuple[dict[str, Device], dict[str, Link]]:
    """Devices and links by name. `path`: the user's file, if not the usual one.

    Raises UserError for a file given that does not exist, an unknown key, a wrong unit or number (naming file and key).
    """
    file = Path(path) if path is not None else user_file("hardware")
    if file.exists():
        return _load(file, file.stat().st_mtime_ns)
    if path is not None or os.environ.get("GRADUS_HARDWARE"):
        raise UserError(f"{file}: no such hardware file.")
    return _load(None, None)


def devices(path: str | Path | None = None) -> dict[str, Device]:
    """All devices by name, the user's own over the packaged ones."""
    return load(path)[0]


def links(path: str | Path | None = None) -> dict[str, Link]:
    """All links by name."""
    return load(path)[1]


def plain(name: str) -> str:
    """A name without what people write differently: case, spaces, hyphens, the maker and the make."""
    return re.sub(r"[\s_-]+", "", re.sub(r"\b(nvidia|amd|google|tesla|geforce|instinct)\b", "", name.lower()))


def pick(name: str, known: dict[str, Any], where: str, what: str) -> Any:
    for key, found in known.items():
        if key == name:
            return found
    for key, found in known.items():
        if plain(key) == plain(name):
            return found
    raise UserError(f"{where}: {name!r} is no known {what}.{did_you_mean(name, known)}")


def link(name: str, path: str | Path | None = None) -> Link:
    """A link by its name, e.g. 'NVLink 5', 'InfiniBand NDR', 'PCIe 5 x16'. Raises UserError when it is not known."""
    return pick(name, links(path), "link", "link")


def find(name: str, path: str | Path | None = None) -> Device:
    """The device of that name: exact, by alias, by the driver's name, or by any of them written differently
    ('h100-sxm', 'A100 80GB').

    What is ambiguous has one meaning: A100 is A100-80GB (SXM), H100 is H100-SXM, V100 is V100-32GB (SXM2). 'this',
    'here' and 'cpu' are the entry that `gradus calibrate` made of this machine. Raises UserError where nothing is
    meant, with the nearest name and `gradus calibrate`.
    """
    known = devices(path)
    if name in known:
        return known[name]
    by_newest = list(reversed(known.values()))  # the user's own go before
    for same in (lambda a: a == name, lambda a: a.lower() == name.lower(), lambda a: plain(a) == plain(name)):
        for device in by_newest:
            if any(same(alias) for alias in (device.name, *device.aliases)):
                return device
    for device in by_newest:
        if device.driver and re.fullmatch(device.driver, name):
            return device
    if name.lower() in THIS:
        raise UserError(f"{name}: this machine has not been measured yet. Run: gradus calibrate")
    words = [*known, *(alias for device in known.values() for alias in device.aliases)]
    near = did_you_mean(name.upper(), words)
    if not near.startswith(" Did"):
        near = " gradus hardware lists what is known."
    own = f"gradus calibrate, run on it, measures it; or write it into {user_file('hardware')}."
    raise UserError(f"{name}: no such device in the hardware file.{near} Otherwise: {own}")


def cluster(text: str, path: str | Path | None = None, network: str | None = None) -> Cluster:
    """'8xA100-80GB', '1024xH100', 'A100' (one), 'cpu', 'this' → Cluster. `network`: another link between nodes, by
    name.

    Raises UserError for a number that is none, an unknown device, or more devices than a node has where no network is
    known.
    """
    found = re.fullmatch(r"\s*(?:([0-9_,.eE+-]+)\s*[x×*]\s*)?(.+?)\s*", text)
    if found is None:
        raise UserError(f"{text!r}: no devices; write e.g. 8xA100-80GB.")
    number = (found[1] or "1").replace(",", "").replace("_", "")
    if not re.fullmatch(r"0*[0-9]{1,9}", number) or int(number[-9:]) < 1:
        many = f"; at most {limits.AXIS:,}" if re.fullmatch(r"[0-9]+", number) and number.strip("0") else ""
        raise UserError(f"{text}: {found[1]} is not a whole number of devices{many}; write e.g. 8xA100-80GB.")
    if re.fullmatch(r"[\d_,. ]+[x×*]?", found[2]):
        raise UserError(
            f"{text}: so many of which device? Write e.g. {found[2].strip(' x×*')}xA100-80GB (gradus hardware lists "
            "them)."
        )
    device = find(found[2], path)
    if network is not None:
        device = dataclasses.replace(device, network=link(network, path))
    n = int(number[-9:])
    if n > device.node and device.network is None and device.kind != "cpu":
        raise UserError(
            f"{text}: a node has {device.node} {device.name} and no network between nodes is known; ask for "
            f"{device.node} or fewer, "
            f"or say network: (e.g. InfiniBand NDR) for {device.name} in {user_file('hardware')}."
        )
    return Cluster(device, n)


def by_driver(name: str, path: str | Path | None = None) -> Device | None:
    """The device whose driver calls it so, by the whole name; None where it is not known (a MIG part, a laptop's
    card)."""
    for device in reversed(devices(path).values()):
        if device.driver and re.fullmatch(device.driver, name):
            return device
    return None


def device_entry(device: Device) -> dict[str, Any]:
    """A device as the file writes it; find() of what was written gives it back."""

    def written(one: Link | None):
        if one is None:
            return None
        found = {
            "name": one.name,
            "bandwidth": in_unit(one.bandwidth, "bytes/s", "GB/s"),
            "efficiency": one.efficiency,
            "latency": in_unit(one.latency, "seconds", "us"),
            "both": one.both and in_unit(one.both, "bytes/s", "GB/s"),
            "source": one.source,
        }
        return {k: v for k, v in found.items() if v}

    found = {
        "kind": device.kind,
        "peaks": {k: in_unit(v, "operations/s", "TFLOP/s") for k, v in device.peaks.items()},
        "memory": in_unit(device.memory, "bytes", "GiB"),
        "usable": in_unit(device.capacity, "bytes", "GiB") if device.usable != 1 else None,
        "memory_type": device.memory_type,
        "bandwidth": in_unit(device.bandwidth, "bytes/s", "GB/s"),
        "power": device.power and in_unit(device.power, "watts", "W"),
        "year": device.year,
        "node": device.node,
        "link": written(device.link),
        "network": written(device.network),
        "bridge": written(device.bridge),
        "aliases": list(device.aliases),
        "driver": device.driver,
        "date": device.date,
        "source": device.source,
        "measured": device.measured,
    }
    return {k: v for k, v in found.items() if v not in (None, "", [], {})}


def add_device(device: Device, path: str | Path | None = None) -> Path:
    """Write a device into the user's file, over one of the same name, and take its aliases from the others there.
    Returns the file.

    What else is in the file stays (comments do not). `gradus calibrate` gives aliases=("this", "here", "cpu"), or
    ("this", "here") for a GPU.
    """
    import yaml

    file = Path(path) if path is not None else user_file("hardware")
    found = copy.deepcopy(read(file).found) if file.exists() else {}
    known = found.setdefault("devices", {})
    for other in known.values():
        if isinstance(other, dict) and other.get("aliases"):
            kept = [a for a in other["aliases"] if a.lower() not in {b.lower() for b in device.aliases}]
            other.pop("aliases")
            if kept:
                other["aliases"] = kept
    known.pop(device.name, None)
    known[device.name] = device_entry(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.aside(file) as aside:
        aside.write_text(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=140), encoding="utf-8")
        load(aside)  # what is written can be read, or the old file stays
    return file


# ---------------------------------------------------------------- prices and grids


def _files(kind: str, path: str | Path | None) -> list[Path]:
    file = Path(path) if path is not None else user_file(kind)
    if not file.exists() and (path is not None or os.environ.get(f"GRADUS_{kind.upper()}")):
        raise UserError(f"{file}: no such file of {kind}.")
    return [HERE / f"{kind}.yaml", *([file] if file.exists() else [])]


def quotes(name: str, path: str | Path | None = None) -> list[Price]:
    """What single sources say a device costs an hour; the user's file replaces the packaged quotes of its devices. []
    where nothing is known."""
    answer: list[Price] = []
    for file in _files("prices", path):
        t = read(file)
        date, names = head(t)
        currency, rate = t.text("currency", "USD"), t.number("rate", 1e-6)
        if currency != "USD" and rate is None:
            raise UserError(f"{t.at('rate')}: missing; say what one dollar costs in {currency}, e.g. rate: 0.9.")
        for key, found in entries(t, "prices").items():
            parts = []
            for i, one in enumerate(found if isinstance(found, list) else [found]):
                p = Table(one, file, f"prices.{key}" + (f"[{i}]" if isinstance(found, list) else ""))
                low, high = p.number("low", 0, required=True), p.number("high", 0, required=True)
                expected = p.number("expected", 0)
                expected = (low + high) / 2 if expected is None else expected
                if not low <= expected <= high:
                    raise UserError(f"{p.at()}: low, expected, high must not fall: {low:g}, {expected:g}, {high:g}.")
                parts.append(Price(low, expected, high, currency, p.day("date") or date, sources_of(p, names)))
                p.done()
            try:
                of = key if key == name else find(key).name
            except UserError as e:
                raise UserError(f"{t.at()}: prices.{e}") from None
            if plain(of) == plain(name):
                answer = parts
        t.done()
    return answer


def price(device: Device | str, path: str | Path | None = None) -> Price | None:
    """What a device costs an hour: the lowest quote, the median of their middles, the highest. None where nothing is
    known.

    Quotes in dollars are converted when the user's file says `currency` and `rate` (what one dollar costs in it); its
    own prices are in its currency already.
    """
    device = find(device) if isinstance(device, str) else device
    found = quotes(device.name, path)
    if not found:
        return None
    wanted, rate = _currency(path)
    times = [rate if one.currency == "USD" and wanted != "USD" else 1.0 for one in found]
    return Price(
        min(t * one.low for t, one in zip(times, found)),
        statistics.median(t * one.expected for t, one in zip(times, found)),
        max(t * one.high for t, one in zip(times, found)),
        wanted,
        max(one.date for one in found),
        "; ".join(f"{one.source} ({one.date})" for one in found),
    )


def _currency(path: str | Path | None) -> tuple[str, float]:
    t = read(_files("prices", path)[-1])
    return t.text("currency", "USD"), t.number("rate", 1e-6) or 1.0


def _grids(path: str | Path | None) -> tuple[dict[str, Grid], tuple[float, float, float, str]]:
    found: dict[str, Grid] = {}
    factor = None
    for file in _files("grid", path):
        t = read(file)
        _, names = head(t)
        year = t.whole("year")
        p = t.table("pue")
        if p is not None:
            factor = (
                *(p.number(case, 1, 10, required=True) for case in ("low", "expected", "high")),
                sources_of(p, names),
            )
            if not factor[0] <= factor[1] <= factor[2]:
                raise UserError(f"{p.at()}: low, expected, high must not fall.")
            p.done()
        for key, one in entries(t, "grids").items():
            g = Table(one, file, f"grids.{key}")
            of = g.whole("year") or year
            if of is None:
                raise UserError(f"{g.at()}: year is missing.")
            found[key] = Grid(
                g.text("name") or key, g.size("intensity", "kg/J", required=True), of, sources_of(g, names)
            )
            g.done()
        t.done()
    return found, factor


def grids(path: str | Path | None = None) -> dict[str, Grid]:
    """All grids by country code."""
    return _grids(path)[0]


def grid(country: str = "world", path: str | Path | None = None) -> Grid:
    """What a kilowatt-hour emits in a country, by code (FR) or name (France). Raises UserError when it is not known."""
    known = grids(path)
    for key, found in known.items():
        if country.lower() in (key.lower(), found.name.lower()):
            return found
    near = did_you_mean(country, [*known, *(g.name for g in known.values())])
    raise UserError(f"grid {country!r}: not known.{near} Or write it into {user_file('grid')}.")


def pue(path: str | Path | None = None) -> tuple[float, float, float, str]:
    """(low, expected, high, source) of a building's power over its computers'."""
    return _grids(path)[1]
