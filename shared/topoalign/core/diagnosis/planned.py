"""
Checks whether pods of gangs that are planned for a node still fit there after another pod.

A kubelet does not know which pods are planned. So a registry binds a pod to a node only if all planned pods still fit
after it, one after the other in the order of the reservations. Otherwise, the answer is `GangFirst`. Only the
reservations of the planned pods are known here, not their requests. So each counts as requesting what is reserved for
it, without annotations, and as many slots as are reserved. The check does not consider that the end of other pods can
change which resources the pod gets.
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
"""The minimum requests of a container of a Guaranteed pod."""


class GangFirst(NoFit):
    """
    Raised for a pod that would take resources of pods that are planned with their gang.

    Remedy: Wait until the pods of the gang run.
    """

    def __init__(self) -> None:
        super().__init__(
            "pods of a gang that are planned to the node would not fit any more",
            "wait until they run, or until what is planned ends, at most two minutes after it was",
        )


def fits_planned_pods(state: NodeState, demand: PodDemand, planned: Sequence[Reservation]) -> bool:
    """Whether all pods that are planned for a node fit after this admitted pod. `state` holds the reservations."""
    pods = [demand]
    for reserved in planned:
        for each in reserved_allocations(reserved):
            if each.id in state.allocations:
                state = state.without(each.id)
        with suppress(InvalidField):  # for a forged message
            pods.append(read_pod(pod_request_of_reservation(reserved), demand.rules))
    for pod in pods:
        decision = decide_demand(as_others(state, pod), pod)
        if not isinstance(decision, Admission):
            return False
        for allocation in decision.allocations:
            state = state.holding(allocation)
    return True


def pod_request_of_reservation(reserved: Reservation) -> PodRequest:
    """A pod that requests what is reserved. It is Guaranteed if exclusive CPUs or memory are reserved."""
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
    """The container that requests what is reserved for it."""
    amounts = {name: len(ids) for name, ids in reserved.devices.items()}
    if reserved.cpus:
        amounts[CPU] = len(parse_cpuset(reserved.cpus)) * 1000
    for block in reserved.memory:
        amounts[block.resource] = amounts.get(block.resource, 0) + sum(block.taken)
    amounts = {**least, **amounts}
    return ContainerRequest(
        name=reserved.container, requests=amounts, limits=amounts, sidecar=reserved.role == "sidecar"
    )
