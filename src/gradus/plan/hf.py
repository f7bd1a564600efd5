"""A bare model as something to plan: a preset's name or a Hugging Face config.json → a configuration of ours → a whole
recipe.

A config.json maps (recipe/hf.yaml) where our module has as many parameters and operations as theirs, but for under
0.1 %; notes say what differs (an activation, a rescaled rotary angle, norms of queries and keys). Where more of the
parameters would differ, it is refused with the field's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gradus import limits, models
from gradus.errors import UserError
from gradus.models import weights
from gradus.models.weights import fields, others
from gradus.models.weights import rope as rotary
from gradus.plan.counts import active, tokens_a_sample
from gradus.recipe import presets, resolve
from gradus.recipe.schema import MODELS, TASKS, ModelConfig, Recipe

# ---------------------------------------------------------------- config.json → a configuration


class Read(NamedTuple):
    config: ModelConfig
    notes: list[str]  # what of it the plan leaves out, and that it changes neither parameters nor operations
    seq_len: int | None = None  # positions that can be used, where they are fewer than the model has
    kind: str | None = None  # model_type, of a config.json of others


def read_hf(name: str) -> Read:
    """The configuration of `hf:NAME`, a local folder (Hugging Face's or Meta's layout, or a run) or a hub name, of
    which only config.json is fetched. Raises UserError for what is not there, and, naming the field, for what does not
    map onto a family."""
    source = name.removeprefix("hf:")
    if not source:
        example = "Give a local folder or a hub name, e.g. hf:openai-community/gpt2"
        raise UserError(f"hf: what comes after it is missing. {example}")
    path = models.locate(source, weights_too=False)
    file = path / "config.json"
    hf = limits.read_object(file) if file.is_file() else {"gradus": True}
    if "gradus" in hf or str(hf.get("model_type")).startswith("gradus"):
        return Read(models.config_of(path), [])
    kind = hf.get("model_type")
    if not isinstance(kind, str | None):
        raise UserError(f"{name}: model_type={kind!r:.60}: expected text")
    if kind not in others.planned():
        raise UserError(f"{name}: {others.refused(kind, others.planned())}")
    with models.one_line(name):
        try:
            return _map(fields.Fields(hf), kind)
        except UserError as e:
            raise UserError(f"{name}: {str(e).removeprefix('config.json: ')}") from None


def _map(hf: fields.Fields, kind: str) -> Read:
    """hf: the fields, which are changed to those that the family's reader knows."""
    entry, notes, usable = others.planned()[kind], [], None
    table = weights.rules_of(entry["family"])
    ours = kind in weights.model_types()
    _check_fields(hf, entry)
    seen = {} if ours else _seen(hf) | _latent(hf, entry) | entry.get("ours", {})
    for field in ("dense_act_fn", *(() if ours else ("layer_types",))):  # which repeat other fields
        hf.pop(field, None)
    notes += _replaced(hf, entry)
    heads = entry.get("heads", {})
    architecture = (hf.get("architectures") or list(heads.values()) or [""])[0]
    if heads:
        hf["architectures"] = [_head(architecture, heads)]
    notes += [note for ending, note in entry.get("headless", {}).items() if architecture.endswith(ending)]
    if "rotary" in entry:
        notes += _window_and_angles(hf, entry["rotary"], ours)
    if "added_positions" in entry:
        usable = hf["max_position_embeddings"]
        hf["n_positions"] = stored = usable + entry["added_positions"]
        notes.append(f"{stored} positions as stored, of which {usable} are used")
    for field, names in entry.get("rename", {}).items():
        hf |= dict.fromkeys([names] if isinstance(names, str) else names, hf[field])
    hf["model_type"] = entry.get("as", kind)
    config = table.config_from_hf(hf)
    config = config.changed(**seen) if seen else config
    if unknown := fields.unknown(hf, (*table.WITHOUT_EFFECT, *entry.get("neither", ()))):
        notes.append(f"config.json: {unknown}: unknown for model_type={kind}, planned as if it changed nothing")
    return Read(config, [*notes, *([entry["note"]] if "note" in entry else [])], usable, kind)


def _check_fields(hf: dict[str, Any], entry: dict[str, Any]) -> None:
    """Raises UserError for a field that is missing, or whose parameters are not ours; puts in what an absent one means.
    """
    default = entry.get("default", {})
    missing = [f for f in entry.get("needs", ()) if hf.get(f) is None and hf.get(str(default.get(f))) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing, and the model cannot be planned without")
    for field, (only, why) in entry.get("only", {}).items():
        wanted = hf[only] if isinstance(only, str) else only
        if hf.get(field, wanted) != wanted:
            raise UserError(f"{field}={hf[field]} is not supported: {why}. Only {field}={wanted} is")
    for field, value in default.items():
        if hf.get(field) is None:
            hf[field] = hf.get(value, value) if isinstance(value, str) else value


def _replaced(hf: dict[str, Any], entry: dict[str, Any]) -> Iterator[str]:
    """Puts in what stands for values that change neither parameters nor operations: a note for each."""
    first, *equal = entry.get("equal", [None])
    planned = {field: [hf.get(first, 0.1)] for field in equal} | entry.get("planned", {})
    for field, known in entry.get("variants", {}).items():
        if str(hf.get(field)).startswith(known[0].partition("-")[0] + "-"):
            planned[field] = known
    for field, known in planned.items():
        if hf.get(field) is not None and hf[field] not in known:
            yield f"{field}={hf[field]} planned as {known[0]}"
            hf[field] = known[0]


def _head(architecture: str, heads: dict[str, str]) -> str:
    """The architecture, by its ending, that the family's reader knows."""
    ending = next((end for end in heads if architecture.endswith(end)), None)
    if ending is None:
        known = ", ".join("..." + end for end in heads)
        raise UserError(f"architectures={architecture} is not supported: the head differs. Known: {known}")
    return heads[ending]


def _seen(hf: dict[str, Any]) -> dict[str, Any]:
    """Ours for what a layer's queries see, which is taken out of the fields: a window, in all layers but every so many.
    {} where no layer has one, or they are mixed in another way."""
    window, every = hf.get("sliding_window"), hf.get("sliding_window_pattern")
    every = len(every) if isinstance(every, str) else every
    if types := hf.get("layer_types"):
        every = [*types, "full_attention"].index("full_attention") + 1
        if types != ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(len(types))]:
            return {}
    if not window or window >= hf.get("max_position_embeddings", 2048):
        return {}
    hf["sliding_window"] = None
    every = every if every and every <= hf["num_hidden_layers"] else None
    return {} if every == 1 else {"window": window, "full_every": every}


def _latent(hf: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """Ours for multi-head latent attention, and for experts after the first few layers, beside shared ones that are as
    one; {} for what has neither."""
    said: dict[str, Any] = {our: hf[their] for our, their in entry.get("experts", {}).items()}
    if said:
        types = hf.get("mlp_layer_types") or ["dense"] * min(hf["first_k_dense_replace"], hf["num_hidden_layers"])
        said["dense_layers"] = [i for i, kind in enumerate(types) if kind == "dense"]
        said["d_shared"] = said["d_expert"] * (hf.get("n_shared_experts") or 0) or None
    if "latent" in entry:
        latent = said["latent"] = {our: hf.get(their) for our, their in entry["latent"].items()}
        latent["v_dim"] = latent["v_dim"] or hf["hidden_size"] // hf["num_attention_heads"]
        hf |= {"head_dim": latent["nope_dim"] + latent["rope_dim"], "num_key_value_heads": 1}
    return said


def _window_and_angles(hf: dict[str, Any], types: list[str], ours: bool) -> Iterator[str]:
    """A window of attention that is not read limits the length; of rotary positions a way to rescale that is not ours
    is left out, and so are fields that nobody knows."""
    if not ours:
        window, hf["sliding_window"] = hf.get("sliding_window"), None
        used = hf.get("use_sliding_window", True) and hf.get("max_window_layers", 0) < hf.get("num_hidden_layers", 32)
        if window and used and window < hf.get("max_position_embeddings", 2048):
            limit = f"up to {window} tokens, where the window changes nothing"
            yield f"sliding_window={window} can be planned, not trained: {limit}"
            hf["max_position_embeddings"] = window
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope  # of each kind of layer its own
    how = rope.get("rope_type") or rope.get("type") or "default"
    if how not in types or any(x.get("partial_rotary_factor", 1.0) != 1.0 for x in (rope, hf)):
        yield f"rotary positions of type {how} planned as plain ones"
        rope = {}
    known = rotary.known(how)
    if left := [name for name in rope if name not in known and rope[name] is not None]:
        yield f"rotary positions: {', '.join(left)}: unknown, planned as if it changed nothing"
    rope = {name: value for name, value in rope.items() if name in known}
    hf |= {"rope_scaling": rope, "rope_parameters": None}


# ---------------------------------------------------------------- a configuration → a recipe


def published(config: ModelConfig) -> dict[str, Any]:
    """How the preset that config names was trained (recipe/runs.yaml), or the model of its family that is nearest in
    parameters; of a family without any, another that learns the same task from the same kind of data.

    Raises UserError where no model did that.
    """

    def learned_alike(run: dict[str, Any]) -> bool:
        task = run["task"]["name"]
        return config.learns.get(task) == MODELS[run["family"]].learns[task]

    every, classifies = presets.runs(), getattr(config, "head", None) == "classification"
    runs = [run for run in every if run["family"] == config.family] or list(filter(learned_alike, every))
    runs = [run for run in runs if ("classification" in TASKS[run["task"]["name"]].heads) == classifies] or runs
    if not runs:
        raise UserError(f"model.family={config.family}: no published training is like its own. Give a recipe.")
    name = presets.ALIASES.get(config.preset or "", config.preset)
    run = next((run for run in runs if name in run.get("sizes", {})), runs[0])
    sizes = run.get("sizes", {})
    if sizes and name not in sizes:
        total = models.count(config)["total"]
        name = min(sizes, key=lambda size: abs(math.log(sizes[size]["parameters"] / total)))
        run = {**run, "tokens": None}
    run = {**run, **sizes.get(name, {})}
    return {**run, "source": run["source"].format(size=name)}


FINE_TUNING = {  # of an adapter, where a command states nothing else; tokens: of the data that are at hand
    "source": (
        "Hu et al. 2022 (LoRA), appendix D.4, GPT-3 on SAMSum: 128 samples of 2,048 tokens, AdamW, 2 epochs; its data "
        "are yours"
    ),
    "samples": 128, "seq_len": 2048, "lr": 2e-4, "warmup": "250000 tokens", "schedule": {"name": "linear"},
    "epochs": 2, "steps": None, "tokens": None,
}  # fmt: skip
# stand for what a bare model does not say
TEXT, TOKENIZER, IMAGES = "path/to/text", "path/to/tokenizer", "path/to/images"


def recipe_for(
    model: ModelConfig | str, *, tokens: float | None = None, notes: list[str] | None = None, adapter: bool = False
) -> Recipe:
    """A whole recipe for a bare model: a configuration, a preset's name, or hf:NAME.

    The family's pre-training task, and settings as published for that size (`published`; notes receives their source):
    samples per step, length, optimizer, schedule, steps; bf16 mixed precision. tokens: to train on, in place of the
    published number; where none is published, 20 for each parameter that a token meets (Hoffmann et al. 2022). adapter:
    the model is fine-tuned with one, of text as FINE_TUNING says, and all weights are bf16. Data and tokenizer are
    placeholders. Raises UserError as `read_hf` and `published`, and for an unknown preset.
    """
    notes = [] if notes is None else notes
    name, tokenizer, usable = model, TOKENIZER, None
    if isinstance(model, ModelConfig):
        config, name = model, model.preset or model.family
    elif model.startswith("hf:"):
        tokenizer = model.removeprefix("hf:")
        config, more, usable, kind = read_hf(model)
        if kind and kind not in weights.model_types():
            notes.append(others.not_trained(kind))
        folder = Path(tokenizer)
        name, notes[len(notes) :] = (folder.resolve() if folder.is_dir() else folder).name, more
    else:
        config = presets.config_of(model)
    run = published(config) | (FINE_TUNING if adapter and config.reads == "text" else {})
    notes.append(f"training settings: {run['source']}")
    length, samples = run.get("seq_len"), run["samples"]
    if length:
        most = usable or config.seq_len
        length = min(length, most)
        if not adapter:  # as many tokens a step where the model has fewer positions
            samples = max(1, round(samples * run["seq_len"] / length))
        of = f", of {most:,} that the model takes" if config.longest else ""
        notes.append(f"planned for samples of {length:,} tokens{of} (data.max_len)")
    raw = {
        "name": name,
        "model": _model(config, notes),
        **_task_and_data(config, run["task"], length),
        **({} if config.reads == "images" else {"tokenizer": {"kind": "file", "path": tokenizer}}),
        "optimizer": {**run["optimizer"], "lr": run["lr"]},
        "batch": {"samples": samples},
        "layout": {
            "precision": "pure_bf16" if adapter else "bf16", "micro_batch": _micro_batch(config, length, samples)
        },
        "train": {"clip_norm": run.get("clip_norm"), "steps": run.get("steps") or 1},
    }
    return resolve({**raw, **_how_long(resolve(raw, name), run, tokens, notes)}, name)


def _how_long(recipe: Recipe, run: dict[str, Any], tokens: float | None, notes: list[str]) -> dict[str, Any]:
    """Sections train and schedule: steps for the tokens asked for or published, else epochs; and the warm-up in
    steps."""
    steps, a_step = run.get("steps"), recipe.batch.samples * tokens_a_sample(recipe)
    wanted = tokens or run.get("tokens")
    if wanted is None and "epochs" in run:
        return {"train": {"clip_norm": run.get("clip_norm"), "epochs": run["epochs"]}, "schedule": run["schedule"]}
    if wanted is None and steps is None:
        wanted = 20 * active(recipe.model)
        source = "20 per active parameter (Hoffmann et al. 2022): how many were trained on is not published"
        notes.append(f"{wanted:.3g} tokens, {source}")
    if wanted is not None:
        steps = math.ceil(wanted / a_step)
    number, unit = re.fullmatch(r"(\d+)( tokens)?", str(run["warmup"])).groups()
    warmup = int(number) // (a_step if unit else 1)
    least = 1 if run["schedule"]["name"] == "noam" else 0
    schedule = {**run["schedule"], "warmup_steps": max(least, min(warmup, steps // 10))}
    return {"train": {"clip_norm": run.get("clip_norm"), "steps": steps}, "schedule": schedule}


def _model(config: ModelConfig, notes: list[str]) -> dict[str, Any]:
    section = {**config.model_dump(exclude_none=True), **({"init": None} if config.init else {})}
    if config.reads == "images" and config.n_classes is None:
        section["n_classes"] = 1000
        notes.append("config.json has no classes: planned with ImageNet's 1,000 (model.n_classes)")
    if getattr(config, "head", None) == "none":
        section |= {"head": _learned_with(config), "pooler": True}
    return section


def _learned_with(config: ModelConfig) -> str | None:
    """The head; of a bare encoder the one that it was trained with: one of two types of tokens tells next sentences."""
    head = getattr(config, "head", None)
    return head if head != "none" else "pretraining" if config.n_token_types > 1 else "masked_lm"


def _task_and_data(config: ModelConfig, task: dict[str, Any], length: int | None) -> dict[str, Any]:
    name, kind = task["name"], config.learns[task["name"]]
    task = {**task, **TASKS[name].heads.get(_learned_with(config), {})}
    data = {"path": IMAGES} if kind == "images" else {"path": TEXT, "max_len": length}
    return {"task": task, "data": {"kind": kind, **data}}


def _micro_batch(config: ModelConfig, length: int | None, samples: int) -> int:
    """A power of two that keeps samples · tokens · width near 2²³: 1 for the largest models, 8 for one of 124 million
    parameters. A start; the search chooses."""
    each = (length or config.n_tokens) * config.d_model
    return min(2 ** max(0, int(math.log2(max(1, 2**23 / each)))), samples)
