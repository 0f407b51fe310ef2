"""
Prefers devices that are free in the record to those that are held in it.

The kubelet lists the devices that it considers free. If some of them are held in the record, they are excluded if there
are enough others. If not, they are used after all others.
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
    """`prefer` among listed devices that are not held, if there are enough. `kept`: ids that also count as held."""
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
    """The devices of a resource that are held (`Ownership.is_held`)."""
    if not ownership.holds_anything:
        return devices.nothing
    return _with_parts(ownership.held(resource), devices, ownership.is_held)


def is_any_held(topology: Topology, ownership: Ownership, resource: ResourceName, ids: Collection[DeviceID]) -> bool:
    """Whether any of these distinct ids is held (`Ownership.is_held`)."""
    if not ownership.holds_anything:
        return False
    devices = topology.devices.get(resource, NO_DEVICES)
    named = devices.some(ids)
    if len(named) < len(ids):
        return any(map(ownership.is_held, ids))
    if named & ownership.held(resource):
        return True
    # a share can consist of hundreds of units, so only one id of each device is checked
    return any(ownership.is_held(some.lowest) for alike in devices.alike if (some := named & alike))


def overlapping_devices(ownership: Ownership, devices: OfferedDevices, others: Collection[DeviceID]) -> DeviceSet:
    """The devices that overlap what any of these ids stands for."""
    if not others:
        return devices.nothing
    taken = ownership.set_of(others)
    return _with_parts(devices.some(others), devices, lambda device: taken.overlaps(ownership.holding(device)))


def _with_parts(named: DeviceSet, devices: OfferedDevices, is_taken: Callable[[DeviceID], bool]) -> DeviceSet:
    """The taken devices: the `named` ones, and those for which `is_taken` is true."""
    found = named.bits
    for alike in devices.alike:  # of the shares of a device that are not named, all are taken or none is
        rest = alike.bits & ~named.bits
        if rest and is_taken(DeviceSet(devices, rest).lowest):
            found |= rest
    return DeviceSet(devices, found)
