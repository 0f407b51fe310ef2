"""
Calls NVML and returns plain Python values. This is the only module that imports pynvml.

pynvml is imported when the library is opened, so that a machine does not need it. A value is None if the GPU or the
driver does not provide it or the user may not read it; any other error raises CallFailed. Every call is first reported
to `steps`, so that an error can name a call that hangs. Functions and codes: NVML as in nvidia-ml-py 13.615.71.
"""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_void_p, cast
from types import ModuleType
from typing import Any

from topoalign.core.model.errors import DriverFault, clean
from topoalign.runtime.driver_thread import CallProgress
from topoalign.runtime.nvml import INIT_WITHOUT_GPUS

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
"""Not a code of NVML: the value is not valid text."""

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
"""Codes which mean that the value is not available here, and that nothing has failed."""
OF_THE_LIBRARY = {UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH}
"""Codes that concern all GPUs."""


Handle = Any
"""A handle of pynvml: of a GPU, a MIG instance or an event set."""

MOST_NVLINKS = 36
"""NVML_NVLINK_MAX_LINKS: used if the driver does not report the number of links."""

NVLINK_COUNT = 91
REMAPPING_PENDING = 144
REMAPPING_FAILED = 145
RECOVERY_ACTION = 230
"""NVML_FI_DEV_…, for `fields`."""

_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The members of the union nvmlValue_t, by nvmlValueType_t."""


class CallFailed(Exception):
    """Raised for a call of NVML that failed."""

    def __init__(self, call: str, code: int, meaning: str) -> None:
        super().__init__(f"{call}: {clean(meaning, 200)}")
        self.code = code


class Library:
    """Access to NVML, which is kept open, because opening takes seconds if no other program keeps the driver loaded."""

    def __init__(self) -> None:
        self._pynvml: ModuleType | None = None
        self._steps: CallProgress | None = None

    def open(self, steps: CallProgress, anew: bool = False) -> bool:
        """
        Opens NVML if it is closed or `anew` is set; returns whether it was opened. `steps`: is called before each call
        of NVML from now on. Raises DriverFault without pynvml, and CallFailed.
        """
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

    def uuid(self, device: Handle) -> str:
        """The uuid of a GPU or MIG instance."""
        return str(self.ask("nvmlDeviceGetUUID", device))

    def fields(self, device: Handle, wanted: Sequence[int]) -> dict[int, int]:
        """Reads these fields; fields that the GPU does not have are omitted."""
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

    def mig_enabled(self, device: Handle) -> bool:
        """Whether MIG mode is on now."""
        modes = self.maybe("nvmlDeviceGetMigMode", device)
        return modes is not None and modes[0] == 1

    def mig_handles(self, device: Handle) -> dict[int, Handle]:
        """Handles of MIG instances by their index on the GPU, which may have gaps."""
        handles = {}
        for slot in range(self.number("nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            try:
                handles[slot] = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", device, slot)
            except CallFailed as error:
                if error.code not in {NOT_FOUND, *UNREPORTED}:
                    raise
        return handles

    def register(self, device: Handle, kinds: int, events: Handle) -> bool:
        """Adds a GPU's events of these kinds to a set. Returns False if the GPU does not report any."""
        try:
            self.ask("nvmlDeviceRegisterEvents", device, kinds, events)
        except CallFailed as error:
            if error.code in UNREPORTED:
                return False
            raise
        return True

    def wait(self, events: Handle, milliseconds: int) -> Any:
        """Returns the next nvmlEventData_t of a set; None if there is none within this time. Raises CallFailed."""
        try:
            return self.ask("nvmlEventSetWait_v2", events, milliseconds)
        except CallFailed as error:
            if error.code == TIMEOUT:
                return None
            raise

    def free(self, events: Handle) -> None:
        """Frees a set. Never fails, because NVML may no longer answer."""
        with suppress(CallFailed):
            self.ask("nvmlEventSetFree", events)

    def number(self, function: str, *arguments: object) -> int | None:
        """As `maybe`, for a number."""
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
    """Returns the address in a handle. It is equal for two handles of one device, but the handles are not."""
    return cast(device, c_void_p).value


def sysfs_address(info: Any) -> str | None:
    """The `00000000:1B:00.0` of an nvmlPciInfo_t in the form of sysfs, `0000:1b:00.0`. None: not reported."""
    bus_id = info.busId if info is not None else ""
    text = bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id
    domain, colon, rest = text.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}:{rest}" if colon else None
    except ValueError:
        return None
