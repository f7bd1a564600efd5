"""A few minutes of measuring this machine make a device that no table lists: what `tables` prices operations by.

Operations are timed as a training step finds them, not as a loop over one of them would: other operands every time (out of a pool larger
than the inner caches), the one that the step has just made freshly written, results kept so that memory is not the same again. A loop
over the same operands is up to a third too fast. All points are measured in turns, over and over until the time is up, and the median
counts; the spread is the quartiles' distance over it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from gradus import files, hardware, limits, models, torch_private
from gradus.errors import UserError
from gradus.hardware import Device, Link
from gradus.hardware.files import user_file
from gradus.measure import collectives
from gradus.parallel import status
from gradus.parallel import world as worlds
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.plan import batches, tables
from gradus.plan.trace import Recorder, trace_recipe
from gradus.proof.room import coarse_name, device_of
from gradus.proof.timing import OTHERS, Others
from gradus.recipe import presets, schema
from gradus.train import machine
from gradus.train.precision import Precision, pick_device
from gradus.train.session import Session
from gradus.train.step import Stepper

aten = torch.ops.aten
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = 32  # of batched products
ROW = 512  # elements of a row of what works by rows: norms, softmax
LONGEST = 0.1  # s of one call; what takes longer is left out, and the rate of the next smaller one holds
SLICE = 0.004  # s that a point gets in a round
POOL = 2**26  # elements of the pool
HELD = 2**25  # bytes of results that are kept
LEAST, FINE, FIRST = 10, 30, 15  # s of a calibration at least; from which on it takes all points; of the one before a machine's first run
clock: Callable[[], float] = time.perf_counter


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of what is timed."""

    sides: tuple[int, ...]  # of m, n and k
    batched: tuple[int, ...]  # the same of batched products
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    elements: tuple[int, ...]
    rounds: int  # at least
    every: int  # of how many tiny models one is stepped
    repeat: int  # how often
    sent: tuple[int, ...] = collectives.SIZES
    causal: tuple[bool, ...] = (False, True)


ALL = Sizes(  # kernels change their blocks with the length; of heads of 8 they are slower than of 16, where products have whole vectors
    (16, 64, 256, 1024, 4096), (16, 64, 256, 1024), (8, 32, 64, 128, 192, 256, 384, 512, 768, 1024), (8, 16, 32, 64, 128),
    tuple(2**k for k in (10, 14, 17, 19, 21, 22, 23, 24)), 2, 1, 30,
)  # fmt: skip
SOME = Sizes(  # up to 512 tokens a CPU's kernel computes a causal mask's whole matrix
    (16, 128, 1024), (16, 128), (8, 32, 128, 512), (8, 16, 64), (2**10, 2**16, 2**22), 1, 2, 6, (2**10, 2**16, 2**22), (False,),
)  # fmt: skip


# ---------------------------------------------------------------- operands


class Pool:
    """Memory with random numbers, of which every call takes other parts."""

    def __init__(self, device: torch.device, n: int = POOL):
        self.device, self.n, self.at, self.generator = device, n, 0, torch.Generator(device).manual_seed(0)
        base = torch.empty(2**20, device=device).normal_(generator=self.generator)
        self.kept: dict[Any, Tensor] = {torch.float32: base.repeat(-(-n // 2**20))[:n]}

    def take(self, *shape: int, dtype: torch.dtype = torch.float32, to_change: bool = False) -> Tensor:
        """The next part. to_change: of memory that may be written to."""
        n = math.prod(shape)
        assert n <= self.n, f"{shape} is more than the pool has"
        key = (dtype, "to change") if to_change else dtype
        if key not in self.kept:
            self.kept[key] = self.kept[torch.float32].to(dtype, copy=True)
        if self.at + n > self.n:
            self.at = 0
        part = self.kept[key][self.at : self.at + n].view(shape)
        self.at += -(-n // 64) * 64
        return part

    def ids(self, n: int, below: int) -> Tensor:
        """(n,) indices."""
        return torch.randint(below, (n,), device=self.device, generator=self.generator)


@dataclasses.dataclass
class Point:
    """One operation at one size, and what was measured of it."""

    make: Callable[[], tuple]  # operands
    call: Callable[..., Any]
    fresh: int | None = 0  # which operand the step has just written; None: none
    name: str = ""  # of memory-bound operations, for messages
    fixed: tuple = ()  # the row's fields where they are not read off the call
    times: list[float] = dataclasses.field(default_factory=list)
    dead: str = ""  # why it cannot be measured here

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        if len(self.times) < 4:
            return 0.0
        low, _, high = statistics.quantiles(self.times, n=4)
        return (high - low) / self.median


# ---------------------------------------------------------------- what is measured


def matmuls(pool: Pool, sizes: Sizes, dtype: str, rate: float) -> Iterator[Point]:
    """mm as in the forward pass (nt), for the input's gradient (nn) and for the weight's (tn); addmm forward; bmm likewise."""
    d = DTYPES[dtype]

    def operands(layout: str, *batch: int, m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
        a = pool.take(*batch, m, k, dtype=d) if layout[0] == "n" else pool.take(*batch, k, m, dtype=d).transpose(-1, -2)
        b = pool.take(*batch, k, n, dtype=d) if layout[1] == "n" else pool.take(*batch, n, k, dtype=d).transpose(-1, -2)
        return a, b

    def biased(m: int, n: int, k: int) -> tuple[Tensor, ...]:
        return pool.take(n, dtype=d), *operands("nt", m=m, n=n, k=k)

    for batch, sides in ((), sizes.sides), ((BATCH,), sizes.batched):
        b, call, name = (BATCH, torch.bmm, "bmm") if batch else (1, torch.mm, "mm")
        for m, n, k in itertools.product(sides, repeat=3):
            if 2 * b * m * n * k / rate > LONGEST or b * max(m * n, m * k, n * k) > pool.n // 4:
                continue
            for layout in ("nt", "nn", "tn"):
                make = functools.partial(operands, layout, *batch, m=m, n=n, k=k)
                yield Point(make, call, int(name == "mm" and layout == "tn"), fixed=(name, dtype, layout, b, m, n, k))
            if not batch:
                yield Point(functools.partial(biased, m, n, k), torch.addmm, 1, fixed=("addmm", dtype, "nt", 1, m, n, k))


def attentions(pool: Pool, sizes: Sizes, dtype: str, rate: float) -> Iterator[Point]:
    """Fused attention forward and backward. Queries, keys and values lie as a linear layer leaves them: (batch, seq, heads, head_dim)."""
    d, heads = DTYPES[dtype], 4

    def qkv(n: int, batch: int, seq: int, dim: int) -> list[Tensor]:
        return [pool.take(batch, seq, heads, dim, dtype=d).transpose(1, 2) for _ in range(n)]

    def made(forward: Callable, *shape: int) -> tuple:
        leaves = [x.detach().requires_grad_() for x in qkv(3, *shape)]
        with torch.enable_grad():
            out = forward(*leaves)
        return out.detach(), out, leaves, *qkv(1, *shape)

    def backward(_: Tensor, out: Tensor, leaves: list[Tensor], grad: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, grad)

    for seq, dim, causal in itertools.product(sizes.sequences, sizes.head_dims, sizes.causal):
        batch = max(1, 2048 // seq)
        if 10 * batch * heads * seq * seq * dim / rate > 3 * LONGEST:
            continue
        shape = ("causal" if causal else "full", batch, heads, seq, seq, dim)
        forward = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
        yield Point(functools.partial(qkv, 3, batch, seq, dim), forward, fixed=("forward", dtype, *shape))
        yield Point(functools.partial(made, forward, batch, seq, dim), backward, None, fixed=("backward", dtype, *shape))


def operands(pool: Pool, dtype: torch.dtype, e: int, letters: str) -> list[Any]:
    """What an operation on about `e` elements is given, a letter each (see BOUND)."""
    rows, row, classes = e // ROW or 1, min(e, ROW), min(4096, e)
    words = 4 * rows  # of an embedding: some times as many as there are tokens
    take = functools.partial(pool.take, dtype=dtype)
    make: dict[str, Callable[[], Any]] = {
        "x": lambda: take(rows, row),
        "c": lambda: take(rows, row, to_change=True),
        "h": lambda: take(-(-e // 2048), 8, min(e, 2048) // 64 or 1, 8).transpose(1, 2),
        "r": lambda: pool.take(rows, 1),
        "w": lambda: pool.take(row),
        "m": lambda: (torch.arange(row, device=pool.device) < row // 2).expand(rows, row),  # as of padding, for all heads
        "t": lambda: take(words, row),
        "i": lambda: pool.ids(rows, words),
        "l": lambda: pool.take(e // classes, classes),
        "y": lambda: pool.ids(e // classes, classes),
        "u": lambda: torch.ones((), device=pool.device),
        "p": lambda: [pool.take(max(1, e // 8), to_change=True) for _ in range(8)],
        "s": lambda: [torch.ones((), device=pool.device) for _ in range(8)],
    }
    return [make[letter]() for letter in letters]


ADAM = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "amsgrad": False, "maximize": False}
SGD = {"weight_decay": 0.01, "momentum": 0.9, "lr": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
OTHER = {torch.float32: torch.bfloat16}  # a type to cast to
# The other operations of our models, their losses and optimizers (with a rate of 0: the numbers stay, the work is the same), by what they
# are given: x a tensor, c one to change, h heads beside each other, r a column of rows, w a row (norms and losses stay in fp32), m a mask,
# t an embedding's table and i indices into it, l logits and y labels, u a scalar, p eight parameters, s their steps; and whether the first
# of these is what the step has just written.
BOUND: list[tuple[str, Callable[..., Any], bool]] = [
    *(("xx", call, True) for call in (aten.add.Tensor, aten.mul.Tensor)),
    *(("x", call, True) for call in (aten.relu.default, aten.silu.default, aten.tanh.default, aten.gelu.default)),
    *(("xx", call, True) for call in (aten.silu_backward.default, aten.tanh_backward.default, aten.gelu_backward.default)),
    ("x", lambda x: aten.mul.Scalar(x, 0.5), True),
    ("x", lambda x: aten.div.Scalar(x, 2.0), True),
    ("c", lambda x: aten.mul_.Scalar(x, 1.0), True),
    ("c", lambda x: aten.div_.Scalar(x, 1.0), True),
    ("c", lambda x: aten.bernoulli_.float(x, 0.9), False),
    ("c", lambda x: aten.fill_.Scalar(x, 1.0), False),
    ("x", lambda x: torch_private.TO_COPY(x, dtype=OTHER.get(x.dtype, torch.float32)), True),
    ("h", lambda x: aten.clone.default(x, memory_format=torch.contiguous_format), True),
    ("xx", lambda x, y: aten.cat.default([x, y], -1), True),
    ("x", lambda x: aten.roll.default(x, [x.shape[1] // 2 or 1], [1]), True),
    ("xxx", aten.addcmul.default, True),
    ("x", lambda x: aten.pow.Tensor_Scalar(x, 2), True),
    ("xx", lambda g, x: aten.threshold_backward.default(g, x, 0), True),
    ("x", lambda x: aten.gelu.default(x, approximate="tanh"), True),
    ("xx", lambda g, x: aten.gelu_backward.default(g, x, approximate="tanh"), True),
    ("x", lambda x: aten.sum.dim_IntList(x, [0], True), True),
    ("x", lambda x: aten.mean.dim(x, [-1], True), True),
    ("x", lambda x: torch_private.SOFTMAX(x, -1, False), True),
    ("x", lambda x: torch_private.SAFE_SOFTMAX(x, -1), True),
    ("xx", lambda g, y: torch_private.SOFTMAX_BACKWARD(g, y, -1, g.dtype), True),
    ("x", lambda x: torch_private.LOG_SOFTMAX(x, -1, False), True),
    ("xx", lambda g, y: torch_private.LOG_SOFTMAX_BACKWARD(g, y, -1, g.dtype), True),
    ("xww", lambda x, w, b: aten.native_layer_norm.default(x, [len(w)], w, b, 1e-5), True),
    ("xxrrww", lambda g, x, m, r, w, b: aten.native_layer_norm_backward.default(g, x, [len(w)], m, r, w, b, [True] * 3), True),
    ("xm", lambda x, mask: aten.masked_fill.Scalar(x, mask, 0.0), False),
    ("xxm", lambda x, y, mask: aten.where.self(mask, x, y), True),
    ("ti", aten.embedding.default, False),
    ("xi", lambda g, ids: aten.embedding_dense_backward.default(g, ids, 4 * len(ids), -1, False), True),
    ("ti", lambda x, ids: aten.index.Tensor(x, [ids]), False),
    ("xti", lambda g, x, ids: aten.index_put.default(x, [ids], g, True), True),
    ("ly", lambda x, y: aten.nll_loss_forward.default(x, y, None, 2, -100), True),
    ("lyu", lambda x, y, one: aten.nll_loss_backward.default(one, x, y, None, 2, -100, one), True),
    ("p", lambda x: torch_private.FOREACH_NORM(x, 2), False),
    ("pu", torch_private.FOREACH_MUL, False),
    ("pppps", lambda p, g, m, v, s: torch_private.FUSED_ADAMW(p, g, m, v, [], s, **ADAM), False),
    ("pppps", lambda p, g, m, v, s: torch_private.FUSED_ADAM(p, g, m, v, [], s, **ADAM), False),
    ("ppp", lambda p, g, b: torch_private.FUSED_SGD(p, g, b, **SGD), False),
]


def memory_bound(pool: Pool, sizes: Sizes, dtype: str) -> Iterator[Point]:
    """BOUND by size. The trace's own names and bytes are read off the call."""
    for e, (letters, call, fresh) in itertools.product(sizes.elements, BOUND):
        if (dtype == "fp32" or not set(letters) & set("wlp")) and not ("i" in letters and e > 2**22):
            make = functools.partial(operands, pool, DTYPES[dtype], e, letters)
            yield Point(make, call, 0 if fresh else None, name=getattr(call, "__name__", "operation"))


# ---------------------------------------------------------------- the clock


class Timer:
    """Times calls one by one, on the CPU's clock or between a GPU's events, with the results of earlier ones still alive."""

    def __init__(self, device: torch.device):
        self.device = device
        self.alive: collections.deque[tuple[Any, int]] = collections.deque()
        self.alive_bytes = 0

    def time(self, point: Point, operands: tuple) -> float:
        if point.fresh is not None:
            operands[point.fresh].mul_(1.0)
        if self.device.type == "cpu":
            start = clock()
            out = point.call(*operands)
            found = clock() - start
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch_private.keep_gpu_busy(200_000)  # so that the device is behind: what is measured is the kernel, not its launch
            begin.record()
            out = point.call(*operands)
            end.record()
            end.synchronize()
            found = begin.elapsed_time(end) / 1e3
        n = sum(t.nbytes for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, Tensor))
        self.alive.append((out, n))
        self.alive_bytes += n
        while self.alive_bytes > HELD and len(self.alive) > 1:
            self.alive_bytes -= self.alive.popleft()[1]
        return found

    def round(self, point: Point) -> None:
        """A few more times of a point. An operation that this device does not have is marked, not measured."""
        try:
            if not point.times:
                self.time(point, point.make())
                point.times.append(self.time(point, point.make()))
            for _ in range(int(min(12, max(1, SLICE / point.times[-1])))):
                point.times.append(self.time(point, point.make()))
        except (RuntimeError, NotImplementedError, TypeError) as e:
            point.dead = str(e).splitlines()[0]


def key_of(point: Point) -> tuple[str, str, int] | tuple[()]:
    """(name, dtype, bytes) of a memory-bound operation as the trace has them; () where the call is not one operation to it."""
    recorder = Recorder(Mesh.single(), {})
    recorder.counting, recorder.scope = True, "micro"
    operands = point.make()
    with recorder:
        point.call(*operands)
    found = [(name, dtype, int(n_bytes)) for _, kind, name, dtype, _, _, n_bytes, *_ in recorder.ops if kind == "memory"]
    return max(found, key=lambda key: key[2], default=())


def sane(pool: Pool, timer: Timer) -> dict[str, float]:
    """dtype → operations/s of a square product. A half precision that is slower than fp32 by half or more is left out: nobody uses it."""
    rates = {}
    for dtype in DTYPES:
        with contextlib.suppress(RuntimeError):
            point = Point(lambda d=DTYPES[dtype]: (pool.take(512, 512, dtype=d), pool.take(512, 512, dtype=d)), torch.mm)
            rates[dtype] = 2 * 512**3 / min(timer.time(point, point.make()) for _ in range(5))
    return {dtype: rate for dtype, rate in rates.items() if rate > 0.5 * rates["fp32"]}


def measure(device: torch.device, seconds: float, say: Callable[[str], None], sizes: Sizes) -> dict[str, Any]:
    """The tables of `tables.FIELDS` and what else `Device.measured` holds, but for dispatch and collectives."""
    start = time.perf_counter()
    with torch.no_grad():
        pool, timer = Pool(device), Timer(device)
        if device.type == "cpu":
            machine.tune_memory()  # as in a run
        rates = sane(pool, timer)
        whole = [dtype for dtype in rates if dtype != "fp16" or device.type != "cpu"]  # few train in fp16 on a CPU: its products must do
        products = [p for dtype, rate in rates.items() for p in matmuls(pool, sizes, dtype, rate)]
        products = [p for p in products if p.fixed[1] in whole or p.fixed[0::2][:2] == ("mm", "nt")]
        fused = [p for dtype in whole for p in attentions(pool, sizes, dtype, rates["fp32"])]
        bound = [p for dtype in whole for p in memory_bound(pool, sizes, dtype)]
        points = products + fused + bound
        for p in points:
            timer.round(p)
        rounds = 1
        say(f"{len(points)} points, the first round took {time.perf_counter() - start:.0f} s")
        while rounds < sizes.rounds or (time.perf_counter() - start) * (rounds + 1) / rounds < seconds:
            for p in points:
                if not p.dead:
                    timer.round(p)
            rounds += 1
        if dead := sorted({p.name or " ".join(map(str, p.fixed[:3])) for p in points if p.dead}):
            say(f"not available on this device: {', '.join(dead)}")
        for p in bound:
            p.fixed = () if p.dead else key_of(p)
    bound = [p for p in bound if p.fixed]
    return {
        "date": datetime.date.today().isoformat(),
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "spread": round(statistics.median(p.spread for p in points if not p.dead), 4),
        "peaks": {d: max(2 * math.prod(p.fixed[3:7]) / p.median for p in products if p.fixed[1] == d and not p.dead) for d in rates},
        "bandwidth": _bandwidth(bound),
        "matmul": _text(products),
        "attention": _text(fused),
        "memory": _text(bound),
    }


def _bandwidth(bound: list[Point]) -> float:
    """Bytes/s, read and written, of the fastest operation on the largest operands that moves them all: filling and a loss's backward pass
    write and read nothing, and a loss reads one entry of each row."""
    moved = [(p.fixed[2], p.median) for p in bound if p.fixed[0] not in ("fill", "nll_loss_forward", "nll_loss_backward")]
    return max(n_bytes / seconds for n_bytes, seconds in moved if n_bytes > max(moved)[0] / 4)


def _text(points: list[Point]) -> str:
    return "".join(f"{' '.join(map(str, p.fixed))} {p.median:.3e} {p.spread:.2f}\n" for p in points if not p.dead)


# ---------------------------------------------------------------- around operations


def tiny_steps(device: torch.device) -> Iterator[tuple[Any, Any, list, dict]]:
    """(recipe, stepper, micro-batches, counts) of models so small that nearly all of a step is the framework's."""
    size = {"vocab_size": 32, "n_layers": 4, "d_model": 16, "n_heads": 2, "seq_len": 8, "d_ff": 32}
    rest = {"name": "tiny", "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 2}, "train": {"steps": 10, "clip_norm": 1.0}}
    for model, task in presets.TINY:
        for precision in ("fp32", "bf16"):
            layout = {"precision": precision, "device": device.type}
            data = {"kind": "synthetic"} if task["name"] == "copy" else {"kind": "text", "path": "-"}
            recipe = schema.Recipe.model_validate({**rest, "data": data, "task": task, "model": model | size, "layout": layout})
            recipe = batches.complete(recipe)
            given = batches.micro_batches(recipe)
            parallel = apply(models.build(recipe.model).to(device), recipe.layout)
            parallel.bare.train()
            stepper = Stepper(recipe, batches.task_without_data(recipe), parallel, device, Precision(precision, device))
            yield recipe, stepper, given, {kind: sum(b["counts"][kind] for b in given) for kind in given[0]["counts"]}


def dispatch(device: Device, on: torch.device, sizes: Sizes) -> dict[str, float]:
    """Phase → seconds that the framework spends around one operation: what steps of tiny models take beyond their operations.

    The forward pass has modules and autograd's bookkeeping, the backward pass autograd's nodes, the optimizer its lists of parameters.
    """
    over = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    launches = dict(over)
    for recipe, stepper, given, counts in itertools.islice(tiny_steps(on), 0, None, sizes.every):
        work = trace_recipe(recipe, micro_batches=given, target="cuda" if on.type == "cuda" else "cpu").work
        known = dict.fromkeys(over, 0.0)
        for op in [*work.micro, *work.step]:
            known[op.phase] += tables.seconds(op, device) * op.count if device.kind == "cpu" else 0.0
            launches[op.phase] += op.launches * op.count
        times = collections.defaultdict(list)
        for i in range(sizes.repeat + 3):
            for phase, found in _phases(stepper, given, counts).items():
                if i >= 3:
                    times[phase].append(found)
        for phase in over:
            over[phase] += statistics.median(times[phase]) - known[phase]
    found = {phase: max(0.0, over[phase] / launches[phase]) for phase in over}
    return {**found, "recompute": found["forward"]}


def _phases(stepper: Any, given: list[dict], counts: dict[str, int]) -> dict[str, float]:
    """Seconds of one step by phase; of the host's alone where there is a GPU, for which nothing waits."""
    inner, marks = stepper.parallel.backward, []

    def backward(loss: Tensor) -> None:
        marks.append(clock())
        inner(loss)
        marks.append(clock())

    with mock.patch.object(stepper.parallel, "backward", backward):
        marks.append(clock())
        stepper.step(given, counts)
        marks.append(clock())
    return {phase: end - begin for phase, (begin, end) in zip(("forward", "backward", "optimizer"), itertools.pairwise(marks))}


# ---------------------------------------------------------------- the device


def device_here(on: torch.device, measured: dict[str, Any]) -> Device:
    """The entry of this machine, without dispatch and links."""
    measured = dict(measured)
    peaks, bandwidth = measured.pop("peaks"), measured.pop("bandwidth")
    if on.type == "cuda":
        properties = torch.cuda.get_device_properties(on)
        name, memory, node = properties.name, properties.total_memory, torch.cuda.device_count()
    else:
        found = machine.describe()
        name = coarse_name(measured["threads"]) if measured.get("coarse") else found["cpu"]
        memory = found.get("memory_limit_bytes", found["memory_bytes"])
        node = max(1, found.get("cpus_allowed", found["cpus"]) // measured["threads"])
    return Device(
        name=name, peaks=peaks, memory=float(memory), bandwidth=bandwidth, kind="cpu" if on.type == "cpu" else "gpu", node=node,
        aliases=("this", "here", *(("cpu",) if on.type == "cpu" else ())), driver=re.escape(name) if on.type == "cuda" else None,
        date=measured["date"], measured=measured,
        source=f"gradus calibrate, torch {measured['torch']}, {measured['threads']} threads: rates reached, not the vendor's peaks",
    )  # fmt: skip


def link_here(on: torch.device, sizes: Sizes) -> tuple[Link, dict[str, Any]]:
    """The link between two processes of this machine, and what was fitted of each collective: seconds of latency, bytes/s."""
    backend = "nccl" if on.type == "cuda" else "gloo"
    rows = collectives.run(backend, 2, sizes.sent)
    found: dict[str, dict[str, float]] = {}
    for row in rows or []:
        _, name, what = row.name.split("/")
        if what in ("latency", "bandwidth"):
            found.setdefault(name, {"largest_error": float(round(row.conditions["largest_error"], 3))})[what] = float(f"{row.value:.4g}")
    reduce = found["all_reduce"]  # two ranks: the bytes of a call cross the link once, in two hops
    return Link(f"{backend} between 2 processes", reduce["bandwidth"], 1.0, reduce["latency"] / 2, source="gradus calibrate"), found


def calibrate(seconds: float, on: torch.device, say: Callable[[str], None] = lambda line: None) -> Device:
    """The device entry of this machine. About `seconds` long; links take 20 s of it, and what surrounds operations 10 s. Below FINE, coarse:
    of fewer points and once, links take 5 s and what surrounds operations 2."""
    start, fine = time.perf_counter(), seconds >= FINE
    sizes = ALL if fine else SOME
    several = torch.cuda.device_count() > 1 if on.type == "cuda" else limits.processors() > 1
    measured = measure(on, max(10.0, seconds - (30 if several else 10)) if fine else seconds - (7 if several else 2), say, sizes)
    say(f"{measured['rounds']} rounds in {time.perf_counter() - start:.0f} s; median spread {measured['spread']:.1%}")
    device = device_here(on, measured | ({} if fine else {"coarse": True}))
    device.measured["dispatch"] = {phase: float(f"{value:.3g}") for phase, value in dispatch(device, on, sizes).items()}
    if several:
        link, device.measured["collectives"] = link_here(on, sizes)
        device = dataclasses.replace(device, link=link)
    device.measured["seconds"] = round(time.perf_counter() - start)
    return device


def lines(device: Device) -> Iterator[str]:
    """What the verb prints."""
    m = device.measured
    yield f"{device.name}: {device.memory / 2**30:.1f} GiB, {m['threads']} threads, torch {m['torch']}, {m['date']}"
    yield "best matrix product  " + ", ".join(f"{k} {v / 1e9:,.0f} GFLOP/s" for k, v in device.peaks.items())
    yield f"memory               {device.bandwidth / 1e9:.1f} GB/s, read and written, beyond the caches"
    yield "around an operation  " + ", ".join(f"{phase} {value * 1e6:.1f} us" for phase, value in m["dispatch"].items())
    if device.link:
        yield f"all-reduce           {device.link.bandwidth / 1e9:.2f} GB/s, {device.link.latency * 1e6:.0f} us per hop ({device.link.name})"
    points = ", ".join(f"{m[kind].count(chr(10))} {kind}" for kind in ("matmul", "attention", "memory"))
    yield f"points               {points}; {m['rounds']} rounds, median spread {m['spread']:.1%}, {m['seconds']} s"


def run(args: Any) -> list[str]:
    """The verb. Returns what is printed at the end."""
    on = pick_device("auto")
    least = LEAST if on.type == "cpu" else FINE
    if args.seconds < least:
        raise UserError(f"--seconds {args.seconds:g}: too short to measure every point twice; give at least {least}.")
    files.writable(Path(args.to or user_file("hardware")))  # before the work
    if args.threads:
        torch.set_num_threads(args.threads)
    device = calibrate(args.seconds, on, functools.partial(print, flush=True))
    if "coarse" in device.measured:
        with contextlib.suppress(UserError):  # there is none
            if "coarse" not in (hardware.find("this", args.to).measured or {}):
                device = dataclasses.replace(device, aliases=())
    file = hardware.add_device(device, args.to)
    return [*lines(device), f"written to {file}; use it with --on {'this' if device.aliases else shlex.quote(device.name)}"]


def once(session: Session) -> None:
    """Before a run on a CPU of which no step time is known with so many threads: a coarse calibration, in a process of its own, which
    leaves nothing in this one's memory. Where others wait too short for it, and where CI or GRADUS_NO_CALIBRATE is set: nothing."""
    layout, several, threads = session.recipe.layout, session.mesh.world.size > 1, torch.get_num_threads()
    off = os.environ.get("CI") or os.environ.get("GRADUS_NO_CALIBRATE") or (several and layout.timeout < 4 * FIRST)
    if off or session.device.type != "cpu" or pick_device("auto").type == "mps" or device_of(session.device, threads):
        return
    of = f"{threads} thread{'s' * (threads > 1)}"
    print(f"first run here with {of}: measuring this machine for the time of a step (GRADUS_NO_CALIBRATE=1: never) ...", end=" ", flush=True)
    command = [sys.executable, "-m", "gradus", "calibrate", "--seconds", str(FIRST), "--threads", str(threads)]
    launchers = {name for launcher in worlds.LAUNCHERS for name in launcher[1:]}
    mine = {name: value for name, value in os.environ.items() if name not in launchers}
    mine |= {status.PARENT: str(os.getpid()), "CUDA_VISIBLE_DEVICES": ""}
    began, others = time.perf_counter(), Others(os.getpid())
    try:
        done = subprocess.run(command, env=mine, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * FIRST)
        why = "" if done.returncode == 0 else f"; failed: {(done.stderr.strip().splitlines() or ['no error message'])[-1]}"
    except subprocess.TimeoutExpired:
        why = "; given up: other programs used the processors. gradus calibrate when they do not"
    except OSError as e:
        why = f"; failed: {e}"
    if not why and (others.share() or 0) > OTHERS:
        why = "; other programs used the processors: gradus calibrate when they do not"
    print(f"{time.perf_counter() - began:.0f} s{why}", flush=True)
