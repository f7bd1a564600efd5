"""Reads the hardware files and finds what is asked for by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import re
import statistics
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradus import files, limits
from gradus.errors import UserError, did_you_mean, nearest
from gradus.hardware import kinds
from gradus.hardware.kinds import Building, Cluster, Device, Grid, Link, Price, plain
from gradus.hardware.units import quantity

HERE = Path(__file__).parent
THIS = ("this", "here", "cpu")  # what the calibrated entry of this machine is called by
T = TypeVar("T")
_adapter = functools.cache(TypeAdapter)


def user_file(kind: str) -> Path:
    """Where the user's own file of a kind (hardware, prices, grid) is: $GRADUS_HARDWARE and so on, else
    ~/.config/gradus."""
    path = os.environ.get(f"GRADUS_{kind.upper()}")
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(path) if path else home / "gradus" / f"{kind}.yaml"


def _own(kind: str, path: str | Path | None = None) -> Path | None:
    """The user's file; None where there is none. Raises UserError where one that was named is not there."""
    file = Path(path) if path is not None else user_file(kind)
    if not file.exists() and (path is not None or os.environ.get(f"GRADUS_{kind.upper()}")):
        raise UserError(f"{file}: no such {kind} file.")
    return file if file.exists() else None


def _files(kind: str) -> list[Path]:
    return [HERE / f"{kind}.yaml", *filter(None, [_own(kind)])]


# ---------------------------------------------------------------- strict reading


def checked(kind: type[T], content: Any, where: str, context: dict[str, Any] | None = None, **own: Any) -> T:
    """Return what a file holds, as its kind (see `kinds`). where: `FILE: ` and keys, each with a dot. own: fields that
    no file states.

    Raises UserError naming file and key.
    """
    known = {field.name for field in dataclasses.fields(kind)} - own.keys()
    for key in content if isinstance(content, dict) else ():
        if key not in known:
            raise UserError(f"{where}{key}: unknown key.{did_you_mean(str(key), known)}")
    values = {**content, **own} if isinstance(content, dict) else content
    try:
        return _adapter(kind).validate_python(values, context=context)
    except ValidationError as e:
        error = e.errors()[0]
    keys = [str(part) for part in error["loc"] if part != "[key]"]
    own, value = error.get("ctx", {}).get("error"), error["input"]
    what = "expected keys with values" if error["type"] in ("dataclass_type", "dict_type") else error["msg"]
    text = "missing." if error["type"] == "missing" else str(own or f"{value!r}: {what}.")
    raise UserError(f"{(where + '.'.join(keys)).rstrip('. :')}: {text}")


@functools.lru_cache(maxsize=16)
def _parsed(file: Path, stamp: int) -> Any:
    return limits.parse_yaml(limits.read_text(file, limits.HARDWARE_FILE), file)


def read(kind: type[T], file: Path) -> T:
    """Return the content of a file as it is now. Raises UserError where it cannot be read."""
    try:
        content = _parsed(file, file.stat().st_mtime_ns)
    except OSError as e:
        raise UserError(f"{file}: {e.strerror}.") from None
    return checked(kind, {} if content is None else content, f"{file}: ")


# ---------------------------------------------------------------- devices and links


def device_from(name: str, entry: Any, where: str, context: dict[str, Any]) -> Device:
    if isinstance(entry, dict):
        entry = {"node": 1 if entry.get("kind") == "cpu" else 8, "date": context["date"], **entry}
    device = checked(Device, entry, where, context, name=name)
    if entry.get("usable") is None:
        return device
    if device.usable > device.memory:
        raise UserError(f"{where}usable: more than memory.")
    return dataclasses.replace(device, usable=device.usable / device.memory)


@functools.lru_cache(maxsize=8)
def _load(file: Path | None, stamp: float | None) -> tuple[dict[str, Device], dict[str, Link]]:
    """All devices and links: the packaged ones, then the user's over them. `stamp`: when the user's file was changed,
    so that it is read again."""
    all_links, all_devices, raw = {}, {}, {}
    for one in (HERE / "links.yaml", HERE / "devices.yaml", *([file] if file else [])):
        t = read(kinds.Devices, one)
        context = {"sources": t.sources, "links": all_links, "date": t.date}
        for name, entry in t.links.items():
            all_links[name] = checked(Link, entry, f"{one}: links.{name}.", context, name=name)
        mine: dict[str, str] = {}
        for name, entry in t.devices.items():
            if name in raw:  # the user's figures over the packaged ones, and said so
                old = [] if "source" in entry else [all_devices[name].source]
                kept = {k: v for k, v in raw[name].items() if k != "usable" or "memory" not in entry}  # a part of it
                entry = {**kept, "source": [*old, f"{one}: {', '.join(entry)}"], **entry}
            raw[name] = entry
            device = device_from(name, entry, f"{one}: devices.{name}.", context)
            for alias in device.aliases:
                if mine.setdefault(alias.lower(), name) != name:
                    raise UserError(f"{one}: devices.{name}.aliases: {alias} is {mine[alias.lower()]}'s alias already.")
            all_devices.pop(name, None)
            all_devices[name] = device
    return all_devices, all_links


def load(path: str | Path | None = None) -> tuple[dict[str, Device], dict[str, Link]]:
    """Devices and links by name. `path`: the user's file, if not the usual one.

    Raises UserError for a file given that does not exist, an unknown key, a wrong unit or number (naming file and key).
    """
    file = _own("hardware", path)
    return _load(file, _stamp(file))


def devices(path: str | Path | None = None) -> dict[str, Device]:
    """All devices by name, the user's own over the packaged ones."""
    return load(path)[0]


def cards() -> list[Device]:
    """The GPUs that can be put into a machine: all but laptops'."""
    return [d for d in devices().values() if d.kind == "gpu" and not d.name.endswith("Laptop")]


def links() -> dict[str, Link]:
    """All links by name."""
    return load()[1]


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
    for form in (str, str.lower, plain):
        for device in reversed(known.values()):  # the user's own override
            if form(name) in map(form, (device.name, *device.aliases)):
                return device
    if device := by_driver(name, path):
        return device
    if name.lower() in THIS:
        raise UserError(f"{name}: this machine has not been measured yet. Run: gradus calibrate")
    if re.fullmatch(r"(apple|macbook|m[1-9](pro|max|ultra|$)).*|mps", plain(name)):
        why = "Apple publishes no peak of matrix products, and layout.device=mps has not been tried"
        raise UserError(f"{name}: Apple's GPUs are not supported: {why}. Its CPU: gradus calibrate, then --on this.")
    meant = nearest(name.upper(), [*known, *(alias for device in known.values() for alias in device.aliases)])
    near = f"Did you mean {meant}?" if meant else "gradus hardware lists what is known."
    own = f"gradus calibrate, run on it, measures it; or write it into {user_file('hardware')}."
    raise UserError(f"{name}: no such device in the hardware file. {near} Otherwise: {own}")


def cluster(text: str) -> Cluster:
    """'8xA100-80GB', '1024xH100', 'A100' (one), 'cpu', 'this' → Cluster.

    Raises UserError for a number that is none, an unknown device, or more devices than a node has where no network is
    known.
    """
    match = re.fullmatch(r"\s*(?:([0-9_,.eE+-]+)\s*[x×*]\s*)?(.+?)\s*", text)
    if match is None:
        raise UserError(f"{text!r}: not devices; write e.g. 8xA100-80GB.")
    number = re.sub("[,_]", "", match[1] or "1")
    if not re.fullmatch(r"0*[1-9][0-9]{0,8}", number):
        raise UserError(
            f"{text}: {match[1]} is not a whole number of devices, at most {limits.AXIS:,}; write e.g. 8xA100-80GB."
        )
    if re.fullmatch(r"[\d_,. ]+[x×*]?", match[2]):
        raise UserError(f"{text}: of which device? Write e.g. 8xA100-80GB (gradus hardware lists them).")
    device = find(match[2])
    n = int(number)
    if n > device.node and device.network is None and device.kind != "cpu":
        raise UserError(
            f"{text}: a node has {device.node} {device.name} and no network between nodes is known; use fewer, "
            f"or set network: (e.g. InfiniBand NDR) for {device.name} in {user_file('hardware')}."
        )
    return Cluster(device, n)


def by_driver(name: str, path: str | Path | None = None) -> Device | None:
    """The device whose driver calls it so, by the whole name; None where it is not known (a MIG part, a
    cut-down card)."""
    return next((d for d in reversed(devices(path).values()) if d.driver and re.fullmatch(d.driver, name)), None)


def device_entry(device: Device) -> dict[str, Any]:
    """A device as the file writes it; find() of what was written gives it back."""
    entry = _adapter(Device).dump_python(dataclasses.replace(device, name="", usable=device.capacity))
    for key in ("link", "network", "bridge"):
        entry[key] = {k: v for k, v in (entry[key] or {}).items() if v}
    return {k: v for k, v in entry.items() if v and (k != "usable" or device.usable != 1)}


def add_device(device: Device, path: str | Path | None = None) -> Path:
    """Write a device into the user's file, over one of the same name, and take its aliases from the others there.
    Returns the file.

    What else is in the file stays (comments do not). `gradus calibrate` gives aliases=("this", "here", "cpu"), or
    ("this", "here") for a GPU.
    """
    import yaml

    file = files.writable(Path(path) if path is not None else user_file("hardware"))
    content = copy.deepcopy(_parsed(file, file.stat().st_mtime_ns)) if file.exists() else {}
    known = content.setdefault("devices", {})
    for other in known.values():
        if isinstance(other, dict) and (aliases := other.pop("aliases", None)):
            taken = {a.lower() for a in device.aliases}
            other |= {"aliases": kept} if (kept := [a for a in aliases if a.lower() not in taken]) else {}
    known.pop(device.name, None)
    known[device.name] = device_entry(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    with files.aside(file) as aside:
        aside.write_text(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=140), encoding="utf-8")
        load(aside)  # what is written can be read, or the old file stays
    return file


# ---------------------------------------------------------------- prices and grids


def _quote(entry: Any, where: str, context: dict[str, Any], **own: Any) -> Price:
    if not isinstance(entry, dict):
        return checked(Price, entry, where, context, **own)
    values = {"date": context["date"], "expected": entry.get("low"), **entry}
    price = checked(Price, values, where, context, **own)
    return price if "expected" in entry else dataclasses.replace(price, expected=(price.low + price.high) / 2)


def quotes(name: str) -> list[Price]:
    """What single sources say a device costs an hour; the user's file replaces the packaged quotes of its devices. []
    where nothing is known."""
    answer: list[Price] = []
    own = _own("hardware")
    for file in _files("prices"):
        answer = _quotes(file, own, _stamp(file), _stamp(own)).get(plain(name), answer)
    return answer


def _stamp(file: Path | None) -> int | None:
    return file and file.stat().st_mtime_ns


@functools.lru_cache(maxsize=8)
def _quotes(file: Path, own: Path | None, *stamps: int | None) -> dict[str, list[Price]]:
    """Of all devices of a file, by plain name. own: the user's devices. stamps: when either was changed."""
    t = read(kinds.Prices, file)
    if t.currency != "USD" and t.rate is None:
        raise UserError(f"{file}: rate: missing; state what one dollar costs in {t.currency}, e.g. rate: 0.9.")
    answer, own = {}, {"context": {"sources": t.sources, "date": t.date}, "currency": t.currency}
    for key, entry in t.prices.items():
        places = {f".{i}": one for i, one in enumerate(entry)} if isinstance(entry, list) else {"": entry}
        parts = [_quote(one, f"{file}: prices.{key}{i}.", **own) for i, one in places.items()]
        try:
            answer[plain(find(key).name)] = parts
        except UserError as e:
            raise UserError(f"{file}: prices.{e}") from None
    return answer


def price(device: Device | str, paid: float | None = None) -> Price | None:
    """What a device costs an hour: the lowest quote, the median of their middles, the highest; or what is `paid`, in
    the currency of the quotes. None where nothing is known.

    Quotes in dollars are converted when the user's file says `currency` and `rate` (what one dollar costs in it); its
    own prices are in its currency already.
    """
    device = find(device) if isinstance(device, str) else device
    quoted = quotes(device.name)
    if not quoted and paid is None:
        return None
    t = read(kinds.Prices, _files("prices")[-1])
    if paid is not None:
        return Price(paid, paid, paid, t.currency, "", "--price")
    rates = [(t.rate or 1.0) if one.currency == "USD" and t.currency != "USD" else 1.0 for one in quoted]
    low, expected, high = ([r * getattr(q, k) for r, q in zip(rates, quoted)] for k in ("low", "expected", "high"))
    sources = "; ".join(f"{one.source} ({one.date})" for one in quoted)
    date = max(one.date for one in quoted)
    return Price(min(low), statistics.median(expected), max(high), t.currency, date, sources)


def _grids() -> tuple[dict[str, Grid], Building]:
    by_country: dict[str, Grid] = {}
    for file in _files("grid"):
        t = read(kinds.Grids, file)
        context = {"sources": t.sources}
        if t.pue is not None:
            building = checked(Building, t.pue, f"{file}: pue.", context)
        for key, one in t.grids.items():
            values = {"name": key, **({"year": t.year} if t.year else {}), **one}
            by_country[key] = checked(Grid, values, f"{file}: grids.{key}.", context)
    return by_country, building


def grids() -> dict[str, Grid]:
    """All grids by country code."""
    return _grids()[0]


def grid(country: str = "world") -> Grid:
    """What a kilowatt-hour emits in a country, by code (FR) or name (France), or as it is stated (385 g/kWh). Raises
    UserError when it is not known."""
    if country[:1].isdigit():
        try:
            return Grid("as stated", quantity(country, "kg/J"), None)
        except ValueError as e:
            raise UserError(f"{e} Write e.g. '385 g/kWh'.") from None
    known = grids()
    for key, g in known.items():
        if country.lower() in (key.lower(), g.name.lower()):
            return g
    near = did_you_mean(country, [*known, *(g.name for g in known.values())])
    raise UserError(f"grid {country!r}: not known.{near} Or write it into {user_file('grid')}.")


def pue() -> tuple[float, float, float, str]:
    """(low, expected, high, source) of a building's power over its computers'."""
    return dataclasses.astuple(_grids()[1])
