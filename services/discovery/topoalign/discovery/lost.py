"""
Keeps devices listed that are no longer found.

A GPU that falls off the bus still has a container on it, and a kubelet forgets a device that is no longer listed. So
a missing device keeps its place with its last known values, until it comes back under the same uuid, at any index.
It is dropped only when another device has its PCI address.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import TypeVar

import msgspec

from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.links import Link
from topoalign.core.model.topology.model import Gpu, Nic, PciBridge, Topology
from topoalign.core.ports import Inventory

D = TypeVar("D", Gpu, Nic)


def with_lost(had: Topology, found: Topology) -> Topology:
    """`found`, and the GPUs and NICs of `had` that it lacks."""
    nodes = set(found.node_ids)
    gpus = kept(had.gpus, found.gpus, nodes)
    nics = kept(had.nics, found.nics, nodes)
    if len(gpus) == len(found.gpus) and len(nics) == len(found.nics):
        return found
    ids = [*(gpu.id for gpu in gpus), *(nic.id for nic in nics)]
    return msgspec.structs.replace(
        found,
        gpus=gpus,
        nics=nics,
        bridges=bridges(had, found, gpus, nics),
        links=links(had.link_by_pair, found.link_by_pair, ids),
    )


def kept(had: Sequence[D], found: Sequence[D], nodes: set[int]) -> tuple[D, ...]:
    """Those found, and those missing; one whose index another has now goes to the end."""
    ids = {device.id for device in found}
    addresses = {device.pci for device in found}
    taken = {device.index for device in found}
    listed: list[D] = list(found)
    for device in had:
        if device.id in ids or (device.pci is not None and device.pci in addresses):
            continue
        index = device.index if device.index not in taken else 1 + max(taken)
        taken.add(index)
        listed.append(msgspec.structs.replace(near(device, nodes), index=index))
    return tuple(sorted(listed, key=lambda device: device.index))


def near(device: D, nodes: set[int]) -> D:
    """The device without NUMA nodes that are no longer there."""
    if isinstance(device, Gpu) and device.memory_node not in nodes:
        device = msgspec.structs.replace(device, memory_node=None)
    return msgspec.structs.replace(device, numa_affinity=tuple(n for n in device.numa_affinity if n in nodes))


def bridges(had: Topology, found: Topology, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> tuple[PciBridge, ...]:
    """Those found, and of the others those above a device."""
    old = {bridge.address: bridge for bridge in had.bridges}
    known = {bridge.address: bridge for bridge in found.bridges}
    for at in (*(gpu.bridge for gpu in gpus), *(nic.bridge for nic in nics)):
        chain: list[PciBridge] = []
        while at is not None and at not in known and at in old:
            chain.append(old[at])
            at = old[at].parent
        known |= {bridge.address: bridge for bridge in reversed(chain)}
    return tuple(known.values())


def links(
    had: Mapping[tuple[DeviceID, DeviceID], Link],
    found: Mapping[tuple[DeviceID, DeviceID], Link],
    ids: Sequence[DeviceID],
) -> tuple[Link, ...]:
    """The links between these devices in the order of `ids`: as found now, else as they were before."""
    pairs = list(combinations(ids, 2))
    known = [found.get(pair) or had.get(pair) for pair in pairs]
    return tuple(link for link in known if link is not None)


def health_of(topology: Topology, inventory: Inventory, source: str) -> dict[DeviceID, DeviceHealth]:
    """Of all devices: as the driver says, or lost."""
    found: Mapping[DeviceID, object] = {**inventory.topology.gpu_by_id, **inventory.topology.nic_by_id}
    lost = DeviceHealth(state=HealthState.UNHEALTHY, reason=f"lost: {source} no longer finds it")
    unjudged = DeviceHealth(state=HealthState.UNKNOWN, reason=f"{source} does not say how it is")
    return {
        device: inventory.health.get(device, unjudged) if device in found else lost
        for device in (*topology.gpu_by_id, *topology.nic_by_id)
    }
