"""How far behind its streams a subscriber is, and a log line when it begins and ends to be slow."""

import structlog

from topoalign.core.ports import Received, Stream

MOST_WAITING = 1_000
"""Messages behind which a subscriber that was up to date is told that it is slow: some ten thousand are read in a second."""

log = structlog.get_logger("topoalign.client")


class Pace:
    """The pace of one client."""

    def __init__(self) -> None:
        self.waiting: dict[Stream, int] = {}
        """Messages of each stream that waited behind the last one read: what a slow subscriber has to catch up with."""
        self._slow: set[Stream] = set()

    def note(self, stream: Stream, received: Received, *, up_to_date: bool) -> None:
        """Says once when a subscriber that was up to date has fallen behind, and once when it has caught up."""
        self.waiting[stream] = received.waiting
        if received.waiting > MOST_WAITING and up_to_date and stream not in self._slow:
            self._slow.add(stream)
            log.warning("slow subscriber: nothing is lost, all is late", stream=stream, waiting=received.waiting)
        elif not received.waiting and stream in self._slow:
            self._slow.discard(stream)
            log.info("subscriber has caught up", stream=stream, position=received.position)
