"""
Checks whether pods of gangs that are planned to a node still fit there after another pod.

A kubelet knows nothing of what is planned. So a registry lets a pod come only where all that is planned still fits after it,
one after the other in the order of the reservations; else the answer is `GangFirst`. Here it is known of these pods what is
reserved for them, and not what they ask for: they count as asking for just that, without annotations, and by slots for as
many. Whether the end of others would lead the pod to their place is not looked at.
"""

from collections.abc import Sequence
from contextlib import suppress

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.kubelet_devices import as_others
from topoalign.core.demand.pod_demand import PodDemand, read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import InvalidField, NoFit
from topoalign.core.model.ids import CPU, MEMORY, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.cpuset import parse_cpuset
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import reserved_allocations

LEAST: dict[ResourceName, int] = {CPU: 1, MEMORY: 1}
"""What a container of a Guaranteed pod asks for at least."""


class GangFirst(NoFit):
    """
    Raised for a pod that would take the place of pods that are planned with their gang.

    Remedy: Wait until these run.
    """

    def __init__(self) -> None:
        super().__init__(
            "pods of a gang that are planned to the node would not fit any more",
            "wait until they run, or until what is planned ends, at most two minutes after it was",
        )


def fits_planned_pods(state: NodeState, demand: PodDemand, planned: Sequence[Reservation]) -> bool:
    """Whether all that is planned to a node fits after this pod, which it admits. `state`: with what is reserved as held."""
    pods = [demand]
    for reserved in planned:
        for each in reserved_allocations(reserved):
            if each.id in state.allocations:
                state = state.without(each.id)
        with suppress(InvalidField):  # of a forged message
            pods.append(read_pod(pod_request_of_reservation(reserved), demand.rules))
    for pod in pods:
        decision = decide_demand(as_others(state, pod), pod)
        if not isinstance(decision, Admission):
            return False
        for allocation in decision.allocations:
            state = state.holding(allocation)
    return True


def pod_request_of_reservation(reserved: Reservation) -> PodRequest:
    """A pod that asks for what is reserved: Guaranteed, if some of it are CPUs or memory of its own."""
    least = LEAST if any(each.cpus or each.memory for each in reserved.containers) else {}
    asked = {place: container_request_of_reserved(each, least) for place, each in enumerate(reserved.containers)}
    early = [place for place, each in enumerate(reserved.containers) if each.role != "app"]
    return PodRequest(
        namespace=reserved.namespace,
        name=reserved.pod,
        init_containers=tuple(asked[place] for place in early),
        containers=tuple(each for place, each in asked.items() if place not in early),
    )


def container_request_of_reserved(reserved: ReservedContainer, least: dict[ResourceName, int]) -> ContainerRequest:
    """The container that asks for what is reserved for it."""
    amounts = {name: len(ids) for name, ids in reserved.devices.items()}
    if reserved.cpus:
        amounts[CPU] = len(parse_cpuset(reserved.cpus)) * 1000
    for block in reserved.memory:
        amounts[block.resource] = amounts.get(block.resource, 0) + sum(block.taken)
    amounts = {**least, **amounts}
    return ContainerRequest(
        name=reserved.container, requests=amounts, limits=amounts, sidecar=reserved.role == "sidecar"
    )
