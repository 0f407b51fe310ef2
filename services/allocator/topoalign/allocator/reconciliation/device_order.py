"""Sorts devices in the hardware's order: a container sees them in it, in whatever order the kubelet named them."""

from collections.abc import Iterable

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES, DeviceSet
from topoalign.core.model.topology.model import Topology


def in_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """The devices in the order in which the resource offers them; those that it does not offer come last, by name."""
    offered = hardware.devices.get(resource, NO_DEVICES)
    if isinstance(devices, DeviceSet) and devices.devices is offered:
        return tuple(devices)
    places, named = offered.places, tuple(devices)
    if all(map(places.__contains__, named)):  # most often, and a share may be hundreds of units
        return tuple(sorted(named, key=places.__getitem__))
    return tuple(sorted(named, key=lambda device: (places.get(device, len(places)), device)))
