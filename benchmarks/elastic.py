"""Kill replicas of one run again and again, and compare its curve with those of runs that nobody disturbed.

    python benchmarks/elastic.py --kills 100 [--processes 4] [--steps 200] [--double] [--seed 0] [layout.precision=bf16 layout.shard=2 ...]

Kills come at random instants and three times at each of PLACES, which are named from inside the program; one in four at least is of rank 0,
one in six a SIGSTOP that ends after the others have given the process up. A place that is reached only after a death is armed before another
replica is killed, so the second kill comes while the first victim is still away, as every fifth of the others does. A kill that does
not come to pass is tried again in the next run. A replica that ended is started again 0.2 s later. Every second run writes no checkpoint.
With layout.shard a replica is several of the N processes: where one of them ends, the others are killed, and all are started again.
Every step's loss must stand once in metrics.jsonl, no further from the undisturbed run's than twice what undisturbed runs on 1 and on N
processes differ by; no sample of a step may be taken twice, and after every step all replicas have the same weights.

--predict N kills N times in one run, at instants drawn evenly over the seconds that it takes undisturbed, and compares the time it lost with
what the planner's formula says of stops that other, shorter runs show; --restarts N likewise, of processes that all start again from a
checkpoint. The replicas share this machine's processors, so what a missing one costs is measured too.

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
from collections.abc import Callable
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
BEFORE = {"place": None, "first": False}  # the kill before one at a place that is reached only after a death
NEVER = 45  # steps after which a place is no longer waited for in this run: an evaluation comes every 20
AGAIN = 0.2  # seconds after which a dead replica is started again
HANG = 90.0  # seconds without a step after which a run hangs


def _worker(process: int, n: int, port: int, folder: str, overrides: list[str], double: bool) -> None:
    out = os.open(f"{folder}.{process}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
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
    replica, part = divmod(process, parts_of(overrides))
    own, here = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), {"step": 0, "trainer": None}

    def observe(place: str) -> None:
        """The end of this process, where it is the one that is wanted. What a death costs the others is written down."""
        rank = here["trainer"].parallel.mesh.world.rank if here["trainer"] else None
        lost = here.get("lost")
        if place == "gradients thrown away" or (lost and place == "the verdict read"):
            here["lost"] = place == "gradients thrown away"
            with open(f"{folder}.lost", "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time.time(), "replica": replica, "thrown_away": here["lost"]}) + "\n")
        if os.environ.get("TRACE"):
            with open(f"{folder}.trace", "a", encoding="utf-8") as file:
                file.write(f"{time.time():.3f} {replica}/{part}.{os.getpid()} rank {rank} step {here['step']} {place}\n")
        fate = json.loads(own.get("armed"))
        wanted = fate.get("place") == place and (rank == 0 or not fate["first"])
        if wanted and own.compare_set(f"claim/{fate['id']}", "", str(process)) == str(process).encode():
            record = {"replica": replica, "pid": os.getpid(), "time": time.time(), "step": here["step"], "zero": rank == 0}
            own.set(f"done/{fate['id']}", json.dumps(record))
            os.kill(os.getpid(), fate["signal"])

    class Recorder(Hook):
        """Which samples this process took in each step that counted."""

        def start(self, trainer):
            here["trainer"] = trainer

        @contextlib.contextmanager
        def around_step(self, trainer, step):
            here["step"] = trainer.progress.step + 1
            self.indices = step.indices.tolist()
            yield

        def after_step(self, trainer, taken):
            values = [h.local.detach().double() for h in trainer.parallel.local_parameters]
            weights = [sum(v.sum().item() for v in values), sum(v.square().sum().item() for v in values)]
            with open(f"{folder}.samples", "a", encoding="utf-8") as file:
                row = {"step": taken.step, "replica": replica, "part": part, "time": time.time(), "samples": self.indices, "weights": weights}
                file.write(json.dumps(row) + "\n")

    elastic = "layout.elastic=true" in overrides
    if elastic:
        Quorum.observer = staticmethod(observe)
    elif n > 1:  # they meet in the store as torchrun's workers do in their agent's
        place = {"RANK": process, "WORLD_SIZE": n, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        os.environ.update({key: str(value) for key, value in place.items()})
    world = World(process, n, process, n, "benchmark", "127.0.0.1", port) if n > 1 else World()
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
    """One run of n processes, to its end."""

    def __init__(self, folder: Path, n: int, overrides: list[str], double: bool):
        import torch.distributed as dist

        self.folder, self.n, self.overrides, self.double = folder, n, [*overrides, f"log.dir={folder}"], double
        self.parts = parts_of(overrides)
        self.n_replicas = n // self.parts
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store.set("armed", "{}")
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([*PRELOAD, "gradus.train.elastic"])
        self.processes = {p: self._start(p) for p in range(n)}
        self.again: dict[int, float] = {}
        self.stopped: dict[int, tuple[int, float]] = {}  # replica → (process, when it may go on)
        self.ended, self.epoch = False, 0
        self.deaths: list[tuple[float, str, int]] = []  # second, process, exit code: of those that ended by themselves

    def _start(self, process: int):
        p = self.context.Process(target=_worker, args=(process, self.n, self.store.port, str(self.folder), self.overrides, self.double))
        p.start()
        return p

    def look(self) -> None:
        """What a launcher does."""
        from gradus.parallel.quorum import place_of, tell_gone

        now = time.monotonic()
        if self.store.check(["orphaned"]):
            raise SystemExit(f"{self.folder}: all replicas were killed that had the weights: {self.deaths[-4:]}")
        for r in range(self.n_replicas):
            codes = {p: code for p in self._of(r) if (code := self.processes[p].exitcode) is not None}  # read once: one may end between two looks
            if 0 in codes.values():
                self.ended = True
            elif codes and r not in self.again:
                for p in self._of(r):
                    if p not in codes:
                        self.processes[p].kill()
                        self.processes[p].join()
                    place, code = place_of(p, self.parts), self.processes[p].exitcode
                    name = f"{place}.{self.store.add(f'started/{place}', 0)}"
                    tell_gone(self.store, name, f"ended with exit code {code}")
                    self.deaths += [(time.time(), name, code)] if p in codes else []
                self.again[r] = now + AGAIN
            elif codes and now >= self.again[r]:
                del self.again[r]
                self.processes |= {p: self._start(p) for p in self._of(r)}
        for r, (pid, until) in list(self.stopped.items()):
            if now >= until:
                del self.stopped[r]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _of(self, replica: int) -> range:
        """Its processes."""
        return range(replica * self.parts, (replica + 1) * self.parts)

    def members(self) -> list[int]:
        """The replicas of the newest epoch that live, whole, and have taken a step, by rank."""
        stepped = collections.Counter(m["replica"] for m in self._named() if self.store.check([f"stepped/{m['name']}"]))
        there = [r for r, n in stepped.items() if n == self.parts and r not in self.again and r not in self.stopped]
        return [r for r in there if all(self.processes[p].exitcode is None for p in self._of(r))]

    def _named(self) -> list[dict]:
        epoch = self._epoch()
        return json.loads(self.store.get(f"members/{epoch}")) if epoch else []

    def kill(self, replica: int, how: int, part: int = 0) -> dict:
        """What is known of it."""
        zero, pid = part == 0 and self._named()[0]["replica"] == replica, self.processes[self._of(replica)[part]].pid
        os.kill(pid, how)
        record = {"replica": replica, "pid": pid, "time": time.time(), "step": self.steps(), "zero": zero, "signal": how}
        self.struck(record)
        return record

    def struck(self, record: dict) -> None:
        if record["signal"] == signal.SIGSTOP:
            self.stopped[record["replica"]] = record["pid"], time.monotonic() + 5.0

    def _epoch(self) -> int:
        while self.store.check([f"members/{self.epoch + 1}"]):
            self.epoch += 1
        return self.epoch

    def steps(self) -> int:
        file = Path(f"{self.folder}.samples")
        for line in reversed(file.read_bytes().splitlines()[-8:] if file.exists() else []):
            with contextlib.suppress(ValueError):  # a line that a kill cut short
                return json.loads(line)["step"]
        return 0

    def end(self) -> None:
        for p in self.processes.values():
            p.join(20 if self.ended else 0)
            if p.exitcode is None:
                p.kill()


def said(folder: Path) -> str:
    """The ends of what each process wrote."""
    return "\n".join(f"{file.name}:\n{file.read_text()[-1000:]}" for file in sorted(folder.parent.glob(f"{folder.name}.*.log")))


def value_of(overrides: list[str], key: str, otherwise: int) -> int:
    return int(next((o.partition("=")[2] for o in reversed(overrides) if o.startswith(f"{key}=")), otherwise))


def parts_of(overrides: list[str]) -> int:
    """Processes of a replica."""
    return value_of(overrides, "layout.shard", 1)


def undisturbed(folder: Path, n: int, overrides: list[str], double: bool) -> float:
    """Seconds."""
    run, began = Run(folder, n, overrides, double), time.monotonic()
    while not run.ended:
        run.look()
        if run.again or time.monotonic() - began > 600:
            raise SystemExit(f"{folder}: the undisturbed run failed:\n{said(folder)}")
        time.sleep(0.05)
    run.end()
    return time.monotonic() - began


def disturbed(folder: Path, n: int, overrides: list[str], double: bool, fates: list[dict]) -> list[dict]:
    """Kill as `fates` says while the run lasts; what became of each that came to pass. Those that did not are left in `fates`."""
    run, draw, kills, waits = Run(folder, n, overrides, double), random.Random(len(fates)), [], 0.0
    last, moved, away = 0, time.monotonic(), 0  # away: the last step at which one was
    armed, since, put_back = None, 0, []
    while not run.ended:
        run.look()
        now = time.monotonic()
        if (steps := run.steps()) != last or run.stopped:
            last, moved = steps, now
        if now - moved > HANG:
            raise SystemExit(f"{folder}: no step for {HANG:.0f} s after {kills[-1:]}:\n{said(folder)}")
        if len(there := run.members()) < run.n_replicas:
            away = steps
        if armed is None and fates and steps > 1 and now > waits and (steps > away + 1 or (fates[0]["soon"] and len(there) > 2)):
            fate = fates.pop(0)
            if fate["place"]:
                run.store.set("armed", json.dumps(fate))
                armed, since = fate, steps
            if before := fate["before"]:  # what is armed is reached only after a death
                kills.append(BEFORE | run.kill(there[0] if before == "of rank 0" else draw.choice(there), signal.SIGKILL, draw.randrange(run.parts)))
            elif not armed:
                victim = (there[0], 0) if fate["first"] else (draw.choice(there), draw.randrange(run.parts))
                kills.append(fate | run.kill(victim[0], fate["signal"], victim[1]))
                waits = now + draw.uniform(0.1, 1.0)
        elif armed and run.store.check([f"done/{armed['id']}"]):
            kills.append(armed | json.loads(run.store.get(f"done/{armed['id']}")))
            run.struck(kills[-1])
            armed, waits = None, now + draw.uniform(0.1, 1.0)
            run.store.set("armed", "{}")
        elif armed and steps > since + NEVER and run.store.compare_set(f"claim/{armed['id']}", "", "nobody") == b"nobody":
            put_back.append(armed)
            armed, waits = None, now
            run.store.set("armed", "{}")
        time.sleep(0.02)
    run.end()
    fates += put_back + ([armed] if armed else [])
    crashed = [death for death in run.deaths if death[2] < 0 and death[2] != -signal.SIGKILL]
    assert not crashed, f"{folder}: {crashed}\n{said(folder)}"
    return kills


def while_away(folder: Path, kills: list[dict]) -> int:
    """How many of the kills came while an earlier victim had taken no step again."""
    times = collections.defaultdict(list)
    for rows in taken(folder).values():
        for row in rows:
            times[row["replica"]].append(row["time"])
    return sum(
        any(not any(then["time"] < t < now["time"] for t in times[then["replica"]]) for then in kills[:i]) for i, now in enumerate(kills)
    )  # fmt: skip


def killed_at(folder: Path, n: int, overrides: list[str], instants: list[float]) -> list[dict]:
    """kill -9 a replica at each of these seconds after the first step, while more than two are left."""
    run, draw, kills, began = Run(folder, n, overrides, False), random.Random(0), [], None
    while not run.ended:
        run.look()
        began = began or (time.monotonic() if run.steps() else None)
        if began and len(kills) < len(instants) and time.monotonic() - began > instants[len(kills)] and len(there := run.members()) > 2:
            kills.append(run.kill(draw.choice(there), signal.SIGKILL))
        time.sleep(0.02)
    run.end()
    return kills


def restarted(folder: Path, n: int, overrides: list[str], instants: list[float]) -> list[float]:
    """When a process was killed, and all started again from the last checkpoint: at each of these seconds after the first step."""
    draw, kills, began, ended = random.Random(0), [], None, False
    while not ended:
        run = Run(folder, n, overrides, False)
        while not (ended := all(p.exitcode == 0 for p in run.processes.values())):
            began = began or (time.monotonic() if run.steps() else None)
            if began and len(kills) < len(instants) and time.monotonic() - began > instants[len(kills)]:
                kills.append(time.time())
                run.processes[draw.randrange(n)].kill()
                time.sleep(0.5)  # in which the others would say what they know of it
                break
            time.sleep(0.02)
        run.ended = ended
        run.end()
    return kills


def step_times(folder: Path) -> list[tuple[float, int]]:
    """When a process had taken which step, in the order of time."""
    return sorted((row["time"], step) for step, rows in taken(folder).items() for row in rows)


def seconds_of(folder: Path) -> float:
    """From the first step's end to the last's."""
    times = step_times(folder)
    return times[-1][0] - times[0][0]


def calm(folder: Path, n: int) -> float:
    """Mean seconds of a step of a run, of those that n replicas took, as they did the two before."""
    rows = sorted(taken(folder).items())
    ends, whole = {s: min(row["time"] for row in of) for s, of in rows}, {s for s, of in rows if len({row["replica"] for row in of}) == n}
    return statistics.fmean(ends[s] - ends[s - 1] for s in ends if {s, s - 1, s - 2} <= whole)


def stops_and_away(folder: Path, n: int, kills: list[dict]) -> list[tuple[float, float]]:
    """Of kills that came one by one, the seconds for which the others stood still, as it died and as it came back, and after which the
    victim had taken a step again."""
    rows, step, found = taken(folder), calm(folder, n), list[tuple[float, float]]()
    ends = {s: min(row["time"] for row in of) for s, of in rows.items()}
    for kill in kills:
        back = min(row["time"] for of in rows.values() for row in of if row["replica"] == kill["replica"] and row["time"] > kill["time"])
        near = [ends[s] - ends[s - 1] - step for s in ends if s - 1 in ends and kill["time"] < ends[s] and ends[s - 1] < back]
        found.append((sum(sorted(near)[-2:]), back - kill["time"]))
    return found


def evenly(n: int, seconds: float) -> list[float]:
    """As failures of a constant rate come, where there are n in this time."""
    draw = random.Random(n)
    return sorted(draw.uniform(0.0, seconds) for _ in range(n))


def predict(base: Path, n: int, overrides: list[str], n_kills: int, n_restarts: int) -> None:
    """What plan/failures.py says is lost by so many kills, of what runs without and with few of them show, before and after, beside
    what is."""
    from gradus.plan import failures

    def work_of(name: str, keys: list[str]) -> float:
        undisturbed(base / name, n, keys, False)
        return seconds_of(base / name)

    def compare(what: str, name: str, work: list[float], kills: list, share: Callable[[float], float]) -> None:
        """The kills came within work[0] seconds."""
        whole, mean = seconds_of(base / name), statistics.fmean(work)
        foreseen, lost = work[0] * (1 - share(work[0] / len(kills))), whole - mean
        print(f"  {len(kills)} {what}: {whole:.1f} s, without {' and '.join(f'{w:.1f}' for w in work)} s; {lost:.1f} s lost, by the formula"
              f" {foreseen:.1f} s ({foreseen / lost - 1:+.0%})", flush=True)  # fmt: skip

    steps = value_of(overrides, "train.steps", 0)
    if n_kills:
        work, seen, slower = [work_of("before", overrides)], [], []

        def few(name: str) -> None:
            folder, of_all = base / name, work[0] / steps
            keys = [*overrides, "train.steps=250"]
            seen.extend(stops_and_away(folder, n, killed_at(folder, n, keys, [50 * of_all, 150 * of_all])))
            slower.append(calm(folder, n - 1) / calm(folder, n))

        def share(between: float, own_device: bool = False) -> float:
            stop, away = (statistics.fmean(times) for times in zip(*seen))
            costs = n * (1 - 1 / statistics.fmean(slower))  # of the n-th of the speed that a replica has which has a device to itself
            counted = away if own_device else stop + (away - stop) * max(0.0, costs)
            return failures.elastic(between, counted, stop, n)

        few("few-before")
        kills = killed_at(base / "many", n, overrides, evenly(n_kills, work[0]))
        few("few-after")
        work.append(work_of("after", overrides))
        stops, aways = (", ".join(f"{seconds:.2f}" for seconds in times) for times in zip(*seen))
        print(f"in {len(seen)} kills, one by one, all stand still for {stops} s, and the replica is away for {aways} s, in which a step takes"
              f" {' and '.join(f'{part:.2f}' for part in slower)} times as long")  # fmt: skip
        compare("kills", "many", work, kills, share)
        own, apart = seconds_of(base / "many") - steps * calm(base / "many", n), work[0] * (1 - share(work[0] / len(kills), True))
        print(f"  by that run's own steps with all replicas {own:.1f} s are lost; had each a device to itself, the formula would say {apart:.1f} s")
    if n_restarts:
        plain = [o for o in overrides if not o.startswith(("layout.elastic", "layout.step_timeout", "train.checkpoint_every"))]
        plain, every = [*plain, "train.checkpoint_every=50"], 50
        work, recovery = [work_of("plain-before", plain)], []

        def once(name: str) -> None:
            [killed] = restarted(base / name, n, [*plain, "train.steps=250"], [125 * work[0] / steps])
            recovery.append(min(t for t, _ in step_times(base / name) if t > killed + 0.5) - work[0] / steps - killed)

        def share_of_restarts(between: float) -> float:
            return failures.with_restarts(between, statistics.fmean(recovery), every * statistics.fmean(work) / steps, 0.0)

        once("once-before")
        kills = restarted(base / "often", n, plain, evenly(n_restarts, work[0]))
        once("once-after")
        work.append(work_of("plain-after", plain))
        print(f"with a checkpoint each {every} steps all start again in {', '.join(f'{t:.2f}' for t in recovery)} s")
        compare("restarts of all", "often", work, kills, share_of_restarts)


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


def fates_of(n_kills: int, seed: int) -> list[dict]:
    """Three times each place, as long as there are kills, and the rest at random instants."""
    draw, fates, n = random.Random(seed), [], 0
    drawn = [*PLACES] * 3
    draw.shuffle(drawn)
    for i, place in enumerate([*drawn, *[None] * n_kills]):
        before = place in AFTER_A_DEATH and ("of rank 0" if place == "the log handed over" else "of any")
        n += 2 if before else 1
        if n > n_kills:
            break
        fates.append({
            "id": i, "place": place, "before": before, "soon": not before and i % 5 == 1,
            "first": i % 4 == 0 and place not in ("weights arrive", "the log handed over", "the members named"),
            "signal": signal.SIGSTOP if i % 6 == 3 else signal.SIGKILL,
        })  # fmt: skip
    return fates


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
    by_part = {step: {row["part"]: row["weights"] for row in rows} for step, rows in taken(folder).items()}
    return {step: sum(map(sum, of.values())) for step, of in by_part.items() if len(of) == parts}  # else they were killed before one wrote


def check_samples(folder: Path, undisturbed: Path) -> int:
    """Each step's samples are those of the undisturbed run, none twice, and the weights after it (or each part) the same on every replica; where the
    process that took some was killed before it wrote them down, they are unknown. Returns the steps whose samples are known in whole."""
    right, whole = taken(undisturbed), 0
    for step, rows in taken(folder).items():
        ours = sorted(i for row in rows for i in row["samples"])
        known = sorted(i for row in right[step] for i in row["samples"])
        assert len(set(ours)) == len(ours) and set(ours) <= set(known), f"{folder}: step {step} took {ours} of {known}"
        seen = {(row["part"], *row["weights"]) for row in rows}
        assert len(seen) == len({row["part"] for row in rows}), f"{folder}: step {step}: the replicas' weights differ"
        whole += ours == known
    return whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4, help="three replicas or more: two are killed at a time")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--each", type=int, default=25, help="kills in one run at most")
    parser.add_argument("--double", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--predict", type=int, default=0, help="kills of one run whose lost time is compared with the formula")
    parser.add_argument("--restarts", type=int, default=0, help="kills of a run that starts again from a checkpoint every 50 steps")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    base = args.folder or Path(tempfile.mkdtemp())
    base.mkdir(parents=True, exist_ok=True)
    whole = ["train.clip_norm=null"] if args.double else []  # the norm of several processes has 32 bits
    overrides = [*TINY, *RUN, f"train.steps={args.steps}", *whole, *args.overrides]
    parts = parts_of(overrides)
    if args.processes % parts or args.processes < 3 * parts or (parts > 1 and (args.predict or args.restarts)):
        parser.error("--processes: three replicas or more; --predict and --restarts: of replicas of one process")
    if args.predict or args.restarts:
        predict(base, args.processes, overrides, args.predict, args.restarts)
    if not args.kills:
        return 0
    one = [o for o in overrides if not o.startswith(("layout.elastic", "layout.step_timeout", "layout.shard"))]
    micro = f"layout.micro_batch={value_of(overrides, 'batch.samples', 16) // args.processes}"
    undisturbed(base / "one", 1, [*one, micro], args.double)
    seconds = undisturbed(base / "all", args.processes, overrides, args.double)
    right, other = curve_of(base / "one", args.double), curve_of(base / "all", args.double, parts)
    differ = max(abs(right[s] - other[s]) for s in right)
    limit = 1e-9 if args.double else 2 * differ
    print(f"undisturbed: {seconds:.1f} s; runs on 1 and on {args.processes} processes differ by {differ:.2e} at most")
    fates = fates_of(args.kills, args.seed)
    kills, bad, number, lost, second = [], 0, 0, [], 0
    while fates and number < 40:
        folder, number = base / f"run-{number}", number + 1
        more = [] if number % 2 else ["train.checkpoint_every=10"]
        mine = [fate for fate in fates if more or fate["place"] != "the writing of a checkpoint"][: args.each]
        others = [fate for fate in fates if fate not in mine]
        began = time.monotonic()
        done = disturbed(folder, args.processes, [*overrides, *more], args.double, mine)
        fates = mine + others
        kills += done
        lost += costs(folder, done)
        second += (again := while_away(folder, done))
        losses(folder)
        curve = curve_of(folder, args.double, parts)
        far = max(abs(curve[s] - other[s]) for s in other if s in curve)
        whole = check_samples(folder, base / "all")
        bad += far > limit
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        stalls = [row["seconds"] for row in rows if row["name"] == "elastic/epoch"]
        print(f"{folder.name}: {len(done)} kills, {again} while a victim was away, {len(stalls)} new epochs; {time.monotonic() - began:.0f} s; the"
              f" curve differs by {far:.2e} at most{'' if far <= limit else '  TOO FAR'}; samples known of {whole} of {len(curve)} steps; regrouping took"
              f" {statistics.median(stalls or [0]):.2f} s (longest {max(stalls or [0]):.2f})", flush=True)  # fmt: skip
        if not args.folder:
            shutil.rmtree(folder)
    by_place = collections.Counter(str(kill["place"] or "at a random instant") for kill in kills)
    for place in ("at a random instant", *PLACES):
        print(f"  {by_place[place]:4} {place}")
    zero = sum(kill["zero"] for kill in kills)
    stops = sum(kill["signal"] == signal.SIGSTOP for kill in kills)
    if lost:
        seen, went_on = (statistics.median(times) for times in zip(*lost))
        print(f"a kill -9 is noticed after {seen:.2f} s and costs {went_on:.2f} s until the next step is done (medians of {len(lost)})")
    print(f"{len(kills)} kills in {number} runs: {stops} by SIGSTOP, {zero} of rank 0, {second} while an earlier victim was away; each place"
          f" {min(by_place[place] for place in PLACES)} times at least; {bad} curves too far; {len(fates)} places not reached")  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
