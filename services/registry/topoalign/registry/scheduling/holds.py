"""
What pods have on a node before the node shows it.

A pod that is bound holds its devices, CPUs and memory from the moment of the bind: the next pod is filtered before the
kubelet has admitted it. Two kinds of pods are held here:

- reserved ones: what they get was chosen, and `Hold` says what it is;
- bound ones of which no reservation is known, such as another scheduler's: each is held as `decide` predicts it, in the
  order of binding, on the node as it is with the ones before.

A hold ends part by part. The devices of a resource, the CPUs or the memory of a container are no longer held here once an
allocation or a checkpoint of the node has them for the same container of the same pod; and they stay ended when that
container gives them back. What the node has given to anybody is not held a second time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from topoalign.core.admission.admit import decide
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.kubelet import CheckpointEntry
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.cpuset import format_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.registry.scheduling.model import PodToSchedule

Part = tuple[ContainerName, str]
"""A container, and what of it: the name of a resource of devices, CPUS or MEMORY."""
Shown = Mapping[str, Collection[Part]]
"""UID of a pod, or `namespace/name` where the node does not know it -> the parts that the node shows."""
PodNames = tuple[Namespace, PodName]

CPUS, MEMORY = "cpus", "memory"


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod is believed to have on a node although the node has not shown it."""

    pod_uid: str
    """UID of the pod."""
    namespace: Namespace
    """Its namespace."""
    pod: PodName
    """Its name."""
    allocations: tuple[Allocation, ...]
    """One for each of its containers that has something; the ids are of no other allocation of the node."""
    request: PodRequest | None = None
    """What it asks for, where that is known: then it is tried in every order (`orders`)."""


@dataclass(slots=True)
class BoundPod:
    """A pod that is bound to the node."""

    names: PodNames
    """Kept after the pod was seen: a record without the UID knows it by these."""
    waiting: PodToSchedule | None
    """The pod, until the node has shown it."""
    hold: Hold | None = None
    """What it is predicted to get. None: not predicted yet, or its kubelet would refuse it."""


class NodeHolds:
    """The holds of one node."""

    def __init__(self) -> None:
        self._reserved: dict[str, Hold] = {}
        self._bound: dict[str, BoundPod] = {}
        """In the order of binding."""
        self._shown: dict[str, set[Part]] = {}
        """UID -> the parts of its pod that have ended."""

    def reserve(self, holds: Sequence[Hold]) -> None:
        """These are the reserved pods now, and no other. One that is bound keeps what it had until the node shows it."""
        now = {each.pod_uid: each for each in holds}
        for uid, hold in self._reserved.items():
            bound = self._bound.get(uid)
            if uid not in now and bound is not None and bound.waiting is not None:
                bound.hold = hold
        self._reserved = now
        self._shown = {uid: parts for uid, parts in self._shown.items() if uid in now or uid in self._bound}

    def expect(self, pod: PodToSchedule) -> bool:
        """A pod is bound to the node. Returns whether that is news."""
        if pod.uid in self._bound:
            return False
        self._bound[pod.uid] = BoundPod((pod.request.namespace, pod.request.name), pod)
        return True

    def end(self, uid: str) -> bool:
        """The pod is no more, or will not be admitted. Returns whether it was known."""
        had = self._reserved.pop(uid, None), self._bound.pop(uid, None)
        self._shown.pop(uid, None)
        return any(had)

    def names_of(self, uids: Collection[str]) -> frozenset[PodNames]:
        """The names of those of these pods that are bound to the node."""
        return frozenset(self._bound[uid].names for uid in uids if uid in self._bound)

    def waiting(self) -> Iterator[PodToSchedule | Hold]:
        """The pods that the node has not shown wholly, as `added_to` found last; the Hold where no request is known."""
        for uid, hold in self._reserved.items():
            if not self._has_ended(hold):
                yield hold if hold.request is None else PodToSchedule(uid=uid, request=hold.request)
        yield from (
            each.waiting for uid, each in self._bound.items() if uid not in self._reserved and each.waiting is not None
        )

    def added_to(
        self, state: NodeState, entries: Sequence[CheckpointEntry], rules: AdmissionRules, without: Collection[str] = ()
    ) -> NodeState:
        """
        This state of the node, as its kubelet has it, with what is held. `entries`: what its checkpoints list. `without`:
        UIDs of pods that count as gone.
        """
        if not self._reserved and not any(each.waiting for each in self._bound.values()):
            return state
        shown = shown_by(state, entries)
        for uid, hold in self._reserved.items():
            self._note(hold, shown)
            if uid not in without:
                state = self._holding(state, hold)
        for uid, bound in self._bound.items():
            if uid in self._reserved or uid in without or bound.waiting is None:
                continue
            if bound.hold is None and parts_of(shown, uid, bound.names):
                bound.waiting = None
                continue
            if bound.hold is None:
                bound.hold = predicted(state, bound.waiting, rules)
            if bound.hold is not None:
                self._note(bound.hold, shown)
                state = self._holding(state, bound.hold)
                if self._has_ended(bound.hold):
                    bound.hold = bound.waiting = None
        return state

    def _note(self, hold: Hold, shown: Shown) -> None:
        """Notes the parts of a hold that the node shows: they have ended for good."""
        found = parts_of(shown, hold.pod_uid, (hold.namespace, hold.pod))
        if found:
            self._shown.setdefault(hold.pod_uid, set()).update(found)

    def _has_ended(self, hold: Hold) -> bool:
        ended = self._shown.get(hold.pod_uid, set())
        return all(part in ended for each in hold.allocations for part in parts(each))

    def _holding(self, state: NodeState, hold: Hold) -> NodeState:
        ended = self._shown.get(hold.pod_uid, set())
        for allocation in hold.allocations:
            left = not_given(without_parts(allocation, ended), state)
            if any(True for _ in parts(left)):
                state = state.holding(left)
        return state


def predicted(state: NodeState, pod: PodToSchedule, rules: AdmissionRules) -> Hold | None:
    """What a pod will get on a node in this state. None: its kubelet would refuse it, or that cannot be told."""
    try:
        demand = read_pod(pod.request, rules)
    except InvalidField:
        return None
    decision = decide(as_others(state, demand), demand)
    if not isinstance(decision, Admission):
        return None
    return Hold(
        pod_uid=pod.uid,
        namespace=demand.namespace,
        pod=demand.pod,
        allocations=tuple(
            msgspec.structs.replace(each, id=AllocationID(f"{pod.uid}/{container_of(each)}"), pod_uid=pod.uid)
            for each in decision.allocations
        ),
        request=pod.request,
    )


def shown_by(state: NodeState, entries: Sequence[CheckpointEntry]) -> Shown:
    """What a node shows of its pods: by its record, and by its kubelet's checkpoints or what stands for them."""
    shown: dict[str, set[Part]] = {}
    for held in state.allocations.values():
        owner = held.owner
        if owner is not None:
            uid = held.pod_uid or (f"{owner.namespace}/{owner.pod}" if owner.namespace else owner.pod)
            shown.setdefault(uid, set()).update(parts(held))
    for entry in entries:
        found = shown.setdefault(entry.pod_uid, set())
        found.update((entry.container, resource) for resource in entry.devices)
        found.update((entry.container, kind) for kind, some in ((CPUS, entry.cpus), (MEMORY, entry.memory)) if some)
    return shown


def parts_of(shown: Shown, uid: str, names: PodNames) -> set[Part]:
    """The parts that a node shows of this pod: under its UID, and where the node knows none, under its names."""
    return {*shown.get(uid, ()), *shown.get("/".join(names), ())}


def parts(allocation: Allocation) -> Iterator[Part]:
    """The parts of an allocation."""
    container = container_of(allocation)
    yield from ((container, resource) for resource, ids in allocation.devices.items() if ids)
    if allocation.cpus:
        yield container, CPUS
    if allocation.memory:
        yield container, MEMORY


def container_of(allocation: Allocation) -> ContainerName:
    """The container of an allocation; empty where it is not known."""
    return allocation.owner.container if allocation.owner is not None else ContainerName("")


def without_parts(allocation: Allocation, ended: Collection[Part]) -> Allocation:
    """An allocation without the parts that have ended."""
    container = container_of(allocation)
    devices = {name: ids for name, ids in allocation.devices.items() if (container, name) not in ended}
    return msgspec.structs.replace(
        allocation,
        devices=devices,
        virtual_functions=functions_within(allocation, devices),
        cpus="" if (container, CPUS) in ended else allocation.cpus,
        memory=() if (container, MEMORY) in ended else allocation.memory,
    )


def not_given(allocation: Allocation, state: NodeState) -> Allocation:
    """An allocation without devices, virtual functions and CPUs that somebody has in this state."""
    owned = state.ownership
    functions = {
        nic: tuple(each for each in addresses if each not in owned.functions_in_use)
        for nic, addresses in allocation.virtual_functions.items()
        if nic not in owned.held_whole
    }
    devices = {
        name: left
        for name, ids in allocation.devices.items()
        if (
            left := tuple(
                each
                for each in ids
                if (functions.get(each) if each in allocation.virtual_functions else not owned.is_held(each))
            )
        )
    }
    kept = msgspec.structs.replace(allocation, virtual_functions={nic: some for nic, some in functions.items() if some})
    return msgspec.structs.replace(
        allocation,
        devices=devices,
        virtual_functions=functions_within(kept, devices),
        cpus=format_cpuset(allocation.cpu_ids - owned.cpus_in_use),
    )


def functions_within(
    allocation: Allocation, devices: Mapping[ResourceName, tuple[DeviceID, ...]]
) -> dict[DeviceID, tuple[str, ...]]:
    """The virtual functions of an allocation that belong to one of these devices."""
    nics = {each for ids in devices.values() for each in ids}
    return {nic: addresses for nic, addresses in allocation.virtual_functions.items() if nic in nics}
