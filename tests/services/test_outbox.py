"""The outbox notices what the stream has lost, also on a node where nothing happens."""

import anyio
import pytest

from topoalign.allocator.journal import MemoryJournal
from topoalign.allocator.ledger import Ledger
from topoalign.allocator.outbox import LOOK_SECONDS, Outbox
from topoalign.core.ids import NodeName
from topoalign.core.ports import Stream
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio


class Forgetful(MemoryBus):
    """A bus whose stores can be lost."""

    emptied = False

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        return 0 if self.emptied else await super().last_position(stream, subject)


async def test_an_idle_node_says_everything_anew_once_the_stream_has_lost_it() -> None:
    bus, clock = Forgetful(), ManualClock()
    ledger = Ledger(NodeName("node-1"), MemoryJournal(), clock)
    outbox = Outbox(ledger, bus, clock)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outbox.run)
        tasks.start_soon(outbox.watch)
        await clock.advance(3 * LOOK_SECONDS)
        whole = ledger.state.seq
        bus.emptied = True
        await clock.advance(LOOK_SECONDS)
        tasks.cancel_scope.cancel()

    assert (1, 2) == (whole, ledger.state.seq)
    assert 0 == len(ledger.pending)
