"""Quantities as people write them, with their unit, and back."""

from __future__ import annotations

import math
import re
from typing import Any

from gradus import limits
from gradus.errors import did_you_mean

# unit → (what it measures, how many of the plain unit). GB is 10^9 bytes, GiB 2^30; b is a bit, B a byte.
UNITS: dict[str, dict[str, float]] = {
    "operations/s": {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15, "TOP/s": 1e12},
    "bytes": {
        "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    },
    "bytes/s": {
        "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12, "Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Tb/s": 1e12 / 8, "GiB/s": 2**30,
        "MiB/s": 2**20,
    },
    "watts": {"W": 1.0, "kW": 1e3},
    "seconds": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "time": {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0, "years": 365 * 86_400.0},
    "kg/J": {"g/kWh": 1e-3 / 3.6e6, "kg/kWh": 1 / 3.6e6, "kg/MWh": 1e-3 / 3.6e6},
}


def quantity(text: Any, what: str) -> float:
    """'80 GiB' → bytes, by `what`: a key of UNITS. Raises ValueError for a missing or wrong unit, a wrong number."""
    known = UNITS[what]
    match = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([A-Za-z/]*)\s*", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit. Units: {', '.join(known)}.")
    if match[2] not in known:
        raise ValueError(f"{text!r}: {match[2] or 'no unit'!r} is not a unit of {what}.{did_you_mean(match[2], known)}")
    try:
        number = float(match[1])
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise ValueError(f"{text!r}: {match[1]} is not a positive number.")
    value = number * known[match[2]]
    if not 1 / limits.QUANTITY <= value <= limits.QUANTITY:
        size = "large" if value > 1 else "small"
        raise ValueError(f"{text!r}: too {size} for anything that is built. Check the number and its unit.")
    return value


def in_unit(value: float, what: str, unit: str) -> str:
    """Bytes and their like as text in `unit`, as few digits as say it."""
    return f"{value / UNITS[what][unit]:.12g} {unit}"
