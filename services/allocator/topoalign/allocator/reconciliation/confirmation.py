"""The record of a damaged journal is confirmed by what the kubelet knows."""

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import Poll
from topoalign.allocator.reconciliation.reconciliation import Reconciliation
from topoalign.core.model.errors import StateFault


def confirm_record(ledger: Ledger, reconciliation: Reconciliation, poll: Poll) -> None:
    """Takes in what the kubelet knows before anything is given out. Raises StateFault if that may not be all."""
    reconciliation.compare(poll)
    if ledger.unconfirmed is not None:
        raise StateFault(
            f"the record is unconfirmed ({ledger.unconfirmed}), and the kubelet cannot tell yet what is held",
            "this passes once its checkpoint can be read, or it has listed its pods for a while; see /readyz",
        )
