"""What a follower does about messages that it was not brought, and about a server that does not serve it."""

from itertools import chain, repeat
from pathlib import Path

import anyio
import pytest
from bus_support import bodies, heard, killable, said

from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.ports import Message, Received, Stream
from topoalign.runtime.nats_bus import connect_bus, follower
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.follower import FollowerReading, NatsFollower
from topoalign.runtime.nats_bus.nats_connection import NatsConnection

pytestmark = pytest.mark.anyio


async def test_a_message_that_got_lost_on_its_way_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each message of a batch has the position of the one before it, and one is missing."""
    arrive = FollowerReading.receive
    losses = chain([False, False, True], repeat(False))

    def lose(self: FollowerReading, delivered: Delivered) -> None:
        if not delivered.is_of_a_store or not next(losses):
            arrive(self, delivered)

    monkeypatch.setattr(FollowerReading, "receive", lose)
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        for number in range(10):
            await bus.publish(said(number))
        async with bus.follow(Stream.ALLOCATIONS, "topoalign.v1.>") as messages:
            with anyio.fail_after(30):
                received = await heard(messages, 10)

    assert [said(number).body for number in range(10)] == bodies(received)


async def test_follow_retries_slow_down_and_start_over_after_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tries to follow are made at growing intervals, and from the first interval again after a message."""
    away, refused = BusUnavailable("away"), BusRefused("no permission", "grant it")
    outcomes = chain([away] * 10, [None, away, None], [refused] * 11, [None])
    pauses: list[list[float]] = [[]]

    class Scripted(NatsFollower):
        async def begin(self, connection: NatsConnection) -> FollowerReading:
            outcome = next(outcomes)
            if outcome is not None:
                raise outcome
            return OneMessage(connection, Stream.NODES, "x", 0)

    class OneMessage(FollowerReading):
        async def next(self) -> Received:
            return Received(message=Message(subject="x", headers={}, body=b""), position=1)

    async def connected() -> NatsConnection:
        return NatsConnection("x", "_INBOX_x")

    async def note(seconds: float) -> None:
        pauses[-1].append(seconds)

    scripted = Scripted(connected, Stream.NODES, "x", 0)
    monkeypatch.setattr(anyio, "sleep", note)
    for _ in range(3):
        await anext(scripted)
        await scripted.end()
        pauses.append([])

    doubled = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28]
    assert [[*doubled, 2.0, 2.0, 2.0], [0.02], [*doubled, 2.56, 5.0, 5.0, 5.0], []] == pauses


async def test_a_message_is_read_although_its_news_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another server of a cluster has taken over: the store is looked at."""
    monkeypatch.setattr(follower, "LOOK", 0.1)
    monkeypatch.setattr(FollowerReading, "take_stored", lambda self, delivered: None)
    async with (
        killable(tmp_path) as server,
        connect_bus(server.url) as bus,
        bus.follow(Stream.ALLOCATIONS, "topoalign.v1.>") as messages,
    ):
        for number in range(3):
            await bus.publish(said(number))
            with anyio.fail_after(30):
                assert said(number) == (await anext(messages)).message


async def test_news_of_a_message_that_was_deleted_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FIRST_PAUSE", 0.001)
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        reading = await NatsFollower(bus.up, Stream.ALLOCATIONS, "topoalign.v1.>", 0).begin(bus.live())
        reading._newest = 5
        reads: list[int] = []
        read = reading.read

        async def counted() -> None:
            reads.append(1)
            await read()

        reading.read = counted  # type: ignore[method-assign]  # as it is, counted
        with anyio.move_on_after(1.0):
            await reading.next()
            raise AssertionError
        await reading.end()

    assert follower.MOST_TRIES == len(reads)


def test_reads_in_vain_are_counted_from_the_last_message_on() -> None:
    """A server that lags again has all its tries again: what was announced is not taken for deleted."""
    reading = FollowerReading(NatsConnection("x", "_INBOX_x"), Stream.ALLOCATIONS, "topoalign.v1.>", 0)
    reading._newest = 7
    head = b"NATS/1.0\r\nNats-Stream: TOPOALIGN_ALLOCATIONS\r\nNats-Subject: x\r\nNats-Sequence: 5\r\n\r\n"

    def read_in_vain(times: int) -> None:
        for _ in range(times):
            reading._reading = True
            reading.end_batch(follower.NO_MESSAGE, "no message")

    read_in_vain(follower.MOST_TRIES)
    reading._reading = True
    reading._batch = 1
    received = reading.take(Delivered(subject=b"_INBOX_x.1", reply=b"", body=b"", head=head))
    read_in_vain(follower.MOST_TRIES)

    assert received is not None
    assert (5, 7) == (received.position, reading._newest)
    read_in_vain(1)
    assert 5 == reading._newest
