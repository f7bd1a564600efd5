"""A check holds for the bytes that it was made with; outputs that are off are refused."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from gradus.cli import main
from gradus.infer import engines, find
from gradus.models.weights import checksums

sys.path.insert(0, str(Path(__file__).parent))
from small_models import flip, predicted, saved


def test_outputs_that_are_off_are_refused(tmp_path, capsys, monkeypatch):
    from gradus.infer import export_torchscript

    run = export_torchscript.TorchScript.run
    monkeypatch.setattr(export_torchscript.TorchScript, "run", lambda self, *a: {k: v + 0.01 for k, v in run(self, *a).items()})
    saved("vit", tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--as", "torchscript"]) == 2
    assert "outputs differ from PyTorch's by" in capsys.readouterr().err and not (tmp_path / "out").exists()


def changed(**more):
    return lambda file: file.write_text(json.dumps(json.loads(file.read_text()) | more))


@pytest.mark.parametrize(("name", "change"), [
    ("model.pt", flip), ("model.pt", Path.unlink), ("model.pt", lambda file: file.write_bytes(file.read_bytes()[:1000])),
    ("export.json", changed(told="checked: perfect")), ("export.json", changed(graphs=[1])), ("export.json", lambda file: file.write_text("5")),
    ("config.json", changed(id2label={"0": "a"}, num_labels=1)), ("checksums.json", Path.unlink), ("checksums.json", lambda file: file.write_text("[]")),
    ("checksums.json", lambda file: file.write_text(json.dumps({k: v for k, v in checksums.read(file.parent).items() if k != "model.pt"}))),
    ("checksums.json", lambda file: file.with_name("generation_config.json").write_text("{}")),
])  # fmt: skip
def test_an_export_of_other_bytes_is_refused(vit, tmp_path, name, change, capsys):
    assert predicted(vit / "out", vit, capsys)[0] == 0
    shutil.copytree(vit / "out", tmp_path / "out")
    change(tmp_path / "out" / name)
    code, out, err = predicted(tmp_path / "out", vit, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1) and f"{name} " in err
    assert "it cannot be verified. Copy it again, or make it again with gradus export" in err


def test_an_export_whose_checksums_are_of_another_version_of_its_json(vit, tmp_path, capsys):
    shutil.copytree(vit / "out", tmp_path / "out")
    (tmp_path / "out" / "export.json").write_text("{}")
    checksums.write(tmp_path / "out")
    assert "export.json has another version" in predicted(tmp_path / "out", vit, capsys)[2]


def test_damaged_files_of_the_cache_are_made_anew(vit, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    whole = predicted(vit / "model", vit, capsys)
    (graph,), (check,) = tmp_path.glob("exports/*/model.pt"), tmp_path.glob("engines/*")
    for damage in (flip, Path.unlink, lambda file: file.with_name("export.json").write_text("{}"), lambda file: file.with_name("checksums.json").write_text("[")):
        damage(graph)
        assert predicted(vit / "model", vit, capsys) == whole
    kept = check.read_text()
    for text in ("", "[", "[]\n", kept[: len(kept) // 2], "\0", kept.replace('"value": ', '"value": "x", "v": '), kept.splitlines()[0] + "\n"):
        for file in tmp_path.glob("engines/*"):
            file.write_text(text)
        assert predicted(vit / "model", vit, capsys)[:2] == whole[:2]
    best = engines.best_at(find(str(vit / "model")))
    best.parent.mkdir()
    for text in ("", "{", "[]", "5", "null", '{"any": ["torchscript", "fp32"]}', '{"any": ["zzz", "fp32"], "when": 1}', '{"any": "torch", "when": 1}'):
        best.write_text(text)
        code, _, err = predicted(vit / "model", vit, capsys, "auto")
        assert (code, "--engine auto: torch fp32 (no gradus bench" in err) == (0, True)


def test_a_check_is_of_the_graph_that_it_was_made_with(vit, tmp_path, monkeypatch, capsys):
    """A graph that is made anew is compared anew, since its bytes may be others."""
    monkeypatch.setenv("GRADUS_CACHE", str(tmp_path))
    predicted(vit / "model", vit, capsys)
    (graph,) = tmp_path.glob("exports/*/model.pt")
    flip(graph)
    checksums.write(graph.parent)  # as if it had been made so
    code, _, err = predicted(vit / "model", vit, capsys)
    assert code == 2 and "differs from PyTorch in fp32" in err
