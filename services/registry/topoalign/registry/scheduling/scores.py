"""
How good each node is for what a pod asks for, scored again only for the nodes that changed.

What of a pod its score depends on is made once for each shape of machines, and what is left on a node when the node changes
(`view`), so a score costs some microseconds.
"""

from topoalign.registry.scheduling.nodes import NodeView
from topoalign.registry.scheduling.verdicts import Request
from topoalign.registry.scheduling.view import ClusterView


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
