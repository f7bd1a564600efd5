"""Results of tracing on disk: what was made once by this code, this PyTorch and for this question is read again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradus import __version__, files, limits, models
from gradus.errors import UserError


@dataclasses.dataclass
class Progress:
    """Of this process's plans: how many parts of models were not on disk and have been traced, the last perhaps in
    part; and about how many parts the plan needs, on disk or not, where a search knows."""

    traced: int = 0
    expected: int = 0


progress = Progress()


# Folders whose YAML says how long steps take and what they cost, or is a recipe: no trace reads it
UNTRACED = ("plan", "hardware", "library")


@functools.cache
def code(priced: bool = False) -> str:
    """The digest of the package's sources: what a trace comes to may depend on any of them. priced: what is UNTRACED
    too."""
    root = Path(__file__).parents[1]
    read = [path for path in root.rglob("*.yaml") if priced or path.parent.name not in UNTRACED]
    sources = sorted([*root.rglob("*.py"), *read])
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def versions(family: str, priced: bool = False) -> tuple[str, ...]:
    """The code that an answer depends on: of Gradus, of PyTorch, and of a family that is registered from elsewhere.
    priced: whether it depends on what a step takes."""
    model = models.lookup(family).model
    own = "" if model.__module__.startswith("gradus.") else inspect.getsource(sys.modules[model.__module__])
    return own, __version__, torch.__version__, code(priced)


def digest_of(question: Any) -> str:
    """What names an answer. Values that JSON does not know are taken by their text."""
    return hashlib.sha256(json.dumps(question, default=str).encode()).hexdigest()[:32]


def stored(folder: str, question: Any, make: Callable[[], Any]) -> Any:
    """The answer of `make`, as JSON has it, from `folder` of the cache where the file is whole; else made and written.
    question: all that the answer depends on."""
    path = files.cache_dir() / folder / f"{digest_of(question)}.json"
    try:
        digest, _, text = limits.regular(path).read_text().partition("\n")
        if digest == hashlib.sha256(text.encode()).hexdigest():
            return json.loads(text)
    except (OSError, ValueError, UserError):  # absent, torn or another kind of file
        pass
    progress.traced += folder == "profiles"
    text = json.dumps(make())
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    return json.loads(text)
