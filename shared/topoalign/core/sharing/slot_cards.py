"""
The GPUs of a machine as cards that are shared, for whoever chooses the slots of a container: what each offers and what of it
is held, and what sets of them are worth. In the place of a GPU are its MIG instances, if those are in slots.
"""

from topoalign.core.demand.shares import SlotsOfGpus, mode_of, numa_node_of
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.views import made_once
from topoalign.core.placement.gpus.scores import gpu_scores
from topoalign.core.placement.gpus.set_scorer import SetScorer
from topoalign.core.placement.preference import set_scorer
from topoalign.core.sharing.cards import SharedCard
from topoalign.core.state.share_amounts import NONE_HELD


@made_once
def places_of(topology: Topology) -> tuple[tuple[DeviceID, Gpu], ...]:
    """All GPUs in the hardware's order, each with itself, or in its place its MIG instances that are in slots, with it."""
    in_slots, found = offers_in_slots(topology), list[tuple[DeviceID, Gpu]]()
    for gpu in topology.gpus:
        instances = [each.uuid for each in gpu.mig or () if each.uuid in in_slots]
        found += [(base, gpu) for base in instances or [gpu.id]]
    return tuple(found)


@made_once
def scorer_of(topology: Topology) -> SetScorer:
    """The scorer of sets of these; MIG instances have no links."""
    places = places_of(topology)
    if all(base == gpu.id for base, gpu in places):
        return set_scorer(topology)
    scores = gpu_scores(topology)
    position = {gpu.id: number for number, gpu in enumerate(topology.gpus)}
    rows = [position.get(base) for base, _ in places]
    return SetScorer([[0 if a is None or b is None else scores[a][b] for b in rows] for a in rows])


def slot_candidates(topology: Topology, left: SlotsOfGpus) -> tuple[SharedCard, ...]:
    """All GPUs and instances of `places_of`; of those that are not in slots nothing is to be had."""
    in_slots = offers_in_slots(topology)
    found = []
    for base, gpu in places_of(topology):
        here = left.get(base)
        offered, held = (here.offered, here.held) if here else (NONE_HELD, NONE_HELD)
        if here and here.profiles:  # whether an instance fits is known already: what is left decides the order alone
            held = Amount(cores=0, memory=offered.memory - here.left.memory)
        found.append(
            SharedCard(
                device=base,
                index=gpu.index,
                minor=gpu.index if gpu.minor is None else gpu.minor,
                numa_node=numa_node_of(topology, gpu.id),
                model=gpu.name,
                mode=mode_of(in_slots[base]) if base in in_slots else "",
                healthy=here is not None and here.usable,
                cores=offered.cores,
                memory=offered.memory,
                slots=here.all_slots if here else 0,
                cores_held=held.cores,
                memory_held=held.memory,
                slots_held=here.sharers if here else 0,
                processes=here.sharers if here else 0,
                exclusive=here is None,
            )
        )
    return tuple(found)
