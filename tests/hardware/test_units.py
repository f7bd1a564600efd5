"""Quantities with their units."""

from __future__ import annotations

import re

import pytest

from gradus.hardware.units import in_unit, quantity

pytestmark = pytest.mark.usefixtures("own_files")


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("text", "what", "value"),
    [
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("400 Gb/s", "bytes/s", 50e9),
        ("400 GB/s", "bytes/s", 400e9),
        ("1.8 TB/s", "bytes/s", 1.8e12),
        ("312 TFLOP/s", "operations/s", 312e12),
        ("0.7 kW", "watts", 700),
        ("5 us", "seconds", 5e-6),
        ("360 g/kWh", "kg/J", 1e-7),
        ("1e3 GB/s", "bytes/s", 1e12),
    ],
)
def test_quantities(text, what, value):
    assert quantity(text, what) == pytest.approx(value, rel=1e-12)
    number, unit = re.fullmatch(r"(\S+?)\s*([A-Za-z/]+)", text).groups()
    assert in_unit(value, what, unit) == f"{float(number):.12g} {unit}"
