"""Architectures that no family reads (recipe/hf.yaml): why their weights cannot be trained, and whether a plan can be
made of them. The plan says the same in the same words."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from gradus import files


def table() -> dict[str, Any]:
    return files.packaged("recipe/hf.yaml")


@functools.cache
def planned() -> dict[str, dict[str, Any]]:
    """model_type → how a plan reads its config.json."""
    return {kind: entry for entry in table()["read"] for kind in entry["types"]}


def not_trained(kind: str) -> str:
    """Of a model_type that is planned."""
    entry = planned()[kind]
    if "part" in entry:
        return not_computed(f"model_type={kind}", entry["part"])
    same = f"family {entry['family']} has the same parameters and operations, but other weights"
    if "near" in entry:
        same = f"it is planned as family {entry['family']} {entry['near']}: under 0.1 % of the parameters"
    return f"model_type={kind} can be planned, not trained: {same}"


def not_computed(what: str, part: str) -> str:
    """Of a model with a part that only plans have."""
    return f"{what} can be planned, not trained: {part} is built for plans only"


def refused(kind: Any, known: Iterable[str]) -> str:
    """Of a model_type that is neither planned nor trained. known: those that are."""
    if isinstance(kind, str) and kind in table()["refused"]:
        field, why, nearest, preset = table()["refused"][kind]
        neither = f"model_type={kind} can be neither planned nor trained: {field}: {why}"
        return f"{neither}. The nearest family is {nearest}: gradus plan {preset}"
    return f"model_type={kind} is not one of Gradus's families, nor similar to one. Known: {', '.join(sorted(known))}."
