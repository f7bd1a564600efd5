"""Parameters by component, and the floating-point operations of a training step, counted from the very module on the
meta device.

Conventions (one multiply-add is two operations; a look-up in an embedding is none; the output projection counts, tied
or not):

    flops/model            no recomputation, attention's full matrix, no padding (Chowdhery et al. 2022, appendix B)
    flops/model_causal     the same, but half of the scores of causal attention, which is all that they need
    flops/hardware         what is computed: model operations, what checkpointing computes again, and the scores that a
                           fused attention's backward pass computes again (Dao et al. 2022, section 3.1); attention's
                           full matrix

A large model is traced with one block of each kind, which is exact: blocks of a kind do the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

from gradus import models
from gradus.errors import UserError, did_you_mean
from gradus.hardware import Cluster
from gradus.plan import engine
from gradus.plan.case import Case
from gradus.plan.figures import known_figure
from gradus.plan.passes import active_elements
from gradus.recipe.schema import Layout, ModelConfig, Recipe
from gradus.rows import Row

FULL = "no recomputation, attention's full matrix"
CAUSAL = "no recomputation, half of causal attention's matrix"
HARDWARE = "recomputation included, attention's full matrix"


# ---------------------------------------------------------------- parameters


def parameters(config: ModelConfig) -> list[Row]:
    """Rows parameters/<component> (those of `models.count`), parameters/total, parameters/trainable and, with experts,
    parameters/active: those that a token meets. Each shared one is counted once. Allocates nothing."""
    counts, inputs = models.count(config), sizes(config)
    more = {"source": " ".join((type(config).__doc__ or "the module").split()), "method": "counted from the module"}
    rows = [known_figure(f"parameters/{name}", n, inputs, **more) for name, n in counts.items()]
    rows.append(known_figure("parameters/trainable", models.trainable(config), inputs, **more))
    if getattr(config, "n_experts", None):
        rows.append(known_figure("parameters/active", active(config), inputs, **more))
    return rows


def active(config: ModelConfig) -> int:
    """The parameters that a token meets: all, but of the experts only top_k (Jiang et al. 2024, section 2.1)."""
    return sum(active_elements(models.whole(config)).values())


SYMBOLS = {
    "L": "n_layers", "L_d": "n_decoder_layers", "h": "d_model", "a": "n_heads", "k": "n_kv_heads", "f": "d_ff",
    "V": "vocab_size", "s": "seq_len", "T": "n_token_types", "E": "n_experts", "top_k": "top_k", "f_e": "d_expert",
    "f_s": "d_shared", "P": "patch_size", "c": "n_channels", "image": "image_size", "C": "n_classes",
    "buckets": "n_buckets",
}  # fmt: skip


def sizes(config: ModelConfig) -> dict[str, Any]:
    """The numbers that formulas name: L layers, h width, a heads of d, k key heads, f inner width, V vocabulary, s
    positions, ..."""
    values = {symbol: getattr(config, name, None) for symbol, name in SYMBOLS.items()}
    if values["E"] is None:
        values["top_k"] = None
    return {**{symbol: value for symbol, value in values.items() if value is not None}, "d": config.head_dim}


# ---------------------------------------------------------------- what a sample is


class Shape(NamedTuple):
    """One training sample as the model sees it, in positions. For decoders and encoders `source` is the sequence and
    `target` 0."""

    source: int
    target: int = 0
    selected: int = 0  # positions at which a masked-LM head computes


def shape_of(case: Case) -> Shape:
    """The shape of a full-length sample. Raises UserError as `Case.one_sample`."""
    batch = case.one_sample.batches.full
    if "source" in batch:
        return Shape(batch["source"].shape[1], batch["target"].shape[1])
    if "ids" in batch:
        return Shape(batch["ids"].shape[1], selected=int(batch["select"].sum()) if "select" in batch else 0)
    return Shape(case.recipe.model.n_tokens)


# ---------------------------------------------------------------- operations


class Operations(NamedTuple):
    model: float
    hardware: float
    attention: float  # of `model`: scores and values
    causal: float  # of `attention`: where no query looks at a later key


def operations(case: Case) -> Operations:
    """The operations of one sample, forward and backward, read off the trace of one block of each kind and the ends. On
    a GPU attention is fused also with dropout, with a trained bias and for few tokens; on a CPU it is not then
    (layers/kernels.py)."""
    kept = ("checkpointing", "attention", "chunk", "precision")
    own = Layout(device="cpu", **{key: getattr(case.layout, key) for key in kept})
    one, batch = case.one_sample, case.one_sample.batches.full
    plain = engine.operations_of(dataclasses.replace(one, target="cuda"), batch)
    model = inner = causal = hardware = 0.0
    for (_, kind, name, _, _, flops, _, shape), n in plain.items():
        model += n * (full := engine.products(kind, name, flops, shape, 2, 4))
        inner += n * full * (kind == "attention")
        halved = flops < 0.75 * engine.products(kind, name, flops, shape, 2, 5)
        causal += n * full * (kind == "attention" and halved)
    for (_, kind, name, _, _, flops, _, shape), n in engine.operations_of(one.at(own), batch).items():
        hardware += n * engine.products(kind, name, flops, shape, 2, 5)
    return Operations(model, hardware, inner, causal)


def flops(case: Case) -> list[Row]:
    """Operations of one optimizer step over all devices: rows flops/model, flops/model_causal (where there is causal
    attention), flops/hardware, and flops/per_token (of flops/model).

    Every sample is full length, so that padding counts for none. Raises UserError as `Case.one_sample`.
    """
    shape, config, layout, batch = shape_of(case), case.recipe.model, case.layout, case.recipe.batch
    tokens = case.one_sample.batches.full["n_tokens"]
    samples = batch.samples or batch.tokens / tokens
    one = operations(case)
    model, hardware, causal = (samples * n for n in (one.model, one.hardware, one.causal))
    how = {"method": "traced with one block of each kind, and multiplied"}

    lengths = {"samples": samples, "s": shape.source, "t": shape.target or None, "m": shape.selected or None}
    inputs = {k: v for k, v in {**sizes(config), **lengths}.items() if v is not None}
    if not shape.target and not shape.selected and models.trainable(config) == models.count(config)["total"]:
        inputs["N_mm"] = round((one.model - one.attention) / (6 * shape.source))
    rows = [known_figure("flops/model", model, inputs, convention=FULL, **how)]
    if causal:
        inputs = {"flops/model": model, "causal attention": causal}
        rows.append(known_figure("flops/model_causal", model - causal / 2, inputs, convention=CAUSAL, **how))
    inputs = {"flops/model": model, "computed again": hardware - model}
    settings = {"checkpointing": layout.checkpointing, "attention": layout.attention, "target": case.target}
    rows.append(known_figure("flops/hardware", hardware, inputs, convention=HARDWARE, **how, **settings))
    inputs = {"flops/model": model, "tokens": samples * tokens}
    return [*rows, known_figure("flops/per_token", one.model / tokens, inputs, convention=FULL)]


def tokens_a_sample(recipe: Recipe) -> int:
    """Tokens of a full-length sample, both sides' of an encoder-decoder; patches of an image. Raises UserError as
    `Case.one_sample`."""
    return Case.of(recipe).one_sample.batches.full["n_tokens"]


# ---------------------------------------------------------------- utilisation


def utilisation(
    name: Literal["mfu", "hfu"], operations: float, seconds: float, cluster: Cluster, dtype: str
) -> Row:
    """time/mfu: model operations of a step / (seconds · devices · dense peak of `dtype`) (Chowdhery et al. 2022,
    section 4.1); time/hfu: the same of the operations that are computed, recomputation included.

    The convention of the operations stands in the row's conditions. Raises UserError where the device has no peak for
    that dtype.
    """
    what, convention = ("model", FULL) if name == "mfu" else ("hardware", HARDWARE)
    device = cluster.device
    if dtype not in device.peaks:
        unknown = f"its peak in {dtype} is not known, so utilisation cannot be given"
        raise UserError(f"{device.name}: {unknown}.{did_you_mean(dtype, device.peaks)}")
    peak, of_peak = device.peaks[dtype], f"dense peak in {dtype} (FLOP/s)"
    inputs = {f"flops/{what}": operations, "seconds": seconds, "devices": cluster.n, of_peak: peak}
    share = operations / (seconds * cluster.n * peak)
    return known_figure(f"time/{name}", share, inputs, convention=convention, dtype=dtype)
