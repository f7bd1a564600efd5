"""Bad inputs made from a seed, over every verb, every kind of file that is read, the plan's page and `gradus.api`.

`python tests/bad_input.py [SEED] [--n 1000] [--only WORD...] [--world FOLDER]` runs the inputs of a seed, or those with
one of the words in their name, and says what came of each: one clear error (clear), a traceback, a hang, a dead process
(abort), accepted with the reason why it may be, accepted without one (unexplained), or something else (other). The exit
code is 1 where there is anything but clear errors and explained accepts.

Each input runs in a forked process of its own, in a copy of one small world (`build`), under limits of time and memory.
The inputs are in bad_input_cases.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import multiprocessing.forkserver
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

WALL, CPU, MEMORY = 300.0, 120, 6 << 30  # s, s, bytes above what the process had
LINES = 41  # of an error, at most: what limits.shown lets through
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
PIPES = ("pipe.yaml", "pipe.txt")
REPORTED = {"check": "FAIL", "study": "failed",
            "bench": "failed", "train": "not finite"}  # verbs that end with 1 where a line of theirs says so

# ---------------------------------------------------------------- an input, and what came of it

Rule = str | Callable[["Outcome"], str | None]  # why an input may be accepted, or what finds out from the outcome


@dataclasses.dataclass
class Case:
    name: str
    argv: list[str] | None = None  # of gradus; several commands with "&&" between them, all of which must be taken; or
    run: Callable[[], int] | None = None
    before: Callable[[], Any] | None = None  # what damages the copy of the world, or the process
    fine: Sequence[Rule] = ()  # () : it must be refused
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    stdin: bytes = b""
    copied: str = ""  # a folder of weights, which the case has as `given`, as other programs write it: no checksums


@dataclasses.dataclass
class Outcome:
    case: Case
    verdict: str  # clear, accepted, unexplained, traceback, hang, abort, other
    errors: str  # standard error
    shown: str  # standard output
    seconds: float
    why: str = ""  # it was accepted
    whole: Outcome | None = None  # of the same command without the damage, where `same` asks for it

    def __str__(self) -> str:
        command = f"gradus {shlex.join(self.case.argv)}" if self.case.argv else ""
        text = self.errors if self.verdict not in ("accepted", "unexplained") else self.errors + self.shown
        if self.whole and self.verdict == "unexplained":
            here, whole = answer(self).splitlines(), answer(self.whole).splitlines()
            missing = " | ".join(line for line in whole if line not in here)
            text += f"\nof the whole ({self.whole.verdict}): {missing[:600]}"
        return f"=== {self.verdict} {self.seconds:.1f} s  {self.case.name}\n{command[:400]}\n{text[-1500:]}"


def same(outcome: Outcome) -> str | None:
    """What is damaged is not read here, or was mended: the answer is that of the whole."""
    if outcome.whole and outcome.whole.verdict in ("accepted",
                                                   "unexplained") and answer(outcome) == answer(outcome.whole):
        return "the answer of the whole file"
    return None


def same_figures(outcome: Outcome) -> str | None:
    """The stream holds fewer characters than the text has: the lines and the figures in them are those of the whole."""

    def figures(one: Outcome) -> list[str]:
        return [re.sub(r"[^0-9]", "", re.sub(ESCAPED, "", line)) for line in answer(one).splitlines()]

    whole = outcome.whole
    return "the lines and figures of the whole" if whole and figures(whole) == figures(outcome) else None


ESCAPED = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}"


def answer(outcome: Outcome) -> str:
    """What was printed, and a digest of what was written, without times and without the memory of the process."""
    kept = [line for line in outcome.shown.splitlines() if not re.match(TIMED, line)]
    return re.sub(r"\d[\d.,]*(e[-+]\d+)?k? ?(tokens/s|samples/s|[GM]B|ms|s)\b|\d{8}-\d{6}|\d\d\d\d-\d\d-\d\d", "#", "\n".join(kept))


TIMED = (  # lines that depend on the machine's speed, or on the case's having typst
    r"out/report.pdf|train_(runtime|\w+_per_second)|hours_per|where the time|the plan|plan: |note: |step \d|ms, batch|.*--force: it is slower"
    r"|  (weights|gradients|optimizer|activations|tensors|process|step)\b"
)


def said(*words: str) -> Rule:
    """A note, in the outcome, with one of the words."""

    def look(outcome: Outcome) -> str | None:
        lines = re.findall(r"^.*(?:note|warning): .*$|^.*\b(?:damaged|left out|skipped|made anew)\b.*$",
                           outcome.errors + outcome.shown, re.M)
        return "said in a note" if any(word in line for line in lines for word in words) else None

    return look


def judge(case: Case, status: int, late: bool, errors: str, shown: str, left: str = "") -> str:
    """left: names of half-written files in the folder."""
    if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return "hang"
    if os.WIFSIGNALED(status):
        return "abort"
    if "Traceback (most recent call last)" in errors + shown or "panicked at" in errors:
        return "traceback"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return "accepted"
    if code == 1 and (word := REPORTED.get((case.argv or [""])[0])) and word in errors + shown:
        return "clear"
    lines = [line for line in errors.splitlines() if line.strip() and not line.startswith(("note: ", "planning "))]
    clear = code in (2, 74) and 0 < len(lines) <= LINES and max(map(len, lines)) < 2000 and not left
    return "clear" if clear else "other"


# ---------------------------------------------------------------- running them


def child(case: Case, world: Path, out: Path) -> None:
    """Runs a case in a copy of the world, out/here. Never returns."""
    code = 1
    try:
        os.setsid()
        multiprocessing.forkserver._forkserver.__init__()  # the parent's server is no child of this process
        os.fsync = lambda file: None  # whether it survives a power cut is another test's
        shutil.copytree(world, out / "here", symlinks=True)
        os.chdir(out / "here")
        for pipe in PIPES:
            os.mkfifo(pipe)
        with socket.socket(socket.AF_UNIX) as s:
            s.bind("socket.yaml")
        (out / "stdin").write_bytes(case.stdin)
        for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY | os.O_CREAT),
                                    (2, "stderr", os.O_WRONLY | os.O_CREAT)):
            os.dup2(os.open(out / name, flags), number)
        sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", buffering=1, errors="backslashreplace")  # noqa: SIM115
        here = {"GRADUS_HARDWARE": str(Path("hardware.yaml").absolute()), "GRADUS_CACHE": str(Path("cache").absolute())}
        os.environ.update({**OFFLINE, **here, **case.env})
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if zlib.crc32(case.name.encode(errors="surrogatepass")) % 4:
            sys.modules["typst"] = None  # seconds for every PDF: of a quarter of the reports is enough
        if case.copied:
            shutil.copytree(case.copied, "given", ignore=shutil.ignore_patterns("checksums.json"))
        if case.before:
            case.before()
        code = case.run() if case.run else commands(case.argv)
        for file in sorted(Path("out").rglob("*")) if code == 0 else ():
            if file.suffix in (".html", ".safetensors",
                               ".yaml") and file.is_file():  # what depends on nothing but the input
                print("wrote", file, hashlib.sha256(file.read_bytes()).hexdigest()[:16])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def commands(words: list[str]) -> int:
    """Each as a command line of its own. 3: a later one refuses what the first has written."""
    from gradus.cli import main

    each = [list(words)]
    while "&&" in each[-1]:
        at = each[-1].index("&&")
        each[-1:] = [each[-1][:at], each[-1][at + 1 :]]
    for n, argv in enumerate(each):
        if code := main(argv):
            return 3 if n and code == 2 else code
    return 0


def worked(session: int) -> float:
    """Seconds of processor time of all processes of a session."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def run_case(case: Case, world: Path) -> Outcome:
    """What came of a case, and, where it was accepted, whether that is explained."""
    out = world.parent / "run"  # always the same, as paths are in what is written
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    sys.stdout.flush()
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        child(case, world, out)
    ended = status = 0
    until, used = began + WALL, 0.0
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        time.sleep(0.003)
        if time.monotonic() > until:  # slow, on a busy machine, is no hang
            until, before, used = until + WALL, used, worked(pid)
            if used - before < WALL / 100:
                break
    late, seconds = not ended, time.monotonic() - began
    if late:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(OSError):
                kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # what it may have started
    errors, shown = ((out / name).read_text(errors="replace") if (out / name).exists() else "" for name in ("stderr",
        "stdout"))
    left = ", ".join(str(path.relative_to(out)) for path in (out / "here").rglob(".writing-*"))
    shutil.rmtree(out, ignore_errors=True)
    verdict = judge(case, status, late, errors, shown, left)
    return Outcome(case, verdict, f"{errors}\nleft behind: {left}" if left and verdict == "other" else errors, shown,
                   seconds)


def run_all(cases: list[Case], world: Path, say: Callable[[str], None] = lambda line: None) -> list[Outcome]:
    """What came of each, in the order of the cases."""
    found, wholes = [], {}
    for case in cases:
        outcome = run_case(case, world)
        if outcome.verdict == "accepted":
            key = repr((case.argv, case.env, case.stdin, case.copied))
            if {same, same_figures} & set(case.fine) and case.before and key not in wholes:
                wholes[key] = run_case(dataclasses.replace(case, before=None), world)
            outcome.whole = wholes.get(key)
            outcome.why = next(filter(None, (rule(outcome) if callable(rule) else rule for rule in case.fine)), "")
            outcome.verdict = "accepted" if outcome.why else "unexplained"
        found.append(outcome)
        say(f"{outcome.verdict:11} {outcome.seconds:5.1f} s  {case.name}{f': {outcome.why}' if outcome.why else ''}")
    return found


# ---------------------------------------------------------------- the world: recipes, data, runs

SMALL = {"n_layers": 1, "d_model": 16, "n_heads": 2}
SHORT = {"optimizer": {"name": "adamw", "lr": 1e-3}, "batch": {"samples": 4}, "train": {"steps": 2},
         "log": {"every": 1}}
RECIPES: dict[str, dict[str, Any]] = {
    "gpt": {"model": {"family": "gpt", **SMALL, "seq_len": 16}, "task": {"name": "causal_lm"},
            "tokenizer": {"kind": "char"},
            "data": {"kind": "text", "path": "text.txt"}, **SHORT},
    "bert": {"model": {"family": "bert", **SMALL, "d_ff": 32, "seq_len": 16, "n_classes": 2},
             "task": {"name": "classification"},
             "data": {"kind": "labelled", "path": "reviews", "text": "text", "label": "label"},
             "tokenizer": {"kind": "word"}, **SHORT},
    "vit": {"model": {"family": "vit", **SMALL, "d_ff": 32, "image_size": 8, "patch_size": 4, "n_channels": 3},
            "task": {"name": "classification"}, "data": {"kind": "images", "path": "images"}, **SHORT},
    "pairs": {"model": {"family": "seq2seq", **SMALL, "d_ff": 32, "seq_len": 16}, "task": {"name": "translation"},
              "data": {"kind": "pairs", "path": "pairs", "source": "de", "target": "en"}, "tokenizer": {"kind": "word"},
              **SHORT},
    "copy": {"model": {"family": "seq2seq", **SMALL, "d_ff": 16},
             "task": {"name": "copy", "n_symbols": 11, "length": 5},
             "data": {"kind": "synthetic", "n_train": 64, "n_valid": 10}, "evaluate": {"samples": 0}, **SHORT},
    "llama": {"model": {"family": "llama", **SMALL, "n_kv_heads": 2, "d_ff": 32, "seq_len": 16},
              "task": {"name": "causal_lm"},
              "data": {"kind": "text", "path": "text.txt"}, "tokenizer": {"kind": "bpe", "vocab_size": 300}, **SHORT},
}  # fmt: skip
ARGUMENTS = {
    "learning_rate": 1e-3, "per_device_train_batch_size": 4, "max_steps": 2, "warmup_steps": 1, "adam_beta1": 0.9,
    "lr_scheduler_type": "linear",
    "eval_steps": 1, "eval_strategy": "steps", "logging_steps": 1, "report_to": "none", "seed": 0, "fp16": False,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 1, "weight_decay": 0.1, "max_grad_norm": 1.0, "optim": "adamw_torch",
    "dataloader_num_workers": 0, "output_dir": "x",
    "save_steps": 1, "torch_compile": False, "warmup_ratio": 0.1,
}  # fmt: skip
DEVICE = {"peaks": {"fp32": "10 TFLOP/s"}, "memory": "8 GiB", "bandwidth": "100 GB/s", "power": "100 W", "node": 2,
          "year": 2020, "kind": "gpu",
          "aliases": ["mine"], "driver": "X", "link": {"bandwidth": "10 GB/s"}, "date": "2026-01-01",
          "source": "me"}  # fmt: skip
STUDY = {"recipe": "gpt.yaml", "steps": 1, "warm_up": 0, "rounds": 1, "plan": False, "runner": "none", "about": "# Two",
         "columns": ["time/step"],
         "configurations": {"one": {"source": {"time/step": 1.0}},
                            "two": {"set": ["layout.micro_batch=1"], "source": {"time/step": 2.0},
                                    "against": "one"}}}  # fmt: skip
ADAPTED = ["model={family: bert, head: classification, init: bert-hf}", "tokenizer={kind: file}", "adapter.rank=2",
           "optimizer.lr=0.3"]  # so that two steps change the answers
MADE = {  # what is made of the runs: the folder or file that shows that it is there → the command
    "exported": "export run-gpt --to exported", "bert-hf": "export run-bert --to bert-hf",
    "bert-onnx": "export run-bert --to bert-onnx --as onnx",
    "bert-int8": "quantize run-bert --to bert-int8 --as dynamic --force", "llama-hf": "export run-llama --to llama-hf",
    "cache/exports": "predict run-bert 'a good film' --engine onnx",
    "cache/engines": "predict run-bert 'a good film' --precision bf16",
    "studied": "study study.yaml --to studied", "ground": "tokenizer train text.txt --vocab-size 300 --to ground",
    "run-adapter": f"train bert.yaml {' '.join(map(shlex.quote, ADAPTED))} log.dir=run-adapter",
    "adapter": "export run-adapter --to adapter",
}  # fmt: skip
QUICK = {"run-gpt", "run-bert", "exported", "studied"}  # the part of the world that a sample needs


def build(only: set[str] | None = None) -> int:
    """Small good things in the working folder, of which the bad ones are made. only: of the runs and of MADE, these."""
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    from gradus.cli import main

    Path("text.txt").write_text("".join(f"line {i} of a text that says nothing.\n" for i in range(200)))
    for folder in ("reviews", "pairs", "cache", "tables"):
        Path(folder).mkdir()
    for split, n in (("train", 40), ("valid", 10)):
        rows = [(f"a {'good' if i % 2 else 'bad'} film {i % 5}", i % 2) for i in range(n)]
        Path(f"reviews/{split}.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
        Path(f"tables/{split}.jsonl").write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text,
            label in rows))
        pyarrow.parquet.write_table(pyarrow.table(dict(zip(("text", "label"), map(list, zip(*rows))))),
                                    f"tables/{split}.parquet")
        Path(f"pairs/{split}.de").write_text("ein Satz .\nnoch ein Satz .\n" * n)
        Path(f"pairs/{split}.en").write_text("a sentence .\nanother sentence .\n" * n)
        for i in range(8):
            folder = Path(f"images/{split}/{('cat', 'dog')[i % 2]}")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.default_rng(i).integers(0, 255, (8, 8, 3),
                dtype=np.uint8)).save(folder / f"{i}.png")
    for name, recipe in {**RECIPES, "study": STUDY, "mine": {"devices": {"X1": DEVICE}}}.items():
        Path(f"{name}.yaml").write_text(json.dumps(recipe))
    Path("args.json").write_text(json.dumps({"TrainingArgs": ARGUMENTS}))
    Path("hardware.yaml").write_text("devices: {}\n")
    Path("notes.md").write_text("# Notes\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    for name in RECIPES:
        assert (only and f"run-{name}" not in only) or main(["train", f"{name}.yaml", f"log.dir=run-{name}"]) == 0, name
        if not only:
            main(["plan", f"{name}.yaml"])  # what is traced is kept
    for name, command in MADE.items():
        assert (only and name not in only) or main(shlex.split(command)) == 0, command
    if Path("adapter").exists():  # as PEFT writes it: without our file and our checksums
        shutil.copytree("adapter", "peft", ignore=shutil.ignore_patterns("gradus_config.json", "checksums.json"))
    return 0


def built(folder: Path, only: set[str] | None = None) -> Path:
    """The good things, made in a process of its own, so that this one stays fit to be forked."""
    empty, out = folder / "empty", folder / "building" / "run"  # where the cases run, as paths are in what is written
    empty.mkdir()
    out.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        child(Case("build", run=lambda: build(only)), empty, out)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, (out / "stderr").read_text()[-4000:]
    for name in (*PIPES, "socket.yaml"):  # cannot be copied: each copy gets its own
        (out / "here" / name).unlink()
    return (out / "here").rename(out.parent / "here")


PRELOADED = """
onnxruntime sacrebleu tokenizers.implementations
torch.distributed.fsdp typst gradus.api gradus.infer.export gradus.infer.generate gradus.infer.predict
gradus.infer.quantize gradus.plan.web gradus.proof.bench gradus.proof.ladder gradus.proof.study_file
gradus.report.look gradus.report.report gradus.train.new gradus.train.run
"""


def prepare() -> None:
    """Import once what every case needs."""
    import gradus.cli

    for name in PRELOADED.split():
        importlib.import_module(name)
    os.environ.update(OFFLINE)
    sys.modules["torch"].set_num_threads(1)
    small = ["model.n_layers=1", "model.d_model=64", "model.n_heads=2", "model.vocab_size=100", "batch.samples=1"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert gradus.cli.main(["plan", "gpt2-small", *small, "--on", "A100"]) == 0  # what is imported late is then here too


def main() -> int:
    from bad_input_cases import table

    p = argparse.ArgumentParser()
    p.add_argument("seed", nargs="?", type=int, default=0)
    p.add_argument("--n", type=int, default=1000, help="how many inputs")
    p.add_argument("--only", nargs="+", default=[], help="those with one of these in their name")
    p.add_argument("--world", type=Path, help="a folder where the world is kept for the next time")
    args = p.parse_args()
    sys.stdout.reconfigure(errors="backslashreplace")  # names have what no encoding has
    prepare()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as name:
        began, folder = time.monotonic(), args.world or Path(name)
        folder.mkdir(exist_ok=True)
        world = folder / "building" / "here" if (folder / "building").exists() else built(folder)
        print(f"the world is built: {time.monotonic() - began:.0f} s", flush=True)
        cases = [c for c in table(world, args.seed,
                                  args.n) if not args.only or any(word in c.name for word in args.only)]
        if not cases:
            print("no input of this seed has such a name: what is drawn depends on the world's files; --world FOLDER keeps them")
            return 2
        found = run_all(cases, world, say=lambda line: print(line, flush=True))
    wrong = [o for o in found if o.verdict not in ("clear", "accepted")]
    for o in wrong:
        print(f"\n{o}\nalone: python tests/bad_input.py {args.seed} --n {args.n} --only {shlex.quote(o.case.name)}")
    print("\naccepted, and why:", *(f"{n:5} {why}" for why, n in Counter(o.why for o in found if o.why).most_common()),
          sep="\n")
    print("slowest:", *(f"{o.seconds:5.0f} s {o.case.name}" for o in sorted(found, key=lambda o: -o.seconds)[:5]),
          sep="\n")
    counts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(o.verdict for o in found).most_common())
    print(f"seed {args.seed}, {len(found)} inputs in {time.monotonic() - began:.0f} s: {counts}")
    return bool(wrong)


if __name__ == "__main__":
    import bad_input  # the module that bad_input_cases knows

    raise SystemExit(bad_input.main())
