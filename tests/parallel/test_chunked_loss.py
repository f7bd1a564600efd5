"""layout.loss=chunked against layout.loss=whole: losses, gradients and curves of every family with a head over words; what its logits take,
planned and measured."""

from __future__ import annotations

import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gradus.layers import Targets, word_loss
from gradus.layers.capabilities import CPU, pretending
from gradus.layers.word_loss import Words, chunked_loss
from gradus.parallel.apply import apply, use_chunked_loss
from gradus.parallel.check import fits
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import common  # noqa: E402
import test_layouts  # noqa: E402
from distributed import run  # noqa: E402

CHUNKED = {"loss": "chunked"}
MODELS = [
    ("gpt", {}),
    ("gpt", {"tie_output": False}),
    ("llama", {}),
    ("t5", {}),
    ("t5", {"tie_output": False, "gated": True}),
    ("seq2seq", {}),
    ("seq2seq", {"tie_output": False, "output_bias": True}),
    ("bert", {}),
]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(word_loss, "ROWS", 7)  # no batch of `common` is a multiple


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float) -> None:
    assert a.keys() == b.keys()
    scale = max(g.abs().max() for g in b.values())  # a key's bias has a gradient of 0, but for rounding
    assert max((a[name] - b[name]).abs().max() / scale for name in b) < tolerance


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family, changes", MODELS)
def test_loss_and_gradients_are_those_of_whole_logits(family, changes, smoothing):
    model, batch = common.build(family, **changes), common.batch(family, 0)
    whole = sum(common.losses(family, model, batch, smoothing).values())
    expected = gradients(model, whole / 3)
    use_chunked_loss(model, None)
    loss = sum(common.losses(family, model, batch, smoothing).values())
    near(gradients(model, loss / 3), expected, 2e-6)
    assert loss.dim() == 0 and float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_under_autocast(dtype, tolerance, on_gpu):
    """Products in half, sums in fp32, as with whole logits; also as a GPU reads and writes two types at once."""
    model, batch = common.build("gpt"), common.batch("gpt", 0)
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype), pretending(dataclasses.replace(CPU, casts_first=not on_gpu)):
            loss = sum(common.losses("gpt", model, batch).values())
        found.append((float(loss.detach()), gradients(model, loss)))
        assert loss.dtype == torch.float32
        use_chunked_loss(model, None)
    near(found[1][1], found[0][1], tolerance)
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)


def test_in_half_weights_gradients_are_added_up_in_fp32():
    torch.manual_seed(0)
    x, weight = torch.randn(700, 16), torch.randn(50, 16)
    words = torch.randint(50, (700,))
    half = [t.bfloat16().requires_grad_() for t in (x, weight)]
    chunked_loss(*half, None, Targets(words), Words(50)).backward()
    full = [t.detach().float().requires_grad_() for t in half]
    F.cross_entropy(full[0] @ full[1].T, words, reduction="sum").backward()
    for a, b in zip(half, full):
        assert a.grad.dtype == torch.bfloat16 and (a.grad - b.grad).abs().max() < 1e-2 * b.grad.abs().max()


def test_a_frozen_head_and_frozen_states_get_no_gradient():
    made = []
    x, weight, bias = torch.randn(20, 4), torch.randn(9, 4), torch.randn(9)
    for frozen in range(3):
        inputs = [t.clone().requires_grad_(i != frozen) for i, t in enumerate((x, weight, bias))]
        with pytest.MonkeyPatch.context() as patch:
            inner = word_loss.summed_by_chunks
            patch.setattr(word_loss, "summed_by_chunks", lambda *args, inner=inner: made.append(inner(*args)) or made[-1])
            loss = chunked_loss(*inputs, Targets(torch.arange(20) % 9), Words(9))
        loss.backward()
        assert [i for i, g in enumerate(made[-1][1]) if g is None] == [frozen] == [i for i, t in enumerate(inputs) if t.grad is None]


def test_targets_that_do_not_count_and_none_at_all():
    x, weight = torch.randn(20, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    words = torch.full((20,), word_loss.IGNORE)
    loss = chunked_loss(x, weight, None, Targets(words, 0.1), Words(9))
    loss.backward()
    assert float(loss.detach()) == 0 and not x.grad.any() and not weight.grad.any()
    empty = chunked_loss(x[:0], weight, None, Targets(words[:0]), Words(9))
    empty.backward()
    assert float(empty.detach()) == 0 and not weight.grad.any()


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_metrics_come_chunk_by_chunk(family, monkeypatch):
    model, batch = common.build(family), common.batch(family, 1)
    words = batch["targets" if family == "bert" else "labels"]
    arguments = (batch["source"], batch["target"]) if family == "t5" else (batch["ids"],)
    select = {"select": batch["select"]} if family == "bert" else {}
    with torch.no_grad():
        logits = model(*arguments, **select)
        words[:] = torch.where(torch.arange(words.numel()).view(words.shape) % 2 == 0, logits.argmax(-1), words)  # half are right
        expected = Targets(words, count_right=True).sums(logits, words.numel())
        use_chunked_loss(model, None)
        targets = Targets(words, count_right=True)
        with targets.given():
            found = targets.sums(model(*arguments, **select), words.numel())
        assert torch.equal(model(*arguments, **select), logits)  # nobody has given targets
    assert found["accuracy"] == expected["accuracy"] and int(found["accuracy"][0]) >= words.numel() // 2
    assert float(found["loss"][0]) == pytest.approx(float(expected["loss"][0]), rel=1e-6)


def test_of_words_that_are_equally_likely_the_first_is_the_prediction():
    x, weight = torch.ones(3, 1), torch.tensor([[0.0], [1.0], [1.0]])
    targets = Targets(torch.tensor([1, 2, 0]), count_right=True)
    chunked_loss(x, weight, None, targets, Words(3))
    assert int(targets.right) == 1


@pytest.mark.parametrize("smoothing, dtype, tolerance", [(0.0, None, 2e-6), (0.1, None, 2e-6), (0.0, torch.bfloat16, 2e-2)])
def test_a_loss_of_each_word_has_a_gradient_of_its_own(smoothing, dtype, tolerance):
    """As a preference weighs whole answers: the sums of rows are squared, so that each word's factor is known in the backward pass alone."""
    model, batch = common.build("gpt", tie_output=False), common.batch("gpt", 0)
    found = []
    for _ in range(2):
        targets = Targets(batch["labels"], smoothing, each=True)
        with torch.autocast("cpu", dtype, enabled=dtype is not None), targets.given():
            losses = targets.loss(model(batch["ids"]))  # (batch, seq)
        found.append((losses.detach(), gradients(model, losses.sum(-1).square().sum())))
        assert losses.dtype == torch.float32 and losses.shape == batch["labels"].shape
        use_chunked_loss(model, None)
    (whole, expected), (chunked, own) = found
    assert not whole[batch["labels"] == word_loss.IGNORE].any() and (chunked - whole).abs().max() <= tolerance * whole.abs().max()
    near(own, expected, tolerance)


@pytest.mark.parametrize("of", ["losses", "one each"])
def test_two_threads_that_train_at_once_get_the_losses_that_each_gets_alone(of):
    """Both are inside their models before either's head computes: what one thread asks, the other's head must not answer."""

    def train(seed: int, met: threading.Barrier | None = None) -> list[float]:
        model, losses = common.build("gpt"), []
        use_chunked_loss(model, None)
        if met:
            model.register_forward_pre_hook(lambda *_: (met.wait(), None)[1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = common.batch("gpt", seed, rows=4 + seed % 2)
        for _ in range(4):
            if of == "losses":
                loss = sum(common.losses("gpt", model, batch).values())
            else:
                targets = Targets(batch["labels"], each=bool(seed % 2))  # the other thread asks for a sum
                with targets.given():
                    loss = targets.loss(model(batch["ids"]))
                assert loss.shape == (batch["labels"].shape if seed % 2 else ())
            (loss.sum() / batch["counts"]["tokens"]).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach().sum()))
        return losses

    seeds, met, found = (0, 51), threading.Barrier(2, timeout=60), {}
    alone = {seed: train(seed) for seed in seeds}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: train(seed, met)})) for seed in seeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone and alone[0][-1] < alone[0][0]


def test_a_model_without_a_head_over_words_is_refused():
    assert "vit has no logits over words" in next(fits(common.CONFIGS["vit"], Layout(**CHUNKED)))
    classifier = common.CONFIGS["bert"].model_copy(update={"head": "classification", "n_classes": 3})
    assert "a classifier has no logits over words" in next(fits(classifier, Layout(**CHUNKED)))
    with pytest.raises(AssertionError, match="logits over words"):
        apply(common.build("vit"), Layout(**CHUNKED))


@pytest.mark.parametrize("layout, why", [
    ({"tensor": 2, "vocab_parallel": False}, "Leave layout.vocab_parallel out"),
    ({"pipeline": 2, "schedule": "zero_bubble"}, "Use layout.schedule=1f1b"),
    ({"replicate": "data_parallel"}, "Use layout.replicate=ddp"),
])  # fmt: skip
def test_layouts_that_it_does_not_go_with_name_the_fix(layout, why):
    assert any(why in line for line in fits(common.CONFIGS["gpt"], Layout(**CHUNKED, **layout)))


# ---------------------------------------------------------------- several processes


QUICK = [("gpt", {**CHUNKED, **layout}, n) for layout, n in (({}, 2), ({"shard": 2}, 2), ({"tensor": 2}, 1), ({"pipeline": 2}, 2))]
MORE = [
    *((family, {**CHUNKED, **layout}) for family in ("llama", "t5", "seq2seq", "bert") for layout in ({"shard": 2}, {"tensor": 2}, {"pipeline": 2})),
    ("gpt", {**CHUNKED, "tensor": 2, "sequence_parallel": False}),
    ("gpt", {**CHUNKED, "context": 2}),
    ("gpt", {**CHUNKED, "shard_optimizer": True}),
    ("gpt", {**CHUNKED, "replicate": "manual"}),
    ("gpt", {**CHUNKED, "shard": 2, "reshard": False}, 2),
    ("llama", {**CHUNKED, "checkpointing": "full"}, 2),
    ("gpt", {**CHUNKED, "pipeline": 2, "schedule": "gpipe"}, 2),
]


def curves(world, cases):
    word_loss.ROWS = 7
    return [test_layouts.curve(world, family, layout, *rest, steps=4) for family, layout, *rest in cases]


def test_the_curve_of_one_process_on_two():
    test_layouts.check(2, QUICK, told=run(2, curves, QUICK))


@pytest.mark.slow
def test_every_family_on_two():
    test_layouts.check(2, MORE, told=run(2, curves, MORE))


@pytest.mark.slow
def test_axes_compose():
    cases = [("gpt", {**CHUNKED, "tensor": 2, "shard": 2}), ("t5", {**CHUNKED, "tensor": 2, "pipeline": 2}, 2), ("llama", {**CHUNKED, "shard": 2}, 2)]
    test_layouts.check(4, cases, told=run(4, curves, cases))


def split_words(world):
    """Of a vocabulary that two do not divide: loss, gradients and right predictions, with label smoothing."""
    word_loss.ROWS = 7
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=g) for shape in ((40, 8), (13, 8), (13,)))
    words = torch.randint(13, (40,), generator=g).masked_fill(torch.arange(40) % 5 == 0, word_loss.IGNORE)
    words[1] = (x @ weight.T + bias)[1].argmax()
    rank = world.rank
    own = slice(0, 7) if rank == 0 else slice(7, 13)
    parts = [x.clone().requires_grad_(), weight[own].clone().requires_grad_(), bias[own].clone().requires_grad_()]
    targets = Targets(words, 0.1, count_right=True)
    loss = chunked_loss(*parts, targets, Words(13, 7 * rank, torch.distributed.group.WORLD))
    loss.backward()
    torch.distributed.all_reduce(parts[0].grad)
    full = [t.clone().requires_grad_() for t in (x, weight, bias)]
    logits = F.linear(*full)
    expected = F.cross_entropy(logits, words, reduction="sum", label_smoothing=0.1, ignore_index=word_loss.IGNORE)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert int(targets.right) == int((logits.argmax(-1) == words).sum()) >= 1
    for a, b in zip(parts, [full[0].grad, full[1].grad[own], full[2].grad[own]]):
        assert torch.allclose(a.grad, b, rtol=1e-5, atol=1e-5)
    losses = chunked_loss(*parts, Targets(words, 0.1, each=True), Words(13, 7 * rank, torch.distributed.group.WORLD))
    each = F.cross_entropy(F.linear(*full), words, reduction="none", label_smoothing=0.1, ignore_index=word_loss.IGNORE)
    assert torch.allclose(losses, each, rtol=1e-5, atol=1e-5)
    for inputs, values in ((parts, losses), (full, each)):
        for t in inputs:
            t.grad = None
        values.square().sum().backward()
    torch.distributed.all_reduce(parts[0].grad)
    for a, b in zip(parts, [full[0].grad, full[1].grad[own], full[2].grad[own]]):
        assert torch.allclose(a.grad, b, rtol=1e-5, atol=1e-5)


def test_a_vocabulary_that_is_split_unevenly():
    run(2, split_words)
