"""A request → the rows of a plan: what `gradus plan`, the page and a program ask."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

from gradus import hardware
from gradus import recipe as recipes
from gradus.errors import UserError, did_you_mean
from gradus.hardware import Cluster
from gradus.parallel import check, mesh
from gradus.plan.figures import figure
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


@dataclasses.dataclass
class Answer:
    recipe: Recipe
    cluster: Cluster | None
    n: int
    rows: list[Row]
    headline: list[str]
    notes: list[str]
    fits: bool | None  # None: the memory of the device is not known
    layout_keys: str  # what of the layout is not the default, as key=value

    def value(self, name: str, **conditions) -> float | None:
        return next((r.value for r in self.rows if r.name == name and all(r.conditions.get(k) == v for k, v in conditions.items())), None)


def answer(request: Request) -> Answer:
    """Raises UserError for what the recipe, the layout or the hardware cannot follow. What does not fit is an answer, not an error."""
    notes: list[str] = []
    _positive(request)
    recipe, task, bare = open_recipe(request, notes)
    cluster, counted = _cluster(request)
    chosen = bool(bare) and not any(o.partition("=")[0] in SPLITS for o in request.overrides)
    if cluster and request.days and not counted:
        recipe, cluster = _devices_for(request, recipe, cluster, chosen, notes)
    n = cluster.n if cluster else mesh.needed(recipe.layout)
    if chosen and n > 1:
        recipe = _with_layout(recipe, cluster)
        notes.append("the layout is the plan's own choice: --search shows the others, layout.* keys set another")
    _whole_replicas(recipe, n, request.on)
    check.validate(recipe, n)
    return _answer(request, recipe, task, cluster, n, notes)


# ---------------------------------------------------------------- what is asked

TRACED = "traced: the module, the optimizer and the step themselves, under fake tensors"
SPLITS = tuple(f"layout.{key}" for key in ("shard", "tensor", "pipeline", "context", "expert", "replicate", "micro_batch", "shard_optimizer"))


def _whole_replicas(recipe: Recipe, n: int, on: str | None) -> None:
    """Raises UserError where n devices are no whole number of what one replica takes."""
    one = mesh.needed(recipe.layout)
    if n % one:
        axes = " × ".join(f"{axis} {k}" for axis, k in mesh.sizes(recipe.layout, one).items() if k > 1)
        device = (on or "").lstrip("0123456789").lstrip("x×* ")
        many = one * max(1, round(n / one))
        raise UserError(f"layout: {axes} = {one} devices, of which {n} is no multiple. Use --on {many}x{device}, or other layout.* keys.")


def _positive(request: Request) -> None:
    for name in ("tokens", "days"):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"--{name}={value:g}: must be a positive number.")


def open_recipe(request: Request, notes: list[str]):
    """(recipe with every size known, its task where the data could be opened, the preset's or hf: name where it is a bare model)."""
    from gradus.plan import hf
    from gradus.train import resolve

    name = request.recipe
    bare = name if name in PRESETS or name in ALIASES or name.startswith("hf:") else None
    if bare:
        base = hf.recipe_for(bare, tokens=request.tokens, notes=notes)
        recipe = recipes.load(bare, request.overrides, notes=notes, text=recipes.dump(base))
        if request.tokens and not any(o.startswith(("train.steps=", "train.epochs=")) for o in request.overrides):
            recipe = _for_tokens(recipe, request.tokens)  # an override may have changed the batch
        return recipe, None, bare
    if not Path(name).expanduser().exists() and name not in recipes.names() and not name.endswith((".yaml", ".yml", ".json")):
        known = [*recipes.names(), *PRESETS, *ALIASES]
        raise UserError(f"{name}: no such recipe or preset.{did_you_mean(name, known)} gradus recipes and gradus models list them.")
    recipe, more = resolve.load(name, list(request.overrides))
    notes += more
    recipe, task = _open(recipe, notes)
    return (_for_tokens(recipe, request.tokens) if request.tokens else recipe), task, None


def _open(recipe: Recipe, notes: list[str]):
    """The recipe completed by its data, and its task. Without the data, what the recipe says itself has to do."""
    from gradus.train.session import open_session

    alone = recipe.model_copy(update={"layout": mesh.alone(recipe.layout).model_copy(update={"device": "cpu"})})
    try:
        session = open_session(alone)
    except (UserError, OSError) as e:
        if "data" not in str(e) and "tokenizer" not in str(e) and not isinstance(e, OSError):
            raise
        if getattr(recipe.model, "vocab_size", 0) is None or getattr(recipe.model, "n_classes", 0) is None:
            key = "model.vocab_size" if getattr(recipe.model, "vocab_size", 0) is None else "model.n_classes"
            raise UserError(f"{str(e).rstrip('.')}. Without the data the plan needs {key}=N.") from None
        notes.append(f"the data could not be opened ({str(e).splitlines()[0].rstrip('.')}): planned for samples of full length")
        return recipe, None
    return session.recipe.model_copy(update={"layout": recipe.layout}), session.task


def _for_tokens(recipe: Recipe, tokens: float) -> Recipe:
    steps = max(1, math.ceil(tokens / tokens_a_step(recipe)))
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": steps, "epochs": None})})


def tokens_a_step(recipe: Recipe) -> float:
    """Places of a step over all devices, padding counted: of an encoder-decoder those of both sides."""
    from gradus.plan.counts import tokens_a_sample

    return recipe.batch.tokens or recipe.batch.samples * tokens_a_sample(recipe)


def _cluster(request: Request) -> tuple[Cluster | None, bool]:
    """The hardware asked for, and whether the number of devices was said."""
    if request.on is None:
        if request.days:
            raise UserError("--days: devices of which kind? Say --on, e.g. --on H100 (gradus hardware lists them).")
        return None, False
    return hardware.cluster(request.on), bool(re.match(r"\d+\s*[x×*]", request.on.strip()))


def _with_layout(recipe: Recipe, cluster: Cluster) -> Recipe:
    from gradus.plan.search import best_layout

    return recipe.model_copy(update={"layout": best_layout(recipe, cluster)})


def _devices_for(request: Request, recipe: Recipe, cluster: Cluster, chosen: bool, notes: list[str]) -> tuple[Recipe, Cluster]:
    """The fewest devices, in whole nodes where there are several, that are done in time."""
    from gradus.plan.budget import GOODPUT
    from gradus.plan.search import quick_time

    node, wanted = cluster.device.node, request.days * 86_400 * GOODPUT[1]
    counts = sorted({k for p in range(15) for k in (2**p, 3 * 2**p) if k <= node or k % node == 0})
    low, high, found = 0, len(counts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        tried = Cluster(cluster.device, counts[middle])
        try:
            now = _with_layout(recipe, tried) if chosen and tried.n > 1 else recipe
            check.validate(now, tried.n)
            seconds = quick_time(now, tried) * total_steps(now)
        except UserError:
            seconds = math.inf
        if seconds <= wanted:
            found, high = (now, tried), middle - 1
        else:
            low = middle + 1
    if found is None:
        raise UserError(
            f"--days={request.days:g}: up to {counts[-1]:,} × {cluster.device.name} are not enough, or the batch cannot be split so far. "
            "Give more days, a larger batch.samples, or a faster device."
        )
    notes.append(f"{found[1].n:,} devices are the fewest of {', '.join(map(str, counts[:6]))}, ... that are done in {request.days:g} days")
    return found


def total_steps(recipe: Recipe, task=None) -> int:
    from gradus.train.loop import total_steps as of_run

    if task is not None:
        return of_run(recipe, task.plan("train", recipe.batch.samples, recipe.batch.tokens))
    if recipe.train.steps is None:
        raise UserError("without its data the plan cannot tell how long an epoch is. Set train.steps=N, or --tokens N.")
    return recipe.train.steps


# ---------------------------------------------------------------- the answer


def _answer(request: Request, recipe: Recipe, task, cluster: Cluster | None, n: int, notes: list[str]) -> Answer:
    from gradus.plan import counts
    from gradus.plan.memory import plan_memory, traced_work

    device = cluster.device if cluster else None
    target = "cuda" if device and device.kind == "gpu" else "cpu"
    rows = counts.parameters(recipe.model)
    rows += counts.flops(recipe, target=target)
    memory = plan_memory(recipe, n, target=target, device=device, task=task)
    notes += [note for note in memory.notes if note not in notes]
    rows += _memory_rows(recipe, memory, device)
    capacity = device.memory * device.usable if device else None
    fits = None if capacity is None else memory.device_total <= capacity
    work = traced_work(recipe, n, target=target, task=task)
    rows += _traffic_rows(work, n)
    time = None
    if cluster:
        time, more = _time_rows(work, cluster, notes)
        rows += more + _utilisation(rows, recipe, time.total, cluster)
        rows += _budget_rows(request, recipe, task, time, cluster, work)
    if recipe.model.preset == "gpt3-175b" and request.tokens == 300e9:
        rows += _lecture(notes)
    keys = layout_keys(recipe.layout)
    made = Answer(recipe, cluster, n, rows, [], notes, fits, keys)
    from gradus.plan.show import headline

    made.headline = headline(made, request)
    return made


def _lecture(notes: list[str]) -> list[Row]:
    """The two answers to the lecture's question: 300e9 tokens in 30 days at 160 TFLOP/s."""
    from gradus.plan.examples import gpt3_devices

    six, eight = gpt3_devices()
    notes.append(
        f"rule of thumb for 30 days at 160 TFLOP/s: {six.value:,} GPUs by 6ND, {eight.value:,} by 8ND: that rate was reached with recomputation "
        "(the lecture: 800; docs/errata.md; --explain rule/devices_8nd)"
    )
    six.name, eight.name = "rule/devices_6nd", "rule/devices_8nd"
    return [six, eight]


def layout_keys(layout: Layout) -> str:
    """What is not the default, ready to paste."""
    default = Layout()
    changed = {k: v for k, v in layout if v != getattr(default, k) and k != "device"}
    return " ".join(f"layout.{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in changed.items())


def _memory_rows(recipe: Recipe, memory, device) -> list[Row]:
    at = {"rank": memory.rank, "at": memory.at}
    rows = [
        figure(f"memory/{name}", memory.components.get(name, 0), "bytes", text, source=TRACED, **at)
        for name, text in COMPONENTS.items()
    ]
    parts = {name: memory.components.get(name, 0) for name in COMPONENTS}
    rows.append(figure("memory/allocated", memory.allocated, "bytes", "sum of the components at the peak", parts, **at))
    given = {"allocated": memory.allocated}
    rows.append(figure("memory/reserved", memory.reserved, "bytes", "allocated, as the caching allocator rounds it", given))
    rows.append(figure("memory/framework", memory.framework, "bytes", "context, kernels, communicators"))
    total = {"reserved": memory.reserved, "framework": memory.framework}
    rows.append(figure("memory/device", memory.device_total, "bytes", "reserved + framework", total))
    if device:
        given = {"memory": device.memory, "usable": device.usable}
        rows.append(figure("memory/capacity", device.memory * device.usable, "bytes", "memory × usable part", given, device.source))
    return rows


def _traffic_rows(work: Work, n: int) -> list[Row]:
    if n == 1:
        return []
    rows = []
    by_axis: dict[str, list] = {}
    for transfer in work.transfers:
        by_axis.setdefault(transfer.axis, []).append(transfer)
    for axis, transfers in by_axis.items():
        kinds = ", ".join(dict.fromkeys(t.kind for t in transfers))
        inputs = {
            f"{t.kind} of {t.group}, {t.phase}, {i}": f"{t.calls:g} calls × {t.payload:,.0f} bytes" for i, t in enumerate(transfers)
        }
        formula = "Σ calls × payload × (2(k−1)/k of an all-reduce, 1 of a send, (k−1)/k of the others)"
        conditions = {"calls": sum(t.calls for t in transfers), "kinds": kinds, "group": max(t.group for t in transfers)}
        rows.append(figure(f"traffic/{axis}", sum(t.sent for t in transfers), "bytes", formula, inputs, TRACED, per="device and step", **conditions))
    return rows


def _time_rows(work: Work, cluster: Cluster, notes: list[str]):
    from gradus.plan.step import step_time

    time = step_time(work, cluster)
    notes += [note for note in time.notes if note not in notes]
    rows = [figure(f"time/{part}", seconds, "s", of="step") for part, seconds in time.parts.items() if seconds]
    total = {part: seconds for part, seconds in time.parts.items() if seconds}
    rows.append(figure("time/step", time.total, "s", "sum of the parts", total, low=time.low, high=time.high))
    if work.tokens:
        given = {"places": work.tokens, "seconds": time.total}
        rows.append(figure("time/tokens_per_s", work.tokens / time.total, "tokens/s", "places of a step (padding counted) / step time", given))
    given = {"samples": work.samples, "seconds": time.total}
    rows.append(figure("time/samples_per_s", work.samples / time.total, "samples/s", "samples of a step / step time", given))
    return time, rows


def _utilisation(rows: list[Row], recipe: Recipe, seconds: float, cluster: Cluster) -> list[Row]:
    """MFU and HFU of the operations counted, at the device's peak in the numbers that matrix products are computed in; none without one."""
    from gradus.plan.counts import hfu, mfu

    numbers = computed_in(recipe.layout)
    if numbers not in cluster.device.peaks:
        return []
    found = {row.name: row.value for row in rows if row.conditions.get("convention") != "causal half"}
    return [mfu(found["flops/model"], seconds, cluster, numbers), hfu(found["flops/hardware"], seconds, cluster, numbers)]


def computed_in(layout: Layout) -> str:
    """fp32, tf32, bf16 or fp16: what matrix products are computed in."""
    numbers = layout.precision.removeprefix("pure_")
    if layout.shard > 1 and layout.param_dtype:
        numbers = layout.param_dtype
    return "tf32" if numbers == "fp32" and layout.tf32 else numbers


def _budget_rows(request: Request, recipe: Recipe, task, time, cluster: Cluster, work: Work) -> list[Row]:
    from gradus.plan.budget import budget

    seconds = (min(time.low, time.total), time.total, max(time.high, time.total))
    steps = total_steps(recipe, task)
    return budget(steps=steps, seconds_per_step=seconds, cluster=cluster, days=request.days, parts=time.parts, work=work)


# ---------------------------------------------------------------- other questions


def devices(request: Request) -> tuple[list[str], list[Row]]:
    """(lines, rows): which single device. Raises UserError as `answer`."""
    from gradus.plan.devices import devices as ranked

    if request.on or request.days:
        raise UserError("--devices compares all devices of the hardware file, one of each: --on and --days have no effect. Leave them out.")
    recipe, task, _ = open_recipe(request, [])
    return ranked(recipe, task)


def search(request: Request) -> tuple[list[str], list[Row]]:
    """(lines, rows): the best layouts on this hardware. Raises UserError as `answer`."""
    from gradus.plan.search import search as of_layouts

    cluster, _ = _cluster(request)
    if cluster is None:
        raise UserError("--search: on which hardware? Say --on, e.g. --on 64xH100 (gradus hardware lists them).")
    recipe, _, _ = open_recipe(request, [])
    found = of_layouts(recipe, cluster)
    return found.lines(), found.rows()
