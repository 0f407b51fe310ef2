"""
Determines whether waiting can help a pod that a node refuses, and which changes would help.

The decision is repeated for the node without any allocation, with the current health of its devices. The results are:

- The node admits the pod (`in-use`). The pod fits after enough pods have ended. The finding is kept.
- The node refuses the pod, but would admit it if all devices were healthy and none was cordoned (`unhealthy`). The
  finding counts the devices that are unhealthy or cordoned.
- The node refuses the pod even then (`never`). The finding is that of the empty machine.

The remedy lists single changes of the pod, and one change of the kubelet's rules, that each make the pod fit: now or,
if waiting does not help, on the empty machine. A remedy without waiting, such as to correct a name, is kept.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.shortages import format_amount
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.hints.preconditions import (
    DistancesUnknown,
    HugepagesUnevenlyKnown,
    MemoryUnknown,
    PodHasAllocations,
    TopologyUnknown,
)
from topoalign.core.model.byte_sizes import GIB
from topoalign.core.model.decisions import Admission, Decision, PreferenceFailed, Refusal, Resolvability
from topoalign.core.model.errors import InvalidField, TooMuchWork, clean, quoted
from topoalign.core.model.events import HEALTHY
from topoalign.core.model.ids import CPU, MEMORY, ContainerName, ResourceName, is_native
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy, Scope, override_rules
from topoalign.core.profile import profile_of
from topoalign.core.state.fold import NodeState

UNDECIDED = frozenset(
    each.code
    for each in (
        TopologyUnknown,
        MemoryUnknown,
        DistancesUnknown,
        HugepagesUnevenlyKnown,
        PodHasAllocations,
        PreferenceFailed,
        TooMuchWork,
    )
)
"""Codes of refusals for reasons other than the machine's resources."""
WAIT = "wait until pods on this node end"
NEVER = "the pod never fits on this node"
HEAL = "the end of other pods does not help: repair, heal or uncordon the devices (`topoalign topo --wide` has the reasons)"
ELSEWHERE = (
    "no single change was found; choose another node, or ask for less of several resources or with fewer annotations"
)


def explain_decision(state: NodeState, demand: PodDemand) -> Decision:
    """The decision with `explain`. A refusal includes its resolvability and the changes that help."""
    decision = decide_demand(state, demand, explain=True)
    return decision if isinstance(decision, Admission) else with_resolvability(state, demand, decision)


def with_resolvability(state: NodeState, demand: PodDemand, refusal: Refusal) -> Refusal:
    """The node's refusal in this state, with its resolvability added, and the finding and remedy updated."""
    if refusal.code in UNDECIDED:
        return msgspec.structs.replace(refusal, resolvability=Resolvability.NOT_KNOWN)
    empty = without_any_allocation(state)
    resolvability, remaining = _resolvability_on(empty, demand)
    finding = refusal.finding
    remedy = refusal.remedy
    where = ""
    if remaining is not None and remaining.container not in (None, refusal.container):
        where = f"container {quoted([str(remaining.container)])}: "
    if remaining is None:
        remedy = "; or ".join((WAIT, *_sufficient_changes(state, demand, refusal)))
    elif resolvability is Resolvability.UNHEALTHY:
        finding = f"{finding}; {_describe_impaired(state, demand)}"
        remedy = "; or ".join((HEAL, *_sufficient_changes(empty, demand, remaining)))
    elif resolvability is Resolvability.NEVER and "wait" not in remaining.remedy:
        finding = where + remaining.finding
        remedy = remaining.remedy
    elif resolvability is Resolvability.NEVER:
        finding = f"even with no other pod on the node: {where}{remaining.finding}"
        remedy = f"{NEVER}: {'; or '.join(_sufficient_changes(empty, demand, remaining)) or ELSEWHERE}"
    return msgspec.structs.replace(refusal, resolvability=resolvability, finding=finding, remedy=remedy)


def _resolvability_on(empty: NodeState, demand: PodDemand) -> tuple[Resolvability, Refusal | None]:
    """The resolvability, and the refusal that remains on the `empty` node. None: the empty node admits the pod."""
    decision = decide_demand(empty, demand, explain=True)
    if isinstance(decision, Admission):
        return Resolvability.IN_USE, None
    healthy = with_healthy_devices(empty)
    if decision.code in UNDECIDED or healthy is empty:
        return Resolvability.NOT_KNOWN if decision.code in UNDECIDED else Resolvability.NEVER, decision
    on_healthy = decide_demand(healthy, demand, explain=True)
    if isinstance(on_healthy, Admission):
        return Resolvability.UNHEALTHY, decision
    return Resolvability.NOT_KNOWN if on_healthy.code in UNDECIDED else Resolvability.NEVER, on_healthy


def without_any_allocation(state: NodeState) -> NodeState:
    """The node's state without any allocation."""
    return msgspec.structs.replace(state, allocations={}, memory={})


def with_healthy_devices(state: NodeState) -> NodeState:
    """The node with all devices healthy and not cordoned. The same object if they already are."""
    if state.health is None:
        return state
    hardware = state.hardware
    known = {
        *state.reported_health,
        *(hardware.parent_of(device) for listed in hardware.devices.values() for device in listed.by_base),
    }
    if all(device in state.reported_health and state.reported_health[device].usable for device in known):
        return state
    health = msgspec.structs.replace(state.health, devices=dict.fromkeys(sorted(known), HEALTHY))
    return msgspec.structs.replace(state, health=health)


def _describe_impaired(state: NodeState, demand: PodDemand) -> str:
    """How many devices of the requested resources cannot be allocated, for people."""
    listed = state.hardware.devices
    counts = {
        name: (sum(not state.health_of(base).usable for base in listed[name].by_base), len(listed[name].by_base))
        for name in (sorted(demand.device_names & listed.keys()) or sorted(listed))
    }
    texts = [f"{bad} of {every} devices of {clean(name)}" for name, (bad, every) in counts.items() if bad]
    return f"{' and '.join(texts) or 'devices'} are unhealthy or cordoned"


def _sufficient_changes(state: NodeState, demand: PodDemand, refusal: Refusal) -> Iterator[str]:
    """Each single change with which the refused pod is admitted in this state, for people."""
    rules = demand.rules

    def admits(pod: PodRequest, rules: AdmissionRules = rules) -> bool:
        try:
            return isinstance(decide_demand(state, read_pod(pod, rules)), Admission)
        except InvalidField:
            return False

    yield from (each.text for each in smaller_requests(demand.request, admits, refusal.container))
    for name, value in OTHER_RULES:
        if getattr(rules, name) != value and admits(demand.request, override_rules(rules, {name: value})):
            is_kubelet = profile_of(rules.mode).starts_kubelet
            yield f"set {SETTINGS[name]}: {value}" if is_kubelet else f"use {name} {value}"
            return


# Finds single changes of a pod, or of its kubelet's rules, that make it fit. The decision is repeated with each change.
#
# - **less of one resource**: the most that one container can request of it: devices, whole CPUs, GiB of memory;
# - **another rule**: alignment of the pod instead of its containers, or the reverse; otherwise, the strictest other
#   policy that helps.
#
#     8 GPUs, policy single-numa-node, two NUMA nodes with four GPUs each
#     ask for 4 instead of 8 nvidia.com/gpu; set topologyManagerPolicy: restricted


UNITS = {CPU: 1000, MEMORY: GIB}
"""The steps in which a request is reduced. Devices are reduced one by one, hugepages not at all."""
OTHER_RULES: tuple[tuple[str, str], ...] = (
    *(("scope", scope.value) for scope in Scope),
    *(("policy", policy.value) for policy in [*reversed(Policy)][1:]),
)
"""Rules to try, with their values: the scopes, then the policies except the strictest, stricter ones first."""
SETTINGS = {"policy": "topologyManagerPolicy", "scope": "topologyManagerScope"}
"""Rule -> the field of the kubelet's configuration that sets it."""


class SmallerRequest(NamedTuple):
    """A pod that requests less of one resource."""

    resource: ResourceName
    asked: int
    amount: int
    """The amount to request instead. CPUs are in millicores."""
    pod: PodRequest
    container: ContainerName | None = None
    """The container that requests less, if others also request the resource."""

    @property
    def text(self) -> str:
        """For people: `ask for 2 instead of 4 nvidia.com/gpu in container 'train'`."""
        amount = format_amount(self.resource, self.amount)[0]
        (asked, unit) = format_amount(self.resource, self.asked)
        where = f" in container {quoted([self.container])}" if self.container is not None else ""
        return f"ask for {amount} instead of {asked} {unit}{where}"


def smaller_requests(
    pod: PodRequest, admits: Callable[[PodRequest], bool], container: ContainerName | None = None
) -> Iterator[SmallerRequest]:
    """
    For each resource, the most that one container can request so that the pod is admitted. `container`: the only one to
    change. None: the only one that requests the resource. Resources for which no smaller amount suffices are omitted.
    """
    asking: dict[ResourceName, list[ContainerRequest]] = {}
    for each in (*pod.init_containers, *pod.containers):
        for name, amount in each.requests.items():
            if amount and (name in UNITS or not is_native(name)):
                asking.setdefault(name, []).append(each)
    for name, every in asking.items():
        containers = [each for each in every if container in (None, each.name)]
        if len(containers) == 1:
            found = _smaller_request(pod, containers[0], name, admits)
            if found is not None:
                yield found._replace(container=containers[0].name if len(every) > 1 else None)


def _smaller_request(
    pod: PodRequest, container: ContainerRequest, resource: ResourceName, admits: Callable[[PodRequest], bool]
) -> SmallerRequest | None:
    unit = UNITS.get(resource, 1)
    asked = container.requests[resource]

    def reduced(units: int) -> PodRequest:
        return asking_for(pod, container.name, resource, units * unit)

    found = _most_that(lambda units: admits(reduced(units)), (asked - 1) // unit)
    return SmallerRequest(resource, asked, found * unit, reduced(found)) if found else None


def _most_that(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` for which `holds` is true, if it is for all smaller ones. 0: for none."""
    # a smaller set of devices can be harder to align, so small numbers are tried one by one
    if most <= 16:
        return next((number for number in range(most, 0, -1) if holds(number)), 0)
    too_many = 1
    while too_many <= most and holds(too_many):  # the result is small even for a request of billions
        too_many *= 2
    return bisect_left(range(1, min(too_many, most + 1)), True, key=lambda number: not holds(number))


def asking_for(pod: PodRequest, name: ContainerName, resource: ResourceName, amount: int) -> PodRequest:
    """The pod with this container requesting another amount of a resource."""

    def changed(container: ContainerRequest) -> ContainerRequest:
        if container.name != name:
            return container
        equal = container.limits.get(resource) == container.requests[resource]
        limits = {**container.limits, resource: amount} if equal else container.limits
        return msgspec.structs.replace(container, requests={**container.requests, resource: amount}, limits=limits)

    return msgspec.structs.replace(
        pod,
        init_containers=tuple(map(changed, pod.init_containers)),
        containers=tuple(map(changed, pod.containers)),
    )
