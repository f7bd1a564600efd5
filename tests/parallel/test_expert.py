"""Experts split over processes against one process: losses, gradient norms and weights; what is refused, and why."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[1])])  # also in the processes that a test starts
import common
import distributed

from gradus import models
from gradus.layers import MixtureOfExperts, keep_balance
from gradus.models.decoding import complete
from gradus.parallel.apply import apply, use_checkpointing
from gradus.parallel.check import fits
from gradus.parallel.expert import expert_parallel, is_expert
from gradus.parallel.mesh import DATA, Mesh
from gradus.recipe.schema import BertConfig, GPTConfig, Layout, LlamaConfig
from gradus.train import sharded
from gradus.train.optim import state_tensors

STEPS, FIRST, CLIP = 4, 3, 1.0  # FIRST: of the engine's test
CHANGES = {"n_layers": 2, "n_experts": 4, "top_k": 2}
FEW = {"n_layers": 2, "n_experts": 2, "top_k": 1}


def shares(family: str, model: nn.Module, b: dict, tokens: int, sequences: int) -> torch.Tensor:
    """The loss of a part of the batch, with a balance loss large enough to be seen."""
    with keep_balance(model) as balance:
        sums = common.losses(family, model, b)
    return sums["tokens"] / tokens + 0.5 * torch.stack(balance).mean(0).sum() / sequences


def curve(
    family: str, mesh: DeviceMesh | None = None, checkpointing: str = "none", micro_batches: int = 1, idle: int | None = None, few: bool = False,
    n_steps: int = STEPS,
) -> tuple:  # fmt: skip
    """(loss, gradient norm) of every step, and the whole weights at the end. mesh: replicate × expert. idle: a rank without samples,
    which computes a batch of no weight."""
    model = common.build(family, **(FEW if few else CHANGES))
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    rank, n = (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())
    if mesh is not None:
        expert_parallel(model, mesh["expert"])
        parts = mesh["expert"].size()
        assert all(p.to_local().shape[0] == CHANGES["n_experts"] // parts for p in model.parameters() if is_expert(p))
    use_checkpointing(model, checkpointing)
    named = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in named.items()} == names  # the names and whole shapes that they had

    def sum_over(tensor: torch.Tensor, *axes: str) -> None:
        for axis in axes if mesh is not None else ():
            dist.all_reduce(tensor, group=mesh.get_group(axis))

    local = {name: nn.Parameter(p.to_local().detach()) if isinstance(p, DTensor) else p for name, p in named.items()}
    optimizer = torch.optim.AdamW(local.values(), lr=1e-3)
    working = [r for r in range(n) if r != idle]
    found = []
    for step in range(n_steps):
        b = common.batch(family, step, rows=12)
        each = 12 // len(working) // micro_batches
        loss = torch.zeros(())
        for i in range(micro_batches):
            lo = (working.index(rank) * micro_batches + i) * each if rank in working else 0
            share = shares(family, model, common.rows_of(family, b, lo, lo + each), b["counts"]["tokens"], 12)
            share = share if rank in working else 0.0 * share
            share.backward()
            loss += share.detach()
        sum_over(loss, "replicate", "expert")
        squares = torch.zeros(2)  # of whole parameters, of split ones
        for name, p in named.items():
            assert isinstance(p.grad, DTensor) == is_expert(p) == (mesh is not None and ".experts." in name), name
            local[name].grad = p.grad.to_local() if is_expert(p) else p.grad
            sum_over(local[name].grad, *(("replicate",) if is_expert(p) else ("replicate", "expert")))
            squares[int(is_expert(p))] += local[name].grad.norm() ** 2
        sum_over(squares[1:], "expert")
        norm = squares.sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(local.values(), CLIP, norm)
        optimizer.step()
        for name, p in named.items():
            p.grad = local[name].grad = None
        found.append((float(loss), float(norm)))
    return found, {name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach() for name, p in named.items()}


def engine(world, family: str, layout: dict, micro_batches: int = 1, few: bool = False, folder: str = "") -> tuple:
    """As `curve`, through the engine that the trainer uses, which also shards by FSDP2. folder: for a checkpoint and an export of the end."""
    layout = Layout(**layout)
    mesh = Mesh.make(layout, world)
    model = common.build(family, **(FEW if few else CHANGES))
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    parallel = apply(model, layout, mesh)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == names
    local = [p for _, p in parallel.trained()]
    parts, whole = sum(p.numel() for p in local), sum(map(math.prod, names.values()))
    assert parts == pytest.approx(whole / mesh.size("shard", "expert"), rel=0.01)  # every process holds as much
    optimizer = torch.optim.AdamW(local, lr=1e-3)
    n, place, found = mesh.size(*DATA) * micro_batches, mesh.rank(*DATA) * micro_batches, []
    for step in range(FIRST):
        b = common.batch(family, step, rows=12)
        mine = [common.rows_of(family, b, 12 * i // n, 12 * (i + 1) // n) for i in range(place, place + micro_batches)]
        tokens = b["counts"]["tokens"]
        loss = parallel.forward_backward(mine, lambda model, part, t=tokens: shares(family, model, part, t, 12), lambda share: share)
        norm = parallel.norm()
        torch.nn.utils.clip_grads_with_norm_(local, CLIP, norm)
        optimizer.step()
        parallel.zero_grad()
        found.append((float(loss), float(norm)))
    if world.size == 4 and family == "llama":
        held = {h.name: h.parameter for h in parallel.local_parameters}
        tensors = {f"model.{name}": p for name, p in held.items()}
        for key, value in state_tensors(parallel.trained(), optimizer).items():
            tensors[key] = sharded.like(held[key.partition(".")[2]], value)
        sharded.save(Path(folder, "step-00000008"), model.config, tensors, lambda aside: None).finish()
        sharded.export(held, model.config, Path(folder, "export"))
        moments = {name: tensors[f"exp_avg.{name}"].full_tensor() for name in held}
        if world.first:
            torch.save(moments, Path(folder, "moments.pt"))
        dist.barrier()
    return found, {}


def several(world, checks: list, folder: str) -> list:
    shapes = {c[1] for c in checks if not isinstance(c[1], dict)}
    meshes = {n: init_device_mesh("cpu", (world.size // n, n), mesh_dim_names=("replicate", "expert")) for n in sorted(shapes)}
    found = []
    for family, n, more in checks:
        split = isinstance(n, dict)
        found.append(engine(world, family, n, **more, folder=folder) if split else curve(family, meshes[n], **more))
    if world.size == 2 and folder:  # what four saved
        for layout in (Layout(shard=2), Layout(expert=2)):
            resume(world, layout, Path(folder))
    return found


def resume(world, layout: Layout, folder: Path) -> None:
    """What four processes saved, read by two in another layout: equal to what they exported, the optimizer's state of the right part."""
    parallel = apply(common.build("llama", **CHANGES), layout, Mesh.make(layout, world))
    held = {h.name: h.parameter for h in parallel.local_parameters}
    sharded.load(folder / "step-00000008", {f"model.{name}": p for name, p in held.items()})
    state = sharded.load_state(folder / "step-00000008", held)
    exported = models.load(folder / "export").state_dict()
    moments = torch.load(folder / "moments.pt")
    for name, whole in parallel.full_tensors(list(held)):
        assert torch.equal(whole, exported[name]), name
        moment = sharded.like(held[name], state[f"exp_avg.{name}"])
        assert torch.equal(moment.full_tensor() if isinstance(moment, DTensor) else moment, moments[name]), name


CHECKS = {  # processes -> (family, processes along expert or the layout that the engine makes, how). The last of four saves.
    4: [
        ("gpt", 2, {}), ("llama", 4, {}),  # the first: two replicas of split experts
        ("gpt", {"expert": 2, "shard": 2, "checkpointing": "full"}, {"micro_batches": 3}),
        ("gpt", {"expert": 2, "shard": 2}, {"few": True}),  # each expert is cut
        ("llama", {"expert": 2, "shard": 2, "reshard": False}, {}),
    ],
    2: [
        ("gpt", 2, {}), ("llama", 2, {"checkpointing": "full", "micro_batches": 3}), ("gpt", 2, {"idle": 0}),
        ("llama", {"shard": 2}, {"micro_batches": 2}),
    ],
}  # fmt: skip


def same(checks: list, found: list[list], alone: dict) -> None:
    """What each process found is what one process finds."""
    for answers in found:
        for (family, _, how), (steps, weights) in zip(checks, answers, strict=True):
            expected, expected_weights = alone[family, how.get("few", False)]
            assert steps == [pytest.approx(step, rel=1e-5) for step in expected[: len(steps)]]
            for name, weight in weights.items():
                torch.testing.assert_close(weight, expected_weights[name], atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def test_experts_on_two_processes():
    checks = [("gpt", 2, {"n_steps": 5})]
    same(checks, distributed.run(2, several, checks, ""), {("gpt", False): curve("gpt", n_steps=5)})


@pytest.mark.slow
def test_experts_over_processes_as_on_one(tmp_path):
    alone = {(family, few): curve(family, few=few) for family, few in (("gpt", False), ("llama", False), ("gpt", True))}
    for n, checks in CHECKS.items():
        same(checks, distributed.run(n, several, checks, str(tmp_path)), alone)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_reference_has_no_tie_and_moves_every_expert(family):
    """Where two experts are equally likely but for rounding, a token may take the other one in another layout, or in micro-batches of
    another size, and the curves part. So these batches have no such token."""
    margins = []

    def look(mixture: MixtureOfExperts, inputs: tuple) -> None:
        with torch.no_grad():
            likeliest = (inputs[0] @ mixture.router.weight.T).softmax(-1).topk(mixture.top_k + 1).values
        margins.append(float((1 - likeliest[..., -1] / likeliest[..., -2]).min()))

    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, inputs: look(m, inputs) if isinstance(m, MixtureOfExperts) else None)
    try:
        _, weights = curve(family)
    finally:
        handle.remove()
    assert len(margins) == 2 * STEPS and min(margins) > 2e-6
    before = dict(common.build(family, **CHANGES).named_parameters())
    assert all((weights[name] != p).flatten(1).any(1).all() for name, p in before.items() if ".experts." in name)


def other_ways(world) -> dict:
    """One forward and backward pass: half precision on the way, decoding, no row for a process."""
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("expert",))
    b = common.batch("gpt", world.rank)
    found = {}
    model, split = common.build("gpt", **CHANGES), common.build("gpt", **CHANGES)
    expert_parallel(split, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        a, c = model(b["ids"]), split(b["ids"])
    found["autocast"] = (c.dtype == torch.bfloat16, float((a - c).abs().max()))
    c.float().sum().backward()
    found["decoding"] = complete(split.eval(), [[1, 2, 3], [4]], max_new=5) == complete(model.eval(), [[1, 2, 3], [4]], max_new=5)
    mixture, whole = split.blocks[0].feedforward, model.blocks[0].feedforward
    for router in (mixture.router.weight, whole.router.weight):
        router.data.zero_()[:2] = 1.0  # every token, on every process, takes experts 0 and 1
    x = torch.rand(2, 3, 32)
    found["all to one"] = torch.allclose(mixture(x), whole(x), atol=1e-6)
    mixture(x).sum().backward()
    found["gradients"] = all(p.grad is not None for p in mixture.parameters())
    return found


@pytest.mark.slow
def test_half_precision_decoding_and_a_process_without_rows():
    for found in distributed.run(2, other_ways):
        same, distance = found.pop("autocast")
        assert same and distance < 2e-2
        assert all(found.values()), found


def test_the_step_can_be_planned_without_values():
    """Under fake tensors in a fake group of 64 processes: 64 experts, one each."""
    from gradus.torch_private import FakeTensorMode, join_fake

    join_fake(3, 64)
    try:
        mesh = init_device_mesh("cpu", (64,), mesh_dim_names=("expert",))
        with FakeTensorMode():
            model = common.build("llama", **{**CHANGES, "n_experts": 64})
            expert_parallel(model, mesh)
            common.losses("llama", model, {k: torch.zeros(8, 16, dtype=torch.long) for k in ("ids", "labels")})["tokens"].backward()
            assert [p.grad.to_local().shape[0] for p in model.parameters() if is_expert(p)] == [1] * 6  # gate, up and down of two layers
    finally:
        dist.destroy_process_group()


def test_what_is_refused_and_why():
    experts = GPTConfig(n_layers=2, d_model=16, n_heads=2, n_experts=6)
    plain = LlamaConfig(n_layers=1, d_model=16, n_heads=2)
    assert list(fits(experts, Layout(expert=3))) == list(fits(experts, Layout())) == list(fits(plain, Layout(tensor=2))) == []
    assert list(fits(experts, Layout(shard=2))) == list(fits(experts, Layout(shard=2, expert=3))) == []
    assert list(fits(plain, Layout(expert=2))) == ["layout.expert=2: this llama has no experts. Set layout.expert=1, or, for gpt or llama, model.n_experts=8, say."]
    assert "this bert has no experts." in next(fits(BertConfig(n_layers=1, d_model=16, n_heads=2, d_ff=32), Layout(expert=2)))
    assert list(fits(experts, Layout(expert=4))) == ["layout.expert=4 does not divide model.n_experts=6. Use 1, 2, 3 or 6."]
    for axis, reason in (("tensor", "rows and columns"), ("pipeline", "in every stage"), ("context", "whole sequences")):
        (line,) = fits(experts, Layout(**{axis: 2}))
        assert line.startswith(f"layout.{axis}: cannot be combined with model.n_experts=6: ") and reason in line
