"""What a training run takes in all: time, devices, money, energy and CO2, each as low, expected and high, with what
was assumed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from gradus import hardware, models
from gradus.hardware import Cluster, Device, Price
from gradus.plan import failures
from gradus.plan.figures import TEXTS, known_figure
from gradus.recipe.schema import Energy
from gradus.rows import Row
from gradus.text import SIGNS

if TYPE_CHECKING:  # imported where it is needed: --help is instant
    from gradus.plan.case import Case

Cases = tuple[float, float, float]  # low, expected, high
CASES = ("low", "expected", "high")
HOUR, KWH = 3600.0, 3.6e6

# Seconds of one device between two failures that stop the run.
MTBF: Cases = (29_500 * HOUR, 50_700 * HOUR, 82_100 * HOUR)
MTBF_SOURCE = (
    "Llama 3: 419 unplanned stops in 54 days on 16,384 GPUs, one in 50,700 GPU-hours (Grattafiori et al. 2024); from "
    "29,500 to 82,100: 6.50 and 2.34 failures in 1,000 days of a node of 8 (Kokolis et al. 2024, RSC-1 and RSC-2)"
)
# Seconds from a failure to the first step, and bytes/s with which a node writes a checkpoint: figures.yaml.
RECOVERY: Cases = (300.0, 600.0, 1200.0)
WRITES = 1e9
# What is lost beside failures, once a run is so long and large that one is expected: figures.yaml, budget/lost_beside.
BESIDE: Cases = (0.0, 0.0, 0.32)
# An elastic run's wait at a failure, beside half a step and the time until it is noticed: for new groups.
REGROUPED = 30.0

# A device's power: idle + (busy - idle) × the part of the time it computes, as parts of its limit (TDP). The high case
# is always the limit. The sources of these and of NODE, a node's power over its devices', stand in figures.yaml:
# energy/step, budget/energy_node.
IDLE = 0.22
BUSY: Cases = (0.76, 0.92, 1.0)
NODE: Cases = (1.4, 1.5, 1.8)


class Failures(NamedTuple):
    """What decides what failures cost a run. checkpoint: bytes of one, by what they are of. every: steps between two;
    None: Daly's optimum. mtbf: seconds of one device between failures, in place of what was published. elastic: whether
    the other replicas go on."""

    checkpoint: dict[str, float] = {}
    every: int | None = None
    mtbf: float | None = None
    elastic: bool = False
    replicas: int = 1
    noticed: float = 10.0  # seconds until a silent replica is given up

    @classmethod
    def of(cls, case: Case, mtbf: float | None = None) -> Failures:
        """A checkpoint has all weights, and the optimizer's state of those that are trained."""
        from gradus.plan.process import bytes_per_weight, momenta

        recipe, model, width = case.recipe, case.recipe.model, bytes_per_weight(case.layout)
        state = momenta(recipe.optimizer) * models.trainable(model) * width
        parts = {"weights": models.count(model)["total"] * width, "optimizer": state}
        elastic = case.shape["replicate"] if case.layout.elastic else 1, case.layout.step_timeout
        return cls(parts, recipe.train.checkpoint_every, mtbf, case.layout.elastic, *elastic)


class Goodput(NamedTuple):
    """The share of a run's time that goes into steps that count, and what it is computed from. between: seconds between
    two failures of all devices; beside: the share lost beside failures; every: steps between two checkpoints, of
    `write` seconds each, beside Young's and Daly's seconds."""

    share: Cases
    between: Cases
    beside: Cases
    every: int
    write: float
    young: float
    daly: float


def goodput(cluster: Cluster, lost: Failures, steps: float, step: Cases) -> Goodput:
    """Of a run of so many steps. step: seconds of one, low, expected and high."""
    n, node = cluster.n, cluster.device.node
    between = tuple(each / n for each in ((lost.mtbf,) * 3 if lost.mtbf else MTBF))
    write = sum(lost.checkpoint.values()) / (WRITES * max(1.0, n / node))
    optimum = failures.daly(write, between[1])
    every = int(min(lost.every or max(1, round(optimum / step[1])), max(1, steps)))
    shares, beside = [], []
    for mean, recovery, part, seconds in zip(between, reversed(RECOVERY), reversed(BESIDE), reversed(step)):
        beside.append(part * -math.expm1(-steps * seconds / mean))
        if lost.elastic and lost.replicas > 1:
            share = failures.elastic(mean, recovery, lost.noticed + REGROUPED + seconds / 2, lost.replicas)
            share *= every * seconds / (every * seconds + write) if lost.every else 1.0
        else:
            share = failures.with_restarts(mean, recovery, every * seconds, write)
        shares.append(share * (1 - beside[-1]))
    of_checkpoints = every, write, failures.young(write, between[1]), optimum
    # where an elastic run hardly gets on, replicas that are away longer are even a gain: they do not fail meanwhile
    return Goodput(tuple(sorted(shares)), between, tuple(reversed(beside)), *of_checkpoints)


def usual_goodput(cluster: Cluster, lost: Failures, steps: float, step: float) -> float:
    """The expected `goodput`."""
    return goodput(cluster, lost, steps, (step,) * 3).share[1]


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
    lost: Failures = Failures(),
) -> list[Row]:  # fmt: skip
    """Rows `budget/<what>` and `energy/step`, each with case=low, expected, high: low is where all that is uncertain
    makes it little.

    seconds_per_step: (low, expected, high), or one figure. days: a deadline. parts: seconds of a step by part
    (StepTime.parts), for the part of the time in which the device computes. price: of a device-hour, in place of the
    quotes. keys: the recipe's. lost: what decides what failures cost. What is not known has no row: cost without a
    price, energy and CO2 without the device's power.
    """
    n = cluster.n
    step = seconds_per_step if isinstance(seconds_per_step, tuple) else (seconds_per_step,) * 3
    assert step[0] <= step[1] <= step[2], step
    good = goodput(cluster, lost, steps, step)

    rows, time = _failures(cluster, lost, step, good), tuple(steps * s / g for s, g in zip(step, reversed(good.share)))
    hours = tuple(t * n / HOUR for t in time)
    for i, case in enumerate(CASES):
        inputs = {"steps": steps, "seconds per step": step[i], "goodput": good.share[2 - i]}
        rows.append(known_figure("budget/time", time[i], inputs, case=case))
        rows.append(known_figure("budget/device_hours", hours[i], {"devices": n, "seconds": time[i]}, case=case))
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


def _failures(cluster: Cluster, lost: Failures, step: Cases, good: Goodput) -> list[Row]:
    """Rows of the goodput and of each of the quantities that it is computed from."""
    n, rows = cluster.n, []
    source = "--mtbf" if lost.mtbf else MTBF_SOURCE
    waiting = {"waiting beside half a step": lost.noticed + REGROUPED}
    elastic = {"replicas": lost.replicas, **waiting} if lost.elastic else {}
    way = TEXTS["figures"]["budget/goodput_elastic"] if elastic else {}
    for i, case in enumerate(CASES):
        inputs = {"seconds of one device": good.between[i] * n, "devices": n}
        rows.append(known_figure("budget/between_failures", good.between[i], inputs, source=source, case=case))
        rows.append(known_figure("budget/recovery", RECOVERY[i], {"seconds": RECOVERY[i]}, case=case))
        inputs = {"share": BESIDE[i], "between_failures": good.between[2 - i]}
        rows.append(known_figure("budget/lost_beside", good.beside[i], inputs, case=case))
        inputs = {
            "between_failures": good.between[i], "recovery": RECOVERY[2 - i], "steps between checkpoints": good.every,
            "seconds per step": step[2 - i], "checkpoint_write": good.write, "lost_beside": good.beside[2 - i],
        }  # fmt: skip
        rows.append(known_figure("budget/goodput", good.share[i], inputs | elastic, **way, case=case))
    size = sum(lost.checkpoint.values())
    optimum = {"checkpoint_write": good.write, "between_failures": good.between[1]}
    every = {"steps": good.every, "seconds per step": step[1]}
    return [
        *rows,
        known_figure("budget/checkpoint", size, lost.checkpoint),
        known_figure("budget/checkpoint_write", good.write, {"checkpoint": size, "devices": n}),
        known_figure("budget/checkpoint_young", good.young, optimum),
        known_figure("budget/checkpoint_daly", good.daly, optimum),
        known_figure("budget/checkpoint_every", good.every * step[1], every, steps=good.every),
    ]


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
