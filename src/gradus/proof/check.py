"""Before spending: what usually goes wrong, checked in half a minute on the real data, model and step.

Every line passes, fails with a hint, or is skipped with the reason: also where its time was up before it could tell.
One model and one batch of a few samples serve all lines. One process checks a layout of several, but for its memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradus import models
from gradus.data.collate import IGNORE
from gradus.data.loader import sample_rng
from gradus.errors import UserError, colour, some
from gradus.layers import observe_attention
from gradus.models.finite import first_not_finite
from gradus.parallel.apply import apply
from gradus.parallel.mesh import needed, single_process
from gradus.plan.batches import task_without_data
from gradus.proof.memory_budget import changed, suggested_fix
from gradus.proof.predict import case_of, predict
from gradus.proof.runners import loading
from gradus.recipe.schema import Recipe
from gradus.rows import Row
from gradus.signals import uninterrupted
from gradus.tasks.base import Task
from gradus.text import fold, width
from gradus.train.loop import Trainer
from gradus.train.optim import check_eps
from gradus.train.schedule import rate_of
from gradus.train.session import Session, open_for, open_session

TARGETS = {"label", "labels", "targets"}
NAMES = ("data", "vocabulary", "memory", "shapes", "start", "gradients", "attention", "lengths", "overfit", "loader")
READ, READING = 64, 3.0  # samples of a split that are read, evenly spread; s for them
FEW, FEWEST = 4, 2  # samples of the batch that is checked and overfitted; where its steps are slow
STEPS, RAMP = 100, 10  # optimizer steps for that at most, the first ones with a rising learning rate
LEAST, SECONDS = 20, 8.0  # steps from which one that learns is known from one that does not; s for all
FALL = 2.0  # factor by which the loss, less what label smoothing leaves, must fall
HARDLY = 1.05  # factor by which it has hardly fallen
SLOW = 1.5  # s of a forward pass of the few samples, beyond which fewer are checked
STEP, TIMES = 2.0, 9  # s in which steps are timed for the loader (of a longer step a part is); how many at most
LARGE = 1e3  # norm of a parameter's gradient: of a mean loss over a batch it is about 1 or less at the start
ONE = 0.01  # how far from one a row of attention weights may sum: bf16 has three digits
NEAR = 0.25, 1.0  # how far from ln(classes) the first loss may be: the larger of a share of it, and nats
WAIT, LITTLE = 0.1, 2e-3  # share of a step that may be spent waiting for data; s that are never too many
WRONG_IDS = "Leave model.vocab_size out (the tokenizer sets it), or use the tokenizer that goes with the weights."
WRONG_LABELS = "Labels count from 0: look at data.label, or leave model.n_classes and model.vocab_size out."
SHOWN = 400  # tokens of a sample that is shown
LOADER, ROUNDS = 1.5, 5  # s for which the loader is timed; in so many rounds, whose median counts


@dataclasses.dataclass
class Line:
    """One check. ok: None where it was skipped."""

    name: str
    ok: bool | None
    text: str
    hint: str = ""

    def row(self, recipe: Recipe) -> Row:
        verdict = {None: "skipped", True: "pass", False: "fail"}[self.ok]
        about = {"found": self.text, "hint": self.hint or None, "recipe": recipe.name}
        return Row(f"check/{self.name}", verdict, "", None, about)

    def __str__(self) -> str:
        word = {None: "skip", True: colour("pass", "green"), False: colour("FAIL", "red")}[self.ok]
        head = f"      {'':12} "
        texts = (text.replace("\n", " ") for text in (self.text, self.hint) if text)
        lines = (line for text in texts for line in fold(text, 0, width() - len(head)))
        return f"{word}  {self.name:12} " + f"\n{head}".join(lines)


class Sample(Line):
    """One training sample, token by token: what is learned between brackets, in green, and what stops with a ■."""

    def __init__(self, tokens: list[tuple[str, bool, bool]]):
        n, self.tokens = sum(learned for _, learned, _ in tokens), tokens[:SHOWN]
        self.left = len(tokens) - len(self.tokens)
        super().__init__("learned", True, f"{n:,} of the first sample's {len(tokens):,} tokens")

    def __str__(self) -> str:
        lines, line, size, before = [f"{super().__str__()}: ⟦so⟧, ■ stops"], "", 0, False
        for text, learned, stops in [*self.tokens, ("", False, False)]:
            mark = "⟦" if learned and not before else "⟧" if before and not learned else "·" if line else ""
            part = mark + text + "■" * stops
            if size + len(part) > width() - 2:
                lines.append(line)
                line, size = "", 0
            line, size, before = line + (colour(part, "green") if learned else part), size + len(part), learned
        more = [f"... and {self.left:,} more"] if self.left else []
        return "\n  ".join([*lines, line, *more])


class Wrong(Exception):
    """A check that fails: (why, the hint)."""

    ok = False


class Skip(Exception):
    """A check that does not apply, or came to no end in its time: (why, the hint if there is one)."""

    ok = None


def check(recipe: Recipe, as_json: bool = False) -> int:
    """`gradus check RECIPE`: prints the lines; returns 1 if any failed."""
    began, counts = time.perf_counter(), {True: 0, False: 0, None: 0}
    for line in checks(recipe):
        counts[line.ok] += 1
        print(line.row(recipe).json() if as_json else line, flush=True)
    if not as_json:
        seconds = time.perf_counter() - began
        print(f"\n{counts[True]} passed, {counts[False]} failed, {counts[None]} skipped in {seconds:.0f} s")
    return 1 if counts[False] else 0


def checks(recipe: Recipe) -> Iterator[Line]:
    """The lines, in the order of what depends on what."""
    try:
        check_eps(recipe)
        models.check_built(recipe.model)
        session = open_session(recipe.model_copy(update={"layout": single_process(recipe.layout)}))
    except UserError as e:
        yield Line("recipe", False, str(e))
        return
    session_checks = SessionChecks(session, recipe)
    for name in NAMES:
        yield run(name, getattr(session_checks, name))
    if tokens := list(session.task.token_by_token()):
        yield Sample(tokens)


def run(name: str, function: Callable[[], str]) -> Line:
    """One check; an exception in it is a failure of it alone."""
    try:
        return Line(name, True, function())
    except (Skip, Wrong) as e:
        return Line(name, e.ok, *e.args)
    except UserError as e:
        return Line(name, False, str(e))
    except Exception as e:
        return Line(name, False, f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"[:300])


class SessionChecks:
    """The checks of a session. Each returns its finding, or raises Wrong or Skip. original: the recipe as the user has
    it; the session's is of one process."""

    def __init__(self, session: Session, original: Recipe):
        self.session, self.original = session, original
        self.recipe, self.task, self.few, self.too_large = session.recipe, session.task, FEW, False
        self.losses: list[float] = []  # of the steps on these few samples
        self.seconds = 0.0  # of the latest one

    # ------------------------------------------------------------ pieces

    @functools.cached_property
    def trainer(self) -> Trainer:
        """The model and its optimizer, in one piece, without dropout: every step must learn from the same."""
        if self.too_large:
            raise Skip("the model alone does not fit here")
        r = changed(self.recipe, layout={"micro_batch": None, "compile": "none"}, data={"workers": 0})
        parallel = apply(self.session.build(), r.layout, qat=r.train.qat)
        parallel.bare.eval()
        return Trainer(dataclasses.replace(self.session, recipe=r), parallel, Path(os.devnull))

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @functools.cached_property
    def collated(self) -> dict[str, Any]:
        """The first few training samples, without augmentation."""
        n = min(self.few, len(self.task.splits["train"]))
        return self.task.collate([self.prepared("train", i) for i in range(n)])

    @property
    def batch(self) -> dict[str, Any]:
        """`collated` on the device and in the weights' own type."""
        return self.to_device(self.collated)

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self.session.precision.cast_batch(self.task.to_device(batch, self.session.device))

    def prepared(self, split: str, i: int, training: bool = False) -> dict[str, Any]:
        sample = self.task.splits[split][i]
        prepare = self.task.prepare if training else self.task.prepare_evaluation
        return sample if prepare is None else prepare(sample, sample_rng(self.recipe.train.seed, 0, i))

    def spread(self, split: str) -> Iterator[int]:
        """Indices of samples, evenly spread and in no order, so that those read in the time that there is are spread
        too."""
        indices = np.unique(np.linspace(0, len(self.task.splits[split]) - 1, READ).astype(int))
        end = time.perf_counter() + READING
        for i in np.random.default_rng(0).permutation(indices).tolist():
            yield i
            if time.perf_counter() > end:
                return

    def learn(self) -> None:
        """One step on the few samples, with the recipe's optimizer, highest learning rate and clipping."""
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, (len(self.losses) + 1) / RAMP)
        began = time.perf_counter()
        self.losses.append(float(self.trainer.step([self.collated])[0]))
        self.trainer.clock.synchronise()
        self.seconds = time.perf_counter() - began

    def fewer(self, slow: bool) -> bool:
        """Use fewer samples from now on, where that is slow and possible. Returns whether that is so."""
        slow = slow and self.few > FEWEST
        if slow:
            self.few = FEWEST
            del self.collated
        return slow

    @functools.cached_property
    def rate(self) -> float:
        """The highest learning rate of the run."""
        r, last = self.recipe, self.trainer.last_step
        steps = np.unique(np.linspace(1, last, 200).astype(int)).tolist()
        return max(rate_of(r, step, last) for step in steps)

    def sums(self, batch: dict[str, Any], task: Task | None = None) -> dict[str, Tensor]:
        """Kind of target → sum of its losses."""
        with self.session.precision.autocast():
            return (task or self.task).losses(self.model, batch)

    def loss(self) -> Tensor:
        """The loss of the batch as in training: every kind of target by its own count."""
        return sum(value / max(1, self.collated["counts"][kind]) for kind, value in self.sums(self.batch).items())

    def classes(self) -> int:
        """The number of classes of the main loss."""
        m = self.recipe.model
        if self.recipe.task.head == "classification":
            return m.n_classes
        return getattr(m, "target_vocab_size", None) or m.vocab_size

    # ------------------------------------------------------------ the checks

    def data(self) -> str:
        """Samples of every split are read and made into batches; empty and constant ones are counted."""
        counts, empty = [], []
        for split, data in self.task.splits.items():
            if len(data) == 0:
                raise Wrong(f"{split} is empty", "Look at data.path and the names of its files.")
            read = 0
            for read, i in enumerate(self.spread(split), 1):  # noqa: B007
                try:
                    if is_empty(data[i]):
                        empty.append(f"{split} {i}")
                    else:
                        self.task.collate([self.prepared(split, i, training=split == "train")])
                except Exception as e:
                    text = f"{split}, sample {i}: {type(e).__name__}: {e}"
                    raise Wrong(text[:200], "Remove or repair that sample.") from None
            counts.append(f"{split} {read:,} of {len(data):,}")
        if empty:
            text = f"{len(empty)} samples are empty or blank: {', '.join(empty[:5])}"
            raise Wrong(text, "Remove them: they teach nothing.")
        return f"read {', '.join(counts)}; none empty, none corrupt"

    def vocabulary(self) -> str:
        """Every id that goes in has an embedding; every target has a logit."""
        m, top = self.recipe.model, {}
        limits = {"ids": m.vocab_size, "source": m.vocab_size, "target": self.classes()} if m.reads != "images" else {}
        limits |= dict.fromkeys(TARGETS, self.classes())
        for i in self.spread("train"):
            for key, value in self.task.collate([self.prepared("train", i)]).items():
                counted = value[value != IGNORE] if key in TARGETS else value
                if key not in limits or not counted.numel():
                    continue
                low, high = int(counted.min()), int(counted.max())
                top[key] = max(top.get(key, 0), high)
                if low < 0 or high >= limits[key]:
                    limit, hint = f"the vocabulary has {limits[key]}", WRONG_IDS
                    if key in TARGETS:
                        limit, hint = f"there are {limits[key]} classes", WRONG_LABELS
                    raise Wrong(f"sample {i}: {key} {low} to {high}, {limit}", hint)
        if not top.keys() & TARGETS:
            hint = "Look at data.max_len and the data's labels: nothing would be learned."
            raise Wrong("no sample has a target", hint)
        inputs = "".join(f"{key} up to {n:,} of {limits[key]:,}; " for key, n in top.items() if key not in TARGETS)
        top_target = max(n for key, n in top.items() if key in TARGETS)
        return f"{inputs}targets up to {top_target:,} of {self.classes():,}"

    def memory(self) -> str:
        """The plan of the largest batch."""
        session = open_for(self.original) if needed(self.original.layout) > 1 else self.session
        case = dataclasses.replace(case_of(session), step=None)
        with uninterrupted():
            plan = predict(case)
        if plan.refusal:
            self.too_large = plan.least > case.budget.available
            fix = suggested_fix(case.recipe, case.budget, plan.least)
            raise Wrong(plan.refusal.partition(". ")[0], fix + ".")
        return plan.line.removeprefix("plan: ")

    @functools.cached_property
    def first(self) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, int]]:
        """(shape of the logits, sums of the losses, counts of their targets) of the batch, by the new model."""
        logits: list[Tensor] = []
        counts, began = self.collated["counts"], time.perf_counter()

        def keep_logits(module: nn.Module, args: Any, out: Any) -> None:
            logits.append(out[0] if isinstance(out, tuple) else out)

        batch = self.batch
        batch.pop("weights", None)  # a row's own weight in the loss is not of the odds
        with self.model.register_forward_hook(keep_logits), torch.no_grad():
            sums = self.sums(batch)
        self.fewer(time.perf_counter() - began > SLOW)
        return tuple(logits[-1].shape), sums, counts

    def shapes(self) -> str:
        """One batch through the model: logits with the right last dimension, and one finite loss."""
        inputs = ", ".join(f"{k} {tuple(v.shape)}" for k, v in self.collated.items() if isinstance(v, Tensor))
        logits, sums, _ = self.first
        loss = sum(sums.values())
        text = f"{inputs} → logits {logits}"
        if logits[-1] != self.classes():
            hint = "Head and task do not agree: look at model.head and task.name."
            raise Wrong(f"{text}, but there are {self.classes()} classes", hint)
        if loss.dim() or not torch.isfinite(loss):
            where = first_not_finite(self.model, lambda: self.sums(self.batch))
            hint = "Is a value of the data not finite? Or use layout.precision=fp32."
            if self.recipe.model.init is not None and where:
                hint = f"Give other weights than model.init={self.recipe.model.init}, or use layout.precision=fp32."
            logits = f": its logits are not finite ({where})" if where else ""
            raise Wrong(f"{text}; the loss is {loss.tolist()}{logits}", hint)
        return text

    def start(self) -> str:
        """Random weights know nothing: their loss is about that of even odds."""
        if self.recipe.model.init is not None:
            raise Skip(f"the initial loss cannot be predicted: the weights are {self.recipe.model.init}'s")
        _, sums, counts = self.first
        kind = next(kind for kind in sums if kind in ("tokens", "samples"))
        loss, even = float(sums[kind]) / max(1, counts[kind]), math.log(self.classes())
        allowed = max(NEAR[0] * even, NEAR[1])
        text = f"loss {loss:.3f}, ln({self.classes():,}) is {even:.3f}; at most {allowed:.3g} apart"
        if not abs(loss - even) <= allowed:
            leak = "targets leak: the model must not see what it is to predict"
            raise Wrong(text, f"The initialisation is too large, or {leak}.")
        return text

    def gradients(self) -> str:
        """A backward pass: every parameter has a gradient that is finite, not zero and not huge.

        A head of zeros lets nothing through at first: zero gradients are checked again after two steps of the
        optimizer.
        """
        (norms, without, frozen), after = self.norms(), ""
        if any(norm == 0 for norm in norms.values()):
            self.learn()
            self.learn()
            norms, after = self.norms()[0], ", after two steps"
        # a bias of the keys adds the same to all scores of a query, which softmax does not see
        counted = {name: norm for name, norm in norms.items() if norm or not name.endswith("to_k.bias")}
        names_by_fault = {
            "not finite": [name for name, norm in counted.items() if not math.isfinite(norm)],
            f"above {LARGE:g}": [name for name, norm in counted.items() if LARGE < norm < math.inf],
            "zero": [name for name, norm in counted.items() if norm == 0],
            "none": without,
            "frozen": [] if self.recipe.adapter or self.recipe.train.freeze else frozen,
        }
        bad = {fault: names for fault, names in names_by_fault.items() if names}
        if bad:
            text = "; ".join(f"{fault}: {some(names)}" for fault, names in bad.items())
            hint = "These will not learn: is the layer used, and is requires_grad on?"
            if bad.keys() & {"not finite", f"above {LARGE:g}"}:
                hint = "Look at the data for huge values and at the initialisation; or try layout.precision=fp32."
            raise Wrong(text + after, hint)
        ranked = sorted((n for n in norms if not n.endswith("to_k.bias")), key=norms.get)
        ends = " to ".join(f"{norms[n]:.2g} ({n})" for n in (ranked[0], ranked[-1]))
        text = f"{len(norms)} parameters, norms {ends}, median {statistics.median(norms.values()):.2g}{after}"
        return f"{text}; finite, not zero, {LARGE:g} at most"

    def norms(self) -> tuple[dict[str, float], list[str], list[str]]:
        """(norm of each gradient, parameters without one, parameters that are not trained) of one backward pass."""
        self.loss().backward()
        named = list(self.model.named_parameters())
        norms = {name: float(p.grad.float().norm()) for name, p in named if p.grad is not None}
        without = [name for name, p in named if p.requires_grad and p.grad is None]
        self.model.zero_grad(set_to_none=True)
        return norms, without, [name for name, p in named if not p.requires_grad]

    def attention(self) -> str:
        """The weights of every query sum to one, by the textbook's kernel on a real batch; of a fully masked one, to
        zero."""
        worst, rows, fully_masked, layers = 0.0, 0, 0, set()

        def see(layer: str, weights: Tensor) -> None:
            nonlocal worst, rows, fully_masked
            off = (weights.float().sum(-1) - 1).abs()
            masked = (weights == 0).all(-1)
            worst = max(worst, float(off.masked_fill(masked, 0.0).max().nan_to_num(math.inf)))
            rows, fully_masked = rows + off.numel(), fully_masked + int(masked.sum())
            layers.add(layer)

        with observe_attention(self.model, see), torch.no_grad():
            self.loss()
        text = f"{rows:,} rows of weights in {len(layers)} layers, sums up to {worst:.1e} from one ({ONE:g} is allowed)"
        text += f"; {fully_masked:,} fully masked" * (fully_masked > 0)
        if not worst <= ONE:
            raise Wrong(text, "A mask or a bias is not finite, or the precision overflows: try layout.precision=fp32.")
        return text

    def lengths(self) -> str:
        """Shorter sequences than the longest run too, and give a finite loss."""
        r = self.recipe
        if r.model.reads == "images":
            raise Skip("images have one size")
        longest = min(getattr(r.data, "max_len", None) or r.model.seq_len, r.model.seq_len)
        tried = sorted({max(4, longest // 8), max(4, longest // 2 - 1), max(4, longest)})
        tried = [n for n in tried if n <= longest] or [longest]
        for n in tried:
            task = task_without_data(r, seq_len=n)
            batch = self.to_device(task.collate([task.splits["train"][i] for i in range(2)]))
            with torch.no_grad():
                loss = sum(self.sums(batch, task).values())
            if not torch.isfinite(loss):
                hint = "Look at the positions and masks of short sequences."
                raise Wrong(f"{n} tokens: the loss is {float(loss)}", hint)
        return f"{', '.join(map(str, tried))} tokens: the loss is finite"

    def overfit(self) -> str:
        """A few samples by heart: the loss must fall by FALL; where a part of the model is trained, by HARDLY."""
        part = self.recipe.adapter is not None or bool(self.recipe.train.freeze)
        needed_fall = HARDLY if part else FALL
        floor = smoothed_floor(getattr(self.recipe.task, "label_smoothing", 0.0), self.classes())
        losses = self.losses
        end = time.perf_counter() + SECONDS
        while True:
            self.learn()
            fell = (losses[0] - floor) / max(1e-12, losses[-1] - floor)
            if not math.isfinite(losses[-1]) or fell >= FALL or len(losses) >= STEPS or time.perf_counter() > end:
                break
            if len(losses) == 2 and self.fewer(LEAST * self.seconds > SECONDS):
                losses.clear()
        steps = f"{self.few} samples, {len(losses)} steps at learning rates up to {self.rate:.1e}"
        text = f"{steps}: loss {losses[0]:.3f} → {losses[-1]:.3f}"
        text += f" (label smoothing leaves {floor:.3f})" * bool(floor)
        text += f"; it must fall to 1/{needed_fall:g}" + ", since a part of the model is trained" * part
        if math.isfinite(losses[-1]) and fell >= needed_fall:
            return text
        if not math.isfinite(losses[0]):
            raise Wrong(text, "The loss is not finite before the first step: see the line of shapes.")
        if not math.isfinite(losses[-1]) or max(losses) > 1.5 * losses[0]:
            raise Wrong(text, "The learning rate is too high: try optimizer.lr ten times smaller.")
        if part and fell > 1 + (HARDLY - 1) / 10:
            raise Skip(f"{text}; not judged: so small a part may not be able to", "Watch the run's first evaluations.")
        if len(losses) >= STEPS or (len(losses) >= LEAST and fell < HARDLY):
            raise Wrong(text, "It hardly learns: optimizer.lr is too small, or targets do not belong to their inputs.")
        hint = "Steps are slow here: watch the loss of the run's first steps."
        raise Skip(f"{text}; not judged in {SECONDS:g} s", hint)

    def loader(self) -> str:
        """Batches come as fast as steps take them.

        It fails where more than WAIT of the time is waiting, and that is more than LITTLE for each step: about so much
        does a batch take on its way from a worker, and the noise of a busy machine make. Both speeds are medians.
        """
        r = self.recipe
        step, samples, how = self.step_seconds()
        speed, workers = loader_speed(self.session, LOADER), r.data.workers
        data = samples / speed
        wait = max(0.0, data - step) if workers else data
        share = wait / (step + wait)
        text = f"{speed:,.0f} samples/s with data.workers={workers}: {1e3 * data:,.1f} ms for the {samples} samples"
        text += f" of a step that takes {1e3 * step:,.0f} ms{how}"
        text += f"; {share:.0%} of the time is waiting, {WAIT:.0%} is allowed"
        if share <= WAIT:
            return text
        if wait <= LITTLE:
            return f"{text}, but no more than {1e3 * LITTLE:g} ms per step, which more workers would hardly save"
        raise Wrong(text, f"Set data.workers={max(2, 2 * workers)}, or prepare the data once.")

    def step_seconds(self) -> tuple[float, int, str]:
        """(seconds of a step of the recipe's batch, its samples, how that is known where it was not measured whole)."""
        trainer, layout = self.trainer, self.recipe.layout
        indices = trainer.loader.plan.epoch(0)[0].tolist()
        if not self.losses:
            self.learn()
        if self.seconds > STEP:
            how = f" (timed with {self.few} of them, without dropout)"
            return self.seconds * len(indices) / self.few, len(indices), how
        in_time = max(self.few, int(STEP * self.few / self.seconds))
        part = min(len(indices), layout.micro_batch or len(indices), in_time)
        batch = self.task.collate([self.prepared("train", i, training=True) for i in indices[:part]])
        trainer.parallel.bare.train()
        times: list[float] = []
        while len(times) <= TIMES and sum(times) <= STEP:
            began = time.perf_counter()
            trainer.step([batch])
            trainer.clock.synchronise()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times[1:] or times)  # the first may set things up
        how = [f"timed with {part} of them"] * (part < len(indices)) + ["not compiled"] * (layout.compile != "none")
        return seconds * len(indices) / part, len(indices), f" ({', '.join(how)})" if how else ""


def loader_speed(session: Session, seconds: float) -> float:
    """Samples/s of the recipe's loader with nobody to train, in about so many seconds."""
    with loading(session) as steps:
        speeds, end = [], time.perf_counter() + seconds
        while not speeds or time.perf_counter() < end:
            began, samples = time.perf_counter(), 0
            while not samples or time.perf_counter() - began < seconds / ROUNDS:
                samples += next(steps).samples
            speeds.append(samples / (time.perf_counter() - began))
        return statistics.median(speeds)


def is_empty(sample: dict[str, Any]) -> bool:
    """True for a sample without a token, or with an image of one colour."""
    if any(np.size(sample[key]) == 0 for key in ("ids", "source", "target", "target_in", "image") if key in sample):
        return True
    pixels = np.asarray(sample.get("image", (0, 1)))
    return pixels.min() == pixels.max()


def smoothed_floor(smoothing: float, classes: int) -> float:
    """The least loss that label smoothing allows: the entropy of the smoothed target, in nats."""
    if not smoothing:
        return 0.0
    rest = smoothing / classes
    right = 1 - smoothing + rest
    return -right * math.log(right) - (classes - 1) * rest * math.log(rest)
