"""
Chooses the devices of one resource for a container, once its NUMA affinity is known (kubelet v1.36.3, device manager).

Devices of earlier init containers of the pod come first, then devices near a NUMA node of the affinity, then others. If
there is a choice, the device plugin is asked for its preference. The valid devices of its answer are used. If they are
too many or too few, they are truncated, or others are added, in the hardware's order.
"""

from collections.abc import Collection
from math import inf
from typing import NamedTuple

from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.hints.device_hints import real_nodes
from topoalign.core.hints.reuse import held_by_pod, reusable_devices
from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.model.topology.device_sets import DeviceSet, OfferedDevices
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState


class DeviceChoice(NamedTuple):
    """The available devices of which a container is allocated `size`, and those that must be included."""

    available: DeviceSet
    must_include: tuple[DeviceID, ...]
    size: int
    fallback: tuple[DeviceSet, ...] = ()
    """The sets from which devices are added, in order, if too few are preferred."""

    @property
    def is_open(self) -> bool:
        """Whether the device plugin is asked, because more than the required devices are needed."""
        return len(self.must_include) < self.size

    def complete(self, preferred: Collection[DeviceID] | None) -> tuple[DeviceID, ...]:
        """The chosen devices. `preferred`: the plugin's answer; None: it has no preference."""
        devices = self.available.devices
        chosen = devices.some(self.must_include)
        for some in (self.available & devices.some(preferred or ()), *self.fallback):
            chosen |= (some - chosen).first(self.size - len(chosen))
        return tuple(chosen)


class NotEnoughDevices(NoFit):
    """Fewer devices of a resource are free and healthy than are needed."""

    def __init__(self, resource: ResourceName, needed: int, available: int) -> None:
        super().__init__(
            f"{needed} of {resource} needed, {available} free and healthy",
            "ask for fewer, wait until some are released, or see `topoalign topo --wide` for devices that are not healthy",
        )


class TooLarge(NoFit):
    """
    Raised if more devices of a resource are requested than one container can have.

    Remedy: Ask for fewer.
    """

    def __init__(self, resource: ResourceName, asked: int, most: int) -> None:
        super().__init__(
            f"{asked} of {resource} asked, and a container may ask for {most} at most",
            "its devices are shared: more shares are no more of a GPU; ask for fewer, or for whole GPUs",
        )


class NoHealthyDevice(NoFit):
    """
    Raised when no device of the resource is healthy.

    Remedy: Run `topoalign doctor` on the node.
    """

    def __init__(self, resource: ResourceName) -> None:
        super().__init__(
            f"no device of {resource} is healthy",
            "see `topoalign topo --wide` for the reasons; `topoalign gpu heal` declares a device healthy again",
        )


class Sides(NamedTuple):
    """Devices by their locality relative to an affinity."""

    aligned: DeviceSet
    """Near a NUMA node of the affinity."""
    unaligned: DeviceSet
    """Near other NUMA nodes only."""
    no_affinity: DeviceSet
    """Near no known NUMA node, or there is no affinity."""


def split_by_affinity(devices: OfferedDevices, available: Collection[DeviceID], affinity: Mask | None) -> Sides:
    """Splits the available devices by their locality relative to the affinity."""
    free = devices.some(available)
    aligned = devices.nothing
    elsewhere = devices.nothing
    if affinity is not None:
        for nodes, there in devices.by_nodes.items():
            near = real_nodes(nodes or ())
            if near & affinity:
                aligned |= there
            elif near:
                elsewhere |= there
    return Sides(free & aligned, free & elsewhere, free - aligned - elsewhere)


def most_per_container(topology: Topology, resource: ResourceName) -> float:
    """The maximum number of devices of a resource that one container can request."""
    return min((offer.most for offer in topology.offers_of.get(resource, ()) if offer.most is not None), default=inf)


def choose_for_container(
    state: NodeState,
    container: ContainerDemand,
    resource: ResourceName,
    affinity: Mask | None,
    among: Collection[DeviceID] | None = None,
    taken_over: Collection[DeviceID] | None = None,
) -> DeviceChoice:
    """
    `choose_devices` for a container on a node in its current state, with the reusable devices of earlier containers of
    its pod. `among`: the healthy devices that can be chosen. None: all. `taken_over`: the devices of earlier containers
    that it reuses. None: the first ones. Raises TooLarge, NoHealthyDevice and NotEnoughDevices.
    """
    amount = container.devices[resource]
    owned = state.ownership
    most = most_per_container(state.hardware, resource)
    if amount > most:
        raise TooLarge(resource, amount, int(most))
    return choose_devices(
        resource,
        state.hardware.devices[resource],
        owned.usable(resource) if among is None else among,
        owned.held(resource),
        reusable_devices(held_by_pod(state, container), resource) if taken_over is None else taken_over,
        amount,
        affinity,
    )


def choose_devices(
    resource: ResourceName,
    devices: OfferedDevices,
    healthy: Collection[DeviceID],
    allocated: Collection[DeviceID],
    reusable: Collection[DeviceID],
    required: int,
    affinity: Mask | None,
) -> DeviceChoice:
    """
    The choice of `required` devices of a resource for a container, in the hardware's order. `devices`: all of the
    resource. `allocated`: those that containers hold. `reusable`: those of them that init containers of this pod
    released. Raises NoHealthyDevice and NotEnoughDevices.
    """
    if not healthy:
        raise NoHealthyDevice(resource)
    taken = devices.some(reusable).first(required)
    needed = required - len(taken)
    if needed <= 0:
        return DeviceChoice(taken, tuple(taken), required)
    available = devices.some(healthy) - devices.some(allocated)
    if len(available) < needed:
        raise NotEnoughDevices(resource, needed, len(available))
    aligned, unaligned, no_affinity = split_by_affinity(devices, available, affinity)
    if needed < len(aligned):
        return DeviceChoice(aligned | taken, tuple(taken), required, (aligned,))
    taken |= aligned
    return DeviceChoice(available | taken, tuple(taken), required, (unaligned, no_affinity))


def likely_takeover(devices: OfferedDevices, reusable: Collection[DeviceID], amount: int) -> frozenset[DeviceID]:
    """
    The most likely distribution over NUMA nodes if a kubelet picks `amount` devices at random from more reusable ones
    (v1.36.3, device manager: the order of a Go map). For 3 of 4 devices on node 0 and 2 on node 1, it is 2 and 1.
    """
    left = devices.some(reusable)
    groups = [group for each in devices.by_nodes.values() if (group := left & each)]
    counts = [0] * len(groups)
    for _ in range(min(amount, len(left))):
        at = max(range(len(groups)), key=lambda place: (len(groups[place]) - counts[place]) / (counts[place] + 1))
        counts[at] += 1
    return frozenset(device for group, count in zip(groups, counts, strict=True) for device in group.first(count))
