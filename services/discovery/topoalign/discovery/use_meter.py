"""
Measures the use of this node's GPUs on request.

The driver measures the GPUs, and /proc shows in which container each process runs. Nothing is measured without a request,
and one measurement answers all requests within `FRESH_SECONDS`. If a file of /proc cannot be read, the measurement of the
driver is still published, without the containers.
"""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from topoalign.core import wire
from topoalign.core.model.errors import DriverFault, InvalidField
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Clock, Driver, Endpoint
from topoalign.runtime.driver_thread import CallProgress, DriverThread
from topoalign.runtime.replies import answer_with

if TYPE_CHECKING:  # not needed before the first measurement
    from topoalign.core.model.processes import DeviceUse, Measurement, ProcessIdentity

FRESH_SECONDS = 1.0
"""How long a measurement is reused: as long as the driver's own sampling period."""
MOST_PROCESSES = 1_000
"""Maximum number of processes in an answer. Each takes up to about 800 bytes, and an answer has at most 1 MB."""
NOT_SEEN = (
    "the processes of the node cannot be seen from here: run the agent in the node's PID namespace (`hostPID: true`) to "
    "know which container uses what"
)


class UseMeter:
    """Measures through a driver, at most once a second."""

    def __init__(self, node: NodeName, driver: Driver, clock: Clock, root: Path, deadline: float) -> None:
        """`root`: the directory that contains /proc. `deadline`: seconds that reading one file of /proc may take."""
        self._node = node
        self._driver = driver
        self._clock = clock
        self._proc = root / "proc"
        self._thread = DriverThread("/proc", clock, deadline)
        self._turn = anyio.Lock(fast_acquire=True)
        self._newest: Measurement | None = None
        self._measured = 0.0
        """Monotonic seconds at which the newest measurement was complete."""

    def endpoint(self) -> Endpoint:
        """The endpoint that answers a NodeRequest with a Measurement."""
        return Endpoint(
            name="use", subject=wire.discovery_subject(self._node, "use"), answer=answer_with(NodeRequest, self.answer)
        )

    async def answer(self, request: NodeRequest) -> "Measurement":
        """Returns the use of the GPUs. Raises InvalidField for another node, and DriverFault."""
        if request.node != self._node:
            raise InvalidField("node", f"this is the discovery service of {self._node}", "ask that node's own")
        async with self._turn:
            if self._newest is None or self._clock.monotonic() - self._measured >= FRESH_SECONDS:
                self._newest = await self._measure()
                self._measured = self._clock.monotonic()
            return self._newest

    async def _measure(self) -> "Measurement":
        from topoalign.core.model.processes import Measurement  # not needed before the first measurement

        measured = await self._driver.measure()
        time = self._clock.wall()
        devices, left_out = _limit_processes(measured)
        pids = {process.pid for device in devices for process in device.processes or ()}
        identities: dict[int, ProcessIdentity] | None = {}
        finding = ""
        if pids:
            try:
                with anyio.CancelScope(shield=True):  # otherwise, the thread could still be busy at the next request
                    identities = await self._thread.run(partial(_identities_of, self._proc, pids))
                finding = NOT_SEEN if identities is None else ""
            except DriverFault as fault:
                finding = fault.finding
        return Measurement(
            node=self._node,
            time=time,
            devices=tuple(
                msgspec.structs.replace(
                    device,
                    processes=tuple(
                        msgspec.structs.replace(process, identity=(identities or {}).get(process.pid))
                        for process in device.processes
                    ),
                )
                if device.processes
                else device
                for device in devices
            ),
            finding=finding,
            left_out=left_out,
        )


def _identities_of(proc: Path, pids: Collection[int], steps: CallProgress) -> "dict[int, ProcessIdentity] | None":
    # runs in the thread; None if this container does not see the node's processes
    from topoalign.kubelet.control_groups import identity_of, sees_all_processes  # imported at the first use

    steps("a link in /proc")
    if not sees_all_processes(proc):
        return None
    found = {}
    for pid in sorted(pids):
        steps(f"a file in /proc/{pid}")
        identity = identity_of(proc, pid)
        if identity is not None:
            found[pid] = identity
    return found


def _limit_processes(devices: "Sequence[DeviceUse]") -> "tuple[tuple[DeviceUse, ...], int]":
    # keeps the processes with the most memory, and returns the number of the others
    listed = [
        (-(process.memory or 0), at, process.pid)
        for at, device in enumerate(devices)
        for process in device.processes or ()
    ]
    left_out = set(sorted(listed)[MOST_PROCESSES:])
    if not left_out:
        return tuple(devices), 0
    gone = {(at, pid) for _, at, pid in left_out}
    return tuple(
        msgspec.structs.replace(device, processes=tuple(p for p in device.processes or () if (at, p.pid) not in gone))
        for at, device in enumerate(devices)
    ), len(gone)
