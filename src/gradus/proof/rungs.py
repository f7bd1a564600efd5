"""The rungs of `gradus ladder`: which keys each would set, given the best so far, or why there is nothing to set."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradus import limits
from gradus.errors import UserError
from gradus.parallel import check
from gradus.parallel.apply import use_compile
from gradus.proof.room import Room, changed, largest_micro_batch
from gradus.recipe.schema import Recipe

HOPELESS = 2.0  # times the seconds of a matrix product, from which a precision is not tried
IDLE = 0.02  # share of a step that waits for data, below which a loader cannot help
ONE_LENGTH = "all samples have one length"
Keys = dict[str, Any]  # e.g. layout.attention → sdpa


@dataclasses.dataclass
class Place:
    """Where a ladder stands. given: the recipe as the user has it. data_wait: share of a step; None: not yet measured."""

    goal: str
    device: torch.device
    given: Recipe
    room: Room
    share: int  # samples a step
    data_wait: float | None = None


@dataclasses.dataclass(frozen=True)
class Rung:
    """options: of (the best so far, the place) the keys to try, and why some are not tried. changes: what else is learnt from, so that
    losses are not compared. ours: False: a change of the recipe that is shown and left to the user."""

    name: str
    options: Callable[[Recipe, Place], tuple[list[Keys], list[str]]]
    changes: str | None = None
    ours: bool = True

    def tries(self, best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
        """What is measured, and why the rest is not."""
        try:
            options, reasons = self.options(best, place)
        except UserError as e:
            return [], [str(e)]
        found = []
        for keys in options:
            try:
                if all(value_of(best, key) == value for key, value in keys.items()):
                    raise UserError("already set")
                check.validate(with_keys(best, keys), 1)
                found.append(keys)
            except UserError as e:
                reasons.append(f"{words(keys)}: {e}".replace("\n", "; "))
        return found, reasons


def value_of(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def with_keys(recipe: Recipe, keys: Keys) -> Recipe:
    sections: dict[str, Keys] = {}
    for key, value in keys.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return changed(recipe, **sections)


def words(keys: Keys) -> str:
    """As they are typed."""
    plain = {None: "null", True: "true", False: "false"}
    return " ".join(f"{key}={plain[value] if value is None or isinstance(value, bool) else value}" for key, value in keys.items())


def pads(recipe: Recipe) -> bool:
    """Whether padding can be chosen: a batch in tokens would hold other samples."""
    return hasattr(recipe.data, "pad") and recipe.batch.samples is not None


def first(recipe: Recipe) -> Keys:
    """Where the ladder stands: nothing is made faster or smaller."""
    found: Keys = {
        "layout.attention": "naive", "layout.precision": "fp32", "layout.tf32": False, "layout.checkpointing": "none",
        "layout.compile": "none", "layout.micro_batch": None, "data.workers": 0,
    }  # fmt: skip
    return found | ({"data.pad": "max_length"} if pads(recipe) else {})


# ------------------------------------------------------------ each rung's options


def _attention(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    return [{"layout.attention": "sdpa"}, {"layout.attention": "chunked"}], []


def _precision(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    if place.device.type != "cuda":
        ratio, reasons = slower_in_bf16(), ["layout.precision=fp16: for GPUs"]
        if ratio <= HOPELESS:
            return [{"layout.precision": "bf16"}], reasons
        return [], [f"layout.precision=bf16: a matrix product takes {ratio:.0f} times as long as in fp32 here", *reasons]
    half = ["bf16"] if torch.cuda.is_bf16_supported(including_emulation=False) else []
    reasons = [] if half else ["layout.precision=bf16: this GPU has none"]
    return [{"layout.tf32": True}, *({"layout.precision": name} for name in (*half, "fp16"))], reasons


def slower_in_bf16() -> float:
    """A CPU's time for a matrix product in bf16, against fp32; without bf16 units it may be fifty times as long."""
    taken = []
    for dtype in (torch.bfloat16, torch.float32):
        a, times = torch.ones(256, 256, dtype=dtype), []
        for _ in range(4):
            began = time.process_time()  # not what others compute
            a @ a
            times.append(time.process_time() - began)
        taken.append(min(times))
    return taken[0] / max(taken[1], 1e-6)


def _fused(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    return [], ["the first rung has it too: PyTorch's fused kernel steps the weights, and no key turns it off"]


def _loader(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    if place.data_wait is not None and place.data_wait < IDLE:
        return [], [f"data.workers: a step waits {place.data_wait:.1%} of its time for data"]
    found = [{"data.workers": n} for n in (1, 2, 4) if n < limits.processors()]
    return found, [] if found else ["data.workers: one processor"]


def _padding(mode: str) -> Callable[[Recipe, Place], tuple[list[Keys], list[str]]]:
    def options(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
        if pads(best):
            return [{"data.pad": mode}], []
        return [], ["batch.tokens counts padding: other padding would change the batches" if hasattr(best.data, "pad") else ONE_LENGTH]

    return options


def _checkpointing(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    """Where the whole share did not fit, for speed each with the micro-batch that then fits."""
    found: list[Keys] = [{"layout.checkpointing": mode} for mode in ("attention", "selective", "full")]
    if place.goal == "speed" and (best.layout.micro_batch or place.share) < place.share:
        found = [keys | {"layout.micro_batch": k} for keys in found if (k := _largest(with_keys(best, keys), place))]
    return found, []


def _largest(recipe: Recipe, place: Place) -> int | None:
    return largest_micro_batch(changed(recipe, layout={"micro_batch": None}), place.room, place.share)


def _micro_batch(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    """Larger where the whole share did not fit; smaller ones take less, and pad less where lengths vary."""
    now, sizes, reasons = best.layout.micro_batch or place.share, [], []
    if now < place.share:
        largest = _largest(best, place)
        sizes += [largest] if largest and largest > now else []
    else:
        reasons.append(f"a larger one: already the whole share of {place.share}")
    smaller = 3 if place.goal == "memory" else 0 if place.device.type == "cuda" else 2
    return [{"layout.micro_batch": n} for n in (*sizes, *(now >> k for k in range(1, smaller + 1))) if n], reasons


def _compile(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    use_compile(torch.nn.Module(), "default", place.device)  # raises UserError without a compiler
    modes = ("default", "reduce-overhead", "max-autotune") if place.device.type == "cuda" else ("default",)
    return [{"layout.compile": mode} for mode in modes], []


def _shorter(best: Recipe, place: Place) -> tuple[list[Keys], list[str]]:
    if best.data.kind not in ("labelled", "pairs"):
        return [], ["the samples would change" if best.data.kind == "text" else ONE_LENGTH]
    return [{"data.max_len": (best.data.max_len or best.model.seq_len) // 2}], []


RUNGS = (
    Rung("attention kernel", _attention),
    Rung("precision", _precision),
    Rung("fused optimizer", _fused),
    Rung("loader", _loader),
    Rung("padding to the longest", _padding("longest")),
    Rung("length buckets", _padding("bucket"), changes="the same samples in other batches"),
    Rung("checkpointing", _checkpointing),
    Rung("micro-batch", _micro_batch),
    Rung("compile", _compile),
    Rung("shorter sequences", _shorter, changes="longer texts are cut", ours=False),
)


def each(rungs: tuple[Rung, ...]) -> Iterator[tuple[str, Rung]]:
    """With the name of its folder."""
    return ((f"{n:02}-{rung.name.replace(' ', '-')}", rung) for n, rung in enumerate(rungs, 1))
