"""
Tells whether a resource offers GPUs, or NICs, whole or in parts.

A container may get GPUs by several resources: two MIG profiles, two models, or GPUs and shares of other GPUs. The kubelet
calls Allocate for each of them, and if a variable such as NVIDIA_VISIBLE_DEVICES is in two answers, it passes on only one
value. So each answer must list the GPUs of all resources of the container. Mounts and CDI names are merged.

Source: kubelet v1.36.3, devicemanager, deviceRunContainerOptions; k8s-device-plugin issue 728.
"""

from collections.abc import Iterator

from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology


def has_gpus(topology: Topology, resource: ResourceName) -> bool:
    """Whether a resource offers GPUs or parts of them."""
    return not topology.gpu_by_id.keys().isdisjoint(_offered_gpus(topology, resource))


def has_nics(topology: Topology, resource: ResourceName) -> bool:
    """Whether a resource offers NICs or virtual functions of them."""
    return not topology.nic_by_id.keys().isdisjoint(_offered_gpus(topology, resource))


def _offered_gpus(topology: Topology, resource: ResourceName) -> Iterator[DeviceID]:
    return (topology.parent_of(base) for offer in topology.offers_of.get(resource, ()) for base in offer.devices)
