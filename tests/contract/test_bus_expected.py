"""
Compare-and-set on every bus: a message under the condition that the newest one of its subject is the expected one, and
several of them as one atomic batch.
"""

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from bus_support import said
from simulation.bus import Broker, FaultyBus

from topoalign.core.model.errors import BusConflict, BusRefused, IdTaken
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import MOST_IN_BATCH, Bus, Message, Received, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.node_bus import NodeBus

pytestmark = pytest.mark.anyio
A, B = "topoalign.v1.reservation.node-1", "topoalign.v1.reservation.b"


@pytest.fixture(params=["memory", "simulated", "nats", "node"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    if request.param == "simulated":
        yield FaultyBus(Broker(), Random(0))
        return
    async with local_nats(tmp_path) as url, connect_bus(url, name="contract") as over_nats:
        yield over_nats if request.param == "nats" else NodeBus(over_nats, NodeName("node-1"))


async def newest(bus: Bus, subject: str) -> tuple[int, bytes] | None:
    found: Received | None = await bus.newest(Stream.RESERVATIONS, subject)
    return None if found is None else (found.position, found.message.body)


async def test_a_message_is_stored_after_the_expected_one(bus: Bus) -> None:
    """0 expects none; each subject counts for itself."""
    first = await bus.publish(said(1, A), 0)
    other = await bus.publish(said(2, B), 0)
    second = await bus.publish(said(3, A), first)

    assert (1, 2, 3) == (first, other, second)
    assert (3, said(3).body) == await newest(bus, A)


async def test_a_message_after_another_than_expected_is_a_conflict(bus: Bus) -> None:
    """C44: who has not received the newest message writes nothing. So does who expects one that the stream never had."""
    await bus.publish(said(1, A), 0)
    await bus.publish(said(2, A), 1)

    for expected in (0, 1, 7):
        with pytest.raises(BusConflict, match=f"has a newer message than {expected}"):
            await bus.publish(said(3, A), expected)
    assert (2, said(2).body) == await newest(bus, A)


async def test_the_repetition_of_a_stored_message_is_a_success(bus: Bus) -> None:
    """Its confirmation was lost: the store says conflict, and has it. Also when others have written since."""
    await bus.publish(said(1, A), 0)
    again = await bus.publish(said(1, A), 0)
    await bus.publish(said(2, A), 1)

    assert (1, 1) == (again, await bus.publish(said(1, A), 0))
    assert 2 == await bus.publish(said(2, A), 1)
    await bus.publish(said(3, B), 0)
    assert 4 == await bus.publish(said(4, A), 2)
    assert (2, 4) == (await bus.publish(said(2, A), 1), await bus.publish(said(4, A), 2))
    assert 4 == await bus.last_position(Stream.RESERVATIONS)


async def test_another_message_under_the_same_id_is_no_repetition(bus: Bus) -> None:
    """A writer decides anew after a conflict, and its next message may have the id of the one that was not stored."""
    await bus.publish(said(1, A), 0)
    other = msgspec.structs.replace(said(1, A), body=b"{}")

    with pytest.raises(BusConflict):
        await bus.publish(other, 0)
    with pytest.raises(IdTaken):
        await bus.publish(other, 1)


async def test_a_batch_is_stored_whole(bus: Bus) -> None:
    await bus.publish(said(1, B), 0)

    positions = await bus.publish_batch([(said(2, A), 0), (said(3, B), 1)])

    assert [2, 3] == [*positions]
    assert ((2, said(2).body), (3, said(3).body)) == (await newest(bus, A), await newest(bus, B))


@pytest.mark.parametrize("stale", [0, 1, 2])
async def test_a_batch_with_one_conflict_stores_nothing(bus: Bus, stale: int) -> None:
    subjects = [A, B, f"{B}-2"]
    await bus.publish(said(1, subjects[stale]), 0)

    with pytest.raises(BusConflict):
        await bus.publish_batch([(said(10 + n, subject), 0) for n, subject in enumerate(subjects)])
    assert 1 == await bus.last_position(Stream.RESERVATIONS)


async def test_the_repetition_of_a_stored_batch_is_a_success(bus: Bus) -> None:
    """Also when others have written since, and whatever was stored before."""
    first, second = [(said(1, A), 0), (said(2, B), 0)], [(said(3, A), 1), (said(4, B), 2)]

    for batch, positions in ((first, [1, 2]), (second, [3, 4])):
        assert positions == [*await bus.publish_batch(batch)] == [*await bus.publish_batch(batch)]
    await bus.publish(said(5, A), 3)
    for batch, positions in ((first, [1, 2]), (second, [3, 4])):
        assert positions == [*await bus.publish_batch(batch)]
    assert 5 == await bus.last_position(Stream.RESERVATIONS)


async def test_a_batch_of_which_only_a_part_is_stored_is_no_repetition(bus: Bus) -> None:
    """The first message is there, as one of another batch or alone."""
    await bus.publish_batch([(said(1, A), 0), (said(2, B), 0)])

    for batch in ([(said(1, A), 0), (said(3, f"{B}-2"), 0)], [(said(1, A), 0), (said(4, B), 2)]):
        with pytest.raises((BusConflict, IdTaken)):
            await bus.publish_batch(batch)
    assert 2 == await bus.last_position(Stream.RESERVATIONS)


async def test_a_batch_whose_ids_are_taken_stores_nothing(bus: Bus) -> None:
    await bus.publish(said(1, "topoalign.v1.reservation.c"))

    with pytest.raises(IdTaken):
        await bus.publish_batch([(said(2, A), 0), (said(1, B), 0)])
    assert 1 == await bus.last_position(Stream.RESERVATIONS)


async def test_a_batch_of_the_largest_size_is_stored(bus: Bus) -> None:
    batch = [(said(n, f"{B}-{n}"), 0) for n in range(MOST_IN_BATCH)]

    assert [*range(1, MOST_IN_BATCH + 1)] == [*await bus.publish_batch(batch)]


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([], id="none"),
        pytest.param([said(n, f"{B}-{n}") for n in range(MOST_IN_BATCH + 1)], id="too many"),
        pytest.param([said(1, A), said(2, A)], id="one subject twice"),
        pytest.param([said(1, A), said(2, "topoalign.v1.usage.node-1")], id="two streams"),
        pytest.param([said(1, "topoalign.v1.usage.node-1")], id="a stream without batches"),
    ],
)
async def test_what_is_no_batch_is_refused(bus: Bus, messages: list[Message]) -> None:
    with pytest.raises(BusRefused, match="cannot be one batch"):
        await bus.publish_batch([(message, 0) for message in messages])
    assert 0 == await bus.last_position(Stream.RESERVATIONS)


async def test_the_newest_message_of_a_subject_is_found(bus: Bus) -> None:
    """None where there is none, or none any more."""
    await bus.publish(said(1, A))
    await bus.publish(said(2, A))
    await bus.publish(said(3, B))

    assert (2, said(2).body) == await newest(bus, A)
    assert await newest(bus, f"{B}-2") is None
    await bus.forget(Stream.RESERVATIONS, A)
    assert await newest(bus, A) is None
    assert 4 == await bus.publish(said(4, A), 0)
