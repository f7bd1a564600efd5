"""A model from its configuration: built, with or without memory, and its parameters counted."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from gradus.errors import UserError
from gradus.models.family import lookup
from gradus.models.weights import others
from gradus.patch import replaced
from gradus.recipe.schema import ModelConfig

if TYPE_CHECKING:  # a configuration is read without torch
    import torch
    from torch import nn

    from gradus.models.values import Deferred, Values
    from gradus.models.weights import LoadReport


def build(config: ModelConfig, device: str | torch.device = "cpu", seed: int | None = None) -> nn.Module:
    """Build a model with the initialisation of its paper, drawn from `seed` (None: one from torch's global generator).
    On "meta" nothing is allocated.

    Raises UserError where the configuration is not complete, e.g. without vocab_size; TypeError where the family's
    description is not.
    """
    import torch

    if str(device) != "meta":
        return deferred(config, seed).on(device)
    family = lookup(config.family)
    if config.reads == "text" and config.vocab_size is None:
        raise UserError("model.vocab_size: not known. Set it, or give a tokenizer.")
    with torch.device("meta"), undrawn():
        model = family.model(config)
        if lacks := list(family.lacks(model)):
            raise TypeError(f"family {family.name}: {'; '.join(lacks)}")
        if config.adapter or config.freeze:
            from gradus.models.adapt import adapt

            adapt(model, config, family)
    return model


def whole(config: ModelConfig) -> nn.Module:
    """The model on the meta device with every weight as it is, whatever adapter.base says. Errors as in `build`."""
    return build(config.as_it_is(), "meta")


@contextmanager
def undrawn() -> Iterator[None]:
    """PyTorch's own initial values are not drawn where there is no memory: the family's are, later (`values.drawn`).
    Modules that another thread makes meanwhile, with memory, are not touched."""
    from torch import nn

    def unless_meta(draw: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        return lambda module: None if module.weight.is_meta else draw(module)

    with ExitStack() as stack:
        for kind in (nn.Linear, nn.Embedding):
            stack.enter_context(replaced(kind, "reset_parameters", unless_meta(kind.reset_parameters)))
        yield


def check_built(config: ModelConfig) -> None:
    """Raises UserError for a model that is built for plans only."""
    if config.planned_only:
        raise UserError(others.not_computed("this model", config.planned_only))


def deferred(config: ModelConfig, seed: int | None) -> Deferred:
    """The same before it has memory. Errors as in `build`."""
    from gradus.models.values import drawn

    check_built(config)
    like = whole(config)
    return with_values(config, like, drawn(like, seed))


def with_values(
    config: ModelConfig, like: nn.Module, values: Values, report: LoadReport | None = None
) -> Deferred:
    """The model of a configuration, of which `like` is `whole` and `values` are its values, before it has memory."""
    from gradus.models.values import Deferred, stored_small

    model = like if config.as_it_is() is config else build(config, "meta")
    return Deferred(model, stored_small(model, values), report)


# ---------------------------------------------------------------- counts


def count(config: ModelConfig) -> dict[str, int]:
    """Count the parameters by component, each shared one once, and their `total`. Allocates nothing.

    embeddings: tokens, types, positions (T5's relative ones too), patches, class token. attention, feedforward, norms:
    as named, wherever they are; what else a block has counts as attention. head: everything else, all of which reads
    the last norm's output (pooler, classifier, an untied output projection).
    """
    return dict(_counted(config))


@functools.lru_cache(maxsize=64)
def trainable(config: ModelConfig) -> int:
    """The number of parameters that are trained, each shared one once. Allocates nothing."""
    return sum(p.numel() for p in build(config, "meta").parameters() if p.requires_grad)


COMPONENTS = "embeddings", "attention", "feedforward", "norms", "head"


def component(name: str, modules: dict[str, nn.Module]) -> str:
    """What a parameter counts as. name: its own; modules: the model's, by name."""
    from torch import nn

    from gradus.layers import Attention, Block, FeedForward, GatedFeedForward, MixtureOfExperts

    owners = name.split(".")[:-1]
    path = [modules[".".join(owners[: i + 1])] for i in range(len(owners))]  # from the model's child to the owner

    def inside(*kinds: type[nn.Module]) -> bool:
        return any(isinstance(module, kinds) for module in path)

    if inside(Attention):
        return "attention"
    if inside(FeedForward, GatedFeedForward, MixtureOfExperts):
        return "feedforward"
    if path and isinstance(path[-1], nn.LayerNorm | nn.RMSNorm):
        return "norms"
    if inside(Block):
        return "attention"
    entry = not path or inside(nn.Embedding) or any(hasattr(module, "n_patches") for module in path)
    return "embeddings" if entry else "head"


@functools.lru_cache(maxsize=64)
def _counted(config: ModelConfig) -> dict[str, int]:
    model = whole(config)
    modules = dict(model.named_modules())
    counts = dict.fromkeys(COMPONENTS, 0)
    for name, parameter in model.named_parameters():
        counts[component(name, modules)] += parameter.numel()
    return {**counts, "total": sum(counts.values())}
