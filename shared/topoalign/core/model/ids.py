"""Types for names and ids."""

from typing import NewType

NodeName = NewType("NodeName", str)
"""Name of a Kubernetes node, or of a host without Kubernetes. May contain dots."""

Namespace = NewType("Namespace", str)
PodName = NewType("PodName", str)
ContainerName = NewType("ContainerName", str)

DeviceID = NewType("DeviceID", str)
"""The id in the kubelet's calls: a GPU's uuid, a NIC's RDMA device name. Never an index, because indexes can change."""

ResourceName = NewType("ResourceName", str)
"""`cpu`, `memory`, `hugepages-2Mi` or an extended resource such as `nvidia.com/gpu`."""

AllocationID = NewType("AllocationID", str)
"""Identifies one container's allocation until it is released."""

CPU = ResourceName("cpu")
MEMORY = ResourceName("memory")
GPU = ResourceName("nvidia.com/gpu")
NIC = ResourceName("topoalign.io/nic")


def is_hugepages(resource: ResourceName) -> bool:
    """Whether a resource is hugepages of one size, such as `hugepages-2Mi`."""
    return resource.startswith("hugepages-")


def is_native(resource: ResourceName) -> bool:
    """Whether the kubelet itself allocates this resource. All other resources are those of device plugins."""
    return resource in (CPU, MEMORY) or is_hugepages(resource)
