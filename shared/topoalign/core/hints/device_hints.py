"""
Finds the NUMA nodes with enough devices of one resource (kubelet v1.36.3, device manager hints).

Hints are subsets of the NUMA nodes that have a device of the resource near them, healthy or not. A device that is near
several nodes is available on each of them, and counts once. A device without a known NUMA node counts on no node. NUMA
nodes that the machine does not have are ignored.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from functools import lru_cache

from topoalign.core.demand.pod_demand import ContainerDemand
from topoalign.core.demand.shares import (
    gpus_with_enough,
    on_one_node,
    unit_of,
)
from topoalign.core.hints.hint_rules import Supply, hints_from
from topoalign.core.hints.joint_hints import joint_hints
from topoalign.core.hints.provider import HintProvider, HintRequest, Largest
from topoalign.core.hints.reuse import held_by_pod, own_part, reusable_devices
from topoalign.core.model.hints import Hints, ProviderHints, ResourceNeed
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask, node_mask
from topoalign.core.model.topology.device_sets import DeviceSet, OfferedDevices
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState


def device_hints(
    devices: OfferedDevices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
    held: Collection[DeviceID] = (),
) -> Hints:
    """
    The hints for `requested` devices of one resource.

    `available`: healthy and free devices. `reusable`: devices to reuse from init containers of the pod. `held`: devices
    that this container already has. `machine`: the ids of the machine's NUMA nodes, ascending. For devices without
    topology, the kubelet never has a preference. Mode `best` has no preference only if there are enough.
    """
    unlisted = sum(device not in devices for device in reusable)
    enough = len(devices.some(available) | devices.some(reusable)) + unlisted >= requested
    if not any(by_counted_nodes(devices, mode)) and (profile_of(mode).silent_on_unplaced_devices or enough):
        return None
    if held:
        return device_hints_of_count(devices, held, (), requested, machine, mode) if len(held) == requested else ()
    if not enough:
        return ()
    return device_hints_of_count(devices, available, reusable, requested, machine, mode)


def device_hints_of_count(
    devices: OfferedDevices,
    available: Collection[DeviceID],
    reusable: Collection[DeviceID],
    requested: int,
    machine: tuple[int, ...],
    mode: Mode,
) -> Hints:
    """
    The subsets of NUMA nodes with enough devices near them. All reusable devices with a topology must be among these.
    """
    by_nodes: dict[tuple[int, ...] | None, DeviceSet] = {
        known: there for known, there in by_counted_nodes(devices, mode).items() if known is not None
    }
    nodes = node_mask(bearing_nodes(by_nodes, machine))
    left = count_near(devices.some(reusable), by_nodes, nodes)
    free = Counter(count_near(devices.some(available), by_nodes, nodes)) + Counter(left)
    everything = count_near(devices.everything, by_nodes, nodes)
    for supply in (free, everything):
        supply.pop(0, None)  # devices near no node meet no need
    obligatory = (ResourceNeed(1, {near: 1} if near else {}) for near in sorted(left))
    now = (ResourceNeed(requested, dict(free)), *obligatory)
    empty = (ResourceNeed(requested, everything),)
    return hints_from(Supply(nodes, now), Supply(nodes, empty), mode, len(machine))


def count_near(some: DeviceSet, by_nodes: Mapping[tuple[int, ...] | None, DeviceSet], nodes: Mask) -> dict[Mask, int]:
    """Mask of some of these `nodes` -> how many devices are near exactly those. Masks without devices are absent."""
    counted = Counter[Mask]()
    for listed, there in by_nodes.items():
        if amount := len(some & there):
            counted[real_nodes(listed or ()) & nodes] += amount
    return counted


@lru_cache(maxsize=1024)
def real_nodes(near: tuple[int, ...]) -> Mask:
    """The nodes as a mask. A plugin can list a device with node -1, which means no node."""
    return node_mask(node for node in near if node >= 0)


def by_counted_nodes(devices: OfferedDevices, mode: Mode) -> Mapping[tuple[int, ...] | None, DeviceSet]:
    """NUMA nodes -> the devices that count as near them: as listed to the kubelet or, in mode `best`, as known."""
    return devices.by_nodes if profile_of(mode).counts_devices_as_listed else devices.by_known_nodes


def bearing_nodes(by_nodes: Iterable[tuple[int, ...] | None], machine: tuple[int, ...]) -> tuple[int, ...]:
    """The machine's NUMA nodes that have a device of the resource near them, or all its NUMA nodes if none has one."""
    bearing = {node for near in by_nodes for node in near or ()}
    return tuple(node for node in machine if node in bearing) or machine


def devices_free_for(asked: HintRequest, resource: ResourceName) -> DeviceSet:
    """
    The devices of a resource that can be allocated. For units and slots, only those on GPUs with enough free, if the
    mode selects units by GPU.
    """
    state, demand, rules = asked
    free = state.ownership.free(resource)
    if not profile_of(rules.mode).seeks_units_by_gpu:
        return free
    if state.hardware.kind_of(resource) == "slot":
        found = free.devices.nothing
        for each in demand.containers:
            found |= slots_for(state, each, resource)
        return found
    if unit_of(state.hardware, resource) is None:
        return free
    gpus = {gpu for each in demand.containers for gpu in gpus_for_units(state, each)}
    found = units_on_gpus(state, gpus, resource) & free
    asking = [each for each in demand.containers if each.devices.get(resource)]
    return _spread_part(state, asking[0], resource, found) if len(asking) == 1 else found


def gpus_for_units(state: NodeState, container: ContainerDemand) -> frozenset[DeviceID]:
    """The GPUs with enough free for the share that a container requests, and the GPUs of which it reuses units."""
    share = container.share_in_units(state.hardware)
    if share is None:
        return frozenset()
    able = gpus_with_enough(state.hardware, state.ownership.units_left, share)
    return frozenset((*able, *taken_over(state, container)))


def _spread_part(state: NodeState, container: ContainerDemand, resource: ResourceName, free: DeviceSet) -> DeviceSet:
    """
    The free units that a container can get in addition to the units that it reuses. If its share is spread over several
    GPUs, it gets no more of each GPU than an equal part. Example: a container requests 60 units over two GPUs, and
    reuses 10 units of GPU-0. It can get 20 more units of GPU-0, and 30 of each other GPU.
    """
    if container.gpus == 1:
        return free
    part = container.devices[resource] // container.gpus
    held = free.devices.some(reusable_devices(held_by_pod(state, container), resource))
    found = free.devices.nothing
    for units in free.devices.by_base.values():
        found |= (units & free).first(max(0, part - len(units & held)))
    return found


def taken_over(state: NodeState, container: ContainerDemand) -> tuple[DeviceID, ...]:
    """The GPUs of the units that a container reuses from earlier containers of its pod. It gets these before others."""
    held = held_by_pod(state, container)
    hardware = state.hardware
    left = (unit for name in container.devices if unit_of(hardware, name) for unit in reusable_devices(held, name))
    return tuple(dict.fromkeys(map(hardware.parent_of, left)))


def units_on_gpus(state: NodeState, gpus: Set[DeviceID], resource: ResourceName) -> DeviceSet:
    """All units of a resource on these GPUs."""
    devices = state.hardware.devices[resource]
    found = devices.nothing
    for gpu in gpus & devices.by_base.keys():
        found |= devices.by_base[gpu]
    return found


def slots_for(state: NodeState, container: ContainerDemand, resource: ResourceName) -> DeviceSet:
    """The first free slot of each GPU with enough free for the share, without GPUs that have a slot to reuse."""
    hardware = state.hardware
    free = state.ownership.free(resource)
    found = free.devices.nothing
    left = reusable_devices(held_by_pod(state, container), resource)
    share = container.share(hardware)
    if share is None or share.resource is None:
        return found
    taken = {*map(base_of, left)}
    others = [gpu for gpu in gpus_with_enough(hardware, state.ownership.slots_left, share) if gpu not in taken]
    for gpu in on_one_node(hardware, share, others, taken):
        found |= (free & free.devices.by_base[gpu]).first(1)
    return found


class DeviceProvider(HintProvider):
    """The device manager."""

    name = "device"

    def hints(self, asked: HintRequest) -> ProviderHints:
        """The hints for each resource of `resources`."""
        state, demand, rules = asked
        held = held_by_pod(state, demand)
        own = own_part(held, demand)
        joint = joint_hints(asked) if demand.together else None
        return {
            name: joint
            if name in demand.together
            else device_hints(
                state.hardware.devices[name],
                devices_free_for(asked, name),
                reusable_devices(held, name),
                demand.devices[name],
                state.hardware.node_ids,
                rules.mode,
                held=[device for each in own for device in each.devices.get(name, ())],
            )
            for name in self.resources(asked)
        }

    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        """Resources that this node has devices of, or that are allocated together, in the order of the demand."""
        known = asked.state.hardware.devices
        demand = asked.demand
        return {name: None for name in demand.devices if name in known or name in demand.together}.keys()

    def may_have_no_opinion(self, resource: ResourceName, asked: HintRequest) -> bool:
        """Only for devices without a known NUMA node, or devices that are allocated together."""
        return resource in asked.demand.together or not any(
            by_counted_nodes(asked.state.hardware.devices[resource], asked.rules.mode)
        )

    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        """One need, and one per NUMA node if the pod has allocations. Each has at most one supply entry per device."""
        hardware = asked.state.hardware
        left = len(hardware.nodes) if held_by_pod(asked.state, asked.demand) else 0
        return Largest(1 + left, max(1, len(hardware.devices.get(resource, ()))), 0)
