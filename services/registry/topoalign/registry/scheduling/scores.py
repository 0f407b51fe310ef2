"""
The scores of nodes for what a pod asks for, made of their keys (`verdicts`) for the nodes that are asked about.

What of a pod the key of a node depends on is made once for each shape of machines, what is left on a node when the node
changes (`view`), and the key when either changes.
"""

from collections.abc import Collection, Sequence

from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.verdicts import Request
from topoalign.registry.scheduling.view import ClusterView


def scores_among(
    request: Request, view: ClusterView, nodes: Sequence[NodeName], last: Collection[NodeName]
) -> Sequence[int]:
    """
    A score for each of these nodes, in their order, 0 to 10; 0 for one that is not known, not offered, or to come `last`.
    The request has been judged for the newest nodes.
    """
    keys, places = request.keys, view.places
    return view.scorer.scores([keys[places[name]] if name in places and name not in last else None for name in nodes])
