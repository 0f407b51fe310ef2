"""
The scores that `prioritize` can be set to give, by name: `TOPOALIGN_SCORING`. 0 to 10, higher is better.

Each has three functions, because a scheduler asks about thousands of nodes: what of a pod it depends on, once for each kind
of machine; what is left on a node, once for each change of the node; and the score, for each node and pod.

    scorer = scorer_of(Scoring.QUALITY, Packing.BINPACK)
    need = scorer.need(topology, demand)
    left = scorer.left(state, demand.rules)
    scorer.score(topology, need, left)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from topoalign.core.demand.pod_demand import PodDemand
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.scoring import numa, quality
from topoalign.core.scoring.numa import NumaNeed, NumaScore
from topoalign.core.scoring.quality import DeviceNeed, FreeDevices, Packing
from topoalign.core.scoring.zones import Zone, zones_of
from topoalign.core.state.fold import NodeState

Need = TypeVar("Need")
Left = TypeVar("Left")
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


class Scorer(Protocol, Generic[Need, Left]):
    """One way to score nodes."""

    def need(self, topology: Topology, demand: PodDemand) -> Need:
        """What of a pod and its rules the score depends on, on machines of this shape."""

    def left(self, state: NodeState, rules: AdmissionRules) -> Left:
        """What is left on a node. Raises NotEnoughCpus and TooMuchWork where the CPUs to keep cannot be chosen."""

    def score(self, topology: Topology, need: Need, left: Left) -> int:
        """The score, 0 to 10. `topology`: as the node announced it, with the shape that equal machines share."""


@dataclass(frozen=True)
class QualityScorer:
    """Scores by the devices (`scoring.quality`)."""

    packing: Packing

    def need(self, topology: Topology, demand: PodDemand) -> DeviceNeed:
        """The devices."""
        return quality.device_need(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> FreeDevices:
        """The free devices, by position."""
        return quality.free_devices(state)

    def score(self, topology: Topology, need: DeviceNeed, left: FreeDevices) -> int:
        """Remembered for machines of one shape."""
        return quality.quality(topology, need, left, self.packing)


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

    def score(self, topology: Topology, need: NumaNeed, left: Sequence[Zone]) -> int:
        """The same machine may have other zones on another node."""
        return numa.numa_score(self.kind, need, left) * TEN // numa.BEST


def scorer_of(scoring: Scoring, packing: Packing) -> Scorer[Any, Any]:
    """The scorer of this name; `packing` counts for `quality` alone."""
    return QualityScorer(packing) if scoring is Scoring.QUALITY else NumaScorer(NumaScore(scoring))
