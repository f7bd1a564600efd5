"""The inputs of bad_input.py: tables of what is damaged × how × which command reads it; a seed takes a share of them.

Beside each stands why it may be accepted: `same` (the answer is that of the whole file), `said` (a note names what was
left out), a word, or a function of what was put in the place of what. What is accepted for none of these reasons is a
failure, as a traceback is.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import json
import math
import os
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated, Any

from bad_input import ADAPTED, RECIPES, Case, Outcome, Rule, commands, said, same, same_figures
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

VALUES: list[Any] = [None, True, -1, 0, 1.5, 10**30, 10**400, 1e308, "x", "", [], {}, [[]], [None], {"a": 1}, "\ud800",
                     "9" * 5000, float("nan"),
                     4_000_000_000, "../../x", "<b>", "a\nb", "\0", [1, "x"]]  # fmt: skip
NUMBERS = ["99999999999", "1e18", "1e400", "-1", "0", "nan", "inf", "-inf", "1.5", "true", "null", "[]", "{a: 1}",
           "9" * 5000, "0x10", "١٢", "", "1_000",
           "=1", "18446744073709551616", "1e-400", "'", "[" * 200, "2147483648", "1e9"]  # fmt: skip
OPTIONS = ["nan", "inf", "-inf", "1e200", "-1", "0", "99999999999999999999", "x", "", "1.5", "9" * 5000, "١٢", "-0",
           "1e-400"]
WORDS = ["\udcff", "x" * 5000, "--", "-", "a\nb", "%s%n", "$(true)", "../../x", "a=b=c", "\u202e", "a\0b", ""]
PATHS = ["pipe.yaml", "socket.yaml", "/dev/zero", "/dev/null", ".", "/proc/self/mem", "x" * 5000 + ".yaml", "a\0b.yaml",
         "gpt.yaml/x", "pipe.txt", "loop",
         "nowhere", "hf:nobody/nothing", "/proc/self/environ", ""]  # fmt: skip


def short(value: Any, most: int = 18) -> str:
    return repr(value)[:most]


# ---------------------------------------------------------------- damage


def put(path: str, data: bytes) -> Callable[[], Any]:
    """Writes a file, through no link."""

    def write() -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).unlink(missing_ok=True)
        Path(path).write_bytes(data)

    return write


def replaced(path: str, how: str) -> Callable[[], Any]:
    def replace() -> None:
        Path(path).unlink()
        if how == "a folder":
            Path(path).mkdir()
        elif how == "a pipe":
            os.mkfifo(path)
        elif how != "gone":
            os.symlink({"endless": "/dev/zero", "a loop": Path(path).name}[how], path)

    return replace


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def signs(data: bytes) -> bytes:
    """Of the numbers in fp32 that the file seems to hold, another sign."""
    start = 8 + int.from_bytes(data[:8], "little") if data[8:9] == b"{" else data.rfind(b"\x00" * 8, 0,
        len(data) // 2) + 8
    return data[:start] + bytes(b ^ 0x80 if i % 4 == 3 else b for i, b in enumerate(data[start:]))


def bytes_damages(data: bytes, pick: random.Random) -> Iterator[tuple[str, bytes | str]]:
    """(name, the file's new content or what stands in its place)"""
    for how in ("gone", "a folder", "a pipe", "endless", "a loop"):
        yield how, how
    yield "empty", b""
    yield "cut", data[: pick.randrange(1, max(2, len(data)))]
    yield "noise", pick.randbytes(300)
    yield "zeros", bytes(len(data))
    yield "doubled", data * 2
    if data:
        yield "a bit", flipped(data, pick.randrange(len(data)), pick.randrange(8))


TEXTS = {"a list": "[]\n", "a number": "5\n", "null": "null\n", "a text": '"x"\n', "{}": "{}\n", "a brace": "{",
         "deep": "[" * 90_000, "deep pairs": '{"a":' * 500,
         "not a number": "NaN\n", "digits": "9" * 5000, "half a character": '{"\\ud800": 1}\n',
         "half a value": '{"name": "\\ud800", "value": 1}\n'}  # fmt: skip


def places(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Every place of a tree of JSON, as keys."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, node in children:
        yield (*at, key)
        yield from places(node, (*at, key))


def mutated(tree: Any, pick: random.Random) -> tuple[str, Any, str | None]:
    """(what was done, another tree, why that may be accepted)"""
    tree = json.loads(json.dumps(tree))
    everywhere = list(places(tree))
    if not everywhere:
        return "nothing to change: a list", [], None
    at = pick.choice(everywhere)
    node = functools.reduce(lambda n, key: n[key], at[:-1], tree)
    name, old, how = ".".join(map(str, at))[:60], node[at[-1]], pick.choice(["value"] * 5 + ["removed", "renamed"])
    if how == "value" or not isinstance(node, dict):
        node[at[-1]] = value = pick.choice(VALUES)
        return f"{name}={short(value)}", tree, alike(old, value)
    node.pop(at[-1])
    if how == "renamed":
        node[f"{at[-1]}x"] = old
        return f"{name} {how}", tree, "names are free" if at[-2:-1] in (("configurations",), ("devices",), ("proof",)) else None
    return f"{name} {how}", tree, "without a key that has a default"


def alike(old: Any, new: Any) -> str | None:
    """Whether one value may stand where the other did: it is of the same kind; the file says no more than that."""
    number = not isinstance(new, bool) and isinstance(new, int | float) and 0 < new < 1e12
    if isinstance(old, bool) or old is None:
        fits = isinstance(new, bool)
    elif isinstance(old, dict) and new == {}:
        return "an empty section: its defaults"
    elif isinstance(old, float) or (isinstance(old, int) and isinstance(new, int)):
        fits = number or (new == 0 and not isinstance(new, bool))
    else:
        fits = isinstance(old, str) and isinstance(new, str) and 0 < len(new) < 100 and "\ud800" not in new
    return "another value of that kind" if fits else None


def tree_damages(path: Path, data: bytes, pick: random.Random, n: int) -> Iterator[tuple[str, bytes, str | None]]:
    """(name, the file's new content, why it may be accepted): of a file of JSON, of lines of JSON or of YAML."""
    import yaml

    for name, text in TEXTS.items():
        yield name, text.encode(), None
    text = data.decode()
    lines = text.splitlines() if path.suffix == ".jsonl" or "\n{" in text else [text]
    read = yaml.safe_load if path.suffix == ".yaml" else json.loads
    trees = [i for i, line in enumerate(lines) if path.suffix == ".yaml" or line[:1] in ("{", "[")]
    for _ in range(n if trees else 0):
        at = pick.choice(trees)
        name, tree, why = mutated(read(lines[at]), pick)
        name = f"line {at} {name}" if len(lines) > 1 else name
        yield name, "\n".join([*lines[:at], json.dumps(tree), *lines[at + 1 :], ""]).encode(), why
    if path.suffix == ".jsonl" and lines:
        yield "a line cut", (text + lines[0][: len(lines[0]) // 2]).encode(), None
        yield "a list in it", (text + "[1]\n").encode(), None
    elif text.startswith("{"):
        key = next(iter(json.loads(text)), "x") if path.suffix == ".json" else "model"
        yield "a key twice", f'{{"{key}": 5, {text.strip()[1:]}'.encode(), None


def tensor_damages(data: bytes, pick: random.Random) -> Iterator[tuple[str, bytes, str | None]]:
    """Of a file of safetensors or of a graph."""
    n = len(data) // 12 * 4
    yield "signs", signs(data), "other weights"
    yield "nan", data[: len(data) - n] + struct.pack("<f", math.nan) * (n // 4), "other weights"
    if data[8:9] == b"{":
        end = 8 + int.from_bytes(data[:8], "little")
        for _ in range(4):
            name, tree, _ = mutated(json.loads(data[8:end]), pick)
            yield name, header(tree) + data[end:], None
        yield "a header of exabytes", (2**60).to_bytes(8, "little") + data[8:], None
        yield "a header without tensors", header({}) + data[end:], None


def header(tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


# ---------------------------------------------------------------- files of the world × damage × commands

TEXT = "'a good film'"
PREDICT, GENERATE = f"predict {{}} {TEXT}", "generate {} line --max-new 4"
USES: dict[str, list[str]] = {  # of a folder or file
    "run-gpt": ["generate run-gpt line --max-new 4", "evaluate run-gpt", "train run-gpt --resume train.steps=3",
                "prove run-gpt", "show run-gpt", "plan run-gpt",
                "export run-gpt --to out", "report run-gpt --to out", "report run-gpt run-llama --to out"],
    "run-bert": [f"predict run-bert {TEXT}", "evaluate run-bert",
                 "predict run-bert --split valid --n 4",
                 "prove run-bert", "report run-bert --to out", "export run-bert --to out",
                 "quantize run-bert --to out --as dynamic --force",
                 f"predict run-bert {TEXT} --engine onnx",
                 "train bert.yaml model.init=run-bert/checkpoints/best model.n_classes=2 train.steps=2 log.dir=o"],
    "run-vit": ["predict run-vit images/valid/cat/0.png", "evaluate run-vit", "report run-vit --to out",
                "predict run-vit --split valid"],
    "run-pairs": ["predict run-pairs 'ein Satz'", "evaluate run-pairs", "train run-pairs --resume train.steps=3"],
    "run-copy": ["predict run-copy '1 2 3 4 5'", "train run-copy --resume train.steps=3", "prove run-copy run-gpt"],
    "run-llama": ["generate run-llama line --max-new 4", "export run-llama --to out"],
    "exported": [GENERATE.format("exported"), "plan hf:exported",
                 "train gpt.yaml model.init=exported train.steps=2 log.dir=o",
                 "export exported --to out",
                 "new out.yaml --data text.txt --init exported", "show gpt.yaml model.init=exported"],
    "llama-hf": [GENERATE.format("llama-hf"), "plan hf:llama-hf", "plan hf:llama-hf --serve",
                 "export llama-hf --to out", "train llama.yaml model.init=llama-hf train.steps=2 log.dir=o"],
    "bert-hf": [PREDICT.format("bert-hf"), "plan hf:bert-hf", "new out.yaml --data reviews --init bert-hf",
                "evaluate run-bert --checkpoint bert-hf"],
    "bert-onnx": [PREDICT.format("bert-onnx") + " --engine onnx",
                  "evaluate run-bert --checkpoint bert-onnx --engine onnx", "plan hf:bert-onnx"],
    "bert-int8": [PREDICT.format("bert-int8") + " --precision int8",
                  "evaluate run-bert --checkpoint bert-int8 --precision int8", PREDICT.format("bert-int8")],
    "cache/exports": [f"predict run-bert {TEXT} --engine onnx", "evaluate run-bert --engine onnx"],
    "cache/engines": [f"predict run-bert {TEXT} --engine onnx", f"predict run-bert {TEXT} --precision bf16"],
    "cache/tokens": ["train gpt.yaml train.steps=2 log.dir=o", "train bert.yaml train.steps=2 log.dir=o",
                     "show pairs.yaml"],
    "cache/images": ["train vit.yaml train.steps=2 log.dir=o", "evaluate run-vit", "show vit.yaml"],
    "cache/tokenizers": ["show llama.yaml", "train llama.yaml train.steps=2 log.dir=o"],
    "cache/profiles": ["plan gpt.yaml", "plan pairs.yaml", "plan bert.yaml --on 2xA100"],
    "studied": ["report studied --to out", "study study.yaml --to studied"],
    "study.yaml": ["study study.yaml --to out"],
    "args.json": ["train gpt.yaml --json_file args.json train.steps=2 log.dir=o",
                  "show gpt.yaml --json_file args.json"],
    "mine.yaml": ["plan gpt2-small --on 2xX1", "hardware X1", "hardware", "plan gpt2-small --devices"],
    "gpt.yaml": ["train gpt.yaml train.steps=2 log.dir=o", "show gpt.yaml", "plan gpt.yaml", "check gpt.yaml",
                 "fetch gpt.yaml --to out", "launch slurm gpt.yaml --dry-run --to j"],
    "llama.yaml": ["train llama.yaml train.steps=2 log.dir=o", "plan llama.yaml --on 2xA100",
                   "plan llama.yaml --search --on 2xA100"],
    "vit.yaml": ["train vit.yaml train.steps=2 log.dir=o", "plan vit.yaml model.n_classes=2"],
    "pairs.yaml": ["train pairs.yaml train.steps=2 log.dir=o", "show pairs.yaml --processes 2"],
    "copy.yaml": ["train copy.yaml train.steps=2 log.dir=o", "show copy.yaml"],
    "text.txt": ["train gpt.yaml train.steps=2 log.dir=o", "new out.yaml --data text.txt && show out.yaml",
                 "tokenizer train text.txt --vocab-size 300 --to out", "evaluate run-gpt"],
    "reviews": ["train bert.yaml train.steps=2 log.dir=o", "new out.yaml --data reviews && show out.yaml",
                "evaluate run-bert",
                "check bert.yaml"],
    "pairs": ["train pairs.yaml train.steps=2 log.dir=o", "new out.yaml --data pairs && show out.yaml",
              "evaluate run-pairs"],
    "images": ["train vit.yaml train.steps=2 log.dir=o", "new out.yaml --data images && show out.yaml",
               "evaluate run-vit",
               "predict run-vit images/valid/cat/0.png"],
    "tables": ["train bert.yaml data.path=tables data.train=train.jsonl data.valid=valid.jsonl train.steps=2 log.dir=o",
               "train bert.yaml data.path=tables data.train=train.parquet data.valid=valid.parquet log.dir=o",
               "new out.yaml --data tables/train.parquet && show out.yaml",
               "new out.yaml --data tables/train.jsonl && show out.yaml"],
    "ground": ["show gpt.yaml tokenizer.kind=file tokenizer.path=ground",
               "train gpt.yaml tokenizer.kind=file tokenizer.path=ground train.steps=1 log.dir=o"],
    "notes.md": ["report run-gpt --to out --notes notes.md"],
}  # fmt: skip
SLOW = ("quantize ", "check ", "--search")  # a few of them
DATA = ("text.txt", "reviews", "pairs", "images", "tables", "notes.md")
NO_DIGESTS = ("exported", "llama-hf", "bert-hf", "ground")  # in others' layout, which has none
CHECKED = ("bert-onnx", "bert-int8", "cache")  # all of whose bytes are checked


def world_cases(world: Path, pick: random.Random, n: int) -> Iterator[Case]:
    """n of all (file, damage, command) of the world."""
    found = {top: [world / top, *sorted((world / top).rglob("*"))] for top in USES}
    by_top = {top: [p for p in paths if p.is_file() and not p.is_symlink()] for top, paths in found.items()}
    tops = [top for top in USES if by_top[top]]
    for _ in range(n):
        top = pick.choice(tops)
        path, use = pick.choice(by_top[top]), pick.choice(USES[top])
        if use.startswith(SLOW) and pick.random() < 0.7:
            use = USES[top][0]
        yield world_case(top, path, world, use, pick)


def world_case(top: str, path: Path, world: Path, use: str, pick: random.Random) -> Case:
    place, data = str(path.relative_to(world)), path.read_bytes()
    kinds: list[tuple[str, Any, str | None]] = [(name, what, None) for name, what in bytes_damages(data, pick)]
    if path.suffix in (".json", ".jsonl", ".yaml"):
        kinds = [*pick.sample(kinds, 3), *tree_damages(path, data, pick, 12)]
    elif path.suffix in (".safetensors", ".onnx"):
        kinds += tensor_damages(data, pick)
    name, what, why = pick.choice(kinds)
    before = replaced(place, what) if isinstance(what, str) else put(place, what)
    fine: list[Rule] = [same]
    if not top.startswith(CHECKED):
        fine.append(said(path.name, top))
        if place.endswith("config.json") and "best-step" in place:
            fine.append(lambda o: "the checkpoint that it took is named" if "checkpoints/step-" in o.shown else None)
        if place.endswith(".yaml") and name == "a bit":
            fine.append("a letter or a digit of another value")
        if top == "mine.yaml" and name in ("{}", "null", "empty"):
            fine.append("no devices of one's own")
        if top in ("mine.yaml", "study.yaml") and ".source=" in name:
            fine.append("a source in any words")
        if top == "study.yaml" and ".source." in name and name.endswith("renamed"):
            fine.append("a figure of the source by any name")
        if top == "study.yaml" and name.endswith(("=None", "configurations.one={}", "configurations.two={}")):
            fine.append("a key that is not set, or a configuration that changes nothing")
        own = path.name in ("recipe.yaml", "summary.json", "environment.json", "metrics.jsonl", "plan.jsonl",
                            "proof.jsonl")
        if why and (own or "checkpoints" not in place) and (why != "other weights" or top in NO_DIGESTS):
            fine.append(why)
        if top in NO_DIGESTS and name in ("a bit", "cut", "noise") and path.suffix in (".safetensors", ".json", ".txt"):
            fine.append("other weights or tokens: a layout without digests")
        if top in DATA and name in ("empty", "cut", "zeros", "doubled", "a bit", "noise",
                                    *TEXTS) and path.suffix not in (".parquet",):
            fine.append("other data")
        if name in ("{}", "null") and path.name == "environment.json":
            fine.append("an environment that is not known")
        if name == "empty" and top == "notes.md":
            fine.append("no notes")
        if use.startswith("report") and place.endswith("metrics.jsonl") and name == "doubled":
            fine.append("its lines are drawn twice")
        if place.endswith(".jsonl") and name in TEXTS and not TEXTS[name].endswith("\n"):
            fine.append("a last line that a kill cut short")
        if use.startswith("report") and "checkpoints" in place:
            fine.append("no report reads a checkpoint")
        if name == "gone" and (top == "images" or use.startswith("new") or (top in DATA and "valid." in place)):
            fine.append("a picture or a split less")
    env = {"GRADUS_HARDWARE": "mine.yaml"} if top == "mine.yaml" else {}
    stem = re.sub(r"[0-9a-f]{30,}", "*", place)
    return Case(f"world/{stem}/{name}/{use}", shlex.split(use), before=before, fine=fine, env=env)


# ---------------------------------------------------------------- files written for the purpose × commands

WRITES = "a text, whatever it says"


def recipe_texts() -> dict[str, tuple[bytes, str | None]]:
    good = json.dumps(RECIPES["gpt"])
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 10)}]\n" for c in "bcdefghijk")
    texts: dict[str, bytes | str] = {
        "bomb": bomb, "bomb-in-model": "x: &x {d_model: 16}\nmodel: [" + "*x, " * 300_000 + "]",
        "itself": "model: &m {init: *m}", "deep-lists": "model: " + "[" * 100_000,
        "mapping-bomb": "a0: &a0 {k: v}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1,
            60)), "deep-closed": "model: " + "[" * 500 + "]" * 500,
        "deep-mappings": "".join(" " * i + "a:\n" for i in range(900)), "binary": bytes(range(256)) * 40,
        "utf16": good.encode("utf-16"), "bom": b"\xef\xbb\xbf[]", "nul": "model: \0",
        "empty": "", "null": "null", "list": "[1, 2]", "number": "1e400",
        "tag": "model: !!python/object/apply:os.system ['true']", "tag-int": "model: {family: gpt, n_layers: !!int x}",
        "twice": good[:-1] + ', "model": {}}', "cut": good[: len(good) // 2], "large": "# " + "x" * 2_000_000,
        "surrogate": good.replace('"char"', '"\\ud800"'),
        "keys-not-text": "? [a, b]\n: 1\n", "date": "model: 2026-99-99\ntask: 2026-01-01",
        "big-int": good.replace('"steps": 2', '"steps": ' + "9" * 6000),
        "anchors": "".join(f"a{i}: &a{i} x\n" for i in range(2000)), "two-documents": "a: 1\n---\nb: 2\n",
        "merge": "a: &a {family: gpt}\nmodel: {<<: *a}\n",
    }  # fmt: skip
    return {name: (text if isinstance(text, bytes) else text.encode(), None) for name, text in texts.items()}


ROWS = "".join(f"{'good' if i % 2 else 'bad'} film {i},{'pos' if i % 2 else 'neg'}\n" for i in range(60))


def rows(*labels: Any) -> str:
    return "text,label\n" + "".join(f"film {i},{labels[i % len(labels)]}\n" for i in range(60))


TABLES: dict[str, tuple[bytes | str, str | None]] = {  # (content, why it may be accepted)
    "label-3e9.csv": (rows(0, 3_000_000_000), "two classes, by their names"), "label-huge.csv": (rows(0, "9" * 5000), None),
    "label-negative.csv": (rows(-1, 1), "names"), "label-float.csv": (rows(0.5, 1.5), "names"),
    "label-score.csv": ("text,label\n" + "".join(f"film {i},{i / 7:.3f}\n" for i in range(60)), None),
    "label-empty.csv": (rows("pos", "", "neg"), None), "label-0-2.csv": (rows(0, 2), "names"),
    "label-ids.csv": ("text,label\n" + "".join(f"film {i},{i}\n" for i in range(60)), None),
    "label-yaml.csv": (rows("yes", "no", "null", "1e9", "~", "- x", "# c", ": "), "names"),
    "label-spaces.csv": (rows("pos", " pos", "Pos", "pos "), "names"), "label-one.csv": (rows("pos"), None),
    "label-million.csv": (rows(0, 1_000_000), "two classes, by their names"),
    "no-label.csv": ("text\na\n", None), "no-header.csv": (ROWS, None),
    "ragged.csv": ("text,label\n" + ROWS + "a,b,c\n", None), "short.csv": ("text,label\n" + ROWS + "a\n", None),
    "quote.csv": ('text,label\n"a,0\n' + ROWS, None), "nul.csv": ("text,label\na\0b,pos\n" + ROWS, WRITES),
    "empty.csv": ("", None), "header.csv": ("text,label\n", None),
    "one-row.csv": ("text,label\na,pos\n", None), "two-rows.csv": ("text,label\na,pos\nb,neg\n", "two rows"),
    "latin.csv": (("text,label\ncaf\xe9,pos\n" + ROWS).encode("latin-1"), None),
    "utf16.csv": (("text,label\n" + ROWS).encode("utf-16"), None),
    "bom.csv": (b"\xef\xbb\xbf" + ("text,label\n" + ROWS).encode(), "a byte order mark is no text"),
    "cr.csv": (("text,label\n" + ROWS).replace("\n", "\r"), "lines"),
    "crlf.csv": (("text,label\n" + ROWS).replace("\n", "\r\n"), "lines"),
    "semicolons.csv": (("text,label\n" + ROWS).replace(",", ";"), "the separator that its header has"),
    "tabs.csv": (("text,label\n" + ROWS).replace(",", "\t"), "the separator that its header has"),
    "twice.csv": ("text,text,label\n" + ROWS.replace(",", ",b,"), None), "no-name.csv": (",label\n" + ROWS, None),
    "header-yaml.csv": ('"{a: [&x","!!python/object:os.system"\n' + ROWS, "names, which new quotes"),
    "header-hash.csv": ('"text # no","label: x"\n' + ROWS, "names, which new quotes"),
    "wide.csv": (",".join(f"c{i}" for i in range(30_000)) + "\n" + (",".join("x" * 30_000) + "\n") * 3, None),
    "long-word.csv": ("text,label\n" + ROWS + "x" * 800_000 + ",pos\n", "one long word, read in a linear time"),
    "long-text.csv": ("text,label\n" + ROWS + "word " * 400_000 + ",pos\n",
                      "a long text, of which the model reads its part"),
    "pairs-of.csv": ("a,b,same\n" + "".join(f"is it {i},is this {i},{i % 2}\n" for i in range(60)), None),
    "label-3e9.jsonl": ('{"text": "a", "label": 3e9}\n', None), "deep.jsonl": ("[" * 90_000 + "\n", None),
    "surrogate.jsonl": ('{"text": "\\ud800", "label": 0}\n{"text": "b", "label": 1}\n' * 20, None),
    "big.jsonl": ('{"text": "a", "label": ' + "9" * 6000 + "}\n", None),
    "nan.jsonl": ('{"text": "a", "label": NaN}\n{"text": "b", "label": 1}\n' * 20, None),
    "number.jsonl": ('{"text": 5, "label": 0}\n' * 20, None),
    "list.jsonl": ("[1]\n", None), "inf.jsonl": ('{"text": "a", "label": 1e999}\n' * 20, None),
    "bool.jsonl": ('{"text": "a", "label": true}\n{"text": "b", "label": false}\n' * 20, "names"),
    "nested.jsonl": ('{"text": {"a": "b"}, "label": [1]}\n' * 20, None),
    "keys.jsonl": ('{"text": "a", "label": 1}\n{"foo": "b"}\n' * 20, None),
    "later.jsonl": ('{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n' * 600 + '{"text": "z"}\n', None),
    "again.jsonl": ('{"text": "a", "text": "b", "label": 1}\n{"text": "c", "label": 0}\n' * 20,
                    "the last of two keys, as readers of JSON do"),
    "rows.json": (json.dumps([{"text": "a", "label": 1}, {"text": "b", "label": 0}] * 9), "a list of rows"),
    "bad.parquet": (b"PAR1" + b"\xff" * 100 + b"PAR1", None), "cut.parquet": (b"PAR1", None),
    "fields.tsv": ("text\tlabel\na\t0\t1\n", None), "bad.csv.gz": (b"\x1f\x8b\x08\x00", None),
    "cut.csv.gz": (gzip.compress(b"text,label\n" * 50)[:-9], None), "bad.csv.xz": (b"\xfd7zXZ", None),
    "table.xlsx": (b"PK", None), "none": ("text,label\n" + ROWS, "running text, as its name has no ending"),
    "table.zip": (b"PK\3\4" + b"x" * 99, None),
}  # fmt: skip
FOR_NEW = ("label-score.csv", "label-ids.csv", "label-one.csv",
           "pairs-of.csv")  # `new` is to ask instead of guessing; a recipe says what they are
PARQUETS: dict[str, tuple[dict[str, Any], str | None]] = {  # columns
    "null": ({"text": ["a b"] * 50, "label": [None] * 50}, None),
    "nan": ({"text": ["a b", "c d"] * 50, "label": [1.0, math.nan] * 50}, None),
    "lists": ({"text": [["a"], ["b"]] * 50, "label": [0, 1] * 50}, None),
    "images": ({"img": [{"bytes": b"x", "path": "a"}] * 50, "label": [0, 1] * 25}, None),
    "bytes": ({"text": [b"x", b"y"] * 25, "label": [0, 1] * 25}, None),
    "dotted": ({"a.b": ["a", "b"] * 20, "label": ["x", "y"] * 20}, "names"),
    "structs": ({"text": [{"a": 1}] * 9, "label": [0] * 9}, None),
    "big": ({"text": ["a", "b"] * 9, "label": [0, 2**62] * 9}, "two classes, by their names"), "empty": ({"text": [], "label": []}, None),
}  # fmt: skip
PLAIN: dict[str, tuple[bytes, str | None]] = {
    "empty.txt": (b"", None), "nul.txt": (b"\0" * 5000, WRITES), "latin.txt": (b"\xe9" * 500, None),
    "short.txt": (b"ab", None), "blank.txt": (b"\n" * 5000, WRITES), "one.txt": (b"a" * 100_000, WRITES),
    "utf16.txt": (b"\xff\xfe" + "text".encode("utf-16-le") * 500, None), "lone.txt": (b"\xed\xa0\x80" * 500, None),
    "cut.txt.gz": (gzip.compress(b"x" * 9999)[:-5], None), "line.txt": (b"a b c " * 50_000, WRITES),
    "word.txt": (b"x" * 900_000, WRITES), "bomb.txt.gz": (b"".join([gzip.compress(b"a" * (64 << 20))] * 16), None),
    "page.pdf": (b"%PDF", None),
}  # fmt: skip


def png(width: int, height: int, pixels: bytes = b"\0" * 99) -> bytes:
    """A picture of that size, here without most of its pixels."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)) + chunk(b"IDAT",
        zlib.compress(pixels)) + chunk(b"IEND", b"")


IMAGES = {"bad.png": b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, "empty.png": b"", "text.png": b"hello",
          "bomb.png": png(60_000, 60_000), "wide.png": png(2**31 - 1, 1),
          "gif.gif": b"GIF89a", "half.png": png(8, 8)[:60], "wrong.jpg": b"\xff\xd8\xff\xe0" + b"\0" * 40}  # fmt: skip
TRAIN_TABLE = "train bert.yaml data.path=given data.train={0} data.valid={0} model.n_classes=null log.dir=o"
READ_BY: dict[str, list[str]] = {  # {0}: the file; what a kind of file is given to
    "recipe": ["train given/{0}", "plan given/{0}", "show given/{0}", "check given/{0}", "fit given/{0}",
               "fetch given/{0} --to staged", "evaluate given/{0}", "profile given/{0}", "study given/{0}",
               "scale given/{0} --processes 1", "launch slurm given/{0} --dry-run", "launch ssh given/{0} --host x",
               "launch modal given/{0}", "ladder given/{0}", "hardware", "quantize given/{0} --to out --as dynamic"],
    "table": [TRAIN_TABLE, "show bert.yaml data.path=given/{0} model.n_classes=null",
              "new out.yaml --data given/{0} && show out.yaml",
              "check bert.yaml data.path=given/{0} model.n_classes=null",
              "new out.yaml --data given/{0} --text text --label label && train out.yaml train.steps=2"],
    "text": ["show gpt.yaml data.path=given/{0}", "train gpt.yaml data.path=given/{0} log.dir=o",
             "fetch gpt.yaml data.path=given/{0} --to staged", "new out.yaml --data given/{0} && show out.yaml",
             "tokenizer train given/{0} --vocab-size 300 --to out", "new out.yaml --data given/{0} given/{0}"],
    "image": ["predict run-vit given/{0}", "show vit.yaml data.path=folder",
              "new out.yaml --data folder && show out.yaml", "train vit.yaml data.path=folder log.dir=o"],
    "hardware": ["plan gpt2-small --on 2xA100", "hardware", "plan gpt2-small --devices"],
    "tokenizer": ["generate run-gpt line --max-new 2 --tokenizer given",
                  "show gpt.yaml tokenizer.kind=file tokenizer.path=given"],
    "points": ["plan --accuracy given/{0}"], "notes": ["report run-gpt --to out --notes given/{0}"],
    "arguments": ["train gpt.yaml --json_file given/{0} log.dir=o"], "study": ["study given/{0} --to out"],
    "config": ["plan hf:given", GENERATE.format("given")],
    "weights": ["generate given/{0} line --max-new 2", "predict given/{0} x", "export given/{0} --to out"],
}  # fmt: skip


def tokenizer_files(world: Path) -> dict[str, tuple[bytes, str | None]]:
    good = json.loads((world / "exported" / "tokenizer.json").read_text())
    first, added = next(iter(good["model"]["vocab"])), {"content": "<x>", "single_word": False, "lstrip": False,
                                                        "rstrip": False, "normalized": False, "special": True}

    def model(**more: Any) -> dict[str, Any]:
        return {**good, "model": {**good["model"], **more}}

    states: dict[str, Any] = {
        "added-id": {**good, "added_tokens": [{**added, "id": 4_000_000_000}]},
        "added-negative": {**good, "added_tokens": [{**added, "id": -1}]},
        "vocab-id": model(vocab={**good["model"]["vocab"], first: 4_000_000_000}),
        "vocab-huge": model(vocab={**good["model"]["vocab"], first: 10**30}), "vocab-empty": model(vocab={}),
        "vocab-list": model(vocab=[["a", 0.0]]), "vocab-size": model(vocab_size=10**11),
        "model-list": {**good, "model": []},
        "model-null": {**good, "model": None},
        "truncation": {**good, "truncation": {"max_length": 10**18, "strategy": "LongestFirst", "stride": 10**18,
                                              "direction": "Right"}}, "number": 5, "empty": {},
        "padding": {**good, "padding": {"strategy": {"Fixed": 10**13}, "direction": "Right", "pad_to_multiple_of": 0,
                                        "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
        "fixed-length": {**good, "pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "regex": {**good, "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Removed",
                                            "invert": False}},
        "unigram": {**good, "model": {"type": "Unigram", "unk_id": 10**10, "vocab": [["a", 0.0]],
                                      "byte_fallback": False}},
                                      "unigram-empty": {**good, "model": {"type": "Unigram", "unk_id": 0, "vocab": []}},
        "charsmap": {**good, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        "charsmap-long": {**good, "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "wordpiece": {**good, "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                                        "max_input_chars_per_word": 10**18, "vocab": {"a": 0}}},
        "post": {**good, "post_processor": {"type": "TemplateProcessing", "single": [], "pair": [],
                                            "special_tokens": {"x": {"id": "x", "ids": [10**18], "tokens": ["x"]}}}},
    }  # fmt: skip
    ours = {"kind": "char", "specials": [], "tokens": ["a"]}
    raw: dict[str, Any] = {
        "gradus_tokenizer.json": {**ours, "tokens": [None, 1]}, "gradus_tokenizer.json 2": {**ours, "specials": 5},
        "gradus_tokenizer.json 3": {**ours, "tokens": "abc"}, "gradus_tokenizer.json 4": {**ours, "kind": []},
        "vocab.txt": b"\xff\n", "vocab.txt 2": b"a\n", "spiece.model": b"\x80" * 100_000, "tokenizer.model": b"",
        "tokenizer.bin": b"\xff" * 40, "tokenizer.bin 2": b"", "vocab.json": b"{}",
        "tok.model": b"\x0a\x05\x0a\x01a\x15\x00" * 3,
        "tokenizer.json 2": b'{"model": {"vocab": {"\\ud800": 0}}}', "tokenizer.json 3": b'{"model": ' + b"[" * 90_000,
    }  # fmt: skip
    files = {f"tokenizer.json {name}": state for name, state in states.items()} | raw
    return {name: (data if isinstance(data, bytes) else json.dumps(data).encode(), None) for name,
            data in files.items()}


def study_files() -> dict[str, tuple[bytes, str | None]]:
    none = "recipe: gpt.yaml\nrunner: none\nplan: false\nrounds: 1\n"
    one = "configurations: {a: {set: [batch.samples=8]}}\n"
    ten = ["  x%d: {%s}\n" % (i, ", ".join(f"n{i}_{j}: null" for j in range(10))) for i in range(12)]  # noqa: UP031
    texts: dict[str, tuple[str, str | None]] = {
        "twice": (none + none + one, None), "cyclic": ("a: &a [*a]\n" + none + one, None),
        "cyclic options": (none + "options: &o {a: *o}\n" + one, None), "unknown": (none + "zzz: 1\n" + one, None),
        "nothing": (none, None),
        "both": (none + one + "grid: {x: {b: null}}\n", None),
        "no configurations": (none + "configurations: {}\n", None),
        "an empty axis": (none + "grid: {x: {}, y: {a: null}}\n", None), "lists": (none + "grid: {x: [1, 2]}\n", None),
        "name 5": (none + "configurations: {5: null}\n", None),
        "name null": (none + "configurations: {null: null}\n", None),
        "name empty": (none + "configurations: {'': null}\n", None),
        "name path": (none + "configurations: {'../../x': null}\n", "a name, never a path"),
        "name HTML": (none + "configurations: {'<script>alert(1)</script>': null}\n", "a name"),
        "name lines": (none + 'configurations: {"a\\nb": null}\n', None),
        "name pipe": (none + 'configurations: {"a|b": null}\n', "a name"),
        "names alike": (none + "grid: {p: {'a · b': null, a: null}, q: {c: null, 'b · c': null}}\n", None),
        "grid 1e6": (none + "grid:\n" + "".join(ten[:6]), None),
        "grid 1e12": (none + "grid:\n" + "".join(ten), None), "rounds 0": (none + "rounds: 0\n" + one, None),
        "rounds 1e30": (none.replace("rounds: 1", "rounds: 1" + "0" * 30) + one, None),
        "rounds x": (none.replace("rounds: 1", "rounds: x") + one, None),
        "steps -1": (none + "steps: -1\n" + one, None), "seeds": (none + "seeds: [1]\n" + one, None),
        "seeds negative": ("recipe: gpt.yaml\nrunner: train\nseeds: [-1]\n" + one, None),
        "seeds huge": ("recipe: gpt.yaml\nrunner: train\nseeds: [99999999999999999999999]\n" + one, None),
        "processes 0": (none + "processes: 0\n" + one, None),
        "processes 1e9": (none + "processes: 1000000000\n" + one, None),
        "against nothing": (none + "configurations: {a: {against: z}}\n", None),
        "against itself": (none + "configurations: {a: {against: a}}\n", "a ratio of 1"),
        "against each other": (none + "configurations: {a: {against: b}, b: {against: a}}\n", "two ratios"),
        "only_with": (none + "grid: {x: {a: {only_with: [z]}}, y: {b: null}}\n", None),
        "only_with no grid": (none + "configurations: {a: {only_with: [a]}}\n", None),
        "two axes": (none + "grid: {x: {a: null}, y: {a: null}}\n", None),
        "no recipe": (none.replace("gpt.yaml", "nope") + one, None),
        "passwd": (none.replace("gpt.yaml", "/etc/passwd") + one, None),
        "set zzz": (none + "set: [zzz=1]\n" + one, None), "set no =": (none + "set: [zzz]\n" + one, None),
        "set 5": (none + "set: [5]\n" + one, None), "runner zzz": (none.replace("none", "zzz") + one, None),
        "runner gone": (none.replace("none", "x.py:f") + one, None),
        "runner passwd": (none.replace("none", "/etc/passwd:f") + one, None),
        "runner dots": (none.replace("none", "runner.py:os.system") + one, None),
        "runner dunder": (none.replace("none", "runner.py:__import__") + one, None),
        "runner txt": (none.replace("none", "runner.txt:f") + one, None),
        "runner exits": (none.replace("none", "runner.py:exits") + one, None),
        "runner raises": (none.replace("none", "runner.py:raises") + one, None),
        "runner five": (none.replace("none", "runner.py:five") + one, None),
        "runner int": (none.replace("none", "runner.py:n") + one, None),
        "options": (none + "options: {a: 1}\n" + one, None), "source text": (none + "source: {a: x}\n" + one, None),
        "source nan": (none + "source: {a: .nan}\n" + one, None),
        "source_devices": (none + "source_devices: zzz\n" + one, None),
        "devices huge": (none + "source_devices: 99999999xH100\n" + one, None),
        "columns": (none + "columns: [zzz]\n" + one, "a note says that nothing has that name"),
        "about HTML": (none + "about: <script>\nnote: '<img>'\n" + one, "a text, escaped"),
        "tag": ("recipe: !!python/object/apply:os.system ['true']\n" + one, None), "tab": ("a:\n\tb: 1", None),
        "deep": ("a: " + "[" * 5000 + "]" * 5000, None),
    }  # fmt: skip
    return {f"{name}.yaml": (text.encode(), why) for name, (text, why) in texts.items()}


RUNNER = """
import sys
n = 5
def exits(recipe, options): sys.exit(0)
def raises(recipe, options): raise ValueError("first\\nsecond")
def five(recipe, options): return 5
"""
HARDWARES = {"deep": "devices: " + "[" * 5000, "list": "[1]", "bad": b"\xff", "tag": "devices: !x {}",
             "date": "date: 2026-99-99", "keys": "devices: {[a]: 1}", "number": "devices: 5"}
POINTS = {"deep": "[" * 90_000, "number": "5",
          "points": '[{"id": 1, "value": 1e999, "metric": [], "config": "x", "n_devices": "9"}]', "none": "[null]",
          "big": "[" + "9" * 6000 + "]"}
NOTES = {"binary": bytes(range(200, 256)) * 9, "utf16": "hi".encode("utf-16"), "large": "x" * 2_000_000,
         "surrogate": b"\xed\xa0\x80"}
WELL_TAKEN = {"nul": "a\0b", "lists": "".join(" " * (2 * i) + "- a\n" for i in range(900)), "quotes": ">" * 5000 + " a",
              "brackets": "[" * 50_000, "ragged": "|a|b|\n|--|--|\n|1|\n|1|2|3|\n",
              "html": "# <script>x</script>\n[a](javascript:x)\n"}
FLAT = {"deep": '{"TrainingArgs": ' + "[" * 90_000, "list": "[]", "none": '{"TrainingArgs": null}', "bad": b"\xff\xfe",
        "twice": '{"TrainingArgs": {"seed": 1, "seed": 2}}', "big": '{"TrainingArgs": {"seed": ' + "9" * 6000 + "}}"}
CONFIGS = {"deep": "[" * 90_000, "rope": '{"model_type": "llama", "rope_scaling": "x"}', "type": '{"model_type": []}',
           "bytes": b"\xff", "big": '{"x": ' + "9" * 6000 + "}", "gradus": '{"model_type": "gpt2", "gradus": 5}',
           "other": '{"model_type": "mamba"}'}
WEIGHTS = {"a.bin": b"\xff" * 28, "a.pth": b"\x80\x04cos\nsystem\n(S'true'\ntR.",
           "a.safetensors": header({"x": {"dtype": "F32", "shape": [2**40, 2**40],
                                          "data_offsets": [0, 4]}}) + b"\0" * 4, "a.gguf": b"GGUF", "b.bin": b""}


def refused(files: dict[str, Any], name: str = "{}") -> dict[str, tuple[bytes, str | None]]:
    return {name.format(key): (data if isinstance(data, bytes) else data.encode(), None) for key, data in files.items()}


def written_cases(world: Path, pick: random.Random, n: int) -> Iterator[Case]:
    notes = {f"{name}.md": (text.encode(), WRITES) for name, text in WELL_TAKEN.items()}
    kinds: dict[str, dict[str, tuple[bytes, str | None]]] = {
        "recipe": {f"{name}.{pick.choice(('yaml', 'json'))}": found for name, found in recipe_texts().items()},
        "hardware": refused(HARDWARES, "{}.yaml"), "study": study_files(),
        "table": {name: (data if isinstance(data, bytes) else data.encode(), why) for name,
                  (data, why) in TABLES.items()} | {f"{name}.parquet": (b"", why) for name,
                                                    (_, why) in PARQUETS.items()},
        "text": PLAIN, "image": refused(IMAGES), "tokenizer": tokenizer_files(world),
        "points": refused(POINTS, "{}.json"), "notes": refused(NOTES, "{}.md") | notes,
        "arguments": refused(FLAT, "{}.json"),
        "config": refused(CONFIGS), "weights": refused(WEIGHTS),
    }  # fmt: skip
    every = [(kind, name, use) for kind, files in kinds.items() for name in files for use in READ_BY[kind]]
    weights = [(3 if kind in ("table", "study", "tokenizer") else 1) / len(READ_BY[kind]) for kind, _, _ in every]
    for kind, name, use in pick.choices(every, weights, k=n):
        data, why = kinds[kind][name]
        file = {"tokenizer": name.split(" ")[0], "config": "config.json"}.get(kind, name)
        before = functools.partial(write_given, kind, file, name, data)
        env = {pick.choice(["GRADUS_HARDWARE", "GRADUS_PRICES",
                            "GRADUS_GRID"]): f"given/{file}"} if kind == "hardware" or use == "hardware" else {}
        if name in FOR_NEW and not (use.startswith("new") and "--label" not in use):
            why = "columns that the recipe names"
        if use == "hardware" and "GRADUS_HARDWARE" not in env:
            why = "prices and grids are not read here"
        if use.endswith("--devices") and "GRADUS_GRID" in env:
            why = "no grid is read here"
        if use == "hardware" and name.startswith(("empty.", "null.")):
            why = "no devices of one's own"
        if kind == "text" and use.startswith("fetch"):
            why = "copied as it is: the run refuses it"
        yield Case(f"written/{kind}/{name}/{use.partition(' ')[0]} {READ_BY[kind].index(use)}",
                   shlex.split(use.format(shlex.quote(file))), before=before, fine=[why] if why else [], env=env)


def write_given(kind: str, file: str, name: str, data: bytes) -> None:
    import pyarrow
    import pyarrow.parquet

    put(f"given/{file}", data)()
    if (stem := name.removesuffix(".parquet")) in PARQUETS and kind == "table":
        pyarrow.parquet.write_table(pyarrow.table(PARQUETS[stem][0]), f"given/{file}")
    if kind == "tokenizer" and file.endswith("vocab.json"):
        put("given/merges.txt", b"#version\n")()
    if kind == "image":
        put(f"folder/train/cat/{file}", data)()
        put(f"folder/train/dog/{file}", data)()
    if kind == "study":
        shutil.copy("gpt.yaml", "given")
        put("given/runner.py", RUNNER.encode())()
        put("given/runner.txt", RUNNER.encode())()


# ---------------------------------------------------------------- words of the command line


def fits(field: FieldInfo, value: str) -> str | None:
    """Whether a value suits a key of a recipe, as its kind is printed: the number, name or null that it may be."""
    annotation = str(field)
    number = float(value) if re.fullmatch(r"[0-9][0-9_]*(\.[0-9]+)?(e-?[0-9]+)?", value) and len(value) < 25 else math.nan
    if value in ("", "null") and not field.is_required():
        return "unset: the default"
    if value in ("true", "1", "0") and "bool" in annotation:
        return "true or false"
    whole = "int" in annotation and number.is_integer() and number < 1e13
    if number >= 0 and (whole or ("float" in annotation and number < math.inf)):
        return "a number of that kind"
    return "a name" if re.search(r"\bstr\b", annotation) else None


def override_cases(world: Path, pick: random.Random, n: int) -> Iterator[Case]:
    """A bad value of keys that the recipes have, by another verb each time."""
    from gradus import recipe as recipes
    from gradus.recipe.fields import fields_of

    verbs = ["show {0} --no-data", "plan {0}", "train {0} log.dir=o", "plan {0} --on 2xA100", "show {0}",
             "launch slurm {0} --dry-run --to j", "evaluate run-{1}"]
    trees = {name: recipes.load(str(world / f"{name}.yaml")).model_dump() for name in RECIPES}
    keys = [(name, f"{section}.{key}") for name, tree in trees.items() for section,
            fields in tree.items() if isinstance(fields, dict) for key in fields]
    for _ in range(n):
        (name, key), value, verb = pick.choice(keys), pick.choice(NUMBERS), pick.choice(verbs)
        why = next(filter(None, (fits(field, value) for field in fields_of(key))), None)
        words = [*shlex.split(verb.format(f"{name}.yaml", name)), f"{key}={value}"]
        yield Case(f"override/{name} {key}={value[:14]}/{verb}", words, fine=[said(key), *([why] if why else [])])


LARGE = [["model.n_layers=99999999999"], ["model.d_model=1e18", "model.n_heads=1"], ["layout.threads=1e8"],
         ["model.n_layers=10000"], ["layout.tensor=1048576"], ["layout.pipeline=700"],
         ["model.d_ff=8388608", "model.d_model=1048576", "model.n_layers=2000"], ["optimizer.betas=[&a [*a], 0.9]"],
         ["optimizer.betas=" + "[" * 300], ["a.b.c.d=1"], ["=1"], ["model=5"],
         ["train.steps=2", "train.steps=x"], ["layout.\ud800=1"], ["data.n_train=1000000000000"],
         ["name=" + "x" * 5000], ["layout.shard=3"], ["model.preset=zzz"], ["model.init=nowhere"]]  # fmt: skip
BENCH = "--engines=torch --precisions=fp32 --batch=1 --runs=1 --seconds=0.01 --warmup=1 --rounds=1 --to=out"
POSITIONAL = {
    "train": "gpt.yaml log.dir=o", "plan": "gpt2-small", "prove": "run-gpt", "check": "gpt.yaml", "fit": "gpt.yaml",
    "show": "gpt.yaml", "fetch": "gpt.yaml", "tokenizer": "train text.txt", "profile": "gpt.yaml",
    "evaluate": "run-gpt", "predict": f"run-bert {TEXT}", "generate": "run-gpt line", "scale": "gpt.yaml",
    "look": f"run-bert {TEXT}", "export": "run-gpt", "study": "study.yaml", "quantize": "run-bert", "bench": f"run-gpt {BENCH}",
    "report": "run-gpt", "new": "out.yaml", "ladder": "gpt.yaml", "slurm": "gpt.yaml --dry-run --to j",
    "completion": "bash", "ssh": "gpt.yaml --dry-run", "modal": "gpt.yaml --to app.py",
}  # fmt: skip
REQUIRED = {"fetch": "--to x", "tokenizer": "--vocab-size 300 --to x", "scale": "--processes 1", "export": "--to x",
            "quantize": "--to x --as static", "generate": "--max-new 2", "report": "--to x", "new": "--data text.txt"}
FREE = {"--to", "--chdir", "--host", "--notes", "--page", "--init", "--checkpoint", "--tokenizer", "--data",
        "--port"}  # paths: below
GOOD_OPTIONS: dict[tuple[str, str], str] = {  # (option, value) that one may mean
    **{(option, value): "zero is a number here" for option in ("--seed", "--accuracy", "--warmup", "--max-restarts",
        "--rank", "--max-loss", "--temperature", "--max-requeues") for value in ("0", "-0")},
    **{(option, "1.5"): "a number" for option in ("--days", "--seconds", "--tokens", "--shard-gb", "--temperature",
                                                  "--max-loss")}, ("--max-loss", "-1"): "points that it is to gain",
    **{(option, "1e-400"): "0" for option in ("--temperature", "--max-loss")},
    ("--temperature", "1e200"): "a temperature",
}  # fmt: skip


def option_cases(pick: random.Random, n: int) -> Iterator[Case]:
    """A bad value of an option, an option that there is none of, a word that is none, a path that is none."""
    from gradus.cli import parser

    verbs = parser()._subparsers._group_actions[0].choices
    places = verbs["launch"]._subparsers._group_actions[0].choices
    every = []
    for words, p in {**{(name,): p for name, p in verbs.items() if name != "launch"},
                     **{("launch", name): p for name, p in places.items()}}.items():
        start = [*words, *shlex.split(POSITIONAL.get(words[-1], ""))]
        taking = {o: a for a in p._actions if a.nargs != 0 for o in a.option_strings if o.startswith("--")}
        every += [(start, option, action) for option, action in taking.items()] + [(start, "--nothing", None),
            (list(words), "word", None)]
    for _ in range(n):
        start, option, action = pick.choice(every)
        more = [word for word in shlex.split(REQUIRED.get(start[0], "")) if not word.startswith(option)]
        named = "a name that is known there" if start[0] == "launch" else None
        if action is None:
            value = pick.choice(WORDS)
            if (start[0], value) == ("demo", "--"):
                continue  # no word: it would run
            argv = [*start, value] if option == "word" else [*start, *more, "--nothing"]
            yield Case(f"option/{' '.join(start[:2])} {option} {short(value)}", argv,
                       fine=list(filter(None, [word_fits(start[0], value)])))
            continue
        value = pick.choice(PATHS if option in FREE else OPTIONS)
        if (start[0], value) == ("calibrate", "loop"):
            continue  # a good name, which would be written after minutes of work
        extra = ["--serve"] if start[0] == "plan" and option in ("--batch", "--length", "--bits", "--new", "--rate") else ["--on",
            "A100"] if option == "--days" else []
        extra = ["--modules"] if option == "--rank" else ["--temperature=1"] if option in ("--top-k",
            "--top-p") else extra
        more = [] if option in (o.partition(" ")[0] for o in [REQUIRED.get(start[0], "")]) else more
        why = GOOD_OPTIONS.get((option, value)) or (
            path_fits(option, value) if option in FREE else None) or (named if action.type is None else None)
        yield Case(f"option/{' '.join(start[:2])} {option}={value[:14]}", [*start, *more, *extra, f"{option}={value}"],
                   fine=[why] if why else [])


def word_fits(verb: str, value: str) -> str | None:
    if verb == "hardware" and value in ("--", ""):
        return "no name"
    return "no word" if value == "--" or (verb in ("keys", "models", "hardware") and not value) else None


def path_fits(option: str, value: str) -> str | None:
    new = value not in ("", "a\0b.yaml", "gpt.yaml/x") and "zero" not in value and len(value) < 99
    if option in ("--to", "--chdir", "--page") and new:
        return "a folder or file to write"
    return "a host" if option == "--host" and value else None


LINES = """
fit gpt.yaml --sweep ''
fit gpt.yaml --sweep 1,,2
fit gpt.yaml --sweep 9999999
fit gpt.yaml --memory 1e999GiB
fit gpt.yaml --memory ''
fit gpt.yaml --memory nanGB
scale gpt.yaml --processes ''
scale gpt.yaml --processes 1,999999999
collectives --processes 0
collectives --sizes 99999999TiB
collectives --sizes 900GiB
collectives --sizes ''
show gpt.yaml --processes 0
export run-gpt --to out --shard-gb nan
export run-gpt --to out --opset 18
export run-bert --to out --as onnx --opset 99
export run-bert --to out --as onnx --precision int8
export run-bert --to run-bert
export run-bert --to .
export run-bert --to /
export run-bert --to text.txt
export run-bert --to /proc/x
generate run-gpt line --engine ../x
generate run-gpt line --engine ''
generate run-gpt line --engine tensorrt
generate run-gpt line --precision int8
generate run-gpt line --beams 0
generate run-gpt line --beams 1000000000
generate run-gpt line --beams 2 --temperature 0.5
generate run-gpt line --beams 2 --sliding-window
generate run-gpt line --beams 2 --no-cache
generate run-gpt line --top-k 5
generate run-gpt line --temperature 1 --top-p 0
generate run-gpt line --seed -1
generate run-gpt line --max-new 0
generate run-gpt line --max-new 999999999999
generate run-gpt line --tokenizer nowhere
generate run-gpt line --temperature 1 --top-p 1e-300 | the likeliest token
generate run-gpt line --temperature 1e-300 | the likeliest token
generate run-gpt line --temperature 1e-40 | the likeliest token
generate run-gpt line --temperature 1e300 --max-new 5
generate run-gpt ☃
generate run-gpt '' | from the begin token
generate run-bert line
generate run-vit line
predict run-gpt line
predict run-bert ''  | an empty text
predict run-bert x --engine compiled --precision int4
predict run-bert x --engine auto --precision int4
predict run-bert x --engine zzz
predict run-bert x --top 0
predict run-bert x --top 9999999 | all classes
predict run-bert x --to .
predict run-bert x --to /proc/x.jsonl
predict run-bert --split valid x
predict run-bert --split test
predict run-bert -- - x
predict run-vit text.txt
predict run-vit .
predict run-vit /dev/zero
predict run-vit pipe.txt
predict run-copy 'a b'
predict run-copy -- '-1 2'
predict run-copy '0 1'
predict run-copy '٣ ٢' | digits of another script
predict run-pairs '' | an empty text
predict run-pairs '   ' | an empty text
predict bert-int8 x --engine onnx
predict bert-int8 x --precision int4
predict bert-onnx x --engine pt2
predict bert-onnx x --engine onnx --precision fp16
export bert-onnx --to out
export bert-int8 --to out
quantize bert-int8 --to out --as dynamic
train bert.yaml model.init=bert-onnx log.dir=o
train bert.yaml model.init=bert-int8 log.dir=o
new out.yaml --data reviews --init bert-onnx
new out.yaml --data reviews --init bert-int8
evaluate bert-onnx
evaluate run-vit --checkpoint bert-onnx --engine onnx
evaluate run-bert --beams 2
evaluate run-bert --split zz
evaluate run-bert --checkpoint run-gpt/checkpoints/best
evaluate run-bert model.n_layers=3
evaluate run-bert train.steps=3
evaluate run-bert --split test
calibrate --seconds nan
plan gpt2-small --tokens 1e200
plan gpt2-small --serve --length 99999999
plan gpt2-small --optimal --tokens 1e-300
plan gpt2-small --explain zzz
plan gpt2-small --search --serve
plan gpt2-small --batch 3
plan gpt2-small --on 0xA100
plan gpt2-small --on -1xA100
plan gpt2-small --on 1e9xA100
plan gpt2-small --on 8x
plan gpt2-small --on 8xA100-80
plan gpt2-small --on ١٢xA100
plan gpt2-small --on 1048577xA100
plan gpt2-small --on ''
plan hf:
plan hf:/dev/zero
plan hf:../../etc
quantize run-gpt --to out --as static --calibrate valid
quantize run-bert --to out --as int4
quantize bert.yaml --to out --as dynamic
quantize run-bert --to out --as static --calibrate train:99999999999999999999
quantize run-bert --to out --as static --calibrate train:٣
quantize run-bert --to out --as static --calibrate train:0
quantize run-bert --to out --as dynamic --calibrate train
quantize run-bert --to run-bert --as dynamic
quantize run-bert --to text.txt --as dynamic
quantize run-bert --to images --as dynamic
quantize run-bert --to out --as dynamic optimizer.lr=1
quantize run-bert --to out --as dynamic --checkpoint run-gpt/checkpoints/best
quantize run-bert --to out --as dynamic --split test
quantize run-bert --to out --as dynamic --engine onnx
quantize run-bert --to out --as int8 --engine compiled
train bert.yaml train.qat=true layout.compile=default
train gpt.yaml --resume
train gpt.yaml --resume --auto-resume
train gpt.yaml --max-restarts 3
train nowhere
train run-gpt
train exported
train gpt2-small
train log.dir=run-gpt gpt.yaml
bench run-gpt --engines torch,,x
bench run-gpt --engines ''
bench run-gpt --engines auto
bench run-gpt --engines torch --precisions int4
bench run-gpt --precisions fp31
bench run-gpt --batch 1,0
bench run-gpt --batch ''
bench run-gpt --length 99999999
bench run-gpt --new 99999
bench run-bert --new 3
bench run-bert --engines torch --precisions fp32 --to run-gpt
bench run-bert --engines torch --precisions fp32 --to text.txt
bench exported --accuracy 5
bench nowhere
report nowhere --to out
report run-gpt run-gpt --to out
report run-gpt --to text.txt
report run-gpt --to /proc/x
report run-gpt --to out --notes nowhere
report text.txt --to out
report . --to out
study study.yaml --only zzz --to out
study study.yaml --only '' --to out
study study.yaml --to text.txt
study study.yaml --to /proc/x
study study.yaml --to run-gpt
study study.yaml --page nowhere/x.md --to out
study study.yaml --page text.txt --to out
study study.yaml zzz=1 --to out
study nowhere.yaml
ladder gpt.yaml --rounds 0
ladder gpt.yaml --to run-gpt
ladder gpt.yaml --for zzz
ladder gpt.yaml layout.shard=2
profile gpt.yaml --to /proc/p
profile gpt.yaml layout.shard=2
new gpt.yaml --data reviews
new out --data reviews
new nowhere/z.yaml --data reviews
new /proc/z.yaml --data reviews
new 'a\\nb.yaml' --data reviews
new .yaml --data reviews
new out.yaml --data nowhere
new out.yaml --data ''
new out.yaml --data hf:
new out.yaml --data hf:../../etc
new out.yaml --data /dev/zero
new out.yaml --data pipe.txt
new out.yaml --data /proc
new out.yaml --data reviews --init nowhere
new out.yaml --data reviews --init run-gpt
new out.yaml --data reviews --text zzz
new out.yaml --data reviews --text ''
new out.yaml --data reviews --text label --label label
new out.yaml --data pairs/train.de pairs/train.de
new out.yaml --data pairs/train.de pairs/valid.en
new out.yaml --data pairs/train.de pairs/train.en text.txt
tokenizer train pipe.txt --vocab-size 300 --to out
tokenizer train text.txt --vocab-size 100000000000 --to out
tokenizer train text.txt --vocab-size 300 --to text.txt
tokenizer learn text.txt --vocab-size 300 --to out
models nothing
hardware nothing
recipes x
env x
keys zzz
keys model.zzz
keys layout.
keys .
keys layout model.gpt zzz
nothing
show pairs.yaml data.valid=nothing
fetch gpt.yaml --to /proc/x
fetch gpt.yaml --to text.txt
launch slurm gpt.yaml --time 99:99:99:99 --dry-run
launch slurm gpt.yaml --signal KILL --dry-run
launch slurm gpt.yaml --directive nodes=3 --dry-run
launch ssh gpt.yaml --host -oProxyCommand=x
launch modal gpt.yaml --gpu zzz --to out.py
demo copy-task
completion
completion tcsh
completion bash zsh
train gpt.yaml --resume log.dir=latest
"""  # each a command line that is refused, or taken for the reason after |


def line_cases() -> Iterator[Case]:
    for line in LINES.strip().splitlines():
        words, _, why = line.partition(" | ")
        yield Case(f"line/{words.strip()}", shlex.split(words.replace("\\n", "\n")), fine=[why] if why else [])
    for words in LARGE:
        verb = ["plan"], ["plan", "--on", "8xH100"], ["plan", "--search", "--on", "8xH100"]
        for v in verb:
            yield Case(f"line/{' '.join(v)} {' '.join(words)[:40]}", [*v, "gpt2-small", *words],
                       fine=["a name"] if words[0].startswith("name=") else [])
    for path in PATHS:
        for verb in ("train {}", "show {}", "plan {}", "show gpt.yaml data.path={}",
                     "show gpt.yaml tokenizer.kind=file tokenizer.path={}", "train gpt.yaml --json_file {}",
                     "plan --accuracy {}", "report {} --to out",
                     "check bert.yaml data.path={}", "generate run-gpt line --tokenizer {}", "predict run-vit {}",
                     "evaluate run-bert --checkpoint {}", "show pairs.yaml data.path={}",
                     "show vit.yaml data.path={}"):  # fmt: skip
            fine = ["an empty file"] if path == "/dev/null" else []
            yield Case(f"path/{short(path)}/{verb}",
                       [path if word == "{}" else word.replace("{}", path) for word in verb.split(" ")], before=loop,
                       fine=fine)


def loop() -> None:
    os.symlink("loop", "loop")


STDIN: dict[str, tuple[bytes, str | None]] = {
    "binary": (b"\xff\xfe\n", None), "noise": (bytes(range(128, 256)) * 40, None), "nul": (b"a\0b\n", WRITES),
    "nothing": (b"", "no lines, no answers"), "lines": (b"\n\n\n", WRITES), "crlf": (b"a film\r\nb\r\n", WRITES),
    "mark": (b"\xef\xbb\xbfa film\n", WRITES), "latin": (b"caf\xe9\n", None),
    "later": (b"a good film\n\xff\xfe\n", None),
    "long": (b"word " * 200_000, "a long text, of which the model reads its part"),
    "utf16": ("hi".encode("utf-16"), None),
    "surrogate": (b"\xed\xa0\x80\n", None), "escape": (b"\x1b[2J\x1b]0;x\x07 film\n", WRITES),
    "many": (b"a\n" * 300, WRITES), "word": (b"x" * 900_000, WRITES),
}  # fmt: skip


def stdin_cases() -> Iterator[Case]:
    for name, (data, allowed) in STDIN.items():
        for command in ("predict run-bert", "predict run-bert -", "predict run-pairs -", "predict run-vit -",
                        "predict run-copy -", "generate run-gpt -"):
            reads = "vit" not in command and "copy" not in command
            why = "a prompt of one sign" if "generate" in command else "no lines" if not data.strip() else allowed
            fine = [why] if why and (reads or why == "no lines") else []
            yield Case(f"stdin/{name}/{command}", command.split(), stdin=data, fine=fine)


# ---------------------------------------------------------------- the process: closed streams, full disks


def closed(number: int) -> Callable[[], None]:
    def close() -> None:
        os.close(number)
        if number:
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)

    return close


def full(number: int) -> Callable[[], None]:
    return lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def smallest(size: int) -> Callable[[], None]:
    """No file grows above so many bytes, as on a disk that is full."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return limit


WRITING = ["train gpt.yaml log.dir=out", "export run-gpt --to out", "quantize run-bert --to out --as dynamic --force",
           "report run-gpt --to out", "new out.yaml --data reviews",
           "tokenizer train text.txt --vocab-size 300 --to out",
           "study study.yaml --to out", f"predict run-bert {TEXT} --to out.jsonl",
           "predict run-bert --split valid --to out.jsonl", f"predict run-bert {TEXT} --engine onnx",
           "fetch gpt.yaml --to out",
           "launch slurm gpt.yaml --dry-run --to j", "train run-gpt --resume train.steps=3",
           f"predict run-bert {TEXT} --precision bf16", "plan gpt.yaml"]  # fmt: skip
READING = ["keys", "models", "show gpt.yaml", "plan gpt2-small", f"predict run-bert {TEXT}",
           "generate run-gpt line --max-new 4", "evaluate run-bert", "prove run-gpt", "report run-gpt --to out",
           "hardware"]


def process_cases() -> Iterator[Case]:
    for size, use in itertools.product((3000, 9000), WRITING):
        yield Case(f"process/files of {size} bytes/{use}", shlex.split(use), before=smallest(size),
                   fine=[same, "nothing larger was written"])
    for (name, before), use in itertools.product({"stdout closed": closed(1), "stderr closed": closed(2),
                                                  "stdin closed": closed(0)}.items(), READING):
        yield Case(f"process/{name}/{use}", shlex.split(use), before=before, fine=["nobody reads it"])
    for use in READING:
        yield Case(f"process/stdout full/{use}", shlex.split(use), before=full(1), fine=[])


# ---------------------------------------------------------------- gradus.api

EXPRESSIONS = ["5", "None", "''", "b'x'", "[]", "{}", "object()", "float('nan')", "-1", "1.5", "10**30", "True",
               "'x\\0'", "['a', 5]", "[None]", "lambda: 0", "(1,)", "'nowhere'", "[b'x']", "{'a': 1}", "-10**400",
               "float('inf')", "'\\ud800'", "'x' * 5000"]
CALLS: dict[str, dict[str, str]] = {  # a call with a place for a bad value → the values that are none, and why
    "api.train({})": {}, "api.train('gpt.yaml', {})": {},
    "api.train('gpt.yaml', 'log.dir=o', train={})": {"{}": "no settings"},
    "api.train('gpt.yaml', 'log.dir=o', train={{'steps': {}}})": {"5": "steps", "True": "1", "None": "unset"},
    "api.train('gpt.yaml', 'log.dir=o', hooks={})": {"[]": "no hooks", "{}": "no hooks", "''": "no hooks"},
    "api.train('gpt.yaml', 'log.dir=o', optimizer={{'betas': {}}})": {},
    "api.train('gpt.yaml', 'log.dir=o', optimizer={{'lr': {}}})": {"5": "a rate", "1.5": "a rate", "True": "1"},
    "api.train('gpt.yaml', 'log.dir=o', name={})": {"'x\\0'": "a name", "'nowhere'": "a name", "5": "a name", "True": "a name",
                                                    "None": "unset", "''": "a name"},
                                                    "api.train('run-gpt', resume={})": {"True": "a run that is finished: nothing is left"},
                                                    "api.train('gpt.yaml', zzz={})": {},
    "api.plan({})": {}, "api.plan('gpt2-small', {})": {}, "api.plan('gpt2-small', on={})": {"None": "no hardware"},
    "api.plan('gpt2-small', on='H100', tokens={})": {"5": "tokens", "None": "the recipe's", "1.5": "tokens"},
    "api.plan('gpt2-small', on='H100', days={})": {**dict.fromkeys(("5", "1.5", "10**30"), "days"), "None": "no deadline"},
    "api.plan('gpt2-small').value({})": dict.fromkeys(("''", "'nowhere'", "'x\\0'", "'\\ud800'", "'x' * 5000"), "a figure that there is none of"),
    "api.load({})": {}, "api.load('run-bert', {})": {}, "api.load('run-bert')({})": {},
    "api.load('run-bert')(input_ids={})": {}, "api.predict({}, 'a')": {},
    "api.predict('run-bert', {})": {"[]": "no inputs", "{}": "no inputs", **dict.fromkeys(
        ("''", "'x\\0'", "'nowhere'", "'\\ud800'", "'x' * 5000"), "a text")},
    "api.predict('run-bert', 'a', top={})": {"5": "all classes", "10**30": "all classes"},
    "api.predict('run-vit', {})": {"[]": "no inputs", "{}": "no inputs"},
    "api.predict('run-copy', {})": {"[]": "no inputs", "{}": "no inputs"},
    "api.predict('run-gpt', {})": {"[]": "no inputs", "{}": "no inputs"},
    "api.generate({}, 'a')": {},
    "api.generate('run-gpt', {})": {"''": "from the begin token", "[]": "no prompts", "{}": "no prompts",
                                    "'nowhere'": "a prompt"},
                                    "api.generate('run-gpt', 'line', max_new={})": {"5": "tokens"},
    "api.generate('run-gpt', 'line', max_new=3, temperature={})": dict.fromkeys(("5", "1.5", "10**30"), "a temperature"),
    "api.generate('run-gpt', 'line', max_new=3, temperature=1, top_k={})": {"5": "tokens", "None": "all",
        "10**30": "all"},
    "api.generate('run-gpt', 'line', max_new=3, temperature=1, top_p={})": {"None": "all"},
    "api.generate('run-gpt', 'line', max_new=3, temperature=1, seed={})": {"5": "a seed"},
    "api.generate('run-gpt', 'line', max_new=3, sliding_window={})": {"True": "it slides"},
    "api.evaluate({})": {}, "api.evaluate('run-bert', {})": {}, "api.evaluate('run-bert', split={})": {},
    "api.evaluate('run-bert', checkpoint={})": {"None": "the best"}, "api.Run({})": {},
}  # fmt: skip


def api_cases(pick: random.Random, n: int) -> Iterator[Case]:
    every = list(itertools.product(CALLS, EXPRESSIONS))
    for call, value in pick.sample(every, min(n, len(every))):
        why = CALLS[call].get(value)
        yield Case(f"api/{call.replace('{}', value)}", run=functools.partial(api, call.format(value)),
                   fine=[why] if why else [])


def api(code: str) -> int:
    """2: it raised UserError, with its text on standard error. Code of several lines prints what came of it itself."""
    from gradus import api, limits
    from gradus.errors import UserError

    names = {"api": api, "UserError": UserError}
    try:
        print(repr((exec if "\n" in code else eval)(code, names))[:300])
    except UserError as e:
        print(limits.shown(f"error: {e}"), file=sys.stderr)
        return 2
    return 0


# ---------------------------------------------------------------- the page


def page(sent: bytes | list[bytes], pause: float = 0.0, receiving: float | None = None) -> Callable[[], int]:
    """Serve, send, and look at the answer: 0 where it is 200, 2 where it is an error in JSON or a refusal of HTTP."""

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
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body)),
             **{k.replace("_", "-"): v for k, v in headers.items()}}
    return f"POST {path} HTTP/1.1\r\n".encode() + "".join(f"{k}: {v}\r\n" for k,
        v in lines.items()).encode() + b"\r\n" + body


def get(host: str = "localhost", **headers: str) -> bytes:
    lines = {"Host": host, **headers}
    return ("GET / HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode()


RAW: dict[str, bytes] = {
    "bracket": b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", "host": get("["), "origin": get(Origin="http://["),
    "other host": get("evil.example"), "other origin": get(Origin="http://evil.example"),
    "https": get(Origin="https://localhost"),
    "no-host": b"GET / HTTP/1.1\r\n\r\n", "binary": bytes(range(256)) * 20 + b"\r\n\r\n",
    "long-line": b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "many-headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    "version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n", "method": b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "nothing": b"\r\n\r\n", "negative": post(b"{}", Content_Length="-5"), "length": post(b"{}", Content_Length="x"),
    "huge": post(b"{}", Content_Length="999999999999"), "digits": post(b"{}", Content_Length="٣"),
    "chunked": post(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), "list": post(b"[]"), "number": post(b"5"),
    "null": post(b"null"),
    "deep": post(b"[" * 60_000), "deep-object": post(b'{"a":' * 500 + b"1" + b"}" * 500),
    "digits-body": post(b'{"tokens": ' + b"9" * 6000 + b"}"), "utf16": post('{"recipe": "x"}'.encode("utf-16")),
    "bytes": post(b"\xff"),
    "kind": post(b"{}", Content_Type="text/plain"), "path": post(b"{}", "/../../etc/passwd"),
    "twice": post(b'{"recipe": "x", "recipe": "y"}'), "surrogate": post(b'{"recipe": "\\ud800"}'),
}  # fmt: skip
OVERRIDES = ["model.n_layers=99999999999", "model.d_model=1e18", "layout.threads=1e8", "layout.tensor=99999999999",
             "model.n_layers=[&a [*a]]", "x" * 399, "batch.samples=" + "9" * 380, "\ud800=1", "model.dropout=nan",
             "layout={}",
             "train.steps=1e400", "optimizer.lr=1e999", "model.init=/dev/zero", "data.path=pipe.txt",
             "model.init=run-gpt"]  # fmt: skip


def page_cases(pick: random.Random, n: int) -> Iterator[Case]:
    good: dict[str, Any] = {"recipe": "gpt2-small", "on": "A100", "tokens": 1e9, "days": None, "overrides": []}
    allowed = {"tokens": lambda v: v is None or (not isinstance(v, str) and v and v > 0), "days": lambda v: v is None or v,
               "on": lambda v: v in (None, ""), "overrides": lambda v: v == [] or v is None, "recipe": lambda v: False}
    every = [Case(f"page/{name}", run=page(data, receiving=2.0)) for name, data in RAW.items()]
    for key, value, path in itertools.product(good, VALUES, ("/api/plan", "/api/search")):
        with contextlib.suppress(TypeError):
            fine = ["a value that one may mean"] if isinstance(value,
                int | float | None | list | str) and not isinstance(value, bool) and allowed[key](value) else []
            every.append(Case(f"page/{key}={short(value)} {path}",
                              run=page(post(json.dumps({**good, key: value}).encode(), path)), fine=fine))
    every += [Case(f"page/override {value[:30]!r}",
                   run=page(post(json.dumps({**good, "overrides": [value]}).encode()))) for value in OVERRIDES]
    every.append(Case("page/a byte at a time",
                      run=page([post(b"", Content_Length="60")] + [b"x"] * 60, pause=0.2, receiving=1.0)))
    every.append(Case("page/a head byte at a time", run=page([b"G"] * 60, pause=0.2, receiving=1.0)))
    yield from pick.sample(every, min(n, len(every)))


# ---------------------------------------------------------------- every number of a recipe at its bounds

SMALLEST = "n_layers: 1, d_model: 16, n_heads: 2, d_ff: 32, seq_len: 16"
T5 = f"model={{family: t5, {SMALLEST}, d_head: 8}}"
BASES: dict[str, list[str]] = {  # section and kind, or key → a recipe that has it
    "model.t5": ["pairs.yaml", T5], "task.span_corruption": ["llama.yaml", T5, "task={name: span_corruption}"],
    "task.masked_lm": ["gpt.yaml", f"model={{family: bert, head: masked_lm, {SMALLEST}}}", "task={name: masked_lm}"],
    **{name: [f"{file}.yaml"] for file, names in {
        "copy": "model.seq2seq task.copy data.synthetic", "bert": "model.bert task.classification data.labelled",
        "pairs": "task.translation data.pairs", "vit": "model.vit data.images", "llama": "model.llama tokenizer",
    }.items() for name in names.split()},
    "optimizer.adam": ["gpt.yaml", "optimizer={name: adam, lr: 1e-3}"],
    "optimizer.sgd": ["gpt.yaml", "optimizer={name: sgd, lr: 1e-3}"], "adapter": ["bert.yaml", *ADAPTED],
    "schedule": ["gpt.yaml", "schedule={name: linear}"],
    "schedule.factor": ["gpt.yaml", "schedule={name: noam, warmup_steps: 2}"],
    "evaluate.beams": ["pairs.yaml", "evaluate.samples=1"], "evaluate.max_new": ["pairs.yaml", "evaluate.samples=1"],
    "layout.chunk": ["gpt.yaml", "layout.attention=chunked"],
    "model.top_k": ["gpt.yaml", "model.n_experts=2"], "model.balance": ["gpt.yaml", "model.n_experts=2"],
    "train.epochs": ["gpt.yaml", "train.steps=null"], "batch.tokens": ["gpt.yaml", "batch.samples=null"],
}  # fmt: skip
ODD = ["1000000000000000000", "-1", "inf", "-inf", "nan", "1e400", "true", "１", "0x10", "1e-320", ""]
LISTS = ["[0,0]", "[0,1]", "[-1,0]", "[nan,0]", "[1e-320,1e-320]", "[0.9999999,0.9999999]", "[0.9]", "[]", "0.9", "[[0.9],0.9]"]
SMALL_ENOUGH = 32  # to be trained with; more is planned
UNLIKE = ("evaluate.beams", "data.prefetch")  # what is trained with at any value, as no plan reads it


def bounds(field: FieldInfo) -> dict[str, Any] | None:
    """JSON schema's words for a key that is a number; None where it is none."""
    schema = TypeAdapter(Annotated[field.annotation, field]).json_schema()
    return next((one for one in [schema, *schema.get("anyOf", ())] if one.get("type") in ("integer", "number")), None)


def at_bounds(of: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """(a value, whether the schema lets it in)"""
    whole = of["type"] == "integer"
    of = {"minimum": of.get("ge"), "maximum": of.get("le")} | of  # a key with a validator before it has pydantic's words
    low, high, above, below = (of.get(name) for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    least, most = low if low is not None else above, high if high is not None else below
    just = (lambda x, by: x + by) if whole else (lambda x, by: x + by * max(1e-9, abs(x) * 1e-9))
    near = [(least, low is not None), (just(least, 1), True), (just(least, -1), False)]
    near += [] if most is None else [(most, high is not None), (just(most, -1), True), (just(most, 1), False)]
    yield from ((repr(int(x) if whole else float(x)), fits) for x, fits in near)
    yield from (("1.5", not whole and least < 1.5 <= (most or 2)), ("1e3", least <= 1e3 <= (most or 1e3)))
    for text in ODD:
        number = float(text) if re.fullmatch(r"[0-9.e+-]+", text) else math.inf
        yield text, math.isfinite(number) and (number >= 1 or not whole) and least < number <= (most or number)


def trained(outcome: Outcome) -> str | None:
    """Every number that it printed is one."""
    wrong = re.search(r"\b(nan|inf|infinity)\b", outcome.shown, re.I)
    return None if wrong else "within the schema's bounds, and every figure is finite"


@functools.cache
def bound_cases() -> list[Case]:
    from gradus.recipe import fields
    from gradus.recipe.schema import Recipe

    def walk(path: str, owner: Any) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in owner.model_fields.items():
            yield f"{path}.{name}", field
            for inside in fields.classes_inside(field.annotation):
                yield from walk(f"{path}.{name}", inside)

    cases, seen = [], set()
    for section in filter(fields.is_section, Recipe.model_fields):
        for kind, owner in fields.classes_of(section).items():
            for key, field in walk(section, owner):
                of, where = bounds(field), f"{section}.{kind}" if kind else section
                base = next((BASES[name] for name in (key, where, section) if name in BASES), ["gpt.yaml"])
                unset = "unset: the default" if not field.is_required() else None
                listed = "list[float]" in str(field.annotation) or "tuple" in str(field.annotation)
                values = at_bounds(of) if of else ((value, False) for value in LISTS) if listed else ()
                if (shown := (key, str(of), base[0])) in seen:
                    continue  # as in another kind
                seen.add(shown)
                for value, inside in values:
                    large = re.fullmatch(r"[\d.e+]+", value) and float(value) > SMALL_ENOUGH and key not in UNLIKE
                    verb = ["plan"] if large or "local_sgd" in key or "diloco" in key else ["train", "log.dir=out"]
                    why = trained if inside or (listed and value in LISTS[:1] + LISTS[4:6]) else unset if value == "" else None
                    cases.append(Case(f"bound/{where} {key}={value[:24]}", [verb[0], *base, *verb[1:], f"{key}={value}"],
                                      fine=[said(key), *([why] if why else [])]))
    return cases


# ---------------------------------------------------------------- adapters' folders

ADAPTER_VALUES = [None, 0, -1, 1e30, "x", "", [], {}, [None], {"a": None}, True, math.nan, "9" * 30, 10**400]
EVIL = "(([a-z0-9._]+)+)+!"
ADAPTER_CONFIGS: dict[str, tuple[dict[str, Any], str | None]] = {
    **{f"{key} {name}": ({key: {pattern: 4} if "pattern" in key else pattern}, None)
       for key in ("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules")
       for name, pattern in (("evil", EVIL), ("broken", "("), ("starred", "*"), ("long", "(a|" * 5000), ("repeats", "a{99999}" * 9))},
    "rank 0 in a pattern": ({"rank_pattern": {".*": 0}}, None), "rank [1] in a pattern": ({"rank_pattern": {".*": [1]}}, None),
    "rank 1e18 in a pattern": ({"rank_pattern": {".*": 10**18}}, None), "alpha [1]": ({"alpha_pattern": {".*": [1]}}, None),
    "alpha nan": ({"alpha_pattern": {".*": math.nan}}, None), "alpha x": ({"alpha_pattern": {".*": "x"}}, None),
    "base itself": ({"base_model_name_or_path": "peft"}, None), "base .": ({"base_model_name_or_path": "."}, None),
    "base an adapter": ({"base_model_name_or_path": "adapter"}, None), "base empty": ({"base_model_name_or_path": ""}, None),
    "base of another family": ({"base_model_name_or_path": "exported"}, None), "base gone": ({"base_model_name_or_path": "nowhere"}, None),
    "base a file": ({"base_model_name_or_path": "bert-hf/model.safetensors"}, None), "base ~": ({"base_model_name_or_path": "~"}, None),
    "base endless": ({"base_model_name_or_path": "/dev/zero"}, None), "base NUL": ({"base_model_name_or_path": "a\0b"}, None),
    "base on the hub": ({"base_model_name_or_path": "gpt2"}, None), "base http": ({"base_model_name_or_path": "http://127.0.0.1:1/x"}, None),
    "base half a character": ({"base_model_name_or_path": "\ud800"}, None), "base long": ({"base_model_name_or_path": "x" * 10**6}, None),
    "base moved beside": ({"base_model_name_or_path": "../bert-hf"}, None), "base the run": ({"base_model_name_or_path": "run-bert"}, None),
    "rslora": ({"use_rslora": True}, "as PEFT scales it"), "alpha doubled": ({"lora_alpha": 32}, "as PEFT scales it"),
    "dora": ({"use_dora": True}, None), "layers": ({"layers_to_transform": [0]}, None), "layers x": ({"layers_to_transform": ["x"]}, None),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, None), "bias": ({"bias": "all"}, None), "type": ({"peft_type": "IA3"}, None),
    "task": ({"task_type": "CAUSAL_LM"}, None),
}  # fmt: skip


def in_tensors(change: Callable[[dict[str, Any]], dict[str, Any]], path: str) -> Callable[[], Any]:
    """Writes the tensors of a file as `change` returns them, and checksums that fit where there are any."""

    def write() -> None:
        from safetensors.torch import load_file, save_file

        from gradus.models.weights import checksums

        file = Path(path)
        changed = {name: tensor.contiguous().clone() for name, tensor in change(load_file(file)).items()}
        save_file(changed, file, metadata={"format": "pt"})
        if (file.parent / "checksums.json").exists():
            checksums.write(file.parent)

    return write


def only_in(part: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: change(t) if part in name else t for name, t in tensors.items()}


def renamed(old: str, new: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def without(part: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


def twice(part: str, dim: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return only_in(part, lambda t: t.repeat_interleave(2, dim))


OTHER = "other weights, with checksums that fit where there are any"
ADAPTER_TENSORS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str | None]] = {
    "B nan": (only_in("lora_B", lambda t: t * math.nan), None), "A inf": (only_in("lora_A", lambda t: t + math.inf), None),
    "signs of B": (only_in("lora_B", lambda t: -t), OTHER), "half": (only_in("", lambda t: t.half()), OTHER),
    "double": (only_in("", lambda t: t.double()), OTHER), "int8": (only_in("", lambda t: t.char()), None),
    "rank 4": (lambda t: twice("lora_B", 1)(twice("lora_A", 0)(t)), "rank 4, as the tensors have it"),
    "rank 0": (lambda t: only_in("lora_B", lambda t: t[:, :0])(only_in("lora_A", lambda t: t[:0])(t)), None),
    "A without B": (without("query.lora_B"), None), "B without A": (without("query.lora_A"), None),
    "a pair less": (without("query.lora_"), "a module less"), "no pairs": (without("lora_"), None),
    "no head": (without("classifier"), None), "nothing": (lambda t: {}, None), "3 classes": (twice("classifier", 0), "other classes"),
    "B transposed": (only_in("lora_B", lambda t: t.T), None), "A flat": (only_in("lora_A", lambda t: t[0]), None),
    "layer 99": (renamed("layer.0.", "layer.99."), None), "no prefix": (renamed("base_model.model.", ""), OTHER),
    "prefix twice": (renamed("base_model.model.", "base_model.model.base_model.model."), None),
    ".default.": (renamed("lora_A.", "lora_A.default."), None),
    "a pair more": (lambda t: t | {f"base_model.model.zzz.{n}.weight": next(iter(t.values())) for n in ("lora_A", "lora_B")}, None),
    "a tensor more": (lambda t: t | {"base_model.model.zzz.weight": next(iter(t.values())).clone()}, None),
}  # fmt: skip
ADAPTER_USES = [f"predict {{}} {TEXT}", f"predict {{}} {TEXT}", "plan hf:{}", "export {} --to out", "export {} --to out --merge",
                f"predict bert-hf --adapter {{}} {TEXT}", "evaluate run-bert --checkpoint {}",
                "train bert.yaml model={} train.steps=1 log.dir=o".replace("{}", "'{{family: bert, init: {}}}'"),
                f"look {{}} {TEXT} --to p.html"]  # fmt: skip


def adapter_cases(world: Path) -> Iterator[Case]:
    file = world / "peft" / "adapter_config.json"
    if not file.exists():
        return
    good = json.loads(file.read_text())
    configs: dict[str, tuple[Any, str | None]] = {name: ({**good, **new}, why) for name, (new, why) in ADAPTER_CONFIGS.items()}
    configs |= {f"without {key}": ({k: v for k, v in good.items() if k != key}, "PEFT's default") for key in good}
    for key, value in itertools.product(good, ADAPTER_VALUES):
        number = key == "lora_alpha" and isinstance(value, int | float) and 0 < value < 1e12
        configs[f"{key}={short(value)}"] = ({**good, key: value}, "another alpha" if number else alike(good[key], value))
    for (name, (config, why)), n in zip(configs.items(), itertools.count()):
        use = ADAPTER_USES[n % 2 and n // 2 % len(ADAPTER_USES)].format("peft")
        yield Case(f"adapter/config {name}/{use[:40]}", shlex.split(use), fine=[same, *([why] if why else [])],
                   before=put("peft/adapter_config.json", json.dumps(config).encode()))
    for (name, (change, why)), use in itertools.product(ADAPTER_TENSORS.items(), ADAPTER_USES[1:]):
        for folder in ("peft", "adapter"):
            fine = [same, why] if why else [same]
            yield Case(f"adapter/{folder} {name}/{use[:40]}", shlex.split(use.format(folder)), fine=fine,
                       before=in_tensors(change, f"{folder}/adapter_model.safetensors"))
    for damage in ("nan", "signs", "gone", "half"):
        change = {"nan": only_in("", lambda t: t * math.nan), "signs": only_in("dense", lambda t: -t),
                  "half": only_in("", lambda t: t.half()), "gone": without("query")}[damage]
        for folder, use in itertools.product(("peft", "adapter", "run-adapter"), ADAPTER_USES[:3]):
            why = OTHER if folder == "peft" and damage in ("signs", "half") else None
            yield Case(f"adapter/{folder}'s base {damage}/{use[:40]}", shlex.split(use.format(folder)),
                       before=in_tensors(change, "bert-hf/model.safetensors"), fine=[same, *([why] if why else [])])


# ---------------------------------------------------------------- weights and outputs that are not finite

FINITE: dict[str, list[str]] = {  # a file of weights → what computes with them
    "exported/model.safetensors": ["generate exported line --max-new 4", "look exported line --to p.html", "export exported --to out",
                                   "generate exported line --max-new 4 --temperature 1", "bench exported " + BENCH,
                                   "train gpt.yaml model={family: gpt, init: exported} train.steps=1 log.dir=o"],
    "run-gpt/checkpoints/best/model.safetensors": ["generate run-gpt line --max-new 4", "evaluate run-gpt", "export run-gpt --to out"],
    "bert-hf/model.safetensors": [f"predict bert-hf {TEXT}", f"look bert-hf {TEXT} --to p.html", "evaluate run-bert --checkpoint bert-hf",
                                  "export bert-hf --to out", "bench bert-hf " + BENCH, f"predict adapter {TEXT}",
                                  "train bert.yaml model={family: bert, head: classification, init: bert-hf} train.steps=1 log.dir=o"],
    "run-bert/checkpoints/best/model.safetensors": [
        f"predict run-bert {TEXT}", "evaluate run-bert", "export run-bert --to out", "export run-bert --to out --as onnx",
        "quantize run-bert --to out --as dynamic --force", f"predict run-bert {TEXT} --engine onnx", "predict run-bert --split valid --n 4",
        f"predict run-bert {TEXT} --precision bf16", "export run-bert --to out --as pt2"],
    "run-vit/checkpoints/best/model.safetensors": ["predict run-vit images/valid/cat/0.png", "evaluate run-vit",
                                                   "look run-vit images/valid/cat/0.png --to p.html"],
    "run-pairs/checkpoints/best/model.safetensors": ["predict run-pairs 'ein Satz'", "evaluate run-pairs", "look run-pairs 'ein Satz' --to p.html"],
    "run-copy/checkpoints/best/model.safetensors": ["predict run-copy '1 2 3 4 5'", "evaluate run-copy", "look run-copy '1 2 3 4 5' --to p.html"],
    "run-llama/checkpoints/best/model.safetensors": ["generate run-llama line --max-new 4", "evaluate run-llama", "look run-llama line --to p.html"],
    "run-gpt/checkpoints/step-00000002/model.safetensors": ["train run-gpt --resume train.steps=3"],
}  # fmt: skip
FILLED: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "nan": (lambda t: t * math.nan, None), "inf": (lambda t: t + math.inf, None), "-inf": (lambda t: t - math.inf, None),
    "1e38": (lambda t: t * 0 + 1e38, "norms may make them small"), "0": (lambda t: t * 0, "zeros are numbers"), "-0": (lambda t: t * -0.0, "zeros are numbers"),
}  # fmt: skip


def finite_cases(world: Path) -> Iterator[Case]:
    there = [(path, uses) for path, uses in FINITE.items() if (world / path).exists()]
    for (path, uses), (name, (change, why)) in itertools.product(there, FILLED.items()):
        for use in uses:
            words = [word for word in shlex.split(use) if "{" not in word] + re.findall(r"model=\{.*?\}", use)
            zeros = [trained] if why else []  # its figures are finite
            yield Case(f"finite/{path.split('/')[0]} {name}/{use[:60]}", words, before=in_tensors(only_in("", change), path), fine=zeros)
            if name == "nan":
                one = only_in("", lambda t: (t.view(-1)[-1:].fill_(math.nan), t)[1])
                yield Case(f"finite/{path.split('/')[0]} last {name}/{use[:60]}", words, before=in_tensors(one, path))


# ---------------------------------------------------------------- gradus look

LOOK_TEXTS = {
    "one character": "a", "tabs": "\t\t", "a newline": "a\nb", "right to left": "\u202eabc", "combining": "e\u0301" * 40,
    "emoji": "\U0001f469\u200d\U0001f467" * 8, "HTML": '<script>alert(1)</script>"><img src=x onerror=alert(1)>', "numbers": "1 2 3 4 5",
    "end of SVG": "</svg><script>x</script></style></title>", "escapes": "\x1b[31mred\x07", "long": "word " * 20_000, "word": "x" * 10**6,
    "48 tokens": "a b " * 24, "an option": "--help", "minus": "-", "negative": "-5 3", "999": "999 999", "a mask": "[MASK] a <mask> <pad> [SEP]",
    "a path": "/etc/passwd", "empty": "", "spaces": "   ", "a picture": "x.png", "controls": "".join(map(chr, range(1, 32))),
}  # fmt: skip
LOOK_ARGS = """
look run-gpt
look run-gpt a b
look run-gpt --sample 0
look nowhere x
look gpt.yaml 'a'
look gpt2-small x
look bert-onnx 'a film'
look bert-int8 'a film'
look run-gpt line --tokenizer nowhere
look run-gpt line --tokenizer ground
look run-vit
look run-vit 'a film'
look run-vit --sample -1
look run-vit --sample x
look run-vit --sample 1000000000
look run-vit images/valid/cat/0.png --sample 1
look run-vit --sample 1 --tokenizer ground
look run-vit nowhere.png
look run-vit images
look run-gpt line --to images
look run-gpt line --to /proc/x.html
look run-gpt line --to nowhere/p.html
look run-gpt line --to /dev/null
look run-gpt line --to pipe.txt
look run-gpt line --to ''
look run-gpt line --to text.txt | the file that it is to write
look run-vit --sample 0 --to p.html | an image of the run
look run-adapter 'a film' --to p.html | an adapter
look adapter 'a film' --to p.html | an adapter
"""
PICTURES: dict[str, tuple[str, tuple[int, ...], str | None]] = {  # mode, (height, width[, channels]), why
    "8 bits": ("L", (8, 8), "a picture"), "wide": ("RGB", (5, 40, 3), "a picture"), "one pixel": ("RGB", (1, 1, 3), "a picture"),
    "alpha": ("RGBA", (40, 40, 4), "a picture"), "a palette": ("P", (40, 40), "a picture"), "1 bit": ("1", (8, 8), "a picture"),
    "16 bits": ("I;16", (8, 8), "a picture"), "CMYK": ("CMYK", (8, 8, 4), "a picture"), "large": ("L", (8000, 8000), "a picture"),
}  # fmt: skip


def picture(path: str, mode: str, shape: tuple[int, ...]) -> Callable[[], None]:
    def write() -> None:
        import numpy as np
        from PIL import Image

        kind = np.uint16 if mode == "I;16" else np.uint8
        pixels = np.random.default_rng(0).integers(0, np.iinfo(kind).max, shape, dtype=kind)
        Image.fromarray(pixels).convert("L" if mode in ("P", "1") else mode).convert(mode).save(path)

    return write


class Tags(HTMLParser):
    """Raises AssertionError for what runs or loads something."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "img", "iframe", "object", "embed", "link", "base", "form", "foreignobject"), tag
        for name, value in attrs:
            where = (value or "").strip().lower()
            assert not name.startswith("on") and "javascript:" not in where, (tag, name, value)
            assert name not in ("src", "href", "xlink:href") or where.startswith(("#", "data:image/png")), (tag, name, value)
            assert where not in ("nan", "inf", "-inf"), (tag, name, value)


def looked(words: list[str]) -> int:
    """1: refused, and a page was written."""
    code, page = commands(words), Path("p.html")
    if page.exists():
        Tags().feed(page.read_text(encoding="utf-8"))
        print("of the page:", len(page.read_text(encoding="utf-8")) > 1000)
    return 1 if code and page.exists() else code


def look_cases() -> Iterator[Case]:
    for (name, text), run in itertools.product(LOOK_TEXTS.items(), ("run-bert", "run-gpt", "run-pairs", "run-copy", "run-llama", "bert-hf")):
        words = ["look", run, *(["--"] if text.startswith("-") else []), text, "--to", "p.html"]
        words = words if words[2] != "--" else ["look", run, "--to", "p.html", "--", text]
        reads = text.strip() and (run != "run-copy" or name == "numbers")
        yield Case(f"look/{run} {name}", run=functools.partial(looked, words), fine=[WRITES] if reads else [])
    for line in LOOK_ARGS.strip().splitlines():
        words, _, why = line.partition(" | ")
        yield Case(f"look/{words}", shlex.split(words), fine=[why] if why else [])
    for (name, (mode, shape, why)), verb in itertools.product(PICTURES.items(), ("look", "predict")):
        file = "<b onload=x>.png" if name == "wide" else "p.jpg" if mode == "CMYK" else "p.png"
        words = [verb, "run-vit", file, *(["--to", "p.html"] if verb == "look" else [])]
        yield Case(f"look/{verb} {name}", run=functools.partial(looked, words), before=picture(file, mode, shape), fine=[why] if why else [])


# ---------------------------------------------------------------- energy, prices, devices

PLAN = "plan gpt.yaml --tokens 1e6 --on 2xA100"
WATTS: dict[str, dict[str, str]] = {  # option → the values that one may mean, and why
    "--watts": {**dict.fromkeys(("1e-9", "1e12", "1e3", "1e-300"), "watts"), "null": "not known", "": "not known"},
    "--pue": {**dict.fromkeys(("1", "10", "1.0000001"), "a PUE"), "null": "the usual one", "": "the usual one"},
    "--grid": {**dict.fromkeys(("FR", "fr", "France", "world", "World", "NO", "no"), "a country"), "null": "the world's mean",
               **dict.fromkeys(("385 g/kWh", "385g/kWh", "385 kg/MWh", "0.385 kg/kWh", "1e3g/kWh"), "as it is stated")},
    "--price": dict.fromkeys(("0.01", "1e3", "0"), "a price"), "--days": {"1e-3": "days", "1e6": "days"}, "--tokens": {"1e18": "tokens"},
}  # fmt: skip
WATTS_NOT = ["0", "-1", "nan", "inf", "1e-320", "1e13", "1e19", "1e400", "", "x", "٣", "0x10", " 5", "0.99", "10.0001", "1,5", "385", "0 g/kWh",
             "-5 g/kWh", "1e400 g/kWh", "1e300 g/kWh", "1e-300 g/kWh", "385 g/MWh", "385 kWh/g", "٣ g/kWh", "<script>", "x" * 5000, "null",
             "385 g/kWh; rm", "nan g/kWh", "4-5 g/kWh", "1e g/kWh", " FR", "XX"]  # fmt: skip
NOT_YAML: dict[str, bytes | str] = {
    "5": "5", "list": "[1]", "text": "x", "binary": bytes(range(128, 256)), "NUL": "a: \0", "deep": "a: " + "[" * 3000 + "]" * 3000,
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in itertools.pairwise("abcdefghi")),
    "tag": "a: !!python/object/apply:os.system ['true']", "twice": "date: 2026-01-01\ndate: 2026-01-02\n", "unknown": "zzz: 1",
    "no day": "date: 2026-99-99", "sources list": "sources: [1]", "sources null": "sources: null", "cycle": "a: &a {b: *a}",
    "utf16": "date: 2026-01-01".encode("utf-16"),
}  # fmt: skip
OWN_FILES: dict[str, dict[str, tuple[str | bytes, str | None]]] = {  # kind → name → (content, why it may be taken)
    "GRID": {name: (f"grids: {{FR: {entry}}}", why) for name, entry, why in (
        ("5", "5", None), ("null", "null", None), ("without", "{name: France}", None), ("0", "{intensity: 0 g/kWh}", None),
        ("a number", "{intensity: 56}", None), ("negative", "{intensity: -5 g/kWh}", None), ("nan", "{intensity: .nan}", None),
        ("1e400", "{intensity: 1e400 g/kWh}", None), ("1e300", "{intensity: 1e300 g/kWh}", None), ("a list", "[1]", None),
        ("name 5", "{name: 5, intensity: 5 g/kWh}", None), ("name HTML", "{name: <script>, intensity: 5 g/kWh}", "a name"),
        ("year -1", "{year: -1, intensity: 5 g/kWh}", None), ("year 1e20", "{year: 99999999999999999999, intensity: 5 g/kWh}", None),
    )} | {
        "grids null": ("grids: null", None), "grids list": ("grids: [1]", None), "key 5": ("grids: {5: {intensity: 5 g/kWh}}", None),
        "key null": ("grids: {null: {intensity: 5 g/kWh}}", None), "NO bare": ("grids: {NO: {intensity: 5 g/kWh}}", None),
        "world": ("grids: {world: {name: w, intensity: 5 g/kWh}}", "a mean of one's own"),
        "pue 5": ("pue: 5", None), "pue falls": ("pue: {low: 3, expected: 2, high: 1}", None), "pue 0": ("pue: {low: 0, expected: 0, high: 0}", None),
        "pue nan": ("pue: {low: .nan, expected: .nan, high: .nan}", None), "pue text": ("pue: {low: a, expected: b, high: c}", None),
        "pue null": ("pue: null", "none of one's own"), "year x": ("year: x", None), "year 1e20": ("year: 99999999999999999999", None),
    },
    "PRICES": {name: (f"date: 2026-01-01\nprices: {{A100: {entry}}}", why) for name, entry, why in (
        ("5", "5", None), ("null", "null", None), ("[]", "[]", "no quotes of it"), ("falls", "{low: 5, high: 2}", None), ("0", "{low: 0, high: 0}", "for nothing"),
        ("negative", "{low: -5, high: 2}", None), ("nan", "{low: .nan, high: .nan}", None), ("inf", "{low: .inf, high: .inf}", None),
        ("1e300", "{low: 1e300, high: 1e300}", None), ("without", "{low: 1}", None), ("text", "{low: a, high: b}", None),
        ("outside", "{low: 1, high: 2, expected: 9}", None), ("date x", "{low: 1, high: 2, date: x}", None),
        ("dates", "[{low: 1, high: 2, date: 5}, {low: 1, high: 2, date: '2026'}]", None),
    )} | {
        "prices null": ("prices: null", None), "prices list": ("prices: [1]", None), "no device": ("prices: {ZZZ: {low: 1, high: 2}}", None),
        "no rate": ("currency: EUR\nprices: {A100: {low: 1, high: 2}}", None), "rate 0": ("currency: EUR\nrate: 0\n", None),
        "rate -1": ("currency: EUR\nrate: -1\n", None), "rate nan": ("currency: EUR\nrate: .nan", None), "rate inf": ("currency: EUR\nrate: .inf", None),
        "rate 1e300": ("currency: EUR\nrate: 1e300", None), "currency HTML": ("currency: <b>\nrate: 1", "a name"),
        "currency 5": ("currency: 5\nrate: 1", None), "currency null": ("currency: null", None),
    },
    "HARDWARE": {name: (f"devices: {{A100-80GB: {{{entry}}}}}", why) for name, entry, why in (
        ("nothing", "", "nothing of one's own"), ("power 0", "power: 0 W", None), ("power -5", "power: -5 W", None), ("power x", "power: x", None),
        ("power 1e300", "power: 1e300 W", None), ("memory 1 B", "memory: 1 B", "a byte: nothing fits"), ("memory 1e300", "memory: 1e300 GB", None),
        ("memory 1e9", "memory: 1e9 GB", "an exabyte"), ("memory 1e6", "memory: 1e6 GB", "a petabyte"),
        ("no peaks", "peaks: {}", None), ("peak 1e300", "peaks: {fp32: 1e300 TFLOP/s}", None), ("peak 1e-300", "peaks: {fp32: 1e-300 TFLOP/s}", None),
        ("driver broken", "driver: '('", None), ("node 0", "node: 0", None), ("node -1", "node: -1", None), ("node 1.5", "node: 1.5", None),
        ("usable", "usable: 900 GB", None), ("usable 1 B", "usable: 1 B", "a byte: nothing fits"), ("bandwidth 1e-300", "bandwidth: 1e-300 GB/s", None),
        ("bandwidth 1e300", "bandwidth: 1e300 GB/s", None), ("link zzz", "link: zzz", None),
        ("latency 1e300", "link: {bandwidth: 1 GB/s, latency: 1e300 s}", None), ("link 1e-300", "link: {bandwidth: 1e-300 GB/s}", None),
        ("alias", "aliases: [H100]", "the user's alias goes first"), ("year 1e20", "year: 99999999999999999999", None), ("measured 5", "measured: 5", None),
        ("measured {}", "measured: {}", "none"), ("measured x", "measured: {threads: x, matmul: [1]}", None),
    )} | {
        "devices null": ("devices: null", None), "device 5": ("devices: {Z: 5}", None), "device {}": ("devices: {Z: {}}", None),
        "link a": ("links: {a: {bandwidth: 1 GB/s, latency: 1 us}}\ndevices: {A100-80GB: {link: a}}", "a link of one's own"),
    },
}  # fmt: skip
OWN_USES = {"GRID": [f"{PLAN} --grid FR", "train gpt.yaml energy.grid=FR train.steps=1 log.dir=o", "show gpt.yaml energy.grid=FR"],
            "PRICES": [PLAN, "plan gpt2-small --devices"],
            "HARDWARE": [PLAN, "hardware", "plan gpt.yaml --search --on 2xA100", "plan gpt.yaml --tokens 1e6 --days 1 --on A100", f"{PLAN} --picture out.svg"]}


def energy_cases() -> Iterator[Case]:
    for option, good in WATTS.items():
        plain = PLAN if option != "--tokens" else "plan gpt.yaml --on 2xA100"
        plain = "plan gpt.yaml --tokens 1e6 --on A100" if option == "--days" else plain
        for value in [*good, *WATTS_NOT]:
            number = re.fullmatch(r" *[0-9.e-]+", value) and option != "--grid" and float(value)
            why = good.get(value) or ("a number" if number and option in ("--watts", "--price", "--days", "--tokens") and 1e-300 < number <= (1e18 if option == "--tokens" else 1e12) else None)
            yield Case(f"energy/{option}={value[:20]}", [*shlex.split(plain), f"{option}={value}"], fine=[why] if why else [])
    for words, why in {"--watts 100": "watts", "--watts 100 --grid FR --pue 1": "watts", "--pue 2": "no watts", "--grid XX": None, "--watts nan": None,
                       "--watts 1e-320": None, "--watts 1e12": "watts", "--watts 1 energy.watts=5": None, "energy.watts=0": None}.items():
        yield Case(f"energy/train {words}", ["train", "gpt.yaml", "train.steps=1", "log.dir=o", *words.split()], fine=[why] if why else [])
    for words, why in {"--watts 50": "watts of a finished run", "--watts 50 --grid FR": "watts", "energy.watts=70": "watts", "--watts 0": None}.items():
        yield Case(f"energy/train run-gpt --resume {words}", ["train", "run-gpt", "--resume", *words.split()], fine=[why] if why else [])
    for kind, uses in OWN_USES.items():
        files = {name: (text, None) for name, text in NOT_YAML.items()} | OWN_FILES[kind]
        for (name, (text, why)), use in itertools.product(files.items(), uses):
            yield Case(f"energy/{kind} {name}/{use}", shlex.split(use), env={f"GRADUS_{kind}": "own.yaml"}, fine=[why] if why else [],
                       before=put("own.yaml", text if isinstance(text, bytes) else text.encode()))
        for path in ("nowhere", "images", "/dev/zero", "pipe.txt", "x" * 5000, "/proc/self/mem"):
            yield Case(f"energy/{kind}={path[:20]}", shlex.split(uses[0]), env={f"GRADUS_{kind}": path})


# ---------------------------------------------------------------- layouts, freezing, what an adapter is put beside

LAYOUTS: dict[str, str | None] = {  # of two processes → why it may be accepted
    **{f"layout.{axis}={value}": None for axis in ("shard", "tensor", "pipeline", "context", "expert") for value in ("0", "3", "-1", "1.5", "1048577")},
    **{f"layout.{axis}=2": "two processes" for axis in ("shard", "tensor", "context", "shard layout.offload=true", "context layout.context_method=ulysses")},
    **{f"layout.{axis}=1": "one of that axis" for axis in ("shard", "tensor", "pipeline", "context", "expert")},
    "layout.expert=2": None, "layout.pipeline=2": None, "layout.pipeline=2 model.n_layers=2": "two stages",
    "model.n_experts=2 layout.expert=2": "two experts", "model.n_experts=3 layout.expert=2": None,
    "model.n_layers=3 layout.pipeline=2": "stages of one and two layers", "model.n_layers=2 layout.pipeline=2 layout.stages=2": None,
    **{f"layout.{key}": None for key in ("bucket_mb=0", "bucket_mb=inf", "bucket_mb=nan", "bucket_mb=-1", "micro_batch=0", "timeout=0", "threads=0",
                                         "threads=1025", "local_sgd.every=0", "diloco.every=0", "diloco.outer_lr=1", "diloco={every: 1, outer_lr: .nan}",
                                         "diloco={every: 1, outer_momentum: 1}", "diloco={every: 1, outer_lr: 0}")},
    **{f"layout.{key}": "a value of that kind" for key in (
        "bucket_mb=1e-320", "bucket_mb=1e12", "micro_batch=1", "threads=1", "local_sgd.every=1", "local_sgd.every=1000000000000",
        "diloco.every=1", "diloco={every: 1, outer_momentum: 0}", "diloco={every: 1, outer_lr: 1e12}", "diloco={every: 1, outer_lr: 1.0e-320}",
        "compress=bf16", "compress=powersgd", "compress=fp16", "replicate=manual", "shard_optimizer=true")},
    "layout.micro_batch=1000000000": None, "layout.micro_batch=3": None, "layout.timeout=1": "seconds", "layout.timeout=1e-320": None,
    "model.seq_len=15 layout.context=2": "padded", "model.seq_len=15 layout.tensor=2": "padded", "model.n_heads=1 layout.tensor=2": None,
    "model.n_heads=1 layout.context=2 layout.context_method=ulysses": None, "model.d_ff=15 layout.tensor=2": "7 and 8",
    "model.seq_len=1 layout.context=2": None, "model.d_model=15 model.n_heads=3 layout.shard=2": "shards of 8 and 7",
    "batch.samples=1": None, "batch.samples=3": "2 and 1", "layout.shard=2 layout.param_dtype=fp16": "in fp16",
    "layout.shard=2 layout.reduce_dtype=bf16": "in bf16", "layout.local_sgd.every=1 layout.diloco.every=1": None,
    "layout.local_sgd.every=1 train.freeze=[blocks.0]": "the rest is averaged", "layout.diloco.every=1 train.freeze=[all,-head]": "the rest is averaged",
    "layout.shard=2 layout.tensor=2": None, "layout.checkpointing=selective layout.shard=2": "both",
}  # fmt: skip
FROZEN: dict[str, str | None] = {  # train.freeze → why it may be accepted
    **dict.fromkeys(("[blocks.0]", "[all,-head]", "[all,-blocks.0]", "[token]", "[blocks.0.attention]", "[all,-blocks.0.attention.to_q]",
                     "[blocks.0,blocks.2]", "[blocks.1,blocks.3]", "[all,-blocks.1]", "[all,'-blocks.*.norm1']", "norm1", "[blocks.0.norm1.weight]",
                     "[]", "['?']", "[1]"), "a part of it is trained"), "[all,-all]": "all of it is trained",
    **dict.fromkeys(("[all]", "[-all]", "[zzz]", "['*']", "[blocks.9]", "[blocks.-1]", "['']", "[ALL]", "[all,--head]", "['[']",
                     "['-']", "[[all]]", "[null]", "{a: 1}", "['" + "x" * 300 + "']", "['(([a-z]+)+)+!']"), None),
}  # fmt: skip
TARGETS: dict[str, str | None] = {  # of an adapter → why
    **dict.fromkeys(("adapter.targets=[to_q]", "adapter.targets=['to_q:3']", "adapter.targets=[all-linear]", "adapter.targets=['to_q:2:8']",
                     "adapter.targets=[-down]", "adapter.rank=16", "adapter.alpha=1e12", "adapter.dropout=0.999", "adapter.rslora=true",
                     "adapter.base=int8", "adapter.base=nf4", "adapter.alpha=1e-320", "train.freeze=[-blocks.0.norm1]", "adapter.targets=['*']",
                     "adapter.targets=[attention,'up:1']", "adapter.targets=['all-linear:3']", "train.freeze=[]", "adapter.targets=null"), "an adapter"),
    **dict.fromkeys(("adapter.rank=0", "adapter.rank=1048577", "adapter.alpha=0", "adapter.dropout=1", "adapter.targets=[]",
                     "adapter.targets=[zzz]", "adapter.targets=[all-linear,-all-linear]", "adapter.targets=['']", "adapter.targets=['-']",
                     "adapter.targets=[':']", "adapter.targets=['to_q:']", "adapter.targets=['to_q:0']", "adapter.targets=['to_q:99999999999999999999']",
                     "adapter.targets=['to_q:9000000000000000000']", "adapter.targets=['to_q:2:nan']", "adapter.targets=['to_q:2:inf']",
                     "adapter.targets=['to_q:2:0']", "adapter.targets=['to_q:2:3:4']", "adapter.targets=['up:1.5']", "adapter.targets=['[']",
                     "adapter.targets=[token]", "adapter.targets=[norm1]", "adapter.base=int4", "train.freeze=[all]", "train.qat=true",
                     "model.n_layers=3", "model.init=gpt.yaml", "model.init=adapter", "adapter.targets=['to_q:2:1e308']"), None),
}  # fmt: skip


def layout_cases() -> Iterator[Case]:
    def several(kind: str, table: dict[str, str | None], uses: list[str]) -> Iterator[Case]:
        for (value, why), use in itertools.product(table.items(), uses):
            keys = re.findall(r"\S+=(?:\{.*?\}|\S+)", value) if kind != "freeze" else [f"train.freeze={value}"]
            yield Case(f"{kind}/{value[:50]}/{use[:40]}", [*shlex.split(use), *keys], fine=[trained_or(why), said(keys[0].split("=")[0])] if why else [])

    yield from several("layout", LAYOUTS, ["show gpt.yaml --no-data --processes 2", "plan gpt.yaml --on 2xA100",
                                           "show gpt.yaml --processes 2 --modules"])
    yield from several("layout", {k: why for k, why in LAYOUTS.items() if why}, ["train gpt.yaml --processes 2 train.steps=2 log.dir=o"])
    yield from several("freeze", FROZEN, ["plan gpt.yaml model.n_layers=4", "train gpt.yaml model.n_layers=4 log.dir=o",
                                          "plan gpt.yaml model.n_layers=4 layout.pipeline=2 --on 2xA100", "show gpt.yaml model.n_layers=4",
                                          "plan gpt.yaml model.n_layers=4 layout.shard=2 --on 2xA100"])
    base = " ".join(map(shlex.quote, ADAPTED))
    yield from several("targets", TARGETS, [f"train bert.yaml {base} log.dir=o", f"plan bert.yaml {base}", f"plan bert.yaml {base} --on 2xA100"])


def trained_or(why: str) -> Rule:
    return lambda outcome: why if trained(outcome) else None


# ---------------------------------------------------------------- files beside weights, numbers of a run, places

GOOD_ENDS = ([5, 7], 5, 0)
BESIDE: dict[str, dict[str, tuple[bytes | str, str | None]]] = {  # file → content → why
    "generation_config.json": {
        **{f"{key}={short(value)}": (json.dumps({key: value}), "tokens that it has" if value in GOOD_ENDS and key != "pad_token_id" else None)
           for key in ("eos_token_id", "bos_token_id", "pad_token_id", "temperature", "max_new_tokens")
           for value in ([5, 7], 5, 0, [], [-1], -1, 99_999, [99_999], 10**30, 1.5, "x", {}, True, None, [[1]], [None], [1] * 10_000, math.nan)},
        "[]": ("[]", None), "deep": ("[" * 90_000, None), "bytes": (b"\xff\xfe", None), "empty": ("", None), "digits": ("9" * 5000, None)},
    "chat_template.jinja": {
        "huge": (b"{{ x }}" * 3_000_000, None), "binary": (bytes(range(128, 256)), None), "empty": ("", None), "broken": ("{% for %}", None),
        "endless": ("{% for i in range(10**12) %}x{% endfor %}", None), "deep": ("{% if x %}" * 5000, None), "NUL": ("a\0b", None)},
    "tokenizer_config.json": {
        "chat_template 5": ('{"chat_template": 5}', None), "chat_template list": ('{"chat_template": [{"name": 5}]}', None),
        "chat_template null": ('{"chat_template": null}', None), "eos 5": ('{"eos_token": 5}', None), "added": ('{"added_tokens_decoder": [1]}', None)},
}  # fmt: skip
CONFIG_VALUES = [None, -1, 0, 1e30, 10**30, "x", "", [], {}, True, math.nan, 1.5]
OWN_NUMBERS = {  # file → keys of a line → odd values; a report or a proof may say what it reads, never fail at it
    "summary.json": ["steps", "samples", "tokens", "train_loss", "best", "metrics", "seconds", "parameters", "trained_parameters", "energy", "skipped_steps"],
    "proof.jsonl": ["value", "name", "unit", "conditions"], "metrics.jsonl": ["value", "step", "name", "unit"], "plan.jsonl": ["value", "name", "conditions"],
    "environment.json": ["gpu", "cpu", "torch", "threads", "host"],
}  # fmt: skip
NUMBER_VALUES = [10**20, 10**400, 1e308, -1e308, math.nan, [1], {}, None, "x", True, -1, "\ud800"]
NUMBER_USES = ["report run-gpt --to out", "prove run-gpt", "report run-gpt run-llama --to out"]
DATA_CHANGED = {"reversed": lambda text: text[::-1], "shorter": lambda text: text[:3000], "others": lambda text: ("\u4e00\u4e8c" * 9000).encode(),
                "doubled": lambda text: text * 2, "a letter": lambda text: b"L" + text[1:]}


def beside_cases(world: Path) -> Iterator[Case]:
    folders = {"exported": "gpt.yaml", "llama-hf": "llama.yaml", "bert-hf": "bert.yaml"}
    folders = {name: recipe for name, recipe in folders.items() if (world / name).exists()}
    for (file, contents), (folder, recipe) in itertools.product(BESIDE.items(), folders.items()):
        uses = ["predict given 'a film'"] if folder == "bert-hf" else ["generate given line --max-new 4"]
        uses += ["export given --to out", f"train {recipe} model.init=given train.steps=1 log.dir=out"]
        for (name, (data, why)), use in itertools.product(contents.items(), uses):
            data = data if isinstance(data, bytes) else data.encode()
            yield Case(f"beside/{folder}/{file} {name}/{use}", shlex.split(use), copied=folder, before=put(f"given/{file}", data), fine=[same, *([why] if why else [])])
    for folder, recipe in folders.items():
        config = json.loads((world / folder / "config.json").read_text())
        uses = ["predict given 'a film'"] if folder == "bert-hf" else ["generate given line --max-new 4"]
        uses += ["plan hf:given", f"train {recipe} model.init=given train.steps=1 log.dir=o"]
        changes = [(key, value) for key in [*config, "gradus"] for value in CONFIG_VALUES] + [("gradus", value) for value in ({"adapter": 5}, {"base": 5})]
        for n, (key, value) in enumerate(changes):
            data, use = json.dumps({**config, key: value}).encode(), uses[n % 3]
            why = alike(config.get(key), value) or ("unset: the default" if value is None else None)
            yield Case(f"beside/{folder}/config.json {key}={short(value)}/{use}", shlex.split(use), copied=folder, before=put("given/config.json", data),
                       fine=[same, *([why] if why else [])])


def number_cases(world: Path) -> Iterator[Case]:
    """A run's own files with odd numbers, and data that changed under a run."""
    for file, keys in OWN_NUMBERS.items():
        if not (world / "run-gpt" / file).exists():  # a busy machine has no plan ready when so short a run ends
            continue
        text = (world / "run-gpt" / file).read_text()
        for key, value, use in itertools.product(keys, NUMBER_VALUES, NUMBER_USES):
            lines = text.splitlines() if file.endswith("l") else [text]
            lines[0] = json.dumps({**json.loads(lines[0]), key: value})
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1.7e308
            why = "as the file says it" if number else "not known" if value is None else None
            if file == "metrics.jsonl" and key == "value" and value in (10**400, math.nan):
                why = "not finite, as of a run that diverged"
            why = why or alike(json.loads(text if file.endswith("n") else text.splitlines()[0]).get(key), value)
            yield Case(f"number/{file} {key}={short(value)}/{use}", shlex.split(use), before=put(f"run-gpt/{file}", "\n".join([*lines, ""]).encode()),
                       fine=[same, said(file, key), *([why] if why else [])])
    data = (world / "text.txt").read_bytes()
    for (name, change), use in itertools.product(DATA_CHANGED.items(), ("train run-gpt --resume train.steps=3", "evaluate run-gpt")):
        yield Case(f"number/data {name}/{use}", shlex.split(use), before=put("text.txt", change(data)), fine=[same, said("data", "text.txt")])
        yield Case(f"number/data.path {name}/{use}", [*shlex.split(use), "data.path=other.txt"], before=put("other.txt", change(data)), fine=[said("data", "other.txt")])


def in_a_gone_folder() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def linked(path: str, target: str | None) -> Callable[[], None]:
    """A link, or for None a file, in the place of a folder."""

    def make() -> None:
        (shutil.rmtree if Path(path).is_dir() and not Path(path).is_symlink() else Path(path).unlink)(path) if os.path.lexists(path) else None
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, path) if target else Path(path).write_text("")

    return make


PLACES: dict[str, tuple[Callable[[], None], list[str]]] = {
    **{f"runs {name}": (linked(path, target), ["train copy.yaml", "train ../here/copy.yaml", "study study.yaml", "ladder copy.yaml", "check copy.yaml",
                                               "train copy.yaml --resume", "report latest --to out", "profile copy.yaml", "fit copy.yaml --sweep 1"])
       for name, path, target in (("dangles", "runs", "/nowhere/at/all"), ("is a loop", "runs", "runs"), ("is a file", "runs", None),
                                  ("of it is a file", "runs/copy", None), ("of it dangles", "runs/copy", "/nowhere/at/all"),
                                  ("is endless", "runs", "/dev/zero"), ("is /proc", "runs", "/proc"))},
    "folder gone": (in_a_gone_folder, ["train ../copy.yaml", "show gpt.yaml", "predict ../run-bert 'a film'", "plan gpt2-small --on A100", "keys", "models", "hardware",
                                       "new out.yaml --data ../reviews", "evaluate ../run-bert", "study ../study.yaml", "report ../run-gpt --to out", "check ../copy.yaml",
                                       "tokenizer train ../text.txt --vocab-size 300 --to out", "export ../run-gpt --to out", "train ../copy.yaml --processes 2"]),
    **{f"best {name}": (linked("run-bert/checkpoints/best", target), ["evaluate run-bert", f"predict run-bert {TEXT}", "export run-bert --to out",
                                                                     "report run-bert --to out", "prove run-bert", "train run-bert --resume train.steps=3",
                                                                     f"look run-bert {TEXT} --to p.html"])
       for name, target in (("dangles", "nowhere"), ("is a loop", "best"), ("is a file", None), ("of another run", "../../run-gpt/checkpoints/best"),
                            ("is endless", "/dev/zero"), ("is its parent", ".."))},
}  # fmt: skip
NEEDS_NONE = ("plan gpt2-small", "keys", "models", "hardware")


def place_cases() -> Iterator[Case]:
    for name, (before, uses) in PLACES.items():
        for use in uses:
            fine: list[Rule] = [same, said("best", "runs")]
            if name.startswith("runs") or use.startswith(NEEDS_NONE):
                fine += ["it writes nowhere" if use.startswith(("check", "fit", "profile", "study", "ladder")) else same]
            yield Case(f"place/{name}/{use}", shlex.split(use), before=before, fine=fine)


def encoded(name: str) -> Callable[[], None]:
    return lambda: sys.stdout.reconfigure(encoding=name, errors="strict")


ENCODINGS = ("ascii", "latin-1", "cp1252")
NOT_RUN = ("demo", "calibrate", "collectives")  # minutes
MEASURES = ("profile", "bench", "check", "ladder", "fit", "scale", "quantize", "study")
UNICODE = {"reads": "predict run-bert 'ein schöner Film → ☃'", "continues": "generate run-gpt '☃'", "refuses": "show gpt.yaml 'modèl☃=1'",
           "refuses 2": "train '☃.yaml'", "draws": "plan gpt.yaml --on 2xA100 --picture ☃.svg", "named": "train gpt.yaml name=☃ log.dir=☃"}


def encoding_cases() -> Iterator[Case]:
    from gradus.cli import parser

    verbs = [v for v in parser()._subparsers._group_actions[0].choices if v not in (*NOT_RUN, "launch")]
    uses = {verb: f"{verb} {POSITIONAL.get(verb, '')} {REQUIRED.get(verb, '')}" for verb in verbs} | UNICODE
    uses |= {f"{verb} --help": f"{verb} --help" for verb in verbs} | {"slurm": "launch slurm gpt.yaml --dry-run --to j"}
    uses |= {"ladder": "ladder copy.yaml --rounds 1 --to out", "plan": "plan gpt2-small --tokens 1e9 --on 8xA100", "--help": "--help", "plan all": "plan gpt.yaml --all"}
    for (name, use), encoding in itertools.product(uses.items(), ENCODINGS):
        yield Case(f"encoding/{encoding} {name}", shlex.split(use), before=encoded(encoding), env={"PYTHONIOENCODING": encoding},
                   fine=["times, measured anew"] if name in MEASURES else [same_figures])


# ---------------------------------------------------------------- the API, in a program

IN_A_PROGRAM: dict[str, tuple[str, str | None]] = {  # (code; a line that prints what came of it, why it may be accepted)
    "inside no_grad": ("import torch\nwith torch.no_grad(): print(api.train('gpt.yaml', 'log.dir=o').summary['steps'])", "it trains all the same"),
    "inside inference_mode": ("import torch\nwith torch.inference_mode(): print(api.train('gpt.yaml', 'log.dir=o').summary['steps'])", "it trains all the same"),
    "default dtype": ("import torch\ntorch.set_default_dtype(torch.float64)\nprint(api.train('gpt.yaml', 'log.dir=o').summary['steps'])", "fp32 all the same"),
    "default device": ("import torch\ntorch.set_default_device('meta')\nprint(api.train('gpt.yaml', 'log.dir=o').summary['steps'])", "a CPU all the same"),
    **{f"hidden of {tensor}": (f"import torch\nprint(api.load('run-gpt').hidden({tensor}).shape)", None) for tensor in (
        "torch.tensor([[10**6]])", "torch.tensor([[-1]])", "torch.rand(1, 3)", "torch.zeros(1, 5000, dtype=torch.long)", "torch.zeros(3, dtype=torch.long)", "5", "None",
        "torch.zeros(1, 0, dtype=torch.long)")},
    **{f"features of {tensor}": (f"import torch\nprint(api.load('run-vit').features({tensor}).shape)", None) for tensor in (
        "torch.zeros(1, 1, 8, 8)", "torch.zeros(1, 3, 9, 9)", "torch.zeros(3, 8, 8)", "torch.zeros(1, 3, 8, 8, dtype=torch.long)", "5")},
    "folder gone, train": ("import os\nos.mkdir('g'); os.chdir('g'); os.rmdir('../g')\nprint(api.train('../copy.yaml'))", None),
    "folder gone, predict": ("import os\nos.mkdir('g'); os.chdir('g'); os.rmdir('../g')\nprint(api.predict('../run-bert', 'a'))", "what `..` means is known"),
    "two at once": ("import threading\nends = []\ndef go(name):\n    try: api.train('gpt.yaml', 'log.dir=' + name); ends.append('ok')\n"
                    "    except UserError: ends.append('refused')\nboth = [threading.Thread(target=go, args=(n,)) for n in ('o', 'p')]\n"
                    "[t.start() for t in both]; [t.join() for t in both]\nassert sorted(ends) in (['ok', 'ok'], ['ok', 'refused']), ends", "one, or one after the other"),
    "two at once in one folder": ("import threading\nends = []\ndef go():\n    try: api.train('gpt.yaml', 'log.dir=o'); ends.append('ok')\n"
                                  "    except UserError: ends.append('refused')\nboth = [threading.Thread(target=go) for _ in range(2)]\n"
                                  "[t.start() for t in both]; [t.join() for t in both]\nassert sorted(ends) == ['ok', 'refused'], ends", "one of them"),
}  # fmt: skip
HOOKS = {"raises": ("raise ValueError('mine')", "ValueError"), "exits": ("raise SystemExit(3)", "SystemExit"), "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
         "spoils the weights": ("[p.data.fill_(float('nan')) for p in trainer.model.parameters()]", "UserError"),
         "raises ours": ("raise UserError('mine')", "UserError"), "raises nothing": ("pass", "nothing")}


def program_cases() -> Iterator[Case]:
    for name, (code, why) in IN_A_PROGRAM.items():
        yield Case(f"program/{name}", run=functools.partial(api, code), fine=[why] if why else [])
    for name, (body, ends) in HOOKS.items():
        code = (f"from gradus.train.hooks import Hook\nclass Mine(Hook):\n    def after_step(self, trainer, taken): {body}\n"
                f"end = 'nothing'\ntry: api.train('gpt.yaml', 'log.dir=o', hooks=[Mine()])\nexcept BaseException as e: end = type(e).__name__\nassert end == '{ends}', end")
        yield Case(f"program/a hook {name}", run=functools.partial(api, code), fine=[f"it ends with {ends}, as the hook's own"])


# ---------------------------------------------------------------- all of them

SHARES = {"world": 0.25, "written": 0.12, "override": 0.06, "option": 0.07, "line": 0.07, "stdin": 0.01, "process": 0.02,
          "api": 0.03, "page": 0.02, "bound": 0.08, "adapter": 0.05, "finite": 0.03, "look": 0.03, "energy": 0.05,
          "layout": 0.04, "beside": 0.02, "number": 0.02, "place": 0.01, "encoding": 0.01, "program": 0.01}


def sample(cases: list[Case], pick: random.Random, n: int) -> list[Case]:
    return pick.sample(cases, min(n, len(cases)))


def table(world: Path, seed: int = 0, n: int = 1000) -> list[Case]:
    """n cases of a seed, none of them twice. world: where `build` made the good things."""
    few = {"line": line_cases(), "stdin": stdin_cases(), "process": process_cases(), "bound": bound_cases(),
           "adapter": adapter_cases(world), "finite": finite_cases(world), "look": look_cases(), "energy": energy_cases(),
           "layout": layout_cases(), "beside": beside_cases(world), "number": number_cases(world),
           "place": place_cases(), "encoding": encoding_cases(), "program": program_cases()}
    found: dict[str, Case] = {}
    made: dict[str, Callable[[random.Random, int], Any]] = {
        "world": lambda pick, k: world_cases(world, pick, k), "written": lambda pick, k: written_cases(world, pick, k),
        "override": lambda pick, k: override_cases(world, pick, k), "option": option_cases,
        "api": api_cases, "page": page_cases,
        **{kind: functools.partial(sample, list(cases)) for kind, cases in few.items()},
    }  # fmt: skip
    for (kind, share), upto in zip(SHARES.items(), itertools.accumulate(SHARES.values())):
        fewer, pick = len(found), random.Random(f"{seed} {kind}")  # what a kind draws does not hang on another's files
        for _ in range(20):
            missing = round(n * upto) - round(n * (upto - share)) - (len(found) - fewer)
            found |= {case.name: case for case in (made[kind](pick, missing) if missing > 0 else ())}
    pick = random.Random(f"{seed} rest")  # in the place of those that this world has nothing for
    for _ in range(20):
        found |= {case.name: case for case in (made["override"](pick, n - len(found)) if len(found) < n else ())}
    return list(found.values())[:n]
