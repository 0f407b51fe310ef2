"""What everybody who makes MIG instances promises: NVML, here by its stand-in, and the GPUs that tests play."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
from instance_support import A100, GIB, GPU, PlayedGpus, instance_line, place, profile_lines
from nvml_support import StandIn, standing_in

from topoalign.allocator.mig.instance_log import InstanceLog
from topoalign.allocator.mig.instances import InstanceInUse, InstanceMaker, Instances, PlaceTaken
from topoalign.allocator.mig.nvml_instances import NvmlInstances
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

SECONDS = 30.0
OTHER = DeviceID("GPU-1")


def machine() -> str:
    """Two GPUs in MIG mode; the first has an instance of somebody's at slice 6."""
    lines = [f"gpu uuid={gpu} pci=00000000:F{number}:00.0 mig=1" for number, gpu in enumerate((GPU, OTHER))]
    return "\n".join([*lines, *profile_lines(0), *profile_lines(1), instance_line("MIG-foreign-6")])


def played(request: pytest.FixtureRequest) -> InstanceMaker:
    return PlayedGpus(place(6, 1))


def nvml(request: pytest.FixtureRequest) -> InstanceMaker:
    return NvmlInstances(SystemClock(), SECONDS)


@pytest.fixture
def standin(nvml_library: Path, tmp_path: Path) -> Iterator[StandIn]:
    with standing_in(nvml_library, tmp_path, machine()) as found:
        yield found


@pytest.fixture(params=[played, nvml], ids=lambda make: make.__name__)
def maker(request: pytest.FixtureRequest) -> InstanceMaker:
    make: Callable[[pytest.FixtureRequest], InstanceMaker] = request.param
    if make is nvml:
        request.getfixturevalue("standin")
    return make(request)


async def test_instances_of_others_are_there(maker: InstanceMaker) -> None:
    (there,) = await maker.there(GPU)

    assert ("1g.5gb", place(6, 1), {"MIG-foreign-6"}) == (there.profile, there.placement, {*there.uuids})
    assert () == await maker.there(OTHER)


async def test_what_is_made_is_there_with_its_mig_device(maker: InstanceMaker) -> None:
    made = await maker.make(GPU, "2g.10gb", place(4, 2))
    there = {each.id: each for each in await maker.there(GPU)}

    assert 2 == len(there)
    assert (place(4, 2), frozenset({made.uuid})) == (there[made.gpu_instance].placement, there[made.gpu_instance].uuids)
    assert ("2g.10gb", place(4, 2)) == (made.profile, made.placement)
    assert () == await maker.there(OTHER)


async def test_a_place_that_is_taken_is_refused_and_nothing_is_made(maker: InstanceMaker) -> None:
    with pytest.raises(PlaceTaken, match="slice 4"):
        await maker.make(GPU, "3g.20gb", place(4, 4))

    assert 1 == len(await maker.there(GPU))


async def test_what_is_destroyed_makes_room(maker: InstanceMaker) -> None:
    made = await maker.make(OTHER, "7g.40gb", place(0, 8))
    await maker.destroy(OTHER, made.gpu_instance)
    await maker.destroy(OTHER, made.gpu_instance)

    assert () == await maker.there(OTHER)
    assert place(0, 8) == (await maker.make(OTHER, "7g.40gb", place(0, 8))).placement


async def test_two_instances_of_a_gpu_have_ids_of_their_own(maker: InstanceMaker) -> None:
    one, two = await maker.make(GPU, "1g.5gb", place(5, 1)), await maker.make(GPU, "1g.5gb", place(4, 1))

    assert one.gpu_instance != two.gpu_instance
    assert one.uuid != two.uuid
    assert 3 == len(await maker.there(GPU))


@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance",
        "nvmlDeviceGetUUID",
        "nvmlGpuInstanceGetInfo",
    ],
)
async def test_a_call_of_nvml_that_fails_is_undone_and_named(call: str, standin: StandIn) -> None:
    maker = NvmlInstances(SystemClock(), SECONDS)
    standin.play(f"{machine()}\nfail {call} 1 4")
    with pytest.raises(DriverFault, match=call) as fault:
        await maker.make(OTHER, "1g.5gb", place(0, 1))
    assert "root" in fault.value.remedy
    assert 0 == standin.made(1)


async def test_an_instance_that_processes_use_is_told_apart(standin: StandIn) -> None:
    maker = NvmlInstances(SystemClock(), SECONDS)
    standin.play(f"{machine()}\nfail nvmlComputeInstanceDestroy 1 19")
    made = await maker.make(OTHER, "1g.5gb", place(0, 1))

    with pytest.raises(InstanceInUse, match="processes use"):
        await maker.destroy(OTHER, made.gpu_instance)


async def test_a_gpu_that_is_gone_is_a_fault(standin: StandIn) -> None:
    with pytest.raises(DriverFault, match="nvmlDeviceGetHandleByUUID"):
        await NvmlInstances(SystemClock(), SECONDS).there(DeviceID("GPU-9"))


async def test_a_driver_that_hangs_is_a_fault_in_time(standin: StandIn) -> None:
    """And the next call says so at once, instead of waiting behind it."""
    clock = ManualClock()
    maker = NvmlInstances(clock, SECONDS)
    standin.play(f"{machine()}\nhang nvmlDeviceCreateGpuInstanceWithPlacement")

    async def make() -> None:
        with pytest.raises(DriverFault, match="nvmlDeviceCreateGpuInstanceWithPlacement within 30 s"):
            await maker.make(OTHER, "1g.5gb", place(0, 1))

    async with background() as tasks:
        tasks.start_soon(make)
        while not standin.hanging():
            await anyio.lowlevel.checkpoint()
        await clock.advance(SECONDS + 1)
        with pytest.raises(DriverFault, match="has not answered"):
            await maker.there(OTHER)
    standin.release()


async def test_a_kubelet_that_hangs_up_while_an_instance_is_made_is_no_fault(standin: StandIn, tmp_path: Path) -> None:
    """grpclib cancels its call. The next one waits until the driver has answered, and the half instance goes."""
    clock = SystemClock()
    instances = Instances(InstanceLog(tmp_path, "b", clock.monotonic), NvmlInstances(clock, SECONDS), lambda: None)
    standin.play(f"{machine()}\nhang nvmlDeviceCreateGpuInstanceWithPlacement")
    former, call = (
        asyncio.create_task(instances.make(DeviceID(f"{OTHER}::{number}"), A100, 5 * GIB)) for number in range(2)
    )
    while not standin.hanging():
        await anyio.lowlevel.checkpoint()
    former.cancel()
    await asyncio.wait([former])
    await all_tasks_blocked()

    assert (True, False) == (former.cancelled(), call.done())
    standin.release()
    made = await call
    await instances.destroy_unused(lambda: {made.uuid})
    assert [{made.uuid}] == [{*each.uuids} for each in await NvmlInstances(clock, SECONDS).there(OTHER)]
    assert {} == instances.failing
