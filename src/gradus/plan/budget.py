"""What a training run takes in all: time, devices, money, energy and CO2, each as low, expected and high, with what
was assumed."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradus import hardware
from gradus.hardware import Cluster, Device, Price
from gradus.plan.figures import known_figure
from gradus.recipe.schema import Energy
from gradus.rows import Row
from gradus.text import SIGNS

Cases = tuple[float, float, float]  # low, expected, high
CASES = ("low", "expected", "high")
HOUR, KWH = 3600.0, 3.6e6

# The part of the wall-clock in which steps are taken that count: the rest goes to failures, restarts, steps taken
# again, checkpoints.
GOODPUT: Cases = (0.60, 0.89, 0.95)
GOODPUT_SOURCE = (
    "end to end over steady: PaLM 30 of 46.2 % (0.65), BLOOM 32 of 36 % (0.89); Llama 3 counts more than 0.90; "
    "the range is 0.6 to 0.95"
)
GOODPUT_NODE: Cases = (0.90, 1.0, 1.0)
GOODPUT_NODE_SOURCE = (
    "one node: Llama 3 saw 419 unplanned stops in 54 days on 16,384 GPUs, one in 51,000 GPU-hours "
    "(Grattafiori et al. 2024)"
)

# A device's power: idle + (busy - idle) × the part of the time it computes, as parts of its limit (TDP). The high case
# is always the limit. The sources of these and of NODE, a node's power over its devices', stand in figures.yaml:
# energy/step, budget/energy_node.
IDLE = 0.22
BUSY: Cases = (0.76, 0.92, 1.0)
NODE: Cases = (1.4, 1.5, 1.8)


def goodput(cluster: Cluster) -> tuple[Cases, str]:
    """(low, expected and high, their source): nearly all of the time on one node, less on several."""
    one_node = cluster.n <= cluster.device.node
    return (GOODPUT_NODE, GOODPUT_NODE_SOURCE) if one_node else (GOODPUT, GOODPUT_SOURCE)


def usual_goodput(cluster: Cluster) -> float:
    """The expected `goodput`."""
    return goodput(cluster)[0][1]


def power(device: Device, busy: float = 1.0) -> Cases | None:
    """Watts of one device that computes for `busy` of the time; None where its limit is not known."""
    if device.power is None:
        return None
    low, expected, _ = (device.power * (IDLE + (top - IDLE) * busy) for top in BUSY)
    return low, expected, device.power


class Power(NamedTuple):
    """Watts of one device; node: × for its node; inputs: what it was computed from."""

    watts: Cases
    node: Cases = (1.0, 1.0, 1.0)
    inputs: dict[str, float] = {}


def power_of(device: Device | None, keys: Energy, busy: float = 1.0) -> Power | None:
    """What is stated, as it is; else the device's, and its node's. None: not known."""
    if keys.watts:
        return Power((keys.watts,) * 3)
    watts = device and power(device, busy)
    return Power(watts, NODE, {"limit (TDP), W": device.power, "busy": busy}) if watts else None


def energy_and_carbon(device_hours: float, watts: float, pue: float, kg_per_kwh: float) -> tuple[float, float]:
    """(joules, kg CO2-equivalent) as published tables book them: hours × watts × PUE × intensity (Touvron et al. 2023,
    table 15)."""
    joules = device_hours * HOUR * watts * pue
    return joules, joules / KWH * kg_per_kwh


def budget(
    *, cluster: Cluster, steps: float, seconds_per_step: float | Cases, days: float | None = None,
    parts: dict[str, float] | None = None, price: float | None = None, keys: Energy = Energy(),
) -> list[Row]:  # fmt: skip
    """Rows `budget/<what>` and `energy/step`, each with case=low, expected, high: low is where all that is uncertain
    makes it little.

    seconds_per_step: (low, expected, high), or one figure. days: a deadline. parts: seconds of a step by part
    (StepTime.parts), for the part of the time in which the device computes. price: of a device-hour, in place of the
    quotes. keys: the recipe's. What is not known has no row: cost without a price, energy and CO2 without the device's
    power.
    """
    n, (good, good_source) = cluster.n, goodput(cluster)
    step = seconds_per_step if isinstance(seconds_per_step, tuple) else (seconds_per_step,) * 3
    assert step[0] <= step[1] <= step[2], step

    rows, time = [], tuple(steps * s / g for s, g in zip(step, reversed(good)))
    hours = tuple(t * n / HOUR for t in time)
    for i, case in enumerate(CASES):
        inputs = {"steps": steps, "seconds per step": step[i], "goodput": good[2 - i]}
        rows.append(known_figure("budget/time", time[i], inputs, source=good_source, case=case))
        inputs = {"devices": n, "seconds": time[i]}
        rows.append(known_figure("budget/device_hours", hours[i], inputs, source=good_source, case=case))
        if days is not None:
            needed, inputs = math.ceil(hours[i] / (days * 24)), {"device-hours": hours[i], "days": days}
            rows.append(known_figure("budget/devices", needed, inputs, case=case))
    rows += _cost(hours, hardware.price(cluster.device, paid=price))
    if drawn := power_of(cluster.device, keys, busy_share(parts)):
        for case, watts, seconds in zip(CASES, drawn.watts, step):
            inputs = {"devices": n, "W per device": watts, **drawn.inputs, "seconds": seconds}
            rows.append(known_figure("energy/step", watts * seconds * n, inputs, case=case, of="devices"))
        rows += energy(hours, drawn, keys)
    return rows


def _cost(hours: Cases, price: Price | None) -> list[Row]:
    if price is None:
        return []
    rates = {"cost": (price.expected,) * 3, "cost_extremes": (price.low, price.expected, price.high)}
    if price.low >= price.high:
        del rates["cost_extremes"]
    unit, dated = SIGNS.get(price.currency, price.currency), {"date": price.date} if price.date else {}
    more = {"unit": unit, "source": f"{price.source}; storage and traffic add 30 to 50 % to real bills", **dated}
    rows = []
    for name, of_name in rates.items():
        for case, each, rate in zip(CASES, hours, of_name):
            inputs = {"device-hours": each, f"{price.currency} per device-hour": rate}
            rows.append(known_figure(f"budget/{name}", each * rate, inputs, case=case, **more))
    return rows


def busy_share(parts: dict[str, float] | None) -> float:
    """The part of a step in which the device computes; 1 where it is not known."""
    if not parts or not sum(parts.values()):
        return 1.0
    computing = ("matmul", "attention", "memory", "optimizer")
    return sum(parts.get(part, 0.0) for part in computing) / sum(parts.values())


def energy(hours: Cases, drawn: Power, keys: Energy) -> list[Row]:
    """Energy of devices, nodes and the building, each by itself, then CO2 of the building's, of so many
    device-hours."""
    (*factor, pue_source), grid = hardware.pue(), hardware.grid(keys.grid or "world")
    if keys.pue:
        factor, pue_source = [keys.pue] * 3, "energy.pue"
    source = f"{grid.name} {grid.year}, location-based: {grid.source}" if grid.year else "energy.grid"
    source += "; manufacturing the devices is not included"
    rows = []
    for i, case in enumerate(CASES):
        node, kg_per_kwh = drawn.node[i], grid.intensity * KWH
        devices = hours[i] * HOUR * drawn.watts[i]
        facility, emitted = energy_and_carbon(hours[i], drawn.watts[i] * node, factor[i], kg_per_kwh)
        one = {"W per device": drawn.watts[i], **drawn.inputs, "device-hours": hours[i]}
        in_nodes = {"energy_device": devices, "node": node}
        in_building = {"energy_node": devices * node, "PUE": factor[i]}
        of_grid = {"energy": facility, "kg/kWh": kg_per_kwh}
        rows += [
            known_figure("budget/energy_device", devices, one, case=case),
            known_figure("budget/energy_node", devices * node, in_nodes, case=case),
            known_figure("budget/energy", facility, in_building, source=pue_source, case=case),
            known_figure("budget/co2", emitted, of_grid, source=source, case=case, grid=grid.name),
        ]
    return rows
