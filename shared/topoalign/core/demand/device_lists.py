"""
Finds the resources by which a container gets GPUs or NICs, or parts of them.

A container can get GPUs by several resources: two MIG profiles, two models, or GPUs and shares of other GPUs. The
kubelet calls Allocate for each resource. If two responses set a variable such as NVIDIA_VISIBLE_DEVICES, the container
gets only one of the values. So each response must list all GPUs of the container. Mounts and CDI names are merged.

Source: kubelet v1.36.3, devicemanager, deviceRunContainerOptions; k8s-device-plugin issue 728.
"""

from collections.abc import Iterator

from topoalign.core.demand.pod_demand import ContainerDemand, PodDemand
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


def gpu_lists(topology: Topology) -> tuple[ResourceName, ...]:
    """The resources by which a container can get different GPUs, in the order of their names."""
    in_memory = {offer.resource for offer in topology.offered if offer.unit == "memory"}
    return tuple(sorted(name for name in topology.offers_of if name not in in_memory and has_gpus(topology, name)))


def lists_asked(topology: Topology, container: ContainerDemand) -> tuple[ResourceName, ...]:
    """The resources of `gpu_lists` that a container requests, if there are several. Otherwise, empty."""
    found = tuple(name for name in gpu_lists(topology) if container.devices.get(name))
    return found if len(found) > 1 else ()


def list_notes(topology: Topology, demand: PodDemand) -> Iterator[str]:
    """
    The notes of a prediction about containers that request several of these resources. They apply to nodes that pass
    devices only by NVIDIA_VISIBLE_DEVICES.
    """
    for container in demand.containers:
        if resources := lists_asked(topology, container):
            yield (
                f"container {container.container} asks for GPUs of {' and '.join(resources)}: under "
                "deviceListStrategy envvar the node refuses it (NotVisible) unless topoalign's scheduler binds the pod; "
                "volume-mounts, cdi-annotations and cdi-cri need no scheduler"
            )
