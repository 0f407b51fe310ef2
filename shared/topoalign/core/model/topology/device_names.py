"""
Names a device for people, by its index, its id and its PCI address.

An index alone is ambiguous, because it changes when another GPU is lost. A uuid alone does not help a person to find
the GPU in the machine. So output and HTTP answers contain all three. The name of a part of a GPU or NIC (a share, a MIG
instance, a virtual function) begins with that of the GPU or NIC.
"""

from collections.abc import Iterable, Mapping

import msgspec

from topoalign.core.model.holdings import SHARE
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Nic, Topology


class NamedDevice(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A device with its names: the id, the index, the PCI address, and a short form for people."""

    resource: ResourceName
    id: DeviceID
    """A GPU's uuid, a NIC's RDMA device name, or the id of a part as it was handed out."""
    index: int | None
    """The index in `nvidia-smi`; for a part, that of its GPU or NIC. None: not in the topology (any more)."""
    pci: str | None
    """For a part, the address of its GPU or NIC. None: unknown."""
    numa_affinity: tuple[int, ...]
    """Empty: unknown."""
    short: str
    """For tables: `GPU3`, `NIC0`, `GPU3::1` for a share, `GPU3/MIG-…`, or the id if there is no index."""


def named_devices(topology: Topology, devices: Mapping[ResourceName, Iterable[DeviceID]]) -> tuple[NamedDevice, ...]:
    """The names of each device of an allocation, by resource."""
    return tuple(name_device(topology, resource, device) for resource, ids in devices.items() for device in ids)


def name_device(topology: Topology, resource: ResourceName, device: DeviceID) -> NamedDevice:
    """Returns the names of a device of this node. Never fails: a device that is not in the topology has only its id."""
    gpu = topology.parent_of(device)
    found = topology.gpu_by_id.get(gpu) or topology.nic_by_id.get(gpu)
    if found is None:
        nodes = next((other.nodes for other in topology.others if other.id == device), None)
        return NamedDevice(resource=resource, id=device, index=None, pci=None, numa_affinity=nodes or (), short=device)
    short = f"{'NIC' if isinstance(found, Nic) else 'GPU'}{found.index}"
    part = device.removeprefix(gpu)
    return NamedDevice(
        resource=resource,
        id=device,
        index=found.index,
        pci=found.pci,
        numa_affinity=found.numa_affinity,
        short=short + (part if not part or part.startswith(SHARE) else f"/{part}"),
    )
