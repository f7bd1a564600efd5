"""Training throughput of our GPT and BERT beside transformers' own, in the same loop and in its Trainer; one run, one table.

    python benchmarks/train_step.py [--family gpt,bert] [--layers 6] [--d-model 384] [--batch 8] [--seq 256] [--steps 12] [--out FILE.json]

All sides: the same shapes, the same batches, AdamW (fused), fp32 unless said, the same clipping, dropout 0 for GPT and 0.1 for BERT
(each its own usual). Rounds alternate between the sides, so that a busy moment hits all alike; a ratio is the median of the
rounds' ratios. The Trainer's side is measured by its own train_runtime, first steps included, and so is ours beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn

from gradus import models
from gradus.parallel.apply import apply
from gradus.recipe.schema import BertConfig, GPTConfig, Layout
from gradus.train.log import environment

VOCAB = 16_384


def ours(family: str, a) -> nn.Module:
    common = {"vocab_size": VOCAB, "n_layers": a.layers, "d_model": a.d_model, "n_heads": a.d_model // 64, "d_ff": 4 * a.d_model, "seq_len": a.seq}
    return models.build(GPTConfig(**common) if family == "gpt" else BertConfig(**common, head="masked_lm", pooler=False))


def theirs(family: str, a) -> nn.Module:
    if family == "gpt":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=a.seq, n_embd=a.d_model, n_layer=a.layers, n_head=a.d_model // 64,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCAB, hidden_size=a.d_model, num_hidden_layers=a.layers, num_attention_heads=a.d_model // 64,
            intermediate_size=4 * a.d_model, max_position_embeddings=a.seq,
        )
    )  # fmt: skip


def batches(family: str, a, n: int) -> list[dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = []
    for _ in range(n):
        ids = torch.randint(VOCAB, (a.batch, a.seq + 1), generator=g)
        if family == "gpt":
            made.append({"ids": ids[:, :-1], "labels": ids[:, 1:]})
        else:
            select = torch.rand(a.batch, a.seq, generator=g) < 0.15
            made.append({"ids": ids[:, :-1], "select": select, "labels": ids[:, :-1].masked_fill(~select, -100)})
    return made


def our_loss(family: str, model: nn.Module, b: dict) -> torch.Tensor:
    if family == "gpt":
        logits, targets = model(b["ids"]).flatten(0, 1), b["labels"].flatten()
    else:
        logits, targets = model(b["ids"], select=b["select"]), b["labels"][b["select"]]
    return nn.functional.cross_entropy(logits.float(), targets, reduction="sum") / len(targets)


def their_loss(family: str, model: nn.Module, b: dict) -> torch.Tensor:
    if family == "gpt":  # its own labels are shifted inside; the full row costs it one position more, so it gets the same logits and ours targets
        logits = model(input_ids=b["ids"]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), b["labels"].flatten())
    return model(input_ids=b["ids"], labels=b["labels"]).loss


class Side:
    def __init__(self, name: str, model: nn.Module, loss, bf16: bool = False):
        self.name, self.model, self.loss, self.bf16 = name, model.train(), loss, bf16
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self.speeds: list[float] = []

    def step(self, b: dict) -> None:
        with torch.autocast(b["ids"].device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss(self.model, b)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def round(self, data: list[dict]) -> None:
        start = time.perf_counter()
        for b in data:
            self.step(b)
        if data[0]["ids"].is_cuda:
            torch.cuda.synchronize()
        self.speeds.append(sum(len(b["ids"]) for b in data) / (time.perf_counter() - start))


def trainer_speed(family: str, a, data: list[dict], steps: int) -> float:
    """samples/s of transformers' Trainer over the same number of steps, from its own train_runtime."""
    rows = [{"input_ids": r, "labels": l} for b in data for r, l in zip(b["ids"], b["labels"])]

    def collate(samples):  # GPT2LMHeadModel shifts by itself, so it takes the ids as labels
        ids = torch.stack([s["input_ids"] for s in samples])
        return {"input_ids": ids, "labels": ids if family == "gpt" else torch.stack([s["labels"] for s in samples])}

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=a.batch, max_steps=steps, learning_rate=1e-4, report_to="none",
            logging_strategy="no", save_strategy="no", disable_tqdm=True, use_cpu=a.device == "cpu", optim="adamw_torch_fused",
        )  # fmt: skip
        result = transformers.Trainer(theirs(family, a), arguments, train_dataset=rows, data_collator=collate).train()
    return steps * a.batch / result.metrics["train_runtime"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--family", default="gpt,bert")
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--d-model", type=int, default=384)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--steps", type=int, default=6, help="steps a round")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--device", default="cpu")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--out")
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    out = []
    for family in a.family.split(","):
        torch.manual_seed(0)
        data = [{k: v.to(a.device) for k, v in b.items()} for b in batches(family, a, a.steps)]
        sides = [
            Side("transformers fp32", theirs(family, a).to(a.device), lambda m, b, f=family: their_loss(f, m, b)),
            Side("gradus fp32", ours(family, a).to(a.device), lambda m, b, f=family: our_loss(f, m, b)),
            Side("transformers bf16", theirs(family, a).to(a.device), lambda m, b, f=family: their_loss(f, m, b), bf16=True),
            Side("gradus bf16", ours(family, a).to(a.device), lambda m, b, f=family: our_loss(f, m, b), bf16=True),
        ]
        naive = apply(ours(family, a).to(a.device), Layout(precision="bf16", attention="naive")).bare  # on CPUs, fused attention is slow in bf16
        sides.append(Side("gradus bf16 naive", naive, lambda m, b, f=family: our_loss(f, m, b), bf16=True))
        if not a.no_compile:
            compiled = apply(ours(family, a).to(a.device), Layout(precision="bf16", attention="naive", compile="default")).bare
            sides.append(Side("gradus bf16 naive compiled", compiled, lambda m, b, f=family: our_loss(f, m, b), bf16=True))
        for side in sides:  # warm-up: two steps, compilation included
            for b in data[:2]:
                side.step(b)
        for _ in range(a.rounds):
            for side in sides:
                side.round(data)
        base = sides[0].speeds
        print(
            f"\n{family}: {a.layers} layers, d_model {a.d_model}, batch {a.batch} × {a.seq}, vocabulary {VOCAB:,}, {torch.get_num_threads()} threads, {a.device}"
        )
        for side in sides:
            ratios = [s / b for s, b in zip(side.speeds, base)]
            row = {
                "family": family, "side": side.name, "samples_per_s": statistics.median(side.speeds), "spread": max(side.speeds) - min(side.speeds),
                "ratio": statistics.median(ratios), "ratio_low": min(ratios), "ratio_high": max(ratios),
            }  # fmt: skip
            out.append(row)
            print(
                f"  {side.name:24} {row['samples_per_s']:8.2f} samples/s   ratio {row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})",
                flush=True,
            )
        speeds = [trainer_speed(family, a, data, a.steps * 2) for _ in range(3)]
        ratio = statistics.median(sides[1].speeds) / statistics.median(speeds)
        out.append({"family": family, "side": "transformers Trainer fp32", "samples_per_s": statistics.median(speeds), "gradus_over_it": ratio})
        print(f"  {'transformers Trainer':24} {statistics.median(speeds):8.2f} samples/s   gradus fp32 over it {ratio:.3f}", flush=True)
    if a.out:
        conditions = {
            **{k: v for k, v in vars(a).items() if k != "out"}, "vocabulary": VOCAB, "torch": torch.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads(), "environment": environment(torch.device(a.device)), "optimizer": "AdamW fused, clip 1.0",
        }  # fmt: skip
        Path(a.out).write_text(json.dumps({"conditions": conditions, "rows": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
