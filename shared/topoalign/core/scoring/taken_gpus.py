"""
Which GPUs a pod would get on a node, for the score `quality`.

Whole GPUs are those that the node's device policy prefers on the lowest of the fewest NUMA nodes that have enough, or on all
under policy `none`. A share is on the GPU with the least left that has enough, shares of several GPUs are on those that come
first by policy `topology`. Containers take GPUs one after another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from math import comb
from typing import NamedTuple

from topoalign.core.demand.slots import SlotShare, has_slot_for
from topoalign.core.demand.units import Share
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import mask_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.model.topology.views import made_once
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.gpus.scores import Members
from topoalign.core.placement.gpus.set_scorer import SetScorer
from topoalign.core.placement.gpus.topology import SetOrder, by_topology
from topoalign.core.placement.preference import PLACEMENTS, choose, set_scorer
from topoalign.core.sharing.slot_cards import scorer_of
from topoalign.core.state.slot_amounts import SlotsLeft
from topoalign.core.state.unit_amounts import UnitsLeft

MOST_SETS = 1_000
"""Sets of NUMA nodes of which the lowest is searched for; of more, those that have the most GPUs are taken."""


class Taken(NamedTuple):
    """The GPUs that one container would get."""

    members: Members
    seam: float
    """GB/s; 0 for a single GPU."""
    cut: int
    """Scores of the links to GPUs that stay unused."""
    numa: float = 1.0
    rest: float = 0.0
    """What stays free of these GPUs, in GPUs."""


class WholeGpus:
    """Takes whole GPUs from a node, one container after another."""

    def __init__(self, shape: Topology, free: Mapping[ResourceName, Members], placement: str, *, aligned: bool) -> None:
        """`free`: resource -> the free GPUs; `placement`: the device policy; `aligned`: whether NUMA nodes count."""
        self.shape, self.scorer, self.policy, self.aligned = shape, set_scorer(shape), PLACEMENTS[placement], aligned
        self.free = dict(free)
        self.taken: list[Taken] = []

    def take(self, name: ResourceName, size: int) -> bool:
        """Takes GPUs for a container. False: too few are free."""
        free, node_of = self.free[name], numa_nodes(self.shape).get(name, {})
        available = within(node_of, free, size) if self.aligned else free
        members = choose(self.policy, GpuChoice(self.scorer, available, (), size, frozenset(free)))
        if not members:
            return False
        seam = bandwidth(self.scorer, members)
        cut = SetOrder(self.scorer, free).cut(members)
        self.taken.append(Taken(members, seam, cut, excess_of_nodes(node_of, members)))
        self.free[name] = tuple(gpu for gpu in free if gpu not in members)
        return True

    @property
    def left(self) -> int:
        """GPUs that stay free."""
        return sum(map(len, self.free.values()))


class GpuLeft(NamedTuple):
    """What is left of a GPU that is shared, as a share of what is offered of it."""

    cores: float
    memory: float
    unused: bool

    @property
    def both(self) -> float:
        """What a share of equal parts could still have."""
        return min(self.cores, self.memory)


NOTHING_LEFT = GpuLeft(0.0, 0.0, False)


class SharedGpus:
    """Takes shares of GPUs from a node, one container after another."""

    def __init__(self, shape: Topology, slots: Sequence[SlotsLeft | None], units: Sequence[UnitsLeft | None]) -> None:
        """What is left of each GPU in slots and in units, by position."""
        self.shape, self.slots_left, self.units_left = shape, slots, units
        self.slots = [*map(left_of_slots, slots)]
        self.units = [*map(left_of_units, units)]
        self.taken: list[Taken] = []

    def take(self, share: SlotShare | Share) -> bool:
        """Takes a share for a container. False: too few GPUs have enough."""
        if isinstance(share, SlotShare):
            scorer, gpus = scorer_of(self.shape), self.slots
            asked = [slot_part(left, share) for left in self.slots_left]
        else:
            scorer, gpus = set_scorer(self.shape), self.units
            asked = [unit_part(left, share) for left in self.units_left]
        size = share.gpus
        enough = [
            at
            for at, (gpu, part) in enumerate(zip(gpus, asked, strict=True))
            if part is not None and part.cores <= gpu.cores and part.memory <= gpu.memory and gpu.both > 0
        ]
        if len(enough) < size:
            return False
        unused = [at for at, gpu in enumerate(gpus) if gpu.unused]
        if size == 1:  # the GPU with the least left
            least = min((gpus[at].cores, gpus[at].memory) for at in enough)
            enough = [at for at in enough if (gpus[at].cores, gpus[at].memory) == least]
        members = by_topology(scorer, enough, (), size, unused)
        cut = SetOrder(scorer, unused).cut(members)
        for at in members:
            gpu, part = gpus[at], asked[at] or NOTHING_LEFT
            gpus[at] = GpuLeft(gpu.cores - part.cores, gpu.memory - part.memory, False)
        self.taken.append(Taken(members, bandwidth(scorer, members), cut, rest=sum(gpus[at].both for at in members)))
        return True

    @property
    def left(self) -> float:
        """What stays free, in GPUs."""
        return round(sum(gpu.both for gpu in (*self.slots, *self.units)), 4)


def left_of_slots(gpu: SlotsLeft | None) -> GpuLeft:
    """What is left of a GPU in slots."""
    if gpu is None or not gpu.usable:
        return NOTHING_LEFT
    return part_of(gpu.left, gpu.offered, unused=not gpu.sharers)


def slot_part(gpu: SlotsLeft | None, share: SlotShare) -> GpuLeft | None:
    """What a share is of a GPU in slots; None: the GPU does not have it."""
    if gpu is None or not has_slot_for(gpu, share):
        return None
    return part_of(share.amount_of(gpu.offered), gpu.offered)


def part_of(amount: Amount, offered: Amount, *, unused: bool = False) -> GpuLeft:
    """The amount as a share of what is offered of a GPU. Of a GPU whose size is not known only cores count."""
    memory = amount.memory / offered.memory if offered.memory else 1.0
    return GpuLeft(amount.cores / offered.cores if offered.cores else 0.0, memory, unused)


def left_of_units(gpu: UnitsLeft | None) -> GpuLeft:
    """What is left of a GPU in units."""
    if gpu is None or not gpu.all_blocks:
        return NOTHING_LEFT
    return GpuLeft(gpu.cores / CORES, gpu.blocks / gpu.all_blocks, gpu.unused)


def unit_part(gpu: UnitsLeft | None, share: Share) -> GpuLeft | None:
    """What a share is of a GPU in units; None: the GPU does not have it."""
    if gpu is None or not gpu.all_blocks or (share.whole and not gpu.unused):
        return None
    part = share.of_each
    return GpuLeft(part.cores / CORES, 1.0 if share.whole else part.blocks / gpu.all_blocks, False)


def bandwidth(scorer: SetScorer, members: Members) -> float:
    """GB/s across the weakest seam of a set; 0 for a single GPU."""
    return scorer.seam(members).bandwidth(scorer.links.model)


@made_once
def places_of_cards(topology: Topology) -> Mapping[DeviceID, int]:
    """GPU or NIC -> its position among the GPUs or NICs of the machine."""
    return {card: place for cards in (topology.gpu_by_id, topology.nic_by_id) for place, card in enumerate(cards)}


@made_once
def numa_nodes(topology: Topology) -> Mapping[ResourceName, Mapping[int, int]]:
    """Resource -> position of a GPU -> the NUMA node that it is listed with, where that is known."""
    places = places_of_cards(topology)
    return {
        name: {places[gpu]: nodes[0] for gpu, nodes in topology.devices[name].items() if nodes}
        for name in topology.offers_of
        if topology.kind_of(name) == "gpu"
    }


def within(node_of: Mapping[int, int], free: Sequence[int], size: int) -> Sequence[int]:
    """The free GPUs of the lowest of the fewest NUMA nodes that have enough of them; all where too few nodes are known."""
    counts = Counter(node_of[place] for place in free if place in node_of)
    least = fewest(counts, size)
    if not least:
        return free
    sets = combinations(sorted(counts), least) if comb(len(counts), least) <= MOST_SETS else ()
    enough = (nodes for nodes in sets if sum(counts[node] for node in nodes) >= size)
    most = tuple(node for node, _ in counts.most_common(least))
    chosen = min(enough, key=mask_of, default=most)
    return [place for place in free if node_of.get(place) in chosen]


def fewest(counts: Mapping[int, int], size: int) -> int:
    """So many NUMA nodes are needed for a set of this size; 0 where all of them have too few."""
    sums = accumulate(sorted(counts.values(), reverse=True))
    return next((nodes for nodes, has in enumerate(sums, 1) if has >= size), 0)


def excess_of_nodes(node_of: Mapping[int, int], members: Members) -> float:
    """The NUMA nodes that these GPUs are on, divided by the fewest that so many can be on; 1 where they are not known."""
    width = len({node_of[place] for place in members if place in node_of})
    least = fewest(Counter(node_of.values()), len(members))
    return max(1.0, width / least) if least else 1.0
