"""Chats learned, on a CPU:

    python benchmarks/chats.py made [FOLDER]    5 M weights from nothing on made chats, three seeds: exact match, and how many answers stop
    python benchmarks/chats.py sst2 FOLDER      SST-2 (train.tsv, dev.tsv; also .xz) as chats, and the same sentences as classification
    python benchmarks/chats.py packed           chats in rows of their own and packed: loss, gradient, tokens a second
    ... --steps N --seeds 0 1 2                 another length (a made run that is in FOLDER goes on), other seeds; --write: rows to benchmarks/results/chats-cpu.jsonl

A made chat has a system prompt (answer in small letters, or in capitals), a question (repeat, sort or count some letters) and, in half of them,
another one about the same letters.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from gradus import api, infer, models, tasks
from gradus import recipe as recipes
from gradus.data.readers import read_rows
from gradus.measure.machine import conditions
from gradus.parallel.apply import apply
from gradus.rows import Row, as_lines
from gradus.train.session import open_session

RESULTS = Path(__file__).parent / "results" / "chats-cpu.jsonl"
DO = {"Repeat": lambda x: x, "Sort": sorted, "Count": lambda x: [str(len(x))]}
MADE = {
    "model": {"family": "llama", "n_layers": 4, "d_model": 320, "n_heads": 8, "d_ff": 960, "seq_len": 96, "tie_output": True},
    "task": {"name": "chat", "template": "chatml"}, "tokenizer": {"kind": "bpe", "vocab_size": 400},
    "optimizer": {"name": "adamw", "lr": 1.5e-3, "betas": [0.9, 0.98]}, "schedule": {"name": "cosine", "warmup_ratio": 0.1},
    "batch": {"samples": 32}, "layout": {"precision": "bf16"},
}  # fmt: skip


def made(rng: random.Random, letters: str = "abcdefgh", most: int = 5, turns: int = 2) -> list[dict[str, str]]:
    """One chat about at most so many of these letters, of at most so many turns."""
    large = rng.random() < 0.5
    few = rng.sample(letters, rng.randint(2, most))
    chat = [("system", f"Answer in {'capitals' if large else 'small letters'}.")]
    for turn in range(rng.randint(1, turns)):
        do = rng.choice([*DO])
        answer = " ".join(DO[do](few))
        chat += [("user", f"{do} them." if turn else f"{do}: {' '.join(few)}"), ("assistant", answer.upper() if large else answer)]
    return [{"role": role, "content": content} for role, content in chat]


def write(file: Path, chats: list) -> None:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))


def train(sections: dict, folder: Path) -> api.Run:
    """In the folder; what has been trained there goes on to as many steps as are asked for now."""
    if folder.exists():
        return api.train(str(folder), f"train.steps={sections['train']['steps']}", resume=True)
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(sections))
    return api.train(str(file), log={"dir": str(folder)})


def answers(run: Path) -> tuple[float, float, int]:
    """(share of held-out chats whose last answer is the right one, share of answers that stop, chats)."""
    source = infer.find(str(run))
    task = open_session(source.recipe, tasks.load_tokenizers(source.path)).task
    model, data, right, stopped = source.load(), task.splits["valid"], 0, 0
    for start in range(0, len(data), 50):
        pairs = [task.question(data[i]) for i in range(start, min(len(data), start + 50))]
        room = [source.config.seq_len - len(prompt) for prompt, _ in pairs]
        rows = task.answered(model, [prompt for prompt, _ in pairs], room)
        stopped += sum(len(row) < n for row, n in zip(rows, room))
        right += sum(task.said(row) == task.said(truth) and len(row) < n for row, (_, truth), n in zip(rows, pairs, room))
    return right / len(data), stopped / len(data), len(data)


def run_made(folder: Path, seed: int, steps: int, n_chats: int) -> list[Row]:
    rng = random.Random(seed)
    seen = [made(rng) for _ in range(n_chats)]
    known = {json.dumps(chat) for chat in seen}
    held_out = list(itertools.islice((chat for chat in iter(lambda: made(rng), None) if json.dumps(chat) not in known), min(200, n_chats)))
    write(folder / "train.jsonl", seen)
    write(folder / "valid.jsonl", held_out)
    sections = {**MADE, "data": {"kind": "chats", "path": str(folder), "cache": str(folder / "cache")}, "train": {"steps": steps, "seed": seed},
                "evaluate": {"every": max(1, steps // 5), "answers": 2}}  # fmt: skip
    began = time.process_time()
    run = train(sections, folder / "run")
    seconds = time.process_time() - began
    right, stop, n = answers(folder / "run")
    about = {"data": "made", "chats": n_chats, "seed": seed, "steps": steps, "weights": run.summary["parameters"], "held-out chats": n, **conditions()}
    print(f"seed {seed}: {right:.3f} of {n} answers right, {stop:.3f} stop; {steps:,} steps, {seconds:,.0f} processor seconds", flush=True)
    return [Row("exact_match", right, "", steps, about), Row("stops", stop, "", steps, about), Row("cpu/training", seconds, "s", steps, about)]


SST2 = {
    "model": {"family": "llama", "n_layers": 2, "d_model": 128, "n_heads": 4, "d_ff": 384, "seq_len": 96, "tie_output": True},
    "task": {"name": "chat", "template": "chatml"}, "tokenizer": {"kind": "bpe", "vocab_size": 8_000, "lowercase": True},
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.01}, "schedule": {"name": "cosine", "warmup_ratio": 0.1},
    "batch": {"samples": 64}, "layout": {"precision": "bf16"},
}  # fmt: skip
CLASSIFIED = {
    **SST2, "task": {"name": "classification"},
    "model": {"family": "bert", "n_layers": 2, "d_model": 128, "n_heads": 4, "d_ff": 512, "seq_len": 96},
}  # fmt: skip
ASK = "Is this review positive or negative?"


def run_sst2(folder: Path, seed: int, steps: int, source: Path, kinds: tuple = (("chats", SST2), ("classification", CLASSIFIED))) -> list[Row]:
    for split, name in (("train", "train"), ("valid", "dev")):
        file = next(source.glob(f"{name}.tsv*"))
        rows = [(row["sentence"].strip(), ("negative", "positive")[int(row["label"])]) for row in read_rows(file)]
        write(folder / f"{split}.jsonl", [[{"role": "user", "content": f"{ASK} {text}"}, {"role": "assistant", "content": label}] for text, label in rows])
        (folder / f"{split}_labelled.jsonl").write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    out = []
    for what, sections in kinds:
        suffix = "" if what == "chats" else "_labelled"
        data = {"kind": "chats" if what == "chats" else "labelled", "path": str(folder), "cache": str(folder / "cache"),
                "train": f"train{suffix}.jsonl", "valid": f"valid{suffix}.jsonl"}  # fmt: skip
        began = time.process_time()
        run = train({**sections, "data": data, "train": {"steps": steps, "seed": seed}, "evaluate": {"every": max(1, steps // 5)}}, folder / what)
        about = {"data": "SST-2", "as": what, "seed": seed, "steps": steps, "weights": run.summary["parameters"], **conditions()}
        name = "exact_match" if what == "chats" else "accuracy"
        best = api.evaluate(run)[f"valid/{name}"]  # of the weights with the least loss
        print(f"{what}: {name} {best:.3f}, {steps:,} steps, {time.process_time() - began:,.0f} processor seconds", flush=True)
        out.append(Row(name, best, "", steps, about))
    return out


def run_packed(folder: Path, seed: int, rounds: int) -> list[Row]:
    """One pass over 512 chats forwards and backwards, in rows of their own of like length and in packed rows of 256 tokens, in alternate rounds."""
    rng, out = random.Random(seed), []
    long = functools.partial(made, letters="abcdefghij", most=6, turns=4)
    write(folder / "train.jsonl", [long(rng) for _ in range(512)])
    write(folder / "valid.jsonl", [long(rng) for _ in range(10)])
    for attention in ("sdpa", "chunked", "naive"):
        passes, times, found = {}, {}, {}
        for pack in ("none", "documents"):
            file = folder / "packed.yaml"
            model = {**MADE["model"], "n_layers": 4, "d_model": 128, "n_heads": 4, "d_ff": 384, "seq_len": 256}
            data = {"kind": "chats", "path": str(folder), "cache": str(folder / "cache"), "pack": pack}
            file.write_text(json.dumps({**MADE, "model": model, "data": data, "train": {"steps": 1000}, "layout": {"attention": attention}}))
            task = tasks.open_task(recipes.load(file, []))
            model = models.build(task.complete(task.recipe.model), seed=0)
            apply(model, task.recipe.layout)
            rows = sorted((task.splits["train"][i] for i in range(len(task.splits["train"]))), key=lambda row: len(row["ids"]))
            size = 32 if pack == "none" else 8
            batches = [task.collate(rows[i : i + size]) for i in range(0, len(rows), size)]
            passes[pack] = functools.partial(one_pass, task, model, batches, sum(batch["counts"]["tokens"] for batch in batches))
            found[pack], times[pack] = passes[pack](), []  # warm-up
            shape = {"rows": len(rows), "tokens": sum(batch["n_tokens"] for batch in batches), "with padding": sum(b["ids"].numel() for b in batches)}
            found[pack] |= shape
        for _ in range(rounds):
            for pack, run in passes.items():
                began = time.process_time()
                run()
                times[pack].append(time.process_time() - began)
        (a, b), scale = (found[pack]["gradients"] for pack in passes), max(float(g.abs().max()) for g in found["none"]["gradients"].values())
        off = max(float((a[name] - b[name]).abs().max()) for name in a) / scale
        loss = abs(found["none"]["loss"] - found["documents"]["loss"]) / found["none"]["loss"]
        speeds = {pack: [found[pack]["tokens"] / seconds for seconds in times[pack]] for pack in passes}
        for pack, values in speeds.items():
            about = {"attention": attention, "pack": pack, "loss": found[pack]["loss"], "rounds": rounds, "least": min(values), "most": max(values),
                     "threads": torch.get_num_threads(), **{k: found[pack][k] for k in ("rows", "tokens", "with padding")}, **conditions()}  # fmt: skip
            out.append(Row("tokens_per_processor_s", statistics.median(values), "tokens/s", None, about))
        shown = ", ".join(f"{pack}: {found[pack]['rows']} rows, {found[pack]['with padding']:,} tokens with padding, {statistics.median(v):,.0f} tokens/s"
                          f" ({min(v):,.0f} to {max(v):,.0f})" for pack, v in speeds.items())  # fmt: skip
        print(f"{attention}: loss off by {loss:.1e}, gradients by {off:.1e}; {shown}", flush=True)
    return out


def one_pass(task: tasks.base.Task, model: torch.nn.Module, batches: list, n: int) -> dict:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = task.losses(model, batch)["tokens"] / n
        loss.backward()
        total += float(loss.detach())
    return {"loss": total, "gradients": {name: p.grad.clone() for name, p in model.named_parameters()}}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["made", "sst2", "packed"])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--chats", type=int, default=150_000, help="made, to train on")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(words)
    rows: list[Row] = []
    for seed in args.seeds or ([0, 1, 2] if args.what == "made" else [0]):
        with tempfile.TemporaryDirectory() as aside:
            if args.what == "made":  # FOLDER/SEED keeps data and run
                folder = args.folder / str(seed) if args.folder else Path(aside)
                folder.mkdir(parents=True, exist_ok=True)
                rows += run_made(folder, seed, args.steps or 6_000, args.chats)
            elif args.what == "sst2":
                rows += run_sst2(Path(aside), seed, args.steps or 3_000, args.folder)
            else:
                rows += run_packed(Path(aside), seed, args.steps or 5)
    if args.write:
        with RESULTS.open("a") as file:
            file.write(as_lines(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
