"""The description of a family: all that layouts, tasks, inference and export know of it. What a recipe must know
without torch (sizes, tasks, kinds of data) stands in its configuration (`gradus.recipe.schema`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from gradus.errors import UserError, did_you_mean
from gradus.recipe import schema

if TYPE_CHECKING:  # a configuration is read without torch
    from torch import nn


@dataclass(frozen=True)
class Stack:
    """The names of a row of blocks and of the modules around it, also of those that only some configurations have."""

    blocks: str  # a ModuleList of layers.Block, whose forward calls hidden states `x`, an encoder's output `memory`
    before: tuple[str, ...]  # what the first block needs: embeddings
    norm: str | None = None  # the norm after the last block
    heads: tuple[str, ...] = ()  # what reads the last hidden states
    shared: tuple[str, ...] = ()  # what every block needs
    dropout: str | None = None  # of an encoder: what is applied to its normed output
    # (configuration, number of a block) → its kind, where blocks with the same modules and parameters compute
    # differently: local and global attention. What is experts, or frozen, a plan sees by itself.
    kind: Callable[[Any, int], Hashable] | None = None

    @property
    def after(self) -> tuple[str, ...]:
        """The modules after the last block: norm and heads."""
        return (self.norm, *self.heads) if self.norm else self.heads

    def signature(self, config: Any, i: int, block: nn.Module) -> tuple[Any, ...]:
        """What block i has in common with others of its kind: parameters and buffers, modules, and what `kind` says."""
        tensors = itertools.chain(block.named_parameters(), block.named_buffers())
        return (
            [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors],
            [type(module).__qualname__ for module in block.modules()],
            self.kind(config, i) if self.kind else None,
        )

    def around(self, first: bool, last: bool) -> tuple[str, ...]:
        """The modules that some of the blocks need besides themselves. first, last: whether these are among them."""
        return (*self.shared, *(self.before if first else ()), *(self.after if last else ()))


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, described. Raises TypeError that names everything that is missing.

    model      model.initialisation() yields each parameter and its start (layers.init); of several the last counts.
    attention  causal: a decoder, which continues texts: model.hidden(ids); model.new_cache if it keeps keys and values.
               both: an encoder: model.hidden(ids), of images model.features(images).
               cross: an encoder-decoder: model.encode(source, keep), model.decode(target, memory, keep).
    tensor     end of a module's name → how tensor parallelism splits it. Attention, feed-forward networks, `tokens` and
               `head` need none; what else is not named is whole on every process.
               gather: its input is put together first. column: its output is split (rows of a Linear, columns of an
               Embedding), a plain tensor. row: its input is split (columns of a Linear), and the results are summed.
    """

    config: type[schema.ModelConfig]
    model: type[nn.Module]
    weights: Any  # the module of its rules for weights (see `gradus.models.weights`)
    stacks: tuple[Stack, ...]  # in the order in which they compute; an encoder's first
    attention: Literal["causal", "both", "cross"]
    tokens: tuple[str, ...] = ()  # embeddings of tokens
    head: str | None = None  # the projection to the vocabulary
    entry: tuple[str, ...] = ()  # what gives the first block its input (a dropout: is given), where `tokens` do not
    tensor: Mapping[str, Literal["gather", "column", "row"]] = field(default_factory=dict)
    whole_sequence: str = ""  # why a process needs the whole sequence; layout.context is then refused
    decoder_start: Literal["begin", "padding"] = "begin"  # the token that an encoder-decoder's answer starts from
    fine_tuning_rate: float = 5e-5  # the usual learning rate, for published sizes

    def __post_init__(self):
        encodes = "features" if self.config.reads == "images" else "hidden"
        methods = {"causal": ["hidden"], "both": [encodes], "cross": ["encode", "decode"]}
        if self.attention not in methods:
            raise TypeError(f"family {self.name}: attention={self.attention}: must be causal, both or cross")
        rules = ("MODEL_TYPES", "config_from_hf", "config_to_hf", "rules")
        asked = ["initialisation", *methods[self.attention]]
        lacks = [f"{self.model.__name__}.{name}()" for name in asked if not hasattr(self.model, name)]
        lacks += [f"weights.{name}" for name in rules if not hasattr(self.weights, name)]
        if isinstance(getattr(self.weights, "MODEL_TYPES", ()), str):
            raise TypeError(f"family {self.name}: weights.MODEL_TYPES is a text: must be a tuple of them")
        if lacks or not self.stacks:
            raise TypeError(f"family {self.name} lacks {', '.join(lacks) or 'stacks'}")

    @property
    def name(self) -> str:
        return schema.family_name(self.config)

    def n_blocks(self, config: schema.ModelConfig) -> tuple[int, ...]:
        """The number of blocks of each stack."""
        return (config.n_layers, getattr(config, "n_decoder_layers", None) or config.n_layers)[: len(self.stacks)]

    def lacks(self, model: nn.Module) -> Iterator[str]:
        """The differences between this description and a built model, a line each."""
        from gradus.layers import Block

        modules = dict(model.named_modules(remove_duplicate=False))
        for stack in self.stacks:
            blocks = list(modules[stack.blocks].children()) if stack.blocks in modules else []
            if not blocks or not all(isinstance(block, Block) for block in blocks):
                yield f"stacks: {stack.blocks} is not a list of gradus.layers.Block"
        for key in ("tokens", "entry"):
            yield from (f"{key}: no module {name}" for name in getattr(self, key) if name not in modules)
        for end in self.tensor:
            if not any(name.endswith(end) for name in modules):
                yield f"tensor: no module's name ends in {end}"
        named = tuple(f"{part}." for s in self.stacks for part in (s.blocks, *s.before, *s.after, *s.shared))
        left = [name for name, _ in model.named_parameters() if not f"{name}.".startswith(named)]
        if left:
            yield f"stacks: {', '.join(left)} in none: name them in before, norm, heads or shared"
        initialisation: Any = model.initialisation
        started = {id(p) for p, _ in initialisation()}
        if left := [name for name, p in model.named_parameters() if id(p) not in started]:
            yield f"initialisation: nothing for {', '.join(left)}"
        ruled = {name for rule in self.weights.rules(model.config) for name in rule.names}
        kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in ruled}
        left = [name for name, p in model.named_parameters() if id(p) not in kept]
        if ruled and left:  # without any rule, a family is planned and not kept
            yield f"weights.rules: nothing for {', '.join(left)}"


_known: dict[str, Family] = {}  # registered, or looked up before


def register(family: Family) -> None:
    """Make a further family known to recipes, layouts and weights. Every process does so before it reads a recipe.

    Raises TypeError where another configuration has the name, or another family has a model_type."""
    for other in (name for name in schema.MODELS if name != family.name):
        if taken := set(rules_of(other).MODEL_TYPES) & set(family.weights.MODEL_TYPES):
            raise TypeError(f"family {family.name}: model_type {taken.pop()} is {other}'s")
    schema.register_model(family.config)
    _known[family.name] = family


def lookup(name: str) -> Family:
    """The family of this name; those of this room are imported when first asked for. Raises UserError for no family."""
    if name not in _known:
        if name not in schema.MODELS:
            raise UserError(f"{name}: no such family.{did_you_mean(name, schema.MODELS)}")
        _known[name] = import_module(f"gradus.models.{name}").FAMILY
    return _known[name]


def families() -> list[Family]:
    return [lookup(name) for name in schema.MODELS]


def rules_of(name: str) -> Any:
    """The rules for a family's weights. Those of this room are imported without the model, and so without torch."""
    return _known[name].weights if name in _known else import_module(f"gradus.models.weights.{name}")
