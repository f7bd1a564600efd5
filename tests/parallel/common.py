"""Six tiny models, ragged batches for them, and the steps of one process: what every layout is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradus import models
from gradus.layers import Targets, summed_cross_entropy
from gradus.models.values import Deferred
from gradus.models.weights import Stored
from gradus.recipe.schema import (
    Adapter,
    BertConfig,
    GemmaConfig,
    GPTConfig,
    LlamaConfig,
    Seq2SeqConfig,
    T5Config,
    ViTConfig,
)

VOCAB, PAD, IGNORE = 48, 0, -100
SIZES = {"n_layers": 4, "d_model": 32, "n_heads": 4, "dropout": 0.0}
CONFIGS = {
    "seq2seq": Seq2SeqConfig(**SIZES, vocab_size=VOCAB, d_ff=64, seq_len=16),
    "bert": BertConfig(**SIZES, vocab_size=VOCAB, d_ff=64, seq_len=16, head="masked_lm"),
    "gpt": GPTConfig(**SIZES, vocab_size=VOCAB, seq_len=16),
    "t5": T5Config(**SIZES, vocab_size=VOCAB, d_head=8, d_ff=64, n_buckets=8, max_distance=16),
    "llama": LlamaConfig(**SIZES, vocab_size=VOCAB, n_kv_heads=2, multiple_of=16, seq_len=16),
    "vit": ViTConfig(**SIZES, d_ff=64, image_size=8, patch_size=2, n_classes=5),
}
MORE = {"gemma": GemmaConfig(**SIZES, vocab_size=VOCAB, n_kv_heads=2, d_head=12, d_ff=48, seq_len=16, window=5, full_every=3)}  # not with every layout
DECODERS = ("gpt", "llama", "gemma")


def deferred(family: str, adapter: Adapter | None = None, freeze: tuple[str, ...] = (), **changes) -> Deferred:
    """The same weights on every process, before they have memory. (ViT's classifier starts at 0; here it is drawn, so that gradients reach the
    blocks.)"""
    start = models.deferred((CONFIGS | MORE)[family].model_copy(update=changes).trained(adapter, freeze), seed=1)
    if family == "vit":
        head = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) * 0.02
        start.values["head.weight"] = Stored((5, 32), lambda: head)
    return start


def build(family: str, **changes) -> nn.Module:
    return deferred(family, **changes).on("cpu")


def batch(family: str, step: int, rows: int = 8) -> dict:
    """One global batch as the family's task makes it: the same on every process; lengths are ragged (images are not)."""
    g = torch.Generator().manual_seed(100 + step)
    if family == "vit":
        images = torch.randn(rows, 3, 8, 8, generator=g)
        return {"images": images, "labels": torch.randint(5, (rows,), generator=g), "counts": {"samples": rows}, "n_tokens": rows * 16}
    lengths = torch.randint(5, 17, (rows,), generator=g)
    keep = torch.arange(16)[None] < lengths[:, None]  # (rows, 16)
    ids = torch.randint(1, VOCAB, (rows, 16), generator=g).masked_fill(~keep, PAD)
    n = int(lengths.sum())
    if family in DECODERS:
        labels = torch.randint(1, VOCAB, (rows, 16), generator=g).masked_fill(~keep, IGNORE)
        return {"ids": ids, "labels": labels, "counts": {"tokens": n}, "n_tokens": n}
    if family == "bert":
        select = (torch.rand(rows, 16, generator=g) < 0.3) & keep
        select[:, 0] = True
        targets = torch.randint(1, VOCAB, (int(select.sum()),), generator=g)
        return {"ids": ids, "keep": keep, "select": select, "targets": targets, "counts": {"tokens": len(targets)}, "n_tokens": n}
    target = torch.randint(1, VOCAB, (rows, 12), generator=g)
    labels = torch.randint(1, VOCAB, (rows, 12), generator=g).masked_fill(torch.arange(12)[None] >= (lengths - 4)[:, None], IGNORE)
    return {"source": ids, "keep": keep, "target": target, "labels": labels, "counts": {"tokens": int((labels != IGNORE).sum())}, "n_tokens": n}


def losses(family: str, model: nn.Module, b: dict, label_smoothing: float = 0.0) -> dict[str, Tensor]:
    """Kind of target → summed loss, called as the tasks call the models."""
    if family == "vit":
        return {"samples": summed_cross_entropy(model(b["images"]), b["labels"])}
    if family in DECODERS:
        arguments, more = (b["ids"],), {"segments": b.get("segments"), "positions": b.get("positions")}
    elif family == "bert":
        arguments, more = (b["ids"],), {"token_types": None, "keep": b.get("keep"), "select": b["select"]}
    else:
        arguments, more = (b["source"], b["target"]), {"source_keep": b.get("keep")}
    targets = Targets(b["targets" if family == "bert" else "labels"], label_smoothing)
    with targets.given():
        output = model(*arguments, **more)
    return {"tokens": targets.loss(output)}


def rows_of(family: str, b: dict, lo: int, hi: int) -> dict:
    """Samples lo to hi of a batch, with their own counts."""
    part = {k: v[lo:hi] for k, v in b.items() if isinstance(v, Tensor) and k != "targets"}
    if family == "bert":
        before = int(b["select"][:lo].sum())
        part["targets"] = b["targets"][before : before + int(part["select"].sum())]
        n = len(part["targets"])
    else:
        n = hi - lo if family == "vit" else int((part["labels"] != IGNORE).sum())
    return part | {"counts": {next(iter(b["counts"])): n}, "n_tokens": n}


def reference(
    family: str, steps: int = 20, lr: float = 1e-3, clip: float = 1.0, losses: Callable = losses, batch: Callable = batch, **changes
) -> list[tuple[float, float]]:  # fmt: skip
    """(loss, gradient norm before clipping) of each step, by one process with plain PyTorch. losses, batch: in place of those here; changes: to the model."""
    model = build(family, **changes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    curve = []
    for step in range(steps):
        b = batch(family, step)
        loss = sum(value / b["counts"][kind] for kind, value in losses(family, model, b).items())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return curve
