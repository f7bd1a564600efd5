"""The recipe: one typed tree that is the YAML file, the `key=value` flags and their help.

A recipe says *what* (model, task, data, optimisation, seed); its `layout` says *how* (device, precision, micro-batch,
checkpointing, compile). Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A part of the recipe. Unknown keys, NaN and infinities are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), validate_default=True)


# ---------------------------------------------------------------- model


class ModelConfig(Section):
    """What every family has. `preset` fills the fields from a published size; `init` starts from weights (a folder, a file
    or a hub name), whose configuration then holds."""

    preset: str | None = None
    init: str | None = None
    vocab_size: PositiveInt | None = None  # from the tokenizer when not given
    n_layers: PositiveInt
    d_model: PositiveInt
    n_heads: PositiveInt
    dropout: Fraction = 0.0

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @model_validator(mode="after")
    def _heads_divide(self):
        if not hasattr(self, "d_head") and self.d_model % self.n_heads:
            raise ValueError(f"d_model={self.d_model} is not a multiple of n_heads={self.n_heads}")
        return self


class ExpertsConfig(ModelConfig):
    """A mixture of experts in place of every feed-forward network, in the families that have it."""

    n_experts: PositiveInt | None = None  # None: one feed-forward network, which all tokens take
    top_k: PositiveInt = 2  # experts a token takes
    balance: NonNegativeFloat = 0.01  # weight of the loss that is least where all experts are equally loaded (Fedus et al. 2021)

    @model_validator(mode="after")
    def _enough_experts(self):
        if self.n_experts is not None and self.top_k > self.n_experts:
            raise ValueError(f"top_k={self.top_k} is more than n_experts={self.n_experts}; set top_k={self.n_experts} or fewer")
        return self


class Seq2SeqConfig(ModelConfig):
    """The original Transformer (Vaswani et al. 2017)."""

    family: Literal["seq2seq"] = "seq2seq"
    target_vocab_size: PositiveInt | None = None  # None: the same as vocab_size
    n_decoder_layers: PositiveInt | None = None  # None: the same as n_layers
    d_ff: PositiveInt
    seq_len: PositiveInt = 512
    dropout: Fraction = 0.1
    norm_first: bool = False  # post-norm as in the paper; the annotated code is pre-norm
    share_embeddings: bool = True  # source = target embedding (one vocabulary)
    tie_output: bool = True  # output projection = target embedding
    output_bias: bool = False
    positions: Literal["interleaved", "halves"] = "interleaved"  # sin and cos alternate (paper), or all sin then all cos
    activation: Literal["relu", "gelu", "silu"] = "relu"
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _sharing(self):
        if self.share_embeddings and self.target_vocab_size not in (None, self.vocab_size):
            raise ValueError("share_embeddings=true needs one vocabulary; leave target_vocab_size out or set share_embeddings=false")
        return self


class BertConfig(ModelConfig):
    """BERT (Devlin et al. 2019)."""

    family: Literal["bert"] = "bert"
    d_ff: PositiveInt
    seq_len: PositiveInt = 512
    n_token_types: PositiveInt = 2
    dropout: Fraction = 0.1
    head: Literal["none", "masked_lm", "pretraining", "classification"] = "none"  # pretraining: masked_lm + next sentence
    pooler: bool = True  # tanh projection of [CLS]; the classification and pretraining heads read it
    n_classes: PositiveInt | None = None
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    norm_eps: PositiveFloat = 1e-12


class GPTConfig(ExpertsConfig):
    """GPT-2 and GPT-3 (Radford et al. 2019, Brown et al. 2020)."""

    family: Literal["gpt"] = "gpt"
    d_ff: PositiveInt | None = None  # None: 4 d_model
    seq_len: PositiveInt = 1024
    bias: bool = True
    tie_output: bool = True
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh"
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _ff(self):
        if self.d_ff is None:
            self.d_ff = 4 * self.d_model
        return self


class T5Config(ModelConfig):
    """T5 (Raffel et al. 2020): v1.0 (relu, tied) and v1.1 (gated gelu, untied)."""

    family: Literal["t5"] = "t5"
    n_decoder_layers: PositiveInt | None = None
    d_head: PositiveInt = 64
    d_ff: PositiveInt
    seq_len: PositiveInt = 512  # a training length; relative positions set no limit
    dropout: Fraction = 0.1
    gated: bool = False
    tie_output: bool = True
    n_buckets: PositiveInt = 32
    max_distance: PositiveInt = 128
    norm_eps: PositiveFloat = 1e-6

    @property
    def head_dim(self) -> int:
        return self.d_head


class RopeScaling(Section):
    """Llama 3.1's stretching of rotary frequencies (Grattafiori et al. 2024)."""

    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_seq_len: PositiveInt = 8192


class LlamaConfig(ExpertsConfig):
    """Llama 2, 3.1, 3.2 (Touvron et al. 2023; Grattafiori et al. 2024); with experts, Mixtral (Jiang et al. 2024); with qkv_bias, Qwen2 and
    Qwen2.5 (Yang et al. 2024)."""

    family: Literal["llama"] = "llama"
    n_kv_heads: PositiveInt | None = None  # None: n_heads
    d_head: PositiveInt | None = None  # None: d_model / n_heads
    d_ff: PositiveInt | None = None  # None: 2/3 of 4 d_model, times ffn_multiplier, up to a multiple of multiple_of
    multiple_of: PositiveInt = 256
    ffn_multiplier: PositiveFloat = 1.0
    seq_len: PositiveInt = 4096
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False  # in the projections to queries, keys and values, not in the output's
    tie_output: bool = False
    norm_eps: PositiveFloat = 1e-5

    @property
    def head_dim(self) -> int:
        return self.d_head or self.d_model // self.n_heads

    @model_validator(mode="after")
    def _sizes(self):
        self.n_kv_heads = self.n_kv_heads or self.n_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if self.qkv_bias and self.n_experts is not None:
            raise ValueError("qkv_bias=true with n_experts: no weights layout of ours holds both; leave one of them out")
        if self.d_ff is None:
            hidden = int(self.ffn_multiplier * int(2 * 4 * self.d_model / 3))
            self.d_ff = self.multiple_of * -(-hidden // self.multiple_of)
        return self


class ViTConfig(ModelConfig):
    """ViT (Dosovitskiy et al. 2021; sizes g and G of Zhai et al. 2022). No vocabulary."""

    family: Literal["vit"] = "vit"
    image_size: PositiveInt = 224
    patch_size: PositiveInt = 16
    n_channels: PositiveInt = 3
    d_ff: PositiveInt
    n_classes: PositiveInt | None = None  # from the data when not given
    pool: Literal["class_token", "mean"] = "class_token"
    patches: Literal["convolution", "unfold", "rearrange"] = "convolution"
    norm_eps: PositiveFloat = 1e-6

    @model_validator(mode="after")
    def _patches_divide(self):
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}")
        return self


Model = Annotated[
    Seq2SeqConfig | BertConfig | GPTConfig | T5Config | LlamaConfig | ViTConfig,
    Field(discriminator="family"),
]


# ---------------------------------------------------------------- task


class CopyTask(Section):
    """Copy a sequence of symbols 1 .. n_symbols-1 (0 is padding and start)."""

    name: Literal["copy"] = "copy"
    n_symbols: Annotated[int, Field(ge=3)] = 11
    length: Annotated[int, Field(ge=2)] = 10
    start: Literal["zero", "first"] = "zero"  # first: every sequence starts with symbol 1, which starts the decoder (S1 as coded)


class TranslationTask(Section):
    """Source sequence to target sequence, teacher forced."""

    name: Literal["translation"] = "translation"
    label_smoothing: Fraction = 0.0


class CausalLMTask(Section):
    """Predict the next token."""

    name: Literal["causal_lm"] = "causal_lm"
    label_smoothing: Fraction = 0.0


class MaskedLMTask(Section):
    """Predict masked tokens (Devlin et al. 2019, section 3.1): of the chosen ones 80 % become [MASK], 10 % a random token, 10 % stay."""

    name: Literal["masked_lm"] = "masked_lm"
    mask_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    next_sentence: bool = False


class SpanCorruptionTask(Section):
    """Replace spans by sentinels and predict them (Raffel et al. 2020, section 3.1.4)."""

    name: Literal["span_corruption"] = "span_corruption"
    noise_rate: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.15
    mean_span: PositiveFloat = 3.0


class ClassificationTask(Section):
    """One label a text or image."""

    name: Literal["classification"] = "classification"
    classes: list[str] | None = None  # names for printing; from the data when not given
    label_smoothing: Fraction = 0.0


Task = Annotated[
    CopyTask | TranslationTask | CausalLMTask | MaskedLMTask | SpanCorruptionTask | ClassificationTask,
    Field(discriminator="name"),
]


# ---------------------------------------------------------------- data and tokenizer


class DataConfig(Section):
    """How any data is loaded. The order is a pure function of (seed, epoch, position), whatever the workers."""

    workers: NonNegativeInt = 0
    prefetch: PositiveInt = 2  # batches ahead, per worker
    persistent: bool = True
    pin: bool = True  # page-locked memory where there is a GPU
    limit: PositiveInt | None = None  # use only the first n training samples (after a fixed shuffle)
    limit_valid: PositiveInt | None = None


class SyntheticData(DataConfig):
    """Sequences made from the seed."""

    kind: Literal["synthetic"] = "synthetic"
    n_train: PositiveInt = 100_000
    n_valid: PositiveInt = 1_000


class TextConfig(DataConfig):
    """What all text sources share. `path` is a file, a folder, or `hf:NAME` for a Hugging Face data set."""

    path: str | None = None
    train: str | None = None  # file names below path, where they are not the usual ones
    valid: str | None = None
    test: str | None = None
    cache: str | None = None  # tokenised text; default: ~/.cache/gradus
    max_len: PositiveInt | None = None  # tokens; default: model.seq_len


class TextData(TextConfig):
    """Running text for language models (txt, jsonl, csv, tsv, parquet; each also .gz and .xz)."""

    kind: Literal["text"] = "text"
    source: Literal["path", "stdlib"] = "path"  # stdlib: the Python standard library found on this machine
    text: str = "text"  # the column, for formats that have columns
    valid_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1  # of the end of the text, where there is no valid file
    pack: Literal["stream", "documents"] = "stream"  # documents: packed rows do not attend across document borders


class LabelledData(TextConfig):
    """Texts with a label."""

    kind: Literal["labelled"] = "labelled"
    text: str | None = None  # column names; None: text or sentence, label
    label: str | None = None
    pad: Literal["bucket", "longest", "max_length"] = "bucket"


class PairsData(TextConfig):
    """Parallel text: `train.de`/`train.en` or columns of a table."""

    kind: Literal["pairs"] = "pairs"
    source: str = "de"
    target: str = "en"
    pad: Literal["bucket", "longest", "max_length"] = "bucket"


class ImagesData(DataConfig):
    """Images with a label: `digits` (scikit-learn's), parquet, class folders, the official CIFAR-10 archives, or `hf:NAME`."""

    kind: Literal["images"] = "images"
    path: str | None = None
    source: Literal["path", "digits"] = "path"
    image: str | None = None  # column names, for parquet
    label: str | None = None
    mean: list[float] | None = None  # per channel, of values in 0..1; None: measured on the training set
    std: list[float] | None = None
    crop: NonNegativeInt = 0  # random crop after padding by so many pixels
    flip: bool = False
    mixup: NonNegativeFloat = 0.0  # alpha of the Beta distribution; 0: off
    cutmix: NonNegativeFloat = 0.0


Data = Annotated[
    SyntheticData | TextData | LabelledData | PairsData | ImagesData,
    Field(discriminator="kind"),
]


class TokenizerConfig(Section):
    """char and word are read off the training text; bpe is trained on it; file is read from `path`
    (a folder, tokenizer.json, vocab.txt, a folder with encoder.json + vocab.bpe, SentencePiece .model, llama2.c .bin)."""

    kind: Literal["char", "word", "byte", "bpe", "file"] = "file"
    path: str | None = None  # for file; None: beside model.init
    vocab_size: PositiveInt | None = None  # for bpe
    lowercase: bool = False  # for word and bpe
    shared: bool = True  # pairs: one vocabulary for both languages

    @model_validator(mode="after")
    def _takes_effect(self):
        if self.path is not None and self.kind != "file":
            raise ValueError(f"path has no effect with kind={self.kind}; use kind=file")
        if self.vocab_size is not None and self.kind != "bpe":
            raise ValueError(f"vocab_size has no effect with kind={self.kind}; it is for kind=bpe")
        if self.lowercase and self.kind not in ("bpe", "word"):
            raise ValueError(f"lowercase has no effect with kind={self.kind}; it is for bpe and word")
        if self.kind == "bpe" and self.vocab_size is None:
            raise ValueError("kind=bpe needs vocab_size")
        return self


# ---------------------------------------------------------------- optimisation


class AdamW(Section):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019); decay on matrices only."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveFloat
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01


class Adam(Section):
    """Adam (Kingma & Ba 2015)."""

    name: Literal["adam"] = "adam"
    lr: PositiveFloat
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8


class SGD(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    lr: PositiveFloat
    momentum: Fraction = 0.0
    nesterov: bool = False
    weight_decay: NonNegativeFloat = 0.0


Optimizer = Annotated[AdamW | Adam | SGD, Field(discriminator="name")]


class Schedule(Section):
    """The learning rate as a multiple of optimizer.lr. `noam` is factor · d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)
    (Vaswani et al. 2017, equation 3); linear and cosine fall to `final` × lr at the last step."""

    name: Literal["constant", "linear", "cosine", "noam"] = "constant"
    warmup_steps: NonNegativeInt = 0
    final: NonNegativeFloat = 0.0
    factor: PositiveFloat = 1.0  # for noam
    end_step: PositiveInt | None = None  # None: the last step of training

    @model_validator(mode="after")
    def _takes_effect(self):
        given = self.model_fields_set
        if self.name == "noam" and self.warmup_steps == 0:
            raise ValueError("noam needs warmup_steps")
        if "factor" in given and self.factor != 1.0 and self.name != "noam":
            raise ValueError("factor has no effect without name=noam")
        if self.final and self.name not in ("linear", "cosine"):
            raise ValueError(f"final has no effect with name={self.name}; it is for linear and cosine")
        if self.end_step is not None and self.name not in ("linear", "cosine"):
            raise ValueError(f"end_step has no effect with name={self.name}; it is for linear and cosine")
        return self


class Batch(Section):
    """What one optimizer step sees, over all devices: so many samples, or as many as fit into so many tokens (padding counted)."""

    samples: PositiveInt | None = None
    tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _one(self):
        if (self.samples is None) == (self.tokens is None):
            raise ValueError("give exactly one of samples and tokens")
        return self


class Train(Section):
    """How long, from which seed, and what to do when something goes wrong."""

    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    seed: NonNegativeInt = 0
    clip_norm: PositiveFloat | None = None
    checkpoint_every: PositiveInt | None = None  # steps; None: only at the end and when stopped
    keep: PositiveInt = 2  # checkpoints to keep besides the best
    on_nonfinite: Literal["stop", "skip"] = "stop"

    @model_validator(mode="after")
    def _one(self):
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give exactly one of steps and epochs")
        return self


class Evaluate(Section):
    """When to evaluate, and which metric makes the best checkpoint. Every validation sample counts exactly once."""

    every: PositiveInt | None = None  # steps; None: at the end of every epoch
    at_start: bool = False
    batch: PositiveInt | None = None  # samples at a time; None: the micro-batch
    best: str | None = None  # metric whose best checkpoint is kept, e.g. valid/loss; None: the task's own
    test: bool = False  # also evaluate the test split at the very end
    decode: bool = True  # translation: BLEU of greedy translations at every evaluation, not only teacher-forced metrics
    samples: NonNegativeInt = 0  # decoded samples to print at the end
    max_new: PositiveInt | None = None  # tokens, for decoding


class LocalSGD(Section):
    """Workers take `every` steps alone, then average their weights (Stich 2019)."""

    every: PositiveInt


class DiLoCo(Section):
    """Workers take `every` steps alone; what they moved on average is the gradient of an outer Nesterov step (Douillard et al. 2023)."""

    every: PositiveInt
    outer_lr: PositiveFloat = 0.7
    outer_momentum: Fraction = 0.9


class Layout(Section):
    """How and where; never what. Changing it changes no sample of any step.

    The number of processes is not said here: it is what was started, and must be pipeline × shard × context × tensor × expert ×
    the replicas, of which there are as many as are left over.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: PositiveInt | None = None  # CPU threads a process; None: PyTorch's choice, or with several processes an equal share
    precision: Literal["fp32", "bf16", "fp16", "pure_bf16", "pure_fp16"] = "fp32"
    tf32: bool = False  # fp32 matrix products on tensor cores, where there are any
    micro_batch: PositiveInt | None = None  # samples a forward pass and process; None: the process's whole share of the batch
    attention: Literal["sdpa", "chunked", "naive"] = "sdpa"
    chunk: PositiveInt = 256  # query rows at a time, for chunked
    checkpointing: Literal["none", "attention", "selective", "full"] = "none"
    compile: Literal["none", "default", "reduce-overhead", "max-autotune"] = "none"
    # several processes
    replicate: Literal["auto", "none", "manual", "parameter_server", "data_parallel", "ddp"] = "auto"  # auto: ddp where processes are left over
    transport: Literal["torch", "mpi"] = "torch"  # of manual: torch.distributed, or mpi4py under mpirun
    bucket_mb: PositiveFloat = 25.0  # of ddp: gradients sent at a time
    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"  # of ddp: gradients as they are sent
    shard: PositiveInt = 1  # processes that share weights, gradients and optimizer state (FSDP2); with replicas: HSDP
    reshard: bool = True  # of shard: forget the gathered weights after the forward pass and gather them again for the backward pass
    param_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # of shard: weights as they are gathered and computed with
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None  # of shard: gradients as they are reduced; None: fp32
    offload: bool = False  # of shard: weights, gradients and optimizer state stay in the host's memory
    shard_optimizer: bool = False  # of ddp and manual: each replica keeps the optimizer's state of a part of the weights (ZeRO-1)
    tensor: PositiveInt = 1  # processes that split every matrix product
    sequence_parallel: bool = True  # of tensor: norms, dropout and residuals split along the sequence
    vocab_parallel: bool = True  # of tensor: the loss over logits split along the vocabulary
    pipeline: PositiveInt = 1  # processes that each hold a part of the layers
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"  # of pipeline
    stages: PositiveInt | None = None  # of pipeline: stages a process; None: 2 for interleaved and zero_bubble, else 1
    context: PositiveInt = 1  # processes that split the sequence, attention included
    context_method: Literal["ring", "ulysses"] = "ring"
    expert: PositiveInt = 1  # processes that split the experts (model.n_experts); each also takes its share of the batch
    local_sgd: LocalSGD | None = None
    diloco: DiLoCo | None = None
    timeout: Annotated[float, Field(gt=0.0, le=1e7)] = 600.0  # seconds after which a process that does not reach a collective is given up


class Log(Section):
    """Where the run folder goes and what is written besides `metrics.jsonl`."""

    dir: str | None = None  # None: runs/<recipe>/<time>
    every: PositiveInt = 10
    tensorboard: bool = False
    wandb: str | None = None  # the project; off when not given


class Recipe(Section):
    """The whole."""

    name: str = "recipe"
    model: Model
    task: Task
    data: Data
    tokenizer: TokenizerConfig | None = None
    optimizer: Optimizer
    schedule: Schedule = Schedule()
    batch: Batch
    train: Train
    evaluate: Evaluate = Evaluate()
    layout: Layout = Layout()
    log: Log = Log()
