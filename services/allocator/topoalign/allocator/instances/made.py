"""The MIG instance of a slot."""

from typing import NamedTuple

from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID


class Made(NamedTuple):
    """The instance of a slot, which is there."""

    uuid: DeviceID
    amount: Amount
    """What the container holds of the GPU by it."""
