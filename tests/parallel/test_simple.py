"""SimpleFSDP against FSDP2 and one process: curves, and what is sent. A compiler takes seconds; what is sent where nothing is compiled is seen quickly."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from gradus.parallel import simple
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.parallel.traffic import Traffic
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402
from test_layouts import curve  # noqa: E402

SIMPLE = {"shard": 2, "shard_with": "simple"}
NO_COMPILER = {"CXX": "no-compiler"}  # operator by operator, which is compiled in less time
reference = functools.cache(common.reference)


def uncompiled(world) -> tuple:
    """(curve, what a pass sends, names of parameters, modules of classes) of a GPT whose output is tied."""
    torch.nn.Module.compile, torch.compiler.reset = (lambda *_, **__: None), (lambda: None)
    found = curve(world, "gpt", SIMPLE, steps=3)
    return found, *sent(world, "gpt", SIMPLE)


def sent(world, family: str, layout: dict, **changes) -> tuple[dict, list[str], set[str]]:
    """(collective → (calls, bytes) of the second pass, whose first one compiles; names of parameters, modules of classes)."""
    made, start, batch = Layout(**layout), common.deferred(family, **changes), common.rows_of(family, common.batch(family, 0), 0, 4)
    parallel = apply(start.model, made, Mesh.make(made, world), device=torch.device("cpu"), values=start.values)
    for _ in range(2):
        with Traffic() as traffic:
            sum(common.losses(family, parallel.model, batch).values()).backward()
    counted = {kind: (c.calls, c.payload) for kind, c in traffic.by_kind.items()}
    return counted, [name for name, _ in start.model.named_parameters()], {type(m).__module__ for m in start.model.modules()}


def test_what_is_read_is_gathered_and_its_gradients_are_summed_once():
    """Of a tied weight too; uncompiled nothing is given back, so that nothing is gathered for the backward pass."""
    weights = dict(common.build("gpt").named_parameters())
    size = 4 * sum(2 * -(-len(p) // 2) * p[0].numel() for p in weights.values())  # each filled up to two parts
    for found, counted, names, modules in run(2, uncompiled):
        assert torch.allclose(torch.tensor(found), torch.tensor(reference("gpt", 3)), rtol=1e-5, atol=0)
        assert counted == {kind: (len(weights), size) for kind in ("all_gather", "reduce_scatter")}
        assert names == list(weights) and "gradus.parallel.simple" not in modules  # which hides nothing from gradus show


def one_block(world, family: str, layout: dict) -> list:
    return curve(world, family, layout, accumulation=2, steps=2, n_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "more", "tolerance"), [
    ("gpt", {}, 1e-5), ("vit", {}, 1e-5), ("seq2seq", {"checkpointing": "selective"}, 1e-5), ("vit", {"param_dtype": "bf16"}, 1e-2),
])  # fmt: skip
def test_compiled_it_follows_one_process(family, more, tolerance):
    for found in run(2, one_block, family, SIMPLE | more, environment=NO_COMPILER):
        assert torch.allclose(torch.tensor(found), torch.tensor(reference(family, 2, n_layers=1)), rtol=tolerance, atol=0)


def both(world) -> list[dict]:
    return [sent(world, "llama", layout, n_layers=n)[0] for n in (1, 2) for layout in ({"shard": 2}, SIMPLE)]


@pytest.mark.slow
def test_a_compiled_block_sends_what_fsdp2_sends():
    """Llama's block has nine weights, all of which the backward pass reads; and FSDP2 gathers the embedding again, which no backward pass reads."""
    for fsdp_1, simple_1, fsdp_2, simple_2 in run(2, both, environment=NO_COMPILER):
        assert simple_1["reduce_scatter"][1] == fsdp_1["reduce_scatter"][1]
        embedding = 4 * common.VOCAB * common.CONFIGS["llama"].d_model
        assert simple_1["all_gather"][1] == fsdp_1["all_gather"][1] - embedding
        blocks = {kind: (simple_2[kind][0] - simple_1[kind][0], simple_2[kind][1] - simple_1[kind][1]) for kind in simple_1}
        assert blocks == {"all_gather": (2 * 9, fsdp_2["all_gather"][1] - fsdp_1["all_gather"][1]),
                          "reduce_scatter": (9, fsdp_2["reduce_scatter"][1] - fsdp_1["reduce_scatter"][1])}  # fmt: skip


def uneven(world) -> list[tuple]:
    """(shape, the gradient's shape) of this rank's part of a weight of three rows over two processes; compiled, then from the cache."""
    found, mesh = [], init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for _ in range(2):
        model = torch.nn.Linear(3, 3, bias=False)
        simple.shard(model, mesh, Layout(**SIMPLE), "inductor")
        model(torch.ones(2, 3)).sum().backward()
        torch.distributed.barrier()
        found += [(tuple(p.to_local().shape), tuple(p.grad.to_local().shape)) for p in model.parameters()]
    return found


@pytest.mark.slow
def test_a_rank_does_not_take_the_graph_of_another_from_the_compilers_cache(tmp_path):
    """Its key has the whole shape of a DTensor, not the part's, so that of two ranks with other parts one had the other's graph."""
    first, second = run(2, uneven, environment={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})
    assert first == [((2, 3), (2, 3))] * 2 and second == [((1, 3), (1, 3))] * 2
