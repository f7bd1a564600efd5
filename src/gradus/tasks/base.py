"""What a task is: data → batches → losses and metrics."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from gradus.data.loader import Plan
from gradus.data.tokenizers import Tokenizer
from gradus.errors import UserError
from gradus.layers import Targets
from gradus.recipe.schema import ModelConfig, Recipe
from gradus.tasks.made import Sample, Unopened

Batch = dict[str, Any]  # tensors, and the ints `counts` (kind of target -> how many) and `n_tokens`


class Task(abc.ABC):
    """Turns a recipe's data into batches, and batches into sums of losses and metrics.

    A loss is a *sum* over targets; the trainer divides by the global count that `collate` put into `batch["counts"]`.
    """

    best = "loss"  # the metric whose best checkpoint is kept
    loss_unit = "nats/token"
    decodes = False  # whether `evaluate` generates token by token, for which a process needs the whole model
    opened = 0  # bytes that its data take in this process, where a plan has opened them
    counts_tokens = True  # speed is reported in tokens (else in samples)
    token_names = ("tokens",)  # how rows of a run name the tokens that it has read
    accuracy = "accuracy"  # the metric of predictions that are right
    varies = False  # whether batches of samples of one length differ in shape
    units = {"loss": "nats/token", "perplexity": "", "accuracy": ""}  # of every metric this task has

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        self.recipe = recipe
        self.splits: dict[str, Any] = {}  # train, valid, perhaps test
        # place below a checkpoint -> tokenizer ("" the first, "target" the second)
        self.tokenizers: dict[str, Any] = {}

    @classmethod
    def without_data(cls, recipe: Recipe, length: int | None = None, tokenizers: dict | None = None) -> Self:
        """The task over samples that are made (`Unopened`). length: tokens of a sequence as the model reads it (None:
        as the recipe says). Raises UserError for one that the model cannot take."""
        recipe = cls.of_length(recipe, length) if length else recipe
        n, longest = getattr(recipe.data, "max_len", None) or getattr(recipe.task, "length", 0), recipe.model.longest
        if longest and n > longest:
            why = f"longer than model.seq_len={longest}: shorten it, or raise model.seq_len"
            raise UserError(f"a sequence of {n} tokens is {why}")
        return cls(recipe, Unopened(recipe, tokenizers))

    @staticmethod
    def of_length(recipe: Recipe, n: int) -> Recipe:
        """The recipe for sequences of n tokens."""
        return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_len": n})})

    @property
    def tokenizer(self) -> Tokenizer:
        return self.tokenizers[""]

    @staticmethod
    def higher_is_better(metric: str) -> bool:
        return metric.endswith("accuracy") or metric in ("macro_f1", "exact_match", "bleu")

    def complete(self, model: ModelConfig) -> ModelConfig:
        """The model's configuration completed with what only the data knows (vocabulary, classes). Raises UserError
        where they clash."""
        model = fit_head(model, self.recipe)
        return fit_vocabulary(model, self.tokenizer.vocab_size) if self.tokenizers else model

    def resolved(self, recipe: Recipe) -> Recipe:
        """The recipe completed with what only the data knows, so that a run folder can be used without the data."""
        return recipe

    def plan(self, split: str, samples: int | None, tokens: int | None) -> Plan:
        """The order of a split: shuffled (and bucketed) for training, every sample once and in order otherwise."""
        data, training = self.splits[split], split == "train"
        lengths = getattr(data, "lengths", None)
        bucket = getattr(self.recipe.data, "pad", None) == "bucket" and lengths is not None
        return Plan(
            len(data), self.recipe.train.seed, batch_samples=samples, batch_tokens=tokens,
            lengths=lengths if bucket or tokens else None, bucket=bucket, shuffle=training,
        )  # fmt: skip

    def content(self) -> dict[str, str]:
        """Split → a hash of what was read for it, wherever it lies; nothing of data that are made or packaged."""
        contents = {split: getattr(data, "content", None) for split, data in self.splits.items()}
        return {split: content for split, content in contents.items() if content}

    def notes(self, *of: str) -> Iterator[str]:
        """Notes on the data, printed before the first step: what metrics do not show. of: on these splits alone."""
        truncated = (getattr(self.splits[split], "truncation", None) for split in of or self.splits)
        for line in dict.fromkeys(filter(None, truncated)):
            yield f"{line}. To keep more, raise data.max_len or model.seq_len."

    prepare = None  # (sample, rng) -> sample, for training
    prepare_evaluation = None  # the same for evaluation, where chance must play no part or the same part every time

    @abc.abstractmethod
    def collate(self, samples: list[Sample]) -> Batch: ...

    def to_device(self, batch: Batch, device: torch.device) -> Batch:
        pin = self.recipe.data.pin and device.type == "cuda"
        return {
            k: (v.pin_memory() if pin else v).to(device, non_blocking=True) if isinstance(v, Tensor) else v
            for k, v in batch.items()
        }

    @abc.abstractmethod
    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Kind of target -> loss summed over this batch's targets, fp32 scalar."""

    @abc.abstractmethod
    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, int]]:
        """Metric -> (sum, count) over this batch."""

    def metrics(self, means: dict[str, float], split: str) -> dict[str, float]:
        """The means over a whole split, and what follows from them, such as perplexity."""
        return {**means, "perplexity": perplexity(means["loss"])} if "perplexity" in self.units else means

    def decode_split(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> dict[int, str]:
        """Sample → the text that the model generates, for one process's part of a split. The parts of `world` processes
        cover every sample once, and no text depends on `world`. Slow, so evaluate.decode=false leaves it out."""
        return {}

    def decoded_metrics(self, written: dict[int, str], split: str) -> dict[str, float]:
        """Metrics of the texts that the model generated for every sample of a split."""
        return {}

    def token_by_token(self) -> Iterable[tuple[str, bool, bool]]:
        """(text, whether it is learned, whether it stops) of the tokens of a training sample, where not all are learned
        alike."""
        return ()

    def examples(self, model: nn.Module, n: int) -> list[str]:
        """Lines that show what the model does on `n` validation samples."""
        return []

    def closing(self, model: nn.Module, metrics: Mapping[str, float]) -> list[str]:
        """Lines that `gradus train` ends with, in one process."""
        return []

    # ------------------------------------------------------------ what `gradus predict` says

    rows: ClassVar[Callable[..., Iterator[str]] | None] = None
    """(path, recipe) → the rows of a file as texts for `read`, where they are not a column."""

    read: ClassVar[Callable[..., Sample] | None] = None
    """(self, text, longest) → the sample of an input, for `answers`, where the model's head does not say how it is
    read. longest: tokens that the model reads. Raises InputError for an input that is none."""

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        """What the model says of each: label, probability and the `top` likeliest, or answer; the data's truth, and
        whether it is right; and as what the sample is shown (input), where no tokenizer tells. model: as a module with
        its `device`; what decodes asks `model.on(Encoded(...))` first. Not overridden: a task without right answers.
        """
        yield from ({} for _ in samples)

    @staticmethod
    def written(tokenizer: Tokenizer, ids: list[int]) -> str:
        """An answer that the model wrote, as text."""
        return tokenizer.decode(ids)


class TokenTask(Task):
    """Predicts the tokens in `labels` (batch, seq), each place with IGNORE aside."""

    @property
    def label_smoothing(self) -> float:
        return getattr(self.recipe.task, "label_smoothing", 0.0)

    def output(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits (batch, seq, vocab), or where the head computes by chunks their loss."""
        raise NotImplementedError

    def losses(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        targets = Targets(batch["labels"], self.label_smoothing, each="weights" in batch)
        with targets.given():
            output = self.output(model, batch)
        loss = targets.loss(output)
        return {"tokens": (batch["weights"] * loss).sum() if targets.each else loss}

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[float | Tensor, int]]:
        targets = Targets(batch["labels"], count_right=True)
        with targets.given():
            output = self.output(model, batch)
        return targets.sums(output, batch["counts"]["tokens"])


def shares(lengths: Sequence[int] | np.ndarray, rank: int, world: int) -> Iterator[list[int]]:
    """The samples that one of `world` processes answers, in batches of similar length. The lengths alone determine the
    batches; the processes take turns with them."""
    order, size = np.argsort(lengths, kind="stable"), min(64, max(8, -(-len(lengths) // 8)))
    for start in range(rank * size, len(order), world * size):
        yield order[start : start + size].tolist()


def around(tokenizer: Tokenizer, what: str, **more: int | None) -> tuple[list[int], list[int]]:
    """The tokens before and after a text: the tokenizer's own, else [CLS] and [SEP], or begin and end. Raises UserError
    where it has more than two, or lacks these, a padding token, or one of `more` (name → id), which `what` needs."""
    t = tokenizer
    first = t.cls_id if t.cls_id is not None else t.bos_id
    last = t.sep_id if t.sep_id is not None else t.eos_id
    needed = {**more, "padding": t.pad_id}
    if not t.with_special_tokens([]):
        needed |= {"class or begin": first, "separator or end": last}
    for name, token in needed.items():
        if token is None:
            raise UserError(f"tokenizer: no {name} token, which {what} needs. Use BERT's, or tokenizer.kind=bpe.")
    t.around(first, last)
    if (n := len(t.with_special_tokens([]))) > 2:
        raise UserError(f"tokenizer: it adds {n} special tokens to a text, and {what} allows two. Use another.")
    return t.before, t.after


def fit_head(model: ModelConfig, recipe: Recipe) -> ModelConfig:
    """The model with the head that the recipe's task trains, where it has none yet."""
    head = recipe.task.head
    if head is None or getattr(model, "head", None) != "none":
        return model
    return model.model_copy(update={"head": head, "pooler": head != "masked_lm"})


def fit_vocabulary(model: ModelConfig, n: int, key: str = "vocab_size") -> ModelConfig:
    """The model with a vocabulary of n where it has none. Raises UserError where it has a smaller one."""
    size = getattr(model, key)
    if size is not None and size < n:
        raise UserError(f"model.{key}={size}: the data has {n} tokens. Leave it out, or set {n} or more.")
    return model.model_copy(update={key: n}) if size is None else model


def likeliest(
    probabilities: Tensor, name: Callable[[int], str], top: int
) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Of each row of probabilities (batch, n): the `top` numbers that are likeliest, and their names with these."""
    values, ids = probabilities.topk(min(top, probabilities.shape[-1]))
    for row, chosen in zip(values.tolist(), ids.tolist()):
        yield chosen, [{"label": name(i), "probability": p} for i, p in zip(chosen, row)]


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
