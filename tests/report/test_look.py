"""`gradus look`: what the page shows is what the model does; every family, every input that it cannot take."""

from __future__ import annotations

import base64
import copy
import io
import json
import math
import re
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from report_parts import Tags

from gradus.cli import main
from gradus.data.tokenizers import WordTokenizer
from gradus.infer import find
from gradus.layers import relative_buckets, rotary_frequencies, sinusoidal
from gradus.report.look import Side, label, look_at_ids, look_at_image, look_at_text, nearest
from gradus.report.look_page import Layer, evenly, gaze, habit
from gradus.tasks import open_task

sys.path.insert(0, str(Path(__file__).parents[1] / "infer"))
from small_models import saved

TEXT = "a cat sat on a mat"
WORDS = WordTokenizer(["a", "cat", "sat", "on", "mat", "<b>", *(f"w{i}" for i in range(20))])
KINDS = {
    "bert": {"Encoder: self-attention"}, "gpt": {"Decoder: self-attention"}, "llama": {"Decoder: self-attention"},
    "seq2seq": {"Encoder: self-attention", "Decoder: self-attention", "Cross attention: decoder to encoder"},
    "t5": {"Encoder: self-attention", "Decoder: self-attention", "Cross attention: decoder to encoder"},
}  # fmt: skip


def around(family: str) -> WordTokenizer:
    """With what the family's task puts around a text."""
    words = copy.deepcopy(WORDS)
    if family not in ("gpt", "llama"):
        words.around(words.bos_id if family == "bert" else None, words.eos_id)
    return words


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → folder, with a tokenizer or the statistics of images beside the weights."""
    folder = tmp_path_factory.mktemp("look")
    from PIL import Image

    for name in KINDS:
        saved(name, folder / name)
        around(name).save(folder / name)
    saved("gpt", folder / "bare")
    saved("bert", folder / "large", n_layers=9, n_heads=16, d_model=32, seq_len=128)
    around("bert").save(folder / "large")
    for name, pool in (("vit", "class_token"), ("mean", "mean")):
        saved("vit", folder / name, pool=pool, patch_size=2)
        (folder / name / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3}))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(folder / "a.png")
    (folder / "junk.png").write_text("junk")
    return folder


def page_of(folder: Path, name: str, text: str) -> str:
    to = folder / f"{name}.html"
    assert main(["look", str(folder / name), text, "--to", str(to)]) == 0
    page = to.read_text(encoding="utf-8")
    tags = Tags(page)
    assert not tags.open and all(load.startswith("data:image/png;base64,") for load in tags.loads)
    return page


def images_of(page: str) -> list[np.ndarray]:
    from PIL import Image

    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in re.findall(r"base64,([^\"]+)", page)]


@pytest.mark.parametrize("name", KINDS)
def test_attention_of_every_family(name, made):
    """Each row sums to 1; a decoder looks at nothing later; the page draws these weights."""
    seen = look_at_text(find(str(made / name)), TEXT, None)
    assert {layer.kind for layer in seen.layers} == KINDS[name] and {layer.number for layer in seen.layers} == {1, 2}
    for layer in seen.layers:
        queries, keys = (len(seen.texts[i]) for i in layer.texts)
        assert layer.weights.shape == (4, queries, keys)
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(4, queries))
        assert layer.causal == layer.kind.startswith("Decoder") and (not layer.causal or layer.weights.triu(1).abs().max() == 0)
    drawn = [image[..., 3] for image in images_of(page_of(made, name, TEXT))]
    alphas = [np.rint(255 * layer.weights[head].numpy()) for layer in seen.layers for head in range(4)]
    for alpha in alphas:
        assert sum(image.shape == alpha.shape and np.abs(image - alpha).max() <= 1 for image in drawn) >= 2  # small and large


def test_positions_of_every_kind(made):
    seen = {name: look_at_text(find(str(made / name)), TEXT, None) for name in KINDS}
    for name in ("bert", "gpt"):
        (table,) = seen[name].tables.values()
        assert torch.equal(table, find(str(made / name)).load().position_embedding.weight)
    (table,) = seen["seq2seq"].tables.values()  # of encoder and decoder, once
    torch.testing.assert_close(table, sinusoidal(32, 16))
    cos, _ = seen["llama"].rotary
    torch.testing.assert_close(cos[:, :3], (torch.arange(len(cos))[:, None] * rotary_frequencies(6, 10_000.0)).cos())
    model, n = find(str(made / "t5")).load(), len(seen["t5"].texts[0])
    places = torch.arange(n)
    bias = model.encoder.relative_bias.table.weight[relative_buckets(places, places, True)].permute(2, 0, 1)
    torch.testing.assert_close(seen["t5"].biases["Encoder: self-attention"], bias)
    assert not seen["t5"].tables and not seen["gpt"].rotary and set(seen["t5"].biases) == {"Encoder: self-attention", "Decoder: self-attention"}


@pytest.mark.parametrize(("name", "said"), [("vit", "the class token"), ("mean", "the mean of all patches")])
def test_an_image(name, said, made):
    page, source = page_of(made, name, str(made / "a.png")), find(str(made / name))
    seen = look_at_image(source, str(made / "a.png"), None)
    assert f"blue where {said} looks" in page and "4 × 4 patches" in page and "Positions of patches" in page
    (table,) = seen.tables.values()
    assert torch.equal(table, source.load().positions[0])
    from PIL import Image

    assert np.array_equal(images_of(page)[0][..., :3], np.asarray(Image.open(made / "a.png")))
    assert seen.says.count("class ") == 3


@pytest.mark.parametrize(
    ("weights", "causal", "said"),
    [
        (torch.eye(5).roll(1, 1), False, "Looks mostly one token on (100%)"),
        (torch.eye(5).roll(1, 0), False, "Looks mostly one token back (100%)"),
        (torch.eye(5), True, "Looks mostly at the token itself (100%)"),
        (torch.tensor([[1.0, 0, 0, 0, 0]] * 5), False, "Looks mostly at ‘a’ (100%)"),
    ],
)
def test_what_is_said_of_a_head(weights, causal, said):
    text = habit(weights, list("abcde"), list("abcde"), Layer("", 1, weights[None], causal))
    assert said in text and "entropy 0.0 of" in text


def test_what_is_said_of_a_spread_head():
    even = torch.full((4, 4), 0.25)
    text = habit(even, list("abcd"), list("abcd"), Layer("", 1, even[None], False))
    assert "Spread out" in text and "entropy 2.0 of at most 2.0 bits" in text and "mean distance 1.2 tokens" in text
    causal = torch.tril(torch.ones(4, 4)) / torch.arange(1, 5)[:, None]
    text = habit(causal, list("abcd"), list("abcd"), Layer("", 1, causal[None], True))
    mean = (1 + math.log2(3) + 2) / 3
    assert f"entropy {mean:.1f} of at most {mean:.1f} bits" in text
    weights = torch.zeros(5, 5)
    weights[0] = torch.tensor([0.25, 0, 0, 0.75, 0])
    assert gaze(weights).startswith("Most at row 2, column 1 (75%); 25% at the class token itself")


def test_nearest_words():
    table = torch.tensor([[1.0, 0], [2, 0.1], [0, 1], [-1, -0.1], [5, 5.5]])
    rows = nearest(table, [0, 2], str)
    assert [[cell.split()[0] for cell in row] for row in rows] == [["0", "1", "4", "2", "3"], ["2", "4", "1", "0", "3"]]
    assert rows[0][2] == "4 (0.67)"


def test_a_token_that_a_padded_vocabulary_has_and_the_tokenizer_has_not(made):
    side = Side([1, 37, 2, 39], partial(label, WORDS), WORDS.vocab_size)
    seen = look_at_ids(find(str(made / "gpt")), side, None)
    ((_, rows),) = seen.nearest.items()
    assert len(seen.texts[0]) == 4 and [row[0] for row in rows] == [label(WORDS, 1), label(WORDS, 2)]


def test_a_large_model_and_a_long_text_are_cut_and_it_is_said(made, capsys):
    page = page_of(made, "large", "cat " * 60)
    assert "A sample: 6 of 9 layers and 8 of 16 heads" in page and "Layer 9 of 9, 8 heads" in page and page.count("<details>") == 7
    assert f"Only the first 48 of the text&#x27;s {60 + 2} tokens are read" in page and "Only the first 48 of" in capsys.readouterr().err
    assert evenly(9, 6)[0] == 0 and evenly(9, 6)[-1] == 8 and evenly(3, 6) == [0, 1, 2]


@pytest.mark.parametrize(("name", "read", "of"), [("gpt", 32, 60), ("seq2seq", 32, 61), ("t5", 48, 61)])
def test_a_text_longer_than_the_context_is_cut_to_it(name, read, of, made, capsys):
    page = page_of(made, name, "cat " * 60)
    assert f"the first {read} of the text's {of} tokens are read" in capsys.readouterr().err
    assert f"It reads, {read} tokens" in page


def test_any_text_is_text_and_pictures_have_names(made):
    page = page_of(made, "gpt", 'a <b> cat "sat" <script>')
    assert "<script" not in page and "<b>" not in page and "&lt;b&gt;" in page
    assert len(re.findall(r'<svg [^>]*aria-label="[^"]+"', page)) == page.count("<svg ") == page.count('<p class="caption">') > 10
    assert "<title>" in page and "prefers-color-scheme: dark" in page
    assert page.count("query ↓</text>") == page.count("key →</text>") == 8 and "position ↓</text>" in page and "dimension →</text>" in page
    captions = re.findall('<p class="caption">([^<]+)</p>', page)
    assert captions and not any(f">{caption}</text>" in page for caption in captions)  # once


def test_the_copy_task(folders, made, capsys):
    assert main(["look", str(folders / "short"), "3 1 4 1 5 9 2 6 5 3", "--to", str(made / "copy.html")]) == 0
    page = (made / "copy.html").read_text()
    assert "Cross attention" in page and "It reads, 10 tokens: <code>3</code>" in page and ("(right)" in page or "(wrong)" in page)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bare", TEXT], "--tokenizer PATH"),
        (["vit", TEXT], "reads images"),
        (["vit", "nowhere.png"], "no such image file"),
        (["vit", "junk.png"], "not a readable image"),
        (["bert", "a.png"], "an image, and"),
        (["bert", " "], "nothing to look at"),
        (["gpt"], "nothing to look at"),
        (["gpt", "a", "cat"], "takes one input"),
        (["gpt", "--sample", "1"], "no run that reads images"),
        (["gpt", TEXT, "--to", "no/such/place.html"], "nothing was written"),
        (["gpt", TEXT, "--to", "."], "not a file"),
        (["nowhere", TEXT], "nowhere: no such"),
    ],
)
def test_what_it_cannot_take_is_one_line(words, said, made, capsys, monkeypatch):
    monkeypatch.chdir(made)
    assert main(["look", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and said in err[0]


def test_a_sample_is_an_image_of_the_runs_validation_split(tmp_path, capsys):
    run, small = tmp_path / "run", ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32"]
    assert main(["train", "digits-vit", *small, "train.steps=1", f"log.dir={run}"]) == 0
    for i in (0, 3):
        assert main(["look", str(run), "--sample", str(i), "--to", str(tmp_path / "a.html")]) == 0
        page = (tmp_path / "a.html").read_text(encoding="utf-8")
        image = np.asarray(open_task(find(str(run)).recipe).splits["valid"][i]["image"])  # (channels, 8, 8)
        assert f"image {i} of the validation split" in page and (images_of(page)[0][..., :3] == image[0][..., None]).all()
    capsys.readouterr()
    for words, said in ((["--sample", "100000"], "the first is 0"), (["a.png", "--sample", "1"], "takes an input or --sample")):
        assert main(["look", str(run), *words]) == 2
        assert said in capsys.readouterr().err
