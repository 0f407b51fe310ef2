"""
Shares equal parts of the topologies of many nodes in memory.

Machines of one model differ in the uuids of their GPUs and MIG instances. A shape is a topology in which these ids are
replaced by their positions. `Shapes` stores each shape once. The topology of a node shares with its shape all parts
without uuids: CPUs, NUMA nodes, bridges, NICs and their links. Data that does not depend on uuids is computed only for
the shape. Different shapes also share equal parts, because machines of one model can differ in some bytes of memory.

    GPU-5f0c…, GPU-1e7a… and the link between them: shape `gpu/0`, `gpu/1` and the link between these

Machines that differ only in uuids have the same shape object, and `device_positions` maps its positions to their uuids.
A decision for a shape is valid for each of these machines, with its own ids.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import SHAPE, computed_once
from topoalign.core.model.topology.model import Gpu, Topology

MOST_PARTS = 100_000
"""Maximum number of cached parts of topologies. A cluster of 5,000 different machines has half as many."""
MOST_BYTES = 64 * 2**20
"""Maximum size of these parts in JSON. The limit is needed because a node could publish ever larger topologies."""
UNSHARED = "others"
"""The field of `Topology` that is not shared: devices of other plugins, which few nodes have in common."""

T = TypeVar("T")


def device_positions(topology: Topology) -> Iterator[tuple[DeviceID, DeviceID]]:
    """The positions of the GPUs and MIG instances, each with the uuid of the device."""
    for gpu_number, gpu in enumerate(topology.gpus):
        yield DeviceID(f"gpu/{gpu_number}"), gpu.id
        for number, instance in enumerate(gpu.mig or ()):
            yield DeviceID(f"gpu/{gpu_number}/{number}"), instance.uuid


def rename_devices(topology: Topology, names: Mapping[DeviceID, DeviceID]) -> Topology:
    """The same hardware with renamed devices. `names`: old id -> new id. Fields without devices are not copied."""
    replace = msgspec.structs.replace

    def gpu_renamed(gpu: Gpu) -> Gpu:
        mig = gpu.mig and tuple(replace(each, uuid=names.get(each.uuid, each.uuid)) for each in gpu.mig)
        return replace(gpu, id=names.get(gpu.id, gpu.id), mig=mig)

    return replace(
        topology,
        gpus=tuple(gpu_renamed(gpu) for gpu in topology.gpus),
        links=tuple(
            replace(link, a=names.get(link.a, link.a), b=names.get(link.b, link.b))
            if link.a in names or link.b in names
            else link
            for link in topology.links
        ),
        offers=topology.offers
        and tuple(
            replace(offer, devices=tuple(names.get(device, device) for device in offer.devices))
            for offer in topology.offers
        ),
    )


@computed_once
def without_uuids(topology: Topology) -> Topology:
    """The same hardware with positions instead of the uuids of GPUs and MIG instances."""
    return rename_devices(topology, {uuid: position for position, uuid in device_positions(topology)})


class Shapes:
    """The shapes of the topologies that were interned here."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, bytes], object] = {}
        """Field of `Topology`, and the SHA-256 of its value in JSON -> the value that all share."""
        self._bytes = 0
        """Size of all parts in JSON."""
        self._shapes: dict[tuple[int, ...], Topology] = {}
        """The identities of the shared values of all fields -> the shape."""

    def interned(self, topology: Topology) -> Topology:
        """
        An equal topology with a `shape`, which shares equal parts with other interned topologies. If two devices have
        the same uuid, the result is `topology` itself. A topology with devices of other plugins has its own shape.
        """
        names = dict(device_positions(topology))
        shape = self._shared(rename_devices(topology, {uuid: position for position, uuid in names.items()}))
        same = rename_devices(shape, names)
        if same != topology:
            return topology
        same.__dict__[SHAPE] = shape
        return same

    def _shared(self, shape: Topology) -> Topology:
        if len(self._parts) > MOST_PARTS or self._bytes > MOST_BYTES:
            self._parts.clear()
            self._shapes.clear()
            self._bytes = 0
        values = {name: getattr(shape, name) for name in shape.__struct_fields__}
        fields = {name: value if name == UNSHARED else self._part(name, value) for name, value in values.items()}
        if fields[UNSHARED]:
            return Topology(**fields)
        return self._shapes.setdefault(tuple(map(id, fields.values())), Topology(**fields))

    def _part(self, name: str, value: T) -> T:
        text = msgspec.json.encode(value)
        key = name, hashlib.sha256(text).digest()
        if key not in self._parts:
            self._parts[key] = value
            self._bytes += len(text)
        part: T = self._parts[key]  # type: ignore[assignment]  # the key has the field, which has the type
        return part
