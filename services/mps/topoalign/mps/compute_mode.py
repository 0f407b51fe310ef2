"""
Reads the GPUs of the node and sets their compute mode through NVML.

Each call has a time limit and runs in a daemon thread. A driver that does not answer is reported, and does not prevent
this process from ending.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.model import Gpu
from topoalign.core.ports import Clock
from topoalign.mps.daemon_shares import MpsGpu
from topoalign.runtime.driver_thread import CallProgress, DriverThread
from topoalign.runtime.nvml import Ask, open_nvml

DEFAULT = 0
EXCLUSIVE_PROCESS = 3
"""nvmlComputeMode_t."""
REMEDY = "see that NVIDIA's driver is loaded, and that this process is root and has the devices"
CALL_SECONDS = 10.0


class Nvml:
    """NVML of the node, for one task at a time."""

    def __init__(self, clock: Clock) -> None:
        self._thread = DriverThread("NVML", clock, CALL_SECONDS)

    async def read_gpus(self) -> tuple[MpsGpu, ...]:
        """Returns the GPUs that are not lost, in NVML's order. Raises DriverFault."""
        return await self._thread.run(read_present_gpus)

    async def set_compute_mode(self, devices: Collection[DeviceID], mode: int) -> None:
        """Sets the compute mode of those GPUs that exist. Raises DriverFault, for example without permission."""
        await self._thread.run(partial(set_mode_now, devices, mode))


def read_present_gpus(steps: CallProgress) -> tuple[MpsGpu, ...]:
    """Reads, in the thread, the GPUs that are not lost."""
    found = []
    with open_nvml(steps, "NVML", REMEDY) as (pynvml, ask):
        for index, handle in handles(pynvml, ask):
            memory = None
            mig = None
            with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                memory = int(ask("nvmlDeviceGetMemoryInfo", handle).total)
            with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
                mig = () if ask("nvmlDeviceGetMigMode", handle)[0] == 1 else None
            major, minor = ask("nvmlDeviceGetCudaComputeCapability", handle)
            uuid = DeviceID(ask("nvmlDeviceGetUUID", handle))
            name = clean(ask("nvmlDeviceGetName", handle))
            gpu = Gpu(id=uuid, index=index, name=name, mig=mig, memory=memory)
            found.append(MpsGpu(gpu=gpu, capability=(int(major), int(minor))))
    return tuple(found)


def set_mode_now(devices: Collection[DeviceID], mode: int, steps: CallProgress) -> None:
    """Sets, in the thread, the compute mode of those GPUs that exist."""
    with open_nvml(steps, "NVML", REMEDY) as (pynvml, ask):
        for _, handle in handles(pynvml, ask):
            if ask("nvmlDeviceGetUUID", handle) in devices:
                ask("nvmlDeviceSetComputeMode", handle, mode)


def handles(pynvml: ModuleType, ask: Ask) -> Iterator[tuple[int, Any]]:
    """Index and handle of each GPU that is not lost."""
    for index in range(ask("nvmlDeviceGetCount")):
        with suppress(pynvml.NVMLError_GpuIsLost):
            yield index, ask("nvmlDeviceGetHandleByIndex", index)
