"""Energy and CO2 of a finished run: by its meter, else by stated watts, else by its device's limit."""

from __future__ import annotations

from typing import Any

import torch

from gradus.plan.budget import CASES, HOUR, Power, energy, power, power_of
from gradus.plan.show import energy_and_co2
from gradus.proof.memory_budget import device_of, powered
from gradus.train.loop import Trainer

LABEL = "energy"
NOT_KNOWN = "not known without a meter or --watts; of this run: gradus train {} --resume --watts W"


def add_energy(trainer: Trainer, summary: dict[str, Any], metered: dict[str, Any] | None) -> str:
    """Add what the run took to its summary, where that is known; the line that says so. metered: the row energy/run.

    All of the run's seconds count, of all its starts. A device is a GPU, or the processors of a host. Metered and
    stated watts are of the devices alone, and multiplied by the building's PUE, as published tables do (`budget.
    energy_and_carbon`); the low, expected and high watts of a device whose limit alone is known are those of one that
    idles, of one that computes all the time, and the limit, each with its node as in a plan.
    """
    world, keys = trainer.parallel.mesh.world, trainer.recipe.energy
    devices = powered(world.size, world.local_size, trainer.device.type)
    hours = sum(trainer.clock.seconds.values()) * devices / HOUR
    device = device_of(trainer.device, torch.get_num_threads())
    drawn = power_of(device, keys)
    if metered:
        drawn, source = Power((metered["value"] / hours / HOUR,) * 3), f"measured: {metered['meter']}"
        source += f" in {metered['share']:.0%} of the time" if metered["share"] < 1 else ""
        source += f", so that energy.watts={keys.watts:g} has no effect" if keys.watts else ""
    elif keys.watts:
        source = "energy.watts"
    elif drawn:
        drawn, source = drawn._replace(watts=(power(device, 0.0)[0], *drawn.watts[1:])), f"{device.name}, not measured"
    else:
        return f"{LABEL:26} {NOT_KNOWN.format(trainer.folder)}"
    rows = energy((hours,) * 3, drawn, keys)
    used, emitted = ([row for row in rows if row.name == f"budget/{name}"] for name in ("energy", "co2"))
    text = ", ".join(energy_and_co2(rows, f"; {source}"))
    summary |= {"energy_wh": used[1].value / HOUR, "co2_kg": emitted[1].value}
    summary["energy"] = {
        "text": text, "power": source, "devices": devices,
        "wh": dict(zip(CASES, (row.value / HOUR for row in used))),
        "pue": dict(zip(CASES, (row.conditions["how"]["inputs"]["PUE"] for row in used))),
        "co2_kg": dict(zip(CASES, (row.value for row in emitted))),
        "grid": emitted[1].conditions["grid"], "kg_per_kwh": emitted[1].conditions["how"]["inputs"]["kg/kWh"],
    }  # fmt: skip
    return f"{LABEL:26} {text}"
