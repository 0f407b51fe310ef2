"""
The scores that `prioritize` can be set to give, by name: `TOPOALIGN_SCORING`. 0 to 10, higher is better.

Each has functions for what changes at different times, because a scheduler asks about thousands of nodes: what of a pod it
depends on, once for each kind of machine; what is left on a node, once for each change of the node; the key of a node for a
pod, once for each change of either; and the scores of the nodes that are asked about, by their keys.

    scorer = scorer_of(Scoring.QUALITY, Packing.BINPACK)
    need = scorer.need(topology, demand)
    left = scorer.left(state, demand.rules)
    scorer.scores([scorer.key(topology, need, left), ...])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import nsmallest
from typing import Any, Generic, Protocol, TypeVar

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring import gaia, hami, numa, quality
from topoalign.core.scoring.gaia import Containers
from topoalign.core.scoring.numa import NumaNeed, NumaScore
from topoalign.core.scoring.quality import DeviceNeed, FreeDevices, Packing
from topoalign.core.scoring.zones import Zone, zones_of
from topoalign.core.sharing.gaia.admission import AdmissionNode
from topoalign.core.state.fold import NodeState

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
    """The order in which gpu-admission prefers nodes (`scoring.gaia`)."""
    HAMI = "hami"
    """How full the GPUs in slots are, as HAMi ranks nodes (`scoring.hami`)."""


class Scorer(Protocol, Generic[Need, Left]):
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

    packing: Packing

    def need(self, topology: Topology, demand: PodDemand) -> DeviceNeed:
        """The devices."""
        return quality.device_need(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> FreeDevices:
        """The free devices, by position."""
        return quality.free_devices(state)

    def key(self, topology: Topology, need: DeviceNeed, left: FreeDevices) -> Key:
        """Remembered for machines of one shape."""
        return quality.key_of(topology, need, left, self.packing)


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
    """Scores by the place of a node in the order of gpu-admission (`scoring.gaia`)."""

    def need(self, topology: Topology, demand: PodDemand) -> Containers:
        """The containers that gpu-admission looks at."""
        return gaia.containers_of(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> AdmissionNode | None:
        """What is left of the GPUs in units."""
        return gaia.node_of(state)

    def key(self, topology: Topology, need: Containers, left: AdmissionNode | None) -> Key:
        """The most loaded first, of those with room for the pod."""
        return gaia.order(need, left)


@dataclass(frozen=True)
class HamiScorer(ByPlace):
    """Scores by the place of a node in HAMi's order (`scoring.hami`)."""

    def need(self, topology: Topology, demand: PodDemand) -> str | None:
        """The pod's policy for nodes."""
        return hami.policy_of(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> float:
        """How full the GPUs in slots are."""
        return hami.fullness(state)

    def key(self, topology: Topology, need: str | None, left: float) -> Key:
        """The fullest first, or the emptiest."""
        return hami.order(need, left)


def scorer_of(scoring: Scoring, packing: Packing) -> Scorer[Any, Any]:
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
