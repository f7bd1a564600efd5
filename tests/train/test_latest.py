"""runs/RECIPE/latest: the newest run folder there, wherever a run folder may be named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus import api, cli, files
from gradus.cli import main
from gradus.errors import UserError
from gradus.launch import local
from gradus.train.resolve import run_to_resume

pytestmark = pytest.mark.usefixtures("no_plan")
SMALL = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=32", "data.n_train=64", "data.n_valid=8", "batch.samples=16",
         "schedule.warmup_steps=1", "train.steps=2", "evaluate.samples=0", "layout.device=cpu"]  # fmt: skip
RUNS = Path("runs/copy-task")


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def folder(name: str, runs: Path = RUNS) -> Path:
    """A run folder as far as its name is looked for."""
    (runs / name).mkdir(parents=True)
    (runs / name / "recipe.yaml").write_text("")
    files.link_latest(runs / name, runs)
    return runs / name


def test_a_new_run_from_a_run_folder_says_that_it_is_no_resume(capsys):
    assert main(["train", "copy-task", *SMALL]) == 0
    (first,) = [run for run in RUNS.iterdir() if not run.is_symlink()]
    assert "--resume continues" not in capsys.readouterr().out
    assert main(["train", f"{RUNS}/latest", "--resume", "train.steps=3"]) == 0
    assert "--resume continues" not in capsys.readouterr().out
    assert main(["train", f"{RUNS}/latest", "train.steps=2"]) == 0
    assert f"note: a new run of the recipe in {first} begins; --resume continues that run\n" in capsys.readouterr().out


@pytest.mark.slow
def test_the_newest_run_has_two_names(capsys, monkeypatch):
    made = []
    for _ in range(2):
        assert main(["train", "copy-task", *SMALL]) == 0
        (new,) = [run for run in RUNS.iterdir() if not run.is_symlink() and run not in made]
        made.append(new)
        assert os.readlink(RUNS / "latest") == new.name
    old, new = made
    out = {}
    for words in (["evaluate", "LATEST"], ["show", "LATEST"], ["export", "LATEST", "--to", "exported"]):
        capsys.readouterr()
        for run in (f"{RUNS}/latest", str(new)):
            shutil.rmtree("exported", ignore_errors=True)
            assert main([run if word == "LATEST" else word for word in words]) == 0
            out[run] = capsys.readouterr().out
        assert out[f"{RUNS}/latest"] == out[str(new)] != ""
    started = []
    with monkeypatch.context() as patch:
        patch.setattr(local, "run", lambda n, argv, **_: started.append(argv[:2]) or 0)
        assert main(["train", f"{RUNS}/latest", "--resume", "train.steps=3", "--processes", "2"]) == 0
    assert started == [["train", str(new)]], "its workers, whose newest run may be another by then"
    assert run_to_resume("copy-task", SMALL) == api.train(RUNS / "latest", resume=True).folder == api.Run(RUNS / "latest").folder == new
    assert main(["train", str(old), "--resume", "train.steps=3"]) == 0 and os.readlink(RUNS / "latest") == new.name, "it is the older one still"
    assert main(["train", f"{RUNS}/latest", "--resume", "train.steps=3"]) == 0
    assert f"run folder: {new}\n" in capsys.readouterr().out
    assert main(["train", "copy-task", *SMALL, "log.dir=elsewhere"]) == 0
    assert os.readlink(RUNS / "latest") == new.name and not os.path.lexists("latest"), "a run elsewhere is not among them"
    assert main(["train", "copy-task", *SMALL, f"log.dir={RUNS.absolute() / 'mine'}"]) == 0 and os.readlink(RUNS / "latest") == "mine"


def test_a_link_beside_its_run_is_one_run():
    """As the shell gives them for runs/copy-task/*."""
    old, new = folder("1"), folder("2")
    link = f"{RUNS}/latest"
    assert cli.parse(["prove", str(old), str(new), link]).runs == [str(old), str(new)]
    assert cli.parse(["prove", f"{old}/", f"{new}/", f"{link}/"]).runs == [f"{old}/", f"{new}/"]
    assert cli.parse(["prove", link, str(old)]).runs == [str(new), str(old)]
    assert cli.parse(["report", link, link, "--to", "x"]).runs == [str(new)] * 2, "which is told"


def test_a_link_that_moves_meanwhile_changes_nothing():
    one = folder("1")
    args = cli.parse(["train", f"{RUNS}/latest", "--resume"])
    folder("2")
    assert args.recipe == str(one)


def test_only_the_link_to_a_run_is_followed():
    Path("latest").symlink_to("nowhere")
    Path("data").mkdir()
    Path("data/1").mkdir()
    Path("data/latest").symlink_to("1")
    for word in ("latest", "data/latest", f"{RUNS}/latest", "", "/", "a\0/latest", "x" * 5000 + "/latest"):
        assert files.run_of(word) == word


def no_links(path: Path, target: Path) -> None:
    if "latest" in path.name:
        raise OSError(1, "no links here")
    os.symlink(target, path)


@pytest.mark.parametrize("kind", ["file", "folder", "no links"])
def test_where_there_can_be_no_link_there_is_none(kind, monkeypatch, capsys):
    RUNS.mkdir(parents=True)
    if kind == "file":
        (RUNS / "latest").write_text("mine")
    elif kind == "folder":
        (RUNS / "latest").mkdir()
    else:
        monkeypatch.setattr(Path, "symlink_to", no_links)
    assert main(["train", "copy-task", *SMALL]) == 0
    left = sorted(path.name for path in RUNS.iterdir())
    assert left[1:] == ([] if kind == "no links" else ["latest"]) and left[0].startswith("20")
    assert kind != "file" or (RUNS / "latest").read_text() == "mine"
    assert run_to_resume("copy-task", SMALL) == RUNS / left[0]


def test_a_run_that_was_deleted_is_not_the_newest():
    old, new = folder("1"), folder("2")
    shutil.rmtree(new)
    assert run_to_resume("copy-task", SMALL) == old
    shutil.rmtree(old)
    with pytest.raises(UserError, match=r"--resume: no run of copy-task in runs/copy-task\."):
        run_to_resume("copy-task", SMALL)


def test_the_newest_is_what_was_made_last_however_it_is_named():
    new = [folder("zzz"), folder("1")][1]
    assert run_to_resume("copy-task", SMALL) == new


def test_many_at_once_leave_one_link():
    """And what a kill between making the link and putting it in its place left is removed; the run that it names stays."""
    killed = folder("0")
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True).stdout.strip()
    (RUNS / f".writing-latest-{files._machine()}-{dead}-{'0' * 16}").symlink_to("0")
    code = "import sys; from pathlib import Path; from gradus import files; runs = Path('runs/copy-task'); [files.link_latest(runs / sys.argv[1], runs) for _ in range(300)]"
    for name in "1234":
        (RUNS / name).mkdir()
    running = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "1234"]
    seen = set()
    while any(process.poll() is None for process in running):
        seen.add(os.readlink(RUNS / "latest"))  # there at any time
    assert [process.returncode for process in running] == [0] * 4 and seen - {"0"} <= set("1234")
    assert sorted(path.name for path in RUNS.iterdir()) == ["0", "1", "2", "3", "4", "latest"]
    assert (killed / "recipe.yaml").is_file()
