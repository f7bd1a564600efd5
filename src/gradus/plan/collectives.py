"""Seconds of a collective: latency and bandwidth (alpha-beta; Hockney 1994) on a hierarchy of links.

Within a node ranks talk over its links (NVLink), between nodes each over its share of the network. Nothing here imports torch.
"""

from __future__ import annotations

import math

from gradus.hardware import Cluster, Link
from gradus.plan.roofline import Parameters, family, fitted, parameters
from gradus.plan.work import Transfer

NODE_LATENCY = 3e-5  # s, of a collective within a node where none was measured: between A100's 2 and 8 ranks (nccl-tests)
MEASURED: dict | None = None  # while parameters are fitted: latency and bandwidth by chip and size of the group, in place of the file's
HOST = Link("host memory", 16e9, 0.8, 1e-5)  # devices of a node without links of their own


def passes(kind: str, group: int) -> float:
    """How often the payload crosses the slowest link: bandwidth-optimal ring (Patarasuk & Yuan 2009)."""
    part = (group - 1) / group
    return {"all_reduce": 2 * part, "send": 1.0, "broadcast": 1.0}.get(kind, part)


def within(kind: str, payload: float, group: int, cluster: Cluster) -> float:
    """Seconds within a node: measured latency and bandwidth by size of the group where there are any, else the link's own."""
    device = cluster.device
    link = device.link or device.network or HOST
    measured = (fitted().get("links", {}) if MEASURED is None else MEASURED).get(family(device))
    if measured and kind != "send" and link.name.startswith("NVLink"):
        sizes = sorted(measured["bandwidth"])
        size = min(sizes, key=lambda s: abs(s - group))
        latency, bandwidth = measured["latency"][size], measured["bandwidth"][size]
        if kind != "all_reduce":
            latency /= 2
    else:
        latency = link.latency if kind == "send" else max(link.latency, NODE_LATENCY)
        bandwidth = link.bandwidth * link.efficiency
    return latency + passes(kind, group) * payload / bandwidth


def unknown_links(transfers: list[Transfer], cluster: Cluster) -> tuple[str, ...]:
    """What is to be said of links that the hardware file does not have."""
    device, notes = cluster.device, []
    spans = [cluster.link_of(t.group, t.stride) for t in transfers]
    if any(local > 1 for local, _ in spans) and device.link is None:
        instead = f"its network's {device.network.bandwidth / 1e9:g}" if device.network else f"{HOST.name}'s {HOST.bandwidth / 1e9:g}"
        notes.append(f"no link between the devices of a node is known for {device.name}: {instead} GB/s are assumed")
    if any(nodes > 1 for _, nodes in spans) and device.network is None:
        instead = f"its link's {device.link.bandwidth / 1e9:g}" if device.link else f"{HOST.name}'s {HOST.bandwidth / 1e9:g}"
        notes.append(f"no network between nodes is known for {device.name}: {instead} GB/s are assumed")
    return tuple(notes)


def collective_seconds(kind: str, payload: float, group: int, stride: int, cluster: Cluster, fit: Parameters | None = None) -> float:
    """Seconds of one collective.

    kind: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send. payload: bytes; of gathers and scatters the whole.
    group: ranks that take part, `stride` apart. A group over several nodes works at the speed of the slower of its two levels, for they
    run in a pipeline: the ranks of a node share what its network carries.
    """
    if group <= 1 or payload <= 0:
        return 0.0
    local, nodes = cluster.link_of(group, stride)
    if nodes <= 1:
        return within(kind, payload, group, cluster)
    fit = fit or parameters(cluster.device)[0]
    network = cluster.device.network or cluster.device.link or HOST
    rate = network.bandwidth * fit.network
    if kind == "all_to_all":
        outside = payload * (nodes - 1) / nodes / rate
    else:
        outside = passes(kind, nodes) * payload / (1 if kind == "send" else local) / rate
    inside = within(kind, payload, local, cluster) if local > 1 and kind != "send" else 0.0
    return max(outside, inside) + fit.latency * max(1.0, math.log2(nodes))
