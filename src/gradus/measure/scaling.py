"""Is it worth more processes? One recipe trained on 1, 2, 4, ... of them: speed, efficiency, and where the rest of it
goes, by name.

Strong scaling keeps the global batch; weak scaling keeps the batch of a process. Every number of processes is started
anew in every round, and runs the very trainer of `gradus train`. A step's time goes by five names that add up to it,
from the clocks of every process's main thread. computing: on a processor (data excepted), the copies that collectives
need included. communication: blocked, of the process that is blocked least in this step: it comes last, so nobody keeps
it waiting. waiting: blocked longer than that: for a process that comes later (where several meeting points have
different last processes, some of this counts as communication). data: making the batch, or waiting for it. other: ready
to run while other programs had the processor (Linux tells it), and what one process alone is blocked.

Collectives by name are profiled in steps of their own, after the timed ones: from when gloo's own threads begin with
one until it is done, the wait for the last process included. Some may be hidden behind computing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError, need
from gradus.hardware.tables import table as columns
from gradus.limits import processors
from gradus.measure.collectives import BYTES, shown
from gradus.measure.machine import conditions
from gradus.measure.profile import endless, folder_for
from gradus.measure.workers import ended_with_this, start
from gradus.parallel import check
from gradus.parallel import world as worlds
from gradus.parallel.mesh import DATA, needed, sizes
from gradus.parallel.replicate import POWERSGD_START
from gradus.parallel.traffic import collective
from gradus.parallel.world import World
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row, RowFile
from gradus.train.clock import peak_memory
from gradus.train.loop import Trainer
from gradus.train.metrics import COUNTED_STEP, TrafficCount
from gradus.train.precision import enough_devices, pick_device
from gradus.train.run import train as train_session
from gradus.train.session import open_session

PARTS = ("computing", "communication", "waiting", "data", "other")
PROFILED = 3  # steps whose collectives are timed by name


# ------------------------------------------------------------ what is measured


@dataclasses.dataclass(frozen=True)
class Settings:
    """In each of `repeat` rounds every number of processes takes `steps` steps after `warm_up`; then, with
    `to_the_end`, the whole training once. weak, scale_lr: as `recipe_for` has them."""

    steps: int = 30
    warm_up: int = 5
    repeat: int = 3
    weak: bool = False
    scale_lr: bool = False
    to_the_end: bool = False


def recipe_for(recipe: Recipe, n: int, *, weak: bool = False, scale_lr: bool = False) -> Recipe:
    """The recipe as n processes train it: the same (strong), or with the recipe's batch for every process that sees
    samples of its own.

    Weak: what is counted in steps is divided by their number k; the learning rate stays, or is multiplied by k with
    `scale_lr` (Goyal et al. 2017, section 2.1). What a layout cannot do with one replica is left out for one. On a CPU
    every process has `layout.threads` threads, else 1.
    """
    layout, changes = recipe.layout, {}
    if layout.threads is None and pick_device(layout.device).type == "cpu":
        changes["threads"] = 1
    arranged = sizes(layout, n)
    if arranged["replicate"] == 1:
        changes |= without_replicas(layout)
    r = recipe.model_copy(update={"layout": layout.model_copy(update=changes)})
    k = math.prod(arranged[axis] for axis in DATA)
    if not weak or k == 1:
        return r

    def fewer(section: Any, *keys: str) -> Any:
        return section.model_copy(update={key: max(1, round(n / k)) for key in keys if (n := getattr(section, key))})

    rate = r.optimizer.lr * (k if scale_lr else 1)
    # its peak is proportional to warmup_steps^-0.5: without this, fewer of them would raise it
    if r.schedule.name == "noam":
        rate /= math.sqrt(k)
    batch = {key: n * k for key in ("samples", "tokens") if (n := getattr(r.batch, key))}
    sections = {"batch": r.batch.model_copy(update=batch), "optimizer": r.optimizer.model_copy(update={"lr": rate})}
    sections |= {"train": fewer(r.train, "steps", "checkpoint_every"), "evaluate": fewer(r.evaluate, "every")}
    return r.model_copy(update={**sections, "schedule": fewer(r.schedule, "warmup_steps", "end_step")})


def without_replicas(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that have nothing to do where there is one replica, as they are then."""
    kept = layout.replicate in ("auto", "none", "data_parallel")  # the last is one process by itself
    plain = {"replicate": layout.replicate if kept else "auto", "shard_optimizer": False, "local_sgd": None}
    return {k: v for k, v in {**plain, "diloco": None}.items() if getattr(layout, k) != v}


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
    """Steps of the recipe's training, in one of `here.size` processes that all call this. Collective. Writes
    nothing."""
    session = open_session(recipe, None, here)
    parallel, traffic = session.lay_out(), TrafficCount()
    trainer = Trainer(session, parallel, Path(os.devnull), [traffic])
    source, (more, every) = endless(trainer.loader), whole_rounds(PROFILED, recipe.layout)
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
        collectives = None
        if profiled:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
                for _ in range(more):
                    trainer.take(next(source))
            events = [(e.name, e.time_range.start, e.time_range.end) for e in found.events()]
            collectives = by_collective(events, more)
    finally:
        trainer.loader.close()
    # (steps, 2: data, the rest)
    wall, processor, ready = np.moveaxis(np.diff(np.array(marks), axis=0).reshape(-1, 2, 3), 2, 0)
    blocked = np.maximum(0.0, wall - processor - ready)  # the clocks differ by microseconds
    spent = np.stack([wall[:, 0], processor[:, 1], ready[:, 1], blocked[:, 1]], axis=1)
    facts = {"device": str(session.device.type), "precision": recipe.layout.precision}
    facts |= {"threads": torch.get_num_threads(), "parameters": models.count(session.recipe.model)["total"]}
    facts |= {"loss_unit": session.task.loss_unit}
    sent = {name: (c.calls / every, c.sent / every) for name, c in counted.found.items()} if counted else None
    return Timed(elapsed, spent, samples, float(loss), memory, sent, collectives, facts)


def whole_rounds(steps: int, layout: Layout) -> tuple[int, int]:
    """(at least `steps`, and a multiple of what follows; steps from one synchronisation of local updates to the
    next)."""
    local = layout.local_sgd or layout.diloco
    every = local.every if local else 1
    return -(-steps // every) * every, every


def _now() -> tuple[float, float, float]:
    """Seconds: of the clock; of this thread on a processor; of this thread ready to run while others were there."""
    ready = 0.0
    with contextlib.suppress(OSError):  # Linux: nanoseconds on a processor, and on its run queue
        ready = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return time.perf_counter(), time.thread_time(), ready


def by_collective(events: Sequence[tuple[str, float, float]], steps: int) -> dict[str, tuple[float, float]]:
    """(calls, seconds) a step from a profiler's events (name, start and end in µs).

    A collective goes by the name that it was called by: gloo does a reduce_scatter by an all_reduce. What was called
    first is done first, so the calls' order tells which is which.
    """
    called = [name for name, *_ in sorted(events, key=lambda e: e[1]) if name.startswith("c10d::")]
    names = (collective(name.removeprefix("c10d::")) for name in called)
    scattered = [name for name in names if name in ("all_reduce", "reduce_scatter")]
    done = sorted((start, end, name.removeprefix("gloo:")) for name, start, end in events if name.startswith("gloo:"))
    if len(scattered) == sum(name == "all_reduce" for *_, name in done):
        order = iter(scattered)
        done = [(start, end, next(order) if name == "all_reduce" else name) for start, end, name in done]
    times: dict[str, list[float]] = {}
    for begin, end, name in done:
        times.setdefault(name, []).append((end - begin) / 1e6)
    return {name: (len(t) / steps, sum(t) / steps) for name, t in sorted(times.items())}


def train_to_the_end(recipe: Recipe, here: World) -> dict[str, Any]:
    """The whole training with its evaluations, and its summary."""
    return train_session(recipe, world=here).summary


# ------------------------------------------------------------ from times to figures


@dataclasses.dataclass
class Round:
    """One round of n processes."""

    ranks: list[Timed]

    def __post_init__(self) -> None:
        elapsed = max(t.elapsed for t in self.ranks)
        self.speed = self.ranks[0].samples / elapsed  # samples/s
        self.step = elapsed / len(self.ranks[0].spent)  # seconds

    def parts(self) -> dict[str, float] | None:
        """Seconds of the mean step by PARTS: means over the processes, which add up to the step. None on a GPU, which
        works by itself while the thread that the clocks see goes on."""
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
    def processes(self) -> str:
        return f"{self.n} process{'es' * (self.n > 1)}"

    @property
    def middle(self) -> Round:
        """The round of median speed (of an even number of rounds, the slower of the two in the middle): its figures
        belong together."""
        return next(r for r in self.rounds if r.speed == statistics.median_low(self.speeds))

    @property
    def speeds(self) -> list[float]:
        """Samples/s of each round."""
        return [r.speed for r in self.rounds]

    @property
    def last(self) -> Timed:
        """The first process's last round."""
        return self.rounds[-1].ranks[0]

    def against(self, base: Found, whole: bool = False) -> tuple[float, float]:
        """(speed-up, efficiency) of the steps, or of the whole training."""
        ratio = self.middle.speed / base.middle.speed
        if whole:
            ratio = base.summary["train_runtime"] / self.summary["train_runtime"]
        return ratio, ratio * base.n / self.n

    def collectives(self) -> dict[str, tuple[float, float, float | None]]:
        """Collective → (calls, seconds, bytes that a process sends) a step, means over the processes of the last
        round."""
        timed, sent = [t.collectives or {} for t in self.rounds[-1].ranks], self.last.sent or {}
        names = sorted({name for t in timed for name in t})
        mean = {name: np.mean([t.get(name, (0.0, 0.0)) for t in timed], axis=0).tolist() for name in names}
        return {name: (*mean[name], sent.get(name, (0, None))[1]) for name in names}


def work(found: Found, base: Found) -> float:
    """A process's samples a step, against the base's: 1/2 with twice the processes (strong), 1 (weak)."""
    return found.middle.ranks[0].samples * base.n / (base.middle.ranks[0].samples * found.n)


def lost(found: Found, base: Found) -> dict[str, float]:
    """Where the rest of the efficiency goes: name → share of the step. They add up to 1 - efficiency.

    Against the base's parts in the ideal step: with strong scaling divided by the ratio of processes, with weak scaling
    as they are.
    """
    parts, ideal = found.middle.parts(), base.middle.parts()
    return {name: (parts[name] - ideal[name] * work(found, base)) / found.middle.step for name in PARTS}


def rows_of(all_found: list[Found], common: dict[str, Any]) -> list[Row]:
    """The figures as rows. `scale/...`; conditions: `common`, and what goes with n processes."""
    base, rows = all_found[0], []

    def add(name: str, value: float, unit: str = "", step: int | None = None, **more: Any) -> None:
        rows.append(Row(f"scale/{name}", value, unit, step, {"processes": f.n, **conditions_of(f), **common, **more}))

    for f in all_found:
        first, memory = f.middle.ranks[0], [max(r.ranks[i].memory for r in f.rounds) for i in range(f.n)]
        add("samples_per_s", f.middle.speed, "samples/s", rounds=f.speeds)
        for name, value in zip(("speed_up", "efficiency"), f.against(base)):
            add(name, value, against_processes=base.n)
        add("memory", max(memory), "bytes", ranks=memory)
        add("loss", first.loss, first.facts["loss_unit"], common["warm_up"] + len(first.spent))
        add("step", f.middle.step, "s")
        for name, t in (f.middle.parts() or {}).items():
            add(f"step/{name}", t, "s")
        for name, share in ((f is not base and f.middle.parts() and lost(f, base)) or {}).items():
            add(f"lost/{name}", share, "of the step", against_processes=base.n)
        if (sent := {} if f.n == 1 else f.last.sent) is not None:  # None: nobody counted
            by = {name: {"calls": calls, "bytes": b} for name, (calls, b) in sent.items()}
            n_bytes = sum(b for _, b in sent.values())
            add("sent", n_bytes, "bytes", counted="ring algorithms, rank 0, a step", collectives=by)
        for name, (calls, t, b) in f.collectives().items():
            add(f"collective/{name}", t, "s", calls=calls, bytes=b, of="a step, from begin to end")
        if s := f.summary:
            add("whole/runtime", s["train_runtime"], "s", s["steps"])
            add("whole/samples_per_s", s["train_samples_per_second"], "samples/s", s["steps"])
            ratios = zip(("speed_up", "efficiency"), f.against(base, whole=True))
            for name, value in (*ratios, ("train_loss", s["train_loss"]), *s["metrics"].items()):
                add(f"whole/{name}", value, "", s["steps"])
    return rows


def conditions_of(f: Found) -> dict[str, Any]:
    r = f.recipe
    batch = {"batch_samples": r.batch.samples} if r.batch.samples else {"batch_tokens": r.batch.tokens}
    return {**batch, "lr": r.optimizer.lr, "layout": r.layout.model_dump(exclude_defaults=True)}


# ------------------------------------------------------------ what is shown


def ms(seconds: float) -> str:
    value = max(0.0, seconds * 1e3)  # clocks differ by microseconds
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def n_bytes(value: float) -> str:
    return shown(value, BYTES)


def table(all_found: list[Found], rows: Sequence[Row]) -> Iterator[str]:
    """The figures of all numbers of processes, for a terminal."""
    base, of = all_found[0], {f.n: {} for f in all_found}  # processes → name → value
    for row in rows:
        of[row.conditions["processes"]][row.name.removeprefix("scale/")] = row.value

    def lines(names: str, *cells: Callable[[Found, dict[str, Any]], str]) -> list[str]:
        return columns(names.split("|"), [[str(f.n), *(cell(f, of[f.n]) for cell in cells)] for f in all_found])

    def speed(f: Found, v: dict[str, Any]) -> str:
        spread = f" [{figure(min(f.speeds))} .. {figure(max(f.speeds))}]" if len(f.speeds) > 1 else ""
        return figure(v["samples_per_s"]) + spread

    def batch(f: Found, v: dict[str, Any]) -> str:
        return f"{f.recipe.batch.samples or f.recipe.batch.tokens:,}"

    def named(shape: Callable[[float], str], *names: str) -> list[Callable[[Found, dict[str, Any]], str]]:
        return [lambda f, v, name=name: shape(v[name]) if name in v else "-" for name in names]

    unit = "samples" if base.recipe.batch.samples else "tokens"
    head = f"processes|batch, {unit}|samples/s|speed-up|efficiency|memory a rank|sent a step"
    yield from lines(
        f"{head}|loss, {base.last.facts['loss_unit']}", batch, speed, *named("{:.2f}".format, "speed_up", "efficiency"),
        *named(n_bytes, "memory", "sent"), *named("{:.5f}".format, "loss"),
    )  # fmt: skip
    parts = "|".join(PARTS)
    if base.middle.parts():
        yield "\na step in ms, mean over the processes; the parts add up to it:"
        yield from lines(f"processes|step|{parts}", *named(ms, "step", *(f"step/{name}" for name in PARTS)))
        yield f"\nlost against {base.processes}, in % of the step:"
        shares = named(lambda share: f"{100 * share:+.1f}", *(f"lost/{name}" for name in PARTS))
        yield from lines(f"processes|in all|{parts}", lambda f, v: f"{100 * (1 - v['efficiency']):+.1f}", *shares)
    else:
        yield f"\nthe parts of a step are measured on a CPU only; this was on {base.last.facts['device']}"
    each = [(f.n, name, *figures) for f in all_found for name, figures in f.collectives().items()]
    calls = [(str(n), name, f"{k:g}", ms(t), "-" if b is None else n_bytes(b)) for n, name, k, t, b in each]
    if calls:
        yield "\ncollectives of a step, profiled separately: ms from start to end, the wait for others included;"
        yield "some may lie behind computing:"
        yield from columns(["processes", "collective", "calls", "ms", "sent"], calls)
    if base.summary:
        yield "\ntrained to the end, once; seconds without evaluation and checkpoints:"
        metrics = list(base.summary["metrics"])
        yield from lines(
            "|".join(("processes|steps|samples|learning rate|seconds|speed-up|efficiency|train loss", *metrics)),
            *(lambda f, v, key=key: f"{f.summary[key]:,}" for key in ("steps", "samples")),
            lambda f, v: f"{f.recipe.optimizer.lr:.3g}",
            *named(figure, "whole/runtime"), *named("{:.2f}".format, "whole/speed_up", "whole/efficiency"),
            *named("{:.4f}".format, "whole/train_loss", *(f"whole/{name}" for name in metrics)),
        )  # fmt: skip


# of Okabe and Ito: distinct to all eyes
COLOURS = dict(zip(PARTS, ("#0072B2", "#D55E00", "#E69F00", "#009E73", "#999999")))


def plot(all_found: list[Found], title: str, file: Path) -> None:
    """Speed-up with the ideal line, and a step by its parts. Raises UserError without matplotlib."""
    fig = need("matplotlib.figure", "plot", "a plot").Figure(figsize=(10.0, 4.6), layout="constrained", dpi=120)
    fig.suptitle(title, fontsize=10)
    (left, right), base, places = fig.subplots(1, 2), all_found[0], np.arange(len(all_found))
    ratios, efficiencies = np.array([f.against(base) for f in all_found]).T
    spread = np.abs([[end(f.speeds) / base.middle.speed for f in all_found] for end in (min, max)] - ratios)
    left.plot(places, [f.n / base.n for f in all_found], "--", color="#666666", label="ideal")
    line = {"fmt": "o-", "capsize": 4, "color": COLOURS["computing"], "label": "steps: median, all rounds"}
    left.errorbar(places, ratios, yerr=spread, **line)
    if base.summary:
        faster = [f.against(base, whole=True)[0] for f in all_found]
        left.plot(places, faster, "s-", color=COLOURS["communication"], label="whole training, once")
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    left.set(xlabel="processes, and their efficiency", ylabel=f"speed-up against {base.processes}", title="speed-up")
    left.set_xticks(places, [f"{f.n}\n{100 * e:.0f} %" for f, e in zip(all_found, efficiencies)])
    floor = np.zeros(len(all_found))
    for name in PARTS if base.middle.parts() else ("step",):
        heights = [max(0.0, 1e3 * (f.middle.parts() or {"step": f.middle.step})[name]) for f in all_found]
        right.bar(places, heights, 0.6, floor, color=COLOURS.get(name, COLOURS["computing"]), label=name)
        floor += heights
    ideal = [1e3 * base.middle.step * work(f, base) for f in all_found]
    right.hlines(ideal, places - 0.38, places + 0.38, colors="black", linestyles="dashed", label="ideal")
    right.set(xlabel="processes", ylabel="time of a step, ms", title="a step by name")
    right.set_xticks(places, [str(f.n) for f in all_found])
    for axes in (left, right):
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=3, frameon=False, fontsize=9)
    fig.savefig(file)


# ------------------------------------------------------------ the verb


def examine(recipe: Recipe, counts: Sequence[int], *, weak: bool, scale_lr: bool) -> list[Recipe]:
    """The recipe for each number of processes. Raises UserError, in the terms of this verb where it has its own."""
    if recipe.layout.transport == "mpi":
        raise UserError("layout.transport=mpi: processes are started here without mpirun. Leave it out.")
    enough_devices(recipe.layout.device, counts[-1])
    found = []
    for n in counts:
        if n % needed(recipe.layout):
            raise UserError(f"--processes {n}: this layout needs a multiple of {needed(recipe.layout)}.")
        try:
            found.append(recipe_for(recipe, n, weak=weak, scale_lr=scale_lr))
            check.validate(found[-1], n)
        except UserError as e:
            raise UserError(f"--processes {n}: {e}") from None
    return found


def measure(
    recipe: Recipe, counts: Sequence[int], folder: Path, how: Settings, say: Callable[[str], None] = print,
    plan: Any = None,
) -> list[Row]:  # fmt: skip
    """Train on each of these numbers of processes, and return what was found as rows (`rows_of`).

    Writes rows.jsonl, recipe.yaml, workers.log and, with matplotlib, scaling.png into `folder`; runs to the end are in
    `folder`/runs. plan: `plan.before({processes: recipe}, say)` raises UserError for what will not fit and gives the
    rows of plan.jsonl; `plan.after(rows, folder, say)` sets beside them what was measured. Raises UserError for what
    cannot be done, before anything is started where it can be known then.
    """
    how = dataclasses.replace(how, steps=whole_rounds(how.steps, recipe.layout)[0])
    found = [Found(n, r) for n, r in zip(counts, examine(recipe, counts, weak=how.weak, scale_lr=how.scale_lr))]
    how = _noted(recipe, found, how, say)
    if (folder / "rows.jsonl").exists():
        raise UserError(f"--to={folder}: there is a measurement already. Give another folder.")
    planned = plan.before({f.n: f.recipe for f in found}, say) if plan else []
    folder_for(folder, ("workers.log",))
    (folder / "recipe.yaml").write_text(recipes.dump(recipe))
    if plan:
        (folder / "plan.jsonl").write_text("".join(row.json() + "\n" for row in planned))
    common = {"recipe": recipe.name, "scaling": "weak" if how.weak else "strong"}
    common |= {"scale_lr": how.scale_lr} if how.weak else {}
    common |= {"steps": how.steps, "warm_up": how.warm_up, **conditions()}
    rows = _take_rounds(found, folder, how, common, say)
    _show(found, rows, folder, how, common, say)
    if plan:
        plan.after(rows, folder, say)
    say(f"rows: {folder / 'rows.jsonl'}")
    return rows


def _noted(recipe: Recipe, found: list[Found], how: Settings, say: Callable[[str], None]) -> Settings:
    """Says in what the measurement is not what was asked for; the settings as they are then."""
    if recipe.layout.compress == "powersgd" and how.warm_up < POWERSGD_START + COUNTED_STEP:
        how = dataclasses.replace(how, warm_up=POWERSGD_START + COUNTED_STEP)
        say(f"note: {how.warm_up} steps to warm up: PowerSGD begins after {POWERSGD_START}")
    for f in found:
        if sizes(recipe.layout, f.n)["replicate"] == 1 and (left_out := without_replicas(recipe.layout)):
            say(f"note: {f.processes}: one replica, so {', '.join(f'layout.{k}' for k in left_out)} left out")
    most, threads = found[-1].n, found[-1].recipe.layout.threads
    if threads and most * threads > processors():
        say(f"note: {most} processes × {threads} threads share {processors()} processors: they keep each other waiting")
    return how


def _take_rounds(
    found: list[Found], folder: Path, how: Settings, common: dict[str, Any], say: Callable[[str], None]
) -> list[Row]:
    """Fills `found`, and `common` with what the first process tells; writes rows as they come and returns those of all
    rounds."""
    log = folder / "workers.log"
    with contextlib.closing(RowFile(folder / "rows.jsonl")) as out:
        for number in range(1, how.repeat + 1):
            for f in found:
                last = number == how.repeat
                f.rounds.append(Round(start(f.n, time_steps, f.recipe, how.warm_up, how.steps, last, log=log)))
                common |= {k: found[0].last.facts[k] for k in ("device", "precision", "threads", "parameters")}
                here, latest = {"processes": f.n, "round": number, **conditions_of(f), **common}, f.rounds[-1]
                out.write([Row("scale/round/samples_per_s", latest.speed, "samples/s", conditions=here)])
                speed = f"{figure(latest.speed)} samples/s, a step {ms(latest.step)} ms"
                say(f"round {number} of {how.repeat}, {f.processes}: {speed}")
        for f in found if how.to_the_end else ():
            say(f"to the end with {f.processes}; what it says: {log}")
            runs = f.recipe.log.model_copy(update={"dir": str(folder / "runs" / str(f.n))})
            f.summary = start(f.n, train_to_the_end, f.recipe.model_copy(update={"log": runs}), log=log)[0]
        rows = rows_of(found, common)
        out.write(rows)
    return rows


def _show(
    found: list[Found], rows: list[Row], folder: Path, how: Settings, common: dict[str, Any], say: Callable[[str], None]
) -> None:  # fmt: skip
    """The table, and the plot."""
    kept = "the same batch for every process" if how.weak else "the same global batch"
    where = f"{common['precision']} on {common['device']}, threads a process: {common['threads']}"
    title = f"{common['recipe']}, {common['scaling']} scaling ({kept}): {where}"
    machine = f"{common['cpu']}, {common['cpus']} processors, load {common['load']} before"
    say(f"\n{title}; {machine}; torch {torch.__version__}")
    say(f"median of {how.repeat} round{'s' * (how.repeat > 1)} of {how.steps} steps [slowest .. fastest]")
    for line in table(found, rows):
        say(line)
    try:
        plot(found, title, folder / "scaling.png")
        say(f"\nplot: {folder / 'scaling.png'}")
    except UserError as e:
        say(f"\nnote: no plot: {e}")


def scale(recipe: Recipe, counts: list[int], args: Any, plan: Any = None) -> int:
    """`gradus scale RECIPE --processes 1,2,4`. counts: of processes; args: as cli has them; plan: as `measure` has
    it."""
    world = worlds.find()
    if world.size > 1:
        place = f"process {world.rank} of {world.size}"
        raise UserError(f"gradus scale: {world.launcher} started this already, as {place}. Start it by itself.")
    if any(word.startswith("log.dir=") for word in args.overrides):
        raise UserError("log.dir cannot take effect: what is measured goes to --to. Use --to DIR.")
    folder = Path(args.to) if args.to else Path("scale") / recipe.name / time.strftime("%Y%m%d-%H%M%S")
    if args.warmup < COUNTED_STEP:
        raise UserError(f"--warmup {args.warmup}: must be at least {COUNTED_STEP}, for what the first steps set up.")
    if args.scale_lr and not args.weak:
        raise UserError("--scale-lr: without --weak the global batch stays, and its learning rate too. Add --weak.")
    how = Settings(args.steps, args.warmup, args.repeat, args.weak, args.scale_lr, args.to_the_end or args.weak)
    with ended_with_this():
        measure(recipe, sorted(counts), folder, how, plan=plan)
    return 0
