"""Every family in every schedule against one process: losses, gradient norms, weights, and an evaluation."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.layers import Block
from gradus.parallel.apply import use_checkpointing
from gradus.parallel.check import fits
from gradus.parallel.pipeline import Pipeline
from gradus.recipe.schema import Layout

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import common  # noqa: E402
import distributed  # noqa: E402

CUTS = (0, 3, 5, 7, 8)  # samples of the four micro-batches


def trimmed(family: str, b: dict) -> dict:
    """Without columns that are padding in every row, as a task would have collated these rows."""
    if family == "vit":
        return b
    source = "source" if "source" in b else "ids"
    width = int((b[source] != common.PAD).sum(1).max())
    out = {k: v[:, :width] if k in (source, "keep", "select") or (k == "labels" and source == "ids") else v for k, v in b.items()}
    if source == "source":
        width = int((b["labels"] != common.IGNORE).sum(1).max())
        out |= {k: b[k][:, :width] for k in ("target", "labels")}
    return out


def micro_batches(family: str, step: int) -> list[dict]:
    whole = common.batch(family, step)
    return [trimmed(family, common.rows_of(family, whole, lo, hi)) for lo, hi in itertools.pairwise(CUTS)]


def train(model: nn.Module, family: str, steps: int, pipeline: Pipeline | None, batches=micro_batches, autocast: bool = False):
    """(loss, gradient norm) of each step, and the weights held after five steps; on one process, or as one of several."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    curve, after_five = [], {}
    for step in range(steps):
        counts = common.batch(family, step)["counts"]

        def share(part: nn.Module, b: dict, counts=counts) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return sum(value / counts[kind] for kind, value in common.losses(family, part, b).items())

        if pipeline is None:
            loss = torch.zeros(())
            for b in batches(family, step):
                one = share(model, b)
                one.backward()
                loss += one.detach()
            owned = {name for name, _ in model.named_parameters()}
        else:
            loss = pipeline.forward_backward(batches(family, step), share)
            pipeline.reduce_tied()
            owned = pipeline.owned
        square = sum(p.grad.square().sum() for name, p in model.named_parameters() if name in owned and p.grad is not None) + torch.zeros(())
        if pipeline is not None:
            for t in (loss, square):
                dist.all_reduce(t, group=pipeline.group)
        norm = square.sqrt()
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= min(1.0, 1.0 / (float(norm) + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss), float(norm)))
        if step == 4:
            after_five = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return curve, after_five


def layout_of(n: int, schedule: str, **changes) -> Layout:
    return Layout(pipeline=n, schedule=schedule, **changes)


def run_cases(world, cases: list[tuple[str, str, dict, int]]) -> list:
    found = []
    for family, schedule, changes, steps in cases:
        stages = changes.get("stages")
        model = common.build(family, **{k: v for k, v in changes.items() if k != "stages"})
        whole = model.config.n_layers + (getattr(model.config, "n_decoder_layers", None) or model.config.n_layers) * hasattr(model, "decoder")
        pipeline = Pipeline(model, dist.group.WORLD, layout_of(world.size, schedule, stages=stages), "cpu")
        assert pipeline.model is model and sum(isinstance(m, Block) for m in model.modules()) < whole
        try:
            found.append((pipeline.owned, *train(model, family, steps, pipeline)))
        except Exception as e:
            raise AssertionError(f"{family} {schedule} {changes}") from e
    return found


def told(*where):
    return lambda message: f"{where}: {message}"


@functools.cache
def expected(family: str, steps: int, config: tuple[tuple, ...]):
    """(the one-process curve, all names, the one-process weights after five steps)."""
    model = common.build(family, **dict(config))
    _, after_five = train(model, family, 5, None, batches=lambda f, s: [common.batch(f, s)])
    return common.reference(family, steps, **dict(config)), sorted(name for name, _ in model.named_parameters()), after_five


def check(n: int, cases: list[tuple[str, str, dict, int]]) -> None:
    answers = distributed.run(n, run_cases, cases)
    for i, (family, schedule, changes, steps) in enumerate(cases):
        reference, names, after_five = expected(family, steps, tuple((k, v) for k, v in changes.items() if k != "stages"))
        for _, curve, weights in (a[i] for a in answers):
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(reference), rtol=1e-5, atol=0, msg=told(family, schedule, changes))
            for name, value in weights.items():  # copies of tied ones too
                if name.endswith("to_k.bias"):  # adds the same to all scores of a query: its gradient is rounding, which Adam makes large
                    continue
                wanted, apart = torch.from_numpy(after_five[name]), torch.from_numpy(value - after_five[name])
                assert apart.norm() <= 3e-4 * wanted.norm(), f"{family} {schedule} {changes}: {name} is {apart.norm()} off of {wanted.norm()}"
        owners = sorted(name for a in answers for name in a[i][0])
        assert owners == names, f"{family} {schedule}: every parameter on exactly one process"


def steps(family: str) -> int:
    return 20 if family == "gpt" else 5


@pytest.mark.slow
def test_two_processes_follow_one():
    cases = [(family, "gpipe", {}, steps(family)) for family in common.CONFIGS]
    cases += [(family, "interleaved", {}, steps(family)) for family in ("gpt", "t5")]
    cases += [(family, "zero_bubble", {}, steps(family)) for family in ("gpt", "vit")]
    check(2, cases)


@pytest.mark.slow
def test_four_processes_follow_one():
    cases = [(family, "1f1b", {}, steps(family)) for family in common.CONFIGS]
    cases += [("t5", "interleaved", {}, 5), ("gpt", "zero_bubble", {"n_layers": 8}, 5)]
    check(4, cases)


@pytest.mark.slow
def test_variants_of_the_families():
    short = [
        ("seq2seq", "1f1b", {"share_embeddings": False, "tie_output": False, "output_bias": True, "n_decoder_layers": 2}, 5),
        ("seq2seq", "gpipe", {"share_embeddings": False, "norm_first": True, "n_decoder_layers": 7, "activation": "gelu"}, 5),  # of relu, rounding may turn a unit off
        ("t5", "interleaved", {"tie_output": False, "gated": True, "n_decoder_layers": 1}, 5),  # memory goes straight to the last stage
        ("gpt", "interleaved", {"tie_output": False, "n_layers": 7, "stages": 3}, 5),
        ("gpt", "zero_bubble", {"stages": 1}, 5),
        ("llama", "zero_bubble", {"n_layers": 6, "stages": 3, "qkv_bias": True}, 5),
        ("vit", "zero_bubble", {"pool": "mean"}, 5),
        ("vit", "1f1b", {"patches": "stem", "patch_size": 4}, 5),
    ]
    check(2, short)


# ---------------------------------------------------------------- what else a pipeline does


def share_of(family: str, counts: dict):
    return lambda part, b: sum(value / counts[kind] for kind, value in common.losses(family, part, b).items())


def summed(family: str, model: nn.Module, b: dict) -> Tensor:
    return sum(common.losses(family, model, b).values())


def other_things(world) -> dict:
    found = {}
    for family in common.CONFIGS:  # evaluation, of batches of several shapes
        pipeline = Pipeline(common.build(family), dist.group.WORLD, layout_of(2, "1f1b"), "cpu")
        scores = [pipeline.forward(b, functools.partial(summed, family)) for b in micro_batches(family, 0)]
        found["forward", family] = scores if scores[0] is None else [float(s) for s in scores]
    pipeline = Pipeline(common.build("t5"), dist.group.WORLD, layout_of(2, "interleaved"), "cpu")
    scores = [pipeline.forward(b, functools.partial(summed, "t5")) for b in micro_batches("t5", 0)]
    found["forward", "interleaved t5"] = scores if scores[0] is None else [float(s) for s in scores]

    for head in ("none", "classification", "pretraining"):  # heads that no other test has
        model = common.build("bert", head=head, pooler=True, n_classes=3)
        part = Pipeline(model, dist.group.WORLD, layout_of(2, "gpipe"), "cpu")
        found["head", head] = part.forward({"ids": torch.arange(1, 13).view(2, 6)}, lambda model, b: flat(model(b["ids"])).numpy())

    for schedule, numbers in {"gpipe": (1,), "1f1b": (3,), "interleaved": (1, 5), "zero_bubble": (1, 3)}.items():
        for n in numbers:  # fewer micro-batches than stages, more, and not a multiple
            part = Pipeline(common.build("gpt"), dist.group.WORLD, layout_of(2, schedule), "cpu")
            whole = common.batch("gpt", 0)
            batches = [trimmed("gpt", common.rows_of("gpt", whole, 8 * i // n, 8 * (i + 1) // n)) for i in range(n)]
            loss = part.forward_backward(batches, share_of("gpt", whole["counts"]))
            part.reduce_tied()
            found["batches", schedule, n] = float(loss), {name: p.grad.numpy().copy() for name, p in part.model.named_parameters()}

    for mode in ("full", "attention"):  # blocks of several stages are found, and recomputed
        part = Pipeline(common.build("t5"), dist.group.WORLD, layout_of(2, "interleaved"), "cpu")
        use_checkpointing(part.model, mode)
        found["checkpointing", mode] = train(part.model, "t5", 2, part)[0]
    for family in ("bert", "t5", "vit"):
        part = Pipeline(common.build(family), dist.group.WORLD, layout_of(2, "1f1b"), "cpu")
        found["autocast", family] = train(part.model, family, 2, part, autocast=True)[0]

    part = Pipeline(common.build("gpt"), dist.group.WORLD, layout_of(2, "1f1b"), "cpu")
    too_long = {"ids": torch.ones(1, 17, dtype=torch.long), "labels": torch.ones(1, 17, dtype=torch.long)}
    if world.first:  # the others would wait for it until the time-out
        with pytest.raises(UserError, match="17 tokens is longer"):
            part.stages[0].compute(None, too_long, share_of("gpt", {"tokens": 1}))
    with pytest.raises(UserError, match="needs the whole model"):
        part.stages[world.rank].part.new_cache(1, 4)
    return found


def flat(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in (output if isinstance(output, tuple) else (output,))])


def test_evaluation_heads_few_batches_checkpointing_and_autocast():
    first, last = distributed.run(2, other_things)
    for (kind, *what), value in last.items():
        if kind == "forward":
            family = what[0].split()[-1]
            model = common.build(family)
            with torch.no_grad():
                wanted = [float(sum(common.losses(family, model, b).values())) for b in micro_batches(family, 0)]
            assert first[kind, *what] == [None] * 4 and value == pytest.approx(wanted, rel=1e-6), what
        elif kind == "head":
            model = common.build("bert", head=what[0], pooler=True, n_classes=3)
            with torch.no_grad():
                torch.testing.assert_close(torch.from_numpy(value), flat(model(torch.arange(1, 13).view(2, 6))), rtol=1e-5, atol=1e-6)
            assert first[kind, *what] is None
        elif kind == "batches":
            model, whole = common.build("gpt"), common.batch("gpt", 0)
            loss = share_of("gpt", whole["counts"])(model, whole)
            loss.backward()
            # the loss is where the last stage is: of zero_bubble's V with the first process
            assert value[0] + first[kind, *what][0] == pytest.approx(float(loss.detach()), rel=1e-6) and 0.0 in (value[0], first[kind, *what][0]), (
                what
            )
            for name, p in model.named_parameters():
                for held in (value[1], first[kind, *what][1]):
                    if name in held:
                        torch.testing.assert_close(torch.from_numpy(held[name]), p.grad, rtol=1e-4, atol=1e-6, msg=told(what, name))
        elif kind == "checkpointing":
            assert torch.allclose(torch.tensor(value), torch.tensor(common.reference("t5", 2)), rtol=1e-5), what
        elif kind == "autocast":  # hidden states travel as the blocks gave them: nothing is rounded that one process does not round
            wanted, _ = train(common.build(what[0]), what[0], 2, None, autocast=True)
            torch.testing.assert_close(torch.tensor(value), torch.tensor(wanted), rtol=1e-4, atol=0, msg=told(what))


@pytest.mark.parametrize(
    ("model", "layout", "words"),
    [
        (common.CONFIGS["gpt"], {"pipeline": 5}, "5 stages, and the model has 4 blocks. Use layout.pipeline=4 or less."),
        (
            common.CONFIGS["gpt"],
            {"pipeline": 4, "schedule": "interleaved"},
            "8 stages, and the model has 4 blocks. Use layout.pipeline=2 or less, or",
        ),
        (common.CONFIGS["t5"], {"pipeline": 4, "schedule": "interleaved"}, ""),
        (common.CONFIGS["t5"], {"pipeline": 2, "schedule": "zero_bubble"}, "Use layout.schedule=interleaved."),
        (common.CONFIGS["gpt"], {"pipeline": 2, "schedule": "1f1b", "stages": 2}, "layout.stages: cannot be combined with layout.schedule=1f1b: it has 1 stage per process"),
        (common.CONFIGS["gpt"], {"pipeline": 2, "schedule": "interleaved", "stages": 1}, "nothing interleaves"),
        (common.CONFIGS["gpt"], {"pipeline": 2, "schedule": "zero_bubble", "checkpointing": "full"}, "layout.checkpointing: cannot be combined with layout.schedule=zero_bubble"),
        (common.CONFIGS["gpt"], {"pipeline": 2, "schedule": "zero_bubble", "compile": "default"}, "layout.compile: cannot be combined with layout.schedule=zero_bubble"),
        (common.CONFIGS["gpt"], {"pipeline": 2, "schedule": "interleaved", "shard": 2}, "layout.shard: cannot be combined with layout.schedule=interleaved"),
        (common.CONFIGS["seq2seq"], {"pipeline": 8}, ""),
        (common.CONFIGS["bert"], {}, ""),
    ],
)
def test_what_is_refused(model, layout, words):
    found = list(fits(model, Layout(**layout)))
    assert len(found) == bool(words) and (not words or words in found[0]), found
