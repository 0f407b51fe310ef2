"""
Defines a hint provider: one of the node's resource managers, asked where a container or a pod can be placed.

A provider is a module with its class, and a line in PROVIDERS. Other code uses its attributes and methods, and never checks
which provider it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import ClassVar, NamedTuple

from topoalign.core.demand.pod_demand import Demand
from topoalign.core.model.hints import ProviderHints
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.state.fold import NodeState


class HintRequest(NamedTuple):
    """Asks on which NUMA nodes a container, or a pod as a whole, could be placed."""

    state: NodeState
    """With all that earlier containers of the pod were given. Its topology is known."""
    demand: Demand
    rules: AdmissionRules


class Largest(NamedTuple):
    """The size of the largest rule that a provider makes of some resource on a machine."""

    needs: int
    supply: int
    """Entries per need."""
    besides: int


class HintProvider(ABC):
    """Base of the hint providers, with the answers of one that always has an opinion."""

    name: ClassVar[str]
    """Its key in PROVIDERS, in a HintAnswer and in a Refusal."""

    @abstractmethod
    def hints(self, asked: HintRequest) -> ProviderHints:
        """Hints per resource. Raises TooMuchWork, and ValueError for invalid CPUs or NUMA nodes in the state."""

    @abstractmethod
    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        """The resources on which it has hints for this request."""

    @abstractmethod
    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        """The largest HintRule that it makes for this request."""

    def may_be_silent(self, asked: HintRequest) -> bool:
        """Whether an answer on none of these resources is valid."""
        return False

    def may_have_no_opinion(self, resource: ResourceName, asked: HintRequest) -> bool:
        """Whether None is a valid answer for a resource."""
        return False
