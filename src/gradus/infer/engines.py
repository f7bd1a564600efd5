"""Engines: the ways to run a trained model, behind one interface."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradus import files, limits, spin
from gradus.data.cache import digest
from gradus.errors import UserError, did_you_mean, either
from gradus.models.decoding import Steps
from gradus.models.finite import MEND, NotFinite, first_not_finite, not_finite
from gradus.train.machine import cpu_flags, cpu_name

if TYPE_CHECKING:
    from gradus.infer import ModelSource
    from gradus.models import Family

PRECISIONS = ("fp32", "bf16", "fp16", "int8", "int4")  # int8 and int4: of the weights of matrix products alone
# name → where its class is; imported when it is asked for. And `auto`: what gradus bench found best on this machine.
ENGINES = {
    "torch": "gradus.infer.engines:Torch",
    "compiled": "gradus.infer.compiled:Compiled",
    "onnx": "gradus.infer.export_onnx:Onnx",
    "pt2": "gradus.infer.export_pt2:Pt2",
    "torchscript": "gradus.infer.export_torchscript:TorchScript",
    "tensorrt": "gradus.infer.export_tensorrt:TensorRT",
}


def by_name(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a model's forward by their names."""
    return dict(zip([name for name in inspect.signature(forward).parameters if name != "self"], args)) | kwargs


class Engine:
    """The interface of every engine. A model that reads (an encoder, of images too; any model that scores) has
    `forward`; one that writes (a decoder, an encoder-decoder) also `prefill`, `decode` and `reorder`, of which
    `generate` makes texts: see gradus.models.decoding.Steps for what they take and return.

    name: as in ENGINES. precision: as asked for. computes: the type that matrix products are really computed in, in
    words ("fp32", "bf16", "fp32 from int8 weights"). keeps: whether decode can follow prefill.

    A subclass names the precisions that it has (a dict: precision → which families' `attention`, as of Family), raises
    UserError in __init__ where this machine or this model cannot, and needs no gradient.
    """

    name: str
    computes: str
    keeps = True
    packages: tuple[str, ...] = ()  # that it imports
    PRECISIONS: dict[str, tuple[str, ...]] = {"fp32": ("causal", "both", "cross")}

    def __init__(self, source: ModelSource, precision: str):
        self.source, self.precision, self.config = source, precision, source.config

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return torch.device("cpu")

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits of every position or sample: what the model's forward returns. inputs: the model's arguments by their
        names (ids, keep, token_types; images; source, target, source_keep), those that are None left out."""
        raise NotImplementedError

    def content(self) -> str:
        """The identity of the files that it runs; "": it runs the model's own weights."""
        return ""

    def weight_bytes(self) -> int:
        """Bytes that the model takes as it is stored."""
        raise NotImplementedError

    def not_finite(self, again: Callable[[Any], Any]) -> NotFinite:
        """The error for logits that are not finite; again: gives them once more by what it is called with: `Steps` of
        the model in PyTorch, which can be called as the model too."""
        where, source = None, self.source
        with contextlib.suppress(UserError):  # a folder of graphs alone
            steps = Torch(source)
            where = first_not_finite(steps.model, lambda: again(steps))
        how = "" if (self.name, self.precision) == ("torch", "fp32") else f" with --engine {self.name}"
        how += f" --precision {self.precision}" if how else ""
        return not_finite(source.name + how, source.path, where, MEND if where or not how else "Use --engine torch.")

    def __call__(self, *args: Any, select: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Called as the model is: tasks take an engine for it."""
        inputs = by_name(self.source.family.model.forward, args, kwargs)
        out = self.forward(**{name: value for name, value in inputs.items() if value is not None})
        return out if select is None else out[select]


class Torch(Steps, Engine):
    """The model as it is."""

    name = "torch"
    PRECISIONS = dict.fromkeys(("fp32", "bf16", "fp16"), ("causal", "both", "cross"))
    not_finite = Engine.not_finite

    def __init__(self, source: ModelSource, precision: str = "fp32"):
        Engine.__init__(self, source, precision)
        Steps.__init__(self, source.load(precision))
        self.computes = source.export_info["computes"] if source.export_info else precision

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.model(**inputs)

    def weight_bytes(self) -> int:
        if self.source.export_info:  # packed weights are no buffers
            return sum(p.stat().st_size for p in self.source.weights())
        sizes = {t.data_ptr(): t.nbytes for t in (*self.model.parameters(), *self.model.buffers())}
        return sum(sizes.values())  # of tied weights one

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)  # it computes the selected positions alone


def kind(name: str) -> type[Engine]:
    """The class of an engine. Raises UserError for no engine."""
    if name not in ENGINES:
        known = f" Known: {', '.join(ENGINES)}."
        raise UserError(f"--engine={name}: no such engine.{did_you_mean(name, (*ENGINES, 'auto')) or known}")
    module, _, cls = ENGINES[name].partition(":")
    return getattr(import_module(module), cls)


def fits(engine: type[Engine], precision: str, source: ModelSource) -> None:
    """Raises UserError where an engine lacks this precision for this kind of model; the text names what it has."""
    kinds = {"causal": "decoders", "both": "encoders", "cross": "encoder-decoders"}
    attention, what = source.family.attention, f"--engine {engine.name} --precision {precision}"
    if attention not in engine.PRECISIONS.get(precision, ()):
        has = [p for p, families in engine.PRECISIONS.items() if attention in families]
        raise UserError(f"{what}: not for {kinds[attention]} ({source.name}). Use --precision {' or '.join(has)}.")


def installed(engine: type[Engine]) -> None:
    """Raises UserError where a package that an engine imports is not here."""
    if absent := [package for package in engine.packages if importlib.util.find_spec(package) is None]:
        raise UserError(f"--engine {engine.name}: not installed here: {', '.join(absent)}.")


def cache_key(source: ModelSource, *more: str) -> str:
    """A key of a model's weights and configuration, by what they hold, on this processor and PyTorch, and of `more`."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else [cpu_name(), cpu_flags()]
    return digest(source.content(), f"{source.config!r}", *more, device, torch.__version__)


def best_at(source: ModelSource) -> Path:
    """Where gradus bench keeps what it found best: {"any" or a precision: [engine, precision], "when": a date}."""
    return files.cache_dir() / "best" / f"{cache_key(source)}.json"


def best(source: ModelSource, precision: str | None) -> tuple[str, str]:
    """(engine, precision) for `auto`, told in one line on standard error; torch where nothing is known."""
    content: Any = None
    with contextlib.suppress(UserError):  # no file, or a damaged one
        content = limits.read_json(best_at(source), limits.CONFIG_FILE)
    known = content if isinstance(content, dict) else {}
    match known.get("when"), known.get(precision or "any"):
        case str(when), [str(name), str(chosen)] if name in ENGINES and chosen in PRECISIONS:
            why = f"the fastest of gradus bench, {when}"
        case _:
            name, chosen, why = "torch", precision or "fp32", f"no gradus bench of {source.name} here"
    print(f"--engine auto: {name} {chosen} ({why})", file=sys.stderr, flush=True)
    return name, chosen


def quantized_in(how: str, family: Family) -> list[str]:
    """The engines for what `gradus quantize --as how` writes of a family, the fastest last."""
    return ["torch", "compiled"] if how in ("int8", "int4") and family.attention != "both" else ["torch"]


def ways_of(source: ModelSource) -> list[tuple[str, str]]:
    """(engine, precision) that a folder of graphs, or of quantized weights, is for."""
    info = source.export_info
    assert info is not None
    names = [info["format"]] if "format" in info else quantized_in(info["as"], source.family)
    return [(name, info["precision"]) for name in names]


def open(source: ModelSource, name: str | None = None, precision: str | None = None) -> Engine:
    """The engine of this name on a model. name: None: torch, of a folder for engines what it was made for. precision:
    None: fp32, of auto and of such a folder any. Raises UserError for an engine that cannot do it; the text says what
    can."""
    if source.export_info and name in (None, "auto"):
        name, known = ways_of(source)[-1 if name else 0]
        precision = precision or known
    elif name == "auto":
        name, precision = best(source, precision)
    name, precision = name or "torch", precision or "fp32"
    engine = kind(name)
    spin.watch()
    if not source.export_info:
        fits(engine, precision, source)
    elif (name, precision) not in (ways := ways_of(source)):
        use = either(f"--engine {name} --precision {precision}" for name, precision in ways)
        what = "exported" if "format" in source.export_info else "quantized"
        raise UserError(f"{source.name}: {what} for {use}. Use that, or give the model that it was made from.")
    return engine(source, precision)
