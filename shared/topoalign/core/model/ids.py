"""Types for the names of things. They have a module of their own, so that nothing has to import a larger one for them."""

from typing import NewType

NodeName = NewType("NodeName", str)
"""Name of a Kubernetes node or of a host that plays one. May contain dots."""

Namespace = NewType("Namespace", str)
PodName = NewType("PodName", str)
ContainerName = NewType("ContainerName", str)

DeviceID = NewType("DeviceID", str)
"""The id that the kubelet knows: a GPU's uuid, a NIC's RDMA device name. Never an index, which may change."""

ResourceName = NewType("ResourceName", str)
"""`cpu`, `memory`, `hugepages-2Mi` or an extended resource such as `nvidia.com/gpu`."""

AllocationID = NewType("AllocationID", str)
"""Names one container's allocation for as long as it lives."""

CPU = ResourceName("cpu")
MEMORY = ResourceName("memory")
GPU = ResourceName("nvidia.com/gpu")
NIC = ResourceName("topoalign.io/nic")


def is_hugepages(resource: ResourceName) -> bool:
    """Whether a resource is hugepages of one size, such as `hugepages-2Mi`."""
    return resource.startswith("hugepages-")


def is_native(resource: ResourceName) -> bool:
    """Whether the kubelet itself hands this resource out; every other resource comes from a device plugin."""
    return resource in (CPU, MEMORY) or is_hugepages(resource)
