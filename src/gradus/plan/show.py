"""The plan as text: the answer that a person reads in ten seconds, then its components, and how any figure came about."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gradus.errors import UserError, did_you_mean
from gradus.plan.work import COMPONENTS
from gradus.rows import Row

if TYPE_CHECKING:
    from gradus.plan.answer import Answer, Request


# ---------------------------------------------------------------- numbers as text


def size(n: float) -> str:
    """Bytes in decimal units: 1.5e9 → 1.50 GB."""
    for unit, suffix in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(n) >= 0.9995 * unit:  # three digits of it round up
            return f"{n / unit:.3g} {suffix}" if n / unit < 1000 else f"{n / unit:,.0f} {suffix}"
    return f"{n:.0f} B"


def weight(kg: float) -> str:
    for unit, suffix in ((1e3, "t"), (1, "kg"), (1e-3, "g")):
        if kg >= unit or unit == 1e-3:
            return f"{kg / unit:,.3g} {suffix}" if kg / unit < 1000 else f"{rate(kg / unit)} {suffix}"
    return f"{kg:.3g} kg"


def energy(joules: float) -> str:
    """From watt-hours on in those: money is counted so."""
    for unit, suffix in ((3.6e12, "GWh"), (3.6e9, "MWh"), (3.6e6, "kWh"), (3.6e3, "Wh"), (1.0, "J")):
        if joules >= unit or unit == 1.0:
            return f"{rate(joules / unit)} {suffix}"
    return f"{joules:.3g} J"


def duration(seconds: float) -> str:
    for unit, suffix in ((86_400 * 365, "years"), (86_400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 2 * unit or unit == 1e-3 or (unit == 1 and seconds >= 0.9995):
            return f"{seconds / unit:.3g} {suffix}" if seconds / unit < 1000 else f"{rate(seconds / unit)} {suffix}"
    return f"{seconds:.3g} s"


def count(n: float) -> str:
    for unit, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= unit:
            return f"{n / unit:.3g} {suffix}"
    return f"{n:.3g} "


def money(amount: float, currency: str) -> str:
    """Cents where they matter: $0.0066, $13.44, $2,130, $1.85 million."""
    from gradus.plan.budget import SIGNS

    sign = SIGNS.get(currency, currency if len(currency) == 1 else f"{currency} ")
    return f"{sign}{rate(amount)}" if amount >= 100 else f"{sign}{amount:.2f}" if amount >= 0.1 or not amount else f"{sign}{amount:.2g}"


def rate(n: float) -> str:
    """Three digits: 22,700; 4.31 million; 1.65 billion."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if n >= unit:
            return f"{n / unit:.3g} {name}" if n < 1000 * unit else f"{n / unit:,.0f} {name}"
    return f"{float(f'{n:.3g}'):,.0f}" if n >= 100 else f"{n:.3g}"


def value_text(row: Row) -> str:
    """A row's value in the unit that a person would take."""
    v, unit = row.value, row.unit
    if isinstance(v, str):
        return v
    if unit == "bytes":
        return size(v)
    if unit == "s":
        return duration(v)
    if unit == "kg":
        return weight(v)
    if unit == "h":
        return f"{rate(v) if v >= 1 else f'{v:.3g}'} device-hours"
    if unit in ("parameters", "devices", "steps", "tokens") or (isinstance(v, int) and not unit):
        return f"{v:,.0f} {unit}".rstrip()
    if unit in ("$", "€"):
        return money(v, unit)
    if unit.endswith("tokens/s") or unit.endswith("samples/s"):
        return f"{rate(v)} {unit}"
    if unit.startswith(("operations", "FLOP")):
        return f"{count(v)}{unit}"
    if row.name in ("time/mfu", "time/hfu"):
        return f"{v:.1%}"
    if unit == "J":
        return energy(v)
    return (f"{v:,.4g}" if abs(v) < 1e4 else f"{v:,.0f}") + (f" {unit}" if unit else "")


# ---------------------------------------------------------------- the first screen


def headline(answer: Answer, request: Request) -> list[str]:
    """What it is, does it fit, how long, how much: a line each, each figure with what drives it. What does not fit has no time or cost."""
    from gradus.parallel.mesh import sizes
    from gradus.plan.answer import computed_in

    r, n = answer.recipe, answer.n
    on = f"{n:,} × {answer.cluster.device.name}" if answer.cluster else f"{n:,} device{'s' * (n > 1)}"
    layout = " × ".join(f"{axis} {k}" for axis, k in sizes(r.layout, n).items() if k > 1)
    how = ", ".join(x for x in (layout, computed_in(r.layout), f"checkpointing {r.layout.checkpointing}" * (r.layout.checkpointing != "none")) if x)
    lines = [f"{request.recipe}: {answer.value('parameters/total'):,} parameters, on {on} ({how})"]
    parts = {row.name.partition("/")[2]: row.value for row in answer.rows if row.name.startswith("memory/")}
    main = sorted((k for k in parts if k not in ("allocated", "reserved", "device", "capacity")), key=lambda k: -parts[k])
    most = ", ".join(f"{k} {parts[k] / parts['device']:.0%}" for k in main[:2] if parts[k])
    if answer.fits is None:
        lines.append(f"memory    {size(parts['device'])} a device at the peak ({most})")
    else:
        share = parts["device"] / parts["capacity"]
        verdict = "fits     " if answer.fits else "NO FIT   "
        over = "" if answer.fits else f", {size(parts['device'] - parts['capacity'])} too much"
        lines.append(f"{verdict} {size(parts['device'])} of {size(parts['capacity'])} a device ({share:.0%}{over}; {most})")
    if answer.fits is False:
        nothing = "no layout of this model fits, on up to 1,024 times as many devices of the kind: shorter samples, or a smaller model"
        return lines + [f"try       {line}" for line in answer.advice or [nothing]]
    return lines + _how_long(answer) + _deadline(answer, request) + _how_much(answer)


def _cases(answer: Answer, name: str) -> dict[str, Row]:
    return {row.conditions.get("case", "expected"): row for row in answer.rows if row.name == name}


def _interval(cases: dict[str, Row]) -> str:
    text = value_text(cases["expected"])
    return text + (_between(text, value_text(cases["low"]), value_text(cases["high"])) if "low" in cases and "high" in cases else "")


def _between(text: str, low: str, high: str) -> str:
    """' [30 .. 47]' where all three have one unit, else each with its own; money always: '[$142 million .. $1.65 billion]'."""
    unit = "" if not text[:1].isdigit() else text.partition(" ")[2]
    low, high = (x.removesuffix(f" {unit}") if unit and all(y.endswith(f" {unit}") for y in (low, high)) else x for x in (low, high))
    return f" [{low} .. {high}]"


def _how_long(answer: Answer) -> list[str]:
    step = next((row for row in answer.rows if row.name == "time/step"), None)
    if step is None:
        return ["how long  not known: say --on DEVICE (gradus hardware), or calibrate this machine once (gradus calibrate)"]
    images = answer.recipe.model.family == "vit"
    speed = f"{rate(answer.value('time/samples_per_s'))} images/s" if images else None
    if speed is None:
        tokens = answer.value("time/tokens_per_s")
        speed = f"{rate(tokens)} tokens/s" if tokens else f"{rate(answer.value('time/samples_per_s'))} samples/s"
    mfu = answer.value("time/mfu")
    driver = "; ".join(x for x in (f"MFU {mfu:.0%}" if mfu else "", _bound(answer.rows, step.value)) if x)
    cases = _cases(answer, "budget/time")
    steps = answer.value("budget/steps")
    whole = f"{_interval(cases)} for {steps:,.0f} steps; " if cases else ""
    text = duration(step.value)
    line = f"how long  {whole}a step {text}{_between(text, duration(step.conditions['low']), duration(step.conditions['high']))}, {speed}"
    return [f"{line} ({driver})"]


BOUND = {  # parts of a step → what it then is bound by
    "compute": ("matmul", "attention"), "memory": ("memory", "optimizer"), "host": ("launch", "host", "data"), "pipeline": ("bubble",),
}  # fmt: skip


def _bound(rows: list[Row], step: float) -> str:
    """'compute-bound, 57% of a step': what most of its time goes to."""
    parts = {row.name.removeprefix("time/"): row.value for row in rows if row.name.startswith("time/") and row.conditions.get("of") == "step"}
    spent = {kind: sum(parts.get(name, 0.0) for name in names) for kind, names in BOUND.items()}
    spent["communication"] = sum(seconds for name, seconds in parts.items() if name.startswith("comm/"))
    most = max(spent, key=lambda kind: spent[kind])
    return f"{most}-bound, {spent[most] / step:.0%} of a step"


def _deadline(answer: Answer, request: Request) -> list[str]:
    cases, needed = _cases(answer, "budget/time"), _cases(answer, "budget/devices")
    if not (request.days and cases and needed):
        return []
    limit = request.days * 86_400
    made = {case: row.value <= limit for case, row in cases.items()}
    n, device = answer.n, answer.cluster.device.name
    if made["expected"]:
        return [f"deadline  {request.days:g} days: made by {n:,} × {device}" + ("" if made["high"] else ", but not if all goes as badly as it may")]
    more = needed["expected"].value
    return [f"deadline  {request.days:g} days: NOT made by {n:,} × {device}; {more:,} or more would (leave the number out of --on to have it found)"]


def _how_much(answer: Answer) -> list[str]:
    found = []
    for name, suffix in (("cost", ""), ("device_hours", ""), ("energy", ""), ("co2", " CO2")):
        cases = _cases(answer, f"budget/{name}")
        if cases:
            text = value_text(cases["expected"]) if name == "device_hours" else _interval(cases)
            found.append(f"{text}{suffix}{_driver(answer, name, cases)}")
        elif name == "cost" and answer.cluster and _cases(answer, "budget/time"):
            found.append(f"no price of {answer.cluster.device.name} is known (your prices: gradus hardware {answer.cluster.device.name})")
    return [f"how much  {'; '.join(found)}"] if found else []


def _driver(answer: Answer, name: str, cases: dict[str, Row]) -> str:
    """' (price $0.9 to $5 an hour)': what was put in for a total, from low to high."""

    def put_in(cases: dict[str, Row], key: str) -> str:
        inputs = [cases[case].conditions["how"]["inputs"] for case in ("low", "high")]
        values = [value for given in inputs for k, value in given.items() if k.endswith(key)]
        return " to ".join(dict.fromkeys(money(v, cases["low"].unit) if name == "cost" else f"{v:,.0f}" if v >= 999.5 else f"{v:.3g}" for v in values))

    if name == "cost":
        return f" (price {put_in(cases, ' a device-hour')} an hour)"
    if name == "energy":
        watts = put_in(_cases(answer, "budget/energy_device"), "W of a device")
        return f" ({watts} W a device, PUE {put_in(cases, 'PUE')})"
    return f" ({cases['expected'].conditions['grid']}: {put_in(cases, 'kg/kWh')} kg/kWh)" if name == "co2" else ""


WIDTH, HEIGHT = 80, 24  # of a terminal that holds the first screen
BRACKETS = "[low .. high]: 4 of 5 published runs lay there; totals add prices, power, grid"
MORE = "--all for components, --explain NAME for a figure"
LEGEND = (
    "[low .. high]: a step: where four of five published runs lay, their model left out of the fit; totals: also time lost, prices, power, grid",
    "--explain NAME: how a figure came about, e.g. --explain memory/activations, budget/time",
)


def fold(line: str, indent: int = 10) -> list[str]:
    """A line in as many of WIDTH columns as it takes. Settings to paste (of `layout` and `try`, up to a colon) stay one command: where they
    are broken stands a backslash."""
    line = re.sub(r"\[[^\]]*\]", lambda m: m[0].replace(" ", "\xa0"), line)  # brackets are not broken
    broken = textwrap.wrap(line, WIDTH - 2, subsequent_indent=" " * indent, break_on_hyphens=False)
    lines = [text.replace("\xa0", " ") for text in broken]
    if re.match(r"(layout|try) ", line):
        command = [":" not in "".join(lines[: i + 1]) for i in range(len(lines) - 1)]
        lines[:-1] = [f"{text} \\" if pasted else text for text, pasted in zip(lines, command)]
    return lines


def screen(answer: Answer, everything: bool = False) -> Iterator[str]:
    """The answers, then the notes, on one screen (`first_screen`); with everything also every row by group."""
    head = [*answer.headline, *([f"layout    {answer.layout_keys}"] if answer.layout_keys else [])]
    timed = any(row.name == "time/step" for row in answer.rows)
    if not everything:
        yield from first_screen(head, answer.notes, [BRACKETS, MORE] if timed and answer.fits is not False else [MORE])
        return
    yield from (text for line in head for text in fold(line))
    yield from components(answer.rows)
    if answer.notes:
        yield ""
        yield from (f"note: {note}" for note in answer.notes)
    if timed:
        yield ""
        yield from LEGEND


def first_screen(head: list[str], notes: list[str], last: list[str]) -> list[str]:
    """At most HEIGHT lines of WIDTH columns: the answers whole; notes whole, else their first sentences, else as many as there is room for."""
    lines = [text for line in head for text in fold(line)]
    room = HEIGHT - len(lines) - len(last) - 1
    ways = (notes, [re.split(r"(?<!\bal)\. (?=[A-Z])|; ", " ".join(note.split()))[0] for note in notes])
    shown = next((said for way in ways if len(said := [t for note in way for t in fold(f"note: {note}", 6)]) <= room), None)
    if shown is None:
        shown = [textwrap.shorten(f"note: {note}", WIDTH, placeholder=" ...") for note in notes]
        if len(shown) > room:
            shown = [*shown[: max(0, room - 1)], f"note: {len(notes) - max(0, room - 1)} more (--all)"][: max(0, room)]
    return [*lines, *([""] if shown else []), *shown, *last]


def components(rows: list[Row]) -> Iterator[str]:
    """Every row that is not zero, by group."""
    group = ""
    heads = list(dict.fromkeys(row.name.partition("/")[0] for row in rows))
    for name, of in sorted(by_name(rows), key=lambda found: heads.index(found[0].partition("/")[0])):
        head, _, rest = name.partition("/")
        if all(isinstance(r.value, (int, float)) and not r.value for r in of):
            continue
        if head != group:
            group = head
            yield ""
            yield head
        cases = {r.conditions.get("case", "expected"): r for r in of}
        shown = _interval(cases) if "expected" in cases else value_text(of[0])
        yield f"  {rest:24} {shown}{_aside(of[0])}"


def by_name(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    yield from found.items()


def _aside(row: Row) -> str:
    c = row.conditions
    if row.name.startswith("traffic/"):
        return f"  in {c['calls']:,.0f} calls ({c['kinds']}) of up to {c['group']:,}"
    said = c.get("convention") or ABOUT.get(row.name)
    return f"  ({said})" if said else ""


ABOUT = {f"memory/{name}": text for name, text in COMPONENTS.items()} | {
    "memory/allocated": "their sum: what tensors take",
    "memory/reserved": "what PyTorch's allocator takes for them",
    "memory/framework": "the device's context, kernels, communicators",
    "memory/device": "reserved and framework: what has to fit",
    "memory/capacity": "what a program gets of the device",
    "time/matmul": "matrix products",
    "time/memory": "all that is bound by the memory's bandwidth: norms, activation functions, dropout, sums, losses",
    "time/launch": "the device waits for the host to launch kernels",
    "time/bubble": "stages of the pipeline wait for each other",
    "time/host": "the optimizer's launches, and waiting for the slowest node",
    "time/data": "the batch, from host to device",
    "budget/time": "with the usual loss to failures and restarts",
    "budget/energy_device": "the devices alone",
    "budget/energy_node": "with processors, fans, network",
    "budget/energy": "with the building: × PUE",
    "budget/devices": "that would do it in the days given, if each kept its rate",
    "energy/step": "the devices alone",
}


# ---------------------------------------------------------------- --explain


def named(rows: list[Row], name: str) -> list[Row]:
    """Those called so, with or without their group. Raises UserError where there are none."""
    found = [row for row in rows if row.name == name] or [row for row in rows if row.name.partition("/")[2] == name]
    if not found:
        raise UserError(f"--explain={name}: the plan has no such figure.{did_you_mean(name, sorted({r.name for r in rows}))}")
    return found


def plain(n: Any) -> str:
    """Whole numbers in full, others to six digits."""
    if not isinstance(n, (int, float)) or isinstance(n, bool):
        return str(n)
    return f"{n:,}" if isinstance(n, int) else f"{n:,.0f}" if abs(n) >= 1e6 and abs(n) < 1e15 else f"{n:,.6g}"


def explain(rows: list[Row], name: str) -> Iterator[str]:
    """How a figure came about. Raises UserError for a name that the plan does not have."""
    for row in named(rows, name):
        case = row.conditions.get("case")
        exact = "" if isinstance(row.value, str) else f"   ({plain(row.value)} {row.unit})".replace(" )", ")")
        yield f"{row.name}{f' ({case})' if case else ''} = {value_text(row)}{exact}"
        how: dict[str, Any] = row.conditions.get("how", {})
        if "formula" in how:
            yield f"  formula: {how['formula']}"
        for key, put_in in how.get("inputs", {}).items():
            yield f"  {key} = {plain(put_in)}"
        if "source" in how:
            yield f"  source: {how['source']}"
        rest = {k: v for k, v in row.conditions.items() if k not in ("how", "kind", "case")}
        if rest:
            yield "  conditions: " + ", ".join(f"{k}={v}" for k, v in rest.items())
