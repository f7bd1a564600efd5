"""The folder of a study: what is left alone, what is refused in one line, and what a full disk leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradus.cli import main
from gradus.errors import FAULT, UserError
from gradus.proof import (
    harness,
    study,
    study_file,
    study_store,
)
from gradus.proof.study_store import SAMPLES, StudyStore

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import OWN, written  # noqa: E402


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9))
def test_the_middle_round_is_one_that_was_measured(rates):
    samples = [study_store.Sample(i, values={"samples_per_s": (r, "")}) for i, r in enumerate(rates)]
    middle = study_store.middle_of(samples).speed
    assert sum(r <= middle for r in rates) * 2 >= len(rates) and sum(r >= middle for r in rates) * 2 >= len(rates)


def test_a_study_is_of_one_machine(tmp_path, monkeypatch):
    made = study.Study("x", [study.Configuration("a", None)])
    StudyStore(made, tmp_path).add(made.configurations[0], study_store.Sample(1, values={"samples_per_s": (1.0, "")}))
    StudyStore(made, tmp_path)
    monkeypatch.setattr(study_store.machine, "conditions", lambda: {"cpu": "another"})
    with pytest.raises(UserError, match=r"samples of another machine .*; this is another\. Go on there, or give another --to"):
        StudyStore(made, tmp_path)


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    file = written(tmp_path, OWN)
    with pytest.raises(UserError, match="is not empty, and holds no study"):
        harness.run(study_file.load(file)[0], tmp_path)


@pytest.mark.parametrize("name", ["study.json", "samples.jsonl", "plan.jsonl"])
@pytest.mark.parametrize("content", ["", "{", "[]\n", "{}\n", "5\n", "null\n", '{"name": "a", "value": 1}\n{"name": "b", "value": 2}\n', "wrong"])
def test_a_damaged_folder_is_one_clear_line(name, content, own, unmeasured, tmp_path, capsys):
    shutil.copytree(own[1], tmp_path / "out")
    text = (own[1] / name).read_text()
    wrong = text.replace('"round": 1', '"round": "x"').replace('"study": "', '"study": ["').replace('"elapsed": ', '"elapsed": "x", "e": ')
    (tmp_path / "out" / name).write_text(wrong if content == "wrong" else content)
    code, error = main(["study", str(own[0]), "--to", str(tmp_path / "out")]), capsys.readouterr().err.strip()
    if code == 2:
        assert len(error.splitlines()) == 1 and str(tmp_path / "out") in error, error
    else:  # of these nothing was left to take: measured, or planned, again
        assert not error and name != "study.json" and (content in ("", "{", "null\n") or (name, content) == ("plan.jsonl", "wrong"))


@pytest.mark.parametrize("after", ["nothing", "the start"])
def test_a_full_disk_is_one_line_and_leaves_nothing(after, tmp_path, monkeypatch, capsys, unmeasured):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # without a file's name, as write() raises it

    def write_text(self, *args, **options):
        if after == "nothing" or SAMPLES in self.name:
            raise full
        return whole(self, *args, **options)

    whole = Path.write_text
    file = written(tmp_path, OWN)
    monkeypatch.setattr(Path, "write_text", write_text)
    assert main(["study", str(file), "--to", str(tmp_path / "deep" / "out")]) == FAULT
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and "the disk is full (" in error and "what was measured is kept" in error
    assert (tmp_path / "deep").exists() == (after == "the start") and not list(tmp_path.rglob(".writing*"))


def test_a_full_disk_while_samples_are_written(tmp_path, monkeypatch, capsys, unmeasured):
    file = written(tmp_path, OWN)
    monkeypatch.setattr(study_store.RowFile, "write", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device")))
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == FAULT
    assert "samples.jsonl: the disk is full (" in capsys.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="locks of files")
def test_two_studies_in_one_folder(own, unmeasured, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(own[1], out)
    hold = f"import fcntl, time\nf = open({str(out / '.lock')!r}, 'w')\nfcntl.lockf(f, fcntl.LOCK_EX)\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert main(["study", str(own[0]), "--to", str(out)]) == 2
        assert f"{out}: another study writes there. Wait until it ends, or give another --to" in capsys.readouterr().err
        other.kill()
    assert main(["study", str(own[0]), "--to", str(out)]) == 0 and not (out / ".lock").exists()


def test_a_folder_without_samples_is_free(tmp_path):
    with study_store.claimed(tmp_path / "a", "ladder", {"digest": "one"}, {}):
        (tmp_path / "a" / "once").mkdir()
    file = tmp_path / "a" / "once" / study_store.SAMPLES
    file.write_text(json.dumps({"name": "sample", "value": 0, "failed": "the first rung"}) + "\n")
    with study_store.claimed(tmp_path / "a", "ladder", {"digest": "two"}, {}):
        assert json.loads((tmp_path / "a" / "ladder.json").read_text()) == {"digest": "two"}
    (tmp_path / "a" / "runs" / "first-1").mkdir(parents=True)
    (tmp_path / "a" / "runs" / "first-1" / "recipe.yaml").touch()
    with pytest.raises(UserError, match="holds another ladder"), study_store.claimed(tmp_path / "a", "ladder", {"digest": "three"}, {}):
        pass  # a training was begun there
    shutil.rmtree(tmp_path / "a" / "runs")
    file.write_text(json.dumps({"name": "sample", "value": 1.0}) + "\n")
    with pytest.raises(UserError, match="holds another ladder"), study_store.claimed(tmp_path / "a", "ladder", {"digest": "three"}, {}):
        pass
