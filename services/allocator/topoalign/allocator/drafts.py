"""What the ledger is given to record: facts that lack their place in the journal."""

from typing import NamedTuple, Protocol

from topoalign.core.events import Displaced, LedgerEvent, Owner
from topoalign.core.ids import AllocationID, NodeName


class Draft(Protocol):
    """A fact that lacks only its place in the journal."""

    def __call__(self, *, node: NodeName, epoch: int, seq: int) -> LedgerEvent: ...


class Binding(NamedTuple):
    """Who holds an allocation, as in `AllocationBound`."""

    allocation: AllocationID
    owner: Owner
    pod_uid: str = ""
    displaced: tuple[Displaced, ...] = ()
