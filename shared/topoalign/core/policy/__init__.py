"""Topology policies: what the providers' hints come to, and whether that is good enough. Names as in the kubelet."""

from collections.abc import Mapping
from typing import Protocol

from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy.best_effort import BestEffortPolicy
from topoalign.core.policy.merge import Distances, HintLists
from topoalign.core.policy.none import NonePolicy
from topoalign.core.policy.restricted import RestrictedPolicy
from topoalign.core.policy.single_numa_node import SingleNumaNodePolicy
from topoalign.core.requests import Policy
from topoalign.core.topology.bitmask import Mask


class TopologyPolicy(Protocol):
    """What each policy can be asked."""

    @property
    def name(self) -> str: ...

    @property
    def asks(self) -> bool:
        """Whether the hint providers are asked at all."""

    def merge(self, lists: HintLists, machine: Mask, distances: Distances | None = None) -> TopologyHint:
        """The hint to align to. `distances` are given where the closest NUMA nodes are to be preferred."""

    def admits(self, hint: TopologyHint) -> bool:
        """Whether a container may run with this hint."""


POLICIES: Mapping[Policy, TopologyPolicy] = {
    Policy.NONE: NonePolicy(),
    Policy.BEST_EFFORT: BestEffortPolicy(),
    Policy.RESTRICTED: RestrictedPolicy(),
    Policy.SINGLE_NUMA_NODE: SingleNumaNodePolicy(),
}
