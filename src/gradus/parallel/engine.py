"""A model laid out over processes: how a step runs, and what of it this process holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models
from gradus.models import weights
from gradus.models.values import held, materialise
from gradus.parallel import world as worlds
from gradus.parallel.mesh import AXES, DATA, Mesh
from gradus.parallel.observe import Observer
from gradus.parallel.replicate import LocalUpdates, Replicas, sum_in_buckets
from gradus.recipe.schema import Layout, ModelConfig


@dataclasses.dataclass
class LocalParameter:
    """What this process holds of one parameter. Optimizers step `local`, a plain view of this process's part."""

    name: str
    parameter: nn.Parameter
    local: nn.Parameter  # shares its memory with `parameter`
    norm_axes: tuple[str, ...]  # along which the parameter is cut, so that its norm is a sum over them
    sum_axes: tuple[str, ...]  # along which its gradient is still to be summed after the backward pass


class Parallel:
    """Made by `parallel.apply.apply`, which fills in the parts that the layout has.

    `model` is what a task calls; `bare` is the same with the parameters' own names.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, mesh: Mesh, joined: bool = True, observer: Observer = Observer()
    ):
        self.bare, self.layout, self.mesh, self.observer = model, layout, mesh, observer
        self.joined = joined  # False: gradients stay what this process has computed
        self.replicas = Replicas(model)
        self.context = None  # parallel.context.Context
        self.pipeline = None  # parallel.pipeline.Pipeline
        self.optimizer_shards = None  # parallel.shard.OptimizerShards
        self.local_updates: LocalUpdates | None = None
        # around forward and backward passes
        self.around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.is_expert: Callable[[nn.Parameter], bool] = lambda p: False
        # axes along which DDP or FSDP sums gradients while the backward pass runs
        self.summed_by_engine: tuple[str, ...] = ()

    @property
    def model(self) -> nn.Module:
        return self.replicas.model

    @property
    def part(self) -> nn.Module:
        """The model, or of a pipeline this process's part of it, under the whole model's names."""
        return self.pipeline.model if self.pipeline else self.bare

    @property
    def device(self) -> torch.device:
        """Where it computes: with layout.offload weights lie on the host between two uses."""
        on_gpu = self.layout.offload and self.mesh.devices is not None and self.mesh.devices.device_type == "cuda"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else next(self.bare.parameters()).device

    @property
    def several(self) -> bool:
        return self.mesh.world.size > 1

    @contextlib.contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """While a block lasts, this one watches."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    # ------------------------------------------------------------ one step

    def forward_backward(
        self,
        micro_batches: list[dict],
        loss_of: Callable[[nn.Module, dict], Tensor],
        scaled: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Run every micro-batch forward and backward, then sum the gradients over the processes.

        loss_of(model, batch): this batch's share of the loss, a scalar. scaled(loss): what is differentiated (fp16's
        loss scale).
        Returns the sum of all processes' shares, on the device. Afterwards every `local.grad` is complete.
        """
        total: list[Tensor] = []

        def share(model: nn.Module, batch: dict) -> Tensor:
            loss = loss_of(model, batch)
            if "idle" in batch:
                loss = loss * 0.0
            if self.context and self.context.redundant:
                loss = loss / self.mesh.size("context")
            total.append(loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach())
            return scaled(loss * self.replicas.scale)

        self.observer.edge("", "begin")
        micro_batches = self.prepared(micro_batches)
        with self.around():
            if self.pipeline:
                self.pipeline.forward_backward(micro_batches, share, self.observer)
            else:
                for i, batch in enumerate(micro_batches):
                    self.replicas.sync_on(i == len(micro_batches) - 1)
                    self.observer.edge("", "forward")
                    self._backward(share(self.model, batch))
                    self.observer.edge("", "idle")
        self.finish_gradients()
        loss = torch.stack([t.float() for t in total]).sum() if total else torch.zeros((), device=self.device)
        return self.sum(loss, *DATA, "context", "pipeline") if not self.local_updates else loss

    def prepared(self, micro_batches: list[dict]) -> list[dict]:
        """This process's part of each."""
        return [self.context.prepare(b) for b in micro_batches] if self.context else micro_batches

    def _backward(self, loss: Tensor) -> None:
        self.observer.edge("", "backward")
        loss.backward()

    def finish_gradients(self) -> None:
        """Sum the gradients of the passes over the processes, as far as that has not happened during them."""
        self.observer.edge("", "end")
        if self.pipeline and self.joined:
            self.pipeline.reduce_tied()
        if self.mesh.size("tensor") > 1 and not self.summed_by_engine:
            from gradus.parallel.tensor import sum_partial_gradients

            sum_partial_gradients(self.part)
        for own in self.trainable:
            own.local.grad = _local_gradient(own.parameter)
        if self.joined and not self.summed_by_engine and not self.local_updates:
            self._sum_gradients()
        self.observer.gradients("", [own.local.grad for own in self.trainable])

    def _sum_gradients(self) -> None:
        with_grad = [h for h in self.trainable if h.local.grad is not None]
        if type(self.replicas) is not Replicas:
            self.replicas.reduce([h.local.grad for h in with_grad])
            return
        for axes in dict.fromkeys(h.sum_axes for h in with_grad):
            gradients = (h.local.grad for h in with_grad if h.sum_axes == axes)
            sum_in_buckets(gradients, self.mesh.group(*axes), self.layout.bucket_mb * 2**20)

    def norm(self) -> Tensor:
        """The norm of the whole gradient, the same on every process."""
        by_axes: dict[tuple[str, ...], list[Tensor]] = {h.norm_axes: [] for h in self.trainable}
        for own in self.trainable:
            if own.local.grad is not None and self.counts(own.name):
                by_axes[own.norm_axes].append(own.local.grad)
        device = self.local_parameters[0].local.device
        norms = {axes: torch.nn.utils.get_total_norm(gradients).to(device) for axes, gradients in by_axes.items()}
        if not self.several:
            return norms[()]
        squares = [self.sum(norms[axes].float() ** 2, *axes) for axes in sorted(norms)]
        none = torch.zeros((), device=device)  # a pipeline's stage may have nothing to train
        total = self.sum(torch.stack([none, *squares]).sum(), "pipeline")
        if self.layout.replicate == "parameter_server":
            dist.broadcast(total, group=self.mesh.group("replicate"), group_src=0)  # the server alone has the sums
        return total.sqrt()

    def counts(self, name: str) -> bool:
        """Whether this process counts and keeps this parameter, where several stages have it."""
        return self.pipeline is None or name in self.pipeline.owned

    def after_step(self) -> None:
        """Weights that were stepped elsewhere arrive."""
        if self.optimizer_shards:
            self.optimizer_shards.send_weights()
        self.replicas.send_weights([h.local.data for h in self.trainable])

    def zero_grad(self) -> None:
        for own in self.local_parameters:
            own.local.grad = own.parameter.grad = None

    # ------------------------------------------------------------ parameters

    @functools.cached_property
    def local_parameters(self) -> list[LocalParameter]:
        """This process's parameters, frozen ones too, in the model's order. Ask when the layout is applied, not
        before."""
        return [self._local(name, p) for name, p in self.part.named_parameters()]

    @functools.cached_property
    def trainable(self) -> list[LocalParameter]:
        """Those of `local_parameters` that are not frozen."""
        return [h for h in self.local_parameters if h.parameter.requires_grad]

    @property
    def stored(self) -> list[LocalParameter]:
        """Those that a checkpoint holds: all, or with an adapter, whose base lies elsewhere, what is trained."""
        return self.trainable if self.bare.config.adapter else self.local_parameters

    def _local(self, name: str, p: nn.Parameter) -> LocalParameter:
        local, cut = p, ()
        if isinstance(p, DTensor):
            local = nn.Parameter(p.to_local().detach(), p.requires_grad)
            placed = zip(p.device_mesh.mesh_dim_names, p.placements)
            split = [name for name, placement in placed if not placement.is_replicate() and not placement.is_partial()]
            cut = tuple(
                axis for axis in AXES if any(axis in name.split("_") for name in split) and self.mesh.sizes[axis] > 1
            )
        unsummed = [a for a in (*DATA, "context") if self.mesh.sizes[a] > 1 and a not in self.summed_by_engine]
        if self.is_expert(p):
            unsummed = [a for a in unsummed if a != "expert"]
        return LocalParameter(name, p, local, cut, tuple(unsummed))

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """(name, local part) of what this process's optimizer steps."""
        if not self.replicas.steps_optimizer():
            return []
        shards = self.optimizer_shards
        return [(h.name, h.local) for h in self.trainable if shards is None or shards.mine(h.name)]

    @contextlib.contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The whole model, plain, on this process, for decoding. Collective.

        Where weights are split they are gathered, parameter by parameter: it takes as much memory as on one process.
        """
        plain = (
            self.pipeline is None
            and self.context is None
            and not any(isinstance(h.parameter, DTensor) for h in self.local_parameters)
        )
        if plain:
            yield self.bare
            return
        replica = models.build(self.bare.config, "meta").to(self.local_parameters[0].local.dtype)
        materialise(replica, self.device, None)
        full, small = dict(replica.named_parameters()), held(self.bare)
        for name, codes in held(replica).items():
            if name not in full:  # of a base that is stored small, which every process holds
                codes.copy_(small[name])
        with torch.no_grad():
            for name, tensor in self.full_tensors(list(full)):
                full[name].copy_(tensor)
        yield replica.train(self.bare.training)

    def full_tensors(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of parameters of the whole model, gathered one at a time. Collective.

        names: as the whole model names them first, in an order that all processes share.
        """
        mine = dict(self.part.named_parameters(remove_duplicate=False))
        return gathered(mine, self.bare.config, names, self.mesh.group("pipeline"))

    # ------------------------------------------------------------ between processes

    def sum(self, value: Tensor, *axes: str) -> Tensor:
        """Over the processes that differ along `axes`. In place."""
        wide = tuple(a for a in AXES if a in axes and self.mesh.sizes[a] > 1)
        if wide and self.several:
            dist.all_reduce(value, group=self.mesh.group(*wide))
        return value

    @property
    def counts_samples(self) -> bool:
        """Whether this process counts its samples: one of those that see the same ones does."""
        return self.mesh.rank("pipeline", "context", "tensor") == 0

    def all_reduce(self, numbers: list[int]) -> list[int]:
        """The sums of whole numbers over all processes, which wait for each other."""
        if not self.several:
            return numbers
        vector = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(vector)
        return vector.tolist()

    def warm_up(self, micro_batch: dict, loss_of: Callable[[nn.Module, dict], Tensor]) -> None:
        """Run one backward pass, throw its gradients away, and put the random numbers back.

        DDP orders its buckets by the first backward pass; a resumed run must sum in the order of one that was not
        interrupted.
        """
        if not isinstance(self.model, nn.parallel.DistributedDataParallel):
            return
        (batch,) = self.prepared([micro_batch])
        # Of its own device alone: asked for their state, the other GPUs would each make a context for this process.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), self.around():
            (loss_of(self.model, batch) * 0.0).backward()
        self.zero_grad()


@torch.no_grad()
def gathered(
    parameters: Mapping[str, Tensor], config: ModelConfig, names: Iterable[str], group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of parameters of a model of this configuration, one at a time. Collective.

    parameters: what this process has, DTensors of which all processes of a mesh have a part, or whole ones.
    group: the processes that have different parameters; None: all have all.
    """
    model = models.build(config, "meta")
    called, shapes = weights.first_names(model), {name: p.shape for name, p in model.named_parameters()}
    mine = {called[name]: p for name, p in parameters.items()}
    holders = worlds.gathered(set(mine), group) if group else [set(mine)]
    for name in names:
        has = [name in there for there in holders]
        tensor, like = mine.get(name), next(iter(mine.values()))
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if not all(has):  # the first that has it sends it to the others
            if tensor is None:
                tensor = torch.empty(shapes[name], dtype=like.dtype, device=like.device)
            tensor = tensor.contiguous()
            dist.broadcast(tensor, group=group, group_src=has.index(True))
        yield name, tensor.detach()


def _local_gradient(p: nn.Parameter) -> Tensor | None:
    """This process's part of a parameter's gradient, cut as the parameter is."""
    gradient = p.grad
    if isinstance(gradient, DTensor):
        if gradient.placements != p.placements:
            p.grad = gradient = gradient.redistribute(placements=p.placements)
        gradient = gradient.to_local()
    return gradient
