"""--force, which goes on where the plan says that a run will not fit, is passed on to where it trains."""

from __future__ import annotations

import pytest

from gradus.cli import main


@pytest.mark.parametrize("force", [True, False])
@pytest.mark.parametrize(
    ("place", "file"),
    [(["slurm", "--dry-run"], "runs/one/job.sbatch"), (["ssh"], "runs/one/job.sh"), (["modal", "--to", "app.py", "--gpu", "none"], "app.py")],
)
def test_force_is_passed_on(place, file, force, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["launch", place[0], "copy-task", "log.dir=runs/one", *place[1:], *(["--force"] if force else [])]
    assert main(command) == 0, capsys.readouterr().err
    text = (tmp_path / file).read_text()
    assert "--auto-resume" in text and ("--force" in text) == force


def test_modal_without_a_recipe_has_nothing_to_force(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "modal", "--model", "gpt2", "--to", "app.py", "--force"]) == 2
    assert "--force: a setting of a recipe, and there is none" in capsys.readouterr().err
