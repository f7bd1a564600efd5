"""What a user types, and what a user mistypes: one clear line, exit code 2, no traceback."""

from __future__ import annotations

import ast
import errno
import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from gradus import cli
from gradus import recipe as recipes
from gradus.cli import main
from gradus.data import tokenizers
from gradus.errors import FAULT, EnvironmentFault, UserError
from gradus.rows import RowFile

pytestmark = pytest.mark.usefixtures("no_plan")
COPY = ["copy-task", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8",
        "schedule.warmup_steps=2", "batch.samples=16", "train.steps=4", "layout.device=cpu"]  # fmt: skip


def fails(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and error.startswith("error:")
    return error


def test_help_and_import_load_no_torch():
    code = "import sys, gradus, gradus.cli; gradus.cli.parser().format_help(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


VERBS = {verb.name: verb for group in cli.JOURNEY.values() for verb in group}


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_the_first_screen(words, capsys):
    """Short, and every verb once, in the groups of the journey."""
    try:
        code = main(words)
    except SystemExit as e:
        code = e.code
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert code == 0 and len(lines) <= 25 and max(map(len, lines)) <= 100
    found, group = {}, ""
    for line in shown.split("\n\n")[2].splitlines():
        group = line[:9].strip() or group
        found.setdefault(group, []).extend(filter(None, (line[9:22].strip(), line[55:68].strip())))
    assert list(found.items()) == [(group, [verb.name for verb in verbs]) for group, verbs in cli.JOURNEY.items()]
    examples = [line.removeprefix("For example:").strip() for line in lines[-3:]]
    assert {shlex.split(example)[1] for example in examples} == {cli.parse(shlex.split(example)[1:]).verb for example in examples} == {"demo", "plan", "train"}


def test_the_journey_has_every_verb_once():
    named = [verb.name for group in cli.JOURNEY.values() for verb in group]
    assert named == [*cli.parser()._subparsers._group_actions[0].choices]
    assert list(cli.JOURNEY) == ["start", "plan", "train", "use", "measure", "move"]


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_opens_with_an_example_and_a_page(verb, capsys):
    example, page = VERBS[verb].example, VERBS[verb].page
    program, *words = shlex.split(example)
    assert program == "gradus" and cli.parse(words).verb == verb
    assert (Path(__file__).parents[1] / "docs" / f"{page}.md").is_file()
    with pytest.raises(SystemExit) as e:
        main([verb, "--help"])
    shown = capsys.readouterr().out
    assert e.value.code == 0 and shown.startswith(f"example: {example}\nmore:    the documentation, page {page}\n\nusage: gradus {verb} ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "copy-task", "optimizer.lrr=1"], "optimizer.lrr: unknown key. Did you mean optimizer.lr?"),
        (["train", "copy-task", "--batch_size", "8"], "--batch_size: unknown option. It is a key of the recipe, written without --: batch.samples=8"),
        (["plan", "copy-task", "--learning-rate=1e-3"], "written without --: optimizer.lr=1e-3"),
        (["fit", "copy-task", "--max_epochs", "3"], "written without --: train.epochs=3"),
        (["launch", "slurm", "copy-task", "--gradient_accumulation_steps", "4"], "written without --: layout.micro_batch=..."),
        (["train", "copy-task", "--bf16"], "written without --: layout.precision=bf16"),
        (["train", "copy-task", "--nproc_per_node", "4"], "Did you mean --processes?"),
        (["train", "copy-task", "--nproc-per-node=4"], "Did you mean --processes?"),
        (["train", "copy-task", "--output_dir", "here"], "written without --: log.dir=here"),
        (["train", "--config", "mine.yaml"], "--config: unknown option. Write it without an option, in the place of RECIPE."),
        (["finetune", "copy-task"], "no such command. Did you mean train?"),
        (["export", "RUN", "--to", "out", "--format", "onnx"], "--format: unknown option. Did you mean --as onnx?"),
        (["export", "RUN", "--to", "out", "--dtype", "bf16"], "Did you mean --precision bf16?"),
        (["export", "RUN", "--to", "out", "--onnx"], "Did you mean --as onnx?"),
        (["quantize", "RUN", "--to", "out", "--as", "int8", "--bits", "8"], "Did you mean --as?"),
        (["quantize", "RUN", "--to", "out", "--as", "int8", "--dtype", "int4"], "Did you mean --as int4?"),
        (["evaluate", "RUN", "--batch_size", "8"], "written without --: evaluate.batch=8"),
        (["generate", "--model", "RUN"], "--model: unknown option. Write it without an option, in the place of RUN_OR_MODEL."),
        (["generate", "RUN", "--max_new_tokens", "5"], "Did you mean --max-new?"),
        (["predict", "RUN", "--text", "a fine film"], "Write it without an option, in the place of INPUT."),
        (["plan", "gpt2-small", "--gpus", "8xH100"], "Did you mean --on?"),
        (["train", "copy-task", "--resme"], "--resme: unknown option. Did you mean --resume?"),
        (["train", "copy-tusk"], "Did you mean copy-task?"),
        (["train", "copy-task", "batch.samples=many"], "batch.samples"),
        (["train", "copy-task", "optimizer.lr=nan"], "optimizer.lr: must be a finite number, got nan"),
        (["train", "copy-task", "model.n_heads=3"], "n_heads=3"),
        (["train", "copy-task", "model.seq_len=4", "evaluate.samples=0"], "model.seq_len=4"),
        (["train", "copy-task", "layout.micro_batch=1000"], "layout.micro_batch"),
        (["train", "copy-task", "layout.device=cuda"], "layout.device=cuda"),
        (["train", "shakespeare-char-gpt"], "data.path"),
        (["train", "shakespeare-char-gpt", "data.path=nowhere.txt"], "nowhere.txt: no such file"),
        (["train", "digits-vit", "model.image_size=9"], "image_size=9"),
        (["train", "sst2-bert", "model.init=./nowhere"], "nowhere: no such file or folder"),
        (["frain", "copy-task"], "frain"),
        (["models", "gpt3-175c"], "Did you mean gpt3-175b?"),
        (["train", "copy-task", "--resume", "log.dir=nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_clear_line(arguments, said, capsys, monkeypatch):
    import torch

    if "layout.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    error = fails(capsys, *arguments)
    assert said in error
    assert len(error.strip().splitlines()) == 1, error


def test_all_problems_are_told_at_once(capsys, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "task: {name: copy}\nmodel: {family: seq2seq, n_layers: 2, d_model: 64, n_heads: 4, d_fff: 128}\ndata: {kind: synthetic}\n"
        "optimizer: {name: adam, lrr: 1.0}\nbatch: {samples: -3}\ntrain: {steps: ten}\n"
    )
    error = fails(capsys, "train", str(recipe))
    for said in ("model.d_fff", "optimizer.lrr", "optimizer.lr", "batch.samples", "train.steps"):
        assert said in error
    assert "pydantic" not in error and "http" not in error


def test_train_show_evaluate_resume(capsys, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *COPY, f"log.dir={run}"]) == 0
    out = capsys.readouterr().out
    for said in ("before training, from ten seeds, 1 2 3 ... is decoded as:", "micro-batch 16 × accumulation 1", "train_runtime", "train_samples_per_second",
                 "train_steps_per_second", "train_loss", "epoch", "exact match on 8 held-out sequences", "1 2 3 4 5 6 7 8 9 10  →"):  # fmt: skip
        assert said in out
    untrained = out.split("is decoded as:\n")[1].splitlines()[:10]
    assert all(len(line.split()) == 10 for line in untrained) and len(set(untrained)) > 1
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert main(["train", str(run), "--resume"]) == 0
    assert "resumed from" in capsys.readouterr().out
    assert main(["evaluate", str(run)]) == 0
    assert "exact_match" in capsys.readouterr().out
    assert "there is a run already" in fails(capsys, "train", *COPY, f"log.dir={run}")
    assert "another run" in fails(capsys, "train", str(run), "--resume", "train.seed=5")


def test_show_prints_what_was_derived(capsys):
    assert main(["show", *COPY, "layout.micro_batch=8"]) == 0
    out = capsys.readouterr().out
    for said in ("steps_per_epoch: 4", "accumulation: 2", "micro_batch: 8", "vocab_size: 11", "schedule_end: 4"):
        assert said in out


def test_models_counts_a_405b_preset(capsys):
    assert main(["models", "llama3.1-405b", "gpt2"]) == 0
    out = capsys.readouterr().out
    assert "405,853,388,800" in out and "124,439,808" in out


@pytest.fixture
def arguments(tmp_path):
    """A file of TrainingArguments."""
    file = tmp_path / "args.json"
    file.write_text(json.dumps({"TrainingArgs": {"per_device_train_batch_size": 4, "learning_rate": 0.25, "max_steps": 4, "push_to_hub": True}}))
    return str(file)


SMALL = [word for word in COPY if not word.startswith(("batch.", "train."))]


def test_every_verb_that_takes_a_recipe_takes_training_arguments():
    verbs = cli.parser()._subparsers._group_actions[0].choices
    parsers = verbs | verbs["launch"]._subparsers._group_actions[0].choices
    takes = {name for name, p in parsers.items() if any(a.dest == "recipe" for a in p._actions)}
    assert takes == {name for name, p in parsers.items() if "--json_file" in p._option_string_actions}
    assert takes >= {"train", "plan", "check", "fit", "show", "fetch", "profile", "evaluate", "ladder", "scale", "slurm", "ssh", "modal"}


@pytest.mark.parametrize(
    ("verb", "where", "samples"),
    [
        (["check"], "proof.check.check", 4),
        (["fit"], "proof.fit.fit", 4),
        (["profile"], "measure.profile.profile", 4),
        (["ladder"], "proof.ladder.ladder", 4),
        (["scale", "--processes", "1,2,4"], "proof.scale.scale", 16),  # strong scaling: one batch, that of the most
        (["scale", "--processes", "1,2,4", "--weak"], "proof.scale.scale", 4),
    ],
)
def test_training_arguments_reach_the_verb(verb, where, samples, arguments, monkeypatch, capsys):
    seen = []
    module, _, function = where.rpartition(".")
    name, *options = verb

    def stand_in(recipe, *args, **kwargs):
        seen.append(recipe)
        return 0 if function == "check" else iter(())

    monkeypatch.setattr(importlib.import_module(f"gradus.{module}"), function, stand_in)
    assert main([name, *SMALL, *options, "--json_file", arguments]) == 0
    (recipe,) = seen
    assert (recipe.batch.samples, recipe.layout.micro_batch, recipe.optimizer.lr, recipe.train.steps) == (samples, 4, 0.25, 4)
    err = capsys.readouterr().err
    assert f"note: {arguments}: push_to_hub=true: nothing is uploaded" in err and f"batch.samples={samples}" in err


@pytest.mark.slow
def test_training_arguments_in_show_plan_fetch_and_evaluate(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *SMALL, "--no-data", "--processes", "3", "--json_file", arguments]) == 0
    assert "samples: 12" in capsys.readouterr().out
    assert main(["show", *SMALL, "--no-data", "batch.samples=6", "--json_file", arguments]) == 0
    assert "samples: 6" in capsys.readouterr().out, "the command line wins"
    assert main(["plan", *SMALL, "--on", "2xT4", "--json", "--json_file", arguments]) == 0
    assert "batch.samples=8: 4 × 2 processes" in capsys.readouterr().err
    assert main(["fetch", *SMALL, "--to", "stage", "--json_file", arguments]) == 0
    assert f"--json_file {arguments}" in capsys.readouterr().out.splitlines()[-1]
    assert main(["train", *COPY, "log.dir=run"]) == 0
    capsys.readouterr()
    Path(arguments).write_text(json.dumps({"TrainingArgs": {"learning_rate": 0.25, "per_device_eval_batch_size": 3}}))
    assert main(["evaluate", "run", "--json_file", arguments]) == 0
    assert f"{arguments}: an evaluation uses only evaluate.batch of it; the rest is for training" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "says"), [
    (["layout.tensor=3"], "layout.tensor=3 does not divide model.n_heads=4"),
    (["layout.pipeline=3", "--processes", "2"], "pipeline 3 = 3 processes, and 2 were started"),
])  # fmt: skip
def test_a_layout_that_cannot_be_is_not_shown_without_the_data(more, says, capsys):
    assert main(["show", "copy-task", "--no-data", *more]) == 2
    assert says in capsys.readouterr().err


def test_training_arguments_travel_with_a_launch(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["log.dir=RUN", "--json_file", "args.json"]
    assert main(["launch", "slurm", *SMALL, *options, "--dry-run", "--venv", "none", "--nodes", "2", "--gpus", "4"]) == 0
    out, err = capsys.readouterr()
    assert "--auto-resume --json_file args.json" in out and "batch.samples=32: 4 × 8 processes" in err
    assert main(["launch", "ssh", *SMALL, *options, "--dry-run", "--processes", "2"]) == 0
    out, err = capsys.readouterr()
    assert f"{arguments} USER@HOST:gradus/RUN/training_args.json" in out and "--json_file RUN/training_args.json" in out
    assert "batch.samples=8: 4 × 2 processes" in err
    assert main(["launch", "modal", *SMALL, *options, "--to", "app.py", "--gpu", "A100:2"]) == 0
    app = (tmp_path / "app.py").read_text()
    files, words = (ast.literal_eval(app.split(f"\n{name} = ")[1].split("\n\n")[0].split("\nMODEL")[0]) for name in ("FILES", "WORDS"))
    assert files["/root/inputs/training_args.json"] == str(arguments) and words[words.index("--json_file") + 1] == "/root/inputs/training_args.json"
    Path(arguments).write_text(json.dumps({"TrainingArgs": {"deepspeed": "zero.json"}}))
    Path("zero.json").write_text("{}")
    capsys.readouterr()
    for place in (["ssh", *SMALL, "--dry-run"], ["modal", *SMALL, "--to", "app.py"]):
        error = fails(capsys, "launch", *place, "--json_file", "args.json", "log.dir=RUN")
        assert "TrainingArgs.deepspeed names a file on this machine. Write its content there" in error


def test_json_file_of_the_hands_on(capsys, tmp_path):
    """S2's way in: its keys are mapped, an unknown one is named, and its figures are printed and kept."""
    labelled = tmp_path / "data"
    labelled.mkdir()
    for split in ("train", "test"):
        (labelled / f"{split}.jsonl").write_text(
            "".join(json.dumps({"text": f"a film {i} {'good' if i % 2 else 'bad'}", "label": i % 2}) + "\n" for i in range(64))
        )
    (tmp_path / "config.json").write_text(
        json.dumps({"TrainingArgs": {"output_dir": str(tmp_path / "out"), "evaluation_strategy": "epoch", "num_train_epochs": 2, "per_device_train_batch_size": 16,
                    "per_device_eval_batch_size": 16, "learning_rate": 5e-5, "fp16": False, "logging_strategy": "no", "save_strategy": "no",
                    "report_to": "none", "disable_tqdm": True, "push_to_hub": True}})
    )  # fmt: skip
    small = ["model.init=null", "model.preset=null", "model.family=bert", "model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.n_classes=2",
             "tokenizer.kind=bpe", "tokenizer.vocab_size=300", f"data.path={labelled}", f"data.cache={tmp_path / 'cache'}", "evaluate.samples=0"]  # fmt: skip
    assert main(["train", "imdb-bert", "--json_file", str(tmp_path / "config.json"), *small]) == 0
    captured = capsys.readouterr()
    assert "push_to_hub" in captured.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    for key in ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "epoch"):
        assert key in summary and key in captured.out
    assert summary["epoch"] == 2 and summary["samples"] == 128


def test_library_recipes_are_listed(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert "copy-task-s1" in out and "cifar10-vit-G14" in out
    assert "copy-task              The original Transformer, small, learns to copy ten symbols.\n" in out, "each with the first line of its header"


def test_tokenizer_train(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    assert main(["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "280", "--to", str(tmp_path / "bpe")]) == 0
    from gradus.data import tokenizer_files

    t = tokenizer_files.load(tmp_path / "bpe")
    assert t.decode(t.encode("the cat sat")) == "the cat sat" and len(t.encode("the cat")) < 7
    assert Path(tmp_path / "bpe" / "tokenizer.json").exists() and t.encode("THE CAT") != t.encode("the cat")
    assert main(["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "280", "--lowercase", "--to", str(tmp_path / "lower")]) == 0
    lower = tokenizer_files.load(tmp_path / "lower")
    assert lower.encode("THE CAT") == lower.encode("the cat") == t.encode("the cat")
    assert main(["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "280", "--text", "body", "--to", str(tmp_path / "again")]) == 2
    assert "--text body: a column of a table, and " in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_a_full_disk_leaves_nothing_of_a_tokenizer(capsys, monkeypatch, tmp_path):
    def full(self, path):  # as the library in Rust words it
        Path(path).write_text("half")
        raise Exception("Error while serializing: No space left on device (os error 28)")

    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 50)
    monkeypatch.setattr(tokenizers.FastTokenizer, "save", lambda self, folder: (folder.mkdir(), full(self, folder / "tokenizer.json")))
    words = ["tokenizer", "train", str(tmp_path / "text.txt"), "--vocab-size", "280", "--to"]
    assert main([*words, str(tmp_path / "bpe")]) == FAULT
    told = capsys.readouterr().err
    assert re.fullmatch(rf"error: {tmp_path}/bpe: the disk is full \(.* GB free\): the tokenizer was not written\. .*\n", told)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.slow
def test_a_full_disk_anywhere_is_one_clear_line(capsys, monkeypatch, tmp_path):
    def full(self, rows):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowFile, "write", full)
    assert main(["train", *COPY, f"log.dir={tmp_path / 'run'}"]) == FAULT
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"error: .*/run/metrics\.jsonl: the disk is full \([\d.]+ GB free\): nothing up to the last .* --resume\.", told)


EIO, ENOSPC, ENETDOWN = ((number, os.strerror(number)) for number in (errno.EIO, errno.ENOSPC, errno.ENETDOWN))


@pytest.mark.parametrize(
    ("raised", "code", "told"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"), 2, "error: /x: No such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 2, "error: /x: Permission denied"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x"), 2, "error: /x: Is a directory"),
        (OSError(*EIO, "/x"), FAULT, "error: /x: Input/output error: a fault of the machine, not of the recipe."),
        (OSError(errno.ESTALE, "Stale file handle", "/x"), FAULT, "error: /x: Stale file handle: a fault of the machine"),
        (OSError(*ENOSPC, "/x"), FAULT, "error: /x: the disk is full ("),
        (OSError(*ENOSPC), FAULT, "error: No space left on device: a fault of the machine"),
        (Exception("while writing: No space left on device (os error 28)"), FAULT, "error: while writing: No space left on device"),
        (OSError(*ENETDOWN), FAULT, "Traceback"),  # no file is named: where it was is told by the traceback
        (ConnectionResetError("Connection reset by peer"), FAULT, "Traceback"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), FAULT, "Traceback"),  # of a connection, while standard output is read
        (EnvironmentFault("/x: the disk is full"), FAULT, "error: /x: the disk is full"),
        (UserError("/x: no such file"), 2, "error: /x: no such file"),
    ],
)
def test_a_fault_of_the_machine_has_an_exit_code_of_its_own(capsys, monkeypatch, raised, code, told):
    def fail():
        raise raised

    monkeypatch.setattr(recipes, "names", fail)
    assert main(["recipes"]) == code
    error = capsys.readouterr().err
    assert error.startswith(told) and (error.count("\n") == 1 or told == "Traceback")
    if told == "Traceback":
        assert f"{type(raised).__name__}: {raised}" in error, "its own text"


def test_closed_standard_streams_lead_to_nothing(tmp_path):
    """`gradus ... <&- >&- 2>&-`; and a full disk behind standard output is one line."""
    code = "import sys; from gradus import cli; sys.exit(cli.main(sys.argv[1:]))"
    python = shlex.join([sys.executable, "-c", code])
    for words, wanted in (("recipes >&-", 0), ("recipes <&- >&- 2>&-", 0), ("recipes zzz 2>&-", 2), ("recipes >/dev/full", FAULT)):
        done = subprocess.run(f"{python} {words}", shell=True, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (wanted, ""), done.stderr
        said = "error: No space left on device: a fault of the machine" if wanted == FAULT else ""
        assert done.stderr.startswith(said) and done.stderr.count("\n") == (wanted == FAULT)


@pytest.mark.parametrize(("cause", "code"), [(OSError(*EIO, "/x"), FAULT), (FileNotFoundError(errno.ENOENT, "no", "/x"), 2), (KeyError("x"), 2)])
def test_a_line_made_from_an_error_of_the_system_keeps_its_code(capsys, monkeypatch, cause, code):
    def fail():
        try:
            raise cause
        except Exception:
            raise UserError("/x: cannot be read. Give another.") from None

    monkeypatch.setattr(recipes, "names", fail)
    assert main(["recipes"]) == code
    assert capsys.readouterr().err == "error: /x: cannot be read. Give another.\n"


def test_nobody_reads_on():
    """`gradus recipes | head -1` is no error."""
    command = f"{sys.executable} -m gradus recipes | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_broken_pipe_while_training_is_told_whole(capsys, monkeypatch, tmp_path):
    from gradus.train.loop import Trainer

    def fail(self, step):
        raise BrokenPipeError("Broken pipe")

    monkeypatch.setattr(Trainer, "take", fail)
    assert main(["train", *COPY, f"log.dir={tmp_path / 'run'}"]) == FAULT
    error = capsys.readouterr().err
    assert "Traceback" in error and "BrokenPipeError: Broken pipe" in error and "did not reach" not in error


FULL = """
mount -t tmpfs -o size=16m none {folder} || exit 99
{train} > {folder}.out 2> {folder}.err & run=$!
until test -e {folder}/run/checkpoints/step-00000020; do sleep 0.02; kill -0 $run || exit 98; done
cat /dev/zero > {folder}/full 2> /dev/null
wait $run; code=$?
cp {folder}/run/metrics.jsonl {folder}.rows
exit $code
"""
AGAIN = """
import os, sys
from gradus.cli import main
from gradus.proof import prove
prove.Planner = None  # without a plan
folder, *words = sys.argv[1:]
code = main(["train", *words, f"log.dir={folder}/run"])
os.remove(f"{folder}/full")
sys.exit(code if main(["train", f"{folder}/run", "--resume"]) == 0 else 97)  # in this process, as starting one takes the longest
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_run_trains(tmp_path):
    """A real disk of 16 MB: one line, another exit code, and the run goes on from its last checkpoint once there is room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(folder)], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    words = [*COPY, "train.steps=300", "log.every=1", "train.checkpoint_every=20", "evaluate.every=300", "train.keep=2"]
    script = FULL.format(folder=folder, train=shlex.join([sys.executable, "-c", AGAIN, str(folder), *words]))
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, timeout=1200)
    error = Path(f"{folder}.err").read_text()
    assert done.returncode == FAULT, (done, error)
    told = error.strip().splitlines()[-1]
    assert re.match(rf"error: {folder}/run/(metrics\.jsonl|checkpoints): the disk is full \(0\.00 GB free\): .* (continue with|use) --resume\.$", told), error
    assert "Traceback" not in error
    steps = [r["step"] for r in map(json.loads, Path(f"{folder}.rows").read_text().splitlines()) if r["name"] == "train/loss"]
    assert steps == list(range(1, 301)), "nothing is lost, nothing is there twice"


@pytest.mark.slow
def test_a_full_device_says_what_to_set(capsys, monkeypatch, tmp_path):
    import torch

    from gradus.train.loop import Trainer

    def full(self, micro_batches, counts=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "step", full)
    assert "layout.micro_batch (it is 16)" in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}")


@pytest.mark.parametrize(("wrong", "error"), [
    ("No API key configured.\nUse `wandb login` to log in.", "log.wandb: No API key configured. Log in once with wandb login, or set WANDB_MODE=offline."),
    ("Failed to authenticate with https://api.wandb.ai: no route", "log.wandb: Failed to authenticate with https://api.wandb.ai: no route. Log in once"),
    (None, "of the extra track: pip install"),
])  # fmt: skip
def test_wandb_is_checked_before_anything_is_measured(capsys, monkeypatch, tmp_path, wrong, error):
    from gradus.train import run

    class UsageError(Exception):
        pass

    def login(verify=False):
        """Without verify, wandb before 0.22 asks no server: that none answers would be seen after the plan, by its init."""
        if verify or "key" in wrong:
            raise UsageError(wrong)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(login=login) if wrong else None)
    monkeypatch.setattr(run, "open_session", lambda *_: pytest.fail("the data were opened"))
    assert error in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}", "log.wandb=true")
    assert not (tmp_path / "run").exists()


def test_a_tensorboard_that_is_absent_is_called_so(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    said = fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}", "log.tensorboard=true")
    assert "log.tensorboard=true needs the package tensorboard" in said and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_missing_tracker_leaves_no_run_behind(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "of the extra track: pip install" in fails(capsys, "train", *COPY, f"log.dir={tmp_path / 'run'}", "log.wandb=x")
    assert main(["train", *COPY, f"log.dir={tmp_path / 'run'}"]) == 0




# ------------------------------------------------------------ where it is started, and what its streams can show

ENCODINGS = ["ascii", "latin-1", "cp1252"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_a_stream_cannot_encode_is_printed_in_plain_signs(encoding, monkeypatch):
    """Of every verb, whatever it prints; and the texts of those that take no time, whole."""
    text = "5 × 3 → 15 … – ≤ µ é 字 \ud800"
    own = text.encode(encoding, "ignore").decode(encoding)
    plain = "".join(c if c in own else {"×": "x", "→": "->", "…": "...", "–": "-", "≤": "<=", "µ": "u", "é": "e"}.get(c, "?") for c in text)

    def printed(words: list[str], code: int = 0) -> tuple[str, str]:
        streams = {name: io.TextIOWrapper(io.BytesIO(), encoding) for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        assert main(words) == code and streams["stdout"].errors == "strict"
        for stream in streams.values():
            stream.flush()
        return tuple(stream.buffer.getvalue().decode(encoding) for stream in streams.values())

    for words in (["keys"], ["recipes"], ["hardware"], []):
        assert len(printed(words)[0]) > 1000
    for number, verb in enumerate(VERBS.values()):
        args = cli.parse(shlex.split(verb.example)[1:])
        args.function = (lambda _: [text]) if number % 2 else error(text)
        monkeypatch.setattr(cli.running, "parse", lambda _, args=args: args)
        assert printed([], 0 if number % 2 else 2)[0 if number % 2 else 1] == (plain if number % 2 else f"error: {plain}") + "\n"


def error(text: str):
    def verb(args):
        raise UserError(text)

    return verb


@pytest.mark.slow
def test_a_run_and_its_verbs_in_another_encoding(tmp_path):
    """Real processes, the workers of a training among them, whose locale is ASCII's and whose streams are of two encodings; files are in UTF-8 all the same."""
    own = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    recipe = recipes.load(COPY[0], [*COPY[1:], "log.line=step {step} – {loss:.1f} ≤ 9", "evaluate.samples=0"])
    (tmp_path / "mine.yaml").write_text(recipes.dump(recipe), encoding="utf-8")
    code = "import sys; from gradus.cli import main; sys.exit(any([main(words.split('|')) for words in sys.argv[1:]]))"

    def shown(encoding: str, *words: str) -> str:
        environment = own if encoding == "ascii" else {**own, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, *words], capture_output=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0 and b"Error" not in done.stderr, (words, done.stderr)
        return done.stdout.decode(encoding)

    out = shown("cp1252", "-m", "gradus", "train", str(tmp_path / "mine.yaml"), "--processes", "2")
    runs = tmp_path / "runs/copy-task"
    (run,) = [run for run in runs.iterdir() if not run.is_symlink()]
    assert os.readlink(runs / "latest") == run.name, "the workers of this machine make it once"
    assert re.search(r"step 4 – \d\.\d <= 9", out) and "micro-batch 8 × accumulation 1" in out
    assert "– {loss:.1f} ≤ 9" in (run / "recipe.yaml").read_text(encoding="utf-8")
    out = shown("ascii", "-c", code, f"prove|{run}", f"predict|{run}|1 2 3", "train|mine.yaml|log.dir=again")
    assert re.search(r"step 4 - \d\.\d <= 9", out) and "micro-batch 16 x accumulation 1" in out
    assert "– {loss:.1f} ≤ 9" in (tmp_path / "again" / "recipe.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["train", *COPY], ["predict", "run", "a"], ["keys"], ["report", "/run", "--to", "there"], ["launch", "slurm", "copy-task", "--dry-run"]])
def test_a_working_folder_that_was_deleted_is_said(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    os.rmdir("../gone")
    assert fails(capsys, *words) == "error: the working folder was deleted. Change to one that is there (cd), and start again.\n"


def test_a_dash_is_an_input_behind_options_too():
    for words in (["--top", "1", "-"], ["-", "--top", "1"]):
        assert cli.parse(["predict", "run", *words]).inputs == ["-"]
