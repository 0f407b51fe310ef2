"""The allocator believes what it has received its devices only for as long as discovery confirms it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from bus_support import FailingBus
from device_allocations_support import ShiftingClock
from discovery_support import READ_SECONDS, Hardware, discovery_with, inventory
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import ASK_SECONDS, SILENT_SECONDS, HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.events import Allocation, HealthState, TopologyDiscovered
from topoalign.core.model.ids import GPU, AllocationID, DeviceID, NodeName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Stream
from topoalign.discovery.service import Discovery
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")
GPU_0 = DeviceID("GPU-0")


class World:
    """One node's bus and hardware, a ledger, and services that come and go."""

    def __init__(self) -> None:
        self.bus, self.clock, self.hardware = FailingBus(), ManualClock(), Hardware()
        self.ledger = Ledger(NODE, MemoryJournal(), self.clock)
        self.discovery: Discovery | None = None

    @asynccontextmanager
    async def discovering(self) -> AsyncIterator[None]:
        discovery = self.discovery = discovery_with(self.hardware, self.bus, self.clock, node=NODE)
        async with background() as tasks:
            await tasks.start(lambda *, task_status: discovery.run(task_status=task_status))
            await self.clock.advance(0)
            yield

    @asynccontextmanager
    async def hardware_watch(self) -> AsyncIterator[HardwareWatch]:
        """As after a start of the allocator: with nothing heard yet."""
        self.ledger = Ledger(NODE, MemoryJournal(), self.clock)
        hardware_watch = HardwareWatch(self.ledger, self.bus, self.clock)
        async with background() as tasks:
            tasks.start_soon(hardware_watch.run)
            await self.clock.advance(0)
            yield hardware_watch

    def health(self) -> tuple[HealthState, str]:
        """Of the first GPU, as the ledger has it."""
        known = self.ledger.state.health_of(GPU_0)
        return known.state, known.reason

    def usable(self) -> int:
        return len(self.ledger.state.healthy(GPU))

    def listed(self) -> int:
        return len(self.ledger.state.hardware.devices.get(GPU, {}))


@pytest.fixture
def world() -> World:
    return World()


async def test_what_a_living_discovery_says_is_believed_at_once(world: World) -> None:
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        assert (2, 2) == (world.listed(), world.usable())
        assert None is hardware_watch.reason()


async def test_a_discovery_that_comes_later_is_believed_at_once(world: World) -> None:
    """A discovery that comes later is believed at once, and nothing else is told before."""
    async with world.hardware_watch() as hardware_watch:
        await world.clock.advance(3.5)
        assert (0, None) == (world.listed(), world.ledger.state.health)
        version = world.ledger.version
        async with world.discovering():
            assert (2, 2) == (world.listed(), world.usable())
            assert version + 2 == world.ledger.version, "topology and health, each once"
            assert None is hardware_watch.reason()


async def test_old_readings_are_listed_and_not_offered_after_a_restart(world: World) -> None:
    """
    After a restart of the allocator alone, devices of old readings are listed and not offered. The stream keeps the last
    reading of a discovery that has died, and of the boot before this one.
    """
    async with world.discovering():
        pass
    async with world.hardware_watch() as hardware_watch:
        assert (2, 0) == (world.listed(), world.usable())
        reason = "discovery has not confirmed the health of the devices since this process started"
        assert (HealthState.UNKNOWN, reason) == world.health()
        assert reason == hardware_watch.reason()
        await world.clock.advance(2 * SILENT_SECONDS)
        assert 0 == world.usable()

        async with world.discovering():
            assert 2 == world.usable()


async def test_a_silent_discovery_is_believed_for_thirty_seconds(world: World) -> None:
    """A discovery that falls silent is believed for thirty seconds after its last answer."""
    async with world.hardware_watch() as hardware_watch:
        async with world.discovering():
            await world.clock.advance(100.0)
        await world.clock.advance(SILENT_SECONDS - ASK_SECONDS - 1)
        assert 2 == world.usable()

        await world.clock.advance(ASK_SECONDS + 2)
        assert (2, 0) == (world.listed(), world.usable())
        assert (HealthState.UNKNOWN, "discovery has not confirmed the health of the devices for 30 s") == world.health()
        assert "discovery has not confirmed the health of the devices for 30 s" == hardware_watch.reason()


async def test_a_discovery_that_answers_again_is_believed_again(world: World) -> None:
    """
    A discovery that answers again is believed again without a new reading. As when the bus between the two was away:
    nothing of the hardware has changed, so nothing comes over the stream.
    """
    async with world.discovering(), world.hardware_watch():
        responders, world.bus._responders = world.bus._responders, []  # nobody can be asked
        await world.clock.advance(2 * SILENT_SECONDS)
        assert 0 == world.usable()

        world.bus._responders = responders
        await world.clock.advance(1.0)
        assert 2 == world.usable()


async def test_every_spell_of_silence_is_noticed_and_logged_once(world: World) -> None:
    async with world.discovering(), world.hardware_watch():
        responders = world.bus._responders
        with capture_logs() as logs:
            for _ in range(2):
                world.bus._responders = []
                await world.clock.advance(3 * SILENT_SECONDS)
                assert 0 == world.usable()
                world.bus._responders = responders
                await world.clock.advance(1.0)
                assert 2 == world.usable()

    ours = [line["log_level"] for line in logs if "health" in line["event"]]
    assert ["warning", "info", "warning", "info"] == ours


async def test_a_change_that_is_heard_is_passed_on(world: World) -> None:
    async with world.discovering(), world.hardware_watch():
        world.hardware.now = inventory(0, 1, 2, sick="XID 79")
        await world.clock.advance(READ_SECONDS)

        assert (3, 2) == (world.listed(), world.usable())
        assert (HealthState.UNHEALTHY, "XID 79") == world.health()


async def test_a_reading_that_is_lost_makes_the_former_one_unconfirmed(world: World) -> None:
    """
    A new reading that does not arrive makes what was received before unconfirmed. Discovery answers, with a revision that
    the stream does not bring: a GPU may have failed.
    """
    async with world.discovering(), world.hardware_watch():
        world.bus.refusal = BusUnavailable("cut")
        world.hardware.now = inventory(0, 1, sick="XID 79")
        await world.clock.advance(READ_SECONDS + SILENT_SECONDS + 1)
        assert (HealthState.UNKNOWN, 0) == (world.health()[0], world.usable())

        world.bus.refusal = None
        await world.clock.advance(6.0)
        assert (HealthState.UNHEALTHY, 1) == (world.health()[0], world.usable())


async def test_a_restarted_discovery_is_believed_from_its_first_reading_on(world: World) -> None:
    async with world.hardware_watch():
        async with world.discovering():
            pass
        await world.clock.advance(2 * SILENT_SECONDS)
        world.hardware.now = inventory(0, 1, sick="XID 79")
        async with world.discovering():
            assert (HealthState.UNHEALTHY, 1) == (world.health()[0], world.usable())


async def test_a_new_discovery_does_not_confirm_the_reading_of_the_former_one(
    world: World,
) -> None:
    """A discovery whose first reading has not arrived does not confirm the reading of the one before."""
    async with world.discovering():
        pass
    await world.clock.advance(1.0)
    world.bus.refusal = BusUnavailable("cut")
    async with world.discovering(), world.hardware_watch():
        assert (2, 0) == (world.listed(), world.usable())

        world.bus.refusal = None
        await world.clock.advance(6.0)
        assert 2 == world.usable()


async def test_a_bus_that_is_away_does_not_take_the_devices_along(world: World) -> None:
    """Discovery cannot be asked then, which says nothing of the hardware; the node goes on giving out its devices."""
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        world.bus._responders, world.bus.away = [], True
        await world.clock.advance(600)
        during = world.usable(), hardware_watch.reason()
        world.bus.away = False
        await world.clock.advance(60)

        assert (2, None) == during
        assert 0 == world.usable(), "with the bus there, a silent discovery is a dead one"


async def test_a_late_message_of_a_discovery_that_is_no_more_is_not_believed(world: World) -> None:
    """As when one that dies has its last word repeated, or a stream went back."""
    async with world.discovering():
        pass
    old = [received.message for received in world.bus._logs[Stream.NODES].kept]
    await world.clock.advance(1.0)
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        for number, message in enumerate(old):
            again = {**message.headers, "Nats-Msg-Id": f"again-{number}"}
            await world.bus.publish(msgspec.structs.replace(message, headers=again))
        await world.clock.advance(60.0)

        assert (2, None) == (world.usable(), hardware_watch.reason())


async def test_a_reading_that_discovery_names_and_that_is_lost_is_asked_for(world: World) -> None:
    """A reading that discovery names and that never arrived is asked for again."""
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        log = world.bus._logs[Stream.NODES]
        world.hardware.now = inventory(0, 1, 2)
        log.append, append = (lambda message: 1), log.append  # type: ignore[method-assign]  # the stream loses it
        await world.clock.advance(READ_SECONDS)
        log.append = append  # type: ignore[method-assign]  # and no longer
        await world.clock.advance(60.0)

        assert (3, None) == (world.usable(), hardware_watch.reason())


async def test_after_a_stop_discovery_is_asked_before_anything_is_given_out(world: World) -> None:
    """
    After this process was stopped, discovery is asked before anything is given out. Nobody woke in between: an Allocate
    that comes first of all must not go by what was known a minute ago.
    """
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        world.bus.refusal = BusUnavailable("cut")
        world.hardware.now = inventory(0, 1, sick="XID 79")
        await world.clock.advance(READ_SECONDS)
        world.clock._now += 2 * SILENT_SECONDS  # stopped, and continued
        believed = world.usable()
        await hardware_watch.ensure_fresh()

        assert (2, 0) == (believed, world.usable())


async def test_after_a_stop_a_discovery_that_confirms_costs_nothing(world: World) -> None:
    """After this process was stopped, a discovery that confirms its readings costs no device."""
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        world.clock._now += 2 * SILENT_SECONDS
        await hardware_watch.ensure_fresh()

        assert (2, None) == (world.usable(), hardware_watch.reason())


@pytest.mark.parametrize("set_by", [86_400.0, -86_400.0])
async def test_a_wall_clock_that_jumps_does_not_change_what_is_confirmed(set_by: float) -> None:
    """A wall clock that jumps neither ends nor prolongs the time for which a reading counts as confirmed."""
    world = World()
    clock = ShiftingClock()
    world.clock = clock
    async with world.hardware_watch() as hardware_watch:
        async with world.discovering():
            await clock.advance(10.0)
            clock.set_by = set_by
            await clock.advance(10.0)
            during = world.usable(), hardware_watch.reason()
        await clock.advance(2 * SILENT_SECONDS)

        assert (2, None) == during
        assert 0 == world.usable()


@pytest.mark.parametrize("silent", [False, True])
async def test_a_late_former_discovery_does_not_change_what_is_listed(world: World, silent: bool) -> None:
    """
    A reading of a former discovery that comes late does not change what is listed, not for a moment. Nor while the
    discovery that lives is silent; what waits then is dropped when it answers.
    """
    world.hardware.now = inventory(0, 1, 2)
    async with world.discovering():
        pass
    old = [received.message for received in world.bus._logs[Stream.NODES].kept]
    await world.clock.advance(1.0)
    world.hardware.now = inventory(0, 1)
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        responders, world.bus._responders = world.bus._responders, [] if silent else world.bus._responders
        for number, message in enumerate(old):
            again = {**message.headers, "Nats-Msg-Id": f"again-{number}"}
            await world.bus.publish(msgspec.structs.replace(message, headers=again))
        await world.clock.advance(0)
        at_once = world.listed()
        world.bus._responders = responders
        await world.clock.advance(ASK_SECONDS)

        assert (2, 2) == (at_once, world.listed())
        assert None is hardware_watch.reason()


async def test_a_topology_from_a_silent_discovery_is_believed_once_it_answers(
    world: World,
) -> None:
    """Another topology that arrived while discovery was silent is believed once discovery answers."""
    async with world.discovering(), world.hardware_watch():
        responders, world.bus._responders = world.bus._responders, []
        world.hardware.now = inventory(0, 1, 2)
        await world.clock.advance(READ_SECONDS)
        silent = world.listed()
        world.bus._responders = responders
        await world.clock.advance(ASK_SECONDS)

        assert (2, 3) == (silent, world.listed())


async def test_a_forged_topology_that_a_starting_allocator_finds_is_not_listed(world: World) -> None:
    """F07: it is the newest in the stream, and discovery says that it is not its own."""
    async with world.discovering():
        told = wire.decode_event(world.bus._logs[Stream.NODES].kept[0].message)
        assert isinstance(told, TopologyDiscovered)
        await world.bus.publish(wire.encode_event(msgspec.structs.replace(told, revision=99, topology=Topology()), 0.0))
        async with world.hardware_watch() as hardware_watch:
            await world.clock.advance(ASK_SECONDS)

            assert (2, None) == (world.listed(), hardware_watch.reason())
            assert hardware_watch.forged >= 1


async def test_a_reading_of_an_unknown_discovery_is_not_believed(world: World) -> None:
    """A reading of no discovery that answers is not believed for its greater epoch."""
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        told = world.ledger.state.topology
        assert told is not None
        forged = msgspec.structs.replace(told, epoch=told.epoch + 1, topology=Topology())
        await world.bus.publish(wire.encode_event(forged, 0.0))
        await world.clock.advance(0)
        at_once = world.listed()
        await world.clock.advance(2 * ASK_SECONDS)

        assert (2, 2, None) == (at_once, world.listed(), hardware_watch.reason())


@pytest.mark.parametrize("forged", [True, False])
async def test_nothing_is_released_for_a_topology_that_discovery_has_not_said(world: World, forged: bool) -> None:
    """
    F07: Nothing is released for a topology whose content is not that of discovery. A forged one says that this is another
    machine, under the number that discovery uses next, and comes first.
    """
    world.hardware.source = "described: one"
    async with world.discovering(), world.hardware_watch() as hardware_watch:
        world.ledger.grant([world.ledger.named(Allocation(id=AllocationID("a"), devices={GPU: (GPU_0,)}))])
        told = world.ledger.state.topology
        assert told is not None
        world.hardware.now = inventory(0, 1, 2)
        if forged:
            lie = msgspec.structs.replace(told, revision=told.revision + 1, source="described: two")
            headers = {**wire.encode_event(lie, 0.0).headers, "Nats-Msg-Id": "forged"}
            world.bus._logs[Stream.NODES].append(msgspec.structs.replace(wire.encode_event(lie, 0.0), headers=headers))
        else:
            world.hardware.source = "described: two"
        assert world.discovery is not None
        await world.discovery.read()
        await world.clock.advance(2 * ASK_SECONDS)

        assert (1 if forged else 0) == len(world.ledger.state.allocations)
        assert (1 if forged else 0) == hardware_watch.forged
        assert 3 == world.listed()
