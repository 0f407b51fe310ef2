"""What is known of the reservations of each node, and on which nodes something is reserved for a pod."""

from collections.abc import Collection

from topoalign.core.model.ids import NodeName
from topoalign.core.state.reservations import NodeReservations


class ReservationsByNode(dict[NodeName, NodeReservations]):
    """
    By node, set as in any dictionary. The nodes of a pod are found without a look at every node. To be changed by setting
    an item and by `drop` alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._nodes: dict[str, frozenset[NodeName]] = {}
        """UID of a pod -> the nodes whose newest message has it: several where it was tried on more than one."""

    def __setitem__(self, node: NodeName, known: NodeReservations) -> None:
        self._note(node, known.until)
        super().__setitem__(node, known)

    def drop(self, node: NodeName) -> None:
        """Nothing is known of the node any more."""
        if node in self:
            self._note(node, ())
            del self[node]

    def nodes_of(self, uid: str) -> frozenset[NodeName]:
        """The nodes whose newest message has this pod, whether what it has is over or not."""
        return self._nodes.get(uid, frozenset())

    def _note(self, node: NodeName, uids: Collection[str]) -> None:
        before = self[node].until.keys() if node in self else frozenset[str]()
        for uid in before - frozenset(uids):
            if left := self._nodes.pop(uid) - {node}:
                self._nodes[uid] = left
        for uid in frozenset(uids) - before:
            self._nodes[uid] = self.nodes_of(uid) | {node}
