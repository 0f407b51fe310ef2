"""
Whether a node may mistake what is reserved for a pod that is gone for what is reserved for another.

Of pods that are there it is known what they ask for (`orders`). Of one that is gone there is only what is still reserved for
it, with which the node answers its kubelet until that has ended.
"""

from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.ids import GPU
from topoalign.core.model.reservations import Reservation, ReservedContainer


def are_mistakable(one: Reservation, other: Reservation) -> bool:
    """
    Whether the node may answer its kubelet's question for one of the pods with the GPUs of the other, and that matters: NICs
    come with them, or as many slots are reserved for both and one must have its own, or holds other amounts by them, or as
    many units of one kind, and of the other kind not as many, or of other numbers of GPUs.
    """
    if any(are_other_slots(a, b) or are_other_units(a, b) for a in one.containers for b in other.containers):
        return True
    parts = [each for pod in (one, other) for each in pod.containers]
    gpus, others = ({len(each.devices.get(GPU, ())) for each in pod.containers} - {0} for pod in (one, other))
    return any(each.companions for each in parts) and not gpus.isdisjoint(others)


def are_other_slots(one: ReservedContainer, other: ReservedContainer) -> bool:
    """Whether two containers have as many slots, and it matters which of them has which."""
    counts = {(name, len(ids)) for name, ids in one.devices.items()}
    if not (one.slots or other.slots) or counts.isdisjoint((name, len(ids)) for name, ids in other.devices.items()):
        return False
    stay = any(each.slots and not each.may_move for each in (one, other))
    return stay or {*one.slots.values()} != {*other.slots.values()}


def are_other_units(one: ReservedContainer, other: ReservedContainer) -> bool:
    """Whether two containers have as many units of one kind, and not of the other, or they are of more GPUs."""
    counts, others = units_of(one), units_of(other)
    return counts != others and any(name in others and others[name][0] == n for name, (n, _) in counts.items())


def units_of(container: ReservedContainer) -> dict[str, tuple[int, int]]:
    """Resource -> how many units of it are reserved for a container, and of how many GPUs these are."""
    gpus = {name: len(amounts_of(ids)) for name, ids in container.devices.items()}
    return {name: (len(ids), gpus[name]) for name, ids in container.devices.items() if gpus[name]}
