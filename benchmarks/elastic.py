"""Kill replicas of one run again and again, and compare its curve with those of runs that nobody disturbed.

    python benchmarks/elastic.py --kills 100 [--processes 4] [--steps 200] [--double] [--seed 0] [layout.precision=bf16 layout.shard=2 ...]

With layout.shard a replica is several processes: where one of them ends, the others are killed, and all are started again.
Kills come at random instants and at each of PLACES, which are named from inside the program; one in four is of rank 0, every fifth comes
while the one before has not come back, one in ten is a SIGSTOP that ends after the others have given the process up. A replica
that ended is started again 0.2 s later. Every second run writes no checkpoint. Every step's loss must stand once in metrics.jsonl, no further from the undisturbed run's than twice what undisturbed runs on 1 and on N processes differ by; no sample of a
step may be taken twice, and after every step all replicas have the same weights.

The workers come from a server that has PyTorch loaded already, 0.3 s a start. Prints what came of it, and ends with exit code 1 where
one of this does not hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kills import PRELOAD, TINY

PLACES = (
    "reading data", "the all-reduce of counts", "the forward and backward passes with their collectives", "the gradient norm",
    "before the vote", "voted", "before the verdict", "after the verdict", "the verdict read", "the evaluation",
    "the gathering of the best weights", "the writing of a checkpoint", "gradients thrown away", "the meeting of the replicas",
    "asked to be a member", "the members named", "before the first collective", "weights are sent", "weights arrive", "the log handed over",
)  # fmt: skip
AFTER_A_DEATH = set(PLACES[PLACES.index("gradients thrown away") :])  # places that are reached only then
RUN = [
    "model.dropout=0", "optimizer.eps=1e-4", "layout.elastic=true", "layout.step_timeout=3", "layout.timeout=60", "evaluate.every=20",
    "train.checkpoint_every=null", "optimizer.lr=1e-4",  # at ten times the rate this model makes 3e-4 of a rounding in 250 steps
]  # fmt: skip
AGAIN = 0.2  # seconds after which a dead replica is started again
HANG = 90.0  # seconds without a step after which a run hangs


def _worker(replica: int, n: int, port: int, folder: str, overrides: list[str], double: bool) -> None:
    out = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    import torch
    import torch.distributed as dist

    from gradus.errors import UserError
    from gradus.parallel.quorum import Quorum
    from gradus.parallel.world import World, leave
    from gradus.train import run
    from gradus.train.loop import Hook
    from gradus.train.resolve import RunContext

    torch.set_num_threads(1)
    if double:
        torch.set_default_dtype(torch.float64)
    own, here = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), {"step": 0, "rank": None}

    def observe(place: str) -> None:
        """The end of this process, where it is the one that is wanted. What a death costs the others is written down."""
        lost = here.get("lost")
        if place == "gradients thrown away" or (lost and place == "the verdict read"):
            here["lost"] = place == "gradients thrown away"
            with open(f"{folder}.lost", "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "replica": replica, "thrown_away": here["lost"]}) + "\n")
        if os.environ.get("TRACE"):
            with open(f"{folder}.trace", "a", encoding="utf-8") as file:
                file.write(f"{time.time():.3f} {replica}.{os.getpid()} rank {here['rank']} step {here['step']} {place}\n")
        fate = json.loads(own.get("armed"))
        wanted = fate.get("place") == place and fate["first"] in (None, here["rank"] == 0)
        if wanted and own.compare_set(f"claim/{fate['id']}", "", str(replica)) == str(replica).encode():
            own.set(f"done/{fate['id']}", json.dumps({"replica": replica, "pid": os.getpid(), "time": time.time(), "step": here["step"]}))
            os.kill(os.getpid(), fate["signal"])

    class Recorder(Hook):
        """Which samples this process took in each step that counted."""

        def start(self, trainer):
            here["rank"] = trainer.parallel.mesh.world.rank

        @contextlib.contextmanager
        def around_step(self, trainer, step):
            here.update(step=trainer.progress.step + 1, rank=trainer.parallel.mesh.world.rank)
            self.indices = step.indices.tolist()
            yield

        def after_step(self, trainer, taken):
            values = [h.local.detach().double() for h in trainer.parallel.local_parameters]
            weights = [sum(v.sum().item() for v in values), sum(v.square().sum().item() for v in values)]
            with open(f"{folder}.samples", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": taken.step, "replica": replica, "pid": os.getpid(), "samples": self.indices, "weights": weights}) + "\n")

    elastic = "layout.elastic=true" in overrides
    if elastic:
        Quorum.observer = staticmethod(observe)
    elif n > 1:  # they meet in the store as torchrun's workers do in their agent's
        place = {"RANK": replica, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update({key: str(value) for key, value in place.items()})
    world = World(replica, n, replica, n, "benchmark", "127.0.0.1", port) if n > 1 else World()
    code = 1
    try:
        run.start("copy-task", overrides, RunContext(None, world), hooks=[Recorder()], auto_resume=not elastic)
        code = 0
    except UserError as e:
        print(f"replica {replica}: error: {e}", flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
    leave(code)


class Run:
    """One run of n replicas, to its end."""

    def __init__(self, folder: Path, n: int, overrides: list[str], double: bool):
        import torch.distributed as dist

        self.folder, self.n, self.overrides, self.double = folder, n, [*overrides, f"log.dir={folder}"], double
        self.parts = parts_of(overrides)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set("armed", "{}")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, "gradus.train.elastic"])
        self.starts = dict.fromkeys(range(n), 0)
        self.processes = {r: self._start(r) for r in range(n)}
        self.again: dict[int, float] = {}
        self.stopped: dict[int, tuple[int, float]] = {}  # replica → (process, when it may go on)
        self.ended, self.epoch = False, 0
        self.deaths: list[tuple[float, int, int]] = []  # second, process, exit code

    def _start(self, replica: int):
        self.starts[replica] += 1
        p = self.context.Process(target=_worker, args=(replica, self.n, self.store.port, str(self.folder), self.overrides, self.double))
        p.start()
        return p

    def look(self) -> None:
        """What a launcher does."""
        from gradus.parallel.quorum import place_of, tell_gone

        now = time.monotonic()
        for r, p in self.processes.items():
            if p.exitcode == 0:
                self.ended = True
            elif p.exitcode is not None and r not in self.again:
                self.deaths.append((round(time.time() % 1000, 2), r, p.exitcode))
                place = place_of(r, self.parts)
                tell_gone(self.store, f"{place}.{self.store.add(f'started/{place}', 0)}", f"ended with exit code {p.exitcode}")
                self.again[r] = now + AGAIN
                first = r // self.parts * self.parts
                for other in range(first, first + self.parts if not self.ended else first):
                    self.processes[other].kill()
                    self.processes[other].join()
            elif p.exitcode is not None and now >= self.again[r]:
                del self.again[r]
                self.processes[r] = self._start(r)
        for r, (pid, until) in list(self.stopped.items()):
            if now >= until:
                del self.stopped[r]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def members(self) -> list[dict]:
        """Of the newest epoch."""
        epoch = self._epoch()
        return json.loads(self.store.get(f"members/{epoch}")) if epoch else []

    def whole(self) -> int:
        """How many replicas of the newest epoch had the weights when it was formed, and have all their processes."""
        lives = collections.Counter()
        for member in self.members():
            rank = member["replica"] * self.parts + member["part"]
            same = member["name"].endswith(f".{self.starts[rank]}") and member["step"] >= 0 and rank not in self.stopped
            lives[member["replica"]] += same and self.processes[rank].exitcode is None
        return sum(n == self.parts for n in lives.values())

    def may_lose(self, soon: bool) -> bool:
        """Whether one more may die now. soon: although not all are there; of split replicas another must be whole."""
        if soon and (self.parts == 1 or self.whole() > 1):
            return True
        return len(self.members()) == self.n and not self.again

    def _epoch(self) -> int:
        while self.store.check([f"members/{self.epoch + 1}"]):
            self.epoch += 1
        return self.epoch

    def steps(self) -> int:
        file = Path(f"{self.folder}.samples")
        for line in reversed(file.read_text().splitlines() if file.exists() else []):
            with contextlib.suppress(ValueError):  # a line that a kill cut short
                return json.loads(line)["step"]
        return 0

    def end(self) -> None:
        for p in self.processes.values():
            p.join(20 if self.ended else 0)
            if p.exitcode is None:
                p.kill()


def parts_of(overrides: list[str]) -> int:
    """Processes of a replica."""
    return int(next((o.partition("=")[2] for o in overrides if o.startswith("layout.shard=")), 1))


def undisturbed(folder: Path, n: int, overrides: list[str], double: bool) -> float:
    """Seconds."""
    run, began = Run(folder, n, overrides, double), time.monotonic()
    while not run.ended:
        run.look()
        if run.again or time.monotonic() - began > 600:
            raise SystemExit(f"{folder}: the undisturbed run failed:\n{Path(f'{folder}.log').read_text()[-3000:]}")
        time.sleep(0.05)
    run.end()
    return time.monotonic() - began


def disturbed(folder: Path, n: int, overrides: list[str], double: bool, fates: list[dict]) -> list[dict]:
    """Kill as `fates` says while the run lasts; what became of each that came to pass."""
    run, draw, kills, waits = Run(folder, n, overrides, double), random.Random(len(fates)), [], 0.0
    last, moved = 0, time.monotonic()
    armed: dict | None = None
    while not run.ended:
        run.look()
        now = time.monotonic()
        if (steps := run.steps()) != last or run.stopped:
            last, moved = steps, now
        if now - moved > HANG:
            raise SystemExit(f"{folder}: no step for {HANG:.0f} s after {kills[-1:]} (deaths: {run.deaths[-12:]}):\n{Path(f'{folder}.log').read_text()[-3000:]}")
        if armed is None and fates and steps > 1 and now > waits and run.may_lose(fates[0]["soon"]):
            armed = fates.pop(0)
            if armed["place"] is None:
                victim = 0 if armed["first"] else draw.randrange(n)
                process = run.processes[_rank_zero(run) if armed["first"] else victim]
                with contextlib.suppress(ProcessLookupError, AttributeError):
                    os.kill(process.pid, armed["signal"])
                    kills.append(armed | {"time": time.time(), "replica": victim, "step": steps})
                    if armed["signal"] == signal.SIGSTOP:
                        run.stopped[victim] = process.pid, now + 5.0
                armed, waits = None, now + draw.uniform(0.1, 1.0)
            else:
                run.store.set("armed", json.dumps(armed))
        elif armed is not None and run.store.check([f"done/{armed['id']}"]):
            record = json.loads(run.store.get(f"done/{armed['id']}"))
            kills.append(armed | record)
            if armed["signal"] == signal.SIGSTOP:
                run.stopped[record["replica"]] = record["pid"], now + 5.0
            armed, waits = None, now + draw.uniform(0.1, 1.0)
            run.store.set("armed", "{}")
        time.sleep(0.02)
    run.end()
    return kills


def restarted(folder: Path, n: int, overrides: list[str], n_kills: int, least: float) -> float:
    """Seconds of a run whose processes all start again from the last checkpoint, so many times: once at least `least` seconds, and at
    most twice as many, have passed."""
    draw, began = random.Random(n_kills), time.monotonic()
    for kill in range(n_kills + 1):
        run, until = Run(folder, n, overrides, False), time.monotonic() + draw.uniform(least, 2 * least)
        while not run.ended and (kill == n_kills or time.monotonic() < until):
            run.ended = all(p.exitcode == 0 for p in run.processes.values())
            time.sleep(0.02)
        if not run.ended:
            run.processes[draw.randrange(n)].kill()
            time.sleep(0.5)  # in which the others would say what they know of it
        run.end()
    return time.monotonic() - began


def costs(folder: Path, kills: list[dict]) -> list[tuple[float, float]]:
    """Of each kill that none followed before the others went on: seconds until the first of them threw its gradients away, and until
    the first had taken a step again."""
    file, found = Path(f"{folder}.lost"), []
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    for kill, then in zip(kills, [*kills[1:], None]):
        after = [row for row in rows if row["time"] > kill["time"]]
        thrown = next((row["time"] for row in after if row["thrown_away"]), None)
        went_on = next((row["time"] for row in after if not row["thrown_away"] and thrown and row["time"] > thrown), None)
        if kill["signal"] == signal.SIGKILL and went_on and (then is None or then["time"] > went_on):
            found.append((thrown - kill["time"], went_on - kill["time"]))
    return found


def _rank_zero(run: Run) -> int:
    members = run.members()
    return members[0]["replica"] * run.parts if members else 0


def fates_of(n_kills: int, seed: int) -> list[dict]:
    draw, fates = random.Random(seed), []
    places = [place for place in PLACES for _ in range(3)] + [None] * max(0, n_kills - 3 * len(PLACES))
    draw.shuffle(places)
    for i, place in enumerate(places[:n_kills]):
        soon = i % 5 == 1 or (place in AFTER_A_DEATH)
        stop = i % 10 == 7 and place not in AFTER_A_DEATH
        fates.append({"id": i, "place": place, "first": True if i % 4 == 0 and place not in ("weights arrive",) else None,
                      "signal": signal.SIGSTOP if stop else signal.SIGKILL, "soon": soon})  # fmt: skip
    # what is reached only after a death comes after one
    return [kill for fate in fates for kill in ([{**fate, "id": fate["id"] + 10_000, "place": None, "signal": signal.SIGKILL, "first": None,
            "soon": False}, fate] if fate["place"] in AFTER_A_DEATH else [fate])]  # fmt: skip


def losses(folder: Path) -> dict[int, float]:
    """By step; AssertionError where one stands twice, or is missing."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["value"]) for row in rows if row["name"] == "train/loss"]
    assert [step for step, _ in found] == list(range(1, len(found) + 1)), f"{folder}: the steps are {[step for step, _ in found]}"
    return dict(found)


def taken(folder: Path) -> dict[int, list[dict]]:
    """Step → what each process wrote down of it."""
    steps = collections.defaultdict(list)
    for line in Path(f"{folder}.samples").read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that a kill cut short
            row = json.loads(line)
            steps[row["step"]].append(row)
    return steps


def curve_of(folder: Path, double: bool, parts: int = 1) -> dict[int, float]:
    """Loss by step, which is a number of 32 bits; in double the sum of the weights and of their squares after it."""
    if not double:
        return losses(folder)
    by_part = {step: {row["replica"] % parts: row["weights"] for row in rows} for step, rows in taken(folder).items()}
    return {step: sum(map(sum, of.values())) for step, of in by_part.items() if len(of) == parts}  # else a kill came before one wrote


def check_samples(folder: Path, undisturbed: Path, parts: int = 1) -> int:
    """Each step's samples are those of the undisturbed run, none twice, and the weights after it the same on every replica; where the
    process that took some was killed before it wrote them down, they are unknown. Returns the steps whose samples are known in whole."""
    right, whole = taken(undisturbed), 0
    for step, rows in taken(folder).items():
        ours = sorted(i for row in rows for i in row["samples"])
        known = sorted(i for row in right[step] for i in row["samples"])
        assert len(set(ours)) == len(ours) and set(ours) <= set(known), f"{folder}: step {step} took {ours} of {known}"
        there = {row["replica"] % parts for row in rows}
        assert len({(row["replica"] % parts, *row["weights"]) for row in rows}) == len(there), f"{folder}: step {step}: the replicas' weights differ"
        whole += ours == known
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--each", type=int, default=25, help="kills in one run at most")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restarts", type=int, default=0, help="kills of a run that starts again from a checkpoint every 50 steps, beside")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base = args.folder or Path(tempfile.mkdtemp())
    base.mkdir(parents=True, exist_ok=True)
    whole = ["train.clip_norm=null"] if args.double else []  # the norm of several processes has 32 bits
    overrides = [*TINY, *RUN, f"train.steps={args.steps}", *whole, *args.overrides]
    one = [o for o in overrides if not o.startswith(("layout.elastic", "layout.step_timeout", "layout.shard"))]
    parts = parts_of(overrides)
    micro = f"layout.micro_batch={16 // args.processes}"
    undisturbed(base / "one", 1, [*one, micro], args.double)
    seconds = undisturbed(base / "all", args.processes, overrides, args.double)
    right, other = curve_of(base / "one", args.double), curve_of(base / "all", args.double, parts)
    differ = max(abs(right[s] - other[s]) for s in right)
    limit = 1e-9 if args.double else 2 * differ
    print(f"undisturbed: {seconds:.1f} s; runs on 1 and on {args.processes} processes differ by {differ:.2e} at most")
    fates, kills, bad, number, lost = fates_of(args.kills, args.seed), [], 0, 0, []
    while fates and number < 40:
        folder, number = base / f"run-{number}", number + 1
        mine = fates[: args.each]
        more = [] if number % 2 else ["train.checkpoint_every=10"]
        began = time.monotonic()
        left = list(mine)
        done = disturbed(folder, args.processes, [*overrides, *more], args.double, left)
        fates = [*left, *fates[len(mine) :]]
        kills += done
        lost += costs(folder, done)
        losses(folder)
        curve = curve_of(folder, args.double, parts)
        far = max(abs(curve[s] - other[s]) for s in other if s in curve)
        whole = check_samples(folder, base / "all", parts)
        bad += far > limit
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        stalls = [row["seconds"] for row in rows if row["name"] == "elastic/epoch"]
        print(f"{folder.name}: {len(done)} kills, {len(stalls)} new epochs; {time.monotonic() - began:.0f} s; the curve differs by {far:.2e} at most"
              f"{'' if far <= limit else '  TOO FAR'}; samples known of {whole} of {len(curve)} steps; regrouping took {statistics.median(stalls or [0]):.2f} s"
              f" (longest {max(stalls or [0]):.2f})", flush=True)  # fmt: skip
        if not args.folder:
            shutil.rmtree(folder)
    by_place = collections.Counter(str(kill["place"] or "at a random instant") for kill in kills)
    for place in ("at a random instant", *PLACES):
        print(f"  {by_place[place]:4} {place}")
    zero = sum(bool(kill["first"]) for kill in kills)
    stops = sum(kill["signal"] == signal.SIGSTOP for kill in kills)
    if lost:
        seen, went_on = (statistics.median(times) for times in zip(*lost))
        print(f"a kill -9 is noticed after {seen:.2f} s and costs {went_on:.2f} s until the next step is done (medians of {len(lost)})")
    if args.restarts:
        plain = [o for o in one if not o.startswith("train.checkpoint_every")] + ["train.checkpoint_every=50"]
        alone = undisturbed(base / "plain", args.processes, plain, args.double)
        total = restarted(base / "restarts", args.processes, plain, args.restarts, alone / 2)
        print(f"a restart of all from a checkpoint every 50 steps costs {(total - alone) / args.restarts:.2f} s (mean of {args.restarts})")
    print(f"{len(kills)} kills ({stops} by SIGSTOP, {zero} of rank 0) in {number} runs; {bad} curves too far")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
