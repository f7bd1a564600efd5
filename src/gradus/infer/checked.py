"""Compares an engine with the model in PyTorch and fp32, on real inputs, before its first use."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradus import files
from gradus.errors import UserError, writing
from gradus.infer import Encoded, ModelSource
from gradus.infer.engines import Engine, Torch, by_name, cache_key, open
from gradus.models.decoding import generate, greedy
from gradus.models.finite import finite
from gradus.parallel.device import pick_device
from gradus.rows import Row, as_lines, read_rows
from gradus.text import say
from gradus.train.machine import cpu_name

TOKENS = 32  # that are decoded in a check
CLOSE = 1e-3  # share of the largest logit by which an engine that computes in fp32 may differ


def compare(
    engine: Engine, reference: Engine, inputs: Encoded | Iterable[dict[str, Tensor]], n: int = TOKENS
) -> list[Row]:
    """How far an engine's logits are from the reference's, on the same inputs.

    inputs: prompts, of which both decode the reference's `n` greedy tokens; or the arguments of some forward passes.
    Rows check/max_abs_delta, check/largest (the reference's largest |logit|), check/cosine (the lowest of a position),
    check/greedy (share of the `n` positions whose likeliest token or class is the same), check/computes (the type).
    Raises NotFinite where the reference's logits are not finite.
    """
    if isinstance(inputs, Encoded):
        tokens: list[Tensor] = []
        theirs = torch.cat(_decoded(reference, inputs, n, tokens))
        ours = torch.cat(_decoded(engine, inputs, n, list(tokens), forced=True))
    else:
        inputs = list(inputs)
        ours, theirs = (torch.cat([_flat(e(**arguments)) for arguments in inputs]) for e in (engine, reference))
    if not finite(theirs):
        raise reference.not_finite(lambda model: [model(**arguments) for arguments in inputs])
    close = finite(ours)
    delta, largest = float((ours - theirs).abs().max()) if close else float("inf"), float(theirs.abs().max())
    cosine = float(torch.cosine_similarity(ours, theirs, dim=-1).min()) if close else 0.0
    same = (ours.argmax(-1) == theirs.argmax(-1)).double()
    at = {"engine": engine.name, "precision": engine.precision}
    values = {"max_abs_delta": delta, "largest": largest, "cosine": cosine, "greedy": float(same.mean())}
    rows = [Row(f"check/{name}", value, conditions={**at, "n": len(same)}) for name, value in values.items()]
    return [*rows, Row("check/computes", engine.computes, conditions=at)]


def _flat(out: Any) -> Tensor:
    out = out[0] if isinstance(out, tuple) else out
    return out.float().cpu().reshape(-1, out.shape[-1])  # (positions, classes)


def _decoded(engine: Engine, inputs: Encoded, n: int, tokens: list[Tensor], forced: bool = False) -> list[Tensor]:
    """The logits (batch, vocab) of every step; tokens: what was chosen is added, or with forced what is taken."""
    steps: list[Tensor] = []

    def choose(logits: Tensor) -> Tensor:
        steps.append(logits.float().cpu())
        if not forced:
            tokens.append(greedy(logits).cpu())
        return (tokens.pop(0) if forced else tokens[-1]).to(logits.device)

    longest = engine.config.longest or sys.maxsize
    n = min(n, longest // 2)
    prompts = [row[-(longest - n + 1) :] for row in inputs.prompts]  # those that slide are cut
    for _ in generate(engine, prompts, max_new=n, choose=choose, sources=inputs.sources):
        pass
    return steps


def _values(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {row["name"].removeprefix("check/"): row["value"] for row in rows}


def line(rows: Sequence[dict[str, Any]]) -> str:
    """A check in one line. rows: as `Row.known` gives them."""
    v = _values(rows)
    at, equal = rows[0], round(float(v["greedy"]) * rows[0]["n"])
    return (
        f"engine {at['engine']} {at['precision']} computes in {v['computes']}; against PyTorch in fp32: "
        f"max |Δ| {float(v['max_abs_delta']):.1e} of {float(v['largest']):.3g}, cosine {float(v['cosine']):.6f}, "
        f"same prediction for {equal} of {at['n']} ({at['when']})"
    )


def verdict(figures: dict[str, Any], engine: str, precision: str) -> None:
    """Raises UserError for an engine whose results are of no use. figures: of a check, by the ends of their names."""
    delta, largest = float(figures["max_abs_delta"]), float(figures["largest"])
    limit = CLOSE * largest if figures["computes"] == "fp32" else largest
    if not delta <= limit:
        off = f"differs from PyTorch in fp32 by {delta:.1e} where logits reach {largest:.3g}"
        raise UserError(f"--engine={engine} --precision={precision}: {off}. Use --engine torch.")


def read_check(file: Path) -> list[dict[str, Any]]:
    """The rows of a check that was kept; none where it is not whole."""
    try:
        line(rows := read_rows(file))
    except (UserError, OSError, ValueError, LookupError, TypeError):
        return []
    return rows


class LazyEngine:
    """A model's engine, which is opened, and checked, on the first inputs. Called, it raises NotFinite for logits that
    are not finite."""

    def __init__(self, source: ModelSource):
        self.source, self.device = source, pick_device("auto")
        self.engine: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)  # prefill, decode and the rest, once it is open

    def on(self, inputs: Encoded | dict[str, Any]) -> Engine:
        if self.engine is None:
            inputs = [inputs] if isinstance(inputs, dict) else inputs
            self.engine = checked(self.source, self.source.engine, self.source.precision, inputs)
        return self.engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine = self.on(by_name(self.source.family.model.forward, args, kwargs))
        out = engine(*args, **kwargs)
        if not finite(out):
            raise engine.not_finite(lambda model: model(*args, **kwargs))
        return out


def checked(
    source: ModelSource, name: str | None, precision: str | None, inputs: Encoded | Iterable[dict[str, Tensor]]
) -> Engine:
    """The engine, ready for use: where it was not yet checked on these weights it is now, on these inputs. Shows the
    check in one line on standard error. Raises UserError for an engine that cannot, or that is far off."""
    engine = open(source, name, precision)
    name, precision = engine.name, engine.precision  # of auto: what it took
    if (name, precision) == ("torch", "fp32"):
        return engine
    if source.export_info:  # checked when it was written
        say(source.export_info["told"], sys.stderr)
        return engine
    key = cache_key(source, name, precision, engine.content())  # of these weights, and of the files that it runs
    file = files.cache_dir() / "engines" / f"{key}.jsonl"
    if not (rows := read_check(file)):
        reference = Torch(dataclasses.replace(source, model=None), "fp32")
        rows = compare(engine, reference, inputs)
        now = f"{datetime.date.today()}"
        for row in rows:
            row.conditions |= {"when": now, "processor": cpu_name(), "torch": torch.__version__}
        with writing(file, "set GRADUS_CACHE to a folder with enough space."):
            file.parent.mkdir(parents=True, exist_ok=True)
            files.write_text(file, as_lines(rows))
        rows = read_rows(file)
    say(line(rows), sys.stderr)
    verdict(_values(rows), name, precision)
    return engine
