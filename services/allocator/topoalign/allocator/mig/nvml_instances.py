"""
Creates and destroys MIG instances through NVML, which only privileged users can do.

Each call has a timeout and runs in a separate thread, so a driver that does not respond blocks only this thread.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from ctypes import Structure, byref, c_uint, c_void_p
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from topoalign.allocator.mig.instances import GpuInstance, InstanceInUse, PlaceTaken
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement
from topoalign.core.ports import Clock
from topoalign.runtime.driver_thread import CallProgress, DriverThread
from topoalign.runtime.nvml import Ask, open_nvml

PROFILES = 18
COMPUTE_PROFILES = 9
SHARED_ENGINES = 0
"""NVML_GPU_INSTANCE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_PROFILE_COUNT, NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED."""
MOST = 64
"""Maximum number of instances of one profile on a GPU."""
REMEDY = "see that the agent is root and has CAP_SYS_ADMIN, and read the driver's messages in the kernel log"
T = TypeVar("T")


class PlacementSlices(Structure):
    """nvmlGpuInstancePlacement_t."""

    _fields_ = (("start", c_uint), ("size", c_uint))


class NvmlInstances:
    """The `InstanceMaker` of real GPUs."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        """`deadline`: timeout of each NVML call, in seconds."""
        self._thread = DriverThread("NVML for MIG instances", clock, deadline)

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        """As `InstanceMaker.there`."""
        return await self._run(gpu, MigGpu.there)

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        """As `InstanceMaker.make`."""
        return await self._run(gpu, partial(MigGpu.make, profile=profile, placement=placement))

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        """As `InstanceMaker.destroy`."""
        await self._run(gpu, partial(MigGpu.destroy, instance=instance))

    async def _run(self, gpu: DeviceID, work: "Callable[[MigGpu], T]") -> T:
        def run(steps: CallProgress) -> T:
            with open_nvml(steps, gpu, REMEDY) as (pynvml, ask):
                return work(MigGpu(gpu, pynvml, ask))

        return await self._thread.run(run)


class MigGpu:
    """One GPU in MIG mode, while NVML is open."""

    def __init__(self, gpu: DeviceID, pynvml: ModuleType, ask: Ask) -> None:
        self._pynvml = pynvml
        self._ask = ask
        self.id = gpu
        self._device = self._ask("nvmlDeviceGetHandleByUUID", gpu)

    def there(self) -> tuple[GpuInstance, ...]:
        """All GPU instances."""
        uuids: dict[int, set[DeviceID]] = {}
        for handle in self._mig_handles():
            number = int(self._ask("nvmlDeviceGetGpuInstanceId", handle))
            uuids.setdefault(number, set()).add(DeviceID(str(self._ask("nvmlDeviceGetUUID", handle))))
        found = {}
        for profile in self._profiles():
            for handle in self._instances("nvmlDeviceGetGpuInstances", self._device, profile.id):
                info = self._ask("nvmlGpuInstanceGetInfo", handle)
                place = MigPlacement(start=int(info.placement.start), size=int(info.placement.size))
                of = frozenset(uuids.get(int(info.id), ()))
                found[int(info.id)] = GpuInstance(int(info.id), strip_profile_prefix(profile), place, of)
        return tuple(found.values())

    def make(self, profile: str, placement: MigPlacement) -> MigDevice:
        """As `NvmlInstances.make`: both instances, or neither."""
        kind = next((each for each in self._profiles() if strip_profile_prefix(each) == profile), None)
        if kind is None:
            raise DriverFault(
                f"{self.id} has no MIG profile {profile} any more", "see whether its MIG mode was changed"
            )
        slices = PlacementSlices(placement.start, placement.size)
        try:
            handle = self._ask("nvmlDeviceCreateGpuInstanceWithPlacement", self._device, kind.id, byref(slices))
        except self._pynvml.NVMLError_InsufficientResources as error:
            raise PlaceTaken(self.id, profile, placement) from error
        try:
            compute = [each for each in self._compute_profiles(handle) if each.sliceCount == kind.sliceCount]
            if not compute:
                raise self._pynvml.NVMLError(self._pynvml.NVML_ERROR_NOT_SUPPORTED)
            self._ask("nvmlGpuInstanceCreateComputeInstance", handle, compute[0].id)
            return self._mig_device(int(self._ask("nvmlGpuInstanceGetInfo", handle).id), profile, placement)
        except self._pynvml.NVMLError:
            with suppress(self._pynvml.NVMLError):
                self._clear(handle)
            raise

    def destroy(self, instance: int) -> None:
        """As `NvmlInstances.destroy`."""
        try:
            handle = self._ask("nvmlDeviceGetGpuInstanceById", self._device, instance)
        except self._pynvml.NVMLError_NotFound:
            return
        try:
            self._clear(handle)
        except self._pynvml.NVMLError_InUse as error:
            finding = f"{self.id}: processes use GPU instance {instance}"
            raise InstanceInUse(finding, "see which with nvidia-smi; it is destroyed when they have ended") from error

    def _clear(self, handle: Any) -> None:
        for profile in self._compute_profiles(handle):
            for compute in self._instances("nvmlGpuInstanceGetComputeInstances", handle, profile.id):
                self._ask("nvmlComputeInstanceDestroy", compute)
        self._ask("nvmlGpuInstanceDestroy", handle)

    def _mig_device(self, number: int, profile: str, placement: MigPlacement) -> MigDevice:
        for index, handle in enumerate(self._mig_handles()):
            if int(self._ask("nvmlDeviceGetGpuInstanceId", handle)) == number:
                return MigDevice(
                    uuid=DeviceID(str(self._ask("nvmlDeviceGetUUID", handle))),
                    profile=profile,
                    gpu_instance=number,
                    compute_instance=int(self._ask("nvmlDeviceGetComputeInstanceId", handle)),
                    memory=int(self._ask("nvmlDeviceGetAttributes", handle).memorySizeMB) << 20,
                    index=index,
                    placement=placement,
                )
        raise self._pynvml.NVMLError(self._pynvml.NVML_ERROR_NOT_FOUND)

    def _mig_handles(self) -> Iterator[Any]:
        for index in range(int(self._ask("nvmlDeviceGetMaxMigDeviceCount", self._device))):
            with suppress(self._pynvml.NVMLError_NotFound):
                yield self._ask("nvmlDeviceGetMigDeviceHandleByIndex", self._device, index)

    def _profiles(self) -> Iterator[Any]:
        for kind in range(PROFILES):
            with suppress(self._pynvml.NVMLError_NotSupported, self._pynvml.NVMLError_InvalidArgument):
                yield self._ask("nvmlDeviceGetGpuInstanceProfileInfo", self._device, kind)

    def _compute_profiles(self, handle: Any) -> Iterator[Any]:
        for kind in range(COMPUTE_PROFILES):
            with suppress(self._pynvml.NVMLError_NotSupported, self._pynvml.NVMLError_InvalidArgument):
                yield self._ask("nvmlGpuInstanceGetComputeInstanceProfileInfo", handle, kind, SHARED_ENGINES)

    def _instances(self, call: str, of: Any, profile: int) -> Iterator[Any]:
        handles = (c_void_p * MOST)()
        count = c_uint(MOST)
        self._ask(call, of, profile, handles, byref(count))
        return (c_void_p(handle) for handle in handles[: count.value])


def strip_profile_prefix(profile: Any) -> str:
    """Returns the name of a profile as NVIDIA prints it: NVML's `MIG 1g.10gb` is `1g.10gb`."""
    return "".join(str(profile.name).split()[-1:])
