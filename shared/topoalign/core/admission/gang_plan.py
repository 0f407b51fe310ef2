"""
Plans nodes for all pods of a gang, which start together or not at all.

NVLink connects GPUs of different nodes only within a fabric. So each fabric is tried alone first, and all nodes together
only if no fabric has room.

Within a group, each node in turn takes as many of the remaining pods as it would admit one after the other: those with the
fewest possible nodes first, then those with the largest requests. For equal pods this finds a plan if there is one. For
different pods it may miss a plan that another order would find. Then the gang waits, and nothing is reserved.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.demand.share_annotations import read_gpu_rules
from topoalign.core.deviceshare.demand import needs_co_allocated
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import reservation_of, reserved_allocations


class GangMember(NamedTuple):
    """A pod of a gang that has no node yet."""

    uid: str
    request: PodRequest
    nodes: Collection[NodeName]
    """The only ones to which it may go; equal ones are one object."""


class GangPlacement(NamedTuple):
    """A node for some of the pods."""

    state: NodeState
    """As its kubelet will have it when the next pod comes."""
    rules: AdmissionRules


Plan = dict[NodeName, tuple[Reservation, ...]]
"""Node -> what to reserve there."""


def fabric_of(hardware: Topology) -> str:
    """The NVLink fabric of a node's GPUs, `cluster/clique`; empty: they are in none, or not all in one."""
    fabrics = {gpu.fabric for gpu in hardware.gpus}
    (one,) = fabrics if len(fabrics) == 1 else (None,)
    return f"{one.cluster}/{one.clique}" if one is not None else ""


def group_nodes_by_fabric(
    fabrics: Mapping[NodeName, str], first: NodeName | None = None
) -> Iterator[tuple[NodeName, ...]]:
    """The groups of nodes to try: each fabric, that of `first` before the others, then all nodes in their order."""
    names = sorted({*fabrics.values()} - {""})
    names.sort(key=lambda name: first is None or fabrics.get(first) != name)
    for name in names:
        yield tuple(node for node, its in fabrics.items() if its == name)
    yield tuple(fabrics)


def plan_gang(
    gang: str,
    members: Sequence[GangMember],
    nodes: Sequence[NodeName],
    candidate: Callable[[NodeName], GangPlacement | None],
    seconds: float,
    fixed: tuple[str, NodeName] | None = None,
) -> Generator[None, None, Plan | None]:
    """Plans what to reserve for all members, or None. `fixed`: UID and node of a member. Raises InvalidField."""
    if fixed is not None:
        nodes = (fixed[1], *(node for node in nodes if node != fixed[1]))

    def key(member: GangMember) -> tuple[object, ...]:
        return (
            fixed is not None and member.uid != fixed[0],  # the one that has its node,
            len(member.nodes),  # then those with the fewest possible nodes,
            *_member_size_key(member),  # then the largest
        )

    left = sorted(members, key=key)
    plan: Plan = {}
    for node in nodes:
        here = [member for member in left if node in member.nodes]
        at = candidate(node) if here else None
        placed = (yield from _fill_node(gang, here, at, seconds)) if at is not None else []
        if fixed is not None and node == fixed[1] and fixed[0] not in {each.pod_uid for each in placed}:
            return None
        if placed:
            plan[node] = tuple(placed)
            taken = {each.pod_uid for each in placed}
            left = [each for each in left if each.uid not in taken]
        if not left:
            break
    return plan if not left else None


def _fill_node(
    gang: str, members: Sequence[GangMember], at: GangPlacement, seconds: float
) -> Generator[None, None, list[Reservation]]:
    """What a node gives those of the members that it would admit one after the other."""
    state = at.state
    refused = set[bytes]()
    placed = list[Reservation]()
    for member in members:
        alike = pod_class_key(member.request)
        if alike in refused:
            continue
        demand = read_pod(member.request, at.rules)
        decision = decide_demand(as_others(state, demand), demand)
        yield
        if not isinstance(decision, Admission):
            refused.add(alike)
            continue
        reservation = reserved_for(member.uid, member.request, decision.allocations, seconds, gang)
        placed.append(msgspec.structs.replace(reservation, planned=True))
        for allocation in reserved_allocations(reservation):
            state = state.holding(allocation)
    return placed


def pod_class_key(pod: PodRequest) -> bytes:
    """Equal for pods that ask for the same, whatever their names."""
    return msgspec.json.encode(msgspec.structs.replace(pod, name=PodName("")), order="deterministic")


def _member_size_key(member: GangMember) -> tuple[int, int, bytes, str]:
    pods = [*member.request.init_containers, *member.request.containers]
    return (
        -sum(each.limits.get(GPU, 0) for each in pods),  # GPUs decide where there is room
        -sum(sum(amount for name, amount in each.limits.items() if "/" in name) for each in pods),  # then other devices
        pod_class_key(member.request),  # alike ones together
        member.uid,  # a total order
    )


def reserved_for(
    uid: str, pod: PodRequest, allocations: Sequence[Allocation], seconds: float, gang: str = ""
) -> Reservation:
    """What a decision gives a pod, as its reservation for so many seconds."""
    return reservation_of(
        uid,
        pod,
        allocations,
        seconds,
        gang,
        needs_co_allocated=needs_co_allocated(pod.annotations),
        # a node chooses others where its kubelet aligns a container elsewhere, and knows no annotations
        may_move=not _limits_slots(pod, allocations),
    )


def has_its_own(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """Whether a pod must have the GPUs that a decision gives it, or none."""
    # it limits its GPUs in slots, or has units that are given as they are reserved alone
    return _limits_slots(pod, allocations) or any(map(is_given_as_reserved, allocations))


def _limits_slots(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """Whether a pod limits its GPUs in slots."""
    return any(each.slots for each in allocations) and read_gpu_rules(pod.annotations).limits


def is_given_as_reserved(allocation: Allocation) -> bool:
    """Whether a container has shares of several GPUs in units, or whole ones and memory: a reservation joins them."""
    amounts = allocation.amounts.values()
    return any(each.memory if each.cores >= CORES else len(amounts) > 1 for each in amounts)
