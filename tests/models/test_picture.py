"""Every parameter is drawn once, and alike blocks are."""

import re
import time

import pytest

from gradus import models
from gradus.cli import main
from gradus.models import picture
from gradus.models.picture import draw, groups
from gradus.recipe.presets import config_of
from gradus.recipe.schema import Adapter, BertConfig, GPTConfig, LlamaConfig, Seq2SeqConfig, T5Config, ViTConfig

SMALL = {"d_model": 16, "n_heads": 2, "n_layers": 3, "d_ff": 32}
CONFIGS = {
    "gpt": GPTConfig(**SMALL, vocab_size=11), "experts": GPTConfig(**SMALL, vocab_size=11, n_experts=4, top_k=2),
    "llama": LlamaConfig(**SMALL, vocab_size=11), "bert": BertConfig(**SMALL, vocab_size=11, head="masked_lm"),
    "t5": T5Config(**SMALL, vocab_size=11),
    "shared": Seq2SeqConfig(**SMALL, vocab_size=11, share_embeddings=True, tie_output=True, n_decoder_layers=1),
    "vit": ViTConfig(**SMALL, image_size=8, patch_size=2, n_channels=1, n_classes=10),
    "gpt2-small": config_of("gpt2-small"), "llama2-7b": config_of("llama2-7b"), "t5-base": config_of("t5-base"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_add_up_to_the_model(name):
    config = CONFIGS[name]
    stacks, counts = groups(config), models.count(config)
    every = [group for of in stacks for group in of]
    assert sum(group.parameters for group in every) == counts["total"]
    assert all(sum(part.parameters for part in g.parts) * g.times == g.parameters for g in every)
    assert tuple(sum(g.times for g in of if g.numbers) for of in stacks) == models.lookup(config.family).n_blocks(config)
    assert all(sum(bool(g.numbers) for g in of) == 1 for of in stacks)  # the blocks of these are all alike
    drawn = draw(config, name).svg()
    assert f"{name}: {counts['total']:,} parameters" in drawn
    for group in every:
        assert all(f">{part.parameters:,}</text>" in drawn for part in group.parts)


def test_an_adapters_part_is_told():
    trained = 3 * 4 * (4 * (16 + 16) + (16 + 32) + (32 + 16))  # layers · rank · (attention, up, down)
    assert f"({trained:,} trained), family gpt" in draw(CONFIGS["gpt"].trained(Adapter(rank=4)), "adapted").svg()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weights_shape_is_drawn(name):
    config = CONFIGS[name]
    lines = [line for of in groups(config) for g in of for part in g.parts for line in part.weights]
    shapes = re.findall(r"\((\d[\d, ]*)\)", " ".join(lines))
    held = {name: tuple(p.shape) for name, p in models.build(config, "meta").named_parameters()}
    assert {tuple(map(int, shape.split(","))) for shape in shapes} == set(held.values())


def test_the_parts_of_a_block_stand_in_the_order_in_which_they_compute():
    def order(norm_first: bool) -> list[str]:
        decoder = groups(Seq2SeqConfig(**SMALL, vocab_size=11, norm_first=norm_first))[1]
        return [part.name for part in next(group for group in decoder if group.numbers).parts]

    sublayers = "attention", "cross", "feedforward"
    assert order(True) == [name for layer in sublayers for name in (f"{layer}_norm", layer)]
    assert order(False) == [name for layer in sublayers for name in (layer, f"{layer}_norm")]


X, MEMORY = picture.INPUT, picture.MEMORY
PRE = [
    ("attention_norm", {X}), ("attention", {0}), ("+", {X, 1}), ("feedforward_norm", {2}), ("feedforward", {3}), ("+", {2, 4}),
]  # fmt: skip
POST = [
    ("attention", {X}), ("+", {X, 0}), ("attention_norm", {1}), ("feedforward", {2}), ("+", {2, 3}), ("feedforward_norm", {4}),
]  # fmt: skip
CROSS = {
    True: [*PRE[:3], ("cross_norm", {2}), ("cross", {3, MEMORY}), ("+", {2, 4}), ("feedforward_norm", {5}), ("feedforward", {6}), ("+", {5, 7})],
    False: [*POST[:3], ("cross", {2, MEMORY}), ("+", {2, 3}), ("cross_norm", {4}), ("feedforward", {5}), ("+", {5, 6}), ("feedforward_norm", {7})],
}  # fmt: skip


def block_of(config, stack: int = 0) -> picture.Group:
    return next(group for group in groups(config)[stack] if group.numbers)


def steps_of(config, stack: int = 0) -> list[tuple[str, set[int]]]:
    return [(step.name, set(step.reads)) for step in block_of(config, stack).steps]


@pytest.mark.parametrize(("name", "expected"), [
    *((name, PRE) for name in ("gpt", "experts", "llama", "t5", "vit")), ("bert", POST), ("shared", POST),
])  # fmt: skip
def test_what_each_part_of_a_block_reads(name, expected):
    """As the paper of each family has it: the residual past a sublayer and its norm (pre-norm), or past it alone (post-norm)."""
    assert steps_of(CONFIGS[name]) == expected
    causal = [step.name for step in block_of(CONFIGS[name]).steps if step.causal]
    assert causal == (["attention"] if name in ("gpt", "experts", "llama") else [])
    assert steps_of(CONFIGS["t5"], 1) == CROSS[True]


@pytest.mark.parametrize("norm_first", [True, False])
def test_the_norms_place_and_cross_attention_are_seen(norm_first):
    config = Seq2SeqConfig(**SMALL, vocab_size=11, norm_first=norm_first)
    assert steps_of(config) == (PRE if norm_first else POST) and steps_of(config, 1) == CROSS[norm_first]
    drawn = draw(config, "x").svg()
    reads = sum(len(step.reads) for stack in (0, 1) for step in block_of(config, stack).steps)
    assert drawn.count('class="head"') == reads == 8 + 13  # an arrow each, that from the encoder among them
    others = Seq2SeqConfig(**SMALL, vocab_size=11, norm_first=not norm_first), Seq2SeqConfig(**{**SMALL, "n_layers": 2}, vocab_size=11, norm_first=norm_first)
    assert len({drawn, *(draw(other, "x").svg() for other in others)}) == 3


def test_blocks_stand_beside_each_other():
    drawn = picture.blocks({"BERT": CONFIGS["bert"], "T5": CONFIGS["t5"]}, "Blocks", "Two and one.").svg()
    assert drawn.count("blocks: BertBlock<") == 1 and drawn.count("blocks: T5Block<") == 2 and "weight (" not in drawn
    assert drawn.count('class="head"') == 8 + 8 + 12  # that from T5's encoder leads out of its block


def test_a_block_of_another_form_is_drawn_as_it_computes(monkeypatch):
    """Attention and feed-forward beside each other, both added to the input at the end (GPT-J, PaLM)."""
    block = models.lookup("gpt").model(CONFIGS["gpt"]).blocks[0]
    monkeypatch.setattr(type(block), "forward", lambda self, x, **_: x + self.attention(self.attention_norm(x)) + self.feedforward(self.attention_norm(x)))
    names = [name for name, _ in steps_of(CONFIGS["gpt"])]
    assert names.count("+") == 2 and names[-1] == "+" and "feedforward_norm" not in names
    assert {part.name for part in block_of(CONFIGS["gpt"]).parts} == {"attention_norm", "attention", "feedforward_norm", "feedforward"}


def test_blocks_of_several_kinds_stand_one_by_one(monkeypatch):
    import dataclasses

    own = models.lookup("gpt")
    stack = dataclasses.replace(own.stacks[0], kind=lambda config, i: i % 2)
    monkeypatch.setattr(models.picture.models, "lookup", lambda name: dataclasses.replace(own, stacks=(stack,)))
    config = GPTConfig(**SMALL, vocab_size=11)
    blocks = [g for g in groups(config)[0] if g.numbers]
    assert [(g.times, g.numbers) for g in blocks] == [(2, (0, 2)), (1, (1,))]
    assert "blocks: GPTBlock × 2 (0, 2)" in draw(config, "x").svg()


def test_the_verb_writes_it_also_of_a_preset(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "copy-task", "--picture"]) == 0
    assert main(["show", "gpt2-small", "--picture", "small.svg", "model.n_layers=3"]) == 0
    assert capsys.readouterr().out == "copy-task.svg: the model drawn\nsmall.svg: the model drawn\n"
    assert "GPTBlock × 3" in (tmp_path / "small.svg").read_text() and (tmp_path / "copy-task.svg").is_file()


@pytest.mark.parametrize("option", [["--modules"], ["--no-data"], ["--processes", "2"], ["--rank", "0"]])
def test_what_has_no_effect_is_refused(option, capsys):
    assert main(["show", "copy-task", *option, "--picture"]) == 2
    assert f"{option[0]} has no effect with --picture" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["copy-task", "a.html"])
def test_another_ending_is_refused(file, capsys):
    assert main(["show", "--picture", file, "copy-task"]) == 2
    assert f"--picture={file}: a picture is an SVG, whose name ends in .svg." in capsys.readouterr().err


@pytest.mark.parametrize("few", [6, 60])
def test_the_time_grows_with_the_layers_and_not_with_their_square(few, monkeypatch):
    """Of few layers mostly that of running the model, which is most of all; of many that of all else, without it."""
    if few == 60:
        monkeypatch.setattr(picture, "_steps", lambda *_: {})

    def seconds(n_layers: int) -> float:
        config = GPTConfig(**{**SMALL, "n_layers": n_layers}, vocab_size=11)
        began = time.process_time()
        assert groups(config)[0][1].times == n_layers
        return time.process_time() - began

    seconds(1)
    assert min(seconds(4 * few) for _ in range(2)) < 10 * min(seconds(few) for _ in range(2))  # squared: 16
