"""The hardware file as printed tables: `gradus hardware [NAME]`."""

from __future__ import annotations

import textwrap
from collections.abc import Container, Sequence
from pathlib import Path

from gradus.hardware import files
from gradus.hardware.kinds import NUMBERS, Device, Link, plain


def size(n: float) -> str:
    return f"{n / 1e12:.5g}" if n else "-"


def gib(n: float) -> str:
    return f"{n / 2**30:.4g} GiB"


def gb_s(n: float) -> str:
    return f"{n / 1e9:.4g} GB/s"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Container[int] | None = None) -> list[str]:
    """Aligned columns; right: those aligned to the right, by default all."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    sides = [">" if right is None or i in right else "<" for i in range(len(header))]
    return ["  ".join(map("{:{}{}}".format, row, sides, widths)).rstrip() for row in [header, *rows]]


def price_of(device: Device, path: str | Path | None) -> str:
    found = files.price(device, path)
    return "-" if found is None else f"{found.low:.2f} {found.expected:.2f} {found.high:.2f} {found.currency}"


def lines(name: str | None = None, path: str | Path | None = None, prices: str | Path | None = None) -> list[str]:
    """All devices and links as tables, or all that is known of one device or link, with its sources.

    path, prices: the user's files, if not the usual ones. Raises UserError for a name that is not known.
    """
    known, known_links = files.load(path)
    if name is not None:
        return one(name, known_links, path, prices)
    numbers = [n for n in NUMBERS if any(n in d.peaks for d in known.values())]
    header = [
        "device", *numbers, "memory", "type", "GB/s", "W", "year", "a node", "link GB/s", "network GB/s",
        "price an hour",
    ]  # fmt: skip
    rows = []
    for d in known.values():
        rate = [
            f"{d.link.bandwidth / 1e9:.4g}" if d.link else "-",
            f"{d.network.bandwidth / 1e9:.4g}" if d.network else "-",
        ]
        rows.append([
            d.name, *(size(d.peaks.get(n, 0)) for n in numbers), gib(d.memory),
            d.memory_type or "-", f"{d.bandwidth / 1e9:.4g}",
            f"{d.power:.0f}" if d.power else "-", str(d.year or "-"), str(d.node), *rate, price_of(d, prices),
        ])  # fmt: skip
    answer = [
        "Devices: dense peaks in TFLOP/s; links one direction, of one device; prices low, expected, high a device-hour",
        "",
    ]
    answer += table(header, rows, set(range(1, len(numbers) + 2)) | set(range(len(numbers) + 3, len(header) - 1)))
    answer += ["", "Links: one direction; where vendors advertise both directions together, that figure beside it", ""]
    rows = [
        [k.name, gb_s(k.bandwidth), f"{k.bandwidth * 8 / 1e9:.6g} Gb/s", gb_s(k.both) if k.both else "-"]
        for k in known_links.values()
    ]
    answer += table(["link", "one direction", "the same in bits", "both together"], rows, {1, 2, 3})
    theirs = files.user_file("hardware") if path is None else Path(path)
    own = f"{theirs}{'' if theirs.exists() else ' (none yet)'}"
    return [
        *answer,
        "",
        f"gradus hardware NAME: one of them with its sources. Your own: {own}; this machine: gradus calibrate",
    ]


def wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, 130, initial_indent=f"  {label:13} ", subsequent_indent=" " * 16)


def one(name: str, known_links: dict[str, Link], path: str | Path | None, prices: str | Path | None) -> list[str]:
    for k in known_links.values():
        if plain(k.name) == plain(name):
            both = f" ({gb_s(k.both)} both directions together)" if k.both else ""
            answer = [
                k.name,
                *wrapped("bandwidth", f"{gb_s(k.bandwidth)} = {k.bandwidth * 8 / 1e9:.6g} Gb/s in one direction{both}"),
            ]
            return (
                answer
                + wrapped("collectives", f"{k.efficiency:.0%} of it, {k.latency * 1e6:.3g} us a hop")
                + wrapped("source", k.source or "-")
            )
    d = files.find(name, path)
    answer = [d.name + (f" ({', '.join(d.aliases)})" if d.aliases else "")]
    answer += wrapped("dense peak", ", ".join(f"{n} {v / 1e12:.4g} TFLOP/s" for n, v in d.peaks.items()))
    usable = f", of which a program gets {gib(d.capacity)}" if d.usable != 1 else ""
    of = f" of {d.memory_type}" if d.memory_type else ""
    answer += wrapped("memory", f"{gib(d.memory)} = {d.memory / 1e9:.4g} GB{of} at {gb_s(d.bandwidth)}{usable}")
    for label, value in (("power", d.power and f"{d.power:.0f} W"), ("year", d.year), ("node", f"{d.node} devices")):
        answer += wrapped(label, str(value)) if value else []
    for label, k in (("link", d.link), ("bridge", d.bridge), ("network", d.network)):
        both = f" ({gb_s(k.both)} both directions together)" if k and k.both else ""
        answer += wrapped(label, f"{k.name}: {gb_s(k.bandwidth)} in one direction{both}") if k else []
    found = files.quotes(d.name, prices)
    for q in found:
        answer += wrapped("price", f"{q.low:.2f} to {q.high:.2f} {q.currency} an hour on {q.date}: {q.source}")
    if found:
        p = files.price(d, prices)
        spread = f", sources differ by a factor of {p.high / p.low:.1f}" if p.low and p.high > p.low else ""
        answer += wrapped(
            "", f"taken: {p.low:.2f} low, {p.expected:.2f} expected, {p.high:.2f} high, in {p.currency}{spread}"
        )
    if d.measured:
        answer += wrapped("measured", f"by gradus calibrate: {', '.join(map(str, d.measured))}")
    return answer + wrapped("source", f"{d.source or '-'} ({d.date or 'no date'})")
