"""
Chooses the devices of one resource for a container, once its NUMA affinity is known (kubelet v1.36.3, device manager).

The rule: devices of earlier init containers of the pod come first. Then devices near a node of the affinity come before
others. If there is a choice, the device plugin is asked for its preference; the valid part of its answer is used, and is cut
or filled up in the hardware's order.

The function asks by yielding the choice, so that the same code serves a plugin behind gRPC and one in the process.
"""

from collections.abc import Collection, Generator, Sequence
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
    """What the plugin is asked: which `size` of the available devices, with those that must be among them?"""

    available: DeviceSet
    must_include: tuple[DeviceID, ...]
    size: int


Choosing = Generator[DeviceChoice, Sequence[DeviceID] | None, tuple[DeviceID, ...]]
"""Yields at most one choice; is sent the preferred devices, or None where the plugin has no preference to give."""


class NotEnoughDevices(NoFit):
    """Fewer devices of a resource are free and healthy than are needed."""

    def __init__(self, resource: ResourceName, needed: int, available: int) -> None:
        super().__init__(
            f"{needed} of {resource} needed, {available} free and healthy",
            "ask for fewer, wait until some are released, or see `topoalign topo --wide` for devices that are not healthy",
        )


class TooLarge(NoFit):
    """
    Raised for more devices of a resource than one container may have.

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
    """Devices by their place relative to an affinity."""

    aligned: DeviceSet
    """Near a node of it."""
    unaligned: DeviceSet
    """Near other nodes only."""
    no_affinity: DeviceSet
    """Near no known node, or there is no affinity to compare with."""


def split_by_affinity(devices: OfferedDevices, available: Collection[DeviceID], affinity: Mask | None) -> Sides:
    """Splits the available devices by their place relative to the affinity."""
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
    """How many devices of a resource one container may ask for."""
    return min((offer.most for offer in topology.offers_of.get(resource, ()) if offer.most is not None), default=inf)


def choose_for_container(
    state: NodeState,
    container: ContainerDemand,
    resource: ResourceName,
    affinity: Mask | None,
    among: Collection[DeviceID] | None = None,
    picked: Collection[DeviceID] | None = None,
) -> Choosing:
    """
    `choose_devices` for a container on a node as it is, with what earlier containers of its pod left. `among`: the healthy
    devices that may be chosen; None: all. `picked`: of what earlier containers left, what it takes over; None: the first
    devices. Raises TooLarge; the generator raises NoHealthyDevice and NotEnoughDevices.
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
        reusable_devices(held_by_pod(state, container), resource) if picked is None else picked,
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
) -> Choosing:
    """
    `required` devices of a resource for a container, in the hardware's order. `devices` are all of the resource,
    `allocated` those that a container holds, `reusable` those of them that init containers of this pod left. Raises
    NoHealthyDevice and NotEnoughDevices.
    """
    if not healthy:
        raise NoHealthyDevice(resource)
    taken = devices.some(reusable).first(required)
    needed = required - len(taken)
    if needed <= 0:
        return tuple(taken)
    available = devices.some(healthy) - devices.some(allocated)
    if len(available) < needed:
        raise NotEnoughDevices(resource, needed, len(available))
    aligned, unaligned, no_affinity = split_by_affinity(devices, available, affinity)
    if needed < len(aligned):
        choice = aligned
        fallback = [aligned]
    elif needed == len(aligned):
        return tuple(taken | aligned)
    else:
        taken |= aligned
        choice = available - aligned
        fallback = [unaligned, no_affinity]
    reply = yield DeviceChoice(choice | taken, tuple(taken), required)
    chosen = taken
    for some in (choice & devices.some(reply or ()), *fallback):
        chosen |= (some - chosen).first(required - len(chosen))
    return tuple(chosen)
