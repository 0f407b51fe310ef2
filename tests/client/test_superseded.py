"""A reader that leaves out what later snapshots stand for believes the same as one that reads everything."""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from random import Random

import anyio
import msgspec
import pytest
from fact_support import Writer, owner
from hypothesis import given
from hypothesis import strategies as st

from topoalign.client import Client, Delivery, subscriber
from topoalign.client.superseded import Superseded, message_position, newest_snapshots
from topoalign.core import wire
from topoalign.core.model.events import LARGEST_NUMBER, AllocationBound, AllocationsSnapshot, LedgerEvent
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.ports import Message, Received, Stream
from topoalign.core.state.fold import NodeState
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

NODES = ("a", "b.example.com", "c")
ODDITIES = ("again", "swapped", "lost", "forged", "unreadable", "nameless")


async def read(messages: list[Message], *, superseded: bool) -> tuple[list[Delivery], Client]:
    """What a reader hears of the past, up to a last fact of a node of its own."""
    bus = MemoryBus()
    for message in [*messages, wire.encode_event(Writer("end").snapshot(), 1.0)]:
        await bus.publish(message)
    client = Client(bus, ManualClock())
    received: list[Delivery] = []
    async with aclosing(client.allocations(0, superseded=superseded)) as events:
        async for delivery in events:
            if delivery.event.node == "end":
                return received, client
            received.append(delivery)
    raise AssertionError("the past has an end")


def believed(received: list[Delivery]) -> dict[NodeName, tuple[int, int, str]]:
    """Node -> epoch, seq and digest, folded as a subscriber does."""
    states: dict[NodeName, NodeState] = {}
    for delivery in received:
        had = states.get(delivery.event.node, NodeState(node=delivery.event.node))
        states[had.node] = (NodeState(node=had.node) if delivery.anew else had).apply(delivery.event)
    return {node: (state.epoch, state.seq, state.digest) for node, state in states.items()}


def histories(chance: Random, repeated_or_constant: list[str]) -> list[Message]:
    """What a few nodes have said, each in its order, with these oddities at any place."""
    said = [history(Writer(node, epoch=chance.randint(1, 3)), chance) for node in NODES]
    messages: list[Message] = []
    while any(said):
        messages.append(wire.encode_event(chance.choice([own for own in said if own]).pop(0), 1.0))
    for number, oddity in enumerate(repeated_or_constant):
        if messages:
            messages = disturbed(messages, oddity, chance.randrange(len(messages)), chance, number)
    return messages


def history(writer: Writer, chance: Random) -> list[LedgerEvent]:
    writer.snapshot()
    for number in range(chance.randint(0, 12)):
        held = list(writer.state.allocations)
        match chance.choice(("grant", "grant", "bind", "release", "snapshot")):
            case "bind" if held:
                writer.bind(chance.choice(held), f"pod-{number}")
            case "release" if held:
                writer.release(chance.choice(held))
            case "snapshot":
                writer.snapshot()
            case _:
                writer.grant(str(number), f"GPU-{number}")
    return list(writer.said)


def disturbed(messages: list[Message], oddity: str, place: int, chance: Random, number: int) -> list[Message]:
    one, rest = messages[place], messages[place + 1 :]
    match oddity:
        case "again":
            at = chance.randint(0, len(rest))
            renamed = wire.with_message_mark(one, f"{number:016x}") if one.headers else one
            return [*messages[: place + 1], *rest[:at], renamed, *rest[at:]]
        case "swapped":
            return [*messages[:place], *rest[:1], one, *rest[1:]]
        case "lost":
            return [*messages[:place], *rest]
        case "unreadable":
            return [*messages[:place], msgspec.structs.replace(one, body=b"{", headers={}), *rest]
        case "nameless":
            return [*messages[:place], msgspec.structs.replace(one, headers={}), *rest]
    node, epoch, seq = NodeName(chance.choice(NODES)), chance.randint(0, 4), chance.randint(0, 15)
    forged = AllocationsSnapshot(node=node, epoch=epoch, seq=seq, allocations=(), digest="")
    return [*messages[:place], one, wire.with_message_mark(wire.encode_event(forged, 1.0), f"{number:016x}"), *rest]


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(ODDITIES), max_size=4))
def test_the_same_is_believed_as_of_a_reader_of_everything(chance: Random, repeated_or_constant: list[str]) -> None:
    """Also where facts were stored again, in another order, lost, forged, or cannot be read."""
    messages = histories(chance, repeated_or_constant)
    all_of_it, _ = anyio.run(lambda: read(messages, superseded=True))
    short, _ = anyio.run(lambda: read(messages, superseded=False))

    assert believed(all_of_it) == believed(short)
    assert len(short) <= len(all_of_it)


@pytest.mark.anyio
async def test_only_the_newest_snapshot_and_what_follows_it_is_heard() -> None:
    writer, other = Writer("a"), Writer("b")
    writer.snapshot(), writer.grant("1", "GPU-0"), other.snapshot(), writer.snapshot(), writer.bind("1", "p")
    messages = [wire.encode_event(event, 1.0) for event in (*writer.said[:2], *other.said, *writer.said[2:])]
    received, client = await read(messages, superseded=False)

    assert [other.said[0], *writer.said[2:]] == [delivery.event for delivery in received]
    assert (0, 0) == (client.counts.gaps, client.counts.repeated)


@pytest.mark.anyio
@pytest.mark.parametrize("odd", ["older", "as old", "without an id"])
async def test_a_snapshot_that_is_not_the_newest_fact_has_the_node_read_whole(odd: str) -> None:
    """It was stored out of order, or forged: what its own headers or those before it say counts, as for every reader."""
    writer = Writer("a")
    writer.snapshot(), writer.grant("1", "GPU-0"), writer.grant("2", "GPU-1")
    seq = 3 if odd == "as old" else 2
    forged = AllocationsSnapshot(node=writer.node, epoch=writer.epoch, seq=seq, allocations=(), digest="")
    messages = [wire.encode_event(event, 1.0) for event in writer.said]
    if odd == "without an id":
        messages[1] = msgspec.structs.replace(messages[1], headers={})
    messages.append(wire.with_message_mark(wire.encode_event(forged, 1.0), "5f0c2a9e8b7d6431"))
    received, _ = await read(messages, superseded=False)

    assert writer.said == [delivery.event for delivery in received]


@pytest.mark.anyio
async def test_a_fact_that_cannot_be_true_is_put_aside_itself_where_all_is_read() -> None:
    """It is the one on the dead-letter stream, and not the snapshot for which the node was read whole."""
    writer = Writer("a")
    writer.snapshot(), writer.grant("1", "GPU-0")
    lie = AllocationBound(
        node=writer.node, epoch=writer.epoch, seq=3, allocation=AllocationID("nobody"), owner=owner("p")
    )
    forged = AllocationsSnapshot(node=writer.node, epoch=writer.epoch, seq=2, allocations=(), digest="")
    bus, messages = MemoryBus(), [wire.encode_event(event, 1.0) for event in (*writer.said, lie)]
    for message in [*messages, wire.with_message_mark(wire.encode_event(forged, 1.0), "5f0c2a9e8b7d6431")]:
        await bus.publish(message)
    async with aclosing(Client(bus, ManualClock()).allocations(0, superseded=False)) as events:
        delivery = [await anext(events) for _ in writer.said]
        async with bus.follow(Stream.DEADLETTERS, ">") as letters, background() as tasks:
            tasks.start_soon(events.__anext__)
            letter = await anext(letters)

    assert writer.said == [each.event for each in delivery]
    assert wire.subject(lie) == letter.message.headers["topoalign-subject"]


@pytest.mark.anyio
async def test_a_position_to_go_on_after_counts_where_all_is_read_too() -> None:
    writer, bus = Writer("a"), MemoryBus()
    writer.snapshot(), writer.grant("1", "GPU-0"), writer.grant("2", "GPU-1")
    forged = AllocationsSnapshot(node=writer.node, epoch=writer.epoch, seq=2, allocations=(), digest="")
    messages = [wire.encode_event(event, 1.0) for event in writer.said]
    for message in [*messages, wire.with_message_mark(wire.encode_event(forged, 1.0), "5f0c2a9e8b7d6431")]:
        await bus.publish(message)
    async with aclosing(Client(bus, ManualClock()).allocations(2, superseded=False)) as events:
        first = await anext(events)

    assert (3, writer.said[2]) == (first.position, first.event)


@pytest.mark.anyio
async def test_snapshots_of_a_stream_that_ends_early_supersede_nothing() -> None:
    writer = Writer()
    stored = [Received(message=wire.encode_event(writer.snapshot(), 1.0), position=number) for number in (1, 2)]

    async def following() -> AsyncGenerator[Received]:
        for received in stored:
            yield received
        await anyio.sleep_forever()

    async with aclosing(following()) as messages:
        whole = await newest_snapshots(messages, 2, 0, TaskTurns(ManualClock()))
    async with aclosing(following()) as messages:
        early = await newest_snapshots(messages, 3, 0, TaskTurns(ManualClock()))

    assert ({writer.node: 2}, {}) == (whole, early)


@pytest.mark.anyio
async def test_snapshots_of_a_stream_that_went_back_supersede_nothing() -> None:
    writer = Writer()
    stored = [Received(message=wire.encode_event(writer.snapshot(), 1.0), position=number) for number in (1, 2, 1, 3)]

    async def following() -> AsyncIterator[Received]:
        for received in stored:
            yield received

    assert {} == await newest_snapshots(following(), 3, 1.0, TaskTurns(ManualClock()))


def test_nothing_is_superseded_in_another_stream() -> None:
    superseded = Superseded({NodeName("a"): 5})
    superseded.clear()

    assert superseded.is_newest(Writer("a").snapshot())


def test_nothing_but_a_snapshot_stands_for_what_was_passed_over() -> None:
    """The stream lost the snapshot, and has another fact at its position: what was passed over is read after all."""
    writer = Writer("a")
    before = Received(message=wire.encode_event(writer.snapshot(), 1.0), position=1)
    superseded = Superseded({writer.node: 2})

    assert superseded.has(before) and superseded.missed
    assert superseded.is_newest(writer.grant("1", "GPU-0")) and superseded.missed
    assert superseded.is_newest(writer.snapshot()) and not superseded.missed


def test_a_place_is_read_from_the_id_and_highest_where_it_has_none() -> None:
    message = wire.encode_event(Writer("gpu.7").snapshot(), 1.0)
    odd = [
        msgspec.structs.replace(message, headers={}),
        msgspec.structs.replace(message, headers={"Nats-Msg-Id": "allocator.a.b.c"}),
    ]

    assert [(7, 1), (7, 1)] == [
        message_position(message),
        message_position(wire.with_message_mark(message, "5f0c2a9e8b7d6431")),
    ]
    assert [(LARGEST_NUMBER, LARGEST_NUMBER)] * 2 == [message_position(each) for each in odd]


class Losing(MemoryBus):
    """Whose stream loses its end, or becomes another one, when it is followed for this time."""

    def __init__(self, time: int, left: list[LedgerEvent] | None) -> None:
        super().__init__()
        self.time, self.left = time, left

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        self.time -= stream is Stream.ALLOCATIONS
        async with super().follow(stream, subject, after) as messages:
            lost = self.time == 0 and stream is Stream.ALLOCATIONS
            yield Interrupted(messages, self._lose) if lost else messages

    async def _lose(self) -> None:
        log = self._logs[Stream.ALLOCATIONS]
        kept = len(log.kept) - 1 if self.left is None else 0
        del log.kept[kept:]
        log.last = kept
        for event in self.left or ():
            await self.publish(wire.with_message_mark(wire.encode_event(event, 1.0), "5f0c2a9e8b7d6432"))


class Interrupted:
    """These messages, before whose first something is lost."""

    def __init__(self, messages: AsyncIterator[Received], lose: Callable[[], Awaitable[None]]) -> None:
        self._messages, self._lose, self._done = messages, lose, False

    def __aiter__(self) -> "Interrupted":
        return self

    async def __anext__(self) -> Received:
        if not self._done:
            self._done = True
            await self._lose()
        return await anext(self._messages)


@pytest.mark.anyio
@pytest.mark.parametrize("becomes", ["shorter", "another"])
async def test_what_was_passed_over_is_read_where_its_snapshot_is_lost(
    becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was rolled back while the past was read: the last snapshot is gone, or nothing but a new one is there."""
    monkeypatch.setattr(subscriber, "ASK_AGAIN_SECONDS", 0.02)
    writer = Writer("a")
    writer.snapshot(), writer.grant("1", "GPU-0"), writer.grant("2", "GPU-1"), writer.snapshot()
    left = None if becomes == "shorter" else writer.said[-1:]
    bus = Losing(2, left)
    for event in writer.said:
        await bus.publish(wire.encode_event(event, 1.0))
    client, expected = Client(bus, ManualClock()), writer.said[:-1] if left is None else left
    async with aclosing(client.allocations(0, superseded=False)) as events:
        with anyio.fail_after(10):
            delivery = [await anext(events) for _ in expected]

    assert expected == [each.event for each in delivery]


@pytest.mark.anyio
async def test_a_node_is_not_waited_for_whose_snapshot_is_deleted_meanwhile() -> None:
    """The snapshot has all before it read; where that ends is known although the snapshot is there no more."""
    writer, bus = Writer("a"), Losing(3, None)
    writer.snapshot(), writer.grant("1", "GPU-0"), writer.grant("2", "GPU-1")
    forged = AllocationsSnapshot(node=writer.node, epoch=writer.epoch, seq=2, allocations=(), digest="")
    for event in writer.said:
        await bus.publish(wire.encode_event(event, 1.0))
    await bus.publish(wire.with_message_mark(wire.encode_event(forged, 1.0), "5f0c2a9e8b7d6431"))
    async with aclosing(Client(bus, ManualClock()).allocations(0, superseded=False)) as events:
        with anyio.fail_after(10):
            delivery = [await anext(events) for _ in writer.said]
            for node in ("b", "c"):  # the first takes the place of the deleted one
                await bus.publish(wire.encode_event(Writer(node).snapshot(), 1.0))
            other = await anext(events)

    assert [*writer.said, Writer("c").snapshot()] == [each.event for each in (*delivery, other)]


@pytest.mark.anyio
async def test_the_past_is_taken_in_pieces_of_a_few_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "AT_ONCE_BYTES", 1)
    bus, writer = MemoryBus(), Writer("a")
    taken: list[int] = []
    for event in (writer.snapshot(), writer.grant("1", "GPU-0"), writer.snapshot()):
        await bus.publish(wire.encode_event(event, 1.0))
    client = Client(bus, ManualClock())
    some = client._take_some
    monkeypatch.setattr(client, "_take_some", lambda *args, **more: noted(taken, some(*args, **more)))
    async with aclosing(client.allocations(0)) as events:
        delivery = [await anext(events) for _ in writer.said]

    assert (writer.said, [1, 1, 1]) == ([each.event for each in delivery], taken)


async def noted(sizes: list[int], some: Awaitable[Sequence[Received | None]]) -> Sequence[Received | None]:
    pieces = await some
    sizes.append(len(pieces))
    return pieces


class Racing(ManualClock):
    """A clock by which every look at it takes long."""

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now


@pytest.mark.anyio
async def test_other_tasks_run_while_the_newest_snapshots_are_looked_for() -> None:
    writer, turns = Writer("a"), itertools.count()
    stored = [Received(message=wire.encode_event(writer.snapshot(), 1.0), position=number) for number in (1, 2, 3)]

    async def at_hand() -> AsyncIterator[Received]:
        for received in stored:
            yield received

    async def run() -> None:
        while True:
            next(turns)
            await anyio.lowlevel.checkpoint()

    async with background() as tasks:
        tasks.start_soon(run)
        await newest_snapshots(at_hand(), 3, 1.0, TaskTurns(Racing()))

    assert next(turns) >= 3
