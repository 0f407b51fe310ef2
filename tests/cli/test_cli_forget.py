"""`topoalign forget` deletes what a node said that is gone, and refuses for one that lives or was never received of."""

import json
from pathlib import Path

import anyio
import pytest

from topoalign.cli import forget, root
from topoalign.client.stored_records import forget_node, has_published
from topoalign.core import wire
from topoalign.core.model.events import AllocationsSnapshot
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Endpoint, Message, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = pytest.mark.anyio
GONE, LIVING = NodeName("gone.example.com"), NodeName("living")


async def no_answer(body: bytes) -> bytes:
    return wire.encode_answer(None)


async def run(*arguments: str) -> int:
    return await anyio.to_thread.run_sync(root.run_command_line, arguments)


async def test_a_node_that_is_gone_is_forgotten_and_one_that_lives_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with local_nats(tmp_path) as url, connect_bus(url) as bus:
        for node in (GONE, LIVING):
            await bus.publish(
                wire.encode_event(AllocationsSnapshot(node=node, epoch=1, seq=1, allocations=(), digest=""), 1.0)
            )
        endpoint = Endpoint(name="explain", subject=wire.admission_subject(LIVING, "explain"), answer=no_answer)
        async with bus.serve("topoalign-allocator", [endpoint]):
            forgotten = await run("forget", GONE, "--nats", url, "--json")
            printed = capsys.readouterr().out
            answer = json.loads(printed[printed.index("{\n") :])  # after what the bus of this test has logged
            refused = await run("forget", LIVING, "--nats", url)
            undelivered = await run("forget", "nobody", "--nats", url)
        spoken = [await has_published(bus, node) for node in (GONE, LIVING)]

    errors = capsys.readouterr().err
    assert (0, {"forgotten": GONE}) == (forgotten, answer)
    assert (5, 3) == (refused, undelivered)
    assert "the allocator of node living answers" in errors
    assert [False, True] == spoken


async def test_a_node_whose_allocator_is_stopped_is_not_taken_for_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silence(body: bytes) -> bytes:
        await anyio.sleep_forever()
        return body

    monkeypatch.setattr(forget, "CONNECT_SECONDS", 0.1)
    async with local_nats(tmp_path) as url, connect_bus(url) as bus:
        snapshot = AllocationsSnapshot(node=LIVING, epoch=1, seq=1, allocations=(), digest="")
        await bus.publish(wire.encode_event(snapshot, 1.0))
        endpoint = Endpoint(name="explain", subject=wire.admission_subject(LIVING, "explain"), answer=silence)
        async with bus.serve("topoalign-allocator", [endpoint]):
            refused = await run("forget", LIVING, "--nats", url)
        spoken = await has_published(bus, LIVING)

    assert 69 == refused
    assert spoken
    assert "node living may still run, so nothing was deleted" in capsys.readouterr().err


def test_a_node_without_a_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status = root.run_command_line(["forget", "", "--nats", "nats://127.0.0.1:1"])

    assert 5 == status
    assert "NODE: it is empty" in capsys.readouterr().err


async def test_everything_that_is_said_of_a_node_is_deleted() -> None:
    """What registries reserve on it, too; but a reservation does not tell that the node has spoken."""
    bus = MemoryBus()
    reserved = wire.reservation_subject(GONE)
    await bus.publish(Message(subject=reserved, headers={}, body=b"{}"))
    before = await has_published(bus, GONE)
    for event, (pattern, _) in wire.SUBJECTS.items():
        subject = f"{wire.PREFIX}.{pattern.format(node=wire.encode_node_token(GONE))}"
        await bus.publish(Message(subject=subject, headers={}, body=b"{}"))
        assert await has_published(bus, GONE), event
    await forget_node(bus, GONE)

    assert not before
    assert 0 == sum([await bus.last_position(stream) for stream in Stream])
