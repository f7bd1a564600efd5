"""A seeded table of bad inputs, over every verb, file and the page, and what came of each: one clear error, a traceback, a hang, or accepted.

Each case runs in a forked process of its own, under limits of time and memory, so that none can take the others with it.
`python tests/bad_input.py [SEED [NAME...]]` runs the whole table, or what has one of these in its name, and prints what came of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import multiprocessing.forkserver
import os
import random
import re
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

WALL, CPU, MEMORY = 400.0, 180, 6 << 30  # s, s, bytes above what the process had
LINES = 12  # of an error, at most
CHECKED = "(the report of gradus check)"

# ---------------------------------------------------------------- a case and what came of it


@dataclasses.dataclass
class Case:
    name: str
    argv: list[str] | None = None  # of gradus; or
    run: Callable[[], int] | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    stdin: bytes = b""


@dataclasses.dataclass
class Outcome:
    case: Case
    verdict: str  # clear, accepted, traceback, hang, abort, other
    text: str
    seconds: float


def judge(status: int, late: bool, text: str) -> str:
    """text: what went to standard error."""
    if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "hang"
    if os.WIFSIGNALED(status):
        return "abort"
    if "Traceback (most recent call last)" in text or "panicked at" in text:
        return "traceback"
    code = os.waitstatus_to_exitcode(status)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("note: ")]
    if code == 0:
        return "accepted"
    if code == 1 and text.startswith(CHECKED):
        return "clear"  # gradus check: what is not healthy is a line of its report
    return "clear" if code == 2 and 0 < len(lines) <= LINES and max(map(len, lines)) < 2000 else "other"


def child(case: Case, folder: Path, out: Path) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()
        multiprocessing.forkserver._forkserver.__init__()  # the server that the parent may have started is no child of this process
        os.chdir(folder)
        (out / "stdin").write_bytes(case.stdin)
        for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY | os.O_CREAT), (2, "stderr", os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open(out / name, flags), number)
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", buffering=1, errors="backslashreplace")  # noqa: SIM115
        os.environ.update({"GRADUS_HARDWARE": str(folder / "hardware.yaml"), "COLUMNS": "100", **case.env})
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc/self/statm").exists() else 0
        if held:
            resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from gradus.cli import main

        code = case.run() if case.run else main(case.argv)
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def run_all(cases: list[Case], folder: Path, at_a_time: int = 2, say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """What came of each, in the order of the cases."""
    left, running, found = list(enumerate(cases)), {}, {}
    while left or running:
        while left and len(running) < at_a_time:
            i, case = left.pop(0)
            out = Path(tempfile.mkdtemp(prefix="out-", dir=folder.parent))
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                child(case, folder, out)
            running[pid] = (i, case, out, time.monotonic())
        for pid, (i, case, out, began) in list(running.items()):
            seconds = time.monotonic() - began
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = not ended and seconds > WALL
            if late:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            if ended or late:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)  # what it may have started
                text = (out / "stderr").read_text(errors="replace") if (out / "stderr").exists() else ""
                shown = (out / "stdout").read_text(errors="replace") if (out / "stdout").exists() else ""
                checked = (case.argv or [""])[0] == "check" and re.search(r"^(FAIL|fail)|FAIL", shown, re.M)
                verdict = judge(status, late, f"{CHECKED}\n{text}" if checked else text)
                found[i] = Outcome(case, verdict, text if verdict != "accepted" else text + shown, seconds)
                say(f"{verdict:9} {seconds:5.1f} s  {case.name}")
                shutil.rmtree(out, ignore_errors=True)
                del running[pid]
        time.sleep(0.005)
    return [found[i] for i in range(len(cases))]


# ---------------------------------------------------------------- the world: recipes, data, runs

GPT = {
    "model": {"family": "gpt", "n_layers": 1, "d_model": 16, "n_heads": 2, "seq_len": 16},
    "task": {"name": "causal_lm"}, "data": {"kind": "text", "path": "text.txt"}, "tokenizer": {"kind": "char"},
    "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 2},
}  # fmt: skip
BERT = {
    "model": {"family": "bert", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "seq_len": 16, "n_classes": 2},
    "task": {"name": "classification"}, "data": {"kind": "labelled", "path": "reviews", "text": "text", "label": "label"},
    "tokenizer": {"kind": "word"}, "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 2},
}  # fmt: skip
VIT = {
    "model": {"family": "vit", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "image_size": 8, "patch_size": 4, "n_channels": 3},
    "task": {"name": "classification"}, "data": {"kind": "images", "path": "images"},
    "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 2},
}  # fmt: skip
PAIRS = {
    "model": {"family": "seq2seq", "n_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "seq_len": 16},
    "task": {"name": "translation"}, "data": {"kind": "pairs", "path": "pairs", "source": "de", "target": "en"},
    "tokenizer": {"kind": "word"}, "optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 2},
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "num_hidden_layers": 1, "hidden_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": False, "hidden_act": "silu", "head_dim": 8,
}  # fmt: skip
RECIPES = {"gpt": GPT, "bert": BERT, "vit": VIT, "pairs": PAIRS}


def build(folder: Path) -> None:
    """Small good things, of which the bad ones are made. Trains three models for two steps, each in a process of its own."""
    import numpy as np
    from PIL import Image

    from gradus.cli import main

    os.chdir(folder)
    text = "".join(f"line {i} of a text that says nothing.\n" for i in range(200))
    (folder / "text.txt").write_text(text)
    for split, n in (("train", 40), ("valid", 10)):
        (folder / "reviews").mkdir(exist_ok=True)
        (folder / "pairs").mkdir(exist_ok=True)
        rows = "".join(f"a {'good' if i % 2 else 'bad'} film {i % 5},{i % 2}\n" for i in range(n))
        (folder / "reviews" / f"{split}.csv").write_text("text,label\n" + rows)
        (folder / "pairs" / f"{split}.de").write_text("ein Satz .\nnoch ein Satz .\n" * n)
        (folder / "pairs" / f"{split}.en").write_text("a sentence .\nanother sentence .\n" * n)
        for name in ("cat", "dog"):
            (folder / "images" / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = np.random.default_rng(i).integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / split / name / f"{i}.png")
    for name, recipe in RECIPES.items():
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    (folder / "hardware.yaml").write_text("devices: {}\n")
    (folder / "llama").mkdir()
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA))
    os.mkfifo(folder / "fifo.yaml")
    os.mkfifo(folder / "fifo.txt")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind("socket.yaml")
    for name in ("gpt", "bert", "vit"):
        assert main(["train", f"{name}.yaml", f"log.dir=run-{name}", "log.every=1"]) == 0, name
    assert main(["export", "run-gpt", "--to", "exported"]) == 0


# ---------------------------------------------------------------- bad values

NUMBERS = ["99999999999", "1e18", "1e400", "-1", "0", "nan", "inf", "-inf", "1.5", "true", "null", "[]", "{a: 1}", "9" * 5000, "0x10", "١٢", "", "1_000",
           "=1", "18446744073709551616", "1e-400", "'", "[" * 200, "2147483648", "1e9"]  # fmt: skip
VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, 10**400, 1e308, "x", "", [], {}, [[]], [None], {"a": 1}, "\ud800", "9" * 5000, float("nan"), 4_000_000_000]
OPTIONS = ["nan", "inf", "-inf", "1e200", "-1", "0", "99999999999999999999", "x", "", "1.5", "9" * 5000, "١٢", "-0", "1e-400"]


def mutated(tree: dict, path: tuple, value: Any) -> dict:
    """A copy of a tree of JSON with another value at a place."""
    copy = json.loads(json.dumps(tree))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return copy


def recipe_texts() -> Iterator[tuple[str, bytes]]:
    good = json.dumps(GPT)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 10)}]\n" for c in "bcdefghijk")
    yield "bomb", bomb.encode()
    yield "bomb-in-model", ("x: &x {d_model: 16}\nmodel: [" + "*x, " * 300_000 + "]").encode()
    yield "mapping-bomb", ("a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 60))).encode()
    yield "itself", b"model: &m {init: *m}"
    yield "deep-lists", b"model: " + b"[" * 100_000
    yield "deep-closed", b"model: " + b"[" * 500 + b"]" * 500
    yield "deep-mappings", b"".join(b" " * i + b"a:\n" for i in range(900))
    yield "binary", bytes(range(256)) * 40
    yield "utf16", good.encode("utf-16")
    yield "bom", b"\xef\xbb\xbf" + b"[]"
    yield "nul", b"model: \x00"
    yield "empty", b""
    yield "null", b"null"
    yield "list", b"[1, 2]"
    yield "number", b"1e400"
    yield "tag", b"model: !!python/object/apply:os.system ['true']"
    yield "tag-int", b"model: {family: gpt, n_layers: !!int x}"
    yield "twice", good[:-1].encode() + b', "model": {}}'
    yield "cut", good[: len(good) // 2].encode()
    yield "large", b"# " + b"x" * 2_000_000
    yield "surrogate", good.replace('"char"', '"\\ud800"').encode()
    yield "keys-not-text", b"? [a, b]\n: 1\n"
    yield "date", b"model: 2026-99-99\ntask: 2026-01-01"
    yield "big-int", good.replace('"steps": 2', '"steps": ' + "9" * 6000).encode()
    yield "anchors", b"".join(b"a%d: &a%d x\n" % (i, i) for i in range(2000))
    yield "two-documents", b"a: 1\n---\nb: 2\n"
    yield "merge", b"a: &a {family: gpt}\nmodel: {<<: *a}\n"


def file_cases(folder: Path, pick: random.Random) -> Iterator[Case]:
    """Bad recipes, JSON of TrainingArguments, configurations, hardware."""
    verbs = [["train"], ["plan"], ["show"], ["check"], ["fit"], ["fetch", "--to", "staged"], ["evaluate"], ["profile"], ["scale", "--processes", "1"],
             ["launch", "slurm", "--dry-run"], ["launch", "ssh"], ["launch", "modal"]]  # fmt: skip
    for name, data in recipe_texts():
        for suffix in ("yaml", "json"):
            (folder / f"bad-{name}.{suffix}").write_bytes(data)
        verb = pick.choice(verbs)
        yield Case(f"recipe/{name}/{' '.join(verb[:2])}", [*verb, f"bad-{name}.{pick.choice(('yaml', 'json'))}"])
    for name in ("fifo.yaml", "socket.yaml", "/dev/zero", "/dev/null", ".", "/proc/self/mem", "x" * 5000 + ".yaml", "a\0b.yaml", "gpt.yaml/x", "fifo.txt"):
        verb = pick.choice(verbs)
        yield Case(f"recipe-file/{name[:20]!r}/{verb[0]}", [*verb, name])
    (folder / "loop.yaml").symlink_to("loop.yaml")
    yield Case("recipe-file/loop/show", ["show", "loop.yaml"])

    arguments = {"learning_rate": 1e-3, "per_device_train_batch_size": 4, "max_steps": 2, "warmup_steps": 1, "adam_beta1": 0.9, "fp16": False,
                 "lr_scheduler_type": "linear", "eval_steps": 1, "eval_strategy": "steps", "logging_steps": 1, "report_to": "none", "seed": 0,
                 "gradient_accumulation_steps": 1, "num_train_epochs": 1, "weight_decay": 0.1, "max_grad_norm": 1.0, "optim": "adamw_torch",
                 "dataloader_num_workers": 0, "output_dir": "x", "save_steps": 1, "torch_compile": False, "warmup_ratio": 0.1}  # fmt: skip
    for i, key in enumerate([*arguments, *pick.sample(list(arguments), 8)]):
        value = pick.choice(VALUES)
        (folder / f"args-{i}.json").write_text(json.dumps({"TrainingArgs": {key: value}}))
        yield Case(f"json_file/{key}={str(value)[:12]!r}", ["train", "gpt.yaml", "--json_file", f"args-{i}.json", f"log.dir=args-run-{i}"])
    for name, data in (("deep", b'{"TrainingArgs": ' + b"[" * 90_000), ("list", b"[]"), ("none", b'{"TrainingArgs": null}'), ("bad", b"\xff\xfe"),
                       ("twice", b'{"TrainingArgs": {"seed": 1, "seed": 2}}'), ("big", b'{"TrainingArgs": {"seed": ' + b"9" * 6000 + b"}}")):  # fmt: skip
        (folder / f"args-{name}.json").write_bytes(data)
        yield Case(f"json_file/{name}", ["train", "gpt.yaml", "--json_file", f"args-{name}.json"])
    for name in ("fifo.txt", "/dev/zero", "."):
        yield Case(f"json_file/{name}", ["train", "gpt.yaml", "--json_file", name])

    gpt2 = json.loads((folder / "exported" / "config.json").read_text())
    for i, (source, key) in enumerate([*[(LLAMA, k) for k in LLAMA], *[(gpt2, k) for k in gpt2], *[(LLAMA, k) for k in pick.sample(list(LLAMA), 8)]]):
        value = pick.choice(VALUES)
        where = folder / f"config-{i}"
        if source is gpt2:
            shutil.copytree(folder / "exported", where)
        else:
            where.mkdir()
        (where / "config.json").write_text(json.dumps(mutated(source, (key,), value)))
        argv = pick.choice([["plan", f"hf:{where}"], ["generate", str(where), "a", "--max-new", "3"], ["export", str(where), "--to", f"made-{i}"],
                            ["predict", str(where), "a"], ["show", "gpt.yaml", f"model.init={where}"], ["plan", f"hf:{where}"]])  # fmt: skip
        yield Case(f"config/{key}={str(value)[:12]!r}/{argv[0]}", argv)
    for name, data in (("deep", b"[" * 90_000), ("rope", json.dumps({**LLAMA, "rope_scaling": "x"}).encode()), ("type", b'{"model_type": []}'),
                       ("bytes", b"\xff"), ("big", b'{"x": ' + b"9" * 6000 + b"}"), ("gradus", b'{"model_type": "gpt2", "gradus": 5}')):  # fmt: skip
        (folder / f"config-{name}").mkdir()
        (folder / f"config-{name}" / "config.json").write_bytes(data)
        yield Case(f"config/{name}", ["plan", f"hf:config-{name}"])

    yield from hardware_cases(folder, pick)


def hardware_cases(folder: Path, pick: random.Random) -> Iterator[Case]:
    device = {"peaks": {"fp32": "10 TFLOP/s"}, "memory": "8 GiB", "bandwidth": "100 GB/s", "power": "100 W", "node": 2, "year": 2020, "kind": "gpu",
              "aliases": ["mine"], "driver": "X", "link": {"bandwidth": "10 GB/s"}, "date": "2026-01-01", "source": "me"}  # fmt: skip
    words: list[Any] = [None, True, -1, 10**400, "1e400 GB", "nan GB/s", [], {}, [[]], {"a": 1}, "(", "9" * 5000, ".inf", 1.5, "((((x+)+)+)+)+$"]
    for i, key in enumerate([*device, *pick.sample(list(device), 3)]):
        value = pick.choice(words)
        (folder / f"hardware-{i}.yaml").write_text(json.dumps({"devices": {"X1": {**device, key: value}}}))
        argv = pick.choice([["hardware"], ["plan", "gpt2-small", "--on", "2xX1"], ["hardware", "X1"], ["plan", "gpt2-small", "--devices"]])
        yield Case(f"hardware/{key}={str(value)[:12]!r}/{argv[0]}", argv, env={"GRADUS_HARDWARE": str(folder / f"hardware-{i}.yaml")})
    bomb = dict(recipe_texts())["bomb"]
    for name, data in (("bomb", b"devices: {}\n" + bomb), ("deep", b"devices: " + b"[" * 5000), ("list", b"[1]"), ("bad", b"\xff"), ("tag", b"devices: !x {}"),
                       ("date", b"date: 2026-99-99"), ("keys", b"devices: {[a]: 1}"), ("number", b"devices: 5")):  # fmt: skip
        (folder / f"hardware-{name}.yaml").write_bytes(data)
        variable = pick.choice(["GRADUS_HARDWARE", "GRADUS_PRICES", "GRADUS_GRID"]) if name not in ("tag", "keys") else "GRADUS_HARDWARE"
        yield Case(f"{variable}/{name}", ["plan", "gpt2-small", "--on", "2xA100"], env={variable: str(folder / f"hardware-{name}.yaml")})
    yield Case("GRADUS_HARDWARE/fifo", ["hardware"], env={"GRADUS_HARDWARE": str(folder / "fifo.yaml")})
    for on in ("0xA100", "-1xA100", "1e9xA100", "9" * 5000 + "xA100", "x", "", "8x", "8xA100-80", "١٢xA100", "1048577xA100", "8×8×A100", "\u202e8xA100"):
        yield Case(f"--on/{on[:16]!r}", ["plan", "gpt2-small", "--on", on])
    for name, data in (("deep", b"[" * 90_000), ("number", b"5"), ("points", b'[{"id": 1, "value": 1e999, "metric": [], "config": "x", "n_devices": "9"}]'),
                       ("none", b"[null]"), ("big", b"[" + b"9" * 6000 + b"]")):  # fmt: skip
        (folder / f"points-{name}.json").write_bytes(data)
        yield Case(f"accuracy/{name}", ["plan", "--accuracy", f"points-{name}.json"])
    yield Case("accuracy/fifo", ["plan", "--accuracy", "fifo.txt"])


def data_cases(folder: Path, pick: random.Random) -> Iterator[Case]:
    tables: dict[str, bytes] = {
        "label-3e9.csv": b"text,label\na,0\nb,3000000000\n", "label-huge.csv": b"text,label\na,0\nb," + b"9" * 5000 + b"\n",
        "label-negative.csv": b"text,label\na,0\nb,-1\n", "label-float.csv": b"text,label\na,0.5\n", "label-none.csv": b"text,label\na,\n",
        "no-label.csv": b"text\na\n", "ragged.csv": b"text,label\na\n", "quote.csv": b'text,label\n"a,0\n', "nul.csv": b"text,label\na\x00b,0\n",
        "empty.csv": b"", "header.csv": b"text,label\n", "latin.csv": b"text,label\n\xe9,0\n", "label-3e9.jsonl": b'{"text": "a", "label": 3e9}\n',
        "deep.jsonl": b"[" * 90_000 + b"\n", "surrogate.jsonl": b'{"text": "\\ud800", "label": 0}\n{"text": "b", "label": 1}\n', "big.jsonl": b'{"text": "a", "label": '
        + b"9" * 6000 + b"}\n", "nan.jsonl": b'{"text": "a", "label": NaN}\n', "number.jsonl": b'{"text": 5, "label": 0}\n', "list.jsonl": b"[1]\n",
        "inf.jsonl": b'{"text": "a", "label": 1e999}\n', "bool.jsonl": b'{"text": "a", "label": true}\n', "bad.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
        "cut.parquet": b"PAR1", "fields.tsv": b"text\tlabel\na\t0\t1\n", "bad.csv.gz": b"\x1f\x8b\x08\x00", "cut.csv.gz": gzip.compress(b"text,label\n" * 50)[:-9],
        "bad.csv.xz": b"\xfd7zXZ", "table.xlsx": b"PK", "none": b"x",
    }  # fmt: skip
    (folder / "tables").mkdir()
    for name, data in tables.items():
        (folder / "tables" / name).write_bytes(data)
        split = [f"data.path=tables/{name}"] if pick.random() < 0.3 else ["data.path=tables", f"data.train={name}", f"data.valid={name}"]
        verb = pick.choice(["show", "train", "check"])
        yield Case(f"data/{name}/{verb}", [verb, "bert.yaml", *split, "model.n_classes=null", *([f"log.dir=table-{name}"] if verb == "train" else [])])
    texts = {"empty.txt": b"", "nul.txt": b"\x00" * 5000, "latin.txt": b"\xe9" * 500, "short.txt": b"ab", "blank.txt": b"\n" * 5000,
             "bom.txt": b"\xff\xfe" + "text".encode("utf-16-le") * 500, "lone.txt": b"\xed\xa0\x80" * 500, "cut.txt.gz": gzip.compress(b"x" * 9999)[:-5]}  # fmt: skip
    for name, data in texts.items():
        (folder / name).write_bytes(data)
        verb = pick.choice(["show", "check", "fetch"])
        yield Case(f"text/{name}", [verb, "gpt.yaml", f"data.path={name}", *(["--to", "staged"] if verb == "fetch" else [])])
    for name in ("fifo.txt", "/dev/zero", "socket.yaml", ".", "nowhere.txt", "hf:nobody/nothing", "/proc/self/environ", "x\0y"):
        verb = pick.choice(["show", "check", "train"])
        yield Case(f"text/{name!r}/{verb}", [verb, pick.choice(["gpt.yaml", "bert.yaml", "pairs.yaml", "vit.yaml"]), f"data.path={name}"])
    yield Case("tokenizer-train/fifo", ["tokenizer", "train", "fifo.txt", "--vocab-size", "300", "--to", "made"])
    yield Case("tokenizer-train/empty", ["tokenizer", "train", "empty.txt", "--vocab-size", "300", "--to", "made"])
    yield Case("tokenizer-train/huge", ["tokenizer", "train", "text.txt", "--vocab-size", "100000000000", "--to", "made"])
    yield Case("pairs/lines", ["show", "pairs.yaml", "data.valid=nothing"])
    images = {"bad.png": b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, "empty.png": b"", "text.png": b"hello", "bomb.png": png(60_000, 60_000), "wide.png": png(2**31 - 1, 1)}
    for name, data in images.items():
        where = folder / f"images-{name}" / "train" / "cat"
        where.mkdir(parents=True)
        (where / name).write_bytes(data)
        yield Case(f"image/{name}/show", ["show", "vit.yaml", f"data.path=images-{name}"])
        yield Case(f"image/{name}/predict", ["predict", "run-vit", str(where / name)])
    for name in ("fifo.txt", "/dev/zero", ".", "nowhere.png", "text.txt"):
        yield Case(f"image/{name}/predict", ["predict", "run-vit", name])


def png(width: int, height: int) -> bytes:
    """The head of a picture of that size, without its pixels."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(b"\0" * 99))


def tokenizer_cases(folder: Path, pick: random.Random) -> Iterator[Case]:
    good = json.loads((folder / "exported" / "tokenizer.json").read_text())
    first = next(iter(good["model"]["vocab"]))
    added = {"id": 4_000_000_000, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files: dict[str, Any] = {
        "added-id": {**good, "added_tokens": [added]}, "added-negative": {**good, "added_tokens": [{**added, "id": -1}]}, "vocab-id": mutated(good, ("model", "vocab", first), 4_000_000_000),
        "vocab-huge": mutated(good, ("model", "vocab", first), 10**30), "vocab-empty": mutated(good, ("model", "vocab"), {}), "vocab-list": mutated(good, ("model", "vocab"), [["a", 0.0]]),
        "vocab-size": mutated(good, ("model", "vocab_size"), 10**11), "model-list": {**good, "model": []}, "model-null": {**good, "model": None},
        "truncation": {**good, "truncation": {"max_length": 10**18, "strategy": "LongestFirst", "stride": 10**18, "direction": "Right"}},
        "padding": {**good, "padding": {"strategy": {"Fixed": 10**13}, "direction": "Right", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
        "fixed-length": {**good, "pre_tokenizer": {"type": "FixedLength", "length": 0}}, "regex": {**good, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed", "invert": False}},
        "unigram": {**good, "model": {"type": "Unigram", "unk_id": 10**10, "vocab": [["a", 0.0]], "byte_fallback": False}}, "unigram-empty": {**good, "model": {"type": "Unigram", "unk_id": 0, "vocab": []}},
        "charsmap": {**good, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap-long": {**good, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "wordpiece": {**good, "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**18, "vocab": {"a": 0}}},
        "number": 5, "empty": {}, "post": {**good, "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {"x": {"id": "x", "ids": [10**18], "tokens": ["x"]}}}},
    }  # fmt: skip
    raw = {"deep": b'{"model": ' + b"[" * 90_000, "bytes": b"\xff", "cut": json.dumps(good).encode()[:-20], "surrogate": b'{"model": {"vocab": {"\\ud800": 0}}}',
           **{name: json.dumps(state).encode() for name, state in files.items()}}  # fmt: skip
    for name, data in raw.items():
        where = folder / f"tokenizer-{name}"
        where.mkdir()
        (where / "tokenizer.json").write_bytes(data)
        argv = pick.choice([["generate", "run-gpt", "line", "--max-new", "2", "--tokenizer", str(where)], ["show", "gpt.yaml", "tokenizer.kind=file", f"tokenizer.path={where}"]])
        yield Case(f"tokenizer.json/{name}/{argv[0]}", argv)
    ours = {"kind": "char", "specials": [], "tokens": ["a"]}
    others: dict[str, bytes] = {
        "gradus_tokenizer.json": json.dumps({**ours, "tokens": [None, 1]}).encode(), "gradus_tokenizer.json ": json.dumps({**ours, "specials": 5}).encode(),
        "vocab.txt": b"\xff\n", "vocab.txt ": b"a\n", "spiece.model": b"\x80" * 100_000, "tokenizer.model": b"", "tokenizer.bin": b"\xff" * 40, "tokenizer.bin ": b"",
        "gradus_tokenizer.json  ": json.dumps({**ours, "tokens": "abc"}).encode(), "gradus_tokenizer.json   ": json.dumps({**ours, "kind": []}).encode(), "vocab.json": b"{}",
        "encoder.json": b'{"a": 4000000000}', "tok.model": b"\x0a\x05\x0a\x01a\x15\x00" * 3,
    }  # fmt: skip
    for i, (name, data) in enumerate(others.items()):
        where = folder / f"token-file-{i}"
        where.mkdir()
        (where / name.strip()).write_bytes(data)
        if name == "encoder.json":
            (where / "vocab.bpe").write_bytes(b"#version\n")
        yield Case(f"tokenizer/{name}{len(data)}", ["generate", "run-gpt", "line", "--max-new", "2", "--tokenizer", str(where)])
    for i, more in enumerate([{"pad_token": 5}, {"pad_token": ["x"]}, {"extra_ids": 10**11}, {"additional_special_tokens": 5}, {"bos_token": {"content": None}}, []]):
        where = folder / f"token-config-{i}"
        shutil.copytree(folder / "exported", where)
        (where / "gradus_tokenizer.json").unlink(missing_ok=True)  # it would win
        (where / "tokenizer_config.json").write_text(json.dumps(more))
        yield Case(f"tokenizer_config/{json.dumps(more)}", ["generate", str(where), "line", "--max-new", "2"])
    for name in ("fifo.txt", "/dev/zero", "text.txt"):
        yield Case(f"tokenizer/{name}", ["show", "gpt.yaml", "tokenizer.kind=file", f"tokenizer.path={name}"])


def run_cases(folder: Path, pick: random.Random) -> Iterator[Case]:
    """Damaged run folders and weights."""
    verbs = [["train", "--resume"], ["prove"], ["evaluate"], ["predict", "--features", "--split", "valid"], ["generate", "--max-new", "2"], ["show"], ["export", "--to", "elsewhere"]]
    damages: list[tuple[str, bytes | None]] = [
        ("recipe.yaml", b""), ("recipe.yaml", b"[" * 90_000), ("recipe.yaml", b"\xff"), ("recipe.yaml", b"model: 5"), ("metrics.jsonl", b"5\n"), ("metrics.jsonl", b"\xff\n"),
        ("metrics.jsonl", b'{"name": "train/loss", "value": "x", "step": []}\n' * 3), ("metrics.jsonl", b"[" * 90_000 + b"\n{}\n"), ("summary.json", b"[]"), ("summary.json", b"\xff"),
        ("summary.json", b'{"metrics": 5}'), ("plan.jsonl", b"5\n5\n"), ("proof.jsonl", b"{}\n{}\n"), ("proof.jsonl", b'{"name": 5, "value": []}\n' * 2), ("metrics.jsonl", None), ("summary.json", None),
        ("checkpoints/*/config.json", b"[]"), ("checkpoints/*/config.json", b'{"model_type": []}'), ("checkpoints/*/model.safetensors", b""), ("checkpoints/*/model.safetensors", b"\xff" * 64),
        ("checkpoints/*/model.safetensors", (2**60).to_bytes(8, "little") + b"{}"), ("checkpoints/*/model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), ("checkpoints/*/tokenizer.json", b"{}"),
        ("checkpoints/*/gradus_tokenizer.json", b"[]"), ("checkpoints/*/model.safetensors", None),
        ("checkpoints/*/model.safetensors", header({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + b"\0" * 4),
        ("checkpoints/*/model.safetensors", header({"token_embedding.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4),
    ]  # fmt: skip
    for i, (place, data) in enumerate(damages):
        run = f"run-{pick.choice(('gpt', 'bert', 'vit'))}" if i % 3 else "run-gpt"
        where = folder / f"damaged-{i}"
        shutil.copytree(folder / run, where)
        for file in where.glob(place):
            file.unlink() if data is None else file.write_bytes(data)
        likely = {"proof.jsonl": ["prove"], "plan.jsonl": ["prove"], "summary.json": ["prove"]}.get(place)
        verb = likely if likely and i % 2 else pick.choice(verbs)
        words = ["line"] if verb[0] == "generate" else []
        yield Case(f"run/{place}/{str(data)[:18]}/{verb[0]}/{run}", [verb[0], str(where), *words, *verb[1:]])
    for i, name in enumerate(("bad.bin", "bad.pth", "fifo.txt", "/dev/zero", "text.txt", "")):
        if name.startswith("bad"):
            (folder / name).write_bytes([b"\xff" * 28, b"\x80\x04cos\nsystem\n(S'true'\ntR."][i])
        verb = pick.choice([["generate", "--max-new", "2"], ["predict"], ["export", "--to", "elsewhere"]])
        yield Case(f"weights/{name}/{verb[0]}", [verb[0], name, *(["x"] if verb[0] != "export" else []), *verb[1:]])


def header(tensors: dict) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def override_cases(pick: random.Random) -> Iterator[Case]:
    """A bad value of every key that the recipes have, by another verb each time."""
    from gradus import recipe as recipes

    for name in RECIPES:
        tree = recipes.load(f"{name}.yaml").model_dump()
        keys = [f"{section}.{key}" for section, fields in tree.items() if isinstance(fields, dict) for key in fields]
        for key in pick.sample(keys, 24 if name == "gpt" else 14):
            value = pick.choice(NUMBERS)
            verb = pick.choice([["show", "--no-data"], ["plan"], ["train"], ["check"], ["plan", "--on", "2xA100"]])
            known = ["model.n_classes=2"] if name == "vit" and verb[0] == "plan" and key != "model.n_classes" else []
            yield Case(f"override/{key}={value[:14]}/{verb[0]}", [verb[0], f"{name}.yaml", f"{key}={value}", *known, *verb[1:], *(["log.dir=o"] if verb[0] == "train" and key != "log.dir" else [])])
    for words in (["model.n_layers=99999999999"], ["model.d_model=1e18", "model.n_heads=1"], ["layout.threads=1e8"], ["model.n_layers=10000"], ["batch.samples=1073741824", "model.seq_len=16777216"],
                  ["layout.tensor=1048576"], ["model.d_ff=8388608", "model.d_model=1048576", "model.n_layers=2000"], ["layout.pipeline=7"], ["data.n_train=1000000000000"],
                  ["optimizer.betas=[&a [*a], 0.9]"], ["optimizer.betas=" + "[" * 300], ["a.b.c.d=1"], ["=1"], ["model=5"], ["train.steps=2", "train.steps=x"], ["layout.\ud800=1"]):  # fmt: skip
        verb = pick.choice([["plan"], ["plan", "--on", "8xH100"], ["plan", "--search", "--on", "8xH100"]])
        yield Case(f"override/{' '.join(words)[:40]!r}/plan", [*verb, "gpt2-small", *words])
    yield Case("override/data.n_train", ["train", "copy-task", "data.n_train=1000000000000"])
    yield Case("override/task.length", ["train", "copy-task", "task.length=16777216", "model.seq_len=16777216"])
    yield Case("override/long copies", ["show", "copy-task", "task.length=4096", "model.seq_len=4096", "batch.samples=8"])
    yield Case("name", ["show", "gpt.yaml", "name=" + "x" * 5000, "--no-data"])


def option_cases(pick: random.Random) -> Iterator[Case]:
    """A bad value of every option that takes a number, and words that are none."""
    from gradus.cli import parser

    Path("study.yaml").write_text("recipe: gpt.yaml\nconfigurations: {one: , two: {set: [layout.micro_batch=1]}}\nsteps: 2\nrounds: 1\nplan: false\n")
    bench = ["--engines=torch", "--precisions=fp32", "--batch=1", "--runs=1", "--seconds=0.01", "--warmup=1", "--rounds=1", "--to=benched"]  # what is bad comes after
    positional = {"train": ["gpt.yaml"], "plan": ["gpt2-small"], "prove": ["run-gpt"], "check": ["gpt.yaml"], "fit": ["gpt.yaml"], "show": ["gpt.yaml"], "fetch": ["gpt.yaml"],
                  "tokenizer": ["train", "text.txt"], "profile": ["gpt.yaml"], "evaluate": ["run-gpt"], "predict": ["run-bert", "a film"], "generate": ["run-gpt", "line"],
                  "scale": ["gpt.yaml"], "export": ["run-gpt"], "study": ["study.yaml"], "quantize": ["run-bert"], "bench": ["run-gpt", *bench]}  # fmt: skip
    required = {"fetch": ["--to", "x"], "tokenizer": ["--vocab-size", "300", "--to", "x"], "scale": ["--processes", "1"], "export": ["--to", "x"], "quantize": ["--to", "x", "--as", "static"], "generate": ["--max-new", "2"]}
    verbs = parser()._subparsers._group_actions[0].choices
    places = verbs["launch"]._subparsers._group_actions[0].choices
    sought = {**{(name,): p for name, p in verbs.items() if name != "launch"}, **{("launch", name): p for name, p in places.items()}}
    for words, p in sought.items():
        verb = words[-1]
        start = ["gpt.yaml", *(["--dry-run"] if verb in ("slurm", "ssh") else [])] if words[0] == "launch" else positional.get(verb, [])
        for action in p._actions:
            option = next((s for s in action.option_strings if s.startswith("--")), None)
            if option is None or action.nargs == 0:
                continue
            for value in pick.sample(OPTIONS, 2 if action.type else 1):
                if option in ("--to", "--grid", "--chdir", "--host") or (verb, option) == ("plan", "--accuracy"):
                    continue
                more = required.get(verb, [])
                more = [] if option in more else more
                extra = ["--serve"] if verb == "plan" and option in ("--batch", "--length", "--bits") else ["--on", "A100"] if option == "--days" else []
                yield Case(f"option/{' '.join(words)} {option}={value[:12]}", [*words, *start, *more, *extra, f"{option}={value}"])
        yield Case(f"option/{' '.join(words)} --nothing", [*words, *start, "--nothing"])
        yield Case(f"word/{' '.join(words)}", [*words, pick.choice(["\udcff", "x" * 5000, "--", "-", "a\nb", "%s%n", "$(true)", "../../x", "a=b=c", "\u202e"])])
    for words in (["fit", "gpt.yaml", "--sweep", ""], ["fit", "gpt.yaml", "--sweep", "1,,2"], ["fit", "gpt.yaml", "--workers", "9999999"], ["fit", "gpt.yaml", "--memory", "1e999GiB"], ["fit", "gpt.yaml", "--memory", ""],
                  ["fit", "gpt.yaml", "--memory", "9" * 400 + "GiB"], ["scale", "gpt.yaml", "--processes", ""], ["scale", "gpt.yaml", "--processes", "1,999999999"], ["collectives", "--processes", "0"], ["collectives", "--sizes", "9" * 5000],
                  ["collectives", "--sizes", "99999999TiB"], ["collectives", "--sizes", "900GiB"], ["show", "gpt.yaml", "--processes", "0"], ["export", "run-gpt", "--to", "x", "--shard-gb", "nan"], ["export", "run-gpt", "--to", "x", "--as", "torchscript"], ["export", "run-gpt", "--to", "x", "--opset", "18"], ["generate", "run-gpt", "line", "--engine", "torchscript"],
                  ["generate", "run-gpt", "line", "--precision", "int8"], ["generate", "run-gpt", "line", "--beams", "0"], ["generate", "run-gpt", "line", "--beams", "2", "--temperature", "0.5"], ["predict", "run-bert", "x", "--engine", "compiled", "--precision", "int4"],
                  ["evaluate", "run-bert", "--beams", "2"], ["generate", "run-gpt", "line", "--beams", "1000000000"], ["calibrate", "--seconds", "nan"], ["plan", "gpt2-small", "--tokens", "1e200"],
                  ["quantize", "run-gpt", "--to", "x", "--as", "static", "--calibrate", "valid"], ["quantize", "run-bert", "--to", "x", "--as", "int4"], ["quantize", "bert.yaml", "--to", "x", "--as", "dynamic"],
                  ["quantize", "run-bert", "--to", "x", "--as", "static", "--calibrate", "train:" + "9" * 40], ["quantize", "run-gpt", "--to", "run-gpt", "--as", "int8", "--engine", "torch"], ["quantize", "run-bert", "--to", "x", "--as", "dynamic", "optimizer.lr=1"], ["train", "bert.yaml", "train.qat=true", "layout.compile=default"],
                  ["plan", "gpt2-small", "--serve", "--length", "99999999"], ["plan", "gpt2-small", "--optimal", "--tokens", "1e-300"], ["plan", "gpt2-small", "--explain", "\n"], ["generate", "run-gpt", "\u2603"],
                  ["bench", "run-gpt", "--engines", "torch,,x"], ["bench", "run-gpt", "--precisions", "fp31"], ["bench", "run-gpt", "--batch", "1,0"], ["bench", "run-gpt", "--length", "99999999"],
                  ["bench", "run-gpt", "--new", "99999"], ["bench", "run-bert", "--new", "3"], ["bench", "run-gpt", "--engines", "torch", "--precisions", "int4"], ["bench", "nowhere"], ["bench", "run-gpt", "--engines", "auto"],
                  ["generate", "run-gpt", ""], ["predict", "run-bert", ""], ["predict", "run-bert", "x" * 100_000], ["models", "nothing"], ["hardware", "nothing"], ["recipes", "x"], ["env", "x"], ["nothing"], ["plan", "hf:"], ["plan", "hf:/dev/zero"]):  # fmt: skip
        yield Case(f"words/{' '.join(words)[:60]!r}", words)
    yield Case("stdin/bytes", ["predict", "run-bert"], stdin=b"\xff\xfe\n")
    yield Case("stdin/nothing", ["predict", "run-bert"])


# ---------------------------------------------------------------- the page


def page(sent: bytes | list[bytes], pause: float = 0.0, receiving: float | None = None) -> Callable[[], int]:
    """Serve, send, and look at the answer: 0 where it is 200, 2 where it is an error in JSON or a plain refusal of HTTP."""

    def run() -> int:
        from gradus import limits
        from gradus.plan import answer, web

        if receiving is not None:
            limits.RECEIVING = receiving
        with web.open_server("127.0.0.1", 0, None, answer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            reply = b""
            with socket.create_connection(server.server_address[:2], timeout=100) as s, contextlib.suppress(OSError):
                for part in [sent] if isinstance(sent, bytes) else sent:
                    s.sendall(part)
                    time.sleep(pause)
                    if pause and select.select([s], [], [], 0)[0]:
                        break
                while more := s.recv(65536):
                    reply += more
            with socket.create_connection(server.server_address[:2], timeout=100) as s:  # the next visitor
                s.sendall(b"GET /favicon.ico HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert b" 204 " in s.recv(65536), "the page does not answer any more"
            server.shutdown()
        head, _, body = reply.partition(b"\r\n\r\n")
        print(repr(head[:60] + b" ... " + body[:300]), file=sys.stderr)
        status = re.match(rb"(?:HTTP/1\.\d )?(\d{3}) ", head)  # a version it does not know gets no head
        refused = reply == b"" or (status and (status[1][:1] == b"4" or status[1] in (b"501", b"503", b"505")))
        return 0 if status and status[1] == b"200" else 2 if refused else 1

    return run


def post(body: bytes, path: str = "/api/plan", **headers: str) -> bytes:
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    return f"POST {path} HTTP/1.1\r\n".encode() + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n" + body


def page_cases(pick: random.Random) -> Iterator[Case]:
    good: dict[str, Any] = {"recipe": "gpt2-small", "on": "A100", "tokens": 1e9, "days": None, "overrides": []}
    for key in good:
        for value in pick.sample(VALUES, 4):
            yield Case(f"page/{key}={str(value)[:14]!r}", run=page(post(json.dumps({**good, key: value}).encode(), pick.choice(["/api/plan", "/api/search"]))))
    for value in ("model.n_layers=99999999999", "model.d_model=1e18", "layout.threads=1e8", "layout.tensor=99999999999", "model.n_layers=[&a [*a]]", "x" * 399, "batch.samples=" + "9" * 380,
                  "\ud800=1", "model.dropout=nan", "layout={}", "train.steps=1e400", "optimizer.lr=1e999"):  # fmt: skip
        yield Case(f"page/override {value[:30]!r}", run=page(post(json.dumps({**good, "overrides": [value]}).encode())))
    raw: dict[str, bytes] = {
        "bracket": b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", "host": b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", "origin": b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://[\r\n\r\n",
        "no-host": b"GET / HTTP/1.1\r\n\r\n", "binary": bytes(range(256)) * 20 + b"\r\n\r\n", "long-line": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", "many-headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
        "version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", "method": b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n", "nothing": b"\r\n\r\n", "negative": post(b"{}", Content_Length="-5"), "length": post(b"{}", Content_Length="x"),
        "huge": post(b"{}", Content_Length="999999999999"), "digits": post(b"{}", Content_Length="٣"), "chunked": post(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), "list": post(b"[]"), "number": post(b"5"), "null": post(b"null"),
        "deep": post(b"[" * 60_000), "deep-object": post(b'{"a":' * 500 + b"1" + b"}" * 500), "digits-body": post(b'{"tokens": ' + b"9" * 6000 + b"}"), "utf16": post('{"recipe": "x"}'.encode("utf-16")), "bytes": post(b"\xff"), "kind": post(b"{}", Content_Type="text/plain"),
        "path": post(b"{}", "/../../etc/passwd"), "twice": post(b'{"recipe": "x", "recipe": "y"}'), "surrogate": post(b'{"recipe": "\\ud800"}'),
    }  # fmt: skip
    for name, data in raw.items():
        yield Case(f"page/{name}", run=page(data, receiving=2.0))
    yield Case("page/a byte at a time", run=page([post(b"", Content_Length="60")] + [b"x"] * 60, pause=0.2, receiving=1.0))
    yield Case("page/a head byte at a time", run=page([b"G"] * 60, pause=0.2, receiving=1.0))


def table(folder: Path, seed: int = 0) -> list[Case]:
    """All cases of a seed. folder: where `build` made the good ones; the bad files are written beside them."""
    os.chdir(folder)
    pick = random.Random(seed)
    return [*file_cases(folder, pick), *data_cases(folder, pick), *tokenizer_cases(folder, pick), *run_cases(folder, pick),
            *override_cases(pick), *option_cases(pick), *page_cases(pick)]  # fmt: skip


def built(folder: Path) -> Path:
    """The good things, made in a process of its own, so that this one stays fit to be forked."""
    world = folder / "world"
    world.mkdir()
    out = folder / "building"
    out.mkdir()
    pid = os.fork()
    if pid == 0:
        child(Case("build", run=lambda: build(world) or 0), world, out)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, (out / "stderr").read_text()
    return world


def prepare() -> None:
    """Import once what every case needs."""
    import torch

    import gradus.cli
    import gradus.infer.generate
    import gradus.infer.predict
    import gradus.plan.answer
    import gradus.plan.show
    import gradus.plan.web
    import gradus.train.run

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        assert gradus.cli.main(["plan", "gpt2-small", "--on", "A100"]) == 0  # what is imported late is then here too


def main() -> None:
    seed, only = int(sys.argv[1]) if len(sys.argv) > 1 else 0, sys.argv[2:]
    prepare()
    with tempfile.TemporaryDirectory() as name:
        world = built(Path(name))
        cases = [c for c in table(world, seed) if not only or any(word in c.name for word in only)]
        began = time.monotonic()
        found = run_all(cases, world, say=lambda line: print(line, flush=True))
    print(f"\n{len(found)} in {time.monotonic() - began:.0f} s:", ", ".join(f"{n} {verdict}" for verdict, n in Counter(o.verdict for o in found).most_common()))
    for o in found:
        if o.verdict != "clear":
            print(f"\n=== {o.verdict} {o.seconds:.1f} s {o.case.name}\n{' '.join(o.case.argv or [])[:300]}\n{o.text[-1500:]}")


if __name__ == "__main__":
    main()
