"""
Shares the equal contents of many nodes' topologies in memory.

Machines of one model differ in the uuids of their GPUs and MIG instances. A shape is a topology in which these ids are
replaced by their positions. `Shapes` keeps each shape once and makes the topology of a node of it, which shares with the
shape every part that has no uuid: CPUs, NUMA nodes, bridges, NICs and their links. What depends on no uuid is computed for
the shape alone. Parts are shared one by one as well, since machines of one model may differ in some bytes of memory.

    GPU-5f0c…, GPU-1e7a… and the link between them: shape `gpu/0`, `gpu/1` and the link between these

Equal machines have the same shape object, and uuids in the order of its positions (`device_positions`). A decision for a
shape holds for each of them under its own ids.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

import msgspec

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import SHAPE, computed_once
from topoalign.core.model.topology.model import Gpu, Topology

MOST_PARTS = 100_000
"""Parts of topologies that are remembered; a cluster of 5,000 different machines has half as many."""
MOST_BYTES = 64 * 2**20
"""Of these parts in JSON, because one node can announce ever larger ones."""
UNSHARED = "others"
"""The field of `Topology` that is left to each node: other plugins' devices, which few nodes have in common."""

T = TypeVar("T")


def device_positions(topology: Topology) -> Iterator[tuple[DeviceID, DeviceID]]:
    """The positions of the GPUs and MIG instances, each with the uuid that it stands for."""
    for gpu_number, gpu in enumerate(topology.gpus):
        yield DeviceID(f"gpu/{gpu_number}"), gpu.id
        for number, instance in enumerate(gpu.mig or ()):
            yield DeviceID(f"gpu/{gpu_number}/{number}"), instance.uuid


def rename_devices(topology: Topology, names: Mapping[DeviceID, DeviceID]) -> Topology:
    """The same hardware with other ids for these. Parts without any of them are the same objects."""
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
    """The same hardware as another machine of its model might be: with ids of GPUs and MIG instances that none has."""
    return rename_devices(topology, {uuid: position for position, uuid in device_positions(topology)})


class Shapes:
    """The shapes of the topologies that were interned here."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, bytes], object] = {}
        """Field of `Topology`, and the SHA-256 of its value in JSON -> the value that all share."""
        self._bytes = 0
        """Of all parts in JSON."""
        self._shapes: dict[tuple[int, ...], Topology] = {}
        """The identities of the shared values of all fields -> the shape."""

    def interned(self, topology: Topology) -> Topology:
        """
        An equal topology that shares what it can with the others that were interned, and has their `shape`; the same one if
        a uuid in it stands for two things. One with devices of other plugins has a shape of its own.
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
