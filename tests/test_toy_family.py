"""Families that live in this file alone: no line of the package knows them.

Lightweight convolutions (Wu et al. 2019, section 3): each token mixes the last few through filters that the channels of a head share,
behind a gated projection. They are trained, cut, resumed, exported, used, planned and served. An encoder of images and one of texts, whose
modules are ViT's and BERT's under other names, are planned, searched and served like those. The pytest process itself never registers it, so that no other test sees it: everything runs in processes of
its own.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus import models
from gradus.errors import UserError
from gradus.layers import Block, GatedFeedForward
from gradus.layers.init import Draw, normal, ones
from gradus.models import Family, Stack, bert, vit
from gradus.models.weights import Rule
from gradus.recipe.schema import MODELS, ModelConfig

sys.path.insert(0, str(Path(__file__).parent))

from distributed import run

# ---------------------------------------------------------------- the family


class ConvConfig(ModelConfig):
    """Lightweight convolutions (Wu et al. 2019)."""

    learns = {"causal_lm": "text"}
    family: Literal["conv"] = "conv"
    d_ff: int = 48
    seq_len: int = 32  # a training length; filters set no limit
    n_taps: int = 4  # tokens that a filter sees

    @property
    def longest(self) -> None:
        return None


class GatedConvolution(nn.Module):
    """(batch, seq, d_model) -> the same; nothing looks ahead."""

    def __init__(self, config: ConvConfig):
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(config.d_model, config.d_model, bias=False) for _ in range(3))
        self.taps = nn.Embedding(config.n_taps, config.n_heads)

    def forward(self, x: Tensor) -> Tensor:
        gated = self.value(x) * self.gate(x).sigmoid()
        taps = self.taps(torch.arange(self.taps.num_embeddings, device=gated.device)).softmax(0)  # (n_taps, heads)
        heads = gated.unflatten(-1, (taps.shape[1], -1))  # (batch, seq, heads, head_dim)
        seq = heads.shape[1]
        mixed = sum(tap[:, None] * F.pad(heads, (0, 0, 0, 0, back, 0))[:, :seq] for back, tap in enumerate(taps))
        return self.out(mixed.flatten(2))


class ConvBlock(Block):
    def __init__(self, config: ConvConfig):
        super().__init__()
        self.mix_norm, self.feedforward_norm = nn.RMSNorm(config.d_model), nn.RMSNorm(config.d_model)
        self.mix = GatedConvolution(config)
        self.feedforward = GatedFeedForward(config.d_model, config.d_ff, "silu")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.mix_norm(x))
        return x + self.feedforward(self.feedforward_norm(x))


class Conv(nn.Module):
    def __init__(self, config: ConvConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(ConvBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model).requires_grad_(False)  # frozen: no optimizer has a state of it
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        for p in self.parameters():
            yield p, normal(0.05) if p.dim() > 1 else ones

    def hidden(self, ids: Tensor, *, positions: Tensor | None = None, segments: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        if segments is not None:
            raise UserError("conv mixes across documents: set data.pack=stream")
        x = self.token_embedding(ids)
        for block in self.blocks:
            x = block(x=x)
        return self.norm(x)

    def forward(self, ids: Tensor, *, positions=None, segments=None, keep=None, select: Tensor | None = None) -> Tensor:
        x = self.hidden(ids, segments=segments)
        return self.head(x if select is None else x[select])


def rules(config: ConvConfig) -> list[Rule]:
    def parts(pair: Tensor) -> tuple[Tensor, ...]:
        return pair.chunk(2)

    def pair(*parts: Tensor) -> Tensor:
        return torch.cat(parts)

    table = [Rule("token_embedding.weight", "embed.weight"), Rule("norm.weight", "norm.weight"), Rule("head.weight", "lm_head.weight")]
    for i in range(config.n_layers):
        mix, same = f"blocks.{i}.mix", ("mix_norm", "feedforward_norm", "mix.taps", "mix.out", *(f"feedforward.{w}" for w in ("gate", "up", "down")))
        table.append(Rule((f"{mix}.value.weight", f"{mix}.gate.weight"), f"layers.{i}.in_proj.weight", parts, pair))
        table += [Rule(f"blocks.{i}.{name}.weight", f"layers.{i}.{name}.weight") for name in same]
    return table


WEIGHTS = SimpleNamespace(
    MODEL_TYPES=("gradus-conv",),
    rules=rules,
    config_from_hf=lambda hf: ConvConfig(**{k: v for k, v in hf.items() if k in ConvConfig.model_fields}),
    config_to_hf=lambda config: {"model_type": "gradus-conv", "architectures": ["Conv"], **config.model_dump(exclude={"preset", "init"})},
    unknown_to_transformers=lambda config: "convolutions; set model.family=gpt",
)
FAMILY = Family(
    config=ConvConfig,
    model=Conv,
    weights=WEIGHTS,
    attention="causal",
    stacks=(Stack("blocks", before=("token_embedding",), norm="norm", heads=("head",)),),
    tokens=("token_embedding",),
    head="head",
    tensor={"mix": "gather", "mix.value": "column", "mix.gate": "column", "mix.taps": "column", "mix.out": "row"},
    whole_sequence="a filter reaches over the border of a part",
)

# ---------------------------------------------------------------- what the processes do

RECIPE = """
task: {name: causal_lm}
model: {family: conv, n_layers: 4, n_heads: 4, d_model: 32}
data: {kind: text, path: text.txt, limit_valid: 4}
tokenizer: {kind: char}
optimizer: {name: adamw, lr: 1.0e-2, eps: 1.0e-4}
batch: {samples: 8}
train: {steps: 6, clip_norm: 1.0, checkpoint_every: 3}
evaluate: {every: 6, samples: 1, max_new: 5}
layout: {device: cpu, threads: 1, micro_batch: 2}
log: {every: 1}
"""


def train(world, folder: Path, runs: dict[str, list[str]], resume: str | None = None) -> None:
    """Each run by its name; `resume`: a run of that name goes on."""
    models.register(FAMILY)
    from gradus import recipe as recipes
    from gradus.train import run

    for name, overrides in runs.items():
        where = [f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", f"log.dir={folder / name}"]
        recipe = recipes.load(folder / resume, overrides) if resume else recipes.load(folder / "toy.yaml", [*where, *overrides])
        with contextlib.redirect_stdout(io.StringIO()):
            run.train(recipe, world=world, resume=folder / resume if resume else None)


def rows(run: Path) -> dict[tuple[str, int], float]:
    wanted = ("train/loss", "train/grad_norm", "valid/loss")
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {(row["name"], row["step"]): row["value"] for row in found if row["name"] in wanted}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds `one`, a run of one process, and `three`, the same stopped after three steps and gone on with."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.yaml").write_text(RECIPE)
    (folder / "text.txt").write_text("".join(f"Line {i} of a play, {i * i} words.\n" for i in range(100)))
    return folder


@pytest.fixture(scope="module")
def done(folder) -> dict:
    """The runs of `folder`, its plans, and what one of them is used for: by one process, as it takes a while to start."""
    return run(1, everything, folder)[0]


def everything(world, folder: Path) -> dict:
    train(world, folder, {"one": [], "three": ["train.steps=3"]})
    train(world, folder, {"three": ["train.steps=6"]}, "three")
    return {"planned": traced(folder), "used": use(folder), "served": served()}


def test_it_learns_and_a_stopped_run_goes_on_to_the_same_numbers(folder, done):
    one = rows(folder / "one")
    assert one["train/loss", 6] < one["train/loss", 1] - 0.1
    assert {key: value for key, value in rows(folder / "three").items() if key != ("valid/loss", 3)} == one
    last = "checkpoints/step-00000006/model.safetensors"
    assert (folder / "one" / last).read_bytes() == (folder / "three" / last).read_bytes()


def traced(folder: Path) -> dict[str, int]:
    from gradus import recipe as recipes
    from gradus.plan import engine
    from gradus.plan.case import Case

    given = [f"data.path={folder / 'text.txt'}", f"data.cache={folder / 'cache'}", "model.vocab_size=32"]
    layouts = {"one": [], "tensor": ["layout.tensor=2"], "shard": ["layout.shard=2"]}
    planned = {name: engine.plan(Case.of(recipes.load(folder / "toy.yaml", [*given, *o]), 1 + bool(o))).memory for name, o in layouts.items()}
    return {name: memory.state["weights"] for name, memory in planned.items()}


def test_the_plan_traces_it(done):
    norms, matrices = (2 * 4 + 1) * 32, 2 * 32 * 32 + 4 * (3 * 32 * 32 + 4 * 4 + 3 * 32 * 48)
    assert done["planned"] == {"one": 4 * (norms + matrices), "tensor": 4 * (norms + matrices // 2), "shard": 4 * (norms + matrices) // 2}


def served() -> dict[str, float]:
    from gradus.hardware import cluster
    from gradus.plan.serving import serving, usage_of

    config = ConvConfig(vocab_size=32, n_layers=4, n_heads=4, d_model=32)
    usage = usage_of(config, 2, 16)
    return {"read": usage.decode.weights, "sums": usage.decode.sums} | {row.name: row.value for row in serving(config, batch=2, seq_len=16, on=cluster("A100-80GB"), precision="fp32")}


def test_serving_it_computes_every_token_anew(done):
    """It keeps no cache: a token takes a pass over all tokens of both rows, and the scores of their last. Filters and words are looked up."""
    from gradus.hardware import find

    found, matrices = done["served"], 4 * (3 * 32 * 32 + 3 * 32 * 48)
    assert "serving/kv_cache" not in found and found["serving/logits"] == 2 * 32 * (4 + 4)
    assert found["read"] == matrices + 4 * 2 * 32 + 32 + 32 * 32
    assert found["sums"] == [[2 * 16 * 32, 2 * 4 + 1]], "mix.out, the feed-forward network, and the words"
    operations = 2 * 2 * (16 * matrices + 32 * 32)
    assert found["serving/decode_time"] == found["serving/prefill_time"] == pytest.approx(operations / find("A100-80GB").peaks["fp32"])


@pytest.mark.slow
def test_every_layout_gives_the_same_curve(folder, done):
    """Three steps, of which the second and the third see what those before have learned."""
    layouts = {
        "shard": ["layout.shard=2"], "tensor": ["layout.tensor=2", "layout.micro_batch=4"], "pipeline": ["layout.pipeline=2"],
        "whole-stream": ["layout.tensor=2", "layout.sequence_parallel=false", "layout.micro_batch=4"],
    }  # fmt: skip
    run(2, train, folder, {name: ["train.steps=3", *layout] for name, layout in layouts.items()})
    one = {(name, step): value for (name, step), value in rows(folder / "three").items() if step <= 3}
    assert len(one) == 2 * 3 + 1
    for name in layouts:
        found = rows(folder / name)
        assert found.keys() == one.keys()
        for key, value in one.items():
            assert found[key] == pytest.approx(value, rel=1e-5), f"{name} {key}"


def use(folder: Path) -> dict:
    from gradus import api
    from gradus.infer.export import export
    from gradus.models import weights

    told = list(export(str(folder / "one"), folder / "exported"))
    ours, again = models.load(folder / "one").eval(), models.load(folder / "exported").eval()
    ids = torch.arange(12)[None]
    return {
        "told": told,
        "same": torch.equal(ours(ids), again(ids)),
        "names": sorted(weights.read_tensors(folder / "exported")),
        "count": models.count(again.config),
        "parameters": sum(p.numel() for p in again.parameters()),
        "text": api.generate(folder / "exported", "Line 1", max_new=4, temperature=0),
        "loss": api.evaluate(folder / "one")["valid/loss"],
    }


def test_it_is_exported_and_used(folder, done):
    found = done["used"]
    assert found["same"] and "layers.0.in_proj.weight" in found["names"]
    assert "transformers does not know this architecture (convolutions; set model.family=gpt)" in found["told"][1]
    assert found["count"]["total"] == found["parameters"] and found["count"]["attention"] == 4 * (3 * 32 * 32 + 4 * 4)
    assert found["text"].startswith("Line 1") and len(found["text"]) == len("Line 1") + 4
    assert found["loss"] == pytest.approx(rows(folder / "one")["valid/loss", 6], rel=1e-6)


# ---------------------------------------------------------------- what is not right is told


def errors(world, folder: Path) -> dict[str, str]:
    from gradus import recipe as recipes
    from gradus.parallel import check
    from gradus.recipe import keys

    found = {}

    def told(name: str, function, *args, **kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (UserError, TypeError) as e:
            found[name] = str(e)

    told("unregistered", recipes.load, folder / "toy.yaml")
    told("no tasks", models.register, dataclasses.replace(FAMILY, config=type("Bare", (ModelConfig,), {"__module__": __name__})))
    models.register(FAMILY)
    models.register(FAMILY)  # twice is no error
    told("taken", models.register, dataclasses.replace(FAMILY, config=type("Other", (ConvConfig,), {"__module__": __name__})))
    told("type", models.register, dataclasses.replace(FAMILY, weights=SimpleNamespace(**{**vars(WEIGHTS), "MODEL_TYPES": ("llama",)})))
    told("key", recipes.load, folder / "toy.yaml", ["model.n_tap=3"])
    told("task", recipes.load, folder / "toy.yaml", ["task.name=span_corruption"])
    told("context", check.validate, recipes.load(folder / "toy.yaml", ["layout.context=2"]), 2)
    told("expert", check.validate, recipes.load(folder / "toy.yaml", ["layout.expert=2"]), 2)
    found["keys"] = "\n".join(f"{name} {rest}" for name, _, rest in keys.entries("model", ConvConfig))
    config = ConvConfig(vocab_size=8, n_layers=1, n_heads=2, d_model=8)
    for name, changes in {
        "stack": {"stacks": (Stack("layers", before=("token_embedding",), norm="norm", heads=("head",)),)},
        "norm": {"stacks": (Stack("blocks", before=("token_embedding",), heads=("head",)),)},
        "tokens": {"tokens": ("embedding",)},
        "tensor": {"tensor": {"mixer.value": "column"}},
        "rules": {"weights": SimpleNamespace(**{**vars(WEIGHTS), "rules": lambda config: WEIGHTS.rules(config)[1:]})},
    }.items():
        models.register(dataclasses.replace(FAMILY, **changes))
        told(name, models.build, config, "meta")
    return found


def test_what_a_description_lacks_is_named(folder):
    (found,) = run(1, errors, folder)
    assert "model.family: no such model: 'conv'" in found["unregistered"]
    assert "Bare needs family:" in found["no tasks"]
    assert found["taken"] == "Other: family conv is ConvConfig's. Choose another name"
    assert found["type"] == "family conv: model_type llama is llama's"
    assert "Did you mean model.n_taps?" in found["key"]
    assert "model.family: task span_corruption needs t5, not conv. conv is for task.name=causal_lm." in found["task"]
    assert "layout.context=2: a filter reaches over the border of a part; layout.context is for bert, gpt, llama, gemma, vit" in found["context"]
    assert "this conv has no experts." in found["expert"]
    assert "model.n_taps" in found["keys"] and "tokens that a filter sees" in found["keys"]
    lacks = "layers is not a list of gradus.layers.Block; stacks: blocks.0."
    assert found["stack"].startswith(f"family conv: stacks: {lacks}")
    assert found["norm"] == "family conv: stacks: norm.weight in none: name them in before, norm, heads or shared"
    assert found["tokens"] == "family conv: tokens: no module embedding"
    assert found["tensor"] == "family conv: tensor: no module's name ends in mixer.value"
    assert found["rules"].startswith("family conv: weights.rules: nothing for "), "what a checkpoint would lose"


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"weights": SimpleNamespace(MODEL_TYPES=())}, "lacks weights.config_from_hf, weights.config_to_hf, weights.rules"),
        ({"model": nn.Linear}, r"lacks Linear.initialisation\(\), Linear.hidden\(\)"),
        ({"attention": "cross"}, r"lacks Conv.encode\(\), Conv.decode\(\)"),
        ({"stacks": ()}, "lacks stacks"),
        ({"weights": SimpleNamespace(**{**vars(WEIGHTS), "MODEL_TYPES": "conv"})}, "weights.MODEL_TYPES is a text"),
        ({"attention": "forward"}, "attention=forward: must be causal, both or cross"),
    ],
)
def test_what_a_family_lacks_is_named_where_it_is_written(changes, lacks):
    with pytest.raises(TypeError, match=f"family conv:? {lacks}"):
        dataclasses.replace(FAMILY, **changes)
    with pytest.raises(TypeError, match="weights"):
        Family(**{field.name: getattr(FAMILY, field.name) for field in dataclasses.fields(Family) if field.name != "weights"})


# ---------------------------------------------------------------- an encoder of images, and one of texts


class PicturesConfig(ModelConfig):
    """Mean-pooled patches (Zhai et al. 2022)."""

    learns = {"classification": "images"}
    reads = "images"
    family: Literal["pictures"] = "pictures"
    image_size: int = 32
    patch_size: int = 8
    n_channels: int = 3
    d_ff: int = 128
    n_classes: int | None = None
    pool: ClassVar[str] = "mean"
    patches: ClassVar[str] = "convolution"
    norm_eps: ClassVar[float] = 1e-6

    @property
    def n_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class ReaderConfig(ModelConfig):
    """Masked words (Devlin et al. 2019)."""

    learns = {"masked_lm": "text"}
    family: Literal["reader"] = "reader"
    d_ff: int = 128
    seq_len: int = 32
    head: ClassVar[str] = "masked_lm"
    variant: ClassVar[str] = "bert"
    pooler: ClassVar[bool] = False
    has_pooler: ClassVar[bool] = False
    alternation: ClassVar[None] = None
    n_classes: ClassVar[None] = None
    first_position: ClassVar[int] = 0
    n_token_types: ClassVar[int] = 2
    activation: ClassVar[str] = "gelu"
    norm_eps: ClassVar[float] = 1e-12


def weights_of(config: type[ModelConfig]) -> SimpleNamespace:
    name = config.model_fields["family"].default
    return SimpleNamespace(**{**vars(WEIGHTS), "MODEL_TYPES": (f"gradus-{name}",), "rules": lambda config: []})  # planned, never kept


class Pictures(vit.ViT):
    pass


class Reader(bert.Bert):
    pass


PICTURES = dataclasses.replace(vit.FAMILY, config=PicturesConfig, model=Pictures, weights=weights_of(PicturesConfig))
READER = dataclasses.replace(bert.FAMILY, config=ReaderConfig, model=Reader, weights=weights_of(ReaderConfig))
SIZE = {"n_layers": 2, "n_heads": 2, "d_model": 64, "d_ff": 128, "dropout": 0.1}
ALIKE = {  # family → (its recipe's sections, the same of the family whose modules it has)
    "pictures": (
        {"task": {"name": "classification"}, "data": {"kind": "images", "path": "absent"}},
        {"family": "pictures", "n_classes": 10, **SIZE},
        {"family": "vit", "n_classes": 10, "image_size": 32, "patch_size": 8, "pool": "mean", **SIZE},
    ),
    "reader": (
        {"task": {"name": "masked_lm", "next_sentence": False}, "data": {"kind": "text", "path": "absent"}, "tokenizer": {"kind": "file", "path": "absent"}},
        {"family": "reader", "vocab_size": 96, **SIZE},
        {"family": "bert", "vocab_size": 96, "seq_len": 32, "head": "masked_lm", "pooler": False, **SIZE},
    ),
}  # fmt: skip


def questions(world, folder: Path, name: str, search: bool) -> list[dict[str, Any]]:
    """What the plan answers of the family of this file and of the one whose modules it has. search: of layouts and devices too."""
    models.register(PICTURES)
    models.register(READER)
    import yaml

    from gradus.plan import answer, devices
    from gradus.plan.hf import recipe_for

    sections, *both = ALIKE[name]
    rest = {"name": "alike", "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 64}, "train": {"steps": 100}}
    found = []
    for i, model in enumerate(both):
        file = folder / f"{name}{i}.yaml"
        file.write_text(yaml.safe_dump({**rest, **sections, "model": model}))

        def asked(ask: Any, on: str | None, *more: str, file: Path = file, **kwargs: Any) -> Any:
            return ask(answer.Request(str(file), more, on=on), **kwargs)

        planned = asked(answer.answer, "2xA100-80GB", "layout.tensor=2", "layout.micro_batch=8")
        config, task = planned.recipe.model, recipe_for(planned.recipe.model).task
        answers = {
            "planned": (planned.headline, planned.rows),
            "served": asked(answer.serve, "2xA100-80GB", batch=4), "one device": asked(answer.serve, "A100-80GB"),
        }  # fmt: skip
        if search:
            ranked = devices.rank_devices(planned.recipe, names=["A100-80GB"])
            answers["searched"] = asked(answer.search, "2xA100-80GB")
            answers["devices"] = devices.lines(ranked, devices.to_serve(config))[0], devices.rows(ranked, [])
        text = {key: [line.replace(str(file), "FILE") for line in lines] for key, (lines, *_) in answers.items()}
        rows = {key: [(row.name, row.value, row.conditions.get("layout")) for row in rows] for key, (_, rows, *_) in answers.items()}
        errors = []
        for ask in (lambda: asked(answer.optimal, None), lambda: asked(answer.serve, None, length=33)):
            with pytest.raises(UserError) as e:
                ask()
            errors.append(str(e.value).replace(name, "FAMILY").replace(model["family"], "FAMILY"))
        found.append({"lines": text, "rows": rows, "errors": errors, "task": task.model_dump()})
    return found


@pytest.mark.parametrize(
    "name, search",
    [("pictures", False), ("reader", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("pictures", "reader"))],
)
def test_an_encoder_from_elsewhere_is_planned_searched_and_served_as_one_of_the_package(name, search, tmp_path):
    ((own, like),) = run(1, questions, tmp_path, name, search, environment={"GRADUS_CACHE": str(tmp_path / "cache")})
    assert own == like
    lines, rows = own["lines"], {key: {name for name, *_ in rows} for key, rows in own["rows"].items()}
    assert {"serving/forward_time", "serving/samples_per_s"} <= rows["served"] and not any("kv" in row for row in rows["served"])
    assert {"memory/device", "time/step", "budget/time"} <= rows["planned"]
    each = {"pictures": ("images/s", "4 images of 16 patches"), "reader": ("tokens/s", "4 sequences of 32 tokens")}[name]
    assert each[0] in " ".join(lines["planned"]) and each[1] in " ".join(lines["served"])
    if search:
        assert "search/step" in rows["searched"]
        assert not any("to serve it" in line for line in lines["devices"]), "what an encoder takes to be used is no choice of a device"


# ---------------------------------------------------------------- no family is named


def test_no_family_is_named_outside_models_recipe_and_tests():
    """Neither in code nor in tables nor in pages; what a docstring or a comment says of a paper is free. A name of the hub is none, nor is llama.cpp."""
    root, named = Path(models.__file__).parents[1], re.compile(rf"\b({'|'.join(MODELS)})\b(?!-|\.cpp)")
    found = []
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".yaml", ".html")):
        room = path.relative_to(root).parts[0]
        if room not in ("models", "recipe"):
            found += [f"{path.relative_to(root)}: {text}" for text in texts(path) if named.search(text)]
    assert found == []


def texts(path: Path) -> Iterator[str]:
    if path.suffix != ".py":
        yield from path.read_text(encoding="utf-8").splitlines()
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    yield from (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said)
