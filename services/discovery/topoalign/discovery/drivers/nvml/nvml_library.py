"""
Calls NVML and returns plain Python values. This is the only module that imports pynvml.

pynvml is imported when the library is opened, so that a machine without it works. A value that this GPU, this driver or
this user's rights do not provide is None; any other error raises CallFailed. Every call is reported to `steps` first,
so that a call that hangs can be named. Functions and codes: NVML as in nvidia-ml-py 13.615.71.
"""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_void_p, cast
from types import ModuleType
from typing import Any, NamedTuple

from topoalign.core.model.errors import DriverFault, clean
from topoalign.core.model.topology.device_links import NVML_LEVEL, PcieClass
from topoalign.runtime.driver_thread import CallProgress

# Return codes of NVML calls (nvmlReturn_t, as in nvidia-ml-py 13.615.71), and whether a code concerns one GPU or all.


UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
NO_DATA = 21
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

NO_TEXT = -1
"""Not a code of NVML: the value is no text."""

UNREPORTED = {
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    NO_PERMISSION,
    INSUFFICIENT_SIZE,
    FUNCTION_NOT_FOUND,
    NO_DATA,
    ARGUMENT_VERSION_MISMATCH,
    DEPRECATED,
    NO_TEXT,
}
"""Codes that mean: this value is not available here, and nothing has failed."""
OF_THE_LIBRARY = {UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH}
"""Codes that concern all GPUs."""


Handle = Any
"""A device, as pynvml hands it out."""

INIT_WITHOUT_GPUS = 1
"""NVML_INIT_FLAG_NO_GPUS: NVML opens also on a node whose only GPU is lost."""
NEAREST_NODE = 0
"""NVML_AFFINITY_SCOPE_NODE."""
MOST_NVLINKS = 36
"""NVML_NVLINK_MAX_LINKS: used if the driver does not report the number of links."""

NVLINK_COUNT = 91
REMAPPING_PENDING = 144
REMAPPING_FAILED = 145
RECOVERY_ACTION = 230
"""NVML_FI_DEV_…, for `fields`."""

WHOLE_GPU = 0xFFFFFFFF
"""In place of the ids of a MIG instance."""
_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of the union nvmlValue_t, by nvmlValueType_t."""


class CallFailed(Exception):
    """Raised for a call of NVML that failed."""

    def __init__(self, call: str, code: int, meaning: str) -> None:
        super().__init__(f"{call}: {clean(meaning, 200)}")
        self.code = code


class MigInstance(NamedTuple):
    """The size of a MIG instance as NVML reports it."""

    name: str
    gpu_slices: int
    compute_slices: int
    memory: int
    """Bytes."""


class NvmlEvent(NamedTuple):
    """An event of an event set."""

    device: Handle
    kind: int
    """One bit of those asked for."""
    data: int
    """Of an XID event the XID, 999 if it is not known."""
    gpu_instance: int | None
    compute_instance: int | None


class Library:
    """One opening of NVML. It is kept open, because opening costs seconds where no other program keeps the driver loaded."""

    def __init__(self) -> None:
        self._pynvml: ModuleType | None = None
        self._steps: CallProgress | None = None

    def open(self, steps: CallProgress, anew: bool = False) -> bool:
        """Begins a reading. Returns whether NVML was opened for it. Raises DriverFault without pynvml, and CallFailed."""
        self._steps = steps
        if anew:
            self.close()
        if self._pynvml is not None:
            return False
        steps("import pynvml")
        try:
            import pynvml
        except ImportError as error:
            raise DriverFault("the Python module pynvml is not installed", "install nvidia-ml-py") from error
        self._call(pynvml, "nvmlInitWithFlags", INIT_WITHOUT_GPUS)
        self._pynvml = pynvml
        return True

    def close(self) -> None:
        """Closes NVML, so that the next opening sees what has changed. Never fails, because NVML may no longer answer."""
        pynvml = self._pynvml
        self._pynvml = None
        if pynvml is not None:
            with suppress(CallFailed):
                self._call(pynvml, "nvmlShutdown")

    def count(self) -> int:
        """The number of GPUs."""
        return int(self.ask("nvmlDeviceGetCount"))

    def handle(self, index: int) -> Handle:
        """The handle of the GPU with this NVML index."""
        return self.ask("nvmlDeviceGetHandleByIndex", index)

    def uuid(self, device: Handle) -> str:
        """The uuid of a GPU or MIG instance."""
        return str(self.ask("nvmlDeviceGetUUID", device))

    def name(self, device: Handle) -> str:
        """The product name; "" if it is not reported."""
        return clean(self.maybe("nvmlDeviceGetName", device) or "")

    def minor(self, device: Handle) -> int | None:
        """The number in /dev/nvidia<minor>."""
        return self._number("nvmlDeviceGetMinorNumber", device)

    def pci(self, device: Handle) -> str | None:
        """As sysfs writes addresses."""
        info = self.maybe("nvmlDeviceGetPciInfo", device)
        return None if info is None else sysfs_address(info.busId)

    def memory(self, device: Handle) -> int | None:
        """Bytes."""
        info = self.maybe("nvmlDeviceGetMemoryInfo", device)
        return None if info is None else int(info.total)

    def cpu_affinity(self, device: Handle, largest: int) -> tuple[int, ...]:
        """The nearest CPUs up to this id; empty if not reported."""
        return ids_in(self.maybe("nvmlDeviceGetCpuAffinity", device, largest // 64 + 1))

    def memory_affinity(self, device: Handle, largest: int) -> tuple[int, ...]:
        """The nearest NUMA nodes up to this id; empty if not reported."""
        return ids_in(self.maybe("nvmlDeviceGetMemoryAffinity", device, largest // 64 + 1, NEAREST_NODE))

    def memory_node(self, device: Handle) -> int | None:
        """The NUMA node that the GPU's own memory is, on coherent platforms."""
        return self._number("nvmlDeviceGetNumaNodeId", device)

    def fields(self, device: Handle, wanted: Sequence[int]) -> dict[int, int]:
        """Reads these fields; those that the GPU does not have are left out."""
        values = self.maybe("nvmlDeviceGetFieldValues", device, list(wanted))
        found = {}
        for value in values or ():
            if value.nvmlReturn == GPU_IS_LOST:
                raise CallFailed("nvmlDeviceGetFieldValues", GPU_IS_LOST, "GPU is lost")
            if value.nvmlReturn == 0 and value.valueType < len(_MEMBERS):
                found[int(value.fieldId)] = int(getattr(value.value, _MEMBERS[value.valueType]))
        return found

    def fabric(self, device: Handle) -> Any:
        """nvmlGpuFabricInfo_v2_t; with older drivers nvmlGpuFabricInfo_t, which has no healthMask; None without either."""
        assert self._pynvml is not None
        info = self._pynvml.c_nvmlGpuFabricInfoV_t()
        if self.maybe("nvmlDeviceGetGpuFabricInfoV", device, byref(info)) is None:
            info = self._pynvml.c_nvmlGpuFabricInfo_t()
            if self.maybe("nvmlDeviceGetGpuFabricInfo", device, byref(info)) is None:
                return None
        return info

    def level(self, a: Handle, b: Handle) -> PcieClass | None:
        """The PCIe class of a pair of GPUs."""
        return NVML_LEVEL.get(self.maybe("nvmlDeviceGetTopologyCommonAncestor", a, b))

    def nvlink_enabled(self, device: Handle, link: int) -> bool | None:
        """Whether a link is enabled; None where the GPU has no such link."""
        state = self._number("nvmlDeviceGetNvLinkState", device, link)
        return None if state is None else state == 1

    def nvlink_remote(self, device: Handle, link: int) -> str | None:
        """PCI address at the other end."""
        info = self.maybe("nvmlDeviceGetNvLinkRemotePciInfo", device, link)
        return None if info is None else sysfs_address(info.busId)

    def nvlink_remote_kind(self, device: Handle, link: int) -> int | None:
        """nvmlIntNvLinkDeviceType_t: 0 GPU, 1 NPU, 2 switch, 255 unknown."""
        return self._number("nvmlDeviceGetNvLinkRemoteDeviceType", device, link)

    def mig_enabled(self, device: Handle) -> bool:
        """Whether MIG mode is on now."""
        modes = self.maybe("nvmlDeviceGetMigMode", device)
        return modes is not None and modes[0] == 1

    def mig_handles(self, device: Handle) -> dict[int, Handle]:
        """Handles of MIG instances by their index on the GPU, which may have gaps."""
        handles = {}
        for slot in range(self._number("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            try:
                handles[slot] = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot)
            except CallFailed as error:
                if error.code not in {NOT_FOUND, *UNREPORTED}:
                    raise
        return handles

    def mig_ids(self, instance: Handle) -> tuple[int, int]:
        """Of the GPU instance and the compute instance."""
        gpu = "nvmlDeviceGetGpuInstanceId"
        compute = "nvmlDeviceGetComputeInstanceId"
        return int(self.ask(gpu, instance)), int(self.ask(compute, instance))

    def mig_size(self, instance: Handle) -> MigInstance:
        """The slices and the memory, in bytes, of a MIG instance."""
        size = self.ask("nvmlDeviceGetAttributes", instance)
        return MigInstance(
            name=self.name(instance),
            gpu_slices=int(size.gpuInstanceSliceCount),
            compute_slices=int(size.computeInstanceSliceCount),
            memory=int(size.memorySizeMB) << 20,
        )

    def event_kinds(self, device: Handle) -> int:
        """The kinds of events that a GPU can report, as bits; 0 where it reports none."""
        return self._number("nvmlDeviceGetSupportedEventTypes", device) or 0

    def event_set(self) -> Handle | None:
        """A new set to wait on; None where the driver has no events."""
        return self.maybe("nvmlEventSetCreate")

    def register(self, device: Handle, kinds: int, events: Handle) -> bool:
        """Adds a GPU's events of these kinds to a set. Returns False if the GPU does not report any."""
        try:
            self.ask("nvmlDeviceRegisterEvents", device, kinds, events)
        except CallFailed as error:
            if error.code in UNREPORTED:
                return False
            raise
        return True

    def wait(self, events: Handle, milliseconds: int) -> NvmlEvent | None:
        """The next event of a set, None if there is none for so long. Raises CallFailed."""
        try:
            data = self.ask("nvmlEventSetWait_v2", events, milliseconds)
        except CallFailed as error:
            if error.code == TIMEOUT:
                return None
            raise
        gpu, compute = (None if i == WHOLE_GPU else int(i) for i in (data.gpuInstanceId, data.computeInstanceId))
        return NvmlEvent(data.device, int(data.eventType), int(data.eventData), gpu, compute)

    def free(self, events: Handle) -> None:
        """Frees a set. Never fails, because NVML may no longer answer."""
        with suppress(CallFailed):
            self.ask("nvmlEventSetFree", events)

    def _number(self, function: str, *arguments: object) -> int | None:
        value = self.maybe(function, *arguments)
        return None if value is None else int(value)

    def maybe(self, function: str, *arguments: object) -> Any:
        """Calls NVML. Returns None if the value is not available here. Raises CallFailed for an error."""
        try:
            return self.ask(function, *arguments)
        except CallFailed as error:
            if error.code in UNREPORTED:
                return None
            raise

    def ask(self, function: str, *arguments: object) -> Any:
        """Calls NVML. Raises CallFailed."""
        if self._pynvml is None:
            raise CallFailed(function, UNINITIALIZED, "NVML is not open")
        return self._call(self._pynvml, function, *arguments)

    def _call(self, pynvml: ModuleType, function: str, *arguments: object) -> Any:
        assert self._steps is not None, "`open` comes first"
        self._steps(function)
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            raise CallFailed(function, error.value, str(error)) from error
        except UnicodeDecodeError as error:
            raise CallFailed(function, NO_TEXT, "the answer is no text") from error


def address_of(device: Handle) -> int | None:
    """Returns the address in a handle. Only this is equal for two handles of one device."""
    return cast(device, c_void_p).value


def sysfs_address(bus_id: bytes | str) -> str | None:
    """Converts `00000000:1B:00.0` to the form of sysfs, `0000:1b:00.0`. None if it is no address."""
    text = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id
    domain, colon, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}" if colon else None
    except ValueError:
        return None


def ids_in(words: Sequence[int] | None) -> tuple[int, ...]:
    """The bits that are set in a mask of 64-bit words, the lowest word first."""
    return tuple(64 * i + bit for i, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)
