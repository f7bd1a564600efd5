"""Seconds of a collective: latency and bandwidth (alpha-beta; Hockney 1994) on a hierarchy of links.

Within a node ranks communicate over its links (NVLink), between nodes each over its share of the network. Nothing here
imports torch.
"""

from __future__ import annotations

import functools
import math

from gradus import hardware
from gradus.hardware import Cluster, Device, Link
from gradus.plan.roofline import KERNELS, Parameters, chip_of, fitted, nearest, parameters
from gradus.plan.work import Transfer

# s of a collective within a node where none was measured: between A100's with 2 and with 8 ranks (nccl-tests)
NODE_LATENCY = 3e-5
# while benchmarks/groundtruth.py fits them: latency and bandwidth by chip and size of the group, in place of the file's
MEASURED: dict | None = None
HOST_LINK = Link("host memory", 16e9, 0.8, 1e-5)  # between devices of a node that has no links of its own


def ring_factor(kind: str, group: int) -> float:
    """How often the payload crosses the slowest link in a bandwidth-optimal ring (Patarasuk & Yuan 2009)."""
    part = (group - 1) / group
    return {"all_reduce": 2 * part, "send": 1.0, "broadcast": 1.0}.get(kind, part)


@functools.cache
def _nominal(chip: str) -> float:
    return hardware.find(chip).link.bandwidth


def measured_links(device: Device, link: Link) -> tuple[dict, float] | None:
    """What was measured between devices of its chip, else of the nearest; how much more the link's maker says."""
    tables = fitted(KERNELS)["links"] | (fitted().get("links", {}) if MEASURED is None else MEASURED)
    chip = chip_of(device)
    while chip and chip not in tables:
        chip = nearest(chip)
    if not chip or not link.name.startswith(tables[chip].get("link", "NVLink")) or "bridge" in link.name:
        return None
    return tables[chip], link.bandwidth / _nominal(chip)


def intra_node_seconds(kind: str, payload: float, group: int, cluster: Cluster) -> float:
    """Seconds within a node: by latency and bandwidth measured for the group's size, else by the link's own.

    payload: bytes, as in `collective_seconds`. Where both count they add up by halves (`bend` below 1): a middle
    payload is slower than either says.
    """
    device, bend = cluster.device, 1.0
    link = device.link or device.network or HOST_LINK
    measured = measured_links(device, link) if kind != "send" else None
    if measured:
        table, faster = measured
        size = min(sorted(table["bandwidth"]), key=lambda size: abs(size - group))
        latency, bandwidth, bend = table["latency"][size], table["bandwidth"][size] * faster, table.get("bend", 1.0)
        if kind != "all_reduce":
            latency *= (group + 2) / (2 * group)
    else:
        latency = link.latency if kind == "send" else max(link.latency, NODE_LATENCY)
        bandwidth = link.bandwidth * link.efficiency
    return (latency**bend + (ring_factor(kind, group) * payload / bandwidth) ** bend) ** (1 / bend)


def unknown_links(transfers: list[Transfer], cluster: Cluster) -> tuple[str, ...]:
    """Notes on links that the transfers use and the hardware file lacks."""
    device, notes = cluster.device, []
    spans = [cluster.link_of(t.group, t.stride) for t in transfers]
    host = f"{HOST_LINK.name}'s {HOST_LINK.bandwidth / 1e9:g}"
    if any(local > 1 for local, _ in spans) and device.link is None:
        assumed = f"its network's {device.network.bandwidth / 1e9:g}" if device.network else host
        notes.append(f"no link between the devices of a node is known for {device.name}: {assumed} GB/s are assumed")
    if any(nodes > 1 for _, nodes in spans) and device.network is None:
        assumed = f"its link's {device.link.bandwidth / 1e9:g}" if device.link else host
        notes.append(f"no network between nodes is known for {device.name}: {assumed} GB/s are assumed")
    return tuple(notes)


def collective_seconds(
    kind: str, payload: float, group: int, stride: int, cluster: Cluster, fit: Parameters | None = None
) -> float:
    """Seconds of one collective.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send. payload: bytes; of gathers and scatters
    the whole. group: number of ranks; stride: between neighbours. A group over several nodes works at the speed of the
    slower of its two levels, as they run in a pipeline: the ranks of a node share what its network carries.
    """
    if group <= 1 or payload <= 0:
        return 0.0
    local, nodes = cluster.link_of(group, stride)
    if nodes <= 1:
        return intra_node_seconds(kind, payload, group, cluster)
    fit = fit or parameters(cluster.device)[0]
    network = cluster.device.network or cluster.device.link or HOST_LINK
    bandwidth = network.bandwidth * fit.network
    if kind == "all_to_all":
        between = payload * (nodes - 1) / nodes / bandwidth
    else:
        between = ring_factor(kind, nodes) * payload / (1 if kind == "send" else local) / bandwidth
    within = intra_node_seconds(kind, payload, local, cluster) if local > 1 and kind != "send" else 0.0
    return max(between, within) + fit.latency * max(1.0, math.log2(nodes))
