"""Versions side by side: what a later one says more is kept, what it says otherwise is counted, and nobody stops."""

import json
import subprocess
import sys
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import get_args

import anyio
import msgspec
import pytest
from bus_support import killable
from e2e_support import allocate, answering, in_one_process, pod
from fact_support import Writer, changed, reservation, reserved_container
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import ASK_AGAIN_SECONDS, HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.client import Client, healing, subscriber
from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import AllocationGranted, Event
from topoalign.core.model.ids import NodeName
from topoalign.core.model.maintenance import Override
from topoalign.core.ports import Bus, Endpoint, Message, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NODE = NodeName("node-1")


def later(event: Event) -> Message:
    """The same event as a later version would say it: with more fields, at the top and further down."""
    message = wire.encode_event(event, 0)
    whole = json.loads(message.body)
    whole["later"] = {"number": 12345678901234567890123, "text": "\n"}
    for inner in (whole.get("allocation"), *whole.get("allocations", ())):
        if isinstance(inner, dict):
            inner["partition"] = [1, 2]
    return msgspec.structs.replace(message, body=json.dumps(whole, indent=1).encode())


async def test_fields_of_a_later_version_are_handed_on_byte_for_byte() -> None:
    """C46: whoever understands more than this version gets it all, by way of this version."""
    bus, writer = MemoryBus(), Writer(NODE)
    said = [later(writer.snapshot()), later(writer.grant("1", "GPU-0")), later(writer.release("1"))]
    for message in said:
        await bus.publish(message)
    client = Client(bus)
    async with aclosing(client.allocations(since=0)) as events:
        delivery = [await anext(events) for _ in said]
    async with aclosing(client.allocations()) as events:
        current_snapshot = await anext(events)

    assert writer.said == [one.event for one in delivery]
    assert [message.body for message in said] == [one.body for one in delivery]
    assert current_snapshot.event == msgspec.json.decode(current_snapshot.body, type=Event)
    assert (0, 0) == (client.counts.unknown, client.counts.undecodable)


async def test_the_command_line_prints_what_it_does_not_know(tmp_path: Path) -> None:
    """C46: `watch --json` leaves nothing out, and each event is one line whatever its writer did."""
    writer = Writer(NODE)
    said = [later(writer.snapshot()), later(writer.grant("1", "GPU-0"))]
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        for message in said:
            await bus.publish(message)
        watch = ["watch", "--json", "--since", "0", "--count", "2", "--nats", server.url]
        printed = await anyio.run_process(
            [str(Path(sys.executable).with_name("topoalign")), *watch], stderr=subprocess.PIPE
        )

    lines = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [json.loads(message.body) for message in said] == [line["event"] for line in lines]
    assert [1, 2] == [line["position"] for line in lines]


async def test_a_dead_letter_keeps_what_a_later_version_said() -> None:
    """C46: a role that this version does not know cannot be folded; it is put aside as it was."""
    bus, writer = MemoryBus(), Writer(NODE)
    await bus.publish(wire.encode_event(writer.snapshot(), 0))
    message = wire.encode_event(writer.grant("1", "GPU-0"), 0)
    message = msgspec.structs.replace(message, body=message.body.replace(b'"id":"1"', b'"id":"1","role":"ephemeral"'))
    await bus.publish(message)
    client = Client(bus, name="older")
    async with aclosing(client.allocations(since=0)) as events:
        await anext(events)
        await bus.publish(wire.encode_event(writer.snapshot(), 0))
        healed = await anext(events)
    async with bus.follow(Stream.DEADLETTERS, ">") as letters:
        letter = (await anext(letters)).message

    assert writer.said[-1] == healed.event
    assert 1 == client.counts.undecodable
    assert message.body == letter.body
    assert "role" in letter.headers["topoalign-reason"]


async def test_unreadable_snapshots_are_requested_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C46: each question has the allocator write its journal anew, so a version that it cannot serve must not insist."""
    monkeypatch.setattr(subscriber, "ASK_AGAIN_SECONDS", 0.01)
    bus, writer, asked = MemoryBus(), Writer(NODE), []
    clock = ManualClock()

    async def announce(body: bytes) -> bytes:
        asked.append(clock.monotonic())
        await bus.publish(unreadable(writer))
        return wire.encode_answer([writer.epoch, writer.state.seq])

    endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(NODE, "snapshot"), answer=announce)
    client = Client(bus, clock)
    async with bus.serve("topoalign-allocator", [endpoint]), anyio.create_task_group() as tasks:

        async def listen() -> None:
            async for _ in client.allocations(since=0):
                raise AssertionError

        writer.snapshot()
        await bus.publish(wire.encode_event(writer.grant("1", "GPU-0"), 0))  # without the snapshot before it
        tasks.start_soon(listen)
        while min(len(asked), client.counts.undecodable) < 6:
            await clock.advance(1)
        tasks.cancel_scope.cancel()

    pauses = [round(after - before, 3) for before, after in pairwise(asked)]
    assert all(pause >= healing.ASK_AGAIN_SECONDS * 2**times for times, pause in enumerate(pauses, 1))
    assert len(asked) == client.counts.undecodable


def unreadable(writer: Writer) -> Message:
    """The next snapshot in the words of a version that has other roles."""
    message = wire.encode_event(writer.snapshot(), 0)
    return msgspec.structs.replace(message, body=message.body.replace(b'"id":"1"', b'"id":"1","role":"ephemeral"'))


@pytest.mark.parametrize(
    "kind", ["topoalign.v1.AllocationBlessed", "topoalign.v2.AllocationGranted", "topoalign.v10.TopologyDiscovered"]
)
async def test_events_of_unknown_types_and_versions_are_only_counted(kind: str) -> None:
    """C46: a later version may mean something else by the same words, so nothing of it is applied."""
    bus, writer = MemoryBus(), Writer(NODE)
    await bus.publish(wire.encode_event(writer.snapshot(), 0))
    unknown = wire.encode_event(writer.grant("1", "GPU-0"), 0)
    await bus.publish(
        msgspec.structs.replace(unknown, headers={**unknown.headers, "Nats-Msg-Id": "x", "ce-type": kind})
    )
    await bus.publish(unknown)
    client = Client(bus)
    async with aclosing(client.allocations(since=0)) as events:
        delivery = [(await anext(events)).event for _ in range(2)]

    assert writer.said == delivery
    assert (1, 0, 0) == (client.counts.unknown, client.counts.undecodable, client.counts.gaps)
    assert 0 == await bus.last_position(Stream.DEADLETTERS)


async def test_a_subscriber_of_allocations_never_receives_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    """C46: nor does one of a version that does not know them, from its store, which takes them beside the allocations."""
    bus, writer = MemoryBus(), Writer(NODE)
    reserved = wire.encode_event(changed(reservation("a", reserved_container("GPU-0"))), 0)
    for message in (
        wire.encode_event(writer.snapshot(), 0),
        reserved,
        wire.encode_event(writer.grant("1", "GPU-0"), 0),
    ):
        await bus.publish(message)
    monkeypatch.setattr(wire, "KINDS", wire.KINDS - {reserved.headers["ce-type"]})
    client = Client(bus)
    async with aclosing(client.allocations(since=0)) as events:
        delivery = [(await anext(events)).event for _ in range(2)]

    assert writer.said == delivery
    assert (0, 0, 0) == (client.counts.unknown, client.counts.undecodable, client.counts.gaps)
    with pytest.raises(wire.UnknownEvent):
        wire.decode_event(reserved)


def test_events_of_the_version_before_which_say_less_are_understood() -> None:
    """C46: what was added since has a meaning where it is missing."""
    body = b'{"type":"AllocationGranted","node":"node-1","epoch":1,"seq":2,"allocation":{"id":"1"}}'
    event = wire.decode_event(Message(subject="topoalign.v1.allocation.node-1.granted", headers={}, body=body))

    assert isinstance(event, AllocationGranted)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"TOPOALIGN_NODE": NODE, "TOPOALIGN_MACHINE": "dgx-a100", "TOPOALIGN_STATE_DIR": str(tmp_path)}


async def test_requests_of_a_later_version_are_refused_by_their_field(
    environment: dict[str, str],
) -> None:
    """C46: to leave a field of a question out would answer another question. Discovery, hinting, allocator."""
    bus = MemoryBus()
    async with in_one_process(bus, environment, ("discovery", "hinting", "allocator")):
        await answering(bus, NODE)
        for subject in subjects():
            body = await bus.ask(subject, b'{"node":"node-1","later":1}', 5)
            with pytest.raises(TopoalignError) as refused:
                wire.decode_answer(body, object)

            assert "request" == json.loads(body)["failure"]["fault"]
            assert "later" in str(refused.value)
        assert isinstance(await allocate(bus, NODE, pod("after", gpus=1)), Admission)


def subjects() -> list[str]:
    """Of all questions that the services of a node answer."""
    verbs = ("allocate", "release", "what-if", "explain", "snapshot", "trust", "alive", "announce")
    words: tuple[Override, ...] = get_args(Override)
    return [
        *(wire.admission_subject(NODE, verb) for verb in verbs),
        *(wire.devices_subject(NODE, word) for word in words),
        wire.hints_subject(NODE),
        wire.discovery_subject(NODE, "announce"),
        wire.discovery_subject(NODE, "alive"),
        wire.discovery_subject(NODE, "published"),
    ]


@pytest.mark.parametrize(
    "reply",
    [
        b'{"ok":{"topology":[1,1],"health":[1,1],"later":[7,7]},"more":1}',
        b'{"ok":{"topology":[1,1,1],"health":[1,1,1]}}',
        b'{"ok":[1,2,3]}',
        b'{"later":1}',
        b'{"failure":{"type":"Failure","fault":"weather","code":"X","finding":"f","remedy":"r","later":1}}',
        b"\xff",
        b"",
    ],
)
async def test_the_allocator_survives_answers_of_another_discovery_version(reply: bytes) -> None:
    """C46: what it cannot use is no answer; it asks again, and says why it believes nothing."""
    bus, clock, asked = MemoryBus(), ManualClock(), []

    async def answer(body: bytes) -> bytes:
        asked.append(body)
        return reply

    hardware_watch = HardwareWatch(Ledger(NODE, MemoryJournal(), clock), bus, clock)
    endpoints = [Endpoint(name="alive", subject=wire.discovery_subject(NODE, "alive"), answer=answer)]
    async with bus.serve("topoalign-discovery", endpoints), anyio.create_task_group() as tasks:
        tasks.start_soon(hardware_watch.run)
        with capture_logs():
            await clock.advance(3 * ASK_AGAIN_SECONDS)
        tasks.cancel_scope.cancel()

    assert len(asked) >= 3
    assert hardware_watch.reason() is not None


async def test_a_hinting_service_of_another_version_is_done_without(environment: dict[str, str]) -> None:
    """C46: it answers in words of its own, or refuses ours; the same providers are asked in process."""
    for reply in (b'{"ok":{"providers":{"gpu":{}}}}', b'{"ok":{"oracle":1}}', b'{"failure":{"type":"Failed"}}', b"{}"):
        bus: Bus = MemoryBus()

        async def answer(body: bytes, reply: bytes = reply) -> bytes:
            return reply

        endpoint = Endpoint(name="hints", subject=wire.hints_subject(NODE), answer=answer)
        async with (
            bus.serve("topoalign-hinting", [endpoint]),
            in_one_process(bus, environment, ("discovery", "allocator")),
        ):
            await answering(bus, NODE)
            decision = await allocate(bus, NODE, pod(f"pod-{len(reply)}", gpus=1))

        assert isinstance(decision, Admission)
