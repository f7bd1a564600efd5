"""The training step, stepped under fake tensors: the module, optimizer, precision, checkpointing and layout that train.

Nothing is computed and nothing is sent: fake tensors have shapes only. The trace records every allocation and release
of tensor memory, and every operation and collective of the second optimizer step (the first one creates the
optimizer's state).

On a GPU autocast computes other functions in fp32 than on a CPU, and other attention kernels run; `target="cuda"`
traces both on fake CPU tensors (`_cuda_rules`). A trace does not see what operators allocate for themselves while they
run: the workspaces of cuBLAS and cuDNN, for example, are part of the framework's constant.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models, torch_private
from gradus.errors import UserError
from gradus.layers.capabilities import CUDA, pretending
from gradus.layers.masks import BLOCK
from gradus.models.values import materialise
from gradus.parallel import check
from gradus.parallel.apply import apply
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import cast, fake_world
from gradus.parallel.mesh import AXES, Mesh
from gradus.parallel.observe import Observer
from gradus.parallel.pipeline import Stage
from gradus.parallel.precision import Precision
from gradus.parallel.stages import Stages
from gradus.parallel.traffic import collective, group_among, payload_of
from gradus.parallel.world import World
from gradus.patch import replaced
from gradus.plan import batches
from gradus.plan.work import (
    COMPONENTS,
    OpCounts,
    OpKey,
    Target,
    TransferCounts,
    TransferKey,
    Work,
    op_of,
    transfer_of,
)  # fmt: skip
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.tasks.base import Task
from gradus.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    memory_id,
    schema,
    storage_id,
    tree_leaves,
    unset_fake_temporarily,
)
from gradus.train.step import Stepper

DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip


@dataclasses.dataclass
class Traced:
    """One optimizer step of one rank. Bytes are those of tensors, without an allocator's rounding."""

    memory: dict[str, int]  # component → bytes at the peak; they sum to `peak`
    peak: int
    peak_phase: str  # forward, loss, backward, recompute or optimizer
    state: dict[str, int]  # weights, gradients, optimizer: all bytes that this rank keeps, alive at the peak or not
    work: Work
    parameters: int  # of the whole model
    timeline: Timeline
    start: int  # the event with which the step begins
    ops: OpCounts
    transfers: TransferCounts
    pure: bool  # whether weights are in half precision
    batch_bytes: int  # of all micro-batches


# ---------------------------------------------------------------- memory


@dataclasses.dataclass
class Allocation:
    """One piece of memory, from its allocation to its release."""

    nbytes: int
    allocated_at: int  # index of the event
    phase: str
    name: str  # the operator that allocated it
    freed_at: int | None = None
    tag: str = ""  # component, where its origin tells it


class Timeline:
    """Every allocation and release, in order."""

    def __init__(self):
        self.alive: dict[int, Allocation] = {}  # by address of the storage
        self.finalizers: dict[int, weakref.ref] = {}
        self.allocations: list[Allocation] = []
        self.events: list[tuple[Allocation, int]] = []  # (allocation, change in bytes)
        self.phases: list[tuple[int, str]] = [(0, "build")]  # (first event, phase)

    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phases.append((len(self.events), phase))

    def record(self, tensor: Tensor, name: str, tag: str = "") -> Allocation:
        """Return the memory behind a plain tensor; memory not seen before is recorded as an allocation by `name`."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        allocation = self.alive.get(key)
        if allocation is None:
            allocation = self._allocate(storage, key, storage.nbytes(), name)
        if tag:
            allocation.tag = tag
        return allocation

    def _allocate(self, storage: torch.UntypedStorage, key: int, nbytes: int, name: str) -> Allocation:
        new = Allocation(nbytes, len(self.events), self.phase, name)
        self.alive[key] = new
        self.finalizers[key] = weakref.ref(storage, lambda _, key=key: self._free(key))
        self.allocations.append(new)
        self.events.append((new, nbytes))
        return new

    def _free(self, key: int) -> None:
        self.finalizers.pop(key, None)
        old = self.alive.pop(key, None)
        if old is not None:
            old.freed_at = len(self.events)
            self.events.append((old, -old.nbytes))

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Record that FSDP frees or reallocates gathered weights by resizing their storage in place."""
        key = storage_id(storage)
        self._free(key)
        self._allocate(storage, key, nbytes, "resize_").tag = "gathered"

    def peak_since(self, event: int) -> tuple[int, int]:
        """(bytes at the peak, the event that reaches it), from `event` on."""
        now = sum(change for _, change in self.events[:event])
        peak, peak_event = now, event - 1
        for i, (_, change) in enumerate(self.events[event:], event):
            now += change
            if now > peak:
                peak, peak_event = now, i
        return peak, peak_event

    def phase_at(self, event: int) -> str:
        return next(name for start, name in reversed(self.phases) if start <= event)

    def alive_after(self, event: int) -> Iterator[Allocation]:
        """What is allocated just after an event."""
        return (a for a in self.allocations if a.allocated_at <= event and (a.freed_at is None or a.freed_at > event))

    def components(self, event: int) -> dict[str, int]:
        """Component → bytes just after an event."""
        ends = self.forward_ends()
        totals = dict.fromkeys(COMPONENTS, 0)
        for a in self.alive_after(event):
            totals[a.tag or self.component_by_lifetime(a, ends)] += a.nbytes
        return totals

    def forward_ends(self) -> list[int]:
        """The events at which a backward pass follows a forward pass."""
        pairs = zip(self.phases[1:], self.phases)
        return [start for (start, phase), (_, before) in pairs if before in ("forward", "loss") and phase == "backward"]

    def component_by_lifetime(self, a: Allocation, ends: list[int]) -> str:
        """Memory that a forward pass allocates and the backward pass still needs is an activation, all else transient.

        ends: `forward_ends()`.
        """
        if a.phase not in ("forward", "loss"):
            return "transient"
        i = bisect.bisect_left(ends, a.allocated_at)
        lives_on = i < len(ends) and (a.freed_at is None or a.freed_at >= ends[i])
        return "activations" if lives_on else "transient"


# ---------------------------------------------------------------- operations


def _product_of(name: str, args: tuple, outputs: list[Tensor]) -> tuple[str, tuple[int, ...], float] | None:
    """(kind, shape as in work.Op, operations) of matrix products and convolutions; None for all else."""
    if name in ("mm", "addmm", "_scaled_mm_v2"):
        a, b = args[1:3] if name == "addmm" else args[:2]
        m, k, n = *a.shape, b.shape[1]
        return "matmul", (1, m, n, k), 2 * m * n * k
    if name in ("bmm", "baddbmm", "baddbmm_"):
        a, b = args[:2] if name == "bmm" else args[1:3]
        batch, m, k = a.shape
        return "matmul", (batch, m, b.shape[2], k), 2 * batch * m * b.shape[2] * k
    if name == "grouped_mm":
        x, w = args[:2]
        rows = -(-x.shape[0] // w.shape[0])
        return "matmul", (w.shape[0], rows, w.shape[2], w.shape[1]), 2 * x.shape[0] * w.shape[1] * w.shape[2]
    if name == "grouped_outer":
        x, y, counts = args[:3]
        rows = -(-x.shape[0] // counts.shape[0])
        return "matmul", (counts.shape[0], x.shape[1], y.shape[1], rows), 2 * x.shape[0] * x.shape[1] * y.shape[1]
    if name == "convolution":
        return _convolution(args[0], args[1], outputs[0], transposed=args[6], groups=args[8])
    if name == "convolution_backward":
        kind, (*batch, m, n, k), flops = _convolution(args[1], args[2], args[0], transposed=args[7], groups=args[9])
        return kind, (*batch, n, k, m), flops * (bool(args[10][0]) + bool(args[10][1]))
    return None


def _convolution(x: Tensor, w: Tensor, y: Tensor, transposed: bool, groups: int) -> tuple[str, tuple[int, ...], float]:
    """As `_product_of`: a product with the weights at every position of the output (of the input, if it is transposed).

    Where a group has a single channel there is no matrix product, and memory limits the time.
    """
    grid = x if transposed else y
    positions, n, k = grid.numel() // grid.shape[1], w.shape[0] // groups, w[0].numel()
    kind = "memory" if groups > 1 and 1 in (n, w.shape[1]) else "matmul"
    return kind, (groups, positions, *((k, n) if transposed else (n, k))), 2 * positions * w.numel()


def _attention(function: Any, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], float]:
    """(shape as in work.Op, operations) of an attention kernel, forward or backward.

    Each argument is looked up by its name in the operator's schema, as the kernels differ in their order.
    """
    q, k, v = (_argument(function, name, args, kwargs) for name in ("query", "key", "value"))
    batch, heads, queries, dim = q.shape
    scores = 2 * batch * heads * queries * k.shape[2]
    # forward two products; backward five: the scores again, and two gradients of each (Dao et al. 2022, appendix B.2)
    flops = scores * (3 * dim + 2 * v.shape[3] if schema(function).name.endswith("backward") else dim + v.shape[3])
    causal = _argument(function, "is_causal", args, kwargs)
    return (batch, heads, queries, k.shape[2], dim, v.shape[3]), flops / 2 if causal else float(flops)


def _argument(function: Any, name: str, args: tuple, kwargs: dict) -> Any:
    for i, argument in enumerate(schema(function).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    raise AssertionError(f"{function} has no argument {name}")


_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_COUNTED_NAMESPACES = ("aten", "gradus", "fsdp")  # FSDP copies what it gathers; others only ask (prim::device) or mark
_NOT_COUNTED = {
    "_unsafe_view", "wait_tensor", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach",
    "alias", "device",
}  # fmt: skip

# Python's collector frees reference cycles (DTensor's wrappers are some) after a number of allocations. A trace runs it
# at these operators alone, so that every trace of a step is the same.
_COLLECTED_AT = {"mm", "addmm", "bmm", "convolution", "convolution_backward"}


@functools.cache
def _names(function: Any) -> tuple[str, str]:
    """(namespace, name) of an operator."""
    namespace, name = schema(function).name.split("::")
    return namespace, name


_current: tuple[tuple[int, int], contextlib.ExitStack, World] | None = None  # ((processes, rank), its stack, its world)


def _enter_world(n: int, rank: int) -> World:
    global _current
    if _current is None or _current[0] != (n, rank):
        _leave_world()
        stack = contextlib.ExitStack()
        _current = (n, rank), stack, stack.enter_context(fake_world(n, rank))
    return _current[2]


def _leave_world() -> None:
    global _current
    if _current is not None:
        _current[1].close()
    _current = None


_gc_is_paused = False


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector from running by itself during one trace or several: what is there already is not
    scanned, and a fake world that the next trace needs too stays alive, with DTensor's caches."""
    global _gc_is_paused
    if _gc_is_paused:
        gc.collect()
        gc.freeze()
        yield
        return
    was_enabled, _gc_is_paused = gc.isenabled(), True
    gc.freeze()  # garbage too: to look for it among all that is loaded takes longer than many a trace
    gc.disable()
    try:
        yield
    finally:
        _gc_is_paused = False
        _leave_world()
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class _NotCacheable(Exception):
    """An argument has no signature."""


_HASHABLE = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_CACHE_SIZE = 50_000
_CPU = torch.device("cpu")


@dataclasses.dataclass
class CachedResult:
    """The result of an operator for arguments of one signature: asking FakeTensorMode takes most of a trace's time."""

    tensors: list[tuple]  # each (shape, strides, dtype, input that it views or None, offset), or (input,): itself
    kind: type  # of the return value: Tensor, tuple, list or NoneType
    counted: tuple | None = None  # (kind, name, dtype, flops, bytes, shape)
    is_counted: bool = False

    cache: ClassVar[dict[tuple, CachedResult]] = {}  # (operator, its arguments' shapes) → result; of all traces

    @staticmethod
    def of(out: Any, inputs: list[Tensor], geometries: list[tuple]) -> CachedResult | None:
        """None where `out` cannot be rebuilt from shapes alone. geometries: of the inputs, before the call."""
        if isinstance(out, Tensor):
            outputs = [out]
        elif out is None or type(out) in (tuple, list):
            outputs = list(out or ())
        else:
            return None
        if any(type(t) is not FakeTensor or t.requires_grad or t.constant is not None for t in outputs):
            return None
        if any(_geometry(t) != before for t, before in zip(inputs, geometries)):
            return None  # the operator has changed an input's shape
        owners = {memory_id(t): i for i, t in enumerate(inputs)}
        tensors: list[tuple] = []
        for t in outputs:
            itself = next((i for i, x in enumerate(inputs) if x is t), None)
            storage = t.untyped_storage()
            owner = owners.get(storage_id(storage))
            if itself is None and owner is None:
                size = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())) if t.numel() else 0
                if t.storage_offset() or storage.nbytes() != size * t.element_size() or t.device.type != "cpu":
                    return None
                owners[storage_id(storage)] = -1  # two outputs that share new memory cannot be rebuilt
            if owner == -1:
                return None
            described = t.shape, t.stride(), t.dtype, owner, t.storage_offset()
            tensors.append(described if itself is None else (itself,))
        return CachedResult(tensors, Tensor if isinstance(out, Tensor) else type(out))

    def rebuild(self, fake: Callable[[Tensor], FakeTensor], inputs: list[Tensor]) -> Any:
        outputs: list[Tensor] = []
        for t in self.tensors:
            if len(t) == 1:
                outputs.append(inputs[t[0]])
                continue
            shape, stride, dtype, owner, offset = t
            first_shape, first_stride = (shape, stride) if owner is None else ((0,), (1,))
            with torch_private.without_dispatch():
                plain = torch.empty_strided(first_shape, first_stride, dtype=dtype, device="meta")
                if owner is not None:
                    plain.set_(inputs[owner].untyped_storage(), offset, shape, stride)
            outputs.append(fake(plain))
        if self.kind is Tensor:
            return outputs[0]
        return None if self.kind is type(None) else self.kind(outputs)


def _geometry(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes()


def _signature(values: Any, inputs: list[Tensor], geometries: list[tuple]) -> tuple:
    """What distinguishes arguments; appends the tensors among them to `inputs`. Raises _NotCacheable."""
    out: list[Any] = []
    for v in values:
        kind = type(v)
        if kind is FakeTensor:
            geometry = _geometry(v)
            inputs.append(v)
            geometries.append(geometry)
            out.append(geometry)
        elif kind in _HASHABLE:
            out.append((kind, v))
        elif kind is list or kind is tuple or kind is torch.Size:
            out.append(_signature(v, inputs, geometries))
        else:
            raise _NotCacheable
    return tuple(out)


class Recorder(TorchDispatchMode):
    """Records memory while it is active, and operations and collectives while `counting`."""

    def __init__(self, mesh: Mesh, true_counts: dict[int, int], fake: FakeTensorMode | None = None):
        super().__init__()
        self.mesh, self.true_counts = mesh, true_counts  # true_counts: of boolean masks, by memory
        self.fake = torch_private.fakes(fake, _CPU) if fake is not None else None
        self.timeline = Timeline()
        self.counting = False
        self.share: float = 1  # how often it happens per step: 1/k for what is done every k steps
        self.scope = "step"
        self.ops: OpCounts = {}
        self.transfers: TransferCounts = {}
        self.in_loss = False
        self.paused = False
        self.weights: set[int] = set()
        self.read: set[int] = set()  # memory of what backward passes read; of a weight not what reads autocast's copy

    # ------------------------------------------------------------ phases

    def _phase(self) -> str:
        if self.timeline.phase in ("build", "optimizer") and self.scope == "step":
            return self.timeline.phase
        if torch_private.in_backward():
            return "recompute" if torch.is_grad_enabled() and torch_private.has_autograd_node() else "backward"
        return "loss" if self.in_loss else "forward"

    # ------------------------------------------------------------ dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that hides a mode from the compiler costs time

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].device  # asked for by every operator
        if any(issubclass(t, DTensor) or torch_private.is_awaited(t) for t in types):
            return NotImplemented  # the operators that they call come here
        kwargs = kwargs or {}
        if self.paused:
            return self._result(function, args, kwargs)[0]
        phase = self._phase()
        self.timeline.enter("backward" if phase == "recompute" else phase)
        namespace, name = _names(function)
        if name == "wait_tensor":
            return args[0]
        if function is torch.ops.aten.index.Tensor:
            args = self._select_rows(args)
        collective_kind = collective(name) if namespace in _COLLECTIVE_NAMESPACES else None
        out, cached, inputs = self._result(function, args, kwargs)
        outputs = [out] if isinstance(out, Tensor) else [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        tag = self._tag(name, inputs, outputs)
        if name in _COLLECTED_AT:
            gc.collect(0)
        input_memory = {memory_id(t) for t in inputs}
        if phase in ("backward", "recompute"):
            only_weights = name == "convolution_backward" and not args[-1][0]  # of images
            self.read |= input_memory - ({memory_id(args[2])} if only_weights else set())
        for t in outputs:
            allocation = self.timeline.record(t, name)
            if memory_id(t) not in input_memory:
                allocation.phase = phase
                allocation.tag = tag or ("communication" if collective_kind else "")
        if self.counting:
            if collective_kind is not None:
                payload = payload_of(collective_kind, args, out)
                self._add_transfer(collective_kind, payload, phase, group_among(args, kwargs))
            elif namespace in _COUNTED_NAMESPACES:
                if cached is not None and cached.is_counted:
                    counted = cached.counted
                else:
                    plain = name.replace("gelu", "gelu_tanh") if kwargs.get("approximate") == "tanh" else name
                    counted = self._count(plain, function, args, kwargs, inputs, outputs)
                    if cached is not None:
                        cached.counted, cached.is_counted = counted, True
                if counted is not None:
                    kind, label, dtype, flops, nbytes, shape = counted
                    key = OpKey(self.scope, kind, label, dtype, phase, flops, nbytes, shape)
                    self.ops[key] = self.ops.get(key, 0) + self.share
        return out

    def _result(self, function: Any, args: tuple, kwargs: dict) -> tuple[Any, CachedResult | None, list[Tensor]]:
        """(the operator's output, its cache entry, its input tensors)."""
        inputs: list[Tensor] = []
        geometries: list[tuple] = []
        try:
            if self.fake is None:  # real tensors are not cached
                raise _NotCacheable
            positional = _signature(args, inputs, geometries)
            key = (function, positional, *kwargs, _signature(kwargs.values(), inputs, geometries) if kwargs else None)
        except _NotCacheable:
            return function(*args, **kwargs), None, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        cached = CachedResult.cache.get(key)
        if cached is not None:
            return cached.rebuild(self.fake, inputs), cached, inputs
        out = function(*args, **kwargs)
        cached = CachedResult.of(out, inputs, geometries)
        if cached is not None:
            if len(CachedResult.cache) >= _CACHE_SIZE:
                CachedResult.cache.clear()
            CachedResult.cache[key] = cached
        return out, cached, inputs

    def _select_rows(self, args: tuple) -> tuple:
        """Replace a boolean mask by indices: it selects as many rows as it holds True.

        The number is counted before the trace (`_fake_batch`), as fake tensors have no values.
        """
        x, indices = args
        if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
            mask = indices[0]
            n = self.true_counts.get(memory_id(mask))
            n = mask.numel() if n is None else n  # a mask made in the step, of targets that count: at most all of them
            return x, [torch.empty(n, dtype=torch.int64, device=x.device) for _ in range(mask.dim())]
        return args

    def _tag(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        if name == "_to_copy" and inputs and memory_id(inputs[0]) in self.weights:
            return "gathered"  # autocast's copy of a weight
        if self.in_loss and self.scope == "micro":
            return "logits"
        return ""

    # ------------------------------------------------------------ counts

    def _count(
        self, name: str, function: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]
    ) -> tuple | None:
        """(kind, name, dtype, flops, bytes, shape); None for what takes no time on a device."""
        if name in _NOT_COUNTED:
            return None
        input_memory = {memory_id(t) for t in inputs}
        if not schema(function).is_mutable and outputs and all(memory_id(t) in input_memory for t in outputs):
            return None  # a view
        nbytes = sum(map(_bytes_moved, inputs)) + sum(map(_bytes_moved, outputs))
        first = next((t for t in inputs if t.is_floating_point()), None)
        dtype = DTYPES.get(first.dtype, "fp32") if first is not None else "fp32"
        label = name.strip("_")
        if name.startswith(torch_private.ATTENTION_PREFIX):
            shape, flops = _attention(function, args, kwargs)
            return "attention", label, dtype, flops, nbytes, shape
        product = _product_of(name, args, outputs)
        if product is None:
            return "memory", label, dtype, 0.0, nbytes, ()
        kind, shape, flops = product
        return kind, label, dtype, float(flops), nbytes, shape if kind == "matmul" else ()

    def _add_transfer(self, kind: str, payload: int, phase: str, group: dist.ProcessGroup | None) -> None:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        axis = axis_of(ranks, self.mesh, kind, payload)
        hidden = ""
        if axis == "shard" and self.scope == "micro":
            hidden = "forward" if phase in ("forward", "loss") else "backward"
        elif axis == "replicate" and self.scope == "micro":
            hidden = "backward"
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        phase = {"build": "optimizer", "loss": "forward"}.get(phase, phase)
        key = TransferKey(axis, kind, payload, len(ranks), stride, phase, hidden)
        self.transfers[key] = self.transfers.get(key, 0) + self.share


def _bytes_moved(t: Tensor) -> int:
    """Bytes read or written of a tensor; an expanded one is read once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def axis_of(ranks: tuple[int, ...], mesh: Mesh, kind: str, payload: int) -> str:
    """The axis of the layout along which these ranks lie; `control` for scalars over any ranks (losses, norms, counts).

    payload: bytes.
    """
    if payload <= 64:
        return "control"
    split = [a for a in AXES if mesh.sizes[a] > 1]
    for k in range(1, len(split) + 1):
        for axes in itertools.combinations(split, k):
            if ranks == _ranks(mesh, axes):
                if axes == ("tensor",) and kind in ("all_gather", "reduce_scatter"):
                    return "sequence"
                return next((a for a in ("shard", "expert", "replicate") if a in axes), axes[0])
    return "control"


def _ranks(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along these axes."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= mesh.sizes[axis]
    base = mesh.world.rank - sum(mesh.rank(axis) * strides[axis] for axis in axes)
    positions = itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
    return tuple(sorted(base + sum(i * strides[a] for i, a in zip(position, axes)) for position in positions))


# ---------------------------------------------------------------- how a GPU differs


@contextlib.contextmanager
def _cuda_rules(compiled: bool) -> Iterator[None]:
    """Compute under fake CPU tensors as on a GPU, as far as our models go.

    CUDA's autocast computes in fp32 what a CPU's does not (ATen/autocast_mode.h, AT_FORALL_FP32). Attention runs in
    flash kernels without a mask in half precision, else in memory-efficient ones; in half precision for few keys too.
    Both keep the output and one fp32 number per query, never the scores, also with dropout or a trained bias. Dropout
    keeps a mask of one byte per element, a CPU's keeps factors in the input's dtype (ATen/native/Dropout.cpp).

    Functions are replaced instead of a mode entered: recomputation in a backward pass bypasses modes of Python
    functions.
    """

    def with_fp32_inputs(function: Callable) -> Callable:
        def widen(y: Any) -> Any:
            return y.float() if isinstance(y, Tensor) and y.dtype in (torch.bfloat16, torch.float16) else y

        @functools.wraps(function)
        def in_fp32(x: Tensor, *args, **kwargs):
            if torch.is_autocast_enabled("cpu"):
                x, args, kwargs = widen(x), tuple(map(widen, args)), {k: widen(v) for k, v in kwargs.items()}
            return function(x, *args, **kwargs)

        return in_fp32

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(F, "rms_norm", functools.partial(_cuda_rms_norm, F.rms_norm)))
        for owner, name in ((F, "rms_norm"), (F, "layer_norm"), (F, "softmax"), (Tensor, "softmax"), (Tensor, "sum")):
            stack.enter_context(replaced(owner, name, with_fp32_inputs(getattr(owner, name))))
        stack.enter_context(replaced(F, "dropout", _cuda_dropout))
        fp8 = functools.partial(_CudaFp8, fused=compiled)
        cuda = dataclasses.replace(CUDA, attention=_cuda_attention, blocks=_cuda_blocks, fp8=fp8)
        stack.enter_context(pretending(cuda))
        yield


def _cuda_rms_norm(
    plain: Callable, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Where input and weight have one dtype, run LayerNorm's kernel, which keeps its input and few numbers a row."""
    if weight is not None and weight.dtype != x.dtype:
        return plain(x, shape, weight, eps)
    return F.layer_norm(x, shape, weight, None, 1e-5)


def _cuda_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace or not x.numel():
        return torch.dropout_(x, p, training) if inplace else torch.dropout(x, p, training)
    return torch.native_dropout(x, p, True)[0]


def _cuda_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: Any, window: int | None, scale: float | None) -> Tensor:
    """flex_attention keeps what flash attention keeps. Operations are counted as if a row were one causal document, and
    with a window as if every query had the same keys, as many as its blocks hold."""
    if window is not None and (seen := window + BLOCK) < k.shape[2] // 2:
        return _cuda_attention(q, k[:, :, :seen], v[:, :, :seen], scale=scale, enable_gqa=True)
    if q.dtype in (torch.bfloat16, torch.float16) and v.shape[-1] == q.shape[-1]:
        return torch_private.FLASH(q, k, v, 0.0, True, False, scale=scale)[0]
    return _cuda_attention(q, k, v, is_causal=True, scale=scale)


def _cuda_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(dtype) for x in (q, k, v))
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    half = q.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and q.shape[-1] <= 256 and v.shape[-1] == q.shape[-1]:
        return torch_private.FLASH(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    keep_logsumexp = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return torch_private.EFFICIENT(q, k, v, attn_mask, keep_logsumexp, dropout_p, is_causal, scale=scale)[0]


class _CudaFp8(nn.Linear):
    """As torchao's Float8Linear, which need not be installed here: the same operations in the same order, but for
    those of scalars, and it keeps its input and the weight themselves. fused: a compiler's casts, which are in the
    product's own seconds (`roofline.Parameters.cast`); the others are counted beside that."""

    def __init__(self, linear: nn.Linear, fused: bool):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias, self.fused = linear.weight, linear.bias, fused

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.get_autocast_dtype("cpu")).flatten(0, -2)
        out = _Fp8Product.apply(rows, self.weight.t(), self.fused).unflatten(0, x.shape[:-1])
        return out if self.bias is None else out + self.bias.to(out.dtype)


class _Fp8Product(torch.autograd.Function):
    """x (m, k) times w (k, n)."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.fused = fused
        return _fp8_product(_in_fp8(x, fused), _in_fp8(w, fused), fused)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, w = ctx.saved_tensors
        a, b = _in_fp8(grad, ctx.fused), _in_fp8(w, ctx.fused)
        to_x = _fp8_product(a, b.t(), ctx.fused)
        c, d = _in_fp8(grad, ctx.fused), _in_fp8(x, ctx.fused)
        return to_x, _fp8_product(c.t(), d, ctx.fused).t(), None


def _in_fp8(x: Tensor, fused: bool) -> Tensor:
    """Of gradients the type is another one as wide."""
    if fused:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scaled = x.float() * (448 / x.abs().max())
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn)


def _fp8_product(a: Tensor, b: Tensor, fused: bool) -> Tensor:
    """(m, k) times (k, n), row-major and column-major, filled up to a multiple of 16 along k."""
    more, one, how = -a.shape[1] % 16, torch.ones(()), F.ScalingType.TensorWise
    if more or not fused:
        a, b = F.pad(a, (0, more)).contiguous(), F.pad(b, (0, 0, 0, more)).t().contiguous().t()
    return F.scaled_mm(a, b, one, how, one, how, output_dtype=torch.bfloat16)


# ---------------------------------------------------------------- the trace


class Subject:
    """What is traced: here, a whole model. `plan.tracing` traces parts of one, and notes more of their step."""

    stages: Stages | None = None  # of `apply`
    replicas = True  # likewise

    def build(self, config: ModelConfig) -> nn.Module:
        """On the meta device."""
        return models.build(config, "meta")

    def start(self, recorder: Recorder, parallel: Parallel) -> None:
        """The second step begins, which is the one that counts."""

    def edge(self, unit: str, name: str) -> None:
        """It passes an edge (`parallel.observe`)."""


def trace_recipe(
    recipe: Recipe,
    n: int = 1,
    rank: int = 0,
    *,
    target: Target = "cpu",
    task: Task | None = None,
    micro_batches: list[dict[str, Any]] | None = None,
    subject: Subject = Subject(),
    evaluation: bool = False,
) -> Traced:
    """Trace one optimizer step of `rank` of `n` processes. Nothing is allocated and no other process is needed.

    task: with its data opened; without it, the batches are synthetic (`batches.micro_batches`). micro_batches: those of
    this rank, in place of the task's. evaluation: of the first of these batches, in place of the steps. Raises
    UserError for settings that contradict each other or cannot be traced.
    """
    recipe = recipe if task is not None else batches.complete(recipe)
    check.validate(recipe, n)
    layout = recipe.layout
    if layout.replicate == "data_parallel" or layout.transport == "mpi":
        setting = f"layout.replicate={layout.replicate}, transport={layout.transport}"
        raise UserError(f"{setting}: it cannot be traced. Plan replicate=ddp instead.")
    micro_batches = micro_batches or batches.micro_batches(recipe, n, task=task)
    task = task or batches.task_without_data(recipe)
    recipe = recipe.model_copy(update={"layout": layout.model_copy(update={"compile": "none", "offload": False})})
    with gc_paused():
        mesh = Mesh.make(recipe.layout, _enter_world(n, rank)) if n > 1 else None
        with FakeTensorMode() as fake:
            true_counts: dict[int, int] = {}
            fake_batches = [_fake_batch(b, true_counts) for b in micro_batches]
            recorder = Recorder(mesh or Mesh.single(), true_counts, fake)
            with _recording(recorder, target, layout.compile != "none"):
                return _trace(recipe, task, mesh, fake_batches, recorder, subject, evaluation)


@contextlib.contextmanager
def _recording(recorder: Recorder, target: Target, compiled: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_recording_resizes(recorder.timeline))
        stack.enter_context(_ignoring_dtensor_trials(recorder))
        if target == "cpu":  # a GPU's generator keeps its state, 16 bytes, on the host
            stack.enter_context(_recording_rng_states(recorder.timeline))
        if target == "cuda":
            stack.enter_context(_cuda_rules(compiled))
        yield


def _trace(
    recipe: Recipe, task: Task, mesh: Mesh | None, micro_batches: list[dict], recorder: Recorder, subject: Subject,
    evaluation: bool,
) -> Traced:  # fmt: skip
    timeline, device = recorder.timeline, torch.device("cpu")
    with recorder:
        tensors = [value for batch in micro_batches for value in batch.values() if isinstance(value, Tensor)]
        for value in tensors:
            timeline.record(value, "batch", "activations")
        precision = Precision(recipe.layout.precision, device)
        model = subject.build(recipe.model)
        materialise(model, device, None)
        if precision.pure:
            cast(model, precision.dtype)
        parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
        edges = _Edges(recorder, subject)
        exchanged = {"stages": subject.stages, "replicas": subject.replicas, "observer": edges}
        parallel = apply(model, recipe.layout, mesh, qat=recipe.train.qat, **exchanged)
        parallel.bare.train()
        stepper = Stepper(recipe, task, parallel, device, precision)
        for p in _local_tensors(parallel):
            timeline.record(p, "weight", "weights")
            recorder.weights.add(memory_id(p))
        edges.watch(parallel)
        if evaluation:
            start = _evaluation(recorder, stepper, micro_batches)
        else:
            start = _two_steps(recorder, stepper, micro_batches, subject)
    peak, peak_event = timeline.peak_since(start)
    return Traced(
        memory=timeline.components(peak_event), peak=peak, peak_phase=timeline.phase_at(peak_event),
        state=_state_bytes(timeline, start), work=_work_of(recorder, recipe, parallel, micro_batches),
        parameters=parameters, timeline=timeline, start=start, ops=recorder.ops, transfers=recorder.transfers,
        pure=precision.pure, batch_bytes=sum(value.nbytes for value in tensors),
    )  # fmt: skip


def _two_steps(recorder: Recorder, stepper: Stepper, micro_batches: list[dict], subject: Subject) -> int:
    """Take the first step, which creates state, and the second, which counts. Returns the second's first event."""
    timeline, local_updates = recorder.timeline, stepper.parallel.local_updates
    counts = {kind: sum(b["counts"][kind] for b in micro_batches) for kind in micro_batches[0]["counts"]}
    for second in (False, True):
        if second:
            gc.collect()  # reference cycles of the first step are not the second's
        timeline.phases.append((len(timeline.events), "build"))
        start = len(timeline.events)
        recorder.counting = second
        if second:
            subject.start(recorder, stepper.parallel)
            stepper.step(micro_batches, counts)
        else:
            _first_step(stepper, micro_batches, counts)
        if local_updates:
            recorder.share = 1 / local_updates.every
            local_updates.sync()
            recorder.share = 1
        stepper.progress.step += 1
        if not second:
            _tag_state(timeline, stepper)
    return start


def _evaluation(recorder: Recorder, stepper: Stepper, batches: list[dict]) -> int:
    """Evaluate the first batch as `train.evaluation` does. Returns the first event."""
    parallel, start = stepper.parallel, len(recorder.timeline.events)
    recorder.scope = "micro"
    batches = stepper.on_device(batches[:1])
    with torch.no_grad(), stepper.precision.autocast():
        (batch,) = parallel.prepared(batches)
        stepper.task.evaluate(parallel.bare.eval(), batch)
    return start


def _fake_batch(batch: dict[str, Any], true_counts: dict[int, int]) -> dict[str, Any]:
    """The batch with fake tensors; the number of True in its mask `select` is added to `true_counts`."""
    out = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            with unset_fake_temporarily():
                n = int(value.sum()) if value.dtype == torch.bool and key == "select" else None
            value = torch.empty(value.shape, dtype=value.dtype)  # every micro-batch has its own memory
            if n is not None:
                true_counts[memory_id(value)] = n
        out[key] = value
    return out


def _local_tensors(parallel: Parallel) -> Iterator[Tensor]:
    """The plain tensors behind all parameters and buffers of this process."""
    model = parallel.part
    for p in itertools.chain(model.parameters(), model.buffers()):
        yield p.to_local() if isinstance(p, DTensor) else p
    for p in parallel.local_parameters:
        yield p.local


def _tag_state(timeline: Timeline, stepper: Stepper) -> None:
    """Tag the optimizer's state, and what an outer step keeps."""
    states = stepper.optimizer.state.values() if stepper.optimizer else ()
    local_updates = stepper.parallel.local_updates
    outer = local_updates.kept() if local_updates else ()
    for value in (*(value for state in states for value in state.values()), *outer):
        if isinstance(value, Tensor):
            timeline.record(value, "state", "optimizer")


def _state_bytes(timeline: Timeline, start: int) -> dict[str, int]:
    """Bytes of weights, optimizer state and gradients, the gradients at their most from event `start` on."""
    totals = {"weights": 0, "optimizer": 0}
    for a in timeline.alive.values():
        if a.tag in totals:
            totals[a.tag] += a.nbytes
    return totals | {"gradients": max_gradients(timeline, start)}


def max_gradients(timeline: Timeline, start: int) -> int:
    """The most bytes of gradients that are alive at once, from event `start` on."""
    now = most = sum(change for a, change in timeline.events[:start] if a.tag == "gradients")
    for a, change in timeline.events[start:]:
        if a.tag == "gradients":
            now += change
            most = max(most, now)
    return most


def _first_step(stepper: Stepper, micro_batches: list[dict], counts: dict[str, int]) -> None:
    """Create what the first step leaves, with as little computing as possible.

    That is the optimizer's state, a pipeline's buffers and FSDP's own. FSDP sets itself up while it computes and gets
    two micro-batches (the second one accumulates gradients); the others get none.
    """
    parallel, layout = stepper.parallel, stepper.recipe.layout
    if parallel.pipeline and (layout.shard > 1 or layout.schedule == "zero_bubble"):
        stepper.step(micro_batches, counts)
        return
    if layout.shard > 1:
        # the last one too, as its shape may differ
        stepper.step([micro_batches[0], micro_batches[-1]][: len(micro_batches)], counts)
        return
    pipeline = parallel.pipeline

    def without_blocks(stage: Stage, received: Tensor | None, number: int) -> Tensor:
        if stage.last:
            return received.sum().float().reshape(1)
        if received is None:
            received = torch.zeros(1, device=pipeline.device, dtype=pipeline.wire, requires_grad=True)
        return received.sum().expand(pipeline.run.capacities[stage.index], pipeline.cutter.d_model).clone()

    if pipeline:
        parallel.observer.edge("", "begin")
        pipeline.run_schedule(parallel.prepared(stepper.on_device(micro_batches)), without_blocks, parallel.observer)
    for p in parallel.trainable:
        if p.parameter.grad is None:
            p.parameter.grad = torch.zeros_like(p.parameter)
    parallel.finish_gradients()
    stepper.update(torch.zeros(()))


class _Edges(Observer):
    """Tells the recorder its scope, its gradients and its logits, and the subject the edges of the second step."""

    def __init__(self, recorder: Recorder, subject: Subject):
        self.recorder, self.subject = recorder, subject

    def watch(self, parallel: Parallel) -> None:
        self.parallel, pipeline = parallel, parallel.pipeline
        for head in [s.part.model for s in pipeline.stages.values() if s.last] if pipeline else [parallel.bare]:
            head.register_forward_pre_hook(self._leave_loss)
            head.register_forward_hook(self._enter_loss)

    def _leave_loss(self, *_: Any) -> None:
        self.recorder.in_loss = False

    def _enter_loss(self, module: nn.Module, args: tuple, output: Any) -> None:
        logits = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        for t in logits:
            self._record(t, "logits")
        self.recorder.in_loss = True
        if logits and logits[0].requires_grad:
            logits[0].register_hook(self._leave_loss)

    def _record(self, tensor: Tensor | None, tag: str) -> None:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.recorder.timeline.record(local, tag, tag)

    def edge(self, unit: str, name: str) -> None:
        recorder = self.recorder
        if name == "begin":
            recorder.scope = "micro"
        elif name == "loss":
            recorder.in_loss = True
        elif name == "forward" and not self.parallel.pipeline:
            for gradient in _unsharded_gradients(self.parallel.bare):
                self._record(gradient, "gradients")
        if recorder.counting:
            self.subject.edge(unit, name)
        if name == "end":
            recorder.scope, recorder.in_loss = "step", False
            recorder.timeline.enter("optimizer")

    def gradients(self, unit: str, made: Sequence[Tensor | None]) -> None:
        if unit:  # those of states grow with the samples, those of weight and bias are as large as a weight
            self.recorder.in_loss = False
            for gradient, tag in zip(made, ("activations", "gathered", "gathered")):
                self._record(gradient, tag)
            return
        for p in self.parallel.local_parameters:
            for gradient in (p.local.grad, p.parameter.grad):
                self._record(gradient, "gradients")


def _unsharded_gradients(model: nn.Module) -> Iterator[Tensor]:
    """The whole gradients that FSDP2 keeps from one micro-batch to the next, to reduce them once."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from torch_private.unsharded_gradients(module)


@contextlib.contextmanager
def _recording_resizes(timeline: Timeline) -> Iterator[None]:
    """Record the resizing of storages, which bypasses all modes."""
    inner = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = inner(storage, nbytes)
        timeline.resize(storage, nbytes)
        return out

    with replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def _ignoring_dtensor_trials(recorder: Recorder) -> Iterator[None]:
    """Ignore the operators that DTensor tries on whole tensors: they are no part of a step."""
    owner, name = torch_private.trying_of_dtensor()
    tries = getattr(owner, name)

    def unrecorded(*args: Any) -> Any:
        before, recorder.paused = recorder.paused, True
        try:
            return tries(*args)
        finally:
            recorder.paused = before

    with replaced(owner, name, unrecorded):
        yield


@contextlib.contextmanager
def _recording_rng_states(timeline: Timeline) -> Iterator[None]:
    """Record the generator's states that checkpointing keeps for every block, which bypass all modes."""
    inner = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = inner()
        timeline.record(state, "get_rng_state")
        return state

    with replaced(torch, "get_rng_state", get_rng_state), replaced(torch.random, "get_rng_state", get_rng_state):
        yield


def _work_of(recorder: Recorder, recipe: Recipe, parallel: Parallel, micro_batches: list[dict]) -> Work:
    n, layout, pipeline = len(micro_batches), recipe.layout, parallel.pipeline
    micro, step = [], []
    for key, count in recorder.ops.items():
        if key.scope == "micro":
            micro.append(op_of(key, count / n, tf32=layout.tf32))
        else:
            step.append(op_of(key, count, tf32=layout.tf32, phase="optimizer"))
    replicas = recorder.mesh.size("replicate", "expert", "shard")
    return Work(
        micro=micro, step=step, transfers=[transfer_of(key, calls) for key, calls in recorder.transfers.items()],
        micro_batches=n, stages=layout.pipeline, virtual=len(pipeline.stages) if pipeline else 1,
        schedule=layout.schedule, samples=sum(map(_n_samples, micro_batches)) * replicas,
        tokens=sum(map(_n_tokens, micro_batches)) * replicas,
        data_bytes=sum(v.nbytes for b in micro_batches for v in b.values() if isinstance(v, Tensor)),
    )  # fmt: skip


def _n_samples(batch: dict) -> int:
    return len(next(v for v in batch.values() if isinstance(v, Tensor)))


def _n_tokens(batch: dict) -> int:
    return batch["n_tokens"] if "images" in batch or "image" in batch else batches.size_of(batch)
