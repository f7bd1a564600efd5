"""The step is exact: accumulation, ragged lengths and micro-batches change nothing but rounding."""

from __future__ import annotations

import pytest
import torch
from step_parts import NAMES, trainer
from torch import nn

from gradus import recipe as recipes
from gradus.train.session import open_session


@pytest.mark.parametrize("name", NAMES)
def test_accumulation_gives_one_loss_and_one_gradient(name, text, tmp_path):
    """Micro-batches of 12 (accumulation 1), 6 (2), 3 (4) and 5 (3, unequal): one loss, one norm, one set of gradients."""
    results = {}
    for micro in (12, 6, 3, 5):
        t = trainer(name, text, tmp_path, f"layout.micro_batch={micro}", "train.clip_norm=null")
        step = next(iter(t.loader.steps(0)))
        assert len(step.micro_batches) == -(-12 // micro)
        grads: dict[str, torch.Tensor] = {}
        t.precision.step = lambda optimizer, bad, t=t, grads=grads: grads.update(
            {n: p.grad.clone() for n, p in t.model.named_parameters() if p.grad is not None}
        )
        loss, norm = t.step(step.micro_batches)
        results[micro] = (loss.item(), norm.item(), grads)
    loss, norm, grads = results[12]
    for other_loss, other_norm, other in results.values():
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_norm == pytest.approx(norm, rel=1e-5)
        assert other.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(other[key], grad, rtol=1e-4, atol=1e-7)


def test_loss_is_the_sum_over_tokens_not_a_mean_of_means(text, tmp_path):
    """On ragged rows the step's loss is torch's own mean over all target tokens at once, which differs from the mean of rows' means."""
    t = trainer("wikitext2-t5", text, tmp_path, "layout.micro_batch=3")
    step = next(iter(t.loader.steps(0)))
    t.model.eval()
    rows, flat_logits, flat_labels = [], [], []
    with torch.no_grad():
        for b in step.micro_batches:
            logits = t.model(b["source"], b["target"], source_keep=b.get("keep"))
            keep = b["labels"] != -100
            flat_logits.append(logits[keep])
            flat_labels.append(b["labels"][keep])
            rows += [nn.functional.cross_entropy(logits[i][keep[i]], b["labels"][i][keep[i]]).item() for i in range(len(logits))]
    want = nn.functional.cross_entropy(torch.cat(flat_logits), torch.cat(flat_labels)).item()
    loss, _ = t.step(step.micro_batches)
    assert loss.item() == pytest.approx(want, rel=1e-5)
    assert abs(sum(rows) / len(rows) - want) > 1e-4  # the oracle tells the two apart


def test_step_equals_a_plain_pytorch_loop(text, tmp_path):
    """Eight steps against the few lines anybody would write with torch.optim.AdamW, clipping included."""
    t = trainer("shakespeare-char-gpt", text, tmp_path, "train.clip_norm=0.5")
    reference = trainer("shakespeare-char-gpt", text, tmp_path, "train.clip_norm=0.5").model
    reference.load_state_dict(t.model.state_dict())
    matrices = [p for p in reference.parameters() if p.ndim >= 2]
    positions = dict(reference.named_parameters())
    undecayed = [p for n, p in positions.items() if p.ndim < 2 or "positions" in n or "norm" in n]
    decayed = [p for p in matrices if not any(p is q for q in undecayed)]
    o = t.recipe.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": o.weight_decay}, {"params": undecayed, "weight_decay": 0.0}], lr=o.lr, betas=o.betas, eps=o.eps
    )
    t.model.train(), reference.train()
    for group in t.optimizer.param_groups:
        group["lr"] = o.lr
    for step in list(t.loader.steps(0))[:8]:
        loss, norm = t.step(step.micro_batches)
        (b,) = step.micro_batches
        want = nn.functional.cross_entropy(reference(b["ids"]).flatten(0, 1), b["labels"].flatten())
        optimizer.zero_grad()
        want.backward()
        want_norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        assert loss.item() == pytest.approx(want.item(), rel=1e-5)
        assert norm.item() == pytest.approx(want_norm.item(), rel=1e-4)


def test_a_bad_gradient_never_reaches_the_weights(text, tmp_path):
    t = trainer("shakespeare-char-gpt", text, tmp_path)
    before = {n: p.clone() for n, p in t.model.named_parameters()}
    step = next(iter(t.loader.steps(0)))
    handle = next(iter(t.model.parameters())).register_hook(lambda g: torch.full_like(g, float("nan")))
    _, norm = t.step(step.micro_batches)
    assert not torch.isfinite(norm)
    assert all(torch.equal(p, before[n]) for n, p in t.model.named_parameters())
    handle.remove()
    t.step(step.micro_batches)
    assert any(not torch.equal(p, before[n]) for n, p in t.model.named_parameters())


@pytest.mark.parametrize("how", ["attention", "selective", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_no_gradient(name, how, text, tmp_path):
    from gradus.parallel.apply import apply

    losses = []
    for mode in ("none", how):
        t = trainer(name, text, tmp_path, f"layout.checkpointing={mode}", "train.clip_norm=null")
        apply(t.model, t.recipe.layout)
        step = next(iter(t.loader.steps(0)))
        losses.append([x.item() for x in t.step(step.micro_batches)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("kernel", ["naive", "chunked"])
def test_attention_kernels_train_alike(kernel, text, tmp_path):
    from gradus.parallel.apply import apply

    results = []
    for name in ("sdpa", kernel):
        t = trainer("wikitext2-bert", text, tmp_path, f"layout.attention={name}", *(["layout.chunk=8"] if name == "chunked" else []))
        apply(t.model, t.recipe.layout)
        results.append([[x.item() for x in t.step(s.micro_batches)] for s in list(t.loader.steps(0))[:3]])
    for a, b in zip(*results):
        assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16"])
def test_half_precision_follows_fp32(precision, text, tmp_path):
    curves = []
    for p in ("fp32", precision):
        t = trainer("shakespeare-char-gpt", text, tmp_path, f"layout.precision={p}")
        curves.append([t.step(s.micro_batches)[0].item() for s in list(t.loader.steps(0))[:6]])
    assert curves[0] == pytest.approx(curves[1], rel=0.03)
    assert curves[0] != curves[1]


def test_fp16_scales_its_loss(text, tmp_path):
    t = trainer("shakespeare-char-gpt", text, tmp_path, "layout.precision=fp16")
    before = [p.clone() for p in t.model.parameters()]
    for s in list(t.loader.steps(0))[:3]:
        loss, norm = t.step(s.micro_batches)
    assert torch.isfinite(loss) and torch.isfinite(norm) and norm < 1e4  # unscaled
    assert t.precision.scaler.get_scale() > 1
    assert any(not torch.equal(a, b) for a, b in zip(before, t.model.parameters()))


def test_a_skipped_first_step_leaves_no_garbage_in_the_momentum():
    """The fused SGD kernel allocates its buffers at step 1 and fills them only if that step is taken (fp16 often skips it)."""
    from gradus.recipe.schema import SGD
    from gradus.train.optim import make_optimizer

    results = {}
    for skip in (True, False):
        model = nn.Linear(64, 64, bias=False)
        nn.init.ones_(model.weight)
        optimizer = make_optimizer(model.named_parameters(), SGD(lr=0.1, momentum=0.9, weight_decay=0.1))
        dirt = [torch.full((64, 64), 1e9) for _ in range(64)]  # what freed memory holds
        del dirt
        for bad in (True, False, False) if skip else (False, False):
            model.weight.grad = torch.full((64, 64), float("inf") if bad else 1.0)
            optimizer.found_inf = torch.tensor(float(bad))
            optimizer.step()
        results[skip] = model.weight.detach().clone()
    assert torch.equal(results[True], results[False])
    reference = nn.Parameter(torch.ones(64, 64))
    optimizer = torch.optim.SGD([reference], lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
    for _ in range(2):
        reference.grad = torch.ones(64, 64)
        optimizer.step()
    assert torch.equal(results[False], reference.detach())


def test_more_next_sentences_right_is_better(text, tmp_path):
    more = ["task.next_sentence=true", "model.head=pretraining", "model.pooler=true", "evaluate.best=valid/next_sentence_accuracy"]
    t = trainer("wikitext2-bert", text, tmp_path, *more)
    assert all(t.task.higher_is_better(m) == (m not in ("loss", "perplexity")) for m in t.task.units)


@pytest.mark.parametrize("precision", ["pure_bf16", "pure_fp16"])
def test_examples_of_images_in_pure_half_precision(precision):
    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.limit=32", "data.limit_valid=8", "layout.device=cpu"]
    pytest.importorskip("sklearn")
    session = open_session(recipes.load("digits-vit", [*small, f"layout.precision={precision}"]))
    with torch.no_grad():
        assert len(session.task.examples(session.build().eval(), 3)) == 3


