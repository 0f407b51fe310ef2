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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, cast

import anyio
import structlog
from anyio import to_thread
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.allocate.pre_start import limits_of, live_parts, of
from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.vcuda import directories
from topoalign.allocator.containers.vcuda.directories import CONFIG_FILE, PIDS_FILE, SOCKET, Limits, config_of, pids_of
from topoalign.allocator.ports import Part, Poll
from topoalign.core.model.allocations import amounts_of
from topoalign.core.model.errors import StateFault, TopoalignError, Unavailable, clean
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import Holder
from topoalign.core.usage.cgroups import container_name_of, placement_of
from topoalign.kubelet.control_groups import container_group, directory_of, processes_in, text_of
from topoalign.kubelet.grpc import sockets
from topoalign.kubelet.grpc.api import vcuda
from topoalign.kubelet.grpc.connection import Connection
from topoalign.kubelet.grpc.transport import LONGEST_MESSAGE, Load, Server, Servicer, caller
from topoalign.runtime.clock import until_tick

# Whose a directory is, and what that container is limited to, by the entries of the kubelet's checkpoint.
#
# Two containers of one pod may have been given the same units: an app container takes over those of an init container.
# Which of them starts, the units do not tell. The kubelet calls for all halves of a container, one right after the
# other, before it starts it, and so there are these cases:
#
# - The half that only one of the two has was called for just before: it is that one (`Calls`).
# - One of them has this half alone: it is that one. Should it be the other, the call for its other half comes next, and
#   writes over it.
# - Both halves of the two are the same, and so are their limits: what a directory says stays.


TOLD_SECONDS = 5.0
"""Between the calls for two halves of a container, at most: each takes milliseconds, and seconds on a busy node."""


def holders(resource: ResourceName, units: frozenset[DeviceID], parts: Iterable[Part]) -> list[Holder]:
    """The containers that have exactly these units, in the order of their names."""
    return sorted({Holder(*each[2:]) for each in parts if each[:2] == (resource, units)})


class Calls:
    """Which halves of containers were called for a short while ago, where a half told which container starts."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Holder, float]] = {}
        """Pod UID -> the container, and when it was told, in monotonic seconds."""

    def starting(
        self,
        resource: ResourceName,
        units: frozenset[DeviceID],
        parts: Sequence[Part],
        written: tuple[str, str] | None,
        at: float,
    ) -> Holder:
        """
        Which container starts, where the kubelet calls for this half at this monotonic second. `written`: whose its
        directory is. Raises Unavailable where that may be one of several pods, or none has it.
        """
        self._told = {pod: told for pod, told in self._told.items() if at - told[1] <= TOLD_SECONDS}
        found = holders(resource, units, parts)
        pods = {each.pod for each in found}
        if len(pods) != 1:
            raise Unavailable(
                f"the kubelet's checkpoint has the units for containers of {len(pods)} pods",
                "the kubelet starts the container again; see whether its device plugin directory can be read",
            )
        (pod,) = pods
        if len(found) == 1:
            self._told[pod] = found[0], at
            return found[0]
        told, _ = self._told.pop(pod, (None, at))
        if told in found:
            return told
        alone = [each for each in found if len([*of(each, parts)]) == 1]
        return next((each for each in alone or found if each == written), (alone or found)[0])


def limits_for(holder: Holder, parts: Collection[Part], hardware: Topology) -> Limits:
    """
    What a container is limited to: of equal parts of several GPUs to one, as the library looks at its first GPU alone. Of
    whole GPUs it has all memory, whatever it has asked for.
    """
    amounts = amounts_of(unit for part in of(holder, parts) for unit in part.devices)
    gpus = [gpu for gpu in hardware.gpus if gpu.id in amounts]
    cores = sum(each.cores for each in amounts.values())
    memory = sum(each.memory for each in amounts.values())
    if cores >= CORES:
        memory = max(memory, sum(gpu.memory or 0 for gpu in gpus))
    else:
        cores, memory = (amount // max(1, len(amounts)) for amount in (cores, memory))
    pci = next((gpu.pci for gpu in gpus if gpu.pci), "")
    return Limits(holder.pod, str(holder.container), cores, memory, pci[-12:].upper())


# The socket of one directory, on which the library's client registers a process: gRPC `vcuda.VCUDAService`.
#
# The client does it once for each process that begins to use CUDA, and reads `pids.config` afterwards. Any user of the
# container may call. What a call says (bus id, pod UID, name and id of the container) is not looked at: who calls is
# judged by `callers`. All sockets together have a bounded number of connections, so that one container takes nothing
# from another.
#
# Source: gpu-manager 8cd842ed, pkg/services/virtual-manager; vcuda-controller 72e0115, src/register.c.


FIELD = "flags.vcudaRoot"
MOST_TOGETHER = 128
"""Connections of all these sockets. A client needs one for milliseconds."""


class Refused(Exception):
    """Why a caller is not registered."""


class Registrations(Servicer, vcuda.VcudaServiceBase):
    """Answers on one socket."""

    def __init__(self, register: Callable[[int], None]) -> None:
        """`register` takes the caller's process id; raises Refused, and TopoalignError."""
        self._register = register

    async def register_v_device(self, message: vcuda.VDeviceRequest) -> vcuda.VDeviceResponse:
        """Answers RegisterVDevice. Raises GRPCError PERMISSION_DENIED for a process of another container."""
        connection = cast(Connection, caller())
        await connection.server.turns.turn(connection)  # milliseconds each, more where processes are many
        try:
            self._register(connection.peer.pid)
        except Refused as refused:
            connection.server.complain("registration refused", str(refused), pid=connection.peer.pid)
            raise GRPCError(Status.PERMISSION_DENIED, clean(str(refused), LONGEST_MESSAGE)) from refused
        return vcuda.VDeviceResponse()


class RegistrationServer(Server):
    """The socket of one directory."""

    mode = 0o666

    def __init__(
        self, directory: Path, register: Callable[[int], None], load: Load, others: Collection[Server]
    ) -> None:
        """`others`: all sockets with which this one shares the bound on connections."""
        super().__init__(Registrations(register), directory / SOCKET, FIELD, load)
        self._others = others
        self.guard = directory.parent  # a container may lock its own: for that it is enough to read it

    def is_welcome(self, peer: sockets.Peer) -> bool:
        """Every process that reaches the socket: it is mounted into one container."""
        if sum(len(each.connections) for each in self._others) >= MOST_TOGETHER:
            max(self._others, key=lambda each: len(each.connections)).make_room(MOST_TOGETHER)
        return True


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
