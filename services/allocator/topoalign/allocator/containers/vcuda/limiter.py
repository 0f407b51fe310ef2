"""
Limits containers with units through Gaia's library: writes its files before containers start, and registers processes.

- PreStartContainer reads the owner of units from the checkpoint. Each half of a share has a directory, and the kubelet
  mounts one of the two. So both get the same limits and a socket. If that fails, the container does not start.
- RegisterVDevice writes the processes of the caller's container, if it has these units.
- Every few seconds each directory gets its socket if its units are in the record or the checkpoint, or its pod exists.
  Any other directory is removed. Nothing is removed if the kubelet does not answer or its checkpoint cannot be read.

Calls and cleanups never run at the same time, and nothing here waits for a caller.
"""

from asyncio import shield
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, cast

import anyio
from anyio import to_thread
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.allocate.pre_start import (
    amounts_of_holder,
    entries_of_holder,
    live_unit_entries,
)
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import is_pod_present, keep_directories, with_checkpoint
from topoalign.allocator.containers.vcuda import unit_directories
from topoalign.allocator.containers.vcuda.unit_directories import (
    SOCKET,
    Limits,
    pids_of,
    read_config_owner,
    units_directory_name,
)
from topoalign.allocator.ports import Poll, ResourceEntry
from topoalign.core.model.errors import StateFault, Unavailable, clean
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import CORES
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import Holder
from topoalign.core.usage.cgroups import container_name_of, placement_of
from topoalign.kubelet.control_groups import container_group, directory_of, processes_in, read_proc_text
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.api import vcuda
from topoalign.kubelet.grpc.grpc_connection import GrpcConnection
from topoalign.kubelet.grpc.transport import LONGEST_MESSAGE, GrpcServer, Load, Servicer, caller
from topoalign.runtime.metrics import ServiceMetric

# The owner of a directory comes from the kubelet's checkpoint.
#
# Two containers of one pod can have the same units, because an app container reuses those of an init container. The
# units do not show which of them starts. The kubelet calls PreStartContainer for both halves of a container, one right
# after the other. So there are these cases:
#
# - If a call just before was for a half that only one of the two has, it is that container (`Calls`).
# - If one of them has only this half, it is that container. If this is wrong, the call for the other half comes next
#   and corrects it.
# - If both halves of the two are the same, so are their limits, and the owner in the directory stays the same.


KNOWN_SECONDS = 5.0
"""Maximum time between the calls for both halves of a container: milliseconds, or seconds on a busy node."""


class Calls:
    """Records recent calls for a half that identified the container."""

    def __init__(self) -> None:
        self._identified: dict[str, tuple[Holder, float]] = {}
        """Pod UID -> the container, and the monotonic time of the call in seconds."""

    def starting(
        self,
        resource: ResourceName,
        units: frozenset[DeviceID],
        parts: Sequence[ResourceEntry],
        written: tuple[str, str] | None,
        at: float,
    ) -> Holder:
        """
        Returns the container that is starting, for a call at monotonic time `at`. `written`: the owner of its
        directory. Raises Unavailable if containers of no pod or of several pods have the units.
        """
        self._identified = {pod: each for pod, each in self._identified.items() if at - each[1] <= KNOWN_SECONDS}
        found = sorted({Holder(*each[2:]) for each in parts if each[:2] == (resource, units)})
        pods = {each.pod for each in found}
        if len(pods) != 1:
            raise Unavailable(
                f"the kubelet's checkpoint has the units for containers of {len(pods)} pods",
                "the kubelet starts the container again; see whether its device plugin directory can be read",
            )
        (pod,) = pods
        if len(found) == 1:
            self._identified[pod] = found[0], at
            return found[0]
        known, _ = self._identified.pop(pod, (None, at))
        if known in found:
            return known
        with_one_half = [each for each in found if len([*entries_of_holder(each, parts)]) == 1]
        return next((each for each in with_one_half or found if each == written), (with_one_half or found)[0])


def limits_for(holder: Holder, parts: Collection[ResourceEntry], hardware: Topology) -> Limits:
    """Returns a container's limits; for equal parts of several GPUs, those of one GPU. The library reads only one."""
    amounts = amounts_of_holder(holder, parts)
    gpus = [gpu for gpu in hardware.gpus if gpu.id in amounts]
    cores = sum(each.cores for each in amounts.values())
    memory = sum(each.memory for each in amounts.values())
    if cores >= CORES:
        memory = max(memory, sum(gpu.memory or 0 for gpu in gpus))
    else:
        cores, memory = (amount // max(1, len(amounts)) for amount in (cores, memory))
    pci = next((gpu.pci for gpu in gpus if gpu.pci), "")
    return Limits(holder.pod, str(holder.container), cores, memory, pci[-12:].upper())


# Each directory has a socket on which the library's client registers a process: gRPC `vcuda.VCUDAService`.
#
# The client registers each process that begins to use CUDA, and reads `pids.config` afterwards. Any user in the
# container can make calls. The fields of a call (bus id, pod UID, name and id of the container) are ignored; the caller
# is identified by `caller_of`. The number of connections of all sockets is bounded, so that one container does not
# block another.
#
# Source: gpu-manager 8cd842ed, pkg/services/virtual-manager; vcuda-controller 72e0115, src/register.c.


FIELD = "flags.vcudaRoot"
MOST_CONNECTIONS = 128
"""Maximum number of connections to all these sockets together. A client needs one for milliseconds."""


class RegistrationRefused(Exception):
    """Raised for a caller that must not be registered."""


class Registrations(Servicer, vcuda.VcudaServiceBase):
    """The gRPC service of one socket."""

    def __init__(self, register: Callable[[int], None]) -> None:
        """`register` takes the caller's process id; raises RegistrationRefused and TopoalignError."""
        self._register = register

    async def register_v_device(self, message: vcuda.VDeviceRequest) -> vcuda.VDeviceResponse:
        """Answers RegisterVDevice. Raises GRPCError PERMISSION_DENIED for a process of another container."""
        connection = cast(GrpcConnection, caller())
        await connection.server.turns.turn(connection)  # milliseconds each, more if there are many processes
        try:
            self._register(connection.peer.pid)
        except RegistrationRefused as refused:
            connection.server.complaints.report("registration refused", str(refused), pid=connection.peer.pid)
            raise GRPCError(Status.PERMISSION_DENIED, clean(str(refused), LONGEST_MESSAGE)) from refused
        return vcuda.VDeviceResponse()


class RegistrationServer(GrpcServer):
    """The socket of one directory."""

    mode = 0o666

    def __init__(
        self, directory: Path, register: Callable[[int], None], load: Load, others: Collection[GrpcServer]
    ) -> None:
        """`others`: all sockets with which this one shares the connection limit."""
        super().__init__(Registrations(register), directory / SOCKET, FIELD, load)
        self._others = others
        self.guard = directory.parent  # a container can lock its own directory, because it can read it

    def is_welcome(self, peer: unix_sockets.Peer) -> bool:
        """Accepts every process that reaches the socket, because it is mounted into only one container."""
        if sum(len(each.connections) for each in self._others) >= MOST_CONNECTIONS:
            max(self._others, key=lambda each: len(each.connections)).make_room(MOST_CONNECTIONS)
        return True


# The caller on a socket is identified by the kernel's data about the process at the other end, and not by its message.
#
# The process's cgroup contains the UID of its pod and the id of its container. Its mounts contain the container's name.
# A process that has ended, or whose data cannot be read, is not identified.


class Caller(NamedTuple):
    """The container in which a process runs."""

    pod_uid: str
    container: str
    container_id: str
    group: PurePosixPath
    """The cgroup of the container."""


def caller_of(proc: Path, pid: int) -> Caller | None:
    """Returns the container of a process; None if it is in none, has ended, or is not visible here (pid 0)."""
    if pid <= 0:
        return None
    try:
        placement = placement_of(read_proc_text(proc / str(pid) / "cgroup"))
        group = container_group(placement)
        if group is None:
            return None
        container = container_name_of(read_proc_text(proc / str(pid) / "mountinfo"), placement.pod_uid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Caller(placement.pod_uid, container, placement.container_id, group) if container else None


PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
AGAIN_SECONDS = 0.5
DRAIN_SECONDS = 0.5


class VcudaLimiter:
    """Keeps the directories and their sockets, and registers processes."""

    def __init__(
        self, root: Callable[[], str], hardware: Callable[[], Topology], proc: Path = PROC, cgroups: Path = CGROUPS
    ) -> None:
        """`root` returns `flags.vcudaRoot` of the current configuration; empty: none. `proc`, `cgroups`: the host's."""
        self._root = root
        self._hardware = hardware
        self._proc = proc
        self._cgroups = cgroups
        self._load = Load()
        self._turn = anyio.Lock()
        self._servers: dict[Path, RegistrationServer] = {}
        self._parts: Sequence[ResourceEntry] = ()
        """The checkpoint's entries with units, at the last poll."""
        self._calls = Calls()
        self._groups: dict[str, Path | None] = {}
        """Container id -> the directory of its cgroup. Cleared at each cleanup."""
        self._is_closed = False
        self.refused = 0
        """Number of refused registrations."""

    def figure(self) -> ServiceMetric:
        """Number of refused registrations, for /metrics."""
        return ServiceMetric(
            "counter",
            "topoalign_allocator_vcuda_refused",
            "Registrations on vcuda.sock that were refused: the process was not in the container with these units.",
            lambda: self.refused,
        )

    async def starting(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """Prepares the directories of a container that is about to start. Raises StateFault and Unavailable."""
        if not (configured := self._root()):
            return
        root = Path(configured)
        written = read_config_owner(root, units_directory_name(resource, units))
        offers = self._hardware().offers_of.get(resource)
        if offers is None and written is None:  # without a limit, the container's library would end its processes
            raise Unavailable(
                f"the node does not offer {resource} now, so the limits of the units are unknown",
                "the kubelet starts the container again; see that discovery runs",
            )
        if written is not None or any(each.limiter == "vcuda" for each in offers or ()):
            # If the kubelet closed the call and cancelled this half-way, an untracked socket would remain.
            await shield(self._start(root, resource, frozenset(units), poll))

    def register(self, root: Path, name: str, pid: int) -> None:
        """Registers the processes of the caller's container. Raises RegistrationRefused and StateFault."""
        who = caller_of(self._proc, pid)
        if who is None or (who.pod_uid, who.container) not in self._owners(root, name):
            self.refused += 1
            if who is None:
                reason = "the caller's container is not known: it has ended, or the agent does not see its process"
            else:
                reason = f"the units of this directory are not of container {who.container} of pod {who.pod_uid}"
            raise RegistrationRefused(reason)
        group = self._groups.get(who.container_id)
        if who.container_id not in self._groups or (group is not None and not group.is_dir()):
            group = self._groups[who.container_id] = directory_of(self._cgroups, who.group)
        pids = processes_in(group) if group is not None else ()
        if not pids:
            remedy = f"see that the host's control groups are mounted at {self._cgroups}"
            raise StateFault(f"no process is found in the control group {who.group}", remedy)
        try:
            unit_directories.write_registered(root, name, who.container_id, pids_of(pids))
        except OSError as error:
            raise StateFault(
                f"the processes of the container cannot be written: {error.strerror}", "make room on the node's disk"
            ) from error

    async def run(self, allocations: DeviceAllocations, clock: Clock) -> None:
        """Cleans up every `COLLECT_SECONDS`, or sooner after a failure: the previous agent may still hold sockets."""
        try:
            await keep_directories(lambda: self.clean_up(allocations.state, allocations.polled), clock, AGAIN_SECONDS)
        finally:
            with anyio.CancelScope(shield=True):
                await self.close()

    async def close(self) -> None:
        """Closes all sockets. After that no container can start here; the next agent opens them again."""
        async with self._turn:
            self._is_closed = True
            await self._stop_all(self._servers)

    async def clean_up(self, state: NodeState, poll: Poll | None) -> None:
        """Opens a socket in every needed directory, and removes the others. Raises OSError and StateFault."""
        poll = with_checkpoint(poll)
        async with self._turn:
            configured = self._root()
            root = Path(configured)
            if configured and poll is not None:
                self._parts = live_unit_entries(poll.listing)
            present = limiter_files.list_own_directories(root, unit_directories.NAME) if configured else []
            held = {*held_units(state), *((each.resource, each.devices) for each in self._parts)}
            needed = {units_directory_name(*each) for each in held} if configured else set()
            self._groups.clear()
            failure: Exception | None = None
            for name in present:
                owner = read_config_owner(root, name)
                is_needed = name in needed or poll is None or is_pod_present(owner[0] if owner else "", poll)
                try:
                    if not is_needed:
                        await self._stop(root / name)
                        limiter_files.remove_own_directory(root, name)
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
        async with self._turn:
            if self._is_closed:
                raise Unavailable("the agent is stopping", "the kubelet starts the container again")
            parts = self._parts = live_unit_entries(poll.listing)
            written = read_config_owner(root, units_directory_name(resource, asked))
            holder = self._calls.starting(resource, asked, parts, written, poll.at)
            limits = limits_for(holder, parts, self._hardware())
            try:
                for part in entries_of_holder(holder, parts):
                    await self._prepare(root, units_directory_name(part.resource, part.devices), limits)
            except OSError as error:
                raise StateFault(
                    f"the limits of container {holder.container} cannot be written below {clean(str(root))}: "
                    f"{error.strerror}",
                    "make room there, and see that it belongs to the agent's user; the kubelet starts the container again",
                ) from error

    async def _prepare(self, root: Path, name: str, limits: Limits) -> None:
        await self._stop(root / name)
        unit_directories.prepare_units_directory(root, name, limits)
        await self._serve(root, name)

    async def _serve(self, root: Path, name: str) -> None:
        server = self._servers.get(root / name)
        if server is not None and server.in_place:
            return
        await self._stop(root / name)
        register = partial(self.register, root, name)
        server = RegistrationServer(root / name, register, self._load, self._servers.values())
        await server.listen()
        self._servers[root / name] = server

    async def _stop_all(self, paths: Iterable[Path]) -> None:
        async with anyio.create_task_group() as tasks:
            for path in paths:
                tasks.start_soon(self._stop, path)

    async def _stop(self, path: Path) -> None:
        if (server := self._servers.pop(path, None)) is not None:
            await server.stop(DRAIN_SECONDS)

    def _owners(self, root: Path, name: str) -> set[tuple[str, str]]:
        owners = {(each.pod_uid, each.container) for each in self._parts if units_directory_name(*each[:2]) == name}
        written = read_config_owner(root, name)
        return owners or ({written} if written is not None else set())


def held_units(state: NodeState) -> Iterator[tuple[ResourceName, frozenset[DeviceID]]]:
    """Yields the units of each Allocate in the record, including those of displaced containers."""
    for each in state.allocations.values():
        if each.amounts:
            for devices in (each.from_kubelet, *(former.devices for former in each.displaced)):
                yield from ((resource, frozenset(ids)) for resource, ids in devices.items())
