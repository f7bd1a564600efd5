"""What errors say: the nearest name, the missing package, colour."""

from __future__ import annotations

import errno
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gradus import errors
from gradus.cli import main
from gradus.errors import colour, nearest

sys.path.insert(0, str(Path(__file__).parent))

from terminals import Terminal


def test_nearest_prefers_a_part_of_the_name_to_the_spelling():
    assert nearest("patch", ["patches", "patch_size"]) == "patch_size"
    assert nearest("exportt", ["evaluate", "export"]) == "export"
    assert nearest("mixed_precision", ["device", "precision", "compile"]) == "precision"
    assert nearest("zzz", ["device", "precision"]) is None


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    lines = ["torch>=2", "numpy", 'pillow>=10; extra == "vision"', 'pyarrow>=15; extra == "vision"', 'pyarrow>=15; extra == "hf"']
    monkeypatch.setattr(metadata, "requires", lambda name: {"gradus-ml": lines}[name])
    assert errors.requirements("") == ["torch>=2", "numpy"] and errors.requirements("hf", "vision") == ["pillow>=10", "pyarrow>=15"]
    with pytest.raises(errors.UserError, match=r"^pictures needs the package no_such_thing \(.*\), of the extra vision: pip install 'pillow>=10' 'pyarrow>=15'$"):
        errors.need("no_such_thing.parts", "vision", "pictures")

    def not_there(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_there)
    assert errors.requirements("", "hf") == [] and errors.how_to_install("hf") == "pip install -e '.[hf]' in the checkout"


def test_colour_is_for_terminals_and_hears_no_color(monkeypatch):
    screen = Terminal(80)
    for environment, wanted in (({"TERM": "xterm"}, True), ({"TERM": "dumb"}, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False)):
        for name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert (colour("error:", "red", screen.out) == "\x1b[31merror:\x1b[0m") == wanted, environment
    monkeypatch.delenv("NO_COLOR")
    with open(os.devnull, "w") as file:
        assert colour("x", "green", file) == "x"
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert colour("x", "green", file) == "\x1b[32mx\x1b[0m"
        monkeypatch.setenv("NO_COLOR", "1")
        assert colour("x", "green", file) == "x"
    screen.close()


def test_an_error_is_red_on_a_terminal_and_plain_in_a_file(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["models", "gpt9"]) == 2
    assert capsys.readouterr().err.startswith("error: model.preset=gpt9: unknown preset.")
    screen = Terminal(80)
    monkeypatch.setattr(sys, "stderr", screen.out)
    assert main(["models", "gpt9"]) == 2
    assert screen.close().startswith("\x1b[31merror:\x1b[0m model.preset=gpt9: unknown preset.")


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, errors.FAULT), (errno.ENOSPC, errors.FAULT), (errno.ENOENT, 2)])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_line_made_from_an_error_of_the_system_has_its_code_however_it_was_raised(number, code, hidden):
    with pytest.raises(errors.UserError) as caught:
        try:
            raise OSError(number, "what the system says")
        except OSError as e:
            raise errors.UserError("what the user reads") from (None if hidden else e)
    assert errors.exit_code(caught.value) == code
