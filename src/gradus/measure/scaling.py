"""Is it worth more processes? One recipe trained on 1, 2, 4, ... of them: speed, efficiency, and where the rest of it goes, by name.

Strong scaling keeps the global batch; weak scaling keeps the batch of a process. Every number of processes is started anew in every
round, and runs the very trainer of `gradus train`.

A step's time is told by five names that add up to it, from the clocks of every process's main thread, in the timed steps themselves:

- computing: on a processor (data excepted), the copies that collectives need included;
- communication: blocked, of the process that is blocked least in this step: it comes last, so nobody keeps it waiting;
- waiting: blocked longer than that: for a process that comes later. Where a step has several meeting points at which different
  processes come last, some of this is told as communication;
- data: making the batch, or waiting for it;
- other: ready to run while other programs had the processor (where the system tells it: Linux), and what one process alone is blocked.

Collectives by name are profiled in steps of their own, after the timed ones: from when gloo's own threads begin with one until it is
done, the wait for the last process to call it included. A part of it, or all, is hidden behind computing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus import __version__, limits, models
from gradus import recipe as recipes
from gradus.errors import UserError, need
from gradus.measure.collectives import show_bytes
from gradus.measure.profile import endless
from gradus.parallel import check, status
from gradus.parallel import world as worlds
from gradus.parallel.mesh import AXES, DATA, sizes
from gradus.parallel.replicate import POWERSGD_START
from gradus.parallel.traffic import collective
from gradus.parallel.world import World
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row, RowFile
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.machine import cpu_name
from gradus.train.metrics import COUNTED_STEP, TrafficCount
from gradus.train.precision import enough_devices, pick_device
from gradus.train.run import train as train_session
from gradus.train.session import open_session

PARTS = ("computing", "communication", "waiting", "data", "other")
PROFILED = 3  # steps whose collectives are timed by name
GRACE = 5.0  # seconds in which the other workers can say what they know of a failure


# ------------------------------------------------------------ what is measured


def recipe_for(recipe: Recipe, n: int, *, weak: bool = False, scale_lr: bool = False) -> Recipe:
    """The recipe as n processes train it: the same (strong), or with the recipe's batch for every process that sees samples of its own.

    Weak: what is counted in steps is divided by their number k, so that a run sees as many samples; the learning rate stays, or is
    multiplied by k with `scale_lr` (the linear scaling rule: Goyal et al. 2017, section 2.1). What a layout cannot do with one replica
    is left out for one. On a CPU every process has `layout.threads` threads, 1 where that is not said.
    """
    layout, changes = recipe.layout, {}
    if layout.threads is None and pick_device(layout.device).type == "cpu":
        changes["threads"] = 1
    arranged = sizes(layout, n)
    if arranged["replicate"] == 1:
        changes |= without_replicas(layout)
    recipe = recipe.model_copy(update={"layout": layout.model_copy(update=changes)})
    k = math.prod(arranged[axis] for axis in DATA)
    if not weak or k == 1:
        return recipe

    def fewer(steps: int | None) -> int | None:
        return steps and max(1, round(steps / k))

    r, noam = recipe, recipe.schedule.name == "noam"
    rate = r.optimizer.lr * (k if scale_lr else 1)
    if noam:  # its peak is proportional to warmup_steps^-0.5: without this, fewer of them would raise it
        rate /= math.sqrt(k)
    return r.model_copy(
        update={
            "batch": r.batch.model_copy(update={"samples": r.batch.samples and r.batch.samples * k, "tokens": r.batch.tokens and r.batch.tokens * k}),
            "optimizer": r.optimizer.model_copy(update={"lr": rate}),
            "train": r.train.model_copy(update={"steps": fewer(r.train.steps), "checkpoint_every": fewer(r.train.checkpoint_every)}),
            "schedule": r.schedule.model_copy(update={"warmup_steps": fewer(r.schedule.warmup_steps), "end_step": fewer(r.schedule.end_step)}),
            "evaluate": r.evaluate.model_copy(update={"every": fewer(r.evaluate.every)}),
        }
    )


def without_replicas(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that have nothing to do where there is one replica, as they are then."""
    plain = {"replicate": "auto", "shard_optimizer": False, "local_sgd": None, "diloco": None}
    keeps = ("auto", "none", "data_parallel")  # the last is one process by itself
    return {k: v for k, v in plain.items() if getattr(layout, k) != v and not (k == "replicate" and layout.replicate in keeps)}


@dataclasses.dataclass
class Timed:
    """What one process found in one round."""

    elapsed: float  # seconds of all timed steps
    spent: np.ndarray  # (steps, 4) seconds of each step: data, computing, ready but not running, blocked
    samples: int  # of the global batches
    loss: float  # of the last timed step
    memory: int  # bytes at the highest
    sent: dict[str, tuple[float, float]] | None  # collective → calls and bytes that this process sends, a step
    collectives: dict[str, tuple[float, float]] | None  # the same → calls and seconds, a step
    facts: dict[str, Any]


def time_steps(recipe: Recipe, warm_up: int, steps: int, profiled: bool, here: World) -> Timed:
    """Steps of the recipe's training, in one of `here.size` processes that all call this. Collective. Writes nothing."""
    session = open_session(recipe, None, here)
    parallel, traffic = session.lay_out(session.build()), TrafficCount()
    trainer = Trainer(session, parallel, Path(os.devnull), [traffic])
    every = meeting(recipe.layout)
    source = endless(trainer)
    try:
        for _ in range(warm_up):
            trainer.take(next(source))
        parallel.all_reduce([0])  # all begin together
        trainer.clock.synchronise()
        before, marks = trainer.progress.samples, [_now()]
        for _ in range(steps):
            step = next(source)
            marks.append(_now())
            loss = trainer.take(step).loss
            marks.append(_now())
        trainer.clock.synchronise()
        elapsed = time.perf_counter() - marks[0][0]
        samples, memory, counted = trainer.progress.samples - before, peak_memory(session.device), traffic.counted
        profiled = profiled and parallel.several and session.device.type == "cpu"
        collectives = profile_collectives(trainer, source, whole(PROFILED, every)) if profiled else None
    finally:
        trainer.loader.close()
    wall, processor, ready = np.moveaxis(np.diff(np.array(marks), axis=0).reshape(-1, 2, 3), 2, 0)  # each (steps, 2: data, the rest)
    blocked = np.maximum(0.0, wall - processor - ready)  # the clocks differ by microseconds
    spent = np.stack([wall[:, 0], processor[:, 1], ready[:, 1], blocked[:, 1]], axis=1)
    facts = {
        "device": str(session.device.type),
        "precision": recipe.layout.precision,
        "threads": torch.get_num_threads(),
        "parameters": models.count(session.recipe.model)["total"],
        "arranged": session.mesh.describe(),
        "loss_unit": session.task.loss_unit,
    }
    sent = {name: (c.calls / every, c.sent / every) for name, c in counted.found.items()} if counted else None
    return Timed(elapsed, spent, samples, float(loss), memory, sent, collectives, facts)


def meeting(layout: Layout) -> int:
    """Steps from one meeting of workers to the next."""
    apart = layout.local_sgd or layout.diloco
    return apart.every if apart else 1


def whole(steps: int, every: int) -> int:
    """At least `steps`, and a multiple of `every`."""
    return -(-steps // every) * every


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock; of this thread on a processor; of this thread ready to run while others were there."""
    ready = 0.0
    with contextlib.suppress(OSError):  # Linux: nanoseconds on a processor, and on its run queue
        ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), ready


def profile_collectives(trainer: Trainer, source: Iterator[Any], steps: int) -> dict[str, tuple[float, float]]:
    """Collective → (calls, seconds from call to end) a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            trainer.take(next(source))
    return by_collective([(e.name, e.time_range.start, e.time_range.end) for e in found.events()], steps)


def by_collective(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """(calls, seconds) a step from a profiler's events (name, start and end in µs).

    A collective goes by the name that it was called by: gloo does a reduce_scatter by an all_reduce. What was called first is done
    first, so the calls' order tells which is which.
    """
    called = [name.removeprefix("c10d::") for name, *_ in sorted(events, key=lambda e: e[1]) if name.startswith("c10d::")]
    scattered = [name for name in map(collective, called) if name in ("all_reduce", "reduce_scatter")]
    done = sorted((start, end, name.removeprefix("gloo:")) for name, start, end in events if name.startswith("gloo:"))
    if len(scattered) == sum(name == "all_reduce" for *_, name in done):
        order = iter(scattered)
        done = [(start, end, next(order) if name == "all_reduce" else name) for start, end, name in done]
    times: dict[str, list[float]] = {}
    for start, end, name in done:
        times.setdefault(name, []).append((end - start) / 1e6)
    return {name: (len(t) / steps, sum(t) / steps) for name, t in sorted(times.items())}


def train_to_the_end(recipe: Recipe, here: World) -> dict[str, Any]:
    """The whole training with its evaluations, and its summary."""
    return train_session(recipe, world=here).summary


# ------------------------------------------------------------ workers


def start(n: int, function: Callable, *args: Any, log: Path) -> list[Any]:
    """What `function(*args, here)` returned in each of n processes that can meet, in the order of their ranks.

    What they print goes to `log`. They end when this returns or raises, or when this process ends, however it ended. Raises UserError
    for a mistake that one of them found, or when one was killed.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["gradus.measure.scaling"])  # torch is imported once, not once a process
    port = worlds.free_port()
    processes, pipes = [], {}
    try:
        for rank in range(n):
            mine, theirs = context.Pipe(duplex=False)
            here = World(rank, n, rank, n, "gradus", "127.0.0.1", port) if n > 1 else World()
            process = context.Process(target=_work, args=(theirs, str(log), here, function, args))
            process.start()
            processes.append(process)
            theirs.close()
            pipes[mine] = rank
        answers = _gather(pipes, processes, log)
        for process in processes:
            process.join(GRACE)
        return answers
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _work(pipe: connection.Connection, log: str, here: World, function: Callable, args: tuple) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends all
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  (as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    try:
        answer = ("done", function(*args, here))
    except UserError as e:
        answer = ("mistake", str(e))
    except torch.OutOfMemoryError as e:
        text = str(e).splitlines()[0]
        answer = ("mistake", f"rank {here.rank} of {here.size}: the memory is full ({text}). Set a smaller layout.micro_batch, or more processes.")
    except BaseException:
        answer = ("failed", traceback.format_exc())
    pipe.send(answer)
    worlds.leave(0 if answer[0] == "done" else 1)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _gather(pipes: dict[connection.Connection, int], processes: list, log: Path) -> list[Any]:
    answers, failures, end = {}, {}, None
    while pipes:
        ready = connection.wait(list(pipes), None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.pop(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                processes[rank].join(1.0)
                kind, value = "died", processes[rank].exitcode
            if kind == "done":
                answers[rank] = value
            else:
                failures[rank] = (kind, value)
                end = end or time.monotonic() + GRACE
    if not failures:
        return [answers[rank] for rank in range(len(processes))]
    n = len(processes)
    for _, (kind, value) in sorted(failures.items()):
        if kind == "mistake" and not status.speaks_of_peers(value):
            raise UserError(value)
    for rank, (kind, value) in sorted(failures.items()):
        if kind == "died" and value != status.LOST:
            how = f"killed by {signal.Signals(-value).name}" if value and value < 0 else f"ended with exit code {value}"
            raise UserError(f"rank {rank} of {n} was {how}. What the processes wrote is in {log}.")
    told = {rank: str(value) for rank, (_, value) in failures.items()}
    rank = min(told, key=lambda r: (status.speaks_of_peers(told[r]), r))  # who only lost another is no cause
    raise RuntimeError(f"rank {rank} of {n} ({log} has more):\n{told[rank]}")


# ------------------------------------------------------------ from times to figures


@dataclasses.dataclass
class Round:
    """One round of n processes."""

    ranks: list[Timed]

    @property
    def speed(self) -> float:
        """Samples/s."""
        return self.ranks[0].samples / max(t.elapsed for t in self.ranks)

    @property
    def step(self) -> float:
        """Seconds."""
        return max(t.elapsed for t in self.ranks) / len(self.ranks[0].spent)

    def parts(self) -> dict[str, float] | None:
        """Seconds of the mean step by PARTS: means over the processes, which add up to the step. None on a GPU, which works by itself
        while the thread that the clocks see goes on."""
        if self.ranks[0].facts["device"] != "cpu":
            return None
        spent = np.stack([t.spent for t in self.ranks])  # (processes, steps, 4)
        data, computing, ready, _ = spent.mean(axis=(0, 1)).tolist()
        if len(self.ranks) == 1:
            return dict(zip(PARTS, (computing, 0.0, 0.0, data, self.step - computing - data)))
        communication = float(spent[:, :, 3].min(axis=0).mean())
        waiting = self.step - computing - communication - data - ready
        return dict(zip(PARTS, (computing, communication, waiting, data, ready)))


@dataclasses.dataclass
class Found:
    """All of one number of processes."""

    n: int
    recipe: Recipe
    rounds: list[Round] = dataclasses.field(default_factory=list)
    summary: dict[str, Any] | None = None  # of the training to its end

    @property
    def middle(self) -> Round:
        """The round of median speed (of an even number of rounds, the slower of the two in the middle): its figures belong together."""
        return next(r for r in self.rounds if r.speed == statistics.median_low([r.speed for r in self.rounds]))

    @property
    def last(self) -> Round:
        return self.rounds[-1]

    def memory(self) -> list[int]:
        """Bytes of each rank at the highest, in any round."""
        return [max(r.ranks[i].memory for r in self.rounds) for i in range(self.n)]

    def collectives(self) -> dict[str, tuple[float, float, float | None]]:
        """Collective → (calls, seconds, bytes that a process sends) a step, means over the processes of the last round."""
        timed = [t.collectives or {} for t in self.last.ranks]
        sent = self.last.ranks[0].sent or {}
        names = sorted({name for t in timed for name in t})
        mean = {name: np.mean([t.get(name, (0.0, 0.0)) for t in timed], axis=0).tolist() for name in names}
        return {name: (*mean[name], sent[name][1] if name in sent else None) for name in names}


def speed_up(found: Found, base: Found) -> float:
    return found.middle.speed / base.middle.speed


def work(found: Found, base: Found) -> float:
    """A process's samples a step, against the base's: 1/2 with twice the processes (strong), 1 (weak)."""
    return found.middle.ranks[0].samples * base.n / (base.middle.ranks[0].samples * found.n)


def lost(found: Found, base: Found) -> dict[str, float] | None:
    """Where the rest of the efficiency goes: name → share of the step. They add up to 1 - efficiency.

    Against the base's parts in the ideal step: with strong scaling divided by the ratio of processes, with weak scaling as they are.
    """
    parts, ideal = found.middle.parts(), base.middle.parts()
    if parts is None or ideal is None:
        return None
    return {name: (parts[name] - ideal[name] * work(found, base)) / found.middle.step for name in PARTS}


def rows_of(all_found: list[Found], common: dict[str, Any]) -> list[Row]:
    """The figures as rows. `scale/...`; conditions: `common`, and what goes with n processes."""
    base, rows = all_found[0], []
    for f in all_found:
        here = {"processes": f.n, **conditions_of(f), **common}
        speeds = [r.speed for r in f.rounds]
        ratio, parts, gone = speed_up(f, base), f.middle.parts(), lost(f, base)
        against = {"against_processes": base.n}
        rows += [
            Row("scale/samples_per_s", f.middle.speed, "samples/s", conditions={**here, "rounds": speeds}),
            Row("scale/speed_up", ratio, "", conditions={**here, **against}),
            Row("scale/efficiency", ratio * base.n / f.n, "", conditions={**here, **against}),
            Row("scale/memory", max(f.memory()), "bytes", conditions={**here, "ranks": f.memory()}),
            Row("scale/loss", f.middle.ranks[0].loss, f.middle.ranks[0].facts["loss_unit"], common["warm_up"] + len(f.middle.ranks[0].spent), here),
            Row("scale/step", f.middle.step, "s", conditions=here),
        ]
        rows += [Row(f"scale/step/{name}", t, "s", conditions=here) for name, t in (parts or {}).items()]
        if gone and f is not base:
            rows += [Row(f"scale/lost/{name}", share, "of the step", conditions={**here, **against}) for name, share in gone.items()]
        sent = f.last.ranks[0].sent
        if sent is not None or f.n == 1:
            by = {name: {"calls": calls, "bytes": b} for name, (calls, b) in (sent or {}).items()}
            total = sum(b for _, b in (sent or {}).values())
            rows.append(Row("scale/sent", total, "bytes", conditions={**here, "counted": "ring algorithms, rank 0, a step", "collectives": by}))
        for name, (calls, t, b) in f.collectives().items():
            rows.append(Row(f"scale/collective/{name}", t, "s", conditions={**here, "calls": calls, "bytes": b, "of": "a step, from begin to end"}))
        if f.summary:
            s = f.summary
            faster = base.summary["train_runtime"] / s["train_runtime"]
            rows += [
                Row("scale/whole/runtime", s["train_runtime"], "s", s["steps"], here),
                Row("scale/whole/samples_per_s", s["train_samples_per_second"], "samples/s", s["steps"], here),
                Row("scale/whole/speed_up", faster, "", s["steps"], {**here, **against}),
                Row("scale/whole/efficiency", faster * base.n / f.n, "", s["steps"], {**here, **against}),
                Row("scale/whole/train_loss", s["train_loss"], "", s["steps"], here),
            ]
            rows += [Row(f"scale/whole/{name}", value, "", s["steps"], here) for name, value in s["metrics"].items()]
    return rows


def conditions_of(f: Found) -> dict[str, Any]:
    r = f.recipe
    batch = {"batch_samples": r.batch.samples} if r.batch.samples else {"batch_tokens": r.batch.tokens}
    return {**batch, "lr": r.optimizer.lr, "layout": r.layout.model_dump(exclude_defaults=True)}


def conditions(recipe: Recipe, weak: bool, scale_lr: bool, steps: int, warm_up: int) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "scaling": "weak" if weak else "strong",
        **({"scale_lr": scale_lr} if weak else {}),
        "steps": steps,
        "warm_up": warm_up,
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpus": processors(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # before: what else the machine was doing
        "versions": {"gradus": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------ what is shown


def columns(head: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned to the right."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    for line in (head, *lines):
        yield "  ".join(cell.rjust(w) for cell, w in zip(line, widths))


def ms(seconds: float) -> str:
    value = max(0.0, seconds * 1e3)  # clocks differ by microseconds
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(all_found: list[Found]) -> Iterator[str]:
    """The figures of all numbers of processes, for a terminal."""
    base, first = all_found[0], all_found[0].last.ranks[0]
    lines = []
    for f in all_found:
        speeds, sent = [r.speed for r in f.rounds], f.last.ranks[0].sent
        spread = f" [{figure(min(speeds))} .. {figure(max(speeds))}]" if len(speeds) > 1 else ""
        ratio = speed_up(f, base)
        n_bytes = show_bytes(round(sum(b for _, b in sent.values()))) if sent else "0 B" if f.n == 1 else "-"
        batch = f"{f.recipe.batch.samples or f.recipe.batch.tokens:,}"
        lines.append(
            (str(f.n), batch, figure(f.middle.speed) + spread, f"{ratio:.2f}", f"{ratio * base.n / f.n:.2f}", show_bytes(max(f.memory())), n_bytes,
             f"{f.middle.ranks[0].loss:.5f}")
        )  # fmt: skip
    counted, unit = "samples" if base.recipe.batch.samples else "tokens", first.facts["loss_unit"]
    head = ("processes", f"batch, {counted}", "samples/s", "speed-up", "efficiency", "memory a rank", "sent a step", f"loss, {unit}")
    yield from columns(head, lines)
    if first.facts["device"] == "cpu":
        yield ""
        yield "a step in ms, mean over the processes; the parts add up to it:"
        yield from columns(("processes", "step", *PARTS), [(str(f.n), ms(f.middle.step), *map(ms, f.middle.parts().values())) for f in all_found])
    else:
        yield f"\nthe parts of a step are told on a CPU only; this was on {first.facts['device']}"
    calls = [
        (str(f.n), name, f"{n:g}", ms(t), "-" if b is None else show_bytes(round(b)))
        for f in all_found
        for name, (n, t, b) in f.collectives().items()
    ]
    if calls:
        yield ""
        yield "collectives of a step, profiled apart: ms from their begin to their end, the wait for others included; some may lie behind computing:"
        yield from columns(("processes", "collective", "calls", "ms", "sent"), calls)
    if len(all_found) > 1 and first.facts["device"] == "cpu":
        yield ""
        yield from (bottleneck(f, base, lost(f, base)) for f in all_found[1:])
    if base.summary:
        yield ""
        yield from whole_table(all_found)


def bottleneck(f: Found, base: Found, gone: dict[str, float]) -> str:
    """For example: `2 processes lose 9.0 % of the step against 1: communication +6.1 % (all_reduce), computing +3.0 %, data -0.1 %`."""
    total = 1 - speed_up(f, base) * base.n / f.n
    by_time = sorted(f.collectives().items(), key=lambda item: -item[1][1])
    named = []
    for name, share in sorted(gone.items(), key=lambda item: -item[1]):
        note = f" ({by_time[0][0]})" if name == "communication" and by_time and share > 0 else ""
        if abs(share) >= 0.0005:
            named.append(f"{name} {100 * share:+.1f} %{note}")
    return f"{f.n} processes {'lose' if total >= 0 else 'gain'} {100 * abs(total):.1f} % of the step against {base.n}; lost to: {', '.join(named)}"


def metric_of(f: Found) -> tuple[str, float] | None:
    """The task's own metric after the whole training."""
    best, metrics = f.summary and f.summary["best"], f.summary and f.summary["metrics"]
    return (best["metric"], metrics[best["metric"]]) if best and best["metric"] in metrics else None


def whole_table(all_found: list[Found]) -> Iterator[str]:
    base = all_found[0]
    names = list(base.summary["metrics"])
    yield "trained to the end, once; seconds without evaluation and checkpoints:"
    lines = []
    for f in all_found:
        s, faster = f.summary, base.summary["train_runtime"] / f.summary["train_runtime"]
        lines.append(
            (str(f.n), f"{s['steps']:,}", f"{s['samples']:,}", f"{f.recipe.optimizer.lr:.3g}", figure(s["train_runtime"]), f"{faster:.2f}",
             f"{faster * base.n / f.n:.2f}", f"{s['train_loss']:.4f}", *(f"{s['metrics'][name]:.4f}" for name in names))
        )  # fmt: skip
    yield from columns(("processes", "steps", "samples", "learning rate", "seconds", "speed-up", "efficiency", "train loss", *names), lines)


COLOURS = dict(zip(PARTS, ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#999999")))  # of Okabe and Ito: told apart by all eyes


def plot(all_found: list[Found], title: str, file: Path) -> None:
    """Speed-up with the ideal line, a step by its parts, and after whole trainings their metric. Raises UserError without matplotlib."""
    Figure = need("matplotlib.figure", "plot", "a plot").Figure
    panels = [plot_speed_up, plot_step, *([plot_metric] if metric_of(all_found[0]) else [])]
    fig = Figure(figsize=(5.0 * len(panels), 4.6), layout="constrained", dpi=120)
    fig.suptitle(title, fontsize=10)
    for draw, axes in zip(panels, fig.subplots(1, len(panels))):
        draw(axes, all_found)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    fig.savefig(file)


def plot_speed_up(axes: Any, all_found: list[Found]) -> None:
    base, counts = all_found[0], [f.n for f in all_found]
    ratios = [speed_up(f, base) for f in all_found]
    low, high = ([g(r.speed for r in f.rounds) / base.middle.speed for f in all_found] for g in (min, max))
    axes.plot(counts, [n / base.n for n in counts], "--", color="#666666", label="ideal")
    spread = [[m - lo for m, lo in zip(ratios, low)], [hi - m for m, hi in zip(ratios, high)]]
    axes.errorbar(counts, ratios, yerr=spread, fmt="o-", capsize=4, color=COLOURS["computing"], label="steps: median, all rounds")
    if base.summary:
        faster = [base.summary["train_runtime"] / f.summary["train_runtime"] for f in all_found]
        axes.plot(counts, faster, "s-", color=COLOURS["communication"], label="whole training, once")
    axes.set(xlabel="processes, and their efficiency", ylabel=f"speed-up against {base.n} process{'es' * (base.n > 1)}", title="speed-up")
    if not number_axis(axes, counts, [f"{f.n}\n{100 * ratio * base.n / f.n:.0f} %" for f, ratio in zip(all_found, ratios)]):
        axes.set_ylim(bottom=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.19), ncols=2, frameon=False, fontsize=9)


def plot_step(axes: Any, all_found: list[Found]) -> None:
    base, places, floor = all_found[0], range(len(all_found)), np.zeros(len(all_found))
    if base.middle.parts() is None:
        axes.bar(places, [1e3 * f.middle.step for f in all_found], 0.6, color=COLOURS["computing"], label="step")
    else:
        for name in PARTS:
            heights = np.array([max(0.0, 1e3 * f.middle.parts()[name]) for f in all_found])
            axes.bar(places, heights, 0.6, floor, color=COLOURS[name], label=name)
            floor += heights
    ideal = [1e3 * base.middle.step * work(f, base) for f in all_found]
    axes.hlines(ideal, [p - 0.38 for p in places], [p + 0.38 for p in places], colors="black", linestyles="dashed", label="ideal")
    axes.set(xlabel="processes", ylabel="time of a step, ms", title="a step by name")
    axes.set_xticks(list(places), [str(f.n) for f in all_found])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)


def plot_metric(axes: Any, all_found: list[Found]) -> None:
    name, _ = metric_of(all_found[0])
    values = np.array([f.summary["metrics"][name] for f in all_found])
    axes.plot([f.n for f in all_found], values, "s-", color=COLOURS["communication"])
    axes.set(xlabel="processes", ylabel=name, title="after the whole training")
    axes.ticklabel_format(axis="y", useOffset=False)
    number_axis(axes, [f.n for f in all_found], [str(f.n) for f in all_found])
    middle = (values.min() + values.max()) / 2
    room = max(0.6 * (values.max() - values.min()), 0.02 * abs(middle), 1e-6)  # rounding is not to look like a difference
    if math.isfinite(room):
        axes.set_ylim(middle - room, middle + room)


def number_axis(axes: Any, counts: list[int], labels: list[str]) -> bool:
    """Numbers of processes along x. Far apart, x and y (a speed-up) are logarithmic: small numbers would stand on each other. Returns whether."""
    wide = counts[-1] >= 8 * counts[0]
    if wide:
        axes.set_xscale("log", base=2)
        if axes.get_title() == "speed-up":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(counts, labels)
    axes.minorticks_off()
    return wide


# ------------------------------------------------------------ the verb


def examine(recipe: Recipe, counts: Sequence[int], *, weak: bool, scale_lr: bool) -> list[Recipe]:
    """The recipe for each number of processes. Raises UserError, in the terms of this verb where it has its own."""
    layout = recipe.layout
    named = {axis: getattr(layout, axis) for axis in AXES if axis != "replicate" and getattr(layout, axis) > 1}
    taken = math.prod(named.values())
    for n in counts:
        if n % taken:
            keys = ", ".join(f"layout.{axis}={k}" for axis, k in named.items())
            raise UserError(f"--processes {n}: {keys} needs a multiple of {taken}, since replicas vary here. Use --processes {taken},{2 * taken}")
    if layout.transport == "mpi":
        raise UserError("layout.transport=mpi: processes are started here without mpirun. Leave it out, or use mpirun -n N gradus train.")
    enough_devices(layout.device, counts[-1])
    found = []
    for n in counts:
        found.append(recipe_for(recipe, n, weak=weak, scale_lr=scale_lr))
        try:
            check.validate(found[-1], n)
        except UserError as e:
            raise UserError(f"--processes {n}: {e}") from None
    return found


def measure(
    recipe: Recipe, counts: Sequence[int], folder: Path, *, steps: int = 30, warm_up: int = 5, repeat: int = 3, weak: bool = False,
    scale_lr: bool = False, to_the_end: bool = False, say: Callable[[str], None] = print, plan: Any = None,
) -> list[Row]:  # fmt: skip
    """Train on each of these numbers of processes, and return what was found as rows (`rows_of`).

    In each of `repeat` rounds, every number of processes takes `steps` steps after `warm_up`; with `to_the_end`, the whole training
    once more. Writes rows.jsonl, recipe.yaml, workers.log and, with matplotlib, scaling.png into `folder`; runs to the end are in
    `folder`/runs. plan: handed in from above: `plan.before({processes: recipe}, say)` raises UserError for what will not fit and gives
    the rows of plan.jsonl; `plan.after(rows, folder, say)` sets beside them what was measured.
    Raises UserError for what cannot be done, before anything is started where it can be known then.
    """
    needed = {"steps": 1, "warmup": COUNTED_STEP, "repeat": 1}
    for name, value in (("steps", steps), ("warmup", warm_up), ("repeat", repeat)):
        if value < needed[name]:
            why = " (what the first steps set up is not to be timed)" if name == "warmup" else ""
            raise UserError(f"--{name} {value}: must be at least {needed[name]}{why}.")
    if scale_lr and not weak:
        raise UserError("--scale-lr: without --weak the global batch stays, and so does its learning rate. Add --weak, or leave it out.")
    steps = whole(steps, meeting(recipe.layout))
    found = [Found(n, r) for n, r in zip(counts, examine(recipe, counts, weak=weak, scale_lr=scale_lr))]
    if recipe.layout.compress == "powersgd" and warm_up < POWERSGD_START + COUNTED_STEP:
        warm_up = POWERSGD_START + COUNTED_STEP
        say(f"note: {warm_up} steps to warm up: PowerSGD begins after {POWERSGD_START}")
    for f in found:
        left_out = [f"layout.{k}" for k in without_replicas(recipe.layout)] if sizes(recipe.layout, f.n)["replicate"] == 1 else []
        if left_out:
            say(f"note: {f.n} process{'es' * (f.n > 1)}: one replica, so {', '.join(left_out)} left out")
    threads = found[-1].recipe.layout.threads
    if threads and counts[-1] * threads > processors():
        say(f"note: {counts[-1]} processes of {threads} thread{'s' * (threads > 1)} share {processors()} processors, so they keep each other waiting")
    if (folder / "rows.jsonl").exists():
        raise UserError(f"--to={folder}: there is a measurement already. Give another folder.")
    planned = plan.before({f.n: f.recipe for f in found}, say) if plan else []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(recipes.dump(recipe))
        if plan:
            (folder / "plan.jsonl").write_text("".join(row.json() + "\n" for row in planned))
        log = folder / "workers.log"
        log.touch()
    except OSError as e:
        raise UserError(f"--to={folder}: cannot write there ({e.strerror}). Give a folder you may write.") from None

    common = conditions(recipe, weak, scale_lr, steps, warm_up)
    out = RowFile(folder / "rows.jsonl")
    try:
        for number in range(1, repeat + 1):
            for f in found:
                f.rounds.append(Round(start(f.n, time_steps, f.recipe, warm_up, steps, number == repeat, log=log)))
                facts, latest = f.last.ranks[0].facts, f.last
                if number == 1 and f is found[0]:
                    common |= {k: facts[k] for k in ("device", "precision", "threads", "parameters")}
                here = {"processes": f.n, "round": number, **conditions_of(f), **common}
                out.write([Row("scale/round/samples_per_s", latest.speed, "samples/s", conditions=here)])
                say(f"round {number} of {repeat}, {f.n} process{'es' * (f.n > 1)}: {figure(latest.speed)} samples/s, a step {ms(latest.step)} ms")
        for f in found if to_the_end else ():
            say(f"to the end with {f.n} process{'es' * (f.n > 1)}; what it says: {log}")
            whole_run = f.recipe.model_copy(update={"log": f.recipe.log.model_copy(update={"dir": str(folder / "runs" / str(f.n))})})
            f.summary = start(f.n, train_to_the_end, whole_run, log=log)[0]
        rows = rows_of(found, common)
        out.write(rows)
    finally:
        out.close()
    kept = "the same batch for every process" if weak else "the same global batch"
    threads = f", {common['threads']} thread{'s' * (common['threads'] > 1)} a process" if common["device"] == "cpu" else ""
    title = f"{recipe.name}, {common['scaling']} scaling ({kept}): {common['precision']} on {common['device']}{threads}"
    say(f"\n{title}; {common['cpu']}, {common['cpus']} processors, load {common['load']} before; torch {torch.__version__}")
    say(f"median of {repeat} round{'s' * (repeat > 1)} of {steps} steps [slowest .. fastest]")
    for line in table(found):
        say(line)
    if plan:
        plan.after(rows, folder, say)
    say("")
    try:
        plot(found, title, folder / "scaling.png")
        say(f"plot: {folder / 'scaling.png'}")
    except UserError as e:
        say(f"note: no plot: {e}")
    say(f"rows: {folder / 'rows.jsonl'}")
    return rows


def scale(recipe: Recipe, args: Any, plan: Any = None) -> int:
    """`gradus scale RECIPE --processes 1,2,4`. `args`: as cli has them. `plan`: as `measure` has it."""
    world = worlds.find()
    if world.size > 1:
        raise UserError(f"gradus scale: {world.launcher} started this already, as process {world.rank} of {world.size}. Start it by itself.")
    if any(word.startswith("log.dir=") for word in args.overrides):
        raise UserError("log.dir cannot take effect: what is measured goes to --to. Use --to DIR.")
    counts = sorted(limits.numbers(args.processes, "--processes"))
    folder = Path(args.to) if args.to else Path("scale") / recipe.name / time.strftime("%Y%m%d-%H%M%S")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # on the way out, what was started here is ended
    try:
        measure(
            recipe, counts, folder, steps=args.steps, warm_up=args.warmup, repeat=args.repeat, weak=args.weak, scale_lr=args.scale_lr,
            to_the_end=args.to_the_end or args.weak, plan=plan,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0
