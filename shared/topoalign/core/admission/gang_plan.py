"""
Plans nodes for all pods of a gang, which start together or not at all.

NVLink connects GPUs of different nodes only within a fabric. So each fabric is tried alone first. All nodes together
are tried only if no fabric has room.

Within a group, each node in turn takes as many of the remaining pods as it would admit in sequence. Pods with the
fewest possible nodes come first, then those with the largest requests. For equal pods, this finds a plan if there is
one. For different pods, it can miss a plan that another order would find. Then the gang waits, and nothing is reserved.
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
    """The nodes on which it can run. Members with equal nodes share one object."""


class GangPlacement(NamedTuple):
    """A candidate node for some of the pods."""

    state: NodeState
    """The state that its kubelet will have when the next pod arrives."""
    rules: AdmissionRules


Plan = dict[NodeName, tuple[Reservation, ...]]
"""Node -> the reservations to make there."""


def fabric_of(hardware: Topology) -> str:
    """The NVLink fabric of a node's GPUs, `cluster/clique`. Empty: the GPUs are in none, or not all in the same one."""
    fabrics = {gpu.fabric for gpu in hardware.gpus}
    (one,) = fabrics if len(fabrics) == 1 else (None,)
    return f"{one.cluster}/{one.clique}" if one is not None else ""


def group_nodes_by_fabric(
    fabrics: Mapping[NodeName, str], first: NodeName | None = None
) -> Iterator[tuple[NodeName, ...]]:
    """The groups of nodes to try, in order: the fabric of node `first`, the other fabrics, and all nodes together."""
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
    fixed: tuple[str, NodeName | None] | None = None,
    least: int | None = None,
) -> Generator[None, None, Plan | None]:
    """
    Plans at least `least` members (None: all), or returns None. `fixed`: the UID of a member that must be planned, and
    its node (None: any node). Raises InvalidField.
    """
    if fixed is not None and fixed[1] is not None:
        nodes = (fixed[1], *(node for node in nodes if node != fixed[1]))

    def key(member: GangMember) -> tuple[object, ...]:
        return (
            fixed is not None and member.uid != fixed[0],  # the member that must be planned,
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
    if fixed is not None and any(each.uid == fixed[0] for each in left):
        return None
    return plan if len(members) - len(left) >= (len(members) if least is None else least) else None


def _fill_node(
    gang: str, members: Sequence[GangMember], at: GangPlacement, seconds: float
) -> Generator[None, None, list[Reservation]]:
    """The reservations on a node, for the members that it would admit in sequence."""
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
    """A key that is equal for pods with equal requests, regardless of their names."""
    return msgspec.json.encode(msgspec.structs.replace(pod, name=PodName("")), order="deterministic")


def _member_size_key(member: GangMember) -> tuple[int, int, bytes, str]:
    pods = [*member.request.init_containers, *member.request.containers]
    return (
        -sum(each.limits.get(GPU, 0) for each in pods),  # GPUs first, as they decide whether there is room
        -sum(sum(amount for name, amount in each.limits.items() if "/" in name) for each in pods),  # then other devices
        pod_class_key(member.request),  # equal pods together
        member.uid,  # a total order
    )


def reserved_for(
    uid: str, pod: PodRequest, allocations: Sequence[Allocation], seconds: float, gang: str = ""
) -> Reservation:
    """The reservation, for this many seconds, of what a decision allocates to a pod."""
    return reservation_of(
        uid,
        pod,
        allocations,
        seconds,
        gang,
        needs_co_allocated=needs_co_allocated(pod.annotations),
        # if its kubelet aligns a container elsewhere, a node chooses other GPUs; it does not know the annotations
        may_move=not _limits_slots(pod, allocations),
    )


def has_its_own(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """Whether a pod must get exactly the GPUs that a decision allocates to it."""
    # it limits its GPUs in slots, or has units that are allocated only as reserved
    return _limits_slots(pod, allocations) or any(map(is_given_as_reserved, allocations))


def _limits_slots(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """Whether a pod has slots and limits their GPUs by annotations."""
    return any(each.slots for each in allocations) and read_gpu_rules(pod.annotations).limits


def is_given_as_reserved(allocation: Allocation) -> bool:
    """Whether a container has units of several GPUs, or whole GPUs and memory: only a reservation combines these."""
    amounts = allocation.amounts.values()
    return any(each.memory if each.cores >= CORES else len(amounts) > 1 for each in amounts)
