"""What a subscriber can rely on, whatever the stream and its writers do."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import KillableServer, killable, stored
from fact_support import Writer
from structlog.testing import capture_logs

from topoalign.client import Client, Delivery, connect, subscriber
from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.events import (
    AllocationBound,
    AllocationGranted,
    AllocationsSnapshot,
    DeviceHealth,
    DeviceHealthChanged,
    Event,
    HealthState,
    TopologyDiscovered,
)
from topoalign.core.model.ids import AllocationID, DeviceID, NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Endpoint, Message, Stream
from topoalign.core.state.fold import replay
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import NatsBus, apply_stores, connect_bus
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
TIME = 1_700_000_000.5


async def publish(bus: Bus, *events: Event) -> None:
    for event in events:
        await bus.publish(wire.encode_event(event, TIME))


async def delivery(client: Client, count: int, since: int | None = None, node: str | None = None) -> list[Delivery]:
    async with aclosing(client.allocations(since, NodeName(node) if node else None)) as events:
        return [await anext(events) for _ in range(count)]


def facts(received: list[Delivery]) -> list[Event]:
    return [one.event for one in received]


async def test_a_snapshot_of_every_node_comes_first_and_then_every_event() -> None:
    bus, one, other = MemoryBus(), Writer("a"), Writer("b.example.com")
    await publish(bus, one.snapshot(), one.grant("1", "GPU-0"), other.snapshot(), one.grant("2", "GPU-1"))
    client = Client(bus)

    async with aclosing(client.allocations()) as events:
        first, second = await anext(events), await anext(events)
        await publish(bus, other.grant("3", "GPU-7"))
        third = await anext(events)

    assert isinstance(first.event, AllocationsSnapshot)
    assert isinstance(second.event, AllocationsSnapshot)
    assert [("a", {"GPU-0", "GPU-1"}), ("b.example.com", set())] == [
        (event.node, {device for live in event.allocations for device in live.device_ids})
        for event in (first.event, second.event)
    ]
    assert one.state.digest == first.event.digest == replay(NodeName("a"), [first.event]).digest
    assert other.said[-1] == third.event
    assert (5, TIME) == (third.position, third.time)


async def test_where_nothing_was_said_yet_the_first_event_is_simply_next() -> None:
    bus, writer = MemoryBus(), Writer()
    async with aclosing(Client(bus).allocations()) as events, anyio.create_task_group() as tasks:
        tasks.start_soon(publish, bus, writer.snapshot())

        assert writer.said[0] == (await anext(events)).event


async def test_one_node_can_be_followed_alone() -> None:
    bus, one, other = MemoryBus(), Writer("a"), Writer("a.b")
    await publish(bus, one.snapshot(), other.snapshot(), other.grant("1", "GPU-0"))

    async with aclosing(Client(bus).allocations(node=NodeName("a"))) as events:
        await anext(events)
        await publish(bus, other.grant("2", "GPU-1"), one.grant("3", "GPU-2"))

        assert one.said[-1] == (await anext(events)).event


async def test_going_on_after_a_position_hears_each_event_once_and_no_snapshot() -> None:
    bus, writer = MemoryBus(), Writer()
    await publish(bus, writer.snapshot(), *(writer.grant(str(n), f"GPU-{n}") for n in range(6)))
    before = await delivery(Client(bus), 1, since=2)

    after = await delivery(Client(bus), 4, since=before[-1].position)

    assert writer.said[2:] == facts(before + after)


@pytest.mark.parametrize("since", [99, None])
async def test_a_position_that_the_stream_never_had_begins_with_a_snapshot(since: int | None) -> None:
    """The store was lost since: what was received under the old positions may not be true any more."""
    bus, writer = MemoryBus(), Writer()
    await publish(bus, writer.snapshot(), writer.grant("1", "GPU-0"))

    received = await delivery(Client(bus), 1, since=since)

    assert isinstance(received[0].event, AllocationsSnapshot)
    assert {"GPU-0"} == received[0].event.allocations[0].device_ids


async def test_repetitions_after_the_broker_forgot_their_ids_are_dropped() -> None:
    """C35: the same facts are in the stream three times, under ids that the broker takes for new ones."""
    bus, writer = MemoryBus(), Writer()
    client = Client(bus)
    for fact in (writer.snapshot(), writer.grant("1", "GPU-0"), writer.bind("1", "pod-1")):
        message = wire.encode_event(fact, TIME)
        for attempt in range(3):
            await bus.publish(
                msgspec.structs.replace(message, headers={**message.headers, "Nats-Msg-Id": f"{fact.seq}.{attempt}"})
            )

    async with aclosing(client.allocations(since=0)) as events:
        received = [await anext(events) for _ in range(3)]
        await publish(bus, writer.release("1"))
        received.append(await anext(events))

    assert writer.said == facts(received)
    assert 6 == client.counts.repeated


async def test_a_gap_is_healed_by_a_snapshot_that_the_allocator_is_asked_for() -> None:
    """C34: nothing of the node is said until it is whole again."""
    bus, writer, asked = MemoryBus(), Writer("gpu.7"), []
    client = Client(bus)

    async def announce(body: bytes) -> bytes:
        asked.append(body)
        await publish(bus, writer.snapshot())
        return wire.encode_answer([writer.epoch, writer.state.seq])

    endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(writer.node, "snapshot"), answer=announce)
    await publish(bus, writer.snapshot(), writer.grant("1", "GPU-0"))
    async with bus.serve("topoalign-allocator", [endpoint]), aclosing(client.allocations()) as events:
        await anext(events)
        writer.grant("2", "GPU-1")  # never published
        await publish(bus, writer.release("1"))
        healed = await anext(events)
        await publish(bus, writer.grant("3", "GPU-0"))
        news = await anext(events)

    assert [b'{"node":"gpu.7"}'] == asked
    assert 1 == client.counts.gaps
    assert isinstance(healed.event, AllocationsSnapshot)
    assert writer.state.digest == replay(writer.node, [healed.event, news.event]).digest


async def test_a_node_gone_before_it_healed_a_gap_is_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its last events stay for a month, and whoever starts reads them; it is asked all the same, for it may be back."""
    monkeypatch.setattr(subscriber, "ASK_AGAIN_SECONDS", 0.01)
    bus, writer, clock, asked = MemoryBus(), Writer("gpu.7"), ManualClock(), 0

    async def refuse(body: bytes) -> bytes:
        nonlocal asked
        asked += 1
        return wire.encode_error(BusUnavailable("it is not there"))

    endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(writer.node, "snapshot"), answer=refuse)
    writer.snapshot()
    await publish(bus, writer.grant("1", "GPU-0"))  # the snapshot before it is too old to be in the stream
    client = Client(bus, clock)
    with capture_logs() as logs:
        async with (
            bus.serve("topoalign-allocator", [endpoint]),
            aclosing(client.allocations(since=0)) as events,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(anext, events)
            while asked < 5:
                await clock.advance(1)
            await publish(bus, writer.snapshot())

    assert ["no snapshot yet"] == [line["event"] for line in logs]


async def test_an_allocator_is_asked_once_however_many_events_follow_a_gap() -> None:
    bus, writer, asked = MemoryBus(), Writer(), []

    async def refuse(body: bytes) -> bytes:
        asked.append(body)
        return wire.encode_error(BusUnavailable("later"))

    endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(writer.node, "snapshot"), answer=refuse)
    await publish(bus, writer.snapshot())
    client = Client(bus, clock=ManualClock())
    async with bus.serve("topoalign-allocator", [endpoint]), aclosing(client.allocations()) as events:
        await anext(events)
        writer.grant("lost", "GPU-0")
        await publish(bus, *(writer.grant(f"a{number}", f"GPU-{number}") for number in range(1, 6)), writer.snapshot())

        assert writer.said[-1] == (await anext(events)).event
    assert (1, 1) == (len(asked), client.counts.gaps)


async def test_a_node_with_lost_beginning_is_healed_and_others_do_not_wait() -> None:
    """If the beginning of a node's facts is no longer in the stream, a snapshot heals it; other nodes do not wait."""
    bus, lost, whole = MemoryBus(), Writer("lost"), Writer("whole")
    lost.snapshot(), lost.grant("1", "GPU-0")
    await publish(bus, lost.grant("2", "GPU-1"), whole.snapshot())

    received = await delivery(Client(bus), 1)
    await publish(bus, lost.snapshot())
    both = await delivery(Client(bus), 2)

    assert [whole.node] == [one.event.node for one in received]
    assert [lost.node, whole.node] == [one.event.node for one in both]


async def test_poison_is_counted_and_set_aside_and_the_client_goes_on() -> None:
    """C41."""
    bus, writer = MemoryBus(), Writer()
    client = Client(bus, name="watcher")
    await publish(bus, writer.snapshot())
    good = wire.encode_event(writer.grant("1", "GPU-0"), TIME)
    poison = [
        msgspec.structs.replace(good, body=b"\x00\xff garbage", headers={}),
        msgspec.structs.replace(good, body=good.body.replace(b"node-1", b"node-2"), headers={}),
        msgspec.structs.replace(good, body=b"[" * 100_000, headers={"ce-type": "topoalign.v1.AllocationGranted"}),
        msgspec.structs.replace(good, body=good.body.replace(b'"seq":2', b'"seq":NaN'), headers={}),
    ]
    later = Message(subject=good.subject, headers={"ce-type": "topoalign.v1.AllocationBlessed"}, body=b"{}")
    async with aclosing(client.allocations()) as events:
        await anext(events)
        for message in [*poison, later, good]:
            await bus.publish(message)

        assert writer.said[-1] == (await anext(events)).event

    async with bus.follow(Stream.DEADLETTERS, "topoalign.v1.deadletter.watcher") as letters:
        put_aside = [(await anext(letters)).message for _ in poison]
    assert (4, 1) == (client.counts.undecodable, client.counts.unknown)
    assert [message.body for message in poison] == [letter.body for letter in put_aside]
    assert all(letter.headers["topoalign-reason"] for letter in put_aside)


async def test_a_subject_that_is_no_text_stops_nobody(tmp_path: Path) -> None:
    """C41: any client of NATS can store one, and every subscriber would meet it again and again."""
    writer = Writer()
    async with (
        killable(tmp_path) as server,
        connect(server.url, name="watcher") as client,
        connect_bus(server.url) as bus,
        await anyio.connect_tcp("127.0.0.1", server.port or 0) as raw,
    ):
        await raw.send(b"CONNECT {}\r\nPUB topoalign.v1.allocation.\xff\xfe.granted 2\r\n{}\r\nPING\r\n")
        while b"PONG" not in await raw.receive():
            pass
        await publish(bus, writer.snapshot())
        received = await delivery(client, 1, since=0)

    assert writer.said == facts(received)
    assert 1 == client.counts.undecodable


async def test_a_fact_that_cannot_be_true_is_put_aside_and_healed() -> None:
    bus, writer = MemoryBus(), Writer()
    client = Client(bus)
    await publish(bus, writer.snapshot())
    async with aclosing(client.allocations()) as events:
        await anext(events)
        writer.grant("1", "GPU-0")
        bound = writer.bind("1", "pod-1")
        assert isinstance(bound, AllocationBound)
        await publish(bus, msgspec.structs.replace(bound, seq=2, allocation=AllocationID("never")))
        await publish(bus, writer.snapshot())

        assert writer.said[-1] == (await anext(events)).event
    assert 1 == client.counts.undecodable
    assert 1 == await bus.last_position(Stream.DEADLETTERS)


def topology(node: str, revision: int, epoch: int = 1) -> TopologyDiscovered:
    return TopologyDiscovered(
        node=NodeName(node), epoch=epoch, revision=revision, boot_id="b", source="test", topology=Topology()
    )


def health(node: str, revision: int) -> DeviceHealthChanged:
    devices = {DeviceID("GPU-0"): DeviceHealth(state=HealthState.HEALTHY)}
    return DeviceHealthChanged(node=NodeName(node), epoch=1, revision=revision, devices=devices)


async def test_the_newest_hardware_and_health_of_each_node_come_first() -> None:
    """The newest topology and health of every node come first, and then all later ones."""
    bus = MemoryBus()
    await publish(bus, *(topology("a", n) for n in range(1, 9)), health("a", 1), topology("b", 1))
    client = Client(bus)

    async with aclosing(client.nodes()) as events:
        first = [(await anext(events)).event for _ in range(3)]
        late = wire.encode_event(topology("a", 7), TIME)
        await bus.publish(msgspec.structs.replace(late, headers={**late.headers, "Nats-Msg-Id": "again"}))
        await publish(bus, topology("a", 1, epoch=2))
        news = (await anext(events)).event

    assert [topology("a", 8), health("a", 1), topology("b", 1)] == first
    assert topology("a", 1, epoch=2) == news
    assert client.counts.repeated > 0


async def test_it_goes_on_through_a_killed_server_over_nats(tmp_path: Path) -> None:
    writer = Writer()
    async with (
        killable(tmp_path) as server,
        connect(server.url, name="watcher") as client,
        connect_bus(server.url) as bus,
        aclosing(client.allocations()) as events,
    ):
        await publish(bus, writer.snapshot())
        received = [await anext(events)]
        server.kill()
        await server.start()
        await stored(bus, wire.encode_event(writer.grant("1", "GPU-0"), TIME))
        received.append(await anext(events))

    assert writer.said == facts(received)
    assert isinstance(received[1].event, AllocationGranted)


async def replace_stream(server: KillableServer, bus: NatsBus, stream: Stream) -> None:
    """Deletes a stream; the administrator creates it again."""
    await bus.live().api(f"$JS.API.STREAM.DELETE.{stream}", b"")
    await apply_stores(server.url)


async def caught_up(client: Client, stream: Stream, events: AsyncIterator[Delivery]) -> None:
    """Waits for an event that does not come until the client has nothing left to read."""

    async def wait() -> None:
        await anext(events)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        while client.unread[stream]:  # the client has no event for it
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_after_the_stream_was_deleted_everything_in_the_new_one_is_news(tmp_path: Path) -> None:
    """C38, for a subscriber that reads on live and for one that counts what is unread, as the registry does."""
    writer = Writer()
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        live, counting = Client(bus), Client(bus)
        async with aclosing(live.allocations()) as events, aclosing(counting.allocations(since=0)) as others:
            await publish(bus, writer.snapshot(), *(writer.grant(str(n), f"GPU-{n}") for n in range(9)))
            await anext(events)
            for _ in range(10):
                await anext(others)
            await replace_stream(server, bus, Stream.ALLOCATIONS)
            await stored(bus, wire.encode_event(writer.grant("new", "GPU-9"), TIME))
            await publish(bus, writer.snapshot(), writer.release("1"))
            with anyio.fail_after(20):
                received = [[await anext(one) for _ in range(3)] for one in (events, others)]
                await caught_up(counting, Stream.ALLOCATIONS, others)

    assert [writer.said[-3:]] * 2 == [facts(one) for one in received]
    assert [1, 2, 3] == [one.position for one in received[0]]


async def test_after_the_stream_was_deleted_a_gap_is_healed_as_before(tmp_path: Path) -> None:
    writer = Writer()
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:

        async def announce(body: bytes) -> bytes:
            await publish(bus, writer.snapshot())
            return wire.encode_answer([writer.epoch, writer.state.seq])

        endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(writer.node, "snapshot"), answer=announce)
        async with bus.serve("topoalign-allocator", [endpoint]), aclosing(Client(bus).allocations()) as events:
            await publish(bus, writer.snapshot(), *(writer.grant(str(n), f"GPU-{n}") for n in range(9)))
            await anext(events)
            await replace_stream(server, bus, Stream.ALLOCATIONS)
            writer.grant("lost", "GPU-9")  # never published
            await stored(bus, wire.encode_event(writer.release("1"), TIME))
            with anyio.fail_after(20):
                healed = await anext(events)

    assert isinstance(healed.event, AllocationsSnapshot)
    assert writer.state.digest == replay(writer.node, [healed.event]).digest


async def test_hardware_announced_on_a_stream_that_was_made_anew_is_news(tmp_path: Path) -> None:
    async with killable(tmp_path) as server, connect_bus(server.url) as bus:
        client = Client(bus)
        await publish(bus, *(topology(name, 1) for name in "abcdef"))
        async with aclosing(client.nodes()) as events:
            for _ in range(6):
                await anext(events)
            await replace_stream(server, bus, Stream.NODES)
            await stored(bus, wire.encode_event(topology("a", 2), TIME))
            await publish(bus, topology("b", 2))
            with anyio.fail_after(20):
                news = [(await anext(events)).event for _ in range(2)]
                await caught_up(client, Stream.NODES, events)

    assert [topology("a", 2), topology("b", 2)] == news


class Shrinking(MemoryBus):
    """Its stream was longer when it was asked for the first time: it was lost, or its messages grew too old, since."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 5

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        lost, self.lost = self.lost, 0
        return await super().last_position(stream, subject) + lost


@pytest.mark.parametrize("since", [None, 3])
async def test_a_past_that_never_comes_is_not_waited_for(since: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "ASK_AGAIN_SECONDS", 0.02)
    bus, writer = Shrinking(), Writer()
    await publish(bus, writer.snapshot(), writer.grant("1", "GPU-0"))
    client = Client(bus)
    async with aclosing(client.allocations(since)) as events:
        with anyio.fail_after(20):
            first = await anext(events)
        await publish(bus, writer.release("1"))

        assert writer.said[-1] == (await anext(events)).event
    assert isinstance(first.event, AllocationsSnapshot)
    assert {"GPU-0"} == first.event.allocations[0].device_ids
    assert 0 == client.unread[Stream.ALLOCATIONS]


class Refusing(MemoryBus):
    """Refuses the first few questions for the end of a stream."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        self.times -= 1
        if self.times >= 0:
            raise BusRefused("no permission", "grant it")
        return await super().last_position(stream, subject)


async def test_a_bus_that_refuses_is_waited_for_and_the_refusal_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subscriber, "LONG_PAUSE", 0)
    bus, writer = Refusing(times=3), Writer()
    await publish(bus, writer.snapshot())
    with capture_logs() as logs:
        received = await delivery(Client(bus), 1, since=0)

    assert writer.said == facts(received)
    assert [("bus refuses", "no permission", "grant it")] == [
        (line["event"], line["finding"], line["remedy"]) for line in logs
    ]


async def test_a_snapshot_that_contradicts_earlier_facts_is_counted() -> None:
    """A snapshot that differs from the facts before it is counted, and believed."""
    bus, writer = MemoryBus(), Writer()
    client = Client(bus)
    facts_before = [writer.snapshot(), writer.grant("1", "GPU-0"), writer.snapshot()]
    wrong = writer.snapshot()
    assert isinstance(wrong, AllocationsSnapshot)
    wrong = msgspec.structs.replace(wrong, allocations=(), digest="0123456789abcdef")
    async with aclosing(client.allocations(since=0)) as events:
        await publish(bus, *facts_before)
        for _ in facts_before:
            await anext(events)
        agreed = client.counts.divergent
        await publish(bus, wrong)
        with capture_logs() as logs:
            received = await anext(events)

    assert (0, 1) == (agreed, client.counts.divergent)
    assert wrong == received.event
    assert ["snapshot differs from the facts before it"] == [line["event"] for line in logs]


async def test_a_snapshot_that_heals_a_gap_is_no_difference() -> None:
    bus, writer = MemoryBus(), Writer()
    client = Client(bus)
    said = [writer.snapshot()]
    writer.grant("lost", "GPU-0")
    await publish(bus, *said, writer.grant("2", "GPU-1"), writer.snapshot())
    async with aclosing(client.allocations(since=0)) as events:
        assert [said[0], writer.said[-1]] == [(await anext(events)).event for _ in range(2)]
    assert (1, 0) == (client.counts.gaps, client.counts.divergent)
