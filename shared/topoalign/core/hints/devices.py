"""
Where devices of one resource can be had (kubelet v1.36.3, device manager hints).

Subsets are taken of the NUMA nodes that bear a device of the resource, healthy or not. A device that is near several nodes
is there for each of them and counts once; a device of which no node is known counts nowhere.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from topoalign.core.hints.enumeration import Subsets, doubled, hints_where, subsets
from topoalign.core.hints.model import Hints
from topoalign.core.ids import DeviceID
from topoalign.core.requests import Mode
from topoalign.core.topology.bitmask import Mask, mask_of

Devices = Mapping[DeviceID, tuple[int, ...] | None]
"""All devices of a resource -> the NUMA nodes each is listed with; None without topology, () with one that is empty."""


def device_hints(
    devices: Devices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
    held: Collection[DeviceID] = (),
) -> Hints:
    """
    The hints for `requested` devices of one resource.

    `available` are healthy and free, `reusable` were left by init containers of the pod, `held` are what this container
    has already; `machine` are the ids of the machine's NUMA nodes, ascending.
    """
    if not any(devices.values()):
        return None
    if held:
        return possible(devices, held, (), requested, machine, mode) if len(held) == requested else ()
    if len({*available, *reusable}) < requested:
        return ()
    return possible(devices, available, reusable, requested, machine, mode)


def possible(
    devices: Devices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
) -> Hints:
    """The subsets that have enough devices, and all reusable ones that have a topology."""
    space = subsets(bearing_nodes(devices, machine))
    nodes_of = {device: real_nodes(near) for device, near in devices.items() if near is not None}
    counted = [nodes_of[device] for device in (*available, *reusable) if device in nodes_of]
    obligatory = {nodes_of[device] for device in reusable if device in nodes_of}
    could = [count >= requested for count in touching(space, Counter(nodes_of.values()))]
    fits = [count >= requested for count in touching(space, Counter(counted))]
    for near in obligatory:
        fits = [fit and mask & near != 0 for fit, mask in zip(fits, space.masks, strict=True)]
    return hints_where(space, could, fits, mode)


def real_nodes(near: Iterable[int]) -> Mask:
    """A plugin may list a device with node -1, which is none."""
    return mask_of(node for node in near if node >= 0)


def bearing_nodes(devices: Devices, machine: tuple[int, ...]) -> tuple[int, ...]:
    """The machine's NUMA nodes that bear a device of the resource; all of them where none is known to."""
    bearing = {node for near in devices.values() for node in near or ()}
    return tuple(node for node in machine if node in bearing) or machine


def touching(space: Subsets, devices: Counter[Mask]) -> list[int]:
    """For each subset the number of devices that are near one of its nodes."""
    near_one = {near.bit_length() - 1: count for near, count in devices.items() if near.bit_count() == 1}
    counts = doubled(near_one.get(node, 0) for node in space.nodes)
    for near, count in devices.items():
        if near.bit_count() > 1:
            counts = [had + count if mask & near else had for had, mask in zip(counts, space.masks, strict=True)]
    return counts
