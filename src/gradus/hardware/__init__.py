"""The hardware file: devices, links, nodes, prices and grids, each figure with its source and date; the user's own file
goes before.

    find("A100-80GB"), cluster("64xH100"), price("H100"), grid("FR"), lines()

Packaged: devices.yaml, links.yaml, prices.yaml, grid.yaml. The user's: ~/.config/gradus/hardware.yaml, prices.yaml,
grid.yaml (or $GRADUS_HARDWARE, $GRADUS_PRICES, $GRADUS_GRID), of the same form. Files state quantities in the units
vendors use, with the unit written; here everything is bytes, seconds, operations, watts. Nothing here imports torch.
"""

from gradus.hardware.files import add_device, by_driver, cards, cluster, devices, find, grid, grids, links, price, pue
from gradus.hardware.kinds import Cluster, Device, Grid, Link, Price
from gradus.hardware.tables import lines

__all__ = [
    "Cluster", "Device", "Grid", "Link", "Price",
    "add_device", "by_driver", "cards", "cluster", "devices", "find", "grid", "grids", "lines", "links", "price", "pue",
]  # fmt: skip
