"""
Tracks the assumed and the terminated pods of a node.

The facts of the node do not have the devices of assumed pods yet, and still have those of terminated pods.

The next pod is filtered before the kubelet has admitted a bound pod. So a bound pod holds its devices, CPUs and memory
from the start of its bind. Three kinds of pods are assumed:

- Reserved pods, with the devices of their reservation.
- Bound pods without a known reservation, for example those of another scheduler. `decide_demand` predicts their devices
  in the order of binding, each on the node with the pods before it.
- Pods whose bind has begun in this registry and that are not reserved yet. Their devices are predicted in the same way,
  after those of the bound pods.

An assumption ends separately for each device, as soon as the node reports it (`core.state.node_reservations`). It does
not return after the container has ended. A device that the node has allocated to any container is not held twice.

A terminated pod holds nothing, although the facts of the node can have its devices for some seconds.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
from topoalign.core.state.terminated_pods import has_anything_of, without_pods
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

Requested = Callable[[Reservation], PodRequest | None]
"""Returns the request of a reserved pod; None: unknown."""


@dataclass(slots=True)
class BoundPod:
    """A pod that is bound to the node, or will be soon."""

    names: PodNames
    """Kept after the node has reported the pod, because an allocation without a pod UID is matched by names."""
    waiting: PodToSchedule | None
    """The pod, until the node has reported it."""
    hold: Reservation | None = None
    """Its predicted devices. None: not predicted yet, or its kubelet would refuse it."""


class TerminatedPod(NamedTuple):
    """A pod that the API server reports as terminated or deleted."""

    names: frozenset[PodNames]
    """Its namespace and name, if known."""
    until: float
    """Monotonic second until which its devices count as free, even if the facts of the node still have them."""


class NodePods:
    """The assumed, terminating and terminated pods of one node."""

    def __init__(self) -> None:
        self.terminating: set[str] = set()
        """UIDs of the pods that are being deleted."""
        self.terminated: dict[str, TerminatedPod] = {}
        """UID of a pod -> the pod."""
        self._reserved: dict[str, Reservation] = {}
        """Reservations without their remaining time, so that they can be compared. `ClusterReservations` ends them."""
        self._bound: dict[str, BoundPod] = {}
        """In the order of binding."""
        self._assumed: dict[str, BoundPod] = {}
        """In the order in which their binds began."""
        self._reported: dict[str, set[ReservedPart]] = {}
        """UID of a pod -> the parts of its reservation or prediction that the node has reported."""

    def reserve(self, reservations: Sequence[Reservation]) -> bool:
        """Replaces the reserved pods. Returns whether any changed. A bound pod keeps its devices until reported."""
        now = {each.pod_uid: msgspec.structs.replace(each, seconds_left=0.0) for each in reservations}
        if list(now.values()) == list(self._reserved.values()):
            return False
        for uid, hold in self._reserved.items():
            bound = self._bound.get(uid)
            if uid not in now and bound is not None and bound.waiting is not None:
                bound.hold = hold
        self._reserved = now
        self._reported = {uid: parts for uid, parts in self._reported.items() if uid in now or uid in self._bound}
        return True

    def expect(self, pod: PodToSchedule) -> bool:
        """Adds a pod that is bound to the node. Returns whether it is new and has no reservation."""
        if pod.uid in self._bound:
            return False
        self._bound[pod.uid] = BoundPod((pod.request.namespace, pod.request.name), pod)
        return pod.uid not in self._reserved

    def assume(self, pod: PodToSchedule) -> bool:
        """Adds a pod whose bind has begun. Returns whether it is neither reserved nor bound."""
        self._assumed[pod.uid] = BoundPod((pod.request.namespace, pod.request.name), pod)
        return pod.uid not in self._reserved and pod.uid not in self._bound

    def unassume(self, uid: str) -> bool:
        """Removes a pod whose bind has ended. Returns whether it was assumed and is neither reserved nor bound."""
        was_assumed = self._assumed.pop(uid, None) is not None
        return was_assumed and uid not in self._reserved and uid not in self._bound

    def end(self, uid: str, until: float) -> bool:
        """Removes a pod. Returns whether it was assumed; then it counts as terminated `until` this monotonic second."""
        self.terminating.discard(uid)
        names = self.names_of({uid})
        had = self._reserved.pop(uid, None), self._bound.pop(uid, None), self._assumed.pop(uid, None)
        self._reported.pop(uid, None)
        if not any(had):
            return False
        self.terminated[uid] = TerminatedPod(names, until)
        return True

    def expire(self, now: float) -> bool:
        """Removes terminated pods whose time is over. Returns whether there were any."""
        kept = {uid: each for uid, each in self.terminated.items() if each.until > now}
        has_changed = len(kept) < len(self.terminated)
        self.terminated = kept
        return has_changed

    def terminated_in(self, facts: NodeState) -> tuple[str, ...]:
        """UIDs of the terminated pods that the node's facts still have."""
        return tuple(uid for uid, each in self.terminated.items() if has_anything_of(facts, uid, each.names))

    def without_terminated(self, facts: NodeState) -> NodeState:
        """The facts without terminated pods. If a bound pod has the same name, they are matched only by UID."""
        if not self.terminated:
            return facts
        names = frozenset[PodNames]().union(*(each.names for each in self.terminated.values()))
        return without_pods(facts, self.terminated.keys(), names - self.names_of(self.uids))

    @property
    def uids(self) -> frozenset[str]:
        """UIDs of all pods that are reserved on the node or bound to it."""
        return frozenset((*self._reserved, *self._bound))

    @property
    def assumed(self) -> frozenset[str]:
        """UIDs of the pods whose bind to the node has begun and that are neither reserved nor bound."""
        return frozenset(self._assumed.keys() - self.uids)

    @property
    def is_empty(self) -> bool:
        """Whether the node has no assumed pods."""
        return not (self._reserved or self._bound or self._assumed)

    @property
    def pending(self) -> frozenset[str]:
        """UIDs of the pods that are being bound or reserved, or that are bound and not yet reported by the node."""
        bound = (uid for uid, each in self._bound.items() if each.waiting is not None)
        return frozenset((*self._reserved, *self._assumed, *bound))

    def has_others(self, uid: str) -> bool:
        """Whether another pod is reserved, or is bound and not yet reported by the node."""
        return bool(self.pending - self.assumed - {uid})

    def names_of(self, uids: Collection[str]) -> frozenset[PodNames]:
        """The names of these pods, if they are bound to the node."""
        return frozenset(self._bound[uid].names for uid in uids if uid in self._bound)

    @property
    def reserved(self) -> Collection[str]:
        """UIDs of the reserved pods."""
        return self._reserved.keys()

    @property
    def planned(self) -> list[Reservation]:
        """Reservations of pods that are planned with their gangs and are not bound."""
        return [each for uid, each in self._reserved.items() if self._is_planned(uid)]

    def waiting(self, state: NodeState, requested: Requested) -> list[tuple[PodToSchedule, bool]]:
        """
        The pods that the kubelet can admit next, in any order, each with whether its admission is predicted. The node
        has reported nothing of these pods. Call this after `settle`. `state`: the node without assumed pods.
        """
        # Two kinds of pods are not included, because they hold their reservation in every order: reserved pods with an
        # unknown request, and pods that are planned with their gang, which the kubelet has not received yet.
        found: list[tuple[PodToSchedule, Reservation | None]] = []
        for uid, hold in self._reserved.items():
            if self._is_planned(uid):
                continue
            bound = self._bound.get(uid)
            request = bound.waiting.request if bound is not None and bound.waiting is not None else requested(hold)
            if request is not None:
                found.append((PodToSchedule(uid=uid, request=request), hold))
        found += [
            (unreserved(each.waiting), each.hold)
            for uid, each in self._bound.items()
            if each.waiting is not None and uid not in self._reserved
        ]
        unknown = devices_of_unknown_containers(state)
        return [(pod, hold is not None) for pod, hold in found if hold is None or self._is_untouched(hold, unknown)]

    def _is_planned(self, uid: str) -> bool:
        """Whether the pod is reserved with its gang, and its bind has not begun."""
        return uid in self._reserved and self._reserved[uid].planned and uid not in self._bound

    def settle(self, facts: NodeState, state: NodeState, rules: AdmissionRules) -> None:
        """Updates the pods from these facts. `state`: the node as its kubelet sees it, without assumed pods."""
        held = [*self._reserved.values(), *(each.hold for each in self._bound.values() if each.hold is not None)]
        for part in reported_parts(facts, held):
            self._reported.setdefault(part.pod_uid, set()).add(part)
        waiting = [
            each for each in self._bound.items() if each[1].waiting is not None and each[0] not in self._reserved
        ]
        if waiting:
            self._settle_bound(waiting, facts, state, rules)
        for uid, assumed in self._assumed.items():
            assert assumed.waiting is not None, "an assumed pod waits for its bind"
            if assumed.hold is None and uid in self.assumed:
                assumed.hold = predict(self.added_to(state, rules, until=uid), assumed.waiting, rules)

    def _settle_bound(
        self, waiting: Sequence[tuple[str, BoundPod]], facts: NodeState, state: NodeState, rules: AdmissionRules
    ) -> None:
        holdings = ReportedHoldings(facts, co_allocated=False)
        for uid, bound in waiting:
            if bound.hold is not None and not self._rest_of(bound.hold).containers:
                bound.hold = bound.waiting = None
            elif bound.hold is None and holdings.knows(uid, bound.names):
                bound.waiting = None
            elif bound.hold is None and bound.waiting is not None:
                bound.hold = predict(self.added_to(state, rules, until=uid), bound.waiting, rules)

    def added_to(
        self, state: NodeState, rules: AdmissionRules, without: Collection[str] = (), until: str = ""
    ) -> NodeState:
        """
        The node's state with its assumed pods. Call after `settle`. A bound pod that did not fit there may fit here.
        `without`: UIDs of pods that count as deleted. `until`: UID of the first bound or assumed pod not to count.
        """
        for uid, hold in self._reserved.items():
            if uid not in without:
                state = holding_reserved(state, self._rest_of(hold))
        assumed = (each for each in self._assumed.items() if each[0] not in self._bound)
        for uid, pod in (*self._bound.items(), *assumed):
            if uid == until:
                break
            if pod.waiting is not None and uid not in self._reserved and uid not in without:
                expected = pod.hold or predict(state, pod.waiting, rules)
                state = state if expected is None else holding_reserved(state, self._rest_of(expected))
        return state

    def _rest_of(self, hold: Reservation) -> Reservation:
        """The part of a reservation or prediction that has not ended."""
        ended = frozenset(self._reported.get(hold.pod_uid, ()))
        rest = (rest_of(each, hold.pod_uid, ended) for each in hold.containers)
        return msgspec.structs.replace(hold, containers=tuple(filter(is_something, rest)))

    def _is_untouched(self, hold: Reservation, unknown: Collection[str]) -> bool:
        """Whether the node has reported nothing of a pod. `unknown`: devices of containers with an unknown owner."""
        if self._reported.get(hold.pod_uid):
            return False
        # If containers with an unknown owner have all reserved devices of a resource, it may be one of them.
        return not any(
            all(part in unknown for device in ids for part in held.virtual_functions.get(device, (device,)))
            for held in reserved_allocations(hold)
            for ids in held.from_kubelet.values()
            if ids
        )


def devices_of_unknown_containers(state: NodeState) -> frozenset[str]:
    """The devices of allocations without a known owner. A shared NIC is represented by its virtual functions."""
    unknown = (each for each in state.allocations.values() if each.owner is None)
    return frozenset[str]().union(*map(ids_held, unknown))


def unreserved(pod: PodToSchedule) -> PodToSchedule:
    """The pod as its kubelet sees it without a reservation: without annotations."""
    return PodToSchedule(uid=pod.uid, request=msgspec.structs.replace(pod.request, annotations={}))


def predict(state: NodeState, pod: PodToSchedule, rules: AdmissionRules) -> Reservation | None:
    """Predicts the devices of a pod on a node in this state. None: its kubelet would refuse it, or it is invalid."""
    try:
        demand = read_pod(unreserved(pod).request, rules)
    except InvalidField:
        return None
    decision = decide_demand(as_others(state, demand), demand)
    if not isinstance(decision, Admission):
        return None
    equal = [msgspec.structs.replace(each, slots={}) for each in decision.allocations]  # no amounts are reserved for it
    return reservation_of(pod.uid, pod.request, equal, 0.0)


def holds_something(request: PodRequest) -> bool:
    """Whether a kubelet allocates devices, CPUs or memory exclusively to the pod."""
    if request.gets_exclusive_resources:
        return True
    return any(
        amount > 0 and not is_native(resource)
        for container in (*request.init_containers, *request.containers)
        for amounts in (container.limits, container.requests)
        for resource, amount in amounts.items()
    )
