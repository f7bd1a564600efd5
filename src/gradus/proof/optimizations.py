"""The optimizations that `gradus ladder` tries, a rung each: which keys each would set, given the best recipe so far,
or why there is nothing to set."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradus import limits
from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel.apply import use_compile
from gradus.proof.memory_budget import MemoryBudget, changed, largest_micro_batch
from gradus.recipe.schema import Recipe

TOO_SLOW = 2.0  # times the seconds of a matrix product, from which a precision is not tried
IDLE = 0.02  # share of a step that waits for data, below which a loader cannot help
ONE_LENGTH = "all samples have one length"
Keys = dict[str, Any]  # e.g. layout.attention → sdpa


@dataclasses.dataclass
class LadderContext:
    """The goal of a ladder and the machine that it runs on. original: the recipe as the user has it. data_wait: share
    of a step; None: not yet measured."""

    goal: str
    device: torch.device
    original: Recipe
    budget: MemoryBudget
    share: int  # samples of a step
    data_wait: float | None = None


Found = Iterable[Keys | str]  # keys to try, and why not others
Find = Callable[[Recipe, LadderContext], Found]  # of the best recipe so far


@dataclasses.dataclass(frozen=True)
class Optimization:
    """changes: what else the model learns from, so that losses are not compared. keep: False: a change of the recipe
    that is shown and left to the user."""

    name: str
    find: Find
    changes: str | None = None
    keep: bool = True

    def candidates(self, best: Recipe, context: LadderContext) -> tuple[list[Keys], list[str]]:
        """(the options that change the recipe and pass its checks, why there are no others)."""
        try:
            found = list(self.find(best, context))
        except UserError as e:
            found = [str(e)]
        options, reasons = [], [reason for reason in found if isinstance(reason, str)]
        for keys in (keys for keys in found if not isinstance(keys, str)):
            try:
                if has_keys(best, keys):
                    raise UserError("already set")
                check.validate(with_keys(best, keys), 1)
                options.append(keys)
            except UserError as e:
                reasons.append(f"{words(keys)}: {e}".replace("\n", "; "))
        return options, reasons


def value_of(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name, None)  # a recipe may have no adapter


def has_keys(recipe: Recipe, keys: Keys) -> bool:
    return all(value_of(recipe, key) == value for key, value in keys.items())


def with_keys(recipe: Recipe, keys: Keys) -> Recipe:
    sections: dict[str, Keys] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return changed(recipe, **sections)


def words(keys: Keys) -> str:
    """The keys as a user types them."""
    return " ".join(f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in keys.items())


def has_padding(recipe: Recipe) -> bool:
    """True where padding can be chosen: a batch in tokens would hold other samples."""
    return "pad" in type(recipe.data).model_fields and recipe.batch.samples is not None


def first_rung(recipe: Recipe) -> Keys:
    """The keys with which nothing is made faster or smaller."""
    keys: Keys = {
        "layout.attention": "naive", "layout.precision": "fp32", "layout.tf32": False, "layout.checkpointing": "none",
        "layout.loss": "whole", "layout.compile": "none", "layout.micro_batch": None, "data.workers": 0,
    }  # fmt: skip
    return keys | ({"data.pad": "max_length"} if has_padding(recipe) else {})


# ------------------------------------------------------------ what each tries


def _attention(best: Recipe, context: LadderContext) -> Found:
    yield from ({"layout.attention": "sdpa"}, {"layout.attention": "chunked"})


def _precision(best: Recipe, context: LadderContext) -> Found:
    if context.device.type == "cuda":
        yield {"layout.tf32": True}
        has = torch.cuda.is_bf16_supported(including_emulation=False)
        yield {"layout.precision": "bf16"} if has else "layout.precision=bf16: this GPU has none"
        yield {"layout.precision": "fp16"}
    else:
        ratio = slower_in_bf16()
        slow = f"layout.precision=bf16: a matrix product takes {ratio:.0f} times as long as in fp32 here"
        yield {"layout.precision": "bf16"} if ratio <= TOO_SLOW else slow
        yield "layout.precision=fp16: few CPUs have units for it, and bf16 needs no loss scaling"


def slower_in_bf16() -> float:
    """A CPU's time for a matrix product in bf16, against fp32; without bf16 units it may be fifty times as long."""
    fastest = []
    for dtype in (torch.bfloat16, torch.float32):
        a, times = torch.ones(256, 256, dtype=dtype), []
        for _ in range(4):
            began = time.process_time()  # not what others compute
            a @ a
            times.append(time.process_time() - began)
        fastest.append(min(times))
    return fastest[0] / max(fastest[1], 1e-6)


def _fused(best: Recipe, context: LadderContext) -> Found:
    yield "the first rung has it too: PyTorch's fused kernel steps the weights, and no key turns it off"


def _loader(best: Recipe, context: LadderContext) -> Found:
    if context.data_wait is not None and context.data_wait < IDLE:
        yield f"data.workers: a step waits {context.data_wait:.1%} of its time for data"
    elif limits.processors() == 1:
        yield "data.workers: one processor"
    else:
        yield from ({"data.workers": n} for n in (1, 2, 4) if n < limits.processors())


def _padding(mode: str) -> Find:
    def find(best: Recipe, context: LadderContext) -> Found:
        fixed = "batches in tokens count padding, and chats of like lengths go together"
        yield {"data.pad": mode} if has_padding(best) else fixed if hasattr(best.data, "pad") else ONE_LENGTH

    return find


def _checkpointing(best: Recipe, context: LadderContext) -> Found:
    """Each mode; for speed, where the whole share did not fit, with the micro-batch that then fits."""
    options: list[Keys] = [{"layout.checkpointing": mode} for mode in ("attention", "selective", "full")]
    if context.goal == "speed" and (best.layout.micro_batch or context.share) < context.share:
        sizes = [_largest(with_keys(best, keys), context) for keys in options]
        options = [keys | {"layout.micro_batch": k} for keys, k in zip(options, sizes) if k]
    yield from options


def _chunked_loss(best: Recipe, context: LadderContext) -> Found:
    yield {"layout.loss": "chunked"}


def _largest(recipe: Recipe, context: LadderContext) -> int | None:
    return largest_micro_batch(changed(recipe, layout={"micro_batch": None}), context.budget, context.share)


def _micro_batch(best: Recipe, context: LadderContext) -> Found:
    """Larger where the whole share did not fit; smaller ones take less, and pad less where lengths vary."""
    now = best.layout.micro_batch or context.share
    if now >= context.share:
        yield f"a larger one: already the whole share of {context.share}"
    elif (largest := _largest(best, context) or 0) > now:
        yield {"layout.micro_batch": largest}
    smaller = 3 if context.goal == "memory" else 0 if context.device.type == "cuda" else 2
    yield from ({"layout.micro_batch": now >> k} for k in range(1, smaller + 1) if now >> k)


def _compile(best: Recipe, context: LadderContext) -> Found:
    use_compile(torch.nn.Module(), "default", context.device)  # raises UserError without a compiler
    modes = ("default", "reduce-overhead", "max-autotune") if context.device.type == "cuda" else ("default",)
    yield from ({"layout.compile": mode} for mode in modes)


def _adapter(best: Recipe, context: LadderContext) -> Found:
    if best.model.init is None:
        yield "adapter.rank=8: it stands beside trained weights (model.init)"
    elif best.adapter is None:
        yield {"adapter.rank": 8}


def _shorter(best: Recipe, context: LadderContext) -> Found:
    if best.data.kind in ("labelled", "pairs"):
        yield {"data.max_len": (best.data.max_len or best.model.seq_len) // 2}
    else:
        yield "the samples would change" if best.data.kind in ("text", "chats") else ONE_LENGTH


OPTIMIZATIONS = (
    Optimization("attention kernel", _attention),
    Optimization("precision", _precision),
    Optimization("fused optimizer", _fused),
    Optimization("loader", _loader),
    Optimization("padding to the longest", _padding("longest")),
    Optimization("length buckets", _padding("bucket"), changes="the same samples in other batches"),
    Optimization("checkpointing", _checkpointing),
    Optimization("chunked loss", _chunked_loss),
    Optimization("micro-batch", _micro_batch),
    Optimization("compile", _compile),
    Optimization("an adapter", _adapter, changes="small matrices are trained in place of the weights", keep=False),
    Optimization("shorter sequences", _shorter, changes="longer texts are cut", keep=False),
)
