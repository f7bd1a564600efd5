"""A run: a recipe is trained into a new run folder, or resumed in an old one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradus import files, models
from gradus import recipe as recipes
from gradus.errors import Diverged, EnvironmentFault, UserError, colour
from gradus.models.finite import first_not_finite, weights_not_finite
from gradus.models.weights import LoadReport
from gradus.parallel import check
from gradus.parallel import world as worlds
from gradus.parallel.status import Status, has_parent, typed, watched
from gradus.parallel.world import World
from gradus.recipe.schema import Layout, Recipe
from gradus.text import count, say
from gradus.train import resolve
from gradus.train.checkpoint import is_finite
from gradus.train.clock import MEASURES, begin_run, peaks
from gradus.train.evaluation import Evaluation, evaluate, examples
from gradus.train.folder import run_folder, write_json, write_text
from gradus.train.log import RunLog, check_trackers, environment
from gradus.train.loop import Hook, Trainer
from gradus.train.machine import bf16_units
from gradus.train.metrics import COUNTED_STEP, MEND_TRAINING, Metrics, TrafficCount
from gradus.train.optim import check_eps
from gradus.train.resume import DATA, LENGTH, Start, check_data, check_same, extend, read_data, start_of
from gradus.train.sampler import Sampler
from gradus.train.saving import Saving, resume_run
from gradus.train.schedule import unusual
from gradus.train.session import Session, derive, describe, open_session
from gradus.train.signals import Stopped


@dataclasses.dataclass
class Outcome:
    """How a run ended."""

    folder: Path
    summary: dict[str, Any]
    trainer: Trainer


class Plan(Hook):
    """What foresees a run and follows it; handed in from above (proof.prove.Proof). This one foresees nothing."""

    step: int | None = None  # of this start, that is measured

    def before(self, session: Session, position: tuple[int, int]) -> None:
        """Before the model is built; the run begins at `position` (epoch, step within it). Collective.

        Raises UserError for what will not fit.
        """

    def begin(self, folder: Path) -> None:
        """The run folder is there. On rank 0."""


def train(
    recipe: Recipe, *, resume: Path | None = None, flops: Any = None, plan: Plan | None = None,
    world: World = World(), longer: bool = False, data_changed: bool = False, hooks: Sequence[Hook] = (),
) -> Outcome:  # fmt: skip
    """Train a recipe into a run folder, or go on with the run in `resume`. world: this process among all that do.

    longer: the user gave a new length for the resumed run; a finished one must not end at once. data_changed: it may go
    on with other data.
    `flops(session) -> (model FLOPs a token, the device's peak FLOP/s or None)` is handed in from above, for MFU; so is
    `plan`. hooks: called after the log and the metrics, before evaluations and checkpoints.
    Raises UserError, Diverged once everything is saved, and Stopped after a signal, likewise.
    """
    plan = plan or Plan()
    if not begin_run() and world.first:
        say("note: this process has trained before: its peak of memory may be of then")
    with contextlib.ExitStack() as stack:
        quorum = None
        if recipe.layout.elastic:
            from gradus.train.elastic import Elastic, enter

            quorum, world = enter(recipe, world)
        folder = stack.enter_context(_own_folder(recipe, resume, world))
        resume = None if world.newcomer else resume
        _validate(recipe, world, resume is None)
        status = stack.enter_context(Status(folder, world))
        stack.enter_context(watched(folder, world, passing=(Stopped,)))

        start = start_of(recipe, folder, resume is not None, world)
        status.at("opening the data")
        session = open_session(recipe, start.tokenizers, world)
        extended = extend(start.before, session, start.step, longer) if start.before else None
        changed = check_data(folder, session.task, start.step, data_changed) if start.before else None
        _print_run(session, [extended, changed], resume is None)
        status.at("the plan")
        if not world.newcomer:
            plan.before(session, start.position)
        else:
            _check_newcomer(session, folder)
        status.at("building the model")
        given = start.checkpoint or world.newcomer  # its weights come from elsewhere
        new = session.deferred(values=not given or session.recipe.adapter is not None)
        _write_folder(folder, session, start, extended is not None)
        if world.first:
            if start.step < session.steps.total:  # else the run has ended, and what was planned and measured stays
                plan.begin(folder)
            _print_model(session, new.report, resume is None)
        per_token, peak = flops(session) if flops else (None, None)  # of the model as one process has it
        status.at("the laying out of the model")
        trainer = Trainer(session, session.lay_out(new), folder)
        trainer.at = status.at
        if start.before is None and world.first:
            files.link_latest(folder, Path("runs", recipe.name))
        if resume:
            status.at("the loading of a checkpoint")
            resume_run(trainer, start.checkpoint)

        evaluation, metrics = Evaluation(), Metrics(per_token, peak * world.size if peak else None)
        with _full_memory_as_user_error(trainer, session.steps.micro_batch):
            with trainer.signals.noted():  # from before metrics.jsonl is there, by which others see that the run is on
                own: list[RunLog | Sampler] = [Sampler(trainer.device)]
                written = (folder, recipe.log, recipe.model_dump(mode="json"))
                if world.first:
                    own.insert(0, RunLog(*written, trainer.metrics_position, quorum is not None))
                opened = [stack.enter_context(contextlib.closing(hook)) for hook in own]
                traffic = TrafficCount(plan.step or COUNTED_STEP)
                trainer.hooks[:0] = [*opened, plan, traffic, metrics, *hooks, evaluation, Saving(metrics)]
                if quorum:
                    elastic = Elastic(quorum, metrics, lambda: RunLog(*written, once=True))
                    trainer.hooks.insert(len(opened), elastic)
                    stack.callback(elastic.close)
                    elastic.begin(trainer)
                trainer.run()
            summary, diverged = trainer.together(lambda: (finish(trainer, evaluation, session), divergence(trainer)))
            outcome = Outcome(folder, summary, trainer)
            if quorum:
                quorum.close()
    if diverged:
        raise Diverged(diverged)
    return outcome


def start(
    name: str, overrides: list[str], context: resolve.RunContext, *, resume: bool = False, auto_resume: bool = False,
    **options: Any,
) -> Outcome:  # fmt: skip
    """`train` of the recipe, or of the run, that a command line means; options: its plan, flops and hooks. auto_resume:
    resume where log.dir holds a run already."""
    folder = None
    if resume:
        folder = resolve.run_to_resume(name, overrides, context)
    elif auto_resume:
        folder = resolve.run_to_auto_resume(name, overrides, context)
    context = dataclasses.replace(context, resuming=folder is not None)
    recipe = resolve.load_and_print_notes(str(folder or name), overrides, context)
    longer = resume and any(word.startswith(("train.steps=", "train.epochs=")) for word in overrides)
    return train(recipe, resume=folder, world=context.world, longer=longer, **options)


def _validate(recipe: Recipe, world: World, new: bool) -> None:
    """Raises UserError for what no process has to be asked for."""
    check.validate(recipe, world.size)
    models.check_built(recipe.model)
    if new:  # an old run goes on as it began
        check_eps(recipe)
    if recipe.adapter:
        models.base_of(recipe.model)  # raises where there is none to keep it beside


@contextlib.contextmanager
def _own_folder(recipe: Recipe, resume: Path | None, world: World) -> Iterator[Path]:
    """`run_folder`, of which rank 0 (or the parent that started all ranks) is the owner. The processes meet here; all
    go on with a run, or none."""
    if world.newcomer:
        yield resume or Path(recipe.log.dir)
        return
    with contextlib.ExitStack() as stack:
        folder, problem = resume or recipe.log.dir, None
        if world.first:
            try:
                if not (has_parent() and folder):
                    folder = stack.enter_context(run_folder(recipe.log, recipe.name, resume))
                check_trackers(recipe.log)
            except UserError as e:
                problem = str(e)
        worlds.meet(world, recipe.layout)
        folder, problem, resumes = worlds.from_first((folder, problem, resume is not None))
        if problem:
            raise UserError(problem)
        if resumes != (resume is not None):
            seen = "a run that this process does not see" if resumes else "no run, and this process sees one"
            raise EnvironmentFault(f"{folder}: rank 0 found {seen}. Let all hosts share log.dir, and start again.")
        folder = Path(folder)
        for place in (folder, folder / "checkpoints") if world.first else ():
            files.sweep(place, locked=True)
        yield folder


def _check_newcomer(session: Session, folder: Path) -> None:
    """Raises EnvironmentFault, since the others go on, where this replica would take other steps than the run."""
    try:
        check_same(recipes.load(folder, configure=None), session.recipe)
        check_data(folder, session.task, 0, False)
    except UserError as e:
        raise EnvironmentFault(f"this replica reads another recipe, or other data, than the run: {e}") from None


def emulated(layout: Layout, device: torch.device) -> str | None:
    """A note where this processor has no instructions for the layout's bf16."""
    half = next((key for key in ("precision", "param_dtype") if (getattr(layout, key) or "").endswith("bf16")), None)
    if half is None or device.type != "cpu" or bf16_units() is not False:
        return None
    slow = "this processor has no instructions for bf16, and may take many times as long as in fp32"
    instead = "fp32" if half == "precision" else "null"
    return f"note: layout.{half}={getattr(layout, half)}: {slow}. layout.{half}={instead} is faster here."


@contextlib.contextmanager
def _full_memory_as_user_error(trainer: Trainer, micro_batch: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"after step {trainer.progress.step}: the memory of {trainer.device} is full. Set a smaller "
            f"layout.micro_batch (it is {micro_batch}) or evaluate.batch, layout.checkpointing=full or "
            "layout.precision=bf16, and continue with --resume."
        ) from None


def _write_folder(folder: Path, session: Session, start: Start, extended: bool) -> None:
    """recipe.yaml of a new run, and of one that is to become longer; what the data are."""
    folder.mkdir(parents=True, exist_ok=True)
    if not session.mesh.world.first:
        return
    if content := session.task.content():
        write_json(folder / DATA, read_data(folder) | content)
    if start.before is None:
        command = {"command": text} if (text := typed("train")) else {}
        write_json(folder / "environment.json", environment(session.device) | command)
        write_text(folder / "recipe.yaml", recipes.dump(session.recipe))
    elif extended:
        (folder / "summary.json").unlink(missing_ok=True)  # of the shorter run
        length = {key: getattr(session.recipe.train, key) for key in LENGTH}
        stored = start.before.model_copy(update={"train": start.before.train.model_copy(update=length)})
        write_text(folder / "recipe.yaml", recipes.dump(stored))


def _print_run(session: Session, changes: list[str | None], new: bool) -> None:
    """Print what the run will do, and what its settings may cost."""
    warning = unusual(session.recipe, session.steps.total) if new else None
    slow = emulated(session.recipe.layout, session.device)
    notes = (f"note: {note}" for note in session.task.notes())
    lines = (describe(derive(session)), *changes, warning, slow, *notes)
    if session.mesh.world.first:
        say("\n".join(filter(None, lines)))


def _print_model(session: Session, report: LoadReport | None, new: bool) -> None:
    """Print where its weights come from and, for a task that can show it, the result of an untrained model."""
    if report:
        say(weights_line(session.recipe, report))
    if new and hasattr(session.task, "untrained"):
        say("\n  ".join(["before training, from ten seeds, 1 2 3 ... is decoded as:", *session.task.untrained()]))


def weights_line(recipe: Recipe, report: LoadReport) -> str:
    """What of `model.init` is used, and what of the model is new."""
    line, theirs = f"weights from {recipe.model.init}", report.stored
    new = [name for name in report.new if not (recipe.adapter and name.endswith((".a.weight", ".b.weight")))]
    for what, names in (("new", new), ("unused", report.unused), ("interpolated", report.resized)):
        line += f"; {what}: {', '.join(names)}" if names else ""
    line += f"; an adapter of rank {recipe.adapter.rank} beside them" if recipe.adapter else ""
    ours = getattr(recipe.task, "classes", None)
    if report.reshaped:
        line += f"; a new head for {recipe.model.n_classes} classes: that of the weights has {theirs.n_classes}"
    elif ours and theirs.classes and list(theirs.classes) != ours:
        line += f"; its head was trained for {', '.join(theirs.classes[:5])}"
        line += f", and learns {', '.join(ours[:5])} from here on"
    return line


def finish(trainer: Trainer, evaluation: Evaluation, session: Session) -> dict[str, Any]:
    """Last evaluation, samples, `summary.json`."""
    r, parallel = trainer.recipe, trainer.parallel
    metrics = dict(trainer.progress.last_evaluation)
    if r.evaluate.test:
        metrics |= evaluation.evaluate(trainer, "test")
    shown = examples(trainer, r.evaluate.samples)
    lines = ["", "samples after training:", *shown] if shown else []
    summary = summary_of(trainer, session) | {"metrics": metrics}
    for hook in trainer.hooks:
        lines += hook.end(trainer, summary)
    if parallel.mesh.world.first:
        finite = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}  # JSON has no infinity
        write_json(trainer.folder / "summary.json", summary | {"metrics": finite})
        print_summary(trainer, summary, lines)
    return summary


def divergence(trainer: Trainer) -> str | None:
    """Why a run that has ended has no weights of use: its last validation is not finite, and none before was. Where one
    was, a note says that the last is not. Collective."""
    p, parallel, task = trainer.progress, trainer.parallel, trainer.task
    if is_finite(p.last_evaluation, "valid/loss"):
        return None
    weights = weights_not_finite((h.name, h.local) for h in parallel.local_parameters)
    where = next(filter(None, worlds.gathered(weights)), None)
    if where is None and not parallel.several:
        run = functools.partial(evaluate, parallel, task, "valid", trainer.precision, trainer.device)
        where = first_not_finite(parallel.bare, run)
    text = f"{trainer.folder}: its logits are not finite (step {p.step:,}{f', {where}' if where else ''})"
    if p.best is not None:
        if parallel.mesh.world.first:
            say(f"note: {text}; those of the best checkpoint, of step {p.best_step:,}, are")
        return None
    return f"{text}, and no checkpoint is better. {MEND_TRAINING}."


def summary_of(trainer: Trainer, session: Session) -> dict[str, Any]:
    """What summary.json holds beside the metrics. The clock's kinds stay separate: training is training. Collective."""
    p, r, seconds = trainer.progress, trainer.recipe, trainer.clock.seconds
    runtime = seconds["train"] + seconds["data"]
    epochs = p.step / session.steps.order.steps_per_epoch
    best = {"metric": r.evaluate.best or f"valid/{trainer.task.best}", "value": p.best, "step": p.best_step}
    memory = peaks(trainer.device)
    return {
        "recipe": r.name,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "parameters": models.count(r.model)["total"],
        "trained_parameters": models.trainable(r.model),
        "processes": session.mesh.world.size,
        "layout": session.mesh.describe(),
        **{f"memory_{MEASURES[name]}_per_rank": worlds.gathered(value) for name, value in memory.items()},
        "steps": p.step,
        "epoch": round(epochs, 4),
        "samples": p.samples,
        "tokens": p.tokens,
        "train_runtime": round(runtime, 3),
        "train_samples_per_second": round(p.samples / runtime, 3),
        "train_steps_per_second": round(p.step / runtime, 4),
        "train_tokens_per_second": round(p.tokens / runtime, 1),
        **({"train_loss": p.loss_sum / (p.step - p.skipped)} if p.step > p.skipped else {}),
        "hours_per_epoch": float(f"{runtime / 3600 / max(epochs, 1e-9):.3g}"),
        "skipped_steps": p.skipped,
        "seconds": {k: round(v, 3) for k, v in seconds.items()},
        "best": best if p.best is not None else None,
    }


def print_summary(trainer: Trainer, s: dict[str, Any], lines: list[str]) -> None:
    keys = [f"train_{key}" for key in ("runtime", "samples_per_second", "steps_per_second", "loss")]
    keys += ["epoch", "hours_per_epoch"]
    texts = {key: f"{s[key]:.6g}" for key in keys if key in s}  # no train_loss where no step was counted
    texts["where the time went"] = "  ".join(f"{k} {v:.1f} s" for k, v in s["seconds"].items())
    texts["seen"] = f"{count(s['samples'])} samples, {count(s['tokens'])} tokens"
    texts["seen"] += f"; {s['skipped_steps']} steps skipped" if s["skipped_steps"] else ""
    texts |= {name: f"{value:.4f}" for name, value in s["metrics"].items()}
    say("\n".join(["", *(f"{name:26} {text}" for name, text in texts.items())]), indent=27)
    if best := s["best"]:
        text = f"{'best':26} {best['metric']} {best['value']:.4f}, at step {best['step']:,} of {s['steps']:,}"
        say(colour(text, "green"), indent=27)
    say("\n".join([*lines, f"run folder: {trainer.folder}"]))
