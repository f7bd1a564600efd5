"""Answer in a conversation (GPT, Llama, Gemma): next-token prediction of what the assistant says alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus.data.chats import messages_of, rows_of
from gradus.data.collate import IGNORE
from gradus.data.tokenizers import TEMPLATE
from gradus.errors import InputError, UserError
from gradus.models.decoding import Encoded, complete
from gradus.recipe.schema import ChatTask, Recipe
from gradus.tasks import GENERATION
from gradus.tasks.base import Batch, TokenTask, shares
from gradus.tasks.causal_lm import CausalLM
from gradus.tasks.kinds import TaskKind
from gradus.tasks.made import Sample
from gradus.tasks.sources import open_chats
from gradus.text import short


class Chat(CausalLM):
    """The loss is of the assistant's tokens and of what ends its turns; all others are only read."""

    units = {"loss": "nats/token", "perplexity": "", "mean_token_accuracy": "", "exact_match": ""}
    accuracy = "mean_token_accuracy"
    token_names = ("tokens", "num_tokens")

    def __init__(self, recipe: Recipe, tokenizers: dict | None = None):
        TokenTask.__init__(self, recipe)
        self.seq_len = recipe.data.max_len or recipe.model.seq_len
        if not recipe.evaluate.decode:
            self.units = {name: unit for name, unit in self.units.items() if name != "exact_match"}
        self.tokenizers, self.splits, self.template = open_chats(recipe, tokenizers, self.seq_len + 1)
        self.ends = json.loads(self.tokenizer.beside.get(GENERATION, "{}")).get("eos_token_id")

    def resolved(self, recipe: Recipe) -> Recipe:
        before, digest = recipe.task.digest, self.template.digest
        if before not in (None, digest):
            what = f"the chat template is another ({digest[:12]}) than training had ({before[:12]})"
            raise UserError(f"task.digest: {what}. Put {TEMPLATE} back, or leave task.digest out.")
        return recipe.model_copy(update={"task": recipe.task.model_copy(update={"digest": digest})})

    def notes(self, *of: str) -> Iterator[str]:
        notes = (note for split in of or self.splits for note in self.splits[split].notes)
        yield from (f"{note}." for note in dict.fromkeys(notes))  # once, where a part of a file is held out

    def targets(self, sample: Sample) -> np.ndarray:
        return np.where(sample["learn"][1:], super().targets(sample), IGNORE)

    def collate(self, samples: list[Sample]) -> Batch:
        batch = super().collate(samples)
        if "weight" in samples[0]:
            rows = [torch.tensor(s["weight"], dtype=torch.float32).expand(len(s["ids"]))[1:] for s in samples]
            batch["weights"] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return batch

    def metrics(self, means: dict[str, float], split: str) -> dict[str, float]:
        means = {self.accuracy if name == "accuracy" else name: mean for name, mean in means.items()}
        return TokenTask.metrics(self, means, split)

    # ------------------------------------------------------------ answers

    def question(self, sample: Sample) -> tuple[list[int], list[int]]:
        """(what a model reads before a chat's last answer, the answer with its end), ids; of a packed row's last chat.
        """
        begin = int(np.argmax(sample.get("segments", 0)))
        ids, learn = sample["ids"][begin:].tolist(), sample["learn"][begin:]
        stop = int(np.flatnonzero(learn)[-1]) + 1
        start = int(max(np.flatnonzero(~learn[:stop]), default=-1)) + 1
        return ids[:start], ids[start:stop]

    def answered(self, model: Any, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
        """What a model writes after each, greedily: so many tokens at most, as far as it reads."""
        longest = self.recipe.model.seq_len
        room = [max(1, min(n, longest + 1 - len(prompt))) for prompt, n in zip(prompts, most)]
        return complete(model, prompts, max_new=room, eos_id=self.ends, window=longest)  # of the longest row, of all

    def decode_split(self, model: nn.Module, split: str, rank: int = 0, world: int = 1) -> dict[int, str]:
        """Answers to the last turns, as far as the right ones go: what is longer, and then cut, ends in an ellipsis."""
        data, written = self.splits[split], {}
        for part in shares(data.lengths, rank, world):
            prompts, truths = zip(*(self.question(data[i]) for i in part))
            rows = self.answered(model, prompts, list(map(len, truths)))
            for i, row, truth in zip(part, rows, truths):
                written[i] = self.said(row) + "…" * (len(row) == len(truth))
        return written

    def decoded_metrics(self, written: dict[int, str], split: str) -> dict[str, float]:
        """The share of chats whose last answer is the right one, and ended."""
        data = self.splits[split]
        right = sum(written[i] == self.said(self.question(data[i])[1]) for i in range(len(written)))
        return {"exact_match": right / max(1, len(written))}

    def said(self, ids: list[int]) -> str:
        """An answer as text."""
        return self.tokenizer.decode(ids).strip()

    def examples(self, model: nn.Module, n: int) -> list[str]:
        data = self.splits["valid"]
        prompts, truths = zip(*(self.question(data[i]) for i in range(min(n, len(data)))))
        rows = self.answered(model, prompts, [self.recipe.evaluate.max_new or len(truth) + 10 for truth in truths])
        asked = (" ".join(self.tokenizer.decode(prompt).split())[-80:] for prompt in prompts)
        return [f"{question} │ {self.said(row)}" for question, row in zip(asked, rows)]

    def answers(self, model: Any, samples: list[Sample], top: int) -> Iterator[dict[str, Any]]:
        asked = [self.question(s) if "learn" in s else (s["ids"].tolist(), s["truth"]) for s in samples]
        prompts, most = [prompt for prompt, _ in asked], self.recipe.evaluate.max_new or 200
        engine = model.on(Encoded(prompts, None, self.ends))
        for sample, (prompt, truth), row in zip(samples, asked, self.answered(engine, prompts, [most] * len(prompts))):
            answer = self.said(row)
            known = {} if truth is None else {"truth": (right := self.said(truth)), "right": answer == right}
            yield {"input": sample.get("question") or self.tokenizer.decode(prompt), "answer": answer, **known}

    @staticmethod
    def rows(path: str, recipe: Recipe) -> Iterator[str]:
        """The chats of a file, each as `read` takes one."""
        data, task = recipe.data, recipe.task
        return (json.dumps(messages) for _, messages, _ in rows_of(path, data.form, task.system))

    def read(self, text: str, longest: int) -> Sample:
        """A question, or the messages of a chat as JSON: if its last one is the assistant's, that is the right answer.
        """
        try:
            messages = json.loads(text) if text.startswith("[{") else [{"role": "user", "content": text}]
            messages = messages_of({"messages": messages}, "messages", self.recipe.task.system)
        except (ValueError, TypeError, RecursionError) as e:
            raise InputError(f"{short(text, 40)}: no chat that can be read: {e}.") from None
        truth, asked = None, messages[:-1] if messages[-1]["role"] == "assistant" else messages
        if not asked or asked[-1]["role"] != "user":
            raise InputError(f"{text:.40}: the last turn before an answer must be the user's.")
        if asked is not messages:  # as the template writes it, which may begin it with a thought
            whole = self.template.render(messages)
            truth = self.tokenizer.encode(whole[self.template.answer_start(asked, whole) :])
        ids = np.array(self.template.ids(asked, add_generation_prompt=True))
        return {"ids": ids, "question": asked[-1]["content"], "truth": truth}

    def token_by_token(self) -> Iterator[tuple[str, bool, bool]]:
        sample = self.splits["train"][0]
        for i, learned in zip(sample["ids"].tolist(), sample["learn"].tolist()):
            text = self.tokenizer.decode([i]) or self.tokenizer.token(i)
            yield json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"'), learned, learned and i in self.ends


KIND = TaskKind(
    config=ChatTask, tasks={"chats": Chat}, drafts=("chats",),
    comment="The loss is of the assistant's turns alone; gradus check shows one chat, token by token.",
)  # fmt: skip
