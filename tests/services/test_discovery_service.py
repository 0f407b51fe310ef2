"""Discovery says what changes, once; what fails or vanishes stays listed; the bus gets the newest in the end."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from topoalign.core import wire
from topoalign.core.errors import BadRequest, BusUnavailable, DriverFault, Unavailable
from topoalign.core.events import DeviceHealth, DeviceHealthChanged, Event, HealthState, TopologyDiscovered
from topoalign.core.ids import DeviceID, NodeName
from topoalign.core.ports import Inventory, Message, Stream
from topoalign.core.requests import AnnounceRequest
from topoalign.core.topology.model import Gpu, Topology
from topoalign.discovery.announcer import FIRST_PAUSE as BUS_PAUSE
from topoalign.discovery.announcer import LOOK_SECONDS
from topoalign.discovery.metrics import Metrics
from topoalign.discovery.service import FIRST_PAUSE, Discovery
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio

NODE = NodeName("rack1.node-1")
READ_SECONDS = 10.0
HEALTHY = DeviceHealth(state=HealthState.HEALTHY)


def inventory(*gpus: int, index: tuple[int, ...] = (), sick: str = "", findings: tuple[str, ...] = ()) -> Inventory:
    """These GPUs; their indexes in order unless given; the first one is unhealthy for this reason."""
    ids = [DeviceID(f"GPU-{gpu}") for gpu in gpus]
    indexes = index or tuple(range(len(gpus)))
    health = dict.fromkeys(ids, HEALTHY)
    if sick:
        health[ids[0]] = DeviceHealth(state=HealthState.UNHEALTHY, reason=sick)
    cards = tuple(Gpu(id=name, index=i) for name, i in zip(ids, indexes, strict=True))
    return Inventory(topology=Topology(gpus=cards), health=health, findings=findings)


class Hardware:
    """A driver that finds what it is told to."""

    source = "test"

    def __init__(self) -> None:
        self.now: Inventory | DriverFault = inventory(0, 1)
        self.reads = 0

    async def read(self) -> Inventory:
        self.reads += 1
        if isinstance(self.now, DriverFault):
            raise self.now
        return self.now


class Bus(MemoryBus):
    """A bus whose connection can be cut, that can be slow, and that can lose what it had."""

    cut = False
    emptied = False

    def __init__(self) -> None:
        super().__init__()
        self.open = anyio.Event()
        self.open.set()

    async def publish(self, message: Message) -> int:
        if self.cut:
            raise BusUnavailable("cut")
        await self.open.wait()
        return await super().publish(message)

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        return 0 if self.emptied else await super().last_position(stream, subject)


class World:
    def __init__(self) -> None:
        self.bus, self.clock, self.hardware, self.registry = Bus(), ManualClock(), Hardware(), CollectorRegistry()
        self.discovery = Discovery(
            NODE,
            self.hardware,
            self.bus,
            self.clock,
            Metrics(self.registry),
            read_seconds=READ_SECONDS,
            boot_id="boot",
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with background() as tasks:
            await tasks.start(lambda *, task_status: self.discovery.run(task_status=task_status))
            await self.clock.advance(0)
            yield

    async def becomes(self, now: Inventory | DriverFault, seconds: float = READ_SECONDS) -> None:
        self.hardware.now = now
        await self.clock.advance(seconds)

    async def said(self) -> list[Event]:
        """All events of the stream, oldest first."""
        last = await self.bus.last_position(Stream.NODES)
        events: list[Event] = []
        async with self.bus.follow(Stream.NODES, ">") as messages:
            async for received in messages:
                events.append(wire.decode(received.message))
                if received.position == last:
                    break
        return events

    async def topology(self) -> TopologyDiscovered:
        return [event for event in await self.said() if isinstance(event, TopologyDiscovered)][-1]

    async def health(self) -> DeviceHealthChanged:
        return [event for event in await self.said() if isinstance(event, DeviceHealthChanged)][-1]

    def counted(self, name: str) -> float | None:
        return self.registry.get_sample_value(name)


@pytest.fixture
def world() -> World:
    return World()


async def test_everything_is_said_at_the_start(world: World) -> None:
    epoch = int(world.clock.wall() * 1000)
    found = inventory(0, 1)
    async with world.running():
        said = await world.said()

    assert [
        TopologyDiscovered(node=NODE, epoch=epoch, revision=1, boot_id="boot", source="test", topology=found.topology),
        DeviceHealthChanged(node=NODE, epoch=epoch, revision=1, devices=dict(found.health)),
    ] == said
    assert None is world.discovery.trouble()


async def test_nothing_is_said_as_long_as_nothing_changes(world: World) -> None:
    async with world.running():
        await world.clock.advance(20 * READ_SECONDS)

        assert 21 == world.hardware.reads
        assert 2 == len(await world.said())
        assert 21 == world.counted("topoalign_discovery_reads_total")


async def test_only_what_changed_is_said(world: World) -> None:
    async with world.running():
        await world.becomes(inventory(0, 1, sick="XID 79"))
        said = await world.said()
        await world.becomes(inventory(0, 1, 2, sick="XID 79"))

        assert [TopologyDiscovered, DeviceHealthChanged, DeviceHealthChanged] == [type(event) for event in said]
        assert "XID 79" == (await world.health()).devices[DeviceID("GPU-0")].reason
        assert (2, 3) == ((await world.topology()).revision, (await world.health()).revision)
        assert 3 == len((await world.topology()).topology.gpus)


async def test_a_lost_gpu_stays_listed_as_unhealthy_and_is_itself_when_it_returns_with_another_index(
    world: World,
) -> None:
    async with world.running():
        await world.becomes(inventory(1, index=(1,)))
        lost = await world.health()
        assert ["GPU-0", "GPU-1"] == [gpu.id for gpu in (await world.topology()).topology.gpus]
        assert (HealthState.UNHEALTHY, HealthState.HEALTHY) == tuple(health.state for health in lost.devices.values())
        assert lost.devices[DeviceID("GPU-0")].reason.startswith("lost")
        assert 1 == (await world.topology()).revision, "the machine is still the same one"

        await world.becomes(inventory(1, 0))
        assert [("GPU-1", 0), ("GPU-0", 1)] == [(g.id, g.index) for g in (await world.topology()).topology.gpus]
        assert {HEALTHY} == set((await world.health()).devices.values())


async def test_a_reading_that_fails_makes_every_health_unknown_and_leaves_the_topology(world: World) -> None:
    async with world.running():
        await world.becomes(DriverFault("NVML hangs", "restart it"), seconds=5 * READ_SECONDS)

        assert {DeviceHealth(state=HealthState.UNKNOWN, reason="NVML hangs")} == set(
            (await world.health()).devices.values()
        )
        assert (1, 2) == ((await world.topology()).revision, (await world.health()).revision), "said once"
        assert "NVML hangs" == world.discovery.trouble()
        assert 5 == world.counted("topoalign_discovery_read_failures_total")

        await world.becomes(inventory(0, 1))
        assert {HEALTHY} == set((await world.health()).devices.values())
        assert None is world.discovery.trouble()


async def test_a_first_reading_that_fails_is_tried_again_at_growing_intervals(world: World) -> None:
    world.hardware.now = DriverFault("NVML hangs", "restart it")
    async with world.running():
        assert "NVML hangs" == world.discovery.trouble()
        await world.clock.advance(FIRST_PAUSE * (1 + 2 + 4))
        assert 4 == world.hardware.reads
        assert 0 == await world.bus.last_position(Stream.NODES), "no devices are listed that were never read"

        await world.becomes(inventory(0, 1), seconds=FIRST_PAUSE * 8)
        assert 2 == len(await world.said())


async def test_a_device_that_the_driver_does_not_judge_is_unknown(world: World) -> None:
    world.hardware.now = msgspec.structs.replace(inventory(0), health={})
    async with world.running():
        assert HealthState.UNKNOWN == (await world.health()).devices[DeviceID("GPU-0")].state


async def test_a_bus_that_was_away_gets_only_the_newest(world: World) -> None:
    """It may have stored what it did not confirm, so a repetition has the same id."""
    world.bus.cut = True
    async with world.running():
        await world.becomes(inventory(0, 1, 2))
        await world.becomes(inventory(0, 1, 2, 3))
        world.bus.cut = False
        await world.clock.advance(60.0)

        assert [(TopologyDiscovered, 3), (DeviceHealthChanged, 3)] == [
            (type(event), event.revision)
            for event in await world.said()
            if isinstance(event, TopologyDiscovered | DeviceHealthChanged)
        ]


async def test_news_that_comes_while_the_bus_is_storing_something_older_is_said_too(world: World) -> None:
    world.bus.open = anyio.Event()
    async with world.running():
        await world.becomes(inventory(0, 1, 2))
        world.bus.open.set()
        await world.clock.advance(0)

        assert (2, 2) == ((await world.topology()).revision, (await world.health()).revision)


async def test_a_publication_is_repeated_under_its_id_until_it_is_stored(world: World) -> None:
    world.bus.cut = True
    async with world.running():
        await world.clock.advance(BUS_PAUSE * 3)
        world.bus.cut = False
        await world.clock.advance(BUS_PAUSE * 16)

        assert 2 == len(await world.said())


async def test_whoever_asks_has_everything_said_anew_under_new_revisions(world: World) -> None:
    """A revision that the stream has seen would be taken for a repetition and not be stored."""
    async with world.running():
        answer = await world.bus.ask(
            wire.announce_subject(NODE), msgspec.json.encode(AnnounceRequest(node=NODE)), within=1.0
        )
        await world.clock.advance(0)

        topology, health = await world.topology(), await world.health()
        assert {"topology": (topology.epoch, 2), "health": (health.epoch, 2)} == wire.answered(
            answer, dict[str, tuple[int, int]]
        )
        assert inventory(0, 1).topology == topology.topology
        assert 4 == len(await world.said())


async def test_an_announcement_before_the_first_reading_or_for_another_node_is_refused(world: World) -> None:
    world.hardware.now = DriverFault("NVML hangs", "restart it")
    async with world.running():
        for node, kind in ((NODE, Unavailable), (NodeName("other"), BadRequest)):
            body = msgspec.json.encode(AnnounceRequest(node=node))
            answer = await world.bus.ask(wire.announce_subject(NODE), body, within=1.0)
            with pytest.raises(kind):
                wire.answered(answer, dict[str, tuple[int, int]])


async def test_a_stream_that_has_lost_what_was_said_is_told_anew(world: World) -> None:
    async with world.running():
        await world.clock.advance(LOOK_SECONDS)
        assert 2 == len(await world.said())

        world.bus.emptied = True
        await world.clock.advance(LOOK_SECONDS)
        world.bus.emptied = False

        assert [2, 2] == [event.revision for event in (await world.topology(), await world.health())]


async def test_a_restart_begins_a_new_epoch(world: World) -> None:
    async with world.running():
        before = await world.topology()
    await world.clock.advance(1.0)
    again = Discovery(
        NODE,
        world.hardware,
        world.bus,
        world.clock,
        Metrics(CollectorRegistry()),
        read_seconds=READ_SECONDS,
        boot_id=None,
    )
    world.discovery = again
    async with world.running():
        after = await world.topology()

    assert (before.epoch + 1000, 1) == (after.epoch, after.revision)
    assert after.boot_id == f"run-{after.epoch}", "no kernel to ask: this run stands for a boot"
