"""
Defines a hint provider: a resource manager of the node that finds where a container or a pod can be placed.

A provider is a class in its own module, and an entry in PROVIDERS. Other code uses its attributes and methods, and
never checks which provider it is.
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
    """A request for the NUMA nodes on which a container, or a pod as a whole, can be placed."""

    state: NodeState
    """Includes the allocations of earlier containers of the pod. Its topology is known."""
    demand: Demand
    rules: AdmissionRules


class Largest(NamedTuple):
    """The size of the largest rule that a provider can return for a resource on a machine."""

    needs: int
    supply: int
    """Entries per need."""
    besides: int


class HintProvider(ABC):
    """The base class of hint providers. By default, a provider always has a preference."""

    name: ClassVar[str]
    """Its key in PROVIDERS, in a HintAnswer and in a Refusal."""

    @abstractmethod
    def hints(self, asked: HintRequest) -> ProviderHints:
        """Hints per resource. Raises TooMuchWork, and ValueError for invalid CPUs or NUMA nodes in the state."""

    @abstractmethod
    def resources(self, asked: HintRequest) -> Set[ResourceName]:
        """The resources for which it provides hints in this request."""

    @abstractmethod
    def largest_rule(self, resource: ResourceName, asked: HintRequest) -> Largest:
        """The size of the largest HintRule that it can return for this request."""

    def may_be_silent(self, asked: HintRequest) -> bool:
        """Whether an answer without any of these resources is valid."""
        return False

    def may_have_no_opinion(self, resource: ResourceName, asked: HintRequest) -> bool:
        """Whether None is a valid answer for a resource."""
        return False
