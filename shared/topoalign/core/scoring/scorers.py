"""
The scores that `prioritize` can be set to give, by name: `TOPOALIGN_SCORING`. 0 to 10, higher is better.

Each has three functions, because a scheduler asks about thousands of nodes: what of a pod it depends on, once for each kind
of machine; what is left on a node, once for each change of the node; and the score, for each node and pod.

    scorer = scorer_of(Scoring.QUALITY, Packing.BINPACK)
    need = scorer.need(topology, demand)
    left = scorer.left(state, demand.rules)
    scorer.score(topology, need, left)

A scorer with an `order` ranks nodes among those that are asked about: `by_place([scorer.order(need, left), ...])`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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

    def score(self, topology: Topology, need: Need, left: Left) -> int:
        """The score, 0 to 10. `topology`: as the node announced it, with the shape that equal machines share."""

    @property
    def order(self) -> Callable[[Need, Left], Key] | None:
        """What sorts nodes where scores are their places among those that are asked about; None: `score` tells."""


@dataclass(frozen=True)
class QualityScorer:
    """Scores by the devices (`scoring.quality`)."""

    packing: Packing
    order: ClassVar[None] = None

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
    order: ClassVar[None] = None

    def need(self, topology: Topology, demand: PodDemand) -> NumaNeed:
        """What containers request."""
        return numa.numa_need(demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> Sequence[Zone]:
        """The NUMA nodes."""
        return zones_of(state, rules)

    def score(self, topology: Topology, need: NumaNeed, left: Sequence[Zone]) -> int:
        """The same machine may have other zones on another node."""
        return numa.numa_score(self.kind, need, left) * TEN // numa.BEST


@dataclass(frozen=True)
class GaiaScorer:
    """Scores by the place of a node in the order of gpu-admission (`scoring.gaia`)."""

    def need(self, topology: Topology, demand: PodDemand) -> Containers:
        """The containers that gpu-admission looks at."""
        return gaia.containers_of(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> AdmissionNode | None:
        """What is left of the GPUs in units."""
        return gaia.node_of(state)

    def score(self, topology: Topology, need: Containers, left: AdmissionNode | None) -> int:
        """That of the node alone, without others."""
        return by_place([self.order(need, left)])[0]

    @property
    def order(self) -> Callable[[Containers, AdmissionNode | None], Key]:
        """The most loaded first, of those with room for the pod."""
        return gaia.order


@dataclass(frozen=True)
class HamiScorer:
    """Scores by the place of a node in HAMi's order (`scoring.hami`)."""

    def need(self, topology: Topology, demand: PodDemand) -> str | None:
        """The pod's policy for nodes."""
        return hami.policy_of(topology, demand)

    def left(self, state: NodeState, rules: AdmissionRules) -> float:
        """How full the GPUs in slots are."""
        return hami.fullness(state)

    def score(self, topology: Topology, need: str | None, left: float) -> int:
        """That of the node alone, without others."""
        return by_place([self.order(need, left)])[0]

    @property
    def order(self) -> Callable[[str | None, float], Key]:
        """The fullest first, or the emptiest."""
        return hami.order


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
    places = {key: place for place, key in enumerate(sorted({key for key in keys if key is not None}))}
    return [0 if key is None else max(1, TEN - places[key]) for key in keys]
