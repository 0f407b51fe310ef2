"""Many publications under way on one real connection: what is known of each when the server dies or is not there."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from bus_support import GRANTED, all_stored, disconnected, killable, said
from nats.aio.msg import Msg

from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.ports import Message, Stream
from topoalign.runtime.nats_bus import connect_bus, publication
from topoalign.runtime.nats_bus.nats_connection import NatsConnection
from topoalign.runtime.nats_bus.publication import Acknowledgements

pytestmark = pytest.mark.anyio


def answered(number: int, body: bytes) -> Msg:
    return cast(Msg, SimpleNamespace(subject=f"_INBOX_x.y.{number}", data=body))


async def test_acknowledgements_in_any_order_find_their_messages() -> None:
    """One that cannot be read, as of a subject that no store takes, is none; all have to be received."""
    answers = Acknowledgements(4)
    for number, body in ((2, b'{"seq": 12}'), (0, b'{"seq": 10}'), (3, b"")):
        await answers.receive(answered(number, body))
    before = answers.complete.is_set()
    await answers.receive(answered(1, b'{"seq": 11, "duplicate": true}'))

    assert (False, True) == (before, answers.complete.is_set())
    assert [10, 11, 12, None] == [each.seq if each is not None else None for each in answers.acknowledgements]


async def test_without_a_connection_nothing_is_stored() -> None:
    async with connect_bus("nats://127.0.0.1:9", wait=None) as nats:
        assert [None, None] == await nats.publish_all([said(1), said(2)])


@pytest.mark.parametrize("turns", [1, 8, 40])
async def test_what_a_lost_connection_left_open_is_published_again(tmp_path: Path, turns: int) -> None:
    """The server dies under hundreds of messages: what it has is the beginning of them, each once."""
    async with killable(tmp_path) as server, connect_bus(server.url, name="pipeline") as nats:
        messages = [said(number) for number in range(500)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(nats.publish_all, messages)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            server.kill()
        await disconnected(nats)
        await server.start()
        positions = await all_stored(nats, messages)

    assert [*range(1, 501)] == positions


async def test_what_the_server_finds_too_large_costs_nothing_before_it(tmp_path: Path) -> None:
    """The server would drop the connection for it; so it is not sent, nor is what follows it."""
    async with killable(tmp_path, "max_payload: 65536\n") as server, connect_bus(server.url, name="pipeline") as nats:
        connection = nats.live()
        wide = {"Nats-Msg-Id": "test.3", "wide": "h" * 100}
        large = Message(subject=GRANTED, headers=wide, body=b"b" * (65536 - 100))
        positions = await nats.publish_all([said(1), said(2), large, said(4)])
        alone = await nats.publish_all([large, said(4)])
        last = await nats.last_position(Stream.ALLOCATIONS)
        with pytest.raises(BusRefused, match="max_payload"):
            await nats.publish(large)

        assert connection is nats.live()
        assert not connection.lost.is_set()
    assert ([1, 2, None, None], [None, None], 2) == (positions, alone, last)


async def test_nothing_is_compared_behind_the_first_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After lost acknowledgements hundreds of messages are repetitions, and each look may take seconds."""
    looks: list[int] = []

    async def compare(connection: NatsConnection, stream: Stream, position: int, message: Message) -> None:
        looks.append(position)
        if position == 2:
            raise BusUnavailable("no answer")

    async with killable(tmp_path) as server, connect_bus(server.url, name="pipeline") as nats:
        messages = [said(number) for number in range(1, 6)]
        await nats.publish_all(messages)
        monkeypatch.setattr(publication, "compare", compare)
        positions = await nats.publish_all(messages)

    assert ([1, None, None, None, None], [1, 2]) == (positions, looks)
