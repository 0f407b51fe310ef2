"""The answer about a pod for a cluster: the nodes on which it fits, why it does not fit on others, and what helps."""

import msgspec

from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.ids import NodeName, ResourceName


class Ranked(msgspec.Struct, frozen=True):
    """A node that would admit the pod."""

    node: NodeName
    score: int
    """0 to 10; higher is better. Nodes with equal scores are in the order of the scorer if it has one, else by name."""
    seam: str = ""
    """
    The weakest seam of the GPUs that the pod would get, human-readable: `18 NVLinks, 722 GB/s`. Empty: no container
    would get several GPUs, or the seam was not computed.
    """


class RefusalReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why some nodes do not admit the pod."""

    code: str
    """Stable code: `NotAligned`, `NotEnoughDevices`."""
    resolvability: Resolvability
    nodes: int
    """Number of nodes with this reason."""
    examples: tuple[NodeName, ...]
    """The first of these nodes by name."""
    finding: str
    """The finding for the first of these nodes."""
    remedy: str
    """The remedy for the first of these nodes."""


class EvictionCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that would have to leave a node."""

    pod: str
    """`namespace/name`. If that is unknown: its UID, or the id of its allocation."""
    devices: dict[ResourceName, int]
    """Number of its devices by resource."""


class SufficientChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change that makes the pod fit somewhere."""

    text: str
    """Human-readable description."""
    cost: float
    """The fraction of the request that is given up or moved: 0.25 for 3 GPUs instead of 4. Changes are sorted by it."""
    nodes: int
    """Number of nodes that would then admit the pod."""
    example: NodeName
    """One of these nodes."""
    asked: dict[ResourceName, int] = {}
    """Resource -> the amount to request instead; CPUs in millicores."""
    rules: dict[str, str] = {}
    """Changed rules of the kubelet, by name."""
    moved: tuple[EvictionCandidate, ...] = ()
    """Pods that have to leave node `example`."""


class ClusterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a cluster about a pod, or about several equal pods."""

    not_covered: tuple[str, ...]
    """Parts of the request that the answer does not cover, human-readable (`Explanation.not_covered`)."""
    pods: int
    """Number of requested pods, which are all equal."""
    fit: int
    """Number of these pods that fit at the same time."""
    nodes: int
    """Number of all known nodes."""
    admitting: tuple[Ranked, ...]
    """The nodes that would admit one pod now, the best first."""
    reason: RefusalReason | None
    """The most important reason. None: the pods fit."""
    reasons: tuple[RefusalReason, ...]
    """All reasons, the most important first."""
    changes: tuple[SufficientChange, ...]
    """Changes with which the pod would fit, the cheapest first. Empty if a node admits the pod."""
    placed: dict[NodeName, int]
    """Node -> number of the pods that it would admit. Empty for a single pod."""
