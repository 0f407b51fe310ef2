"""
Predicts which GPUs a pod would get on a node, for the score `quality`.

Whole GPUs are those that the node's device policy prefers. If the node aligns, they are on the lowest of the fewest NUMA
nodes that have enough; where topoalign decides itself (mode `best`), on those of the fewest NUMA nodes whose GPUs come first
by policy `topology`. A share is on the GPU with the least left that has enough; shares of several GPUs are on those that
come first by policy `topology`. Containers take GPUs one after another; what is cut and what stays free is computed
after the last.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, combinations
from math import comb
from typing import NamedTuple

from topoalign.core.demand.shares import Share
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import node_mask
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.gpus.seam import Members
from topoalign.core.placement.gpus.set_scorer import SetScorer
from topoalign.core.placement.gpus.topology import SetOrder, by_topology
from topoalign.core.placement.preference import PLACEMENTS, choose_gpu_set, set_scorer
from topoalign.core.state.share_amounts import ShareLeft

MOST_SETS = 1_000
"""Sets of NUMA nodes that are searched for the lowest; if there are more, the nodes with the most GPUs are taken."""
MOST_ALIGNED = 64
"""Sets of NUMA nodes that are compared by their GPUs."""


class WholeGpus:
    """Takes whole GPUs from a node, one container after another."""

    def __init__(
        self, shape: Topology, free: Mapping[ResourceName, Members], placement: str, *, aligned: bool, by_gpus: bool
    ) -> None:
        """
        `free`: resource -> the free GPUs; `placement`: the device policy; `aligned`: whether NUMA nodes count; `by_gpus`:
        whether equally few NUMA nodes are compared by their GPUs.
        """
        self.shape = shape
        self.scorer = set_scorer(shape)
        self.policy = PLACEMENTS[placement]
        self.aligned = aligned
        self.by_gpus = by_gpus
        self.free = dict(free)
        self.order = SetOrder(self.scorer, {gpu for some in free.values() for gpu in some})
        self.taken: list[Members] = []
        self.numa = 1.0
        """The largest `_excess_of_nodes` of a container."""

    def take(self, name: ResourceName, size: int) -> bool:
        """Takes GPUs for a container. False: too few are free."""
        free = self.free[name]
        node_of = _gpu_numa_nodes(self.shape).get(name, {})
        offered = _aligned_free_sets(node_of, free, size, several=self.by_gpus) if self.aligned else [free]
        questions = (GpuChoice(self.scorer, available, (), size, frozenset(free)) for available in offered)
        sets = [members for question in questions if (members := choose_gpu_set(self.policy, question))]
        if not sets:
            return False
        order = SetOrder(self.scorer, free)
        members = sets[0] if len(sets) == 1 else min(sets, key=lambda each: order.rank(each)[:-1])
        self.taken.append(members)
        self.numa = max(self.numa, _excess_of_nodes(node_of, members))
        self.free[name] = tuple(gpu for gpu in free if gpu not in members)
        return True

    @property
    def seams(self) -> list[float]:
        """GB/s across the weakest seam of each container with several GPUs."""
        return [_seam_bandwidth(self.scorer, members) for members in self.taken if len(members) > 1]

    @property
    def cut(self) -> int:
        """Scores of the links between the GPUs that are taken and those that stay free."""
        return self.order.cut(tuple(sorted(gpu for members in self.taken for gpu in members)))

    @property
    def left(self) -> int:
        """GPUs that stay free."""
        return sum(map(len, self.free.values()))


class GpuLeft(NamedTuple):
    """What is left of a GPU that is shared. Memory is in bytes."""

    cores: int
    memory: int
    all_cores: int
    all_memory: int
    """That are offered. 0: the size is not known, and cores alone count."""
    slots: int
    """Containers that it can still take."""
    unused: bool

    @property
    def part(self) -> float:
        """The part of the GPU that is left: of cores or memory, whichever is less."""
        cores = self.cores / self.all_cores if self.all_cores else 0.0
        return min(cores, self.memory / self.all_memory) if self.all_memory else cores

    def has(self, asked: Amount, *, whole: bool) -> bool:
        """Whether it has so much for one more container, which is to have the `whole` GPU."""
        some = self.slots > 0 and self.cores >= max(1, asked.cores) and self.memory >= asked.memory
        return some and (self.unused or not whole)

    def less(self, asked: Amount) -> "GpuLeft":
        """The same after a container has got so much."""
        return self._replace(
            cores=self.cores - asked.cores, memory=self.memory - asked.memory, slots=self.slots - 1, unused=False
        )


NOTHING_LEFT = GpuLeft(0, 0, 0, 0, 0, False)


def gpu_left(gpu: ShareLeft | None) -> GpuLeft:
    """What is left of a GPU in units or slots."""
    if gpu is None or not gpu.usable:
        return NOTHING_LEFT
    left = gpu.left
    offered = gpu.offered
    places = gpu.slots if gpu.all_slots else left.cores
    return GpuLeft(left.cores, left.memory, offered.cores, offered.memory, places, gpu.unused)


class SharedGpus:
    """Takes shares of GPUs that are offered in one way from a node, one container after another."""

    def __init__(self, scorer: SetScorer, gpus: Sequence[GpuLeft]) -> None:
        self.scorer = scorer
        self.gpus = list(gpus)
        self.order = SetOrder(scorer, [at for at, gpu in enumerate(gpus) if gpu.unused])
        self.taken: list[Members] = []

    def take(self, share: Share) -> bool:
        """Takes a share for a container. False: too few GPUs have enough."""
        amounts = [_amount_of_share(share, gpu) for gpu in self.gpus]
        pairs = zip(self.gpus, amounts, strict=True)
        enough = [at for at, (gpu, amount) in enumerate(pairs) if gpu.has(amount, whole=share.whole)]
        if len(enough) < share.gpus:
            return False
        if share.gpus == 1:  # the GPU with the least left
            least = min(self.gpus[at][:2] for at in enough)
            enough = [at for at in enough if self.gpus[at][:2] == least]
        unused = [at for at, gpu in enumerate(self.gpus) if gpu.unused]
        members = by_topology(self.scorer, enough, (), share.gpus, unused)
        for at in members:
            self.gpus[at] = self.gpus[at].less(amounts[at])
        self.taken.append(members)
        return True

    @property
    def seams(self) -> list[float]:
        """As of `WholeGpus`."""
        return [_seam_bandwidth(self.scorer, members) for members in self.taken if len(members) > 1]

    @property
    def cut(self) -> int:
        """Scores of the links between the unused GPUs that are taken and those that stay unused."""
        return self.order.cut(tuple(sorted({gpu for members in self.taken for gpu in members})))

    @property
    def rest(self) -> float:
        """What stays free of the GPUs that are taken, in GPUs."""
        return sum(self.gpus[at].part for at in {gpu for members in self.taken for gpu in members})

    @property
    def left(self) -> float:
        """What stays free, in GPUs."""
        return sum(gpu.part for gpu in self.gpus)


def _amount_of_share(share: Share, gpu: GpuLeft) -> Amount:
    """What a share is of this GPU. Of a GPU of unknown size cores alone count for whole ones."""
    amount = share.amount_of(Amount(cores=gpu.all_cores, memory=gpu.all_memory))
    return Amount(cores=amount.cores, memory=0) if share.whole and not gpu.all_memory else amount


def _seam_bandwidth(scorer: SetScorer, members: Members) -> float:
    return scorer.seam(members).bandwidth(scorer.links.model)


@computed_once
def position_by_gpu(topology: Topology) -> Mapping[DeviceID, int]:
    """GPU or NIC -> its position among the GPUs or NICs of the machine."""
    return {gpu: place for gpus in (topology.gpu_by_id, topology.nic_by_id) for place, gpu in enumerate(gpus)}


@computed_once
def _gpu_numa_nodes(topology: Topology) -> Mapping[ResourceName, Mapping[int, int]]:
    """Resource -> position of a GPU -> the NUMA node that it is listed with, where that is known."""
    places = position_by_gpu(topology)
    return {
        name: {places[gpu]: nodes[0] for gpu, nodes in topology.devices[name].items() if nodes}
        for name in topology.offers_of
        if topology.kind_of(name) == "gpu"
    }


def _aligned_free_sets(node_of: Mapping[int, int], free: Members, size: int, *, several: bool) -> list[Sequence[int]]:
    """
    The free GPUs of the lowest of the fewest NUMA nodes that have enough of them; with `several` of each such set of NUMA
    nodes, MOST_ALIGNED at most. All of them where too few nodes are known.
    """
    counts = Counter(node_of[place] for place in free if place in node_of)
    least = _fewest_numa_nodes(counts, size)
    if not least:
        return [free]
    sets = combinations(sorted(counts), least) if comb(len(counts), least) <= MOST_SETS else ()
    enough = [nodes for nodes in sets if sum(counts[node] for node in nodes) >= size]
    if not enough:
        enough = [tuple(node for node, _ in counts.most_common(least))]
    chosen = sorted(enough, key=node_mask)[: MOST_ALIGNED if several else 1]
    return [[place for place in free if node_of.get(place) in nodes] for nodes in chosen]


def _fewest_numa_nodes(counts: Mapping[int, int], size: int) -> int:
    sums = accumulate(sorted(counts.values(), reverse=True))
    return next((nodes for nodes, has in enumerate(sums, 1) if has >= size), 0)


def _excess_of_nodes(node_of: Mapping[int, int], members: Members) -> float:
    """The NUMA nodes that these GPUs are on, divided by the fewest that so many can be on; 1 where they are not known."""
    width = len({node_of[place] for place in members if place in node_of})
    least = _fewest_numa_nodes(Counter(node_of.values()), len(members))
    return max(1.0, width / least) if least else 1.0
