"""
Scores sets of GPUs, first by their weakest seam, which measures how fast a collective runs on a set.

A set can be divided into two parts in many ways. The seam is the weakest of these divisions, which is the minimum cut of the
set: the number of fabric links (NVLink, xGMI) between both parts or, if there are none, the best PCIe path between
them. Every ring crosses every division, so no collective on the set is faster than its seam. The graph search of NCCL
2.30.7 ranks sets as the seam does more often than as the sum of all links does (docs/decisions/0020).

    DGX-1V, GPUs 0 to 3: 0 and 3 are linked by two NVLinks, 0 and 1 by one, …; the weakest division has 4 NVLinks
    GPUs 0, 1, 4, 5: {0, 4} and {1, 5} are linked by 2 NVLinks, all other divisions by more: the seam is 2 NVLinks
    GPUs 0 and 5: no NVLink, PCIe across sockets

Any fabric link is stronger than any PCIe path. At an NVSwitch, each GPU reaches each other GPU with all of its links,
so the seam is the fewest links of any GPU. The seam does not include measured bandwidth, congestion or other jobs.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import combinations
from math import inf
from operator import add
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_links import NVLINK_SCORE, PCIE_SCORE, PcieClass, link_name, link_type
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import connection_score, kept_apart, links_to_switch, pcie_class, share_node

Scores = Sequence[Sequence[int]]
"""Row and column i belong to the i-th device; symmetric, 0 on the diagonal."""
Members = tuple[int, ...]
"""GPUs by their positions on the machine, ascending."""


@computed_once
def gpu_scores(topology: Topology) -> Scores:
    """The table of the pair scores of all GPUs of a machine, in the hardware's order."""
    gpus = tuple(topology.gpu_by_id)
    table = [[0] * len(gpus) for _ in gpus]
    for (i, a), (j, b) in combinations(enumerate(gpus), 2):
        table[i][j] = table[j][i] = connection_score(topology, a, b)
    return table


def total_score(scores: Scores, members: Iterable[int]) -> int:
    """The score of a set: the sum over all its pairs."""
    return sum([scores[a][b] for a, b in combinations(members, 2)])


def grow_set(strength: Scores, among: Iterable[int], seed: Sequence[int], size: int, to_free: Sequence[int]) -> Members:
    """
    Grows the seed to `size` devices. Each added device has the strongest links to the members. Of equal devices, it has
    the lowest `to_free`: the sum of the scores of its links to free GPUs.
    """
    members = list(seed)
    gain = [-inf] * len(strength)
    for other in among:
        gain[other] = -to_free[other] * 1e-9  # small enough to decide only between equal ones
    for member in members:
        gain[member] = -inf
    for row in map(strength.__getitem__, seed):
        gain = list(map(add, gain, row))
    while len(members) < size:
        added = gain.index(max(gain))
        members.append(added)
        gain = list(map(add, gain, strength[added]))
        gain[added] = -inf
    return tuple(sorted(members))


PCIE_GBPS = {
    PcieClass.PSB: 24.0,
    PcieClass.PIX: 24.0,
    PcieClass.PXB: 24.0,
    PcieClass.PHB: 20.0,
    PcieClass.NODE: 20.0,
    PcieClass.SYS: 12.0,
}
"""Assumed GB/s of PCIe paths, to compare sets by bandwidth: x16 of generation 4. The seam itself does not need them."""

PCIE_TEXT = {
    PcieClass.PSB: "PCIe on one board",
    PcieClass.PIX: "PCIe through one switch",
    PcieClass.PXB: "PCIe through several switches",
    PcieClass.PHB: "PCIe through a host bridge",
    PcieClass.NODE: "PCIe within a NUMA node",
    PcieClass.SYS: "PCIe across sockets",
}
NOT_JOINED = {"not-started", "in-progress", "failed"}
"""States of a fabric (`Gpu.fabric_state`) in which NVLinks carry no data."""
CLASS_OF_SCORE = {score: path for path, score in PCIE_SCORE.items()}


class Seam(NamedTuple):
    """The connection across the weakest division of a set. Of two seams the greater one is the stronger one."""

    fabric_links: int
    """Number of fabric links (NVLink, xGMI) between both parts."""
    pcie: int = 0
    """Score of the best PCIe path between both parts (`PCIE_SCORE`). 0 if fabric links connect them."""

    def bandwidth(self, model: str = "") -> float:
        """GB/s between both parts, for GPUs of this product name. For an unknown model, 20 for each fabric link."""
        if self.fabric_links:
            known = link_type(model)
            return self.fabric_links * (known.gbps if known else 20.0)
        return PCIE_GBPS[CLASS_OF_SCORE[self.pcie]] if self.pcie in CLASS_OF_SCORE else 0.0

    def text(self, model: str = "") -> str:
        """Human-readable: `4 NVLinks, 80 GB/s`, `PCIe across sockets`. `one GPU` if there is nothing to divide."""
        if not self.fabric_links:
            return PCIE_TEXT[CLASS_OF_SCORE[self.pcie]] if self.pcie in CLASS_OF_SCORE else "one GPU"
        links = f"{self.fabric_links} {link_name(model)}{'s' if self.fabric_links > 1 else ''}"
        return f"{links}, {self.bandwidth(model):.0f} GB/s" if link_type(model) else links


ONE_GPU = Seam(0, 0)
"""The seam of fewer than two GPUs: there is nothing to divide."""


class Links(NamedTuple):
    """The links of some GPUs, by their positions."""

    strength: Scores
    """For each pair: 100 per NVLink, plus its PCIe path's score. NVLinks do not count if a fabric separates the two."""
    switch: Sequence[tuple[object, int]]
    """For each GPU: the NVSwitch fabric of its NVLinks, and their number. 0 links: no NVSwitch. Empty: unknown."""
    model: str = ""
    """Product name of the GPUs. Empty: unknown, or they differ."""


@computed_once
def gpu_links(topology: Topology) -> Links:
    """
    The links of all GPUs of a machine. SYS between GPUs of one NUMA node counts as NODE, as NCCL treats it on Grace. A GPU
    that has not joined its NVLink fabric has no NVLinks.
    """
    gpus = topology.gpus
    strength = [[0] * len(gpus) for _ in gpus]
    for (i, a), (j, b) in combinations(enumerate(gpus), 2):
        path = pcie_class(topology, a.id, b.id)
        if path is PcieClass.SYS and share_node(topology, a.id, b.id):
            path = PcieClass.NODE
        link = topology.link_by_pair.get((a.id, b.id))
        usable = link is not None and not ({a.fabric_state, b.fabric_state} & NOT_JOINED)
        count = link.fabric_links if link is not None and usable and not kept_apart(topology, a.id, b.id) else 0
        strength[i][j] = strength[j][i] = NVLINK_SCORE * count + PCIE_SCORE[path]
    models = {gpu.name for gpu in gpus}
    model = models.pop() if len(models) == 1 else ""
    ends = links_to_switch(topology)
    switch = [(gpu.fabric, 0 if gpu.fabric_state in NOT_JOINED else ends[gpu.id]) for gpu in gpus]
    return Links(strength, switch, model)


def weakest_seam(links: Links, members: Sequence[int]) -> Seam:
    """The seam of a set of GPUs, given by distinct positions; ONE_GPU for fewer than two."""
    if len(members) < 2:
        return ONE_GPU
    if links.switch:
        ends = [links.switch[member] for member in members]
        if all(count for _, count in ends) and len({fabric for fabric, _ in ends if fabric is not None}) <= 1:
            return Seam(min(count for _, count in ends))
    if len(members) == 2:
        nvlinks, pcie = divmod(links.strength[members[0]][members[1]], NVLINK_SCORE)
        return Seam(nvlinks) if nvlinks else Seam(0, pcie)
    table = [[links.strength[a][b] for b in members] for a in members]
    weakest = _weakest_of_tree(table)
    if weakest < NVLINK_SCORE:
        return Seam(0, weakest)
    return Seam(minimum_cut([[strength // NVLINK_SCORE for strength in row] for row in table]))


def _weakest_of_tree(strength: Sequence[Sequence[int]]) -> int:
    """The weakest edge of a maximum spanning tree (Prim): the best path between both parts of the weakest division."""
    best = list(strength[0])
    rest = set(range(1, len(strength)))
    weakest = max(best)
    while rest:
        nearest = max(rest, key=best.__getitem__)
        weakest = min(weakest, best[nearest])
        rest.remove(nearest)
        row = strength[nearest]
        for other in rest:
            best[other] = max(best[other], row[other])
    return weakest


def minimum_cut(weights: list[list[int]]) -> int:
    """The minimum cut of a graph with at least two vertices (Stoer and Wagner, 1997). Changes its edge `weights`."""
    vertices = list(range(len(weights)))
    least = sum(weights[0])
    while len(vertices) > 1:
        gain = dict.fromkeys(vertices, 0)
        last = previous = vertices[0]
        while gain:  # the order of maximum adjacency
            previous = last
            last = max(gain, key=gain.__getitem__)
            cut = gain.pop(last)
            for other in gain:
                gain[other] += weights[last][other]
        least = min(least, cut)  # between the last vertex and all others
        for other in vertices:
            weights[previous][other] += weights[last][other]
            weights[other][previous] += weights[other][last]
        vertices.remove(last)
    return least


MOST_KEPT = 4096
"""Maximum number of cached scores of each kind. A machine with eight GPUs has 256 sets."""

Asked = tuple[object, ...]
"""The key of a cached answer: everything that it depends on."""


class SetScorer:
    """Scores sets of GPUs of one machine. Keep one per machine."""

    def __init__(self, scores: Scores, links: Links | None = None) -> None:
        """`scores`: of all pairs (`connection_score`). `links` None: only the scores are known."""
        self.scores = scores
        self.links = Links(scores, ()) if links is None else links
        # cached, because the same GPUs stay free between two pods
        self.seam = lru_cache(MOST_KEPT)(partial(weakest_seam, self.links))
        self.own = lru_cache(MOST_KEPT)(partial(total_score, scores))
        """The sum of the scores of all links among the members."""
        self._chosen: dict[Asked, Members] = {}

    @cached_property
    def _fabric_links(self) -> Scores:
        return [[strength // NVLINK_SCORE for strength in row] for row in self.links.strength]

    def most_links(self, members: Members) -> int:
        """An upper bound for the fabric links of the set's seam: the minimum number from a member to all others."""
        if any(count for _, count in self.links.switch):  # computed fast
            return self.seam(members).fabric_links
        rows = map(self._fabric_links.__getitem__, members)
        return min([sum([row[other] for other in members]) for row in rows], default=0)

    def describe(self, members: Members) -> str:
        """The seam of a set as human-readable text: `4 NVLinks, 80 GB/s`."""
        return self.seam(members).text(self.links.model)

    def links_to(self, free: Iterable[int]) -> Sequence[int]:
        """For each GPU of the machine, the sum of the scores of its links to these GPUs."""
        columns = tuple(free)
        return [sum([row[column] for column in columns]) for row in self.scores]

    def chosen(self, asked: Asked, choose: Callable[[], Members]) -> Members:
        """Returns the answer to a question, which is computed once."""
        if asked not in self._chosen:
            if len(self._chosen) >= MOST_KEPT:
                self._chosen.clear()
            self._chosen[asked] = choose()
        return self._chosen[asked]


# NICs: a NIC is local to a GPU if only PCIe switches are between them (PIX, PXB) or, on Grace, if both are at the same
# CPU. One local GPU is enough for a set: NCCL's PXN transfers the data of the other members through it. A NIC that is
# local to no member is near if it is on the NUMA node of a member. Example: GPU-0 to GPU-3 have one local NIC each.
#
#     2 NICs requested, those of GPU-1 and GPU-3 free: GPU-0 and GPU-1 have 1 local NIC, GPU-1 and GPU-3 have 2


THROUGH_SWITCHES = (PcieClass.PSB, PcieClass.PIX, PcieClass.PXB)


class NicLocality(NamedTuple):
    """The GPUs that one NIC is local to and near."""

    local: frozenset[int]
    """The GPUs that it is local to, by their positions."""
    near: frozenset[int]
    """These GPUs, and the GPUs on its NUMA node."""


class Nics(NamedTuple):
    """The NICs that a container could get."""

    wanted: int
    free: Sequence[NicLocality]


NO_NICS = Nics(0, ())


def count_nics(nics: Nics, members: Sequence[int]) -> tuple[int, int]:
    """The number of wanted NICs that can be local to a member of the set, and the number that can be near."""
    if not nics.wanted:
        return 0, 0
    local = sum(not nic.local.isdisjoint(members) for nic in nics.free)
    near = sum(not nic.near.isdisjoint(members) for nic in nics.free)
    return min(local, nics.wanted), min(near, nics.wanted)


def nic_locality(topology: Topology, nic: DeviceID) -> NicLocality:
    """The GPUs of the machine that a NIC is local to, and near."""
    local = set()
    near = set()
    for position, gpu in enumerate(topology.gpus):
        path = pcie_class(topology, nic, gpu.id)
        same_node = share_node(topology, nic, gpu.id)
        if path in THROUGH_SWITCHES or (gpu.memory_node is not None and same_node):
            local.add(position)
        if path is not PcieClass.SYS or same_node:
            near.add(position)
    return NicLocality(frozenset(local), frozenset(near | local))
