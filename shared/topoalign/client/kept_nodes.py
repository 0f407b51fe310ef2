"""
Bounds of how many nodes something is kept.

Whoever may publish on the subjects of nodes can invent names of nodes. A node is confirmed once a service of it has
answered; the others are strangers, as a node is that has just begun. Of strangers `MOST_STRANGERS` are kept: of one more,
that is forgotten of which nothing was heard for longest. What it says later is heard as if it had said nothing before.
"""

from collections.abc import Callable

import structlog

from topoalign.core.model.ids import NodeName

MOST_STRANGERS = 20_000
"""Four times the nodes of a large cluster, which all are strangers until they are asked. Each takes some kilobytes."""

log = structlog.get_logger("topoalign.client")


class KeptNodes:
    """The nodes of which something is kept, by name."""

    def __init__(self, *forgotten: Callable[[NodeName], object]) -> None:
        """`forgotten`: each is told the nodes of which nothing is kept from now on."""
        self.forgotten = [*forgotten]
        self.dropped = 0
        """Strangers that were forgotten because there were too many."""
        self._confirmed: set[NodeName] = set()
        self._strangers: dict[NodeName, None] = {}
        """Of which something was heard longest ago first."""

    def hear(self, node: NodeName) -> None:
        """Something was heard of this node, so it is kept."""
        if node in self._confirmed:
            return
        self._strangers.pop(node, None)
        self._strangers[node] = None
        while len(self._strangers) > MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))

    def confirm(self, node: NodeName) -> None:
        """A service of the node has answered."""
        self._strangers.pop(node, None)
        self._confirmed.add(node)

    def doubt(self, node: NodeName) -> None:
        """It is a stranger, from now on or still."""
        self._confirmed.discard(node)
        self.hear(node)

    def forget(self, node: NodeName) -> None:
        """Nothing of this node is kept."""
        self._strangers.pop(node, None)
        self._confirmed.discard(node)
        for each in self.forgotten:
            each(node)

    def _drop(self, node: NodeName) -> None:
        if not self.dropped:
            log.warning(
                "nodes that have never answered are forgotten: there are too many",
                most=MOST_STRANGERS,
                node=node,
                remedy="see who may publish on the subjects of nodes: only their own services should",
            )
        self.dropped += 1
        self.forget(node)
