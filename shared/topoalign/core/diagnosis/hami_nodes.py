"""Defines the two reasons why topoalign does not use nodes that HAMi manages, and how a registry reports the nodes."""

import msgspec

from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import NodeName


class ForeignNode(NoFit):
    """
    Raised when HAMi manages the GPUs of the node.

    No allocator of topoalign serves such a node.

    Remedy: Schedule the pod with HAMi's scheduler, or move the node to topoalign.
    """

    def __init__(self) -> None:
        super().__init__(
            "HAMi gives out the GPUs of the node",
            "let HAMi's scheduler have the pod, or move the node to topoalign",
        )


class ContestedNode(NoFit):
    """
    Raised when HAMi and topoalign both manage the GPUs of the node.

    Remedy: Stop one of them, and delete what HAMi wrote.
    """

    def __init__(self) -> None:
        super().__init__(
            "HAMi and topoalign both give out the GPUs of the node",
            "stop HAMi's device plugin there, end its pods and delete its annotations of the Node, or stop topoalign there",
        )


REASONS: dict[str, type[ForeignNode] | type[ContestedNode]] = {each.code: each for each in (ForeignNode, ContestedNode)}
"""Code -> its error."""


class ForeignRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requests from a registry the nodes that HAMi manages. The answer is a `ForeignPage`."""

    after: NodeName = NodeName("")
    """Only nodes whose names come after this one."""


class ForeignPage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of the nodes that HAMi manages, by name."""

    nodes: dict[NodeName, str]
    """Node -> code of the reason."""
    has_more: bool
    """Whether there are further nodes after the last one."""
