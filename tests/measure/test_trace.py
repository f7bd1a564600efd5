"""What recorded steps consist of, from real ones and from a trace written by hand."""

from __future__ import annotations

import collections

from profile_parts import calls, shares

from gradus.measure import trace
from gradus.measure.trace import read


def test_all_of_attention_is_attention_also_backwards(tmp_path):
    names = collections.defaultdict(set)
    for kernel in ("naive", "sdpa"):
        for call in calls(tmp_path, **{"layout.attention": kernel}):
            names[kernel, call.category].add(call.name)
    assert names["naive", "attention"] >= {"aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"}
    assert "aten::bmm" not in names["naive", "matrix products"] | names["sdpa", "attention"]
    assert {name for name in names["sdpa", "attention"] if name.endswith("for_cpu_backward")}


def test_recomputation_is_told_from_the_backward_pass(tmp_path):
    again = shares(tmp_path, "phase", **{"layout.checkpointing": "full"})
    assert again["recomputation"] > 0.03 and abs(sum(again.values()) - 1) < 1e-6


def event(name, cat, ts, dur, tid=1, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def test_compiled_kernels_are_told_from_python():
    graph = "## Call CompiledFxGraph abc ##"
    events = [event("ProfilerStep#2", "user_annotation", 0, 100), event("gradus/ready", "user_annotation", 1, 1), event("gradus/forward", "user_annotation", 90, 1),
              event("nn.Module: Block_0", "python_function", 10, 60), event(graph, "user_annotation", 20, 40), event("/tmp/torchinductor_me/ab/cd.py(9): call", "python_function", 21, 38),
              event("<built-in function kernel>", "python_function", 25, 20), event("aten::mm", "cpu_op", 46, 10)]  # fmt: skip
    found = collections.Counter()
    for call in read(events, cuda=False).calls:
        found[call.category, call.place.modules, call.place.source] += call.own
    assert found["compiled kernels", ("Block",), ""] == 30 and found["matrix products", ("Block",), ""] == 10
    assert sum(found.values()) == 100


def gpu_events():
    """A step of 100 µs on a GPU as the profiler writes it: 20 of data, a product forwards, its backward pass by another thread."""
    return [
        event("ProfilerStep#2", "user_annotation", 0, 100),
        event("gradus/data", "user_annotation", 20, 1),
        event("gradus/ready", "user_annotation", 22, 1),
        event("nn.Module: Linear_0", "python_function", 24, 10),
        event("aten::addmm", "cpu_op", 25, 8),
        event("cudaLaunchKernel", "cuda_runtime", 26, 2, correlation=7),
        event("gradus/forward", "user_annotation", 36, 1),
        event("autograd::engine::evaluate_function: AddmmBackward0", "cpu_op", 40, 8, tid=2),
        event("aten::mm", "cpu_op", 41, 6, tid=2),
        event("cudaLaunchKernel", "cuda_runtime", 42, 2, tid=2, correlation=8),
        event("gradus/backward", "user_annotation", 50, 1),
        event("cudaDeviceSynchronize", "cuda_runtime", 60, 5, correlation=9),
        {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "ts": 25, "pid": 1, "tid": 1},
        {"ph": "f", "cat": "fwdbwd", "name": "fwdbwd", "id": 3, "ts": 40, "pid": 1, "tid": 2},
        event("before", "kernel", 0, 5, tid=70, correlation=1),  # launched before it was recorded
        event("gemm", "kernel", 30, 40, tid=70, correlation=7),
        event("gemm", "kernel", 70, 20, tid=70, correlation=8),
    ]


def test_times_on_a_gpu_are_those_of_kernels():
    found = read(gpu_events(), cuda=True)
    times = {(call.name, call.phase, call.category, call.place.modules): call.own for call in found.calls}
    assert times == {
        ("aten::addmm", "forward", "matrix products", ("Linear",)): 40,
        ("aten::mm", "backward", "matrix products", ("Linear",)): 20,
        ("waiting for data", "data", "data loading", ()): 15,  # 20 less the 5 in which the GPU still computed
        ("device idle", "device idle", "device idle", ()): 25,
    }
    assert sum(times.values()) == 100 and found.waits == (1, 5)


def test_what_was_there_before_and_is_freed_meanwhile_had_its_size():
    def change(at: int, address: int, size: int, device: int = 0) -> dict:
        return {"name": "[memory]", "ts": at, "args": {"Addr": address, "Bytes": size, "Device Type": device}}

    events = [change(1, 7, 32), change(2, 5, -64), change(3, 9, 16), change(4, 7, -32), change(5, 1, -8, device=1)]
    inf = float("inf")
    assert sorted(trace._spans(events, cuda=False)) == [(-inf, 2, 5, 64), (1, 4, 7, 32), (3, inf, 9, 16)]
