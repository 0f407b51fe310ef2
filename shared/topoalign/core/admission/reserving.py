"""What is reserved for a pod that a node will admit: what the decision gives it, and what its annotations say of that."""

from collections.abc import Sequence

from topoalign.core.demand.share_annotations import card_rules, said_of_cards
from topoalign.core.deviceshare.demand import needs_companions
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.offers import CORES
from topoalign.core.state.reservations import reservation_of


def reserved_for(
    uid: str, pod: PodRequest, allocations: Sequence[Allocation], seconds: float, gang: str = ""
) -> Reservation:
    """
    What a decision gives a pod, as its reservation for so many seconds. A pod that limits its GPUs in slots gets these or
    none: a node chooses others where its kubelet aligns a container elsewhere, and knows no annotations.
    """
    return reservation_of(
        uid,
        pod,
        allocations,
        seconds,
        gang,
        needs_companions=needs_companions(pod.annotations),
        may_move=not limits_slots(pod, allocations),
    )


def has_its_own(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """
    Whether a pod must have the GPUs that a decision gives it, or none, as it limits its GPUs in slots, or has units that are
    given as they are reserved alone.
    """
    return limits_slots(pod, allocations) or any(map(is_given_as_reserved, allocations))


def limits_slots(pod: PodRequest, allocations: Sequence[Allocation]) -> bool:
    """
    Whether a pod limits its GPUs in slots. What pods without slots say about cards is not looked at. HAMi's rules and ours
    read the limits alike, and HAMi's know all policies.
    """
    return any(each.slots for each in allocations) and card_rules(said_of_cards(pod.annotations), as_hami=True).limits


def is_given_as_reserved(allocation: Allocation) -> bool:
    """
    Whether a container has parts of several GPUs in units, or whole ones and memory: a reservation alone tells whoever gives
    them that they are of one container.
    """
    amounts = allocation.amounts.values()
    return any(each.memory if each.cores >= CORES else len(amounts) > 1 for each in amounts)
