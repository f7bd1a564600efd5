"""docs/quickstart.ipynb, executed anew in an empty folder: what does not depend on the machine is as committed, what was measured has its form.

python tests/docs/test_notebook.py        executes it and writes its outputs; on a quiet machine, and the first run there (it calibrates)
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"
PLANNED = r"^(memory/(?:weights|gradients|optimizer|rest|allocated) +predicted +[\d.]+ MB)"  # the same on every machine
# Of the first run on a machine alone, which measures it, and what follows from that.
CALIBRATED = r"^first run here .*|^(?:measured in|given up after) .*|; (?:[\d.]+ m?s per step|step time unknown).*|^ +step .*|^time/step .*"


def executed(folder: str | Path):
    """The notebook with the outputs that it has here. Raises nbclient's CellExecutionError for a cell that fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def said(cell) -> list[str]:
    """The lines that a cell printed, without colours."""
    text = "".join(output.get("text", "") for output in cell.get("outputs", ()))
    return re.sub(r"\x1b\[\d*m", "", text).splitlines()


def form(line: str) -> str:
    """A line without its numbers and their units: what each says, and how many figures it has."""
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,:]*(e[-+]\d+)?%?k?( [kMG]?B\b| [mµ]?s\b)?", "#", line)).strip()


def test_a_line_keeps_its_words():
    assert form("step 50/300  loss 1.692  lr 1.00e-03  17.7k tokens/s  process 0.44 GB  ETA 0:36") == "step #/# loss # lr # # tokens/s process # ETA #"
    assert form("  process at the peak 516 MB 441 MB +17.2%") == form("process at the peak  1.2 GB  441 kB  -0.1%")


@pytest.mark.docs
def test_it_runs_as_committed(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="the extra docs brings nbclient and ipykernel, which run the notebook")
    pytest.importorskip("ipykernel"), pytest.importorskip("nbclient"), pytest.importorskip("matplotlib")
    before = [cell for cell in nbformat.read(NOTEBOOK, 4).cells if cell.cell_type == "code"]
    after = [cell for cell in executed(tmp_path).cells if cell.cell_type == "code"]
    assert len(after) == len(before) == 5
    assert said(after[0]) == said(before[0]) and "235,851 parameters" in said(after[0])
    for old, new in zip(before, after):
        was, now = ([re.sub(CALIBRATED, "", line) for line in said(cell)] for cell in (old, new))
        missing = {form(line) for line in was} - {form(line) for line in now} - {""}
        assert not missing, "\n".join(now)
        assert [set(output.get("data", ())) for output in old.outputs] == [set(output.get("data", ())) for output in new.outputs]
    planned = [re.findall(PLANNED, "\n".join(said(cells[2])), re.M) for cells in (before, after)]
    assert planned[0] == planned[1] and len(planned[0]) == 5
    exact = float(re.search(r"([\d.]+)%", said(after[4])[0])[1])
    assert exact > 90, "it learns to copy"


def test_its_outputs_name_no_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "image/png" in text and not re.search(r"/(home|root|tmp|Users|work)/|execution_start|\"iopub", text)
    assert NOTEBOOK.stat().st_size < 100_000


def test_its_page_has_code_outputs_and_picture():
    pytest.importorskip("nbformat", reason="the extra docs brings nbclient, and with it nbformat")
    import notebook

    page = "\n".join(notebook.Notebook().run(["{{ quickstart.ipynb }}", "after"]))
    assert page.startswith("# Gradus") and page.endswith("\nafter") and page.count("```python\n") == 5
    assert "```measured\n235,851 parameters\n" in page and 'src="data:image/png;base64,iVBOR' in page


if __name__ == "__main__":
    import nbformat

    for name in ("CI", "GRADUS_NO_CALIBRATE", "FORCE_COLOR"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        notebook = executed(folder)
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            if "text" in output:
                output["text"] = re.sub(r"\x1b\[\d*m", "", output["text"])
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, NOTEBOOK)
    print("\n".join(said(notebook.cells[-2])), file=sys.stderr)
