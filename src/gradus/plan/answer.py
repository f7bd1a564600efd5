"""A request → the rows of a plan: what `gradus plan`, the page and a program ask."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from gradus import hardware
from gradus import recipe as recipes
from gradus.errors import DataError, UserError, did_you_mean
from gradus.hardware import Cluster
from gradus.parallel import check, mesh
from gradus.parallel.world import World
from gradus.plan.budget import budget
from gradus.plan.figures import AT_PEAK, figure, known_figure
from gradus.plan.keys import computed_in, kind_of, layout_keys, said_keys
from gradus.plan.roofline import peak
from gradus.plan.show import headline, note_lines, size
from gradus.plan.step import HOST_TO_DEVICE, bubble_share, step_time
from gradus.plan.work import COMPONENTS, Work
from gradus.recipe.presets import ALIASES, PRESETS
from gradus.recipe.schema import Layout, Recipe
from gradus.rows import Row


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked. recipe: a packaged recipe, a file, a run folder, a preset's name or hf:NAME."""

    recipe: str
    overrides: tuple[str, ...] | list[str] = ()
    on: str | None = None  # "8xA100-80GB", "H100", "this"
    tokens: float | None = None  # to train on, in place of the recipe's steps
    days: float | None = None  # a deadline
    json_file: str | None = None  # Hugging Face's TrainingArguments
    price: float | None = None  # of a device-hour

    def __post_init__(self) -> None:
        for name in ("tokens", "days", "price"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name}={value:g}: must be a positive number.")


@dataclasses.dataclass
class Answer:
    recipe: Recipe
    cluster: Cluster | None
    n: int
    rows: list[Row]
    notes: list[str]
    fits: bool | None  # None: the memory of the device is not known
    layout_keys: str  # the layout as words ready to paste; where --days found the number of devices, with --on
    headline: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)  # what would fit, where this does not
    chosen: bool = False  # whether the layout, or the number of devices, is the plan's own choice

    def value(self, name: str, **conditions) -> float | None:
        return next((r.value for r in self.rows if r.name == name and all(r.conditions.get(k) == v for k, v in conditions.items())), None)


def pinned(request: Request, made: Answer) -> Request:
    """The request whose answer is this one again: what the plan chose is given."""
    if not made.chosen:
        return request
    rest = [o for o in request.overrides if o.partition("=")[0].strip().partition(".")[0] != "layout"]
    words = [word for word in made.layout_keys.split() if word.startswith("layout.")]
    return dataclasses.replace(request, overrides=(*rest, *words), on=f"{made.n}x{kind_of(request.on)}")


def answer(request: Request) -> Answer:
    """Raises UserError for what the recipe, the layout or the hardware cannot follow. What does not fit is an answer, not an error."""
    notes: list[str] = []
    recipe, task, cluster, counted, choose = asked(request, notes)
    said, layout = said_keys(request.overrides), None
    find = bool(cluster and request.days and not counted)  # the number of devices
    if find:
        from gradus.plan.search import fewest_in_time

        found = fewest_in_time(recipe, cluster, total_steps(recipe, task), request.days, task, chosen=choose, said=said)
        cluster, layout = Cluster(cluster.device, found.n), found.layout if choose else None
        notes.append(f"{found.n:,} is the smallest number of devices, in whole nodes, that finishes in {request.days:g} days")
    elif choose and cluster:
        from gradus.plan.search import best_layout

        layout = best_layout(recipe, cluster, task, said)
    made = _on(request, recipe, task, cluster, layout, notes)
    if find:
        made.layout_keys, made.chosen = f"--on {made.n}x{kind_of(request.on)} {made.layout_keys}".strip(), True
    return made


def asked(request: Request, notes: list[str]):
    """(recipe, task, cluster, whether the number of devices was said, whether the plan is to choose the layout). Raises UserError."""
    recipe, task, bare = open_recipe(request, notes)
    cluster, counted = _cluster(request)
    if cluster:
        recipe = _numbers(request, recipe, cluster, bool(bare), notes)
    return recipe, task, cluster, counted, bool(bare) and not said_keys(request.overrides) & SPLITS


def _on(request: Request, recipe: Recipe, task, cluster: Cluster | None, layout: Layout | None, notes: list[str]) -> Answer:
    """layout: the plan's own choice; None: the recipe's."""
    n = cluster.n if cluster else mesh.needed(recipe.layout)
    planned = recipe.model_copy(update={"layout": layout}) if layout else recipe
    if not layout:
        _whole_replicas(recipe, n, request.on)
        check.validate(recipe, n)
    rows, fits = _rows(request, planned, task, cluster, n, notes)
    state = 16 * next(row.value for row in rows if row.name == "parameters/total")
    if layout and layout.param_dtype and state < cluster.device.capacity / 2:
        notes.append(
            f"a device would hold the whole state, {size(state)}: it is sharded because layout.param_dtype={layout.param_dtype} also computes "
            f"norms and residuals in {layout.param_dtype}, which is faster than replicas, whose layout.precision keeps them in fp32 (--search)"
        )
    if layout:
        notes.append("the layout is the plan's own choice: --search shows the others, layout.* keys set another")
    keys = layout_keys(planned.layout, recipe.layout, said_keys(request.overrides))
    made = Answer(planned, cluster, n, rows, notes, fits, keys, chosen=layout is not None)
    if fits is False:
        made.advice = _advice(request, made, recipe.layout, task)
    made.headline = headline(made, request)
    return made


# ---------------------------------------------------------------- what is asked

DAY = 86_400.0
IMAGENET = 1000  # classes
MOST_DEVICES = 2**20  # larger numbers take the search for a layout minutes
SPLITS = {"shard", "tensor", "pipeline", "context", "expert", "replicate", "micro_batch", "shard_optimizer"}  # who sets one sets the layout


def _whole_replicas(recipe: Recipe, n: int, on: str | None) -> None:
    """Raises UserError where n devices are no whole number of what one replica takes."""
    one = mesh.needed(recipe.layout)
    if n % one:
        axes = " × ".join(f"{axis} {k}" for axis, k in mesh.sizes(recipe.layout, one).items() if k > 1)
        device = kind_of(on or "")
        many = one * max(1, round(n / one))
        raise UserError(f"layout: {axes} = {one} devices, of which {n} is not a multiple. Use --on {many}x{device}, or other layout.* keys.")


def open_recipe(request: Request, notes: list[str]):
    """(recipe with every size known, its task where the data could be opened, the preset's or hf: name where it is a bare model)."""
    from gradus.plan import hf
    from gradus.train import resolve

    name, cluster = _named(request.recipe), _cluster(request)[0] if request.json_file else None
    here = World(size=cluster.n, local_size=min(cluster.n, cluster.device.node)) if cluster else World()
    given = resolve.Given(request.json_file, here)
    if name.startswith("hf:"):
        _offline_without_a_network()
    bare = name if name in PRESETS or name in ALIASES or name.startswith("hf:") else None
    if bare:
        base = hf.recipe_for(bare, tokens=request.tokens, notes=notes)
        words = [*request.overrides, *_samples_as_long(request.overrides)]
        recipe = given.read(lambda extra, notes: recipes.load(bare, words, notes=notes, text=recipes.dump(base), **extra), notes)
        if recipe.model.init and not bare.startswith("hf:"):
            from gradus import models

            models.config_of(recipe.model.init)  # or there is nothing to start from
        if not any(o.startswith(("train.steps=", "train.epochs=")) for o in request.overrides):
            now, then = tokens_a_step(recipe), tokens_a_step(base)
            if now != then and base.train.steps:  # an override has changed the batch: as many tokens in the whole
                recipe = _for_tokens(recipe, request.tokens or base.train.steps * then)
                notes.append(f"a step has {now:,.0f} tokens instead of {then:,.0f}: {recipe.train.steps:,} steps, to keep the total")
        return recipe, None, bare
    if not Path(os.path.expanduser(name)).exists() and name not in recipes.names() and not name.endswith((".yaml", ".yml", ".json")):
        known = [*recipes.names(), *PRESETS, *ALIASES]
        raise UserError(f"{name}: no such recipe or preset.{did_you_mean(name, known)} gradus recipes and gradus models list them.")
    recipe, more = resolve.load(name, list(request.overrides), given)
    notes += more
    recipe, task = _open(recipe, notes)
    return (_for_tokens(recipe, request.tokens) if request.tokens else recipe), task, None


def _named(name: str) -> str:
    """A folder that is no run but holds a config.json is a bare model."""
    folder = Path(os.path.expanduser(name))
    return f"hf:{name}" if (folder / "config.json").is_file() and not (folder / "recipe.yaml").exists() else name


def _samples_as_long(overrides) -> list[str]:
    """data.max_len as model.seq_len was set: who gives a preset another length means its samples."""
    set_to = {key: value for key, _, value in (o.partition("=") for o in overrides)}
    length = set_to.get("model.seq_len", "")
    return [f"data.max_len={length}"] if length.isdigit() and "data.max_len" not in set_to and "data" not in set_to else []


def _open(recipe: Recipe, notes: list[str]):
    """The recipe completed by its data, and its task. Where the data are not at hand, what the recipe says itself has to do; any other
    mistake in it is told."""
    from gradus.plan import batches, engine
    from gradus.train import machine
    from gradus.train.session import open_session

    _offline_without_a_network()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what cannot be reached is told once, below
    alone = recipe.model_copy(update={"layout": mesh.single_process(recipe.layout).model_copy(update={"device": "cpu"})})
    engine.alone()  # without the data
    start = machine.resident()
    try:
        session = open_session(alone)
    except (DataError, OSError) as e:
        why = str(e).splitlines()[0].rstrip(".")
        if recipe.model.reads == "images" and recipe.model.n_classes is None:
            recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"n_classes": IMAGENET})})
            notes.append(f"the number of classes is not known without the data: planned with ImageNet's {IMAGENET:,} (model.n_classes)")
        if missing := [f"{key}=N" for key in batches.not_known(recipe)]:
            raise UserError(f"{why}. Without the data the plan needs {' '.join(missing)}, and for the whole run train.steps=N.") from None
        notes.append(f"the data could not be opened ({why}): planned for samples of full length")
        return recipe, None
    session.task.opened = max(0, machine.resident() - start)
    return session.recipe.model_copy(update={"layout": recipe.layout}), session.task


def _offline_without_a_network() -> None:
    """Where the hub's name is not even known here (a compute node, a plane), its library need not try five times."""
    if "huggingface_hub" in sys.modules or any(os.environ.get(k) for k in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy")):
        return
    try:
        socket.getaddrinfo("huggingface.co", 443)
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _for_tokens(recipe: Recipe, tokens: float) -> Recipe:
    steps = max(1, math.ceil(tokens / tokens_a_step(recipe)))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})


def tokens_a_step(recipe: Recipe) -> float:
    """Tokens of a step over all devices, padding counted: of an encoder-decoder those of both sides."""
    from gradus.plan.counts import tokens_a_sample

    return recipe.batch.tokens or recipe.batch.samples * tokens_a_sample(recipe)


def _cluster(request: Request) -> tuple[Cluster | None, bool]:
    """The hardware asked for, and whether the number of devices was said."""
    if request.on is None:
        if name := "days" if request.days else "price" if request.price else "":
            raise UserError(f"--{name}: devices of which kind? Give --on, e.g. --on H100 (gradus hardware lists them).")
        return None, False
    cluster = hardware.cluster(request.on)
    if cluster.n > MOST_DEVICES:
        raise UserError(f"--on={request.on}: {cluster.n:,} devices; the plan goes up to {MOST_DEVICES:,}.")
    if cluster.device.kind == "tpu":
        why = "Gradus does not run on TPUs; their entry is for comparison (gradus hardware)"
        raise UserError(f"{request.on}: {why}. Use a GPU.")
    return cluster, bool(re.match(r"\d[\d_,]*\s*[x×*]", request.on.strip()))


def _numbers(request: Request, recipe: Recipe, cluster: Cluster, bare: bool, notes: list[str]) -> Recipe:
    """A preset's precision as the device has it; a recipe's own stays, and what the device lacks is said."""
    peaks, now = cluster.device.peaks, computed_in(recipe.layout)
    if now in peaks:
        return recipe
    if bare and not any(o.startswith(("layout.precision=", "layout=")) for o in request.overrides):
        found = "fp16" if "fp16" in peaks else "fp32"
        notes.append(f"{cluster.device.name} has no {now}: planned in {found} (layout.precision)")
        return recipe.model_copy(update={"layout": recipe.layout.model_copy(update={"precision": found})})
    notes.append(f"no peak of {cluster.device.name} in {now} is known: planned with the nearest precision it has, and without an MFU")
    return recipe


def total_steps(recipe: Recipe, task=None) -> int:
    from gradus.train.schedule import total_steps as of_run

    if task is not None:
        return of_run(recipe, task.plan("train", recipe.batch.samples, recipe.batch.tokens))
    if recipe.train.steps is None:
        raise UserError("without its data the plan cannot tell how long an epoch is. Set train.steps=N, or --tokens N.")
    return recipe.train.steps


# ---------------------------------------------------------------- the answer


def _rows(request: Request, recipe: Recipe, task, cluster: Cluster | None, n: int, notes: list[str]) -> tuple[list[Row], bool | None]:
    """(every row, whether it fits)."""
    from gradus.plan import counts, engine

    device = cluster.device if cluster else None
    target = "cuda" if device and device.kind == "gpu" else "cpu"
    rows = [*counts.parameters(recipe.model), *counts.flops(recipe, target=target)]
    memory = engine.plan_memory(recipe, n, target=target, task=task)
    notes += [note for note in memory.notes if note not in notes]
    rows += _memory_rows(recipe, memory, cluster, engine.before(task) if target == "cpu" else None)
    fits = memory.device_total <= cluster.capacity if cluster else None
    work = engine.traced_work(recipe, n, target=target, task=task)
    rows += _traffic_rows(work, n)
    if cluster and fits is not False:  # of what does not fit there is no time, no price
        threads, asked = (device.measured or {}).get("threads"), recipe.layout.threads
        if device.kind == "cpu" and threads and asked and asked != threads:
            notes.append(f"measured with --threads {threads}, not with layout.threads={asked}: gradus calibrate --threads {asked}")
        if "coarse" in (device.measured or {}):
            notes.append("this machine was measured coarsely, before its first run: expect errors of 15 % and more; gradus calibrate measures it in full")
        time, more = _time_rows(work, cluster, notes)
        rows += more + _utilisation(rows, recipe, time.total, cluster)
        if recipe.data.kind == "images" and target == "cuda":
            rate = work.samples / time.total
            notes.append(f"reading and decoding images is not planned: the loader must deliver {rate:,.0f} images/s (gradus check measures it)")
        rows += _budget_rows(request, recipe, task, time, cluster, notes)
    return rows, fits


def _advice(request: Request, made: Answer, asked: Layout, task) -> list[str]:
    """What would fit, ready to paste: the nearest other layout, and the device, of the same vendor where one of those does, on which it
    would as it is, with HEADROOM where one has it. asked: the recipe's layout."""
    from gradus.plan.search import HEADROOM, remedy

    cluster, now, out = made.cluster, made.value("memory/device"), []
    device = cluster.device
    if c := remedy(made.recipe, cluster, task):
        on = f"--on {c.n}x{kind_of(request.on)} " if c.n != cluster.n else ""
        keys = layout_keys(c.layout, asked, said_keys(request.overrides))
        out.append(f"{on}{keys}: it fits, {size(c.needed)} per device ({c.needed / device.capacity:.0%})")
    larger = [d for d in hardware.devices().values() if d.kind == device.kind and d.capacity >= now]
    if larger and device.kind == "gpu":
        least = min(larger, key=lambda d: (d.vendor != device.vendor, now > HEADROOM * d.capacity, d.capacity))
        out.append(f"--on {cluster.n}x{least.name} {made.layout_keys}".rstrip() + f": it fits as it is ({now / least.capacity:.0%})")
    return out


def _memory_rows(recipe: Recipe, memory, cluster: Cluster | None, before: int | None) -> list[Row]:
    """before: as `engine.outside`; None on a GPU."""
    from gradus.plan import engine

    layout, at = recipe.layout, {"rank": memory.rank, "at": memory.at}
    common = {"parameters": memory.parameters, "precision": layout.precision, "layout": layout_keys(layout) or "the defaults"}
    common |= {"samples per step": recipe.batch.samples} if recipe.batch.samples else {"tokens per step": recipe.batch.tokens}
    own = {
        "optimizer": {"optimizer": recipe.optimizer.name},
        "activations": {"micro-batch": layout.micro_batch or "a device's whole share", "checkpointing": layout.checkpointing},
    }
    parts, rows = {name: memory.components.get(name, 0) for name in COMPONENTS}, []
    for name, text in COMPONENTS.items():
        given = {**common, **own.get(name, {}), **({"held, in use or not": memory.held[name]} if name in memory.held else {})}
        rows.append(known_figure(f"memory/{name}", parts[name], given, formula=f"Σ bytes alive at the peak: {text}", **at))
    if before is None:
        given = {"context and kernels": engine.CONTEXT, "cuBLAS workspace": engine.WORKSPACE, "per communicator": engine.COMMUNICATOR}
        given["communicators"] = round((memory.framework - engine.CONTEXT - engine.WORKSPACE) / engine.COMMUNICATOR)
        framework = {"inputs": given, "source": "typical sizes as published: a context 0.3 to 2 GB, NCCL about 0.5 GB per communicator"}
    else:
        framework = {"inputs": memory.outside[1], "formula": memory.outside[0]}
        framework |= {"source": "this process before the model is built; fitted to the runs of docs/proof.md"}
    rows += [
        known_figure("memory/allocated", memory.allocated, parts, **at),
        known_figure("memory/reserved", memory.reserved, {"allocated": memory.allocated}),
        known_figure("memory/framework", memory.framework, **framework),
        known_figure("memory/device", memory.device_total, {"reserved": memory.reserved, "framework": memory.framework}),
    ]
    if cluster:
        device = cluster.device
        given = {"memory": device.memory, "usable": device.usable, "devices that share it": round(device.capacity / cluster.capacity)}
        rows.append(known_figure("memory/capacity", cluster.capacity, given, source=device.source))
    return rows


def _traffic_rows(work: Work, n: int) -> list[Row]:
    rows = []
    for axis in dict.fromkeys(t.axis for t in work.transfers if n > 1):
        transfers = [t for t in work.transfers if t.axis == axis]
        inputs = {f"{t.kind} of {t.group}, {t.phase}, {i}": f"{t.calls:g} calls × {t.payload:,.0f} bytes" for i, t in enumerate(transfers)}
        conditions = {"calls": sum(t.calls for t in transfers), "kinds": ", ".join(dict.fromkeys(t.kind for t in transfers))}
        conditions |= {"group": max(t.group for t in transfers)}
        rows.append(known_figure(f"traffic/{axis}", sum(t.sent for t in transfers), inputs, per="device and step", **conditions))
    return rows


def _time_rows(work: Work, cluster: Cluster, notes: list[str]):
    time = step_time(work, cluster)
    notes += [note for note in time.notes if note not in notes]
    parts = {part: seconds for part, seconds in time.parts.items() if seconds}
    rows = [known_figure(f"time/{part}", seconds, _put_in(part, work, cluster), of="step") for part, seconds in parts.items()]
    rows.append(known_figure("time/step", time.total, parts, low=time.low, high=time.high))
    for unit, put_in, n in (("tokens", "tokens", work.tokens), ("samples", "samples", work.samples)):
        if n:
            rows.append(known_figure(f"time/{unit}_per_s", n / time.total, {put_in: n, "seconds": time.total}))
    return time, rows


def _put_in(part: str, work: Work, cluster: Cluster) -> dict[str, Any]:
    """The numbers behind one part of the step's time."""
    device, m = cluster.device, work.micro_batches
    bandwidth = {"bandwidth, bytes/s": device.bandwidth}
    kind, _, axis = part.partition("/")
    if kind == "comm":
        transfers = [t for t in work.transfers if t.axis == axis]
        given = {"bytes sent": sum(t.sent for t in transfers), "calls": sum(t.calls for t in transfers)}
        for name, link in (("link", device.link), ("network", device.network)):
            given |= {f"{name}, bytes/s in one direction": link.bandwidth} if link else {}
    elif kind in ("matmul", "attention", "memory"):
        ops = [op for op in work.micro if op.kind == kind]
        given = {"bytes": sum(op.bytes * op.count for op in ops) * m, **bandwidth}
        if kind != "memory":
            given = {"operations": sum(op.flops * op.count for op in ops) * m, **given}
            given |= {f"peak in {dtype}, operations/s": peak(device, dtype) for dtype in dict.fromkeys(op.dtype for op in ops)}
            given[AT_PEAK] = sum(op.flops * op.count / peak(device, op.dtype) for op in ops) * m
    elif kind == "bubble":
        given = {"schedule": work.schedule, "stages": work.stages, "stages per device": work.virtual, "micro-batches": m}
        given["share"] = bubble_share(work.schedule, work.stages, work.virtual, m)
    elif kind == "optimizer":
        given = {"bytes": sum(op.bytes * op.count for op in work.step), **bandwidth}
    elif kind == "data":
        given = {"bytes": work.data_bytes, "bytes/s": HOST_TO_DEVICE}
    else:
        ops, times = (work.micro, m) if kind == "launch" else (work.step, 1)
        given = {"launches": sum(op.launches * op.count for op in ops) * times}
    return given


def _utilisation(rows: list[Row], recipe: Recipe, seconds: float, cluster: Cluster) -> list[Row]:
    """MFU and HFU of the operations counted, at the device's peak in the numbers that matrix products are computed in; none without one."""
    from gradus.plan.counts import utilisation

    numbers, found = computed_in(recipe.layout), {row.name: row.value for row in rows}
    if numbers not in cluster.device.peaks:
        return []
    return [utilisation(name, found[of], seconds, cluster, numbers) for name, of in (("mfu", "flops/model"), ("hfu", "flops/hardware"))]


def _budget_rows(request: Request, recipe: Recipe, task, time, cluster: Cluster, notes: list[str]) -> list[Row]:
    seconds = (min(time.low, time.total), time.total, max(time.high, time.total))
    try:
        steps = total_steps(recipe, task)
    except UserError as e:
        if request.price:
            raise UserError(f"--price: {e}") from None
        steps = None
        notes.append(str(e).replace("without", "how long in total: without", 1))
    rows = budget(steps=steps or 1, seconds_per_step=seconds, cluster=cluster, days=request.days, parts=time.parts, price=request.price)
    return [_steps_row(request, recipe, steps), *rows] if steps else [row for row in rows if row.name == "energy/step"]


def _steps_row(request: Request, recipe: Recipe, steps: int) -> Row:
    if request.tokens:
        formula, source = "tokens / tokens per step (padding counted), rounded up", "--tokens"
        given = {"tokens": request.tokens, "tokens per step": tokens_a_step(recipe)}
    elif recipe.train.steps is not None:
        formula, source, given = "train.steps", "the recipe; of a preset as published", {"train.steps": recipe.train.steps}
    else:
        formula, source = "epochs × batches of an epoch", "counted from the data"
        given = {"train.epochs": recipe.train.epochs, "samples per step": recipe.batch.samples, "tokens per step": recipe.batch.tokens}
    return figure("budget/steps", steps, "steps", formula, {k: v for k, v in given.items() if v}, source)


# ---------------------------------------------------------------- other questions


def devices(request: Request, everything: bool = False) -> tuple[list[str], list[Row]]:
    """(lines, rows): which single device; everything: lines of all, not of the first. Raises UserError as `answer`."""
    from gradus.plan.devices import devices as ranked

    if request.on or request.days:
        raise UserError("--devices compares all devices of the hardware file, one of each: --on and --days have no effect. Leave them out.")
    recipe, task, _ = open_recipe(request, notes := [])
    lines, rows = ranked(recipe, task, whole=request.tokens is not None, everything=everything)
    return [*lines, *note_lines(notes)], rows


def search(request: Request) -> tuple[list[str], list[Row]]:
    """(lines, rows): the best layouts on this hardware. Raises UserError as `answer`."""
    from gradus.plan.search import search as of_layouts

    if request.days:
        raise UserError("--search: --days has no effect on it. Leave it out; without --search it says how many devices are needed.")
    if request.on is None:
        raise UserError("--search: on which hardware? Give --on, e.g. --on 64xH100 (gradus hardware lists them).")
    said = said_keys(request.overrides)
    if chosen := sorted(said & SPLITS):
        raise UserError(f"--search: it chooses layout.{chosen[0]}. Leave that out; without --search it is used.")
    recipe, task, cluster, *_ = asked(request, notes := [])
    try:
        steps = total_steps(recipe, task)
    except UserError as e:
        steps = None
        notes.append(str(e))
    found = of_layouts(recipe, cluster, steps=steps, task=task, said=said, paid=request.price)
    found.said = said
    return [*found.lines(), *note_lines(notes)], found.rows()


def serve(request: Request, *, batch: int = 1, length: int | None = None, bits: int | None = None) -> tuple[list[str], list[Row]]:
    """(lines, rows): what using the model takes: weights, cache by batch and length, time a token. Raises UserError as `answer`."""
    from gradus.plan.serving import lines, serving

    if request.days or request.tokens:
        raise UserError("--serve: --tokens and --days are for training. Leave them out.")
    recipe, _, cluster, *_ = asked(request, notes := [])
    precision = recipe.layout.precision.removeprefix("pure_")
    try:
        rows = serving(recipe.model, batch=batch, seq_len=length, bits=bits, precision=precision, on=cluster)
    except UserError as e:  # by the names of the command line
        raise UserError(re.sub(r"\b(seq_len|batch|bits)=", lambda m: f"--{m[1].replace('seq_len', 'length')}=", str(e))) from None
    text = lines(request.recipe, rows, cluster, images=recipe.model.reads == "images")
    return [*text, *note_lines([n for n in notes if not n.startswith("training settings") and "20 per active" not in n])], rows


def optimal(request: Request) -> tuple[list[str], list[Row]]:
    """(lines, rows): how many tokens suit the model, or with tokens how large a model suits them. Raises UserError as `answer`."""
    from gradus import models
    from gradus.plan.serving import optimal as of
    from gradus.plan.serving import optimal_lines

    if request.on or request.days:
        raise UserError("--optimal is about a model's size alone: --on and --days have no effect. Leave them out.")
    recipe, _, _ = open_recipe(dataclasses.replace(request, tokens=None), [])
    if models.lookup(recipe.model.family).attention != "causal":
        decoders = ", ".join(family.name for family in models.families() if family.attention == "causal")
        of_what = f"decoders that continue text ({decoders})"
        raise UserError(f"--optimal: the published fits are for {of_what}, not of family {recipe.model.family}.")
    total = models.count(recipe.model)["total"]
    rows = of(parameters=total) if request.tokens is None else of(tokens=request.tokens)
    return optimal_lines(request.recipe, total, request.tokens, rows), rows
