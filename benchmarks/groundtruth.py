"""Published measurements against the plan, with the committed parameters (nothing is fitted on what is scored).

    python benchmarks/groundtruth.py POINTS.json                     # a table: per group and overall
    python benchmarks/groundtruth.py POINTS.json --to rows.jsonl     # and every point as a row; why not, where not predicted
    python benchmarks/groundtruth.py POINTS.json ... --evaluate      # fitted on the files, with each model, group, chip left out: medians of groups, intervals
    python benchmarks/groundtruth.py POINTS.json ... --evaluate --chart FILE.svg     # and seconds measured by planned, each model left out, drawn
    python benchmarks/groundtruth.py POINTS.json ... --ablation      # what the plan would say of the runs with less: data sheets, kernels, features
    python benchmarks/groundtruth.py POINTS.json ... --fit           # makes src/gradus/plan/fitted.yaml anew from the files: some ten minutes
    python benchmarks/groundtruth.py POINTS.json ... --anchors       # 40 runs, whose plans are kept: a change must make no right one wrong
    python benchmarks/groundtruth.py POINTS.json --serving           # measurements of serving: errors by what may be their cause; some minutes
    python benchmarks/groundtruth.py KERNELS.json --kernels          # makes src/gradus/plan/kernels.yaml anew: what single kernels say of a chip

POINTS.json is a list of {id, model, params, config, hardware, n_devices, batch, seq, metric, value, unit, kind, source, note}.
"""

from __future__ import annotations

import argparse
import datetime
import math
import re
import sys
from pathlib import Path

import yaml
from published import kernels, memory, others, points, scoring, serving, study

from gradus import pictures
from gradus.errors import UserError
from gradus.plan import published as shown
from gradus.plan import roofline

HEAD = "# Fitted by `python benchmarks/groundtruth.py POINTS.json --fit`: do not edit. Units are SI. What each parameter means: roofline.Parameters.\n"


def written(file: dict, depth: int = 1) -> str:
    """YAML with a line for each entry of the second level."""
    out = []
    for key, value in file.items():
        if not isinstance(value, dict):
            out.append(yaml.safe_dump({key: value}, default_flow_style=True, width=10_000, allow_unicode=True).strip()[1:-1])
            continue
        out.append(f"{key}:")
        for name, entry in value.items():
            text = yaml.safe_dump({name: entry}, default_flow_style=True, width=10_000, sort_keys=False, allow_unicode=True).strip()
            out.append("  " + text[1:-1])
    return "\n".join(out) + "\n"


def fit(found: list[points.Point], date: str) -> None:
    """Writes the parameters, and the errors with each model, group and chip left out."""
    cases, reasons = study.read(found)
    of = study.Study(cases)
    file, entries = study.kept(of, found, reasons, date)

    def keep(title: str, rows: dict[str, dict]) -> None:
        columns = [name for name in next(iter(rows.values())) if name != "cells"]
        file[title] = {"columns": columns} | {name: [v if v is None or isinstance(v, int) else round(v, 3) for v in map(r.get, columns)] for name, r in rows.items()}

    for i, (title, scored) in enumerate(study.evaluations(of, reasons)):
        print("\n".join([*scoring.lines(title, scored), *scoring.worst(scored), ""]))
        keep(title, scoring.table(scored))
        if i == 0:
            keep(shown.BY_CHIP, scoring.by_chip(scored))
    roofline.FITTED.write_text(HEAD + written(file), encoding="utf-8")
    Path(others.__file__).with_name(others.FITTED).write_text("# As fitted.yaml, of what only published points need.\n" + written(entries), encoding="utf-8")
    roofline.fitted.cache_clear()
    roofline.find_parameters.cache_clear()
    file["anchors"] = list(study.anchors(found, yaml.safe_load(study.ANCHORS.read_text())).values())
    roofline.FITTED.write_text(HEAD + written(file), encoding="utf-8")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- tables -->\n")
    PAGE.write_text(f"{before}<!-- tables -->\n{tables()}{rest[rest.index('<!-- end of tables -->') :]}", encoding="utf-8")


KINDS = {"A100": "A100", "H100, H200, GH200": r"G?H\d+", "B200 to GB300": r"G?B\d+", "TPU": "TPU.*", "others": ".*"}


def chart(entries: list[scoring.Entry]) -> pictures.Picture:
    """Each run's seconds of a step, planned and measured."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in KINDS}
    for e in entries:
        if e.error is not None:
            name = next(name for name, pattern in KINDS.items() if re.fullmatch(pattern, e.chip))
            found[name].append((e.case.seconds / math.exp(e.error), e.case.seconds))
    ends = [f(x for points in found.values() for pair in points for x in pair) for f in (min, max)]
    curves = {name: pictures.Curve(points, pictures.COLOURS[i], mark=pictures.MARKS[i % 4], joined=False) for i, (name, points) in enumerate(found.items())}
    curves["equal"] = pictures.Curve([(x, x) for x in ends], "var(--quiet)", dashed=True)
    title, below = "Published steps beside the plan", f"{sum(map(len, found.values())):,} runs, each predicted without the runs of its model."
    return pictures.lines(curves, title, below, x="planned, seconds of a step", y="measured, seconds of a step", zero=False, log="xy", height=420)


PAGE = Path(__file__).resolve().parent.parent / "docs" / "accuracy-published.md"


def tables() -> str:
    """The kept tables as PAGE has them between its marks, where --fit writes them: of groups of scoring.LEAST runs, and the means."""
    out = []
    for title in [name for name, entry in roofline.fitted().items() if isinstance(entry, dict) and "columns" in entry and not name.startswith("formulas")]:
        scores = dict(roofline.fitted()[title])
        columns = scores.pop("columns")
        rows = [(name, *map(shown.cell_text, columns, row)) for name, row in scores.items() if row[0] >= scoring.LEAST]
        out += [f"| {title} | runs | covered % | error % | bias % | inside % | width |", "|---|---|---|---|---|---|---|"]
        out += [("| " + " | ".join(row) + " |") if "mean of" not in row[0] else ("| " + " | ".join(f"**{cell}**" for cell in row) + " |") for row in rows] + [""]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, help="write every point as a JSON line")
    parser.add_argument("--evaluate", action="store_true", help="fit on the files, each model, group and chip left out")
    parser.add_argument("--chart", type=Path, help="with --evaluate: draw what the first evaluation says")
    parser.add_argument("--ablation", action="store_true", help="what each layer of knowledge brings")
    parser.add_argument("--fit", action="store_true", help="write the parameters fitted on the file")
    parser.add_argument("--anchors", action="store_true", help="compare the plans of 40 runs with those that were kept")
    parser.add_argument("--kernels", action="store_true", help="write what a file of single kernels says of chips")
    parser.add_argument("--serving", action="store_true", help="score measurements of serving: time to a first token, and between tokens")
    arguments = parser.parse_args()
    try:
        found = [point for path in arguments.points for point in points.load(path)]
        file, lines = kernels.fitted(found) if arguments.kernels else ({}, ())
    except UserError as error:
        sys.exit(str(error))
    if arguments.kernels:
        print("\n".join(lines))
        roofline.KERNELS.write_text(kernels.HEAD + written(file), encoding="utf-8")
        return
    if arguments.serving:
        entries, reasons = serving.score(found)
        print("\n".join([*serving.tables(entries), "", *scoring.not_predicted(reasons)]))
        return
    if arguments.fit:
        fit(found, datetime.date.today().isoformat())
        return
    if arguments.anchors:
        kept = yaml.safe_load(study.ANCHORS.read_text())
        lines = list(study.drift(kept, study.anchors(found, kept)))
        print("\n".join(lines))
        sys.exit(int(any(line.endswith("LOST") for line in lines)))
    if arguments.ablation:
        cases, reasons = study.read(found)
        print("\n".join(study.ablation(study.Study(cases), reasons)))
        return
    if arguments.evaluate:
        cases, reasons = study.read(found)
        for i, (title, entries) in enumerate(study.evaluations(study.Study(cases), reasons)):
            print("\n".join([*scoring.lines(title, entries), *scoring.worst(entries), ""]))
            if arguments.chart and i == 0:
                chart(entries).save(arguments.chart)
        print("\n".join([*scoring.not_predicted(reasons), *scoring.set_apart(found)]))
        return
    taken = [point for point in found if point.get("metric") in memory.METRICS]
    found = [point for point in found if point not in taken]
    entries, reasons = study.score(found)
    print(f"{len(found)} points, {len(entries)} predicted, {sum(map(len, reasons.values()))} not")
    direct = [e for e in entries if e.case.work is None]
    print("\n".join([*scoring.lines("runs, each once", study.counted(entries, reasons)), *scoring.lines("what is no run", direct)]))
    print("\n".join([*study.remarks(entries), *scoring.not_predicted(reasons), *scoring.set_apart(found)]))
    if taken:
        peaks, missed = scoring.memory_entries(taken)
        print("\n".join(["", *scoring.memory_lines(peaks), *scoring.not_predicted(missed)]))
    if arguments.to:
        arguments.to.write_text("".join(row + "\n" for row in scoring.rows(entries, reasons)), encoding="utf-8")


if __name__ == "__main__":
    main()
