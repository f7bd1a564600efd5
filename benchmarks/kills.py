"""Kill a random process of a run at a random instant, let the run go on, and compare where it ends with a run that nobody disturbed.

    python benchmarks/kills.py --kills 200 --processes 2 [layout.shard=2 ...] [--resume-processes N] [--resume-layout layout.tensor=2 ...]

Instants are uniform over the run's duration: starting, training, evaluating, writing checkpoints (every third step, in the
background) and ending. After a kill the other processes have a second to end by themselves, as a launcher lets them; then the run is
started again with --auto-resume and goes to its end. On one layout weights and optimizer state must be bitwise those of the
undisturbed run, and the loss of every step must stand once in metrics.jsonl; resumed in another layout, to a tolerance.

The workers come from a server that has PyTorch loaded already, 0.3 s a start; `--launcher N` does N more kills, each at the start or
once a step that is drawn has begun, through the real `gradus train --processes`, whose restart then is its own (`--max-restarts 1`).
Ends `200 of 200 ...`, or with exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# small, but with dropout (the generators' state matters), accumulation, evaluations, and a checkpoint every third step
TINY = [
    "model.n_layers=1", "model.d_model=32", "model.n_heads=2", "model.d_ff=64", "model.dropout=0.1", "data.n_train=256", "data.n_valid=32",
    "schedule.warmup_steps=5", "batch.samples=16", "layout.device=cpu", "layout.threads=1", "layout.timeout=60", "train.steps=30",
    "train.checkpoint_every=3", "evaluate.every=10", "evaluate.batch=16", "evaluate.samples=0", "log.every=1",
]  # fmt: skip
# dropout draws other masks in another layout; and the bias of keys has no gradient but rounding, of which AdamW makes whole steps
# where epsilon is smaller than that
OTHER_LAYOUT = ["model.dropout=0", "optimizer.eps=1e-4"]
PRELOAD = [
    "torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.hf_storage", "torch.optim.adamw", "gradus.cli", "gradus.measure.flops", "gradus.train.run", "gradus.train.sharded",
    "gradus.train.resolve", "gradus.parallel.apply", "gradus.parallel.status",
]  # fmt: skip
PATIENCE = 1.0  # seconds that the others have to end by themselves
TOLERANCE = 1e-5  # in another layout; on one it is bitwise
LIMIT = 600.0  # seconds after which a run that nobody disturbs is given up


def _worker(rank: int, n: int, port: int, argv: list[str], log: str) -> None:
    """What `torchrun gradus train ...` runs."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if n > 1:
        place = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({key: str(value) for key, value in place.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    import traceback

    import torch

    from gradus.cli import main
    from gradus.parallel.world import leave

    torch.set_num_threads(1)
    try:
        code = main(argv)
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


class Processes:
    """A run's processes on this machine."""

    def __init__(self, n: int, argv: list[str], log: Path):
        from torch.distributed import TCPStore

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.log = log
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where they meet, as torchrun's agent has it
        arguments = [(rank, n, self.store.port, argv, str(log)) for rank in range(n)]
        self.all = [context.Process(target=_worker, args=a) for a in arguments]  # they start processes themselves
        for process in self.all:
            process.start()

    def wait(self, seconds: float) -> bool:
        """Whether all ended in time."""
        end = time.monotonic() + seconds
        for process in self.all:
            process.join(max(0.0, end - time.monotonic()))
        return not any(process.is_alive() for process in self.all)

    def end(self) -> None:
        for process in self.all:
            if process.is_alive():
                process.kill()
            process.join()

    def must_finish(self) -> None:
        """Raises AssertionError with what was written where it did not go to its end."""
        fine = self.wait(LIMIT)
        self.end()
        codes = [process.exitcode for process in self.all]
        assert fine and not any(codes), f"exit codes {codes}:\n{self.log.read_text()[-4000:]}"


@dataclasses.dataclass
class Setup:
    """What is run, and what it must come to."""

    overrides: list[str]
    processes: int
    resume_overrides: list[str]
    resume_processes: int
    base: Path
    duration: float = 0.0  # s, of the undisturbed run

    @property
    def alike(self) -> bool:
        return not self.resume_overrides and self.resume_processes == self.processes

    def argv(self, folder: Path, *more: str) -> list[str]:
        return ["train", "copy-task", *TINY, *self.overrides, f"log.dir={folder}", *more]

    @property
    def undisturbed(self) -> Path:
        return self.base / "undisturbed"


def final_state(run: Path) -> dict:
    """Name → tensor of the last checkpoint: weights, optimizer state, the generators' state. And nothing half is left beside it."""
    from gradus.train import sharded

    checkpoints = run / "checkpoints"
    left = [p.name for p in checkpoints.iterdir() if p.name.startswith(".")]
    assert not left, f"{left} left in {checkpoints}"
    last = sorted(checkpoints.glob("step-*"))[-1]
    assert last.name == "step-00000030" and (run / "summary.json").exists(), f"{run}: it ends at {last.name}"
    return {name: stored.read() for name, stored in sharded.read(last).items()}


def losses(run: Path) -> dict[int, float]:
    """Step → loss, each step once."""
    from gradus.rows import read_rows

    rows = [(r["step"], r["value"]) for r in read_rows(run / "metrics.jsonl") if r["name"] == "train/loss"]
    assert [step for step, _ in rows] == list(range(1, 31)), f"{run}: the steps in metrics.jsonl are {[step for step, _ in rows]}"
    return dict(rows)


def compare(setup: Setup, run: Path, tolerance: float = TOLERANCE) -> float:
    """The largest difference of a weight or its optimizer's state. Raises AssertionError where the runs did not come to the same.

    In another layout sums are made in another order: values of order 1 may differ by `tolerance`.
    """
    import torch

    found, wanted = final_state(run), final_state(setup.undisturbed)
    ours, theirs = losses(run), losses(setup.undisturbed)
    if setup.alike:
        assert found.keys() == wanted.keys(), f"{run}: {sorted(found.keys() ^ wanted.keys())}"
        other = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        assert not other, f"{run}: {len(other)} of {len(wanted)} tensors differ: {other[:5]}"
        assert ours == theirs, f"{run}: the losses differ"
        return 0.0
    names = [name for name in wanted if not name.startswith("rng.")]
    assert set(names) == {name for name in found if not name.startswith("rng.")}, f"{run}: other tensors"
    worst, name = max((float((found[name].double() - wanted[name].double()).abs().max()), name) for name in names)
    assert worst < tolerance, f"{run}: {name} differs by {worst:.2e}"
    assert all(abs(ours[step] - theirs[step]) < tolerance * abs(theirs[step]) for step in theirs), f"{run}: the losses differ"
    return worst


def one_kill(setup: Setup, rng: random.Random, folder: Path) -> tuple[str, bool] | None:
    """Start, kill, resume, compare. Returns (where the kill hit, whether the others ended by themselves); None where it came too late."""
    from gradus.parallel import status

    log = folder.with_suffix(".log")
    run = Processes(setup.processes, setup.argv(folder), log)
    victim = rng.randrange(setup.processes)
    time.sleep(rng.uniform(0.0, setup.duration))
    record = status.read(folder, victim) if setup.processes > 1 else None
    run.all[victim].kill()
    run.all[victim].join()
    hit = run.all[victim].exitcode == -signal.SIGKILL
    themselves = run.wait(PATIENCE)
    run.end()
    if not hit:
        return None
    where = record.what if record else "training" if (folder / "metrics.jsonl").exists() else "before its first word"
    more = [*setup.resume_overrides, "--auto-resume"]
    Processes(setup.resume_processes, setup.argv(folder, *more), log).must_finish()
    compare(setup, folder)
    shutil.rmtree(folder)
    log.unlink()
    return where, themselves


def one_through_the_launcher(setup: Setup, rng: random.Random, folder: Path) -> tuple[str, bool] | None:
    """The same through `gradus train --processes N --max-restarts 1`, which starts again by itself."""
    from gradus.parallel import status

    log = folder.with_suffix(".log")
    command = [sys.executable, "-m", "gradus", *setup.argv(folder, "--processes", str(setup.processes), "--max-restarts", "1")]
    with log.open("w") as out:
        parent = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        victim, step, record, end = rng.randrange(setup.processes), rng.randrange(-1, 28), None, time.monotonic() + LIMIT
        while (record is None or record.progress[0] < step) and parent.poll() is None and time.monotonic() < end:  # -1: as it starts
            record = status.read(folder, victim)
            time.sleep(0.01)
        if record is None or parent.poll() is not None or status.is_gone(record):
            parent.wait(LIMIT)
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGKILL)
        code, said = parent.wait(LIMIT), log.read_text()
    finally:
        if parent.poll() is None:
            parent.kill()
            parent.wait()
    assert code == 0, f"{folder}: exit code {code}:\n{said[-4000:]}"
    if "SIGKILL" not in said:  # it was ending
        return None
    assert f"error: rank {victim} on " in said, said
    compare(setup, folder)
    shutil.rmtree(folder)
    log.unlink()
    return record.what, True


def kills(
    n: int, processes: int = 2, overrides: list[str] = [], *, resume_processes: int | None = None, resume_overrides: list[str] = [],  # noqa: B006
    launcher: int = 0, seed: int = 0, folder: Path | None = None, say=print,
) -> int:  # fmt: skip
    """Do n kills (and `launcher` more through the real launcher) and return how many runs ended as the undisturbed one.

    `say` is given every line of the account. Folders of runs that ended otherwise are kept, the others removed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    base = Path(folder or tempfile.mkdtemp(prefix="kills-"))
    base.mkdir(parents=True, exist_ok=True)
    setup = Setup(list(overrides), processes, list(resume_overrides), resume_processes or processes, base)
    if not setup.alike:
        setup.overrides += OTHER_LAYOUT
    rng, where, fine, themselves, done = random.Random(seed), collections.Counter(), 0, 0, 0
    for name in ("warm", "undisturbed"):  # the first also starts the server of processes
        start = time.monotonic()
        Processes(processes, setup.argv(base / name), base / f"{name}.log").must_finish()
        setup.duration = time.monotonic() - start
    if setup.alike:
        compare(setup, base / "warm")
    say(f"undisturbed: {setup.duration:.2f} s with {processes} processes {' '.join(overrides)}".rstrip())
    tries = 0
    while done < n + launcher:
        through = one_kill if done < n else one_through_the_launcher
        tries += 1
        assert tries < 20 + 5 * (n + launcher), "nearly every kill comes too late"
        try:
            found = through(setup, rng, base / f"run-{tries:04d}")
        except AssertionError as e:
            done += 1
            say(f"{done}: {e}")
            continue
        if found is None:
            shutil.rmtree(base / f"run-{tries:04d}", ignore_errors=True)
            continue
        done, fine = done + 1, fine + 1
        where[found[0]] += 1
        themselves += found[1]
        say(f"{fine} of {done}", passing=True) if say is print_line else None
    for what, count in where.most_common():
        say(f"  {count:4}  {what}")
    say(f"in {themselves} of {done} the other processes ended by themselves within {PATIENCE:g} s; in the rest they were ended")
    same = "bitwise the weights, optimizer state and losses" if setup.alike else f"the weights, optimizer state and losses (to {TOLERANCE:g})"
    say(f"{fine} of {done} runs ended with {same} of the undisturbed run")
    if fine == done and folder is None:
        shutil.rmtree(base)
    return fine


def print_line(text: str, passing: bool = False) -> None:
    end = "\r" if passing and sys.stdout.isatty() else "\n"
    if not passing or end == "\r" or text.split()[-1].endswith("0"):
        print(text, end=end, flush=True)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--kills", type=int, default=200)
    p.add_argument("--processes", type=int, default=2)
    p.add_argument("--launcher", type=int, default=0, metavar="N", help="N more kills through the real gradus train --processes")
    p.add_argument("--resume-processes", type=int, metavar="N", help="go on with another number of processes")
    p.add_argument("--resume-layout", nargs="*", default=[], metavar="key=value", help="go on in another layout")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--folder", type=Path, help="for the runs (default: a new one, removed when all is well)")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="the layout, e.g. layout.shard=2")
    a = p.parse_intermixed_args()
    found = kills(
        a.kills, a.processes, a.overrides, resume_processes=a.resume_processes, resume_overrides=a.resume_layout, launcher=a.launcher, seed=a.seed,
        folder=a.folder, say=print_line,
    )  # fmt: skip
    return 0 if found == a.kills + a.launcher else 1


if __name__ == "__main__":
    sys.exit(main())
