"""From a recipe to a run: resolve what only data and weights know, build, apply the layout, train, keep."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gradus import models, tasks
from gradus import recipe as recipes
from gradus.data.loader import Loader, Step
from gradus.errors import UserError, coloured, did_you_mean
from gradus.models.weights import LoadReport
from gradus.parallel import check, world
from gradus.parallel.apply import apply
from gradus.parallel.mesh import DATA, Mesh, alone, needed, sizes
from gradus.parallel.status import Status, supervised, watched
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.tasks.base import Task
from gradus.train.checkpoint import Checkpoints
from gradus.train.clock import MEASURES, peaks
from gradus.train.log import RunLog, Silence, environment, human, run_folder, write_json, write_text
from gradus.train.loop import Stopped, Trainer, total_steps
from gradus.train.precision import Precision, pick_device
from gradus.train.schedule import learning_rate


@dataclasses.dataclass
class Session:
    """A resolved recipe with its task, device and precision."""

    recipe: Recipe
    task: Task
    device: torch.device
    precision: Precision
    mesh: Mesh

    def build(self) -> nn.Module:
        """The model: the paper's initialisation drawn from the recipe's seed, or `model.init`'s weights; on its device, not yet changed
        by the layout."""
        torch.manual_seed(self.recipe.train.seed)
        config = self.recipe.model
        if config.init is None:
            model = models.build(config)
        else:
            fields = {k: v for k, v in config.model_dump().items() if k not in ("family", "preset", "init")}
            model = models.load(config.init, strict=False, **fields)
        model.config = model.config.named(getattr(self.recipe.task, "classes", None))
        return self.precision.cast(model).to(self.device)


def open_session(recipe: Recipe, tokenizers: dict | None = None, here: world.World = world.World()) -> Session:
    """Meet the other processes, open the data, complete the model's configuration from it, choose device and precision. Collective.

    Raises UserError for anything in the recipe that the data, the weights, this machine or the number of processes cannot follow.
    """
    layout = recipe.layout
    if layout.threads:
        torch.set_num_threads(layout.threads)
    elif here.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # srun and mpirun may bind each process
        torch.set_num_threads(max(1, min(allowed, (os.cpu_count() or 1) // here.local_size)))
    device = pick_device(layout.device)
    if device.type == "cuda":
        device = torch.device("cuda", here.local_rank % torch.cuda.device_count())  # a launcher may show each process one GPU only
        torch.backends.cudnn.allow_tf32 = layout.tf32  # true by default: ViT's patches would not be fp32
    if layout.tf32:
        torch.set_float32_matmul_precision("high")
    world.join(here, device.type, layout.timeout)
    with world.one_first(here):  # caches of tokens are made once a host
        task = tasks.open_task(recipe, tokenizers)
    if recipe.evaluate.test and "test" not in task.splits:
        raise UserError("evaluate.test=true: this data has no test split. Give data.test, or set evaluate.test=false.")
    if recipe.evaluate.best is not None and recipe.evaluate.best not in (known := [f"valid/{metric}" for metric in task.units]):
        raise UserError(f"evaluate.best={recipe.evaluate.best}: no such metric here.{did_you_mean(recipe.evaluate.best, known)}")
    if recipe.data.workers > (os.cpu_count() or 1) and here.first:
        print(f"note: data.workers={recipe.data.workers} share {os.cpu_count()} processors", flush=True)
    model = task.complete(recipe.model)
    resolved = task.resolved(recipe.model_copy(update={"model": model}))
    task.recipe = resolved
    check.validate(resolved, here.size)  # once more, now that every size is known
    return Session(resolved, task, device, Precision(layout.precision, device), Mesh.make(layout, here, device.type))


def open_for(recipe: Recipe, n: int | None = None) -> Session:
    """The session of one of `n` processes (None: as many as the layout's axes need), opened by this one alone, to look at and not to train."""
    n = n or needed(recipe.layout)
    check.validate(recipe, n)
    session = open_session(recipe.model_copy(update={"layout": alone(recipe.layout)}))
    session.recipe = session.recipe.model_copy(update={"layout": recipe.layout})
    session.mesh = Mesh(world.World(size=n), sizes(recipe.layout, n))
    return session


def derive(session: Session) -> dict[str, Any]:
    """What follows from the recipe: parameters, steps, tokens, micro-batch, accumulation, the schedule's end."""
    r, task = session.recipe, session.task
    plan = task.plan("train", r.batch.samples, r.batch.tokens)
    steps_an_epoch = len(plan.epoch(0))
    counts = models.count(r.model)
    last = total_steps(r, plan)
    samples = r.batch.samples or max(1, round(len(task.splits["train"]) / steps_an_epoch))
    samples = min(samples, len(task.splits["train"]))
    share = -(-samples // session.mesh.size(*DATA))
    micro = min(r.layout.micro_batch or share, share)
    first = next(Loader(task.splits["train"], plan, task.collate, prepare=task.prepare, seed=r.train.seed).steps(0))
    rate = [learning_rate(r.schedule, r.optimizer.lr, s, last, r.model.d_model) for s in (1, last)]
    return {
        "parameters": counts["total"],
        "parameters_by_component": {k: v for k, v in counts.items() if k != "total" and v},
        "train_samples": len(task.splits["train"]),
        "valid_samples": len(task.splits["valid"]) if "valid" in task.splits else None,
        "steps_an_epoch": steps_an_epoch,
        "steps": last,
        "epochs": round(last / steps_an_epoch, 3),
        "samples_a_step": samples if r.batch.samples else f"about {samples}",
        "tokens_first_step": sum(b["n_tokens"] for b in first.micro_batches),  # without padding
        "micro_batch": micro,
        "accumulation": -(-share // micro),
        "processes": session.mesh.world.size,
        "layout": session.mesh.describe(),
        "learning_rate": {"first_step": rate[0], "last_step": rate[1]},
        "schedule_end": r.schedule.end_step or last,
        "device": str(session.device),
        "precision": r.layout.precision,
    }


def describe(derived: dict[str, Any]) -> str:
    """The lines printed before step 0."""
    d = derived
    return (
        f"{d['parameters']:,} parameters; {d['train_samples']:,} training samples, {d['steps_an_epoch']:,} steps an epoch\n"
        f"{d['steps']:,} steps ({d['epochs']:g} epochs) of {d['samples_a_step']} samples ({d['tokens_first_step']:,} tokens in the first); "
        f"micro-batch {d['micro_batch']} × accumulation {d['accumulation']}; {d['precision']} on {d['device']}"
        + (f"; {d['processes']} processes: {d['layout']}\n" if d["processes"] > 1 else "\n")
        +        f"learning rate {d['learning_rate']['first_step']:.2e} at the first step, {d['learning_rate']['last_step']:.2e} at the last"
    )


# what may change between a run and its continuation, since it changes no sample and no update; of the length see `extend`
FREE_ON_RESUME = ("layout", "log", "evaluate", "name")
LENGTH = ("steps", "epochs")
FREE_KEYS = {
    "data": ("workers", "prefetch", "persistent", "pin", "path", "cache"),
    "train": ("checkpoint_every", "keep", "on_nonfinite", *LENGTH),
}


def check_same(before: Recipe, now: Recipe) -> None:
    """Raises UserError that names the first thing a resume would change in the mathematics of the run."""
    old, new = before.model_dump(), now.model_dump()
    for section in old:
        if section in FREE_ON_RESUME:
            continue
        a, b = old[section] or {}, new[section] or {}
        for key in dict.fromkeys([*a, *b]):
            if a.get(key) != b.get(key) and key not in FREE_KEYS.get(section, ()):
                was = f"{section}.{key} was {a.get(key)} and is now {b.get(key)}"
                raise UserError(f"--resume: {was}: that would be another run. Start it without --resume in a new folder.")


def extend(before: Recipe, session: Session, taken: int, stated: bool) -> str | None:
    """What another train.steps or train.epochs does to a run that has taken `taken` steps, in a line; None where it stays as long.

    before: the recipe as the run stored it. stated: the user gave a length. Raises UserError where no step would be left.
    """
    now, task = session.recipe, session.task
    plan = task.plan("train", now.batch.samples, now.batch.tokens)
    was, last = total_steps(before, plan), total_steps(now, plan)
    key = "steps" if now.train.steps is not None else "epochs"
    given = f"train.{key}={getattr(now.train, key)}"
    more = f"Give more than {taken}: train.steps={2 * taken}, say, or start another run without --resume."
    if last < taken or (last == taken and was != last):
        raise UserError(f"--resume: {given}: {taken} steps are taken already and cannot be taken back. {more}")
    if last == was == taken and stated:
        raise UserError(f"--resume: {given}: the run is finished, all its {taken} steps are taken. {more}")
    if last == was:
        return None
    schedule, next_step = now.schedule, taken + 1

    def rate(step: int, last_step: int) -> str:
        return f"{learning_rate(schedule, now.optimizer.lr, step, last_step, now.model.d_model):.2e}"

    moves = schedule.name in ("linear", "cosine") and schedule.end_step is None
    stays = "does not change" + (f": it ends at step {schedule.end_step}" if schedule.end_step else "")
    ends = f"now ends at step {last}" if moves else stays
    rates = f"goes from {rate(taken, was)} (step {taken}) to" if taken else "is"
    instead = f", where {rate(next_step, was)} was to come" if moves and taken < was else ""
    return (
        f"{was} steps become {last}, {taken} of them taken; the schedule ({schedule.name}) {ends}; "
        f"the learning rate {rates} {rate(next_step, last)} (step {next_step}){instead}"
    )


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    folder: Path
    summary: dict[str, Any]
    trainer: Trainer


class Plan(Protocol):
    """What foresees a run and follows it; handed in from above. Every process has one and calls the same methods."""

    def ready(self, here: world.World) -> AbstractContextManager:
        """Around all of a run, from before the processes meet."""

    def before(self, session: Session, position: tuple[int, int]) -> None:
        """Before the model is built. position: (epoch, step within it) where the run begins. Raises UserError for what will not fit. Collective."""

    def begin(self, folder: Path) -> None:
        """The run folder is there. On rank 0."""

    def around(self, trainer: Trainer, step: Step) -> AbstractContextManager:
        """Around every step of the run."""

    def flushed(self, trainer: Trainer) -> None:
        """The device has been waited for, and a line is printed."""

    def counted(self, rows: list[Row]) -> None:
        """The traffic of one step, as rows."""

    def after(self, trainer: Trainer) -> tuple[list[str], dict[str, Any]]:
        """The last step is done. Returns (lines to print, what `summary.json` is to hold); of use on rank 0. Collective."""


def train(
    recipe: Recipe, *, resume: Path | None = None, flops: Any = None, plan: Plan | None = None, here: world.World = world.World(),
    longer: bool = False,
) -> Outcome:  # fmt: skip
    """Train a recipe into a run folder, or go on with the run in `resume`. `here`: this process among all that call this.
    longer: the user gave a length with which the run goes on, and a finished one must not end at once.

    `flops(session) -> (model FLOPs a token, the device's peak FLOP/s or None)` is handed in from above, for MFU; so is `plan`.
    Raises UserError, and Stopped after a signal once everything is saved.
    """
    with plan.ready(here) if plan else contextlib.nullcontext():
        check.validate(recipe, here.size)
        if here.size > 1:
            world.join(here, pick_device(recipe.layout.device).type, recipe.layout.timeout)
        with _own_folder(recipe, resume, here) as folder:
            status = Status(folder, here)
            with watched(folder, here, passing=(Stopped,)):
                outcome = _train(recipe, folder, resume, flops, plan, here, status, longer)
            status.close()
            return outcome


@contextlib.contextmanager
def _own_folder(recipe: Recipe, resume: Path | None, here: world.World) -> Iterator[Path]:
    """`run_folder`, of which rank 0 (or the parent that started all ranks) is the owner. Collective."""
    with contextlib.ExitStack() as stack:
        folder, problem = resume or recipe.log.dir, None
        if here.first and not (supervised() and folder):
            try:
                folder = stack.enter_context(run_folder(recipe.log, recipe.name, resume))
            except UserError as e:
                problem = str(e)
        if here.size > 1:
            folder, problem = world.from_first((folder, problem))
        if problem:
            raise UserError(problem)
        yield Path(folder)


@dataclasses.dataclass
class Start:
    """Where a run begins: a new one with nothing, another with its checkpoint."""

    before: Recipe | None = None  # as the run stored it
    checkpoint: Path | None = None
    tokenizers: dict | None = None
    step: int = 0
    position: tuple[int, int] = (0, 0)  # epoch, step within it


def _start(recipe: Recipe, folder: Path, resume: bool, here: world.World) -> Start:
    """Raises UserError where there is a run already, none to resume, or one that would become another. Collective."""
    if not resume:
        if here.first and (folder / "metrics.jsonl").exists():
            raise UserError(f"{folder}: there is a run already. Go on with it: gradus train {folder} --resume; or set another log.dir.")
        return Start()
    if not (folder / "recipe.yaml").exists():
        raise UserError(f"{folder}: no run to resume here (it has no recipe.yaml).")
    start = Start(before=recipes.load(folder, configure=None))
    check_same(start.before, recipe)
    start.checkpoint = Checkpoints(folder / "checkpoints", recipe.train.keep).newest_whole()
    if start.checkpoint:
        start.tokenizers = tasks.load_tokenizers(start.checkpoint)
        progress = json.loads((start.checkpoint / "training.json").read_text())["progress"]
        start.step, start.position = progress["step"], (progress["epoch"], progress["epoch_step"])
    return start


def _write_recipe(folder: Path, session: Session, start: Start, extended: bool) -> None:
    """recipe.yaml of a new run, and of one that is to become longer."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not session.mesh.world.first:
            return
        if start.before is None:
            write_json(folder / "environment.json", environment(session.device))
            write_text(folder / "recipe.yaml", recipes.dump(session.recipe))
        elif extended:
            (folder / "summary.json").unlink(missing_ok=True)  # of the shorter run
            length = {key: getattr(session.recipe.train, key) for key in LENGTH}
            stored = start.before.model_copy(update={"train": start.before.train.model_copy(update=length)})
            write_text(folder / "recipe.yaml", recipes.dump(stored))
    except OSError as e:
        raise UserError(f"log.dir={folder}: cannot write there ({e.strerror}). Set log.dir to a folder you may write.") from None


def _train(
    recipe: Recipe, folder: Path, resume: Path | None, flops: Any, plan: Plan | None, here: world.World, status: Status, longer: bool
) -> Outcome:
    start = _start(recipe, folder, resume is not None, here)
    status.at("opening the data")
    session = open_session(recipe, start.tokenizers, here)
    extended = extend(start.before, session, start.step, longer) if start.before else None
    derived = derive(session)
    if here.first:
        print(describe(derived) + (f"\n{extended}" if extended else ""), flush=True)
    if plan:
        status.at("the plan")
        plan.before(session, start.position)
    status.at("building the model")
    model = session.build()
    report = getattr(model, "load_report", None)
    if report is not None and here.first:
        print(weights_line(session.recipe, report), flush=True)

    _write_recipe(folder, session, start, extended is not None)
    if plan and here.first:
        plan.begin(folder)

    if not resume and here.first and hasattr(session.task, "untrained"):
        print("ten untrained models decode 1 2 3 ...:")
        print("\n".join(f"  {line}" for line in session.task.untrained()), flush=True)

    per_token, peak = flops(session) if flops else (None, None)  # of the model as one process has it
    status.at("the laying out of the model")
    parallel = apply(model, session.recipe.layout, session.mesh)
    torch.manual_seed(dropout_seed(recipe.train.seed, session.mesh))
    parallel.bare.train()
    trainer = Trainer(
        session.recipe, session.task, parallel, folder, session.device, precision=session.precision, flops_per_token=per_token,
        peak_flops=peak * here.size if peak else None, status=status.at, plan=plan,
    )  # fmt: skip
    if resume:
        status.at("the loading of a checkpoint")
        trainer.resume(start.checkpoint)
        if here.first:
            print(f"resumed from {start.checkpoint}" if start.checkpoint else "no checkpoint yet: from the start", flush=True)
    log: Any = Silence()
    if here.first:
        log = RunLog(folder, recipe.log, json.loads(session.recipe.model_dump_json()), trainer.metrics_position)
    try:
        trainer.run(log)
        summary = finish(trainer, log, derived)
    except torch.OutOfMemoryError:
        raise UserError(
            f"after step {trainer.progress.step}: the memory of {session.device} is full. Set a smaller layout.micro_batch (it is "
            f"{derived['micro_batch']}) or evaluate.batch, layout.checkpointing=full or layout.precision=bf16, and go on with --resume."
        ) from None
    finally:
        log.close()
    return Outcome(folder, summary, trainer)


def weights_line(recipe: Recipe, report: LoadReport) -> str:
    """What of `model.init` is used, and what of the model is new."""
    line, theirs = f"weights from {recipe.model.init}", models.config_of(recipe.model.init)
    for what, names in (("new", report.new), ("unused", report.unused)):
        line += f"; {what}: {', '.join(names)}" if names else ""
    ours = getattr(recipe.task, "classes", None)
    if report.reshaped:
        line += f"; a new head for {recipe.model.n_classes} classes: that of the weights has {theirs.n_classes}"
    elif ours and theirs.classes and list(theirs.classes) != ours:
        line += f"; its head was trained for {', '.join(theirs.classes[:5])}, and learns {', '.join(ours[:5])} from here on"
    return line


def dropout_seed(seed: int, mesh: Mesh) -> int:
    """What a process draws its dropout from: the recipe's seed where it is alone or first; processes that split the matrix products of
    the same samples draw alike, others differ."""
    return seed + 1_000_003 * mesh.rank("pipeline", "replicate", "expert", "shard", "context")


def finish(trainer: Trainer, log: RunLog, derived: dict[str, Any]) -> dict[str, Any]:
    """Last evaluation, samples, `summary.json`. The clock's kinds are kept apart: training is training."""
    p, r, task, parallel = trainer.progress, trainer.recipe, trainer.task, trainer.parallel
    metrics = dict(p.last_evaluation)
    if r.evaluate.test:
        metrics |= trainer.evaluate(log, "test")
    examples = []
    if r.evaluate.samples:
        with torch.no_grad(), trainer.clock.count("evaluate"), trainer.precision.autocast(), parallel.whole() as model:
            if parallel.mesh.world.first:  # the only one that prints them
                examples = task.examples(model.eval(), r.evaluate.samples)
                model.train()
    proof, proved = trainer.plan.after(trainer) if trainer.plan else ([], {})
    seconds = trainer.clock.seconds
    runtime = seconds["train"] + seconds["data"]
    epochs = p.step / derived["steps_an_epoch"]
    summary = {
        "recipe": r.name,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "parameters": derived["parameters"],
        "processes": derived["processes"],
        "layout": derived["layout"],
        **{f"memory_{MEASURES[name]}_per_rank": parallel.collect(value) for name, value in peaks(trainer.device).items()},
        "steps": p.step,
        "epoch": round(epochs, 4),
        "samples": p.samples,
        "tokens": p.tokens,
        "train_runtime": round(runtime, 3),
        "train_samples_per_second": round(p.samples / runtime, 3),
        "train_steps_per_second": round(p.step / runtime, 4),
        "train_tokens_per_second": round(p.tokens / runtime, 1),
        **({"train_loss": p.loss_sum / (p.step - p.skipped)} if p.step > p.skipped else {}),
        "hours_per_epoch": round(runtime / 3600 / max(epochs, 1e-9), 6),
        "skipped_steps": p.skipped,
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "best": {"metric": r.evaluate.best or f"valid/{task.best}", "value": p.best, "step": p.best_step} if p.best is not None else None,
        **proved,
        "metrics": metrics,
    }
    finite = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}  # JSON has no infinity
    if parallel.mesh.world.first:
        write_json(trainer.folder / "summary.json", summary | {"metrics": finite})
        print_summary(trainer, summary, [*examples, *proof])
    return summary


def print_summary(trainer: Trainer, summary: dict[str, Any], lines: list[str]) -> None:
    s = summary
    print()
    for key in ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "epoch"):
        if key not in s:  # no step was counted
            continue
        print(f"{key:26} {s[key]:.6g}")
    print(f"{'hours_per_epoch':26} {s['hours_per_epoch']:.6g}")
    clock = "  ".join(f"{k} {v:.1f} s" for k, v in s["seconds"].items())
    print(f"{'where the time went':26} {clock}")
    print(
        f"{'seen':26} {human(s['samples'])} samples, {human(s['tokens'])} tokens"
        + (f"; {s['skipped_steps']} steps skipped" if s["skipped_steps"] else "")
    )
    for name, value in s["metrics"].items():
        print(f"{name:26} {value:.4f}")
    if best := s["best"]:
        text = f"{'best':26} {best['metric']} {best['value']:.4f}, at step {best['step']:,} of {s['steps']:,}"
        print(coloured(text, "green", sys.stdout))
    for line in lines:
        print(line)
    print(f"run folder: {trainer.folder}", flush=True)
