"""
Defines the scores of `prioritize` by name (`TOPOALIGN_SCORING`): 0 to 10, higher is better.

Each has functions for what changes at different times, because a scheduler asks about thousands of nodes: what of a pod it
depends on, once for each kind of machine; what is left on a node, once for each change of the node; the key of a node for a
pod, once for each change of either; and the scores of the nodes that are asked about, by their keys.

    scorer = scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK)
    need = scorer.need(topology, demand)
    left = scorer.left(state, demand.rules)
    scorer.scores([scorer.key(topology, need, left), ...])
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.demand.share_annotations import NODE_POLICY, GpuOrder
from topoalign.core.demand.shares import units_asked
from topoalign.core.model.holdings import Amount
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring import numa, quality
from topoalign.core.scoring.numa import NumaNeed, NumaScore
from topoalign.core.scoring.quality import DeviceNeed, FreeDevices, NodePacking
from topoalign.core.scoring.zones import Zone, zones_of
from topoalign.core.sharing.choosers import shared_gpus
from topoalign.core.sharing.gaia.admission import AdmissionNode, Load, admission_order_key, asks_for_gpu
from topoalign.core.sharing.hami.gpu_scores import hami_gpus_score
from topoalign.core.sharing.slots_as_hami import usage_of_gpus
from topoalign.core.state.fold import NodeState

# Orders nodes as gpu-admission does: of those on which the pod fits, the one with the least left comes first.
#
#     cores left of all GPUs in units, then their memory, then the name
#     a: 150 cores and 200 blocks, b: 150 and 180, c: 800 and 1280 are tried in the order b, a, c
#
# gpu-admission leaves no other node than the first on which the pod fits; here the others come after it, and last those
# on which it finds no room, in the same order: whether topoalign finds room, the filter has decided. It does not
# restrict a pod without such a GPU, or with memory alone: for such a pod all nodes are equal. The GPUs that it promises
# are not taken over, because gpu-manager chooses again (`sharing.gaia`). Source: gpu-admission 47d56ae, predicate.


Containers = tuple[Amount, ...]
"""What each container of a pod asks for; (): gpu-admission lets the pod go anywhere."""


def unit_containers(topology: Topology, demand: PodDemand) -> Containers:
    """
    The containers that gpu-admission looks at, which are the app containers with units: all others are unknown to it, and so
    is that a share is spread over several GPUs.
    """
    asked = (units_asked(topology, each.devices) for each in demand.containers if each.role == "app")
    containers = tuple(each for each in asked if each is not None)
    return containers if asks_for_gpu(containers) else ()


def admission_node(state: NodeState) -> AdmissionNode | None:
    """
    A node with its GPUs in units; None: it has none. Nothing is left of one that somebody has whole, that is not healthy, or
    that is held in another way.
    """
    units = state.ownership.units_left
    if not units:
        return None
    whole = {gpu for each in state.allocations.values() for gpu, held in each.amounts.items() if held.cores >= CORES}
    gpus = [
        msgspec.structs.replace(card, usable=card.usable and card.device not in whole)
        for card in shared_gpus(state.hardware, units)
        if card.device in units
    ]
    return AdmissionNode(name=state.node, cards=tuple(gpus))


def gaia_order(containers: Containers, node: AdmissionNode | None) -> tuple[bool, Load] | tuple[()] | None:
    """The key that sorts nodes for a pod; None for a node that gpu-admission does not try."""
    if not containers:
        return ()
    return None if node is None else admission_order_key(node, containers)


Need = TypeVar("Need")
Left = TypeVar("Left")
Key = tuple[Any, ...] | None
"""What sorts nodes, the best first. None: the node comes last."""
TEN = 10
"""The highest score."""


class Scoring(StrEnum):
    """Names of the scores."""

    QUALITY = "quality"
    """How good the devices are that the pod would get, and what it would leave (`scoring.quality`)."""
    LEAST_ALLOCATED = NumaScore.LEAST_ALLOCATED.value
    MOST_ALLOCATED = NumaScore.MOST_ALLOCATED.value
    BALANCED = NumaScore.BALANCED.value
    LEAST_NUMA_NODES = NumaScore.LEAST_NUMA_NODES.value
    GAIA = "gaia"
    """The order in which gpu-admission prefers nodes."""
    HAMI = "hami"
    """How full the GPUs in slots are, as HAMi ranks nodes."""


class NodeScorer(Protocol, Generic[Need, Left]):
    """One way to score nodes."""

    def need(self, topology: Topology, demand: PodDemand) -> Need:
        """What of a pod and its rules the score depends on, on machines of this shape."""

    def left(self, state: NodeState, rules: AdmissionRules) -> Left:
        """What is left on a node. Raises NotEnoughCpus and TooMuchWork where the CPUs to keep cannot be chosen."""

    def key(self, topology: Topology, need: Need, left: Left) -> Key:
        """What sorts a node for a pod. `topology`: as the node announced it, with the shape that equal machines share."""

    def scores(self, keys: Sequence[Key]) -> Sequence[int]:
        """The scores, 0 to 10, of nodes with these keys."""


class ByPlace:
    """Base of scorers whose score is the place of a node among those that are asked about."""

    def scores(self, keys: Sequence[Key]) -> Sequence[int]:
        """10 for the lowest key, one less for each that follows."""
        return by_place(keys)


@dataclass(frozen=True)
class QualityScorer(ByPlace):
    """Scores by the devices (`scoring.quality`)."""

    packing: NodePacking

    def need(self, topology: Topology, demand: PodDemand) -> DeviceNeed:
        """The devices."""
        return quality.device_need(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> FreeDevices:
        """The free devices, by position."""
        return quality.free_devices(state)

    def key(self, topology: Topology, need: DeviceNeed, left: FreeDevices) -> Key:
        """Remembered for machines of one shape."""
        return quality.node_key(topology, need, left, self.packing)


@dataclass(frozen=True)
class NumaScorer:
    """Scores by what NUMA nodes have left (`scoring.numa`), a tenth of NodeResourceTopologyMatch's score, rounded down."""

    kind: NumaScore

    def need(self, topology: Topology, demand: PodDemand) -> NumaNeed:
        """What containers request."""
        return numa.numa_need(demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> Sequence[Zone]:
        """The NUMA nodes."""
        return zones_of(state, rules)

    def key(self, topology: Topology, need: NumaNeed, left: Sequence[Zone]) -> Key:
        """The score, negative."""
        return (-(numa.numa_score(self.kind, need, left) * TEN // numa.BEST),)

    def scores(self, keys: Sequence[Key]) -> Sequence[int]:
        """Each node has its score by itself."""
        return [0 if key is None else -key[0] for key in keys]


@dataclass(frozen=True)
class GaiaScorer(ByPlace):
    """Scores by the place of a node in the order of gpu-admission."""

    def need(self, topology: Topology, demand: PodDemand) -> Containers:
        """The containers that gpu-admission looks at."""
        return unit_containers(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> AdmissionNode | None:
        """What is left of the GPUs in units."""
        return admission_node(state)

    def key(self, topology: Topology, need: Containers, left: AdmissionNode | None) -> Key:
        """The most loaded first, of those with room for the pod."""
        return gaia_order(need, left)


@dataclass(frozen=True)
class HamiScorer(ByPlace):
    """Scores by the place of a node in HAMi's order."""

    def need(self, topology: Topology, demand: PodDemand) -> str | None:
        """The pod's policy for nodes."""
        return policy_of(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> float:
        """How full the GPUs in slots are."""
        return hami_node_score(state)

    def key(self, topology: Topology, need: str | None, left: float) -> Key:
        """The fullest first, or the emptiest."""
        return hami_order(need, left)


def scorer_by_name(scoring: Scoring, packing: NodePacking) -> NodeScorer[Any, Any]:
    """The scorer of this name; `packing` counts for `quality` alone."""
    match scoring:
        case Scoring.QUALITY:
            return QualityScorer(packing)
        case Scoring.GAIA:
            return GaiaScorer()
        case Scoring.HAMI:
            return HamiScorer()
        case _:
            return NumaScorer(NumaScore(scoring))


def by_place(keys: Sequence[Key]) -> list[int]:
    """
    The scores of nodes by their keys: 10 for the lowest, one less for each that follows, and 1 from the tenth on. Equal keys
    have equal scores; None has 0.
    """
    lowest = nsmallest(TEN - 1, {key for key in keys if key is not None})
    scores = {None: 0} | {key: TEN - place for place, key in enumerate(lowest)}
    return [scores.get(key, 1) for key in keys]


# Orders nodes as HAMi does: by how full their GPUs in slots are before the pod arrives.
#
# HAMi's score of a node is 10 times the sum of its held slots, cores and memory, each as a fraction of what all of
# its GPUs in slots offer together. The pod's annotation `hami.io/node-scheduler-policy` sets whether the fullest node comes
# first (`binpack`, the default) or the emptiest (`spread`). What the pod asks for, links and NUMA nodes do not count:
#
#     two GPUs of 10 slots, 100 cores and 8000 MiB on each node; held is 1 slot with 25 cores and 2000 MiB on a, with 75
#     cores and 6000 MiB on b: a has 10 x (1/20 + 25/200 + 2000/16000) = 3, b 10 x (1/20 + 75/200 + 6000/16000) = 8
#     binpack ranks b before a, spread a before b
#
# A node without GPUs in slots counts as an empty one. HAMi does not restrict pods that ask for no GPU: for them all
# nodes are equal. Source: HAMi 4707fb02.


def policy_of(topology: Topology, demand: PodDemand) -> str | None:
    """By which policy nodes are ranked for a pod; None: HAMi does not look at it."""
    asks = any(amount and topology.kind_of(name) in ("gpu", "slot") for name, amount in demand.devices.items())
    return node_policy(demand.annotations) if asks else None


def node_policy(annotations: Mapping[str, str], policy: str = GpuOrder.BINPACK) -> str:
    """By which policy nodes are ranked for a pod with these annotations; `policy` where they name none."""
    return annotations.get(NODE_POLICY, policy)


def hami_node_score(state: NodeState) -> float:
    """HAMi's score of a node."""
    left = state.ownership.slots_left
    return hami_gpus_score(usage_of_gpus(shared_gpus(state.hardware, left), left)) if left else 0.0


def hami_order(policy: str | None, score: float) -> tuple[float, ...]:
    """The key that sorts nodes of such scores for a pod: the fullest first, with `spread` the emptiest."""
    return () if policy is None else (score if policy == GpuOrder.SPREAD else -score,)
