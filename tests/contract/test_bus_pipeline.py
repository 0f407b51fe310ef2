"""Many publications under way on one real connection: what is known of each when the server dies or is not there."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from bus_support import disconnected, killable, said
from nats.aio.msg import Msg

from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_bus.pipeline import Acknowledgements

pytestmark = pytest.mark.anyio


def answered(number: int, body: bytes) -> Msg:
    return cast(Msg, SimpleNamespace(subject=f"_INBOX_x.y.{number}", data=body))


async def test_acknowledgements_in_any_order_find_their_messages() -> None:
    """One that cannot be read, as of a subject that no store takes, is none; all have to be heard."""
    answers = Acknowledgements(4)
    for number, body in ((2, b'{"seq": 12}'), (0, b'{"seq": 10}'), (3, b"")):
        await answers.hear(answered(number, body))
    before = answers.complete.is_set()
    await answers.hear(answered(1, b'{"seq": 11, "duplicate": true}'))

    assert (False, True) == (before, answers.complete.is_set())
    assert [10, 11, 12, None] == [each.seq if each is not None else None for each in answers.heard]


async def test_without_a_connection_nothing_is_stored() -> None:
    async with connect_bus("nats://127.0.0.1:9", wait=None) as bus:
        assert [None, None] == await bus.publish_all([said(1), said(2)])


@pytest.mark.parametrize("turns", [1, 8, 40])
async def test_what_a_lost_connection_left_open_is_published_again(tmp_path: Path, turns: int) -> None:
    """The server dies under hundreds of messages: what it has is the beginning of them, each once."""
    async with killable(tmp_path) as server, connect_bus(server.url, name="pipeline") as bus:
        messages = [said(number) for number in range(500)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bus.publish_all, messages)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            server.kill()
        await disconnected(bus)
        await server.start()
        while not bus.connected:
            await anyio.lowlevel.checkpoint()
        positions = await bus.publish_all(messages)

    assert [*range(1, 501)] == positions
