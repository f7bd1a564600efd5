"""The first page of a report: who and when, five sentences, and the same as one table; all from the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gradus.errors import either
from gradus.proof import ladder, results
from gradus.proof.pairs import signed
from gradus.report.blocks import Block, Table, narrow, plain
from gradus.report.runs import Run, is_number, uneven_load, words
from gradus.report.studies import Study
from gradus.text import cell, size

COLUMNS = ("machine", "best speed-up", "peak memory", "quality", "error of the plan")
LATER = ("loss", "perplexity")  # a metric that is better comes first
MEMORY = {"memory/allocated": "tensors", "memory/process": "the process"}
QUALITY = ("valid/", "test/", "accuracy", "loss")  # how names of rows begin
PLANNED = {**MEMORY, "memory/device": "the device", "time/step": "a step", "latency/median": "latency"}


def blocks(author: str, date: str, sections: Sequence[tuple[str, list[str]]]) -> Iterator[Block]:
    """sections: what each is of, and its cells of COLUMNS, empty where that is not known."""
    yield plain(" · ".join(filter(None, [author, date])))
    every, of_all = zip(*sections)
    subjects = [f"This report shows {either(every, 'and')} (Table 1), measured on"]
    subjects += [f"The {head} is" for head in COLUMNS[1:]]
    sentences = []
    for subject, cells in zip(subjects, zip(*of_all)):
        names: dict[str, list[str]] = {}
        for name, of_one in zip(every, cells):
            names.setdefault(of_one or "not known", []).append(name)
        known = (of_one + f" for {either(of, 'and')}" * (len(names) > 1) for of_one, of in names.items())
        sentences.append(f"{subject} {'; '.join(known)}.")
    yield plain(" ".join(sentences))
    rows = [[name, *(of_one or "–" for of_one in cells)] for name, cells in sections]
    yield narrow(Table(["", *COLUMNS], rows, "What was measured, and what came of it.", words=True))


def machine(facts: dict[str, Any]) -> str:
    """Its GPU, else its processor and how many of them; empty: not known."""
    gpu, cpu = facts.get("gpu"), facts.get("cpu")
    name = f"{cpu}, {facts.get('cpus_allowed')} processors" if cpu else ""
    return str(gpu.get("name")) if isinstance(gpu, dict) else name


def ranged(values: Iterable[float], text: Callable[[float], str], what: str) -> Iterator[str]:
    """The lowest and the highest of what; one where they read the same; nothing without any."""
    if known := sorted(values):
        yield f"{' to '.join(dict.fromkeys(map(text, (known[0], known[-1]))))} {what}"


def cells_of(
    machines: Iterable[str], speed: str, pairs: Iterable[tuple[str, Any, Any]], metrics: Iterable[tuple[str, Any]]
) -> list[str]:
    """Of COLUMNS. pairs: name, planned and measured. metrics: name and value."""
    both = [(name, p, m) for name, p, m in pairs if is_number(m) and m]
    known = sorted(((n, v) for n, v in metrics if is_number(v)), key=lambda metric: metric[0].endswith(LATER))
    memory, off = [], []
    for name, text in PLANNED.items():
        memory += ranged((m for n, _, m in both if n == name and n in MEMORY), size, f"of {text}")
        off += ranged((p / m - 1 for n, p, m in both if n == name and is_number(p)), signed, f"({text})")
    reached = ranged((v for n, v in known if n == known[0][0]), cell, f"({words(known[0][0])})") if known else ()
    where = either(dict.fromkeys(filter(None, machines)) or ["an unknown machine"], "and")
    return [where, speed, "".join(memory[:1]), "".join(reached), ", ".join(off)]


def of_runs(group: Sequence[Run]) -> list[str]:
    wrong, compared = uneven_load(group), [run for run in group if run.speed_up]
    speed = next(iter(wrong.values()), "")
    if fair := [run for run in compared[1:] if run.name not in wrong]:
        best = max(fair, key=lambda run: run.speed_up)
        speed = speed_text(best.speed_up, cell(best.speed_up), best.name, compared[0].name)
    machines, pairs = (machine(run.environment) for run in group), (pair for run in group for pair in run.proved)
    busy = results.busy(run.summary.load.during for run in group)
    metrics = (metric for run in group for metric in run.summary.metrics.items())
    return cells_of([f"{name}{busy}" for name in machines if name], speed, pairs, metrics)


def speed_text(ratio: float, text: str, best: str, base: str) -> str:
    return f"{text} × the samples/s of {base}, by {best}" if ratio > 1 else f"none: nothing is faster than {base}"


def of_study(study: Study) -> list[str]:
    """Of a ladder: all that was kept against the first rung."""
    kind, speed = next((kind for kind in ("speed_up", "ratio") if study.values(kind)), ""), ""
    if values := study.values(kind):
        best = max(values, key=values.get)
        row = study.row(best, kind)
        speed = speed_text(values[best], results.shown(kind, row), best, row.get("against", "the first"))
        speed = study.table.incomparable().get(best, speed)
    pairs = [(p.name, p.predicted, p.measured) for p in study.table.pairs["predicted", "measured"].values()]
    if trials := study.trials:
        whole, speed = trials[-1], "none: the first rung is the best"
        if whole.rung == ladder.LAST:
            speed = ladder.against_first(whole, trials[0]) if whole.kept else f"none: {whole.verdict}"
        pairs = [("memory/allocated", trial.planned, trial.tensors) for trial in trials]
    metrics = ((name, row["value"]) for (_, name), row in study.table.measured.items() if name.startswith(QUALITY))
    busy = results.busy(share for row in study.records for share in row.get("others", ()))
    name = machine(study.machine)
    return cells_of([f"{name}{busy}"] if name else [], speed, pairs, metrics)
