"""Sorts devices in the hardware's order: a container sees them in it, in whatever order the kubelet named them."""

from collections.abc import Iterable, Mapping

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.views import made_once

Places = Mapping[ResourceName, Mapping[DeviceID, int]]


def in_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """The devices in the order in which the resource offers them; those that it does not offer come last, by name."""
    places = places_of(hardware).get(resource, {})
    return tuple(sorted(devices, key=lambda device: (places.get(device, len(places)), device)))


@made_once
def places_of(hardware: Topology) -> Places:
    """
    Resource -> device -> its index there. Made once per topology: it may have 17,500 shares, and an Allocate names
    four.
    """
    return {name: {device: at for at, device in enumerate(ids)} for name, ids in hardware.devices.items()}
