"""Worlds of one process: layouts of any size are built and stepped, and what is counted there is what a real world counts."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradus import models
from gradus.errors import UserError
from gradus.parallel.apply import apply
from gradus.parallel.engine import Parallel
from gradus.parallel.fake import BucketedReplicas, fake_world
from gradus.parallel.mesh import Mesh
from gradus.parallel.traffic import Traffic
from gradus.parallel.world import World
from gradus.recipe.schema import GPTConfig, Layout
from gradus.torch_private import FakeTensorMode, chunking_of_fsdp

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
from distributed import run  # noqa: E402

GPT2 = GPTConfig(n_layers=12, d_model=768, n_heads=12, vocab_size=50257, seq_len=1024, dropout=0.1)
SMALL = GPTConfig(n_layers=2, d_model=64, n_heads=4, vocab_size=512, seq_len=64)
OLD = torch.__version__ < (2, 12)


def steps(parallel: Parallel, micro_batches: list[dict], loss_of, n: int = 1) -> Traffic:
    """n steps as the trainer takes them; what the last one sends."""
    trained = [p for _, p in parallel.trained()]
    optimizer = torch.optim.AdamW(trained, lr=1e-3) if trained else None
    for _ in range(n):
        with Traffic() as traffic:
            loss = parallel.forward_backward(micro_batches, loss_of, lambda share: share)
            norm = parallel.norm()
            torch.nn.utils.clip_grads_with_norm_([p for p in trained if p.grad is not None], 1.0, norm)
            if optimizer:
                optimizer.step()
            parallel.after_step()
            parallel.zero_grad()
        assert loss.shape == norm.shape == ()
    return traffic


def gpt(size: int, layout: dict, config: GPTConfig, batch: int, seq: int, rank: int = 0, fake: bool = True, micro_batches: int = 1, n: int = 1):
    """(what rank holds, what it sends in a step)."""
    with fake_world(size, rank) as world:
        mesh = Mesh.make(Layout(**layout), world)
        with FakeTensorMode() if fake else contextlib.nullcontext():
            parallel = apply(models.build(config), Layout(**layout), mesh)
            data = [{name: torch.randint(0, config.vocab_size, (batch, seq)) for name in ("ids", "labels")} for _ in range(micro_batches)]
            traffic = steps(parallel, data, lambda model, b: common.losses("gpt", model, b)["tokens"], n)
            return {h.name: h.local.shape for h in parallel.local_parameters}, traffic.by_kind


def padded(shapes: list[tuple[int, ...]], n: int) -> int:
    """Elements of parameters that FSDP2 gathers from n processes, each of which has equally many rows."""
    return sum(math.ceil(rows / n) * n * math.prod(rest) for rows, *rest in shapes)


def gpt_shapes(c: GPTConfig, t: int = 1) -> list[tuple[int, ...]]:
    """Of a GPT's parameters, split over t processes."""
    d, part, wide = c.d_model, c.d_model // t, c.d_ff // t
    attention = [(part, d), (part,)] * 3 + [(d, part), (d,)]
    block = attention + [(wide, d), (wide,), (d, wide), (d,)] + [(d,)] * 4
    return [(math.ceil(c.vocab_size / t), d), (c.seq_len, d), (d,), (d,)] + block * c.n_layers


@pytest.mark.slow
def test_fsdp_and_tensor_at_1024():
    start = time.process_time()
    s, t, c, batch = 256, 4, GPT2, 4
    held, found = gpt(s * t, {"shard": s, "tensor": t}, c, batch, c.seq_len, n=2)
    assert time.process_time() - start < 30
    assert held["blocks.3.feedforward.up.weight"] == (4 * 768 // 4 // 256, 768)
    assert sum(map(math.prod, held.values())) == padded(gpt_shapes(c, t), s) // s  # of the first, which has full rows

    weights = 4 * padded(gpt_shapes(c, t), s)  # bytes of a tensor-parallel rank's whole
    stream = 4 * batch * c.seq_len * c.d_model  # hidden states of the whole sequence
    of_shard, of_tensor = (s - 1) / s, (t - 1) / t
    # a layer: attention and feed-forward each gather their input and scatter their result; backwards, the other way round
    gathers, scatters = 4 * c.n_layers + 2, 4 * c.n_layers + 1  # at the ends: the embedding's result, the last norm's
    assert found["all_gather"].sent == pytest.approx(2 * weights * of_shard + gathers * stream * of_tensor, rel=1e-12)
    assert found["reduce_scatter"].sent == pytest.approx(weights * of_shard + scatters * stream * of_tensor, rel=1e-12)
    assert found["all_gather"].calls == 2 * (c.n_layers + 1) + gathers
    assert found["reduce_scatter"].calls == c.n_layers + 1 + scatters
    norms = (2 * c.n_layers + 1) * 2 * c.d_model + c.seq_len * c.d_model  # and positions: each process has a part of the sum
    loss = 3 * batch * c.seq_len  # of each token the maximum, the sum, the target's logit
    scalars = 4 * 2 * (2 * of_shard + 1023 / 1024)  # the loss over `shard`; squares of gradients over `shard` and over both
    assert found["all_reduce"].sent == pytest.approx((4 * (norms + loss) + stream) * 2 * of_tensor + scalars, rel=1e-12)
    assert set(found) == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.slow
def test_each_rank_holds_its_own():
    whole = dict.fromkeys(dict(models.build(SMALL.model_copy(update={"vocab_size": 510})).named_parameters()), 0)
    for rank in range(4):
        held, _ = gpt(4, {"shard": 2, "tensor": 2}, SMALL.model_copy(update={"vocab_size": 510}), 2, 16, rank)
        for name, shape in held.items():
            whole[name] += math.prod(shape)
    for name, p in models.build(SMALL.model_copy(update={"vocab_size": 510})).named_parameters():
        copies = 2 if "norm" in name or "position" in name or name.endswith(("to_out.bias", "down.bias")) else 1
        assert whole[name] == p.numel() * copies, name


@pytest.mark.slow
@pytest.mark.parametrize("fake", [True, False], ids=["fake tensors", "real tensors"])
def test_closed_forms(fake):
    c, batch, seq = SMALL, 2, 64
    weights = 4 * sum(map(math.prod, gpt_shapes(c)))
    stream = 4 * batch * seq * c.d_model

    def sent(size: int, layout: dict, config: GPTConfig = c, rank: int = 0, **more) -> dict[str, float]:
        return {name: n.sent for name, n in gpt(size, layout, config, batch, seq, rank, fake, **more)[1].items()}

    for size in (2, 8):
        ring = (size - 1) / size
        assert sent(size, {}) == {"all_reduce": 2 * ring * (weights + 4)}  # DDP; 4: the loss
        assert sent(size, {}, micro_batches=2) == {"all_reduce": 2 * ring * (weights + 4)}
        assert sent(size, {"compress": "bf16"}) == {"all_reduce": 2 * ring * (weights / 2 + 4)}
        assert sent(size, {"replicate": "manual"}) == {"all_reduce": 2 * ring * (weights + 4)}
        fsdp = {"all_gather": 2 * ring * weights, "reduce_scatter": ring * weights, "all_reduce": 2 * ring * 8}  # 8: the loss and the norm
        assert sent(size, {"shard": size}) == fsdp
        assert sent(size, {"shard": size, "param_dtype": "bf16"}) == fsdp | {"all_gather": ring * weights}
        assert sent(size, {"shard": size, "reshard": False}) == fsdp | {"all_gather": ring * weights}
    hsdp = sent(16, {"shard": 4}, rank=15)
    assert hsdp["all_gather"] == 2 * weights * 3 / 4 and hsdp["reduce_scatter"] == weights * 3 / 4
    assert hsdp["all_reduce"] == 2 * 3 / 4 * weights / 4 + 4 * 2 * (15 / 16 + 3 / 4)  # each part over 4 replicas; the loss over all 16

    tensor = sent(2, {"tensor": 2})
    assert tensor["all_gather"] == (4 * c.n_layers + 2) * stream / 2 and tensor["reduce_scatter"] == (4 * c.n_layers + 1) * stream / 2

    context = sent(2, {"context": 2}, rank=1)  # keys and values of half the sequence: once forwards; backwards once, and twice their gradient
    assert context == {"send": 4 * c.n_layers * 2 * stream / 2, "all_reduce": weights + 4}
    pipeline = sent(2, {"pipeline": 2}, micro_batches=2)
    opening = pipeline.pop("send") - (2 * stream + 4 * c.vocab_size * c.d_model)  # and the tied embedding's gradient
    assert opening in (0, 4) and pipeline == {"all_reduce": 8}  # PyTorch 2.11 sends a number ahead, to open the connection

    experts = c.model_copy(update={"n_experts": 4})
    rows = 2 * stream  # each token goes to two experts
    if fake:  # as if all experts were equally loaded: there and back, forwards and backwards, and how many go to each
        assert sent(2, {"expert": 2}, experts)["all_to_all"] == 2 * (4 * rows + 4 * 8) / 2
    elif not OLD:  # there a fake group leaves what it should receive as it was, and the rows to come are any number
        assert sent(2, {"expert": 2}, experts)["all_to_all"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", common.CONFIGS)
def test_families(family):
    """Built under FakeTensorMode, and stepped."""
    if OLD and family == "vit":
        pytest.skip("PyTorch 2.11 cannot view a part of a padded sequence under fake tensors (an odd number of patches and class token)")
    for rank, layout in ((3, {"shard": 2, "tensor": 2, "checkpointing": "selective"}), (2, {"pipeline": 2})):
        with fake_world(4, rank) as world:
            mesh = Mesh.make(Layout(**layout), world)
            batch = common.batch(family, 0)
            if family == "bert":  # how many places are chosen is a value; all of them, here
                batch |= {"select": None, "targets": batch["ids"].flatten()}
            with FakeTensorMode() as mode:
                batch = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                parallel = apply(models.build(common.CONFIGS[family].model_copy(update={"n_layers": 2})), Layout(**layout), mesh)
                steps(parallel, [batch, batch], lambda model, b: loss_of(family, model, b))
                assert all(h.local.device.type == "cpu" for h in parallel.local_parameters)


def loss_of(family: str, model, batch: dict):
    if family == "bert" and batch["select"] is None:
        scores = model(batch["ids"], token_types=None, keep=batch["keep"])
        return common.summed_cross_entropy(scores.flatten(0, 1), batch["targets"])
    return sum(common.losses(family, model, batch).values())


# ---------------------------------------------------------------- against real processes

REAL = {
    2: [{}, {"bucket_mb": 0.01}, {"compress": "bf16"}, {"shard": 2}, {"tensor": 2}, {"context": 2}, {"pipeline": 2}],
    4: [{"shard": 2, "tensor": 2}],
}


def sent_by(world: World, layout: dict, fake: bool) -> dict:
    mesh = Mesh.make(Layout(**layout), world)
    batch = common.batch("gpt", 0)
    with FakeTensorMode() if fake else contextlib.nullcontext() as mode:
        parallel = apply(models.build(common.CONFIGS["gpt"].model_copy(update={"n_layers": 2})), Layout(**layout), mesh)
        batch = {k: mode.from_tensor(v) if fake and isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        found = steps(parallel, [batch, batch], lambda model, b: common.losses("gpt", model, b)["tokens"], n=1 + OLD if fake else 3).by_kind
    return {"held": {h.name: tuple(h.local.shape) for h in parallel.local_parameters}} | {name: (n.calls, n.payload, n.sent) for name, n in found.items()}


def sent_really(world: World, layouts: list[dict]) -> list[dict]:
    return [sent_by(world, layout, fake=False) for layout in layouts]


@pytest.mark.slow
@pytest.mark.parametrize("n", REAL)
def test_as_in_a_real_world(n):
    """The same parts of parameters, calls and bytes, on the first rank and the last. (Three real steps: DDP makes its buckets anew in the second.)"""
    told = run(n, sent_really, REAL[n])
    for i, layout in enumerate(REAL[n]):
        for rank in (0, n - 1):
            with fake_world(n, rank) as world:
                assert sent_by(world, layout, fake=True) == told[rank][i], f"{layout} rank {rank} of {n}"


# ---------------------------------------------------------------- the world itself


def test_all_is_as_before_afterwards():
    before = DeviceMesh.__init__, DeviceMesh.mesh, getattr(*chunking_of_fsdp())
    with pytest.raises(ZeroDivisionError), fake_world(4, 2) as world:
        assert (world.rank, world.size, world.first) == (2, 4, False) and dist.get_rank() == 2
        assert DeviceMesh.__init__ is not before[0]
        raise ZeroDivisionError
    assert not dist.is_initialized()
    assert before == (DeviceMesh.__init__, DeviceMesh.mesh, getattr(*chunking_of_fsdp()))
    with fake_world(1) as world:
        assert world.first and not dist.is_initialized()
    with pytest.raises(AssertionError, match="rank 4 of 4"), fake_world(4, 4):
        pass


def test_replicas_sum_on_the_last_micro_batch_alone():
    """With values: the others are taken to have the same, so the sum by DDP's rule is the gradient itself divided by their number."""
    layout = Layout(bucket_mb=0.01)
    with fake_world(4) as world:
        parallel = apply(models.build(SMALL), layout, Mesh.make(layout, world))
        assert type(parallel.replicas) is BucketedReplicas
        batch = {"ids": torch.arange(64)[None], "labels": torch.arange(64)[None]}
        parallel.forward_backward([batch, batch], lambda model, b: common.losses("gpt", model, b)["tokens"], lambda share: share)
        found = {h.name: h.local.grad.clone() for h in parallel.local_parameters}
        alone = models.build(SMALL)
        alone.load_state_dict(parallel.bare.state_dict())
        (2 * common.losses("gpt", alone, batch)["tokens"]).backward()
        for name, p in alone.named_parameters():
            torch.testing.assert_close(found[name], p.grad)
        with pytest.raises(UserError, match="powersgd"):
            BucketedReplicas(alone, dist.group.WORLD, Layout(compress="powersgd"))
