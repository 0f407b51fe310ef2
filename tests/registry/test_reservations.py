"""Reservations of several registries on one stream: by compare-and-set, with deadlines, and consumed as nodes show them."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from fact_support import NODE, allocated, changed, reservation, reserved_container

from topoalign.core import wire
from topoalign.core.model.errors import BusConflict, BusUnavailable, NotFound
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Message, Received, Stream
from topoalign.core.state.fold import NodeState
from topoalign.registry.scheduling.binding.cluster_reservations import (
    OTHERS_SECONDS,
    TIDY_SECONDS,
    ClusterReservations,
    ReservationChange,
)
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
OTHER = NodeName("node-2")


class Replica:
    """A registry with its own view of the nodes."""

    def __init__(self, bus: Bus, clock: Clock, writer: str) -> None:
        self.nodes: dict[NodeName, NodeState] = {}
        self.changed: list[NodeName] = []
        self.freed: list[NodeName] = []
        self.gone: set[NodeName] = set()
        self.reservations = ClusterReservations(
            bus, clock, writer, self.facts, self.changed.append, self.freed.append, self.gone.__contains__
        )

    def facts(self, node: NodeName) -> NodeState:
        if node not in self.nodes:
            raise NotFound("node", node, "")
        return self.nodes[node]

    def shows(self, *containers: str) -> None:
        """Containers of pod a, each with a GPU, which is not the one that was reserved for it."""
        held = [allocated(f"GPU-{n + 4}", pod="a", name=name, number=n) for n, name in enumerate(containers)]
        self.nodes[NODE] = NodeState(node=NODE, allocations={each.id: each for each in held})
        self.reservations.observe(NODE)

    async def reserve(self, pod: str, *gpus: str, node: NodeName = NODE, seconds: float = 30.0) -> None:
        made = reservation(pod, reserved_container(*gpus), seconds=seconds)
        await self.reservations.write(
            [ReservationChange(node=node, position=self.reservations.of(node).position, made=(made,))]
        )

    def pods(self, node: NodeName = NODE) -> list[str]:
        return [each.pod for each in self.reservations.held(node)]


@asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for replica in replicas:
            tasks.start_soon(replica.reservations.run)
        await all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()


async def test_what_one_registry_reserves_every_registry_holds() -> None:
    bus, clock = MemoryBus(), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(one, other):
        await one.reserve("a", "GPU-0")
        await all_tasks_blocked()

        assert ["a"] == one.pods() == other.pods()
        assert [NODE] == other.changed


async def test_every_registry_names_the_nodes_of_a_pod_in_one_order() -> None:
    """Two registries have planned one gang: both take the same one of its nodes."""
    bus, clock = MemoryBus(), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    names = [NodeName(f"node-{number}") for number in range(9)]
    async with running(one, other):
        for node in reversed(names):
            await one.reserve("a", "GPU-0", node=node)
        await all_tasks_blocked()

        assert names == [*one.reservations.of_pod("uid-a")] == [*other.reservations.of_pod("uid-a")]


async def test_a_node_that_has_gone_is_kept_while_something_is_reserved() -> None:
    """Its pods may be on a kubelet that comes back; then no name of a node that was ever there is kept."""
    bus, clock = MemoryBus(), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(one, other):
        await one.reserve("a", "GPU-0")
        await all_tasks_blocked()
        for each in (one, other):
            each.gone.add(NODE)
            each.reservations.forget(NODE)
        held = one.pods(), other.pods()
        await one.reservations.cancel("uid-a")
        await all_tasks_blocked()

        assert (["a"], ["a"]) == held
        assert [0, 0] == [each.reservations.of(NODE).position for each in (one, other)]
        assert [{}, {}] == [each.reservations._known for each in (one, other)]


async def test_no_number_of_a_change_comes_twice_though_its_node_was_forgotten() -> None:
    """Else its id would be that of an earlier message, and whoever compares numbers would pass the newer one over."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    async with running(one):
        await one.reserve("a", "GPU-0")
        await one.reservations.cancel("uid-a")
        await all_tasks_blocked()
        one.reservations.forget(NODE)
        with pytest.raises(BusConflict):  # once: it did not know what the change stands on
            await one.reserve("b", "GPU-1")
        await one.reserve("b", "GPU-1")
        newest = await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(NODE))
        assert newest is not None
        event = wire.decode_event(newest.message)

    assert isinstance(event, ReservationsChanged)
    assert wire.event_id(event) == newest.message.headers["Nats-Msg-Id"]
    assert (["b"], True) == (one.pods(), event.seq > 2)


async def test_a_stale_registry_writes_nothing() -> None:
    """C44: one has slept while the other reserved. Its write is refused; it reads what is newest and decides anew."""
    bus, clock = MemoryBus(), ManualClock()
    awake, stale = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(awake):
        await awake.reserve("a", "GPU-0")
        with pytest.raises(BusConflict):
            await stale.reserve("b", "GPU-0")
        before = awake.pods()
        await stale.reserve("b", "GPU-1")
        await all_tasks_blocked()

        assert ["a"] == before
        assert ["a", "b"] == awake.pods() == stale.pods()
        assert 1 == stale.reservations.counts["conflicts"]


class LateBus(MemoryBus):
    """What one process has of a bus on which answers to it arrive when `arrives` is set."""

    def __init__(self, shared: MemoryBus) -> None:
        super().__init__()
        self._logs = shared._logs
        self.asked = anyio.Event()
        self.arrives = anyio.Event()

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        found = await super().newest(stream, subject)
        await self._arrive()
        return found

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        position = await super().publish(message, expected_last)
        await self._arrive()
        return position

    async def _arrive(self) -> None:
        self.asked.set()
        await self.arrives.wait()


@pytest.mark.parametrize("answer", ["newest", "confirmation"])
async def test_a_late_answer_does_not_replace_what_came_meanwhile(answer: str) -> None:
    """K5: before the newest message, or the confirmation of its own, arrives, the stream has delivered a newer one."""
    bus, clock = MemoryBus(), ManualClock()
    late = LateBus(bus)
    one, other = Replica(late, clock, "r1"), Replica(bus, clock, "r2")
    async with running(one, other), anyio.create_task_group() as tasks:
        if answer == "newest":
            await other.reserve("a", "GPU-0")
            tasks.start_soon(one.reservations.refresh, NODE)
        else:
            tasks.start_soon(one.reserve, "a", "GPU-0")
        await late.asked.wait()
        await all_tasks_blocked()
        await other.reserve("b", "GPU-1")
        await all_tasks_blocked()
        before = one.pods()
        late.arrives.set()
        await all_tasks_blocked()

        assert ["a", "b"] == before == one.pods()


async def test_registries_conflict_over_a_real_server(tmp_path: Path) -> None:
    """C44: nats-server answers 10071 to the write of the stale one, and a batch with one such write stores nothing."""
    async with local_nats(tmp_path) as url, connect_bus(url) as bus:
        awake, stale = Replica(bus, ManualClock(), "r1"), Replica(bus, ManualClock(), "r2")
        await awake.reserve("a", "GPU-0")
        with pytest.raises(BusConflict):
            await stale.reserve("b", "GPU-0")
        stale.reservations = ClusterReservations(bus, ManualClock(), "r3", stale.facts)
        gang = [
            ReservationChange(node=node, position=0, made=(reservation("c", reserved_container("GPU-0")),))
            for node in (OTHER, NODE)
        ]
        with pytest.raises(BusConflict):
            await stale.reservations.write(gang)

        assert ["a"] == stale.pods()
        assert await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(OTHER)) is None
        for_now = {each.node: stale.reservations.of(each.node).position for each in gang}
        await stale.reservations.write([msgspec.structs.replace(each, position=for_now[each.node]) for each in gang])
        assert (["c"], ["a", "c"]) == (stale.pods(OTHER), stale.pods())


async def test_a_registry_that_starts_reads_the_newest_of_each_node() -> None:
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    for pod in ("a", "b"):
        await one.reserve(pod, f"GPU-{pod}")
    await one.reserve("c", "GPU-0", node=OTHER)
    await one.reservations.cancel("uid-a")
    late = Replica(bus, clock, "r2")
    assert late.reservations.behind()
    async with running(late):
        assert late.reservations.behind() is None
        assert (["b"], ["c"]) == (late.pods(), late.pods(OTHER))
        assert [NODE, OTHER] == sorted(late.changed)


async def test_a_reservation_whose_time_is_over_is_written_down() -> None:
    """By the registry that wrote the newest message, and it says that the node has room."""
    bus, clock = MemoryBus(), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(one, other):
        await one.reserve("a", "GPU-0", seconds=10.0)
        await clock.advance(10.0 + TIDY_SECONDS)

        newest = other.reservations.of(NODE).newest
        assert newest is not None
        assert (("uid-a",), (), "r1") == (newest.expired, newest.reservations, newest.writer)
        assert ([NODE], []) == (one.freed, other.freed)
        assert 2 == newest.seq


async def test_another_registry_writes_it_down_if_the_writer_is_gone() -> None:
    """Some seconds later, each time: a writer that is there does so first."""
    bus, clock = MemoryBus(), ManualClock()
    gone, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(other):
        for pod in ("a", "b"):
            await gone.reservations.refresh(NODE)
            await gone.reserve(pod, "GPU-0", seconds=10.0)
            reserved = gone.reservations.of(NODE).position
            await clock.advance(10.0 + TIDY_SECONDS)
            before = other.reservations.of(NODE).position
            await clock.advance(OTHERS_SECONDS)

            newest = other.reservations.of(NODE).newest
            assert newest is not None
            assert (reserved, (f"uid-{pod}",), "r2") == (before, newest.expired, newest.writer)
            assert [] == other.pods()


async def test_a_reservation_that_the_node_shows_is_consumed() -> None:
    """Its devices are held once, by the allocation; nobody is woken for it."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    async with running(one):
        made = reservation("a", reserved_container("GPU-0", name="one"), reserved_container("GPU-1", name="two"))
        await one.reservations.write([ReservationChange(node=NODE, position=0, made=(made,))])
        one.shows("one")
        assert [["two"]] == [[held.container for held in each.containers] for each in one.reservations.held(NODE)]
        one.shows("one", "two")
        assert [] == one.pods()
        await clock.advance(TIDY_SECONDS)

        newest = one.reservations.of(NODE).newest
        assert newest is not None
        assert (("uid-a",), []) == (newest.consumed, one.freed)


async def test_a_cancelled_reservation_frees_its_node() -> None:
    """Wherever the pod had one; cancelling what is not reserved does nothing."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    await one.reserve("a", "GPU-0")
    await one.reserve("a", "GPU-0", node=OTHER)
    await one.reservations.cancel("uid-a")
    await one.reservations.cancel("uid-b")

    assert ([], []) == (one.pods(), one.pods(OTHER))
    assert [NODE, OTHER] == sorted(one.freed)
    assert 4 == await bus.last_position(Stream.RESERVATIONS)


class Unsure(MemoryBus):
    """Stores what is published, and says once that nobody knows."""

    silent = 1

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        position = await super().publish(message, expected_last)
        if self.silent:
            self.silent -= 1
            raise BusUnavailable("no confirmation")
        return position


async def test_a_write_whose_confirmation_was_lost_is_repeated() -> None:
    """The store answers the repetition as a conflict, and has it: it was a success, and is stored once."""
    bus, clock = Unsure(), ManualClock()
    one = Replica(bus, clock, "r1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.reserve, "a", "GPU-0")
        await clock.advance(1.0)

    assert ["a"] == one.pods()
    assert 1 == await bus.last_position(Stream.RESERVATIONS)
    assert 0 == one.reservations.counts["conflicts"]


class Delayed(MemoryBus):
    """Each step waits for its event: an acknowledgement, the answer to a question for the newest message, a delivery."""

    def __init__(self) -> None:
        super().__init__()
        self.acknowledge = anyio.Event()
        self.answer = anyio.Event()
        self.deliver = anyio.Event()

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        position = await super().publish(message, expected_last)
        await self.acknowledge.wait()
        return position

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        received = await super().newest(stream, subject)
        await self.answer.wait()
        return received

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        async def delivered() -> AsyncGenerator[Received]:
            async with super(Delayed, self).follow(stream, subject, after) as messages:
                async for received in messages:
                    await self.deliver.wait()
                    yield received

        async with aclosing(delivered()) as messages:
            yield messages


def delayed(step: str) -> Delayed:
    """A bus of which one step waits."""
    bus = Delayed()
    for each in {"acknowledge", "answer", "deliver"} - {step}:
        getattr(bus, each).set()
    return bus


async def test_a_late_acknowledgement_replaces_no_newer_message() -> None:
    """Another registry has written since, and that was received before the acknowledgement of the own write."""
    bus, clock = delayed("acknowledge"), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    async with running(one, other), anyio.create_task_group() as tasks:
        tasks.start_soon(one.reserve, "a", "GPU-0")
        await all_tasks_blocked()
        tasks.start_soon(other.reserve, "b", "GPU-1")
        await all_tasks_blocked()
        bus.acknowledge.set()
        await all_tasks_blocked()

        assert ["a", "b"] == one.pods() == other.pods()
        assert 2 == one.reservations.of(NODE).position


async def test_a_late_answer_replaces_no_newer_write() -> None:
    """The newest message was asked for, and this registry has received it and written since."""
    bus, clock = delayed("answer"), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    await other.reserve("a", "GPU-0")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.reservations.refresh, NODE)
        await all_tasks_blocked()
        async with running(one):
            await one.reserve("b", "GPU-1")
            await all_tasks_blocked()
            bus.answer.set()
            await all_tasks_blocked()

            assert ["a", "b"] == one.pods()
            assert 2 == one.reservations.of(NODE).position


@pytest.mark.parametrize("before", [(), ("x",)])
async def test_a_late_delivery_replaces_no_newer_write(before: tuple[str, ...]) -> None:
    """Neither of one's own messages, nor of those that were stored `before` the registry started."""
    bus, clock = delayed("deliver"), ManualClock()
    one, other = Replica(bus, clock, "r1"), Replica(bus, clock, "r2")
    for pod in before:
        await other.reserve(pod, "GPU-7")
    async with running(one):
        await one.reservations.refresh(NODE)
        for pod in ("a", "b"):
            await one.reserve(pod, f"GPU-{pod}")
        one.changed.clear()
        bus.deliver.set()
        await all_tasks_blocked()

        assert ([], [*before, "a", "b"]) == (one.changed, one.pods())


async def test_what_cannot_be_read_ends_no_reservation() -> None:
    """Whoever may publish there can say anything; the next change restores the truth behind it."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    async with running(one):
        await one.reserve("a", "GPU-0")
        await bus.publish(Message(subject=wire.reservation_subject(NODE), headers={}, body=b"nonsense"))
        await all_tasks_blocked()
        assert ["a"] == one.pods()
        await one.reserve("b", "GPU-1")

        newest = one.reservations.of(NODE).newest
        assert newest is not None
        assert ["a", "b"] == [each.pod for each in newest.reservations]


async def test_reservations_outlive_a_lost_stream() -> None:
    """What is still held is written again with the node's next change."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    async with running(one):
        await one.reserve("x", "GPU-7")
        await one.reserve("a", "GPU-0")
    one.reservations._bus = empty = MemoryBus()
    with pytest.raises(BusConflict):
        await one.reserve("b", "GPU-1")
    await one.reserve("b", "GPU-1")

    received = await empty.newest(Stream.RESERVATIONS, wire.reservation_subject(NODE))
    assert received is not None
    assert ["x", "a", "b"] == one.pods()
    assert wire.decode_event(received.message) == one.reservations.of(NODE).newest


class Scripted(MemoryBus):
    """A bus that delivers what a test sends."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end
        self.sent, self._received = anyio.create_memory_object_stream[Received](10)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        return self.end

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        with self._received:
            yield self._received


async def test_messages_of_a_stream_that_was_replaced_are_taken_in() -> None:
    """Their positions begin anew, below those of the stream that the registry has read."""
    bus = Scripted(end=5)
    one = Replica(bus, ManualClock(), "r1")
    async with running(one):
        for position, pod in ((5, "a"), (1, "b")):
            event = changed(reservation(pod, reserved_container("GPU-0")), writer="r2", seq=position)
            bus.sent.send_nowait(Received(message=wire.encode_event(event, 0.0), position=position))
        await all_tasks_blocked()

        assert (["b"], 1) == (one.pods(), one.reservations.of(NODE).position)
    bus.sent.close()


async def test_a_writer_goes_on_counting_after_what_it_heard_of_itself() -> None:
    """A write was given up and stored all the same: its number is used."""
    bus, clock = MemoryBus(), ManualClock()
    one = Replica(bus, clock, "r1")
    given_up = msgspec.structs.replace(
        changed(reservation("a", reserved_container("GPU-0"))), epoch=one.reservations.epoch
    )
    async with running(one):
        await bus.publish(wire.encode_event(given_up, 0.0))
        await all_tasks_blocked()
        await one.reserve("b", "GPU-1")

    newest = one.reservations.of(NODE).newest
    assert newest is not None
    assert (2, ["a", "b"]) == (newest.seq, one.pods())
