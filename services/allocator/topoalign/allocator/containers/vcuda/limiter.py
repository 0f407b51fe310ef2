"""
Limits containers with units of GPUs by Gaia's library: what it reads is written before a container starts, and what it
registers while it runs.

- PreStartContainer knows the owner of units from the kubelet's checkpoint. Each half of its share has a directory, and
  which of the two the kubelet mounts is its choice: so both get the same limits, and a socket. Where that fails, the
  container does not start, and the next try makes it.
- RegisterVDevice writes which processes the container has, for a caller that is in the container whose units these are.
- Every few seconds, and when the agent has started: a directory whose units are in the record, in the checkpoint, or whose
  pod is there has its socket; any other is removed. Without an answer of the kubelet, or where its checkpoint cannot be
  read, nothing is removed.

Calls and sweeps take turns; nothing here waits for a caller. What containers have left is removed in a thread.
"""

from asyncio import shield
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import anyio
import structlog
from anyio import to_thread

from topoalign.allocator.allocate.unit_starts import limits_of, live_parts, of
from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.vcuda import directories
from topoalign.allocator.containers.vcuda.limits import CONFIG_FILE, PIDS_FILE, Limits, config_of, pids_of
from topoalign.allocator.containers.vcuda.owners import Calls, limits_for
from topoalign.allocator.containers.vcuda.registrations import Refused, RegistrationServer
from topoalign.allocator.ports import Part, Poll
from topoalign.core.model.errors import StateFault, TopoalignError, Unavailable, clean
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import Holder
from topoalign.core.usage.cgroups import container_name_of, placement_of
from topoalign.kubelet.control_groups import container_group, directory_of, processes_in
from topoalign.kubelet.grpc.transport import Load
from topoalign.kubelet.processes import text_of
from topoalign.runtime.clock import until_tick

# Who calls on a socket: what the kernel tells of the process at its other end, and nothing that this says of itself.
#
# The process' control group has the UID of its pod and the id of its container; its mounts have the container's name. A
# process that has ended, or of which this cannot be read, is nobody.


class Caller(NamedTuple):
    """The container in which a process runs."""

    pod_uid: str
    container: str
    container_id: str
    group: PurePosixPath
    """Of the container."""


def caller_of(proc: Path, pid: int) -> Caller | None:
    """The container of a process; None where it is in none, has ended, or is not visible here (0)."""
    if pid <= 0:
        return None
    try:
        placement = placement_of(text_of(proc / str(pid) / "cgroup"))
        group = container_group(placement)
        if group is None:
            return None
        container = container_name_of(text_of(proc / str(pid) / "mountinfo"), placement.pod_uid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Caller(placement.pod_uid, container, placement.container_id, group) if container else None


PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
SWEEP_SECONDS = 5.0
AGAIN_SECONDS = 0.5
DRAIN_SECONDS = 0.5

log = structlog.get_logger("topoalign.allocator.containers.vcuda")


class Allocations(Protocol):
    """What a sweep asks of the allocator."""

    @property
    def state(self) -> NodeState:
        """What is known of the node now."""

    @property
    def polled(self) -> Poll | None:
        """What the kubelet answered last; None: nothing yet, or it did not answer."""


class VcudaLimiter:
    """Keeps the directories and their sockets, and registers processes."""

    def __init__(
        self, root: Callable[[], str], hardware: Callable[[], Topology], proc: Path = PROC, cgroups: Path = CGROUPS
    ) -> None:
        """
        `root`: `flags.vcudaRoot` of the newest configuration, empty: there is none. `proc`, `cgroups`: where the host's are
        mounted.
        """
        self._root = root
        self._hardware = hardware
        self._proc = proc
        self._cgroups = cgroups
        self._load = Load()
        self._turn = anyio.Lock()
        self._servers: dict[Path, RegistrationServer] = {}
        self._parts: Sequence[Part] = ()
        """What the checkpoint has of units, as the kubelet answered last."""
        self._names: dict[tuple[ResourceName, frozenset[DeviceID]], str] = {}
        self._calls = Calls()
        self._groups: dict[str, Path | None] = {}
        """Container id -> the directory of its control group, since the last sweep."""
        self._is_closed = False
        self.refused = 0
        """Registrations that were refused."""

    async def starting(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """
        A container with these units is about to start: has its directories in place, if a limiter is configured, or if it
        has got one before. Raises StateFault where they cannot be made, and Unavailable where it is not known whose units
        these are.
        """
        if not (configured := self._root()):
            return
        root = Path(configured)
        asked = frozenset(units)
        offers = self._hardware().offers_of.get(resource, ())
        name = self._name(resource, asked)
        if not any(each.limiter == "vcuda" for each in offers) and directories.owner_of(root, name) is None:
            return
        await shield(self._start(root, resource, asked, poll))  # half of it would leave a socket that nobody knows of

    def register(self, root: Path, name: str, pid: int) -> None:
        """
        Writes what the container of a process has, into the directory of this name. Raises Refused for a process of another
        container, and StateFault where the files cannot be written.
        """
        who = caller_of(self._proc, pid)
        try:
            if who is None:
                raise Refused(
                    "the caller's container is not known: it has ended, or the agent does not see its process"
                )
            if (who.pod_uid, who.container) not in self._owners(root, name):
                raise Refused(f"the units of this directory are not of container {who.container} of pod {who.pod_uid}")
        except Refused:
            self.refused += 1
            raise
        group = self._groups.get(who.container_id)
        if who.container_id not in self._groups or (group is not None and not group.is_dir()):
            group = self._groups[who.container_id] = directory_of(self._cgroups, who.group)
        pids = processes_in(group) if group is not None else ()
        if not pids:
            remedy = f"see that the host's control groups are mounted at {self._cgroups}"
            raise StateFault(f"no process is found in the control group {who.group}", remedy)
        holder = Holder(who.pod_uid, who.container)
        if any(of(holder, self._parts)):
            config = config_of(limits_for(holder, self._parts, self._hardware()))
        else:
            config = directories.config_in(root, name)
        files = {CONFIG_FILE: config, PIDS_FILE: pids_of(pids)}
        try:
            directories.write_registered(root, name, who.container_id, files, PIDS_FILE)
        except OSError as error:
            raise StateFault(
                f"the processes of the container cannot be written: {error.strerror}", "make room on the node's disk"
            ) from error

    async def run(self, allocations: Allocations, clock: Clock) -> None:
        """
        Sweeps every `SWEEP_SECONDS` until cancelled, and sooner where that fails: a predecessor may have the sockets still.
        Logs once why it fails.
        """
        failing = None
        try:
            while True:
                try:
                    await self.sweep(allocations.state, allocations.polled)
                    failing = None
                except (OSError, TopoalignError) as error:
                    if failing != str(error):
                        log.warning("the directories of containers cannot be kept", reason=clean(str(error), 200))
                    failing = str(error)
                await clock.sleep(until_tick(clock, SWEEP_SECONDS if failing is None else AGAIN_SECONDS))
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def close(self) -> None:
        """
        Closes all sockets. No container can start any more: the next agent is to make them again.
        """
        async with self._turn:
            self._is_closed = True
            await self._stop_all(self._servers)

    async def sweep(self, state: NodeState, poll: Poll | None) -> None:
        """
        Has a socket in every directory that is needed, and removes the others. Raises OSError and StateFault once all that
        can be done is done.
        """
        if poll is not None and poll.listing.checkpoint is None:
            poll = None
        async with self._turn:
            configured = self._root()
            root = Path(configured)
            if configured and poll is not None:
                self._parts = live_parts(poll.listing)
            present = directories.listed(root) if configured else []
            needed = self._needed(state) if configured else set()
            self._groups.clear()
            failure: Exception | None = None
            for name in present:
                owner = directories.owner_of(root, name)
                is_needed = name in needed or poll is None or has_pod(owner, poll)
                try:
                    if not is_needed:
                        await self._stop(root / name)
                        limiter_files.remove(root, name)
                    elif owner is not None:
                        await self._serve(root, name)
                except (OSError, StateFault) as error:
                    failure = error
            await self._stop_all(self._servers.keys() - {root / name for name in present})
            if configured:
                await to_thread.run_sync(limiter_files.remove_leftovers, root)
            if failure is not None:
                raise failure

    async def _start(self, root: Path, resource: ResourceName, asked: frozenset[DeviceID], poll: Poll) -> None:
        """The rest of `starting`. To its end, also where the kubelet has hung up."""
        async with self._turn:
            if self._is_closed:
                raise Unavailable("the agent is stopping", "the kubelet starts the container again")
            parts = self._parts = live_parts(poll.listing)
            written = directories.owner_of(root, self._name(resource, asked))
            holder = self._calls.starting(resource, asked, parts, written, poll.at)
            limits = limits_for(holder, parts, self._hardware())
            try:
                for part in of(holder, parts):
                    await self._prepare(root, self._name(part.resource, part.devices), limits)
            except OSError as error:
                told = " and ".join(each for named in limits_of(holder, parts) for each in named)
                raise StateFault(
                    f"the limits of container {holder.container} ({told}) cannot be written below {clean(str(root))}: "
                    f"{error.strerror}",
                    "make room there, and see that it belongs to the agent's user; the kubelet starts the container again",
                ) from error

    async def _prepare(self, root: Path, name: str, limits: Limits) -> None:
        """Has one directory and its socket in place. Raises OSError and StateFault."""
        if directories.owner_of(root, name) != (limits.pod_uid, limits.container):
            await self._stop(root / name)
        directories.prepare(root, name, limits)
        await self._serve(root, name)

    async def _serve(self, root: Path, name: str) -> None:
        """Has a socket in this directory. Raises StateFault."""
        server = self._servers.get(root / name)
        if server is not None and server.in_place:
            return
        await self._stop(root / name)
        register = partial(self.register, root, name)
        server = RegistrationServer(root / name, register, self._load, self._servers.values())
        await server.listen()
        self._servers[root / name] = server

    async def _stop_all(self, paths: Iterable[Path]) -> None:
        """Closes these sockets at the same time: a container may keep its own open for a while."""
        async with anyio.create_task_group() as tasks:
            for path in paths:
                tasks.start_soon(self._stop, path)

    async def _stop(self, path: Path) -> None:
        """Closes the socket of this directory, if there is one."""
        if (server := self._servers.pop(path, None)) is not None:
            await server.stop(DRAIN_SECONDS)

    def _owners(self, root: Path, name: str) -> set[tuple[str, str]]:
        """The containers whose directory this is: by the checkpoint; where that has lost them, by what is written in it."""
        told = {(each.pod_uid, each.container) for each in self._parts if self._name(*each[:2]) == name}
        written = directories.owner_of(root, name)
        return told or ({written} if written is not None else set())

    def _needed(self, state: NodeState) -> set[str]:
        """The names of the directories of all units that are held."""
        pairs = {*held_units(state), *((each.resource, each.devices) for each in self._parts)}
        self._names = {pair: self._name(*pair) for pair in pairs}
        return {*self._names.values()}

    def _name(self, resource: ResourceName, units: frozenset[DeviceID]) -> str:
        """`name_of`, remembered until the next sweep, and longer of units that are held."""
        if (name := self._names.get((resource, units))) is None:
            name = self._names[resource, units] = directories.name_of(resource, units)
        return name


def held_units(state: NodeState) -> Iterator[tuple[ResourceName, frozenset[DeviceID]]]:
    """What each container got of a resource of units in one Allocate, by the record; also those that were displaced."""
    for each in state.allocations.values():
        if each.amounts:
            for devices in (each.from_kubelet, *(former.devices for former in each.displaced)):
                yield from ((resource, frozenset(ids)) for resource, ids in devices.items())


def has_pod(owner: tuple[str, str] | None, poll: Poll) -> bool:
    """Whether the pod of a directory's owner is there still."""
    directories_of_pods = poll.listing.directories
    return owner is not None and directories_of_pods is not None and not directories_of_pods.is_gone(owner[0])
