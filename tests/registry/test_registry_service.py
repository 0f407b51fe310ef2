"""The registry hears everything once in effect, mends what it missed, and knows whose allocator is there."""

import gc
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from pytest import MonkeyPatch
from view_support import heard_of

from topoalign.client import Client
from topoalign.client.stored_records import forget_node
from topoalign.core import wire
from topoalign.core.model.events import (
    Allocation,
    AllocationGranted,
    AllocationReleased,
    AllocationsSnapshot,
    DeviceHealthChanged,
    Event,
    MemoryBlock,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, MEMORY, AllocationID, DeviceID, NodeName
from topoalign.core.model.requests import WriterPosition
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Bus, Endpoint, Message, Stream
from topoalign.core.state.fold import NodeState
from topoalign.registry import service
from topoalign.registry.cluster_nodes import Cluster, ClusterNode
from topoalign.registry.main import MOST_PASSES, YOUNG_OBJECTS, freezing, serve
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.service import PAUSE, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

NODE = NodeName("rack1.node-1")
TIME = 1_700_000_000.0


def granted(seq: int, name: str, gpu: str = "GPU-0") -> AllocationGranted:
    allocation = Allocation(id=AllocationID(name), devices={GPU: (DeviceID(gpu),)})
    return AllocationGranted(node=NODE, epoch=3, seq=seq, allocation=allocation)


def snapshot(seq: int, *allocations: Allocation) -> AllocationsSnapshot:
    return AllocationsSnapshot(node=NODE, epoch=3, seq=seq, allocations=allocations, digest="")


def topology(revision: int, gpus: int) -> TopologyDiscovered:
    hardware = Topology(gpus=tuple(Gpu(id=DeviceID(f"GPU-{i}"), index=i) for i in range(gpus)))
    return TopologyDiscovered(
        node=NODE, epoch=1, revision=revision, boot_id="b", source="described: test", topology=hardware
    )


class World:
    """A bus, a clock, and a registry that can be started on them again and again."""

    def __init__(self) -> None:
        self.bus, self.clock = MemoryBus(), ManualClock()
        self.asked: list[str] = []

    async def say(self, *events: Event) -> None:
        for event in events:
            await self.bus.publish(wire.encode_event(event, TIME))

    @asynccontextmanager
    async def registry(self, asking: bool = True) -> AsyncIterator[tuple[Cluster, CollectorRegistry, Registry]]:
        cluster, metrics = Cluster(), CollectorRegistry()
        client = Client(self.bus, self.clock, "registry")
        counts = RegistryMetrics(metrics, client)
        registry = Registry(self.bus, self.clock, client, cluster, counts, RegistrySettings())
        async with background() as tasks:
            await tasks.start(lambda *, task_status: registry.run(task_status=task_status))
            await all_tasks_blocked()
            if asking:
                await self.clock.advance(PAUSE)
            yield cluster, metrics, registry

    @asynccontextmanager
    async def allocator(self, on_snapshot: Sequence[Event] = ()) -> AsyncIterator[None]:
        """Answers like an allocator that holds nothing, and announces these events when asked for a snapshot."""

        async def alive(body: bytes) -> bytes:
            self.asked.append("alive")
            return wire.encode_answer(WriterPosition())

        async def announce(body: bytes) -> bytes:
            self.asked.append("snapshot")
            await self.say(*on_snapshot)
            return wire.encode_answer((3, 1))

        answers = {"alive": alive, "snapshot": announce}
        endpoints = [
            Endpoint(name=verb, subject=wire.admission_subject(NODE, verb), answer=answer)
            for verb, answer in answers.items()
        ]
        async with self.bus.serve("topoalign-allocator", endpoints):
            yield


@pytest.fixture
def world() -> World:
    return World()


async def test_the_past_and_the_present_are_folded_alike(world: World) -> None:
    await world.say(topology(1, 1), snapshot(1), granted(2, "a"))

    async with world.registry() as (cluster, metrics, registry):
        await world.say(topology(2, 8), granted(3, "b", "GPU-1"), granted(3, "b", "GPU-1"))
        await world.say(AllocationReleased(node=NODE, epoch=3, seq=4, allocation=AllocationID("a"), reason="gone"))
        await all_tasks_blocked()
        member = cluster.member(NODE)

        assert None is registry.behind()
        assert (8, ["b"], 4) == (len(member.state.hardware.gpus), list(member.state.allocations), member.state.seq)
        assert {AllocationID("b"): TIME} == member.since
        assert 2 == metrics.get_sample_value("topoalign_registry_events_total", {"type": "AllocationGranted"})


async def test_a_registry_that_starts_again_has_the_same_fold(world: World) -> None:
    async with world.registry() as (first, _, _):
        await world.say(topology(1, 8), snapshot(1), granted(2, "a"), granted(3, "b", "GPU-1"))
        await all_tasks_blocked()
    async with world.registry() as (second, _, _):
        assert first.member(NODE).state.digest == second.member(NODE).state.digest
        assert 2 == len(second.member(NODE).state.allocations)


async def test_missing_facts_are_healed_by_asking_for_a_snapshot(world: World) -> None:
    held = granted(9, "c", "GPU-2").allocation
    async with world.allocator(on_snapshot=[snapshot(10, held)]), world.registry() as (cluster, metrics, _):
        await world.say(snapshot(1), granted(2, "a"), granted(8, "b", "GPU-1"), granted(9, "c", "GPU-2"))
        await all_tasks_blocked()

        assert (["c"], 10) == (list(cluster.member(NODE).state.allocations), cluster.member(NODE).state.seq)
        assert 1 == metrics.get_sample_value("topoalign_registry_gaps_total")
        assert ["snapshot"] == [verb for verb in world.asked if verb == "snapshot"]


async def test_a_stream_whose_beginning_is_gone_is_healed_too(world: World) -> None:
    await world.say(granted(500, "late"))
    late = granted(500, "late").allocation
    async with world.allocator(on_snapshot=[snapshot(501, late)]), world.registry() as (cluster, _, _):
        await all_tasks_blocked()

        assert ["late"] == list(cluster.member(NODE).state.allocations)


async def test_an_unreadable_message_is_put_aside_with_the_reason(world: World) -> None:
    """What cannot be read is put aside with the reason and the rest goes on."""
    async with world.registry() as (cluster, metrics, _):
        good = wire.encode_event(topology(1, 8), TIME)
        await world.bus.publish(Message(subject=good.subject, headers={}, body=b'{"type": "TopologyDisc'))
        await world.bus.publish(Message(subject=good.subject, headers={}, body=good.body.replace(b"node-1", b"node-2")))
        await world.bus.publish(good)
        await all_tasks_blocked()

        assert (NODE,) == cluster.nodes
        assert 2 == metrics.get_sample_value("topoalign_registry_undecodable_total")
        assert 2 == await world.bus.last_position(Stream.DEADLETTERS)


@pytest.mark.parametrize(
    ("true", "false"),
    [(b'"cpus":"0-3"', b'"cpus":"0-x"'), (b'"taken":[1,1]', b'"taken":[2]'), (b'"GPU-0"', b"7")],
)
async def test_an_impossible_allocation_is_put_aside(world: World, true: bytes, false: bytes) -> None:
    """An allocation that cannot be is put aside and a snapshot goes on without it."""
    memory = (MemoryBlock(resource=MEMORY, nodes=(0, 1), size=2, taken=(1, 1)),)
    allocation = msgspec.structs.replace(granted(2, "a").allocation, cpus="0-3", memory=memory)
    message = wire.encode_event(AllocationGranted(node=NODE, epoch=3, seq=2, allocation=allocation), TIME)
    async with world.allocator(on_snapshot=[snapshot(4)]), world.registry() as (cluster, metrics, _):
        await world.say(snapshot(1))
        await world.bus.publish(msgspec.structs.replace(message, body=message.body.replace(true, false)))
        await world.say(granted(3, "b"))
        await all_tasks_blocked()

        assert (4, 0) == (cluster.member(NODE).state.seq, len(cluster.member(NODE).state.allocations))
        assert 1 == metrics.get_sample_value("topoalign_registry_undecodable_total")


async def test_an_event_of_a_later_version_is_counted_and_no_dead_letter(world: World) -> None:
    async with world.registry() as (_, metrics, _):
        message = wire.encode_event(topology(1, 8), TIME)
        headers = {**message.headers, "ce-type": "topoalign.v1.TopologyDreamt"}
        await world.bus.publish(Message(subject=message.subject, headers=headers, body=b"{}"))
        await all_tasks_blocked()

        assert 1 == metrics.get_sample_value("topoalign_registry_unknown_total")
        assert 0 == await world.bus.last_position(Stream.DEADLETTERS)


async def test_a_node_is_stale_while_its_allocator_does_not_answer(world: World) -> None:
    await world.say(topology(1, 8), snapshot(1))
    async with world.registry() as (cluster, _, _):
        undelivered = cluster.member(NODE).answering
        async with world.allocator():
            await world.clock.advance(11)
            there = cluster.member(NODE).answering
        await world.clock.advance(11)
        gone = cluster.member(NODE).answering
        await world.say(granted(2, "a"))
        await all_tasks_blocked()

        assert (False, True, False, True) == (undelivered, there, gone, cluster.member(NODE).answering)


async def test_a_node_whose_facts_were_deleted_is_shown_no_more(world: World) -> None:
    """A node that is away and of which everything was deleted is shown no more."""
    await world.say(topology(1, 8), snapshot(1), granted(2, "a"))
    async with world.registry() as (cluster, _, _):
        async with world.allocator():
            await world.clock.advance(11)
            await forget_node(world.bus, NODE)
            await world.clock.advance(11)
            while_it_lives = NODE in cluster
        await world.clock.advance(11)
        gone = NODE in cluster
        await world.say(topology(2, 8), snapshot(3))
        await all_tasks_blocked()

        assert (True, False, True) == (while_it_lives, gone, NODE in cluster)


async def test_a_node_that_is_away_and_of_which_something_is_kept_stays(world: World) -> None:
    await world.say(topology(1, 8), snapshot(1))
    await world.bus.forget(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))
    async with world.registry() as (cluster, _, _):
        await world.clock.advance(30)

        assert NODE in cluster


async def test_a_node_that_returns_while_the_streams_are_asked_stays(world: World, monkeypatch: MonkeyPatch) -> None:
    """The answer that nothing is kept of it was true before it spoke again."""
    await world.say(topology(1, 8), snapshot(1))

    async def nothing_yet(bus: Bus, node: NodeName) -> bool:
        await world.say(snapshot(2, granted(2, "a").allocation))
        await all_tasks_blocked()
        return False

    monkeypatch.setattr(service, "has_published", nothing_yet)
    async with world.registry() as (cluster, _, _):
        assert [AllocationID("a")] == list(cluster.member(NODE).state.allocations)


async def test_an_old_fact_does_not_count_as_a_sign_of_life(world: World) -> None:
    await world.say(snapshot(1), granted(2, "a"))
    async with world.registry(asking=False) as (cluster, _, _):
        assert not cluster.member(NODE).answering


async def test_only_a_fact_of_the_allocator_is_a_sign_of_its_life(world: World) -> None:
    """Discovery and usage come from elsewhere, or from before."""
    await world.say(topology(1, 8), snapshot(1))
    async with world.registry() as (cluster, _, _):
        await world.clock.advance(11)
        await world.say(topology(2, 4))
        await world.say(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices={}))
        await world.say(UsageObserved(node=NODE, epoch=1, revision=1, containers=()))
        await all_tasks_blocked()
        after_readings = cluster.member(NODE).answering
        await world.say(granted(2, "a"))
        await all_tasks_blocked()

        assert (False, True) == (after_readings, cluster.member(NODE).answering)


def test_the_last_event_is_the_time_of_the_newest_fact() -> None:
    """Facts that come late are older, and some carry no time."""
    member = ClusterNode(NodeState(node=NODE))
    facts: list[tuple[Event, float | None]] = [(snapshot(1), None), (granted(2, "a"), TIME)]
    facts += [
        (topology(1, 8), TIME - 60),
        (granted(3, "b"), None),
        (granted(4, "c"), TIME + 5),
        (topology(2, 4), TIME + 1),
    ]
    seen = []
    for event, time in facts:
        member.apply(heard_of(event, member.state, time))
        seen.append(member.last_event)

    assert [None, TIME, TIME, TIME, TIME + 5, TIME + 5] == seen


def test_the_time_of_a_forged_fact_does_not_outlast_it() -> None:
    member = ClusterNode(NodeState(node=NODE))
    member.apply(heard_of(snapshot(9), member.state, TIME + 1e9))
    member.apply(heard_of(snapshot(2), member.state, TIME, anew=True))

    assert (TIME, 2) == (member.last_event, member.state.seq)


async def test_the_service_brings_its_routes_readiness_and_metrics(world: World) -> None:
    context = Context(bus=world.bus, clock=world.clock, environment={})
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(context, task_status=task_status))
        await all_tasks_blocked()

        assert ["/v1"] == [getattr(route, "path", None) for route in context.routes]
        assert [None] == [check() for check in context.checks.values()]
        assert 0 == context.metrics.get_sample_value("topoalign_registry_gaps_total")


async def test_it_is_not_ready_before_it_has_read_what_was_there_when_it_began(world: World) -> None:
    client, cluster = Client(world.bus, world.clock), Cluster()
    metrics = RegistryMetrics(CollectorRegistry(), client)
    registry = Registry(world.bus, world.clock, client, cluster, metrics, RegistrySettings())

    assert "TOPOALIGN_NODES is not reached yet" == registry.behind()


def test_survivors_of_a_collection_are_frozen_until_memory_has_doubled(monkeypatch: MonkeyPatch) -> None:
    """A collection looks only at what has come since the last one, and garbage among the frozen ones is bounded."""
    blocks, steps = 100, []
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks)
    monkeypatch.setattr(gc, "freeze", lambda: steps.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: steps.append("unfreeze"))
    gc.disable()
    try:
        with freezing(lambda _: steps.append("soon")):
            gc.collect(0)
            gc.collect(1)
            blocks = 200
            gc.collect(1)
            gc.collect()
            blocks = 399
            gc.collect(1)
        gc.collect()
    finally:
        gc.enable()

    assert ["freeze", "unfreeze", "soon", "freeze", "freeze"] == steps


def test_a_registry_collects_enough_new_objects_at_a_time() -> None:
    """With Python's thresholds, two dozen new connections would begin a collection; later ones are the default again."""
    before = gc.get_threshold()
    with freezing(lambda _: None):
        within = gc.get_threshold()

    assert (YOUNG_OBJECTS, MOST_PASSES) == within[:2]
    assert before == gc.get_threshold()
