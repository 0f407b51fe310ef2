"""
Opens NVML for one task, and closes it after that (NVML as in nvidia-ml-py 13.615.71).

It is for rare tasks: setting the compute mode that MPS needs, and creating MIG instances. Discovery keeps NVML open and
has its own reader, because it reads every few seconds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from topoalign.core.model.errors import DriverFault, clean
from topoalign.runtime.driver_thread import CallProgress

INIT_WITHOUT_GPUS = 1
"""NVML_INIT_FLAG_NO_GPUS: NVML also opens on a node with a lost GPU."""

Ask = Callable[..., Any]
"""Calls the function of NVML with this name. Raises NVMLError."""


@contextmanager
def open_nvml(steps: CallProgress, what: str, remedy: str) -> Iterator[tuple[ModuleType, Ask]]:
    """
    Opens NVML for the block; yields pynvml and a function that calls it. Raises DriverFault about `what`; if NVML fails
    in the block, it names the call.
    """
    steps("import pynvml")
    try:
        import pynvml  # only if such a task comes
    except ImportError as error:
        raise DriverFault("the Python module pynvml is not installed", "install nvidia-ml-py") from error

    def ask(function: str, *arguments: object) -> Any:
        steps(function)
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError as error:
            error.add_note(function)
            raise

    try:
        ask("nvmlInitWithFlags", INIT_WITHOUT_GPUS)
        try:
            yield pynvml, ask
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        call = getattr(error, "__notes__", steps.current)[0]
        raise DriverFault(f"{what}: {call}: {clean(str(error), 200)}", remedy) from error
