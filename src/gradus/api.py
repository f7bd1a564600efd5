"""Gradus in Python: the verbs train, plan, load, evaluate, predict and generate as functions. They do what the command
line does, by the same functions, and raise UserError with the same texts.

A recipe is a packaged name, a YAML or JSON file or a run folder. Overrides are the command line's words
("train.steps=100") or Python values by section (train={"steps": 100}). A run or model is a run folder (or the `Run`
that `train` returned), a checkpoint, a folder in the Hugging Face layout, or what `load` returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus import files, limits
from gradus.errors import UserError, exit_code, of_system
from gradus.text import plain_where_needed, say

if TYPE_CHECKING:  # `import gradus.api` loads no torch
    from torch import nn

    from gradus.infer import ModelSource
    from gradus.plan.answer import Answer
    from gradus.train.hooks import Hook

__all__ = ["Plan", "Run", "UserError", "evaluate", "generate", "load", "plan", "predict", "train"]


def frame(rows: list[dict[str, Any]]) -> Any:
    """Rows as a pandas DataFrame where pandas is installed, else as they are: a list of dicts."""
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


@contextlib.contextmanager
def _as_a_command() -> Iterator[None]:
    """What the command line does around a verb: an error of the system is one line, and what is printed can be."""
    try:
        with plain_where_needed():
            yield
    except Exception as e:
        if isinstance(e, UserError) or exit_code(e) == 1:
            raise
        raise type(error := of_system(e))(limits.shown(str(error))) from e


# ---------------------------------------------------------------- arguments


def _wrong(name: str, value: Any, expected: str) -> UserError:
    shown = " ".join(f"{value!r}".split())
    return UserError(f"{name}={shown if len(shown) <= 60 else shown[:60] + '…'}: expected {expected}.")


def _text(name: str, value: Any, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, expected)
    limits.words([value])
    return value


def _path(name: str, value: Any, expected: str = "a name, a file or a folder") -> str:
    return _text(name, os.fspath(value) if isinstance(value, os.PathLike) else value, expected)


def _words(values: Iterable[Any]) -> list[str]:
    return [_text("overrides", value, "strings such as 'train.steps=100'") for value in values]


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def _int(name: str, value: Any, least: int, most: int) -> int:
    with contextlib.suppress(TypeError):
        if not isinstance(value, bool) and least <= operator.index(value) <= most:
            return operator.index(value)
    raise _wrong(name, value, f"a whole number from {least} to {most:,}")


def _float(name: str, value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise _wrong(name, value, "a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last of a tensor of several numbers
        raise _wrong(name, value, "a number") from None


def _optional(read: Any, name: str, value: Any, *more: Any) -> Any:
    return None if value is None else read(name, value, *more)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run folder. `Run("runs/mine/latest")` opens one that is there already."""

    folder: Path

    @_as_a_command()
    def __post_init__(self):
        object.__setattr__(self, "folder", Path(files.run_of(_path("run", self.folder, "a run folder"))))
        if not (self.folder / "recipe.yaml").is_file():
            raise UserError(f"{self.folder}: not a run folder (it has no recipe.yaml). Give a run folder.")

    def __fspath__(self) -> str:
        return str(self.folder)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end. One that was stopped goes on with `train(run, resume=True)`."""
        return (self.folder / "summary.json").is_file()

    @property
    def summary(self) -> dict[str, Any]:
        """What `summary.json` says: losses, metrics, the best step, times; empty before the end."""
        if not self.finished:
            return {}
        summary = limits.read_json(self.folder / "summary.json", limits.CONFIG_FILE)
        if not isinstance(summary, dict):
            raise UserError(f"{self.folder / 'summary.json'}: expected an object. Copy the run folder again.")
        return summary

    @property
    def rows(self) -> Any:
        """Every number that was logged (name, value, unit, step, conditions): a pandas DataFrame where pandas is, else
        a list of dicts."""
        from gradus.rows import read_rows

        return frame(read_rows(self.folder / "metrics.jsonl"))

    def __repr__(self) -> str:
        best, state = self.summary.get("best"), "finished" if self.finished else "stopped"
        if best:
            state = f"best {best['metric']} {best['value']:.4f} at step {best['step']}"
        return f"Run({str(self.folder)!r}: {state})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a recipe will cost. In a notebook it shows what `gradus plan` prints."""

    answer: Answer

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the memory of each device, by the upper end of what it takes; None where that memory is
        not known."""
        return self.answer.fits

    @property
    def notes(self) -> list[str]:
        return self.answer.notes

    @cached_property
    def rows(self) -> Any:
        """Every figure with its unit and conditions: a pandas DataFrame where pandas is, else a list of dicts."""
        return frame([json.loads(row.json()) for row in self.answer.rows])

    def value(self, name: str, **conditions: Any) -> float | None:
        """A figure by its name, e.g. value("budget/time", case="expected"), in the row's unit; None where there is no
        such row."""
        return self.answer.value(_text("name", name), **conditions)

    def __repr__(self) -> str:
        from gradus.plan.show import screen

        return "\n".join(screen(self.answer))


# ---------------------------------------------------------------- before and during a run

_TRAINING = threading.Lock()  # a run's signals, seeds, threads and peak of memory are the process's


def train(
    recipe: Any, *overrides: str, resume: bool = False, force: bool = False, data_changed: bool = False,
    hooks: Sequence[Hook] = (), **settings: Any,
) -> Run:  # fmt: skip
    """Train a recipe into a run folder: `gradus train`. Returns the run, also when it was asked to stop (the notebook's
    interrupt) and has saved itself: then `run.finished` is False.

    resume: go on with the run that `recipe` means, a run folder or else its newest run. force: also where the plan says
    that it will not fit. data_changed: resume also with other data than the run has read. hooks: objects of classes
    made from gradus.train.hooks.Hook, whose methods are called around the steps. Raises UserError for what cannot be
    trained, where the loss is no longer finite, and while this process trains another run; and what a hook raised, as
    it is, once the run has saved itself.
    """
    from gradus.parallel import world
    from gradus.proof.prove import train_and_prove
    from gradus.train.hooks import Hook, UserHooks
    from gradus.train.resolve import RunContext
    from gradus.train.signals import Stopped

    if not isinstance(hooks, list | tuple):
        raise _wrong("hooks", hooks, "a list of hooks")
    for hook in hooks:
        if not isinstance(hook, Hook):
            raise UserError(f"hooks: {hook!r} is not a hook. Give an object of a subclass of gradus.train.hooks.Hook.")
    name, words = files.run_of(_path("recipe", recipe)), _words(overrides)
    options, own = {"force": force, "resume": resume, "data_changed": data_changed}, UserHooks(hooks)
    flags = {name: _flag(name, value) for name, value in options.items()}
    if data_changed and not resume:
        raise UserError("data_changed has no effect without resume=True. Leave it out: a new run takes any data.")
    if not _TRAINING.acquire(blocking=False):
        raise UserError("this process trains another run. Wait until it ends, or train in a process of its own.")
    try:
        with _as_a_command(), _usual_modes():
            context = RunContext(world=world.find(), settings=settings)
            folder = train_and_prove(name, words, context, hooks=[own], **flags).folder
    except Stopped as stop:
        folder = stop.checkpoint.parent.parent
    except Exception as e:  # what the hook did may keep the run from saving itself
        if own.raised is None:
            raise
        say(f"note: a hook raised {type(own.raised).__name__}, and then: {e}", sys.stderr)
    finally:
        _TRAINING.release()
    if own.raised is not None:
        raise own.raised
    return Run(folder)


@contextlib.contextmanager
def _usual_modes() -> Iterator[None]:
    """Gradients, types and devices as a new process has them, whatever the caller has set: a recipe says the rest."""
    import torch

    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with contextlib.ExitStack() as stack:
        for mode in (torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(mode)
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


@_as_a_command()
def plan(
    recipe: Any, *overrides: str, on: str | None = None, tokens: float | None = None, days: float | None = None
) -> Plan:
    """What a recipe or a preset will cost before it is run: `gradus plan`. on: hardware, e.g. "8xA100-80GB". tokens: to
    train on, in place of the recipe's steps. days: a deadline; with `on` a device, how many of them are needed.

    What does not fit is an answer (`fits` is False). Raises UserError for what the recipe, the layout or the hardware
    cannot follow.
    """
    from gradus.plan.answer import Request, answer

    on, tokens, days = _optional(_text, "on", on), _optional(_float, "tokens", tokens), _optional(_float, "days", days)
    return Plan(answer(Request(_path("recipe", recipe), tuple(_words(overrides)), on, tokens, days)))


# ---------------------------------------------------------------- using a model


@_as_a_command()
def load(model: Any, precision: str = "fp32") -> nn.Module:
    """The model as a torch.nn.Module with its weights, in evaluation mode, on the accelerator where there is one.
    precision: of the weights and the arithmetic: fp32, bf16 or fp16; of a folder that `gradus quantize` wrote, its own.
    What load returned comes back as it is.

    `model.tokenizer` is its tokenizer (None where it has none), `model.config` its configuration. Besides its own
    arguments forward takes Hugging Face's by name: input_ids, attention_mask (1: a token, 0: padding), token_type_ids,
    decoder_input_ids, pixel_values. Raises UserError where there is no model, or a damaged one.
    """
    source = _source(model)
    module: Any = source.load(_text("precision", precision))
    if not hasattr(module, "source"):
        module.source, module.tokenizer = source, None
        with contextlib.suppress(UserError):  # raised once texts are to be read
            module.tokenizer = source.tokenizers()[""]
        module.register_forward_pre_hook(_take_their_names, with_kwargs=True)
        for name in ("hidden", "features", "encode"):
            if method := getattr(module, name, None):
                setattr(module, name, functools.partial(_of_shape, method, name == "features"))
        for name, embedding in module.named_modules():
            if hasattr(embedding, "num_embeddings"):
                embedding.register_forward_pre_hook(functools.partial(_check_ids, name))
    return module


def _of_shape(method: Callable[..., Any], images: bool, /, *args: Any, **kwargs: Any) -> Any:
    """What the method returns. Raises UserError where its first argument is no batch of sequences of ids, or of
    images."""
    import torch

    x = next(iter(inspect.signature(method).bind(*args, **kwargs).arguments.values()))
    dims, kind = ("batch, channels, height, width", "floats") if images else ("batch, sequence", "ids (torch.long)")
    if not isinstance(x, torch.Tensor) or x.dim() != (4 if images else 2) or x.is_floating_point() != images:
        raise _wrong(method.__name__, x, f"a tensor of {kind} of the shape ({dims})")
    return method(*args, **kwargs)


def _check_ids(name: str, embedding: Any, args: tuple) -> None:
    """Raises UserError for what is no tensor of ids, and for ids that an embedding does not have: on a CPU alone, since
    others would wait for the values."""
    import torch

    ids = args[0]
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.long, torch.int):
        raise _wrong(name, ids, "a tensor of ids (torch.long)")
    if ids.shape[-1:] == (0,):
        raise UserError(f"{name}: ids of the shape {tuple(ids.shape)}: a sequence has a token at least.")
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(limit) for limit in ids.aminmax())
        if low < 0 or high >= embedding.num_embeddings:
            raise UserError(
                f"{name}: ids from {low:,} to {high:,}, where the model has 0 to {embedding.num_embeddings - 1:,}."
            )


THEIRS = {"input_ids": ("ids", "source"), "attention_mask": ("keep", "source_keep"), "token_type_ids": ("token_types",),
          "decoder_input_ids": ("target",), "pixel_values": ("images",)}  # fmt: skip


def _take_their_names(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    known, called = inspect.signature(module.forward).parameters, {}
    for theirs, names in THEIRS.items():
        ours = next((name for name in names if name in known), None)
        if ours and theirs in kwargs:
            kwargs[ours], called[ours] = kwargs.pop(theirs), theirs
    for name, value in (dict(zip(known, args)) | kwargs).items():
        if value is not None or (name in known and known[name].default is not None):
            _check_tensor(called.get(name, name), name, value)
        if value is not None and called.get(name) == "attention_mask":
            kwargs[name] = value.bool()
    return args, kwargs


def _check_tensor(name: str, ours: str, value: Any) -> None:
    """Raises UserError for what is no tensor, or one of ids that is no batch of sequences."""
    import torch

    ids = ours in ("ids", "source", "target")
    if any(ours in names for names in THEIRS.values()) and not isinstance(value, torch.Tensor):
        raise _wrong(name, value, "a tensor of ids (torch.long)" if ids else "a tensor")
    if ids and value.dim() != 2:
        raise _wrong(name, value, "ids of the shape (batch, sequence)")


@_as_a_command()
def evaluate(run: Any, *overrides: str, split: str = "valid", checkpoint: Any = None) -> dict[str, float]:
    """The metrics of a run's best checkpoint over a whole split ("valid", "test" or "train"), each sample once: `gradus
    evaluate`.

    checkpoint: another one, or a folder with weights; `run` may then be any recipe. Raises UserError for a split that
    is not there.
    """
    from gradus.infer.predict import evaluate as metrics

    checkpoint = _optional(_path, "checkpoint", checkpoint)
    return metrics(_path("run", run), _words(overrides), _text("split", split), checkpoint)


@_as_a_command()
def predict(model: Any, inputs: Any, top: int = 5) -> list[dict[str, Any]]:
    """What the model says about each input, as `gradus predict`: a dict each. inputs: a text (of chats also the
    messages of one, as JSON), an image (a file or a PIL image), or a list.

    By the model: `label` and `probability` with the `top` likeliest (a classifier), `filled` and `masks` (a masked
    language model), or `answer` (a translation, a chat). Raises UserError for a model that does none of this, or
    an input that cannot be read.
    """
    from gradus.infer.predict import records_of

    several = _is_list(inputs) and not _is_picture(inputs)
    items, top = list(inputs) if several else [inputs], _int("top", top, 1, limits.CLASSES)
    source = _source(model)
    images = source.config.reads == "images"
    what = "an image (a file or a PIL image)" if images else "a string"
    readable = [
        _png(item) if images and _is_picture(item) else _path("inputs", item, f"{what}, or a list") for item in items
    ]
    if not items:
        return []
    with _keep_mode(source):
        records = list(records_of(source, readable, top))
    return [{**record, "input": item} for item, record in zip(items, records)]


@_as_a_command()
def generate(
    model: Any, prompt: str | list[str] = "", *, max_new: int = 200, temperature: float = 0.0, top_k: int | None = None,
    top_p: float | None = None, seed: int = 0, sliding_window: bool = False,
) -> Any:  # fmt: skip
    """The prompt with its continuation (of an encoder-decoder: its answer), as `gradus generate`; for a list of
    prompts, a list.

    max_new: tokens. temperature: 0 is greedy; top_k, top_p and seed are of drawing. sliding_window: go on beyond the
    model's positions, forgetting the oldest tokens (attention in a window is the model's own: model.window). Raises
    UserError for a model that cannot generate, or a setting out of range.
    """
    from gradus.infer.generate import Continuation
    from gradus.models.decoding import sampler

    given = prompt if _is_list(prompt) else [prompt]
    prompts = [_text("prompt", one, "a text, or a list of texts") for one in given]
    top_k, top_p = _optional(_int, "top_k", top_k, 1, limits.VOCABULARY), _optional(_float, "top_p", top_p)
    choose = sampler(_float("temperature", temperature), top_k, top_p, _int("seed", seed, 0, limits.SEED))
    max_new, sliding = _int("max_new", max_new, 1, limits.LENGTH), _flag("sliding_window", sliding_window)
    source = _source(model)
    if not prompts:
        return []
    with _keep_mode(source):
        continuation = Continuation(source, prompts, max_new=max_new, sliding=sliding)
        for _ in continuation.steps(choose):
            pass
    return continuation.texts[0] if isinstance(prompt, str) else continuation.texts


def _source(model: Any) -> ModelSource:
    from gradus.infer import find

    if hasattr(model, "source"):
        return model.source
    if not isinstance(model, str | os.PathLike):
        raise UserError(f"expected a model, got {type(model).__name__}. Give a run, a folder, or what load returned.")
    return find(_path("model", model))


@contextlib.contextmanager
def _keep_mode(source: ModelSource) -> Iterator[None]:
    """A model in the middle of a training loop stays in training mode."""
    model = source.model
    training = model is not None and model.training
    try:
        yield
    finally:
        if model is not None:
            model.train(training)


def _is_list(inputs: Any) -> bool:
    return isinstance(inputs, Iterable) and not isinstance(inputs, str | bytes | Mapping)


def _is_picture(item: Any) -> bool:
    return hasattr(item, "getbands") and hasattr(item, "save")


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
