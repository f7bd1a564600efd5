"""`gradus predict` and `gradus evaluate`: labels, filled masks and translations; a split's metrics."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradus import files, limits, models, pictures, tasks
from gradus import recipe as recipes
from gradus.data import preprocessor, readers
from gradus.data.augment import normalise
from gradus.data.collate import pad_sequences
from gradus.data.corpus import Corpus
from gradus.data.image_sources import is_image
from gradus.data.images import fit, read_image
from gradus.data.tokenizers import Tokenizer
from gradus.errors import InputError, UserError, did_you_mean
from gradus.infer import (
    ModelSource,
    encode,
    fits,
    grid,
    note,
    read_export_info,
    readable,
    repetition_penalty,
    with_finite_weights,
)
from gradus.infer import sources as sources_of
from gradus.infer.checked import LazyEngine
from gradus.limits import read_json
from gradus.models.decoding import complete, greedy, penalised
from gradus.models.finite import first_not_finite, not_finite
from gradus.parallel import qat
from gradus.parallel.apply import apply
from gradus.parallel.mesh import single_process
from gradus.parallel.precision import Precision
from gradus.recipe.presets import beside_weights
from gradus.recipe.schema import ImagesData, Preprocess, Recipe
from gradus.tasks.base import Task, likeliest
from gradus.tasks.kinds import task_class
from gradus.text import short
from gradus.train.evaluation import evaluate as evaluate_split
from gradus.train.resolve import RunContext
from gradus.train.resume import changed_data
from gradus.train.session import Session, open_session

BATCH = 32  # inputs a forward pass
WORST = 16  # of the samples of an evaluation: by their loss
PREDICTIONS = "predictions.jsonl"  # in a run's folder, for its report
MASK = r"(?:\[MASK\]|<mask>)"
Record = dict[str, Any]  # one input's prediction: a line of --to FILE.jsonl


# ---------------------------------------------------------------- predict


def predict(args: Any) -> Iterator[str]:
    """Yield lines with what a model says about each input. The arguments are those of `gradus predict`.

    The model decides: a label with its probability (a text or an image), the likeliest words for [MASK] or <mask>, or
    an answer (a translation, a copy of numbers). With --split, inputs and right answers are the data's.
    Raises UserError for a model that does none of this, an input that does not fit, or an option without effect.
    """
    if args.split and args.inputs:
        raise UserError(f"--split={args.split} takes inputs from the data; leave out {args.inputs[0]!r}, or --split.")
    if args.grid_file and Path(args.grid_file).suffix != ".svg":
        raise UserError(f"--grid={args.grid_file}: the picture is saved as .svg. Give a name with that ending.")
    if args.to and Path(args.to).suffix != ".jsonl":
        raise UserError(f"--to={args.to}: this is saved as .jsonl. Give a name with that ending.")
    sources = sources_of(args.model, args.adapter, args.engine, args.precision)
    if len(sources) > 1 and (args.inputs in ([], ["-"]) or args.split):
        raise UserError("several of --adapter answer the same inputs: give these as arguments.")
    if args.grid_file and sources[0].config.reads != "images":
        table = "--to RUN/predictions.jsonl, which gradus report RUN shows as a table"
        raise UserError(
            f"--grid={args.grid_file}: it shows images, and this model reads {sources[0].config.reads}. Use {table}."
        )
    records: list[Record] = []
    shown: list[Record] = []  # in the picture, with their pixels
    if "-" in args.inputs and len(args.inputs) > 1:
        raise UserError('"-" stands for the lines of standard input, so it is given alone. Leave the other inputs out.')
    for source in sources:
        if len(sources) > 1:
            yield f"{source.name}:"
        if args.inputs == ["-"]:  # each line is answered before the next is read
            answered = records_by_line(source, args.top)
        elif args.split:
            answered = split_records(source, args)
        else:
            answered = records_of(source, inputs_of(source, args), args.top)
        for record in answered:
            pixels = record.pop("pixels", None)  # of a split; a file's are read again
            if args.grid_file and "error" not in record:
                pixels = read_images(source, [record["input"]])[0] if pixels is None else pixels
                shown.append({**record, "pixels": pixels})
            records.append(record | ({"adapter": source.name} if len(sources) > 1 else {}))
            yield line_of(record)
    if known := [r["right"] for r in records if "right" in r]:
        yield f"{sum(known)} of {len(known)} right"
    if args.to:
        try:
            write_records(Path(args.to), records)
        except OSError as e:
            why = f"cannot be written ({e.strerror or e})"
            raise UserError(f"--to={args.to}: {why}. Give a file in a folder you may write.") from None
        yield f"wrote {args.to}"
    if shown:
        yield f"wrote {pictures.write(grid.of_predictions(shown), args.grid_file, '')}"
    if wrong := [i for i, r in enumerate(records, 1) if "error" in r]:
        few = f"{len(wrong)} of {len(records)} lines could not be read, line {wrong[0]} first"
        raise UserError(f"standard input: {few}. The output has the reason in place of each answer.")


def write_records(file: Path, records: Iterable[Record]) -> None:
    files.write_text(file, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))


def records_by_line(source: ModelSource, top: int) -> Iterator[Record]:
    """A prediction for each line of standard input as it comes; for a line that cannot be read, the reason."""
    model = LazyEngine(source)
    for line in lines_of(sys.stdin):
        try:
            yield from records_of(source, [line], top, model)
        except InputError as e:
            yield {"input": line, "error": str(e)}


def lines_of(file: Iterable[str]) -> Iterator[str]:
    """The lines of a file. Raises UserError where one is not text."""
    if hasattr(file, "reconfigure"):
        file.reconfigure(encoding="utf-8")  # whatever the locale's is
    try:
        for line in file:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as e:
        raise UserError(f"standard input: not text in UTF-8 (byte 0x{e.object[e.start]:02x}).") from None


def inputs_of(source: ModelSource, args: Any) -> list[str]:
    """The inputs on the command line, with files of texts replaced by their texts; without inputs the lines of standard
    input that are not empty."""
    inputs = args.inputs or list(filter(str.strip, lines_of(sys.stdin)))
    limits.words(inputs)
    if not inputs:
        raise UserError("nothing to predict. Give texts or files after the model's name, or --split valid.")
    if args.inputs and source.config.reads == "text":
        return [text for given in inputs for text in texts_of(source, given)]
    return [image for given in inputs for image in images_in(given) or [given]]


def images_in(given: str) -> list[str]:
    """The image files in a folder."""
    return sorted(f"{file}" for file in Path(given).iterdir() if is_image(file)) if os.path.isdir(given) else []


def texts_of(source: ModelSource, given: str) -> Iterable[str]:
    """A text as it is; of a file its lines, or the column that the run's recipe names. Raises UserError for a file that
    training could not read, and for a file's name of which there is none."""
    path = readers.expanded(given)
    end = readers.suffix(path)
    if (end or os.sep in given) and os.path.isfile(path):
        if readers.kind_of(path) == "txt":
            return filter(str.strip, readers.read_lines(path))
        data = source.recipe and source.recipe.data
        if data and (rows := task_class(source.recipe).rows):
            return rows(path, source.recipe)
        return Corpus.column(path, getattr(data, "text", getattr(data, "source", None)))
    if end in readers.KINDS or (os.sep in given and os.path.isdir(path)):
        aside = "If it is a text, give it on standard input"
        raise UserError(f"{given}: no such file.{readers.near(path)} {aside}.")
    if path.is_absolute() or (end and len(given.split()) == 1):
        note(f"read as a text, since there is no such file: {short(given, 40)}")
    return [given]


def line_of(record: Record) -> str:
    def guesses(ranks: list[dict[str, Any]], separator: str) -> str:
        return separator.join(f"{t['label']} {t['probability']:.4f}" for t in ranks)

    if "error" in record:
        return f"error: {record['error']}"
    if "top" in record:
        wrong = "" if record.get("right", True) else f"wrong: it is {record['truth']}"
        verdict = f"  ({wrong or 'right'})" if "right" in record else ""
        return f"{guesses(record['top'], ', ')}{verdict}  ←  {short(record['input'])}"
    if "scores" in record:
        scores = (f"{name} {x:.{2 if abs(x) >= 0.1 else 4}f}" for name, x in record["scores"].items())
        return f"{', '.join(scores)}  ←  {short(record['input'])}"
    if "masks" in record:
        masks = (f"  [MASK] {i}: {guesses(mask, '; ')}" for i, mask in enumerate(record["masks"], 1))
        return "\n".join([record["filled"], *masks])
    reference = f"\n  it is     {record['truth']}" if "truth" in record else ""
    return f"{short(record['input'])}\n  →         {record['answer']}{reference}"


def records_of(source: ModelSource, inputs: list[Any], top: int, model: LazyEngine | None = None) -> Iterator[Record]:
    """Predictions for texts, or image files, by what the model is. model: where it is open already. Raises InputError
    for one that cannot be read."""
    config, model = source.config, model or LazyEngine(source)
    head = getattr(config, "head", None)
    if source.recipe is not None and task_class(source.recipe).read:
        return read_by_task(source, inputs, top, model)
    if config.reads == "images" and config.n_classes:
        return label_images(source, inputs, top, model)
    if head == "classification":
        return label_texts(source, inputs, top, model)
    if head in ("masked_lm", "pretraining"):
        return fill_masks(source, inputs, top, model)
    if source.family.attention == "cross":
        return answers(source, inputs, model)
    writes = source.family.attention == "causal"
    use = f"gradus generate {source.name} PROMPT (of chats: --chat PROMPT)" if writes else "a model trained for a task"
    what = f"this {config.family} has no head that predicts anything"
    raise UserError(f"{source.name}: {what}. Use {use}.")


def batches(items: list[Any]) -> Iterator[list[Any]]:
    return (items[i : i + BATCH] for i in range(0, len(items), BATCH))


@torch.no_grad()
def labels(
    source: ModelSource, names: list[str], items: list[Any], logits: Callable[[list[Any]], Tensor], top: int
) -> Iterator[Record]:
    """The classes of items by their probability, or their scores. names: as records call them. logits:
    (batch, n_classes) of some."""
    classes, outputs = class_names(source), source.config.outputs
    for part in batches(list(zip(names, items))):
        values = logits([item for _, item in part]).float()
        if outputs == "none":
            yield from ({"input": n, "scores": dict(zip(classes, row))} for (n, _), row in zip(part, values.tolist()))
            continue
        values = values.sigmoid() if outputs == "sigmoid" else values.softmax(-1)
        for (name, _), (_, best) in zip(part, likeliest(values, classes.__getitem__, top)):
            yield {"input": name, **best[0], "top": best}


def class_names(source: ModelSource) -> list[str]:
    """The names in the run's recipe, else those in config.json, else numbers, or of one score its own."""
    n = source.config.n_classes
    names = getattr(source.recipe and source.recipe.task, "classes", None) or source.config.classes
    return list(names) if len(names) == n else [f"class {i}" for i in range(n)] if n > 1 else ["score"]


@torch.no_grad()
def read_by_task(source: ModelSource, texts: list[str], top: int, model: LazyEngine) -> Iterator[Record]:
    """What the task of a run makes of texts, all of which are read before the first is answered."""
    task = task_class(source.recipe).without_data(source.recipe, tokenizers=tasks.load_tokenizers(source.path))
    samples = [task.read(text, source.config.seq_len) for text in texts]
    fits(texts, [sample.get("source", sample.get("ids")) for sample in samples], source.config.seq_len)
    for part in batches(list(zip(texts, samples))):
        records = task.answers(model, [sample for _, sample in part], top)
        yield from ({"input": text, **record} for (text, _), record in zip(part, records))


# ---------------------------------------------------------------- texts


def rows_of(source: ModelSource, tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Texts as an encoder reads them, with what its tokenizer puts around one, cut to its length; a note names those
    that were cut."""
    longest = source.config.seq_len
    if source.recipe is not None:
        longest = min(longest, getattr(source.recipe.data, "max_len", None) or longest)
    room = longest - len(tokenizer.with_special_tokens([]))
    rows, heads = [], [text[: limits.TOKEN * longest] for text in texts]  # of a longer one the rest is not encoded
    for text, head, ids in zip(texts, heads, tokenizer.encode_batch(heads)):
        if len(ids) > room or head != text:
            more = "more than " if head != text else ""
            n = min(room, len(ids))
            note(f"cut to the first {n} of its {more}{len(ids)} tokens: {short(text, 40)}")
        rows.append(tokenizer.with_special_tokens(ids[:room]))
        if not rows[-1]:
            raise InputError("an empty text, and the tokenizer adds no special token. Give one with a word.")
    return rows


def batch_of(rows: list[list[int]], tokenizer: Tokenizer, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(ids (batch, seq), keep of that shape or None where nothing is padded)."""
    if len({len(row) for row in rows}) > 1 and tokenizer.pad_id is None:
        note("the tokenizer has no padding token; token 0 is used in its place and masked")
    ids, keep = pad_sequences([np.array(row) for row in rows], tokenizer.pad_id or 0)
    return ids.to(device), None if bool(keep.all()) else keep.to(device)


def label_texts(source: ModelSource, texts: list[str], top: int, model: LazyEngine) -> Iterator[Record]:
    tokenizer = source.tokenizers()[""]

    def logits(part: list[str]) -> Tensor:
        ids, keep = batch_of(rows_of(source, tokenizer, part), tokenizer, model.device)
        return model(ids, keep=keep)

    return labels(source, texts, texts, logits, top)


@torch.no_grad()
def fill_masks(source: ModelSource, texts: list[str], top: int, model: LazyEngine) -> Iterator[Record]:
    """For each [MASK] or <mask> the likeliest tokens, each mask by itself; `filled` has the likeliest in all."""
    tokenizer = source.tokenizers()[""]
    if tokenizer.mask_id is None:
        raise UserError(f"{source.name}: its tokenizer has no mask token.")
    readable(texts, source.config.seq_len)
    for text in texts:
        # In a run's own training a mask stood for a word and the space before it
        parts = re.split(MASK if source.recipe is None else rf"\s*{MASK}", text)
        if len(parts) < 2:
            raise InputError(f"no [MASK] or <mask> in {short(text, 40)!r}: mark the words to be filled in.")
        if tokenizer.special_in_text:
            ids = tokenizer.encode(tokenizer.token(tokenizer.mask_id).join(parts))
        else:
            ids = [i for part in parts for i in (tokenizer.mask_id, *tokenizer.encode(part))][1:]
        row = tokenizer.with_special_tokens(ids)
        fits([text], [row], source.config.seq_len)
        batch = torch.tensor([row], device=model.device)
        out = model(batch, select=batch == tokenizer.mask_id)
        chances = (out[0] if isinstance(out, tuple) else out).float().softmax(-1)
        name = lambda i: tokenizer.decode([i]).strip() or tokenizer.token(i)  # noqa: E731
        masks = list(likeliest(chances, name, top))
        first = iter([chosen[0] for chosen, _ in masks])
        filled = tokenizer.decode([next(first) if i == tokenizer.mask_id else i for i in ids])
        yield {"input": text, "filled": filled, "masks": [best for _, best in masks]}


@torch.no_grad()
def answers(source: ModelSource, texts: list[str], model: LazyEngine) -> Iterator[Record]:
    """Greedy answers of an encoder-decoder: translations or filled sentinels. An empty text's is empty."""
    penalty, tokenizers = repetition_penalty(source), source.tokenizers()
    tokenizer = tokenizers.get("target", tokenizers[""])
    asked = source.recipe.evaluate.max_new if source.recipe is not None else None
    written = (Task if source.recipe is None else task_class(source.recipe)).written

    def answered(texts: list[str]) -> list[list[int]]:
        encoded = encode(source, tokenizers, texts)
        max_new = [min(source.config.seq_len, asked or 2 * len(row) + 10) for row in encoded.sources]
        choose = penalised(greedy, penalty, encoded.prompts)
        options = {"sources": encoded.sources, "max_new": max_new, "eos_id": encoded.ends, "choose": choose}
        return complete(model.on(encoded), encoded.prompts, **options)

    for part in batches(texts):
        rows = iter(answered(read) if (read := [text for text in part if text.strip()]) else [])
        for text in part:
            row = next(rows) if text.strip() else []
            yield {"input": text, "answer": written(tokenizer, row)}


# ---------------------------------------------------------------- images


def read_images(source: ModelSource, files: list[str | bytes]) -> list[np.ndarray]:
    """uint8 (channels, image_size, image_size) of each file, or of the bytes of one."""
    for file in files:
        if isinstance(file, str) and not (path := Path(file)).is_file():
            names = [p.name for p in path.parent.iterdir() if is_image(p)] if path.parent.is_dir() else []
            meant = did_you_mean(path.name, names) if names else ""
            raise InputError(f"{file}: no such image file, and no folder with one.{meant}")
    n, size, how = source.config.n_channels, source.config.image_size, preparation(source).preprocess
    named = [(file if isinstance(file, str) else "image", file) for file in files]
    try:
        return [fit(read_image(file, name, n), size, how or Preprocess(resize=size), name) for name, file in named]
    except UserError as e:
        raise InputError(str(e)) from None


def preparation(source: ModelSource) -> ImagesData:
    """How images are prepared (mean, std, preprocess), as in training: from the run's recipe, which keeps what was
    measured, or from preprocessor_config.json beside the weights."""
    data = source.recipe.data if source.recipe is not None else published(source, ImagesData())
    if not (data.mean and data.std):
        where = source.folder / preprocessor.FILE if source.recipe is None else f"{source.name}: its recipe.yaml"
        what = "no data.mean and data.std (image_mean, image_std), by which images are normalised"
        raise UserError(f"{where}: {what}. Write them there.")
    return data


def published(source: ModelSource, data: ImagesData) -> ImagesData:
    """The data, completed by preprocessor_config.json beside the weights, where there is one."""
    file = next(iter(source.beside(preprocessor.FILE)), source.folder / preprocessor.FILE)
    return preprocessor.as_published(data, file, source.config, source.config.image_size)


def prepared(source: ModelSource, images: list[np.ndarray], device: torch.device) -> Tensor:
    """(batch, channels, image_size, image_size): of `read_images`, normalised as in training."""
    data = preparation(source)
    return normalise(torch.tensor(np.stack(images), device=device), data.mean, data.std)


def label_images(source: ModelSource, files: list[str], top: int, model: LazyEngine) -> Iterator[Record]:
    images = read_images(source, files)
    return labels(source, files, images, lambda part: model(prepared(source, part, model.device)), top)


# ---------------------------------------------------------------- the run's own data


def split_records(source: ModelSource, args: Any) -> Iterator[Record]:
    """Predictions for the first `args.n` samples of a split, with the right answers."""
    if source.recipe is None:
        raise UserError(f"--split={args.split}: {source.name} belongs to no run. Give inputs, or a run folder.")
    task = tasks.open_task(asking_for(source.recipe, args.split), tasks.load_tokenizers(source.path))
    task.complete(source.config)  # labels are numbered as the head's
    if type(task).answers is Task.answers:
        raise UserError(f"--split={args.split}: task {source.recipe.task.name} has no right answers. Give texts.")
    chosen = range(min(args.n, len(split_of(task, args.split, source.run))))
    return sample_records(source, task, args.split, chosen, args.top, LazyEngine(source))


@torch.no_grad()
def sample_records(
    source: ModelSource, task: Task, split: str, chosen: Sequence[int], top: int, model: LazyEngine
) -> Iterator[Record]:
    """Predictions for samples of a split, with the right answers; of a task that has none their texts alone."""
    for part in batches(chosen):
        samples = [task.splits[split][i] for i in part]
        for i, sample, record in zip(part, samples, task.answers(model, samples, top)):
            ids = sample.get("ids", sample.get("source"))
            named = {"input": task.tokenizer.decode(ids.tolist()) if task.tokenizers else f"{split} {i}"}
            yield named | record | ({"pixels": sample["image"]} if "image" in sample else {})


def asking_for(recipe: Recipe, split: str) -> Recipe:
    """The recipe as one process evaluates it, with the test split opened when it is wanted."""
    evaluate = recipe.evaluate.model_copy(update={"test": split == "test"})
    return recipe.model_copy(update={"evaluate": evaluate, "layout": single_process(recipe.layout)})


def split_of(task: Task, split: str, run: Path | None) -> Any:
    """A split's data. run: the folder of the run that they belong to: a note says where it has read others. Raises
    UserError where there is no such split."""
    if split not in task.splits:
        raise UserError(f"--split={split}: this data has no such split.{did_you_mean(split, task.splits)}")
    if run is not None and split in changed_data(run, task):
        note(f"{split}: other data than {run} has read: the figures are not of the same samples")
    return task.splits[split]


# ---------------------------------------------------------------- evaluate

FREE = ("layout", "data", "evaluate", "log")  # the sections that change no weight


def evaluate(
    name: str, overrides: list[str], split: str, checkpoint: str | None = None, json_file: str | None = None,
    engine: str | None = None, precision: str | None = None, keep: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The metrics of a run's best checkpoint, or of `checkpoint`, over a whole split, each sample exactly once.

    engine, precision: what runs the model, if not PyTorch as the recipe says, which for a run with train.qat computes
    with the rounding that training saw. keep: predictions for the samples, which are then evaluated one by one, go into
    the run's folder.
    Arguments and errors else as of `open_evaluation`; NotFinite where the loss is not finite.
    """
    alone = ["evaluate.batch=1"] if keep else []
    source, session = open_evaluation(name, [*overrides, *alone], split, checkpoint, json_file)
    source.engine, source.precision = engine, precision
    plain = not source.export_info and (engine or "torch", precision or "fp32") == ("torch", "fp32")
    instead = None if plain else LazyEngine(source)
    task, sums = session.task, []
    model = session.deferred(values=False).on(session.device if plain else "meta")  # an engine opens its own
    if plain:
        models.load_weights(model, source.path)
        with_finite_weights(source, model)
    rounds = plain and session.recipe.train.qat and (source.path / qat.FILE).is_file()  # as training evaluated
    parallel = apply(model, session.recipe.layout, qat=rounds)
    if rounds:
        qat.restore(model, read_json(source.path / qat.FILE, limits.CONFIG_FILE))
    precision = session.precision if plain else Precision("fp32", session.device)  # an engine has its own
    run = functools.partial(evaluate_split, parallel, task, split, precision, session.device)
    metrics = run(instead=instead, each=sums if keep else None)
    if not math.isfinite(metrics.get("loss", 0.0)):
        if instead is not None:
            raise instead.not_finite(lambda steps: run(instead=steps))
        raise not_finite(source.name, source.path, first_not_finite(model, run))
    if keep:
        engine = instead or LazyEngine(source)
        if plain and not session.recipe.layout.precision.startswith("pure_"):
            source.model, engine.device = parallel.bare, session.device
        with precision.autocast():
            write_records(Path(name) / PREDICTIONS, by_loss(source, task, split, sums, engine))
    return {f"{split}/{key}": value for key, value in metrics.items()}


def by_loss(source: ModelSource, task: Task, split: str, sums: list[dict], model: LazyEngine) -> Iterator[Record]:
    """Predictions for the samples of a split, by their loss, the largest first: of a classifier all, else WORST. sums:
    of the metrics of each sample (see `evaluate_split`)."""
    losses = {int(each["samples"][0]): each["loss"][0] / max(1, each["loss"][1]) for each in sums}
    chosen = sorted(losses, key=losses.get, reverse=True)
    chosen = chosen if task.recipe.task.head == "classification" else chosen[:WORST]
    for n, (i, record) in enumerate(zip(chosen, sample_records(source, task, split, chosen, 1, model))):
        pixels = record.pop("pixels", None)
        shown = {} if pixels is None or n >= WORST else {"pixels": pixels.tolist()}
        yield {**record, "loss": losses[i], **shown}


def open_evaluation(
    name: str, overrides: list[str], split: str, checkpoint: str | None = None, json_file: str | None = None
) -> tuple[ModelSource, Session]:
    """(the weights, the data with the split opened): of a run's best checkpoint, or of `checkpoint`.

    name: a run folder, or with `checkpoint` any recipe. A run may override only layout, data, evaluate and log; of
    json_file (TrainingArguments) only these count.
    Raises UserError for other overrides, for a recipe without weights, and for weights and data that do not fit.
    """
    notes: list[str] = []

    def load(extra: dict[str, Any], notes: list[str]) -> Recipe:
        free = {key: value for key, value in extra.items() if key.split(".")[0] in FREE}
        if free != extra:
            taken = ", ".join(free) or "nothing"
            notes.append(f"{json_file}: an evaluation uses only {taken} of it; the rest is for training")
        # the architecture is the weights' own, in the place of those that training would start from
        configure = None if is_run else lambda init: beside_weights(checkpoint or init)
        return recipes.load(name, overrides, notes=notes, configure=configure, **free)

    is_run = (Path(name) / "recipe.yaml").is_file()
    recipe = RunContext(json_file).load_with(load, notes)
    for text in notes:
        note(text)
    for override in overrides if is_run else ():
        if not override.startswith(FREE):
            raise UserError(f"{override}: this would be another model. Only {', '.join(FREE)} may change.")
    if not is_run and checkpoint is None:
        raise UserError(f"{name}: a recipe has no weights. Give a run folder, or --checkpoint DIR.")
    path = models.locate(name if checkpoint is None else checkpoint)
    export_info = read_export_info(path)
    config = models.config_of(path)  # the weights' own
    if config.family != recipe.model.family:
        raise UserError(f"the weights are a {config.family}, and recipe {recipe.name} is for {recipe.model.family}.")
    source = ModelSource(name if checkpoint is None else checkpoint, path, config, None, export_info)
    data = published(source, recipe.data) if config.reads == "images" else recipe.data
    source.recipe = recipe = recipe.model_copy(update={"model": config, "data": data})
    tokenizers = tasks.load_tokenizers(path) if path.is_dir() else None
    session = open_session(asking_for(recipe, split), tokenizers)
    split_of(session.task, split, Path(name) if is_run else None)  # raises where there is none
    if recipe.task.head == "classification" and not config.classes:
        names = ", ".join(session.task.classes[:10])
        note(f"classes: the head's have no names (id2label); they are taken to be, in order, {names}")
    for text in session.task.notes(split):
        note(text)
    return source, session
