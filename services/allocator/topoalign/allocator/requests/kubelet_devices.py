"""
The devices of a node as its kubelet will have them at its next admission, for predictions.

The record lags behind the kubelet: it keeps what a container had until the container was missing for some seconds. The
kubelet's checkpoint lags, too, but names pods by their UIDs, and their directories tell which are gone. So

- what the caller knows to have ended is free;
- what the record has for a container that was seen to run is free if the checkpoint lists it for pods that are gone alone:
  the checkpoint was written before that container was seen, so its pod is one of these;
- what the checkpoint lists for a pod with a mounted volume is held, in the record or not: a plain init container that ended
  before this process started is in no record, and the kubelet keeps its devices for its pod;
- all else is as the record has it, above all what was granted a moment ago and is not in the checkpoint yet.
"""

from collections.abc import Collection, Mapping

import msgspec

from topoalign.core.model.errors import quoted
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.files.listed_pods import ListedPods
from topoalign.kubelet.files.node_state import Container, Held

Devices = Mapping[ResourceName, tuple[DeviceID, ...]]


def without_ended(state: NodeState, ended: Collection[Allocation]) -> tuple[NodeState, tuple[str, ...]]:
    """The state without these allocations, and a note that names them."""
    names = {each.id for each in ended} & state.allocations.keys()
    if not names:
        return state, ()
    left = {name: held for name, held in state.allocations.items() if name not in names}
    whose = [name_of(held) for name, held in state.allocations.items() if name in names]
    note = f"the record still has devices of {quoted(whose)}, whose pods have ended: they count as free"
    return msgspec.structs.replace(state, allocations=left), (note,)


def name_of(allocation: Allocation) -> str:
    """The container of an allocation for people; its id where that is not known."""
    owner = allocation.owner
    return f"{owner.namespace}/{owner.pod}/{owner.container}" if owner is not None else allocation.id


def without_dropped(state: NodeState, listed: Held) -> NodeState:
    """The state without what the checkpoint, read as `listed`, has for pods that are gone alone."""
    kept = {name: left for name, held in state.allocations.items() if (left := remaining(held, listed.dropped))}
    return msgspec.structs.replace(state, allocations=kept)


def remaining(held: Allocation, dropped: Mapping[ResourceName, Collection[DeviceID]]) -> Allocation | None:
    """An allocation without what it has of these devices, if its container was seen to run. None: nothing is left."""
    if held.owner is None or not held.devices:
        return held
    devices = {
        resource: left
        for resource, ids in held.devices.items()
        if (left := tuple(device for device in ids if device not in dropped.get(resource, ())))
    }
    return None if not devices else held if devices == held.devices else msgspec.structs.replace(held, devices=devices)


def unrecorded(
    state: NodeState, listed: Held, pods: ListedPods, ended: Collection[Allocation]
) -> dict[Container, Devices]:
    """What the checkpoint lists for pods that run, the record has for nobody, and no container that has ended had."""
    over = frozenset[DeviceID]().union(*(each.device_ids for each in ended))
    return {
        container: {
            resource: tuple(device for device in ids if device not in over and not state.overlapping([device]))
            for resource, ids in devices.items()
            if resource in state.hardware.devices
        }
        for container, devices in listed.devices.items()
        if pods.is_known_to_run(container[0])
    }


def unaccounted(state: NodeState, listed: Held) -> tuple[str, ...]:
    """
    A note that names what was granted and the checkpoint lists for no pod that runs: the pod may be refused yet, or was.
    Nothing where the checkpoint cannot be read.
    """
    told = {device for devices in listed.devices.values() for ids in devices.values() for device in ids}
    waiting = sorted(
        device for held in state.allocations.values() if held.owner is None for device in held.device_ids - told
    )
    if not waiting or listed.finding is not None:
        return ()
    return (f"the kubelet has asked for {quoted(waiting)} and lists no container with them: they count as held",)


def as_others(state: NodeState, pod: PodRequest) -> NodeState:
    """
    The state in which what a pod of this name has is somebody else's: the kubelet tells pods apart by their UIDs, and the
    pod that comes next has a new one.
    """
    name = (pod.namespace, pod.name)
    others = {
        each: msgspec.structs.replace(held, owner=None)
        if held.owner is not None and (held.owner.namespace, held.owner.pod) == name
        else held
        for each, held in state.allocations.items()
    }
    return msgspec.structs.replace(state, allocations=others)
