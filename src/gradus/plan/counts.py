"""Parameters by component, and the floating-point operations of a training step, counted from the very module on the meta device.

Conventions (one multiply-add is two operations; a look-up in an embedding is none; the output projection counts, tied or not):

    flops/model            no recomputation, attention's full matrix, no padding (Chowdhery et al. 2022, appendix B)
    flops/model_causal     the same, but half of the scores of causal attention, which is all that they need
    flops/hardware         what is computed: model operations, what checkpointing computes again, and the scores that a fused
                           attention's backward pass computes again (Dao et al. 2022, section 3.1); attention's full matrix

A large model is counted with one and two layers and extended, which is exact: every layer of a stack does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gradus import models
from gradus.errors import UserError, did_you_mean
from gradus.plan.batches import complete
from gradus.plan.figures import figure
from gradus.plan.formulas import Shape, closed_form, vit_tokens
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.rows import Row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from gradus.hardware import Cluster

FULL = "no recomputation, attention's full matrix"
CAUSAL = "no recomputation, half of causal attention's matrix"
HARDWARE = "recomputation included, attention's full matrix"
PALM = "Chowdhery et al. 2022 (PaLM), appendix B"


# ---------------------------------------------------------------- parameters

PARAMETERS = {  # family -> (formula, source)
    "gpt": (
        "L(4h²+4h + 2hf+f+h + 4h) + 2h + (V+s)h [+ Vh untied]",
        "Radford et al. 2019, section 2.3; Brown et al. 2020, section 2.1",
    ),
    "llama": (
        "L(2h·a·d + 2h·k·d + 3hf + 2h [+ (a+2k)·d qkv_bias]) + h + Vh [+ Vh untied]",
        "Touvron et al. 2023, section 2.2; Grattafiori et al. 2024, section 3.2; qkv_bias: Yang et al. 2024, section 2.2.1",
    ),
    "bert": (
        "(V+s+T)h + 2h + L(4h²+4h + 2hf+f+h + 4h) [+ pooler h²+h] [+ masked LM h²+h+2h+V] [+ next sentence 2h+2] [+ classes hC+C]",
        "Devlin et al. 2019, section 3",
    ),
    "t5": (
        "Vh + L(4hD+F+2h) + L_d(8hD+F+3h) + 2h + 2·buckets·a [+ Vh untied]; D=a·d, F=2hf or gated 3hf",
        "Raffel et al. 2020, sections 2.1 and 3.7",
    ),
    "seq2seq": (
        "Vh + L(4h²+4h + 2hf+f+h + 4h) + L_d(8h²+8h + 2hf+f+h + 6h) [+ 4h pre-norm] [+ Vh a table of its own]",
        "Vaswani et al. 2017, sections 3 and 5.1",
    ),
    "vit": (
        "cP²h+h + h + (N+1)h + L(4h²+4h + 2hf+f+h + 4h) + 2h + hC+C; N=(image/P)²",
        "Dosovitskiy et al. 2021, section 3.1",
    ),
}
EXPERTS = "; a feed-forward network of E experts is hE + E of them, of which a token takes top_k"


def parameters(config: ModelConfig) -> list[Row]:
    """Rows parameters/<component> (those of `models.count`), parameters/total, parameters/trainable and, with experts, parameters/active:
    those that a token meets. Each shared one is counted once. Allocates nothing; 405B takes a second."""
    counts = models.count(config)
    formula, source = PARAMETERS[config.family]
    experts = getattr(config, "n_experts", None)
    how = {"formula": formula + (EXPERTS if experts else ""), "inputs": sizes(config), "source": source, "method": "counted from the module"}
    rows = [figure(f"parameters/{name}", n, "parameters", **how) for name, n in counts.items()]
    rows.append(figure("parameters/trainable", counts["total"], "parameters", **{**how, "formula": "all: nothing is frozen"}))
    if experts:
        text = f"total - (1 - top_k/E) · parameters of the experts{EXPERTS}"
        rows.append(figure("parameters/active", active(config, counts["total"]), "parameters", **{**how, "formula": text}))
    return rows


def active(config: ModelConfig, total: int | None = None) -> int:
    """The parameters that a token meets: all, but of the experts only top_k (Jiang et al. 2024, section 2.1)."""
    total = models.count(config)["total"] if total is None else total
    experts = getattr(config, "n_experts", None)
    if not experts:
        return total
    from gradus.layers.moe import Experts

    model = models.build(config, device="meta")
    held = sum(p.numel() for m in model.modules() if isinstance(m, Experts) for p in m.parameters())
    return total - held // experts * (experts - config.top_k)


def sizes(config: ModelConfig) -> dict[str, Any]:
    """The numbers that the formulas name: L layers, h width, a heads of d, k key heads, f inner width, V vocabulary, s positions, ..."""
    names = {"L": "n_layers", "L_d": "n_decoder_layers", "h": "d_model", "a": "n_heads", "k": "n_kv_heads", "f": "d_ff", "V": "vocab_size",
             "s": "seq_len", "T": "n_token_types", "E": "n_experts", "top_k": "top_k", "P": "patch_size", "c": "n_channels",
             "image": "image_size", "C": "n_classes", "buckets": "n_buckets"}  # fmt: skip
    found = {short: getattr(config, name, None) for short, name in names.items()}
    if found["E"] is None:
        found["top_k"] = None
    return {**{k: v for k, v in found.items() if v is not None}, "d": config.head_dim}


# ---------------------------------------------------------------- what a sample is


def shape_of(recipe: Recipe, seq_len: int | None = None) -> Shape:
    """A full-length sample of this recipe, as its task makes it. seq_len: tokens of a row; None: data.max_len, or model.seq_len.

    Raises UserError for a seq_len that the model has no positions for, and for one given for images.
    """
    model, task = recipe.model, recipe.task
    if model.family == "vit":
        if seq_len is not None:
            raise UserError(
                f"seq_len={seq_len}: an image's length is its patches. Set model.image_size={model.image_size} or model.patch_size={model.patch_size}"
            )
        return Shape(vit_tokens(model))
    if task.name == "copy":
        return Shape(task.length, task.length - (task.start == "first"))
    n = seq_len or getattr(recipe.data, "max_len", None) or model.seq_len
    if model.family != "t5" and n > model.seq_len:
        raise UserError(f"seq_len={n}: the model has {model.seq_len} positions. Set seq_len={model.seq_len} or fewer, or a longer model.seq_len")
    if task.name == "masked_lm":
        inner = n - (3 if task.next_sentence else 2)
        return Shape(n, selected=max(1, round(task.mask_rate * inner)))
    if task.name == "span_corruption":  # tasks/span_corruption.py: the row ends with an end token, and so does the target
        inside = n - 1
        noise = min(max(1, round(inside * task.noise_rate)), inside - 1)
        spans = min(max(1, round(noise / task.mean_span)), inside - noise)
        return Shape(inside - noise + spans + 1, noise + spans + 1)
    return Shape(n, n) if task.name == "translation" else Shape(n)


# ---------------------------------------------------------------- operations


FORMULAS = {
    "gpt": "samples · (6·N_mm·s + 12·L·a·d·s²)",
    "llama": "samples · (6·N_mm·s + 12·L·a·d·s²)",
    "bert": "samples · (6·N_mm·s + 12·L·a·d·s² + 6·(h²+hV)·m [+ 6·(h²+hC)]); m: places of the masked-LM head",
    "vit": "samples · (6·N_mm·s + 12·L·a·d·s² + 4·cP²h·N + 6hC); s=N+1",
    "t5": "samples · (6·N_enc·s + 6·N_dec·t + L_d·12·h·D·(s+t) + 12·D·(L·s² + L_d·(t²+t·s)) + 6·hV·t); D=a·d",
    "seq2seq": "samples · (6·N_enc·s + 6·N_dec·t + L_d·12·h²·(s+t) + 12·h·(L·s² + L_d·(t²+t·s)) + 6·hV·t)",
}


class Operations(NamedTuple):
    model: float
    hardware: float
    attention: float  # of `model`: scores and values
    causal: float  # of `attention`: where no query looks at a later key


def operations(recipe: Recipe, shape: Shape, *, target: str = "cuda") -> Operations:
    """Of one sample, forward and backward. target: "cuda", where attention is fused also with dropout and with a trained bias; "cpu", where
    it is not then (layers/kernels.py). Raises UserError where the model's configuration is not complete."""
    config, layout = complete(recipe).model, recipe.layout
    base = {"n_layers": 1, **({"n_decoder_layers": 1} if shape.target else {})}

    def count(**more: int) -> Operations:
        small = config.model_copy(update={**base, **more})
        key = type(small), small.model_dump_json(), shape
        model, attention, causal = _as_in_papers(*key)
        if layout.checkpointing == "none" and layout.attention == "naive":
            return Operations(model, model, attention, causal)
        return Operations(model, _as_computed(*key, layout.attention, layout.chunk, layout.checkpointing, target), attention, causal)

    small = total = count()
    depths = {"n_layers": config.n_layers, **({"n_decoder_layers": config.n_decoder_layers or config.n_layers} if shape.target else {})}
    for name, depth in depths.items():
        if depth > 1:
            total = Operations(*(so_far + (depth - 1) * (two - one) for so_far, two, one in zip(total, count(**{name: 2}), small)))
    return total


@functools.lru_cache(maxsize=512)
def _as_in_papers(kind: type[ModelConfig], content: str, shape: Shape) -> tuple[int, int, int]:
    """(operations, those of scores and values, those of causal ones) with every score written out and nothing computed again."""
    from gradus.layers import Attention
    from gradus.measure.flops import count_flops
    from gradus.parallel.apply import use_kernel

    config = kind.model_validate_json(content)
    inner = {"all": 0, "causal": 0}

    def watch(kernel: Callable) -> Callable:
        def watched(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, **kwargs: Any):
            n = 4 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * q.shape[3]  # scores and values, forward
            inner["all"] += n
            inner["causal"] += n * causal
            return kernel(q, k, v, causal=causal, **kwargs)

        return watched

    model = models.build(config, device="meta")
    use_kernel(model, "naive", 0)
    for module in model.modules():
        if isinstance(module, Attention):
            module.kernel = watch(module.kernel)
    inputs = _inputs(config, shape, "meta")
    found = count_flops(lambda: _step(model, inputs))
    return found, 3 * inner["all"], 3 * inner["causal"]


@functools.lru_cache(maxsize=512)
def _as_computed(kind: type[ModelConfig], content: str, shape: Shape, attention: str, chunk: int, checkpointing: str, target: str) -> int:
    from gradus.layers import Attention
    from gradus.measure.flops import count_flops
    from gradus.parallel.apply import use_checkpointing, use_kernel
    from gradus.torch_private import FakeTensorMode

    config = kind.model_validate_json(content)
    with FakeTensorMode(allow_non_fake_inputs=True):  # a CPU's attention is fused there, as a GPU's is: on meta it would not be
        model = models.build(config, device="cpu")
        if target != "cpu":
            for module in model.modules():
                if isinstance(module, Attention):
                    module.dropout = 0.0
            for name, p in model.named_parameters():
                p.requires_grad_("relative_bias" not in name)
        use_kernel(model, attention, chunk)
        use_checkpointing(model, checkpointing)
        inputs = _inputs(config, shape, "cpu")
        return count_flops(lambda: _step(model, inputs))


def _inputs(config: ModelConfig, shape: Shape, device: str) -> dict[str, Any]:
    """One sample without values, under the names of the model's arguments."""
    import torch

    def ids(n: int) -> Tensor:
        return torch.zeros(1, n, dtype=torch.long, device=device)

    if config.family == "vit":
        return {"images": torch.zeros(1, config.n_channels, config.image_size, config.image_size, device=device)}
    if shape.target:
        return {"source": ids(shape.source), "target": ids(shape.target)}
    if shape.selected:
        return {"ids": ids(shape.source), "select": (ids(shape.selected)[0], ids(shape.selected)[0])}
    return {"ids": ids(shape.source)}


def _step(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Forward and backward pass. A loss has no matrix product, so that any sum of the scores will do."""
    out = model(**inputs)
    sum(x.float().sum() for x in (out if isinstance(out, tuple) else (out,))).backward()


def flops(recipe: Recipe, *, samples: float | None = None, seq_len: int | None = None, shape: Shape | None = None, target: str = "cuda") -> list[Row]:
    """Operations of one optimizer step over all devices: rows flops/model, flops/model_causal (where there is causal attention),
    flops/hardware, and flops/per_token (of flops/model).

    samples: of the whole step, None: the recipe's. seq_len: tokens of a row, None: the recipe's; or a `shape` of one's own. target: "cuda"
    or "cpu", see `operations`. Every sample is full length, so that padding counts for none. Raises UserError as `shape_of` and `operations`.
    """
    shape = shape or shape_of(recipe, seq_len)
    config, layout = complete(recipe).model, recipe.layout
    tokens = _tokens(config, shape)
    samples = samples or recipe.batch.samples or recipe.batch.tokens / tokens
    found = operations(recipe, shape, target=target)
    model, hardware = samples * found.model, samples * found.hardware
    how = {"method": "counted from the module with few layers, extended by layers"}

    lengths = {"samples": samples, "s": shape.source, "t": shape.target or None, "m": shape.selected or None}
    inputs = {k: v for k, v in {**sizes(config), **lengths}.items() if v is not None}
    if config.family in ("gpt", "llama"):
        inputs["N_mm"] = matmul_weights(config)
    inputs["closed form"] = samples * closed_form(config, shape)
    rows = [figure("flops/model", model, "FLOP/step", FORMULAS[config.family], inputs, PALM, convention=FULL, **how)]
    if found.causal:
        text, source = "flops/model - half of causal attention's 12·L·a·d·s²", "Dao 2023 (FlashAttention-2), section 3.1; Megatron-LM counts so"
        inputs = {"flops/model": model, "causal attention": samples * found.causal}
        rows.append(figure("flops/model_causal", model - samples * found.causal / 2, "FLOP/step", text, inputs, source, convention=CAUSAL, **how))
    text = "flops/model + what checkpointing computes again + the scores that a fused attention's backward pass computes again"
    inputs, source = {"flops/model": model, "computed again": hardware - model}, "Korthikanti et al. 2022, section 5; Dao et al. 2022, section 3.1"
    conditions = {"convention": HARDWARE, **how, "checkpointing": layout.checkpointing, "attention": layout.attention, "target": target}
    rows.append(figure("flops/hardware", hardware, "FLOP/step", text, inputs, source, **conditions))
    text, inputs = "flops/model / tokens", {"flops/model": model, "tokens": samples * tokens}
    rows.append(figure("flops/per_token", found.model / tokens, "FLOP/token", text, inputs, PALM, convention=FULL))
    return rows


def tokens_a_sample(recipe: Recipe, seq_len: int | None = None) -> int:
    """Tokens of a full-length sample, those of both sides of an encoder-decoder; of an image its patches. Raises UserError as `shape_of`."""
    return _tokens(recipe.model, shape_of(recipe, seq_len))


def _tokens(config: ModelConfig, shape: Shape) -> int:
    return shape.source + shape.target - (config.family == "vit" and config.pool == "class_token")


def matmul_weights(config: ModelConfig) -> int:
    """N_mm of a decoder or encoder: the weights a token is multiplied by, the output projection included, look-ups, norms and biases not."""
    one = Shape(1)
    per_pair = 12 * config.n_layers * config.n_heads * config.head_dim
    return (closed_form(config, one) - per_pair) // 6


# ---------------------------------------------------------------- utilisation


def mfu(model_flops: float, seconds: float, cluster: Cluster, dtype: str, *, convention: str = FULL) -> Row:
    """time/mfu: model operations of a step / (seconds · devices · dense peak of `dtype`) (Chowdhery et al. 2022, section 4.1).

    The convention of the operations stands in the row's conditions. Raises UserError where the device has no peak for that dtype.
    """
    return _utilisation("time/mfu", "model", model_flops, seconds, cluster, dtype, convention)


def hfu(hardware_flops: float, seconds: float, cluster: Cluster, dtype: str, *, convention: str = HARDWARE) -> Row:
    """time/hfu: as `mfu`, of the operations that are computed, recomputation included."""
    return _utilisation("time/hfu", "hardware", hardware_flops, seconds, cluster, dtype, convention)


def _utilisation(name: str, what: str, operations: float, seconds: float, cluster: Cluster, dtype: str, convention: str) -> Row:
    device = cluster.device
    if dtype not in device.peaks:
        raise UserError(f"{device.name}: its peak in {dtype} is not known, so there is no share of it.{did_you_mean(dtype, device.peaks)}")
    peak = device.peaks[dtype]
    inputs = {f"flops/{what}": operations, "seconds": seconds, "devices": cluster.n, f"dense peak in {dtype} (FLOP/s)": peak}
    value = operations / (seconds * cluster.n * peak)
    source = "Chowdhery et al. 2022, section 4.1 and appendix B"
    return figure(name, value, "", f"flops/{what} / (seconds · devices · dense peak)", inputs, source, convention=convention, dtype=dtype)
