"""The words that every form of launch gives to a shell elsewhere: whatever a recipe's file, a setting or a name holds, the program gets it whole."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradus import launch
from gradus import recipe as recipes
from gradus.cli import main, parse
from gradus.errors import UserError
from gradus.launch import slurm, ssh, train_words
from gradus.recipe.schema import right_name

NASTY = ["$(touch canary)", "`touch canary`", "'; touch canary; '", '"; touch canary; "', "a b", "*", "~", "\\", "!!", "#x", "${PATH}", "&", "|x", ">canary", "-e", "ü 日"]
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), max_size=20) | st.sampled_from(NASTY)
words = st.lists(st.builds("a.b={}".format, text), max_size=3)
file_names = st.builds("{}.yaml".format, text.map(lambda t: t.replace("/", "")).filter(lambda t: len(t.encode()) < 200))
few = settings(max_examples=25)

STUB = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$CALLS"\n'


def shell(script: str, folder: Path, *programs: str) -> list[list[str]]:
    """The calls of `programs`, as argument lists, when bash runs a script in a folder."""
    (folder / "bin").mkdir(exist_ok=True)
    for name in programs:
        (folder / "bin" / name).write_text(STUB)
        (folder / "bin" / name).chmod(0o755)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    told = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(folder), "CALLS": str(calls), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=told, capture_output=True, text=True, timeout=60)
    assert not list(folder.rglob("canary")), (script, done.stderr)
    found: list[list[str]] = []
    for word in calls.read_text().split("\0")[:-1] if calls.exists() else []:
        if word in programs:
            found.append([word])
        else:
            found[-1].append(word)
    return found


@few
@given(recipe=file_names, overrides=words)
@example(recipe="$(touch canary).yaml", overrides=["a.b=`touch canary`"])
def test_the_script_of_a_rented_machine(recipe, overrides):
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").write_text("")
        (folder / "runs" / "a").mkdir(parents=True)
        args = Namespace(recipe=recipe, overrides=overrides, force=True, processes=2, json_file=None)
        (call,) = shell(ssh._script(args, train_words(args, "runs/a"), "runs/a"), folder, "gradus")
        assert call == ["gradus", "train", recipe, *overrides, "log.dir=runs/a", "--auto-resume", "--force", "--processes", "2"]


COPY_TASK = recipes.load("copy-task")


@few
@given(file=file_names)
@example(file="$(touch canary).yaml")
@example(file="my recipe.yaml")
@example(file="a:b.yaml")
@example(file="-x.yaml")
def test_the_commands_for_a_rented_machine(file):
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as there:
        path, folder = Path(here) / file, Path(there)
        path.write_text("")
        args = parse(["launch", "ssh", "copy-task", "--host", "me@there", "--setup", "true"])
        args.recipe = str(path)
        named = COPY_TASK.model_copy(update={"name": right_name(path.stem)})
        script, todo = ssh.commands(args, named, "runs/a")
        (folder / "gradus" / "runs" / "a").mkdir(parents=True)
        for why, words in todo.items():
            if words[0] == "ssh" and why not in list(todo)[-3:]:
                assert words[:2] == ["ssh", "me@there"]
                for call in shell(words[2], folder, "tmux"):
                    session = call[4]
                    assert call == ["tmux", "new-session", "-d", "-s", session, "bash", "runs/a/job.sh"] and re.fullmatch(r"[\w-]+", session)
            elif words[0] == "scp":  # older ones let the other machine's shell read the path
                target = words[-1].removeprefix("me@there:")
                printed = subprocess.run(["sh", "-c", f'printf "%s\\0" {target}'], capture_output=True, text=True, cwd=folder).stdout
                assert printed == f"{target}\0" and not target.startswith("-") and ".." not in Path(target).parts
        sent = todo["copy the recipe"]
        there_is = sent[-1].removeprefix("me@there:gradus/")
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "activate").write_text("")
        (folder / "runs" / "a").mkdir(parents=True)
        (call,) = shell(script, folder, "gradus")
        assert call[:3] == ["gradus", "train", there_is] and sent[-2] == str(path.resolve())
        assert there_is == f"runs/a/{file}" or f"name={named.name}" in call, "the run has the name that it has here"


def sbatch_reads(line: str) -> str:
    """The value of a directive, as Slurm's own parser takes it (src/sbatch/opt.c: a backslash escapes everywhere, # begins a comment)."""
    value, quote, escaped = "", "", False
    for c in line.partition("=")[2]:
        if escaped:
            value, escaped = value + c, False
        elif c == "\\":
            escaped = True
        elif quote:
            value, quote = (value, "") if c == quote else (value + c, quote)
        elif c in "\"'":
            quote = c
        elif c == "#" or c.isspace():
            break
        else:
            value += c
    return value


@few
@given(recipe=file_names, overrides=words, name=text.filter(str.strip))
@example(recipe="$(touch canary).yaml", overrides=[], name="a\\'b")
def test_the_batch_script(recipe, overrides, name):
    with tempfile.TemporaryDirectory() as there:
        folder = Path(there)
        args = parse(["launch", "slurm", "copy-task", "--venv", "none", "--module", "m", "--dry-run"])
        args.recipe, args.overrides, args.job_name, args.module = recipe, overrides, name, [name]
        script = slurm.script(args, "copy-task", "runs/50%j", folder / "a 'b\\c")
        directives = {line.partition("=")[0].removeprefix("#SBATCH --"): sbatch_reads(line) for line in script.split("\n") if line.startswith("#SBATCH")}
        assert directives["job-name"] == name and directives["chdir"] == str(folder / "a 'b\\c") and directives["output"] == "runs/50%%j/slurm-%j.out"
        *modules, call = shell(script, folder, "srun", "module", "scontrol") if name not in ("srun", "module", "scontrol") else ([], None)
        if call is not None:
            assert modules == [["module", "purge"], ["module", "load", name]]
            assert call == ["srun", "--kill-on-bad-exit=1", "gradus", "train", recipe, *overrides, "log.dir=runs/50%j", "--auto-resume"]


def test_a_recipe_file_in_the_app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library = Path(sys.modules["gradus"].__file__).with_name("recipe") / "library" / "copy-task.yaml"
    name = """$(x) '"`a=b`.yaml"""
    (tmp_path / name).write_text(library.read_text())
    assert main(["launch", "modal", name, "--to", "app.py", "log.dir=runs/a"]) == 0
    tree = ast.parse((tmp_path / "app.py").read_text())
    of = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    words, there = ast.literal_eval(of["WORDS"]), f"/root/inputs/{name}"
    assert words[:2] == ["train", there] and ast.literal_eval(of["FILES"]) == {there: str(tmp_path / name)}


@pytest.mark.parametrize("word", ["a.b=x\ny", "a.b=\rx", "a.b=\0", "a.b=\udc80"])
def test_what_cannot_stand_in_a_script_is_refused(word):
    with pytest.raises(UserError, match=r"must be one line|cannot be written in UTF-8"):
        train_words(Namespace(recipe="copy-task", overrides=[word], force=False, json_file=None), "runs/a")


@pytest.mark.parametrize("code", [0, 2, 137])
def test_the_script_elsewhere_keeps_the_code_of_the_training_and_what_it_says(code, tmp_path):
    """And not the code of tee, which writes the log."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / ".venv/bin/activate").write_text(f'PATH="{tmp_path}/.venv/bin:$PATH"\n')
    (tmp_path / ".venv/bin/gradus").write_text(f'#!/bin/bash\necho "gradus $*"\nexit {code}\n')
    (tmp_path / ".venv/bin/gradus").chmod(0o755)
    script = ssh._script(Namespace(processes=2), ["train", "a recipe.yaml"], "run")
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "run/exit_code").read_text() == f"{code}\n"
    assert (tmp_path / "run/log.txt").read_text() == "gradus train a recipe.yaml --processes 2\n"


def test_what_lies_beside_the_data_and_is_named_goes_with_them(tmp_path):
    for name in ("train.tsv", "held.tsv", "asked.tsv", "other.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\na\t1\n")
    recipe = recipes.load("sst2-bert", [f"data.path={tmp_path}/train.tsv", "data.valid=held.tsv", "data.test=asked.tsv"])
    assert [path.name for path in launch.inputs(recipe)["data.path"]] == ["train.tsv", "held.tsv", "asked.tsv"]
