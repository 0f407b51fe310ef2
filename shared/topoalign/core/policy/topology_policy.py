"""Defines the interface of topology policies, which merge hints and decide whether the merged hint is admitted."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.policy.merge.closest_numa import Distances, MaskOrder
from topoalign.core.policy.merge.kubelet_merge import Offer


class MergeQuestion(NamedTuple):
    """The input of the merge of a policy."""

    offers: Sequence[Offer]
    machine: Mask
    distances: Distances | None = None
    """Given if the closest NUMA nodes are preferred. None: distances do not count."""
    mode: Mode = Mode.KUBELET
    work: NumaSearchBudget | None = None
    order: MaskOrder | None = None
    """Sorts equally narrow sets of NUMA nodes in mode `best`."""


class TopologyPolicy(ABC):
    """Base class of the policies. By default, a policy asks the hint providers and admits only preferred hints."""

    name: ClassVar[str]
    asks: ClassVar[bool] = True
    """Whether the hint providers are asked."""
    single_node: ClassVar[bool] = False
    """Whether all resources of a container must be on one NUMA node: only hints for one node, or for any, count."""

    @abstractmethod
    def merge(self, asked: MergeQuestion) -> TopologyHint:
        """The merged hint: of the kubelet's merge or, in mode `best`, of `narrowest_fit`. Raises TooMuchWork."""

    def admits(self, hint: TopologyHint) -> bool:
        """Whether the policy admits a container with this hint."""
        return hint.preferred
