"""The rows of a study as one table: planned, measured, error, ratio; for a terminal and for a page."""

from __future__ import annotations

import itertools
import re
import shlex
import statistics
import textwrap
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from gradus.proof.pairs import joined, signed
from gradus.proof.timing import BUSY
from gradus.text import cell, duration, fold, size, width
from gradus.text import table as columns

LABELS = {  # of rows, in the order of the columns
    "best": "best", "latency/median": "latency", "latency/p90": "p90", "latency/p99": "p99",
    "latency/first_token": "first token", "latency/per_token": "per token", "decode/tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s", "samples_per_s/undisturbed": "undisturbed samples/s", "steps_per_s": "steps/s",
    "ratio": "×", "ratio/undisturbed": "undisturbed ×", "speed_up": "speed-up", "ratio/efficiency": "efficiency",
    "efficiency": "efficiency",
    "time/step": "step", "time/load": "load", "time/first_call": "first call",
    "time/run": "run", "time/epoch": "h/epoch", "cost/epoch": "USD/epoch", "memory/allocated": "tensors",
    "ratio/memory": "of tensors", "memory/device": "device", "memory/process": "process", "memory/cache": "cache",
    "size/weights": "weights", "roof": "of the roofline", "energy/sample": "J/sample", "ratio/process": "of process",
    "traffic/sent": "sent", "data_wait": "waits for data", "tokens_per_s": "tokens/s", "energy/run": "Wh",
    "co2/run": "kg CO2", "loss/first": "first loss", "loss": "loss", "lr/first": "first learning rate",
    "lr": "last learning rate", "deviation/loss": "loss deviation", "deviation/grad_norm": "gradient norm deviation",
    "train/loss": "training loss", "same_tokens": "same tokens", "points_lost": "points lost",
}  # fmt: skip
HIDDEN = (
    "time/warm_up", "parameters", "energy/run", "memory/weights", "memory/gradients", "memory/optimizer", "memory/rest",
    "memory/reserved", "roof/bandwidth", "roof/rate", "check/largest", "tokens_per_s", "co2/run", "loss/first",
    "lr/first", "lr", "ratio/efficiency",
)  # fmt: skip
# kinds of rows
WORDS = {"source": "source says", "planned": "planned there", "predicted": "planned", "measured": "measured"}
COMPARED = (("planned", "source"), ("predicted", "measured"))
UNDISTURBED = "/undisturbed"  # without the time in which a step was ready but other programs had the processor
MOST = 1.05  # an efficiency above it has another cause than the processes
INCOMPARABLE = "not comparable"
MORE = f"more than {MOST} times as fast per process"
Record = dict[str, Any]


def pasted(command: Sequence[str]) -> Iterator[str]:
    """A command that stays whole when it is pasted: each line but the last ends with a backslash."""
    text = " ".join(shlex.quote(word).replace(" ", "\0") for word in command)  # a word in quotes is not broken
    options = {"subsequent_indent": "  ", "break_long_words": False, "break_on_hyphens": False}
    *continued, last = (line.replace("\0", " ") for line in textwrap.wrap(text, width() - 2, **options))
    yield from (f"{line} \\" for line in continued)
    yield last


def say(text: str) -> None:
    for line in text.split("\n"):
        print(*fold(line, width=width()), sep="\n", flush=True)


def quiet(text: str) -> None:
    """Prints nothing: for --json."""


def print_lines(lines: Generator[str, None, int | None], as_json: bool) -> int:
    """Prints what a verb yields, JSON as it is; the exit code that it returns."""
    while True:
        try:
            line = next(lines)
        except StopIteration as end:
            return end.value or 0
        print(line, flush=True) if as_json else say(line)


class Table:
    """Rows by configuration and name: the figures of a source, the plan for its devices, the plan, the measurement."""

    def __init__(self, rows: Sequence[Record], wanted: Sequence[str] = ()):
        """wanted: names of rows, in the order of the columns (empty: all that are known)."""
        self.names = list(dict.fromkeys(r["configuration"] for r in rows))
        by_kind: dict[str, dict[tuple[str, str], Record]] = {kind: {} for kind in WORDS}  # (configuration, name) → row
        for r in rows:  # of what was planned: of the largest batch, where there is that, else of the one step
            of_kind, key = by_kind.setdefault(r["kind"], {}), (r["configuration"], r["name"])
            if not (r["kind"] == "predicted" and key in of_kind and r.get("step") is not None):
                of_kind[key] = r
        self.by_kind, self.measured, self.planned = by_kind, by_kind["measured"], by_kind["predicted"]
        self.failed = {c: r["value"] for (c, name), r in self.measured.items() if name == "failed"}
        self.pairs = {(planned, kind): joined(by_kind[planned], by_kind[kind]) for planned, kind in COMPARED}
        known = dict.fromkeys(r["name"] for r in rows if r["kind"] != "predicted" and r["name"] != "failed")
        for name in [name for name in known if name.endswith(UNDISTURBED)]:
            as_measured = name.removesuffix(UNDISTURBED)
            cells = ([shown(n, self.measured.get((c, n))) for n in (name, as_measured)] for c in self.names)
            if all(own in ("-", other) for own, other in cells):
                del known[name]
        order = sorted(known.keys() - HIDDEN, key=list(LABELS | known).index)
        parts = ("traffic/", "time/step/")
        order = [name for name in order if not name.startswith(parts) or name == "traffic/sent"]
        self.columns = [name for name in wanted if name in known] if wanted else order

    def kinds(self, name: str) -> list[str]:
        """The kinds of a figure, in the order of the columns."""
        return [kind for kind in WORDS if any((c, name) in self.by_kind[kind] for c in self.names)]

    def errors(self, name: str) -> dict[tuple[str, str], dict[str, float]]:
        """(planned, measured) kinds of this figure that are compared → configuration → error."""
        errors = {}
        for kinds, pairs in self.pairs.items():
            of_kinds = {c: pairs[c, name].error for c in self.names if (c, name) in pairs}
            errors[kinds] = {c: error for c, error in of_kinds.items() if error is not None}
        return {kinds: of_kinds for kinds, of_kinds in errors.items() if of_kinds}

    def head(self) -> list[str]:
        cells = ["configuration"]
        for name in self.columns:
            kinds, label = self.kinds(name), LABELS.get(name, name)
            heads = [WORDS[kind] for kind in kinds]
            heads += ["error" if "measured" in compared else "error there" for compared in self.errors(name)]
            cells += [label] if kinds == ["measured"] else [f"{label}: {heads[0]}", *heads[1:]]
        return cells

    def body(self) -> list[list[str]]:
        lines = {c: [c] for c in self.names}
        for name in self.columns:
            kinds, errors = self.kinds(name), self.errors(name).values()
            for c, cells in lines.items():
                cells += [shown(name, self.by_kind[kind].get((c, name))) for kind in kinds]
                cells += [signed(of_kinds.get(c)) for of_kinds in errors]
        return list(lines.values())

    def summary(self) -> Iterator[str]:
        """The sizes of the plan's errors, over all configurations; and what cannot be compared."""
        for name in self.columns:
            for kinds, errors in self.errors(name).items():
                sizes = [abs(error) for error in errors.values()]
                where = "" if "measured" in kinds else " for the source's devices"
                middle = f"a median error of {statistics.median(sizes):.1%}, at most {max(sizes):.1%} ({len(sizes)})"
                if len(sizes) > 1:
                    yield f"{LABELS.get(name, name)}: planned{where} with {middle}"
        yield from (f"{c}: {why}" for c, why in self.incomparable().items())

    def incomparable(self) -> dict[str, str]:
        """Configuration → why its speed-up is none of its processes."""
        reasons = {}
        for (c, name), row in self.measured.items():
            if shown(name, row) == INCOMPARABLE:
                known = row.get("load") is not None and "cpus" in row
                load = f" (load {row['load']:g} on {row['cpus']} cores)" if known else ""
                reasons[c] = f"{INCOMPARABLE}: other programs ran{load}, or other things differ too: {MORE}"
        return reasons


def shown(name: str, row: Record | None) -> str:
    """A cell: the value; of several samples with the lowest and highest, of several seeds with the standard
    deviation."""
    if row is None:
        return "-"
    value, unit = row["value"], row.get("unit", "")
    if isinstance(value, str):
        return value
    if unit == "bytes":
        return size(value)
    if unit == "s":
        return duration(value)
    if name.endswith("efficiency") and value > MOST and row.get("processes", 2) > row.get("against_processes", 1):
        return INCOMPARABLE
    if name.startswith("deviation/"):
        return f"{value:.1e}"
    if name in ("data_wait", "roof"):
        return f"{value:.1%}"
    text = cell(value)
    if row.get("std") is not None:
        two_digits = float(f"{row['std']:.2g}")
        return f"{text} ± {cell(two_digits)}"
    if name.removesuffix(UNDISTURBED) in ("samples_per_s", "ratio") and len(row.get("samples", ())) > 1:
        text += f" [{cell(row['low'])}, {cell(row['high'])}]"
    return text


def conditions_line(rows: Sequence[Record]) -> str:
    """The conditions that all rows share."""
    r = next((r for r in rows if r.get("kind") == "measured" and "cpu" in r), None)
    if r is None:
        return ""
    threads = {str(r["threads"]) for r in rows if "threads" in r}
    sets = f" ({', '.join(r['cpu_flags'])})" if r.get("cpu_flags") else ""
    others = busy(share for row in rows for share in row.get("others", ()))
    words = [f"{r['cpu']}{sets}", f"{r['cpus']} processors{others}", f"PyTorch {r['versions']['torch']}"]
    words += [f"threads per process: {', '.join(sorted(threads))}"] if threads else []
    words += [f"{r['steps']} steps per round after {r['warm_up']} of warm-up"] if "steps" in r else []
    rounds = max((len(r.get("samples", ())) for r in rows), default=0)
    words += [f"median of {rounds} rounds [lowest, highest]"] if rounds > 1 and "steps" in r else []
    disturbed = sum(r.get("retaken", 0) for r in rows if r["name"] == "samples_per_s")
    if disturbed:
        samples = f"{disturbed} sample{'s' * (disturbed > 1)}"
        words.append(f"{samples} measured again: other programs used the processors")
    return "; ".join(words)


def busy(shares: Iterable[float | None]) -> str:
    """What other programs took at most of the processors, to stand behind what these are; empty for little."""
    most = max((share or 0.0 for share in shares), default=0.0)
    return f", of which other programs used up to {most:.1f}" * (most > BUSY)


def lines(rows: Sequence[Record], wanted: Sequence[str] = ()) -> Iterator[str]:
    """The table for a terminal. Parts of the names that all configurations share stand in the head alone."""
    table = Table(rows, wanted)
    body = [cells for cells in table.body() if cells[0] not in table.failed or any(cell != "-" for cell in cells[1:])]
    head, parts = table.head(), [cells[0].split(" · ") for cells in body]
    if len(body) > 1 and len(set(map(len, parts))) == 1:
        shared = [len({names[i] for names in parts}) == 1 for i in range(len(parts[0]))]
        if any(shared):
            head[0] += f" ({' · '.join(itertools.compress(parts[0], shared))})"
        for cells, names in zip(body, parts):
            cells[0] = " · ".join(name for name, same in zip(names, shared) if not same)
    yield from columns(head, body, set(range(1, 99)), width()) if body else ()
    yield from (f"{c}: {why}" for c, why in table.failed.items())
    yield from table.summary()
    yield from filter(None, [conditions_line(rows)])


def markdown(rows: Sequence[Record], wanted: Sequence[str] = ()) -> Iterator[str]:
    """The table for a page: characters with a meaning in Markdown or HTML are escaped."""
    table = Table(rows, wanted)
    head = table.head()
    yield f"| {' | '.join(map(_text, head))} |"
    yield "|---|" + "---:|" * (len(head) - 1)
    yield from (f"| {' | '.join(map(_text, cells))} |" for cells in table.body())
    yield ""
    yield from (f"{_text(f'{c}: {why}')}  " for c, why in table.failed.items())
    yield from (f"{_text(line)}  " for line in table.summary())
    yield from (f"{_text(line)}." for line in [conditions_line(rows)] if line)


def _text(words: str) -> str:
    """On one line; a _ or # within a word, and [ ] without a link, have no meaning."""
    return re.sub(r"[\\`*<>&|$~]|\](?=[(\[:])|(?<!\w)[_#]|_(?!\w)", r"\\\g<0>", " ".join(words.split()))
