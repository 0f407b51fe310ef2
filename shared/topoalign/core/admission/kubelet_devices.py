"""
Adjusts the devices of a node to those that its kubelet will have at its next admission, for predictions.

The allocation record lags behind the kubelet: an allocation is released only some seconds after its container
disappears. The kubelet's checkpoint also lags, but has pod UIDs, and pod directories show which pods are deleted. So:

- devices of containers that are known to have ended are free;
- recorded devices of a container that has been seen running are free if the checkpoint lists them only for deleted
  pods. The checkpoint was written before that container was seen, so its pod is one of the deleted pods;
- devices that the checkpoint lists for a pod with a mounted volume are held, even if they are not in the record: a
  plain init container that ended before this process started is not recorded, and the kubelet keeps its devices for its
  pod;
- devices of other plugins that the checkpoint lists are held, because they are not in the record;
- all other allocations count, for example new ones that are not in the checkpoint yet.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.shares import amount_resources
from topoalign.core.model.errors import InvalidField, clean, quoted
from topoalign.core.model.events import HEALTHY, Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, ListedDevices
from topoalign.core.model.topology.model import PluginDevice, Topology
from topoalign.core.state.fold import NodeState

Devices = Mapping[ResourceName, tuple[DeviceID, ...]]


def with_others(state: NodeState, listed: Mapping[ResourceName, Sequence[ListedDevices]] | None) -> NodeState:
    """The state with the devices that other plugins list to the kubelet, all healthy. `listed` None: unknown."""
    # a resource that topoalign offers stays as discovery announces it
    hardware = state.hardware
    found = sorted(
        (
            PluginDevice(id=device, resource=resource, nodes=part.nodes)
            for resource, parts in (listed or {}).items()
            if resource not in hardware.offers_of
            for part in parts
            for device in part.ids
        ),
        key=lambda other: (other.resource, other.id),  # kubelets list them in no order
    )
    if not found or state.topology is None or state.health is None:
        return state
    kept = tuple(other for other in hardware.others if other.resource not in (listed or {}))
    hardware = msgspec.structs.replace(hardware, others=(*kept, *found))
    devices = {**{other.id: HEALTHY for other in found}, **state.health.devices}
    return msgspec.structs.replace(
        state,
        topology=msgspec.structs.replace(state.topology, topology=hardware),
        health=msgspec.structs.replace(state.health, devices=devices),
    )


def without_ended(state: NodeState, ended: Collection[AllocationID]) -> tuple[NodeState, tuple[str, ...]]:
    """The state without these allocations, and a note that names them."""
    names = state.allocations.keys() & {*ended}
    if not names:
        return state, ()
    left = {name: held for name, held in state.allocations.items() if name not in names}
    whose = [
        f"{held.owner.namespace}/{held.owner.pod}/{held.owner.container}" if held.owner is not None else held.id
        for name, held in state.allocations.items()
        if name in names
    ]
    note = (
        f"the record still has devices of {quoted(whose)}, whose pods have ended: they count as free. Until it has released "
        "them the record lags behind the kubelet, which may take other, equally good devices"
    )
    return msgspec.structs.replace(state, allocations=left), (note,)


def without_dropped(state: NodeState, dropped: Mapping[AllocationID, Devices]) -> NodeState:
    """The state without devices that the checkpoint lists only for deleted pods (`KubeletObserved.dropped`)."""
    if state.allocations.keys().isdisjoint(dropped):
        return state
    kept = {
        name: left
        for name, held in state.allocations.items()
        if (left := _without_devices(held, dropped[name]) if name in dropped else held)
    }
    return msgspec.structs.replace(state, allocations=kept)


def _without_devices(held: Allocation, dropped: Devices) -> Allocation | None:
    """An allocation without these devices. None: only co-allocated devices remain, which are released with them."""
    devices = {
        resource: left
        for resource, ids in held.devices.items()
        if (left := tuple(device for device in ids if device not in dropped.get(resource, ())))
    }
    if all(device in held.co_allocated for ids in devices.values() for device in ids):
        return None
    kept = frozenset(device for ids in devices.values() for device in ids)
    slots = {slot: amount for slot, amount in held.slots.items() if slot in kept}
    instances = {slot: uuid for slot, uuid in held.instances.items() if slot in kept}
    return msgspec.structs.replace(held, devices=devices, slots=slots, instances=instances)


def dropped_of(
    live: Mapping[AllocationID, Allocation], listed: Mapping[ResourceName, Collection[DeviceID]]
) -> dict[AllocationID, dict[ResourceName, tuple[DeviceID, ...]]]:
    """The devices of these allocations that the checkpoint lists only for deleted pods (`listed`)."""
    # by allocation, because its id is never reused, but its devices are; only if its container was seen running
    found = {
        name: {
            resource: gone
            for resource, ids in held.from_kubelet.items()
            if (gone := tuple(device for device in ids if device in listed.get(resource, ())))
        }
        for name, held in live.items()
        if held.owner is not None
    }
    return {name: devices for name, devices in found.items() if devices}


def find_unrecorded_devices(state: NodeState, entry: CheckpointEntry, ended: Collection[DeviceID]) -> Devices:
    """The devices that the checkpoint lists for a container, without recorded ones and those of `ended` containers."""
    # for resources that topoalign offers, only devices of a pod that certainly runs; for other plugins, all devices
    hardware = state.hardware
    return {
        resource: tuple(device for device in ids if device not in ended and not state.ownership.is_held(device))
        for resource, ids in entry.devices.items()
        if resource in hardware.devices and (entry.mounted or resource not in hardware.offers_of)
    }


def describe_unaccounted_grants(state: NodeState, kubelet: KubeletObserved) -> tuple[str, ...]:
    """A note that names the granted devices that the checkpoint lists for no existing pod."""
    in_checkpoint = {device for entry in kubelet.entries for ids in entry.devices.values() for device in ids}
    waiting = sorted(
        device
        for held in state.allocations.values()
        if held.owner is None
        for device in held.device_ids - in_checkpoint - {*held.co_allocated}
    )
    if not waiting or kubelet.checkpoint_unknown:  # the pod can still be refused, or was refused
        return ()
    return (f"the kubelet has asked for {quoted(waiting)} and lists no container with them: they count as held",)


def as_others(state: NodeState, demand: PodDemand) -> NodeState:
    """The state in which a pod of this name counts as another pod, because the next pod has a new UID."""
    name = (demand.namespace, demand.pod)
    others = {
        each: msgspec.structs.replace(held, owner=None)
        if held.owner is not None and (held.owner.namespace, held.owner.pod) == name
        else held
        for each, held in state.allocations.items()
    }
    return msgspec.structs.replace(state, allocations=others)


def explain_unavailable_resources(
    demand: PodDemand, topology: Topology, registered: Collection[ResourceName] | None, devices_unknown: str = ""
) -> tuple[str, ...]:
    """
    Notes on requested resources without devices here. The kubelet ignores a resource that no plugin has registered.
    `devices_unknown`: why the devices of other plugins are unknown; empty: they are known. Raises InvalidField for a
    resource that is registered with the kubelet, because the NUMA nodes of its devices are unknown.
    """
    unknown = sorted(demand.device_names - topology.devices.keys() - amount_resources(topology) - demand.together)
    for name in unknown:
        if registered is not None and name in registered:
            raise InvalidField(
                f"limits[{clean(name)}]",
                "the kubelet has such devices, and the machine as it is known here has none",
                "describe the machine with them (`topology.others` of topoalign's own JSON), or see that their plugin "
                "on the node lists healthy ones",
            )
    if devices_unknown:
        return tuple(f"whether a plugin lists {clean(name)} is not known: {devices_unknown}" for name in unknown)
    return tuple(
        f"nobody lists {clean(name)} here: the kubelet passes over it, a scheduler would not" for name in unknown
    )
