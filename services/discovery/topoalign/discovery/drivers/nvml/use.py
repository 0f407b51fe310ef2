"""
Reads the use of GPUs and of their MIG instances from NVML: memory, time, processes.

NVML has separate lists of compute processes, graphics processes, and compute processes of an MPS server. A process may
be in several lists, with the same memory in each. On a GPU with MIG instances, each instance has its own lists, and the
utilisation of processes is not reported.

The driver samples the utilisation of processes. A process without a sample in the last second ran no kernel in that
second. Some drivers report samples above 100 %, which are invalid and ignored (as by vcuda-controller).
"""

from collections import defaultdict
from typing import Any, Final

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.processes import DeviceUse, GpuProcess, ProcessKind
from topoalign.discovery.drivers.nvml.nvml_library import (
    NOT_FOUND,
    OF_THE_LIBRARY,
    UNREPORTED,
    CallFailed,
    Handle,
    Library,
)

LISTS: Final[dict[ProcessKind, str]] = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}
VERSIONS = ("_v3", "_v2")
"""Versions of the functions in `LISTS`, the newest first: drivers before R510 have only the second."""
SAMPLE_SECONDS = 1.0
"""Maximum age of the samples of utilisation that count, as in gpu-manager."""
NO_SAMPLES = {0, NOT_FOUND}
"""Codes if there are no samples. pynvml raises an error even for the first code, which means success."""


def read_gpu_use(nvml: Library, device: Handle, uuid: DeviceID, now: float) -> tuple[DeviceUse, ...]:
    """Reads the use of a GPU and of its MIG instances; `now`: Unix time. Raises CallFailed if all of NVML fails."""
    try:
        if not nvml.mig_enabled(device):
            return (_device_use(nvml, device, uuid, _utilization_by_pid(nvml, device, now)),)
        found = [_device_use(nvml, device, uuid, None, has_processes=False)]
        for _, instance in sorted(nvml.mig_handles(device).items()):
            try:
                found.append(_device_use(nvml, instance, DeviceID(nvml.uuid(instance)), None))
            except CallFailed as error:
                if error.code != NOT_FOUND:  # otherwise, the instance has been destroyed meanwhile
                    raise
        return tuple(found)
    except CallFailed as error:
        if error.code in OF_THE_LIBRARY:
            raise
        return (DeviceUse(device=uuid, failure=clean(str(error), 200)),)


def _device_use(
    nvml: Library, device: Handle, uuid: DeviceID, utilization: dict[int, int] | None, *, has_processes: bool = True
) -> DeviceUse:
    # `utilization`: pid -> percent, None if not reported
    memory = nvml.maybe("nvmlDeviceGetMemoryInfo", device)
    rates = nvml.maybe("nvmlDeviceGetUtilizationRates", device)
    return DeviceUse(
        device=uuid,
        memory=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        utilization=None if rates is None else int(rates.gpu),
        memory_utilization=None if rates is None else int(rates.memory),
        processes=_list_processes(nvml, device, utilization) if has_processes else (),
    )


def _list_processes(nvml: Library, device: Handle, utilization: dict[int, int] | None) -> tuple[GpuProcess, ...] | None:
    # the processes in any of the lists, by ascending pid; None if there is no list of compute processes
    kinds: defaultdict[int, list[ProcessKind]] = defaultdict(list)
    memory: dict[int, int | None] = {}
    lists: dict[ProcessKind, Any] = {}
    for kind, name in LISTS.items():  # in the newest version that the driver has
        listings = (nvml.maybe(name + version, device) for version in VERSIONS)
        lists[kind] = next((listing for listing in listings if listing is not None), None)
    if lists["compute"] is None:
        return None
    for kind, listing in lists.items():
        for process in listing or ():
            pid = int(process.pid)
            kinds[pid].append(kind)
            memory[pid] = max(memory.get(pid), process.usedGpuMemory, key=lambda size: -1 if size is None else size)
    return tuple(
        GpuProcess(
            pid=pid,
            kinds=tuple(dict.fromkeys(kinds[pid])),
            memory=memory[pid],
            utilization=None if utilization is None else utilization.get(pid, 0),
        )
        for pid in sorted(kinds)
    )


def _utilization_by_pid(nvml: Library, device: Handle, now: float) -> dict[int, int] | None:
    # pid -> the mean of the samples of the last second; None if not reported
    try:
        samples = nvml.ask("nvmlDeviceGetProcessUtilization", device, int((now - SAMPLE_SECONDS) * 1e6))
    except CallFailed as error:
        if error.code in NO_SAMPLES:
            return {}
        if error.code in UNREPORTED:
            return None
        raise
    by_pid: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples:
        if sample.smUtil <= 100:
            by_pid[int(sample.pid)].append(int(sample.smUtil))
    return {pid: round(sum(percents) / len(percents)) for pid, percents in by_pid.items()}
