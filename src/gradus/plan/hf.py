"""A bare model as something to plan: a preset's name or a Hugging Face config.json → a configuration of ours → a whole recipe.

A config.json maps (recipe/hf.yaml) where our module has as many parameters and operations as theirs; what else differs (an activation, a rescaled
rotary angle, several dropouts) is told in the notes. Where even the parameters would differ, it is refused with the field's name.
"""

from __future__ import annotations

import math
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from gradus import models
from gradus.errors import UserError
from gradus.models import weights
from gradus.models.weights import others
from gradus.plan.counts import active, tokens_a_sample
from gradus.recipe import presets, resolve
from gradus.recipe.schema import ModelConfig, Recipe

# ---------------------------------------------------------------- config.json → a configuration


class Read(NamedTuple):
    config: ModelConfig
    notes: list[str]  # what of it the plan leaves out, and that it changes neither parameters nor operations
    seq_len: int | None = None  # positions that can be used, where they are fewer than the model has
    kind: str | None = None  # model_type, of a config.json of others


def read_hf(name: str) -> Read:
    """The configuration of `hf:NAME`, a local folder (Hugging Face's or Meta's layout, or a run) or a hub name, of which only config.json
    is fetched. Raises UserError for what is not there, and, naming the field, for what does not map onto a family."""
    where = name.removeprefix("hf:")
    if not where:
        raise UserError("hf: what comes after it is missing. Give a local folder or a hub name, e.g. hf:openai-community/gpt2")
    path = models.locate(where, weights_too=False)
    file = path / "config.json"
    hf = weights.read_json(file) if file.is_file() else {"gradus": True}
    if "gradus" in hf or str(hf.get("model_type")).startswith("gradus"):
        return Read(models.config_of(path), [])
    kind = hf.get("model_type")
    if not isinstance(kind, str | None):
        raise UserError(f"{name}: model_type={kind!r:.60}: expected text")
    if kind not in others.planned():
        raise UserError(f"{name}: {others.refused(kind, others.planned())}")
    with models.one_line(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several dropouts: they are no matter of size
        try:
            return _map(dict(hf), kind)
        except UserError as e:
            raise UserError(f"{name}: {str(e).removeprefix('config.json: ')}") from None


def _map(hf: dict[str, Any], kind: str) -> Read:
    entry, notes, usable = others.planned()[kind], [], None
    missing = [field for field in entry.get("needs", ()) if hf.get(entry.get("default", {}).get(field, field)) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing, and the model cannot be planned without")
    for field, (only, why) in entry.get("only", {}).items():
        wanted = hf[only] if isinstance(only, str) else only
        if hf.get(field, wanted) != wanted:
            raise UserError(f"{field}={hf[field]} is not supported: {why}. Only {field}={wanted} is")
    for field, value in entry.get("default", {}).items():
        if hf.get(field) is None:
            hf[field] = hf.get(value, value) if isinstance(value, str) else value
    first, *alike = entry.get("equal", [None])
    planned = {field: [hf.get(first, 0.1)] for field in alike} | entry.get("planned", {})
    if entry["family"] == "t5" and str(hf.get("feed_forward_proj")).startswith("gated-"):
        planned["feed_forward_proj"] = ["gated-gelu", "gated-gelu_new"]
    for field, known in planned.items():
        if hf.get(field) is not None and hf[field] not in known:
            notes.append(f"{field}={hf[field]} planned as {known[0]}")
            hf[field] = known[0]
    theirs = (hf.get("architectures") or list(entry.get("heads", {}).values()) or [""])[0]
    if "heads" in entry:
        _heads(hf, theirs, entry["heads"])
    if (entry["family"], theirs[-5:]) == ("llama", "Model"):
        notes.append("planned with the output projection that training needs")
    if theirs == "ViTModel":
        notes.append("the pooler, which neither a classifier nor the features read, is left out")
    if entry["family"] == "llama":
        _window_and_angles(hf, kind, notes)
    elif kind == "opt":
        usable, hf["n_positions"] = hf["max_position_embeddings"], hf["max_position_embeddings"] + 2
        notes.append(f"{usable + 2} positions as stored, of which {usable} are used")
    elif entry["family"] == "bert" and kind != "bert":
        usable = hf["max_position_embeddings"] - hf.get("pad_token_id", 1) - 1
        notes.append(f"{hf['max_position_embeddings']} positions as stored, of which {usable} are used")
    for field, names in entry.get("rename", {}).items():
        hf |= dict.fromkeys([names] if isinstance(names, str) else names, hf[field])
    hf["model_type"] = entry.get("as", kind)
    config = weights.rules_of(entry["family"]).config_from_hf(hf)
    return Read(config, [*notes, *([entry["note"]] if "note" in entry else [])], usable, kind)


def _heads(hf: dict[str, Any], theirs: str, heads: dict[str, str]) -> None:
    """Their architecture, by its ending, as the one that the family's reader knows."""
    ending = next((end for end in heads if theirs.endswith(end)), None)
    if ending is None:
        raise UserError(f"architectures={theirs} is not supported: the head differs. Known: {', '.join('...' + end for end in heads)}")
    hf["architectures"] = [heads[ending]]


def _window_and_angles(hf: dict[str, Any], kind: str, notes: list[str]) -> None:
    """Of the Llamas: a window of attention limits the length; a way to rescale rotary positions that is not ours is left out."""
    window = hf.pop("sliding_window", None)
    used = hf.get("use_sliding_window", kind != "qwen2")  # Qwen2 names a window that it may not use
    if window and window < hf.get("max_position_embeddings", 2048) and used:
        notes.append(f"sliding_window={window} can be planned, not trained: up to {window} tokens, where the window changes nothing")
        hf["max_position_embeddings"] = window
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    how = rope.get("rope_type") or rope.get("type") or "default"
    if how not in ("default", "llama3") or any(x.get("partial_rotary_factor", 1.0) != 1.0 for x in (rope, hf)):
        notes.append(f"rotary positions of type {how} planned as plain ones")
        hf.pop("rope_parameters", None)
        hf["rope_scaling"] = None


# ---------------------------------------------------------------- a configuration → a recipe


def published(config: ModelConfig) -> dict[str, Any]:
    """How the preset that config names was trained (recipe/runs.yaml), or the model of its family that is nearest in parameters."""
    family = "bert classifier" if getattr(config, "head", None) == "classification" and config.family == "bert" else config.family
    name = presets.ALIASES.get(config.preset or "", config.preset)
    runs = [run for run in presets.runs() if run["family"] == family]
    run = next((run for run in runs if name in run.get("sizes", {})), runs[0])
    sizes = run.get("sizes", {})
    if sizes and name not in sizes:
        total = models.count(config)["total"]
        name, run = min(sizes, key=lambda size: abs(math.log(sizes[size]["parameters"] / total))), {**run, "tokens": None}
    run = {**run, **sizes.get(name, {})}
    return {**run, "source": run["source"].format(size=name)}


TEXT, TOKENIZER, IMAGES = "path/to/text", "path/to/tokenizer", "path/to/images"  # stand for what a bare model does not say


def recipe_for(model: ModelConfig | str, *, tokens: float | None = None, notes: list[str] | None = None) -> Recipe:
    """A whole recipe for a bare model: a configuration, a preset's name, or hf:NAME.

    The family's pre-training task, and settings as published for that size (`published`; notes receives their source): samples a step,
    length, optimizer, schedule, steps; bf16 mixed precision. tokens: to train on, in place of the published number; where none is
    published, 20 a parameter that a token meets (Hoffmann et al. 2022). Data and tokenizer are placeholders. Raises UserError as
    `read_hf`, and for an unknown preset.
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
        name, notes[len(notes) :] = Path(tokenizer).name, more
    else:
        config = presets.config_of(model)
    run = published(config)
    notes.append(f"training settings: {run['source']}")
    length, samples = run.get("seq_len"), run["samples"]
    if length:  # as many tokens a step where the model has fewer positions
        length = min(length, usable or config.seq_len)
        samples = max(1, round(samples * run["seq_len"] / length))
    raw = {
        "name": name,
        "model": _model(config, notes),
        **_task_and_data(config, length),
        **({} if config.family == "vit" else {"tokenizer": {"kind": "file", "path": tokenizer}}),
        "optimizer": {**run["optimizer"], "lr": run["lr"]},
        "batch": {"samples": samples},
        "layout": {"precision": "bf16", "micro_batch": _micro_batch(config, length, samples)},
        "train": {"clip_norm": run.get("clip_norm"), "steps": run.get("steps", 1)},
    }
    return resolve({**raw, **_how_long(resolve(raw, name), run, tokens, notes)}, name)


def _how_long(recipe: Recipe, run: dict[str, Any], tokens: float | None, notes: list[str]) -> dict[str, Any]:
    """Sections train and schedule: steps for the tokens asked for or published, and the warm-up in steps."""
    steps, a_step = run.get("steps"), recipe.batch.samples * tokens_a_sample(recipe)
    wanted = tokens or run.get("tokens")
    if wanted is None and steps is None:
        wanted = 20 * active(recipe.model)
        notes.append(f"{wanted:.3g} tokens, 20 per active parameter (Hoffmann et al. 2022): how many were trained on is not published")
    if wanted is not None:
        steps = math.ceil(wanted / a_step)
    number, unit = re.fullmatch(r"(\d+)( tokens)?", str(run["warmup"])).groups()
    warmup = int(number) // (a_step if unit else 1)
    least = 1 if run["schedule"]["name"] == "noam" else 0
    schedule = {**run["schedule"], "warmup_steps": max(least, min(warmup, steps // 10))}
    return {"train": {"clip_norm": run.get("clip_norm"), "steps": steps}, "schedule": schedule}


def _model(config: ModelConfig, notes: list[str]) -> dict[str, Any]:
    section = {**config.model_dump(exclude_none=True), **({"init": None} if config.init else {})}
    if config.family == "vit" and config.n_classes is None:
        section["n_classes"] = 1000
        notes.append("config.json has no classes: planned with ImageNet's 1,000 (model.n_classes)")
    if config.family == "bert" and config.head == "none":
        section |= {"head": "pretraining", "pooler": True}
    return section


def _task_and_data(config: ModelConfig, length: int | None) -> dict[str, Any]:
    head = getattr(config, "head", None)
    text = {"kind": "text", "path": TEXT, "max_len": length}
    if config.family == "vit":
        return {"task": {"name": "classification"}, "data": {"kind": "images", "path": IMAGES}}
    if config.family == "seq2seq":
        return {"task": {"name": "translation", "label_smoothing": 0.1}, "data": {**text, "kind": "pairs"}}
    if config.family == "bert" and head == "classification":
        return {"task": {"name": "classification"}, "data": {**text, "kind": "labelled"}}
    if config.family == "bert":
        return {"task": {"name": "masked_lm", "next_sentence": head != "masked_lm"}, "data": text}
    return {"task": {"name": "span_corruption" if config.family == "t5" else "causal_lm"}, "data": text}


def _micro_batch(config: ModelConfig, length: int | None, samples: int) -> int:
    """A power of two that keeps samples · places · width near 2²³: 1 for the largest, 8 for GPT-2 small. A start; the search chooses."""
    places = length or (config.image_size // config.patch_size) ** 2
    return min(2 ** max(0, int(math.log2(max(1, 2**23 / (places * config.d_model))))), samples)
