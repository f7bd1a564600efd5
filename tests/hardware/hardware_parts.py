"""What the tests of hardware files share."""

from __future__ import annotations

from gradus import hardware


def write(path, text):
    path.write_text(text)
    return path


def measured(name, **more):
    tables = {"matmul": [[64, 64, 64, 1.5e-6], [128, 128, 128, 2e-6]], "spread": 0.03}
    link = hardware.Link("shared memory", 3.25e9, 0.7, 2.5e-5, source="measured")
    return hardware.Device(
        name, {"fp32": 51_234_567_890.0, "bf16": 7.5e10}, 8.25e9, 1.234e10, kind="cpu", node=1, link=link, measured=tables, usable=0.875,
        source="gradus calibrate", date="2026-06-01", **more,
    )  # fmt: skip
