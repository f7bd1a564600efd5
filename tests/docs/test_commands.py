"""Every block of code of the README and the pages is run.

- A command is what a fenced block without a language shows, a line a command, and what a page sets in code style with more than a program's
  and a verb's name. It runs at a small size and must not fail: `STANDS_FOR` says what a placeholder, a recipe or a large size is replaced by;
  `ELSEWHERE` which commands cannot be run here and where they are run. So this does not see that a command fails at its own size or without the
  data that is put in: those of the errata that need none run as they stand too (test_errata.py).
- A block of `$ command` lines with what they print is compared with what they print now: as it stands where that does not depend on the
  machine (`LITERAL`), else with any other numbers in the place of its own. `...` stands for anything.
- Python runs in order, a page at a time; YAML is read as a study or as a recipe.
- `kind_of` says what a block is. One that is nothing of this is an error.
"""

from __future__ import annotations

import difflib
import io
import itertools
import json
import re
import runpy
import shlex
import shutil
import string
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml

from gradus import models, recipe
from gradus.cli import main
from gradus.data import tokenizers
from gradus.hardware.files import quotes
from gradus.models import llama
from gradus.proof import check, fit, study_file
from gradus.recipe.schema import BertConfig
from gradus.tasks import causal_lm

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN_BY_THEIR_OWN_TESTS = ("your-data.md", "train.md", "python.md", "adapters.md", "chats.md", "llama-cpp.md")
SHOWN = {file.read_text(encoding="utf-8") for file in (ROOT / "docs/programs").iterdir() if file.suffix in (".py", ".c")}  # test_collectives_page.py
PROGRAMS = ("gradus", "python", "torchrun", "mpirun", "mpiexec", "srun", "modal", "scontrol", "pytest", "make", "pip", "apt-get", "rsync", "mkdir", "python3", "source")

TINY = {  # what makes a packaged recipe small
    "copy-task": "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 data.n_train=64 data.n_valid=16 batch.samples=16 train.steps=4",
    "copy-task-s1": "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 train.steps=2",
    "digits-vit": "model.n_layers=1 train.epochs=null train.steps=2 schedule.warmup_steps=1",
    "shakespeare-char-gpt": "model.n_layers=1 model.d_model=32 model.n_heads=2 model.seq_len=48 batch.samples=12 train.steps=4 "
    "schedule.warmup_steps=1 evaluate.every=2 evaluate.max_new=null",
    "sst2-bert": "model.init=bert data.path=sst2 train.epochs=null train.steps=3 schedule.warmup_steps=1 batch.samples=4",
    "imdb-bert": "model.init=bert data.path=imdb data.max_len=32 train.epochs=null train.steps=2 batch.samples=8",
    "wikitext2-gpt": "data.path=wikitext-2 model.n_layers=1 model.d_model=32 model.n_heads=2 model.seq_len=16 tokenizer.vocab_size=300 batch.samples=4 "
    "train.epochs=null train.steps=2 schedule.warmup_steps=1",
    "bert-pretrain": "model.n_layers=1 model.d_model=32 model.n_heads=2 model.d_ff=64 model.seq_len=32 tokenizer.vocab_size=300 batch.samples=4 "
    "train.steps=2 data.path=corpus.txt data.workers=1",
    "cifar10-vit-small": "model.n_layers=1 model.d_model=24 model.n_heads=2 model.d_ff=32 batch.samples=8 train.epochs=null train.steps=2 "
    "schedule.warmup_steps=1 data.workers=0 evaluate.batch=8 data.path=cifar10",
}
RECIPE = f"copy-task {TINY['copy-task']}"
STANDS_FOR = [  # (pattern in a command, what replaces it), in this order
    (r"^gradus predict RUN\b", "gradus predict runs/classes"),
    (r"^gradus quantize RUN --to DIR", "gradus quantize runs/classes --to quantized"),
    (r"^gradus export RUN\b", "gradus export runs/classes"),
    (r"^gradus generate RUN\b", "gradus generate runs/words --max-new 4"),
    (r"^gradus report runs/one runs/bf16 runs/two --to report --notes notes.md", "gradus report runs/copy runs/stopped --to out --notes notes.md"),
    (r"^gradus study precision.yaml", "gradus study precision.yaml --to studies/new --rounds 1 --steps 2"),
    (r"^gradus report runs/one studies/precision --to report", "gradus report runs/copy studies/precision --to out"),
    (r"^gradus train runs/\S+ --resume", "gradus train runs/stopped --resume"),
    (r"^gradus study FILE\.yaml", f"gradus study some.yaml {TINY['copy-task']} --only fp32 --rounds 1 --steps 2 --to out"),
    (r"^gradus report studies/NAME", "gradus report runs/copy"),
    (r"^gradus report runs/copy-task/latest .*", "gradus report runs/copy --to out"),
    (r"^(gradus train .*) log\.dir=(?!RUN\b)\S+", r"\1"),
    (r"\bstudies/mini-gpt-on-wikitext2/runs/\S+|\bruns/\S*(gpt|llama|book)\S*/latest\b", "runs/words"),
    (r"\bruns/\S+/latest\b", "runs/copy"),
    (r"^gradus bench (RUN$|runs/words .*)", "gradus bench runs/words --engines torch --precisions fp32 --batch 1 --runs 2 --seconds 0.01 --rounds 1 --to out"),
    (r"^gradus quantize runs/words --to \S+", "gradus quantize runs/classes --to quantized"),
    (r"--max-new \d+", "--max-new 4"),
    (r"\btrain\.steps=1000\b", "train.steps=8"),
    (r"^(gradus quantize (?!.*--force).*)", r"\1 --force"),
    (r"\bconfig_mp.json", "config.json"),
    (r"(--json_file .*) --gpus 4", r"\1 --gpus 2"),
    (r"\b(RUN)\.\.\.", "runs/copy runs/again"),
    (r"log\.dir=RUN\b", "log.dir=runs/new"),
    (r"\bRUN\b", "runs/copy"),
    (r"hf:FOLDER(_OR_NAME)?\b", "hf:bert"),
    (r"model\.init=(FOLDER|MiniLM)\b", "model.init=bert"),
    (r"\bFOLDER\b", "bert"),
    (r"(--to|--csv) (DIR|FILE)\b", r"\1 out"),
    (r"--json_file FILE --on 8x", "--json_file config.json --on 2x"),
    (r"--json_file FILE", "--json_file config.json"),
    (r"layout\.\.\.", "layout.tensor=2"),
    (r"^gradus train \.\.\. ", "gradus train RECIPE "),
    (r" \.\.\.(?= |$)| key=value", ""),
    (r"^gradus launch modal$", "gradus launch modal RECIPE --gpu A100 --to app.py"),
    (r"\[(NAME|POINTS\.json|SECTION)\]", ""),
    (r"\bPOINTS\.json\b", "points.json"),
    (r"\bstdlib-gpt\b", "shakespeare-char-gpt data.path=input.txt"),
    (r"\bRECIPE\b", RECIPE),
    (r"^gradus plan llama2-7b .*--search", f"gradus plan {RECIPE} --on 8xH100 --search"),
    (r"gpt3-175b", "gpt2-small"),  # large sizes
    (r"llama2-7b(?! --optimal)", "gpt2-small"),
    (r"--tokens 300e9", "--tokens 300e6"),
    (r"llama3.1-405b", "gpt2-small"),
    (r"--on (16384|1024|64)x", "--on 8x"),
    (r"--on 384xA100 layout\.tensor=4 layout\.pipeline=12 layout\.shard=8", "--on 16xA100 layout.tensor=4 layout.pipeline=2 layout.shard=2"),
    (r"--processes 4|--processes 1,2,4", lambda found: found[0].replace("1,2,4", "1,2").replace("4", "2")),
    (r"^gradus scale (.*)", r"gradus scale \1 --steps 2 --warmup 2 --repeat 1"),
    (r"^gradus calibrate( --threads 1)?( --seconds \d+)?$", "gradus calibrate --seconds 10 --threads 1"),
    (r"^gradus collectives (?!.*--sizes)(.*)", r"gradus collectives \1 --sizes 1KiB"),
    (r"--sizes \S+,\S+", "--sizes 1KiB,64KiB,1MiB"),
    (r"^gradus fit (.*) --sweep \S+", r"gradus fit \1 --sweep 4,8"),
    (r"--vocab-size 8000", "--vocab-size 300"),
    (r"^gradus launch slurm (?!--status)(.*?)(?: --dry-run)?$", r"gradus launch slurm \1 --dry-run"),
    (r"^(gradus launch ssh .*) --host \S+ -p \d+( --follow)?$", r"\1"),  # without a host it prints what it would run
    (r"--model meta-llama/Llama-2-7b-hf", "--model bert"),
    (r"^torchrun --nproc-per-node 4 -m", "python -m torch.distributed.run --standalone --nproc-per-node 2 -m"),
    (r"(gradus study .*) --page \S+", r"\1"),
    (r"benchmarks/windows\.py$", "benchmarks/windows.py 640"),
    (r"stories-qwen3 model\.seq_len=4096", "stories-qwen3 data.source=null data.path=input.txt tokenizer.vocab_size=300 model.n_layers=1 model.seq_len=600"),
    (r"train_step\.yaml", 'train_step.yaml --rounds 1 --steps 1 --only "vit · gradus · fp32" model.n_layers=1 model.d_model=64 model.n_heads=2'),
    (r"attention_kernels\.yaml", 'attention_kernels.yaml --rounds 1 --steps 1 --only "n=512 · forward · sdpa"'),
    (r"(?<!_)accuracy\.yaml", 'accuracy.yaml --only "vit · fp32 · no checkpointing · one process" train.steps=3'),
    (r"step_time\.yaml", 'step_time.yaml --rounds 1 --steps 1 --only "vit · fp32 · no checkpointing" model.n_layers=1'),
    (r"layouts\.yaml", f"layouts.yaml --only offload {TINY['shakespeare-char-gpt']}"),
    (r"simple_fsdp\.yaml", f"simple_fsdp.yaml --only 'one process' {TINY['shakespeare-char-gpt']}"),
    (r"road\.yaml", f"road.yaml --only 'one process' {TINY['cifar10-vit-small']} evaluate.every=2"),
    (r"local_updates\.yaml", f"local_updates.yaml --only DDP {TINY['shakespeare-char-gpt']}"),
    (r"benchmarks/ladder_accuracy\.yaml", 'ladder_accuracy.yaml --only "first rung" data.limit=16 data.limit_valid=16 train.steps=1 schedule.warmup_steps=0'),
    (r"decode\.yaml", 'decode.yaml --rounds 1 --steps 1 --only "llama-15m · 1 thread · gradus torch"'),
    (r"exports\.py", "exports.py torchscript"),
    (r"startup\.py.*", "startup.py --model tiny --step"),
    (r"gpu\.py", "gpu.py --device cpu --tiny --models gpt2 vit-l16 --steps 2 --out rows.jsonl"),
    (r"^(rsync .*) site/ \S+", r"\1 sst2/ out"),
]
ELSEWHERE = {  # command: where it is run instead, or why it cannot be
    r"^python benchmarks/search_exhaustive": "tests/plan/test_search.py",
    r"^python benchmarks/kills": "tests/launch/test_kills.py",
    r"^python benchmarks/busy": "tests/test_spin.py",
    r"^python benchmarks/elastic|^python -m gradus\.parallel\.quorum|^torchrun --standalone": "tests/train/test_elastic.py",
    r"^mpirun -n \d+ gradus train |^mpiexec -n \d+ gradus train ": "tests/launch/test_mpi.py",
    r"^gradus collectives --backend mpi": "tests/measure/test_collectives.py",
    r"^gradus plan( .*)? --web": "tests/plan/test_web.py",
    r"^gradus export RUN --to DIR --as gguf": "tests/infer/test_gguf.py",  # of a run whose tokenizer llama.cpp has
    r"^gradus demo": "tests/test_demo.py",
    r"^gradus predict RUN .*--grid": "tests/docs/test_your_data.py",  # of a run that reads images
    r"^gradus ladder ": "tests/proof/test_ladder.py",
    r"^gradus launch slurm --status": "tests/launch/test_slurm.py",
    r"^srun |^scontrol ": "tests/launch/test_slurm.py",
    r"^modal |^gradus train .* app\.py": "tests/launch/test_modal.py",
    r"^make |^pip |^apt-get |^python3 -m venv ": ".ci/run",
    r"^source ": "tests/test_completion.py",
    r"^mkdir -p served|^python -m http.server": "tests/docs/test_site.py",
}


FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LITERAL = r"^gradus( --\w+)?$|^gradus (plan|show|keys|models|recipes|hardware|new|launch)\b(?!.* --on this)"


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of the page's fenced blocks."""
    return [(language, textwrap.dedent(text)) for _, language, text in FENCE.findall(page.read_text(encoding="utf-8"))]


def own(page: Path) -> bool:
    return page.parent.name == "docs" and page.name in RUN_BY_THEIR_OWN_TESTS


def learn(page: Path) -> bool:
    """A page of docs/learn: its Python and what that prints are tests/docs/test_learn.py's."""
    return page.parent.name == "learn"


def is_command(line: str) -> bool:
    return line.split()[:1] != [] and line.split()[0] in PROGRAMS


def kind_of(page: Path, language: str, text: str) -> str | None:
    """What a block is, and so how it is checked here; None: by nothing."""
    lines, programs = text.splitlines(), [block for _, block in blocks(page) if block in SHOWN]
    if own(page) or text in SHOWN or (learn(page) and language in ("python", "output", "measured")):
        return "its own test"
    if language == "math":
        return "an equation"
    if page.name == "elastic.md" and language == "text":
        return "its own test"  # tests/train/test_elastic.py, which kills too
    if language in ("", "console", "text") and re.match(r"\$ gradus\b", text):
        return "console"
    if language == "text" and programs:
        return "its own test"
    if language in ("", "sh") and all(is_command(line) or line.startswith("#") or not line for line in lines):
        return "commands"
    if language == "" and re.match(r"gradus: job \d+ on \S+, start 1$", lines[0]):
        return "its own test"  # tests/launch/test_slurm.py, where there is Slurm
    return language if language in ("python", "yaml") else None


def commands(page: Path) -> dict[str, bool]:
    """What the page shows to be typed: whether it is in a block (alone, without what it prints), or among the words."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page) if kind_of(page, *block) == "commands" for line in block[1].splitlines()]
    shown = [part for line in lines for part in re.split(r"(?<=\S)\s*; ", re.sub(r"(^|\s)#.*", "", line))]
    spans = [span for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text)) if len(span.split()) > 2 or span.startswith("python ")]
    named = [" ".join(part.split()) for span in spans for part in span.split("; ")]
    if page.parent.name in ("experiments", "reference"):  # they say what was run elsewhere, and for hours
        named = []
    found = {part.strip(): place == "block" for place, parts in (("words", named), ("block", shown)) for part in parts}
    return {command: block for command, block in found.items() if is_command(command)}


def small(command: str) -> str:
    """The command as it is run here."""
    for pattern, replacement in STANDS_FOR:
        command = re.sub(pattern, replacement, command)
    name = next((name for name in sorted(TINY, key=len, reverse=True) if re.search(rf"(?<=\s){name}(?=\s|$)", command)), None)
    if name and TINY[name] not in command and not re.match(r"gradus (models|recipes|hardware)", command):
        command = re.sub(rf"(?<=\s){name}(?=\s|$)", lambda _: f"{name} {TINY[name]}", command, count=1)
    return command


def cases() -> list:
    """Each page's commands; what is the same command at a small size is run once. Those of blocks are run by `make docs`, the others by
    `make test-all`."""
    each: dict[str, object] = {}
    every = [(page, command, block) for page in PAGES if not own(page) for command, block in commands(page).items()]
    for page, command, block in sorted(every, key=lambda one: not one[2]):
        each.setdefault(small(command), pytest.param(command, id=f"{page.stem}: {command}", marks=pytest.mark.docs if block else pytest.mark.slow))
    return list(each.values())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with all that the commands name: data, a Hugging Face folder, runs, a file of published points."""
    folder = tmp_path_factory.mktemp("commands")
    words = ["Once upon a time the old king rode home", "a fine film about a small dog", "rain fell on the quiet town", "nobody knew the answer"]
    text = f"{string.printable.strip()}\n" + "\n".join(f"{words[i % 4]} and {words[(i * 7 + 1) % 4]} {i} times." + "\n" * (i % 10 == 9) for i in range(400))
    (folder / "lines.txt").write_text("a fine film\na slow one\n")
    example = re.search(r"```yaml\n(.*?)```", (ROOT / "docs/studies.md").read_text(encoding="utf-8"), re.DOTALL)
    (folder / "some.yaml").write_text(example[1])
    (folder / "notes.md").write_text("# What I saw\n\nOne is shorter.\n")
    (folder / "reviews.csv").write_text("review,label\n" + "".join(f"{words[i % 4]},{'good' if i % 2 else 'bad'}\n" for i in range(40)))
    (folder / "ladder_accuracy.yaml").write_text((ROOT / "benchmarks/ladder_accuracy.yaml").read_text().replace("seeds: [0, 1, 2]", "seeds: [0]"))
    (folder / "precision.yaml").write_text(json.dumps({"recipe": "copy-task", "set": TINY["copy-task"].split(), "configurations": {"fp32": None}}))
    (folder / "studies" / "precision").mkdir(parents=True)
    (folder / "studies" / "precision" / "study.json").write_text("{}")
    row = {"name": "samples_per_s", "value": 3.0, "unit": "samples/s", "kind": "measured", "configuration": "fp32"}
    (folder / "studies" / "precision" / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("input.txt", "corpus.txt"):
        (folder / name).write_text(text)
    for name in ("train", "valid", "test"):
        (folder / "wikitext-2").mkdir(exist_ok=True)
        (folder / "wikitext-2" / f"{name}.txt").write_text(text)
    for name, files in {"imdb": ("train", "test"), "sst2": ("train", "dev", "test")}.items():
        (folder / name).mkdir()
        for file in files:
            rows = [{"text": " ".join([words[i % 4]] * (1 + i % 5)), "label": i % 2} for i in range(24)]  # of unequal length
            if name == "imdb":
                (folder / name / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            else:
                (folder / name / f"{file}.tsv").write_text("sentence\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in rows))
    images(folder / "cifar10")
    tokenizer = tokenizers.train_bpe([text], 300)
    config = BertConfig(vocab_size=tokenizer.vocab_size, n_layers=1, d_model=16, n_heads=2, d_ff=32, seq_len=512, head="classification", n_classes=2)
    models.save(models.build(config), folder / "bert")
    tokenizer.save(folder / "bert")
    (folder / "config.json").write_text(json.dumps({"TrainingArgs": {"max_steps": 2, "learning_rate": 1e-4, "per_device_train_batch_size": 4}}))
    points = ROOT.parent / "shared" / "groundtruth" / "calibration.json"
    if points.is_file():
        data = json.loads(points.read_text())
        key = next(key for key, value in data.items() if isinstance(value, list)) if isinstance(data, dict) else None
        (folder / "points.json").write_text(json.dumps({**data, key: data[key][:4]} if key else data[:4]))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("copy", "stopped"):
            assert main(["train", *shlex.split(RECIPE), f"log.dir=runs/{name}", "train.checkpoint_every=2"]) == 0
            patch.setattr("gradus.proof.prove.Planner", None)  # one plan is enough
        shutil.copytree("runs/copy", "runs/again")
        shutil.rmtree("runs/stopped/checkpoints/step-00000004")  # as a kill after step 2 leaves it
        gpt = shlex.split(f"shakespeare-char-gpt {TINY['shakespeare-char-gpt']} data.path=input.txt")
        assert main(["train", *gpt, "log.dir=runs/words"]) == 0
        assert main(["train", *shlex.split(f"sst2-bert {TINY['sst2-bert']} data.path=sst2"), "log.dir=runs/classes"]) == 0
    return folder


def images(folder: Path) -> None:
    """Twelve noisy pictures a class and split, in the layout of the hub's CIFAR-10."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        rows = []
        for i in range(120):
            buffer = io.BytesIO()
            image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
            rows.append({"img": {"bytes": buffer.getvalue(), "path": f"{i}.png"}, "label": i % 10})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


@pytest.fixture
def run(workplace, monkeypatch, capfd):
    """command -> (exit code, standard output, standard error), in the workplace."""

    def run(command: str) -> tuple[int, str, str]:
        words, _, file = command.partition(" <")
        words = shlex.split(words)
        if file:
            monkeypatch.setattr(sys, "stdin", io.StringIO((workplace / file).read_text()))
        if not {"points.json"}.isdisjoint(words) and not (workplace / "points.json").exists():
            pytest.skip("no ../shared/groundtruth beside the checkout")
        if words[0] == "rsync" and shutil.which("rsync") is None:
            pytest.skip("no rsync on PATH")
        if re.search(r"--on this|step_time", command) and not (workplace / ".config").exists():
            assert main(["calibrate", "--seconds", "10", "--threads", "1"]) == 0
            capfd.readouterr()
        shutil.rmtree("out", ignore_errors=True)
        words = [str(ROOT / word) if word.startswith("benchmarks/") else word for word in words]
        if words[0] == "gradus":
            code = main(words[1:])
        elif words[0] == "python" and Path(words[1]).name in ("exports.py", "gpu.py", "groundtruth.py"):  # they start none that imports them
            monkeypatch.setattr(sys, "argv", words[1:])
            monkeypatch.syspath_prepend(str(Path(words[1]).parent))
            try:
                runpy.run_path(words[1], run_name="__main__")
                code = 0
            except SystemExit as end:
                code = end.code or 0
        else:
            words[:1] = [sys.executable] if words[0] == "python" else [words[0]]
            code = subprocess.run(words, timeout=600).returncode
        return code, *capfd.readouterr()

    monkeypatch.chdir(workplace)
    monkeypatch.setenv("HOME", str(workplace))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(workplace / ".config"))  # where gradus calibrate writes
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(fit, "ROUNDS", 1)
    monkeypatch.setattr(check, "WAIT", 1.0)  # whether this machine loads data fast enough is no matter of the command
    run.workplace = workplace
    return run


@pytest.mark.parametrize("command", cases())
def test_the_command_works(command, run, record_property):
    record_property("commands run", 1)
    if elsewhere := next((where for pattern, where in ELSEWHERE.items() if re.search(pattern, command)), None):
        assert (ROOT / elsewhere).exists()
        for name in re.findall(r"NAME=(\S+)", command):
            assert list((ROOT / "experiments").glob(f"{name}.*")), f"no experiments/{name}.yaml or .py"
        return
    code, out, err = run(small(command))
    assert code == 0, f"{small(command)}\n{out[-2000:]}\n{err[-2000:]}"


def pattern(text: str) -> str:
    """A regular expression for what is printed: as it stands, but for `...`."""
    lines = ["(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace(r"\.\.\.", ".*") + "\n" for line in text.splitlines()]
    return "".join(lines)


def without_numbers(text: str) -> str:
    """The words and the layout: numbers are 0 and units are left out, equal lines come once."""
    number = r"(?<![\w.])v?[-+−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?[kMG]?(\s?(ms|µs|s|min|h|days|[kKMGT]?i?B(/s)?|[kMG]?Wh|g|%)(?![\w/]))?"
    lines = [re.sub(r"(?<= )-(?= |$)|\bnan\b|no growth", "0", re.sub(number, "0", line)) for line in text.splitlines()]
    lines = [re.sub(r"(?<!\S)0( 0)+(?!\S)", "0", re.sub(r"\s+", " ", line)).strip() for line in lines]
    return "".join(f"{line}\n" for line, _ in itertools.groupby(lines))


CONSOLE = [
    pytest.param(text, id=f"{page.stem}: {text.splitlines()[0]}")
    for page in PAGES for language, text in blocks(page) if kind_of(page, language, text) == "console"
]  # fmt: skip


@pytest.mark.docs
@pytest.mark.parametrize("text", CONSOLE)
def test_a_command_prints_what_the_page_says(text, run, record_property):
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        typed = re.match(r"(?:.*\\\n)*.*\n", part)[0]
        command, said = re.sub(r"\\\n|\s+#.*", "", typed).strip(), part.removeprefix(typed)
        literal = re.search(LITERAL, command)
        if not literal and not (run.workplace / ".config").exists():  # so that times are predicted
            assert run("gradus calibrate --seconds 10 --threads 1")[0] == 0
        code, out, err = run(command if literal else small(command))
        out = out if code == 0 else out + err
        assert code == (2 if "error: " in said else 0), f"{command}\n{out}\n{err}"
        said, out = ("".join(f"{line.rstrip()}\n" for line in t.strip("\n").splitlines()) for t in (said, out))
        if not literal:
            said, out = without_numbers(said), without_numbers(out)
        difference = "\n".join(difflib.unified_diff(said.splitlines(), out.splitlines(), "the page says", "the command prints", n=1, lineterm=""))
        assert re.fullmatch(pattern(said), out), f"{command}\n{difference}"
    record_property("outputs compared", 1)


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if any(kind_of(page, *block) == "python" for block in blocks(page))], ids=lambda page: page.stem)
def test_python_runs(page, tmp_path, monkeypatch, record_property):
    monkeypatch.chdir(tmp_path)
    quoted = {"FAMILY": llama.FAMILY, "KIND": causal_lm.KIND} if page.name == "extend.md" else {}  # it quotes those files
    names = {**vars(llama), **vars(causal_lm)} if quoted else {}
    for language, text in blocks(page):
        if kind_of(page, language, text) == "python":
            exec(compile(text, str(page), "exec"), names)
            record_property("blocks of Python", 1)
            for name in re.findall(r"^(\w+) = ", text, re.MULTILINE) if quoted else ():
                for field in re.findall(r"^    (\w+)=", text, re.MULTILINE):
                    assert getattr(names[name], field) == getattr(quoted[name], field), field


@pytest.mark.docs
@pytest.mark.parametrize("text", [text for page in PAGES for language, text in blocks(page) if language == "yaml"])
def test_yaml_is_a_study_a_recipe_or_prices(text, tmp_path, record_property, monkeypatch):
    (tmp_path / "file.yaml").write_text(text, encoding="utf-8")
    if "prices" in (said := yaml.safe_load(text)):
        monkeypatch.setenv("GRADUS_PRICES", str(tmp_path / "file.yaml"))
        for name, quote in said["prices"].items():
            (found,) = quotes(name)
            assert (found.expected, found.currency) == (quote["expected"], said["currency"])
    elif {"configurations", "grid"} & set(said):
        assert study_file.load(tmp_path / "file.yaml")[0].configurations
    else:
        assert recipe.load(str(tmp_path / "file.yaml"), [])
    record_property("blocks of YAML", 1)


def test_every_block_is_of_a_kind_that_is_checked():
    each = [(page, *block) for page in PAGES for block in blocks(page)]
    nothing = [f"{page.name}:\n```{language}\n{text}```" for page, language, text in each if kind_of(page, language, text) is None]
    assert not nothing, "nothing checks these blocks:\n" + "\n".join(nothing)
    for page in PAGES:
        fences = len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE))
        assert fences == 2 * len(blocks(page)), f"{page.name}: a fence that is not closed, or has more than a language"


def test_every_benchmark_is_on_a_page():
    """So that each one is run: a benchmark that no page names is run by nothing."""
    shown = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    studies = sorted((ROOT / "benchmarks").glob("*.yaml"))
    runners = "\n".join(file.read_text(encoding="utf-8") for file in studies)
    for file in [*(ROOT / "benchmarks").glob("*.py"), *studies]:
        how = "gradus study" if file in studies else "python"
        assert re.search(rf"`[^`]*{how} benchmarks/{file.name}", shown) or f"{file.name}:" in runners, f"no page shows how {file.name} is run"


def test_pages_have_the_marks_that_their_commands_fill():
    for command in (command for page in PAGES for command in commands(page)):
        if found := re.match(r"gradus study \S+/(\w+)\.yaml .*--page (\S+)", command):
            text = (ROOT / found[2]).read_text(encoding="utf-8")
            assert f"<!-- {found[1]} -->\n" in text and f"<!-- end of {found[1]} -->\n" in text, command


def test_no_line_of_the_tables_is_stale():
    every = [command for page in PAGES for command in commands(page)]
    for pattern in ELSEWHERE:
        for part in pattern.split("|"):
            assert any(re.search(part, command) for command in every) or part in ("^pip ", "^apt-get ", r"^gradus train .* app\.py"), part
