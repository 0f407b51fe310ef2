"""
Hints, and the question that a hint provider answers.

A hint names NUMA nodes on which the request can be met, and whether they are as few as possible (`preferred`). A
provider answers per resource with a list of hints, with an empty list (cannot be met) or with None (no opinion), and
the three mean different things to the merge.

A question carries all that its answer depends on, so that a provider in another process answers from what the asker
knows, and never from the facts that it has received so far.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.model.events import Allocation, MemoryUse
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.bitmask import Mask


class TopologyHint(msgspec.Struct, frozen=True, array_like=True):
    """One way to place a request. `affinity` is a mask of NUMA node ids; None means any node will do."""

    affinity: Mask | None
    preferred: bool


class ResourceNeed(msgspec.Struct, frozen=True):
    """An amount that a request needs of something that is spread over the NUMA nodes."""

    amount: int
    supply: dict[Mask, int]
    """Mask of nodes -> how much is near any of them. What is near several nodes counts once."""


class HintRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    The hints where NUMA nodes are too many to list their subsets: the subsets of `nodes` that meet all needs, and the
    masks of `besides`. Those of `least` nodes are preferred, and none has fewer.
    """

    nodes: Mask
    needs: tuple[ResourceNeed, ...]
    least: int
    besides: tuple[Mask, ...] = ()
    """Ascending."""


Hints = tuple[TopologyHint, ...] | HintRule | None
"""Of one resource: None is no opinion, () is cannot be met."""

ProviderHints = Mapping[ResourceName, Hints]
"""Of one provider. Empty: it has no opinion at all. A resource that is missing counts as no opinion on it."""


class HintQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Asks where a container, or a whole pod, could be placed. It carries all that the answer depends on."""

    node: NodeName
    topology: tuple[int, int]
    """(epoch, revision) of the TopologyDiscovered that the asker decides on."""
    allocations: tuple[Allocation, ...]
    """All live ones, and those already decided for earlier containers of the same pod."""
    memory: dict[int, MemoryUse] = {}
    """`NodeState.memory`."""
    unusable: tuple[DeviceID, ...]
    """Devices that are not healthy or are cordoned."""
    pod: PodRequest
    container: ContainerName | None
    """None: hints for the pod as a whole."""
    rules: AdmissionRules


class HintAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The hints of each provider, in the order in which the kubelet asks them: device, cpu, memory."""

    providers: dict[str, dict[ResourceName, Hints]]
