"""The training step itself, stepped under fake tensors: the very module, optimizer, precision, checkpointing and layout that train.

Nothing is computed and nothing travels: only shapes. What is recorded is every allocation and release of tensor memory, every operation
and every collective of the second optimizer step (the first makes the optimizer's state).

On a GPU a step differs from a CPU's in what autocast computes in fp32 and in which attention kernel runs; `target="cuda"` has both, on
fake CPU tensors (`_cuda_rules`). What operators allocate for themselves while they run is not seen: cuBLAS's and cuDNN's workspaces, for
example, are part of the framework's constant.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradus import models, torch_private
from gradus.errors import UserError
from gradus.layers import kernels, masks
from gradus.parallel import check
from gradus.parallel.apply import apply
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import cast, fake_world, replaced
from gradus.parallel.mesh import AXES, DATA, Mesh
from gradus.parallel.pipeline import Stage
from gradus.parallel.traffic import collective, group_among, payload_of
from gradus.parallel.world import World
from gradus.plan import batches as making
from gradus.plan.work import COMPONENTS, Target, Work, op_of, transfer_of
from gradus.recipe.schema import Recipe
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
from gradus.train.precision import Precision
from gradus.train.step import Stepper

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclasses.dataclass
class Traced:
    """One optimizer step of one rank. Bytes are those of tensors; an allocator's rounding is not in them."""

    memory: dict[str, int]  # component → bytes at the peak; they sum to `peak`
    peak: int
    at: str  # what was going on at the peak: forward, loss, backward, recompute, optimizer
    held: dict[str, int]  # weights, gradients, optimizer: all that this rank holds of them, live at the peak or not
    work: Work
    parameters: int  # of the whole model
    timeline: Timeline
    start: int  # the event with which the step begins
    ops: dict[tuple, float]  # what was counted: (scope, kind, name, dtype, phase, flops, bytes, shape) → how often
    transfers: dict[tuple, float]  # (axis, kind, payload, group, stride, phase, hidden by) → calls
    pure: bool  # whether weights are in half
    batch: int  # bytes of the micro-batches


# ---------------------------------------------------------------- memory


@dataclasses.dataclass
class Stored:
    """One piece of memory, from its allocation to its release."""

    nbytes: int
    born: int  # index of the event
    phase: str
    name: str  # the operation that made it
    died: int | None = None
    tag: str = ""  # component, where it is known from where it comes


class Timeline:
    """Every allocation and release, in order."""

    def __init__(self):
        self.stored: dict[int, Stored] = {}  # alive, by address of the storage
        self.watched: dict[int, weakref.ref] = {}
        self.all: list[Stored] = []
        self.events: list[tuple[Stored, int]] = []  # (what, change in bytes)
        self.phases: list[tuple[int, str]] = [(0, "build")]  # (event from which on, phase)

    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    def enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phases.append((len(self.events), phase))

    def see(self, tensor: Tensor, name: str, tag: str = "") -> Stored:
        """The memory behind a plain tensor; new memory is an allocation."""
        storage = tensor.untyped_storage()
        key = storage_id(storage)
        found = self.stored.get(key)
        if found is None:
            found = self._born(storage, key, storage.nbytes(), name)
        if tag:
            found.tag = tag
        return found

    def _born(self, storage: torch.UntypedStorage, key: int, nbytes: int, name: str) -> Stored:
        new = Stored(nbytes, len(self.events), self.phase, name)
        self.stored[key] = new
        self.watched[key] = weakref.ref(storage, lambda _, key=key: self._died(key))
        self.all.append(new)
        self.events.append((new, nbytes))
        return new

    def _died(self, key: int) -> None:
        self.watched.pop(key, None)
        gone = self.stored.pop(key, None)
        if gone is not None:
            gone.died = len(self.events)
            self.events.append((gone, -gone.nbytes))

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """FSDP gives memory back, and takes it again, by resizing what stays the same object."""
        key = storage_id(storage)
        old = self.stored.get(key)
        if old is not None:
            self._died(key)
        new = self._born(storage, key, nbytes, "resize_")
        new.tag = "gathered"

    def since(self, event: int) -> tuple[int, int]:
        """(bytes at the peak, event just after which it is), from an event on."""
        now = sum(change for _, change in self.events[:event])
        peak, at = now, event - 1
        for i, (_, change) in enumerate(self.events[event:], event):
            now += change
            if now > peak:
                peak, at = now, i
        return peak, at

    def phase_at(self, event: int) -> str:
        return next(name for start, name in reversed(self.phases) if start <= event)

    def live(self, event: int) -> Iterator[Stored]:
        """What is allocated just after an event."""
        return (s for s in self.all if s.born <= event and (s.died is None or s.died > event))

    def components(self, event: int) -> dict[str, int]:
        """Component → bytes just after an event."""
        ends = self.forward_ends()
        found = dict.fromkeys(COMPONENTS, 0)
        for s in self.live(event):
            found[s.tag or self.by_life(s, ends)] += s.nbytes
        return found

    def forward_ends(self) -> list[int]:
        """The events at which backward passes take over from forward passes."""
        pairs = zip(self.phases[1:], self.phases)
        return [start for (start, phase), (_, before) in pairs if before in ("forward", "loss") and phase == "backward"]

    def by_life(self, s: Stored, ends: list[int]) -> str:
        """What the forward pass made and the backward pass still finds is an activation, the rest passes by."""
        if s.phase not in ("forward", "loss"):
            return "transient"
        i = bisect.bisect_left(ends, s.born)
        return "activations" if i < len(ends) and (s.died is None or s.died >= ends[i]) else "transient"


# ---------------------------------------------------------------- operations


def _shape_of(name: str, args: tuple, outputs: list[Tensor]) -> tuple[str, tuple[int, ...], float] | None:
    """(kind, shape as of work.Op, operations) of matrix products and convolutions; None for all else."""
    if name in ("mm", "addmm"):
        a, b = args[-2:] if name == "mm" else args[1:3]
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
    """As _shape_of: at every place of its output (of its input, if it is transposed) a product with the weights. Where a group has a single
    channel it is no product of matrices, and takes as long as its memory."""
    each = x if transposed else y
    places, n, k = each.numel() // each.shape[1], w.shape[0] // groups, w[0].numel()
    kind = "memory" if groups > 1 and 1 in (n, w.shape[1]) else "matmul"
    return kind, (groups, places, *((k, n) if transposed else (n, k))), 2 * places * w.numel()


def _attention(function: Any, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], float]:
    """(shape as of work.Op, operations) of a kernel of attention, forwards or backwards, each argument found by its name in the operator's
    schema: the kernels order theirs differently."""
    q, k, v = (_argument(function, name, args, kwargs) for name in ("query", "key", "value"))
    batch, heads, queries, dim = q.shape
    scores = 2 * batch * heads * queries * k.shape[2]
    # forwards two products; backwards five: the scores again, and two gradients of each (Dao et al. 2022, appendix B.2)
    flops = scores * (3 * dim + 2 * v.shape[3] if schema(function).name.endswith("backward") else dim + v.shape[3])
    causal = _argument(function, "is_causal", args, kwargs)
    return (batch, heads, queries, k.shape[2], dim), flops / 2 if causal else float(flops)


def _argument(function: Any, name: str, args: tuple, kwargs: dict) -> Any:
    for i, argument in enumerate(schema(function).arguments):
        if argument.name == name:
            return args[i] if i < len(args) else kwargs.get(name, argument.default_value)
    raise AssertionError(f"{function} has no argument {name}")


_TRAVELS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_COUNTED = ("aten", "gradus", "fsdp")  # others only ask (prim::device) or mark; FSDP's own copy what is gathered into place


@functools.cache
def _names(function: Any) -> tuple[str, str]:
    """(namespace, name) of an operator."""
    namespace, name = schema(function).name.split("::")
    return namespace, name


_FREE = {"_unsafe_view", "wait_tensor", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "detach", "alias", "device"}


# Python frees what refers to itself (DTensor's wrappers do) when its collector runs, after so many objects. So that a trace is the same
# every time, it runs at these operators here, and else not.
_COLLECTS = {"mm", "addmm", "bmm", "convolution", "convolution_backward"}


_entered: tuple[tuple[int, int], contextlib.ExitStack, World] | None = None  # (processes, rank) and their world


def _enter_world(n: int, rank: int) -> World:
    global _entered
    if _entered is None or _entered[0] != (n, rank):
        _leave_world()
        stack = contextlib.ExitStack()
        _entered = (n, rank), stack, stack.enter_context(fake_world(n, rank))
    return _entered[2]


def _leave_world() -> None:
    global _entered
    if _entered is not None:
        _entered[1].close()
    _entered = None


_at_rest = False  # whether what was there before is set aside already


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """Around one trace, or several of one recipe with more or fewer layers: what was there before is looked through once, and a world
    that the next trace has too stays, with what DTensor knows of it."""
    global _at_rest
    if _at_rest:
        gc.collect()
        gc.freeze()
        yield
        return
    was, _at_rest = gc.isenabled(), True
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        _at_rest = False
        _leave_world()
        gc.unfreeze()
        if was:
            gc.enable()


class _Unknown(Exception):
    """An argument whose like cannot be told."""


_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_RESULTS_KEPT = 50_000


@dataclasses.dataclass
class Result:
    """What an operator makes of arguments of one kind: FakeTensorMode is asked once, as it takes most of a trace's time."""

    tensors: list[tuple]  # each (shape, strides, dtype, which input's memory or None, offset), or which input it is itself: (i,)
    kind: type  # of what is returned: Tensor, tuple, list or NoneType
    counted: tuple | None = None  # (kind, name, dtype, flops, bytes, shape), once it was counted
    known: bool = False  # whether it was counted

    _all: ClassVar[dict[tuple, Result]] = {}  # (operator, its arguments' shapes) → result; of all traces

    @staticmethod
    def of(out: Any, inputs: list[Tensor], like: tuple, function: Any) -> Result | None:
        """None where it cannot be made again from shapes alone."""
        outputs = [out] if isinstance(out, Tensor) else list(out) if type(out) in (tuple, list) else [] if out is None else None
        if outputs is None or any(type(t) is not FakeTensor or t.requires_grad or t.constant is not None for t in outputs):
            return None
        if any(_like(t) != before for t, before in zip(inputs, like)):
            return None  # it changed an input's shape
        memory = {memory_id(t): i for i, t in enumerate(inputs)}
        tensors: list[tuple] = []
        for t in outputs:
            itself = next((i for i, x in enumerate(inputs) if x is t), None)
            storage = t.untyped_storage()
            of = memory.get(storage_id(storage))
            if itself is None and of is None:
                size = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())) if t.numel() else 0
                if t.storage_offset() or storage.nbytes() != size * t.element_size() or t.device.type != "cpu":
                    return None
                memory[storage_id(storage)] = -1  # two that share new memory are not made again
            if of == -1:
                return None
            tensors.append((itself,) if itself is not None else (t.shape, t.stride(), t.dtype, of, t.storage_offset()))
        return Result(tensors, Tensor if isinstance(out, Tensor) else type(out))

    def make(self, mode: FakeTensorMode, inputs: list[Tensor]) -> Any:
        made: list[Tensor] = []
        for t in self.tensors:
            if len(t) == 1:
                made.append(inputs[t[0]])
                continue
            shape, stride, dtype, of, offset = t
            with torch_private.without_dispatch():
                plain = torch.empty_strided(shape if of is None else (0,), stride if of is None else (1,), dtype=dtype, device="meta")
                if of is not None:
                    plain.set_(inputs[of].untyped_storage(), offset, shape, stride)
            made.append(FakeTensor(mode, plain, _CPU))
        return made[0] if self.kind is Tensor else None if self.kind is type(None) else self.kind(made)


_CPU = torch.device("cpu")


def _like(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes()


def _signature(values: Any, inputs: list[Tensor], like: list[tuple]) -> tuple:
    """What tells arguments from others; collects the tensors among them. Raises _Unknown."""
    out: list[Any] = []
    for v in values:
        kind = type(v)
        if kind is FakeTensor:
            of = v.shape, v.stride(), v.dtype, v.storage_offset(), v.untyped_storage().nbytes()
            inputs.append(v)
            like.append(of)
            out.append(of)
        elif kind in _PLAIN:
            out.append((kind, v))
        elif kind is list or kind is tuple or kind is torch.Size:
            out.append(_signature(v, inputs, like))
        else:
            raise _Unknown
    return tuple(out)


class Recorder(TorchDispatchMode):
    """While active, keeps the time line of memory; and while `counting`, operations and collectives."""

    def __init__(self, mesh: Mesh, chosen: dict[int, int], fake: FakeTensorMode | None = None):
        super().__init__()
        self.mesh, self.chosen, self.fake = mesh, chosen, fake
        self.timeline = Timeline()
        self.counting = False
        self.share: float = 1  # of a step: of what is done every so many steps
        self.scope = "step"
        self.causal = False
        self.ops: dict[tuple, float] = {}
        self.transfers: dict[tuple, float] = {}
        self.in_loss = False
        self.paused = False
        self.weights: set[int] = set()

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
        return False  # nothing is compiled here, and the wrapper that hides a mode from the compiler takes its time at every operator

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default and type(args[0]) is FakeTensor:
            return args[0].device  # asked for by every operator
        if any(issubclass(t, DTensor) or torch_private.is_awaited(t) for t in types):
            return NotImplemented  # what they make of it comes by here again
        kwargs = kwargs or {}
        if self.paused:
            return function(*args, **kwargs)
        phase = self._phase()
        self.timeline.enter("backward" if phase == "recompute" else phase)
        namespace, name = _names(function)
        if name == "wait_tensor":
            return args[0]
        if function is torch.ops.aten.index.Tensor:
            args = self._selected(args)
        travels = namespace in _TRAVELS
        kind = collective(name) if travels else None
        out, result, inputs = self._result(function, args, kwargs)
        outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        tag = self._tag(name, inputs, outputs)
        if name in _COLLECTS:
            gc.collect(0)
        known = {memory_id(t) for t in inputs}
        for t in outputs:
            stored = self.timeline.see(t, name)
            if memory_id(t) not in known:
                stored.phase = phase
                stored.tag = tag or ("communication" if kind else "")
        if self.counting:
            if kind is not None:
                self._transfer(kind, payload_of(kind, args, out), phase, group_among(args, kwargs))
            elif namespace in _COUNTED:
                if result is None or not result.known:
                    plain = name.replace("gelu", "gelu_tanh") if kwargs.get("approximate") == "tanh" else name
                    counted = self._count(plain, function, args, kwargs, inputs, outputs)
                    if result is not None:
                        result.counted, result.known = counted, True
                else:
                    counted = result.counted
                if counted is not None:
                    kind_of, label, dtype, flops, moved, shape = counted
                    key = (self.scope, kind_of, label, dtype, phase, flops, moved, shape)
                    self.ops[key] = self.ops.get(key, 0) + self.share
        return out

    def _result(self, function: Any, args: tuple, kwargs: dict) -> tuple[Any, Result | None, list[Tensor]]:
        """(what the operator gives, the same as it is remembered, the tensors it is given)."""
        inputs: list[Tensor] = []
        like: list[tuple] = []
        try:
            if self.fake is None:  # real tensors: nothing is remembered
                raise _Unknown
            key = (function, _signature(args, inputs, like), *kwargs, _signature(kwargs.values(), inputs, like) if kwargs else None)
        except _Unknown:
            return function(*args, **kwargs), None, [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        result = Result._all.get(key)
        if result is not None:
            return result.make(self.fake, inputs), result, inputs
        out = function(*args, **kwargs)
        result = Result.of(out, inputs, like, function)
        if result is not None:
            if len(Result._all) >= _RESULTS_KEPT:
                Result._all.clear()
            Result._all[key] = result
        return out, result, inputs

    def _selected(self, args: tuple) -> tuple:
        """Indexing by a boolean mask gives as many rows as it holds True: known from before, as fake tensors have no values."""
        x, indices = args
        if len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool:
            mask = indices[0]
            n = self.chosen.get(memory_id(mask))
            n = mask.numel() if n is None else n  # of the targets that count, by label smoothing: all of them, at most
            places = [torch.empty(n, dtype=torch.int64, device=x.device) for _ in range(mask.dim())]
            return x, places
        return args

    def _tag(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> str:
        if self.in_loss and self.scope == "micro":
            return "logits"
        if name == "_to_copy" and inputs and memory_id(inputs[0]) in self.weights:
            return "gathered"  # autocast's copy of a weight
        return ""

    # ------------------------------------------------------------ what is counted

    def _count(self, name: str, function: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]) -> tuple | None:
        """(kind, name, dtype, flops, bytes, shape)."""
        if name in _FREE:
            return None
        given = {memory_id(t) for t in inputs}
        if not schema(function).is_mutable and outputs and all(memory_id(t) in given for t in outputs):
            return None  # a view
        moved = sum(_moved(t) for t in inputs) + sum(_moved(t) for t in outputs)
        first = next((t for t in inputs if t.is_floating_point()), None) if inputs else None
        dtype = DTYPES.get(first.dtype, "fp32") if first is not None else "fp32"
        if name.startswith(torch_private.ATTENTION_PREFIX):
            shape, flops = _attention(function, args, kwargs)
            return "attention", name.strip("_"), dtype, flops, moved, shape
        found = _shape_of(name, args, outputs)
        if found is None:
            return "memory", name.strip("_"), dtype, 0.0, moved, ()
        kind, shape, flops = found
        return kind, name.strip("_"), dtype, float(flops), moved, shape if kind == "matmul" else ()

    def _transfer(self, kind: str, payload: int, phase: str, group: dist.ProcessGroup | None) -> None:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        axis = axis_of(ranks, self.mesh, kind, payload)
        if axis == "control":
            hidden = ""
        elif axis == "shard" and self.scope == "micro":
            hidden = "forward" if phase in ("forward", "loss") else "backward"
        elif axis == "replicate" and self.scope == "micro":
            hidden = "backward"
        else:
            hidden = ""
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        key = (axis, kind, payload, len(ranks), stride, "optimizer" if phase == "build" else "forward" if phase == "loss" else phase, hidden)
        self.transfers[key] = self.transfers.get(key, 0) + self.share


def _moved(t: Tensor) -> int:
    """Bytes read or written of a tensor; what is expanded is read once."""
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def axis_of(ranks: tuple[int, ...], mesh: Mesh, kind: str, payload: int) -> str:
    """The axis of the layout along which these ranks lie. Scalars over any of them (losses, norms, counts) are `control`."""
    if payload <= 64:
        return "control"
    wide = [a for a in AXES if mesh.sizes[a] > 1]
    for k in range(1, len(wide) + 1):
        for axes in itertools.combinations(wide, k):
            if ranks == _ranks(mesh, axes):
                if axes == ("tensor",) and mesh.sizes["tensor"] > 1 and kind in ("all_gather", "reduce_scatter"):
                    return "sequence"
                return next((a for a in ("shard", "expert", "replicate") if a in axes), axes[0])
    return "control"


def _ranks(mesh: Mesh, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one only along these axes."""
    strides, stride = {}, 1
    for axis in reversed(AXES):
        strides[axis] = stride
        stride *= mesh.sizes[axis]
    own = mesh.world.rank
    base = own - sum(mesh.rank(axis) * strides[axis] for axis in axes)
    places = itertools.product(*(range(mesh.sizes[axis]) for axis in axes))
    return tuple(sorted(base + sum(i * strides[a] for i, a in zip(place, axes)) for place in places))


# ---------------------------------------------------------------- what a GPU does otherwise


@contextlib.contextmanager
def _cuda_rules() -> Iterator[None]:
    """What CUDA's autocast computes in fp32 and a CPU's does not (ATen/autocast_mode.h, AT_FORALL_FP32), of what our models use; and
    CUDA's attention kernels: flash without a mask in half precision, else the memory-efficient one; half precision for few keys too. Both
    keep the output and one fp32 number a query, never the scores, also with dropout or a trained bias. Its dropout keeps which ones, a byte
    each, where a CPU's keeps factors in the input's own dtype (ATen/native/Dropout.cpp).

    Functions are replaced, and no mode is entered: what a backward pass computes again goes by no mode of Python functions.
    """

    def in_fp32(function: Callable) -> Callable:
        @functools.wraps(function)
        def up(x: Tensor, *args, **kwargs):
            if torch.is_autocast_enabled("cpu"):
                wide = lambda y: y.float() if isinstance(y, Tensor) and y.dtype in (torch.bfloat16, torch.float16) else y  # noqa: E731
                x, args, kwargs = wide(x), tuple(map(wide, args)), {k: wide(v) for k, v in kwargs.items()}
            return function(x, *args, **kwargs)

        return up

    places = [(F, "rms_norm"), (F, "layer_norm"), (F, "softmax"), (Tensor, "softmax"), (Tensor, "sum")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(F, "rms_norm", functools.partial(_cuda_rms_norm, F.rms_norm)))
        for owner, name in places:
            stack.enter_context(replaced(owner, name, in_fp32(getattr(owner, name))))
        stack.enter_context(replaced(F, "dropout", _cuda_dropout))
        stack.enter_context(replaced(F, "scaled_dot_product_attention", _cuda_attention))
        stack.enter_context(replaced(masks, "has_block_masks", lambda device: True))
        stack.enter_context(replaced(kernels, "naive_is_faster", lambda *_: False))
        stack.enter_context(replaced(kernels, "flex", _cuda_documents))
        yield


def _cuda_rms_norm(plain: Callable, x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """One kernel on a GPU, where input and weight are of one type: LayerNorm's, which keeps its input and a number or two a row."""
    if weight is not None and weight.dtype != x.dtype:
        return plain(x, shape, weight, eps)
    return F.layer_norm(x, shape, weight, None, 1e-5)


def _cuda_dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0 < p < 1 or inplace or not x.numel():
        return torch.dropout_(x, p, training) if inplace else torch.dropout(x, p, training)
    return torch.native_dropout(x, p, True)[0]


def _cuda_documents(q: Tensor, k: Tensor, v: Tensor, documents: masks.Documents, scale: float | None) -> Tensor:
    """flex_attention keeps what flash attention does. All that is causal is counted, as if a row were one document."""
    if q.dtype in (torch.bfloat16, torch.float16):
        return torch_private.FLASH(q, k, v, 0.0, True, False, scale=scale)[0]
    return _cuda_attention(q, k, v, is_causal=True, scale=scale)


def _cuda_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(dtype) for x in (q, k, v))
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    half = q.dtype in (torch.bfloat16, torch.float16)
    if attn_mask is None and half and q.shape[-1] <= 256:
        return torch_private.FLASH(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return torch_private.EFFICIENT(q, k, v, attn_mask, wanted, dropout_p, is_causal, scale=scale)[0]


# ---------------------------------------------------------------- the trace


def trace_recipe(
    recipe: Recipe,
    n: int = 1,
    rank: int = 0,
    *,
    target: Target = "cpu",
    task: Task | None = None,
    micro_batches: list[dict[str, Any]] | None = None,
    watch: Callable[[Recorder, Stepper], Any] | None = None,
) -> Traced:
    """One optimizer step of `rank` of `n` processes. Allocates nothing and needs no other process.

    task: with its data opened; without it, the batches are synthetic (`batches.micro_batches`). micro_batches: what this rank is given.
    Raises UserError for what does not fit together or cannot be traced.
    """
    recipe = recipe if task is not None else making.complete(recipe)
    check.validate(recipe, n)
    layout = recipe.layout
    if layout.replicate in ("data_parallel",) or layout.transport == "mpi":
        raise UserError(f"layout.replicate={layout.replicate}, transport={layout.transport}: it cannot be traced. Plan replicate=ddp instead.")
    given = micro_batches or making.micro_batches(recipe, n, task=task)
    task = task or making.task_without_data(recipe)
    recipe = recipe.model_copy(update={"layout": layout.model_copy(update={"compile": "none", "offload": False})})
    with contextlib.ExitStack() as stack:
        stack.enter_context(collecting())
        mesh = Mesh.make(recipe.layout, _enter_world(n, rank)) if n > 1 else None
        fake = stack.enter_context(FakeTensorMode())
        return _trace(recipe, task, mesh, given, target, fake, stack, watch)


def _trace(
    recipe: Recipe, task: Task, mesh: Mesh | None, given: list[dict], target: Target, fake: FakeTensorMode,
    stack: contextlib.ExitStack, watch: Callable | None = None,
) -> Traced:
    chosen: dict[int, int] = {}
    batches = [_fake_batch(b, chosen) for b in given]
    device = torch.device("cpu")
    recorder = Recorder(mesh or Mesh.single(), chosen, fake)
    timeline = recorder.timeline
    stack.enter_context(_resizes(timeline))
    stack.enter_context(_untried(recorder))
    if target == "cpu":  # a GPU's generator has its state, 16 bytes, on the host
        stack.enter_context(_random_states(timeline))
    if target == "cuda":
        stack.enter_context(_cuda_rules())
    with recorder:
        for batch in batches:
            for value in batch.values():
                if isinstance(value, Tensor):
                    timeline.see(value, "batch", "activations")
        precision = Precision(recipe.layout.precision, device)
        model = models.build(recipe.model)
        if precision.pure:
            cast(model, precision.dtype)
        parameters = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
        parallel = apply(model, recipe.layout, mesh, qat=recipe.train.qat)
        parallel.bare.train()
        stepper = Stepper(recipe, task, parallel, device, precision)
        for p in _tensors(parallel):
            recorder.weights.add(timeline.see(p, "weight", "weights") and memory_id(p))
        _instrument(recorder, stepper)
        counts = _counts(batches)
        for i in range(2):
            if i == 1:
                gc.collect()  # what the first step has left in circles is none of the second's
            timeline.phases.append((len(timeline.events), "build"))
            start = len(timeline.events)
            recorder.counting = i == 1
            if recorder.counting and watch:
                watch(recorder, stepper)
            if i == 0:
                _first_step(stepper, batches, counts)
            else:
                stepper.step(batches, counts)
            if parallel.local_updates:
                recorder.share = 1 / parallel.local_updates.every
                parallel.local_updates.sync()
                recorder.share = 1
            stepper.progress.step += 1
            if i == 0:
                _tag_state(timeline, stepper)
    peak, at = timeline.since(start)
    work = _work(recorder, recipe, parallel, given, stepper)
    return Traced(
        memory=timeline.components(at), peak=peak, at=timeline.phase_at(at), held=_held(stepper, timeline, start), work=work, parameters=parameters,
        timeline=timeline, start=start, ops=recorder.ops, transfers=recorder.transfers, pure=precision.pure,
        batch=sum(v.nbytes for b in batches for v in b.values() if isinstance(v, Tensor)),
    )  # fmt: skip


def _fake_batch(batch: dict[str, Any], chosen: dict[int, int]) -> dict[str, Any]:
    out = {}
    for key, value in batch.items():
        if isinstance(value, Tensor):
            with unset_fake_temporarily():
                n = int(value.sum()) if value.dtype == torch.bool and key == "select" else None
            value = torch.empty(value.shape, dtype=value.dtype)  # of its own for every micro-batch
            if n is not None:
                chosen[memory_id(value)] = n
        out[key] = value
    return out


def _counts(batches: list[dict]) -> dict[str, int]:
    return {kind: sum(b["counts"][kind] for b in batches) for kind in batches[0]["counts"]}


def _tensors(parallel: Parallel) -> Iterator[Tensor]:
    """The plain tensors behind all parameters and buffers that this process holds."""
    model = parallel.part
    for p in itertools.chain(model.parameters(), model.buffers()):
        yield p.to_local() if isinstance(p, DTensor) else p
    for h in parallel.local_parameters:
        yield h.local


def _tag_state(timeline: Timeline, stepper: Stepper) -> None:
    """What the step left behind: the optimizer's state, and buckets of gradients."""
    optimizers = [o for o in (stepper.optimizer, stepper.parallel.local_updates and stepper.parallel.local_updates.outer) if o]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    timeline.see(value, "state", "optimizer")
    if stepper.parallel.local_updates and stepper.parallel.local_updates.outer:
        for anchor in stepper.parallel.local_updates.anchors:
            timeline.see(anchor, "anchor", "optimizer")


def _held(stepper: Stepper, timeline: Timeline, start: int) -> dict[str, int]:
    seen: dict[str, dict[int, int]] = {"weights": {}, "optimizer": {}}
    for s in timeline.stored.values():
        if s.tag in seen:
            seen[s.tag][id(s)] = s.nbytes
    return {k: sum(v.values()) for k, v in seen.items()} | {"gradients": max_gradients(timeline, start)}


def max_gradients(timeline: Timeline, start: int) -> int:
    """From an event on."""
    now = most = sum(change for s, change in timeline.events[:start] if s.tag == "gradients")
    for s, change in timeline.events[start:]:
        if s.tag == "gradients":
            now += change
            most = max(most, now)
    return most


def _first_step(stepper: Stepper, batches: list[dict], counts: dict[str, int]) -> None:
    """What the first step leaves, with as little computing as does: the optimizer's state, a pipeline's buffers, FSDP's own. FSDP makes
    itself ready while it computes, and is given two micro-batches (the second adds to the gradients); the others none."""
    parallel, layout = stepper.parallel, stepper.recipe.layout
    if parallel.pipeline and (layout.shard > 1 or layout.schedule == "zero_bubble"):
        stepper.step(batches, counts)
        return
    if layout.shard > 1:
        stepper.step([batches[0], batches[-1]][: len(batches)], counts)  # also where the last one has another shape
        return
    finish = parallel._finish_gradients

    def finish_with_gradients() -> None:
        for held in parallel.trainable:
            if held.parameter.grad is None:
                held.parameter.grad = torch.zeros_like(held.parameter)
        finish()

    def without_computing(*_) -> Tensor:
        finish_with_gradients()
        loss = torch.zeros(())
        return loss if parallel.local_updates else parallel.sum(loss, *DATA, "context", "pipeline")

    def little(stage: Stage, received: Tensor | None = None, *, index: Tensor) -> Tensor:
        pipeline = stage.pipeline
        if stage.last:
            return received.sum().float().reshape(1)
        if received is None:
            received = torch.zeros(1, device=pipeline.device, dtype=pipeline.wire, requires_grad=True)
        return received.sum().expand(pipeline.run.capacities[stage.index], pipeline.cutter.d_model).clone()

    with replaced(parallel, "_finish_gradients", finish_with_gradients), replaced(Stage, "forward", little):
        if parallel.pipeline:
            stepper.step(batches, counts)
        else:
            with replaced(parallel, "forward_backward", without_computing):
                stepper.step(batches, counts)


def _instrument(recorder: Recorder, stepper: Stepper) -> None:
    """Tell the recorder where the step stands, without changing it."""
    timeline, parallel = recorder.timeline, stepper.parallel

    def forward_backward(*args, inner=parallel.forward_backward, **kwargs):
        recorder.scope = "micro"
        return inner(*args, **kwargs)

    def finish(inner=parallel._finish_gradients):
        recorder.scope, recorder.in_loss = "step", False
        timeline.enter("optimizer")
        inner()
        for held in parallel.local_parameters:
            for grad in (held.local.grad, held.parameter.grad):
                if grad is not None:
                    grad = grad.to_local() if isinstance(grad, DTensor) else grad
                    timeline.see(grad, "gradient", "gradients")

    def sync_on(last: bool, inner=parallel.replicas.sync_on):
        for grad in _unsharded_gradients(parallel.bare):
            timeline.see(grad, "gradient", "gradients")
        inner(last)

    parallel.forward_backward, parallel._finish_gradients, parallel.replicas.sync_on = forward_backward, finish, sync_on

    def gone(_grad: Tensor) -> None:
        recorder.in_loss = False

    def leaves(module: nn.Module, args: tuple, output: Any) -> None:
        logits = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        for t in logits:
            timeline.see(t.to_local() if isinstance(t, DTensor) else t, "logits", "logits")
        recorder.in_loss = True
        if logits and logits[0].requires_grad:
            logits[0].register_hook(gone)

    if parallel.pipeline:
        heads = [s.part.model for s in parallel.pipeline.stages.values() if s.last]
    else:
        heads = [parallel.bare]
    for head in heads:
        head.register_forward_pre_hook(lambda *_: gone(None))
        head.register_forward_hook(leaves)


def _unsharded_gradients(model: nn.Module) -> Iterator[Tensor]:
    """What FSDP2 keeps whole from one micro-batch to the next, to reduce it once."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for grad in torch_private.unsharded_gradients(module):
                yield grad.to_local() if isinstance(grad, DTensor) else grad


@contextlib.contextmanager
def _resizes(timeline: Timeline) -> Iterator[None]:
    """Resizing a storage passes by all modes."""
    inner = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        out = inner(storage, nbytes)
        timeline.resized(storage, nbytes)
        return out

    torch.UntypedStorage.resize_ = resize_
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = inner


@contextlib.contextmanager
def _untried(recorder: Recorder) -> Iterator[None]:
    """What DTensor tries on whole tensors is no part of a step."""
    owner, name = torch_private.trying_of_dtensor()
    tries = getattr(owner, name)

    def unseen(*args: Any) -> Any:
        before, recorder.paused = recorder.paused, True
        try:
            return tries(*args)
        finally:
            recorder.paused = before

    with replaced(owner, name, unseen):
        yield


@contextlib.contextmanager
def _random_states(timeline: Timeline) -> Iterator[None]:
    """Checkpointing keeps the state of the random number generator for every block, and it comes by no mode."""
    inner = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = inner()
        timeline.see(state, "get_rng_state")
        return state

    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = inner


def _work(recorder: Recorder, recipe: Recipe, parallel: Parallel, given: list[dict], stepper: Stepper) -> Work:
    n = len(given)
    micro, step = [], []
    for key, count in recorder.ops.items():
        if key[0] == "micro":
            micro.append(op_of(key, count / n, tf32=recipe.layout.tf32))
        else:
            step.append(op_of(key, count, tf32=recipe.layout.tf32, phase="optimizer"))
    transfers = [transfer_of(key, calls) for key, calls in recorder.transfers.items()]
    mesh = recorder.mesh
    data = mesh.size("replicate", "expert", "shard")
    layout = recipe.layout
    samples = sum(_samples(b) for b in given)
    tokens = sum(making.size_of(b) if "images" not in b and "image" not in b else b["n_tokens"] for b in given)
    pipeline = parallel.pipeline
    return Work(
        micro=micro, step=step, transfers=transfers, micro_batches=n, stages=layout.pipeline,
        virtual=len(pipeline.stages) if pipeline else 1, schedule=layout.schedule,
        samples=samples * data, tokens=tokens * data,
        data_bytes=sum(v.nbytes for b in given for v in b.values() if isinstance(v, Tensor)),
    )  # fmt: skip


def _samples(batch: dict) -> int:
    return len(next(v for v in batch.values() if isinstance(v, Tensor)))
