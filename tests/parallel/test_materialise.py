"""A layout is applied before a model has memory: what the processes then hold is what one process would, and no process ever holds more than its part."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.layers.init import normal
from gradus.models.values import drawn, materialise
from gradus.parallel.apply import apply
from gradus.parallel.mesh import Mesh
from gradus.recipe.schema import GPTConfig, Layout, LlamaConfig

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402

LAYOUTS = (
    {"shard": 2}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": False}, {"pipeline": 2}, {"pipeline": 2, "schedule": "interleaved"},
    {"shard": 2, "tensor": 2}, {"shard": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, {"replicate": "ddp"}, {"shard": 2, "offload": True},
)  # fmt: skip
EXPERTS = {"n_experts": 4, "top_k": 2}


def held(world, cases: list[tuple[str, dict, dict, str]]) -> list[dict[str, torch.Tensor]]:
    """The whole parameters, gathered, of models of which each process made its part; from a folder, if there is one, else drawn."""
    found = []
    for family, changes, layout, folder in cases:
        start = models.load_deferred(folder) if folder else models.deferred(common.CONFIGS[family].model_copy(update=changes), seed=1)
        names = [name for name, _ in start.model.named_parameters()]
        mesh = Mesh.make(Layout(**layout), world)
        parallel = apply(start.model, Layout(**layout), mesh, device=torch.device("cpu"), values=start.values)
        assert not any(p.is_meta for p in parallel.part.parameters())
        found.append({name: p.clone() for name, p in parallel.full_tensors(names)})
    return found


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_process_has_the_numbers_that_one_would_have(n, tmp_path):
    """Drawn, and of one family from a folder. How a model is cut is its family's own for tensor and pipeline alone."""
    cases, expected = [], []
    wholes = {family: models.build(config, seed=1) for family, config in common.CONFIGS.items()}
    models.save(wholes["gpt"], tmp_path)
    for layout in LAYOUTS:
        if torch.tensor([layout.get(axis, 1) for axis in ("shard", "tensor", "pipeline")]).prod() not in (1, n):
            continue
        for family in common.CONFIGS if layout in ({"tensor": 2}, {"pipeline": 2}) else ("gpt",) if n == 2 else ("gpt", "t5", "vit"):
            whole = wholes[family]
            cases += [(family, {}, layout, "")]
            expected += [whole]
            if family == "gpt":
                cases += [(family, {}, layout, str(tmp_path))]
                expected += [whole]
    for layout in ({"expert": 2}, {"expert": 2, "shard": 2}):
        if layout.get("shard", 1) * 2 == n:
            cases.append(("llama", EXPERTS, layout, ""))
            expected.append(models.build(common.CONFIGS["llama"].model_copy(update=EXPERTS), seed=1))
    assert cases
    for result in run(n, held, cases):
        for case, found, whole in zip(cases, result, expected, strict=True):
            ours = dict(whole.named_parameters())
            assert found.keys() == ours.keys()
            assert all(torch.equal(found[name], p) for name, p in ours.items()), case


def test_a_parameter_depends_on_its_name_and_the_seed_alone():
    """A deeper model begins as the shallower one; another seed, another start."""
    config = GPTConfig(vocab_size=20, n_layers=2, d_model=8, n_heads=2, seq_len=6)
    shallow = dict(models.build(config.model_copy(update={"n_layers": 2}), seed=3).named_parameters())
    other = dict(models.build(config, seed=4).named_parameters())
    wide = models.build(config.model_copy(update={"n_layers": 3}), seed=3)
    same = [name for name, p in wide.named_parameters() if name in shallow and torch.equal(p, shallow[name])]
    assert [name for name in shallow if name not in same] == [
        name for name in shallow if re.search(r"blocks\.\d\.(attention\.to_out|feedforward\.down)\.weight", name)
    ]  # their deviation is of the number of layers
    assert not any(torch.equal(p, other[name]) for name, p in shallow.items() if p.std() > 0)
    a, b = (shallow[f"blocks.{i}.attention.to_q.weight"].flatten() for i in (0, 1))
    assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 0.5


def test_build_draws_from_the_global_generator_unless_told_otherwise():
    config = GPTConfig(vocab_size=20, n_layers=1, d_model=8, n_heads=2, seq_len=6)
    torch.manual_seed(5)
    first, second = models.build(config), models.build(config)
    torch.manual_seed(5)
    again = models.build(config)
    assert torch.equal(first.head.weight, again.head.weight) and not torch.equal(first.head.weight, second.head.weight)
    assert first.head.weight is first.token_embedding.weight


def test_the_draws_have_the_deviations_that_they_say():
    model = models.build(LlamaConfig(vocab_size=2000, n_layers=1, d_model=128, n_heads=4), "meta")
    tensor = drawn(model, 0)["token_embedding.weight"].read()
    assert tensor.mean().abs() < 1e-3 and tensor.std().item() == pytest.approx(0.02, rel=0.01) and tensor.dtype == torch.float32
    whole = torch.empty(100_000)
    normal(2.0)(whole, torch.Generator().manual_seed(0))
    assert whole.std().item() == pytest.approx(2.0, rel=0.02)


def test_memory_without_values_stays_tied():
    model = models.build(GPTConfig(vocab_size=20, n_layers=1, d_model=8, n_heads=2, seq_len=6), "meta")
    materialise(model, "cpu", None)
    assert model.head.weight is model.token_embedding.weight and not any(p.is_meta for p in model.parameters())


# ---------------------------------------------------------------- memory

LARGE = LlamaConfig(vocab_size=16_000, n_layers=12, d_model=1024, n_heads=8, seq_len=64, tie_output=False)  # 184 M parameters: 738 MB


def status(field: str) -> int:
    """Bytes, from the kernel's account of this process."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def start_up(world, layouts: list[dict], folder: str) -> list[tuple[int, int, int]]:
    """(bytes above those before there was a model, at the peak; bytes of this process's part; of the largest parameter)"""
    small = models.deferred(common.CONFIGS["llama"], seed=0)
    apply(small.model, Layout(**layouts[0]), Mesh.make(Layout(**layouts[0]), world), device=torch.device("cpu"), values=small.values)
    found = []
    for layout in layouts:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = models.load_deferred(folder) if folder else models.deferred(LARGE, seed=0)
        mesh = Mesh.make(Layout(**layout), world)
        parallel = apply(start.model, Layout(**layout), mesh, device=torch.device("cpu"), values=start.values)
        peak = status("VmHWM") - before
        found.append((peak, sum(h.local.nbytes for h in parallel.local_parameters), 4 * 16_000 * 1024))
        del parallel, start
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of peaks")
@pytest.mark.parametrize(("layout", "stored"), [({"shard": 2}, True), ({"tensor": 2}, False), ({"pipeline": 2}, False)], ids=str)
def test_a_process_holds_its_part_and_one_parameter(layout, stored, tmp_path):
    if stored:
        models.save(models.build(LARGE, seed=0), tmp_path)
    for peak, part, largest in [one for result in run(2, start_up, [layout], str(tmp_path) if stored else "") for one in result]:
        assert part < 0.62 * 4 * models.count(LARGE)["total"], "half of the model, roughly"
        assert peak <= part + largest + 100 * 2**20
