"""
Manages the directories of HAMi-core's shared files: one for each allocation of slots, below one root.

A directory is named by a digest of the resource and the slots, so that the mount which the kubelet keeps for each start of a
container stays valid even if the journal is lost, and a missing directory can be created again.

    <root>/slots-2f1c…          of this process' user, mode 0755: a container cannot change what is in it
        of                      the id of its allocation and, once known, the UID of its pod
        cache/                  mode 0777, mounted read-write at /usr/local/vgpu
    <root>/vgpulock/            mode 0777, mounted at /tmp/vgpulock of all containers

The root is closed to other users of the host (mode 0700), because root in a container may leave setuid programs there.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import structlog
from anyio import to_thread

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import (
    MODE,
    RecordView,
    digest_of,
    discard,
    is_pod_present,
    make_root,
    open_directory,
    put_aside,
    read_file,
    with_checkpoint,
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
"""Mode of directories that users of all containers may write to."""


class DirectoryOwner(NamedTuple):
    """The owner of a directory."""

    allocation: AllocationID
    pod_uid: str = ""
    """Empty: not known yet."""


def slots_directory_name(resource: ResourceName, slots: Collection[DeviceID]) -> str:
    """Returns the directory name of these slots, in any order."""
    return f"slots-{digest_of(resource, frozenset(slots))}"


def read_directory_owner(root: Path, name: str) -> DirectoryOwner | None:
    """Reads the owner of a directory; None if none is written."""
    try:
        with open_directory(root) as at, open_directory(name, at) as directory:
            allocation, _, pod_uid = read_file(directory, OWNER).decode("utf-8", "replace").partition("\n")
    except OSError:
        return None
    return DirectoryOwner(AllocationID(allocation), pod_uid.strip()) if allocation else None


def make_locks(root: Path) -> None:
    """Creates the root, for this process' user alone, and the directory of locks. Raises OSError."""
    make_root(root)
    with open_directory(root) as at:
        with suppress(FileNotFoundError):
            found = os.stat(LOCKS, dir_fd=at, follow_symlinks=False)
            # A container may have given it to another user, who then controls its mode.
            if stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid():
                put_aside(at, LOCKS, at)
        make_open(at, LOCKS)


def prepare_slots_directory(root: Path, name: str, owner: DirectoryOwner) -> None:
    """Prepares the directory of this record, empty unless it was its own before. Raises OSError."""
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


def make_open(at: int, name: str) -> None:
    """Creates a directory that all users may write to, or opens it again after its container. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(name, OPEN, dir_fd=at)
    directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if stat.S_IMODE(os.fstat(directory).st_mode) != OPEN:
            os.chmod(f"/proc/self/fd/{directory}", OPEN)
    finally:
        os.close(directory)


# The cleanup runs every few seconds and after the start of the agent.
#
# A directory stays if its slots are in the record or in the kubelet's checkpoint, or if its pod exists. A missing directory
# of slots in the record or the checkpoint is created again. Any other is renamed, and its content is removed in small
# batches in a thread, because a file system may need seconds to free a large file. Nothing is removed without an answer
# of the kubelet, or if its checkpoint cannot be read.


COLLECT_SECONDS = 5.0
NOBODY = DirectoryOwner(AllocationID(""))
"""Owner of slots that only the checkpoint has: those of an init container, which may run again."""

log = structlog.get_logger("topoalign.allocator.containers.hami_core")
Held = tuple[ResourceName, frozenset[DeviceID]]


class DirectoryCleanup:
    """Restores and removes directories below one root."""

    def __init__(self, root: Callable[[], str]) -> None:
        """`root`: `flags.hamiRoot` of the newest configuration, empty: there is none."""
        self._root = root
        self._owners: dict[str, DirectoryOwner | None] = {}
        """Directory -> the owner that is written in it."""

    async def run(self, allocations: RecordView, clock: Clock) -> None:
        """Cleans up every `COLLECT_SECONDS` until cancelled. Logs a failure once."""
        failing = None
        while True:
            try:
                try:
                    self.clean_up(allocations.state, allocations.polled)
                finally:
                    await to_thread.run_sync(self.remove_leftovers)
                failing = None
            except OSError as error:
                if failing != (reason := f"{error.strerror}: {error.filename}"):
                    log.warning("the directories of containers cannot be kept", reason=clean(reason, 200))
                failing = reason
            await clock.sleep(until_tick(clock, COLLECT_SECONDS))

    def clean_up(self, state: NodeState, poll: Poll | None) -> None:
        """Restores and removes directories once. Raises OSError after it has done all that is possible."""
        if not (configured := self._root().rstrip("/")):
            return
        poll = with_checkpoint(poll)
        root = Path(configured)
        failure = None
        held = self._held(state)
        # The entries of the checkpoint with slots, without those of deleted pods.
        in_checkpoint = {
            (each.resource, each.devices)
            for each in (poll.listing.parts if poll is not None else ())
            if are_slots(each.devices) and poll is not None and not poll.listing.is_gone(each.pod_uid)
        }
        places = in_checkpoint.union(pair for _, pair in held_slots(state))
        limited = {slots_directory_name(*each) for each in places if is_limited(state, each[0])}
        entered = {slots_directory_name(*each) for each in in_checkpoint}
        present = limiter_files.list_own_directories(root, NAME)
        self._owners = {name: self._owners.get(name) or read_directory_owner(root, name) for name in present}
        for name in present:
            owner = self._owners[name]
            try:
                if name in held:
                    if (now := held[name]) is not None and now != owner:
                        with open_directory(root) as at, open_directory(name, at) as directory:
                            write_file(directory, OWNER, "\n".join(now).encode())
                        self._owners[name] = now
                elif (
                    poll is not None
                    and name not in entered
                    and not is_pod_present(owner.pod_uid if owner else "", poll)
                ):
                    limiter_files.remove_own_directory(root, name)
            except OSError as error:
                failure = error
        try:
            for name in limited - self._owners.keys():
                if (owner := held.get(name, NOBODY)) is not None:
                    make_locks(root)
                    prepare_slots_directory(root, name, owner)
        except OSError as error:
            failure = error
        if failure is not None:
            raise failure

    def remove_leftovers(self) -> None:
        """Removes the content of renamed directories. Raises OSError if some of it cannot be removed."""
        if configured := self._root().rstrip("/"):
            try:
                limiter_files.remove_leftovers(Path(configured))
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # the next cleanup continues
                    raise

    def _held(self, state: NodeState) -> dict[str, DirectoryOwner | None]:
        return {
            slots_directory_name(*pair): DirectoryOwner(each.id, each.pod_uid) if each is not None else None
            for each, pair in held_slots(state)
        }


def is_limited(state: NodeState, resource: ResourceName) -> bool:
    """Whether slots of this resource are limited by HAMi-core now."""
    return any(each.limiter == "hami-core" for each in state.hardware.offers_of.get(resource, ()))


def held_slots(state: NodeState) -> Iterator[tuple[Allocation | None, Held]]:
    """Yields the slots of each allocation of the record. The allocation is None for a displaced container."""
    for each in state.allocations.values():
        for former in each.displaced:
            yield from ((None, (name, frozenset(ids))) for name, ids in former.devices.items() if are_slots(ids))
    for each in state.allocations.values():
        yield from ((each, (name, frozenset(ids))) for name, ids in each.from_kubelet.items() if are_slots(ids))


def are_slots(devices: Collection[DeviceID]) -> bool:
    """Whether these may be slots, also of a former configuration: ids of a device followed by a number."""
    return any(base_of(each) != each and unit_kind(each) is None for each in devices)
