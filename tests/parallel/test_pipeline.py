"""Every family in every schedule against one process: losses, gradient norms, weights, and an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
import common
import distributed

from gradus.errors import UserError
from gradus.layers import Block
from gradus.parallel.apply import use_checkpointing
from gradus.parallel.pipeline import Pipeline, problems
from gradus.recipe.schema import BertConfig, Layout

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
    return [trimmed(family, common.rows_of(family, whole, lo, hi)) for lo, hi in zip(CUTS, CUTS[1:])]


def train(model: nn.Module, family: str, steps: int, pipeline: Pipeline | None, batches=micro_batches, autocast: bool = False):
    """(loss, gradient norm) of each step, and the weights held after five steps and at the end; by hand, on one process or as one of several."""
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
    return curve, after_five, {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


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


def check(n: int, cases: list[tuple[str, str, dict, int]]) -> None:
    answers = distributed.run(n, run_cases, cases)
    for i, (family, schedule, changes, steps) in enumerate(cases):
        config = {k: v for k, v in changes.items() if k != "stages"}
        expected = common.reference(family, steps, **config)
        model = common.build(family, **config)
        _, after_five, _ = train(model, family, min(steps, 5), None, batches=lambda f, s: [common.batch(f, s)])
        for owned, curve, weights, _ in (a[i] for a in answers):
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), rtol=1e-5, atol=0, msg=lambda m: f"{family} {schedule} {changes}: {m}")
            for name, value in weights.items():  # copies of tied ones too
                if name.endswith("to_k.bias"):  # adds the same to all scores of a query: its gradient is rounding, which Adam makes large
                    continue
                wanted, apart = torch.from_numpy(after_five[name]), torch.from_numpy(value - after_five[name])
                assert apart.norm() <= 1e-5 * wanted.norm(), f"{family} {schedule} {changes}: {name} is {apart.norm()} off of {wanted.norm()}"
        owners = sorted(name for a in answers for name in a[i][0])
        assert owners == sorted(name for name, _ in model.named_parameters()), f"{family} {schedule}: every parameter on exactly one process"
