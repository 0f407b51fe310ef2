"""
How good each node is for what a pod asks for, computed again only for the nodes that changed.

What of a pod its score depends on is made once for each shape of machines, what is left on a node when the node changes
(`view`), and the key of a node for a pod when either changes. Scores are made of the keys of the nodes that are asked about.
"""

from collections.abc import Collection, Sequence

from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.scorers import Key
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
    keys, places = keys_of(request, view), view.places
    return view.scorer.scores([keys[places[name]] if name in places and name not in last else None for name in nodes])


def keys_of(request: Request, view: ClusterView) -> Sequence[Key]:
    """By the place of each node its key; None where it is not offered. Raises InvalidField as `Asked` does."""
    if request.scored < view.version:
        request.keys.extend([None] * (view.size - len(request.keys)))
        for node in view.changed_since(request.scored):
            request.keys[node.place] = key(request, node, view)
        request.scored = view.version
    return request.keys


def key(request: Request, node: NodeView, view: ClusterView) -> Key:
    """What sorts one node."""
    if node.kind is None or node.shape is None:
        return None
    need = request.of(node.kind, view).score_need(node.shape, view.scorer)
    return view.scorer.key(node.shape, need, node.left)
