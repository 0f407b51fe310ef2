"""
A device as people know it: its index, its id and its PCI address together.

An index alone is ambiguous (it changes when another GPU is lost), a uuid alone says nothing to a person in front of the
machine, so whatever is shown or answered over HTTP carries all three.
"""

import msgspec

from topoalign.core.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.topology.model import Topology


class NamedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device and what it is called where."""

    resource: ResourceName
    id: DeviceID
    """A GPU's uuid, a NIC's RDMA device name."""
    index: int | None
    """As `nvidia-smi` counts GPUs and numbers NICs. None: the topology does not have the device (any more)."""
    pci: str | None
    numa_affinity: tuple[int, ...]
    """Empty: unknown."""

    @property
    def short(self) -> str:
        """For one line among many: `GPU3`, `NIC0`, or the id where there is no index."""
        kind = {GPU: "GPU", NIC: "NIC"}.get(self.resource)
        return self.id if kind is None or self.index is None else f"{kind}{self.index}"


def named(topology: Topology, resource: ResourceName, device: DeviceID) -> NamedDevice:
    """What a device of this node is called. Never fails: a device that the topology lacks has only its id."""
    found = topology.gpu_by_id.get(device) or topology.nic_by_id.get(device)
    if found is None:
        nodes = next((other.nodes for other in topology.others if other.id == device), None)
        return NamedDevice(resource=resource, id=device, index=None, pci=None, numa_affinity=nodes or ())
    return NamedDevice(
        resource=resource, id=device, index=found.index, pci=found.pci, numa_affinity=found.numa_affinity
    )
