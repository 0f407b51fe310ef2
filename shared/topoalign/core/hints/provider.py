"""
What a hint provider is: one of the node's resource managers, asked where a container or a pod could be placed.

A provider is a module with its class, and a line in PROVIDERS. Code elsewhere asks its attributes and methods, and never
which provider it is.
"""

from collections.abc import Set
from typing import NamedTuple, Protocol

from topoalign.core.model.hints import HintQuestion, ProviderHints
from topoalign.core.model.ids import ContainerName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState


class Largest(NamedTuple):
    """The size of the largest rule that a provider makes of some resource on a machine."""

    needs: int
    supply: int
    """Entries per need."""
    besides: int


class HintProvider(Protocol):
    """What each provider can be asked."""

    @property
    def name(self) -> str:
        """Its key in PROVIDERS, in a HintAnswer and in a Refusal."""

    @property
    def narrows(self) -> bool:
        """
        Whether it takes as few as it can of the NUMA nodes that the merge allows, in a mode with `narrows_after_merge`. Its
        resources have the same hints.
        """

    def hints(
        self, state: NodeState, pod: PodRequest, container: ContainerName | None, rules: AdmissionRules
    ) -> ProviderHints:
        """
        Per resource that it manages the hints for a container, or with None for the pod as a whole.

        Raises TooMuchWork, ValueError for CPUs or NUMA nodes in the state that are none, and InvalidField for annotations.
        """

    def resources(self, question: HintQuestion, topology: Topology) -> Set[ResourceName]:
        """The resources on which it answers this question."""

    def may_be_silent(self, question: HintQuestion) -> bool:
        """Whether an answer on none of these resources can be meant."""

    def may_have_no_opinion(self, resource: ResourceName, question: HintQuestion, topology: Topology) -> bool:
        """Whether None can be meant as the hints of a resource."""

    def largest_rule(self, resource: ResourceName, question: HintQuestion, topology: Topology) -> Largest:
        """The largest HintRule that it makes for this question."""
