"""
Keeps the assumed pods of a node: pods whose devices the node does not report yet.

A bound pod has its devices, CPUs and memory from the moment of the bind, because the next pod is filtered before the kubelet
has admitted it. Three kinds of pods are kept:

- reserved pods: their devices were chosen, and `AssumedPod` has them;
- bound pods without a known reservation, such as another scheduler's: `decide_demand` predicts each,
in the order of binding,
on the
  node with the ones before;
- pods whose bind has begun here and which are not reserved yet: they are predicted in the same way, after the bound ones.

A hold ends device by device, by the rule of `core.state.node_reservations`: a device that the node has reported once
stays ended after the container returns it, and a device that the node has allocated to any container is not held a
second time.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField
from topoalign.core.model.ids import is_native
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import holding_reserved, reservation_of, reserved_allocations
from topoalign.core.state.reserved_parts import (
    PodNames,
    ReportedHoldings,
    ReservedPart,
    ids_held,
    is_something,
    reported_parts,
    rest_of,
)
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

Requested = Callable[[Reservation], PodRequest | None]
"""Returns the request of a reserved pod, if it is known."""


def unknown_request(reserved: Reservation) -> PodRequest | None:
    """A `Requested` that knows no requests."""
    return None


class AssumedPod(msgspec.Struct, frozen=True, kw_only=True):
    """The assumed devices of a pod that the node does not report yet."""

    reserved: Reservation
    """The devices that it will get. Its expiry does not count: the owner of the hold ends it."""


@dataclass(slots=True)
class BoundPod:
    """A pod that is bound to the node, or will be soon."""

    names: PodNames
    """Kept after the pod was reported: a record without the UID identifies it by these."""
    waiting: PodToSchedule | None
    """The pod, until the node has reported it."""
    hold: AssumedPod | None = None
    """Its predicted devices. None: not predicted yet, or its kubelet would refuse it."""


class AssumedPods:
    """The assumed pods of one node."""

    def __init__(self) -> None:
        self._reserved: dict[str, AssumedPod] = {}
        self._bound: dict[str, BoundPod] = {}
        """In the order of binding."""
        self._assumed: dict[str, BoundPod] = {}
        """In the order in which their binds began."""
        self._shown: dict[str, set[ReservedPart]] = {}
        """UID -> the ended parts of its reservation."""

    def reserve(self, holds: Sequence[AssumedPod]) -> bool:
        """
        Replaces the reserved pods. A bound one keeps its devices until the node reports it. Returns whether anything
        changed.
        """
        now = {each.reserved.pod_uid: without_time(each) for each in holds}
        if list(now.values()) == list(self._reserved.values()):
            return False
        for uid, hold in self._reserved.items():
            bound = self._bound.get(uid)
            if uid not in now and bound is not None and bound.waiting is not None:
                bound.hold = hold
        self._reserved = now
        self._shown = {uid: parts for uid, parts in self._shown.items() if uid in now or uid in self._bound}
        return True

    def expect(self, pod: PodToSchedule) -> bool:
        """Adds a pod that is bound to the node. Returns whether it holds more than its reservation."""
        if pod.uid in self._bound:
            return False
        self._bound[pod.uid] = BoundPod((pod.request.namespace, pod.request.name), pod)
        return pod.uid not in self._reserved

    def assume(self, pod: PodToSchedule) -> bool:
        """Adds a pod whose bind has begun. Returns whether it holds more than before."""
        self._assumed[pod.uid] = BoundPod((pod.request.namespace, pod.request.name), pod)
        return pod.uid not in self._reserved and pod.uid not in self._bound

    def unassume(self, uid: str) -> bool:
        """Removes a pod whose bind has ended. Returns whether it holds less now: it is neither reserved nor bound."""
        was_assumed = self._assumed.pop(uid, None) is not None
        return was_assumed and uid not in self._reserved and uid not in self._bound

    def end(self, uid: str) -> bool:
        """Removes a pod that is deleted or will not be admitted. Returns whether it was known."""
        had = self._reserved.pop(uid, None), self._bound.pop(uid, None), self._assumed.pop(uid, None)
        self._shown.pop(uid, None)
        return any(had)

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of all pods that are reserved or bound here."""
        return frozenset((*self._reserved, *self._bound))

    @property
    def assumed(self) -> frozenset[str]:
        """UIDs of the pods that are about to be bound here, and neither reserved nor bound."""
        return frozenset(self._assumed.keys() - self.uids)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is known of any pod here."""
        return not (self._reserved or self._bound or self._assumed)

    @property
    def pending(self) -> frozenset[str]:
        """UIDs of the pods that are assumed or reserved here, or bound and not reported yet."""
        bound = (uid for uid, each in self._bound.items() if each.waiting is not None)
        return frozenset((*self._reserved, *self._assumed, *bound))

    def has_others(self, uid: str) -> bool:
        """Whether any other pod is reserved here, or bound and not reported yet."""
        return bool(self.pending - self.assumed - {uid})

    def names_of(self, uids: Collection[str]) -> frozenset[PodNames]:
        """The names of those of these pods that are bound to the node."""
        return frozenset(self._bound[uid].names for uid in uids if uid in self._bound)

    @property
    def reserved(self) -> Collection[str]:
        """UIDs of the reserved pods."""
        return self._reserved.keys()

    @property
    def planned(self) -> list[Reservation]:
        """Reservations of pods that are planned with their gangs and not bound."""
        return [hold.reserved for uid, hold in self._reserved.items() if self._is_planned(uid)]

    def waiting(self, state: NodeState, requested: Requested = unknown_request) -> list[tuple[PodToSchedule, bool]]:
        """
        Returns the pods that the kubelet may admit in any order, after the last `settle`, each with whether it is
        predicted to be admitted. These are the pods of which the node, in this state without holds, has reported
        nothing, and whose devices of a resource are not all with a container that is not known yet. If another pod has
        got a pod's devices or CPUs, the kubelet will allocate others. A reserved pod with an unknown request keeps its
        position in every order. So does one that is planned with its gang, because its kubelet has not received it yet.
        """
        found: list[tuple[PodToSchedule, AssumedPod | None]] = [
            (PodToSchedule(uid=uid, request=request), hold)
            for uid, hold in self._reserved.items()
            if not self._is_planned(uid) and (request := requested(hold.reserved) or self._request(uid)) is not None
        ]
        found += [
            (unreserved(each.waiting), each.hold)
            for uid, each in self._bound.items()
            if each.waiting is not None and uid not in self._reserved
        ]
        unknown = given_to_unknown(state)
        return [(pod, hold is not None) for pod, hold in found if hold is None or self._is_untouched(hold, unknown)]

    def _is_planned(self, uid: str) -> bool:
        """Whether the pod is reserved with its gang, and its bind has not begun."""
        return uid in self._reserved and self._reserved[uid].reserved.planned and uid not in self._bound

    def _request(self, uid: str) -> PodRequest | None:
        """Returns the request of a bound pod, until the node has reported it."""
        bound = self._bound.get(uid)
        return bound.waiting.request if bound is not None and bound.waiting is not None else None

    def settle(self, facts: NodeState, state: NodeState, rules: AdmissionRules) -> None:
        """
        Updates the pods by these facts of the node. Then predicts the devices of bound pods in `state`: the node as its
        kubelet has it, without holds.
        """
        held = [*self._reserved.values(), *(each.hold for each in self._bound.values() if each.hold is not None)]
        for part in reported_parts(facts, [each.reserved for each in held]):
            self._shown.setdefault(part.pod_uid, set()).add(part)
        given = ReportedHoldings(facts, co_allocated=False)
        for uid, bound in self._bound.items():
            if bound.waiting is None or uid in self._reserved:
                continue
            if bound.hold is not None and not self._left(bound.hold).containers:
                bound.hold = bound.waiting = None
            elif bound.hold is None and given.knows(uid, bound.names):
                bound.waiting = None
            elif bound.hold is None:
                before = self.added_to(state, rules, until=uid)
                bound.hold = predicted(before, bound.waiting, rules)
        for uid, assumed in self._assumed.items():
            assert assumed.waiting is not None, "an assumed pod waits for its bind"
            if assumed.hold is None and uid in self.assumed:
                assumed.hold = predicted(self.added_to(state, rules, until=uid), assumed.waiting, rules)

    def added_to(
        self, state: NodeState, rules: AdmissionRules, without: Collection[str] = (), until: str = ""
    ) -> NodeState:
        """
        Returns a state of the node with the assumed pods, after the last `settle`. A bound pod that did not fit then may fit
        here. `without`: UIDs of pods that count as gone; `until`: UID of the first bound or assumed pod that does not count.
        """
        for uid, hold in self._reserved.items():
            if uid not in without:
                state = holding_reserved(state, self._left(hold))
        assumed = (each for each in self._assumed.items() if each[0] not in self._bound)
        for uid, pod in (*self._bound.items(), *assumed):
            if uid == until:
                break
            if pod.waiting is not None and uid not in self._reserved and uid not in without:
                expected = pod.hold or predicted(state, pod.waiting, rules)
                state = state if expected is None else holding_reserved(state, self._left(expected))
        return state

    def _left(self, hold: AssumedPod) -> Reservation:
        """Returns the part of a hold that has not ended."""
        ended = frozenset(self._shown.get(hold.reserved.pod_uid, ()))
        rest = (rest_of(each, hold.reserved.pod_uid, ended) for each in hold.reserved.containers)
        return msgspec.structs.replace(hold.reserved, containers=tuple(filter(is_something, rest)))

    def _is_untouched(self, hold: AssumedPod, unknown: Collection[str]) -> bool:
        """
        Whether the node has reported nothing of a pod. `unknown`: devices of containers that are not known yet. If they
        include all devices of a resource reserved for a container, they count as that container's.
        """
        if self._shown.get(hold.reserved.pod_uid):
            return False
        return not any(
            all(part in unknown for device in ids for part in held.virtual_functions.get(device, (device,)))
            for held in reserved_allocations(hold.reserved)
            for ids in held.from_kubelet.values()
            if ids
        )


def given_to_unknown(state: NodeState) -> frozenset[str]:
    """Returns the devices of containers that are not known yet; for a shared NIC, its virtual functions."""
    unknown = (each for each in state.allocations.values() if each.owner is None)
    return frozenset[str]().union(*map(ids_held, unknown))


def without_time(hold: AssumedPod) -> AssumedPod:
    """Returns the hold without its expiry, so that equal holds compare equal."""
    return msgspec.structs.replace(hold, reserved=msgspec.structs.replace(hold.reserved, seconds_left=0.0))


def unreserved(pod: PodToSchedule) -> PodToSchedule:
    """Returns a pod without a reservation: its limits decide, and its annotations are ignored."""
    return PodToSchedule(uid=pod.uid, request=msgspec.structs.replace(pod.request, annotations={}))


def predicted(state: NodeState, pod: PodToSchedule, rules: AdmissionRules) -> AssumedPod | None:
    """
    Predicts the devices of a pod on a node in this state. None: its kubelet would refuse it, or it cannot be predicted.
    """
    try:
        demand = read_pod(unreserved(pod).request, rules)
    except InvalidField:
        return None
    decision = decide_demand(as_others(state, demand), demand)
    if not isinstance(decision, Admission):
        return None
    equal = [msgspec.structs.replace(each, slots={}) for each in decision.allocations]  # no amounts are reserved for it
    return AssumedPod(reserved=reservation_of(pod.uid, pod.request, equal, 0.0))


def holds_something(request: PodRequest) -> bool:
    """Whether a kubelet allocates something to the pod exclusively."""
    if request.gets_exclusive_resources:
        return True
    return any(
        amount > 0 and not is_native(resource)
        for container in (*request.init_containers, *request.containers)
        for amounts in (container.limits, container.requests)
        for resource, amount in amounts.items()
    )
