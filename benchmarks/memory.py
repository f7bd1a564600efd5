"""Published peak memory against the plan: of other programs by what they keep, of Gradus as it is, and of what people use instead.

    python benchmarks/memory.py POINTS.json [POINTS.json ...]     # a table per group, and the rivals on the same rows: some ten minutes the first time
    python benchmarks/memory.py POINTS.json --to rows.jsonl       # and every point as a row
    python benchmarks/memory.py POINTS.json ... --keep            # writes the intervals: benchmarks/published/kept-intervals.yaml

Nothing is fitted here; what was read off measured rows stands in benchmarks/published/kept.yaml. An error is the logarithm of planned over measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml
from published import points, scoring

from gradus.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--to", type=Path, help="write every point as a JSON line")
    parser.add_argument("--keep", action="store_true", help="write the intervals of the residuals")
    arguments = parser.parse_args()
    try:
        found = [point for path in arguments.points for point in points.load(path)]
    except UserError as error:
        sys.exit(str(error))
    entries, reasons = scoring.memory_entries(found)
    print("\n".join([*scoring.memory_lines(entries), "", *scoring.rival_lines(entries), "", *scoring.not_predicted(reasons)]))
    if arguments.keep:
        scoring.INTERVALS.write_text(scoring.HEAD + yaml.safe_dump(scoring.kept_intervals(entries), sort_keys=True))
    if arguments.to:
        arguments.to.write_text("".join(row + "\n" for row in scoring.rows(entries, reasons)), encoding="utf-8")


if __name__ == "__main__":
    main()
