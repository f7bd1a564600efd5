"""Profiles of a tiny GPT: their pieces by name, and their sums against the same step traced whole and closed forms."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from gradus import models
from gradus.plan import batches as making
from gradus.plan import engine, profiles, tracing
from gradus.plan.case import Case
from gradus.plan.profiles import INDEX, N, Part, Piece, Profile, block_kinds
from gradus.plan.trace import trace_recipe

sys.path[:0] = [str(Path(__file__).parent)]

from test_trace import recipe  # noqa: E402

SAMPLES, SEQ, D, VOCAB, LAYERS = 2, 16, 32, 64, 3
TINY = making.complete(recipe("gpt", samples=SAMPLES, layers=LAYERS, d=D, seq=SEQ, vocab=VOCAB))
KINDS = block_kinds(TINY.model)
(BATCH,) = making.micro_batches(TINY, 1)


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADUS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def profile() -> Profile:
    """All three blocks are traced: the first, the last, and the one between."""
    return tracing.profile(TINY, Part.of(KINDS, 0, LAYERS), BATCH, target="cpu")


def names(pieces: list[Piece]) -> list[tuple[str, str]]:
    return [(piece.unit, piece.edge) for piece in pieces]


def net(run: dict[str, list[Piece]]) -> np.ndarray:
    return sum((piece.stretch.net for pieces in run.values() for piece in pieces), np.zeros(N + 3))


def test_pieces_begin_at_the_edges_of_units(profile):
    blocks = [f"blocks.{i}" for i in range(LAYERS)]
    inner = [list(itertools.product(units, edges)) for units, edges in
             ((blocks, ("pre_forward", "post_forward")), (reversed(blocks), ("pre_backward", "post_backward")))]  # fmt: skip
    assert names(profile.first["forward"]) == [("", "forward"), ("", "pre_forward"), *inner[0], ("", "post_forward")]
    assert names(profile.first["backward"]) == [("", "backward"), ("", "pre_backward"), *inner[1]]
    assert all(names(profile.first[kind]) == names(profile.later[kind]) for kind in ("forward", "backward"))
    assert list(profile.first) == ["forward", "backward"] and profile.stacks == {"blocks": (0, LAYERS)} and not profile.sent


def test_every_parameter_is_in_one_unit(profile):
    own = {name: tuple(p.shape) for name, p in models.build(TINY.model, "meta").named_parameters()}
    found = [(name, w.shape) for weights in profile.units.values() for name, w in weights.items()]
    assert dict(found) == own and len(found) == len(own) and not profile.frozen
    assert all(name.startswith(f"{unit}.") for unit, weights in profile.units.items() if unit for name in weights)
    assert set(profile.units[""]) == {name for name in own if not name.startswith("blocks.")}


def test_an_untied_head_and_its_embedding_are_units_of_their_own():
    r = TINY.model_copy(update={"model": TINY.model.model_copy(update={"tie_output": False})})
    units = tracing.profile(r, Part.of(KINDS, 0, LAYERS), BATCH, target="cpu").units
    ends = {unit: set(weights) for unit, weights in units.items() if unit and not unit.startswith("blocks.")}
    assert ends == {"token_embedding": {"token_embedding.weight"}, "head": {"head.weight"}}


def test_the_pieces_are_the_whole_step(profile):
    """Two micro-batches, the first of which makes the gradients to which the second adds."""
    total: Counter = Counter()
    for run in (profile.first, profile.later):
        for piece in itertools.chain(*run.values()):
            total.update(piece.stretch.ops)
    total.update(profile.optimizer.ops)
    total.update({key: 2 * count for key, count in profile.prepare.items()})
    assert total == trace_recipe(TINY, micro_batches=[BATCH] * 2).ops


def test_what_is_alive_after_a_pass_are_gradients(profile):
    first, later = net(profile.first), net(profile.later)
    elements = sum(p.numel() for p in models.build(TINY.model, "meta").parameters())
    assert first[INDEX["gradients"]] == 4 * elements and later[INDEX["gradients"]] == 0
    assert profile.stepped == (sum(1 for _ in models.build(TINY.model, "meta").parameters()), 4 * elements)
    for run in (first, later):  # but for the loss, one number
        assert run[:N].sum() - run[INDEX["gradients"]] == 4


def test_products_of_a_block_by_hand(profile):
    """2 · 12 d² operations a token forward (Kaplan et al. 2020, table 1), twice as many backward; attention's own left out."""

    def products(kind: str) -> float:
        ops = [op for piece in profile.first[kind] if piece.unit == "blocks.1" for op in piece.stretch.ops.items()]
        return sum(key.flops * n for key, n in ops if key.kind == "matmul" and key.shape[0] == 1)

    linear = 2 * 12 * D * D * SAMPLES * SEQ
    assert (products("forward"), products("backward")) == (linear, 2 * linear)


def test_an_inner_stage_of_a_pipeline_sends_its_hidden_states_both_ways():
    """Its blocks alone, numbered as in the small pipeline, in which they stand between a neighbour on each side."""
    r = making.complete(recipe("gpt", samples=SAMPLES, layers=8, d=D, seq=SEQ, vocab=VOCAB))
    p = tracing.profile(r, Part.of(block_kinds(r.model), 2, 5), BATCH, target="cpu")
    assert p.sent == dict.fromkeys(("forward", "backward"), SAMPLES * SEQ * D * 4)
    assert p.stacks == {"blocks": (1, 3)} and set(p.units) == {"blocks.1", "blocks.2", "blocks.3"}


@pytest.mark.parametrize("tensor", [1, 4])
@pytest.mark.parametrize(("checkpointing", "split", "whole"), [("full", 4, 0), ("selective", 20, 4), ("none", 32, 8)])
def test_what_a_block_keeps_is_as_the_page_says(tensor, checkpointing, split, whole):
    """docs/plan-figures.md, beside Korthikanti et al.'s formula: bytes by seq · batch · d_model, `split` of them over layout.tensor, and `whole`."""
    r = recipe("gpt", samples=2, layers=3, d=512, seq=128, precision="bf16", checkpointing=checkpointing, tensor=tensor)
    r = making.complete(r.model_copy(update={"model": r.model.model_copy(update={"dropout": 0.0})}))
    (process,) = engine.processes(Case.of(r, tensor, "cuda"))
    pieces = process.stages[0].profile.later["forward"]
    kept = sum(piece.stretch.net[profiles.INDEX["activations"]] for piece in pieces if piece.unit == "blocks.1")
    assert kept / (2 * 128 * 512) == pytest.approx(split / tensor + whole, rel=0.005)
