"""What a follower does about messages that it was not brought, and about a server that does not serve it."""

from collections.abc import AsyncIterator, Mapping
from itertools import chain, repeat
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import bodies, killable, receive, said

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.ports import Message, Received, Stream
from topoalign.runtime.nats_bus import connect_bus, follower
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.follower import FollowerReading, NatsFollower
from topoalign.runtime.nats_bus.nats_connection import NatsConnection

HEAD = (
    b"NATS/1.0\r\nNats-Stream: TOPOALIGN_ALLOCATIONS\r\nNats-Subject: x\r\nNats-Sequence: %d\r\nNats-Num-Pending: 0\r\n"
    b"Nats-Last-Sequence: %d\r\n\r\n"
)
END = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n\r\n"

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("before", [2, 3])
async def test_a_message_that_got_lost_on_its_way_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """
    Each message of a batch has the position of the one before it, and one is missing; or its end has the position of the
    last, which is missing, and the next batch was requested behind that.
    """
    monkeypatch.setattr(follower, "BATCH", 4)
    monkeypatch.setattr(follower, "LARGEST_BATCH", 4)
    arrive = FollowerReading.receive
    losses = chain([False] * before, [True], repeat(False))

    def lose(self: FollowerReading, delivered: Delivered) -> None:
        if not delivered.is_of_a_store or not next(losses):
            arrive(self, delivered)

    monkeypatch.setattr(FollowerReading, "receive", lose)
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        for number in range(10):
            await bus.publish(said(number))
        async with bus.follow(Stream.ALLOCATIONS, "topoalign.v1.>") as messages:
            with anyio.fail_after(30):
                received = await receive(messages, 10)

    assert [said(number).body for number in range(10)] == bodies(received)


async def test_at_most_one_batch_is_requested_beyond_the_one_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is requested when this one has arrived, however little of it was read."""
    connection = NatsConnection("x", "_INBOX_x")
    requests: list[dict[str, object]] = []
    replies: list[bytes] = []

    async def note(subject: str, body: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        requests.append(msgspec.json.decode(body, type=dict[str, object]))
        replies.append(reply.encode())

    monkeypatch.setattr(connection, "send", note)
    reading = FollowerReading(connection, Stream.ALLOCATIONS, "topoalign.v1.allocation.>", 0)

    def arrive(*positions: int, waiting: int) -> None:
        before = 0
        for position in positions:
            reading.receive(Delivered(replies[-1], b"{}", HEAD % (position, before)))
            before = position
        reading.receive(Delivered(replies[-1], b"", END % (waiting, before)))

    await reading.read()
    arrive(1, 2, waiting=4)
    seen: list[tuple[int, list[object]]] = []

    async def read_one() -> None:
        received = await reading.next()
        seen.append((received.position, [request["seq"] for request in requests]))

    await read_one()
    arrive(4, 5, waiting=2)
    for _ in range(3):
        await read_one()
    arrive(6, 9, waiting=0)
    for _ in range(2):
        await read_one()

    assert [
        (1, [1, 3]),
        (2, [1, 3]),
        (4, [1, 3]),
        (5, [1, 3, 6]),
        (6, [1, 3, 6]),
        (9, [1, 3, 6]),
    ] == seen


@pytest.mark.parametrize(
    ("subject", "filtered"),
    [
        (">", {}),
        ("topoalign.v1.>", {}),
        (wire.allocation_subjects(), {}),
        (wire.allocation_subjects(None, "granted"), {"next_by_subj": "topoalign.v1.allocation.*.granted"}),
        ("topoalign.v1.reservation.>", {"next_by_subj": "topoalign.v1.reservation.>"}),
        ("topoalign.v1.*.*", {"next_by_subj": "topoalign.v1.*.*"}),
    ],
)
def test_a_store_is_read_without_a_filter_where_each_of_its_messages_fits(
    subject: str, filtered: dict[str, str]
) -> None:
    assert filtered == FollowerReading(NatsConnection("x", "_INBOX_x"), Stream.ALLOCATIONS, subject, 0)._filter


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


async def test_a_follower_that_falls_behind_has_no_news_until_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any news is more than this follower has had; it reads each message from the store."""
    steps: list[str] = []
    send, waits = anyio.create_memory_object_stream[None](10)
    wait = FollowerReading.wait_for_news
    end = FollowerReading.end_news

    async def wait_for_news(self: FollowerReading) -> None:
        steps.append("wait")
        send.send_nowait(None)
        await wait(self)

    async def end_news(self: FollowerReading) -> None:
        steps.append("end")
        await end(self)

    monkeypatch.setattr(follower, "NEWS_BYTES", 0)
    monkeypatch.setattr(FollowerReading, "wait_for_news", wait_for_news)
    monkeypatch.setattr(FollowerReading, "end_news", end_news)
    received: list[Received] = []

    async def read(messages: AsyncIterator[Received]) -> None:
        async for each in messages:
            received.append(each)

    with send, waits:
        async with (
            killable(tmp_path) as server,
            connect_bus(server.url) as bus,
            bus.follow(Stream.ALLOCATIONS, "topoalign.v1.>") as messages,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(read, messages)
            with anyio.fail_after(30):
                for number in range(3):
                    await waits.receive()
                    await bus.publish(said(number))
                await waits.receive()
            assert ["wait", "end"] * 3 + ["wait"] == steps
            tasks.cancel_scope.cancel()

    assert [said(number).body for number in range(3)] == bodies(received)


async def test_of_facts_of_nodes_the_news_is_a_position_and_the_store_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are large: a follower that is slow would be sent more than the server keeps for it."""
    news: list[bytes] = []
    take_stored = FollowerReading.take_stored

    def noted(self: FollowerReading, delivered: Delivered) -> None:
        news.append(delivered.body)
        take_stored(self, delivered)

    monkeypatch.setattr(FollowerReading, "take_stored", noted)
    facts = [
        Message(subject=f"topoalign.v1.usage.node-{each}", headers={"Nats-Msg-Id": f"{each}"}, body=b"{}")
        for each in range(3)
    ]
    async with (
        killable(tmp_path) as server,
        connect_bus(server.url) as bus,
        bus.follow(Stream.NODES, "topoalign.v1.>") as messages,
    ):
        for fact in facts:
            await bus.publish(fact)
            with anyio.fail_after(30):
                assert fact == (await anext(messages)).message

    assert news
    assert {b""} == {*news}


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

    assert follower.MOST_TRIES + 1 == len(reads), "the last one after the subscription to news"


def test_reads_in_vain_are_counted_from_the_last_message_on() -> None:
    """A server that lags again has all its tries again: what was announced is not taken for deleted."""
    reading = FollowerReading(NatsConnection("x", "_INBOX_x"), Stream.ALLOCATIONS, "topoalign.v1.>", 0)
    reading._newest = 7
    head = b"NATS/1.0\r\nNats-Stream: TOPOALIGN_ALLOCATIONS\r\nNats-Subject: x\r\nNats-Sequence: 5\r\n\r\n"

    def read_in_vain(times: int) -> None:
        for _ in range(times):
            reading.end_batch(Delivered(b"", b"", b"NATS/1.0 404 Message Not Found\r\n\r\n"))

    read_in_vain(follower.MOST_TRIES)
    reading.begin_batch()
    received = reading.take(Delivered(subject=b"_INBOX_x.1", body=b"", head=head))
    read_in_vain(follower.MOST_TRIES)

    assert received is not None
    assert (5, 7) == (received.position, reading._newest)
    read_in_vain(1)
    assert 5 == reading._newest
