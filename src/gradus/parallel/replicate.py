"""Replicas: every process has the whole weights and sees its own samples; gradients are summed before the step.

By hand (`manual`: one all-reduce a gradient, over torch.distributed or MPI), through a `parameter_server`, or by
PyTorch's DDP, which sends buckets while the backward pass still runs. Shares of the loss are divided by global counts,
so gradients are summed, never averaged.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.parallel.traffic import Traffic
from gradus.parallel.world import load_mpi
from gradus.recipe.schema import Layout

POWERSGD_START = 10  # steps with whole gradients before: their buckets settle, and early gradients compress badly


class Replicas:
    """The base of all ways to replicate: it does nothing. `model` is what the task calls, `bare` has the parameters'
    own names."""

    scale = 1.0  # what the loss is multiplied by before the backward pass

    def __init__(self, bare: nn.Module):
        self.bare = self.model = bare

    def sync_on(self, last: bool) -> None:
        """Sum gradients in the next backward pass, or (False) keep them for a later micro-batch's."""

    def reduce(self, gradients: list[Tensor]) -> None:
        """Sum the gradients over the replicas, in place. They come in the same order on every process."""

    def steps_optimizer(self) -> bool:
        """Whether this process steps the optimizer."""
        return True

    def send_weights(self, weights: list[Tensor]) -> None:
        """After the step, where not every process has stepped."""


class Manual(Replicas):
    """After the backward pass, one all-reduce for every gradient."""

    def __init__(self, bare: nn.Module, group: dist.ProcessGroup):
        super().__init__(bare)
        self.group = group

    def reduce(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=self.group)


class ManualMPI(Replicas):
    """The same by MPI, spelled out: reduce every gradient to rank 0, then broadcast it. Buffers travel, not pickles."""

    def __init__(self, bare: nn.Module):
        super().__init__(bare)
        self.world = load_mpi("layout.transport=mpi").COMM_WORLD
        if self.world.size != dist.get_world_size():
            raise UserError(
                f"layout.transport=mpi: MPI sees {self.world.size} process(es), the layout {dist.get_world_size()}. "
                f"Start with mpirun: mpirun -n {dist.get_world_size()} gradus train ..."
            )

    def reduce(self, gradients: list[Tensor]) -> None:
        for gradient in gradients:
            own = gradient.cpu().contiguous()  # the same memory on a CPU
            total = torch.empty_like(own)
            self.world.Reduce(own.numpy(), total.numpy(), root=0)  # op=SUM; only rank 0's result is defined
            self.world.Bcast(total.numpy(), root=0)
            for kind in ("reduce", "broadcast") if Traffic.now else ():
                Traffic.now.count(kind, total.nbytes, self.world.size)
            gradient.copy_(total)


class ParameterServer(Replicas):
    """Rank 0 holds the optimizer. The others push their gradients to it and pull the weights when it has stepped (Li et
    al. 2014, synchronous). Rank 0 computes on its share too. All traffic goes through its one link; this class is there
    to measure what that costs."""

    def __init__(self, bare: nn.Module, group: dist.ProcessGroup):
        super().__init__(bare)
        self.group = group
        self.rank, self.size = dist.get_group_rank(group, dist.get_rank()), dist.get_world_size(group)

    def steps_optimizer(self) -> bool:
        return self.rank == 0

    def reduce(self, gradients: list[Tensor]) -> None:
        with as_one(gradients) as push:
            if self.rank:
                dist.send(push, group=self.group, group_dst=0)
            for worker in range(1, self.size) if self.rank == 0 else ():
                pushed = torch.empty_like(push)
                dist.recv(pushed, group=self.group, group_src=worker)
                push += pushed

    def send_weights(self, weights: list[Tensor]) -> None:
        with as_one(weights) as flat:
            if self.rank:
                dist.recv(flat, group=self.group, group_src=0)
            for worker in range(1, self.size) if self.rank == 0 else ():
                dist.send(flat, group=self.group, group_dst=worker)


class DDP(Replicas):
    """PyTorch's DistributedDataParallel reduces buckets of gradients while the backward pass goes on, in the last
    micro-batch alone. It takes the mean over processes, so the loss is multiplied by their number."""

    def __init__(self, bare: nn.Module, group: dist.ProcessGroup, layout: Layout):
        super().__init__(bare)
        on_gpu = next(bare.parameters()).device.type == "cuda"
        known = inspect.signature(nn.parallel.DistributedDataParallel).parameters
        # buffers never change; the older name is PyTorch 2.11's
        synced = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        self.model = nn.parallel.DistributedDataParallel(
            bare, device_ids=[torch.cuda.current_device()] if on_gpu else None, process_group=group,
            bucket_cap_mb=layout.bucket_mb, gradient_as_bucket_view=True, **{synced: False},
            init_sync=not layout.elastic,  # whose members have the same weights: none is written to before a vote
        )  # fmt: skip
        self.scale = float(dist.get_world_size(group))
        compress(self.model, layout.compress, group)
        if layout.elastic and layout.compress == "none":  # DDP divides by 3 as a number of 32 bits, of doubles too
            self.scale = 1.0
            self.model.register_comm_hook(group, lambda group, bucket: _summed(group, bucket))  # without annotations

    def sync_on(self, last: bool) -> None:
        self.model.require_backward_grad_sync = last


def _summed(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A hook of DDP: the sum, in place of the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def compress(model: nn.parallel.DistributedDataParallel, how: str, group: dist.ProcessGroup) -> None:
    """Compress the gradients that DDP sends: to half the bits, or to PowerSGD's low rank (Vogels et al. 2019), which
    adds what it leaves out to the next step's gradient."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if how == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=4, start_powerSGD_iter=POWERSGD_START, warm_start=True
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif how != "none":
        hook = getattr(default_hooks, f"{how}_compress_hook")
        # not by its own name: DDP refuses bf16's where there is no NCCL, which summing bf16 does not need
        model.register_comm_hook(group, lambda group, bucket: hook(group, bucket))


def sum_in_buckets(gradients: Iterable[Tensor], group: dist.ProcessGroup | None, bucket_bytes: float) -> None:
    """All-reduce after the backward pass, many gradients at a time, where DDP cannot be used (split weights, pipelines,
    experts)."""
    if group is None:
        return
    buckets: list[list[Tensor]] = []
    for gradient in gradients:
        last = buckets[-1] if buckets else []
        room = bucket_bytes - gradient.nbytes - sum(g.nbytes for g in last)
        if last and last[0].dtype == gradient.dtype and room >= 0:
            last.append(gradient)
        else:
            buckets.append([gradient])
    for bucket in buckets:
        with as_one(bucket) as flat:
            dist.all_reduce(flat, group=group)


@contextlib.contextmanager
def as_one(tensors: list[Tensor]) -> Iterator[Tensor]:
    """The values of several tensors as one flat tensor; what it holds afterwards is copied back into them."""
    flat = torch.cat([t.flatten() for t in tensors])
    yield flat
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))


class LocalUpdates:
    """Workers take `every` steps by themselves and then sync. Local SGD averages their weights (Stich 2019); DiLoCo
    (Douillard et al. 2023, algorithm 1) takes the mean change of their weights as the gradient of an outer step with
    Nesterov momentum, or with momentum 0 a plain one."""

    def __init__(self, layout: Layout, weights: list[Tensor], group: dist.ProcessGroup, bucket_bytes: float):
        self.group, self.weights, self.bucket_bytes = group, weights, bucket_bytes
        self.every = (layout.local_sgd or layout.diloco).every
        self.last_step: int | None = None  # of the run, where all sync
        self.outer, self.anchors = None, []
        if layout.diloco:
            self.anchors = [w.detach().clone().requires_grad_() for w in weights]  # the weights of the last sync
            lr, momentum = layout.diloco.outer_lr, layout.diloco.outer_momentum
            self.outer = torch.optim.SGD(self.anchors, lr=lr, momentum=momentum, nesterov=momentum > 0)
            for anchor in self.anchors if momentum else ():
                self.outer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)

    def due(self, step: int) -> bool:
        """Whether the workers sync at the end of this step."""
        return step % self.every == 0 or step == self.last_step

    @torch.no_grad()
    def sync(self) -> None:
        """Collective. Afterwards every worker has the same weights."""
        size = dist.get_world_size(self.group)
        if self.outer is None:
            for w in self.weights:
                w.div_(size)
            sum_in_buckets(self.weights, self.group, self.bucket_bytes)
            return
        moved = [(anchor - w) / size for anchor, w in zip(self.anchors, self.weights)]
        sum_in_buckets(moved, self.group, self.bucket_bytes)
        for anchor, gradient in zip(self.anchors, moved):
            anchor.grad = gradient
        self.outer.step()
        self.outer.zero_grad()
        for w, anchor in zip(self.weights, self.anchors):
            w.copy_(anchor)

    def state(self) -> list[Tensor]:
        """The outer momentum, one tensor a weight, in their order; none for local SGD, or without momentum."""
        return [state["momentum_buffer"] for state in self.outer.state.values()] if self.outer else []

    def kept(self) -> list[Tensor]:
        """All that the outer step keeps: the weights of the last sync, and its momentum; nothing for local SGD."""
        return [*self.anchors, *self.state()]

    def restart(self) -> None:
        """Weights were loaded: they are those of the last sync."""
        for anchor, w in zip(self.anchors, self.weights):
            anchor.data.copy_(w)
