"""BERT (Devlin et al. 2019): a bidirectional encoder, pre-trained by filling in masked words and by telling whether the
second sentence follows the first. RoBERTa (Liu et al. 2019) numbers its positions from behind its padding's number;
DistilBERT (Sanh et al. 2019) has no token types. Both fill in masked words alone, and their classifiers have a dense
layer of their own in place of the pooler. So does ModernBERT (Warner et al. 2024), which is pre-norm, with rotary
positions, gated feed-forward networks, no biases, and layers that see a window alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from gradus.errors import UserError
from gradus.layers import (
    ACTIVATIONS,
    Attention,
    Block,
    FeedForward,
    GatedFeedForward,
    check_length,
    rotary_table,
)
from gradus.layers.init import Draw, norms_and_biases, truncated_normal
from gradus.models.family import Family, Stack
from gradus.models.weights import bert as weights
from gradus.recipe.schema import BertConfig


def norm(config: BertConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=not config.alternation)


def dense(config: BertConfig) -> nn.Linear:
    """Of the heads, before their projection."""
    return nn.Linear(config.d_model, config.d_model, bias=not config.alternation)


class BertBlock(Block):
    """Attention, then feed-forward, each followed by dropout, residual and norm: post-norm (Vaswani et al. 2017,
    section 5.4)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = Attention(config.d_model, config.n_heads, dropout=config.dropout)
        self.attention_norm = norm(config)
        self.feedforward = FeedForward(config.d_model, config.d_ff, config.activation)
        self.feedforward_norm = norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.attention_dropout = nn.Dropout(0.0 if config.variant == "distilbert" else config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.attention_dropout(self.attention(x, mask=mask)))  # (batch, seq, d_model)
        return self.feedforward_norm(x + self.dropout(self.feedforward(x)))


def is_local(config: BertConfig, i: int) -> bool:
    """Whether block i sees a window alone."""
    return bool(config.alternation and i % config.alternation.global_every)


class ModernBertBlock(Block):
    """Norm, attention, residual; norm, gated feed-forward, residual. The first attention needs no norm: the embeddings
    have one."""

    def __init__(self, config: BertConfig, number: int):
        super().__init__()
        self.attention_norm = norm(config) if number else nn.Identity()
        window = config.alternation.window + 1 if is_local(config, number) else None
        self.attention = Attention(config.d_model, config.n_heads, bias=False, dropout=config.dropout, window=window)
        self.feedforward_norm = norm(config)
        self.feedforward = GatedFeedForward(config.d_model, config.d_ff, config.activation, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask, rotary=rotary))  # (batch, seq, d_model)
        return x + self.feedforward(self.feedforward_norm(x))


class MaskedLMHead(nn.Module):
    """Hidden states to scores of words: dense, activation, norm, then the word embeddings themselves and a bias
    (Devlin et al. 2019, section 3.1 and its published code). (..., d_model) -> (..., vocab)."""

    def __init__(self, config: BertConfig, word_embedding: nn.Embedding):
        super().__init__()
        self.dense = dense(config)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = norm(config)
        self.decoder = nn.Linear(config.d_model, config.vocab_size)
        self.decoder.weight = word_embedding.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decoder(self.norm(self.activation(self.dense(hidden))))


class ClassificationHead(nn.Module):
    """A pooled state to scores of classes: dense, activation, dropout, projection. The activation is RoBERTa's tanh,
    behind a further dropout, DistilBERT's ReLU, ModernBERT's with a norm behind it (their published code).
    (batch, d_model) -> (batch, n_classes)."""

    def __init__(self, config: BertConfig):
        super().__init__()
        gelu = ACTIVATIONS[config.activation]
        self.activation = {"roberta": torch.tanh, "distilbert": torch.relu, "modernbert": gelu}[config.variant]
        self.before = nn.Dropout(config.head_dropout if config.variant == "roberta" else 0.0)
        self.dense = dense(config)
        self.norm = norm(config) if config.alternation else nn.Identity()
        self.dropout = nn.Dropout(config.head_dropout)
        self.out = nn.Linear(config.d_model, config.n_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.dropout(self.norm(self.activation(self.dense(self.before(x))))))


class Bert(nn.Module):
    """The encoder with the head that `config.head` names.

    `masked_lm` reads no pooler and has none, whatever `config.pooler` says; `pretraining` and `classification` need it
    (but for the variants' classifiers, which have a dense layer in its place).
    Raises UserError when the head's needs (n_classes, pooler) are not met, and for `pretraining` of another variant.
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        pools, classifies = config.head in ("pretraining", "classification"), config.head == "classification"
        if (pools and not config.pooler) or (classifies and config.n_classes is None):
            raise UserError(
                f"model.head={config.head}: needs model.pooler=true{' and model.n_classes' if classifies else ''}."
            )
        if config.head == "pretraining" and config.variant != "bert":
            raise UserError(
                f"model.variant={config.variant}: it has no next-sentence head. Set task.next_sentence=false "
                "(model.head=masked_lm)."
            )
        self.config = config
        self.word_embedding = nn.Embedding(config.vocab_size, config.d_model)
        if config.n_token_types:
            self.type_embedding = nn.Embedding(config.n_token_types, config.d_model)
        self.embedding_norm = norm(config)
        self.dropout = nn.Dropout(config.dropout)
        if config.alternation:
            self.blocks = nn.ModuleList(ModernBertBlock(config, i) for i in range(config.n_layers))
            self.final_norm = norm(config)
        else:
            self.position_embedding = nn.Embedding(config.first_position + config.seq_len, config.d_model)
            self.blocks = nn.ModuleList(BertBlock(config) for _ in range(config.n_layers))
        if config.has_pooler:
            self.pooler = nn.Linear(config.d_model, config.d_model)
        if config.head in ("masked_lm", "pretraining"):
            self.masked_lm = MaskedLMHead(config, self.word_embedding)
        if config.head == "pretraining":
            self.next_sentence = nn.Linear(config.d_model, 2)
        if classifies and config.has_pooler:
            self.classifier_dropout = nn.Dropout(config.head_dropout)
            self.classifier = nn.Linear(config.d_model, config.n_classes)
        elif classifies:
            self.classifier = ClassificationHead(config)

    def initialisation(self) -> Iterator[tuple[nn.Parameter, Draw]]:
        """Matrices and embeddings from a normal of 0.02 cut off at two standard deviations, biases 0 (BERT's published
        code)."""
        yield from norms_and_biases(self)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                yield module.weight, truncated_normal(0.02)

    def hidden(self, ids: Tensor, *, token_types: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """The last hidden states: (batch, seq, d_model).

        ids, token_types: (batch, seq); no token_types means type 0 everywhere. keep: boolean (batch, seq), True where a
        token is real; None means all are, which takes the unmasked path.
        Raises UserError when the sequence is longer than the model's positions.
        """
        c = self.config
        check_length(ids.shape[1], c.seq_len)
        if token_types is None:
            token_types = ids.new_zeros(1, 1)  # broadcast, so that its gradient is one sum
        places = torch.arange(c.first_position, c.first_position + ids.shape[1], device=ids.device)[None]  # (1, seq)
        x = self.word_embedding(ids)
        if c.n_token_types:
            x = x + self.type_embedding(token_types)
        x = self.embedding_norm(x if c.alternation else x + self.position_embedding(places))
        x = self.dropout(x)  # (batch, seq, d_model)
        # (batch, 1, 1, seq): the same keys for every head and query
        mask = None if keep is None else keep[:, None, None, :]
        everywhere, local = {}, {}
        if how := c.alternation:
            everywhere["rotary"] = rotary_table(places[:, None], c.head_dim, how.theta)
            local["rotary"] = rotary_table(places[:, None], c.head_dim, how.local_theta)
        for i, block in enumerate(self.blocks):
            x = block(x, mask=mask, **(local if is_local(c, i) else everywhere))
        return self.final_norm(x) if c.alternation else x

    def pooled(self, hidden: Tensor) -> Tensor:
        """The first token's state through a dense layer and tanh: (batch, seq, d_model) -> (batch, d_model)."""
        return torch.tanh(self.pooler(hidden[:, 0]))

    def forward(self, ids: Tensor, *, token_types: Tensor | None = None, keep: Tensor | None = None,
                select: Tensor | None = None):  # fmt: skip
        """By `config.head`: none: last hidden states (batch, seq, d_model); masked_lm: scores (batch, seq, vocab);
        pretraining: (those scores, next-sentence scores (batch, 2)); classification: scores (batch, n_classes).

        select: boolean (batch, seq); the masked-LM head then runs on the selected places only: (n_selected, vocab).
        Other arguments and errors as in `hidden`. Raises UserError for `select` without a masked-LM head.
        """
        head = self.config.head
        if select is not None and head not in ("masked_lm", "pretraining"):
            raise UserError(f"select chooses positions for the masked-LM head, and head={head} has none")
        x = self.hidden(ids, token_types=token_types, keep=keep)
        if head == "none":
            return x
        if head == "classification":
            if self.config.has_pooler:
                return self.classifier(self.classifier_dropout(self.pooled(x)))
            if self.config.pool == "cls":
                return self.classifier(x[:, 0])
            keep = torch.ones_like(ids) if keep is None else keep  # (batch, seq)
            return self.classifier((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))
        scores = self.masked_lm(x if select is None else x[select])  # (..., vocab)
        if head == "masked_lm":
            return scores
        return scores, self.next_sentence(self.pooled(x))


FAMILY = Family(
    config=BertConfig, model=Bert, weights=weights, attention="both",
    stacks=(Stack("blocks", before=("word_embedding", "position_embedding", "type_embedding", "embedding_norm"),
                  heads=("final_norm", "pooler", "masked_lm", "next_sentence", "classifier"), kind=is_local),),
    tokens=("word_embedding",), head="masked_lm.decoder",
)  # fmt: skip
