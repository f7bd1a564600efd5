"""A bare model as something to plan: a preset's name or a Hugging Face config.json → a configuration of ours → a whole recipe.

A config.json maps where our module has as many parameters and operations as theirs; what else differs (an activation, a rescaled rotary
angle, several dropouts) is told in the notes. Where even the parameters would differ, it is refused with the field's name.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradus import models
from gradus.errors import UserError, did_you_mean
from gradus.models import weights
from gradus.recipe import presets, resolve
from gradus.recipe.schema import ModelConfig, Recipe

# ---------------------------------------------------------------- config.json → a configuration


class Read(NamedTuple):
    config: ModelConfig
    notes: list[str]  # what of it the plan leaves out, and that it changes neither parameters nor operations
    seq_len: int | None  # positions that can be used, where they are fewer than the model has


def from_hf(name: str) -> tuple[ModelConfig, str]:
    """The configuration of `hf:NAME`, a local folder (Hugging Face's or Meta's layout, or a run) or a hub name, of which only config.json is
    fetched; and a note of what the plan leaves out of it, or "".

    Raises UserError for what is not there, and, naming the field, for what does not map onto a family.
    """
    read = read_hf(name)
    return read.config, "; ".join(read.notes)


def read_hf(name: str) -> Read:
    """As `from_hf`, with the positions that can be used."""
    where = name.removeprefix("hf:")
    if not where:
        raise UserError("hf: what comes after it is missing. Give a local folder or a hub name, e.g. hf:openai-community/gpt2")
    path = models.locate(where, weights_too=False)
    file = path / "config.json"
    if not file.is_file():
        return Read(models.config_of(path), [], None)
    hf = weights.read_json(file)
    if "gradus" in hf or str(hf.get("model_type")).startswith("gradus"):
        return Read(models.config_of(path), [], None)
    return map_config(hf, name)


def map_config(hf: dict[str, Any], where: str = "config.json") -> Read:
    """The content of a config.json. Raises UserError as `from_hf`."""
    kind = hf.get("model_type")
    if not isinstance(kind, str | None):
        raise UserError(f"{where}: model_type={kind!r:.60}: expected text")
    if kind in REFUSED:
        field, why, nearest, instead = REFUSED[kind]
        raise UserError(f"{where}: model_type={kind} does not map: {field}: {why}. The nearest is family {nearest}: gradus plan {instead}")
    if kind not in READERS:
        raise UserError(f"{where}: model_type={kind} maps onto none of Gradus' families.{did_you_mean(str(kind), READERS)}")
    notes: list[str] = []
    with models.one_line(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several dropouts: they are no matter of size
        try:
            config, seq_len = READERS[kind](dict(hf), notes)
        except UserError as e:
            raise UserError(f"{where}: {str(e).removeprefix('config.json: ')}") from None
    return Read(config, notes, seq_len)


def _is(hf: dict, field: str, wanted: Any, why: str, default: Any = None) -> None:
    """What must be so, or the parameters differ."""
    value = hf.get(field, wanted if default is None else default)
    if value != wanted:
        raise UserError(f"{field}={value} does not map: {why}. Only {field}={wanted} does")


def _has(hf: dict, *fields: str) -> None:
    missing = [field for field in fields if hf.get(field) is None]
    if missing:
        raise UserError(f"{', '.join(missing)}: not in it, and the model cannot be planned without")


def _soft(hf: dict, field: str, ours: Any, notes: list[str], known: tuple = ()) -> None:
    """What changes neither parameters nor operations: ours stands in for it, and a note says so."""
    if field in hf and hf[field] is not None and hf[field] != ours and hf[field] not in known:
        notes.append(f"{field}={hf[field]} planned as {ours}")
        hf[field] = ours


def _architecture(hf: dict, known: dict[str, str], notes: list[str]) -> None:
    """Theirs, by its ending, as the one that the family's reader knows."""
    theirs = (hf.get("architectures") or [next(iter(known.values()))])[0]
    ending = next((end for end in known if theirs.endswith(end)), None)
    if ending is None:
        raise UserError(f"architectures={theirs} does not map: the head is another. Known: {', '.join('...' + end for end in known)}")
    hf["architectures"] = [known[ending]]


def _llama(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    from gradus.models.weights.llama import ARCHITECTURES

    kind = hf["model_type"]
    biases = {"attention_bias": "bias of attention's output", "mlp_bias": "biases of the feed-forward network", "bias": "biases"}
    for field, what in biases.items():
        _is(hf, field, False, f"family llama has no {what}")
    if kind == "phi3":  # its one matrix for q, k, v and its one for gate and up are ours, side by side
        hf["num_key_value_heads"] = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    if kind == "gemma":
        notes.append("embeddings scaled by the root of hidden_size and 1 + weight in the norms are left out")
        hf["hidden_act"] = hf.pop("hidden_activation", None) or hf.get("hidden_act", "gelu_pytorch_tanh")
        hf.setdefault("tie_word_embeddings", True)
    _soft(hf, "hidden_act", "silu", notes)
    for field in ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"):  # granite
        _soft(hf, field, 1.0, notes)
    if kind != "llama":
        _has(hf, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    known = kind if kind in ARCHITECTURES else "llama"
    whole, body = ARCHITECTURES[known]
    _architecture(hf, {"ForCausalLM": whole, "Model": body}, notes)
    if hf["architectures"] == [body]:
        notes.append("planned with the output projection that training needs")
        hf["architectures"] = [whole]
    positions = hf.get("max_position_embeddings", 2048)
    window = hf.pop("sliding_window", None)
    if window and window < positions and hf.get("use_sliding_window", kind != "qwen2"):  # Qwen2 names a window that it may not use
        notes.append(f"sliding_window={window}: planned up to {window} tokens, where the window changes nothing")
        hf["max_position_embeddings"] = window
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind_of_rope = rope.get("rope_type") or rope.get("type") or "default"
    if kind_of_rope not in ("default", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0 or hf.get("partial_rotary_factor", 1.0) != 1.0:
        notes.append(f"rotary positions of type {kind_of_rope} planned as plain ones")
        hf.pop("rope_parameters", None)
        hf["rope_scaling"] = None
    hf["model_type"] = known
    return _family("llama", hf)


def _family(family: str, hf: dict) -> tuple[ModelConfig, int | None]:
    return weights.rules_of(family).config_from_hf(hf), None


def _gpt2(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    from gradus.models.weights.fields import ACTIVATIONS

    _soft(hf, "activation_function", "gelu_new", notes, tuple(ACTIVATIONS))
    for field in ("embd_pdrop", "attn_pdrop"):
        hf.setdefault(field, 0.1)
        _soft(hf, field, hf.get("resid_pdrop", 0.1), notes)
    _soft(hf, "scale_attn_weights", True, notes)
    _soft(hf, "scale_attn_by_inverse_layer_idx", False, notes)
    return _family("gpt", hf)


def _opt(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    """OPT is GPT with two more positions, which are never looked up."""
    _is(hf, "do_layer_norm_before", True, "family gpt is pre-norm")
    _is(hf, "word_embed_proj_dim", hf["hidden_size"], "family gpt has no projection of its embeddings")
    _is(hf, "enable_bias", True, "family gpt has all biases or none, and norms of their own")
    _is(hf, "layer_norm_elementwise_affine", True, "the norms of family gpt are learned")
    _is(hf, "_remove_final_layer_norm", False, "family gpt has a last norm")
    _architecture(hf, {"ForCausalLM": "GPT2LMHeadModel", "Model": "GPT2Model"}, notes)
    positions = hf["max_position_embeddings"]
    notes.append(f"{positions + 2} positions as stored, of which {positions} are used")
    theirs = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_inner": "ffn_dim"}
    _has(hf, *theirs.values(), "vocab_size", "max_position_embeddings")
    dropout = hf.get("dropout", 0.1)
    _soft(hf, "attention_dropout", dropout, notes)
    more = {
        "model_type": "gpt2",
        "vocab_size": hf["vocab_size"],
        "n_positions": positions + 2,
        "activation_function": hf.get("activation_function", "relu"),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
        "tie_word_embeddings": hf.get("tie_word_embeddings", True),
    }
    return _gpt2({**{ours: hf[name] for ours, name in theirs.items()}, **more}, notes)[0], positions


def _bert(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    from gradus.models.weights.fields import ACTIVATIONS

    seq_len = None
    if hf["model_type"] != "bert":  # RoBERTa: BERT with two more positions, which are never looked up
        _has(hf, "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "type_vocab_size")
        endings = {"ForMaskedLM": "BertForMaskedLM", "ForSequenceClassification": "BertForSequenceClassification", "Model": "BertModel"}
        _architecture(hf, endings, notes)
        seq_len = hf["max_position_embeddings"] - hf.get("pad_token_id", 1) - 1
        notes.append(f"{hf['max_position_embeddings']} positions as stored, of which {seq_len} are used")
    _soft(hf, "hidden_act", "gelu", notes, tuple(ACTIVATIONS))
    dropout = hf.get("hidden_dropout_prob", 0.1)
    for field in ("attention_probs_dropout_prob", "classifier_dropout"):
        _soft(hf, field, dropout, notes)
    return _family("bert", {**hf, "model_type": "bert"})[0], seq_len


def _t5(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    if hf["model_type"] == "mt5":
        _architecture(hf, {"ForConditionalGeneration": "T5ForConditionalGeneration", "MT5Model": "T5Model"}, notes)
        hf.setdefault("tie_word_embeddings", False)  # as released (Xue et al. 2021), whatever the class's default says
        hf["model_type"] = "t5"
    if str(hf.get("feed_forward_proj", "relu")).startswith("gated-"):
        _soft(hf, "feed_forward_proj", "gated-gelu", notes, ("gated-gelu_new",))
    return _family("t5", hf)


def _vit(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    _soft(hf, "hidden_act", "gelu", notes)
    _soft(hf, "attention_probs_dropout_prob", 0.0, notes)
    if (hf.get("architectures") or [""])[0] == "ViTModel":
        notes.append("the pooler, which neither a classifier nor the features read, is left out")
    return _family("vit", hf)


def _seq2seq(hf: dict, notes: list[str]) -> tuple[ModelConfig, int | None]:
    for field in ("attention_dropout", "activation_dropout"):
        _soft(hf, field, hf.get("dropout", 0.1), notes)
    for field in ("encoder_layerdrop", "decoder_layerdrop"):
        _soft(hf, field, 0.0, notes)
    notes.append("the output bias, a buffer there, is a parameter here; the table of positions is none")
    return _family("seq2seq", hf)


READERS: dict[str, Callable[[dict, list[str]], tuple[ModelConfig, int | None]]] = {
    "gpt2": _gpt2, "opt": _opt,
    "llama": _llama, "mistral": _llama, "mixtral": _llama, "qwen2": _llama, "gemma": _llama, "phi3": _llama, "granite": _llama,
    "bert": _bert, "roberta": _bert, "xlm-roberta": _bert, "camembert": _bert,
    "t5": _t5, "mt5": _t5, "vit": _vit, "ijepa": _vit, "marian": _seq2seq, "pegasus": _seq2seq,
}  # fmt: skip

REFUSED = {  # model_type → (field, why its parameters are not ours, the nearest family, a preset of it)
    "qwen2_moe": ("shared_expert_intermediate_size", "an expert that every token takes, which family llama has not", "llama", "mixtral-8x7b"),
    "qwen3": ("q_norm, k_norm", "queries and keys have norms, which family llama has not", "llama", "llama3.1-8b"),
    "qwen3_moe": ("q_norm, k_norm", "queries and keys have norms, which family llama has not", "llama", "mixtral-8x7b"),
    "gemma2": ("post-norms", "a layer has four norms, and family llama's two", "llama", "llama3.1-8b"),
    "gemma3_text": ("post-norms", "a layer has four norms and norms of queries and keys", "llama", "llama3.1-8b"),
    "olmo": ("LayerNorm", "its norms have no weights", "llama", "llama2-7b"),
    "olmo2": ("q_norm, k_norm", "queries and keys have norms, which family llama has not", "llama", "llama2-7b"),
    "deepseek_v2": ("kv_lora_rank", "multi-head latent attention is none of ours", "llama", "mixtral-8x7b"),
    "deepseek_v3": ("kv_lora_rank", "multi-head latent attention is none of ours", "llama", "mixtral-8x7b"),
    "gpt_neox": ("rotary_pct", "rotary positions with biases: gpt has learned positions, llama no biases", "gpt", "gpt3-6.7b"),
    "gpt_neo": ("attention_layers", "q, k and v have no biases, and family gpt has all or none", "gpt", "gpt3-2.7b"),
    "gptj": ("rotary_dim", "rotary positions and one norm a layer; gpt has learned positions and two", "gpt", "gpt3-6.7b"),
    "gpt_bigcode": ("multi_query", "one key head; family gpt has as many as query heads", "gpt", "gpt3-xl"),
    "bloom": ("alibi", "no learned positions, and a norm of the embeddings", "gpt", "gpt3-175b"),
    "falcon": ("multi_query, parallel_attn", "one key head and one norm a layer", "llama", "llama2-7b"),
    "mpt": ("alibi", "no learned positions, which family gpt has", "gpt", "gpt3-6.7b"),
    "phi": ("partial_rotary_factor", "biases and one norm a layer; family llama has neither", "llama", "llama3.2-1b"),
    "starcoder2": ("use_bias", "biases and LayerNorm; family llama has none", "llama", "llama3.2-3b"),
    "stablelm": ("layer_norm_eps", "LayerNorm has biases; family llama's RMSNorm has none", "llama", "llama3.2-3b"),
    "cohere": ("layer_norm_eps", "one LayerNorm a layer; family llama has two RMSNorms", "llama", "llama3.1-8b"),
    "distilbert": ("type_vocab_size", "it has no embedding of token types, and family bert has at least one", "bert", "bert-base"),
    "albert": ("num_hidden_groups", "its layers share their weights", "bert", "bert-base"),
    "electra": ("embedding_size", "its embeddings are projected", "bert", "bert-base"),
    "deberta": ("relative_attention", "its attention has positions of its own", "bert", "bert-base"),
    "deberta-v2": ("relative_attention", "its attention has positions of its own", "bert", "bert-base"),
    "modernbert": ("global_attn_every_n_layers", "rotary positions and gated feed-forward networks in an encoder", "bert", "bert-base"),
    "umt5": ("relative_attention_num_buckets", "every layer has a relative bias of its own; family t5's stacks share one", "t5", "t5-v1.1-base"),
    "longt5": ("encoder_attention_type", "its encoder's attention is local or by blocks", "t5", "t5-v1.1-base"),
    "bart": ("max_position_embeddings", "its positions are learned; family seq2seq's are sinusoidal", "seq2seq", "seq2seq-big"),
    "mbart": ("max_position_embeddings", "its positions are learned; family seq2seq's are sinusoidal", "seq2seq", "seq2seq-big"),
    "deit": ("distillation token", "it has a second token and position; a DeiT without it has model_type=vit", "vit", "vit-b16"),
    "swin": ("window_size", "its stages have windows and widths of their own", "vit", "vit-b16"),
}  # fmt: skip


# ---------------------------------------------------------------- a configuration → a recipe


class Published(NamedTuple):
    """How a model of this family and size was trained."""

    samples: int
    seq_len: int | None
    tokens: float | None  # in the whole, or
    steps: int | None
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    clip: float | None
    source: str


def _adamw(lr: float, beta2: float, weight_decay: float, eps: float = 1e-8) -> dict[str, Any]:
    return {"name": "adamw", "lr": lr, "betas": (0.9, beta2), "eps": eps, "weight_decay": weight_decay}


GPT3 = {  # preset: (samples of 2,048 tokens, lr)
    "gpt3-small": (256, 6.0e-4), "gpt3-medium": (256, 3.0e-4), "gpt3-large": (256, 2.5e-4), "gpt3-xl": (512, 2.0e-4),
    "gpt3-2.7b": (512, 1.6e-4), "gpt3-6.7b": (1024, 1.2e-4), "gpt3-13b": (1024, 1.0e-4), "gpt3-175b": (1536, 0.6e-4),
}  # fmt: skip
LLAMA3_LR = {"llama3.1-8b": 3e-4, "llama3.1-70b": 1.5e-4, "llama3.1-405b": 8e-5}


def published(config: ModelConfig, total: int) -> Published:
    """Settings as published for the preset that config names, else for the size nearest to `total` parameters of its family."""
    preset = presets.ALIASES.get(config.preset or "", config.preset or "")
    c, family = config, config.family
    longest = getattr(c, "seq_len", 0)
    if family == "gpt":
        nearest = preset if preset in GPT3 else min(GPT3, key=lambda p: abs(math.log(_gpt_size(p) / total)))
        samples, lr = GPT3[nearest]
        seq_len, tokens = min(2048, longest), 300e9 if preset in GPT3 else None
        source = f"Brown et al. 2020, table 2.1 and appendix B, {nearest}: 300B tokens, batches of 0.5M to 3.2M tokens of 2,048"
        if nearest == "gpt3-175b":
            source += " (1,536 samples: Narayanan et al. 2021, section 5.1)"
        samples = round(samples * 2048 / seq_len)
        if preset.startswith("gpt2"):
            samples, seq_len = 512, 1024
            source = "Radford et al. 2019, section 2.3: 512 samples of 1,024 tokens; learning rate, not published, of GPT-3 (Brown et al. 2020)"
        schedule = {"name": "cosine", "final": 0.1, "warmup_steps": 375_000_000 // (samples * seq_len)}
        return Published(samples, seq_len, tokens, None, _adamw(lr, 0.95, 0.1), schedule, 1.0, source)
    if family == "llama" and preset.startswith("llama3"):
        lr, tokens = LLAMA3_LR.get(preset, 3e-4), 15.6e12 if preset.startswith("llama3.1") else 9e12
        source = "Grattafiori et al. 2024, table 3, section 3.4.1: 16M tokens of 8,192 (405B's), 15.6T tokens; 3.2: its model card, 9T"
        schedule = {"name": "cosine", "final": 0.01, "warmup_steps": 8000}
        return Published(2048, 8192, tokens, None, _adamw(lr, 0.95, 0.1), schedule, 1.0, source)
    if family == "llama":
        lr, seq_len = 1.5e-4 if total > 2e10 else 3e-4, min(4096, longest)
        source = "Touvron et al. 2023 (Llama 2), section 2.2: 4M tokens of 4,096, 2T tokens"
        schedule = {"name": "cosine", "final": 0.1, "warmup_steps": 2000}
        tokens = 2e12 if preset.startswith("llama2") else None
        return Published(2**22 // seq_len, seq_len, tokens, None, _adamw(lr, 0.95, 0.1, 1e-5), schedule, 1.0, source)
    if family == "bert" and c.head == "classification":
        source = "Devlin et al. 2019, section 4.1: batches of 32, 3 epochs; here of MNLI's 392,702 pairs"
        schedule = {"name": "linear", "warmup_steps": 3_681}
        return Published(32, min(512, longest), None, 36_816, _adamw(2e-5, 0.999, 0.01), schedule, 1.0, source)
    if family == "bert":
        source = "Devlin et al. 2019, appendix A.2: 256 samples of 512 tokens, 1,000,000 steps (here all at full length)"
        schedule = {"name": "linear", "warmup_steps": 10_000}
        return Published(256, min(512, longest), None, 1_000_000, _adamw(1e-4, 0.999, 0.01), schedule, 1.0, source)
    if family == "t5":
        source = "Raffel et al. 2020, section 3.7: 2,048 samples of 512 tokens, 1,000,000 steps; AdamW in place of Adafactor"
        schedule = {"name": "linear", "warmup_steps": 10_000}
        return Published(2048, 512, None, 1_000_000, _adamw(1e-3, 0.999, 0.0), schedule, 1.0, source)
    if family == "seq2seq":
        source = "Vaswani et al. 2017, section 5: about 25,000 tokens a side, Adam; rows of 64 tokens are ours, the paper does not say"
        optimizer = {"name": "adam", "lr": 1.0, "betas": (0.9, 0.98), "eps": 1e-9}
        steps = 300_000 if c.d_model >= 1024 else 100_000
        return Published(384, min(64, longest), None, steps, optimizer, {"name": "noam", "warmup_steps": 4000}, None, source)
    source = "Dosovitskiy et al. 2021, table 3: 4,096 images, 300 epochs of ImageNet's 1,281,167, learning rate 3e-3, decay 0.3"
    return Published(4096, None, None, 93_836, _adamw(3e-3, 0.999, 0.3), {"name": "cosine", "warmup_steps": 10_000}, 1.0, source)


def _gpt_size(preset: str) -> float:
    c = presets.PRESETS[preset]
    return 12 * c["n_layers"] * c["d_model"] ** 2 + c["vocab_size"] * c["d_model"]


TEXT = "path/to/text"  # stand for what a bare model does not say
TOKENIZER = "path/to/tokenizer"
IMAGES = "path/to/images"


def recipe_for(
    model: ModelConfig | str,
    *,
    tokens: float | None = None,
    seq_len: int | None = None,
    samples: int | None = None,
    notes: list[str] | None = None,
    **overrides: Any,
) -> Recipe:
    """A whole recipe for a bare model: a configuration, a preset's name, or hf:NAME.

    The family's pre-training task, and settings as published for that size (`published`; notes receives their source): samples a step,
    seq_len, optimizer, schedule, steps; bf16 mixed precision. tokens: to train on, in place of the published number; where none is published,
    20 a parameter that a token meets (Hoffmann et al. 2022). Data and tokenizer are placeholders. overrides: sections or dotted keys of the recipe
    (`**{"layout.tensor": 8}`), which win. Raises UserError as `from_hf`, for an unknown preset, and for keys that do not fit.
    """
    from gradus.plan.counts import active, tokens_a_sample

    notes = [] if notes is None else notes
    usable, name, tokenizer = None, "recipe", TOKENIZER
    if isinstance(model, str) and model.startswith("hf:"):
        config, more, usable = read_hf(model)
        name, notes[len(notes) :] = Path(model.removeprefix("hf:")).name, more
        tokenizer = model.removeprefix("hf:")
    elif isinstance(model, str):
        name, config = model, presets.config_of(model)
    else:
        config = model
        name = config.preset or config.family
    total = models.count(config)["total"] if config.family != "bert" or config.head != "classification" or config.n_classes else 0
    how = published(config, total)
    notes.append(f"training settings: {how.source}")
    length = seq_len or (min(how.seq_len, usable) if usable and how.seq_len else how.seq_len)
    if seq_len and config.family == "vit":
        raise UserError(f"seq_len={seq_len}: an image's length is its patches. Set model.image_size or model.patch_size")
    if seq_len and how.seq_len:  # the same tokens a step
        how = how._replace(samples=max(1, round(how.samples * how.seq_len / seq_len)))

    raw: dict[str, Any] = {
        "name": name,
        "model": {**config.model_dump(exclude_none=True), **({"init": None} if config.init else {})},
        "task": _task(config),
        "data": _data(config, length),
        "optimizer": how.optimizer,
        "batch": {"samples": samples or how.samples},
        "layout": {"precision": "bf16"},
    }
    if config.family == "vit" and config.n_classes is None:
        raw["model"]["n_classes"] = 1000
        notes.append("config.json has no classes: planned with ImageNet's 1,000 (model.n_classes)")
    if config.family == "bert" and config.head == "none":
        raw["model"] |= {"head": "pretraining", "pooler": True}
    if config.family != "vit":
        raw["tokenizer"] = {"kind": "file", "path": tokenizer}
    given = dict(_flat(overrides))
    if given.get("optimizer.name", raw["optimizer"]["name"]) != raw["optimizer"]["name"]:
        raw["optimizer"] = {"lr": raw["optimizer"]["lr"]}
    for other, key in (("batch.tokens", "samples"), ("batch.samples", "tokens")):
        if other in given:
            raw["batch"].pop(key, None)
    for path, value in given.items():
        *above, key = path.split(".")
        section = raw
        for part in above:
            section = section.setdefault(part, {})
        section[key] = value

    train: dict[str, Any] = {"clip_norm": how.clip, **raw.get("train", {})}
    schedule: dict[str, Any] = dict(how.schedule)
    raw["train"] = {**train, "steps": train.get("steps", how.steps or 1)} if "epochs" not in train else train
    first = resolve(raw, name)  # what a step is, is known now
    if "steps" not in train and "epochs" not in train:
        wanted = tokens or how.tokens
        if wanted is None and how.steps is None:
            wanted = 20 * active(config, total)
            notes.append(f"{wanted:.3g} tokens, 20 per active parameter (Hoffmann et al. 2022): how many were trained on is not published")
        if wanted is not None:
            a_step = first.batch.tokens or first.batch.samples * tokens_a_sample(first)
            raw["train"]["steps"] = math.ceil(wanted / a_step)
    steps = raw["train"].get("steps")
    if steps is not None:
        schedule["warmup_steps"] = max(1 if schedule["name"] == "noam" else 0, min(schedule["warmup_steps"], int(steps) // 10))
    raw["schedule"] = raw.get("schedule") or schedule
    raw["layout"].setdefault("micro_batch", _micro_batch(config, length, first.batch.samples))
    return resolve(raw, name)


def _task(config: ModelConfig) -> dict[str, Any]:
    if config.family in ("gpt", "llama"):
        return {"name": "causal_lm"}
    if config.family == "bert":
        if config.head == "classification":
            return {"name": "classification"}
        return {"name": "masked_lm", "next_sentence": config.head != "masked_lm"}
    if config.family == "t5":
        return {"name": "span_corruption"}
    return {"name": "translation", "label_smoothing": 0.1} if config.family == "seq2seq" else {"name": "classification"}


def _data(config: ModelConfig, length: int | None) -> dict[str, Any]:
    if config.family == "vit":
        return {"kind": "images", "path": IMAGES}
    kind = {"seq2seq": "pairs", "bert": "labelled" if getattr(config, "head", "") == "classification" else "text"}.get(config.family, "text")
    return {"kind": kind, "path": TEXT, "max_len": length}


def _micro_batch(config: ModelConfig, length: int | None, samples: int | None) -> int:
    """A power of two that keeps samples · places · width near 2²³: 1 for the largest, 8 for GPT-2 small. A start; the search chooses."""
    places = length or (config.image_size // config.patch_size) ** 2
    size = 2 ** max(0, int(math.log2(max(1, 2**23 / (places * config.d_model)))))
    return min(size, samples or size)


def _flat(tree: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values."""
    return [
        pair for key, value in tree.items() for pair in (_flat(value, f"{above}{key}.") if isinstance(value, dict) else [(f"{above}{key}", value)])
    ]
