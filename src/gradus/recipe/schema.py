"""The recipe: one typed tree that is the YAML file, the `key=value` flags and their help.

A recipe says *what* (model, task, data, optimisation, seed); its `layout` says *how* (device, precision, micro-batch,
checkpointing, compile). Nothing here imports torch.
"""

from __future__ import annotations

import datetime
import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from gradus import hardware, limits
from gradus.errors import UserError, did_you_mean

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, le=limits.REAL)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, le=limits.REAL)]
Rate = Annotated[float, Field(gt=0.0, le=limits.RATE)]
Epsilon = Annotated[float, Field(gt=0.0, le=limits.EPSILON)]


def _whole(value: object) -> object:
    """1e6 for 1000000."""
    if not isinstance(value, str) or value.isdigit():
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


def upto(most: int, least: int = 1) -> Any:
    """The bounds of a whole number."""
    return Field(ge=least, le=most)


Whole = Annotated[int, BeforeValidator(_whole)]
Steps = Annotated[Whole, upto(limits.STEPS)]
Samples = Annotated[Whole, upto(limits.SAMPLES)]
Axis = Annotated[Whole, upto(limits.AXIS)]
Layers = Annotated[Whole, upto(limits.LAYERS)]
Width = Annotated[Whole, upto(limits.WIDTH)]
Heads = Annotated[Whole, upto(limits.HEADS)]
Hidden = Annotated[Whole, upto(limits.FF)]
Vocabulary = Annotated[Whole, upto(limits.VOCABULARY)]
Length = Annotated[Whole, upto(limits.LENGTH)]
Classes = Annotated[Whole, upto(limits.CLASSES)]
Batches = Annotated[Whole, upto(limits.BATCH)]
Experts = Annotated[Whole, upto(limits.EXPERTS)]
Pixels = Annotated[Whole, upto(limits.IMAGE)]
Threads = Annotated[Whole, upto(limits.THREADS)]
Workers = Annotated[Whole, upto(limits.WORKERS, 0)]


class Section(BaseModel):
    """A part of the recipe. Unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), validate_default=True)
    alternatives: ClassVar[tuple[str, ...]] = ()  # keys of which exactly one is given

    @model_validator(mode="after")
    def _one(self):
        if self.alternatives and sum(getattr(self, key) is not None for key in self.alternatives) != 1:
            raise ValueError(f"give exactly one of {' and '.join(self.alternatives)}")
        return self


# ---------------------------------------------------------------- model


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


class Adapter(Section):
    """Low-rank matrices beside frozen ones: they alone are trained, and a classifier's head (LoRA, Hu et al. 2022).
    Targets are patterns of parts of a module's dotted name (to_q, blocks.0, blocks.*.feedforward), each with a rank and
    an alpha of its own (up:32, up:32:64) where it needs one; the last that matches counts, and -up excludes.
    With `base` the frozen Linears of blocks are stored in 8 bits with one scale per output, or as NF4 (Dettmers et al.
    2023) with one fp32 scale per 64 weights, without double quantization, and dequantized in both passes; with
    layout.shard every process holds all of them."""

    rank: Width  # rank of the two matrices
    alpha: PositiveFloat = 16.0  # what they add is multiplied by alpha / rank
    rslora: bool = False  # multiplied by alpha / sqrt(rank) instead (Kalajdzievski 2023)
    dropout: Fraction = 0.0  # share of their input set to 0 in training
    targets: Annotated[list[str], BeforeValidator(_listed)] = ["all-linear"]  # which Linears; attention: those in it
    base: Literal["int8", "nf4"] | None = None  # how the blocks' frozen Linears are stored; null: as they are


class ModelConfig(Section):
    """What every family has. `preset` fills the fields from a published size; `init` starts from weights (a folder, a
    file or a hub name), whose configuration then holds."""

    learns: ClassVar[Mapping[str, str]] = {}  # task → the kind of data it takes
    reads: ClassVar[Literal["text", "images"]] = "text"
    preset: str | None = None  # a published size that fills the other keys (gradus models)
    init: str | None = None  # start from weights: a folder, a file or a hub name
    vocab_size: Vocabulary | None = None  # from the tokenizer when not given
    n_layers: Layers  # blocks; of an encoder-decoder: of the encoder
    d_model: Width  # width: numbers per token
    n_heads: Heads  # attention heads per layer
    dropout: Fraction = 0.0  # share of numbers set to 0 in training
    _classes: tuple[str, ...] = PrivateAttr(())
    _outputs: str = PrivateAttr("softmax")
    _adapter: Adapter | None = PrivateAttr(None)
    _freeze: tuple[str, ...] = PrivateAttr(())

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @property
    def longest(self) -> int | None:
        """The most tokens that the model can read; None: its positions set no limit."""
        return getattr(self, "seq_len", None)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of a classifier's outputs, kept beside weights as id2label; () where nobody named them. A recipe has
        them in task.classes."""
        return self._classes if len(self._classes) == getattr(self, "n_classes", None) else ()

    @property
    def outputs(self) -> str:
        """How a classifier's outputs are read. softmax: a probability of each class; sigmoid: of each label by
        itself, of which several may hold; none: scores, the default for one output."""
        return "none" if self._outputs == "softmax" and getattr(self, "n_classes", None) == 1 else self._outputs

    @property
    def planned_only(self) -> str:
        """The key of a part that can be planned, not trained; empty: there is none."""
        return ""

    def changed(self, **fields: Any) -> Self:
        """The same configuration with other fields. Raises ValidationError where they contradict each other."""
        other = type(self)(**{**self.model_dump(), **fields}).named(self.classes, self._outputs)
        return other.trained(self.adapter, self.freeze)

    def named(self, classes: Sequence[str] | None, outputs: str = "softmax") -> Self:
        """The same configuration with these names of classes, and how its outputs are read."""
        copy = self.model_copy()
        copy._classes, copy._outputs = tuple(classes or ()), outputs
        return copy

    @property
    def adapter(self) -> Adapter | None:
        """A recipe has it in `adapter`, weights in adapter_config.json."""
        return self._adapter

    @property
    def freeze(self) -> tuple[str, ...]:
        """Patterns of parameters that are not trained. A recipe has them in train.freeze."""
        return self._freeze

    def as_it_is(self) -> Self:
        """The same configuration without what adapter.base says."""
        if not (self.adapter and self.adapter.base):
            return self
        return self.trained(self.adapter.model_copy(update={"base": None}), self.freeze)

    def trained(self, adapter: Adapter | None, freeze: Sequence[str] | None = None) -> Self:
        """The same configuration, of which this is trained."""
        copy = self.model_copy()
        copy._adapter, copy._freeze = adapter, tuple(freeze or ())
        return copy

    def described(self) -> list[Any]:
        """All that a model is a pure function of, as JSON can hold it."""
        adapter = self._adapter and self._adapter.model_dump(mode="json")
        return [self.model_dump(mode="json"), adapter, list(self._freeze)]

    def __hash__(self):
        return hash(repr(self.described()))

    @model_validator(mode="after")
    def _heads_divide(self):
        if getattr(self, "d_head", None) is None and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}")
        return self

    @model_validator(mode="after")
    def _a_size_one_could_mean(self):
        width = max(self.d_model, self.n_heads * self.head_dim)
        layers = self.n_layers + (getattr(self, "n_decoder_layers", None) or 0)
        networks = getattr(self, "n_experts", None) or 1
        inner = getattr(self, "d_ff", None) or 4 * self.d_model
        expert, shared = getattr(self, "d_expert", None) or inner, getattr(self, "d_shared", None) or 0
        about = layers * self.d_model * (4 * width + 3 * max(inner, networks * expert + shared))
        if about > limits.PARAMETERS:
            raise ValueError(f"these sizes are about {about:.1g} parameters; at most {limits.PARAMETERS:g} are planned")
        return self


class ExpertsConfig(ModelConfig):
    """A mixture of experts in place of every feed-forward network, in the families that have it."""

    n_experts: Experts | None = None  # None: one feed-forward network, which all tokens take
    top_k: Experts = 2  # experts per token
    balance: NonNegativeFloat = 0.01  # weight of the load-balancing loss, least at equal load (Fedus et al. 2021)

    @model_validator(mode="after")
    def _enough_experts(self):
        if self.n_experts is not None and self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} is more than n_experts={self.n_experts}")
        return self


class WindowsConfig(ModelConfig):
    """Attention in a window, in the families that have it."""

    window: Length | None = None  # tokens that a query sees, itself among them, of layers with a window; None: all
    full_first: Annotated[Whole, upto(limits.LAYERS, 0)] = 0  # the first so many layers see all
    full_every: Layers | None = None  # of every so many layers the last sees all; None: no further one

    def window_of(self, layer: int) -> int | None:
        """The tokens that a query sees in this layer, from 0; None: all."""
        full = layer < self.full_first or (self.full_every and (layer + 1) % self.full_every == 0)
        return None if full else self.window

    @model_validator(mode="after")
    def _full_among_windows(self):
        if self.window is None and (self.full_first or self.full_every):
            raise ValueError("full_first and full_every are of models with a window; set window or leave them out")
        return self


class Seq2SeqConfig(ModelConfig):
    """The original Transformer (Vaswani et al. 2017)."""

    learns = {"copy": "synthetic", "translation": "pairs"}
    family: Literal["seq2seq"] = "seq2seq"
    target_vocab_size: Vocabulary | None = None  # None: the same as vocab_size
    n_decoder_layers: Layers | None = None  # None: the same as n_layers
    d_ff: Hidden  # width of the feed-forward network
    seq_len: Length = 512  # longest sequence in tokens
    dropout: Fraction = 0.1
    norm_first: bool = False  # post-norm as in the paper; the annotated code is pre-norm
    share_embeddings: bool = True  # source = target embedding (one vocabulary)
    tie_output: bool = True  # output projection = target embedding
    output_bias: bool = False  # a bias in the output projection
    positions: Literal["interleaved", "halves"] = "interleaved"  # sin and cos alternate (paper) or all sin then all cos
    activation: Literal["relu", "gelu", "silu"] = "relu"  # of the feed-forward network
    norm_eps: Epsilon = 1e-5  # added to the variance in norms

    @model_validator(mode="after")
    def _sharing(self):
        if self.share_embeddings and self.target_vocab_size not in (None, self.vocab_size):
            raise ValueError("share_embeddings=true needs one vocabulary; leave target_vocab_size out or set it false")
        return self


class Alternation(Section):
    """ModernBERT's attention (Warner et al. 2024, section 2.1): rotary positions, and a window in most layers."""

    window: Length = 64  # tokens to either side that a local layer sees
    global_every: Layers = 3  # layers 1, 1 + n, 1 + 2n, ... see the whole text
    theta: PositiveFloat = 160_000.0  # base of the rotary frequencies of global layers
    local_theta: PositiveFloat = 10_000.0  # base of those of local layers


class BertConfig(ModelConfig):
    """BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), DistilBERT (Sanh et al. 2019), ModernBERT (Warner et al.
    2024)."""

    learns = {"masked_lm": "text", "classification": "labelled"}
    family: Literal["bert"] = "bert"
    variant: Literal["bert", "roberta", "distilbert", "modernbert"] = "bert"  # the published architecture
    d_ff: Hidden  # width of the feed-forward network
    seq_len: Length = 512  # longest sequence in tokens
    first_position: Annotated[Whole, upto(limits.VOCABULARY, 0)] = 0  # RoBERTa: its padding id + 1, so 2
    n_token_types: Annotated[Whole, upto(limits.HEADS, 0)] = 2  # segments of a text; DistilBERT and ModernBERT: 0
    alternation: Alternation | None = None  # ModernBERT's: rotary positions, local attention in most layers
    pool: Literal["cls", "mean"] = "cls"  # what ModernBERT's classifier reads: [CLS], or the mean
    dropout: Fraction = 0.1
    classifier_dropout: Fraction | None = None  # before the classifier; None: as dropout
    head: Literal["none", "masked_lm", "pretraining", "classification"] = "none"  # pretraining: and next sentence
    pooler: bool = True  # tanh projection of [CLS]; the classification and pretraining heads read it
    n_classes: Classes | None = None  # labels of the classification head; from the data when not given
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"  # of the feed-forward network
    norm_eps: Epsilon = 1e-12  # added to the variance in norms

    @model_validator(mode="after")
    def _check_variant(self):
        roberta, distilbert, modernbert = (self.variant == name for name in ("roberta", "distilbert", "modernbert"))
        wrong = {
            "RoBERTa alone has first_position, and needs it (2 as published)": roberta != (self.first_position > 0),
            "n_token_types=0 is what DistilBERT and ModernBERT alone need": (distilbert or modernbert)
            != (self.n_token_types == 0),
            "only activation=gelu is supported": (roberta or modernbert) and self.activation != "gelu",
            "only norm_eps=1e-12 is supported": distilbert and self.norm_eps != 1e-12,
            "ModernBERT alone has alternation, and needs it ({}: as published)": modernbert
            != (self.alternation is not None),
            "pool=mean is for ModernBERT alone": self.pool == "mean" and not modernbert,
        }
        for text in (text for text, it_is in wrong.items() if it_is):
            raise ValueError(f"variant={self.variant}: {text}")
        return self

    @property
    def has_pooler(self) -> bool:
        """Whether there is a pooler: other classifiers than BERT's have a layer of their own instead."""
        reads = {"bert": self.head != "masked_lm", "roberta": self.head == "none"}
        return self.pooler and reads.get(self.variant, False)

    @property
    def head_dropout(self) -> float:
        return self.dropout if self.classifier_dropout is None else self.classifier_dropout


class GPTConfig(ExpertsConfig):
    """GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020)."""

    learns = {"causal_lm": "text", "chat": "chats"}
    family: Literal["gpt"] = "gpt"
    d_ff: Hidden | None = None  # None: 4 d_model
    seq_len: Length = 1024  # longest sequence in tokens
    bias: bool = True  # biases in linear layers and norms
    tie_output: bool = True  # output projection = token embedding
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"  # of the feed-forward network
    norm_eps: Epsilon = 1e-5  # added to the variance in norms

    @model_validator(mode="after")
    def _ff(self):
        if self.d_ff is None:
            self.d_ff = 4 * self.d_model
        return self


class T5Config(ModelConfig):
    """T5 (Raffel et al. 2020): v1.0 (relu, tied) and v1.1 (gated gelu, untied)."""

    learns = {"copy": "synthetic", "translation": "pairs", "span_corruption": "text"}
    family: Literal["t5"] = "t5"
    n_decoder_layers: Layers | None = None  # None: the same as n_layers
    d_head: Width = 64  # width of a head
    d_ff: Hidden  # width of the feed-forward network
    seq_len: Length = 512  # a training length; relative positions set no limit
    dropout: Fraction = 0.1
    gated: bool = False  # gated gelu (v1.1) in place of relu (v1.0)
    tie_output: bool = True  # output projection = token embedding
    scale_output: bool | None = None  # the decoder's output times d_model^-0.5; None: where tie_output is true
    n_buckets: Annotated[Whole, upto(limits.HEADS, 4)] = 32  # distances that relative positions distinguish
    max_distance: Length = 128  # tokens beyond which all distances are one
    norm_eps: Epsilon = 1e-6  # added to the mean square in norms

    @property
    def scales(self) -> bool:
        """Whether the decoder's output is scaled."""
        return self.tie_output if self.scale_output is None else self.scale_output

    @model_validator(mode="after")
    def _far(self):
        near = self.n_buckets // 2  # the decoder's, one for each distance; the others grow up to max_distance
        if self.max_distance <= near:
            raise ValueError(
                f"max_distance={self.max_distance} is not above half of n_buckets={self.n_buckets}: no bucket would be "
                f"left for what is farther. Set max_distance={near + 1} or more, or fewer buckets"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.d_head

    @property
    def longest(self) -> None:
        return None


class RopeScaling(Section):
    """How rotary frequencies are stretched for longer texts: the low ones, as in Llama 3.1 (Grattafiori et al. 2024) or
    by YaRN (Peng et al. 2023), or all alike (Chen et al. 2023)."""

    type: Literal["llama3", "yarn", "linear"] = "llama3"  # which of the three
    factor: PositiveFloat = 8.0  # low frequencies are divided by it, or all
    original_seq_len: Length | None = None  # llama3 (8,192), yarn (8,192): tokens the model was first trained with
    low_freq_factor: PositiveFloat | None = None  # llama3 (1): wavelengths above original_seq_len / it: in full
    high_freq_factor: PositiveFloat | None = None  # llama3 (4): wavelengths below original_seq_len / it stay
    beta_fast: PositiveFloat | None = None  # yarn (32): what turns more often within original_seq_len stays
    beta_slow: PositiveFloat | None = None  # yarn (1): what turns less often is stretched in full
    attention_factor: PositiveFloat | None = None  # yarn (0.1 ln factor + 1): cos and sin are multiplied by it

    @model_validator(mode="after")
    def _of_the_type(self):
        defaults = {
            "llama3": {"original_seq_len": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            "yarn": {"original_seq_len": 8192, "beta_fast": 32.0, "beta_slow": 1.0,
                     "attention_factor": 0.1 * math.log(max(self.factor, 1.0)) + 1.0},
            "linear": {},
        }[self.type]  # fmt: skip
        for name in set(RopeScaling.model_fields) - {"type", "factor"}:
            if getattr(self, name) is None:
                setattr(self, name, defaults.get(name))
            elif name not in defaults:
                raise ValueError(f"{name}={getattr(self, name):g} is not of type={self.type}; leave it out")
        return self


class Latent(Section):
    """Multi-head latent attention (DeepSeek-AI 2024, section 2.1): keys and values of all heads are made of one short
    vector a token, which alone is kept in use, beside a rotated part of the keys that all heads share."""

    q_rank: Width | None = None  # width of what queries are made of; None: d_model
    kv_rank: Width  # width of what keys and values are made of
    nope_dim: Width  # of a head's queries and keys, the part without rotary positions
    rope_dim: Width  # the part with them
    v_dim: Width  # of a head's values


class LlamaConfig(ExpertsConfig, WindowsConfig):
    """Llama 2, 3.1, 3.2 (Touvron et al. 2023; Grattafiori et al. 2024); with experts, Mixtral (Jiang et al. 2024);
    with qkv_bias, Qwen2 and Qwen2.5 (Yang et al. 2024); with qk_norm, Qwen3 (Yang et al. 2025); with latent,
    DeepSeek-V2 and V3 (DeepSeek-AI 2024), planned only."""

    learns = {"causal_lm": "text", "chat": "chats"}
    family: Literal["llama"] = "llama"
    n_kv_heads: Heads | None = None  # None: n_heads; of latent 1, which is what is kept in use
    d_head: Width | None = None  # None: d_model / n_heads; of latent nope_dim + rope_dim
    latent: Latent | None = None  # multi-head latent attention, which is planned only; None: attention as usual
    d_ff: Hidden | None = None  # None: 2/3 of 4 d_model, times ffn_multiplier, up to a multiple of multiple_of
    multiple_of: Width = 256  # of d_ff, where it is not given
    ffn_multiplier: PositiveFloat = 1.0  # of d_ff, where it is not given
    seq_len: Length = 4096  # longest sequence in tokens
    rope_theta: PositiveFloat = 10_000.0  # base of the rotary frequencies
    rope_scaling: RopeScaling | None = None  # stretched frequencies; None: as they are
    no_rotation_every: Layers | None = None  # every so many layers one has no rotary positions (SmolLM3); None: none
    qkv_bias: bool = False  # in the projections to queries, keys and values, not in the output's
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, before their rotation
    d_expert: Hidden | None = None  # width of an expert; None: d_ff
    d_shared: Hidden | None = None  # width of an expert that every token takes, times a sigmoid gate; None: no such
    shared_gate: bool = True  # whether it has the gate; false: planned only
    router: Literal["softmax", "sigmoid"] = "softmax"  # scores of experts; sigmoid, with a bias of each: planned only
    norm_top_k: bool = True  # the weights of the experts that a token takes sum to 1
    experts_every: Layers = 1  # every so many layers one has experts, the others a network of width d_ff
    dense_layers: list[Annotated[Whole, upto(limits.LAYERS, 0)]] = []  # layers without experts too, counted from 0
    tie_output: bool = False  # output projection = token embedding
    norm_eps: Epsilon = 1e-5  # added to the mean square in norms

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    @property
    def planned_only(self) -> str:
        sigmoid, gate = self.router == "sigmoid", self.shared_gate
        parts = {"latent": self.latent, "router=sigmoid": sigmoid, "shared_gate=false": not gate}
        return next((f"model.{key}" for key, there in parts.items() if there), "")

    def has_experts(self, layer: int) -> bool:
        """Whether this layer, from 0, has them."""
        chosen = (layer + 1) % self.experts_every == 0 and layer not in self.dense_layers
        return self.n_experts is not None and chosen

    @model_validator(mode="after")
    def _sizes(self):
        if self.latent:
            d_head = self.latent.nope_dim + self.latent.rope_dim
            fixed = {"n_kv_heads": 1, "d_head": d_head, "qkv_bias": False, "qk_norm": False}
            for name, value in {**fixed, "window": None, "no_rotation_every": None}.items():
                if getattr(self, name) not in (None, value):
                    raise ValueError(f"{name}={getattr(self, name)}: with latent it is {value}; leave it out")
                setattr(self, name, value)
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if beyond := [i for i in self.dense_layers if i >= self.n_layers]:
            raise ValueError(f"dense_layers={beyond}: of n_layers={self.n_layers} the last is {self.n_layers - 1}")
        if self.n_experts and not any(map(self.has_experts, range(self.n_layers))):
            raise ValueError("experts_every and dense_layers leave no layer its experts; leave n_experts out")
        if self.d_ff is None:
            hidden = int(self.ffn_multiplier * int(2 * 4 * self.d_model / 3))
            self.d_ff = self.multiple_of * -(-hidden // self.multiple_of)
        if not 1 <= self.d_ff <= limits.FF:
            raise ValueError(f"d_ff={self.d_ff:,} follows from ffn_multiplier; 1 to {limits.FF:,} are planned")
        return self


class GemmaConfig(WindowsConfig):
    """Gemma 3's text model (Gemma Team 2025). Layers with a window have rotary positions of their own."""

    learns = {"causal_lm": "text", "chat": "chats"}
    family: Literal["gemma"] = "gemma"
    n_kv_heads: Heads | None = None  # None: n_heads
    d_head: Width = 256  # numbers per head
    d_ff: Hidden  # width of the feed-forward network
    seq_len: Length = 32_768  # longest sequence in tokens
    query_width: Width | None = None  # scores are divided by its root; None: d_head
    rope_theta: PositiveFloat = 1_000_000.0  # base of the rotary frequencies of layers that see all
    rope_scaling: RopeScaling | None = None  # stretched frequencies of these; None: as they are
    local_theta: PositiveFloat = 10_000.0  # base of those of layers with a window
    tie_output: bool = True  # output projection = token embedding
    norm_eps: Epsilon = 1e-6  # added to the mean square in norms

    @property
    def head_dim(self) -> int:
        return self.d_head

    @model_validator(mode="after")
    def _sizes(self):
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        self.query_width = self.query_width or self.d_head
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        return self


class ViTConfig(ModelConfig):
    """ViT (Dosovitskiy et al. 2021; sizes g and G of Zhai et al. 2022). No vocabulary."""

    learns = {"classification": "images"}
    reads = "images"
    family: Literal["vit"] = "vit"
    image_size: Pixels = 224  # pixels per side
    patch_size: Pixels = 16  # pixels per side of a patch; a token is a patch
    n_channels: Heads = 3  # 3: colour, 1: grey
    d_ff: Hidden  # width of the feed-forward network
    n_classes: Classes | None = None  # from the data when not given
    pool: Literal["class_token", "mean"] = "class_token"  # what the classifier reads
    patches: Literal[
        "convolution", "unfold", "rearrange", "stem"
    ] = "convolution"  # how tokens are made; stem: 3 × 3 convolutions, the others all give the same numbers
    norm_eps: Epsilon = 1e-6  # added to the variance in norms

    @property
    def n_tokens(self) -> int:
        """Patches, and the class token."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "class_token")

    @model_validator(mode="after")
    def _patches_divide(self):
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}")
        if self.patches == "stem":
            if self.patch_size < 2 or self.patch_size & (self.patch_size - 1):
                raise ValueError(f"patches=stem halves the sides: patch_size={self.patch_size} must be 2, 4, 8, ...")
            if self.d_model % (half := self.patch_size // 2):
                raise ValueError(f"patches=stem: d_model={self.d_model} is not a multiple of patch_size / 2 = {half}")
        return self


Model = Annotated[
    Seq2SeqConfig | BertConfig | GPTConfig | T5Config | LlamaConfig | GemmaConfig | ViTConfig,
    Field(discriminator="family"),
]
MODELS: dict[str, type[ModelConfig]] = {c.model_fields["family"].default: c for c in get_args(get_args(Model)[0])}


# ---------------------------------------------------------------- task


def _date(text: str) -> str:
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"{text!r:.40} is no day. Write it as 2026-01-31") from None


class TaskConfig(Section):
    """What every task has: all that a recipe must know of it without torch."""

    heads: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # a model's head → the keys with which the task trains it

    @property
    def head(self) -> str | None:
        """The head that it trains, of a family that has several."""
        told = self.model_dump()
        return next((head for head, keys in self.heads.items() if keys.items() <= told.items()), None)

    @property
    def vocabulary(self) -> int | None:
        """How many numbers there are, of a task whose sequences are numbers; None: they are text or images."""
        return None


class CopyTask(TaskConfig):
    """Copy a sequence of symbols 1 .. n_symbols-1 (0 is padding and start)."""

    name: Literal["copy"] = "copy"
    n_symbols: Annotated[Whole, upto(limits.VOCABULARY, 3)] = 11  # symbols, padding counted
    length: Annotated[Whole, upto(limits.COPIED, 2)] = 10  # symbols per sequence
    start: Literal["zero", "first"] = "zero"  # first: symbol 1 starts sequence and decoder (the Annotated Transformer)

    @property
    def vocabulary(self) -> int:
        return self.n_symbols


class TranslationTask(TaskConfig):
    """Source sequence to target sequence, teacher forced."""

    name: Literal["translation"] = "translation"
    label_smoothing: Fraction = 0.0  # share of the target spread over all tokens


class CausalLMTask(TaskConfig):
    """Predict the next token."""

    name: Literal["causal_lm"] = "causal_lm"
    label_smoothing: Fraction = 0.0  # share of the target spread over all tokens


class ChatTask(TaskConfig):
    """Answer in a conversation: the assistant's turns are learned, each with the token that ends it."""

    name: Literal["chat"] = "chat"
    template: Literal["chatml", "llama3", "qwen3", "gemma"] | None = None  # how a chat is a text; None: the tokenizer's
    learn: Literal["all", "last"] = "all"  # which of the assistant's turns
    system: str | None = None  # what the system says in chats where it says nothing
    date: Annotated[str, AfterValidator(_date)] = "2026-01-01"  # today, for templates that write it
    digest: str | None = None  # of the template, as training has it; set when a run begins


class MaskedLMTask(TaskConfig):
    """Predict masked tokens (Devlin et al. 2019, section 3.1): of the chosen ones 80 % become [MASK], 10 % a random
    token, 10 % stay."""

    heads = {"masked_lm": {"next_sentence": False}, "pretraining": {"next_sentence": True}}
    name: Literal["masked_lm"] = "masked_lm"
    mask_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15  # share of the tokens to predict
    next_sentence: bool = False  # also tell whether the second sentence follows the first


class SpanCorruptionTask(TaskConfig):
    """Replace spans by sentinels and predict them (Raffel et al. 2020, section 3.1.4)."""

    name: Literal["span_corruption"] = "span_corruption"
    noise_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15  # share of the tokens to predict
    mean_span: Annotated[float, Field(ge=1.0, le=limits.REAL)] = 3.0  # mean length of a span in tokens


class ClassificationTask(TaskConfig):
    """One label per text or image."""

    heads = {"classification": {}}
    name: Literal["classification"] = "classification"
    classes: list[str] | None = None  # names for printing; from the data when not given
    label_smoothing: Fraction = 0.0  # share of the target spread over all classes
    class_weights: Literal["balanced"] | list[PositiveFloat] | None = None  # in the loss; balanced: n / (classes · own)


Task = Annotated[
    CopyTask | TranslationTask | CausalLMTask | ChatTask | MaskedLMTask | SpanCorruptionTask | ClassificationTask,
    Field(discriminator="name"),
]
TASKS: dict[str, type[TaskConfig]] = {c.model_fields["name"].default: c for c in get_args(get_args(Task)[0])}


# ---------------------------------------------------------------- data and tokenizer


class DataConfig(Section):
    """How any data is loaded. The order is a pure function of (seed, epoch, position), whatever the workers."""

    workers: Workers = 0  # processes that prepare batches; 0: the training process does
    prefetch: Annotated[Whole, upto(limits.WORKERS)] = 2  # batches ahead, per worker
    persistent: bool = True  # keep workers from epoch to epoch
    pin: bool = True  # page-locked memory where there is a GPU
    limit: Samples | None = None  # use only the first n training samples (after a fixed shuffle)
    limit_valid: Samples | None = None  # use only the first n validation samples


class SyntheticData(DataConfig):
    """Sequences made from the seed."""

    kind: Literal["synthetic"] = "synthetic"
    n_train: Annotated[Whole, upto(limits.MADE)] = 100_000  # training sequences
    n_valid: Annotated[Whole, upto(limits.MADE)] = 1_000  # validation sequences


class TextConfig(DataConfig):
    """What all text sources share. `path` is a file, a folder, or `hf:NAME` for a Hugging Face data set. A relative one
    is looked for below the working directory, then in the recipe file's folder."""

    path: str | None = None  # a file, a folder, or hf:NAME for a Hugging Face data set
    train: str | None = None  # file names below path, where they are not the usual ones
    valid: str | None = None  # as train
    test: str | None = None  # as train
    cache: str | None = None  # tokenised text; default: $GRADUS_CACHE, else ~/.cache/gradus
    max_len: Length | None = None  # tokens; default: model.seq_len


class TextData(TextConfig):
    """Running text for language models (txt, jsonl, csv, tsv, parquet; each also .gz and .xz)."""

    kind: Literal["text"] = "text"
    source: Literal["path", "stdlib"] = "path"  # stdlib: the Python standard library found on this machine
    text: str = "text"  # the column, for formats that have columns
    valid_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1  # of the end of the text, if there is no valid file
    pack: Literal["stream", "documents"] = "stream"  # documents: packed rows do not attend across document borders


class ChatsData(TextConfig):
    """Chats, a row each, in one of four forms."""

    roles: ClassVar[Mapping[str, str]] = {"human": "user", "gpt": "assistant"}  # ShareGPT's → ours
    pad: ClassVar[str] = "bucket"  # like lengths together
    kind: Literal["chats"] = "chats"
    form: Literal["messages", "prompt", "alpaca", "sharegpt"] | None = None  # None: what the columns say
    weight: str | None = None  # the column of a row's weight in the loss; None: all weigh 1
    pack: Literal["none", "documents"] = "none"  # documents: several chats a training row, which do not see each other


class LabelledData(TextConfig):
    """Texts with a label."""

    kind: Literal["labelled"] = "labelled"
    text: str | None = None  # column names; None: text or sentence, label
    label: str | None = None  # as text
    pad: Literal["bucket", "longest", "max_length"] = "bucket"  # bucket: like lengths together; longest: of the batch


class PairsData(TextConfig):
    """Parallel text: `train.de`/`train.en` or columns of a table."""

    kind: Literal["pairs"] = "pairs"
    source: str = "de"  # suffix of the file, or column, to translate from
    target: str = "en"  # suffix of the file, or column, to translate to
    pad: Literal["bucket", "longest", "max_length"] = "bucket"  # bucket: like lengths together; longest: of the batch


class Preprocess(Section):
    """How an image becomes model.image_size × model.image_size pixels, by Pillow, as transformers' image processors do
    it: resized, then cropped."""

    resize: Pixels | tuple[Pixels, Pixels] | None = None  # n: the shorter side; [height, width]: both
    resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"  # the filter
    center_crop: bool = True  # crop the centre; without resize, pad smaller images with black


class ImagesData(DataConfig):
    """Images with a label: `digits` (scikit-learn's), parquet, class folders, metadata.csv, or `hf:NAME`."""

    kind: Literal["images"] = "images"
    path: str | None = None  # a folder, a file, or hf:NAME for a Hugging Face data set
    source: Literal["path", "digits"] = "path"  # path, or scikit-learn's digits
    image: str | None = None  # column names of a table
    label: str | None = None  # as image
    mean: list[float] | None = None  # per channel, of values in 0..1; None: model.init's, else measured
    std: list[float] | None = None  # as mean
    preprocess: Preprocess | None = None  # to the model's size; None: as model.init's, else a centre crop
    crop: Annotated[Whole, upto(limits.IMAGE, 0)] = 0  # random crop after padding by this many pixels
    flip: bool = False  # mirror half of the images horizontally
    mixup: NonNegativeFloat = 0.0  # alpha of the Beta distribution; 0: off
    cutmix: NonNegativeFloat = 0.0  # alpha of the Beta distribution; 0: off


Data = Annotated[
    SyntheticData | TextData | ChatsData | LabelledData | PairsData | ImagesData,
    Field(discriminator="kind"),
]


class TokenizerConfig(Section):
    """char and word are read off the training text; bpe is trained on it; file is read from `path` (a folder,
    tokenizer.json, vocab.txt, a folder with encoder.json + vocab.bpe, SentencePiece .model, llama2.c .bin)."""

    kind: Literal["char", "word", "byte", "bpe", "file"] = "file"  # file: from path; others: from the text
    path: str | None = None  # for file; None: beside model.init
    vocab_size: Vocabulary | None = None  # for bpe
    lowercase: bool = False  # for word and bpe
    shared: bool = True  # pairs: one vocabulary for both languages

    @model_validator(mode="after")
    def _trained(self):
        if self.kind == "bpe" and self.vocab_size is None:
            raise ValueError("kind=bpe needs vocab_size")
        return self


# ---------------------------------------------------------------- optimisation


class AdamMoments(Section):
    """The moments of Adam and AdamW."""

    lr: Rate  # learning rate, times what the schedule says
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)  # decay of the means of gradients and of their squares
    eps: Epsilon = 1e-8  # added to the root of the mean square


class Adam(AdamMoments):
    """Adam (Kingma & Ba 2015)."""

    name: Literal["adam"] = "adam"


class AdamW(AdamMoments):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); decay on matrices only."""

    name: Literal["adamw"] = "adamw"
    weight_decay: NonNegativeFloat = 0.01  # of matrices, times lr, per step


class SGD(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: Rate  # learning rate, times what the schedule says
    momentum: Fraction = 0.0  # share of the last step that is kept
    weight_decay: NonNegativeFloat = 0.0  # of matrices, added to the gradient


Optimizer = Annotated[AdamW | Adam | SGD, Field(discriminator="name")]


class Schedule(Section):
    """The learning rate as a multiple of optimizer.lr. `noam` is factor · d_model^-0.5 · min(step^-0.5, step ·
    warmup^-1.5) (Vaswani et al. 2017, equation 3); linear and cosine fall to `final` × lr at the last step."""

    name: Literal["constant", "linear", "cosine", "noam"] = "constant"  # the shape of the curve after the warmup
    warmup_steps: Annotated[Whole, upto(limits.STEPS, 0)] = 0  # steps of rising learning rate
    warmup_ratio: Fraction | None = None  # in place of warmup_steps: share of all steps, rounded up
    final: NonNegativeFloat = 0.0  # share of lr at the last step
    factor: PositiveFloat = 1.0  # for noam
    end_step: Steps | None = None  # None: the last step of training

    @model_validator(mode="after")
    def _warms_up(self):
        if self.name == "noam" and not (self.warmup_steps or self.warmup_ratio):
            raise ValueError("noam needs warmup_steps")
        if self.warmup_steps and self.warmup_ratio is not None:
            raise ValueError("give one of warmup_steps and warmup_ratio")
        return self

    def warmup(self, last_step: int) -> int:
        """Steps of rising learning rate, in a run of last_step steps."""
        return self.warmup_steps if self.warmup_ratio is None else math.ceil(self.warmup_ratio * last_step)


class Batch(Section):
    """What one optimizer step sees, over all devices: so many samples, or as many as fit into so many tokens (padding
    counted)."""

    alternatives = ("samples", "tokens")
    samples: Batches | None = None  # samples per step, over all processes
    tokens: Batches | None = None  # tokens per step at most, padding counted, over all processes


class Train(Section):
    """How long, from which seed, and what to do when something goes wrong."""

    alternatives = ("steps", "epochs")
    steps: Steps | None = None  # optimizer steps; or give epochs
    epochs: Annotated[float, Field(gt=0.0, le=limits.EPOCHS)] | None = None  # passes over training data; or give steps
    seed: Annotated[Whole, upto(limits.SEED, 0)] = 0  # of the initial weights, the order of the data and dropout
    clip_norm: PositiveFloat | None = None  # largest gradient norm; None: no clipping
    checkpoint_every: Steps | None = None  # steps; None: only at the end and when stopped
    keep: Steps = 2  # checkpoints to keep besides the best
    patience: Steps | None = None  # stop after n evaluations in a row without a better one
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient that is NaN or infinite
    freeze: Annotated[list[str], BeforeValidator(_listed)] | None = None  # not trained: [blocks.0]; [all, -head]
    qat: bool = False  # quantization-aware: Linears compute with inputs and weights rounded as int8 would round them


class Evaluate(Section):
    """When to evaluate, and which metric makes the best checkpoint. Every validation sample counts exactly once."""

    every: Steps | None = None  # steps; None: at the end of every epoch
    at_start: bool = False  # also evaluate before the first step
    batch: Batches | None = None  # samples at a time; None: the micro-batch
    best: str | None = None  # metric whose best checkpoint is kept, e.g. valid/loss; None: the task's own
    test: bool = False  # also evaluate the test split at the very end
    decode: bool = True  # translation, chat: BLEU, exact matches of what is written at every evaluation, token by token
    samples: Annotated[Whole, upto(limits.SAMPLES, 0)] = 0  # decoded samples to print at the end
    answers: Annotated[Whole, upto(limits.SAMPLES, 0)] = 0  # the same, kept at every evaluation for the report
    max_new: Length | None = None  # tokens, for decoding
    beams: Annotated[Whole, upto(1_000)] = 1  # translation: beam width; 1: greedy


class LocalSGD(Section):
    """Workers take `every` local steps, then average their weights (Stich 2019)."""

    every: Steps  # steps between two averages


class DiLoCo(Section):
    """Workers take `every` inner steps; their mean movement is the gradient of an outer Nesterov step (Douillard et al.
    2023)."""

    every: Steps  # steps between two outer steps
    outer_lr: PositiveFloat = 0.7  # learning rate of the outer step
    outer_momentum: Fraction = 0.9  # of the outer step; 0: a plain step, without Nesterov's


class Layout(Section):
    """How and where; never what. Changing it changes no sample of any step.

    The number of processes is not set here: it is how many were started, and must be pipeline × shard × context ×
    tensor × expert × replicas: the processes left over are replicas.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: a GPU where there is one
    threads: Threads | None = None  # CPU threads per process; None: PyTorch's choice, of several processes equal shares
    precision: Literal["fp32", "bf16", "fp16", "fp8", "pure_bf16", "pure_fp16"] = "fp32"  # pure_: of weights too
    tf32: bool = False  # fp32 matrix products on tensor cores, where there are any
    micro_batch: Batches | None = None  # samples per forward pass and process; None: the process's share of the batch
    attention: Literal["sdpa", "chunked", "naive"] = "sdpa"  # kernel: PyTorch's, in chunks of queries, or written out
    chunk: Length = 256  # query rows at a time, for chunked
    checkpointing: Literal["none", "attention", "selective", "full"] = "none"  # activations recomputed
    loss: Literal["whole", "chunked"] = "whole"  # all logits over words at once, or 2,048 rows of them at a time
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"  # mode of torch.compile
    # several processes
    replicate: Literal[
        "auto", "none", "manual", "parameter_server", "data_parallel", "ddp"
    ] = "auto"  # auto: ddp where processes are left over
    transport: Literal["torch", "mpi"] = "torch"  # of manual: torch.distributed, or mpi4py under mpirun
    bucket_mb: PositiveFloat = 25.0  # of ddp: gradients sent at a time
    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"  # of ddp: gradients as they are sent
    shard: Axis = 1  # processes that share weights, gradients and optimizer state (FSDP2); with replicas: HSDP
    shard_with: Literal["fsdp2", "simple"] = "fsdp2"  # of shard: simple is SimpleFSDP, compiled as one graph
    reshard: bool = True  # of shard: free gathered weights after the forward pass, gather again for the backward pass
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # of shard: weights as gathered and computed with
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # of shard: gradients as they are reduced; None: fp32
    offload: bool = False  # of shard: weights, gradients and optimizer state stay in the host's memory
    shard_optimizer: bool = False  # of ddp and manual: each replica keeps its part of the optimizer's state (ZeRO-1)
    tensor: Axis = 1  # processes that split every matrix product
    sequence_parallel: bool = True  # of tensor: norms, dropout and residuals split along the sequence
    vocab_parallel: bool = True  # of tensor: the loss over logits split along the vocabulary
    pipeline: Axis = 1  # processes that each hold a part of the layers
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # of pipeline
    stages: Layers | None = None  # of pipeline: stages per process; None: 2 for interleaved and zero_bubble, else 1
    context: Axis = 1  # processes that split the sequence, attention included
    context_method: Literal["ring", "ulysses"] = "ring"  # of context: keys sent around, or heads exchanged for sequence
    expert: Axis = 1  # processes that split the experts (model.n_experts); each also takes its share of the batch
    local_sgd: LocalSGD | None = None  # workers take local steps and average their weights
    diloco: DiLoCo | None = None  # workers take inner steps and share an outer step
    elastic: bool = False  # of ddp or HSDP: where a replica dies, the others take the same step without it
    min_replicas: Axis = 1  # of elastic: with fewer, the others wait for one to come
    step_timeout: Annotated[float, Field(ge=1.0, le=1e6)] = 10.0  # of elastic: seconds without a sign of life
    max_deaths: Steps = 10  # of elastic, with --processes or on Slurm: of a replica in a row, before it stays away
    timeout: Annotated[float, Field(ge=1.0, le=1e7)] = 600.0  # seconds a collective waits before the run fails

    @property
    def stages_per_process(self) -> int:
        """Stages of the pipeline that a process has."""
        if self.pipeline <= 1:
            return 1
        return self.stages or (2 if self.schedule in ("interleaved", "zero_bubble") else 1)


def right_name(text: str) -> str:
    """The nearest name that a recipe may have: what may not stand in it becomes -."""
    if not text.isprintable() or set("/\\") & set(text):
        text = re.sub("-+", "-", "".join(c if c.isprintable() and c not in "/\\" else "-" for c in text))
    text = text.strip(" .-")
    while len(text.encode()) > 100:  # the name is a folder's
        text = text[:-1].rstrip(" .-")
    return text or "recipe"


def _name(text: str) -> str:
    if text != right_name(text):
        raise ValueError(f"{text[:50]!r} cannot be the name of a folder. Try {right_name(text)!r}")
    return text


def _folder(text: str | None) -> str | None:
    if text is not None and re.search(r"[\0-\x1f\x7f]", text):
        raise ValueError(f"{text[:80]!r}: a folder has no line breaks or control characters in its name")
    return text


# what a line of the log may hold, each with a value to try it with
LINE_VALUES = dict.fromkeys(("step", "steps", "accumulations"), 1) | dict.fromkeys(
    ("loss", "lr", "grad_norm", "samples_per_s", "tokens_per_s"), 1.0
)


def _project(value: Any) -> Any:
    word = str(value).lower()
    return word if word == "true" else None if word == "false" else value


def _line(text: str | None) -> str | None:
    if text is None:
        return None
    try:
        for _, name, spec, _ in string.Formatter().parse(text):
            if name is not None and name not in LINE_VALUES:
                raise ValueError(f"{{{name[:30]}}}: no such value.{did_you_mean(name, LINE_VALUES).rstrip('.?')}")
            if spec and (len(spec) > 8 or "{" in spec or re.search(r"\d{3}", spec)):
                raise ValueError(f"{{{name}:{spec[:30]}}}: too wide")
        text.format(**LINE_VALUES)
    except ValueError as e:
        raise ValueError(f"{text[:80]!r}: {e}") from None
    return text


class Log(Section):
    """Where the run folder goes and what is written besides `metrics.jsonl`."""

    dir: Annotated[str | None, AfterValidator(_folder)] = None  # None: runs/<recipe>/<time>, the newest: latest
    every: Steps = 10  # steps between two rows and lines
    line: Annotated[str | None, AfterValidator(_line)] = None  # another line, e.g. "{step:6d} | {loss:.2f} | {lr:.1e}"
    tensorboard: bool = False  # also write rows for TensorBoard
    wandb: Annotated[str | None, BeforeValidator(_project)] = None  # the project; true: the recipe's name; None: off


def _grid(text: str | None) -> str | None:
    try:
        hardware.grid(text or "world")
    except UserError as e:
        raise ValueError(str(e).rstrip(".")) from None
    return text


class Energy(Section):
    """What a run's energy and CO2 are counted with: of one that is planned, and of one that is done. --watts, --pue and
    --grid of `gradus train` and `gradus plan` set these keys."""

    watts: PositiveFloat | None = None  # of one GPU, or of one host's CPUs, where no meter reads it; null: the device's
    pue: Annotated[float, Field(ge=1.0, le=10.0)] | None = None  # the building's power over its computers'; null: usual
    grid: Annotated[str | None, AfterValidator(_grid)] = None  # FR, France or "385 g/kWh"; null: the world's mean


class Recipe(Section):
    """The whole."""

    name: Annotated[str, AfterValidator(_name)] = "recipe"  # of the recipe: its runs go to runs/NAME
    model: Model  # the family of the model
    adapter: Adapter | None = None  # small matrices that are trained in place of the model's own
    task: Task  # what is learned
    data: Data  # where samples come from
    tokenizer: TokenizerConfig | None = None  # how text becomes tokens
    optimizer: Optimizer  # how gradients move weights
    schedule: Schedule = Schedule()  # the learning rate over the steps
    batch: Batch  # what one step sees
    train: Train  # how long, and from which seed
    evaluate: Evaluate = Evaluate()  # when, and what is best
    layout: Layout = Layout()  # where and how fast
    log: Log = Log()  # what is written
    energy: Energy = Energy()  # what watt-hours and CO2 are counted with

    @model_validator(mode="after")
    def _says_what_is_trained(self):
        if {"model", "train"} <= vars(self).keys():  # not where one section is validated alone
            self.model = self.model.trained(self.adapter, self.train.freeze)
        return self


def family_name(config: type[ModelConfig]) -> str:
    """The family that a class configures. Raises TypeError for one without a family or task."""
    name = config.model_fields["family"].default if "family" in config.model_fields else None
    if not isinstance(name, str) or not config.learns:
        raise TypeError(f'{config.__name__} needs family: Literal["NAME"] = "NAME" and learns = {{task: kind of data}}')
    return name


def register_model(config: type[ModelConfig]) -> None:
    """Let `model.family` of a recipe be that of this class too. TypeError as in `family_name`, or if it is taken."""
    name = family_name(config)
    if MODELS.get(name) is config:
        return
    if name in MODELS:
        raise TypeError(f"{config.__name__}: family {name} is {MODELS[name].__name__}'s. Choose another name")
    MODELS[name] = config
    _admit("model", config)


def register_task(config: type[TaskConfig], learners: Mapping[str, str]) -> None:
    """Let `task.name` of a recipe be that of this class too. learners: family → the kind of data from which it learns
    the task, of families whose own `learns` do not say so. Raises TypeError where another task has the name."""
    name = config.model_fields["name"].default
    if TASKS.get(name) is config:
        return
    if name in TASKS:
        raise TypeError(f"{config.__name__}: task {name} is {TASKS[name].__name__}'s. Choose another name")
    if unknown := ", ".join(learners.keys() - MODELS.keys()):
        raise TypeError(f"{config.__name__}: learners: no family {unknown}. Known: {', '.join(MODELS)}")
    TASKS[name] = config
    for family, kind in learners.items():
        MODELS[family].learns = {**MODELS[family].learns, name: kind}
    _admit("task", config)


def _admit(section: str, config: type[Section]) -> None:
    """Let this class describe the section too."""
    field: Any = Recipe.model_fields[section]
    field.annotation |= config
    Recipe.model_rebuild(force=True)
