"""
Hints, and the question to a hint provider.

A hint is a set of NUMA nodes on which the request can be served. It is `preferred` if it has as few nodes as possible.
For each resource, a provider returns a list of hints, an empty list (the request cannot be served), or None (no
opinion). The merge treats the three differently.

A question contains all data on which its answer depends. So a provider in another process answers from the caller's
data, not from the facts that it has received itself.
"""

from collections.abc import Mapping

import msgspec

from topoalign.core.model.events import Allocation, MemoryUse
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest
from topoalign.core.model.topology.bitmask import Mask


class TopologyHint(msgspec.Struct, frozen=True, array_like=True):
    """One way to place a request. `affinity` is a mask of NUMA node ids; None: any nodes."""

    affinity: Mask | None
    preferred: bool


class ResourceNeed(msgspec.Struct, frozen=True):
    """The amount of a resource that a request needs, and the amounts that are near NUMA nodes."""

    amount: int
    supply: dict[Mask, int]
    """Mask of nodes -> the amount near any of them. A device that is near several nodes counts once."""


class HintRule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    Represents the hints if there are too many NUMA nodes to list all subsets. The hints are all subsets of `nodes` that
    meet all `needs`, and the masks in `besides`. Hints with `least` nodes are preferred. No hint has fewer nodes.
    """

    nodes: Mask
    needs: tuple[ResourceNeed, ...]
    least: int
    besides: tuple[Mask, ...] = ()
    """Ascending."""


Hints = tuple[TopologyHint, ...] | HintRule | None
"""The hints for one resource. None: no opinion. (): the request cannot be served."""

ProviderHints = Mapping[ResourceName, Hints]
"""The hints of one provider. It has no opinion on a resource that is missing."""


class HintQuestion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Asks where a container, or a whole pod, can be placed. It has all data that the answer depends on."""

    node: NodeName
    topology: tuple[int, int]
    """(epoch, revision) of the caller's TopologyDiscovered."""
    allocations: tuple[Allocation, ...]
    """All live allocations, and those that were decided for earlier containers of the same pod."""
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
