"""The answer to a question about a whole cluster: where a pod fits, why not elsewhere, and what would make it fit."""

import msgspec

from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.ids import NodeName, ResourceName


class Ranked(msgspec.Struct, frozen=True):
    """A node that would admit the pod."""

    node: NodeName
    score: int
    """0 to 10, the best first; equals in the order of the scorer if it has one, else by name."""
    seam: str = ""
    """
    The weakest seam of the GPUs that the pod would get, for people: `18 NVLinks, 722 GB/s`. Empty: no container would get
    several GPUs, or it was not computed.
    """


class RefusalReason(msgspec.Struct, frozen=True, kw_only=True):
    """Why some nodes do not admit the pod."""

    code: str
    """Stable code: `NotAligned`, `NotEnoughDevices`."""
    resolvability: Resolvability
    nodes: int
    """How many nodes have this reason."""
    examples: tuple[NodeName, ...]
    """The first of them by name."""
    finding: str
    """What was found on the first of them."""
    remedy: str
    """What to do about it there."""


class EvictionCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that would have to leave a node."""

    pod: str
    """`namespace/name`; its UID, or the id of its allocation, where that is not known."""
    devices: dict[ResourceName, int]
    """How many devices it holds."""


class SufficientChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change that makes the pod fit somewhere."""

    text: str
    """For people."""
    cost: float
    """What share of what is asked for is given up or moved: 0.25 for 3 GPUs instead of 4. Changes are sorted by it."""
    nodes: int
    """How many nodes would then admit the pod."""
    example: NodeName
    """The first of them by name."""
    asked: dict[ResourceName, int] = {}
    """Resource -> how much of it to ask for; CPUs in millicores."""
    rules: dict[str, str] = {}
    """Rules of the kubelet that are to differ."""
    moved: tuple[EvictionCandidate, ...] = ()
    """Pods that have to leave the example."""


class ClusterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a cluster about a pod, or about several equal pods."""

    not_covered: tuple[str, ...]
    """What the pod asks for and the answer does not cover, for people (`Explanation.not_covered`)."""
    pods: int
    """How many are asked for, all alike."""
    fit: int
    """How many of these fit at once."""
    nodes: int
    """All that are known."""
    admitting: tuple[Ranked, ...]
    """The nodes that would admit one pod now, the best first."""
    reason: RefusalReason | None
    """The reason that matters most; None where the pods fit."""
    reasons: tuple[RefusalReason, ...]
    """All reasons, that one first."""
    changes: tuple[SufficientChange, ...]
    """What would make it fit, the cheapest first. Looked for only where no node admits the pod."""
    placed: dict[NodeName, int]
    """Of several pods: how many each node would take."""
