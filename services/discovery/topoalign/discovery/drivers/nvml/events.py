"""
Events of NVML between two readings: XIDs, memory errors, changes of MIG.

Waiting for NVML's events blocks, so it is done in a thread of its own, a second at a time, with a deadline on each
call. Every GPU is registered by itself, MIG instances by their GPU. A GPU that cannot be registered does not affect the
others: it is tried again later, and until then its health is unknown. For a GPU without any events only the readings
count.

After a failed wait all GPUs are registered again, at once the first time and then at growing intervals. As long as it
fails, the health of all GPUs is unknown, unless the error says that a GPU is lost: the readings show which one, and the
others are not affected. A call that hangs blocks this one thread, and no second thread is started before it has ended.

A process that has NVML open does not see GPUs that come back or are added, so every user in the process has to close it
from time to time: `let_go` waits until that was done here.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import structlog

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock, HardwareEvent, Listener, Occurrence
from topoalign.discovery.drivers.nvml.library import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    OF_THE_LIBRARY,
    CallFailed,
    Handle,
    Library,
    NvmlEvent,
    address_of,
)
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.driver_thread import DriverThread, Steps

KINDS: Final = {
    0x0001: Occurrence.SINGLE_BIT_ECC,
    0x0002: Occurrence.DOUBLE_BIT_ECC,
    0x0008: Occurrence.XID,
    0x0100: Occurrence.CHANGED,  # MIG instances were made or destroyed
    0x4000: Occurrence.UNAVAILABLE,
    0x8000: Occurrence.CHANGED,  # the driver asks for another recovery action than before
}
"""nvmlEventType…, as bits."""

NO_EVENTS = {NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND}
"""Codes of a wait that mean: there are none to be had here."""

WAIT_SECONDS = 1.0
"""For one wait. An event ends it at once; this is how long closing NVML may have to wait for it."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0
"""Seconds between tries while waiting fails; doubled each time."""
WAITS_BETWEEN_TRIES = 30
"""Before GPUs that could not be registered are tried again."""
MOST_WAITING = 1024
"""Events that are taken out of a set before it ends: a GPU that reports without end does not keep it open."""

REMEDY = "run nvidia-smi on the node, and look for driver errors in its kernel log"

Tell = Callable[[HardwareEvent | None, frozenset[DeviceID]], object]
"""Told after each wait in order: the event, if there was one, and the GPUs that could not be registered."""

log = structlog.get_logger("topoalign.discovery")


class NvmlEvents:
    """Listens to the GPUs that readings find."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        """`deadline` is in seconds and holds for each call, beside the time it is told to wait."""
        self._clock = clock
        self._thread = DriverThread("NVML, waiting for events,", clock, WAIT_SECONDS + deadline)
        self._gpus: frozenset[DeviceID] | None = None
        """Who is to be listened to; None: nobody, and NVML is to be closed. Written by the loop, read by the thread."""
        self._changed = anyio.Event()
        self._closed = anyio.Event()
        self._closed.set()
        self._ears = Ears()

    def listen_to(self, gpus: frozenset[DeviceID]) -> None:
        """From now on to these."""
        if gpus != self._gpus:
            self._gpus = gpus
            self._changed.set()

    async def let_go(self) -> None:
        """Closes NVML until `listen_to` is called again. Returns when it is closed, or hangs."""
        self._gpus = None
        await self._closed.wait()

    async def run(self, listener: Listener) -> None:
        """Until cancelled."""
        report = EventReport(listener)
        loop = asyncio.get_running_loop()

        def tell(event: HardwareEvent | None, silent: frozenset[DeviceID]) -> None:
            loop.call_soon_threadsafe(report.observe, event, silent)

        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            while (gpus := self._gpus) is not None:
                self._closed = anyio.Event()
                try:
                    await self._thread.run(partial(self._listen, tell))
                    if self._gpus is not None:  # none of them reports events, and nothing is missed
                        report.observe(None, frozenset())
                    break
                except (DriverFault, CallFailed) as fault:
                    failures = report.failed(fault, self._gpus or gpus)
                finally:
                    self._closed.set()
                if failures > 1:
                    await self._clock.sleep(backoff_seconds(failures - 1, FIRST_PAUSE, LONGEST_PAUSE))

    def _listen(self, tell: Tell, steps: Steps) -> None:
        """In the thread: until nobody is to be listened to, or nobody can be. Left behind open if it was abandoned."""
        try:
            while (gpus := self._gpus) is not None and self._ears.open(gpus, steps):
                event = self._ears.wait()
                tell(event, self._ears.silent)
            self._ears.empty()
            while self._ears.unheard:
                tell(self._ears.wait(), self._ears.silent)
        except CallFailed as error:
            self._ears.close()
            if error.code not in NO_EVENTS:
                raise
        self._ears.close()


class Ears:
    """An event set and the GPUs that are registered in it. Used by the thread alone."""

    def __init__(self) -> None:
        self._nvml = Library()
        self._set: Handle | None = None
        self._gpus: frozenset[DeviceID] | None = None
        """Who the set was made for."""
        self._names: dict[int | None, DeviceID] = {}
        """Address of its handle -> a GPU in the set."""
        self.silent: frozenset[DeviceID] = frozenset()
        """Who could not be registered."""
        self._waits = 0
        self.unheard: deque[HardwareEvent] = deque()
        """What was in a set that has ended."""

    def open(self, gpus: frozenset[DeviceID], steps: Steps) -> bool:
        """Makes the set one of these GPUs. False: none of them reports events. Raises CallFailed, DriverFault."""
        opened = self._nvml.open(steps)
        if opened or gpus != self._gpus or (self.silent and self._waits >= WAITS_BETWEEN_TRIES):
            self._register(gpus)
        return bool(self._names)

    def _register(self, gpus: frozenset[DeviceID]) -> None:
        """In a new set, so that the old one hears for as long as it takes. Raises CallFailed if that fails for all."""
        events = self._nvml.event_set()
        try:
            names, silent = self._registered(gpus, events) if events is not None else ({}, frozenset[DeviceID]())
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
        """Takes what waits in the set, which is about to end and what it holds with it, as far as that can be had."""
        with suppress(CallFailed):
            for _ in range(MOST_WAITING if self._set is not None else 0):
                event = self._nvml.wait(self._set, 0)
                if event is None:
                    return
                if (known := self._known(event)) is not None:
                    self.unheard.append(known)

    def _registered(
        self, gpus: frozenset[DeviceID], events: Handle
    ) -> tuple[dict[int | None, DeviceID], frozenset[DeviceID]]:
        """The GPUs that are in this set now by the addresses of their handles, and those that should be and are not."""
        names: dict[int | None, DeviceID] = {}
        without_events: set[DeviceID] = set()
        errors: list[CallFailed] = []
        for index in range(self._nvml.count()):
            try:
                device = self._nvml.handle(index)
                uuid = DeviceID(self._nvml.uuid(device))
                kinds = self._nvml.event_kinds(device) & sum(KINDS) if uuid in gpus else 0
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
        if self.unheard:
            return self.unheard.popleft()
        self._waits += 1
        event = self._nvml.wait(self._set, int(WAIT_SECONDS * 1000))
        return self._known(event) if event is not None else None

    def _known(self, event: NvmlEvent) -> HardwareEvent | None:
        """What it is; None for a kind that nobody asked for."""
        kind = KINDS.get(event.kind)
        if kind is None:
            return None
        return HardwareEvent(
            kind=kind,
            gpu=self._names.get(address_of(event.device)) or self._name(event),
            xid=event.data if kind is Occurrence.XID else None,
            gpu_instance=event.gpu_instance,
            compute_instance=event.compute_instance,
        )

    def _name(self, event: NvmlEvent) -> DeviceID | None:
        try:
            return DeviceID(self._nvml.uuid(event.device))
        except CallFailed:
            return None

    def close(self) -> None:
        """Close NVML here; `wait` needs new registrations after that."""
        if self._set is not None:
            self._nvml.free(self._set)
        self._nvml.close()
        self._set = None
        self._gpus = None
        self._names = {}
        self.silent = frozenset()


class EventReport:
    """Tells the listener what is received, and once when nothing is."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._failures = 0
        self._lost: frozenset[DeviceID] | None = None
        """Who the listener was told cannot be received; None: all is received."""

    def observe(self, event: HardwareEvent | None, silent: frozenset[DeviceID]) -> None:
        """A wait has ended in order, with an event or without."""
        self._failures = 0
        if (silent or None) != self._lost:
            self._lost = silent or None
            reason = f"events of {len(silent)} GPUs cannot be waited for" if silent else None
            self._listener.lose_subscription(reason, silent)
            log.info("events of GPUs are received") if reason is None else log.warning(reason, gpus=sorted(silent))
        if event is not None:
            self._listener.hear(event)

    def failed(self, fault: DriverFault | CallFailed, gpus: frozenset[DeviceID]) -> int:
        """How often in a row that was now. The first time says nothing yet."""
        self._failures += 1
        lost = isinstance(fault, CallFailed) and fault.code == GPU_IS_LOST
        unknown = frozenset() if lost else gpus
        if self._failures > 1 and self._lost != unknown:
            self._lost = unknown
            reason = f"events of GPUs cannot be waited for: {fault}"
            self._listener.lose_subscription(reason, unknown)
            log.warning("events of GPUs cannot be waited for", finding=str(fault), remedy=REMEDY)
        return self._failures
