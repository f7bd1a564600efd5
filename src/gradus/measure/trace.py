"""What recorded steps consist of: phases, categories of operations, places in the code and memory, read from the trace
that torch.profiler wrote (Chrome's Trace Event Format), a pure function of the file.

Time on a CPU is what each call takes without the calls within it. Time on a GPU is that of the kernels which a call
launched; what is left of the steps is idle.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

MARK = "gradus/"  # how ranges are named that end a phase
PHASES = {"data": "data", "forward": "forward", "backward": "backward", "step": "optimizer"}  # mark that ends → phase
REST = "rest"  # between them: counts of all processes, the batch on its way to the device, gradients set to nothing
AGAIN = "recomputation"  # of a forward pass within the backward pass
WAITING, PYTHON, IDLE, POINTWISE = "data loading", "Python and dispatch", "device idle", "element-wise"
COMPILED = "compiled kernels"

# the category of an operation, by its name: the first that fits
NAMES = {
    "collectives": r"^(c10d|nccl|gloo|mpi):|c10d_functional|record_param_comms",
    "attention": r"scaled_dot_product|flash_attention|efficient_attention|flex_attention",
    COMPILED: r"triton_|cpp_fused|CompiledF|Torch-Compiled|AOTAutograd|inductor",
    "convolution": r"::\w*conv",
    "matrix products": r"::_?(add)?(mm|bmm|mv)(_backward)?$|::(baddbmm|addbmm|matmul|linear|dot|einsum|_?grouped_mm)",
    "normalisation": r"::\w*norm",
    "softmax and loss": r"softmax|nll_loss|cross_entropy|logsumexp",
    "embedding and indexing": r"::(\w*embedding|\w*index|gather|scatter|take|one_hot|select_backward|slice_backward)",
    "copies and memory": r"::(copy_|_?to|_to_copy|clone|contiguous|cat|stack|pin_memory|resize_|\w*empty\w*|"
    r"(new_)?(zeros|ones|full)\w*|zero_|fill_)$|Memcpy|Memset",
    PYTHON: r"::(\w*view\w*|reshape|\w*transpose|t|permute|expand\w*|as_strided|slice|select|\w*squeeze|detach_?|alias|"
    r"unbind|split\w*|chunk|narrow|unfold|\w*flatten|lift_fresh|item|_local_scalar_dense|is_nonzero|result_type)$",
    POINTWISE: r"^(aten|gradus|prims)::",
}
LAUNCHES, KERNELS = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cpu_op", "python_function", "user_annotation", *LAUNCHES)


class Place(NamedTuple):
    """Where in the model and in the source something was called. modules: classes, from the outermost. source: the
    innermost function that is no library's, `FILE:LINE NAME`. compiled: within a graph of torch.compile's."""

    modules: tuple[str, ...] = ()
    source: str = ""
    compiled: bool = False

    @property
    def kernel(self) -> bool:
        """Of attention: whichever is chosen, its operations are in this file."""
        return "layers/kernels.py" in self.source

    @property
    def name(self) -> str:
        """The last three classes, else file and function."""
        path, _, function = self.source.partition(" ")
        return " / ".join(self.modules[-3:]) or f"{path.rsplit('/')[-1].split(':')[0]} {function}".strip()


@dataclasses.dataclass(slots=True)
class Call:
    """An operation, a Python function or a range. Times in µs; `own`: without what it called, on a GPU of kernels."""

    name: str
    kind: str
    start: float
    end: float
    phase: str
    place: Place
    operation: Call | None  # the operator that this is, or is within
    own: float = 0.0

    @property
    def category(self) -> str:
        if self.phase in ("data", IDLE):
            return WAITING if self.phase == "data" else IDLE
        if self.kind == "python_function":
            return COMPILED if self.place.compiled else PYTHON  # on a CPU its kernels are functions of Python's
        named = _named(self.name)
        if named in (PYTHON, "collectives"):
            return named
        if self.phase == "optimizer":
            return "optimizer"
        if self.place.kernel:
            return "attention"
        norm = self.place.modules and "norm" in self.place.modules[-1].lower()
        return "normalisation" if norm and named == POINTWISE else named


@functools.cache
def _named(name: str) -> str:
    return next((category for category, pattern in NAMES.items() if re.search(pattern, name)), PYTHON)


@dataclasses.dataclass
class Trace:
    """calls: of the recorded steps, each with time of its own. steps: (start, end) of each, in µs. waits: times that
    the host waited for a GPU, and µs."""

    calls: list[Call]
    steps: list[tuple[float, float]]
    waits: tuple[int, float] = (0, 0.0)


class Phases:
    """Which phase of which step a time (µs) falls into."""

    def __init__(self, events: list[dict]):
        ranges = [e for e in events if e.get("cat") == "user_annotation"]
        steps = (e for e in ranges if e["name"].startswith("ProfilerStep"))
        self.steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in steps)
        self.marks = sorted((e["ts"], e["name"].removeprefix(MARK)) for e in ranges if e["name"].startswith(MARK))

    def step(self, at: float) -> tuple[float, float] | None:
        i = bisect.bisect_right(self.steps, (at, float("inf"))) - 1
        return self.steps[i] if i >= 0 and at < self.steps[i][1] else None

    def phase(self, at: float) -> str:
        i = bisect.bisect_left(self.marks, (at, ""))
        if i == len(self.marks) or (step := self.step(at)) is None or self.marks[i][0] > step[1]:
            return REST
        return PHASES.get(self.marks[i][1], REST)

    def spans(self, phase: str) -> Iterator[tuple[float, float]]:
        """(start, end) of each time that a phase was entered."""
        edges = sorted([*(start for start, _ in self.steps), *(at for at, _ in self.marks)])
        ends = {at: PHASES.get(name, REST) for at, name in self.marks}
        yield from ((a, b) for a, b in itertools.pairwise(edges) if ends.get(b) == phase)


def read(events: list[dict], cuda: bool) -> Trace:
    """The calls of a trace's events, with their times. cuda: times of kernels, not of calls."""
    phases = Phases(events)
    within = [e for e in events if e.get("cat") in CALLS and e.get("ph") == "X" and phases.step(e["ts"])]
    main = next(((e["pid"], e["tid"]) for e in within if e["name"].startswith("ProfilerStep")), None)
    by_thread: dict[Any, list[dict]] = {}
    for event in within:
        by_thread.setdefault((event["pid"], event["tid"]), []).append(event)
    threads = sorted(by_thread, key=lambda t: (t != main, str(t)))  # forward passes first: backward ones ask for them
    flows, places, calls, launches = _flows(events), {}, [], {}
    for thread in threads if cuda else threads[:1]:
        for event, call in _sweep(by_thread[thread], phases, flows, places, clock=not cuda):
            calls.append(call)
            if event["cat"] in LAUNCHES:
                launches[event.get("args", {}).get("correlation")] = call
    if not cuda:
        return Trace([c for c in calls if c.own > 0], phases.steps)
    waits = [e["dur"] for e in within if e["cat"] == "cuda_runtime" and "Synchronize" in e["name"]]
    calls = _on_gpu([e for e in events if e.get("cat") in KERNELS], launches, phases)
    return Trace(calls, phases.steps, (len(waits), sum(waits)))


def _flows(events: list[dict]) -> tuple[dict, dict]:
    """Of forward operations and of the nodes of the backward pass that belong to them: (thread, time) → number."""
    starts, ends = (
        {(e["pid"], e["tid"], e["ts"]): e["id"] for e in events if e.get("cat") == "fwdbwd" and e["ph"] == side}
        for side in "sf"
    )
    return starts, ends


def _sweep(
    events: list[dict], phases: Phases, flows: tuple[dict, dict], places: dict[int, Place], clock: bool
) -> Iterator[tuple[dict, Call]]:
    """The calls of one thread, in the order in which they begin; each lies within the one that was open then.

    places: of forward operations by the flow that starts there, filled and used here. clock: give them their times.
    """
    open_calls: list[Call] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        start = event["ts"]
        while open_calls and open_calls[-1].end <= start:
            open_calls.pop()
        above = open_calls[-1] if open_calls else None
        end = min(start + event["dur"], above.end if above else phases.step(start)[1])
        kind, phase = event["cat"], phases.phase(start)
        place, again = (above.place, above.phase == AGAIN) if above else (Place(), False)
        if phase == "backward" and (again or "torch/utils/checkpoint.py" in event["name"]):
            phase, place = AGAIN, place if again else Place()
        if kind == "python_function":
            place = place if place.compiled else _called_from(place, event["name"])
        elif event["name"].startswith("## Call CompiledFxGraph"):
            place = place._replace(compiled=True)
        else:
            key = event["pid"], event["tid"], start
            place = places.get(flows[1].get(key), place)
            if key in flows[0]:
                places[flows[0][key]] = place
        inside = above.operation if above else None
        call = Call(event["name"], kind, start, end, phase, place, inside)
        if kind == "cpu_op":
            call.operation = call
        if clock:
            call.own = end - start
            if above:
                above.own -= end - start
        open_calls.append(call)
        yield event, call


LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "triton", "numpy", "PIL", "pyarrow", "tokenizers"}
FRAME = re.compile(r"(?P<file>.+\.py)\((?P<line>\d+)\): (?P<name>.+)")


@functools.lru_cache(maxsize=100_000)
def _called_from(place: Place, name: str) -> Place:
    """The place within a Python function, or a module's call, that was called at `place`."""
    if name.startswith("nn.Module: "):
        return place._replace(modules=(*place.modules, name.removeprefix("nn.Module: ").rsplit("_", 1)[0]))
    frame = FRAME.fullmatch(name)
    if not frame or frame["file"].split("/")[0].removesuffix(".py") in LIBRARIES or "site-packages" in frame["file"]:
        return place
    return place._replace(source=f"{frame['file']}:{frame['line']} {frame['name']}")


def _on_gpu(kernels: list[dict], launches: dict[int, Call], phases: Phases) -> list[Call]:
    """The calls that launched kernels, with the kernels' times, and the time left: waiting for data, or idle."""
    calls: dict[int, Call] = {}
    for kernel in kernels:
        launch = launches.get(kernel.get("args", {}).get("correlation"))
        if launch is not None:
            # without an operator around it, a launch is told by its kernel's name
            if launch.operation is None:
                launch.operation = dataclasses.replace(launch, name=kernel["name"], kind="cpu_op")
            call = calls.setdefault(id(launch.operation), launch.operation)
            call.own += kernel["dur"]
    busy = merged((k["ts"], k["ts"] + k["dur"]) for k in kernels)
    left = sum(b - a for a, b in phases.steps) - sum(call.own for call in calls.values())
    waiting = min(max(left, 0.0), sum(b - a - overlap(busy, a, b) for a, b in phases.spans("data")))
    rest = Call(IDLE, "idle", 0, 0, IDLE, Place(), None, max(0.0, left - waiting))
    return [*calls.values(), Call("waiting for data", "idle", 0, 0, "data", Place(), None, waiting), rest]


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Their union, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def overlap(spans: list[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(b, end) - max(a, start)) for a, b in spans)


# ---------------------------------------------------------------- memory

COMPONENTS = ("weights", "optimizer", "gradients", "activations", "other")


class Level(NamedTuple):
    """Bytes by component, at a time (ms) of the step."""

    ms: float
    bytes: dict[str, int]


def memory(events: list[dict], cuda: bool, gradients: set[int], constant: dict[str, int], points: int) -> list[Level]:
    """Of the last recorded step, `points` times at which its memory is largest in between.

    gradients: addresses of those that the last backward pass left. constant: bytes that are there all the time, by
    component. Activations are what a forward pass allocates and leaves to the backward pass.
    """
    phases = Phases(events)
    begin, end = phases.steps[-1]
    ends = {kind: [at for at, mark in phases.marks if mark == kind and begin <= at < end] for kind in PHASES}
    changes: list[tuple[float, str, int]] = []
    for start, stop, address, size in _spans(events, cuda):
        if stop <= begin or start >= end:
            continue
        component, phase = "other", phases.phase(start) if start >= begin else ""
        if address in gradients and phase == "backward" and stop >= ends["backward"][-1]:
            component = "gradients"
        elif phase == "forward" and stop >= next((at for at in ends["forward"] if at >= start), end):
            component = "activations"
        changes += [(max(start, begin), component, size), (stop, component, -size)]
    now, width = dict.fromkeys(COMPONENTS, 0) | constant, (end - begin) / points
    first, highest, last = now, {}, {}
    for at, component, size in sorted(changes):
        if at >= end:
            break
        i = min(points - 1, int((at - begin) / width))
        now = now | {component: now[component] + size}
        last[i], before = now, highest.get(i, now)
        highest[i] = max(before, now, key=lambda level: sum(level.values()))
    levels = []
    for i in range(points):  # an interval without a change is as the one before it ended
        levels.append(Level(round((i + 0.5) * width / 1e3, 3), highest.get(i, first)))
        first = last.get(i, first)
    return levels


def allocations(events: list[dict], cuda: bool) -> int:
    """How many times memory of the device was allocated."""
    return sum(args["Bytes"] > 0 for _, args in _changes(events, cuda))


def _changes(events: list[dict], cuda: bool) -> list[tuple[float, dict]]:
    """(time, what the profiler says of it), in order."""
    changes = ((e["ts"], e["args"]) for e in events if e.get("name") == "[memory]")
    return sorted((c for c in changes if c[1]["Device Type"] == int(cuda)), key=lambda change: change[0])


def _spans(events: list[dict], cuda: bool) -> Iterator[tuple[float, float, int, int]]:
    """(start, end, address, bytes) of what was allocated or freed on the device while it was recorded."""
    alive: dict[int, tuple[float, int]] = {}
    for at, args in _changes(events, cuda):
        address, size = args["Addr"], args["Bytes"]
        if size > 0:
            alive[address] = at, size
        else:
            start, size = alive.pop(address, (float("-inf"), -size))
            yield start, at, address, size
    yield from ((start, float("inf"), address, size) for address, (start, size) in alive.items())
