"""Many publications under way on one real connection: what is known of each when the server dies or is not there."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from bus_support import GRANTED, disconnected, killable, said

from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.ports import Bus, Message, Stream
from topoalign.runtime.nats_bus import connect_bus, publication
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.nats_connection import NatsConnection
from topoalign.runtime.nats_bus.nats_library import TolerantClient
from topoalign.runtime.nats_bus.stored import Acknowledgement


async def all_stored(bus: Bus, messages: Sequence[Message]) -> list[int]:
    """Publishes as an outbox does: those that are not confirmed again, in their order, until all are."""
    positions: list[int] = []
    while len(positions) < len(messages):
        for position in await bus.publish_all(messages[len(positions) :]):
            if position is None:
                break
            positions.append(position)
        await anyio.lowlevel.checkpoint()
    return positions


pytestmark = pytest.mark.anyio


class Scripted(TolerantClient):
    """Notes the reply subjects of what is published; the answers come when the test gives them."""

    max_payload = 1000

    def __init__(self) -> None:
        super().__init__()
        self.replies: list[bytes] = []

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        self.replies.append(reply.encode())


def scripted() -> tuple[NatsConnection, Scripted]:
    connection = NatsConnection("x", "_INBOX_x")
    client = connection.client = Scripted()
    return connection, client


async def test_acknowledgements_in_any_order_find_their_messages() -> None:
    """One that cannot be read, as of a subject that no store takes, is none; all have to be received."""
    connection, client = scripted()
    found: list[Acknowledgement | None] = []

    async def publish() -> None:
        found.extend(await publication.publish_pipelined(connection, [said(number) for number in range(4)], 60))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(publish)
        await anyio.wait_all_tasks_blocked()
        for number, body in ((2, b'{"seq": 12}'), (0, b'{"seq": 10}'), (3, b""), (0, b'{"seq": 99}')):
            connection.take_answer(Delivered(client.replies[number], body, b""))
        await anyio.wait_all_tasks_blocked()
        assert not found
        connection.take_answer(Delivered(client.replies[1], b'{"seq": 11, "duplicate": true}', b""))

    assert [10, 11, 12, None] == [each.seq if each is not None else None for each in found]
    assert {} == connection._questions


async def test_nothing_is_kept_of_a_question_that_was_given_up() -> None:
    """A registry asks thousands of allocators in a round, of which some are away for weeks."""
    connection, _ = scripted()
    asks = (
        lambda: connection.request("a.b", b"", 60),
        lambda: publication.publish_pipelined(connection, [said(1)], 60),
    )
    for ask in asks:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert connection._questions
            tasks.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert {} == connection._questions


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
