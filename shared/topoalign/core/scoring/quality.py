"""
The score `quality`: how good the devices are that a pod would get on a node, and what it would leave there. 0 to 10.

Of 10 points a node gets, rounded to whole ones:

- **links**, 4: the link score of the GPUs that a container would get, as a share of the machine's best set of as many;
- **NUMA nodes**, 1: the fewest NUMA nodes that so many GPUs can be on, divided by those that they would be on;
- **NICs**, 1: how near the free NICs are to these GPUs, for as many as the pod asks for; all of it for one on a switch each;
- **left**, 1: how good the best sets of 2, 4 and 8 GPUs are that stay free, as shares of the machine's best ones;
- **packing**, 3: the share of the GPUs that would be held (`binpack`), or that would stay free (`spread`).

    8 GPUs in two groups of four, 1 GPU is asked for, NVLinks within the groups only; binpack
    one GPU is held: another of its group, 4 + 1 + 1 + 1 + 3 x 2/8 = 7.75: 8
    none is held: 4 + 1 + 1 + 1 + 3 x 1/8 = 7.375: 7

So links weigh more than anything else: a full node with a bad pair is behind an empty one with a good pair. What a container
has no use for counts in full: links for a single GPU, NICs where none are wanted. The GPUs are those that the node's device
policy prefers on the lowest of the fewest NUMA nodes that have enough, or on all under policy `none`; which CPUs and memory
are free there is not looked at. Of shares, MIG instances and functions only the packing tells nodes apart.

Which machine it is, what is free by position, and what is asked for decide the score; so it is remembered by these for all
machines of one model. A node with too few of a device has the score 0.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, combinations
from math import comb
from typing import NamedTuple

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.bitmask import mask_of, nodes_of
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import pair_score
from topoalign.core.model.topology.views import made_once
from topoalign.core.placement.fragmentation import sets_left
from topoalign.core.placement.gpus.device_policy import GpuChoice, Members
from topoalign.core.placement.gpus.set_scorer import Nics
from topoalign.core.placement.gpus.topology import nearness
from topoalign.core.placement.preference import PLACEMENTS, choose, set_scorer
from topoalign.core.policy import POLICIES
from topoalign.core.state.fold import NodeState

LINKS, NUMA, NICS, LEFT, PACKING = 4, 1, 1, 1, 3
"""Points for each part."""
MOST_SETS = 1_000
"""Sets of NUMA nodes of which the lowest is searched for; of more, those that have the most GPUs are taken."""
MOST_KEPT = 16_384
"""Scores that are remembered for machines of one model."""


class Packing(StrEnum):
    """Which nodes come first where the devices are equally good."""

    BINPACK = "binpack"
    """Those of which the most is held."""
    SPREAD = "spread"
    """Those of which the most is free."""


class DeviceNeed(NamedTuple):
    """What of a pod and of the rules of a node's kubelet the score depends on."""

    gpus: tuple[tuple[ResourceName, int], ...]
    """How many whole GPUs each container asks for."""
    nics: tuple[tuple[ResourceName, int], ...]
    """How many NICs the pod asks for."""
    parts: tuple[tuple[ResourceName, int], ...]
    """How many of other devices that are offered here."""
    aligned: bool
    """Whether the kubelet looks at NUMA nodes."""
    placement: str
    """The node's device policy."""

    @property
    def names(self) -> Iterator[ResourceName]:
        """The resources that are asked for."""
        return (name for some in (self.gpus, self.nics, self.parts) for name, _ in some)


FreeDevices = Mapping[ResourceName, int]
"""Resource -> the GPUs or NICs that are free, as bits by their positions on the machine; of other devices how many."""


def device_need(topology: Topology, demand: PodDemand) -> DeviceNeed:
    """
    The need of a pod on a kind of machine. To be made once for each pod, rules and shape, not for each node. GPUs of plain
    init containers count only where no other container asks for some, because the others take them over.
    """
    kinds = {name: topology.kind_of(name) for name in demand.devices}
    lasting = [each for each in demand.containers if each.role != "init"]
    gpus = []
    for name in (name for name, kind in kinds.items() if kind == "gpu"):
        sizes = [each.devices[name] for each in lasting if each.devices.get(name)]
        gpus += [(name, size) for size in sizes or [demand.devices[name]] if size]
    return DeviceNeed(
        gpus=tuple(gpus),
        nics=tuple((name, demand.devices[name]) for name, kind in kinds.items() if kind == "nic"),
        parts=tuple((name, demand.devices[name]) for name, kind in kinds.items() if kind in ("part", "unit", "slot")),
        aligned=POLICIES[demand.rules.policy].asks,
        placement=demand.rules.placement,
    )


def free_devices(state: NodeState) -> FreeDevices:
    """What is free on a node of each resource that is offered there. To be renewed when the node changes."""
    topology = state.hardware
    places = places_of_cards(topology)
    return {
        name: len(state.ownership.free(name))
        if topology.kind_of(name) in ("part", "unit", "slot")
        else mask_of(map(places.__getitem__, state.ownership.free(name)))
        for name in topology.offers_of
    }


@made_once
def places_of_cards(topology: Topology) -> Mapping[DeviceID, int]:
    """GPU or NIC -> its position among the GPUs or NICs of the machine."""
    return {card: place for cards in (topology.gpu_by_id, topology.nic_by_id) for place, card in enumerate(cards)}


def quality(topology: Topology, need: DeviceNeed, free: FreeDevices, packing: Packing) -> int:
    """
    The score, 0 to 10, of a node of this topology: the one that was announced, whose shape others share.

    2 µs where such a node was scored before; else 0.1 ms with eight GPUs, 1 to 10 ms with sixteen.
    """
    shape = topology.shape
    known = scores_of(shape)
    key = need, tuple(free.get(name, 0) for name in need.names), packing
    score = known.get(key)
    if score is None:
        if len(known) >= MOST_KEPT:
            known.clear()
        score = known[key] = points(shape, need, free, packing)
    return score


Key = tuple[DeviceNeed, tuple[int, ...], Packing]


@made_once
def scores_of(topology: Topology) -> dict[Key, int]:
    """The scores that are remembered for machines of one shape."""
    return {}


def points(shape: Topology, need: DeviceNeed, free: FreeDevices, packing: Packing) -> int:
    """The points of all parts together, rounded; 0 where a device is short."""
    left = {name: nodes_of(free.get(name, 0)) for name, _ in (*need.gpus, *need.nics)}
    amounts = {**free, **{name: len(places) for name, places in left.items()}}
    if any(amounts.get(name, 0) < amount for name, amount in (*need.nics, *need.parts)):
        return 0
    scorer, node_of = set_scorer(shape), numa_nodes(shape)
    given: list[tuple[ResourceName, Members]] = []
    for name, size in need.gpus:
        members = preferred(shape, node_of.get(name, {}), left[name], size, need)
        if not members:
            return 0
        given.append((name, members))
        left[name] = tuple(place for place in left[name] if place not in members)
    asked = dict(need.parts) | {name: amounts[name] - len(left[name]) for name, _ in need.gpus}
    gpus = tuple(place for _, members in given for place in members)
    rest = [place for name in dict(need.gpus) for place in left[name]]
    return int(
        LINKS * share([scorer.own(members) for _, members in given if scorer.best[len(members)]])
        + NUMA * share([narrowness(node_of.get(name, {}), members) for name, members in given])
        + NICS * share(besides(shape, need, left, gpus))
        + LEFT * share([1 - each.lost for each in sets_left(scorer, rest).sets])
        + PACKING * share(list(packed(shape, asked, amounts, packing)))
        + 0.5
    )


def share(parts: Sequence[float]) -> float:
    """The mean of these shares; all where there is nothing to judge."""
    return sum(parts) / len(parts) if parts else 1.0


def preferred(shape: Topology, node_of: Mapping[int, int], free: Sequence[int], size: int, need: DeviceNeed) -> Members:
    """The GPUs that a container would get; none where too few are free."""
    available = within(node_of, free, size) if need.aligned else free
    asked = GpuChoice(set_scorer(shape), available, (), size, frozenset(free))
    return choose(PLACEMENTS[need.placement], asked)


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


def narrowness(node_of: Mapping[int, int], members: Members) -> float:
    """The fewest NUMA nodes that so many GPUs can be on, divided by those that these are on; 1 where they are not known."""
    width = len({node_of[place] for place in members if place in node_of})
    return min(1.0, fewest(Counter(node_of.values()), len(members)) / width) if width else 1.0


def besides(
    shape: Topology, need: DeviceNeed, free: Mapping[ResourceName, Sequence[int]], gpus: Members
) -> list[float]:
    """How near the free NICs are to these GPUs, 1 for a switch in common: for as many NICs as the pod asks for."""
    if not gpus:
        return []
    near = nic_scores(shape)
    return [nearness(Nics(amount, [near[nic] for nic in free[name]]), gpus) for name, amount in need.nics if amount]


@made_once
def nic_scores(topology: Topology) -> Sequence[Sequence[int]]:
    """For each NIC its pair scores with all GPUs, by their positions."""
    return [[pair_score(topology, nic, gpu) for gpu in topology.gpu_by_id] for nic in topology.nic_by_id]


def packed(
    shape: Topology, asked: Mapping[ResourceName, int], free: Mapping[ResourceName, int], packing: Packing
) -> Iterator[float]:
    """Of each resource the share that would be held, or that would stay free."""
    for name, amount in asked.items():
        left = (free[name] - amount) / len(shape.devices[name])
        yield left if packing is Packing.SPREAD else 1 - left
