"""The trainer. One step, exact: the loss is a sum over the global batch divided by its global count of targets."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus.data.loader import Loader, Plan, Step
from gradus.errors import UserError
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import DATA, Mesh
from gradus.parallel.replicate import POWERSGD_START
from gradus.parallel.traffic import Traffic
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.tasks.base import Task
from gradus.train.checkpoint import Checkpoints
from gradus.train.clock import MEASURES, Clock, peaks
from gradus.train.log import RunLog, human
from gradus.train.optim import make_optimizer
from gradus.train.precision import Precision
from gradus.train.sampler import Sampler
from gradus.train.schedule import learning_rate

HOPELESS = 100  # steps in a row that are not finite: skipping more of them will not help
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # ask for a stop; Slurm sends the last before a time limit
COUNTED_STEP = 2  # of a start, whose traffic between processes is counted: the first one may set things up
SETTLED = 5  # steps of a start whose times are kept apart from those of the others
TIMED = 4096  # latest steps whose times are kept


@dataclasses.dataclass
class Progress:
    """Where a run stands; all of it survives a resume."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0
    epoch_step: int = 0  # steps taken in this epoch
    accumulations: int = 0  # forward-backward passes
    samples: int = 0
    tokens: int = 0  # without padding
    skipped: int = 0  # steps left out because they were not finite
    loss_sum: float = 0.0  # of the losses of the steps that were not skipped, for the mean over the run
    best: float | None = None
    best_step: int | None = None
    best_metric: str | None = None
    last_evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluation_due: bool = False  # a stop came before it was done


class Stopped(Exception):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGUSR1) and has saved itself."""

    def __init__(self, signal_number: int, checkpoint: Path):
        self.signal_number, self.checkpoint = signal_number, checkpoint


def alone(model: nn.Module, recipe: Recipe) -> Parallel:
    """A model that one process has for itself."""
    return Parallel(model, recipe.layout, Mesh.single())


@dataclasses.dataclass
class Agreed:
    """What the processes told each other before a step."""

    counts: dict[str, int]  # kind of target → how many the global batch has
    tokens: int
    signal: int | None  # that one of them got
    saved: bool  # the checkpoint under way is on every process's disk


class Stepper:
    """The optimizer step of a laid out model on a task: what a run takes, and what the plan traces."""

    def __init__(self, recipe: Recipe, task: Task, model: nn.Module | Parallel, device: torch.device, precision: Precision):
        self.recipe, self.task, self.device, self.precision = recipe, task, device, precision
        self.parallel = model if isinstance(model, Parallel) else alone(model, recipe)
        self.optimizer = make_optimizer(self.parallel.trained(), recipe.optimizer)
        self.progress = Progress()
        self.at: Callable[[str, int], None] = lambda what, step: None  # tells what this process is doing
        self.warm = False

    def agree(self, micro_batches: list[dict[str, Any]]) -> Agreed:
        """What the processes know together of the coming step."""
        raise NotImplementedError

    def step(self, micro_batches: list[dict[str, Any]], counts: dict[str, int] | None = None) -> tuple[Tensor, Tensor]:
        """One optimizer step over one global batch. Returns (loss, gradient norm), scalars that stay on the device.

        Each kind of target (tokens, next sentences) has its own count over the whole batch, known before the first backward pass.
        So accumulation, ragged lengths, micro-batch sizes and processes change nothing but rounding: never a mean of means.
        counts: None asks the other processes.
        """
        counts = counts or self.agree(micro_batches).counts
        parallel, optimizer = self.parallel, self.optimizer

        def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            with self.precision.autocast():
                sums = self.task.losses(model, batch)
            return sum(sums[kind] / max(1, counts[kind]) for kind in sums)

        self.at("the forward and backward passes with their collectives", self.progress.step + 1)
        batches = [self.precision.cast_batch(self.task.to_device(batch, self.device)) for batch in micro_batches]
        if not self.warm:
            parallel.warm_up(batches[0], loss_of)
            self.warm = True
        loss = parallel.forward_backward(batches, loss_of, self.precision.scaled)
        if optimizer is not None:
            self.precision.unscale(optimizer, parallel)
        self.at("the gradient norm", self.progress.step + 1)
        norm = parallel.norm().to(self.device)  # with layout.offload gradients lie on the host
        if optimizer is not None:
            if self.recipe.train.clip_norm is not None:
                parameters = [p for _, p in parallel.trained() if p.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(parameters, self.recipe.train.clip_norm, norm)
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            self.precision.step(optimizer, (~finite).float())  # a bad gradient never reaches the weights
        parallel.after_step()
        parallel.zero_grad()
        return loss, norm


class Trainer(Stepper):
    """Trains one model on one task as a recipe says. `model` is already on its device, with its layout applied: a module that this
    process has for itself, or what `parallel.apply.apply` made. Every process of a layout has its Trainer and calls the same methods.
    """

    def __init__(
        self, recipe: Recipe, task: Task, model: nn.Module | Parallel, folder: Path, device: torch.device, *,
        precision: Precision, flops_per_token: float | None = None, peak_flops: float | None = None, status: Callable[[str, int], None] | None = None,
        plan: Any = None,
    ):  # fmt: skip
        super().__init__(recipe, task, model, device, precision)
        self.model = self.parallel.bare
        self.at = status or self.at
        self.checkpoints = Checkpoints(folder / "checkpoints", recipe.train.keep)
        self.folder = folder
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.clock = Clock(device)
        self.loader = Loader(
            task.splits["train"],
            task.plan("train", samples=recipe.batch.samples, tokens=recipe.batch.tokens),
            task.collate,
            prepare=task.prepare,
            seed=recipe.train.seed,
            micro_batch=recipe.layout.micro_batch,
            workers=recipe.data.workers,
            prefetch=recipe.data.prefetch,
            persistent=recipe.data.persistent,
            pin=recipe.data.pin and device.type == "cuda",
            rank=self.parallel.mesh.rank(*DATA),
            world=self.parallel.mesh.size(*DATA),
        )
        self.last_step = total_steps(recipe, self.loader.plan)
        self.metrics_position = 0  # in metrics.jsonl, of what the last checkpoint knows of; no checkpoint, nothing
        self.asked = Asked()
        self.signal: int | None = None  # that all processes know of
        self.apart_tokens = 0  # seen by this worker alone since the workers met
        self.traffic: Traffic | None = None
        self.plan = plan  # train.session.Plan
        self.times: collections.deque[tuple[int, float, int]] = collections.deque(maxlen=TIMED)  # (step, seconds, tokens); the latest is last
        self.start_step = 0  # where this start began
        self.waited = (0, 0.0)  # (step, seconds of training) when the device was last known to have done all
        self.sampler = Sampler(device)
        self.in_a_row = 0  # steps that were not finite, up to now
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []  # (step, learning rate, loss, gradient norm) not read yet

    def agree(self, micro_batches: list[dict[str, Any]]) -> Agreed:
        """Sums over all processes of what each knows of the coming step."""
        speaks, kinds = self.parallel.speaks, sorted(micro_batches[0]["counts"])
        mine = [sum(b["counts"][kind] for b in micro_batches) * speaks for kind in kinds]
        mine.append(sum(b["n_tokens"] for b in micro_batches) * speaks)
        mine += [number in self.asked for number in SIGNALS]
        mine.append(self.checkpoints.saved())
        if self.parallel.apart and not self._meets():  # workers that are apart ask nobody
            return Agreed(dict(zip(kinds, mine)), mine[len(kinds)], None, False)
        *counts, saved = self.parallel.agree([int(n) for n in mine])
        asked = [number for number, n in zip(SIGNALS, counts[-len(SIGNALS) :]) if n]
        self.signal = self.signal or (int(asked[0]) if asked else None)
        if self.parallel.apart:  # they agree on when to stop; their losses stay their own
            counts = mine
        return Agreed(dict(zip(kinds, counts)), counts[len(kinds)], self.signal, saved == self.parallel.mesh.world.size)

    def _meets(self) -> bool:
        """Whether the workers meet after the coming step."""
        return (self.progress.step + 1) % self.parallel.apart.every == 0 or self.progress.step + 1 == self.last_step

    # ------------------------------------------------------------ the run

    def run(self, log: RunLog) -> Progress:
        """Train to the last step. Raises Stopped after a signal, UserError on a loss that is not finite."""
        p, recipe = self.progress, self.recipe
        every = recipe.train.checkpoint_every
        with stop_signals(self.asked) as asked:
            p.evaluation_due |= recipe.evaluate.at_start and p.step == 0 and not p.last_evaluation
            self._evaluate_if_due(log)
            if self._stop_signal(asked):
                raise Stopped(self.signal, self.save(log, wait=True))
            self.start, self.start_step = self._mark(), p.step
            self.waited = p.step, self.start[0]
            self.mark = mark = self.start
            log.stepped(p.step, self.last_step)
            while p.step < self.last_step:
                n_steps = len(self.loader.plan.epoch(p.epoch))
                for step in self._steps():
                    with self.plan.around(self, step) if self.plan else contextlib.nullcontext():
                        rate, loss, norm = self.take(step)
                    log.stepped(p.step, self.last_step)
                    before, mark = mark, self._mark()
                    self.times.append((p.step, mark[0] - before[0], mark[2] - before[2]))
                    self.pending.append((p.step, rate, loss, norm))
                    if p.step - self.start_step == SETTLED and self.device.type != "cpu":
                        with self.clock.count("train", wait=True):
                            pass
                        mark = self._mark()
                        self._share_time(mark[0])
                    last = p.step == self.last_step
                    if p.step % recipe.log.every == 0 or last:
                        self._flush(log)
                    p.evaluation_due |= self._evaluate_now(p.epoch_step == n_steps)
                    if self.parallel.apart and p.step % self.parallel.apart.every and not last:
                        continue  # with the weights of one worker there is nothing to evaluate or keep
                    self._evaluate_if_due(log)
                    stop = self._stop_signal(asked)
                    if stop or last or (every and p.step % every == 0):
                        saved = self.save(log, wait=bool(stop) or last)
                        if stop and (not last or p.evaluation_due):
                            raise Stopped(stop, saved)
                    if last:
                        return p
                p.epoch, p.epoch_step = p.epoch + 1, 0
        return p

    def take(self, step: Step) -> tuple[float, Tensor, Tensor]:
        """One step of a run, and the count of it in `progress`. Returns (learning rate, loss, gradient norm); the last two as `step` does."""
        p, recipe = self.progress, self.recipe
        rate = learning_rate(recipe.schedule, recipe.optimizer.lr, p.step + 1, self.last_step, recipe.model.d_model)
        for group in self.optimizer.param_groups if self.optimizer else ():
            group["lr"] = rate
        with self.clock.count("train"):
            agreed, loss, norm = self._train(step)
        if agreed.saved:
            self.checkpoints.finish(self.parallel)
        p.step, p.epoch_step, p.accumulations = p.step + 1, step.step + 1, p.accumulations + len(step.micro_batches)
        p.samples += step.samples
        p.tokens += agreed.tokens
        return rate, loss, norm

    def _train(self, step: Step) -> tuple[Agreed, Tensor, Tensor]:
        """One step of the run, and what goes with it between processes. In apart workers, `tokens` come when they meet."""
        self.at("the all-reduce of counts", self.progress.step + 1)
        agreed = self.agree(step.micro_batches)
        if self.parallel.apart:
            counting = self._meets()
        else:
            at = COUNTED_STEP if self.recipe.layout.compress != "powersgd" else COUNTED_STEP + POWERSGD_START
            counting = self.parallel.several and self.progress.step - self.start_step + 1 == at and self.recipe.layout.compile == "none"
        if counting:
            self.traffic = Traffic()
        with self.traffic if counting else contextlib.nullcontext():
            loss, norm = self.step(step.micro_batches, agreed.counts)
            if self.parallel.apart:
                self.apart_tokens += agreed.tokens
                agreed.tokens = 0
                if self._meets():
                    self.at("the meeting of the workers", self.progress.step + 1)
                    self.parallel.apart.meet()
                    (agreed.tokens,) = self.parallel.agree([self.apart_tokens])
                    self.apart_tokens = 0
        self.at("reading data", self.progress.step + 2)
        return agreed, loss, norm

    def _stop_signal(self, asked: Asked) -> int | None:
        """The signal to stop at, if any: one process's own, or one that all agreed on."""
        if asked and not self.parallel.several:
            self.signal = asked[0]
        return self.signal

    def _steps(self) -> Iterator[Any]:
        """The loader's steps from where the run stands, with the time spent waiting for each counted."""
        steps = iter(self.loader.steps(self.progress.epoch, self.progress.epoch_step))
        while True:
            with self.clock.count("data"):
                step = next(steps, None)
            if step is None:
                return
            yield step

    def _evaluate_now(self, epoch_ends: bool) -> bool:
        every, p = self.recipe.evaluate.every, self.progress
        if "valid" not in self.task.splits:
            return False
        return p.step == self.last_step or (p.step % every == 0 if every else epoch_ends)

    def _evaluate_if_due(self, log: RunLog) -> None:
        """A stop does not wait for an evaluation, which may take minutes: it is cut, and done first when the run goes on."""
        if self.progress.evaluation_due:
            with contextlib.suppress(Cut):
                self.evaluate(log)

    def _flush(self, log: RunLog) -> None:
        """Read the pending losses from the device (the only place that waits for it), check them, log them."""
        if not self.pending:
            return
        with self.clock.count("train"):
            values = torch.stack([torch.stack((loss.float(), norm.float())) for *_, loss, norm in self.pending]).tolist()
        p, (step, rate, *_) = self.progress, self.pending[-1]
        for (at, *_), (loss, norm) in zip(self.pending, values):
            scaler_skips = self.precision.scaler is not None and math.isfinite(loss)  # fp16: the scaler backs off by itself
            if not (math.isfinite(loss) and math.isfinite(norm)):
                p.skipped += 1
                self.in_a_row += 1
                if self.in_a_row >= HOPELESS or (self.recipe.train.on_nonfinite == "stop" and not scaler_skips):
                    self._stop_nonfinite(at, loss, norm, log)
            else:
                self.in_a_row = 0
                p.loss_sum += loss
        self.pending.clear()
        before, self.mark = self.mark, self._mark()
        elapsed, n_samples, n_tokens = (now - then for now, then in zip(self.mark, before))
        if self.device.type != "cpu":
            self._share_time(self.mark[0])
        if self.plan:
            self.plan.flushed(self)
        loss, norm = values[-1]
        rows = [
            Row("train/loss", loss, self.task.loss_unit, step),
            Row("train/lr", rate, "", step),
            Row("train/grad_norm", norm, "", step),
            Row("train/samples", p.samples, "samples", step),
            Row("train/tokens", p.tokens, "tokens", step),
            Row("train/samples_per_s", n_samples / elapsed, "samples/s", step),
            Row("train/tokens_per_s", n_tokens / elapsed, "tokens/s", step),
            Row("train/data_wait", self.clock.seconds["data"], "s", step),
            *(Row(f"memory/{name}", value, "bytes", step) for name, value in peaks(self.device).items()),
        ]
        speed = f"{human(n_tokens / elapsed)} tokens/s" if self.task.counts_tokens else f"{human(n_samples / elapsed)} samples/s"
        if self.flops_per_token and self.peak_flops:
            mfu = self.flops_per_token * n_tokens / elapsed / self.peak_flops
            rows.append(Row("train/mfu", mfu, "of peak", step, {"convention": "model FLOPs, full attention, no recompute"}))
            speed += f"  MFU {mfu:.1%}"
        rows += self.sampler.rows(step)
        if self.traffic:  # of one step, or of one meeting of workers that are apart
            conditions = {"of": "one meeting" if self.parallel.apart else "one step", "counted": "ring algorithms, this process"}
            rows += [Row(f"traffic/{name}", c.sent, "bytes", step, {**conditions, "calls": c.calls}) for name, c in self.traffic.found.items()]
            rows.append(Row("traffic/sent", self.traffic.sent, "bytes", step, conditions))
            if self.plan:
                self.plan.counted(rows[-1 - len(self.traffic.found) :])
            self.traffic = None
        log.write(rows)
        spent, _, _, steps = (now - then for now, then in zip((*self.mark, p.step), (*self.start, self.start_step)))
        left = (self.last_step - p.step) * spent / max(1, steps)
        seen = f"{human(p.tokens)} tokens" if self.task.counts_tokens else f"{human(p.samples)} samples"
        memory, n_bytes = next(iter(peaks(self.device).items()))
        accumulation = f"  accumulation {p.accumulations}" if p.accumulations != p.step else ""
        log.line(
            f"step {p.step}/{self.last_step}{accumulation}  loss {loss:.4f}  lr {rate:.2e}  {speed}  {seen}"
            f"  {MEASURES[memory]} {n_bytes / 1e9:.2f} GB  ETA {int(left) // 60}:{int(left) % 60:02d}",
            done=p.step / self.last_step,
        )

    def _share_time(self, now: float) -> None:
        """Where steps run by themselves, only their mean over a stretch between two waits is known. Call after a wait, at `now` s of training."""
        (step, then), self.waited = self.waited, (self.progress.step, now)
        n = self.progress.step - step
        latest = [self.times.pop() for _ in range(min(n, len(self.times)))][::-1]
        self.times.extend((at, (now - then) / n, tokens) for at, _, tokens in latest)

    def _mark(self) -> tuple[float, int, int]:
        """(seconds of training and waiting for data, samples, tokens) so far."""
        return self.clock.seconds["train"] + self.clock.seconds["data"], self.progress.samples, self.progress.tokens

    def _stop_nonfinite(self, step: int, loss: float, norm: float, log: RunLog) -> None:
        last = self.checkpoints.latest()
        good = f"The last good checkpoint is {last}." if last else "There is no checkpoint yet."
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        log.write([Row("train/nonfinite", str(loss), "", step)])
        raise UserError(
            f"step {step}: {what}. {good} Try a smaller optimizer.lr, a longer schedule.warmup_steps, train.clip_norm=1.0, "
            "or layout.precision=bf16 or fp32; train.on_nonfinite=skip leaves such steps out and counts them."
        )

    # ------------------------------------------------------------ evaluation and state

    @torch.no_grad()
    def evaluate(self, log: RunLog | None = None, split: str = "valid") -> dict[str, float]:
        """Every sample of the split exactly once; metrics are sums divided by counts. Keeps the best checkpoint."""
        with self.clock.count("train", wait=True):
            pass  # what the device still has to do of the steps is training time
        several = self.parallel.several
        with self.clock.count("evaluate"), contextlib.nullcontext() if several else self.asked.at_once():
            found = evaluate(self.parallel, self.task, split, self.precision, self.device, self._cut_together if several else None)
            metrics = {f"{split}/{k}": v for k, v in found.items()}
        p = self.progress
        if log is not None:
            log.write([Row(name, value, self.task.units.get(name.split("/")[1], ""), p.step) for name, value in metrics.items()])
            log.line(f"step {p.step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        if split == "valid":
            p.last_evaluation, p.evaluation_due = metrics, False
            name, higher = self._chosen_by()
            value, sign = metrics[name], 1 if higher else -1
            if p.step and math.isfinite(value) and (p.best is None or sign * value > sign * p.best):
                p.best, p.best_step, p.best_metric = value, p.step, name
                with self.clock.count("checkpoint"):
                    self.at("the gathering of the best weights", p.step)
                    evaluated = {"step": p.step, "metric": name, "value": value, "metrics": metrics}
                    self.checkpoints.save_best(self.parallel, self.task.tokenizers, evaluated)
        return metrics

    def _chosen_by(self) -> tuple[str, bool]:
        """(the metric that makes the best checkpoint, whether higher is better)."""
        name = self.recipe.evaluate.best or f"valid/{self.task.best}"
        return name, self.task.higher_is_better(name.split("/")[1])

    def _cut_together(self) -> None:
        """Between two batches of an evaluation: raises Cut on every process once any of them was asked to stop."""
        self.at("the evaluation", self.progress.step)
        numbers = self.parallel.agree([int(number in self.asked) for number in SIGNALS])
        asked = [number for number, n in zip(SIGNALS, numbers) if n]
        if asked or self.signal:
            self.signal = self.signal or int(asked[0])
            raise Cut

    def save(self, log: RunLog, wait: bool = False) -> Path:
        """Write a checkpoint; with several processes in the background, unless `wait`."""
        self._flush(log)
        state = {"progress": dataclasses.asdict(self.progress), "seconds": self.clock.seconds, "metrics_position": log.rows.position}
        with self.clock.count("checkpoint"):
            self.at("the writing of a checkpoint", self.progress.step)
            return self.checkpoints.save(self.progress.step, self.parallel, self.task.tokenizers, self.optimizer, self.precision, state, wait)

    def resume(self, checkpoint: Path | None) -> None:
        """Go on from a checkpoint (None: from the start) and with the best weights that are kept. Collective."""
        if checkpoint is not None:
            state = self.checkpoints.load(checkpoint, self.parallel, self.optimizer, self.precision, self.recipe.train.seed)
            self.progress = Progress(**state["progress"])
            self.clock.seconds |= state["seconds"]
            self.metrics_position = state["metrics_position"]
        p, (metric, higher) = self.progress, self._chosen_by()
        # they may have been kept after the checkpoint, and by another metric: what they were evaluated to stands with them
        best = self.checkpoints.best(metric, higher, {"step": p.best_step, "metric": p.best_metric, "value": p.best})
        p.best, p.best_step, p.best_metric = (best["value"], best["step"], metric) if best else (None, None, None)


def total_steps(recipe: Recipe, plan: Plan) -> int:
    """Optimizer steps of the whole run; part of an epoch counts its steps, rounded up."""
    if recipe.train.steps is not None:
        return recipe.train.steps
    whole = int(recipe.train.epochs)
    steps = sum(len(plan.epoch(e)) for e in range(whole)) if plan.batch_samples is None else whole * plan.steps_per_epoch
    rest = recipe.train.epochs - whole
    return steps + (math.ceil(round(rest * len(plan.epoch(whole)), 6)) if rest else 0) or 1  # 1.1 - 1 is a little more than 0.1


@torch.no_grad()
def evaluate(
    parallel: Parallel, task: Task, split: str, precision: Precision, device: torch.device, between: Callable[[], None] | None = None
) -> dict[str, float]:
    """The task's metrics over a whole split, each sample exactly once, in evaluation mode; the model's mode is put back.

    Collective: processes take shares of every batch and sum what they found; for decoding each has the whole model, and its own share.
    between: called before every batch, on all alike.
    """
    r, mesh, model = task.recipe, parallel.mesh, parallel.bare
    rank, world = (mesh.world.rank, mesh.world.size) if task.decodes else (mesh.rank(*DATA), mesh.size(*DATA))
    batch_size = r.evaluate.batch or r.layout.micro_batch or -(-(r.batch.samples or 64) // world)
    plan = task.plan(split, samples=batch_size * world, tokens=None)
    pin = r.data.pin and device.type == "cuda"
    loader = Loader(
        task.splits[split], plan, task.collate, prepare=task.prepare_evaluation, seed=r.train.seed, pin=pin, rank=rank, world=world
    )
    was_training = model.training
    model.eval()
    totals: dict[str, list[float]] = {}
    try:
        writes = r.evaluate.decode and type(task).decoded_metrics is not Task.decoded_metrics
        with parallel.whole() if task.decodes or writes else contextlib.nullcontext() as whole:
            for step in loader.steps(0):
                if between:
                    between()
                for batch in step.micro_batches:
                    batch = precision.cast_batch(task.to_device(batch, device))
                    found = _evaluate_batch(parallel, task, batch, precision, whole if task.decodes else None)
                    for name, (value, count) in found.items():
                        total = totals.setdefault(name, [0.0, 0])
                        total[0] += float(value)
                        total[1] += count
            sums: dict[str, list[float]] = {}
            for mine in parallel.collect(totals):
                for name, (value, count) in mine.items():
                    total = sums.setdefault(name, [0.0, 0])
                    total[0] += value
                    total[1] += count
            metrics = task.metrics({name: total / max(1, count) for name, (total, count) in sums.items()}, split)
            if writes:
                with precision.autocast():
                    mine = task.decode_split(whole, split, mesh.world.rank, mesh.world.size)
                written = {i: text for part in parallel.collect(mine) for i, text in part.items()}
                metrics |= task.decoded_metrics(written, split)
    finally:
        model.train(was_training)
    return metrics


def _evaluate_batch(parallel: Parallel, task: Task, batch: dict, precision: Precision, whole: nn.Module | None) -> dict[str, tuple[float, int]]:
    """What this process adds to the metrics' (sum, count): each target once over all processes."""

    def run(model: nn.Module, batch: dict) -> dict:
        with precision.autocast():
            found = task.evaluate(model, batch)
        return {name: (float(v.full_tensor() if isinstance(v, DTensor) else v), count) for name, (v, count) in found.items()}

    context, mesh = parallel.context, parallel.mesh
    if whole is not None:
        found = run(whole, batch)
    else:
        if context:
            batch = context.prepare(batch)
        found = parallel.pipeline.forward(batch, run) if parallel.pipeline else run(parallel.bare, batch)
        if found is None or mesh.rank("tensor") or (context and context.redundant and mesh.rank("context")):
            return {}
        if context and mesh.rank("context"):  # its part of the sequences; whose targets are counted once
            found = {name: (value, 0) for name, (value, _) in found.items()}
    return {} if "idle" in batch else found


class Cut(Exception):
    """A signal came where there is nothing to lose."""


class Asked(list[int]):
    """The signals that came."""

    cut = False

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Where a signal, also one that came before, raises Cut."""
        self.cut = True
        try:
            if self:
                raise Cut
            yield
        finally:
            self.cut = False


@contextlib.contextmanager
def stop_signals(asked: Asked) -> Iterator[Asked]:
    """`asked`, which while this lasts holds the signal once Ctrl-C or SIGTERM came; a second Ctrl-C stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number, frame):
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        if asked.cut:
            raise Cut

    old = {number: signal.signal(number, ask) for number in SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        asked.clear()
