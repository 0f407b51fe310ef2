"""
Hands a node over from one allocator process to another, for example to a new version, while its containers run.

Two processes of one node must never use its record at once, and the kubelet should notice as little as possible.

1. The new process gets ready, and then takes a lock on the file `successor` in the state directory.
2. The running process polls that lock once a second. When it is taken, the running process lets calls in progress end, ends
   its streams to the kubelet, and then releases the directory.
3. The new process replays the record and registers. Meanwhile, the kubelet has kept the node's capacity.
4. The former process stays idle until it is stopped. If it ended, its supervisor would start it again, and the two processes
   would take the node from each other in turn. Only if the new process has ended as well, the former one reports on
   /livez that it must be restarted.

Locks are used instead of signals, because the two processes may run in different containers, where each has PID 1.
"""

import fcntl
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import structlog

from topoalign.allocator.ledger.journal import FileJournal, open_journal
from topoalign.allocator.ledger.state_dir import StateInUse, is_in_use
from topoalign.client import Client
from topoalign.core.model.errors import HardwareUnknown
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock
from topoalign.runtime.clock import until_tick

SUCCESSOR_LOCK = "successor"
"""File in the state directory; the process that is to take over holds a lock on it."""

POLL_SECONDS = 1.0
"""Seconds between two polls of the successor lock by the running process. This wait does not affect the kubelet."""

STEP_SECONDS = 0.02
"""Seconds between two attempts of the new process to open the journal. Meanwhile, the node may have no allocator."""

RECEIVE_SECONDS = 8.0
"""Seconds that a new process waits for the topology. If none is received, the running process keeps the node."""

WAIT_SECONDS = 20.0
"""
Timeout of the handover in seconds: the running process first lets calls in progress end. Together with
`RECEIVE_SECONDS`, it is less than the time limit of a start.
"""

VACANT_SECONDS = 60.0
"""Seconds that the node may be without a process. A new process that has failed is usually restarted sooner."""

log = structlog.get_logger("topoalign.allocator")


@asynccontextmanager
async def open_in_turn(
    directory: Path, node: NodeName, clock: Clock, ready: Callable[[], Awaitable[None]] | None
) -> AsyncIterator[FileJournal]:
    """
    Opens the journal of a state directory, and takes it over if another process has the directory. `ready` is awaited
    before the handover is requested; None: no handover is requested. Raises what `open_journal` and `ready` raise, and
    StateInUse if the other process does not hand over within `WAIT_SECONDS`.
    """
    with ExitStack() as held:
        try:
            journal = held.enter_context(open_journal(directory, node))
        except StateInUse:
            if ready is None:
                raise
            await ready()
            journal = await await_handover(directory, node, clock, held)
        yield journal


async def await_handover(directory: Path, node: NodeName, clock: Clock, held: ExitStack) -> FileJournal:
    """Holds the successor lock until the journal can be opened; `held` later closes the journal. Raises StateInUse."""
    until = clock.monotonic() + WAIT_SECONDS
    log.info("waiting for the other allocator to hand over", directory=str(directory))
    line = os.open(directory / SUCCESSOR_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try_lock(line, fcntl.LOCK_EX)  # else another new process holds the lock, and will have the directory next
            try:
                return held.enter_context(open_journal(directory, node))
            except StateInUse as fault:
                if clock.monotonic() >= until:
                    finding = f"{fault.finding}; it was asked to hand over, and did not within {WAIT_SECONDS:g} s"
                    raise StateInUse(finding, "stop it (SIGTERM), then start this one again") from fault
            await clock.sleep(STEP_SECONDS)
    finally:
        os.close(line)


async def wait_for_successor(directory: Path, clock: Clock) -> None:
    """Returns when another process holds the successor lock. It polls every `POLL_SECONDS`."""
    while not is_successor_waiting(directory):
        await clock.sleep(until_tick(clock, POLL_SECONDS))


class Vacancy:
    """Detects, in the process that has handed over, that its successor has ended and no process has the node."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        self._since: float | None = None
        """Monotonic seconds since which no process has the directory."""

    def restart_reason(self) -> str | None:
        """
        Returns, for /livez, why this process should be restarted: no process has had the directory for `VACANT_SECONDS`.
        None: a process has it, or had it less long ago. The time is measured between calls, so call it regularly.
        """
        if is_in_use(self._directory):
            self._since = None
            return None
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
        if now - self._since < VACANT_SECONDS:
            return None
        return "the allocator that took over has ended, and no process has this node: start this one again"


def is_successor_waiting(directory: Path) -> bool:
    """Whether another process holds the successor lock of this state directory. False if the file cannot be opened."""
    try:
        line = os.open(directory / SUCCESSOR_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return not try_lock(line, fcntl.LOCK_SH)
    finally:
        os.close(line)


def try_lock(file: int, kind: int) -> bool:
    """Tries to take a lock (LOCK_EX or LOCK_SH) on an open file without waiting; returns whether it succeeded."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def hardware_known(bus: Bus, node: NodeName, clock: Clock) -> None:
    """Waits until discovery has published the node's topology. Raises HardwareUnknown after `RECEIVE_SECONDS`."""

    async def give_up() -> None:
        await clock.sleep(RECEIVE_SECONDS)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(give_up)
        async for delivery in Client(bus, clock, "topoalign-successor").nodes(node=node):
            if isinstance(delivery.event, TopologyDiscovered):
                tasks.cancel_scope.cancel()
                return
    raise HardwareUnknown(node, f"nothing was received of it for {RECEIVE_SECONDS:g} s, so nothing is taken over")
