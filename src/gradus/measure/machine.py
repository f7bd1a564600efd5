"""The machine as found, with a word on each figure; and under what anything is measured on it."""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradus import __version__, files, limits
from gradus.errors import how_to_install
from gradus.text import say
from gradus.train.machine import cpu_flags, cpu_name, describe

# the end of a key → how its figure is written
WRITTEN = {"temperature_c": "{} °C", "power_w": "{:.0f} W", "power_cap_w": "{:.0f} W", "utilisation": "{} %"}


def lines(facts: dict[str, Any] | None = None) -> Iterator[str]:
    """The description (train.machine.describe) as text: a line a figure, its value and a word on it. What is absent has
    no line."""
    facts, notes = describe() if facts is None else facts, files.packaged("measure/machine.yaml")
    versions = [(name, version, notes["packages"][name]) for name, version in facts.get("versions", {}).items()]
    sections = {
        "machine": _figures(notes["machine"], facts),
        "software": [*_figures(notes["software"], facts), *versions],
        "several processes": [(name, "yes", notes["backends"][name]) for name in facts.get("backends", [])]
        + [(name, path, notes["launchers"][name]) for name, path in facts.get("launchers", {}).items()],
        "GPUs": _figures(notes["driver"], facts),
        **{f"GPU {gpu['index']}": _figures(notes["gpu"], gpu) for gpu in facts.get("gpus", [])},
        "links": [
            ("GPU {} - GPU {}".format(*link["gpus"]), link["path"], "the path between them")
            for link in facts.get("gpu_links", [])
        ],
    }
    for title, figures in sections.items():
        width = min(48, max((len(value) for _, value, _ in figures), default=0))
        yield from [title] if figures else []
        yield from (f"  {label:18}  {value:{width}}  {word}" for label, value, word in figures)
    if facts.get("torch_gpus") and "gpus" not in facts and "nvml_error" not in facts:
        yield f"\nFor the GPUs' figures: {how_to_install('gpu')}"


def _figures(words: dict[str, list[str]], facts: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(label, _written(key, facts[key]), word) for key, (label, word) in words.items() if key in facts]


def _written(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    shape = next((shape for end, shape in WRITTEN.items() if key.endswith(end)), "{}")
    return ", ".join(value) if isinstance(value, list) else shape.format(value)


def env(args) -> int:
    """The verb: the machine as text, or as JSON."""
    if args.json:
        print(json.dumps(describe(), indent=1, ensure_ascii=False))
        return 0
    say("\n".join(lines()))
    return 0


def conditions() -> dict[str, Any]:
    """Of every row that is measured here."""
    return {
        "date": f"{datetime.date.today()}",
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cpus": limits.processors(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,  # what else the machine is doing
        "versions": {"gradus": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


@functools.cache
def commit() -> str | None:
    """Of the checkout that this program runs from; with + where files differ from it. None: it was installed."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        inside = subprocess.run([*git[:3], "ls-files", Path(__file__).name], capture_output=True, text=True, timeout=10)
        done = subprocess.run(git, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if inside.stdout.strip() else None
