"""
The keys that sort nodes for what a pod asks for, and the scores that are made of them for the nodes that are asked about.

Thousands of nodes share few keys. So each key has a number, and each node the number of its key.
"""

from collections.abc import Collection, Sequence

from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.scorers import Key
from topoalign.registry.scheduling.cluster_state.view import ClusterView

MOST_STALE = 4
"""Keys for each node, above which most are those of nodes as they were."""


class NodeKeys:
    """The keys of the nodes of a cluster for one request."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """By the place of a node: the number of its key."""
        self._keys: dict[Key, int] = {None: 0}

    def note(self, place: int, key: Key) -> None:
        """Sets the key of a node. None: it is not offered."""
        self.numbers.extend([0] * (place + 1 - len(self.numbers)))
        self.numbers[place] = self._keys.setdefault(key, len(self._keys))

    @property
    def are_stale(self) -> bool:
        """Whether all keys are to be computed anew, because most belong to no node any more."""
        return len(self._keys) > MOST_STALE * len(self.numbers) + 64

    def scores_among(self, view: ClusterView, nodes: Sequence[NodeName], last: Collection[NodeName]) -> Sequence[int]:
        """
        A score for each of these nodes, in their order, 0 to 10; 0 for one that is not known, not offered, or to come
        `last`. Of nodes with equal keys those with pending pods come after the others, because a bind may have to wait for
        these. The keys are those of the newest nodes.
        """
        of_nodes = self.numbers
        places = view.places
        pending = view.nodes_with_pending
        numbers = [of_nodes[places[name]] if name in places and name not in last else 0 for name in nodes]
        if pending:
            numbers = [-number if name in pending else number for name, number in zip(nodes, numbers, strict=True)]
        present = [*{*numbers}]
        keys = [*self._keys]
        ranked = [(*key, number < 0) if (key := keys[abs(number)]) is not None else None for number in present]
        scores = dict(zip(present, view.scorer.scores(ranked), strict=True))
        return [*map(scores.__getitem__, numbers)]
