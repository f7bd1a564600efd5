"""Gradus in Python: wrong arguments are one line, runs are interrupted and go on, and Hugging Face's names mean what they do there."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import sys
import threading

import numpy as np
import pytest
import torch

from gradus import api, models
from gradus import recipe as recipes
from gradus.data import tokenizers
from gradus.errors import UserError
from gradus.recipe.schema import BertConfig, GPTConfig, T5Config, ViTConfig
from gradus.rows import read_rows
from gradus.train.hooks import Hook
from gradus.train.run import train

TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32}
COPY = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "layout.device=cpu",
        "schedule.warmup_steps=2", "batch.samples=16", "evaluate.samples=0", "log.every=2"]  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_interrupted_comes_back_and_goes_on(tmp_path):
    """The interrupt comes from outside while the steps run, as from a notebook; afterwards the run is that of one never stopped."""
    whole = api.train("copy-task", *COPY, train={"steps": 100}, log={"dir": tmp_path / "whole"})
    cut, watching = tmp_path / "cut", threading.Event()

    def interrupt():
        while not watching.wait(0.002):
            if (cut / "metrics.jsonl").is_file() and (cut / "metrics.jsonl").stat().st_size:
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = api.train("copy-task", *COPY, train={"steps": 100}, log={"dir": cut})
    watching.set()
    thread.join()
    assert not run.finished and run.summary == {} and "stopped" in repr(run)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run = api.train(run, resume=True)
    assert run.finished and run.summary["train_loss"] == pytest.approx(whole.summary["train_loss"], rel=1e-6)


def test_in_bf16_every_step_has_the_steps_weights(tmp_path):
    """PyTorch keeps cast weights as long as any autocast is entered, a caller's too: training must not see old ones."""
    words = [*COPY, "train.steps=6", "train.clip_norm=null", "layout.precision=bf16", "log.every=1", "layout.threads=1"]
    train(recipes.load("copy-task", [*words, f"log.dir={tmp_path / 'alone'}"]))
    with torch.autocast("cpu", torch.bfloat16):
        api.train("copy-task", *words, log={"dir": tmp_path / "within"})
    losses = [[r["value"] for r in read_rows(tmp_path / name / "metrics.jsonl") if r["name"] == "train/loss"] for name in ("alone", "within")]
    assert len(losses[0]) == 6 and losses[1] == losses[0]


class Raises(Hook):
    def __init__(self, error: BaseException):
        self.error, self.refused = error, None

    def after_step(self, trainer, taken):
        if taken.step == 1:
            with pytest.raises(UserError) as self.refused:
                api.train("copy-task", *COPY)
        if taken.step == 2:
            raise self.error


FEW = {"train": {"steps": 4}, "evaluate": {"every": 2}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, no_plan) -> api.Run:
    return api.train("copy-task", *COPY, log={"dir": tmp_path_factory.mktemp("whole") / "run"}, **FEW)


@pytest.mark.parametrize("error", [KeyboardInterrupt("mine"), OSError(errno.ENOSPC, "mine", "file")])
def test_a_hooks_exception_passes_through_and_the_callers_modes_do_not(error, whole, tmp_path, monkeypatch):
    """One stream and several modes of PyTorch in which a training ended before, or came to other numbers; and one that is begun within another."""
    stream, hook = io.TextIOWrapper(io.BytesIO(), "ascii"), Raises(error)
    monkeypatch.setattr(sys, "stdout", stream)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(type(error)) as caught, torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            api.train("copy-task", *COPY, log={"dir": tmp_path / "cut"}, hooks=[hook], **FEW)
        assert torch.get_default_dtype() == torch.float64, "afterwards they are the caller's again"
    finally:
        torch.set_default_dtype(dtype)
    assert caught.value is error and error.__cause__ is None and error.__context__ is None
    assert "this process trains another run" in str(hook.refused.value)
    stream.flush()
    assert stream.errors == "strict" and b"micro-batch 16 x accumulation 1" in stream.buffer.getvalue()
    run = api.Run(tmp_path / "cut")
    assert not run.finished and [p.name for p in (tmp_path / "cut/checkpoints").glob("step-*")] == ["step-00000002"]
    run = api.train(run, resume=True)
    for key in ("train_loss", "metrics", "best"):
        assert run.summary[key] == whole.summary[key], "nothing is lost, to the bit"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: api.train("copy-tusk"), "copy-tusk: no such recipe. Did you mean copy-task?"),
        (lambda: api.train("copy-task", "optimizer.lrr=1"), "optimizer.lrr: unknown key. Did you mean optimizer.lr?"),
        (lambda: api.train("copy-task", optimizer={"learning_rate": 1}), "optimizer.learning_rate: unknown key. It is optimizer.lr."),
        (lambda: api.train("copy-task", hooks=[print]), "hooks: <built-in function print> is not a hook. Give an object"),
        (lambda: api.plan("gpt2-smal"), "Did you mean gpt2-small?"),
        (lambda: api.load("./nowhere"), "nowhere: no such file or folder"),
        (lambda: api.Run("."), "not a run folder"),
        (lambda: api.predict(3, "x"), "expected a model, got int"),
        (lambda: api.generate("./nowhere", temperature=-1), "temperature=-1"),
        (lambda: api.evaluate("copy-task"), "a recipe has no weights"),
    ],
)
def test_mistakes_are_the_command_lines_errors(call, said):
    with pytest.raises(UserError, match=re.escape(said)):
        call()


WRONG = """
train(5) train(None) train('copy-task', 5) train('copy-task', None) train('copy-task', hooks=5) train('copy-task', hooks=[1]) train('copy-task', resume='x')
train('copy-task', force=1) train('copy-task', train=5) train('copy-task', train={5: 1})
plan(5) plan('copy-task', on=5) plan('copy-task', on='H100', tokens='x') plan('copy-task', on='H100', tokens=-1) plan('copy-task', on='H100', days='x') plan('copy-task', 5)
plan('copy-task', on='H100').value(5) Run(5) Run(None) Run('/none')
load(5) load(None) load(bert, 'int8') load(bert, 5) load(load(bert), 'int8')
load(bert)(input_ids='x') load(bert)(5) load(bert)(ids=torch.zeros(1, 3)) load(bert)(input_ids=torch.full((1, 3), 10**6)) load(gpt)(torch.full((1, 3), -1))
load(bert)(None) load(bert)(input_ids=torch.zeros(1, 3, dtype=torch.long), attention_mask=[[1, 1, 1]]) load(bert)(input_ids=torch.zeros(1, 500, dtype=torch.long))
predict(5, 'a') predict(bert, 5) predict(bert, None) predict(bert, [5]) predict(bert, ['a', ['b']]) predict(bert, b'a') predict(bert, [b'a']) predict(bert, {'a': 'b'})
predict(bert, torch.zeros(2)) predict(bert, picture) predict(bert, 'a', top='x') predict(bert, 'a', top=0) predict(bert, 'a', top=1.5) predict(bert, 'a', top=None) predict(bert, 'a', top=True)
predict(gpt, 'a')
generate(gpt, 5) generate(gpt, None) generate(gpt, [5]) generate(gpt, b'a') generate(gpt, {'a': 1}) generate(gpt, 'a', max_new='x') generate(gpt, 'a', max_new=0) generate(gpt, 'a', max_new=1.5)
generate(gpt, 'a', temperature='x') generate(gpt, 'a', temperature=float('nan')) generate(gpt, 'a', temperature=1, top_k='x') generate(gpt, 'a', temperature=1, top_k=0)
generate(gpt, 'a', temperature=1, top_p='x') generate(gpt, 'a', temperature=1, top_p=2) generate(gpt, 'a', temperature=1, seed='x') generate(gpt, 'a', temperature=1, seed=-1)
generate(gpt, 'a', temperature=1, seed=2**70) generate(gpt, 'a', sliding_window='yes') generate(bert, 'a')
train('x' * 5000) train(chr(0)) train(chr(0xD800)) train('copy-task', log={'dir': chr(0xD800)}) plan('x' * 5000) plan(chr(0)) load('x' * 5000) load(chr(0xD800)) Run('x' * 5000)
Run(chr(0)) evaluate('x' * 5000) evaluate(chr(0xD800)) predict('x' * 5000, 'a') predict(bert, chr(0xD800)) generate('x' * 5000) generate(chr(0)) generate(gpt, chr(0xD800))
load(gpt).hidden(torch.full((1, 3), 10**6)) load(gpt).hidden(torch.full((1, 3), -1)) load(bert).hidden(torch.rand(1, 3)) load(bert).hidden(torch.zeros(1, 0, dtype=torch.long))
load(gpt).hidden(None) load(gpt).hidden(5) load(bert).hidden(torch.zeros(3, dtype=torch.long)) load(vit).features(5) load(vit).features(torch.zeros(3, 8, 8))
load(vit).features(torch.zeros(1, 3, 8, 8, dtype=torch.long)) load(vit).features(torch.zeros(1, 1, 8, 8)) load(t5).encode(None)
load(bert)(torch.zeros(1, 3, dtype=torch.long), token_types=torch.full((1, 3), 7)) load(gpt)(torch.zeros(3, dtype=torch.long))
evaluate(5) evaluate(bert, 5) evaluate(bert, split=5) evaluate(bert, split='zz') evaluate(bert, checkpoint=5) evaluate(bert, checkpoint='/none')
"""


def test_wrong_types_are_user_errors(tmp_path):
    bert = saved(tmp_path / "bert", BertConfig(**TINY, vocab_size=260, seq_len=32, head="classification", n_classes=3))
    gpt = saved(tmp_path / "gpt", GPTConfig(**TINY, vocab_size=260, seq_len=32))
    for folder in (bert, gpt):
        tokenizers.ByteTokenizer().save(folder)
    vit = saved(tmp_path / "vit", ViTConfig(**TINY, image_size=8, patch_size=4, n_classes=2))
    t5 = saved(tmp_path / "t5", T5Config(**TINY, vocab_size=260))
    picture = pytest.importorskip("PIL.Image").new("RGB", (8, 8))
    names = {**{name: getattr(api, name) for name in api.__all__}, "torch": torch, "bert": bert, "gpt": gpt, "vit": vit, "t5": t5, "picture": picture}
    calls = re.split(rf"\s(?=(?:{'|'.join(api.__all__)})\()", WRONG.strip())
    assert len(calls) > 70
    for call in calls:
        with pytest.raises(UserError) as told:
            eval(call, names)
        assert len(str(told.value).splitlines()) == 1, call
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert api.load(gpt).hidden(ids=ids).equal(api.load(gpt).hidden(ids)) and api.load(vit).features(images=torch.zeros(1, 3, 8, 8)).shape[0] == 1
    assert api.generate(gpt, []) == [] == api.predict(bert, [])
    assert len(api.generate(gpt, "a", max_new=np.int64(3), temperature=np.float32(1), seed=np.int64(2))) >= 1, "numbers of numpy are numbers"


def saved(folder, config):
    torch.manual_seed(3)
    model = models.build(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.3)
    models.save(model, folder)
    return folder


IDS = torch.tensor([[5, 6, 7, 8, 9, 4], [9, 8, 7, 0, 0, 0], [3, 1, 4, 1, 0, 0]])
MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] * 4 + [0] * 2])


@pytest.mark.parametrize("left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize(
    ("config", "kind"),
    [(BertConfig(**TINY, vocab_size=20, seq_len=12, head="classification", n_classes=3), "BertForSequenceClassification"),
     (GPTConfig(**TINY, vocab_size=20, seq_len=12), "GPT2LMHeadModel")],
)  # fmt: skip
def test_attention_mask_means_what_it_does_in_transformers(config, kind, left, tmp_path):
    """The same folder in both libraries, the same arguments: the same scores at every token, within fp32's rounding of the sums."""
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, kind).from_pretrained(saved(tmp_path / "m", config)).eval()
    ids, mask = (IDS.flip(1), MASK.flip(1)) if left else (IDS, MASK)
    with torch.no_grad():
        expected = theirs(input_ids=ids, attention_mask=mask).logits
        ours = api.load(tmp_path / "m")
        found = ours(input_ids=ids, attention_mask=mask)
        unmasked = ours(ids)
    real = mask.bool() if found.dim() == 3 else torch.ones(3, dtype=torch.bool)
    assert torch.allclose(found[real], expected[real], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[real], unmasked[real], atol=1e-3) or (found.dim() == 3 and not left), "the mask changes something"
    assert torch.equal(ours(ids, keep=mask.bool()), found), "as by its own name"


def test_a_loaded_model_predicts_in_the_middle_of_a_loop(tmp_path):
    folder = saved(tmp_path / "m", BertConfig(**TINY, vocab_size=260, seq_len=32, head="classification", n_classes=3))
    tokenizers.ByteTokenizer().save(folder)
    model = api.load(folder)
    assert isinstance(model.tokenizer, tokenizers.ByteTokenizer) and not any(name.startswith("place") for name in model.state_dict())
    model.train()
    found = api.predict(model, ["a", "b"], top=2)
    assert model.training
    model.eval()
    assert found == api.predict(model, ["a", "b"], top=2) and not model.training, "as it was before"
    assert found == api.predict(folder, ["a", "b"], top=2) and len(found[0]["top"]) == 2
    assert api.predict(model, []) == []
    with torch.no_grad():
        model.classifier.bias += torch.tensor([9.0, 0.0, 0.0])
    assert api.predict(model, "a")[0]["label"].endswith("0") and api.predict(model, "a")[0]["probability"] > 0.9, "the weights as they are now, not as they were stored"


def test_images_are_files_or_pictures(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    folder = saved(tmp_path / "m", ViTConfig(**TINY, image_size=8, patch_size=4, n_classes=3))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8))
    picture.save(tmp_path / "a.png")
    by_file, by_picture = api.predict(folder, [tmp_path / "a.png", picture])
    assert by_file["input"] == tmp_path / "a.png" and by_picture["input"] is picture
    for record in (by_picture, *api.predict(folder, picture)):
        assert record["label"] == by_file["label"] and record["probability"] == pytest.approx(by_file["probability"], rel=1e-5)
    assert api.load(folder).tokenizer is None


def test_an_encoder_decoder_takes_transformers_names_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = T5Config(**TINY, d_head=8, vocab_size=20, seq_len=12)
    theirs = transformers.T5ForConditionalGeneration.from_pretrained(saved(tmp_path / "m", config)).eval()
    arguments = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :4]}
    with torch.no_grad():
        found, expected = api.load(tmp_path / "m")(**arguments), theirs(**arguments).logits
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
