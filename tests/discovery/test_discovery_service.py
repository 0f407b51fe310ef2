"""Discovery says what changes, once; what fails or vanishes stays listed."""

import msgspec
import pytest
from discovery_support import HEALTHY, NODE, QUIET_SECONDS, READ_SECONDS, World, inventory
from structlog.testing import capture_logs

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Stream
from topoalign.discovery.service import FIRST_PAUSE

pytestmark = pytest.mark.anyio


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
    assert None is world.discovery.not_ready_reason()


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


async def test_another_source_of_the_same_hardware_is_published(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a driver is loaded that finds what the files of /sys have shown."""
    async with world.running():
        before = await world.topology()
        monkeypatch.setattr(world.hardware, "source", "nvml")
        await world.clock.advance(READ_SECONDS)
        after = await world.topology()

    assert (before.topology, "test", "nvml") == (after.topology, before.source, after.source)


async def test_a_lost_gpu_stays_listed_and_is_itself_when_it_returns(
    world: World,
) -> None:
    """A lost gpu stays listed as unhealthy and is itself when it returns with another index."""
    async with world.running():
        await world.becomes(inventory(1, index=(1,)))
        lost = await world.health()
        assert ["GPU-0", "GPU-1"] == [gpu.id for gpu in (await world.topology()).topology.gpus]
        assert (HealthState.UNHEALTHY, HealthState.HEALTHY) == tuple(health.state for health in lost.devices.values())
        assert lost.devices[DeviceID("GPU-0")].reason.startswith("lost")
        assert 1 == (await world.topology()).revision, "the machine is still the same one"

        await world.becomes(inventory(1, 0))
        assert [("GPU-1", 0), ("GPU-0", 1)] == [(g.id, g.index) for g in (await world.topology()).topology.gpus]
        await world.clock.advance(QUIET_SECONDS)
        assert {HEALTHY} == set((await world.health()).devices.values()), "once it has been found for a while"


async def test_a_reading_that_fails_makes_all_health_unknown(world: World) -> None:
    """A reading that fails makes every health unknown and leaves the topology."""
    async with world.running():
        await world.becomes(DriverFault("NVML hangs", "restart it"), seconds=5 * READ_SECONDS)

        assert {DeviceHealth(state=HealthState.UNKNOWN, reason="NVML hangs")} == set(
            (await world.health()).devices.values()
        )
        assert (1, 2) == ((await world.topology()).revision, (await world.health()).revision), "said once"
        assert "NVML hangs" == world.discovery.not_ready_reason()
        assert 5 == world.counted("topoalign_discovery_read_failures_total")

        await world.becomes(inventory(0, 1))
        assert {HEALTHY} == set((await world.health()).devices.values())
        assert None is world.discovery.not_ready_reason()


async def test_a_first_reading_that_fails_is_tried_again_at_growing_intervals(world: World) -> None:
    world.hardware.now = DriverFault("NVML hangs", "restart it")
    async with world.running():
        assert "NVML hangs" == world.discovery.not_ready_reason()
        await world.clock.advance(FIRST_PAUSE * (1 + 2 + 4))
        assert 4 == world.hardware.reads
        assert 0 == await world.bus.last_position(Stream.NODES), "no devices are listed that were never read"

        await world.becomes(inventory(0, 1), seconds=FIRST_PAUSE * 8)
        assert 2 == len(await world.said())


async def test_the_log_says_once_what_is_odd_or_wrong(world: World) -> None:
    """A node may fail for days, at every reading."""
    with capture_logs() as lines:
        async with world.running():
            await world.becomes(inventory(0, 1, findings=("GPU 2 is lost",)), seconds=5 * READ_SECONDS)
            await world.becomes(DriverFault("NVML hangs", "restart it"), seconds=5 * READ_SECONDS)

    said = [line for line in lines if line["log_level"] == "warning"]
    assert [("GPU 2 is lost",), "NVML hangs"] == [line.get("findings") or line["finding"] for line in said]


async def test_a_device_that_the_driver_does_not_judge_is_unknown(world: World) -> None:
    world.hardware.now = msgspec.structs.replace(inventory(0), health={})
    async with world.running():
        assert HealthState.UNKNOWN == (await world.health()).devices[DeviceID("GPU-0")].state
