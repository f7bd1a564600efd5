"""The commands for a rented machine: read, and run, with a folder of this machine as the other one, its own home and a real tmux."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.cli import main

TINY = [
    "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "model.n_layers=1", "batch.samples=8", "train.steps=4", "schedule.warmup_steps=0", "evaluate.every=4",
    "data.n_train=64", "data.n_valid=8",
]  # fmt: skip

# what ssh, scp and rsync do, with $OTHER in place of the other machine; what they were asked for is kept in $OTHER.log
SSH = """#!/bin/bash
echo "ssh $*" >> "$OTHER.log"
while [[ $1 == -* ]]; do [ "$1" = -p ] && shift; shift; done
shift
cd "$OTHER" && HOME="$OTHER" exec bash -c "$*"
"""
COPY = """#!/bin/bash
echo "$(basename "$0") $*" >> "$OTHER.log"
while [[ $1 == -* ]]; do [[ $1 == -P || $1 == -e ]] && shift; shift; done
places=()
for place; do [[ $place == *@*:* ]] && places+=("$OTHER/${place#*:}") || places+=("$place"); done
exec cp -r "${places[@]}"
"""


@pytest.fixture
def other(tmp_path, monkeypatch):
    """Another machine: a home folder, reached by stand-ins for ssh, scp and rsync, with tmux as it is."""
    if not shutil.which("tmux"):
        pytest.skip("no tmux here: apt-get install tmux")
    home, programs, sockets, here = (tmp_path / name for name in ("other", "bin", "t", "here"))
    for folder in (home, programs, sockets, here):
        folder.mkdir()
    for name, text in (("ssh", SSH), ("scp", COPY), ("rsync", COPY)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("OTHER", str(home))
    monkeypatch.setenv("TMUX_TMPDIR", str(sockets))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.chdir(here)
    yield home
    subprocess.run(["tmux", "kill-server"], capture_output=True)


def as_here() -> list[str]:
    """Options that make the other machine's virtual environment this one's, instead of installing PyTorch anew."""
    return ["--setup", f"ln -sfn {shlex.quote(sys.prefix)} .venv"]


@pytest.mark.slow
def test_it_trains_there_and_comes_back(other, capfd):
    """Copied, set up, started inside tmux, watched, fetched: the run folder lies here as if it had been trained here."""
    recipe = Path("my recipe.yaml")
    recipe.write_text(Path(sys.modules["gradus"].__file__).with_name("recipe").joinpath("library", "copy-task.yaml").read_text())
    words = ["launch", "ssh", str(recipe), *TINY, "log.dir=runs/a", "--host", "me@there", "-p", "2222", *as_here()]
    assert main([*words, "--follow"]) == 0
    printed = capfd.readouterr().out
    assert "step 4/4" in printed and "training ended with exit code 0; its run folder is runs/a" in printed
    assert {"job.sh", "recipe.yaml", "metrics.jsonl", "summary.json", "checkpoints", "log.txt"} <= {f.name for f in Path("runs/a").iterdir()}
    assert (other / "gradus" / "source" / "pyproject.toml").is_file() and (other / "gradus" / "source" / "src" / "gradus" / "cli" / "__init__.py").is_file()
    asked = (other.parent / "other.log").read_text()
    calls = [line.split()[0] for line in asked.splitlines()]
    assert calls == ["ssh", "scp", "scp", "scp", "ssh", "ssh", "ssh", "scp"] and asked.count("ssh -p 2222 me@there") == 4
    assert "tmux new-session -d -s gradus-my-recipe-a" in asked


@pytest.mark.slow
def test_a_lost_connection_loses_nothing(other, capfd):
    """Started without --follow, the command returns while training goes on; its printed commands show the end and fetch the run."""
    assert main(["launch", "ssh", "copy-task", *TINY, "log.dir=runs/b", "--host", "me@there", "--copy", "rsync", *as_here()]) == 0
    printed = capfd.readouterr().out.splitlines()
    assert subprocess.run(["tmux", "list-sessions", "-F", "#S"], capture_output=True, text=True).stdout == "gradus-copy-task-b\n"
    assert not Path("runs/b/summary.json").exists()
    later = printed[printed.index("training; a lost connection does not stop it. From here:") :]
    look, follow, fetch = (later[later.index(f"# {why}") + 1] for why in ("look at it (leave with Ctrl-b d)", "see its log until it has ended", "fetch the run folder"))
    assert shlex.split(look)[:3] == ["ssh", "-t", "me@there"] and "tmux attach -t gradus-copy-task-b" in look
    assert subprocess.run(["bash", "-c", follow], timeout=240).returncode == 0
    assert subprocess.run(["bash", "-c", fetch]).returncode == 0
    assert Path("runs/b/summary.json").is_file()


def test_the_commands_are_printed(tmp_path, monkeypatch, capsys):
    """Without a host nothing runs; each printed command is one line that a shell takes as it is, and data go where the recipe will look."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/none")
    (tmp_path / "a text.txt").write_text("to be or not to be " * 200)
    words = ["shakespeare-char-gpt", "data.path=a text.txt", "log.dir=runs/c", "--processes", "2", "--copy", "rsync", "-p", "22022"]
    assert main(["launch", "ssh", *words]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    assert [shlex.split(line)[0] for line in lines] == ["ssh", "rsync", "rsync", "rsync", "ssh", "ssh", "ssh", "ssh", "rsync"]
    assert shlex.split(lines[2]) == ["rsync", "-az", "-e", "ssh -p 22022", str(tmp_path / "a text.txt"), "USER@HOST:gradus/inputs/data.path/"]
    assert lines[-1] == "rsync -az -e 'ssh -p 22022' USER@HOST:gradus/runs/c runs/"
    script = (tmp_path / "runs" / "c" / "job.sh").read_text()
    assert "gradus train shakespeare-char-gpt 'data.path=inputs/data.path/a text.txt' log.dir=runs/c --auto-resume --processes 2 2>&1 | tee -a runs/c/log.txt" in script
    assert "-m pip install --quiet" in lines[4] and "./source[hf,vision]" in lines[4] and "apt-get install -qq -y tmux" in lines[4]


def test_from_a_wheel_someone_must_say_what_installs_gradus_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradus.launch.ssh.checkout", lambda: None)
    assert main(["launch", "ssh", "copy-task"]) == 2
    assert "Run it from a checkout, or say with --setup LINE what installs it there." in capsys.readouterr().err
    assert main(["launch", "ssh", "copy-task", "--setup", "pip install some.whl"]) == 0
    assert "pip install some.whl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "-oProxyCommand=x"], "argument --host: expected one argument"),
        (["--host=-oProxyCommand=x"], "--host=-oProxyCommand=x: not a host. Give USER@HOST, and the port with -p."),
        (["--host", "a b"], "--host=a b: not a host."),
        (["--port", "0"], "--port=0: must be at least 1."),
        (["--folder", "a; b"], "--folder=a; b: give a folder below the home folder there"),
        (["--folder", "x/../../.."], "--folder=x/../../..: give a folder below the home folder there"),
        (["--folder=-x"], "--folder=-x: give a folder below the home folder there"),
        (["--folder", "/etc"], "--folder=/etc: give a folder below the home folder there"),
        (["--host", "me@-oProxyCommand"], "--host=me@-oProxyCommand: not a host."),
        (["log.dir=-x"], "log.dir=-x: the run folder has the same path here and there."),
        (["log.dir=a:b"], "log.dir=a:b: the run folder has the same path here and there."),
        (["name=../x"], "name: '../x' cannot be the name of a folder"),
        (["--follow"], "--follow cannot take effect where nothing is run. Give --host, without --dry-run."),
        (["--processes", "0"], "--processes=0: must be at least 1."),
        (["log.dir=../a"], "log.dir=../a: the run folder has the same path here and there."),
        (["--copy", "ftp"], "--copy=ftp: not one of scp, rsync"),
        (["--processes", "3"], "batch.samples=128 does not divide among 3 processes"),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "ssh", "copy-task", *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_that_fails_is_told(other, capfd):
    """With what it was for, its exit code, and the command itself."""
    Path(shutil.which("ssh")).write_text("#!/bin/bash\nexit 255\n")
    assert main(["launch", "ssh", "copy-task", "log.dir=runs/d", "--host", "me@there"]) == 2
    assert capfd.readouterr().err.startswith("error: could not make the folders: ssh ended with exit code 255. The command was: ssh me@there 'mkdir -p gradus/source")
