"""
Whether a node may mistake what is reserved for a pod that is gone for what is reserved for another.

Of pods that are there it is known what they ask for (`orders`). Of one that is gone there is only what is still reserved for
it, with which the node answers its kubelet until that has ended.
"""

from topoalign.core.model.ids import GPU
from topoalign.core.model.reservations import Reservation, ReservedContainer


def are_mistakable(one: Reservation, other: Reservation) -> bool:
    """
    Whether the node may answer its kubelet's question for one of the pods with the GPUs of the other, and that matters: NICs
    come with them, or as many slots are reserved for both and one must have its own, or holds other amounts by them.
    """
    if any(are_other_slots(a, b) for a in one.containers for b in other.containers):
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
