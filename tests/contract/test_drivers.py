"""What every driver promises, whatever it reads by."""

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import msgspec
import pytest
from nvml_support import host_tree, put, script, standing_in, switch_links, told_uuids, uuid

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.processes import DeviceUse
from topoalign.core.model.topology.topology_checks import validate
from topoalign.core.ports import Driver, HardwareEvent, Inventory
from topoalign.discovery.drivers.auto import AutoDriver, DescribedDriver, SysfsDriver
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.machines.sysfs_files import Tree
from topoalign.machines.sysfs_machine import read_gpus
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio

SECONDS = 30.0

Make = Callable[[pytest.FixtureRequest, Path], Driver]


def described(request: pytest.FixtureRequest, folder: Path) -> Driver:
    return DescribedDriver("dgx-a100")


def sysfs(request: pytest.FixtureRequest, folder: Path) -> Driver:
    root = host_tree(folder / "host")
    told_uuids(root, *range(8))
    return SysfsDriver(root, SystemClock(), SECONDS)


def sysfs_captured(request: pytest.FixtureRequest, folder: Path) -> Driver:
    """A POWER9 with six GPUs whose memory is NUMA nodes, as hwloc captured it: all but their uuids."""
    archive = request.getfixturevalue("vectors") / "sysfs_trees" / "power9-nvidiagpunumanodes.tar.bz2"
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "tar_filter", None)  # Python 3.11.4 and later would ask for one
        tar.extractall(folder)
    root = folder / "nvidiagpunumanodes"
    for gpu in read_gpus(Tree(root)):
        put(root, f"proc/driver/nvidia/gpus/{gpu.pci}/information", f"GPU UUID: {uuid(gpu.index)}")
    return SysfsDriver(root, SystemClock(), SECONDS)


def nvml(request: pytest.FixtureRequest, folder: Path) -> Driver:
    return NvmlDriver(host_tree(folder / "host"), SystemClock(), SECONDS)


def auto(request: pytest.FixtureRequest, folder: Path) -> Driver:
    root = host_tree(folder / "host")
    return AutoDriver(NvmlDriver(root, SystemClock(), SECONDS), SysfsDriver(root, SystemClock(), SECONDS))


def real(request: pytest.FixtureRequest, folder: Path) -> Driver:
    """NVIDIA's driver and the GPUs of this machine."""
    if "TOPOALIGN_TEST_GPU" not in os.environ:
        pytest.skip("needs NVIDIA's driver and a GPU: run `make test-gpu` where there is one")
    return NvmlDriver(Path("/"), SystemClock(), SECONDS)


@pytest.fixture(params=[described, sysfs, sysfs_captured, nvml, auto, real], ids=lambda make: make.__name__)
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    make: Make = request.param
    if make not in (nvml, auto):
        yield make(request, tmp_path)
        return
    with standing_in(request.getfixturevalue("nvml_library"), tmp_path, script(more=switch_links(8, 18))):
        yield make(request, tmp_path)


async def test_the_machine_hangs_together(driver: Driver) -> None:
    """Ids are unique, links name devices, nodes exist: all that `validate` says."""
    topology = (await driver.read()).topology

    validate(topology)
    assert topology.cpus
    assert topology.gpus


async def test_every_device_is_judged_and_nothing_else(driver: Driver) -> None:
    found = await driver.read()

    assert {*found.topology.gpu_by_id, *found.topology.nic_by_id} == set(found.health)
    assert [] == [health for health in found.health.values() if bool(health.reason) == health.usable]


async def test_equal_hardware_gives_equal_readings(driver: Driver) -> None:
    """So that a reading which says nothing new is known to say nothing new."""
    assert await driver.read() == await driver.read()


async def test_a_reading_survives_json(driver: Driver) -> None:
    found = await driver.read()

    assert found == msgspec.json.decode(msgspec.json.encode(found), type=Inventory)


async def test_a_driver_says_what_it_reads_by(driver: Driver) -> None:
    await driver.read()

    assert driver.source in {"described: dgx-a100", "sysfs", "nvml"}


class Nobody:
    """Hears, and fails the test if what it hears is that nothing can be received."""

    def receive(self, event: HardwareEvent) -> None:
        pass

    def lose_subscription(self, reason: str | None, gpus: frozenset[DeviceID] = frozenset()) -> None:
        assert reason is None, reason


async def test_a_driver_can_be_read_while_somebody_watches(driver: Driver) -> None:
    async with background() as tasks:
        tasks.start_soon(driver.watch, Nobody())
        first = await driver.read()
        await anyio.lowlevel.checkpoint()

        assert first == await driver.read()


async def test_a_measurement_names_known_gpus_or_says_why_there_is_none(driver: Driver) -> None:
    found = await driver.read()
    if driver.source != "nvml":
        with pytest.raises(DriverFault):
            await driver.measure()
        return
    uses = await driver.measure()

    assert found.topology.gpu_by_id.keys() <= {use.device for use in uses}
    assert uses == msgspec.json.decode(msgspec.json.encode(uses), type=tuple[DeviceUse, ...])
