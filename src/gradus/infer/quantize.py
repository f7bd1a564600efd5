"""`gradus quantize`: a model with its Linears in int8 or int4, set beside what it replaces before it is kept."""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradus import models
from gradus.data.loader import Loader, Step
from gradus.errors import UserError, did_you_mean
from gradus.infer import ModelSource, engines, quantized, sidecar
from gradus.infer.checked import compare, line
from gradus.infer.engines import Engine, by_name
from gradus.infer.export import free
from gradus.infer.exported import check_finite
from gradus.infer.predict import BATCH, open_evaluation
from gradus.layers import linears
from gradus.limits import CONFIG_FILE, read_json
from gradus.models.decoding import complete
from gradus.parallel import qat
from gradus.parallel.engine import Parallel
from gradus.parallel.mesh import Mesh
from gradus.parallel.precision import Precision
from gradus.tasks.base import Task
from gradus.text import table as columns
from gradus.train.evaluation import evaluate
from gradus.train.session import Session

CALIBRATE = 256  # samples, unless said otherwise
ROUNDS, TOKENS = 7, 32  # of timing; that are decoded in one of them
TIMINGS = 3  # at most, while what is new seems to be slower: other programs may use the processors
Table = dict[str, Any]  # name → [before, after]; difference: see `paired_loss`


def quantize(args: Any) -> Iterator[str]:
    """Write the quantized model to the folder `to`, with its tokenizer, and yield the table. The arguments are those of
    `gradus quantize`.

    Raises UserError, and writes nothing, where the result is slower than what it replaces or loses more than max_loss
    points of accuracy (unless force), and for what does not fit together.
    """
    source, session = open_evaluation(args.recipe, args.overrides, args.split, args.checkpoint, args.json_file)
    engine, to = _engine(args, source), Path(args.to)
    free(source, to, quantized.FILE, "quantized model")
    without = session.recipe.evaluate.model_copy(update={"decode": False})  # accuracy is of given answers
    session.task.recipe = session.task.recipe.model_copy(update={"evaluate": without})
    model = source.load()
    check_finite(source, model)
    ranges, origin = _ranges(args, source, session) if args.how == "static" else ({}, None)
    if origin:
        yield origin
    with sidecar.folder(to) as folder:
        about = quantized.write(folder, model, args.how, ranges)
        quantized_source = ModelSource(str(folder), folder, models.config_of(folder), source.recipe, about)
        old, new = engines.open(source, engine), engines.open(quantized_source, engine, about["precision"])
        size = [sum(p.stat().st_size for p in which.weights()) for which in (source, quantized_source)]
        table: Table = {"size, MB": [n / 1e6 for n in size]} | before_and_after(session, args.split, old, new)
        yield from table_lines(table, about, args)
        refusal = why_refused(table, args.max_loss)
        if refusal and not args.force:
            raise UserError(f"--as {args.how}: {refusal}. Nothing was written. --force keeps it.")
        inputs = _arguments(model, session, args.split)
        with torch.no_grad():
            rows = [row.known() | {"when": f"{datetime.date.today()}"} for row in compare(new, old, [inputs])]
        about |= {"told": line(rows), "table": table, "calibrated": origin}
        (folder / quantized.FILE).write_text(json.dumps(about, indent=1) + "\n")
        sidecar.write(source, folder)
    forced = f" (--force: {refusal})" if refusal else ""
    yield f"{source.path} → {to}: use it with --engine {engine} --precision {new.precision}{forced}"


def _engine(args: Any, source: ModelSource) -> str:
    """The engine in which both are measured. Raises UserError for what does not fit together."""
    how, known = args.how, engines.quantized_in(args.how, source.family)
    if source.export_info:
        raise UserError(f"{source.name}: an exported or quantized folder. Give the model that it was made from.")
    if args.calibrate and how != "static":
        raise UserError(f"--calibrate={args.calibrate}: only for --as static; {how} needs no samples. Leave it out.")
    if why := quantized.lacks(how):
        raise UserError(f"--as {how}: {why}. Use --as int8, or run it with --precision bf16.")
    if args.engine not in (None, *known):
        raise UserError(f"--engine={args.engine}: --as {how} is not for it. Use --engine {' or '.join(known)}.")
    return args.engine or known[-1]


# ---------------------------------------------------------------- ranges of inputs


def _ranges(args: Any, source: ModelSource, session: Session) -> tuple[dict[str, list[float]], str]:
    """(module → lowest and highest input, where they are from). Raises UserError where there are none."""
    file = source.folder / qat.FILE
    if file.is_file():
        if args.calibrate:
            raise UserError(f"--calibrate={args.calibrate}: training saw the ranges (train.qat). Leave it out.")
        ranges, origin = read_json(file, CONFIG_FILE), "ranges of inputs: those that training saw (train.qat)"
    else:
        batches, origin = calibration(args.calibrate or "train", args.split, session)
        ranges = input_ranges(source.load(), session, batches)
    if lacks := [name for name in linears(source.load()) if name not in ranges]:
        raise UserError(f"{args.recipe}: no input of {lacks[0]} was seen. Use --as dynamic.")
    return ranges, origin


def calibration(asked: str, evaluated: str, session: Session) -> tuple[list[dict], str]:
    """(batches of the named set, a sentence on it). asked: SPLIT or SPLIT:N. Raises UserError for none, and for the
    split that is evaluated."""
    split, colon, number = asked.partition(":")
    if split not in (splits := session.task.splits):
        raise UserError(f"--calibrate={asked}: this data has no such split.{did_you_mean(split, splits)}")
    if split == evaluated:
        raise UserError(f"--calibrate={asked}: the accuracy is measured on it. Use train, or evaluate another --split.")
    if colon and not (number.isascii() and number.isdigit() and len(number) < 10 and int(number)):
        raise UserError(f"--calibrate={asked}: expected SPLIT or SPLIT:N, such as train:256.")
    n = min(int(number) if colon else CALIBRATE, len(splits[split]))
    order = "as the recipe shuffles it" if split == "train" else "in its order"
    return next(_steps(session, split, n)).micro_batches, f"calibrated on the first {n:,} samples of {split}, {order}"


def _steps(session: Session, split: str, samples: int) -> Iterator[Step]:
    """A split in its order, so many samples per step and at most BATCH per forward pass."""
    task = session.task
    plan = task.plan(split, samples, None)
    return Loader(task.splits[split], plan, task.collate, prepare=task.prepare_evaluation, micro_batch=BATCH).steps(0)


@torch.no_grad()
def input_ranges(model: nn.Module, session: Session, batches: list[dict]) -> dict[str, list[float]]:
    """Lowest and highest input of every Linear over these batches."""
    ranges: dict[str, Tensor] = {}

    def extend(module: nn.Module, inputs: tuple, name: str) -> None:
        low, high = inputs[0].aminmax()
        old = ranges.get(name, (low, high))
        ranges[name] = torch.stack((old[0].minimum(low), old[1].maximum(high)))

    named = linears(model).items()
    hooks = [linear.register_forward_pre_hook(functools.partial(extend, name=name)) for name, linear in named]
    for batch in batches:
        session.task.evaluate(model, session.task.to_device(batch, session.device))
    for hook in hooks:
        hook.remove()
    return {name: pair.tolist() for name, pair in ranges.items()}


# ---------------------------------------------------------------- before and after


def before_and_after(session: Session, split: str, old: Engine, new: Engine) -> Table:
    """The table of both engines. Times are medians in ms, the two in turn, of the last of up to TIMINGS; metrics are of
    the whole split."""
    task, calls = session.task, _timed(session, split)
    for call, engine in itertools.product(calls.values(), (old, new)):
        call(engine)  # compiles, where it does
    for _ in range(TIMINGS):
        table: Table = {}
        for name, call in calls.items():
            times = [[_ms(call, engine) for engine in (old, new)] for _ in range(ROUNDS)]
            table[name] = [statistics.median(column) for column in zip(*times)]
        if not slower(table):
            break
    each: tuple[list[dict], list[dict]] = ([], [])
    fp32, parallel = Precision("fp32", session.device), Parallel(old.model, session.recipe.layout, Mesh.single())
    metrics = [
        evaluate(parallel, task, split, fp32, session.device, instead=engine, each=sums)
        for engine, sums in zip((old, new), each)
    ]
    table |= {f"{split}/{name}": [m[name] for m in metrics] for name in (task.accuracy, "loss")}
    both = [(a["accuracy"], b.get("accuracy", b["loss"])) for a, b in zip(*each, strict=True)]
    return table | {"difference": paired_loss([(before - after, n) for (before, n), (after, _) in both])}


def paired_loss(batches: list[tuple[float, int]]) -> tuple[float, float, int]:
    """(points lost, their standard error, targets) from (right before - right after, targets) of every batch. The error
    is that of a ratio whose batches are drawn (Cochran 1977, section 6.4)."""
    n, k = sum(count for _, count in batches), len(batches)
    mean = sum(difference for difference, _ in batches) / n
    spread = sum((difference - mean * count) ** 2 for difference, count in batches)
    return 100 * mean, 100 * math.sqrt(spread * k / (k - 1)) / n if k > 1 else math.inf, n


def _timed(session: Session, split: str) -> dict[str, Callable[[Engine], Any]]:
    """What is timed, by its name in the table: a pass over one sample and over BATCH, or a token that is written."""
    task, many = session.task, min(BATCH, len(session.task.splits[split]))
    batches = {n: task.to_device(next(_steps(session, split, n)).micro_batches[0], session.device) for n in (1, many)}
    if models.lookup(session.recipe.model.family).attention == "both":
        return {f"ms, batch {n}": functools.partial(_evaluated, task, b) for n, b in batches.items()}
    batch, longest = batches[1], session.recipe.model.longest
    sources = batch["source"].tolist() if "source" in batch else None
    prompts = (batch["ids"][:, :8] if sources is None else batch["target"][:, :1]).tolist()
    new = TOKENS if longest is None else min(TOKENS, longest - len(prompts[0]))
    return {f"ms, {new} tokens": lambda engine: complete(engine, prompts, max_new=new, sources=sources)}


@torch.no_grad()
def _evaluated(task: Task, batch: dict, engine: Engine) -> Any:
    return task.evaluate(engine, batch)


def _ms(call: Callable[[Engine], Any], engine: Engine) -> float:
    began = time.perf_counter()
    call(engine)
    return (time.perf_counter() - began) * 1e3


def _arguments(model: nn.Module, session: Session, split: str) -> dict[str, Any]:
    """What the task calls the model with for the first batch of a split, by name, for `compare`."""
    arguments: dict[str, Any] = {}

    def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
        arguments.update(by_name(module.forward, args, kwargs))

    batch = next(_steps(session, split, BATCH)).micro_batches[0]
    hook = model.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        session.task.evaluate(model, session.task.to_device(batch, session.device))
    hook.remove()
    return {name: value for name, value in arguments.items() if value is not None and name != "select"}


def slower(table: Table) -> str:
    """The times of what is slower than what it replaces; "" of what is not."""
    times = {name: pair for name, pair in table.items() if name.startswith("ms")}
    if math.prod(before / after for before, after in times.values()) >= 1:
        return ""
    return "; ".join(f"{name}: {after:.3g} after, {before:.3g} before" for name, (before, after) in times.items())


def why_refused(table: Table, max_loss: float) -> str | None:
    """Why a result is not worth keeping, with its figures; None: it is."""
    points, error, n = table["difference"]
    reasons = []
    if not all(math.isfinite(pair[1]) for name, pair in table.items() if "/" in name):
        reasons.append("its logits are not finite")
    elif points > max_loss:
        reasons.append(f"it loses {points:.2f} ± {error:.2f} points of {n:,}, more than --max-loss {max_loss:g}")
    if figures := slower(table):
        reasons.append(f"it is slower than what it replaces, {TIMINGS} times in a row ({figures})")
    return " and ".join(reasons) or None


def table_lines(table: Table, about: dict[str, Any], args: Any) -> Iterator[str]:
    rows = {name: pair for name, pair in table.items() if name != "difference"}
    body = []
    for name, (before, after) in rows.items():
        ratio = f"{after - before:+.4f}" if "/" in name else f"{before / after:.2f}×"
        digits = ".4f" if "/" in name else ".3f" if before < 100 else ".1f"
        body.append([name, f"{before:{digits}}", f"{after:{digits}}", ratio])
    yield from columns(["", "as it is", args.how, "ratio"], body, {1, 2, 3})
    points, error, n = table["difference"]
    lost = f"{points:.2f} ± {error:.2f} points of accuracy"
    yield f"loses {lost} on {n:,} targets, paired; computes in {about['computes']}"
