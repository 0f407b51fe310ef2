"""The hardware's order of what is handed out: a container sees its devices in it, however the kubelet named them."""

from collections.abc import Iterable, Mapping

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.views import made_once

Places = Mapping[ResourceName, Mapping[DeviceID, int]]


def in_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """Sorted; what is not listed under the resource comes last, by name."""
    places = places_of(hardware).get(resource, {})
    return tuple(sorted(devices, key=lambda device: (places.get(device, len(places)), device)))


@made_once
def places_of(hardware: Topology) -> Places:
    """The place of each device in its resource. Counted once: there may be 17,500 shares, and an Allocate names four."""
    return {name: {device: at for at, device in enumerate(ids)} for name, ids in hardware.devices.items()}
