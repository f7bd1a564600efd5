"""A study file: mistakes are one clear line."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from gradus.cli import main
from gradus.proof import study_file

sys.path[:0] = [str(Path(__file__).parent)]

from proof_cases import OWN, written  # noqa: E402


def grid(axes: int, names: int) -> str:
    return "recipe: copy-task\nrunner: none\ngrid:\n" + "".join(f"  x{i}: {{{', '.join(f'n{i}_{j}: ' for j in range(names))}}}\n" for i in range(axes))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected keys"),
        (r'{"\ud800": 1}', "keys: input should be a valid string"),
        ("recipe: copy-task", "give configurations or grid."),
        ("recipe: copy-task\nconfiguration: {}", "configuration: unknown key. Did you mean configurations?"),
        ("recipe: copy-task\nconfigurations: {a: {sett: []}}", "configurations.a.sett: unknown key. Did you mean set?"),
        ("recipe: copy-task\nconfigurations: {a: }\nsteps: 0", "steps: input should be greater than or equal to 1"),
        ("recipe: copy-task\nconfigurations: {a: {set: [model.layers=2]}}", "a: command line: model.layers: unknown key"),
        ("recipe: copy-tusk\nconfigurations: {a: }", "Did you mean copy-task?"),
        ("configurations: {a: }", "a: no recipe."),
        ("recipe: copy-task\nconfigurations: {a: }\nagainst: b", "against=b: no such name"),
        ("recipe: copy-task\nconfigurations: {a: {runner: no.py:f}}", "runner=no.py:f: no such runner"),
        ("recipe: copy-task\nconfigurations: {a: }\nseeds: [1]", "seeds are of whole trainings"),
        ("recipe: copy-task\nconfigurations: {a: {options: {b: 1}}}", "options are for your own runner"),
        ("recipe: copy-task\ngrid: {x: {a: }, y: {a: }}", "a is a name on two axes"),
        ("recipe: copy-task\nrecipe: copy-task\nconfigurations: {a: }", "line 2, column 1: not valid YAML: recipe is given twice. Keep one."),
        ("recipe: copy-task\nconfigurations: {a: {set: []}, a: {set: []}}", "a is given twice"),
        ("recipe: copy-task\nconfigurations: {'': }", "'': not a name"),
        ("recipe: copy-task\nconfigurations: {\"a\\nb\": }", "'a\\nb': not a name"),
        ("recipe: copy-task\nconfigurations: {a: }\nrounds: 1000000000", "rounds: input should be less than or equal to 10000"),
        ("recipe: copy-task\nrunner: train\nconfigurations: {a: }\nseeds: [-1]", "seeds.0: input should be greater than or equal to 0"),
        ("recipe: copy-task\nrunner: train\nconfigurations: {a: }\nseeds: [1, 1]", "seeds=[1, 1]: give each once"),
        ("recipe: copy-task\nconfigurations: {a: {source: {loss: .nan}}}", "input should be a finite number"),
        ("configurations: {a: {runner: note.txt:f}}", "runner=note.txt:f: no such runner"),
        ("recipe: copy-task\nrunner: none\nconfigurations: {a b: , a-b: }", "'a-b' is too like 'a b': both would have one folder. Rename one."),
        ("recipe: copy-task\nrunner: none\nconfigurations: {a: {source_price: 1.5}}", "a: source_price is of an epoch on source_devices. Name them, and set data.limit."),
        (grid(4, 10), "10,000 configurations; at most 1,000. Leave names out, or use only_with."),
        (grid(12, 10), "the grid has 1,000,000,000,000 combinations; at most 100,000."),
        ("recipe: copy-task\nconfigurations: {a: {processes: 3}}", "a: copy-task: batch.samples=128 does not divide among 3"),
    ],
)
def test_mistakes_in_a_file_are_one_clear_line(text, said, tmp_path, capsys):
    (tmp_path / "note.txt").write_text("def f(recipe, options): pass")
    file = written(tmp_path, text)
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and error.startswith("error:") and not (tmp_path / "out").exists()


def test_two_configurations_of_one_name_are_refused(tmp_path, capsys):
    """Their names are joined by the same mark that one of them has in it: one of the two was left out."""
    file = written(tmp_path, "recipe: copy-task\nrunner: none\ngrid:\n  p: {'a · b': {only_with: [c]}, a: {only_with: [b · c]}}\n  q: {c: , b · c: }\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 2
    assert "'a · b · c' is the name of two configurations: {'p': 'a', 'q': 'b · c'} and {'p': 'a · b', 'q': 'c'}. Rename one." in capsys.readouterr().err


def test_a_column_that_is_not_there_is_told(own, tmp_path, capsys):
    shutil.copytree(own[1], tmp_path / "out")
    file = written(tmp_path, OWN + "columns: [samples_per_s, los]\n")
    assert main(["study", str(file), "--to", str(tmp_path / "out")]) == 0
    assert "note: columns: los: nothing has that name. Did you mean loss?" in capsys.readouterr().out


def test_what_a_configuration_says_itself_counts_before_what_all_have(tmp_path):
    file = written(tmp_path, "recipe: copy-task\nprocesses: 2\nset: [train.steps=7]\nconfigurations:\n  as all: \n  own: {recipe: digits-vit, processes: 1, set: [train.steps=9]}")
    as_all, own = study_file.load(file)[0].configurations
    assert [(c.recipe.name, c.processes, c.recipe.train.steps) for c in (as_all, own)] == [("copy-task", 2, 7), ("digits-vit", 1, 9)]
