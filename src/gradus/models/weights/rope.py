"""Rotary positions in a config.json: `rope_theta` and `rope_scaling`, or since transformers 5 `rope_parameters`, which
hold both, for each type of layer by itself where the types differ. All are read, and all are written: a program that
knows one name alone takes an angle of 10,000 without a word."""

from __future__ import annotations

import math
from typing import Any

from gradus.errors import UserError
from gradus.models.weights import fields
from gradus.recipe.schema import RopeScaling

SCALING = fields.names()["rope"]  # type → ours → theirs
KNOWN = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "truncate", "mscale", "mscale_all_dim")


def known(kind: str) -> set[str]:
    """What rotary positions of this type are read from."""
    return {*KNOWN, *fields.theirs(SCALING.get(kind, {})).values()}


def read(family: str, hf: dict[str, Any], layers: str | None = None) -> tuple[float | None, RopeScaling | None]:
    """(theta, None where it is not said; scaling). layers: of this type of layer; None: all have the same.

    Raises UserError for a scaling that is not known or not whole, and where two fields contradict each other.
    """
    old, new = (dict(hf.get(name) or {}) for name in ("rope_scaling", "rope_parameters"))
    if nested := [value for value in new.values() if isinstance(value, dict)]:
        if layers is None and any(value != nested[0] for value in nested):
            raise fields.unsupported(family, "rope_parameters", new, " (only the same for all layers is)")
        new = dict(nested[0] if layers is None else new.get(layers) or {})
    elif layers and new:
        raise fields.unsupported(family, "rope_parameters", new, f" (only for each type of layer, as {layers}, is)")
    for one in (old, new):
        if "type" in one:
            one.setdefault("rope_type", one.pop("type"))
    both = [name for name in old if name in new and None not in (old[name], new[name])]
    if differ := [name for name in both if old[name] != new[name]]:
        what = f"rope_scaling has {differ[0]}={old[differ[0]]}, rope_parameters {new[differ[0]]}"
        raise UserError(f"config.json: {what}. Remove one of the two")
    rope = fields.Fields({**old, **{name: value for name, value in new.items() if value is not None}})
    fields.only(family, rope, {"partial_rotary_factor": 1.0, "truncate": True})
    beside = hf.get("rope_theta")
    theta = rope.get("rope_theta") or beside
    kind = fields.one_of(family, "rope_type", rope.get("rope_type") or "default", ("default", *SCALING))
    if isinstance(hf, fields.Fields):  # not of what Gradus has just written
        fields.refuse_unknown(rope, known(kind), "rope_parameters")
    if kind == "default":
        return theta, None
    if missing := [their for their in SCALING[kind].values() if isinstance(their, str) and rope.get(their) is None]:
        raise UserError(f"config.json: rope_scaling of type {kind} lacks {', '.join(missing)}")
    scaling = fields.read(rope, SCALING[kind])
    magnitude, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if kind == "yarn" and magnitude and of_all and scaling["attention_factor"] is None:
        above, below = (0.1 * m * math.log(max(scaling["factor"], 1.0)) + 1.0 for m in (magnitude, of_all))
        scaling["attention_factor"] = above / below
    return theta, RopeScaling(type=kind, **scaling)


def written(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Their fields."""
    own = {} if scaling is None else {"rope_type": scaling.type, **fields.written(scaling, SCALING[scaling.type])}
    new = {"rope_type": "default", **own, "rope_theta": theta}
    return {"rope_theta": theta, "rope_scaling": own or None, "rope_parameters": new}
