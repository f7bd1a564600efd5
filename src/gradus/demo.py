"""`gradus demo`: a recipe's whole way on the copy task. Each command is shown, then run as if typed, by itself."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from gradus import files
from gradus.parallel.processes import run_program
from gradus.text import say

RUN = "runs/copy-task/latest"
NEXT = """
Everything is in {run}; its report/report.html opens in a browser. What next?
  gradus train copy-task --processes 2
      on two processes: the same samples, the same loss
  gradus plan gpt2-small --tokens 3e9 --on 8xA100-80GB
      the cost of a run on hardware that is not here
  gradus new mine.yaml --data reviews.csv
      a recipe for your own table, text or images"""


def run(words: list[str]) -> int:
    """A command line in a process of its own: what the commands before it have left counts to nobody's memory."""
    try:
        code = run_program([sys.executable, "-m", "gradus", *words])[0]
    except KeyboardInterrupt:  # it was passed on: the command has saved, and ended
        return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code  # as a shell says it


def demo(gradus: Callable[[list[str]], int] = run, settings: Sequence[str] = ("train.steps=300",)) -> int:
    """Plan, check, train, prove and report, up to the first command that fails; its exit code.

    gradus: runs a command line. settings: of the recipe; in 300 steps it learns to copy as well as in its 500.
    """
    for verb, why in (("plan", "What will it cost?"), ("check", "Is it healthy?"), ("train", "Train it.")):
        if code := _typed(gradus, why, verb, "copy-task", *settings):
            return code
    if code := _typed(gradus, "Was the plan right?", "prove", RUN):
        return code
    if code := _typed(gradus, "Hand it in.", "report", RUN, "--to", f"{RUN}/report"):
        return code
    say(NEXT.format(run=files.run_of(RUN)))
    return 0


def _typed(gradus: Callable[[list[str]], int], why: str, *words: str) -> int:
    print(f"\n# {why}\n$ {shlex.join(['gradus', *words])}", flush=True)
    return gradus(list(words))
