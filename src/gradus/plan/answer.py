"""A request → the rows of a plan: what `gradus plan`, the page and a program ask."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gradus import hardware
from gradus import recipe as recipes
from gradus.errors import DataError, UserError, did_you_mean
from gradus.hardware import Cluster, Device
from gradus.parallel import mesh
from gradus.parallel.world import World
from gradus.plan.budget import Failures, budget
from gradus.plan.figures import AT_PEAK, figure, known_figure
from gradus.plan.keys import computed_in, kind_of, layout_keys, precision_text, stated_keys
from gradus.plan.request import Answer, Reply, Request
from gradus.plan.roofline import peak_flops
from gradus.plan.show import TIGHT, headline
from gradus.plan.step import HOST_TO_DEVICE, StepTime, bubble_share, step_time
from gradus.plan.work import COMPONENTS, Target, Work
from gradus.recipe.presets import ALIASES, PRESETS
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row
from gradus.text import duration, size

if TYPE_CHECKING:  # imported where they are needed: --help is instant
    from gradus.plan.case import Case
    from gradus.plan.engine import Plan
    from gradus.plan.process import Memory
    from gradus.tasks.base import Task
    from gradus.train import resolve


def pinned(request: Request, answer: Answer) -> Request:
    """The request whose answer is this one again, with the plan's own choice in its overrides."""
    if not answer.chosen:
        return request
    rest = [o for o in request.overrides if o.partition("=")[0].strip().partition(".")[0] != "layout"]
    words = [word for word in answer.layout_keys.split() if word.startswith("layout.")]
    return dataclasses.replace(request, overrides=(*rest, *words), on=f"{answer.n}x{kind_of(request.on)}")


class Question(NamedTuple):
    """A request, opened. case: of the recipe's own layout. counted: whether it names the number of devices. choose:
    whether the plan is to choose the layout."""

    case: Case
    cluster: Cluster | None
    counted: bool
    choose: bool


def answer(request: Request) -> Answer:
    """The plan: the recipe opened, a layout chosen where none is given, its figures as rows. What does not fit is an
    answer, not an error. Raises UserError for what the recipe, the layout or the hardware cannot follow."""
    notes: list[str] = []
    question = asked(request, notes)
    case, cluster, counted, choose = question
    stated, chosen = stated_keys(request.overrides), None
    find = bool(cluster and request.days and not counted)  # the number of devices
    if find:
        from gradus.plan.search import fewest_in_time

        more = {"chosen": choose, "stated": stated, "mtbf": request.mtbf}
        fewest = fewest_in_time(case, cluster, total_steps(case), request.days, **more)
        chosen = fewest.plan if choose else None
        question = question._replace(case=case.at(n=fewest.n), cluster=Cluster(cluster.device, fewest.n))
        notes.append(f"{request.days:g} days need at least {fewest.n:,} devices, in whole nodes")
    elif choose and cluster:
        from gradus.plan.search import best_layout

        chosen = best_layout(case, cluster, stated)
    answer = _on(request, question, chosen, notes)
    if find:
        answer.layout_keys = f"--on {answer.n}x{kind_of(request.on)} {answer.layout_keys}".strip()
        answer.chosen = True
    return answer


def asked(request: Request, notes: list[str]) -> Question:
    """Raises UserError as `answer`. notes receives what was derived."""
    from gradus.plan.case import Case

    recipe, task, bare = open_recipe(request, notes)
    cluster, counted = _cluster(request)
    if cluster:
        recipe = _with_known_precision(request, recipe, cluster, bool(bare), notes)
    case = Case.of(recipe, cluster.n if cluster else mesh.needed(recipe.layout), target_of(cluster), task)
    return Question(case, cluster, counted, bool(bare) and not stated_keys(request.overrides) & SPLITTING)


def _on(request: Request, question: Question, chosen: Plan | None, notes: list[str]) -> Answer:
    """chosen: of the plan's own choice of a layout; None: the recipe's."""
    from gradus.plan import engine

    case, cluster, *_ = question
    own, stated = case.layout, stated_keys(request.overrides)
    if not chosen:
        _check_whole_replicas(own, case.n, request.on)
    plan = chosen or engine.plan(case)
    layout = plan.case.layout
    rows, fits = _rows(request, plan, cluster, notes)
    state = STATE_BYTES * next(row.value for row in rows if row.name == "parameters/total")
    if chosen and layout.param_dtype and state < cluster.device.capacity / 2:
        dtype = layout.param_dtype
        notes.append(
            f"a device would hold the whole state, {size(state)}: it is sharded because layout.param_dtype={dtype} "
            f"also computes norms and residuals in {dtype}, which is faster than replicas, whose layout.precision "
            "keeps them in fp32 (--search)"
        )
    if chosen:
        notes.append("the layout is the plan's own choice: --search shows the others, layout.* keys set another")
    keys = layout_keys(layout, own, stated)
    answer = Answer(plan.case.recipe, cluster, case.n, rows, notes, fits, keys, chosen=chosen is not None, plan=plan)
    if fits and chosen and layout.checkpointing != "none" and "checkpointing" not in stated:
        from gradus.plan.search import Space, why_free

        if (free := 1 - answer.value("memory/device") / cluster.capacity) > FREE:
            notes.append(f"{free:.0%} of the memory stays free: {why_free(Space(case, cluster, stated), layout)}")
    if fits is False and not answer.tight:
        answer.advice = _advice(request, answer, own)
    answer.headline = headline(answer, request)
    return answer


# ---------------------------------------------------------------- what is asked

IMAGENET = 1000  # classes
STATE_BYTES = 16  # of a parameter: weight, gradient and two moments of Adam in fp32
FEW_STEPS = 100
LEAST_GOODPUT = 0.01
FREE = 0.5  # of a device's memory, beside checkpointing: a note says why
MOST_DEVICES = 2**20  # larger numbers take the search for a layout minutes
SPLITTING = {  # setting one of these turns off the plan's own choice of a layout
    "shard", "tensor", "pipeline", "context", "expert", "replicate", "micro_batch", "shard_optimizer",
}  # fmt: skip


def _check_whole_replicas(layout: Layout, n: int, on: str | None) -> None:
    """Raises UserError where n devices are no whole number of what one replica takes."""
    one = mesh.needed(layout)
    if n % one:
        axes = " × ".join(f"{axis} {k}" for axis, k in mesh.sizes(layout, one).items() if k > 1)
        device = kind_of(on or "")
        instead = f"--on {one * max(1, round(n / one))}x{device}, or other layout.* keys"
        raise UserError(f"layout: {axes} = {one} devices, of which {n} is not a multiple. Use {instead}.")


def open_recipe(request: Request, notes: list[str]) -> tuple[Recipe, Task | None, str | None]:
    """(recipe with every size known, its task where the data could be opened, the preset's or hf: name where it is a
    bare model). Raises UserError as `answer`."""
    from gradus.train import resolve

    name, cluster = _named(request.recipe), _cluster(request)[0] if request.json_file else None
    world = World(size=cluster.n, local_size=min(cluster.n, cluster.device.node)) if cluster else World()
    options = resolve.RunContext(request.json_file, world)
    if name.startswith("hf:"):
        _offline_without_a_network()
    if name in PRESETS or name in ALIASES or name.startswith("hf:"):
        return _bare_recipe(request, name, options, notes), None, name
    file = Path(os.path.expanduser(name)).exists() or name.endswith((".yaml", ".yml", ".json"))
    if not file and name not in recipes.names():
        suggestion = did_you_mean(name, [*recipes.names(), *PRESETS, *ALIASES])
        raise UserError(f"{name}: no such recipe or preset.{suggestion} gradus recipes and gradus models list them.")
    recipe, more = resolve.load(name, list(request.overrides), options)
    notes += more
    recipe, task = _with_data(recipe, notes)
    return (_for_tokens(recipe, request.tokens) if request.tokens else recipe), task, None


def _bare_recipe(request: Request, name: str, options: resolve.RunContext, notes: list[str]) -> Recipe:
    """name: of a preset, or hf:NAME. options: what the command line gives beside overrides."""
    from gradus import models
    from gradus.plan import hf

    adapter = any(re.match(r"\s*adapter\b", o) for o in request.overrides)
    base = hf.recipe_for(name, tokens=request.tokens, notes=notes, adapter=adapter)
    words, text = [*request.overrides, *_implied(request.overrides)], recipes.dump(base)
    recipe = options.load_with(lambda extra, notes: recipes.load(name, words, notes=notes, text=text, **extra), notes)
    if getattr(recipe.data, "max_len", None) != getattr(base.data, "max_len", None):  # it is stated
        notes[:] = [note for note in notes if not note.startswith("planned for samples")]
    if recipe.layout.precision == base.layout.precision:  # a default: where layout.param_dtype is given, that holds
        recipe.layout.model_fields_set.discard("precision")
    if adapter and recipe.layout.precision == "pure_bf16":
        notes.append("all weights are planned in bf16, the frozen ones and the adapter's (layout.precision=pure_bf16)")
    if recipe.model.init and not name.startswith("hf:"):
        models.config_of(recipe.model.init)  # or there is nothing to start from
    if any(o.startswith(("train.steps=", "train.epochs=")) for o in request.overrides):
        return recipe
    now, before = tokens_a_step(recipe), tokens_a_step(base)
    if now != before and base.train.steps:  # an override has changed the batch: as many tokens in the whole
        recipe = _for_tokens(recipe, request.tokens or base.train.steps * before)
        steps = f"{recipe.train.steps:,} steps, to keep the total"
        notes.append(f"a step has {now:,.0f} tokens instead of {before:,.0f}: {steps}")
    return recipe


def _named(name: str) -> str:
    """A folder that is no run but holds a config.json is a bare model; so is that file."""
    path = Path(os.path.expanduser(name))
    folder = path.parent if path.name == "config.json" else path
    bare = (folder / "config.json").is_file() and not (folder / "recipe.yaml").exists()
    return name if not bare else f"hf:{name}" if folder == path else f"hf:{folder}"


def _implied(overrides) -> list[str]:
    """What overrides of a bare model mean besides: who sets model.seq_len means its samples, who sets
    layout.param_dtype weights in fp32."""
    values = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    length, half = values.get("model.seq_len", ""), values.get("layout.param_dtype", "null") != "null"
    words = [f"data.max_len={length}"] if length.isdigit() and not {"data", "data.max_len"} & values.keys() else []
    return [*words, *(["layout.precision=fp32"] if half and "precision" not in stated_keys(overrides) else [])]


def _with_data(recipe: Recipe, notes: list[str]) -> tuple[Recipe, Task | None]:
    """The recipe completed by its data, and its task. Where the data are not at hand, the recipe's own keys have to do;
    any other mistake in it is an error."""
    from gradus.plan import batches, engine
    from gradus.train import machine
    from gradus.train.session import open_session

    _offline_without_a_network()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the note below says what cannot be reached
    layout = mesh.single_process(recipe.layout).model_copy(update={"device": "cpu"})
    engine.resident_at_start()  # without the data
    start = machine.resident()
    try:
        session = open_session(recipe.model_copy(update={"layout": layout}))
    except (DataError, OSError) as e:
        why, model = str(e).splitlines()[0].rstrip("."), recipe.model
        if model.reads == "images" and model.n_classes is None:
            recipe = recipe.model_copy(update={"model": model.model_copy(update={"n_classes": IMAGENET})})
            unknown = "the number of classes is not known without the data"
            notes.append(f"{unknown}: planned with ImageNet's {IMAGENET:,} (model.n_classes)")
        if missing := " ".join(f"{key}=N" for key in batches.missing_keys(recipe)):
            needed = f"Without the data the plan needs {missing}, and for the whole run train.steps=N"
            raise UserError(f"{why}. {needed}.") from None
        notes.append(f"the data could not be opened ({why}): planned for samples of full length")
        return recipe, None
    session.task.opened = max(0, machine.resident() - start)
    return session.recipe.model_copy(update={"layout": recipe.layout}), session.task


def _offline_without_a_network() -> None:
    """Where the hub's name does not resolve (a compute node, a plane), its library need not try five times."""
    settings = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy")
    if "huggingface_hub" in sys.modules or any(map(os.environ.get, settings)):
        return
    try:
        socket.getaddrinfo("huggingface.co", 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _for_tokens(recipe: Recipe, tokens: float) -> Recipe:
    steps = max(1, math.ceil(tokens / tokens_a_step(recipe)))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})


def tokens_a_step(recipe: Recipe) -> float:
    """Tokens of a step over all devices, padding counted; both sides' of an encoder-decoder."""
    from gradus.plan.counts import tokens_a_sample

    return recipe.batch.tokens or recipe.batch.samples * tokens_a_sample(recipe)


def _cluster(request: Request) -> tuple[Cluster | None, bool]:
    """(the hardware that is asked for, whether the request names the number of devices)."""
    if request.on is None:
        stated = (word.partition("=")[0] for word in request.overrides if word.startswith("energy."))
        given = (f"--{name}" for name in ("days", "price", "mtbf") if getattr(request, name))
        if name := next(itertools.chain(given, stated), ""):
            example = "Give --on, e.g. --on H100 (gradus hardware lists them)"
            raise UserError(f"{name}: devices of which kind? {example}.")
        return None, False
    cluster = hardware.cluster(request.on)
    if cluster.n > MOST_DEVICES:
        raise UserError(f"--on={request.on}: {cluster.n:,} devices; the plan goes up to {MOST_DEVICES:,}.")
    if not cluster.device.runs:
        why = f"Gradus does not run on {cluster.device.kind.upper()}s; their entry is for comparison (gradus hardware)"
        raise UserError(f"{request.on}: {why}. Use a GPU.")
    return cluster, bool(re.match(r"\d[\d_,]*\s*[x×*]", request.on.strip()))


def _with_known_precision(
    request: Request, recipe: Recipe, cluster: Cluster, bare: bool, notes: list[str]
) -> Recipe:
    """A preset's precision as the device has it; a recipe's own stays, and a note says what the device lacks."""
    peaks, now, device = cluster.device.peaks, computed_in(recipe.layout), cluster.device.name
    if recipe.layout.precision == "fp8":
        if "fp8" not in peaks:
            raise UserError(f"layout.precision=fp8: no peak of {device} in fp8 is known. Use layout.precision=bf16.")
        notes.append("layout.precision=fp8: MFU and HFU are shares of the peak in bf16")
        if recipe.layout.compile == "none":
            notes.append("casts to fp8 take several passes each, unless layout.compile=default fuses them")
    if now in peaks:
        return recipe
    if bare and not any(o.startswith(("layout.precision=", "layout=")) for o in request.overrides):
        precision = "fp16" if "fp16" in peaks else "fp32"
        notes.append(f"{device} has no {now}: planned in {precision} (layout.precision)")
        return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"precision": precision})})
    instead = "planned with the nearest precision it has, and without an MFU"
    notes.append(f"no peak of {device} in {now} is known: {instead}")
    return recipe


def total_steps(case: Case) -> int:
    recipe = case.recipe
    if case.task is not None:
        return case.task.plan("train", recipe.batch.samples, recipe.batch.tokens).total_steps(recipe.train)
    if recipe.train.steps is None:
        raise UserError("without its data the plan cannot tell how long an epoch is. Set train.steps=N, or --tokens N.")
    return recipe.train.steps


# ---------------------------------------------------------------- the answer


def target_of(cluster: Cluster | None) -> Target:
    """What a step is planned for on this hardware."""
    return "cuda" if cluster and cluster.device.kind == "gpu" else "cpu"


def _rows(
    request: Request, plan: Plan, cluster: Cluster | None, notes: list[str]
) -> tuple[list[Row], bool | None]:
    """(every row, whether it fits)."""
    from gradus.plan import counts, engine
    from gradus.plan.case import where_fewest

    case, memory, device = plan.case, plan.memory, cluster.device if cluster else None
    recipe, rows = case.recipe, [*counts.parameters(case.recipe.model), *counts.flops(case)]
    if memory.at == engine.EVALUATION:
        notes.append("an evaluation needs more memory than a step; a smaller evaluate.batch needs less")
    notes += [note for note in memory.notes if note not in notes]
    if fewest := case.fewest():
        few = engine.plan(fewest, plan.resident).memory.device_total
        notes.append(where_fewest(case.layout, case.n, "process" if case.target == "cpu" else "device", few))
    low, high = engine.interval(memory, case.layout, case.target)
    rows += _memory_rows(recipe, memory, (low, high), cluster, case.target)
    fits = high <= cluster.capacity if cluster else None
    rows += _traffic_rows(plan.work, case.n)
    if cluster and memory.device_total <= cluster.capacity:  # of what does not fit there is no time, no price
        notes += _about_measuring(recipe, device)
        time, more = _time_rows(plan.work, cluster, notes)
        rows += more + _utilisation(rows, recipe, time.total, cluster)
        if recipe.data.kind == "images" and case.target == "cuda":
            needed = f"the loader must deliver {plan.work.samples / time.total:,.0f} images/s"
            notes.append(f"reading and decoding images is not planned: {needed} (gradus check measures it)")
        rows += _budget_rows(request, case, cluster, time, notes)
    return rows, fits


def _about_measuring(recipe: Recipe, device: Device) -> Iterator[str]:
    """Notes on how this machine was measured."""
    measured = device.measured or {}
    threads, wanted = measured.get("threads"), recipe.layout.threads
    if device.kind == "cpu" and threads and wanted and wanted != threads:
        again = f"gradus calibrate --threads {wanted}"
        yield f"measured with --threads {threads}, not with layout.threads={wanted}: {again}"
    if "coarse" in measured:
        expect = "expect errors of 15 % and more, more of several processes; gradus calibrate measures it in full"
        yield f"this machine was measured coarsely, before its first run: {expect}"


def _advice(request: Request, answer: Answer, own: Layout) -> list[str]:
    """What would fit, ready to paste: the nearest other layout, and the device, of the same vendor where one of those
    does, on which it would as it is, with HEADROOM where one has it. own: the recipe's layout."""
    from gradus.plan.search import HEADROOM, remedy

    cluster, needed, advice = answer.cluster, answer.value("memory/device"), []
    device = cluster.device
    if c := remedy(answer.plan.case, cluster):
        on = f"--on {c.n}x{kind_of(request.on)} " if c.n != cluster.n else ""
        keys = layout_keys(c.layout, own, stated_keys(request.overrides))
        share = f"{size(c.needed)} per device ({c.needed / device.capacity:.0%})"
        advice.append(f"{on}{keys}: it {'fits' if c.fits else TIGHT}, {share}")
    high = next(row.conditions["high"] for row in answer.rows if row.name == "memory/device")
    larger = [d for d in hardware.cards() if d.capacity >= high and (d.network or d.node >= cluster.n)]
    if larger and device.kind == "gpu":
        least = min(larger, key=lambda d: (d.vendor != device.vendor, needed > HEADROOM * d.capacity, d.capacity))
        words = f"--on {cluster.n}x{least.name} {answer.layout_keys}".rstrip()
        advice.append(f"{words}: it fits as it is ({needed / least.capacity:.0%})")
    return advice


def _memory_rows(
    recipe: Recipe, memory: Memory, ends: tuple[int, int], cluster: Cluster | None, target: Target
) -> list[Row]:
    layout, peak = recipe.layout, {"rank": memory.rank, "at": memory.at}
    common = {"parameters": memory.parameters, "precision": precision_text(layout)}
    common |= {"layout": layout_keys(layout) or "the defaults"}
    unit, count = ("samples", recipe.batch.samples) if recipe.batch.samples else ("tokens", recipe.batch.tokens)
    common |= {f"{unit} per step": count}
    micro_batch = layout.micro_batch or "a device's whole share"
    own = {
        "optimizer": {"optimizer": recipe.optimizer.name},
        "activations": {"micro-batch": micro_batch, "checkpointing": layout.checkpointing},
    }
    parts, rows = {name: memory.components.get(name, 0) for name in COMPONENTS}, []
    for name, text in COMPONENTS.items():
        always = {"held, in use or not": memory.state[name]} if name in memory.state else {}
        inputs, formula = {**common, **own.get(name, {}), **always}, f"Σ bytes alive at the peak: {text}"
        rows.append(known_figure(f"memory/{name}", parts[name], inputs, formula=formula, **peak))
    whole = {"reserved": memory.reserved, "framework": memory.framework}
    rows += [
        known_figure("memory/allocated", memory.allocated, parts, **peak),
        known_figure("memory/reserved", memory.reserved, {"allocated": memory.allocated}),
        known_figure("memory/framework", memory.framework, **_framework(memory, target)),
        known_figure("memory/device", memory.device_total, whole, low=ends[0], high=ends[1]),
    ]
    if cluster:
        device, sharing = cluster.device, round(cluster.device.capacity / cluster.capacity)
        inputs = {"memory": device.memory, "usable": device.usable, "devices that share it": sharing}
        rows.append(known_figure("memory/capacity", cluster.capacity, inputs, source=device.source))
    return rows


def _framework(memory: Memory, target: Target) -> dict[str, Any]:
    """Inputs, formula and source of what a process takes besides tensors."""
    from gradus.plan import engine

    if target == "cpu":
        source = "this process before the model is built; fitted to the runs of docs/proof.md"
        return {"inputs": memory.outside[1], "formula": memory.outside[0], "source": source}
    communicators = round((memory.framework - engine.CONTEXT - engine.WORKSPACE) / engine.COMMUNICATOR)
    inputs = {"context and kernels": engine.CONTEXT, "cuBLAS workspace": engine.WORKSPACE}
    inputs |= {"per communicator": engine.COMMUNICATOR, "communicators": communicators}
    source = "typical sizes as published: a context 0.3 to 2 GB, NCCL about 0.5 GB per communicator"
    return {"inputs": inputs, "source": source}


def _traffic_rows(work: Work, n: int) -> list[Row]:
    rows = []
    for axis in dict.fromkeys(t.axis for t in work.transfers if n > 1):
        transfers = [t for t in work.transfers if t.axis == axis]
        inputs = {
            f"{t.kind} of {t.group}, {t.phase}, {i}": f"{t.calls:g} calls × {t.payload:,.0f} bytes"
            for i, t in enumerate(transfers)
        }
        calls, kinds = sum(t.calls for t in transfers), ", ".join(dict.fromkeys(t.kind for t in transfers))
        conditions = {"calls": calls, "kinds": kinds, "group": max(t.group for t in transfers)}
        sent = sum(t.sent for t in transfers)
        rows.append(known_figure(f"traffic/{axis}", sent, inputs, per="device and step", **conditions))
    return rows


def _time_rows(work: Work, cluster: Cluster, notes: list[str]) -> tuple[StepTime, list[Row]]:
    time = step_time(work, cluster)
    notes += [note for note in time.notes if note not in notes]
    parts = {part: seconds for part, seconds in time.parts.items() if seconds}
    rows = [known_figure(f"time/{part}", s, _inputs(part, work, cluster), of="step") for part, s in parts.items()]
    rows.append(known_figure("time/step", time.total, parts, low=time.low, high=time.high))
    for unit, n in (("tokens", work.tokens), ("samples", work.samples)):
        if n:
            rows.append(known_figure(f"time/{unit}_per_s", n / time.total, {unit: n, "seconds": time.total}))
    return time, rows


def _inputs(part: str, work: Work, cluster: Cluster) -> dict[str, Any]:
    """The numbers behind one part of the step's time."""
    device, m = cluster.device, work.micro_batches
    bandwidth = {"bandwidth, bytes/s": device.bandwidth}
    kind, _, axis = part.partition("/")
    if kind == "comm":
        transfers = [t for t in work.transfers if t.axis == axis]
        links = {"link": device.link, "network": device.network}
        rates = {f"{name}, bytes/s in one direction": link.bandwidth for name, link in links.items() if link}
        return {"bytes sent": sum(t.sent for t in transfers), "calls": sum(t.calls for t in transfers), **rates}
    if kind in ("matmul", "attention", "memory"):
        ops = [op for op in work.micro if op.kind == kind]
        inputs = {"bytes": sum(op.bytes * op.count for op in ops) * m, **bandwidth}
        if kind == "memory":
            return inputs
        peaks = {dtype: peak_flops(device, dtype) for dtype in dict.fromkeys(op.dtype for op in ops)}
        at_peak = sum(op.flops * op.count / peaks[op.dtype] for op in ops) * m
        of_peaks = {f"peak in {dtype}, operations/s": value for dtype, value in peaks.items()}
        operations = sum(op.flops * op.count for op in ops) * m
        return {"operations": operations, **inputs, **of_peaks, AT_PEAK: at_peak}
    if kind == "bubble":
        shape = work.schedule, work.stages, work.virtual, m
        names = ("schedule", "stages", "stages per device", "micro-batches")
        return dict(zip(names, shape)) | {"share": bubble_share(*shape)}
    if kind == "optimizer":
        return {"bytes": sum(op.bytes * op.count for op in work.step), **bandwidth}
    if kind == "data":
        return {"bytes": work.data_bytes, "bytes/s": HOST_TO_DEVICE}
    ops, times = (work.micro, m) if kind == "launch" else (work.step, 1)
    return {"launches": sum(op.launches * op.count for op in ops) * times}


def _utilisation(rows: list[Row], recipe: Recipe, seconds: float, cluster: Cluster) -> list[Row]:
    """MFU and HFU of the operations counted, at the device's peak in the numbers that matrix products are computed in;
    none without one."""
    from gradus.plan.counts import utilisation

    numbers, values = computed_in(recipe.layout), {row.name: row.value for row in rows}
    if numbers not in cluster.device.peaks:
        return []
    shares = {"mfu": "flops/model", "hfu": "flops/hardware"}
    return [utilisation(name, values[of], seconds, cluster, numbers) for name, of in shares.items()]


def _budget_rows(request: Request, case: Case, cluster: Cluster, time: StepTime, notes: list[str]) -> list[Row]:
    seconds = (min(time.low, time.total), time.total, max(time.high, time.total))
    try:
        steps = total_steps(case)
    except UserError as e:
        if name := "price" if request.price else "mtbf" if request.mtbf else "":
            raise UserError(f"--{name}: {e}") from None
        steps = None
        notes.append(str(e).replace("without", "how long in total: without", 1))
    rows = budget(
        steps=steps or 1, seconds_per_step=seconds, cluster=cluster, days=request.days, parts=time.parts,
        price=request.price, keys=case.recipe.energy, lost=Failures.of(case, request.mtbf),
    )  # fmt: skip
    if request.tokens and steps < FEW_STEPS:
        notes.append(f"a run of {steps} step{'s' * (steps > 1)} is short to learn in: a smaller batch.samples has more")
    if steps:
        _check_goodput(rows, cluster.n)
        return [_steps_row(request, case.recipe, steps), *rows]
    return [row for row in rows if row.name == "energy/step"]


def _check_goodput(rows: list[Row], n: int) -> None:
    """Raises UserError where failures come so often that the run hardly gets on."""
    expected = {row.name: row.value for row in rows if row.conditions.get("case", "expected") == "expected"}
    if (share := expected["budget/goodput"]) < LEAST_GOODPUT:
        each = f"a failure each {duration(expected['budget/between_failures'])} on {n:,} device{'s' * (n > 1)}"
        instead = "Use a longer --mtbf, fewer devices, or a smaller train.checkpoint_every"
        raise UserError(f"--mtbf: {each} leaves {share:.1g} of the time for steps that count. {instead}.")


def _steps_row(request: Request, recipe: Recipe, steps: int) -> Row:
    train, batch = recipe.train, recipe.batch
    if request.tokens:
        formula, source = "tokens / tokens per step (padding counted), rounded up", "--tokens"
        inputs = {"tokens": request.tokens, "tokens per step": tokens_a_step(recipe)}
    elif train.steps is not None:
        formula, source = "train.steps", "the recipe; of a preset as published"
        inputs = {"train.steps": train.steps}
    else:
        formula, source = "epochs × batches of an epoch", "counted from the data"
        inputs = {"train.epochs": train.epochs, "samples per step": batch.samples, "tokens per step": batch.tokens}
    return figure("budget/steps", steps, "steps", formula, {k: v for k, v in inputs.items() if v}, source)


# ---------------------------------------------------------------- other questions


def devices(request: Request, everything: bool = False) -> Reply:
    """Which single device; everything: lines of all, not of the first. Raises UserError as `answer`."""
    from gradus.plan.devices import devices as ranked

    if request.on or request.days:
        compared = "--devices compares all devices of the hardware file, one of each"
        raise UserError(f"{compared}: --on and --days have no effect. Leave them out.")
    recipe, task, _ = open_recipe(request, notes := [])
    lines, rows, more = ranked(recipe, task, whole=request.tokens is not None, everything=everything)
    return Reply(lines, rows, [*more, *notes])


def search(request: Request) -> Reply:
    """The best layouts on this hardware. Raises UserError as `answer`."""
    from gradus.plan.search import search as of_layouts

    if request.days:
        instead = "without --search it says how many devices are needed"
        raise UserError(f"--search: --days has no effect on it. Leave it out; {instead}.")
    if request.on is None:
        raise UserError("--search: on which hardware? Give --on, e.g. --on 64xH100 (gradus hardware lists them).")
    stated = stated_keys(request.overrides)
    if chosen := sorted(stated & SPLITTING):
        raise UserError(f"--search: it chooses layout.{chosen[0]}. Leave that out; without --search it is used.")
    case, cluster, *_ = asked(request, notes := [])
    try:
        steps = total_steps(case)
    except UserError as e:
        steps = None
        notes.append(str(e))
    result = of_layouts(case, cluster, steps=steps, stated=stated, paid=request.price, mtbf=request.mtbf)
    result.stated = stated
    return Reply(result.lines(), result.rows(), notes)


def serve(request: Request, *, batch: int = 1, length: int | None = None, **more: float | None) -> Reply:
    """What using the model takes: weights, cache by batch and length, time per token. more: `bits`, `new` and `rate` of
    `serving`. Raises UserError as `answer`."""
    from gradus.plan.serving import lines, serving

    if request.days or request.tokens:
        raise UserError("--serve: --tokens and --days are for training. Leave them out.")
    case, cluster, *_ = asked(request, notes := [])
    recipe = case.recipe
    precision = recipe.layout.precision.removeprefix("pure_")
    try:
        rows = serving(recipe.model, batch=batch, seq_len=length, precision=precision, on=cluster, **more)
    except UserError as e:  # by the names of the command line
        flags = {"seq_len": "--length=", "batch": "--batch=", "bits": "--bits="}
        raise UserError(re.sub(r"\b(seq_len|batch|bits)=", lambda m: flags[m[1]], str(e))) from None
    return Reply(lines(request.recipe, rows, cluster, recipe.model.reads == "images"), rows, of_model(notes))


def of_model(notes: list[str]) -> list[str]:
    """Those that are not about training it."""
    texts = ("training settings", "20 per active", "MFU and HFU", "casts to fp8")
    notes = [note for note in notes if not note.startswith("planned for samples")]
    return [note for note in notes if not any(text in note for text in texts)]


def optimal(request: Request) -> Reply:
    """How many tokens suit the model, or with tokens how large a model suits them. Raises UserError as
    `answer`."""
    from gradus import models
    from gradus.plan import serving

    if request.on or request.days:
        alone = "--optimal is about a model's size alone"
        raise UserError(f"{alone}: --on and --days have no effect. Leave them out.")
    recipe, _, _ = open_recipe(dataclasses.replace(request, tokens=None), [])
    if models.lookup(recipe.model.family).attention != "causal":
        decoders = ", ".join(family.name for family in models.families() if family.attention == "causal")
        fits = f"the published fits are for decoders that continue text ({decoders})"
        raise UserError(f"--optimal: {fits}, not of family {recipe.model.family}.")
    total = models.count(recipe.model)["total"]
    by = {"parameters": total} if request.tokens is None else {"tokens": request.tokens}
    rows = serving.optimal(**by)
    return Reply(serving.optimal_lines(request.recipe, total, request.tokens, rows), rows, [])
