"""The hardware file as printed tables: `gradus hardware [NAME]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradus.hardware import files
from gradus.hardware.kinds import NUMBERS, Device, Link, plain
from gradus.text import fold, table


def formatted(value: float | str | None, shape: str = "{}", unit: float = 1) -> str:
    return shape.format(value if isinstance(value, str) else value / unit) if value else "-"


def gib(n: float) -> str:
    return f"{n / 2**30:.4g} GiB"


def gb_s(n: float | None) -> str:
    return formatted(n, "{:.4g} GB/s", 1e9)


def lines(name: str | None = None) -> list[str]:
    """All devices and links as tables, or all that is known of one device or link, with its sources. Raises UserError
    for a name that is not known."""
    known, known_links = files.load()
    if name is not None:
        same = [k for k in known_links.values() if plain(k.name) == plain(name)]
        return of_link(same[0]) if same else of_device(files.find(name))
    numbers = [n for n in NUMBERS if any(n in d.peaks for d in known.values())]
    compute, moving = [], []
    for d in known.values():
        peaks = [formatted(d.peaks.get(n), "{:.5g}", 1e12) for n in numbers]
        compute.append([short_name(d), *peaks, formatted(d.year, "{:.0f}"), formatted(d.memory_type)])
        speeds = [formatted(k and k.bandwidth, "{:.4g}", 1e9) for k in (d.link, d.network)]
        p = files.price(d)
        price = f"{p.low:.2f} {p.expected:.2f} {p.high:.2f} {p.currency.replace('USD', '')}".rstrip() if p else "-"
        figures = [gib(d.memory), formatted(d.bandwidth, "{:.4g}", 1e9), formatted(d.power, "{:.0f}"), str(d.node)]
        moving.append([short_name(d), *figures, *speeds, price])
    of_links = [
        [k.name, gb_s(k.bandwidth), f"{k.bandwidth * 8 / 1e9:.6g} Gb/s", gb_s(k.both)] for k in known_links.values()
    ]
    file = files.user_file("hardware")
    own = f"{file}{'' if file.exists() else ' (none yet)'}"
    text = [
        "Devices: dense peaks in TFLOP/s; the type of memory",
        "",
        *table(["device", *numbers, "year", "type"], compute, set(range(1, len(numbers) + 2))),
        "",
        "Devices: memory; GB/s of the memory, the link and the network (one direction, per device); watts; devices per "
        "node; USD per device-hour: low, expected, high",
        "",
        *table(["device", "memory", "GB/s", "W", "node", "link", "network", "price"], moving, set(range(1, 7))),
        "",
        "Links: one direction; where vendors advertise both directions together, that figure beside it",
        "",
        *table(["link", "one direction", "in bits", "both together"], of_links, {1, 2, 3}),
        "",
        f"gradus hardware NAME: one of them with its sources. Your own: {own}; this machine: gradus calibrate",
    ]
    return [piece for line in text for piece in fold(line)]


def short_name(d: Device) -> str:
    """A name that fits a column: of a long one (a processor's) the shortest by which --on knows it."""
    return d.name if len(d.name) <= 18 else min((d.name, *d.aliases), key=len)


def labelled(figures: Sequence[tuple[str, Any]]) -> list[str]:
    """A line or more for each (label, text) that has one."""
    return [line for label, text in figures if text for line in fold(f"  {label:13} {text}", 16)]


def in_one_direction(k: Link) -> str:
    return "in one direction" + (f" ({gb_s(k.both)} both directions together)" if k.both else "")


def of_link(k: Link) -> list[str]:
    bits = f"{k.bandwidth * 8 / 1e9:.6g} Gb/s"
    return [k.name, *labelled([
        ("bandwidth", f"{gb_s(k.bandwidth)} = {bits} {in_one_direction(k)}"),
        ("collectives", f"{k.efficiency:.0%} of it, {k.latency * 1e6:.3g} us per hop"),
        ("source", k.source or "-"),
    ])]  # fmt: skip


def of_device(d: Device) -> list[str]:
    usable = f", of which a program gets {gib(d.capacity)}" if d.usable != 1 else ""
    of = f" of {d.memory_type}" if d.memory_type else ""
    p, taken = files.price(d), ""
    if p:
        taken = f"taken: {p.low:.2f} low, {p.expected:.2f} expected, {p.high:.2f} high, in {p.currency}"
        taken += f", sources differ by a factor of {p.high / p.low:.1f}" if p.low and p.high > p.low else ""
    links = (("link", d.link), ("bridge", d.bridge), ("network", d.network))
    quotes = [f"{q.low:.2f} to {q.high:.2f} {q.currency} per hour, {q.date}: {q.source}" for q in files.quotes(d.name)]
    return [d.name + (f" ({', '.join(d.aliases)})" if d.aliases else ""), *labelled([
        ("dense peak", ", ".join(f"{n} {v / 1e12:.5g} TFLOP/s" for n, v in d.peaks.items())),
        ("memory", f"{gib(d.memory)} = {d.memory / 1e9:.4g} GB{of} at {gb_s(d.bandwidth)}{usable}"),
        ("vendor", d.vendor),
        ("power", d.power and f"{d.power:.0f} W"),
        ("year", d.year),
        ("node", f"{d.node} devices"),
        *((label, k and f"{k.name}: {gb_s(k.bandwidth)} {in_one_direction(k)}") for label, k in links),
        *(("price", quote) for quote in quotes),
        ("", taken),
        ("measured", d.measured and f"by gradus calibrate: {', '.join(map(str, d.measured))}"),
        ("inferred", ", ".join(d.inferred)),
        ("source", f"{d.source or '-'} ({d.date or 'no date'})"),
    ])]  # fmt: skip
