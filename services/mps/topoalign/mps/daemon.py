"""
Keeps the MPS control daemon of one resource running.

The order of a start: compute mode EXCLUSIVE_PROCESS, directories, daemon, its limits, and then the announcement on
which Allocate relies. A daemon that ends is started again after 1, 2, 4 ... seconds, at most 60. If it has run for a
minute, the pauses begin at 1 second again. Between two daemons, the GPUs stay in EXCLUSIVE_PROCESS, so that no client
without limits runs beside others. DEFAULT is set when this service ends.

A daemon of an earlier, killed process is ended, because no process supervises it and its limits may differ.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import Process

from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.mps.compute_mode import DEFAULT, EXCLUSIVE_PROCESS, Nvml
from topoalign.mps.control import GET_PERCENTAGE, Control
from topoalign.mps.daemon_shares import MpsShare
from topoalign.plugin_config.mps_files import Announcement, lock_resource_directory
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.tasks import wait_for_first

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
STEADY_SECONDS = 60.0
"""If a daemon ends after this time or later, its earlier failures no longer count."""
START_SECONDS = 10.0
START_PAUSE = 0.1
"""Seconds that a daemon may take until it accepts commands, and seconds between two attempts to send one."""
HEALTH_SECONDS = 10.0
"""Seconds between two checks of a daemon."""
END_SECONDS = 5.0
"""Seconds to end after `quit`, and again after SIGTERM: together less than a pod's default grace period of 30 s."""

log = structlog.get_logger("topoalign.mps")


class Daemon:
    """The control daemon of one resource."""

    def __init__(
        self,
        wanted: tuple[MpsShare, Path],
        shares: Callable[[], Awaitable[Mapping[ResourceName, MpsShare]]],
        program: str,
        environment: Mapping[str, str],
        nvml: Nvml,
        clock: Clock,
    ) -> None:
        """
        `wanted`: the share and the MPS root of this daemon. `shares` is called before each start and returns resource
        -> share; a resource without a GPU on the node is missing. `program` and `environment`: of `Control`.
        """
        share, root = wanted
        self.wanted = wanted
        self.resource = share.resource
        self._directory = root / share.resource
        self._shares = shares
        self._program = program
        self._environment = environment
        self._nvml = nvml
        self._clock = clock
        self._announcement = Announcement(root, share.resource)
        self._lock: int | None = None
        self._exclusive: set[DeviceID] = set()
        self.reason: str | None = "it has not started yet"
        """Why no client can be served; None: one can."""
        self.starts = 0
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self) -> None:
        """Keeps the daemon running until `end` or cancelled; then ends it and resets the compute mode."""
        failures = 0
        try:
            with self._scope:
                while True:
                    began = self._clock.monotonic()
                    try:
                        await self._serve()
                    except (DriverFault, OSError) as error:
                        self.reason = _explain_error(error)
                    failures = 1 if self._clock.monotonic() - began >= STEADY_SECONDS else failures + 1
                    pause = backoff_seconds(failures, FIRST_PAUSE, LONGEST_PAUSE)
                    log.warning("the MPS daemon does not run", resource=self.resource, reason=self.reason, pause=pause)
                    await self._clock.sleep(pause)
        finally:
            self.reason = "it is stopped"
            with anyio.CancelScope(shield=True):
                await self._release()
            if self._lock is not None:
                os.close(self._lock)
            self._ended.set()

    async def end(self) -> None:
        """Makes `run` end, and waits for it."""
        self._scope.cancel()
        await self._ended.wait()

    async def _serve(self) -> None:
        """Runs one daemon until it ends. Raises DriverFault and OSError if it cannot be started."""
        if self._lock is None:
            self._lock = lock_resource_directory(self._directory)
        if self._lock is None:
            raise DriverFault(f"another topoalign mps uses {self._directory}", "run one on a node")
        share = (await self._shares()).get(self.resource)
        if share is None:
            raise DriverFault(f"the node has no GPU for {self.resource}", "see nvidia-smi -L and the configuration")
        if few := share.with_too_few_clients:
            finding = f"{share.replicas} replicas are more than the clients that {few[0].name or few[0].id} can have"
            raise DriverFault(finding, "use 16 replicas or fewer for GPUs before compute capability 7.5")
        self._exclusive.update(share.devices)
        await self._nvml.set_compute_mode(share.devices, EXCLUSIVE_PROCESS)
        control = Control(self._program, self._directory, share.devices, self._environment, self._clock)
        for directory in (control.pipe, control.log):
            directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        await self._end_former(control)
        process = await control.start()
        self.starts += 1
        self.reason = "it is starting"
        log.info("MPS daemon started", resource=self.resource, devices=len(share.devices), pid=process.pid)
        try:
            await wait_for_first(partial(_wait_until_ended, process), partial(self._supervise, share, control))
            if process.returncode is not None:
                self.reason = f"it ended with status {process.returncode}; see control.log in {control.log}"
        finally:
            self._announcement.withdraw()
            with anyio.CancelScope(shield=True):
                await self._end_process(process, control)

    async def _supervise(self, share: MpsShare, control: Control) -> None:
        """Sets the limits, announces the daemon, and checks it regularly. Returns after an error."""
        try:
            if not await self._answers_within(START_SECONDS, control):
                finding = f"it takes no commands after {START_SECONDS:g} s"
                raise DriverFault(finding, f"see control.log in {control.log}")
            if not share.own_limits:
                await set_limits(share, control)
            while True:
                self._announcement.publish(share.serves)
                if self.reason is not None:
                    log.info("MPS daemon serves", resource=self.resource, replicas=share.replicas)
                self.reason = None
                while (reason := await self._check_later(share, control)) is None:
                    pass
                self._announcement.withdraw()
                self.reason = reason
                log.warning("the MPS daemon cannot serve", resource=self.resource, reason=reason)
                while await self._check_later(share, control) is not None:
                    pass
        except (DriverFault, OSError) as error:
            self.reason = _explain_error(error)

    async def _check_later(self, share: MpsShare, control: Control) -> str | None:
        """Checks the daemon after a pause, and sets changed limits again. Returns why it cannot serve; None: it can."""
        await self._clock.sleep(HEALTH_SECONDS)
        try:
            answer = await control.command(GET_PERCENTAGE)
            # Root in a container can also send commands to the daemon.
            if not share.own_limits and percentage_in(answer) != share.thread_percentage:
                log.warning("the limits of an MPS daemon were changed", resource=self.resource, answer=answer)
                await set_limits(share, control)
        except DriverFault as fault:
            return _explain_error(fault)
        return None

    async def _answers_within(self, seconds: float, control: Control, wanted: bool = True) -> bool:
        """Waits until the daemon accepts commands (`wanted` True) or no longer does. Returns False after `seconds`."""
        until = self._clock.monotonic() + seconds
        while await control.answers() is not wanted:
            if self._clock.monotonic() >= until:
                return False
            await self._clock.sleep(START_PAUSE)
        return True

    async def _end_former(self, control: Control) -> None:
        """Ends a daemon that already serves the pipe directory. Raises DriverFault if it does not end."""
        if await control.answers():
            log.warning("another MPS daemon is ended", resource=self.resource, pipe=str(control.pipe))
            await control.command("quit")
            if not await self._answers_within(END_SECONDS, control, wanted=False):
                raise DriverFault(f"another MPS daemon serves {control.pipe}", "stop it, or give it another directory")

    async def _end_process(self, process: Process, control: Control) -> None:
        """Ends a daemon that runs: with `quit`, then with SIGTERM, then with SIGKILL."""
        if process.returncode is None:
            await wait_for_first(partial(quit_until, control, process), partial(self._clock.sleep, END_SECONDS))
        if process.returncode is None:
            process.terminate()
            await wait_for_first(partial(_wait_until_ended, process), partial(self._clock.sleep, END_SECONDS))
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def _release(self) -> None:
        """Resets the GPUs to compute mode DEFAULT. Never fails: logs the GPUs whose mode cannot be reset."""
        if not self._exclusive:
            return
        try:
            await self._nvml.set_compute_mode(self._exclusive, DEFAULT)
        except DriverFault as fault:
            log.error(
                "GPUs stay in compute mode EXCLUSIVE_PROCESS",
                devices=sorted(self._exclusive),
                reason=fault.finding,
                remedy="nvidia-smi -c DEFAULT",
            )


async def set_limits(share: MpsShare, control: Control) -> None:
    """Sets the limits of a daemon's clients. Raises DriverFault if the daemon does not accept them."""
    for device, limit in share.memory_limits.items():
        await control.command(f"set_default_device_pinned_mem_limit {device} {limit}")
    await control.command(f"set_default_active_thread_percentage {share.thread_percentage}")
    answer = await control.command(GET_PERCENTAGE)
    if percentage_in(answer) != share.thread_percentage:
        raise DriverFault(
            f"the MPS daemon did not take the limit of {share.thread_percentage} per cent of the threads: {answer!r}",
            "see its log, control.log",
        )


def _explain_error(error: DriverFault | OSError) -> str:
    return f"{error.finding}; {error.remedy}" if isinstance(error, DriverFault) else str(error)


async def _wait_until_ended(process: Process) -> None:
    await process.wait()


async def quit_until(control: Control, process: Process) -> None:
    """Sends `quit` to a daemon, and returns when it has ended for any reason, or if it does not answer."""
    try:
        await control.command("quit")
    except DriverFault:
        return
    await process.wait()


def percentage_in(answer: str) -> float | None:
    """The number at the end of an answer; None if there is none."""
    try:
        return float(answer.split()[-1])
    except (IndexError, ValueError):
        return None
