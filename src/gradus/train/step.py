"""One optimizer step, exact: the loss is a sum over the global batch divided by its global count of targets. What a run
takes is what the plan traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import Mesh
from gradus.parallel.precision import Precision
from gradus.recipe.schema import Recipe
from gradus.tasks.base import Task
from gradus.train.optim import make_optimizer


@dataclasses.dataclass
class Progress:
    """Where a run stands; all of it survives a resume."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0
    epoch_step: int = 0  # steps taken in this epoch
    accumulations: int = 0  # forward-backward passes
    samples: int = 0
    tokens: int = 0  # without padding; on several GPUs those of the latest step come with the next one or with its loss
    skipped: int = 0  # steps left out because they were not finite
    loss_sum: float = 0.0  # of the losses of the steps that were not skipped, for the mean over the run
    best: float | None = None
    best_step: int | None = None
    best_metric: str | None = None
    not_better: int = 0  # evaluations since the best
    last_evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluation_due: bool = False  # a stop came before it was done


@dataclasses.dataclass
class Totals:
    """Sums over all processes of each one's numbers for a step. On several GPUs no process waits for them: counts stay
    on the device, tokens and flags are those of the step before."""

    counts: dict[str, int | Tensor]  # kind of target → how many the global batch has
    tokens: int  # without padding
    flags: list[int]


class Stepper:
    """The optimizer step of a laid out model on a task."""

    def __init__(
        self, recipe: Recipe, task: Task, model: nn.Module | Parallel, device: torch.device, precision: Precision
    ):
        self.recipe, self.task, self.device, self.precision = recipe, task, device, precision
        self.hold(model if isinstance(model, Parallel) else Parallel(model, recipe.layout, Mesh.single()))
        self.progress = Progress()
        self.at: Callable[[str, int], None] = lambda what, step: None  # tells what this process is doing
        self.warm = False
        self.unread: tuple[Tensor, torch.cuda.Event] | None = None  # tokens and flags on their way to the host

    def hold(self, parallel: Parallel) -> None:
        """Step this model from now on, with a new optimizer."""
        self.parallel, self.optimizer = parallel, make_optimizer(parallel.trained(), self.recipe.optimizer)

    def step(
        self, micro_batches: list[dict[str, Any]], counts: dict[str, int | Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """One optimizer step over one global batch. Returns (loss, gradient norm), scalars that stay on the device.

        Each kind of target (tokens, next sentences) has its own count over the whole batch, known before the first
        backward pass. So accumulation, ragged lengths, micro-batch sizes and processes change nothing but rounding:
        never a mean of means. counts: None asks the other processes.
        """
        parallel = self.parallel
        counts = counts or self.totals(micro_batches).counts
        counts = {kind: n.clamp(min=1) if isinstance(n, Tensor) else max(1, n) for kind, n in counts.items()}

        def loss_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            with self.precision.autocast():
                sums = self.task.losses(model, batch)
            return sum(sums[kind] / counts[kind] for kind in sums)

        self.at("the forward and backward passes with their collectives", self.progress.step + 1)
        batches = self.on_device(micro_batches)
        if not self.warm:
            parallel.warm_up(batches[0], loss_of)
            self.warm = True
        loss = parallel.forward_backward(batches, loss_of, self.precision.scaled)
        return loss, self.update(loss)

    def on_device(self, micro_batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As the model reads them."""
        return [self.precision.cast_batch(self.task.to_device(batch, self.device)) for batch in micro_batches]

    def update(self, loss: Tensor) -> Tensor:
        """The optimizer's part of a step whose passes gave this loss. Returns the gradient norm."""
        parallel, optimizer = self.parallel, self.optimizer
        if optimizer is not None:
            self.precision.unscale(optimizer, parallel)
        self.at("the gradient norm", self.progress.step + 1)
        norm = parallel.norm().to(self.device)  # with layout.offload gradients lie on the host
        self.commit()
        if optimizer is not None:
            if self.recipe.train.clip_norm is not None:
                parameters = [p for _, p in parallel.trained() if p.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(parameters, self.recipe.train.clip_norm, norm)
            finite = torch.isfinite(loss) & torch.isfinite(norm)
            parallel.observer.step(before=True)
            self.precision.step(optimizer, (~finite).float())  # a bad gradient never reaches the weights
            parallel.observer.step(before=False)
        parallel.after_step()
        torch.clear_autocast_cache()  # of the old weights: within a caller's autocast it would stay
        parallel.zero_grad()
        return norm

    def commit(self) -> None:
        """The gradients are complete, and nothing has changed yet."""

    def totals(self, micro_batches: list[dict[str, Any]], flags: Sequence[int] = ()) -> Totals:
        """Sums over all processes for the coming step; for each flag, how many processes raise it. Collective.

        Workers of local SGD and DiLoCo divide by their own counts, and exchange flags when they sync.
        """
        parallel, kinds = self.parallel, sorted(micro_batches[0]["counts"])
        own = [sum(batch["counts"][kind] for batch in micro_batches) for kind in kinds]
        if parallel.local_updates:
            syncs = flags and parallel.local_updates.due(self.progress.step + 1)
            flags_of_all = parallel.all_reduce(flags) if syncs else [0] * len(flags)
            return Totals(dict(zip(kinds, own)), 0, flags_of_all)
        own.append(sum(batch["n_tokens"] for batch in micro_batches))
        numbers = [*(n * parallel.counts_samples for n in own), *flags]
        if parallel.several and self.device.type == "cuda" and not parallel.layout.elastic:
            sums, (tokens, *flags_of_all) = self._sums_on_device(numbers, len(kinds))
        else:
            sums = parallel.all_reduce(numbers)
            tokens, *flags_of_all = sums[len(kinds) :]
        return Totals(dict(zip(kinds, sums)), tokens, flags_of_all)

    def _sums_on_device(self, numbers: list[int], n_counts: int) -> tuple[Tensor, list[int]]:
        """(the sums over all processes, on the device; those after the first `n_counts`, of the step before)."""
        sums = torch.tensor(numbers, pin_memory=True).to(self.device, non_blocking=True)
        dist.all_reduce(sums)
        before = self.read_totals() or [0] * (len(numbers) - n_counts)
        self.unread = sums[n_counts:].to("cpu", non_blocking=True), torch.cuda.Event()
        self.unread[1].record()
        return sums, before

    def read_totals(self) -> list[int] | None:
        """Tokens and flags of the latest step that are still on their way, if any. Waits until they are here."""
        if self.unread is None:
            return None
        (values, arrived), self.unread = self.unread, None
        arrived.synchronize()
        return values.tolist()
