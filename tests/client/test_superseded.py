"""A reader that leaves out what later snapshots stand for believes the same as one that reads everything."""

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from random import Random

import anyio
import msgspec
import pytest
from fact_support import Writer
from hypothesis import given
from hypothesis import strategies as st

from topoalign.client import Client, Delivery, subscriber
from topoalign.client.superseded import newest_snapshots
from topoalign.core import wire
from topoalign.core.model.events import LedgerEvent
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Message, Received
from topoalign.core.state.fold import NodeState
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

NODES = ("a", "b.example.com", "c")
ODDITIES = ("again", "lost", "unreadable", "nameless")


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
        case "lost":
            return [*messages[:place], *rest]
        case "unreadable":
            return [*messages[:place], msgspec.structs.replace(one, body=b"{", headers={}), *rest]
        case _:  # nameless
            return [*messages[:place], msgspec.structs.replace(one, headers={}), *rest]


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(ODDITIES), max_size=4))
def test_the_same_is_believed_as_of_a_reader_of_everything(chance: Random, repeated_or_constant: list[str]) -> None:
    """Also where facts were stored again, were lost, or cannot be read."""
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
