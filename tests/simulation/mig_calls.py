"""
NVML's calls for MIG instances as one simulated agent makes them: each may fail, hang, or be the last thing that it does.

As in `topoalign.allocator.mig.nvml_instances`: a GPU instance whose compute instance cannot be made is destroyed again,
if the driver lets it; a call that does not answer is given up after ten seconds, whatever becomes of it, and no other
one begins until it has ended. A process that is killed in the driver ends when the call has: the next one starts after
that.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from simulation.loop import Process
from simulation.mig_driver import PROFILES, Call, Driver, Instance, outside
from simulation.world import World

from topoalign.allocator.mig.instances import GpuInstance, InstanceInUse, PlaceTaken
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement

DEADLINE = 10.0
HANG_SECONDS = (12.0, 25.0, 70.0)
ERRORS = ("Unknown Error", "Insufficient Permissions", "GPU is lost")
REMEDY = "look at the kernel log"


def nothing() -> None:
    """What a call changes that only asks."""


class SimulatedMaker:
    """`InstanceMaker` of one agent."""

    def __init__(self, world: World, driver: Driver, process: Process) -> None:
        self._world, self._driver, self._process = world, driver, process
        self._hanging: Call | None = None
        self._at_last: Callable[[], None] = nothing
        """What the hanging call does when it ends."""
        process.ended.append(self._end)

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        await self._call(gpu, "nvmlDeviceGetGpuInstances", nothing)
        return tuple(
            GpuInstance(each.id, each.profile.name, each.placement, frozenset([each.uuid] if each.has_compute else []))
            for each in self._driver.of(gpu)
        )

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        kind = next(each for each in PROFILES if each.name == profile)
        made = Instance(gpu, kind, placement, is_ours=True)
        if self._world.faults.random() < self._driver.failing / 2:
            raise PlaceTaken(gpu, profile, placement)
        await self._call(gpu, "nvmlDeviceCreateGpuInstanceWithPlacement", lambda: self._add(made))
        try:
            await self._call(gpu, "nvmlGpuInstanceCreateComputeInstance", lambda: self._set_compute(made, True))
            await self._call(gpu, "nvmlGpuInstanceGetInfo", nothing)
        except DriverFault:
            if self._hanging is None:
                with suppress(DriverFault):
                    await self._clear(made)
            raise
        return MigDevice(
            uuid=made.uuid,
            profile=profile,
            gpu_instance=made.id,
            compute_instance=0,
            memory=kind.memory,
            placement=placement,
        )

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        found = next((each for each in self._driver.of(gpu) if each.id == instance), None)
        if found is not None:
            for told in self._driver.destroyed:
                told(found)
            await self._clear(found)

    async def _clear(self, instance: Instance) -> None:
        self._expect_unused(instance)
        if instance.has_compute:
            await self._call(instance.gpu, "nvmlComputeInstanceDestroy", lambda: self._set_compute(instance, False))
        self._expect_unused(instance)
        await self._call(instance.gpu, "nvmlGpuInstanceDestroy", lambda: self._remove(instance))

    def _expect_unused(self, instance: Instance) -> None:
        if self._process.dead:
            raise asyncio.CancelledError
        if instance in self._driver.watched:
            raise InstanceInUse(f"{instance.gpu}: processes use GPU instance {instance.id}", "see which")

    async def _call(self, gpu: DeviceID, call: Call, deed: Callable[[], None]) -> None:
        """One call. Raises DriverFault where it fails or hangs; where the process is killed in it, nothing more happens."""
        driver, chance = self._driver, self._world.faults
        if self._process.dead:
            raise asyncio.CancelledError
        if self._hanging is not None:
            raise no_answer(gpu, self._hanging)
        if driver.kills is not None and driver.kills[0] == call:
            (_, is_late), driver.kills = driver.kills, None
            if is_late:
                deed()
            self._world.kill(self._process)
            raise asyncio.CancelledError
        if driver.hangs == call:
            driver.hangs = None
            await self._hang(call, deed if chance.random() < 0.6 else nothing)
            raise no_answer(gpu, call)
        if chance.random() < driver.failing:
            raise fault(gpu, call, chance.choice(ERRORS))
        is_early = chance.random() < 0.5
        if is_early:
            deed()
        await self._world.slow()
        if self._process.dead:
            raise asyncio.CancelledError
        if not is_early:
            deed()

    async def _hang(self, call: Call, at_last: Callable[[], None]) -> None:
        """Returns after ten seconds; the call ends later, and then it has done this."""
        self._hanging, self._at_last = call, at_last
        seconds = self._world.faults.choice(HANG_SECONDS)
        self._world.note("hangs", call, seconds)
        outside(lambda: self._driver.later(seconds, self._end))
        await self._world.clock.sleep(DEADLINE)

    def _end(self) -> None:
        """The hanging call ends, or the process does and with it the call."""
        if self._hanging is not None:
            self._hanging = None
            with suppress(PlaceTaken):  # somebody has made another one at its place meanwhile
                self._at_last()

    def _add(self, instance: Instance) -> None:
        if any(instance.placement.overlaps(each.placement) for each in self._driver.of(instance.gpu)):
            raise PlaceTaken(instance.gpu, instance.profile.name, instance.placement)
        self._world.note("instance", instance)
        self._driver.add(instance)

    def _set_compute(self, instance: Instance, has_compute: bool) -> None:
        if instance in self._driver.instances:
            instance.has_compute = has_compute
            self._driver.changed()

    def _remove(self, instance: Instance) -> None:
        if instance in self._driver.instances:
            self._world.note("no instance", instance)
            self._driver.remove(instance)


def fault(gpu: DeviceID, call: Call, error: str) -> DriverFault:
    return DriverFault(f"{gpu}: {call}: {error}", REMEDY)


def no_answer(gpu: DeviceID, call: Call) -> DriverFault:
    return DriverFault(f"{gpu}: NVML has not answered {call} within {DEADLINE:g} s", REMEDY)
