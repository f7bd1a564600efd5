"""The step is exact: accumulation, ragged lengths and micro-batches change nothing but rounding."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradus import recipe as recipes
from gradus import tasks
from gradus.parallel.world import World
from gradus.recipe.schema import Layout
from gradus.train import machine
from gradus.train.evaluation import Evaluation
from gradus.train.loop import Trainer
from gradus.train.run import emulated
from gradus.train.session import _open_device, open_session

TINY = {
    "copy-task": ["model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "schedule.warmup_steps=2"],
}


@pytest.fixture
def text(tmp_path):
    """A corpus with lines of unequal length, and labelled rows."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "seven", "black", "crows", "who", "did", "not", "mind"]
    lines = [" ".join(words[i % 7 : i % 7 + 1 + i % 9]) for i in range(120)]
    (tmp_path / "train.txt").write_text("\n\n".join(lines))
    (tmp_path / "valid.txt").write_text("\n\n".join(lines[:20]))
    rows = "\n".join(f"{line}\t{i % 2}" for i, line in enumerate(lines))
    (tmp_path / "labelled").mkdir()
    (tmp_path / "labelled" / "train.tsv").write_text("sentence\tlabel\n" + rows + "\n")
    (tmp_path / "labelled" / "dev.tsv").write_text("sentence\tlabel\n" + rows + "\n")
    return tmp_path


def small(name: str, text, tmp_path) -> list[str]:
    """Overrides that make a packaged recipe tiny, without dropout, on the test's own text."""
    cache = f"data.cache={tmp_path / 'cache'}"
    size = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.dropout=0.0", "layout.precision=fp32"]
    return {
        "copy-task": [*TINY["copy-task"], "model.dropout=0.0"],
        "shakespeare-char-gpt": [*size, f"data.path={text}", "model.seq_len=16", cache, "data.limit_valid=4"],
        "wikitext2-bert": [*size, "model.d_ff=32", f"data.path={text}", "data.pack=documents", "tokenizer.vocab_size=300", "model.seq_len=32", "evaluate.test=false", cache],
        "wikitext2-t5": [*size, "model.d_head=8", "model.d_ff=32", f"data.path={text}", "data.pack=documents", "tokenizer.vocab_size=400", "model.seq_len=32", "evaluate.test=false", cache],
        "sst2-bert": ["model.init=null", "model.preset=null", "model.family=bert", *size, "model.d_ff=32", "model.seq_len=32", "data.max_len=32",
                      "tokenizer.kind=bpe", "tokenizer.vocab_size=300", f"data.path={text / 'labelled'}", "data.text=sentence", cache],
    }[name]  # fmt: skip


def trainer(name: str, text, tmp_path, *more: str) -> Trainer:
    extra = ["batch.tokens=null"] if name == "multi30k-seq2seq" else []
    recipe = recipes.load(
        name,
        [
            *small(name, text, tmp_path),
            *extra,
            "batch.samples=12",
            "layout.device=cpu",
            "train.steps=8",
            "schedule.name=constant",
            "schedule.warmup_steps=0",
            *more,
        ],
    )
    session = open_session(recipe)
    return Trainer(session, session.build(), tmp_path / "run")


NAMES = ["copy-task", "shakespeare-char-gpt", "wikitext2-bert", "wikitext2-t5", "sst2-bert"]


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


@pytest.mark.parametrize(
    ("epochs", "n", "batch", "steps"), [(0.5, 60, 12, 3), (1.1, 120, 12, 11), (0.01, 60, 12, 1), (2.0, 61, 12, 12), (1e-9, 60, 12, 1)]
)
def test_part_of_an_epoch_is_the_same_number_of_steps_wherever_it_is_said(epochs, n, batch, steps):
    from gradus.train.session import derive

    noam = ["train.steps=null", f"train.epochs={epochs}", f"data.n_train={n}", f"batch.samples={batch}", "schedule.name=noam", "layout.device=cpu"]
    session = open_session(recipes.load("copy-task", [*TINY["copy-task"], *noam]))
    t = Trainer(session, session.build(), Path("nowhere"))
    assert derive(session)["steps"] == t.last_step == steps


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


@pytest.mark.parametrize(
    ("name", "more", "metric"),
    [
        ("wikitext2-bert", ["evaluate.best=valid/next_sentence_accuracy"], "next_sentence_accuracy"),
        ("shakespeare-char-gpt", ["evaluate.best=valid/bits_per_byte"], "bits_per_byte"),  # data.limit_valid: nobody counted the bytes
    ],
)
def test_a_best_metric_that_will_not_be_there_is_told_before_step_0(name, more, metric, text, tmp_path):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=f"evaluate.best=valid/{metric}: no such metric here"):
        trainer(name, text, tmp_path, *more)


@pytest.mark.parametrize("kind", ["char", "byte", "word"])
def test_a_perplexity_of_words_is_of_models_that_are_told_by_words(kind, text, tmp_path):
    """By hand: bits are nats / ln 2; a word is what stands between spaces."""
    more = ["data.limit_valid=null", f"tokenizer={{kind: {kind}}}", f"log.dir={tmp_path / 'run'}"]
    t = trainer("shakespeare-char-gpt", text, tmp_path, *more)
    found = Evaluation().evaluate(t)
    assert {name.removeprefix("valid/") for name in found} == set(t.task.units)
    assert ("valid/bits_per_character" in found) == (kind == "char") and ("valid/word_perplexity" in found) == (kind == "word")
    size, loss = t.task.sizes["valid"], found["valid/loss"]
    assert found["valid/perplexity"] == pytest.approx(math.exp(loss)) and found["valid/bits_per_byte"] > 0
    if kind == "char":
        assert found["valid/bits_per_character"] == pytest.approx(loss / math.log(2))
        t.task.tokenizer.save(tmp_path / "stored")  # as a checkpoint holds it
        assert tasks.open_task(t.recipe, tasks.load_tokenizers(tmp_path / "stored")).units == t.task.units
    if kind == "word":
        assert found["valid/word_perplexity"] == pytest.approx(math.exp(loss * size["targets"] / size["words"]))


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


def test_a_span_has_at_least_one_token(text, tmp_path):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=r"task\.mean_span: expected a number ≥ 1, got 0\.5"):
        trainer("wikitext2-t5", text, tmp_path, "task.mean_span=0.5")


@pytest.fixture
def pairs(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.de").write_text("eins zwei drei vier\nzwei\n" * 8)
        (tmp_path / f"{split}.en").write_text("one two three four\ntwo\n" * 8)
    more = [
        "layout.device=cpu",
        "layout.precision=fp32",
        "evaluate.test=false",
        "data.test=null",
        "optimizer.lr=1",
        f"data.cache={tmp_path / 'cache'}",
    ]
    size = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.seq_len=16", "tokenizer.kind=word", "batch.tokens=64"]
    return [f"data.path={tmp_path}", *size, *more]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.share_embeddings=false", "model.target_vocab_size=3"], "model.target_vocab_size=3: the data has 13 tokens"),
        (["evaluate.best=valid/bleu", "evaluate.decode=false"], "evaluate.best=valid/bleu: no such metric here"),
        (
            ["tokenizer.kind=file", "tokenizer.path=.", "tokenizer.shared=false", "model.share_embeddings=false"],
            "tokenizer.shared=false has no effect",
        ),
    ],
)
def test_mistakes_in_translation_are_told_before_step_0(more, said, pairs):
    from gradus.errors import UserError

    with pytest.raises(UserError, match=said):
        open_session(recipes.load("multi30k-seq2seq", [*pairs, *more]))


def test_t5_translates_rows_longer_than_its_training_length(pairs):
    size = ["model.family=t5", "model.d_head=8", "model.seq_len=2"]
    assert open_session(recipes.load("multi30k-seq2seq", [*pairs, *size])).task.splits["train"].lengths.max() == 2  # one of each, and their ends
    assert open_session(recipes.load("multi30k-seq2seq", [*pairs, *size, "data.max_len=16"])).task.splits["train"].lengths.max() == 8


def test_a_processor_without_bf16_is_told(monkeypatch):
    def note(device: str = "cpu", **layout) -> str | None:
        return emulated(recipes.load("copy-task", **{f"layout.{k}": v for k, v in layout.items()}).layout, torch.device(device))

    for flags, told in ((["avx2", "avx512f"], True), (["avx512_bf16"], False), ([], False)):
        monkeypatch.setattr(machine, "cpu_flags", lambda flags=flags: flags)
        assert bool(note(precision="bf16")) == bool(note(precision="pure_bf16")) == told
    monkeypatch.setattr(machine, "cpu_flags", lambda: ["avx2"])
    assert note(precision="bf16").endswith("layout.precision=fp32 is faster here.")
    assert note(shard=2, param_dtype="bf16").endswith("layout.param_dtype=null is faster here.")
    assert note() is None and note("cuda", precision="bf16") is None


@pytest.mark.parametrize(("threads", "local", "told"), [(4, 1, "layout.threads=4: "), (2, 2, "layout.threads=2 in each of 2 processes: "), (1, 2, None), (2, 1, None)])
def test_more_threads_than_processors_are_told(monkeypatch, capsys, threads, local, told):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    _open_device(Layout(device="cpu", threads=threads), World(size=local, local_size=local))
    err = capsys.readouterr().err
    assert err.startswith(f"note: {told}more than the 2 processors here") and err.endswith(f"Use {2 // local}.\n") if told else not err
