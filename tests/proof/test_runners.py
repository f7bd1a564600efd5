"""From a profile to figures, and whatever a runner of ones own does."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.errors import UserError
from gradus.parallel.world import World
from gradus.proof import runners, timing


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12))
def test_what_intervals_cover(starts_and_lengths):
    intervals = [(a, a + n) for a, n in starts_and_lengths]
    assert runners.covered(intervals) == len({i for a, b in intervals for i in range(a, b)})


def test_a_gpu_communicates_alone_where_no_other_kernel_runs():
    events = [("ncclDevKernel_AllReduce", 5.0, 25.0), ("gemm", 0.0, 10.0), ("gemm", 8.0, 15.0), ("ncclDevKernel_AllReduce", 40.0, 42.0)]
    assert runners.by_kernel([runners.Event(*e) for e in events], steps=2) == pytest.approx([7.5e-6, 6e-6])


def test_collectives_go_by_the_name_they_were_called_by():
    events = [
        ("c10d::_reduce_scatter_base_", 0.0, 5.0), ("c10d::allreduce_", 10.0, 11.0), ("c10d::broadcast_", 12.0, 13.0),
        ("gloo:all_reduce", 30.0, 40.0), ("gloo:all_reduce", 20.0, 27.0), ("gloo:broadcast", 41.0, 44.0), ("aten::mm", 0.0, 50.0),
    ]  # fmt: skip
    found = runners.by_collective([runners.Event(*e) for e in events], steps=2)
    assert {name: (calls, 1e6 * seconds) for name, (calls, seconds) in found.items()} == {
        "all_reduce": (0.5, pytest.approx(5.0)), "broadcast": (0.5, pytest.approx(1.5)), "reduce_scatter": (0.5, pytest.approx(3.5)),
    }  # fmt: skip


@pytest.mark.parametrize("code", ["sys.exit(0)", "raise KeyboardInterrupt", "return None"])
def test_whatever_a_runner_does_is_its_own_failure(code, tmp_path, capsys):
    (tmp_path / "own.py").write_text(f"import sys\ndef f(recipe, options):\n    {code}\n")
    with pytest.raises(UserError, match="does not run here"):
        runners.own_steps(str(tmp_path / "own.py"), "f", None, {}, timing.Window(1, 0, os.getpid()), World())
