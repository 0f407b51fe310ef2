"""
The directories in which the library keeps its shared file: one for each allocation of slots, below one root.

A directory is named by a digest of the resource and the slots, as those of vcuda are: not after the record, which is another
one where the journal was lost. So the mount that the kubelet keeps, and gives a container again whenever that starts, always
finds it, and one that is gone can be made again.

    <root>/slots-2f1c…          of this process' user, mode 0755: a container cannot change what is in it
        of                      the record that it was made for and, once known, the UID of its pod
        cache/                  mode 0777, mounted read-write at /usr/local/vgpu
    <root>/vgpulock/            mode 0777, mounted at /tmp/vgpulock of all containers

The root is closed to other users of the host (mode 0700): a container's root may leave programs there that run as root, and
device nodes. Containers need no right to it, because what they see is mounted.

Allocate makes a directory anew for another record: the former one loses its name, and sweeps remove it. `cache` is the
container's, which may have changed it in every way; `vgpulock` is all containers', and where one has made it its own, the
next containers get another one.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import structlog
from anyio import to_thread

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import (
    MODE,
    digest_of,
    discard,
    make_root,
    open_directory,
    put_aside,
    read_file,
    write_file,
)
from topoalign.allocator.ports import Poll
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import clean
from topoalign.core.model.holdings import base_of, unit_kind
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.runtime.clock import until_tick

NAME = re.compile(r"slots-[0-9a-f]{32}")
OWNER = "of"
CACHE = "cache"
LOCKS = "vgpulock"
OPEN = 0o777
"""Of directories in which users of all containers write."""


class DirectoryOwner(NamedTuple):
    """Whose a directory is."""

    allocation: AllocationID
    pod_uid: str = ""
    """Empty: not known yet."""


def slots_directory_name(resource: ResourceName, slots: Collection[DeviceID]) -> str:
    """The name of the directory of these slots, in whatever order they are."""
    return f"slots-{digest_of(resource, slots)}"


def list_slots_directories(root: Path) -> list[str]:
    """The names of the directories below the root that are ours; none where there is no root. Raises OSError."""
    return limiter_files.list_own_directories(root, NAME)


def read_directory_owner(root: Path, name: str) -> DirectoryOwner | None:
    """Whose a directory is; None where that is not written."""
    try:
        with open_directory(root) as at, open_directory(name, at) as directory:
            allocation, _, pod_uid = read_file(directory, OWNER).decode("utf-8", "replace").partition("\n")
    except OSError:
        return None
    return DirectoryOwner(AllocationID(allocation), pod_uid.strip()) if allocation else None


def make_locks(root: Path) -> None:
    """Has the root, for this process' user alone, and the directory of locks. Raises OSError."""
    make_root(root)
    with open_directory(root) as at:
        if is_taken(at, LOCKS):
            put_aside(at, LOCKS, at)
        make_open(at, LOCKS)


def is_taken(at: int, name: str) -> bool:
    """Whether this is a directory that a container has given to another user: its rights are that user's to set."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid()


def prepare_slots_directory(root: Path, name: str, owner: DirectoryOwner) -> None:
    """
    Has the directory of this record, with nothing of a former one in it; what its own container has written stays. Raises
    OSError; then it can be repeated.
    """
    with open_directory(root) as at:
        former = read_directory_owner(root, name)
        if former is not None and former.allocation == owner.allocation:
            with open_directory(name, at) as directory:
                make_open(directory, CACHE)
            return
        discard(at, name)
        os.mkdir(name, MODE, dir_fd=at)
        with open_directory(name, at) as directory:
            os.fchmod(directory, MODE)
            make_open(directory, CACHE)
            write_file(directory, OWNER, "\n".join(owner).encode())


def write_owner(root: Path, name: str, owner: DirectoryOwner) -> None:
    """Notes whose a directory is; its content stays. Raises OSError."""
    with open_directory(root) as at, open_directory(name, at) as directory:
        write_file(directory, OWNER, "\n".join(owner).encode())


def make_open(at: int, name: str) -> None:
    """
    Has a directory that all users may write to, also where its container has closed it. Raises OSError, also where something
    else has the name.
    """
    with suppress(FileExistsError):
        os.mkdir(name, OPEN, dir_fd=at)
    directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if stat.S_IMODE(os.fstat(directory).st_mode) != OPEN:
            os.chmod(f"/proc/self/fd/{directory}", OPEN)
    finally:
        os.close(directory)


# Keeps the directories of containers that are limited by HAMi-core, every few seconds and when the agent has started.
#
# A directory whose slots are in the record or in the kubelet's checkpoint, or whose pod is there, stays; one that is
# missing for slots in the record or the checkpoint is made again. Any other is taken away, and removed some entries at
# a time, in a thread: to give a large file's blocks back may take a file system seconds. Without an answer of the
# kubelet, or where its checkpoint cannot be read, nothing is removed.


COLLECT_SECONDS = 5.0
NOBODY = DirectoryOwner(AllocationID(""))
"""Of a directory of slots that the checkpoint has and the record has not: an init container's, which may run once more."""

log = structlog.get_logger("topoalign.allocator.containers.hami_core")
Held = tuple[ResourceName, frozenset[DeviceID]]


class LedgerView(Protocol):
    """What a sweep asks of the allocator."""

    @property
    def state(self) -> NodeState:
        """What is known of the node now."""

    @property
    def polled(self) -> Poll | None:
        """What the kubelet answered last; None: nothing yet, or it did not answer."""


class Collections:
    """Restores and removes directories below one root."""

    def __init__(self, root: Callable[[], str]) -> None:
        """`root`: `flags.hamiRoot` of the newest configuration, empty: there is none."""
        self._root = root
        self._owners: dict[str, DirectoryOwner | None] = {}
        """Directory -> whose it is, by what is written in it."""
        self._names: dict[Held, str] = {}

    async def run(self, allocations: LedgerView, clock: Clock) -> None:
        """Sweeps every `COLLECT_SECONDS` until cancelled. Logs once why it fails."""
        failing = None
        while True:
            try:
                try:
                    self.sweep(allocations.state, allocations.polled)
                finally:
                    await to_thread.run_sync(self.remove_leftovers)
                failing = None
            except OSError as error:
                if failing != (reason := f"{error.strerror}: {error.filename}"):
                    log.warning("the directories of containers cannot be kept", reason=clean(reason, 200))
                failing = reason
            await clock.sleep(until_tick(clock, COLLECT_SECONDS))

    def sweep(self, state: NodeState, poll: Poll | None) -> None:
        """One of them. Raises OSError once all that can be done is done."""
        if not (configured := self._root().rstrip("/")):
            return
        if poll is not None and poll.listing.checkpoint is None:
            poll = None
        root = Path(configured)
        failure = None
        held = self._held(state)
        shown = self._shown(poll)
        limited = [name for (resource, _), name in self._names.items() if is_limited(state, resource)]
        limited += [name for name, resource in shown.items() if is_limited(state, resource)]
        present = list_slots_directories(root)
        self._owners = {name: self._owners.get(name) or read_directory_owner(root, name) for name in present}
        for name in present:
            owner = self._owners[name]
            try:
                if name in held:
                    if (now := held[name]) is not None and now != owner:
                        write_owner(root, name, now)
                        self._owners[name] = now
                elif poll is not None and name not in shown and not is_owner_present(owner, poll):
                    limiter_files.remove_own_directory(root, name)
            except OSError as error:
                failure = error
        try:
            for name in {*limited} - self._owners.keys():
                if (owner := held.get(name, NOBODY)) is not None:
                    make_locks(root)
                    prepare_slots_directory(root, name, owner)
        except OSError as error:
            failure = error
        if failure is not None:
            raise failure

    def remove_leftovers(self) -> None:
        """Goes on removing what was taken away. Raises OSError where some of it cannot be removed."""
        if configured := self._root().rstrip("/"):
            try:
                limiter_files.remove_leftovers(Path(configured))
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # the next one goes on
                    raise

    def _held(self, state: NodeState) -> dict[str, DirectoryOwner | None]:
        """Directory of slots that are held, by the record -> whose it is. None: of a container that was displaced."""
        pairs = {
            pair: DirectoryOwner(each.id, each.pod_uid) if each is not None else None
            for each, pair in held_slots(state)
        }
        self._names = {pair: self._name(pair) for pair in pairs}
        return {self._names[pair]: owner for pair, owner in pairs.items()}

    def _shown(self, poll: Poll | None) -> dict[str, ResourceName]:
        """The directories of slots in the kubelet's checkpoint -> the resource, without entries of pods that are gone."""
        if poll is None:
            return {}
        pods = poll.listing.directories
        return {
            self._name((each.resource, each.devices)): each.resource
            for each in poll.listing.parts
            if are_slots(each.devices) and (pods is None or not pods.is_gone(each.pod_uid))
        }

    def _name(self, pair: Held) -> str:
        """`slots_directory_name`, remembered for slots in the record."""
        return self._names.get(pair) or slots_directory_name(*pair)


def is_limited(state: NodeState, resource: ResourceName) -> bool:
    """Whether slots of this resource are limited by HAMi-core now."""
    return any(each.limiter == "hami-core" for each in state.hardware.offers_of.get(resource, ()))


def held_slots(state: NodeState) -> Iterator[tuple[Allocation | None, Held]]:
    """The slots of each allocation of the record; None as the allocation: of one that was displaced."""
    for each in state.allocations.values():
        for former in each.displaced:
            yield from ((None, (name, frozenset(ids))) for name, ids in former.devices.items() if are_slots(ids))
    for each in state.allocations.values():
        yield from ((each, (name, frozenset(ids))) for name, ids in each.from_kubelet.items() if are_slots(ids))


def are_slots(devices: Collection[DeviceID]) -> bool:
    """Whether these may be slots, also of a configuration that is not there any more: ids with a number behind a device."""
    return any(base_of(each) != each and unit_kind(each) is None for each in devices)


def is_owner_present(owner: DirectoryOwner | None, poll: Poll) -> bool:
    """Whether the pod of a directory's owner is there still."""
    pods = poll.listing.directories
    return owner is not None and bool(owner.pod_uid) and pods is not None and not pods.is_gone(owner.pod_uid)
