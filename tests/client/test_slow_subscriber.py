"""A subscriber that sleeps costs nobody else anything, learns that it is late, and misses nothing."""

from contextlib import aclosing
from pathlib import Path

import anyio
import nats
import nats.errors
import pytest
from bus_support import killable
from faults_support import THOROUGH
from nats.aio.msg import Msg
from outage_support import NODE, come_and_go, emptied, telling
from structlog.testing import capture_logs

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.client import Client
from topoalign.client.subscriber import MOST_WAITING
from topoalign.core import wire
from topoalign.core.model.events import LedgerFact
from topoalign.core.ports import Stream
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600 if THOROUGH else 300)]

FACTS = 100_000 if THOROUGH else 1_300
PENDING = 100
"""Messages that a subscription of NATS' own keeps for a subscriber that does not take them."""


class Sleeper:
    """A subscriber of NATS itself, without a stream, that is busy with the first message until it is woken."""

    def __init__(self) -> None:
        self.awake = anyio.Event()
        self.delivery: list[int] = []
        self.errors: list[Exception] = []

    async def hear(self, message: Msg) -> None:
        await self.awake.wait()
        self.delivery.append(int(message.headers["ce-id"].rpartition(".")[2]) if message.headers else 0)

    async def told(self, error: Exception) -> None:
        self.errors.append(error)


async def test_a_sleeping_subscriber_delays_no_publisher_and_catches_up(tmp_path: Path) -> None:
    """
    C36: two subscribers sleep through all facts of a node, ours and one that is NATS' own with room for a hundred messages.

    The node's outbox never meets a failure. NATS' own subscriber is told of each message that it lost; ours loses none: it
    fetches what it has time for, learns from the first messages how many wait, says so once, and reads on to the end.
    """
    async with killable(tmp_path / "nats") as server, connect_bus(server.url) as bus:
        client, sleeper = Client(bus), Sleeper()
        other = await nats.connect(server.url, error_cb=sleeper.told)
        await other.subscribe(wire.allocation_subjects(NODE), cb=sleeper.hear, pending_msgs_limit=PENDING)
        await other.flush()
        ledger = Ledger(NODE, MemoryJournal(), SystemClock(), pending_limit=2 * FACTS)
        with capture_logs() as logs:
            async with telling(ledger, bus) as outbox, aclosing(client.allocations(since=0)) as events:
                await emptied(ledger)
                numbers = [fact.seq for fact in [(await anext(events)).event] if isinstance(fact, LedgerFact)]
                come_and_go(ledger, FACTS)
                await emptied(ledger)
                failures = outbox.publisher.failures
                expected = list(range(1, ledger.state.seq + 1))
                while numbers[-1] < ledger.state.seq:
                    fact = (await anext(events)).event
                    assert isinstance(fact, LedgerFact)
                    numbers.append(fact.seq)
        await other.flush()
        sleeper.awake.set()
        await other.drain()

    assert 0 == failures
    assert expected == numbers
    assert {"bus does not confirm"}.isdisjoint(line["event"] for line in logs)
    pace = [
        (line["log_level"], line["event"], line.get("waiting", 0) > MOST_WAITING)
        for line in logs
        if "subscriber" in line["event"]
    ]
    assert [
        ("warning", "slow subscriber: nothing is lost, all is late", True),
        ("info", "subscriber has caught up", False),
    ] == pace
    assert 0 == client.waiting[Stream.ALLOCATIONS] == client.counts.gaps
    assert PENDING + 1 >= len(sleeper.delivery)
    assert {nats.errors.SlowConsumerError} == {type(error) for error in sleeper.errors}
    assert len(expected) == len(sleeper.delivery) + len(sleeper.errors)
