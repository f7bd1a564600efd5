"""A layout as `key=value` words that can be pasted back: what the plan, the search, the advice and the page print."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from gradus.recipe.schema import Layout, Section

DEFAULT = Layout()


def layout_keys(layout: Layout, asked: Layout | None = None, stated: Collection[str] = ()) -> str:
    """The `layout.*` words that give the recipe this layout: what is not the default, what is not as in `asked` (the
    recipe's own layout), and what the command line names (`stated`), so that they hold beside those words and in their
    place. --on names the device."""
    own = asked or layout
    keys = [k for k, v in layout if k != "device" and (v != getattr(DEFAULT, k) or v != getattr(own, k) or k in stated)]
    if layout.param_dtype and "precision" in keys and "precision" not in own.model_fields_set | set(stated):
        keys.remove("precision")  # of a bare model: fp32, as param_dtype has it
    return " ".join(word for key in keys for word in _words(f"layout.{key}", getattr(layout, key)))


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, Section):
        return [word for name, of_it in value for word in _words(f"{key}.{name}", of_it)]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{key}={text}"]


def stated_keys(overrides: Iterable[str]) -> frozenset[str]:
    """The layout's keys that overrides name; all of them where they give the whole section."""
    paths = [o.partition("=")[0].strip().split(".") for o in overrides]
    if ["layout"] in paths:
        return frozenset(Layout.model_fields)
    return frozenset(path[1] for path in paths if path[0] == "layout")


def kind_of(on: str) -> str:
    """'8xA100-80GB' → 'A100-80GB'."""
    return re.sub(r"^\s*[0-9_,.eE+-]+\s*[x×*]\s*", "", on)


def precision_text(layout: Layout) -> str:
    """What is computed in, and where that is not plain also what the weights are kept in."""
    if layout.shard > 1 and layout.param_dtype:
        return f"fp32 master weights, {layout.param_dtype} compute (FSDP mixed precision)"
    fp8 = ", products of the blocks' linear layers in fp8" * (layout.precision == "fp8")
    return computed_in(layout) + " weights and compute" * layout.precision.startswith("pure_") + fp8


def computed_in(layout: Layout) -> str:
    """fp32, tf32, bf16 or fp16: what matrix products are computed in; with fp8 those that are not in fp8."""
    numbers = layout.precision.removeprefix("pure_").replace("fp8", "bf16")
    if layout.shard > 1 and layout.param_dtype:
        numbers = layout.param_dtype
    return "tf32" if numbers == "fp32" and layout.tf32 else numbers
