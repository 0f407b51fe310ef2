"""
Receives events of NVML between two readings: XIDs, memory errors, changes of MIG instances.

Waiting for NVML's events blocks, so it is done in a separate thread, one second at a time, with a deadline for each
call. Each GPU is registered separately, and its MIG instances with it. A GPU that cannot be registered does not affect
the others: the registration is retried later, and until then the health of the GPU is unknown. The health of a GPU that
does not support events depends only on the readings.

After a failed wait, all GPUs are registered again: at once the first time, then at growing intervals. While waits fail
repeatedly, the health of all GPUs is unknown. If the error is that a GPU is lost, the readings show which one, and the
health of the others stays known. A call that hangs blocks only this thread, and no second thread starts before it ends.

A process that has NVML open does not see GPUs that come back or are added. So everything that uses NVML in the process
must close it from time to time. `let_go` closes it here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import anyio
import structlog

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock, HardwareEvent, Listener, Occurrence
from topoalign.discovery.drivers.nvml.nvml_library import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    OF_THE_LIBRARY,
    CallFailed,
    Handle,
    Library,
    address_of,
)
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.driver_thread import CallProgress, DriverThread

KINDS: Final = {
    0x0001: Occurrence.SINGLE_BIT_ECC,
    0x0002: Occurrence.DOUBLE_BIT_ECC,
    0x0008: Occurrence.XID,
    0x0100: Occurrence.CHANGED,  # MIG instances were created or destroyed
    0x4000: Occurrence.UNAVAILABLE,
    0x8000: Occurrence.CHANGED,  # the recovery action that the driver requests has changed
}
"""nvmlEventType…, as bits."""

WHOLE_GPU = 0xFFFFFFFF
"""The value of the instance ids in an event of the whole GPU."""

NO_EVENTS = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
"""Error codes of a wait which mean that the driver does not report events to this process."""

WAIT_SECONDS = 1.0
"""The longest duration of one wait. An event ends the wait at once, but closing NVML may have to wait for it."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""The first and the longest pause in seconds between attempts while waits fail; doubled each time."""
WAITS_BETWEEN_TRIES = 30
"""Number of waits before the registration of GPUs that could not be registered is retried."""
MOST_WAITING = 1024
"""Maximum number of events that are read from a set before it is freed, in case a GPU reports events endlessly."""

REMEDY = "run nvidia-smi on the node, and look for driver errors in its kernel log"

Deliver = Callable[[HardwareEvent | None, frozenset[DeviceID]], object]
"""Called after each wait, in order, with the event, if there was one, and the GPUs that could not be registered."""

log = structlog.get_logger("topoalign.discovery")


class NvmlEvents:
    """Receives events of the GPUs that the readings find."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds and holds for each call, in addition to the time that the call waits."""
        self._clock = clock
        self._thread = DriverThread("NVML, waiting for events,", clock, WAIT_SECONDS + deadline)
        self._gpus: frozenset[DeviceID] | None = None
        """The GPUs to register; None: close NVML. Written by the event loop, read by the thread."""
        self._changed = anyio.Event()
        self._closed = anyio.Event()
        self._closed.set()
        self._event_sets = EventSets()
        self._failures = 0
        """Failed waits in a row."""
        self._lost: frozenset[DeviceID] | None = None
        """GPUs whose events cannot be received, as reported to the listener; None: all can be received."""

    def listen_to(self, gpus: frozenset[DeviceID]) -> None:
        """Registers these GPUs instead of the previous ones."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._changed.set()

    async def let_go(self) -> None:
        """Closes NVML until `listen_to` is called again. Returns when it is closed, or when the call hangs."""
        self._gpus = None
        await self._closed.wait()

    async def run(self, listener: Listener) -> None:
        """Runs until cancelled."""
        loop = asyncio.get_running_loop()

        def deliver(event: HardwareEvent | None, silent: frozenset[DeviceID]) -> None:
            loop.call_soon_threadsafe(self._observe, listener, event, silent)

        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            while (gpus := self._gpus) is not None:
                self._closed = anyio.Event()
                try:
                    await self._thread.run(partial(self._listen, deliver))
                    if self._gpus is not None:  # none of the GPUs supports events, so none is missed
                        self._observe(listener, None, frozenset())
                    break
                except (DriverFault, CallFailed) as fault:
                    self._report_failure(listener, fault, self._gpus or gpus)
                finally:
                    self._closed.set()
                if self._failures > 1:
                    await self._clock.sleep(backoff_seconds(self._failures - 1, FIRST_PAUSE, LONGEST_PAUSE))

    def _observe(self, listener: Listener, event: HardwareEvent | None, silent: frozenset[DeviceID]) -> None:
        self._failures = 0
        if (silent or None) != self._lost:
            self._lost = silent or None
            reason = f"events of {len(silent)} GPUs cannot be waited for" if silent else None
            listener.lose_subscription(reason, silent)
            log.info("events of GPUs are received") if reason is None else log.warning(reason, gpus=sorted(silent))
        if event is not None:
            listener.receive(event)

    def _report_failure(self, listener: Listener, fault: DriverFault | CallFailed, gpus: frozenset[DeviceID]) -> None:
        # the first failed wait in a row is not reported
        self._failures += 1
        is_lost = isinstance(fault, CallFailed) and fault.code == GPU_IS_LOST
        unknown = frozenset() if is_lost else gpus
        if self._failures > 1 and self._lost != unknown:
            self._lost = unknown
            listener.lose_subscription(f"events of GPUs cannot be waited for: {fault}", unknown)
            log.warning("events of GPUs cannot be waited for", finding=str(fault), remedy=REMEDY)

    def _listen(self, deliver: Deliver, steps: CallProgress) -> None:
        """Waits for events, in the thread, until no GPU is registered. If the thread is abandoned, NVML stays open."""
        try:
            while (gpus := self._gpus) is not None and self._event_sets.open(gpus, steps):
                event = self._event_sets.wait()
                deliver(event, self._event_sets.silent)
            self._event_sets.empty()
            while self._event_sets.undelivered:
                deliver(self._event_sets.wait(), self._event_sets.silent)
        except CallFailed as error:
            self._event_sets.close()
            if error.code not in NO_EVENTS:
                raise
        self._event_sets.close()


class EventSets:
    """The event set and the GPUs registered in it. Only the thread uses it."""

    def __init__(self) -> None:
        self._nvml = Library()
        self._set: Handle | None = None
        self._gpus: frozenset[DeviceID] | None = None
        """The GPUs for which the set was created."""
        self._names: dict[int | None, DeviceID] = {}
        """Address of its handle -> a GPU in the set."""
        self.silent: frozenset[DeviceID] = frozenset()
        """GPUs that could not be registered."""
        self._waits = 0
        self.undelivered: deque[HardwareEvent] = deque()
        """Events of a set that was replaced."""

    def open(self, gpus: frozenset[DeviceID], steps: CallProgress) -> bool:
        """Registers these GPUs. Returns False if none of them reports events. Raises CallFailed, DriverFault."""
        opened = self._nvml.open(steps)
        if opened or gpus != self._gpus or (self.silent and self._waits >= WAITS_BETWEEN_TRIES):
            self._register(gpus)
        return bool(self._names)

    def _register(self, gpus: frozenset[DeviceID]) -> None:
        """Registers the GPUs in a new set; meanwhile the old set receives events. Raises CallFailed if it fails for all."""
        events = self._nvml.maybe("nvmlEventSetCreate")
        try:
            names, silent = self._register_gpus(gpus, events) if events is not None else ({}, frozenset[DeviceID]())
        except CallFailed:
            self._nvml.free(events)
            raise
        self.empty()
        if self._set is not None:
            self._nvml.free(self._set)
        self._set = events
        self._gpus = gpus
        self._names = names
        self.silent = silent
        self._waits = 0

    def empty(self) -> None:
        """Reads the waiting events from the set, because freeing the set would drop them."""
        with suppress(CallFailed):
            for _ in range(MOST_WAITING if self._set is not None else 0):
                event = self._nvml.wait(self._set, 0)
                if event is None:
                    return
                if (known := self._decode(event)) is not None:
                    self.undelivered.append(known)

    def _register_gpus(
        self, gpus: frozenset[DeviceID], events: Handle
    ) -> tuple[dict[int | None, DeviceID], frozenset[DeviceID]]:
        # returns handle address -> registered GPU, and the GPUs that could not be registered
        names: dict[int | None, DeviceID] = {}
        without_events: set[DeviceID] = set()
        errors: list[CallFailed] = []
        for index in range(int(self._nvml.ask("nvmlDeviceGetCount"))):
            try:
                device = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
                uuid = DeviceID(self._nvml.uuid(device))
                reported = self._nvml.number("nvmlDeviceGetSupportedEventTypes", device) if uuid in gpus else None
                kinds = (reported or 0) & sum(KINDS)
                if kinds and self._nvml.register(device, kinds, events):
                    names[address_of(device)] = uuid
                else:
                    without_events.add(uuid)
            except CallFailed as error:
                if error.code in OF_THE_LIBRARY:
                    raise
                errors.append(error)
        silent = gpus - set(names.values()) - without_events
        if silent and errors and not names:
            raise errors[0]
        return names, silent

    def wait(self) -> HardwareEvent | None:
        """The next event, or None after WAIT_SECONDS without one. Raises CallFailed."""
        if self.undelivered:
            return self.undelivered.popleft()
        self._waits += 1
        event = self._nvml.wait(self._set, int(WAIT_SECONDS * 1000))
        return self._decode(event) if event is not None else None

    def _decode(self, event: Any) -> HardwareEvent | None:
        kind = KINDS.get(int(event.eventType))
        if kind is None:  # it was not requested
            return None
        gpu = self._names.get(address_of(event.device))
        if gpu is None:
            with suppress(CallFailed):
                gpu = DeviceID(self._nvml.uuid(event.device))
        return HardwareEvent(
            kind=kind,
            gpu=gpu,
            xid=int(event.eventData) if kind is Occurrence.XID else None,
            gpu_instance=None if event.gpuInstanceId == WHOLE_GPU else int(event.gpuInstanceId),
            compute_instance=None if event.computeInstanceId == WHOLE_GPU else int(event.computeInstanceId),
        )

    def close(self) -> None:
        """Closes NVML here. After that, `open` must register the GPUs again before the next `wait`."""
        if self._set is not None:
            self._nvml.free(self._set)
        self._nvml.close()
        self._set = None
        self._gpus = None
        self._names = {}
        self.silent = frozenset()
