"""What a shell completes."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from gradus.cli import main
from gradus.cli import parser as command_line
from gradus.completion import script
from gradus.recipe import names
from gradus.recipe.presets import ALIASES, PRESETS

VERBS = command_line()._subparsers._group_actions[0].choices
# what is typed, the last word unfinished → what it may become, all of it
ASKED = [
    ("gradus cal", {"calibrate"}),
    ("gradus --v", {"--version"}),
    ("gradus train copy-task-", {"copy-task-s1"}),
    ("gradus train copy-task train.see", {"train.seed="}),
    ("gradus train copy-task optimizer.lr", {"optimizer.lr="}),
    ("gradus train copy-task --res", {"--resume"}),
    ("gradus launch sl", {"slurm"}),
    ("gradus launch slurm digits", {"digits-vit"}),
    ("gradus launch slurm digits-vit --ntasks-", {"--ntasks-per-node"}),
    ("gradus completion f", {"fish"}),
    ("gradus plan llama3.1-7", {"llama3.1-70b"}),
    ("gradus models gpt2-small gpt2-m", {"gpt2-medium"}),
]


def run(shell: str, code: str) -> set[str]:
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done
    return set(done.stdout.split())


@pytest.mark.parametrize(("typed", "wanted"), [*ASKED, ("gradus ", set(VERBS)), ("gradus show ", {*names(), *PRESETS, *ALIASES})])
def test_bash(typed, wanted):
    words = [*typed.split(), *([""] if typed.endswith(" ") else [])]
    code = f"{script('bash', VERBS)}\nCOMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _gradus; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    assert run("bash", code) == wanted


@pytest.mark.skipif(not shutil.which("fish"), reason="no fish here")
@pytest.mark.parametrize(("typed", "wanted"), ASKED)
def test_fish(typed, wanted):
    assert run("fish", f"{script('fish', VERBS)}\ncomplete -C {shlex.quote(typed)} | string replace -r '\\t.*' ''; true") == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_whole(shell, capsys):
    """Its syntax where the shell is here; in any case every verb, option, recipe and section."""
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    words = set(text.replace('"', " ").split())
    assert {*VERBS, *names(), "--json_file", "--max-restarts", "layout.tensor=", "train.steps="} <= words
    if shutil.which(shell):
        assert subprocess.run([shell, "--no-execute" if shell == "fish" else "-n"], input=text, text=True).returncode == 0


def test_another_shell_is_one_clear_line(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "error: gradus completion: shell=tcsh: not one of bash, zsh, fish. Did you mean zsh?\n"
