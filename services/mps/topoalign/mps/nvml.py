"""
The GPUs of the node and their compute mode, by NVML.

NVML is opened for each task and closed after it: this process asks it when a daemon starts or ends, and never between.
Functions: NVML as in nvidia-ml-py 13.615.71.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from anyio import to_thread

from topoalign.core.model.errors import DriverFault, clean
from topoalign.core.model.ids import DeviceID
from topoalign.mps.shares import Card

DEFAULT, EXCLUSIVE_PROCESS = 0, 3
"""nvmlComputeMode_t."""
INIT_WITHOUT_GPUS = 1
"""NVML_INIT_FLAG_NO_GPUS: a node with a GPU that is gone can still be asked for the others."""
T = TypeVar("T")


async def read_cards() -> tuple[Card, ...]:
    """The GPUs that answer, in NVML's order. Raises DriverFault."""
    return await in_thread(cards_now)


async def set_compute_mode(devices: Collection[DeviceID], mode: int) -> None:
    """Sets the compute mode of GPUs that exist. Raises DriverFault, also where this process may not."""
    await in_thread(partial(set_mode_now, devices, mode))


async def in_thread(work: Callable[[], T]) -> T:
    """Runs what calls the driver in a thread, which a cancelled caller does not wait for: the driver may hang."""
    return await to_thread.run_sync(work, abandon_on_cancel=True)


def cards_now() -> tuple[Card, ...]:
    """As `read_cards`."""
    with opened() as pynvml:
        return tuple(card_of(pynvml, index, handle) for index, handle in handles(pynvml))


def set_mode_now(devices: Collection[DeviceID], mode: int) -> None:
    """As `set_compute_mode`."""
    with opened() as pynvml:
        for _, handle in handles(pynvml):
            if pynvml.nvmlDeviceGetUUID(handle) in devices:
                pynvml.nvmlDeviceSetComputeMode(handle, mode)


@contextmanager
def opened() -> Iterator[ModuleType]:
    """NVML, open in the block. Raises DriverFault, also for an error of NVML's in the block."""
    try:
        import pynvml  # not where nothing is shared by MPS
    except ImportError as error:
        raise DriverFault("the Python module pynvml is not installed", "install nvidia-ml-py") from error
    try:
        pynvml.nvmlInitWithFlags(INIT_WITHOUT_GPUS)
        try:
            yield pynvml
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        remedy = "see that NVIDIA's driver is loaded, and that this process is root and has the devices"
        raise DriverFault(f"NVML: {clean(str(error), 200)}", remedy) from error


def handles(pynvml: ModuleType) -> Iterator[tuple[int, Any]]:
    """Index and handle of each GPU that is not lost."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        with suppress(pynvml.NVMLError_GpuIsLost):
            yield index, pynvml.nvmlDeviceGetHandleByIndex(index)


def card_of(pynvml: ModuleType, index: int, handle: Any) -> Card:
    """One GPU."""
    memory, in_mig_mode = None, False
    with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        in_mig_mode = pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Card(
        id=DeviceID(pynvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=clean(pynvml.nvmlDeviceGetName(handle)),
        memory=memory,
        in_mig_mode=in_mig_mode,
        capability=(int(major), int(minor)),
    )
