"""The plan as text: the answer that a person reads in ten seconds, then its components, and the explanation of any
figure."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gradus import models
from gradus.errors import UserError, colour, did_you_mean
from gradus.parallel.mesh import sizes
from gradus.plan.figures import AT_PEAK, TEXTS
from gradus.plan.keys import precision_text
from gradus.plan.roofline import fitted
from gradus.plan.work import COMPONENTS
from gradus.rows import Row
from gradus.text import DAY, UNITS, WIDTH, duration, fold, in_unit, money, parameters, rate, size

if TYPE_CHECKING:
    from gradus.hardware import Device
    from gradus.plan.request import Answer, Request


# ---------------------------------------------------------------- figures as text


def value_text(row: Row, like: float | None = None) -> str:
    """A row's value in the unit that a person would take, for `like` where it is the end of that one's interval."""
    v, unit = row.value, row.unit
    if isinstance(v, str):
        return v
    if unit in UNITS:
        return size(v) if unit == "bytes" else in_unit(v, unit, like)
    if unit == "h":
        return duration(3600 * v) if row.name == "device/hours" else f"{rate(v)} device-hours"
    if unit in ("parameters", "devices", "steps", "tokens") or (isinstance(v, int) and not unit):
        return f"{v:,.0f} {unit}".rstrip()
    if unit in ("$", "€"):
        return money(v, unit)
    if unit.endswith(("tokens/s", "samples/s")):
        return f"{rate(v)} {unit}"
    if unit.startswith(("operations", "FLOP")):
        return f"{in_unit(v, 'prefix')}{unit}"
    if row.name in ("time/mfu", "time/hfu"):
        return f"{v:.1%}"
    return (f"{v:,.4g}" if abs(v) < 1e4 else f"{v:,.0f}") + (f" {unit}" if unit else "")


# ---------------------------------------------------------------- the first screen


TIGHT = "fits by the middle estimate, not by its upper end"


def headline(answer: Answer, request: Request) -> list[str]:
    """What it is, whether it fits, how long it takes, what it costs: a line each, each figure with what drives it. What
    does not fit has no time or cost."""
    lines = [_what(answer, request), _memory(answer)]
    if answer.fits is False and not answer.tight:
        nothing = "no layout of this model fits on up to 1,024 times as many of these devices"
        advice = answer.advice or [f"{nothing}: use shorter samples, or a smaller model"]
        return lines + [f"try       {line}" for line in advice]
    lines += _how_long(answer) + _goodput(answer, request)
    return lines + _deadline(answer, request) + _how_much(answer)


def _what(answer: Answer, request: Request) -> str:
    layout, n = answer.recipe.layout, answer.n
    on = f"{n:,} × {answer.cluster.device.name}" if answer.cluster else f"{n:,} device{'s' * (n > 1)}"
    split = sizes(layout, n)
    how = [
        " × ".join(f"{axis} {k}" for axis, k in split.items() if k > 1),
        "optimizer sharded" * (layout.shard_optimizer and split["replicate"] > 1),
        precision_text(layout),
        f"checkpointing {layout.checkpointing}" * (layout.checkpointing != "none"),
    ]
    active = f" ({active:,} active)" if (active := answer.value("parameters/active")) else ""
    of = f"{parameters(answer.value('parameters/total'), answer.value('parameters/trainable'))}{active}"
    return f"{request.recipe}: {of}, on {on} ({', '.join(filter(None, how))})"


def _memory(answer: Answer) -> str:
    parts = {row.name.partition("/")[2]: row.value for row in answer.rows if row.name.startswith("memory/")}
    on_cpu = not answer.cluster or answer.cluster.device.kind == "cpu"
    tensors, device, each = parts["allocated"], parts["device"], "process" if on_cpu else "device"
    whole = ("allocated", "reserved", "device", "capacity", *(["framework"] if on_cpu else []))
    largest = sorted((part for part in parts if part not in whole), key=lambda part: -parts[part])[:2]
    total = tensors if on_cpu else device
    most = ", ".join(f"{part} {parts[part] / total:.0%}" for part in largest if parts[part])
    if answer.fits is None:
        process = f"as a process on a CPU {size(device)}"
        return f"memory    tensors {size(tensors)} per device at the peak ({most}); {process}"
    capacity = parts["capacity"]
    most = f"tensors {size(tensors)}: {most}" if on_cpu else most
    over = "" if device <= capacity else f", {size(device - capacity)} too much"
    share, verdict = f"{device / capacity:.0%}{over}; {most}", "fits" if answer.fits else "NO FIT"
    ends = next(row.conditions for row in answer.rows if row.name == "memory/device")
    taken, low, high = size(device), size(ends["low"]), size(ends["high"])
    taken += _between(taken, low, high) if high != taken else ""
    if answer.tight:
        verdict, share = "tight", f"{share}): {TIGHT} ({high}"
    return f"{verdict:9} {taken} of {size(capacity)} per {each} ({share})"


def _cases(rows: Iterable[Row], name: str) -> dict[str, Row]:
    return {row.conditions.get("case", "expected"): row for row in rows if row.name == name}


def _interval(cases: dict[str, Row]) -> str:
    text, expected = value_text(cases["expected"]), cases["expected"].value
    ends = [value_text(cases[case], expected) for case in ("low", "high") if case in cases]
    return text + (_between(text, *ends) if len({text, *ends}) > 1 else "")


def _between(text: str, low: str, high: str) -> str:
    """' [30 .. 47]' where all three have one unit; money each with its own: '[$142 million .. $1.65 billion]'."""
    unit = "" if not text[:1].isdigit() else text.partition(" ")[2]
    if unit and all(end.endswith(f" {unit}") for end in (low, high)):
        low, high = (end.removesuffix(f" {unit}") for end in (low, high))
    return f" [{low} .. {high}]"


def _how_long(answer: Answer) -> list[str]:
    step, config = _cases(answer.rows, "time/step").get("expected"), answer.recipe.model
    if step is None:
        calibrate = "calibrate this machine once (gradus calibrate)"
        return [f"how long  not known: give --on DEVICE (gradus hardware), or {calibrate}"]
    tokens, mfu = answer.value("time/tokens_per_s"), answer.value("time/mfu")
    each = "images" if config.reads == "images" else "tokens" if tokens else "samples"
    two_sided = each == "tokens" and models.lookup(config.family).attention == "cross"
    per_second = tokens if each == "tokens" else answer.value("time/samples_per_s")
    speed = f"{rate(per_second)} {each}/s{' of source and target' * two_sided}"
    driver = (f"MFU {mfu:.0%}; " if mfu else "") + _limit(answer.rows, step.value)
    cases = _cases(answer.rows, "budget/time")
    whole = f"{_interval(cases)} for {answer.value('budget/steps'):,.0f} steps; " if cases else ""
    ends = (step.value, step.conditions["low"], step.conditions["high"])
    text, low, high = (in_unit(seconds, "s", step.value) for seconds in ends)
    return [f"how long  {whole}{text}{_between(text, low, high)} per step, {speed} ({driver})"]


# Parts of a step → what limits it where they take most; others are communication along an axis of the layout.
LIMITS = {
    "matmul": "matrix products", "attention": "fused attention", "memory": "memory-bound operations",
    "launch": "kernel launches", "bubble": "pipeline bubble", "optimizer": "the optimizer's step",
    "data": "copies of the batch", "host": "waiting for the host or the slowest node",
    "comm/shard": "FSDP's gathers and sums", "comm/replicate": "sums of gradients",
}  # fmt: skip
THIN = 0.4  # of the peak: large products reach twice as much


def _limit(rows: list[Row], step: float) -> str:
    """'limited by matrix products at 66% of the peak, 57% of a step': the part that takes most, and for products what
    they reach."""
    most = max((row for row in rows if row.conditions.get("of") == "step"), key=lambda row: row.value)
    part = most.name.removeprefix("time/")
    text = LIMITS.get(part, f"communication along {part.removeprefix('comm/')}")
    if ideal := most.conditions["how"]["inputs"].get(AT_PEAK):
        thin = part == "matmul" and ideal < THIN * most.value
        text += f"{' too thin:' if thin else ' at'} {ideal / most.value:.0%} of the peak"
    return f"limited by {text}, {most.value / step:.0%} of a step"


def _goodput(answer: Answer, request: Request) -> list[str]:
    """Of a run that is expected to fail once or more, or whose --mtbf is given."""
    names = ("time", "goodput", "between_failures", "recovery")
    time, share, between, recovery = (_cases(answer.rows, f"budget/{name}") for name in names)
    if not time or (time["expected"].value < between["expected"].value and not request.mtbf):
        return []
    every, young, daly, write, size_of = (
        next(row for row in answer.rows if row.name == f"budget/checkpoint{name}")
        for name in ("_every", "_young", "_daly", "_write", "")
    )
    low, expected, high = (f"{share[case].value:.2f}" for case in ("low", "expected", "high"))
    key = "set " * (not answer.recipe.train.checkpoint_every) + f"train.checkpoint_every={every.conditions['steps']}"
    optima = f"Young 1974: {value_text(young)}, Daly 2006: {value_text(daly)}"
    return [
        f"goodput   {expected}{_between(expected, low, high)}: a failure each {_interval(between)}, "
        f"{_interval(recovery)} to recover; a checkpoint ({value_text(size_of)}, {value_text(write)}) every "
        f"{value_text(every)} ({key}; {optima})"
    ]


def _deadline(answer: Answer, request: Request) -> list[str]:
    cases, needed = _cases(answer.rows, "budget/time"), _cases(answer.rows, "budget/devices")
    if not (request.days and cases and needed):
        return []
    expected, high = (cases[case].value for case in ("expected", "high"))
    by, limit = f"met by {answer.n:,} × {answer.cluster.device.name}", request.days * DAY
    if expected > limit:
        by = f"NOT {by}; {needed['expected'].value:,} or more would (leave the number out of --on to have it found)"
    elif high > limit:
        by += f" as expected, not at the high end of the range ({duration(high)})"
    return [f"deadline  {request.days:g} days: {by}"]


def _how_much(answer: Answer) -> list[str]:
    """Each total with the inputs behind it, from low to high: '$3 [$2 .. $5] at $2 per device-hour (quoted: $0.9 to
    $5)'."""
    names = ("cost", "cost_extremes", "device_hours")
    cost, listed, hours = (_cases(answer.rows, f"budget/{name}") for name in names)
    totals = []
    if cost:
        price, quoted = (_prices(cases, cost["low"].unit) for cases in (cost, listed))
        quoted = f" (quoted: {quoted})" if quoted else ""
        totals.append(f"{_interval(cost)} at {price} per device-hour{quoted}")
    elif hours:
        device = answer.cluster.device.name
        totals.append(f"no price of {device} is known (--price; your prices: gradus hardware {device})")
    if hours:
        totals.append(value_text(hours["expected"]))
    totals += energy_and_co2(answer.rows)
    return [f"how much  {'; '.join(totals)}"] if totals else []


def energy_and_co2(rows: Sequence[Row], source: str = "") -> list[str]:
    """Energy and CO2, each with what it was computed from; [] without rows. source: of the watts, where it is not the
    plan."""
    names = ("energy_device", "energy_node", "energy", "co2")
    devices, node, energy, co2 = (_cases(rows, f"budget/{name}") for name in names)
    if not energy:
        return []
    factors, of_node = f"{_inputs(devices, 'W per device')} W per device", _inputs(node, "node")
    factors += f", × {of_node} for its node" if of_node != "1" else ""
    intensity = f"{co2['expected'].conditions['grid']}: {_inputs(co2, 'kg/kWh')} kg/kWh"
    factors += f", PUE {_inputs(energy, 'PUE')}{source}"
    return [f"{_interval(energy)} ({factors})", f"{_interval(co2)} CO2 ({intensity})"]


def _prices(cases: dict[str, Row], currency: str) -> str:
    return _inputs(cases, " per device-hour", lambda amount: money(amount, currency)) if cases else ""


def _inputs(cases: dict[str, Row], ending: str, text: Callable[[float], str] = rate) -> str:
    """The inputs whose names end so, of the low case and, where it differs, of the high one."""
    both = [cases[case].conditions["how"]["inputs"].items() for case in ("low", "high")]
    texts = (text(value) for inputs in both for name, value in inputs if name.endswith(ending))
    return " to ".join(dict.fromkeys(texts))


MORE = "--all for components, --explain NAME for a figure"
LEGEND = "--explain NAME: the explanation of a figure, e.g. --explain memory/activations, budget/time"


def brackets(device: Device, rows: Iterable[Row] = ()) -> str:
    """What the interval of a step is of: see `step.interval`; and what makes the totals among the rows a range: more
    than steps × step time."""
    table = fitted()["each model left out"]
    n = sum(row[0] for name, row in table.items() if name != "columns" and "mean of" not in name)
    own = " on GPUs; operations: measured here"
    if device.measured is None:
        own = "; Gradus's own step has not run on a GPU"
    lost = [f"{1 - row.value:.1%}" for row in reversed(_cases(rows, "budget/goodput").values())]
    share = f"{lost[1]} [{lost[0]} .. {lost[2]}] of the time lost, and " if {*lost} - {"0.0%"} else ""
    totals = f". Of totals: a range, with {share}the lowest to highest watts" if lost else ""
    return f"[low .. high] of a step: 80 % interval, from {n} published runs of other software{own}{totals}"


def screen(answer: Answer, everything: bool = False) -> list[str]:
    """The answers, then the notes (`first_screen`); with everything also every row by group."""
    head = [*answer.headline, *([f"layout    {answer.layout_keys}"] if answer.layout_keys else [])]
    has_time = any(row.name == "time/step" for row in answer.rows)
    timed = [brackets(answer.cluster.device, answer.rows)] if has_time else []
    if not everything:
        last = [*(text for line in timed for text in fold(line, 2)), MORE]
        return first_screen(head, answer.notes, last)
    lines = [text for line in head for text in fold(line, 10)]
    return [*lines, *components(answer.rows), *note_lines(answer.notes), *(["", *timed, LEGEND] if timed else [])]


VERDICTS = {"green": r"^fits\b", "red": r"^(NO FIT|SATURATED)\b|\bnothing fits\b|\bdoes not fit\b|[\d.]+ \w+ too much"}


def printed(lines: Iterable[str]) -> Iterator[str]:
    """Lines as a terminal shows them: folded, the verdicts in colour."""
    for text in itertools.chain.from_iterable(map(fold, lines)):
        for name, pattern in VERDICTS.items():
            text = re.sub(pattern, lambda m, name=name: colour(m[0], name), text)
        yield text


def note_lines(notes: list[str]) -> list[str]:
    return ["", *(f"note: {note}" for note in notes)] if notes else []


def first_screen(head: list[str], notes: list[str], last: list[str]) -> list[str]:
    """The answers, then the notes, in lines of WIDTH columns."""
    lines = [text for line in head for text in fold(line, 10)]
    return [*lines, *(text for line in note_lines(notes) for text in fold(line, 6)), *last]


def components(rows: list[Row]) -> Iterator[str]:
    """Every row that is not zero, by group."""
    groups: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        groups.setdefault(row.name.partition("/")[0], {}).setdefault(row.name, []).append(row)
    for group, figures in groups.items():
        shown = [same for same in figures.values() if any(isinstance(r.value, str) or r.value for r in same)]
        yield from ("", group) if shown else ()
        for same in shown:
            cases = _cases(same, same[0].name)
            text = _interval(cases) if "expected" in cases else value_text(same[0])
            yield f"  {same[0].name.partition('/')[2]:24} {text}{_aside(same[0])}"


def _aside(row: Row) -> str:
    c = row.conditions
    if row.name.startswith("traffic/"):
        return f"  in {c['calls']:,.0f} calls ({c['kinds']}) of up to {c['group']:,}"
    about = c.get("convention") or ABOUT.get(row.name)
    return f"  ({about})" if about else ""


ABOUT = {f"memory/{name}": text for name, text in COMPONENTS.items()} | TEXTS["about"]


# ---------------------------------------------------------------- while it takes long

SILENCE = 3.0  # s until the first line
AGAIN = {True: 1.0, False: 30.0}  # then until the next, on a terminal and elsewhere


@contextlib.contextmanager
def progress(name: str, rows_only: bool) -> Iterator[None]:
    """A plan that takes long to trace says so on standard error: a terminal's line is drawn again and removed at the
    end, elsewhere a line follows now and then. rows_only: on a terminal alone."""
    from gradus.plan import engine, store

    ended, began, before = threading.Event(), time.monotonic(), store.progress.traced
    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    start, end = ("\r\x1b[K", "") if live else ("", "\n")

    def tell() -> None:
        wait = SILENCE
        while not ended.wait(wait):
            if store.progress.traced == before:  # so far all was on disk
                continue
            wait, done, of = AGAIN[live], len(engine._kept), store.progress.expected
            parts = f"parts of models traced: {done}" + f" of about {of:,}" * (of > done)
            text = f"planning {name}: {time.monotonic() - began:.0f} s, {parts}"
            print(f"{start}{text[: WIDTH - 1]}", end=end, file=sys.stderr, flush=True)
        if live and wait != SILENCE:
            print(start, end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    if live or not rows_only:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident:
            thread.join()


# ---------------------------------------------------------------- --explain


def named(rows: list[Row], name: str) -> list[Row]:
    """The rows of this name, with or without its group. Raises UserError where there are none."""
    same = [row for row in rows if row.name == name] or [row for row in rows if row.name.partition("/")[2] == name]
    if not same:
        suggestion = did_you_mean(name, sorted({row.name for row in rows}))
        raise UserError(f"--explain={name}: the plan has no such figure.{suggestion}")
    return same


def plain(n: Any) -> str:
    """Whole numbers in full, others to six digits."""
    if not isinstance(n, (int, float)) or isinstance(n, bool):
        return str(n)
    return f"{n:,}" if isinstance(n, int) else f"{n:,.0f}" if abs(n) >= 1e6 and abs(n) < 1e15 else f"{n:,.6g}"


def explain(rows: list[Row], name: str) -> Iterator[str]:
    """The explanation of a figure. Raises UserError for a name that the plan does not have."""
    for row in named(rows, name):
        case = row.conditions.get("case")
        exact = "" if isinstance(row.value, str) else f"   ({plain(row.value)} {row.unit})".replace(" )", ")")
        yield f"{row.name}{f' ({case})' if case else ''} = {value_text(row)}{exact}"
        how: dict[str, Any] = row.conditions.get("how", {})
        if "formula" in how:
            yield f"  formula: {how['formula']}"
        for key, value in how.get("inputs", {}).items():
            yield f"  {key} = {plain(value)}"
        if "source" in how:
            yield f"  source: {how['source']}"
        rest = {k: v for k, v in row.conditions.items() if k not in ("how", "kind", "case")}
        if rest:
            yield "  conditions: " + ", ".join(f"{k}={v}" for k, v in rest.items())
