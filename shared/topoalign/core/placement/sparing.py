"""
Preferences that spare what is held.

The kubelet names the devices that it takes to be free. Where the record has some of them as held, these are left out as long
as there are enough others, and used after all others where there are not.
"""

from collections.abc import Collection, Iterable, Sequence

from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.holdings import SHARE
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.parts import MarkedDevices
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
    """As `prefer`, of devices that nobody holds if there are enough. `kept`: what counts as held besides."""
    among, required = available, must_include
    offered = available if isinstance(available, MarkedDevices) else frozenset(available)
    if all(map(offered.__contains__, must_include)) and len(must_include) <= size <= len(available):
        held = {*held_among(topology, ownership, resource, offered)}
        if kept:
            spared = ownership.set_of(kept)
            held.update(device for device in offered if spared.overlaps(ownership.holding(device)))
        held.difference_update(must_include)
        if held and isinstance(available, MarkedDevices) and len(available) - len(held) >= size:
            among = available.without(held)
        elif held:
            spare = [device for device in available if device not in held]
            among, required = (spare, must_include) if len(spare) >= size else (available, spare)
    free = ownership.free(resource) if topology.kind_of(resource) == "gpu" else ()
    return prefer(topology, resource, among, required, size, placement, beside=PlacementContext(free=free))


def held_among(
    topology: Topology, ownership: Ownership, resource: ResourceName, devices: Collection[DeviceID]
) -> Iterable[DeviceID]:
    """
    Those of the devices that are held (`Ownership.is_held`).

    Of thousands of shares few are held, so they are not asked about one by one: a share is held if it was given out under
    its id, or if the device that is shared is held as a whole.
    """
    offers = topology.offers_of.get(resource, ())
    shared = [base for offer in offers if offer.replicas > 1 for base in offer.devices]
    if not isinstance(devices, MarkedDevices) or any(ownership.is_held(any_share(base)) for base in shared):
        return filter(ownership.is_held, devices)
    whole = [device for offer in offers if offer.replicas == 1 for device in offer.devices]
    others = [other.id for other in topology.others if other.resource == resource]
    parts = [device for device in (*whole, *others) if device in devices and ownership.is_held(device)]
    return parts + [device for device in ownership.holders if device in devices]


def any_share(base: DeviceID) -> DeviceID:
    """The id of a share without a number: nobody holds it, so it is held if the device is held as a whole."""
    return DeviceID(f"{base}{SHARE}")
