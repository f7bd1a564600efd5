"""Local updates, synchronised every H steps, beside DDP: the loss they reach, and what they send.

    python benchmarks/local_updates.py shakespeare-char-gpt data.path=input.txt --every 50 --to docs/layouts.md

Traffic is counted twice: by the trainer from its calls (one step of DDP, one synchronisation of DiLoCo), and as the loopback interface
counted it over the whole run (Linux; everything that two processes said to each other, start and checkpoints included). Other programs
that talk over the loopback interface meanwhile are counted too.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from layouts import fill, keep, run


def loopback() -> int:
    """Bytes sent over the loopback interface since the machine started."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="+", help="as for gradus train")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--diloco", default="layout.diloco.outer_lr=1.0 layout.diloco.outer_momentum=0.5", help="more settings of DiLoCo's")
    parser.add_argument("--to", type=Path, help="a page with the marks")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder for the rows (default: results/ beside this file)")
    args = parser.parse_args()
    recipe = [*args.recipe, "layout.threads=1", "layout.device=cpu", "evaluate.samples=0", "log.every=50"]
    ways = {
        "ddp": ("layout.replicate=ddp", 1),
        "diloco": (f"layout.diloco.every={args.every} {args.diloco}", args.every),
        "local_sgd": (f"layout.local_sgd.every={args.every}", args.every),
    }
    lines = ["| | validation loss | against DDP | sent a step and process, by calls | less | over the loopback interface, whole run | less |"]
    lines.append("|---|---|---|---|---|---|---|")
    found: list[dict] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, (settings, every) in ways.items():
            before = loopback()
            rows = run(recipe, 2, settings, Path(scratch) / name)
            sent = [value for key, value in rows.items() if key[0] == "traffic/sent"][-1] / every
            row = {"way": name, "layout": settings, "valid_loss": rows["summary"]["metrics"]["valid/loss"], "sent_a_step": sent}
            found.append(row | {"loopback_bytes": loopback() - before, "steps": rows["summary"]["steps"]})
            row, ddp = found[-1], found[0]
            lines.append(
                f"| `{settings}` | {row['valid_loss']:.4f} | {row['valid_loss'] / ddp['valid_loss'] - 1:+.1%} | {row['sent_a_step']:,.0f} B "
                f"| {ddp['sent_a_step'] / row['sent_a_step']:.1f} times | {row['loopback_bytes'] / 1e6:,.1f} MB "
                f"| {ddp['loopback_bytes'] / row['loopback_bytes']:.1f} times |"
            )
            print(lines[-1], flush=True)
    keep("local_updates-cpu-2-processes", found, args.results)
    fill(args.to, "local updates", lines)


if __name__ == "__main__":
    main()
