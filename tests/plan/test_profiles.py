"""Models whose blocks are not alike: local and global attention, experts in every second block, frozen blocks. Each kind is traced once; the
step put together of them against the same step traced whole.

The pytest process never registers the family: processes of its own do.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gradus import models
from gradus.models import gpt
from gradus.plan.profiles import Part, block_kinds, representatives
from gradus.recipe.schema import GemmaConfig, GPTConfig, LlamaConfig

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from distributed import run  # noqa: E402
from test_new_modules import recipe, table  # noqa: E402


class MixedConfig(GPTConfig):
    family: Literal["mixed"] = "mixed"
    window: int | None = None  # tokens that every second block sees
    dense_every: int = 1  # so many blocks have experts for one that has none
    frozen: tuple[int, ...] = ()  # blocks that are not trained
    frozen_embeddings: bool = False


class MixedBlock(gpt.GPTBlock):
    def __init__(self, config: MixedConfig, number: int):
        dense = config.n_experts and number % (config.dense_every + 1) == 0
        super().__init__(config.model_copy(update={"n_experts": None}) if dense else config)
        self.window = config.window if number % 2 else None

    def forward(self, x: Tensor, mask=None, causal: bool = True, cache=None, positions=None) -> Tensor:
        if self.window is not None:
            at = torch.arange(x.shape[1], device=x.device)
            back = at[:, None] - at
            mask, causal = (back >= 0) & (back < self.window), False
        return super().forward(x, mask, causal, cache, positions)


class Mixed(gpt.GPT):
    def __init__(self, config: MixedConfig):
        super().__init__(config)
        self.blocks = nn.ModuleList(MixedBlock(config, i) for i in range(config.n_layers))
        for i in config.frozen:
            self.blocks[i].requires_grad_(False)
        for embedding in (self.token_embedding, self.position_embedding):
            embedding.requires_grad_(not config.frozen_embeddings)

    def initialisation(self):
        for p in self.parameters():
            yield p, gpt.normal(0.02)


FAMILY = dataclasses.replace(
    gpt.FAMILY, config=MixedConfig, model=Mixed, weights=table(MixedConfig),
    stacks=(dataclasses.replace(gpt.FAMILY.stacks[0], kind=lambda config, i: config.window and i % 2),),
)  # fmt: skip
SMALL = {"vocab_size": 256, "seq_len": 16, "d_model": 32, "n_heads": 4, "n_layers": 8, "dropout": 0.0}
ALTERNATING = {"window": 4}
EXPERTS = {"n_experts": 4}
FROZEN = {"frozen": (0, 1, 2, 3)}
PROBE = {"frozen": (0, 1, 2, 3, 4), "frozen_embeddings": True, "tie_output": False}  # no gradient goes back to its first blocks
BETWEEN = {"frozen": (2, 3, 5)}
NORMS = {"n_kv_heads": 2, "d_ff": 56, "qk_norm": True, "d_head": 12}
SHARED = NORMS | {"n_experts": 4, "d_expert": 24, "d_shared": 40, "experts_every": 2, "dense_layers": [1]}
GEMMA = {"family": "gemma", "n_layers": 8, "d_ff": 48, "d_head": 12, "n_kv_heads": 2, "window": 6, "full_every": 3}
WINDOWS = NORMS | {"window": 6, "full_every": 3, "no_rotation_every": 2}
LONG = {"n_layers": 6, "d_model": 32, "vocab_size": 64, "seq_len": 272, "window": 60, "full_every": 2}  # a CPU computes what lies in the window alone
SIX = {"n_layers": 6}  # of two kinds the first, the last and one of each between
SEVERAL = {"samples": 8, "micro_batch": 2}
CASES = {
    "alternating, checkpointing, micro-batches": (1, ALTERNATING | SIX, {"checkpointing": "selective", **SEVERAL}),
    "alternating, 7 blocks, bf16": (1, ALTERNATING | {"n_layers": 7}, {"precision": "bf16"}),
    "alternating, shard, micro-batches": (2, ALTERNATING | SIX, {"shard": 2, **SEVERAL}),
    "alternating, tensor": (2, ALTERNATING | SIX, {"tensor": 2, **SEVERAL, "samples": 6}),
    "alternating, pipeline of stages of three": (2, ALTERNATING | {"n_layers": 12}, {"pipeline": 2, "schedule": "interleaved", **SEVERAL}),
    "experts in two of three": (1, EXPERTS | {"dense_every": 2, "n_layers": 7}, {"checkpointing": "full", **SEVERAL}),
    "experts, shard, half": (2, EXPERTS | SIX, {"shard": 2, "param_dtype": "bf16", **SEVERAL}),
    "experts, split": (2, EXPERTS | SIX, {"expert": 2, **SEVERAL}),
    "frozen, micro-batches, checkpointing": (1, FROZEN | SIX, {"checkpointing": "full", **SEVERAL}),
    "frozen, replicas": (2, FROZEN | SIX, {"samples": 8}),
    "frozen, pipeline": (2, FROZEN, {"pipeline": 2, **SEVERAL}),
    "frozen to the fifth block": (1, PROBE, SEVERAL),
    "frozen to the fifth block, shard": (2, PROBE, {"shard": 2, **SEVERAL}),
    "frozen between": (1, BETWEEN | {"n_layers": 7}, {"checkpointing": "selective", **SEVERAL}),
    "norms of heads, tensor": (2, NORMS | SIX, {"tensor": 2, **SEVERAL}),
    "norms of heads, tensor, shard": (4, NORMS | SIX, {"tensor": 2, "shard": 2, "sequence_parallel": False, **SEVERAL}),
    "norms of heads, pipeline": (2, NORMS, {"pipeline": 2, **SEVERAL}),
    "a shared expert in every second layer": (1, SHARED | SIX, {"checkpointing": "full", **SEVERAL}),
    "a shared expert, split": (2, SHARED | SIX, {"expert": 2, **SEVERAL}),
    "windows in two of three layers": (1, WINDOWS, {"checkpointing": "full", **SEVERAL}),
    "windows in two of three layers, pipeline": (2, WINDOWS, {"pipeline": 2, **SEVERAL}),
    "gemma": (1, GEMMA, SEVERAL),
    "gemma, tensor, checkpointing": (2, GEMMA, {"tensor": 2, "checkpointing": "selective", **SEVERAL, "samples": 6}),
    "all at once": (1, ALTERNATING | EXPERTS | BETWEEN | {"n_layers": 12}, SEVERAL),
}  # fmt: skip
QUICK = {"frozen to the fifth block", "all at once"}


def against_the_whole(world, names: list[str]) -> dict[str, list[tuple[str, float, float]]]:
    """Case → what is not alike, as tests/plan/test_engine.py compares it."""
    models.register(FAMILY)
    import test_engine as whole

    out = {}
    for name in names:
        n, sizes, layout = CASES[name]
        config = LlamaConfig if "qk_norm" in sizes else GemmaConfig if "family" in sizes else MixedConfig
        case = whole.Case(recipe(config(**SMALL | sizes), **layout), n, "cpu", name)
        bounds = {"memory": 0.001, "bytes": 0.01, "optimizer": 0.03, **({"memory": 0.006, "bytes": 0.06} if layout.get("param_dtype") else {})}
        if layout.get("schedule") == "interleaved" or "family" in sizes:  # of two rotary tables the composed peak may have one
            bounds["memory"] = max(bounds["memory"], 0.002)
        rows = whole.compared(case)
        out[name] = [(what, a, b) for _, what, a, b in rows if whole.off(a, b) > bounds.get(what.split()[0], 1e-9)]
    return out


@pytest.mark.parametrize(
    "config", [LlamaConfig(**SMALL | NORMS | LONG, no_rotation_every=3), GemmaConfig(**SMALL | GEMMA | LONG)], ids=lambda config: config.family
)
def test_windows_in_every_other_layer_are_as_if_traced_whole(config):
    """Longer than the window, so that a layer with it and one without take other kernels; and of the first some are rotated."""
    import test_engine as whole

    assert len(set(block_kinds(config)[0])) == (4 if config.family == "llama" else 2)
    for _, what, composed, traced in whole.compared(whole.Case(recipe(config, samples=2), 1, "cpu", config.family)):
        assert whole.off(composed, traced) <= {"memory": 0.002, "optimizer": 0.03}.get(what.split()[0], 1e-9), (what, composed, traced)


def kinds_of(world, *sizes: dict) -> list[tuple]:
    models.register(FAMILY)
    return [block_kinds(MixedConfig(**SMALL | each)) for each in sizes]


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict:
    cache = {"GRADUS_CACHE": str(tmp_path_factory.mktemp("cache"))}
    return run(1, against_the_whole, [name for name in CASES if name in QUICK], environment=cache)[0]


@pytest.mark.parametrize("name", [name for name in CASES if name in QUICK])
def test_a_model_of_several_kinds_of_blocks_is_as_if_traced_whole(differences, name):
    assert differences[name] == []


@pytest.mark.slow
def test_more_of_them(tmp_path):
    names = [name for name in CASES if name not in QUICK]
    differences = run(1, against_the_whole, names, environment={"GRADUS_CACHE": str(tmp_path)})[0]
    assert {name: found for name, found in differences.items() if found} == {}


def test_the_kinds_of_blocks():
    (alternating,), (probe,) = run(1, kinds_of, ALTERNATING, PROBE)[0]
    assert alternating == alternating[:2] * 4 and len(set(alternating)) == 2
    assert len(set(probe[:5])) == 1 and probe[5] != probe[6] and len(set(probe[6:])) == 1  # the sixth gives no gradient of its input
    assert {len(set(kinds)) for kinds in block_kinds(GPTConfig(**SMALL))} == {1}


@given(st.lists(st.sampled_from("abc"), max_size=12), st.data())
def test_every_kind_has_a_representative(kinds, data):
    chosen = representatives(kinds)
    assert {kinds[i] for i in chosen} == set(kinds) and {*kinds[1:-1]} == {kinds[i] for i in chosen if 0 < i < len(kinds) - 1}
    assert [kinds[i] for i in representatives(kinds, ends=False)] == list(dict.fromkeys(kinds))
    assert not kinds or {0, len(kinds) - 1} <= set(chosen)
    begin = data.draw(st.integers(0, len(kinds)))
    part = Part.of((tuple(kinds),), begin, data.draw(st.integers(begin, len(kinds))))
    assert sum(part.sizes) == len(kinds) and set(part.small.kinds[0]) <= set(kinds)
    assert len(part.small.kinds[0]) == part.small.sizes[0] == len(part.chosen[0])
