"""Published measurements against the plan, with the committed parameters (nothing is fitted on what is scored).

    python benchmarks/groundtruth.py POINTS.json                     # a table: per group and overall
    python benchmarks/groundtruth.py POINTS.json --to rows.jsonl     # and every point as a row; why not, where not predicted
    python benchmarks/groundtruth.py POINTS.json --leave-one-out     # fitted on the file itself, each point's model left out
    python benchmarks/groundtruth.py POINTS.json --fit               # makes src/gradus/plan/fitted.yaml anew from the file

POINTS.json is a list of {id, model, params, config, hardware, n_devices, batch, seq, metric, value, unit, kind, source, note}.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import yaml

from gradus.errors import UserError
from gradus.plan import accuracy, roofline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path)
    parser.add_argument("--to", type=Path, help="write every point as a JSON line")
    parser.add_argument("--leave-one-out", action="store_true", help="fit on the file, each point's model left out")
    parser.add_argument("--fit", action="store_true", help="write the parameters fitted on the file")
    arguments = parser.parse_args()
    try:
        points = accuracy.load(arguments.points)
    except UserError as error:
        sys.exit(str(error))
    progress = lambda text: print(f"fitting {text}", file=sys.stderr)  # noqa: E731
    if arguments.fit:
        file = accuracy.refit(points, datetime.date.today().isoformat(), progress)
        head = "# Fitted by `python benchmarks/groundtruth.py POINTS.json --fit`: do not edit. Units are SI; meanings below.\n"
        roofline.FITTED.write_text(head + yaml.safe_dump(file, sort_keys=False, width=150, allow_unicode=True), encoding="utf-8")
        print("\n".join(accuracy.table_lines(file["accuracy"])))
        return
    results, reasons = accuracy.leave_one_out(points, progress) if arguments.leave_one_out else accuracy.score(points)
    print(f"{len(points)} points, {len(results)} predicted, {sum(map(len, reasons.values()))} not")
    print("\n".join(accuracy.table_lines(accuracy.grouped(results) | ({"all": accuracy.summary(results)} if results else {}))))
    print("\n".join([*accuracy.remarks(points, results), *accuracy.not_predicted(reasons)]))
    if arguments.to:
        with open(arguments.to, "w", encoding="utf-8") as file:
            for r in results:
                p = r.case.point
                file.write(json.dumps({"id": p.get("id"), "group": r.case.group, "model": p.get("model"), "metric": p.get("metric"), "unit": p.get("unit"),
                                       "measured": r.case.measured, "predicted": r.predicted, "error": r.error, "constant": r.baseline}) + "\n")  # fmt: skip
            for reason, missed in reasons.items():
                for p in missed:
                    file.write(json.dumps({"id": p.get("id"), "model": p.get("model"), "metric": p.get("metric"), "not_predicted": reason}) + "\n")


if __name__ == "__main__":
    main()
