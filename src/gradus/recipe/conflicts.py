"""One table: what in a recipe cannot be combined.

It is read when a recipe is loaded (`recipe.check`), when its layout is checked and applied (`parallel.check`,
`parallel.apply`), by the search over layouts (`plan.search`), and it is the table of docs/layouts.md. Whether numbers
divide one another, `parallel.check` and the files of the axes check.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from gradus.recipe.schema import Recipe, Section

WARMUP = {"warmup_steps", "warmup_ratio"}
# Sections whose keys depend on one of them though the schema holds them in one class: kind -> the keys it knows.
DEPENDENT = {
    "schedule": ("name", {"constant": WARMUP, "linear": {*WARMUP, "final", "end_step"},
                          "cosine": {*WARMUP, "final", "end_step"}, "noam": {*WARMUP, "factor"}}),
    "tokenizer": ("kind", {"char": {"shared"}, "word": {"lowercase", "shared"}, "byte": {"shared"},
                           "bpe": {"vocab_size", "lowercase", "shared"}, "file": {"path", "shared"}}),
}  # fmt: skip


class Problem(NamedTuple):
    """A key that is wrong. path: its dotted name. others: the keys that contradict it. void: it takes no effect beside
    them, and is left out where a later layer sets one of them. instead: the value that it is then clamped to."""

    path: str
    text: str
    others: tuple[str, ...] = ()
    void: bool = False
    instead: Any = None


class Condition:
    """`key`: it is not what it is by default. `key=a|b`: it is one of these. `key!=a|b`: it is something else. None of
    them holds where the recipe does not know the key."""

    def __init__(self, text: str):
        path, equals, values = text.partition("=")
        self.path, self.negated = path.removesuffix("!"), path.endswith("!")
        self.values = set(values.split("|")) if equals else None
        self.section, _, self.key = self.path.partition(".")

    def value(self, sections: Mapping[str, Any]) -> Any:
        """Raises LookupError or AttributeError where there is none."""
        return getattr(sections[self.section], self.key) if self.key else sections[self.section]

    def holds(self, sections: Mapping[str, Any], stated: Collection[str] | None = None) -> bool:
        """stated: keys that hold because somebody wrote them, whatever their value; None: as the class says."""
        try:
            value = self.value(sections)
        except (LookupError, AttributeError):
            return False
        if self.values is not None:
            return (word(value) in self.values) != self.negated
        if stated is not None:
            return self.path in stated
        owner: type[Section] = type(sections[self.section]) if self.key else Recipe
        return value != owner.model_fields[self.key or self.section].default


def word(value: Any) -> str:
    """A value as after `key=`."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Row:
    """None of `keys` goes together with any of `others` (separated by commas, each with all its conditions).

    void: a key takes no effect beside them. stated: to write it is enough, even with its default value. In `text` {} is
    the last condition's key with its value, and {value} only the value.
    """

    def __init__(self, keys: str, others: str, text: str, *, void: bool = True, stated: bool = False):
        self.keys = [Condition(key) for key in keys.split(", ")]
        self.others = [[Condition(word) for word in one.split()] for one in others.split(", ")]
        self.text, self.void, self.stated = f"cannot {'take effect' if void else 'be combined'}{text}.", void, stated

    def problems(self, sections: Mapping[str, Any], stated: Collection[str]) -> Iterator[Problem]:
        for key in self.keys:
            if not key.holds(sections, stated if self.stated else None):
                continue
            conditions = next((one for one in self.others if all(c.holds(sections) for c in one)), None)
            if conditions is not None:
                value, last = conditions[-1].value(sections), conditions[-1].path
                other = last if isinstance(value, Section) else f"{last}={word(value)}"
                text = self.text.replace("{}", other).replace("{value}", word(value))
                yield Problem(key.path, text, tuple(c.path for c in conditions), self.void)


def _clash(keys: str, others: str, reason: str) -> Row:
    return Row(keys, others, f" with {{}}: {reason}", void=False)


def _stated(keys: str, others: str, text: str) -> Row:
    return Row(keys, others, text, stated=True)


SPLITS = "layout.pipeline, layout.expert, layout.shard, layout.context, layout.tensor"
WORKERS = "layout.local_sgd, layout.diloco"
TWO_PASSES = "it computes the gradients of inputs and of weights in two passes"

LAYOUT: tuple[Row, ...] = (
    _clash("layout.tensor", "model.n_experts", "experts' matrices are not split by rows and columns. "
           "Use layout.expert for a model with experts"),
    _clash("layout.pipeline", "model.n_experts", "the load-balancing loss arises in every stage and the loss in the "
           "last only. Use layout.expert for a model with experts"),
    _clash("layout.context", "model.n_experts", "the load-balancing loss is of whole sequences, and a process sees a "
           "part. Use layout.expert for a model with experts"),
    _clash("model.patches=unfold", "layout.tensor",
           "DTensor does not support unfold. Set model.patches=rearrange or convolution: the same result"),
    _clash("layout.tensor, layout.context", "model.latent", "multi-head latent attention is split by neither heads nor "
           "sequence. Use layout.expert, layout.pipeline or layout.shard"),
    _clash("layout.context", "model.alternation", "ModernBERT's windows need whole sequences. Leave it out"),
    _clash("model.window", "layout.context layout.context_method=ring",
           "the ring takes no window of attention. Set layout.context_method=ulysses"),
    _clash("layout.pipeline", "layout.context", "stages pass on whole sequences. Use one of them"),
    _clash("layout.attention=naive", "layout.context layout.context_method=ring",
           "the ring has its own kernel. Leave layout.attention out, or set layout.context_method=ulysses"),
    # loss by chunks
    _clash("layout.loss=chunked", "model.head=classification",
           "a classifier has no logits over words. Leave layout.loss out"),
    _clash("layout.loss=chunked", "layout.tensor layout.vocab_parallel=false",
           "chunks stay split along the vocabulary. Leave layout.vocab_parallel out"),
    _clash("layout.loss=chunked", "layout.pipeline layout.schedule=zero_bubble",
           f"{TWO_PASSES}, and a chunk computes both in one. Use layout.schedule=1f1b"),
    _clash("layout.loss=chunked", "layout.replicate=data_parallel",
           "its copies of the model see parts of the batch, and the loss is of one. Use layout.replicate=ddp"),
    # pipelines
    _clash("layout.stages!=1|null", "layout.pipeline layout.schedule=gpipe|1f1b",
           "it has 1 stage per process. Use layout.schedule=interleaved or zero_bubble"),
    _clash("layout.stages=1", "layout.pipeline layout.schedule=interleaved",
           "with 1 stage per process nothing interleaves. Use layout.schedule=1f1b, or layout.stages=2"),
    _clash("layout.shard", "layout.pipeline layout.schedule=interleaved|zero_bubble",
           "FSDP2 shards one stage per process, and this schedule has more. Use layout.schedule=1f1b or gpipe"),
    _clash("layout.checkpointing", "layout.pipeline layout.schedule=zero_bubble",
           f"{TWO_PASSES}, which does not work with recomputation. Use layout.schedule=1f1b"),
    _clash("layout.compile", "layout.pipeline layout.schedule=zero_bubble",
           f"{TWO_PASSES}, and compiled blocks have only one. Use layout.schedule=1f1b"),
    _clash("layout.offload", "layout.pipeline",
           "stages keep their weights where they compute. Set layout.offload=false"),
    # replicas
    _clash("layout.replicate=manual|parameter_server|data_parallel", SPLITS,
           "it is only for replicas of whole weights. Use layout.replicate=ddp"),
    _clash("layout.replicate=parameter_server", "layout.precision=fp16",
           "only the server has the loss scale. Use layout.precision=bf16"),
    _clash("layout.shard_optimizer", "layout.shard",
           "sharding splits the optimizer's state already. Set layout.shard_optimizer=false"),
    _clash("layout.shard_optimizer", "layout.tensor, layout.pipeline, layout.expert",
           "it distributes whole weights that every replica has. Set layout.shard_optimizer=false"),
    Row("layout.shard_optimizer", "layout.replicate!=auto|ddp|manual", " with {}. Use layout.replicate=ddp or manual"),
    Row("layout.transport=mpi", "layout.replicate!=manual", " with {}. It is for manual"),
    Row("layout.compress", f"layout.replicate!=auto|ddp, {SPLITS.replace('layout.context, ', '')}, {WORKERS}",
        " with {}: it is a hook of DDP, for replicas of whole weights. Leave it out"),
    Row("layout.bucket_mb", "layout.shard, layout.replicate=manual|parameter_server",
        " with {}: gradients are sent in another way there. Leave it out"),
    # local SGD and DiLoCo
    _clash("layout.local_sgd", "layout.diloco", "they are alternatives. Choose one"),
    _clash(WORKERS, SPLITS, "local SGD and DiLoCo workers hold whole weights. Leave one of the two out"),
    _clash(WORKERS, "layout.replicate!=auto|none", "its workers are the replicas. Leave layout.replicate out"),
    _clash(WORKERS, "layout.shard_optimizer", "every worker steps all weights. Leave layout.shard_optimizer out"),
    _clash(WORKERS, "layout.precision=fp16",
           "each worker would scale its loss by itself. Use layout.precision=bf16"),
    # replicas that come and go
    _clash("layout.elastic", SPLITS.replace("layout.shard, ", ""), "a replica holds whole weights, or splits them by "
           "layout.shard. Leave one of the two out"),
    _clash("layout.elastic", "layout.replicate!=auto|ddp", "it is built for ddp. Leave layout.replicate out"),
    _clash("layout.elastic", WORKERS, "their curve depends on the number of workers by design. Leave one of the two "
           "out"),
    _clash("layout.elastic", "layout.shard_optimizer", "the optimizer's state of a dead replica would be lost. Leave "
           "layout.shard_optimizer out"),
    _clash("layout.elastic", "layout.compress=powersgd", "each replica keeps what it did not send, and a dead one's "
           "is lost. Use layout.compress=bf16"),
    # shards
    _clash("layout.param_dtype", "layout.precision!=fp32",
           "both say what is computed in. Set layout.precision=fp32"),
    _clash("layout.param_dtype=fp16", "layout.precision=fp32",
           "gradients would underflow without a loss scale. Use layout.param_dtype=bf16, or layout.precision=fp16"),
    _clash("layout.offload", "layout.precision=fp16",
           "the loss scale lies on the GPU and the gradients on the host. Use layout.precision=bf16"),
    # SimpleFSDP
    _clash("layout.shard_with=simple", SPLITS.replace("layout.shard, ", "") + ", layout.elastic, layout.offload, "
           "adapter.rank", "it is built for layout.shard and replicas alone. Use layout.shard_with=fsdp2"),
    _clash("layout.shard_with=simple", "layout.checkpointing=attention|full", "PyTorch's compiler keeps what a "
           "recomputed block has gathered. Use layout.checkpointing=selective"),
    _clash("layout.shard_with=simple", "layout.compile",
           "it compiles the whole model itself. Leave layout.compile out"),
    _clash("layout.shard_with=simple", "layout.attention=chunked, layout.loss=chunked, layout.precision=fp8, "
           "model.n_experts, model.window!=null, model.alternation", "it cannot be compiled into one graph. Leave one "
           "of the two out"),
    # products in fp8
    _clash("layout.precision=fp8", "layout.tensor",
           "scaling by a tensor's largest value is not built for tensors that are split. Use layout.precision=bf16"),
    _clash("layout.precision=fp8", "layout.pipeline layout.schedule=zero_bubble",
           f"{TWO_PASSES}, and torchao's Linear computes both in one. Use layout.schedule=1f1b"),
    _clash("layout.precision=fp8", "adapter.rank",
           "torchao's Linear computes gradients of frozen weights too. Use layout.precision=bf16"),
    # a base that is stored small
    *(_clash("adapter.base", f"layout.{axis}", "quantized weights are not split: every process holds them all. "
             f"Set layout.{axis}=1, or leave adapter.base out") for axis in ("tensor", "pipeline")),
    _clash("adapter.base", "layout.offload", "quantized weights stay on the device. Set layout.offload=false"),
    # what belongs to another key
    *(Row(keys, f"{axis}=1", f" without {axis}. Set {axis}=2, say, or leave it out") for axis, keys in (
        ("layout.shard", "layout.shard_with, layout.reshard, layout.param_dtype, layout.reduce_dtype, layout.offload"),
        ("layout.tensor", "layout.sequence_parallel, layout.vocab_parallel"),
        ("layout.pipeline", "layout.schedule, layout.stages"), ("layout.context", "layout.context_method"),
    )),
    Row("layout.min_replicas, layout.step_timeout, layout.max_deaths", "layout.elastic=false",
        " without layout.elastic. Set layout.elastic=true, or leave it out"),
    _stated("layout.chunk", "layout.attention!=chunked", " with {}. Set layout.attention=chunked or leave it out"),
)  # fmt: skip


def _of_kinds(section: str, stated: bool) -> Iterator[Row]:
    kind, knows = DEPENDENT[section]
    for key in sorted(set().union(*knows.values())):
        having = [name for name, keys in knows.items() if key in keys]
        if len(having) < len(knows):
            others, text = f"{section}.{kind}!={'|'.join(having)}", f" with {{}}. It is for {' and '.join(having)}"
            yield Row(f"{section}.{key}", others, text, stated=stated)


OTHER: tuple[Row, ...] = (
    _clash("layout.shard_with=simple", "data.pack=documents",
           "masks of documents are not compiled. Use layout.shard_with=fsdp2, or data.pack=none"),
    _clash("train.qat", f"{SPLITS}, {WORKERS}, layout.replicate=data_parallel",
           "one process sees the ranges of inputs. Leave the axis out, or train.qat"),
    _clash("train.qat", "layout.checkpointing", "ranges move between a forward pass and its recomputation. "
           "Set layout.checkpointing=none"),
    _clash("train.qat", "layout.loss=chunked", "chunks are computed without the head's rounding. "
           "Set layout.loss=whole"),
    _clash("train.qat", "layout.compile", "compiled blocks keep the ranges that they were compiled with. "
           "Set layout.compile=none"),
    _clash("train.qat", "layout.precision!=fp32", "the rounding is that of fp32 inputs. Set layout.precision=fp32"),
    _clash("train.qat", "adapter.base", "it rounds the weights that are trained. Leave adapter.base out"),
    _clash("train.qat", "model.n_experts", "experts' products are not rounded. Leave model.n_experts out"),
    _clash("train.qat", "adapter", "int8 is for the merged weights. Train without, merge, then quantize"),
    *_of_kinds("schedule", stated=True),
    *_of_kinds("tokenizer", stated=False),
    _stated("model.n_classes", "model.family=bert task.name=masked_lm", " with task {value}. It is for classification"),
    _stated("model.vocab_size", "model.family=vit", ": vit reads images. Leave it out"),
    _stated("model.top_k, model.balance, model.d_expert, model.d_shared, model.norm_top_k, model.experts_every, "
            "model.dense_layers, model.shared_gate, model.router", "model.n_experts=null",
            " without experts. Set model.n_experts=8, say, or leave it out"),
    _stated("tokenizer", "data.kind=synthetic|images", " with {value} data. Leave it out"),
    _stated("tokenizer.shared", "data.kind=text|labelled|chats", " with {value} data. It is for pairs"),
    _stated("data.prefetch, data.persistent", "data.workers=0",
            " with {}. Set data.workers=2, say, or leave it out"),
    _stated("data.path, data.train, data.valid, data.test, data.text, data.image, data.label",
            "data.kind=text|images data.source!=path", " with {}. Set data.source=path or leave it out"),
    _stated("data.valid_fraction", "data.kind=text data.valid", " with {}. Leave one of the two out"),
    Row("evaluate.test", "task.name=copy", " with task {value}: made data has no test split. Leave it out"),
    _stated("evaluate.decode", "task.name!=translation|chat", " with task {value}. It is for translation and chat"),
    _stated("evaluate.beams", "task.name!=translation", " with task {value}. It is for translation"),
    _stated("evaluate.max_new", "task.name!=translation|causal_lm|chat",
            " with task {value}. It is for translation, causal_lm and chat"),
    _stated("evaluate.max_new", "task.name=causal_lm evaluate.answers=0 evaluate.samples=0",
            " with {}. Set evaluate.samples=1, say"),
)  # fmt: skip


def conflicts(
    sections: Mapping[str, Any], stated: Collection[str] = (), rows: tuple[Row, ...] = (*LAYOUT, *OTHER)
) -> Iterator[Problem]:
    """What does not go together in the sections that are there. stated: the dotted keys that somebody wrote down."""
    for row in rows:
        yield from row.problems(sections, stated)
