"""
How good each node is for what a pod asks for, scored again only for the nodes that changed.

What of a pod its score depends on is made once for each shape of machines, and what is left on a node when the node changes
(`view`), so a score costs some microseconds. Where a score is a node's place among others, nodes are ranked anew for each
question, which costs as much for each of them: what takes longer, the scorer remembers with what is left on the node.
"""

from collections.abc import Collection, Sequence

from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.scorers import Key, by_place
from topoalign.registry.scheduling.nodes import NodeView
from topoalign.registry.scheduling.verdicts import Request
from topoalign.registry.scheduling.view import ClusterView


def scores_among(
    request: Request, view: ClusterView, nodes: Sequence[NodeName], last: Collection[NodeName]
) -> Sequence[int]:
    """
    A score for each of these nodes, in their order, 0 to 10; 0 for one that is not known, not offered, or to come `last`.
    Raises InvalidField as `Asked` does.
    """
    known = view.nodes
    if view.scorer.order is not None:
        return by_place(
            [None if name in last or name not in known else key(request, known[name], view) for name in nodes]
        )
    scores, places = scores_of(request, view), view.places
    return [scores[places[name]] if name in places and name not in last else 0 for name in nodes]


def scores_of(request: Request, view: ClusterView) -> bytearray:
    """By the place of each node its score, 0 to 10; 0 where it is not offered. Raises InvalidField as `Asked` does."""
    if request.scored < view.version:
        request.scores.extend(bytes(view.size - len(request.scores)))
        for node in view.changed_since(request.scored):
            request.scores[node.place] = score(request, node, view)
        request.scored = view.version
    return request.scores


def score(request: Request, node: NodeView, view: ClusterView) -> int:
    """The score of one node."""
    if node.kind is None or node.shape is None or node.left is None:
        return 0
    need = request.of(node.kind, view).score_need(node.shape, view.scorer)
    return view.scorer.score(node.shape, need, node.left)


def key(request: Request, node: NodeView, view: ClusterView) -> Key:
    """What sorts one node, where the scorer has an order."""
    if node.kind is None or node.shape is None or view.scorer.order is None:
        return None
    return view.scorer.order(request.of(node.kind, view).score_need(node.shape, view.scorer), node.left)
