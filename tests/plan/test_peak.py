"""Events of a step: what FSDP2 adds at the edges, the order of the schedules, and the cumulative sum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.plan.peak import Fsdp, Span, _pass, actions, joined, level
from gradus.plan.profiles import INDEX, N, Weight
from gradus.plan.stage import Run, _alike
from gradus.recipe.schema import Layout

BLOCKS = [f"blocks.{i}" for i in range(4)]


def weight(*shape: int) -> Weight:
    return Weight(shape, expert=False, cut=False, partial=False, across=False, width=4, computed=4)


def edges(kind: str) -> list[tuple[str, str]]:
    if kind == "forward":
        inner = [(name, edge) for name in BLOCKS for edge in ("pre_forward", "post_forward")]
        return [("", "forward"), ("", "pre_forward"), *inner, ("", "post_forward")]
    inner = [(name, edge) for name in reversed(BLOCKS) for edge in ("pre_backward", "post_backward")]
    return [("", "backward"), ("", "pre_backward"), *inner]


def step(fsdp: Fsdp, micro: int) -> dict[str, list[float]]:
    """Component → its level after each event of a step."""
    now: dict[str, list[float]] = {"transient": [0.0], "gathered": [0.0], "gradients": [0.0]}
    for i in range(micro):
        for kind in ("forward", "backward"):
            for _, name, nbytes in fsdp.run(edges(kind), kind, i == micro - 1):
                now[name].append(now[name][-1] + nbytes)
    return now


@given(
    shard=st.sampled_from([2, 3, 8]), micro=st.integers(1, 3), reshard=st.booleans(), param_dtype=st.sampled_from([None, "bf16"]),
    reduce_dtype=st.sampled_from([None, "bf16", "fp32"]), rows=st.integers(1, 20),
)  # fmt: skip
def test_what_fsdp_takes_it_gives_back(shard, micro, reshard, param_dtype, reduce_dtype, rows):
    layout = Layout(shard=shard, reshard=reshard, param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    trained = {name: {"w": weight(rows, 5)} for name in BLOCKS} | {"": {"head": weight(rows, 3)}}
    now = step(Fsdp(layout, trained, {}, False), micro)
    assert now["transient"][-1] == pytest.approx(0) and now["gathered"][-1] == pytest.approx(0)
    assert min(now["transient"]) > -1e-6 and min(now["gathered"]) > -1e-6
    whole = 4 * sum(w.size for unit in trained.values() for w in unit.values())
    computed = 2 if param_dtype else 4
    padded = sum(-(-w.shape[0] // shard) * w.shape[1] for unit in trained.values() for w in unit.values())
    # the pieces themselves make gradients of the whole, in the type that is computed in; its part in fp32 is left
    made = whole / 4 * computed
    reduced = {None: computed if not param_dtype else 4, "bf16": 2, "fp32": 4}[reduce_dtype]
    times = micro if reduced != computed else 1
    assert now["gradients"][-1] + times * made == pytest.approx(4 * padded)


def test_one_unit_is_open_at_a_time_and_the_next_one_arrives():
    trained = {name: {"w": weight(8, 8)} for name in BLOCKS}
    fsdp = Fsdp(Layout(shard=2), trained, {}, False)
    now = step(fsdp, 1)
    assert max(now["gathered"]) == 256 and max(now["transient"]) == 512  # two buffers while one is copied out
    kept = step(Fsdp(Layout(shard=2, reshard=False), trained, {}, False), 1)
    assert max(kept["gathered"]) == 4 * 256


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize(("pipeline", "micro"), [(2, 4), (4, 8), (3, 9)])
def test_every_micro_batch_passes_every_stage_once_and_forward_first(schedule, pipeline, micro):
    layout = Layout(pipeline=pipeline, schedule=schedule)
    for rank in range(pipeline):
        order = list(actions(layout, micro, rank))
        own = 1 if schedule in ("gpipe", "1f1b") else layout.stages_per_process
        for kind in ("forward", "backward"):
            passes = [(s, i) for k, s, i in order if k == kind]
            assert sorted(passes) == list(itertools.product(range(own), range(micro)))
        at = {action: i for i, action in enumerate(order)}
        assert all(at["forward", s, i] < at["backward", s, i] for s, i in itertools.product(range(own), range(micro)))


def test_one_process_has_one_micro_batch_at_a_time():
    assert list(actions(Layout(), 2, 0)) == [("forward", 0, 0), ("backward", 0, 0), ("forward", 0, 1), ("backward", 0, 1)]


def test_the_peak_is_where_most_is_alive():
    start, rows = level(weights=1000.0), (np.zeros((3, N + 3)), np.zeros((3, N + 3)))
    rows[0][:, INDEX["activations"]] = 10, 500, 20  # while each takes place
    rows[1][:, INDEX["gradients"]] = 100, 100, -150  # what each leaves
    spans = [
        Span.of(start[None], start[None], [""]), Span.of(*rows, ["forward", "backward", "backward"]),
        Span.change(level(gradients=5000.0)),  # between two events nothing is looked at
        Span.of(level(transient=7.0)[None], np.zeros((1, N + 3)), ["optimizer"]),
    ]  # fmt: skip
    peak = joined(spans)
    assert peak.bytes == 1000 + 50 + 5000 + 7 and peak.at == "optimizer" and peak.gradients == 5050


@given(
    n=st.integers(0, 12), shard=st.sampled_from([1, 4]), micro=st.integers(1, 3), reshard=st.booleans(),
    param_dtype=st.sampled_from([None, "bf16"]),
    nets=st.lists(st.integers(-50, 50), min_size=4, max_size=4), peaks=st.lists(st.integers(0, 90), min_size=4, max_size=4),
)  # fmt: skip
def test_many_alike_blocks_are_as_one_after_the_other(n, shard, micro, reshard, param_dtype, nets, peaks):
    """A pass that goes through n alike blocks one by one, and one in which those between stand for all."""

    def spans(blocks: list[tuple[int, int, int]]) -> list[Span]:
        trained = {f"blocks.{i}": {"w": weight(8, 9)} for i in range(3)}
        fsdp = Fsdp(Layout(shard=shard, reshard=reshard, param_dtype=param_dtype), trained, {}, False)
        names = [("blocks.0", 1), *((f"blocks.{traced}@{i}", times) for i, traced, times in blocks), ("blocks.2", 1)]
        out = []
        for i, kind in itertools.product(range(micro), ("forward", "backward")):
            order = names if kind == "forward" else names[::-1]
            rows = [np.zeros((2 * len(order), N + 3)) for _ in range(2)]
            at = INDEX["activations" if kind == "forward" else "gradients"]
            first = 0 if kind == "forward" else 2
            for row in range(2 * len(order)):
                rows[0][row, at], rows[1][row, at] = peaks[first + row % 2], nets[first + row % 2]
            edges = [(name, f"{edge}_{kind}") for name, _ in order for edge in ("pre", "post")]
            run = Run(edges, [times for _, times in order for _ in range(2)], *rows)
            out.append(_pass(run, kind, i == micro - 1, False, fsdp if shard > 1 else None))
        return out

    one_by_one = joined(spans([(i, 1, 1) for i in range(n)]))
    together = joined(spans(list(_alike([1] * n))))
    assert together.bytes == one_by_one.bytes and together.gradients == pytest.approx(one_by_one.gradients)
    assert together.pools == pytest.approx(one_by_one.pools)
