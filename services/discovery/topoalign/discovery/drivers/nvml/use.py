"""
Reads the use of GPUs and of their MIG instances from NVML: memory, time, processes.

NVML has lists of processes that compute, draw, or compute through an MPS server. A process may be in several, with the same
memory in each. On a GPU with MIG instances each instance has lists of its own, and the time of a process is not reported.

Utilisation of processes is sampled by the driver; a process without a sample of the last second ran no kernel in it. Some
drivers have samples above 100 %, which mean nothing (vcuda-controller drops them as well).
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
"""Of the lists, the newest first: drivers before R510 have the second only."""
SAMPLE_SECONDS = 1.0
"""Age of the oldest samples of utilisation that count, as with gpu-manager."""
NO_SAMPLES = {0, NOT_FOUND}
"""Codes of an answer without any: pynvml raises the first, success, as well."""


def read_gpu_use(nvml: Library, device: Handle, uuid: DeviceID, now: float) -> tuple[DeviceUse, ...]:
    """Reads the use of a GPU and of its MIG instances; `now`: wall seconds. Raises CallFailed if all of NVML fails."""
    try:
        if not nvml.mig_enabled(device):
            return (device_use(nvml, device, uuid, utilization_by_pid(nvml, device, now)),)
        gpu = device_use(nvml, device, uuid, None, has_processes=False)
        return (
            gpu,
            *(
                use
                for _, instance in sorted(nvml.mig_handles(device).items())
                for use in read_instance_use(nvml, instance)
            ),
        )
    except CallFailed as error:
        if error.code in OF_THE_LIBRARY:
            raise
        return (DeviceUse(device=uuid, failure=clean(str(error), 200)),)


def read_instance_use(nvml: Library, instance: Handle) -> tuple[DeviceUse, ...]:
    """Reads the use of a MIG instance; empty if it has been destroyed meanwhile. Raises CallFailed."""
    try:
        return (device_use(nvml, instance, DeviceID(nvml.uuid(instance)), None),)
    except CallFailed as error:
        if error.code != NOT_FOUND:
            raise
        return ()


def device_use(
    nvml: Library, device: Handle, uuid: DeviceID, utilization: dict[int, int] | None, *, has_processes: bool = True
) -> DeviceUse:
    """Reads the use of one device. `utilization`: pid -> percent, None if not reported. Raises CallFailed."""
    memory = nvml.maybe("nvmlDeviceGetMemoryInfo", device)
    rates = nvml.maybe("nvmlDeviceGetUtilizationRates", device)
    return DeviceUse(
        device=uuid,
        memory=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        utilization=None if rates is None else int(rates.gpu),
        memory_utilization=None if rates is None else int(rates.memory),
        processes=processes(nvml, device, utilization) if has_processes else (),
    )


def processes(nvml: Library, device: Handle, utilization: dict[int, int] | None) -> tuple[GpuProcess, ...] | None:
    """The processes in any of the lists, ascending by pid; None where there is no list. Raises CallFailed."""
    kinds: defaultdict[int, list[ProcessKind]] = defaultdict(list)
    memory: dict[int, int | None] = {}
    lists = {kind: list_processes(nvml, name, device) for kind, name in LISTS.items()}
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


def list_processes(nvml: Library, name: str, device: Handle) -> Any:
    """One list of processes, in the newest version that the driver has; None for none. Raises CallFailed."""
    for version in VERSIONS:
        found = nvml.maybe(name + version, device)
        if found is not None:
            return found
    return None


def utilization_by_pid(nvml: Library, device: Handle, now: float) -> dict[int, int] | None:
    """Reads pid -> percent, the mean of the samples of the last second; None if not reported. Raises CallFailed."""
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
