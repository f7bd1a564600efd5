"""`gradus demo`: a recipe's whole way on the copy task, in one process. Each command is shown, then run as if typed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence

from gradus import files
from gradus.errors import UserError, need

RUN = "runs/copy-task/latest"
NEXT = """
Everything is in {run}; its report/report.html opens in a browser. What next?
  gradus train copy-task --processes 2                          the same samples, the same losses, on two processes
  gradus plan gpt2-small --tokens 3e9 --on 8xA100-80GB          what it would cost on hardware that is not here
  gradus new mine.yaml --data reviews.csv                       a recipe for your own table, text or images"""


def demo(gradus: Callable[[list[str]], int], settings: Sequence[str] = ("train.steps=300",)) -> int:
    """Plan, check, train, prove and report, up to the first command that fails; its exit code.

    gradus: runs a command line. settings: of the recipe; in 300 steps it learns to copy as well as in its 500.
    """
    from gradus.train.clock import begin_run

    for verb, why in (("plan", "What will it cost?"), ("check", "Is it healthy?"), ("train", "Train it.")):
        if verb == "train":
            begin_run()  # of what the check has left, nothing counts to the training's memory
        if code := _typed(gradus, why, verb, "copy-task", *settings):
            return code
    if code := _typed(gradus, "Was the plan right?", "prove", RUN):
        return code
    try:
        need("matplotlib", "report", "gradus report")
    except UserError as e:
        print(f"\nnote: {e}", flush=True)
    else:
        if code := _typed(gradus, "Hand it in.", "report", RUN, "--to", f"{RUN}/report"):
            return code
    print(NEXT.format(run=files.run_of(RUN)), flush=True)
    return 0


def _typed(gradus: Callable[[list[str]], int], why: str, *words: str) -> int:
    print(f"\n# {why}\n$ {shlex.join(['gradus', *words])}", flush=True)
    sys.argv[1:] = words  # which a run folder keeps
    return gradus(list(words))
