"""What in a recipe cannot be combined: one table.

It is read when a recipe is loaded (`recipe.check`), when its layout is checked and applied (`parallel.check`,
`parallel.apply`), by the search over layouts (`plan.search`), and it is the table of docs/layouts.md. Whether numbers
divide one another is no matter of this table: `parallel.check` and the files of the axes say that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from gradus.recipe.schema import Recipe, Section

# Sections whose keys depend on one of them though the schema holds them in one class: kind -> the keys it knows.
DEPENDENT = {
    "schedule": ("name", {"constant": {"warmup_steps"}, "linear": {"warmup_steps", "final", "end_step"},
                          "cosine": {"warmup_steps", "final", "end_step"}, "noam": {"warmup_steps", "factor"}}),
    "tokenizer": ("kind", {"char": {"shared"}, "word": {"lowercase", "shared"}, "byte": {"shared"},
                           "bpe": {"vocab_size", "lowercase", "shared"}, "file": {"path", "shared"}}),
}  # fmt: skip


class Problem(NamedTuple):
    """path: the dotted key. others: the keys that it is in conflict with. void: it takes no effect beside them, and is
    left out where one of them was switched in a higher place than the one that says it."""

    path: str
    text: str
    others: tuple[str, ...] = ()
    void: bool = False


class Condition:
    """`key`: it is not what it is by default. `key=a|b`: it is one of these. `key!=a|b`: it is something else. None of
    them holds where the recipe does not know the key."""

    def __init__(self, text: str):
        self.text, (self.path, equals, values) = text, text.partition("=")
        self.path, self.negated = self.path.removesuffix("!"), self.path.endswith("!")
        self.values = set(values.split("|")) if equals else None
        self.section, _, self.key = self.path.partition(".")

    def value(self, sections: Mapping[str, Any]) -> Any:
        """Raises AttributeError where there is none."""
        if self.section not in sections:
            raise AttributeError(self.path)
        return getattr(sections[self.section], self.key) if self.key else sections[self.section]

    def holds(self, sections: Mapping[str, Any], stated: Collection[str] | None = None) -> bool:
        """stated: keys that hold because somebody wrote them, whatever their value; None: as the class says."""
        try:
            value = self.value(sections)
        except AttributeError:
            return False
        if self.values is not None:
            return (_word(value) in self.values) != self.negated
        if stated is not None:
            return self.path in stated
        owner = type(sections[self.section]) if self.key else Recipe
        return value != _default(owner, self.key or self.section)


@cache
def _default(owner: type[Section], key: str) -> Any:
    return owner.model_fields[key].default


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Row:
    """`key` does not go together with `others`, all of them.

    void: it takes no effect beside them. stated: to write it is enough, even with its default value. In `text` {} is
    the last of others with its value, and {value} the value alone.
    """

    def __init__(self, key: str, others: str, text: str, *, void: bool, stated: bool = False):
        self.key, self.others = Condition(key), tuple(Condition(other) for other in others.split())
        self.text, self.void, self.stated = text, void, stated

    def problem(self, sections: Mapping[str, Any], stated: Collection[str]) -> Problem | None:
        if not self.key.holds(sections, stated if self.stated else None):
            return None
        if not all(other.holds(sections) for other in self.others):
            return None
        last = self.others[-1]
        value = last.value(sections)
        beside = last.path if isinstance(value, Section) else f"{last.path}={_word(value)}"
        text = self.text.replace("{}", beside).replace("{value}", _word(value))
        return Problem(self.key.path, text, tuple(other.path for other in self.others), self.void)


def _apart(key: str, others: str, reason: str) -> Row:
    return Row(key, others, f"cannot be combined with {{}}: {reason}.", void=False)


def _void(key: str, others: str, text: str) -> Row:
    return Row(key, others, f"cannot take effect{text}.", void=True)


def _stated(key: str, others: str, text: str) -> Row:
    return Row(key, others, f"cannot take effect{text}.", void=True, stated=True)


SPLITS = ("layout.pipeline", "layout.expert", "layout.shard", "layout.context", "layout.tensor")
LOCAL = ("layout.local_sgd", "layout.diloco")
ZERO_BUBBLE = "computes the gradients of inputs and of weights in two passes"
NEEDS = {  # a key of the layout -> the axis without which it means nothing
    "reshard": "shard", "param_dtype": "shard", "reduce_dtype": "shard", "offload": "shard",
    "sequence_parallel": "tensor", "vocab_parallel": "tensor", "schedule": "pipeline", "stages": "pipeline",
    "context_method": "context",
}  # fmt: skip

LAYOUT: tuple[Row, ...] = (
    # experts
    _apart("layout.tensor", "model.n_experts", "experts' matrices are not split by rows and columns. "
           "Use layout.expert for a model with experts"),
    _apart("layout.pipeline", "model.n_experts", "the load-balancing loss arises in every stage and the loss in the "
           "last alone. Use layout.expert for a model with experts"),
    _apart("layout.context", "model.n_experts", "the load-balancing loss is of whole sequences, and a process sees a "
           "part. Use layout.expert for a model with experts"),
    # one axis and another
    _apart("model.patches=unfold", "layout.tensor",
           "DTensor knows no unfold. Set model.patches=rearrange or convolution: the same result"),
    _apart("layout.pipeline", "layout.context", "stages pass on whole sequences. Use one of them"),
    _apart("layout.attention=naive", "layout.context layout.context_method=ring",
           "the ring has its own kernel. Leave layout.attention out, or set layout.context_method=ulysses"),
    # pipelines
    _apart("layout.stages!=1|null", "layout.pipeline layout.schedule=gpipe|1f1b",
           "it has 1 stage a process. Use layout.schedule=interleaved or zero_bubble"),
    _apart("layout.stages=1", "layout.pipeline layout.schedule=interleaved",
           "with 1 stage a process nothing interleaves. Use layout.schedule=1f1b, or layout.stages=2"),
    _apart("layout.shard", "layout.pipeline layout.schedule=interleaved|zero_bubble",
           "FSDP2 shards one stage a process, and this schedule has more. Use layout.schedule=1f1b or gpipe"),
    _apart("layout.checkpointing", "layout.pipeline layout.schedule=zero_bubble",
           f"it {ZERO_BUBBLE}, which recomputation does not survive. Use layout.schedule=1f1b"),
    _apart("layout.compile", "layout.pipeline layout.schedule=zero_bubble",
           f"it {ZERO_BUBBLE}, and compiled blocks have one. Use layout.schedule=1f1b"),
    _apart("layout.offload", "layout.pipeline",
           "stages keep their weights where they compute. Set layout.offload=false"),
    # replicas
    *(_apart("layout.replicate=manual|parameter_server|data_parallel", axis,
             "it is for replicas of whole weights alone. Use layout.replicate=ddp") for axis in SPLITS),
    _apart("layout.replicate=parameter_server", "layout.precision=fp16",
           "the server alone has the loss scale. Use layout.precision=bf16"),
    _apart("layout.shard_optimizer", "layout.shard",
           "sharding splits the optimizer's state already. Set layout.shard_optimizer=false"),
    *(_apart("layout.shard_optimizer", axis, "it deals out whole weights that every replica has. "
             "Set layout.shard_optimizer=false") for axis in ("layout.tensor", "layout.pipeline", "layout.expert")),
    _void("layout.shard_optimizer", "layout.replicate!=auto|ddp|manual",
          " with {}. Use layout.replicate=ddp or manual"),
    _void("layout.transport=mpi", "layout.replicate!=manual", " with {}. It is for manual"),
    *(_void("layout.compress", other, " with {}: it is a hook of DDP, for replicas of whole weights. Leave it out")
      for other in ("layout.replicate!=auto|ddp", *(a for a in SPLITS if a != "layout.context"), *LOCAL)),
    *(_void("layout.bucket_mb", other, " with {}: gradients are sent in another way there. Leave it out")
      for other in ("layout.shard", "layout.replicate=manual|parameter_server")),
    # local SGD and DiLoCo
    _apart("layout.local_sgd", "layout.diloco", "they are two answers to one question. Choose one"),
    *(_apart(key, axis, "workers that take steps of their own hold whole weights. Leave one of the two out")
      for key in LOCAL for axis in SPLITS),
    *(_apart(key, "layout.replicate!=auto|none", "its workers are the replicas. Leave layout.replicate out")
      for key in LOCAL),
    *(_apart(key, "layout.shard_optimizer", "every worker steps all weights. Leave layout.shard_optimizer out")
      for key in LOCAL),
    *(_apart(key, "layout.precision=fp16", "each worker would scale its loss by itself. Use layout.precision=bf16")
      for key in LOCAL),
    # shards
    _apart("layout.param_dtype", "layout.precision!=fp32",
           "both say what is computed in. Set layout.precision=fp32"),
    _apart("layout.param_dtype=fp16", "layout.precision=fp32",
           "gradients would underflow without a loss scale. Use layout.param_dtype=bf16, or layout.precision=fp16"),
    _apart("layout.offload", "layout.precision=fp16",
           "the loss scale lies on the GPU and the gradients on the host. Use layout.precision=bf16"),
    # what belongs to another key
    *(_void(f"layout.{key}", f"layout.{axis}=1", f" without layout.{axis}. Set layout.{axis}=2, say, or leave it out")
      for key, axis in NEEDS.items()),
    _stated("layout.chunk", "layout.attention!=chunked", " with {}. Set layout.attention=chunked or leave it out"),
)  # fmt: skip


def _of_kinds(section: str, stated: bool) -> Iterator[Row]:
    kind, knows = DEPENDENT[section]
    for key in sorted(set().union(*knows.values())):
        having = [name for name, keys in knows.items() if key in keys]
        text = f" with {{}}. It is for {' and '.join(having)}"
        if len(having) < len(knows):
            yield (_stated if stated else _void)(f"{section}.{key}", f"{section}.{kind}!={'|'.join(having)}", text)


OTHER: tuple[Row, ...] = (
    *_of_kinds("schedule", stated=True),
    *_of_kinds("tokenizer", stated=False),
    _stated("model.n_classes", "model.family=bert task.name=masked_lm", " with task {value}. It is for classification"),
    _stated("model.vocab_size", "model.family=vit", ": vit reads images. Leave it out"),
    *(_stated(f"model.{key}", "model.n_experts=null", " without experts. Set model.n_experts=8, say, or leave it out")
      for key in ("top_k", "balance")),
    _stated("tokenizer", "data.kind=synthetic|images", " with {value} data. Leave it out"),
    _stated("tokenizer.shared", "data.kind=text|labelled", " with {value} data. It is for pairs"),
    *(_stated(f"data.{key}", "data.workers=0", " with {}. Set data.workers=2, say, or leave it out")
      for key in ("prefetch", "persistent")),
    *(_stated(f"data.{key}", "data.kind=text|images data.source!=path",
              " with {}. Set data.source=path or leave it out")
      for key in ("path", "train", "valid", "test", "text", "image", "label")),
    _stated("data.valid_fraction", "data.kind=text data.valid", " with {}. Leave one of the two out"),
    _void("evaluate.test", "task.name=copy", " with task {value}: made data has no test split. Leave it out"),
    _stated("evaluate.decode", "task.name!=translation", " with task {value}. It is for translation"),
    _stated("evaluate.max_new", "task.name!=translation|causal_lm",
            " with task {value}. It is for translation and causal_lm"),
    _stated("evaluate.max_new", "task.name=causal_lm evaluate.samples=0", " with {}. Set evaluate.samples=1, say"),
)  # fmt: skip


def conflicts(
    sections: Mapping[str, Any], stated: Collection[str] = (), rows: tuple[Row, ...] = (*LAYOUT, *OTHER)
) -> Iterator[Problem]:
    """What does not go together in the sections that are there; of rows that say the same of a key, the first.

    stated: the dotted keys that somebody wrote down.
    """
    told = set()
    for row in rows:
        about = (row.key.path, row.text)
        if about not in told and (problem := row.problem(sections, stated)):
            told.add(about)
            yield problem
