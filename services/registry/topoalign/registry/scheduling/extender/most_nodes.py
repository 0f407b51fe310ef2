"""
How many nodes a question may be about, told before they are read: millions of names, or of items that are no nodes, would
fill the memory and keep everybody else waiting.

Each name and each item but the first has a comma before it. So 20,000 commas among names are too many; among whole nodes,
which have commas of their own, they are where these lie closer together than in any node.
"""

from topoalign.core.model.errors import InvalidField

MOST_NODES = 20_000
"""Four times as many as a Kubernetes cluster is tested with."""
LARGEST_NAMES = MOST_NODES * 256
"""Bytes of as many names: 253 each, and what is between them."""
LEAST_PER_COMMA = 16
"""Bytes of whole nodes for each comma among them. Those of a real node have about 30, items that are no nodes have 2."""


class TooManyNodes(InvalidField):
    """Raised for a question about more nodes than a cluster has."""

    def __init__(self, field: str) -> None:
        super().__init__(field, f"more than {MOST_NODES} nodes", "send those of the cluster, as kube-scheduler does")


def check_names(names: bytes) -> None:
    """Raises TooManyNodes for the JSON of a list of names."""
    if len(names) > LARGEST_NAMES or names.count(b",") >= MOST_NODES:
        raise TooManyNodes("NodeNames")


def check_whole(nodes: bytes) -> None:
    """Raises TooManyNodes for the JSON of a list of whole nodes; not for each that is too long."""
    commas = nodes.count(b",")
    if commas >= MOST_NODES and commas * LEAST_PER_COMMA > len(nodes):
        raise TooManyNodes("Nodes.items")


def check_number(count: int, field: str) -> None:
    """Raises TooManyNodes."""
    if count > MOST_NODES:
        raise TooManyNodes(field)
