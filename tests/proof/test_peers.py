"""What the benchmarks set beside Gradus computes the same: as many parameters, and the same losses after steps of both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from gradus import models
from gradus import recipe as recipes
from gradus.errors import UserError
from gradus.parallel.world import World
from gradus.proof.runners import train_steps
from gradus.proof.study_file import load
from gradus.proof.timing import Window, peak_of_one_more, time_it

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(FOLDER)]
peers = pytest.importorskip("peers")
transformers = pytest.importorskip("transformers")

PLAIN = ["optimizer.name=adamw", "optimizer.weight_decay=0", "schedule.name=constant", "schedule.warmup_steps=0", "model.dropout=0",
         "layout.device=cpu", "evaluate.test=false", "model.n_layers=2"]  # fmt: skip
TEXT = "data.path=TEXT tokenizer.kind=byte model.d_model=32 model.n_heads=2 model.seq_len=32 batch.samples=4"
FAMILIES = {
    "gpt": f"stdlib-gpt {TEXT} data.source=path model.activation=gelu model.bias=true",
    "llama": f"stories-llama {TEXT} model.n_kv_heads=1",
    "bert": f"wikitext2-bert {TEXT} model.d_ff=64 layout.precision=fp32",
    "t5": "copy-task model={family: t5, n_layers: 2, d_model: 32, n_heads: 2, d_head: 16, d_ff: 64} batch.samples=4",
    "vit": "digits-vit data.mixup=0 model.pool=class_token batch.samples=4",
    "seq2seq": "copy-task model.norm_first=false model.share_embeddings=true model.tie_output=true model.output_bias=false batch.samples=4",
}
WINDOW = Window(steps=2, warm_up=1, root=os.getpid())


def recipe_of(family: str, folder: Path):
    (folder / "text.txt").write_text("".join(f"Line {i} of a text of {i * i} words.\n\n" for i in range(400)))
    words = [w.replace("TEXT", str(folder / "text.txt")) for w in FAMILIES[family].replace(": ", ":").replace(", ", ",").split()]
    return recipes.load(words[0], [*(w.replace(":", ": ") if w.startswith("model={") else w for w in words[1:]), *PLAIN])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peers_step_is_ours(family, tmp_path):
    recipe = recipe_of(family, tmp_path)
    ours = train_steps(recipe, {}, WINDOW, World())
    subject = peers.transformers_step(recipe, {})
    timed = time_it(subject, WINDOW)
    assert timed.losses == pytest.approx(ours.losses, rel=2e-5) and timed.samples == ours.samples
    assert peak_of_one_more(subject)["allocated"] > 0


def test_nanogpt_and_the_trainer_compute_the_same(tmp_path):
    recipe = recipe_of("gpt", tmp_path)
    ours = train_steps(recipe, {}, WINDOW, World())
    for runner in (peers.nanogpt_step, peers.trainer_step):
        assert time_it(runner(recipe, {}), WINDOW).losses == pytest.approx(ours.losses, rel=2e-5)


def test_peers_have_as_many_parameters(tmp_path):
    config = peers.open_session(recipe_of("gpt", tmp_path)).recipe.model
    made = models.build(config)
    for kind in (peers.Transformers, peers.NanoGPT):
        assert sum(p.numel() for p in kind(made).parameters()) == models.count(config)["total"]


def test_the_matrix_products_of_a_step(tmp_path):
    subject = peers.matrix_products(recipe_of("vit", tmp_path), {})
    assert time_it(subject, WINDOW).samples == 8 and subject.facts["flops"] > 1e6


@pytest.mark.parametrize("backward", [False, True])
def test_attention_in_chunks_takes_less_than_written_out(backward):
    def peak(kernel: str) -> int:
        subject = peers.attention_call(None, {"kernel": kernel, "length": 512, "chunk": 32, "heads": 2, "backward": backward})
        time_it(subject, WINDOW)
        return peak_of_one_more(subject)["allocated"]

    scores = 2 * 512 * 512 * 4
    assert peak("naive") > scores > peak("chunked") > 0


def test_what_a_peer_would_leave_out_is_refused(tmp_path):
    recipe = recipe_of("gpt", tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.name=adamw"):
        peers.transformers_step(recipes.load("copy-task", ["model.norm_first=false"]), {})
    with pytest.raises(UserError, match="nanoGPT"):
        peers.nanogpt_step(recipe.model_copy(update={"model": recipe.model.model_copy(update={"activation": "relu"})}), {})
    with pytest.raises(UserError, match="lengt"):
        peers.attention_call(None, {"lengt": 4})


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_study_can_be_read(file):
    study, _ = load(file)
    assert all(study.base_of(c) in study.configurations for c in study.configurations)


def test_what_a_grid_leaves_out_and_compares():
    study, _ = load(FOLDER / "train_step.yaml")
    against = {c.name: study.base_of(c).name for c in study.configurations}
    assert {name.split(" · ")[0] for name in against if "nanogpt" in name} == {"gpt"}
    assert against["t5 · gradus compiled · bf16"] == "t5 · transformers compiled · bf16"
    assert against["t5 · gradus · fp32"] == against["t5 · transformers · fp32"] == "t5 · transformers · fp32"


@pytest.mark.parametrize(("wrong", "said"), [
    ("grid: {a: {x: {against: z}, y: }}", "against=z: no such name"),
    ("grid: {a: {x: {only_with: [z]}, y: }}", "only_with=z: no such name"),
    ("only_with: [x]\nconfigurations: {x: , y: }", "only_with takes effect only at a name of the grid"),
    ("grid: {a: {x: {only_with: [p]}, y: }, b: {p: , q: {against: x}}}", "against=x: no configuration is that"),
])  # fmt: skip
def test_names_that_lead_nowhere(wrong, said, tmp_path):
    (tmp_path / "study.yaml").write_text(f"recipe: copy-task\n{wrong}\n")
    with pytest.raises(UserError, match=said):
        load(tmp_path / "study.yaml")
