"""`gradus new`: look at data with the readers that train on them, say what was found, and write a commented recipe."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gradus import files, models, tasks
from gradus.data.corpus import Corpus
from gradus.data.readers import expanded
from gradus.data.splits import find_pairs, find_split
from gradus.data.tokenizers import TEMPLATE
from gradus.errors import UserError, not_written
from gradus.recipe import presets
from gradus.recipe.check import learners
from gradus.recipe.schema import Adapter, ModelConfig, Recipe
from gradus.tasks.kinds import drafted, lookup
from gradus.train import machine, resolve
from gradus.train.inspect_data import WHAT, DataSummary, look
from gradus.train.schedule import SMALL, fine_tuning_rate
from gradus.train.session import Session, open_session

Sections = dict[str, dict[str, Any]]  # of a recipe

WHOLE, LONGEST = 0.95, 1024  # share of the texts that a sample holds whole; tokens, where a model sets no limit
MINUTES = 3  # that a first run is to take on two CPU cores
SPEED = 3e10  # FLOP/s that two cores of about 2020 reach on models as small as these
HELD_OUT = {**dict.fromkeys(("labelled", "images"), "A tenth of each class"), "text": "The last tenth of the text",
            "pairs": "Every tenth pair", "chats": "Every tenth chat"}  # fmt: skip


def new(
    file: str, paths: Sequence[str], init: str | None = None, text_column: str | None = None,
    label: str | bool | None = None, lora: bool = False, form: str | None = None,
) -> Iterator[str]:  # fmt: skip
    """Write the recipe `file` for the data in `paths` (one, or the two sides of parallel text). Yields what was found.

    init: a folder or hub name to fine-tune from; lora: by an adapter beside its weights. text_column, label: columns of
    a table, which are chosen where only one is possible; label=False: none. form: of chats. Raises UserError where
    `file` is there already or cannot be written, for data that no reader knows, that are ambiguous or that cannot be
    trained on, and for an init of another kind.
    """
    target = _target(file)
    summary = look(paths, text_column, label, form)
    if lora and init is None:
        raise UserError("--lora: an adapter stands beside weights that are trained already. Give them: --init FOLDER.")
    config = _weights(init, summary) if init else None
    if config is not None and lora:
        config = config.trained(Adapter(rank=8))
    yield from map(printable, summary.lines)
    if init and expanded(init).exists():
        init = str(expanded(init).absolute())
    sections = _draft(summary, init, config)
    if init and "template" in sections["task"]:
        yield "note       chatml is the template, since the weights bring none: task.template names the one they know"
    facts = Facts(tasks.open_task(_recipe(target, sections)), summary)
    yield from map(printable, facts.lines())
    _fit_to(sections, facts, config)
    with contextlib.redirect_stdout(None):  # what is said of the data was said above
        session = open_session(_recipe(target, sections))
    yield from (f"note       {printable(note)}" for note in session.task.notes())
    counts = models.count(session.recipe.model)
    minutes = _steps(sections, session, counts, facts, init is not None)
    steps, samples = sections["train"]["steps"], sections["batch"]["samples"]
    family, minutes = session.recipe.model.family, max(1, round(minutes))
    about = f"{counts['total'] / 1e6:,.1f} M parameters, {steps:,} steps of {samples} samples; "
    about += f"about {minutes} minute{'s' if minutes > 1 else ''} on two CPU cores (an estimate)"
    what = printable(f"{Path(summary.data['path']).name}: {WHAT[summary.kind]}, for {family}")
    commands = [f"  gradus {verb} {target.name}" for verb in ("check", "train", "plan")]
    try:
        files.write_text(target, _text(target, sections, [what, about, *commands], init))
    except OSError as e:
        raise not_written(target, e, "nothing was written. Free some space, or give another name.") from e
    yield f"wrote      {file}: {family}, {about}"
    yield f"next       gradus check {file}, then gradus train {file}"


def _target(file: str) -> Path:
    """Where to write. Raises UserError where that is not possible."""
    if not file.isprintable():
        raise UserError(f"{file!r}: a line break or another character that cannot be printed. Give another name.")
    target = expanded(file)
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file}: a recipe is a .yaml file. Name it {target.with_suffix('.yaml')}.")
    if target.exists() or not target.parent.is_dir():
        what = "there is such a file already" if target.exists() else f"there is no folder {target.parent}"
        raise UserError(f"{file}: {what}. Give another name.")
    return target


def _weights(init: str, summary: DataSummary) -> ModelConfig:
    """The configuration of weights to fine-tune. Raises UserError where there are none that learn these data."""
    config = models.config_of(init)
    if config.family not in (known := learners(drafted(summary.kind))[summary.kind]):
        raise UserError(f"--init {init}: a {config.family}, and {WHAT[summary.kind]} are for {' or '.join(known)}.")
    models.load_deferred(init, strict=False)  # headers only
    return config


def printable(text: str) -> str:
    """The text on one line, whatever names hold."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# ---------------------------------------------------------------- what is in them


@dataclasses.dataclass
class Facts:
    """Numbers of data as a task has opened them."""

    task: Any
    summary: DataSummary

    @property
    def train(self) -> Any:
        return self.task.splits["train"]

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels, height and width as read; of several sizes the channels."""
        return getattr(self.train, "as_read", self.train.shape)

    def lengths(self) -> np.ndarray:
        """Tokens of each training sample, of a pair of the longer side."""
        if self.summary.kind != "pairs":
            return np.asarray(self.train.lengths)
        return np.maximum(self.train.source.lengths(), self.train.target.lengths())

    def lines(self) -> Iterator[str]:
        """What was found."""
        splits, kind = self.task.splits, self.summary.kind
        unit = {"text": "windows", "labelled": "texts"}.get(kind, kind)
        sizes = ", ".join(f"{split} {len(data):,}" for split, data in splits.items())
        yield f"splits     {sizes} {unit}{self._held_out()}"
        if kind in ("labelled", "images"):
            labels = np.concatenate([self.train.labels, splits["valid"].labels])
            counts = np.bincount(labels, minlength=len(self.task.classes))
            shown = [f"{name} {n:,}" for name, n in zip(self.task.classes, counts)]
            yield f"classes    {len(shown)}: " + ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")
        if kind == "images":
            shape, (_, *sides) = self.train.shape, self.image_shape
            size = f"{sides[1]} × {sides[0]} pixels" if sides else "several sizes: scaled and cut to one"
            how = getattr(self.train, "preprocess", None)
            if how and self.task.recipe.model.init is not None:  # else the size is chosen below
                size = f"prepared to {shape[2]} × {shape[1]} pixels: {how}"
            yield f"images     {shape[0]} channel{'s' if shape[0] > 1 else ''}, {size}"
        elif kind == "text":
            n, kinds = len(self.train) * self.task.seq_len, self.task.tokenizer.vocab_size
            yield f"tokens     {n:,} for training, in a vocabulary of {kinds:,}"
        else:
            low, middle, high = np.percentile(self.lengths(), [0, 50, 100]).astype(int)
            yield f"lengths    {low} to {high} tokens, median {middle}"
        if kind == "labelled" and (n := sum(int((data.lengths == 0).sum()) for data in splits.values())):
            are = "are" if n > 1 else "is"
            yield f"note       {n:,} of the texts {are} empty, and learned with the label all the same"

    def _held_out(self) -> str:
        kind, data = self.summary.kind, self.summary.data
        if kind in ("images", "labelled"):
            there = not self.task.splits["valid"].name.endswith("(held out)")
        elif kind == "pairs":
            there = find_pairs(data["path"], "valid", data["source"], data["target"], required=False)
        else:
            there = find_split(data["path"], "valid", required=False)
        if there and kind == "labelled" and not find_split(data["path"], "valid", required=False):
            return "; there is no valid split: test is evaluated in its place"
        return "" if there else f"; valid is {HELD_OUT[kind].lower()}, held out"


# ---------------------------------------------------------------- the recipe


def _draft(summary: DataSummary, init: str | None, config: ModelConfig | None) -> Sections:
    """The sections of a recipe that opens these data."""
    kind, path = summary.kind, summary.data["path"]
    model = {"init": init} if init else dict(presets.DRAFTS[kind])
    sections: Sections = {"task": {"name": drafted(kind)}, "model": model, "data": dict(summary.data)}
    if kind == "chats" and not (init and tasks.beside(models.locate(init)).get(TEMPLATE)):
        sections["task"]["template"] = "chatml"
    if init and kind != "images":
        sections["tokenizer"] = {"kind": "file"}
        if kind == "text":
            sections["data"]["max_len"] = min(config.seq_len, 128)
    elif not init and kind == "text" and not path.startswith("hf:"):
        corpus = Corpus.open(find_split(path, "train"), summary.data.get("text", "text"))
        sections["tokenizer"], model["seq_len"] = _alphabet(corpus)
    elif kind != "images":
        lowercase = {"lowercase": True} if kind == "labelled" else {}
        sections["tokenizer"] = {"kind": "bpe", "vocab_size": 4_000, **lowercase}
    if config is not None and config.adapter:
        sections["adapter"] = {"rank": config.adapter.rank, "alpha": config.adapter.alpha}
    rate = fine_tuning_rate(config) if config else 1e-3
    sections["optimizer"] = {"name": "adamw", "lr": rate, "weight_decay": 0.01}
    sections["schedule"] = {"name": "linear" if init else "cosine", "warmup_ratio": 0.1}
    sections["batch"] = {"samples": 16 if kind == "text" or init else 32}
    sections["train"] = {"steps": 100, "clip_norm": 1.0, "seed": 0}
    shown = {"text": {"samples": 1, "max_new": 100}, "chats": {"answers": 3}}.get(kind, {"samples": 3})
    sections["evaluate"] = {"every": 20, **shown}
    return sections


def _alphabet(corpus: Corpus) -> tuple[dict[str, Any], int]:
    """(tokenizer, seq_len): letter by letter where the text is small and of few letters."""
    n, letters = 0, set()
    for piece in corpus:
        n += len(piece)
        letters |= set(piece)
        if n > 2_000_000:
            break
    small = n <= 2_000_000 and len(letters) <= 200
    return ({"kind": "char"} if small else {"kind": "bpe", "vocab_size": 4_000}), max(8, min(128, n // 40))


def _fit_to(sections: Sections, facts: Facts, config: ModelConfig | None) -> None:
    """Lengths and sizes that suit what the data were found to be."""
    kind, model, data = facts.summary.kind, sections["model"], sections["data"]
    if kind in ("labelled", "pairs", "chats"):
        most = (config.longest if config else None) or LONGEST
        if config:  # an activation is about 17 fp32 numbers of each width, layer and token (Korthikanti et al. 2022)
            total, limit = machine.memory_bytes()
            each = 4 * 17 * config.d_model * config.n_layers * sections["batch"]["samples"]
            most = min(most, max(8, 8 * int((limit or total or math.inf) / 2 / each // 8)))
        length = int(min(most, 8 * -(-(np.percentile(facts.lengths(), 100 * WHOLE) + 2) // 8)))
        if config is None:
            model["seq_len"] = length
        else:
            data["max_len"] = length
        if kind == "pairs":
            sections["evaluate"]["max_new"] = length - 1
    elif kind == "images" and config is None:
        channels, side = facts.train.shape[0], min((64, *facts.image_shape[1:]))
        model["image_size"] = max(8, 4 * (side // 4))
        side = model["image_size"]
        model["patch_size"] = 4 if side <= 32 else next(p for p in (8, 7, 6, 5, 4) if side % p == 0)
        if channels != 3:
            model["n_channels"] = channels
    samples = max(1, min(sections["batch"]["samples"], len(facts.train) // 2))
    even = 4 * -(-samples // 4)  # divides among 2 and 4 processes
    sections["batch"]["samples"] = even if even <= len(facts.train) else samples


def _steps(sections: Sections, session: Session, counts: dict[str, int], facts: Facts, tuned: bool) -> float:
    """Set how long to train, so that it is minutes; returns how many."""
    kind, m = facts.summary.kind, session.recipe.model
    if kind == "images":
        length = (m.image_size // m.patch_size) ** 2 + 1
    else:
        length = facts.task.seq_len if kind == "text" else float(facts.lengths().mean()) + 2
    weights = counts["attention"] + counts["feedforward"]
    weights += m.vocab_size * m.d_model if kind in ("text", "pairs", "chats") else 0
    seconds = 0.02 + 6 * weights * length * sections["batch"]["samples"] / SPEED
    epoch = session.steps.order.steps_per_epoch
    steps = int(min(60 * MINUTES / seconds, max(3 * epoch if tuned else 10 * epoch, 20 if tuned else 200)))
    steps = max(20, round(steps, -1 if steps < 100 else -2))
    sections["train"]["steps"] = steps
    sections["evaluate"]["every"] = max(1, steps // 5)
    return steps * seconds / 60


def _recipe(target: Path, sections: Sections) -> Recipe:
    text = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    return resolve.load(target.stem, [], resolve.RunContext(settings={"text": text}))[0]


def _comments(sections: Sections, init: str | None) -> dict[str, str]:
    """Section → why it is so, and what to change."""
    kind = sections["data"]["kind"]
    more = {"images": "flip: true mirrors images at random.", "pairs": "Swap source and target for the other way."}
    held_out = f"{HELD_OUT[kind]} is held out where there is no valid split (data.valid). {more.get(kind, '')}".strip()
    comments = {
        "task": f"What the model learns. {lookup(sections['task']['name']).comment}".strip(),
        "model": "Small, for a first result on a CPU. With more data: more n_layers and d_model, or model.init=FOLDER.",
        "data": f"A relative path is looked for below the working directory, then beside this file. {held_out}",
        "tokenizer": "Made from the training text and kept with the weights.",
        "optimizer": "The learning rate (lr) is the first thing to tune: 3e-4 to 3e-3.",
        "schedule": "The learning rate rises over a tenth of the steps, then falls to 0.",
        "batch": "Samples per optimizer step, on any number of devices. Out of memory: layout.micro_batch=8.",
        "train": "Chosen for minutes on two CPU cores. Longer: train.steps=N, or train.epochs=N. "
        "patience: N stops after N evaluations in a row without a better one.",
        "evaluate": "The best checkpoint is kept. test: true evaluates the test split too, once, at the end.",
    }
    usual = "2e-4 to 1e-3 with an adapter" if "adapter" in sections else "2e-5 to 1e-4"
    return comments | ({} if init is None else {
        "model": "Fine-tuned from these weights, with their configuration; a head for other classes is new.",
        "tokenizer": "The one beside the weights.",
        "adapter": "LoRA: small matrices beside the blocks' Linears are trained, not the weights. More: rank: 32.",
        "optimizer": f"A small learning rate, since the weights are trained: {usual}, more if d_model < {SMALL}.",
    })  # fmt: skip


def _text(target: Path, sections: Sections, head: list[str], init: str | None) -> str:
    """The file. Paths below its folder are relative to it, so that both can move together."""
    base = target.absolute().parent
    shown = {name: dict(section) for name, section in sections.items()}
    for name, key in (("data", "path"), ("model", "init")):
        value = shown[name].get(key)
        if value and Path(value).is_absolute() and Path(value).is_relative_to(base):
            shown[name][key] = os.path.relpath(value, base)
    comments, lines = _comments(sections, init), [f"# {line}" for line in head]
    for name, section in shown.items():
        body = yaml.safe_dump(section, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6)
        lines += ["", *(f"# {line}" for line in textwrap.wrap(comments[name], 110)), f"{name}: {body.strip()}"]
    return "\n".join(lines) + "\n"
