"""Pipeline parallelism: each process holds a part of the layers, and micro-batches flow through them (Huang et al.
2019; Narayanan et al. 2021; Qi et al. 2024). Schedules, sends and receives are torch.distributed.pipelining's; the
models are not edited.

A stage is the model itself, with other stages' parts replaced by modules without parameters. The task calls it as it
calls the whole model, so that masks, positions and rotary tables are computed anew on every stage, and only hidden
states travel:

    first stage                     embeddings → own blocks → [leave]
    middle stage                    nothing → [receive] → own blocks → [leave]
    last stage                      nothing → [receive] → own blocks → final norm, head, loss

[receive] stands in the place of the block before the first own one, [leave] in that of the block after the last. An
encoder-decoder is one row of blocks, those of the encoder first; the encoder's output travels along with the decoder's
states.

torch's stages send tensors of one shape. Hidden states of a micro-batch are therefore laid flat into (capacity,
d_model), with a capacity that holds the largest micro-batch of the step.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from gradus import models
from gradus.errors import UserError
from gradus.parallel.observe import Observer
from gradus.parallel.stages import Stages, bounds, needed, ranks
from gradus.recipe.schema import Layout
from gradus.torch_private import send_nothing_ahead

if TYPE_CHECKING:  # it takes half a second, which a plan need not wait for
    from torch.distributed.pipelining import PipelineStage

T = TypeVar("T")


# ---------------------------------------------------------------- what stands in the place of other stages' parts


class Skip(nn.Module):
    """In the place of a block: returns its input."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        return x


class _Receive(nn.Module):
    """In the place of the block before the first own one: returns what came from the stage before."""

    def __init__(self, slot: dict[str, Tensor], name: str):
        super().__init__()
        self.slot, self.name = slot, name

    def forward(self, *args, **kwargs) -> Tensor:
        assert self.name in self.slot, "a stage's model is called once per micro-batch"
        return self.slot.pop(self.name)


class _Leave(nn.Module):
    """In the place of the block after the last own one: keeps that block's inputs. What follows sees zeros."""

    def __init__(self, slot: dict[str, Tensor], names: tuple[str, ...], block: nn.Module):
        super().__init__()
        self.slot, self.names = slot, names
        self.signature = inspect.signature(type(block).forward)

    def forward(self, *args, **kwargs) -> Tensor:
        arguments = self.signature.bind(self, *args, **kwargs).arguments
        self.slot.update({f"leaving {name}": arguments[name] for name in self.names})
        x = arguments["x"]
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


class _Zeros(nn.Module):
    """In the place of an embedding: zeros of the right shape, that hold no memory. They end at a `_Receive`."""

    def __init__(self, *shape: int):
        super().__init__()
        self.shape = shape

    def forward(self, inputs: Tensor, *args, **kwargs) -> Tensor:
        leading = inputs.shape[: 3 - len(self.shape)]
        return torch.zeros((), device=inputs.device).expand(*leading, *self.shape)  # (batch, seq, d_model)


class _Left(Exception):
    """A stage that is not the last has done its part. Only the last stage does what the task wants of the output."""


class _Part(nn.Module):
    """A stage as the task sees it: to be called, once a micro-batch."""

    def __init__(self, model: nn.Module, slot: dict[str, Tensor], leaving: tuple[str, ...]):
        super().__init__()
        self.model, self.slot, self.leaving, self.config = model, slot, leaving, model.config
        if leaving:  # a hook, so that the backward pass starts from the model's output: FSDP2 waits for it there
            model.register_forward_hook(
                lambda module, inputs, output: tuple(slot.pop(f"leaving {name}") for name in leaving)
            )

    def forward(self, *args, **kwargs):
        output = self.model(*args, **kwargs)
        if not self.leaving:
            return output
        self.slot.update({f"leaving {name}": x for name, x in zip(self.leaving, output)})
        raise _Left

    def __getattr__(self, name: str):
        if name in ("encode", "decode", "decode_hidden", "hidden", "new_cache", "features", "pooled"):
            raise UserError(
                f"layout.pipeline: {name}() needs the whole model, and a process has a part of it. "
                "Gather it first, or set evaluate.decode=false."
            )
        return super().__getattr__(name)


# ---------------------------------------------------------------- cutting a model


def _get(model: nn.Module, path: str) -> nn.Module | nn.Parameter | None:
    """What has this name; None where this model has no such part."""
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name, None)


def _parameters(part: nn.Module | nn.Parameter | None) -> list[nn.Parameter]:
    return [] if part is None else [part] if isinstance(part, nn.Parameter) else list(part.parameters())


def _clone(module: nn.Module) -> nn.Module:
    """A module with the same children and parameters, whose children may be replaced without changing the original."""
    clone = copy.copy(module)
    registries = {name: copy.copy(value) for name, value in module.__dict__.items() if isinstance(value, dict | set)}
    clone.__dict__.update(registries)
    return clone


def _unused(part: nn.Module, zeros: _Zeros) -> nn.Module:
    """The same parameters under the same names, without hooks, and no computation."""
    shell = type(part).__new__(type(part))
    nn.Module.__init__(shell)
    for name, p in part.named_parameters(recurse=False):
        shell.register_parameter(name, p)
    for name, child in part.named_children():
        shell.add_module(name, child)
    shell.forward = zeros.forward
    return shell


class Cutter:
    """Knows which part of a model a range of its blocks needs. Blocks are counted through all stacks."""

    def __init__(self, model: nn.Module):
        self.stacks = models.lookup(model.config.family).stacks
        self.sizes = [len(model.get_submodule(s.blocks)) for s in self.stacks]
        self.blocks = [f"{s.blocks}.{i}" for s, size in zip(self.stacks, self.sizes) for i in range(size)]
        self.config, self.d_model = model.config, model.config.d_model
        self.names = {id(p): name for name, p in model.named_parameters()}

    def parts(self, own: set[int]) -> set[str]:
        """Names of the parts that these blocks need besides themselves."""
        needed: set[str] = set()
        start = 0
        for stack, size in zip(self.stacks, self.sizes):
            if not own.isdisjoint(range(start, start + size)):
                needed.update(stack.around(start in own, start + size - 1 in own))
            start += size
        return needed

    def parameters_of(self, model: nn.Module, own: set[int]) -> set[str]:
        """Names of the parameters of these blocks and of what they need, each as the whole model names it first."""
        modules = [_get(model, part) for part in self.parts(own)] + [model.get_submodule(self.blocks[i]) for i in own]
        return {self.names[id(p)] for part in modules for p in _parameters(part)}

    def view(self, model: nn.Module) -> nn.Module:
        """Another module around the same parts, which can be pruned without changing the first."""
        view = _clone(model)
        for stack in self.stacks:
            names = stack.blocks.split(".")
            for path in (".".join(names[: i + 1]) for i in range(len(names))):
                view.set_submodule(path, _clone(view.get_submodule(path)))
        return view

    def prune(self, model: nn.Module, own: set[int], device: torch.device) -> None:
        """Remove, in place, what these blocks do not need. An embedding whose weight is needed for another purpose
        stays, unused: it keeps the weight's name."""
        needed, names = self.parts(own), self.parameters_of(model, own)
        for i, name in enumerate(self.blocks):
            if i not in own:
                model.set_submodule(name, Skip())
        for stack in self.stacks:
            for name in {*stack.before, *stack.after, *stack.shared} - needed:
                part = _get(model, name)
                if part is None:
                    continue
                if isinstance(part, nn.Parameter):
                    delattr(model, name)
                    placeholder = torch.zeros(1, 1, self.d_model, device=device, dtype=part.dtype)
                    model.register_buffer(name, placeholder, persistent=False)
                elif name in stack.shared:
                    model.set_submodule(name, Skip())
                elif name in stack.after or isinstance(part, nn.LayerNorm):
                    model.set_submodule(name, nn.Identity())
                else:
                    shape = (part.n_patches, self.d_model) if hasattr(part, "n_patches") else (self.d_model,)
                    zeros = _Zeros(*shape)
                    tied = {self.names[id(p)] for p in part.parameters()} <= names
                    model.set_submodule(name, _unused(part, zeros) if tied else zeros)

    def carried(self, block: int) -> tuple[str, ...]:
        """What travels to the stage that begins with this block: of the arguments of blocks, x, memory or both."""
        if len(self.sizes) == 1 or block < self.sizes[0]:
            return ("x",)
        return ("memory",) if block == self.sizes[0] else ("x", "memory")

    def connect(self, model: nn.Module, begin: int, end: int, blocks: list[nn.Module], slot: dict[str, Tensor]) -> None:
        """Put [receive] and [leave] around blocks begin to end - 1 of a pruned model. `blocks`: all of the whole
        model."""
        if begin > 0:
            arriving = self.carried(begin)
            if "x" in arriving:
                model.set_submodule(self.blocks[begin - 1], _Receive(slot, "x"))
            if "memory" in arriving:
                model.set_submodule(self.blocks[self.sizes[0] - 1], _Receive(slot, "memory"))
                if self.stacks[0].dropout:  # it has been applied
                    model.set_submodule(self.stacks[0].dropout, nn.Identity())
        if end < len(self.blocks):
            model.set_submodule(self.blocks[end], _Leave(slot, self.carried(end), blocks[end]))

    def shapes(self, batch: dict, block: int) -> dict[str, tuple[int, int]]:
        """What travels to the stage that begins with this block → (batch, seq)."""
        if self.config.reads == "images":
            return {"x": (len(batch["images"]), self.config.n_tokens)}
        if len(self.sizes) == 1:
            return {"x": tuple(batch["ids"].shape)}
        source, target = tuple(batch["source"].shape), tuple(batch["target"].shape)
        return {name: target if name == "x" and block > self.sizes[0] else source for name in self.carried(block)}


# ---------------------------------------------------------------- the pipeline


class Stage(nn.Module):
    """Blocks begin to end - 1, as torch's PipelineStage runs them."""

    def __init__(self, pipeline: Pipeline, index: int, begin: int, end: int, model: nn.Module, slot: dict[str, Tensor]):
        super().__init__()
        self.index, self.begin, self.end = index, begin, end
        self.last = index == pipeline.n_stages - 1
        self.part = _Part(model, slot, () if self.last else pipeline.cutter.carried(end))
        self.slot = slot
        self.micro_batch = 0  # the one that it computes, counted in the step
        self.__dict__["pipeline"] = pipeline

    def forward(self, received: Tensor | None = None) -> Tensor:
        """received (capacity, d_model), None on the first stage. Returns the same for the next stage, or on the last
        stage the loss (1,)."""
        return self.pipeline.run.forward(self, received, self.micro_batch)

    def compute(self, received: Tensor | None, batch: dict, function: Callable[[nn.Module, dict], T]) -> T | None:
        """function's result on the last stage; elsewhere None, and what leaves lies in the slot."""
        self.slot.clear()
        if received is not None:
            self.slot.update(self.pipeline.unpack(self, received, batch))
        try:
            result = function(self.part, batch)
        except _Left:
            return None
        assert self.last, "what is run in a pipeline must call the model"
        return result


@functools.cache
def _observed_stage() -> type[PipelineStage]:
    """torch's stage, which tells its Stage the number of the micro-batch, and the observer its passes."""
    from torch.distributed.pipelining import PipelineStage

    class ObservedStage(PipelineStage):
        def _observed(self, edge: str, run: Callable, micro_batch: int, *args, **kwargs):
            stage: Stage = self.submod
            stage.micro_batch, observer = micro_batch, stage.pipeline.run.observer
            observer.edge("", edge)
            out = run(micro_batch, *args, **kwargs)
            observer.edge("", "idle")
            return out

        def forward_one_chunk(self, *args, **kwargs):
            return self._observed("forward", super().forward_one_chunk, *args, **kwargs)

        def backward_one_chunk(self, *args, **kwargs):
            return self._observed("backward", super().backward_one_chunk, *args, **kwargs)

        def backward_weight_one_chunk(self, *args, **kwargs):
            return self._observed("weights", super().backward_weight_one_chunk, *args, **kwargs)

    return ObservedStage


@dataclasses.dataclass
class _Run:
    """What the stages are working on. forward(stage, received, number of the micro-batch): as of `Stage.forward`."""

    forward: Callable[[Stage, Tensor | None, int], Tensor]
    capacities: list[int]  # of the tensors that leave each stage but the last
    observer: Observer


class Pipeline:
    """A model cut into stages over the processes of `group`; all of them are given the same micro-batches. Collective.

    `model`, which is changed in place, becomes this process's part: the parameters of its stages, under the whole
    model's names, and its blocks. Techniques applied to it afterwards reach every stage of this process.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, layout: Layout, device: torch.device,
        stages: Stages | None = None,
    ):  # fmt: skip
        # the device that the model will be on
        self.model, self.group, self.layout, self.device = model, group, layout, torch.device(device)
        self.cutter = cutter = Cutter(model)
        rank_of = ranks(layout)
        stages = stages or Stages(bounds(len(cutter.blocks), len(rank_of)), rank_of)
        self.rank, self.rank_of, self.bounds = dist.get_rank(group), stages.ranks, stages.bounds
        self.n_stages = len(self.rank_of)

        own = [set(range(self.bounds[s], self.bounds[s + 1])) for s in range(self.n_stages)]
        names_of = [cutter.parameters_of(model, blocks) for blocks in own]
        self.wire = next(model.parameters()).dtype  # of hidden states between stages
        self.stream = _stream(model, layout)

        blocks = [model.get_submodule(name) for name in cutter.blocks]
        mine = [s for s in range(self.n_stages) if self.rank_of[s] == self.rank]
        views = {s: model if len(mine) == 1 else cutter.view(model) for s in mine}
        self.stages: dict[int, Stage] = {}
        for s in mine:
            slot: dict[str, Tensor] = {}
            cutter.prune(views[s], own[s], device)
            cutter.connect(views[s], self.bounds[s], self.bounds[s + 1], blocks, slot)
            self.stages[s] = Stage(self, s, self.bounds[s], self.bounds[s + 1], views[s], slot)
        if len(mine) > 1:
            cutter.prune(model, set().union(*(own[s] for s in mine)), device)
        self.views = list(views.values())
        names = {name for name, _ in model.named_parameters()}
        assert names == set().union(*(names_of[s] for s in mine)), "a part keeps the whole model's names"

        holders: dict[str, set[int]] = {}
        for s, s_names in enumerate(names_of):
            for name in s_names:
                holders.setdefault(name, set()).add(self.rank_of[s])
        # each parameter on exactly one process
        self.owned = {name for name, ranks in holders.items() if min(ranks) == self.rank}
        # in an order that all processes share
        self.tied = {name: sorted(ranks) for name, ranks in sorted(holders.items()) if len(ranks) > 1}
        self.run: _Run | None = None
        self._schedule = functools.lru_cache(maxsize=4)(self._make_schedule)  # each holds its receive buffers

    # ------------------------------------------------------------ training

    def forward_backward(
        self, micro_batches: list[dict], loss_of: Callable[[nn.Module, dict], Tensor], observer: Observer = Observer()
    ) -> Tensor:
        """Run every micro-batch forward and backward, in the schedule's order; gradients are added to `.grad`.

        loss_of(model, batch): the batch's share of the loss, a scalar. It calls the model once; what it does afterwards
        happens on the last stage alone. Where the schedule needs more micro-batches than there are, it is also called
        with copies that hold `"idle": True`, whose loss does not count.
        Returns the sum of the shares, detached; 0 on processes without the last stage. Collective.
        Raises UserError as the model does, for example for a sequence that is too long.
        """
        smallest = min(micro_batches, key=lambda b: self._rows(b, self.bounds[1]))

        def forward(stage: Stage, received: Tensor | None, i: int) -> Tensor:
            real = i < len(micro_batches)  # those behind fill the schedule, and count nothing
            result = stage.compute(received, micro_batches[i] if real else {**smallest, "idle": True}, loss_of)
            if stage.last:
                return (result if real else result * 0.0).reshape(1)
            return self.pack(stage, self.run.capacities[stage.index])

        return self.run_schedule(micro_batches, forward, observer)

    def run_schedule(
        self, micro_batches: list[dict], forward: Callable[[Stage, Tensor | None, int], Tensor], observer: Observer
    ) -> Tensor:
        """`forward_backward` with stages that compute forward(stage, received, number of the micro-batch)."""
        n = needed(self.layout, len(micro_batches))
        capacities = [_round_up(max(self._rows(b, bound) for b in micro_batches)) for bound in self.bounds[1:-1]]
        self.run = _Run(forward, capacities, observer)
        index, losses = torch.arange(n), []
        target, into = (index, losses) if self.n_stages - 1 in self.stages else (None, None)
        try:
            self._schedule(n, *capacities).step(target=target, losses=into, return_outputs=False)
        except RuntimeError as e:  # torch wraps what a stage raises
            if isinstance(e.__cause__, UserError):
                raise e.__cause__ from None
            raise
        finally:
            self.run = None
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _make_schedule(self, n: int, *capacities: int):
        """torch's schedule for n micro-batches of these sizes."""
        from torch.distributed import pipelining

        kind = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
        }[self.layout.schedule]
        if self.layout.schedule == "zero_bubble" and len(self.stages) == 2:
            kind = pipelining.ScheduleZBVZeroBubble
        stages = [self._torch_stage(stage, capacities) for stage in self.stages.values()]
        alone = self.layout.schedule in ("gpipe", "1f1b")
        return kind(stages[0] if alone else stages, n, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)

    def _torch_stage(self, stage: Stage, capacities: tuple[int, ...]) -> PipelineStage:
        def like(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, device="meta", dtype=dtype).requires_grad_()

        d = self.cutter.d_model
        arriving = () if stage.index == 0 else (like(capacities[stage.index - 1], d, dtype=self.wire),)
        leaving = like(1, dtype=torch.float32) if stage.last else like(capacities[stage.index], d, dtype=self.wire)
        torch_stage = _observed_stage()(
            stage, stage.index, self.n_stages, self.device,
            input_args=arriving, output_args=(leaving,), group=self.group,
        )  # fmt: skip
        torch_stage.stage_index_to_group_rank = dict(enumerate(self.rank_of))
        if dist.get_backend(self.group) == "gloo":
            send_nothing_ahead(torch_stage)
        return torch_stage

    def reduce_tied(self) -> None:
        """Sum the gradients of parameters that several processes hold, over those processes. Once, after the last
        backward pass. Collective."""
        parameters = dict(self.model.named_parameters())
        for name, holders in self.tied.items():
            if self.rank not in holders or not parameters[name].requires_grad:
                continue
            p, (first, *others) = parameters[name], (dist.get_global_rank(self.group, r) for r in holders)
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            total = grad.contiguous()
            if self.rank == holders[0]:
                part = torch.empty_like(total)
                for other in others:
                    dist.recv(part, src=other, group=self.group)
                    total += part
                for other in others:
                    dist.send(total, dst=other, group=self.group)
            else:
                dist.send(total, dst=first, group=self.group)
                dist.recv(total, src=first, group=self.group)
            grad.copy_(total)

    # ------------------------------------------------------------ evaluation

    @torch.no_grad()
    def forward(self, batch: dict, function: Callable[[nn.Module, dict], T]) -> T | None:
        """The result of function(model, batch) on the process with the last stage; None elsewhere.

        The function calls the model once, as it would call the whole one. No gradients. Collective.
        """
        arrived: dict[int, Tensor] = {}
        result = None
        for s, stage in self.stages.items():
            received = arrived.pop(s, None)
            if s and received is None:
                rows = self._rows(batch, stage.begin)
                received = torch.empty(rows, self.cutter.d_model, device=self.device, dtype=self.wire)
                dist.recv(received, src=dist.get_global_rank(self.group, self.rank_of[s - 1]), group=self.group)
            result = stage.compute(received, batch, function)
            if stage.last:
                continue
            leaving = self.pack(stage)
            if s + 1 in self.stages:
                arrived[s + 1] = leaving
            else:
                dist.send(leaving, dst=dist.get_global_rank(self.group, self.rank_of[s + 1]), group=self.group)
        return result

    # ------------------------------------------------------------ between stages

    def _local(self, name: str, shape: tuple[int, int]) -> tuple[int, int]:
        """(batch, seq) of this process's part: under sequence parallelism x is split along the sequence."""
        batch, seq = shape
        if name == "x" and self.stream is not None and isinstance(self.stream[1], Shard):
            mesh, size = self.stream[0], -(-seq // self.stream[0].size())
            seq = max(0, min(size, seq - size * mesh.get_local_rank()))
        return batch, seq

    def _rows(self, batch: dict, block: int) -> int:
        """Rows that travel to the stage that begins with this block."""
        local = (self._local(name, shape) for name, shape in self.cutter.shapes(batch, block).items())
        return sum(n * seq for n, seq in local)

    def pack(self, stage: Stage, capacity: int | None = None) -> Tensor:
        """What leaves a stage, flat: (capacity or as many rows as there are, d_model)."""
        rows = []
        for name in self.cutter.carried(stage.end):
            x = stage.slot.pop(f"leaving {name}")  # (batch, seq, d_model)
            x = x.to_local() if isinstance(x, DTensor) else x
            assert torch.promote_types(x.dtype, self.wire) == self.wire, f"{x.dtype} does not fit into {self.wire}"
            rows.append(x.reshape(-1, x.shape[-1]).to(self.wire))
        used = sum(len(r) for r in rows)
        assert capacity is None or used <= capacity, f"{used} rows, and room for {capacity}"
        return torch.cat([*rows, rows[0].new_zeros((capacity or used) - used, rows[0].shape[1])])

    def unpack(self, stage: Stage, received: Tensor, batch: dict) -> dict[str, Tensor]:
        """The inverse of `pack`: name → (batch, seq, d_model)."""
        tensors, at = {}, 0
        for name, (n, seq) in self.cutter.shapes(batch, stage.begin).items():
            _, local_seq = self._local(name, (n, seq))
            d = received.shape[1]
            x = received[at : at + n * local_seq].view(n, local_seq, d)
            at += n * local_seq
            if name == "x" and self.stream is not None:
                mesh, placement = self.stream
                shape, stride = torch.Size((n, seq, d)), (seq * d, d, 1)
                x = DTensor.from_local(x, mesh, (placement,), run_check=False, shape=shape, stride=stride)
            tensors[name] = x
        return tensors


def _stream(model: nn.Module, layout: Layout) -> tuple[DeviceMesh, Shard | Replicate] | None:
    """How tensor parallelism, where it was applied, places hidden states between blocks."""
    weight = next(model.parameters())
    if not isinstance(weight, DTensor):
        return None
    return weight.device_mesh, Shard(1) if layout.sequence_parallel else Replicate()


def _round_up(rows: int) -> int:
    """By an eighth at most, so that few capacities arise."""
    step = max(1, 2 ** (rows.bit_length() - 4))
    return -(-rows // step) * step
