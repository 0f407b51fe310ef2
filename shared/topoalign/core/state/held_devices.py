"""
Which of many devices of a resource are held.

`Ownership.is_held` tells it of one. The kubelet names all that it takes to be free, which may be thousands of shares, of
which a few are held: a share is held if it was given out under its id, or the device that is shared is held as a whole. So
the ids that are given out are looked up among those that are asked about, and each shared device is asked about once.
"""

from collections.abc import Collection

from topoalign.core.model.holdings import SHARE
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.ownership import Ownership


def held_among(
    hardware: Topology, ownership: Ownership, resource: ResourceName, devices: frozenset[DeviceID]
) -> Collection[DeviceID]:
    """Those of the devices that are held (`Ownership.is_held`), whether the resource offers them or not."""
    shared = [base for offer in hardware.offers_of.get(resource, ()) if offer.replicas > 1 for base in offer.devices]
    if not shared or any(ownership.is_held(any_share(base)) for base in shared):
        return {device for device in devices if ownership.is_held(device)}
    others = devices.difference(hardware.devices[resource]).union(devices.intersection(not_shared(hardware, resource)))
    return devices.intersection(ownership.holders).union(filter(ownership.is_held, others))


def any_share(base: DeviceID) -> DeviceID:
    """The id of a share without a number: nobody holds it, so it is held if the device is held as a whole."""
    return DeviceID(f"{base}{SHARE}")


def not_shared(hardware: Topology, resource: ResourceName) -> list[DeviceID]:
    """The devices of a resource that are handed out whole, those of another plugin included."""
    whole = [device for offer in hardware.offers_of[resource] if offer.replicas == 1 for device in offer.devices]
    return whole + [other.id for other in hardware.others if other.resource == resource]
