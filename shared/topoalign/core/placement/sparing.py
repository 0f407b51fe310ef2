"""
Chooses devices that the record has as free before those that it has as held.

The kubelet names the devices that it takes to be free. Where the record has some of them as held, these are left out as long
as there are enough others, and used after all others where there are not.
"""

from collections.abc import Callable, Collection, Sequence

from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet, OfferedDevices
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.preference import prefer
from topoalign.core.state.ownership import Ownership


def prefer_sparing(
    topology: Topology,
    ownership: Ownership,
    resource: ResourceName,
    available: Collection[DeviceID],
    must_include: Sequence[DeviceID],
    size: int,
    placement: str,
    kept: Collection[DeviceID] = (),
) -> tuple[DeviceID, ...]:
    """As `prefer`, of listed devices that nobody holds if there are enough. `kept`: what counts as held besides."""
    devices = topology.devices.get(resource, NO_DEVICES)
    offered = devices.some(available)
    if len(offered) < len(available) or not all(map(offered.__contains__, must_include)):
        return ()
    others = held_among(ownership, resource, devices) | overlapping_devices(ownership, devices, kept)
    spare = offered - others | devices.some(must_include)
    among, required = (spare, must_include) if len(spare) >= size else (offered, tuple(spare))
    free = ownership.free(resource) if topology.kind_of(resource) == "gpu" else ()
    return prefer(topology, resource, among, required, size, placement, context=PlacementContext(free=free))


def held_among(ownership: Ownership, resource: ResourceName, devices: OfferedDevices) -> DeviceSet:
    """Those of all devices of a resource that are held (`Ownership.is_held`)."""
    if not ownership.holds_anything:
        return devices.nothing
    return _with_parts(ownership.held(resource), devices, ownership.is_held)


def is_any_held(topology: Topology, ownership: Ownership, resource: ResourceName, ids: Collection[DeviceID]) -> bool:
    """Whether any of these ids, all different, is held (`Ownership.is_held`)."""
    if not ownership.holds_anything:
        return False
    devices = topology.devices.get(resource, NO_DEVICES)
    named = devices.some(ids)
    if len(named) < len(ids):
        return any(map(ownership.is_held, ids))
    if named & ownership.held(resource):
        return True
    # a share may be hundreds of units: one of each device is asked about
    return any(ownership.is_held(some.lowest) for alike in devices.alike if (some := named & alike))


def overlapping_devices(ownership: Ownership, devices: OfferedDevices, others: Collection[DeviceID]) -> DeviceSet:
    """Those of the devices that overlap what any of these ids stands for."""
    if not others:
        return devices.nothing
    taken = ownership.set_of(others)
    return _with_parts(devices.some(others), devices, lambda device: taken.overlaps(ownership.holding(device)))


def _with_parts(named: DeviceSet, devices: OfferedDevices, is_taken: Callable[[DeviceID], bool]) -> DeviceSet:
    """Those of the devices that are taken: the `named` ones, and their neighbours."""
    found = named.bits
    for alike in devices.alike:  # all shares of a device that are not named are taken with the device, or none is
        rest = alike.bits & ~named.bits
        if rest and is_taken(DeviceSet(devices, rest).lowest):
            found |= rest
    return DeviceSet(devices, found)
