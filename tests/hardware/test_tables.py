"""The hardware file as tables."""

from __future__ import annotations

import re

import pytest

from gradus import hardware
from gradus.cli import main
from gradus.hardware import tables

pytestmark = pytest.mark.usefixtures("own_files")


# ---------------------------------------------------------------- printed


def test_the_tables_name_all(capsys):
    assert main(["hardware"]) == 0
    printed = capsys.readouterr().out
    for name in [*hardware.devices(), *hardware.links()]:
        assert re.search(rf"^{re.escape(name)}\s", printed, re.M), name
    assert max(len(line) for line in printed.splitlines() if "hardware.yaml" not in line) <= 80  # but for a long path
    row = " ".join(line for line in printed.splitlines() if line.startswith("H100-SXM "))  # of both tables
    for figure in ("67", "494", "989", "1979", "80 GiB", "HBM3", "3350", "700", "2022", "450", "50"):
        assert re.search(rf"\s{figure}(\s|$)", row), figure
    assert re.search(r"\s3350\s+700\s+8\s+450\s+50\s", row), "its memory's GB/s, watts, devices a node, then the link's and the network's GB/s"


def test_one_device_with_its_sources(capsys):
    assert main(["hardware", "NVIDIA", "H100", "NVL"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "bf16 835 TFLOP/s" in printed and "94 GiB" in printed and "63 GB/s in one direction (126 GB/s both directions together)" in printed
    assert "NVIDIA H100 data sheet" in printed
    assert "sources differ by a factor of 5.1" in " ".join(" ".join(tables.lines("H100")).split())
    assert main(["hardware", "NVLink", "5"]) == 0
    assert "900 GB/s = 7200 Gb/s in one direction (1800 GB/s both directions together)" in " ".join(capsys.readouterr().out.split())
    assert main(["hardware", "X999"]) == 2
    assert "gradus calibrate" in capsys.readouterr().err
