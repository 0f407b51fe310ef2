"""What the NVML driver measures, over the real pynvml and a stand-in library."""

from pathlib import Path

import anyio
import msgspec
import pytest
from nvml_support import GPUS, Node, built, host_tree, script, standing_in

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.processes import DeviceUse, GpuProcess
from topoalign.discovery.drivers.nvml.use import SAMPLE_SECONDS
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio

GIB = 1 << 30
MIG = (
    "gpu uuid=GPU-x pci=00000000:F9:00.0 memory=85899345920 mig=1",
    "use 8 21474836480 50",
    "mig 8 gi=3 ci=0 uuid=MIG-0 name=MIG_1g.10gb memory=9728 slices=1 compute=1",
    "mig 8 gi=9 ci=0 uuid=MIG-1 name=MIG_1g.10gb memory=9728 slices=1 compute=1",
    "process 8 pid=7 memory=1073741824 mig=1",
)


async def measured(node: Node, *more: str) -> dict[str, DeviceUse]:
    """By device, after a reading of this machine."""
    await node.read(*more)
    uses = await node.driver.measure()
    assert len(uses) == len({use.device for use in uses})
    return {use.device: use for use in uses}


async def test_memory_time_and_processes_of_a_gpu_are_told(node: Node) -> None:
    uses = await measured(
        node,
        "use 2 21474836480 97 30",
        "process 2 pid=41 memory=17179869184 sm=90",
        "process 2 pid=9 memory=1073741824",
    )

    expected = DeviceUse(
        device=DeviceID("GPU-2"),
        memory=80 * GIB,
        memory_used=20 * GIB,
        utilization=97,
        memory_utilization=30,
        processes=(
            GpuProcess(pid=9, kinds=("compute",), memory=GIB, utilization=0),
            GpuProcess(pid=41, kinds=("compute",), memory=16 * GIB, utilization=90),
        ),
    )
    assert expected == uses["GPU-2"]
    assert DeviceUse(device=DeviceID("GPU-3"), memory=80 * GIB, memory_used=0, processes=()) == uses["GPU-3"]
    assert GPUS == tuple(uses)


async def test_a_process_in_several_lists_is_one_with_its_memory_once(node: Node) -> None:
    uses = await measured(
        node,
        "process 0 pid=5 memory=4294967296",
        "process 0 pid=5 memory=4294967296 kind=graphics",
        "process 0 pid=6 kind=mps",
        "process 0 pid=6 memory=1073741824",
    )

    assert (
        GpuProcess(pid=5, kinds=("compute", "graphics"), memory=4 * GIB, utilization=0),
        GpuProcess(pid=6, kinds=("compute", "mps"), memory=GIB, utilization=0),
    ) == uses["GPU-0"].processes


async def test_what_the_driver_does_not_tell_is_unknown_and_not_zero(node: Node) -> None:
    uses = await measured(
        node,
        "process 0 pid=5",
        "fail nvmlDeviceGetMemoryInfo 0 3",
        "fail nvmlDeviceGetProcessUtilization 0 4",
        "fail nvmlDeviceGetComputeRunningProcesses_v3 1 4",
        "fail nvmlDeviceGetComputeRunningProcesses_v2 1 4",
    )

    assert (None, None, None) == (uses["GPU-0"].memory, uses["GPU-0"].memory_used, uses["GPU-0"].utilization)
    assert (GpuProcess(pid=5, kinds=("compute",)),) == uses["GPU-0"].processes
    assert None is uses["GPU-1"].processes


async def test_utilisation_is_the_mean_of_the_last_second(node: Node) -> None:
    """Older samples, and those above 100 %, do not count."""
    cut = int((node.clock.wall() - SAMPLE_SECONDS) * 1e6)
    samples = {5: ((20, 1), (40, 2)), 6: ((70, 0), (90, -5)), 7: ((101, 1), (30, 3))}

    uses = await measured(
        node, *(f"process 0 pid={pid} sm={sm} at={cut + at}" for pid, told in samples.items() for sm, at in told)
    )

    assert {5: 30, 6: 0, 7: 30} == {process.pid: process.utilization for process in uses["GPU-0"].processes or ()}


async def test_each_mig_instance_has_its_memory_and_its_processes(node: Node) -> None:
    uses = await measured(node, *MIG)

    assert ["GPU-x", "MIG-0", "MIG-1"] == list(uses)[8:]
    assert DeviceUse(device=DeviceID("GPU-x"), memory=80 * GIB, memory_used=20 * GIB, processes=()) == uses["GPU-x"]
    assert (
        DeviceUse(
            device=DeviceID("MIG-1"),
            memory=9728 << 20,
            memory_used=0,
            processes=(GpuProcess(pid=7, kinds=("compute",), memory=GIB),),
        )
        == uses["MIG-1"]
    )
    assert () == uses["MIG-0"].processes


async def test_an_instance_that_is_destroyed_meanwhile_is_left_out(node: Node) -> None:
    await node.read(*MIG)
    node.standin.play(script(more=[*MIG, "fail nvmlDeviceGetMemoryInfo 8 6"]))

    assert "failure" in msgspec.to_builtins((await node.driver.measure())[8]), "a GPU that is not found is a failure"
    node.standin.play(script(more=[*MIG, "fail nvmlDeviceGetComputeRunningProcesses_v3 8 6"]))
    assert ["GPU-x"] == [use.device for use in (await node.driver.measure())[8:]]


async def test_a_lost_gpu_says_so_and_the_others_are_measured(node: Node) -> None:
    uses = await measured(node, "fail nvmlDeviceGetComputeRunningProcesses_v3 3 15", "process 4 pid=5 memory=1")

    assert (
        DeviceUse(device=DeviceID("GPU-3"), failure="nvmlDeviceGetComputeRunningProcesses_v3: GPU is lost")
        == uses["GPU-3"]
    )
    assert 1 == len(uses["GPU-4"].processes or ())


async def test_a_gpu_that_does_not_tell_who_it_is_is_left_out(node: Node) -> None:
    assert {*GPUS} - {"GPU-5"} == (await measured(node, "fail nvmlDeviceGetUUID 5 15")).keys()


@pytest.mark.parametrize("code", [1, 9])
async def test_a_library_that_does_not_work_is_a_fault_and_is_opened_anew(node: Node, code: int) -> None:
    await node.read()
    node.standin.play(script(more=[f"fail nvmlDeviceGetMemoryInfo * {code}"]))
    with pytest.raises(DriverFault, match="NVML does not work"):
        await node.driver.measure()

    assert GPUS == tuple((await measured(node)).keys())


async def test_measuring_before_the_first_reading_does_not_spoil_it(node: Node) -> None:
    assert 8 == len(await node.driver.measure())
    assert 8 == len((await node.read()).topology.gpus)


async def test_a_measurement_waits_for_the_reading_under_way(node: Node) -> None:
    """The driver's thread does one thing at a time; neither is at fault because of the other."""
    node.standin.play(script(more=["delay 200"]))
    found: list[int] = []

    async def measure() -> None:
        found.append(len(await node.driver.measure()))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure)
        tasks.start_soon(node.driver.read)
        tasks.start_soon(measure)

    assert [8, 8] == found


async def test_a_measurement_that_nobody_waits_for_leaves_nvml_in_order(node: Node) -> None:
    """An asker who goes away in the middle must not make the next reading find NVML at work."""
    await node.read("hang nvmlDeviceGetComputeRunningProcesses_v3")
    async with background() as tasks:
        tasks.start_soon(node.driver.measure)
        while not node.standin.hanging():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
        node.standin.release()

    assert 8 == len((await node.driver.read()).topology.gpus)


async def test_a_call_that_hangs_is_named(node: Node) -> None:
    await node.read("hang nvmlDeviceGetProcessUtilization")
    faults: list[str] = []

    async def measure() -> None:
        with pytest.raises(DriverFault) as fault:
            await node.driver.measure()
        faults.append(fault.value.finding)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(measure)
        while not node.standin.hanging():
            await anyio.lowlevel.checkpoint()
        await node.clock.advance(6.0)

    assert "NVML has not answered nvmlDeviceGetProcessUtilization within 5 s" == faults[0]


async def test_an_old_driver_tells_what_it_has(tmp_path: Path) -> None:
    library = built(tmp_path, "-DOLD_DRIVER")
    (tmp_path / "standin").mkdir()
    machine = script(gpus=[0], more=["process 0 pid=5 memory=1073741824", "process 0 pid=6 kind=graphics"])
    with standing_in(library, tmp_path / "standin", machine) as standin:
        (use,) = await Node(host_tree(tmp_path / "host", gpus=1), standin).driver.measure()

    assert (
        GpuProcess(pid=5, kinds=("compute",), memory=GIB),
        GpuProcess(pid=6, kinds=("graphics",)),
    ) == use.processes
