"""
Topology policies: they merge hints, and decide whether the merged hint is good enough. Names as in the kubelet.

A policy is a module with its class, a line in POLICIES and its name in `Policy`. Code elsewhere asks its attributes,
and never which policy it is.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from topoalign.core.model.hints import TopologyHint
from topoalign.core.model.requests import Mode, Policy
from topoalign.core.model.topology.bitmask import Mask
from topoalign.core.numa_sets.search import NumaSearchBudget
from topoalign.core.policy.best_effort import BestEffortPolicy
from topoalign.core.policy.merge.closeness import Distances, MaskOrder
from topoalign.core.policy.merge.hint_combinations import Offer
from topoalign.core.policy.none import NonePolicy
from topoalign.core.policy.restricted import RestrictedPolicy
from topoalign.core.policy.single_numa_node import SingleNumaNodePolicy


class TopologyPolicy(Protocol):
    """Protocol of a topology policy: how it merges hints, and which merged hints it admits."""

    @property
    def name(self) -> str:
        """The kubelet's name of the policy."""

    @property
    def asks(self) -> bool:
        """Whether the hint providers are asked at all."""

    @property
    def single_node(self) -> bool:
        """Whether all of a container must be on one NUMA node: then only hints for one node, or for any, count."""

    def merge(
        self,
        offers: Sequence[Offer],
        machine: Mask,
        distances: Distances | None = None,
        mode: Mode = Mode.KUBELET,
        work: NumaSearchBudget | None = None,
        order: MaskOrder | None = None,
    ) -> TopologyHint:
        """
        Returns the hint to align to: the kubelet's merge of the offers, or in mode `best` that of `narrowest_fit`.

        `distances` are given where the closest NUMA nodes are to be preferred; `work` bounds the search; `order` sorts
        equally narrow sets of NUMA nodes in mode `best`. Raises TooMuchWork.
        """

    def admits(self, hint: TopologyHint) -> bool:
        """Whether a container may run with this hint."""


POLICIES: Mapping[Policy, TopologyPolicy] = {
    Policy.NONE: NonePolicy(),
    Policy.BEST_EFFORT: BestEffortPolicy(),
    Policy.RESTRICTED: RestrictedPolicy(),
    Policy.SINGLE_NUMA_NODE: SingleNumaNodePolicy(),
}

PREFERRED_ALONE = Policy.RESTRICTED
"""The policy that merges as `best-effort` does and refuses what is not preferred."""
