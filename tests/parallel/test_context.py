"""A sequence split over processes trains as a whole one does."""

# ruff: noqa: E402

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gradus.torch_private import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # also in the processes that a test starts
import common
import distributed

from gradus.errors import UserError
from gradus.layers import kernels, naive
from gradus.parallel import context as contexts
from gradus.parallel.apply import use_checkpointing
from gradus.parallel.check import fits
from gradus.parallel.context import Context
from gradus.recipe.schema import Layout

FAMILIES, METHODS = ("gpt", "llama", "bert", "vit"), ("ring", "ulysses")
STEPS = 20
SMALL = {"n_layers": 2, "n_heads": 8}  # heads for 4 processes, also those of keys
GROUPED = SMALL | {"n_kv_heads": 4}


def changes_of(family: str) -> dict:
    return GROUPED if family == "llama" else SMALL


def make(family: str, n: int, method: str = "ring", **changes) -> tuple[nn.Module, Context]:
    model = common.build(family, **changes_of(family) | changes)
    layout = Layout(context=n, context_method=method, chunk=3, attention="chunked")
    return model, Context(model, dist.group.WORLD, layout)


def steps_of(family: str, n: int) -> int:
    return STEPS if family == "gpt" and n == 2 else 7  # lengths


def prepared(context: Context, b: dict) -> contexts.WholeSequence:
    """What attention is given in the place of a mask."""
    return context.prepare(b)["segments"]


def packed(family: str, step: int, rows: int = 8) -> dict:
    """Rows of two or three documents each, and of other lengths in other steps: most do not divide."""
    b = common.batch(family, step, rows)
    length = 16 - step % 7
    g = torch.Generator().manual_seed(step)
    borders = torch.rand(rows, length, generator=g) < 0.15
    segments = borders.cumsum(1).masked_fill(b["ids"][:, :length] == common.PAD, -1)
    start = torch.where(borders, torch.arange(length), 0).cummax(1).values
    labels = b["labels"][:, :length].clone()
    labels[:, :-1][segments[:, 1:] != segments[:, :-1]] = common.IGNORE
    count = {"tokens": int((labels != common.IGNORE).sum())}
    return b | {"ids": b["ids"][:, :length], "labels": labels, "segments": segments, "positions": torch.arange(length) - start, "counts": count}


def curve(family: str, model: nn.Module, batches, context: Context | None = None) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; split over the processes where there is a context."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for step in range(steps_of(family, 2 if context is None else context.n)):
        b = batches(family, step)
        counts = dict(b["counts"])
        if context is not None:
            b = context.prepare(b)
            assert b["counts"] == counts
        loss = sum(value / counts[kind] for kind, value in common.losses(family, model, b).items())
        if context is not None and context.redundant:
            loss = loss / context.n
        loss.backward()
        loss = loss.detach()
        if context is not None:
            gradients = [p.grad for p in model.parameters()]
            everything = nn.utils.parameters_to_vector([loss, *gradients])
            dist.all_reduce(everything)
            nn.utils.vector_to_parameters(everything, [loss, *gradients])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    return found


# ---------------------------------------------------------------- training

CASES = [(f, "plain") for f in FAMILIES] + [("gpt", "packed"), ("llama", "packed")]


def _curves(world, cases: list[tuple[str, str]]) -> dict:
    batches = {"plain": common.batch, "packed": packed}
    found = {}
    for method in METHODS:
        for family, kind in cases:
            model, context = make(family, world.size, method)
            found[method, family, kind] = curve(family, model, batches[kind], context)
    return found


@pytest.fixture(scope="module")
def expected() -> dict:
    plain = {(f, "plain"): common.reference(f, STEPS, **changes_of(f)) for f in FAMILIES}
    return plain | {(f, "packed"): curve(f, common.build(f, **changes_of(f)), packed) for f in ("gpt", "llama")}


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_every_step_follows_the_curve_of_one_process(n, expected):
    cases = [c for c in CASES if n == 2 or c != ("gpt", "packed")]
    for found in distributed.run(n, _curves, cases):
        assert len(found) == len(METHODS) * len(cases)
        for (method, *case), steps in found.items():
            assert steps == [pytest.approx(step, rel=1e-5) for step in expected[tuple(case)][: steps_of(case[0], n)]], (method, case)


def _padded(world, length: int) -> list[tuple]:
    found = []
    for method in METHODS:
        b = common.batch("gpt", 0)
        b = {k: v[:, :length] if isinstance(v, torch.Tensor) else v for k, v in b.items()}
        b["labels"] = torch.ones_like(b["labels"])  # each position counts, and nothing that fills the last part up
        part = make("gpt", world.size, method)[1].prepare(b)
        found.append((tuple(part["ids"].shape), int((part["labels"] == 1).sum()), int((part["labels"] == common.IGNORE).sum())))
    return found


def test_what_fills_up_a_sequence_is_not_trained_on():
    told = distributed.run(2, _padded, 13)
    for parts in zip(*told):
        assert len({shape for shape, _, _ in parts}) == 1 and sum(counted for _, counted, _ in parts) == 8 * 13
        assert sum(counted + ignored for _, counted, ignored in parts) == 2 * 8 * parts[0][0][1]


# ---------------------------------------------------------------- the kernel alone

LENGTHS = {2: (1, 7, 13, 16), 4: (1, 7, 16, 29)}


def _kernels(world) -> None:
    """Output and all gradients of both methods in float64 against the textbook's, causal and not, packed and padded, for several lengths."""
    n = world.size
    for method in METHODS:
        causal, both = make("gpt", n, method, seq_len=32)[1], make("bert", n, method, seq_len=32)[1]
        for length in LENGTHS[n]:
            g = torch.Generator().manual_seed(length)
            q, k, v, w = (torch.randn(2, length, heads, 4, dtype=torch.float64, generator=g) for heads in (8, 4, 4, 8))
            segments = torch.randint(0, 3, (2, length), generator=g).sort(dim=1).values
            keep = torch.rand(2, length, generator=g) < 0.6
            keep[0] = False  # a row without any key gives zeros
            same = (segments[:, :, None] == segments[:, None, :])[:, None]  # (batch, 1, seq, seq)
            for context, extra, mask in (
                (causal, {}, None),
                (causal, {"segments": segments}, same),
                (causal, {"segments": segments, "keep": keep}, same & keep[:, None, None, :]),
                (both, {}, None),
                (both, {}, keep[:, None, None, :]),
            ):
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                want, _ = naive(*(x.transpose(1, 2) for x in leaves), mask=mask, causal=context is causal)
                wanted = torch.autograd.grad((want.transpose(1, 2) * w).sum(), leaves)

                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                if context is causal:
                    sequence = mask = prepared(context, {"ids": torch.zeros(2, length, dtype=torch.long), **extra})
                else:
                    context._before_first(nn.Identity(), (q.flatten(2),), {})
                    sequence = context.sequence
                part = [sequence.split.take(x, world.rank) for x in (*leaves, w, want.detach().transpose(1, 2))]
                out, _ = context.attend(*(x.transpose(1, 2) for x in part[:3]), mask=mask, causal=context is causal)
                valid = sequence.split.take(torch.ones(2, length, 1, 1, dtype=torch.float64), world.rank)
                torch.testing.assert_close(out.transpose(1, 2) * valid, part[4] * valid, rtol=1e-10, atol=1e-12)
                got = torch.autograd.grad((out.transpose(1, 2) * part[3]).sum(), leaves)
                for name, a, b in zip("qkv", got, wanted):
                    dist.all_reduce(a)
                    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda m: f"{method} d{name} length {length}: {m}")  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 4])
def test_the_kernels_give_what_the_textbook_gives(n):
    distributed.run(n, _kernels)


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gives."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def _ring_alone(world, length: int) -> tuple[list[int], int]:
    """Sizes of the score blocks computed, forward and backward, and the largest tensor of both passes."""
    model = common.build("gpt", n_heads=1, d_model=4, n_layers=1, seq_len=length)
    context = Context(model, dist.group.WORLD, Layout(context=world.size, chunk=8))
    sequence = prepared(context, {"ids": torch.zeros(1, length, dtype=torch.long), "segments": torch.zeros(1, length, dtype=torch.long)})
    q, k, v = (torch.randn(1, 1, length // world.size, 4, requires_grad=True) for _ in range(3))
    blocks = []
    for name in ("forward_chunk", "backward_chunk"):
        whole = getattr(kernels, name)

        def counted(*args, whole=whole):
            blocks.append(args[0].shape[-2] * args[1].shape[-2])
            return whole(*args)

        setattr(kernels, name, counted)
    with _Largest() as largest:
        context.attend(q, k, v, mask=sequence, causal=True)[0].sum().backward()
    return blocks, largest.numel


@pytest.mark.slow
def test_the_causal_ring_shares_the_work_equally_and_never_holds_the_scores():
    n, length = 4, 256
    found = distributed.run(n, _ring_alone, length)
    works = [sum(blocks) for blocks, _ in found]
    assert len(set(works)) == 1, works
    size = length // (2 * n)
    assert works[0] == 2 * ((2 * n - 1) * size * size + 2 * sum(8 * stop for stop in range(8, size + 1, 8)))  # wholly masked chunks cost nothing
    for _, largest in found:
        assert largest <= 8 * length // n  # 8 queries against the keys of a process; the whole would be length²


# ---------------------------------------------------------------- what it must live with


def _gradients(world, family: str, method: str, checkpointing: str = "none", bf16: bool = False, **changes) -> tuple[Tensor, Tensor]:
    model, context = make(family, world.size, method, **changes)
    use_checkpointing(model, checkpointing)
    b = context.prepare((packed if family in ("gpt", "llama") else common.batch)(family, 3))
    torch.manual_seed(world.rank)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        (loss,) = common.losses(family, model, b).values()
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


class _ByKeyword(nn.Module):
    """A model's way to call its blocks."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        return self.block(x=x, mask=mask)


def _called_by_keyword(world) -> None:
    plain, model = common.build("bert"), common.build("bert")
    model.blocks = nn.ModuleList(_ByKeyword(block) for block in model.blocks)
    Context(model, dist.group.WORLD, Layout(context=world.size))
    b = common.batch("bert", 1)
    (want,), (got,) = (common.losses("bert", m, b).values() for m in (plain, model))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


def test_blocks_may_be_called_by_keyword():
    distributed.run(2, _called_by_keyword)


def _interleaved(world, method: str) -> None:
    """Batches of several lengths under way at once, computed again in the backward pass, do not see each other's documents."""
    model, context = make("llama", world.size, method)
    use_checkpointing(model, "full")
    batches = [packed("llama", step) for step in (0, 1, 2)]
    parts = [context.prepare(b) for b in batches]
    sums = [common.losses("llama", model, part)["tokens"] for part in parts]
    for total in sums:
        total.backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(got)
    plain = common.build("llama", **GROUPED)
    for b in batches:
        common.losses("llama", plain, b)["tokens"].backward()
    torch.testing.assert_close(got, torch.cat([p.grad.flatten() for p in plain.parameters()]), rtol=1e-4, atol=1e-4)


def _composed(world) -> tuple[float, float, float]:
    for method in METHODS:
        for family in ("llama", "bert"):
            loss, gradient = _gradients(world, family, method)
            for mode in ("attention", "selective", "full"):
                again, repeated = _gradients(world, family, method, mode)
                assert torch.equal(loss, again) and torch.equal(gradient, repeated), (family, method, mode)
            rough, near = _gradients(world, family, method, "full", bf16=True)
            torch.testing.assert_close(rough, loss, rtol=5e-3, atol=0)
            assert float((near - gradient).norm() / gradient.norm()) < 0.03
        _interleaved(world, method)
    # a mask of dropout is drawn again as it was
    for method in METHODS:
        first = _gradients(world, "gpt", method, dropout=0.2)
        second = _gradients(world, "gpt", method, "full", dropout=0.2)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
        assert not torch.equal(first[0], _gradients(world, "gpt", method)[0])
    # hidden states that tensor parallelism has split are cut as whole ones are
    whole, weight = torch.arange(48.0).view(2, 6, 4), torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    x = distribute_tensor(whole, init_device_mesh("cpu", (world.size,)), [Shard(1)]).requires_grad_()
    cut = contexts._on_whole(lambda x: 3 * x[:, 1:4], x)
    assert cut.placements == x.placements and torch.equal(cut.full_tensor(), 3 * whole[:, 1:4])
    (cut.full_tensor() * weight).sum().backward()
    assert torch.equal(x.grad.full_tensor(), nn.functional.pad(3 * weight, (0, 0, 1, 2)))
    return _dropout(world)


def _dropout(world) -> tuple[float, float, float]:
    """(slope along a direction by differences, the same by gradients, mean of the kept and scaled weights), float64."""
    context = make("gpt", world.size, seq_len=32)[1]
    sequence = prepared(context, {"ids": torch.zeros(2, 29, dtype=torch.long)})
    torch.manual_seed(world.rank)
    shapes = [(2, heads, sequence.split.local, 4) for heads in (8, 4, 4)]
    x, d = ([torch.randn(s, dtype=torch.float64) for s in shapes] for _ in range(2))
    w = torch.randn(shapes[0], dtype=torch.float64)

    def value(*inputs: Tensor) -> Tensor:
        torch.manual_seed(10 + world.rank)
        return (context.attend(*inputs, mask=sequence, causal=True, dropout=0.3)[0] * w).sum()

    leaves = [a.clone().requires_grad_() for a in x]
    by_gradient = sum((g * b).sum() for g, b in zip(torch.autograd.grad(value(*leaves), leaves), d))
    up, down = (value(*(a + sign * 1e-5 * b for a, b in zip(x, d))) for sign in (1, -1))
    results = torch.stack((((up - down) / 2e-5).detach(), by_gradient))
    dist.all_reduce(results)
    sequence = prepared(context, {"ids": torch.zeros(2, 32, dtype=torch.long)})
    q, k, v = (torch.zeros(64, heads, 32 // world.size, 4) for heads in (8, 4, 4))
    mean = context.attend(q, k, v + 1, mask=sequence, causal=True, dropout=0.3)[0].mean()
    return *results.tolist(), float(mean)


@pytest.mark.slow
def test_it_composes_with_checkpointing_mixed_precision_and_dropout():
    for by_difference, by_gradient, mean in distributed.run(2, _composed):
        assert by_difference == pytest.approx(by_gradient, rel=1e-7)
        assert mean == pytest.approx(1.0, abs=0.02)


def _evaluated(world) -> str:
    with torch.no_grad():
        _evaluate(world)
    return _refused(world)


def _evaluate(world) -> None:
    for method in METHODS:
        for family in FAMILIES:
            plain = common.build(family, **changes_of(family)).eval()
            model, context = make(family, world.size, method)
            model.eval()
            for step, length in ((0, 16), (1, 13), (2, 3)):
                b = common.batch(family, step)
                if family in ("gpt", "llama"):
                    b |= {"ids": b["ids"][:, :length], "labels": b["labels"][:, :length]}
                (want,) = common.losses(family, plain, b).values()
                (got,) = common.losses(family, model, context.prepare(b)).values()
                if not context.redundant:
                    dist.all_reduce(got)
                torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
        # decoding from a cache, on one process alone
        ids = torch.randint(1, common.VOCAB, (2, 9))
        if world.first:
            plain, (model, context) = common.build("llama", **GROUPED), make("llama", world.size, method)
            cache, other = plain.new_cache(2, 10), model.new_cache(2, 10)
            for piece in (ids[:, :5], ids[:, 5:6]):
                torch.testing.assert_close(model(piece, cache=other), plain(piece, cache=cache))


def _decoded(world) -> list[bool]:
    """Whether windows' logits of a text by ulysses are those of the plain model, read at once, in parts, and one token a row."""
    found = []
    for family, changes in (("gemma", {}), ("llama", {"window": 3, "full_every": 2})):
        plain = common.build(family, **changes).eval()
        model = common.build(family, **changes).eval()
        Context(model, dist.group.WORLD, Layout(context=world.size, context_method="ulysses"))
        ids, cache = torch.randint(1, common.VOCAB, (2, 15)), model.new_cache(2, 15)
        with torch.no_grad():
            logits = torch.cat([model(part, cache=cache) for part in ids.split([7, 1, 1, 5, 1], dim=1)], dim=1)
            found.append(torch.allclose(logits, plain(ids), rtol=1e-4, atol=1e-5))
        assert {layer.k.shape[2] for layer in cache.layers} == {15, changes.get("window", 5)}
    return found


def test_decoding_past_a_window():
    assert distributed.run(2, _decoded) == [[True, True]] * 2


def _refused(world) -> str:
    model, context = make("llama", world.size)
    ids = torch.zeros(4, 17, dtype=torch.long)
    with pytest.raises(UserError) as e:
        context.prepare({"ids": ids})
    with pytest.raises(AssertionError, match="was not prepared"):
        model(ids[:, :8])
    return str(e.value)


@pytest.mark.slow
def test_evaluation_takes_any_length_that_the_model_takes_and_decoding_needs_no_other_process():
    wanted = "a sequence of 17 tokens is longer than model.seq_len=16. Cut it (data.max_len=16), or raise model.seq_len"
    assert distributed.run(2, _evaluated) == [wanted, wanted]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("family", "changes", "layout", "message"),
    [
        ("t5", {}, {"context": 2}, "T5 adds a relative bias"),
        ("gpt", {"seq_len": 1}, {"context": 2}, "model.seq_len=1 is fewer tokens than processes. Set layout.context=1"),
        ("seq2seq", {}, {"context": 2}, "seq2seq has cross-attention"),
        ("gpt", {}, {"context": 3, "context_method": "ulysses"}, "does not divide model.n_heads=4, and ulysses splits the heads. Use 1, 2 or 4, or"),
        ("llama", {}, {"context": 4, "context_method": "ulysses"}, "does not divide model.n_kv_heads=2, and ulysses splits the heads. Use 1 or 2, or"),
        ("llama", {}, {"context": 2, "tensor": 2, "context_method": "ulysses"}, "model.n_kv_heads=2 / layout.tensor=2, and ulysses splits the heads. Use 1, or"),
        ("gpt", {}, {"context": 2, "attention": "naive"}, "layout.attention: cannot be combined with layout.context_method=ring: the ring"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(family, changes, layout, message):
    (found,) = fits(common.CONFIGS[family].model_copy(update=changes), Layout(**layout))
    assert message in found and "\n" not in found


def test_a_layout_that_can_be_is_not_refused():
    for family in (*FAMILIES, "t5", "seq2seq"):
        assert not list(fits(common.CONFIGS[family], Layout()))
    for family in FAMILIES:
        for method in METHODS:
            assert not list(fits(common.CONFIGS[family], Layout(context=2, context_method=method)))
        assert not list(fits(common.CONFIGS[family], Layout(context=3)))
