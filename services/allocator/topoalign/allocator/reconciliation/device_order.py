"""The hardware's order of what is handed out: a container sees its devices in it, however the kubelet named them."""

from collections.abc import Iterable, Mapping

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology

Places = Mapping[ResourceName, Mapping[DeviceID, int]]


def in_order(hardware: Topology, resource: ResourceName, devices: Iterable[DeviceID]) -> tuple[DeviceID, ...]:
    """Sorted; what is not listed under the resource comes last, by name."""
    places = places_of(hardware).get(resource, {})
    return tuple(sorted(devices, key=lambda device: (places.get(device, len(places)), device)))


def places_of(hardware: Topology) -> Places:
    """Counted once and kept with the topology, which is frozen: there may be 17,500 shares, and an Allocate names four."""
    kept: dict[str, Places] = hardware.__dict__
    if "places" not in kept:
        kept["places"] = {name: {d: at for at, d in enumerate(ids)} for name, ids in hardware.devices.items()}
    return kept["places"]
