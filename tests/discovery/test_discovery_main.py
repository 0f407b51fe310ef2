"""Which driver reads, by the settings, and what the drivers without NVML do."""

from pathlib import Path

import pytest
from discovery_support import READ_SECONDS, World
from nvml_support import host_tree, put, script, standing_in, told_uuids, uuid

from topoalign.core import wire
from topoalign.core.model.errors import DriverFault, InvalidField, InvalidMachine, NotFound
from topoalign.core.model.events import HealthState, TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.ports import HardwareEvent, Occurrence, Stream
from topoalign.discovery.drivers.auto import DescribedDriver, SysfsDriver
from topoalign.discovery.main import driver_for, follow_configuration, serve
from topoalign.discovery.settings import DiscoverySettings
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_sysfs
from topoalign.plugin_config.file_watch import ConfigurationFile
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.context import Context
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.settings import from_environment
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

MATRIX = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV4\t0-7\t0
GPU1\tNV4\t X \t8-15\t1

Legend:
"""


def settings(**values: str) -> DiscoverySettings:
    environment = {f"TOPOALIGN_{name.upper()}": value for name, value in {"node": "n", **values}.items()}
    return from_environment(DiscoverySettings, environment)


async def test_the_service_says_what_a_described_machine_is(tmp_path: Path) -> None:
    """As it runs in a process: settings from the environment, readiness and metrics in the context."""
    bus = MemoryBus()
    environment = {
        "TOPOALIGN_NODE": "node-1",
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
    }
    context = Context(bus=bus, clock=ManualClock(), environment=environment)
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(context, task_status=task_status))
        async with bus.follow(Stream.NODES, f"{wire.PREFIX}.topology.>") as messages:
            said = wire.decode_event((await anext(messages)).message)

        assert isinstance(said, TopologyDiscovered)
        assert (NodeName("node-1"), "described: dgx-a100", 8) == (said.node, said.source, len(said.topology.gpus))
        assert None is context.checks["discovery"]()
        assert 1 == context.metrics.get_sample_value("topoalign_discovery_reads_total")


async def test_what_is_odd_about_the_hardware_is_noted_where_an_operator_looks(tmp_path: Path) -> None:
    root = host_tree(tmp_path / "host")
    told_uuids(root, *range(7))
    environment = {
        "TOPOALIGN_NODE": "node-1",
        "TOPOALIGN_DRIVER": "sysfs",
        "TOPOALIGN_SYSFS_ROOT": str(root),
        "TOPOALIGN_STATE_DIR": str(tmp_path / "state"),
    }
    bus = MemoryBus()
    context = Context(bus=bus, clock=ManualClock(), environment=environment)
    async with background() as tasks:
        await tasks.start(lambda *, task_status: serve(context, task_status=task_status))
        assert None is context.notes["hardware"]()
        async with bus.follow(Stream.NODES, ">") as messages:
            await anext(messages)

        assert "GPU 7 at 0000:77:00.0 has no uuid" in (context.notes["hardware"]() or "")


async def test_a_machine_that_is_set_is_played(tmp_path: Path) -> None:
    file = tmp_path / "pasted.txt"
    file.write_text(MATRIX)

    assert "described: dgx1-volta" == driver_for(settings(machine="dgx1-volta"), SystemClock()).source
    assert "described: pasted" == driver_for(settings(machine=str(file)), SystemClock()).source


def test_what_cannot_be_meant_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "broken.txt"
    file.write_text("GPU0 and more\n")

    with pytest.raises(InvalidField, match="TOPOALIGN_MACHINE"):
        driver_for(settings(driver="described"), SystemClock())
    with pytest.raises(InvalidField, match="TOPOALIGN_DRIVER"):
        settings(driver="cuda")
    with pytest.raises(InvalidField, match="TOPOALIGN_READ_SECONDS"):
        settings(read_seconds="0")
    with pytest.raises(NotFound):
        driver_for(settings(machine="no-such-machine"), SystemClock())
    with pytest.raises(InvalidMachine):
        driver_for(settings(machine=str(file)), SystemClock())


async def test_editing_a_described_machine_changes_it_and_breaking_it_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "pasted.txt"
    file.write_text(MATRIX)
    driver = DescribedDriver(str(file))
    assert 4 == (await driver.read()).topology.links[0].fabric_links

    file.write_text(MATRIX.replace("NV4", "NV2"))
    assert 2 == (await driver.read()).topology.links[0].fabric_links

    file.write_text("GPU0 and more\n")
    with pytest.raises(DriverFault, match=r"pasted\.txt"):
        await driver.read()


async def test_without_nvml_the_files_are_read_until_it_answers(nvml_library: Path, tmp_path: Path) -> None:
    """A driver that is loaded late is found; once it has answered, its failure is a fault."""
    driver = driver_for(settings(sysfs_root=str(host_tree(tmp_path / "host"))), SystemClock())
    with standing_in(nvml_library, tmp_path, script(more=["fail nvmlInitWithFlags * 9"])) as standin:
        early = await driver.read()
        assert ("sysfs", ()) == (driver.source, early.topology.gpus)
        assert {"mlx5_0", "mlx5_1"} == set(early.health)
        assert "GPU 0 at 0000:07:00.0 has no uuid" in early.findings[0]
        assert "GPUs are known from /sys only" in early.findings[-1]

        standin.play(script())
        late = await driver.read()
        assert ("nvml", "GPU-0") == (driver.source, late.topology.gpus[0].id)
        assert {HealthState.HEALTHY} == {late.health[gpu.id].state for gpu in late.topology.gpus}

        standin.play(script(more=["fail nvmlDeviceGetCount_v2 * 999"]))
        with pytest.raises(DriverFault):
            await driver.read()


async def test_a_machine_without_gpus_needs_no_nvml_and_is_not_warned_about(nvml_library: Path, tmp_path: Path) -> None:
    driver = driver_for(settings(sysfs_root=str(host_tree(tmp_path / "host", gpus=0))), SystemClock())
    with standing_in(nvml_library, tmp_path, script(more=["fail nvmlInitWithFlags * 12"])):
        found = await driver.read()

    assert ((), ()) == (found.topology.gpus, found.findings)


async def test_files_tell_of_a_gpu_only_what_its_driver_has_named(tmp_path: Path) -> None:
    """An id must name a card for good: one made of its address would be another card after a swap."""
    root = host_tree(tmp_path)
    told_uuids(root, 0, 2)

    found = await SysfsDriver(root, SystemClock(), 30.0).read()

    assert [(uuid(0), 0), (uuid(2), 2)] == [(gpu.id, gpu.index) for gpu in found.topology.gpus]
    assert {uuid(0), uuid(2), "mlx5_0", "mlx5_1"} == set(found.health)
    assert {HealthState.UNKNOWN} == {found.health[gpu.id].state for gpu in found.topology.gpus}
    assert 6 == len(found.findings)
    assert "GPU 1 at 0000:17:00.0 has no uuid" in found.findings[0]
    assert 8 == len(read_sysfs(Tree(root)).gpus), "whoever looks at the machine sees them all"


async def test_a_nic_without_an_active_port_is_unhealthy(tmp_path: Path) -> None:
    root = host_tree(tmp_path)
    put(root, "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")

    health = (await SysfsDriver(root, SystemClock(), 30.0).read()).health

    assert HealthState.HEALTHY == health[DeviceID("mlx5_0")].state
    assert (HealthState.UNHEALTHY, "no port is active: 1 DOWN") == (
        health[DeviceID("mlx5_1")].state,
        health[DeviceID("mlx5_1")].reason,
    )


async def test_a_root_without_a_machine_is_a_driver_fault(tmp_path: Path) -> None:
    with pytest.raises(DriverFault, match="no CPU"):
        await SysfsDriver(tmp_path, SystemClock(), 30.0).read()


async def test_health_settings_count_as_soon_as_they_change(tmp_path: Path) -> None:
    """What the configuration says of health counts as soon as it changes."""
    world, first, second = World(), DeviceID("GPU-0"), DeviceID("GPU-1")
    file = tmp_path / "topoalign.yaml"
    file.write_text("version: v1\n")
    configuration = ConfigurationFile({"TOPOALIGN_CONFIG": str(file)})
    async with world.running(), background() as tasks:
        tasks.start_soon(follow_configuration, configuration, world.discovery, world.health_keeper, {})
        await world.clock.advance(READ_SECONDS)
        file.write_text("health: {ignoredXIDs: [79], quietSeconds: 1, holdDownSeconds: 40}\n")
        assert await configuration.look()
        await world.clock.advance(READ_SECONDS)

        world.discovery.receive(HardwareEvent(kind=Occurrence.XID, gpu=first, xid=79))
        world.discovery.receive(HardwareEvent(kind=Occurrence.XID, gpu=second, xid=13))
        await world.clock.advance(0)
        said = (await world.health()).devices
        assert [HealthState.HEALTHY, HealthState.UNHEALTHY] == [said[first].state, said[second].state]
        await world.clock.advance(2 * READ_SECONDS)
        assert said == (await world.health()).devices, "well again, and held down"
        await world.clock.advance(2 * READ_SECONDS)
        assert HealthState.HEALTHY == (await world.health()).devices[second].state
