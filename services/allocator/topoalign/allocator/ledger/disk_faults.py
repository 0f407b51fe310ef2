"""What the disk complains of when the journal is written: shown in readiness, logged when it begins and when it is over."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from topoalign.core.model.errors import StateFault

log = structlog.get_logger("topoalign.allocator.ledger.ledger")


class DiskFaults:
    """Notes what the writes of one journal complain of."""

    def __init__(self) -> None:
        self.newest: str | None = None
        """What the disk complained of last, and the remedy; None since it took a fact again."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes whether the writes in this block raise StateFault."""
        try:
            yield
        except StateFault as fault:
            if self.newest is None:
                log.error("the journal cannot be written", finding=fault.finding, remedy=fault.remedy)
            self.newest = f"{fault.finding}; {fault.remedy}"
            raise
        if self.newest is not None:
            log.info("the journal can be written again")
        self.newest = None
