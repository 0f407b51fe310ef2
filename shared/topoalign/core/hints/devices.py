"""
Where devices of one resource can be had (kubelet v1.36.3, device manager hints).

Subsets are taken of the NUMA nodes that bear a device of the resource, healthy or not. A device that is near several nodes
is there for each of them and counts once; a device of which no node is known counts nowhere, nor does a node that the
machine lacks.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from topoalign.core.hints.rules import Supply, hints_from
from topoalign.core.model.hints import Hints, Need
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask, mask_of
from topoalign.core.profile import profile_of

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
    has already; `machine` are the ids of the machine's NUMA nodes, ascending. Without topology the kubelet has no opinion,
    whether there are enough or not; mode `best` has none only if there are enough.
    """
    enough = len({*available, *reusable}) >= requested
    if not any(devices.values()) and (profile_of(mode).silent_on_unplaced_devices or enough):
        return None
    if held:
        return possible(devices, held, (), requested, machine, mode) if len(held) == requested else ()
    if not enough:
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
    nodes = mask_of(bearing_nodes(devices, machine))
    nodes_of = {device: real_nodes(near) & nodes for device, near in devices.items() if near is not None}
    counted = Counter(nodes_of[device] for device in (*available, *reusable) if device in nodes_of)
    obligatory = {nodes_of[device] for device in reusable if device in nodes_of}
    now = (Need(requested, somewhere(counted)), *(Need(1, somewhere({near: 1})) for near in sorted(obligatory)))
    empty = (Need(requested, somewhere(Counter(nodes_of.values()))),)
    return hints_from(Supply(nodes, now), Supply(nodes, empty), mode, len(machine))


def somewhere(counted: Mapping[Mask, int]) -> dict[Mask, int]:
    """Without what is near no node at all: it meets no need."""
    return {near: amount for near, amount in counted.items() if near}


def real_nodes(near: Iterable[int]) -> Mask:
    """A plugin may list a device with node -1, which is none."""
    return mask_of(node for node in near if node >= 0)


def bearing_nodes(devices: Devices, machine: tuple[int, ...]) -> tuple[int, ...]:
    """The machine's NUMA nodes that bear a device of the resource; all of them where none is known to."""
    bearing = {node for near in devices.values() for node in near or ()}
    return tuple(node for node in machine if node in bearing) or machine
