"""
Manages the files and directories of limiters, below a root that only this process's user can access.

A container can write to its directory. So only regular files and directories are opened there, and symbolic links are
not followed. A directory is removed in two steps: it is renamed immediately, and its content is removed in small
batches. So a deep tree or a million files neither block the agent nor delay the next container with the same devices.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from secrets import token_hex

import structlog

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.allocator.ports import KubeletListing, Poll, ResourceEntry
from topoalign.core.model.errors import TopoalignError, clean
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Clock
from topoalign.core.state.share_amounts import equal_part, offered_in_slots
from topoalign.runtime.clock import until_tick


def with_checkpoint(poll: Poll | None) -> Poll | None:
    """Returns the poll if it can show that directories are unused; None: its checkpoint could not be read."""
    return poll if poll is not None and poll.listing.checkpoint is not None else None


def live_entries(listing: KubeletListing) -> list[ResourceEntry]:
    """Returns the entries of the checkpoint without those of deleted pods."""
    return [each for each in listing.parts if not listing.is_gone(each.pod_uid)]


def is_pod_present(pod_uid: str, poll: Poll) -> bool:
    """Whether the pod of a directory's owner still exists; False for an unknown owner."""
    pods = poll.listing.directories
    return bool(pod_uid) and pods is not None and not pods.is_gone(pod_uid)


def amount_of_slot(slot: DeviceID, gpu: DeviceID, amounts: Mapping[DeviceID, Amount], hardware: Topology) -> Amount:
    """Returns a slot's recorded amount, or an equal part. Raises ContainerUnready if the GPU is not in slots."""
    if gpu not in offered_in_slots(hardware):
        raise ContainerUnready(f"{gpu} is not in slots any more", "let the pod be created again")
    return amounts.get(slot) or equal_part(hardware, gpu)


COLLECT_SECONDS = 5.0
"""Cleanup interval."""

log = structlog.get_logger("topoalign.allocator.containers")


async def keep_directories(clean_up: Callable[[], Awaitable[None]], clock: Clock, again_seconds: float) -> None:
    """Cleans up every `COLLECT_SECONDS` (`again_seconds` after a failure) until cancelled. Logs each failure once."""
    failing = ""
    while True:
        before = failing
        failing = ""
        try:
            await clean_up()
        except (OSError, TopoalignError) as error:
            failing = str(error)
            if failing != before:
                log.warning("the directories of containers cannot be kept", reason=clean(failing, 200))
        await clock.sleep(until_tick(clock, again_seconds if failing else COLLECT_SECONDS))


MODE = 0o755
CLOSED = 0o700
"""Mode of the root. Containers need no access to it, because their directories are mounted."""
GONE = re.compile(r"\.gone-[0-9a-f]{16}")
"""The name of a directory that is being removed."""
MOST_LISTED = 16_384
"""Maximum number of entries that are read from the root."""
MOST_REMOVED = 512
"""Maximum number of entries that are removed in one batch, over all directories. A batch takes milliseconds."""
LEAST_REMOVED = 2
"""Minimum number of entries of each directory in a batch: a subdirectory and one entry in it."""
LARGEST = 1 << 16
"""Maximum number of bytes that are read from a file. A valid file has at most 8,240."""


@lru_cache(maxsize=256)  # about 20 MiB, if each has 320 ids
def digest_of(resource: ResourceName, devices: frozenset[DeviceID]) -> str:
    """Returns 32 hexadecimal digits for these devices of a resource, in any order."""
    text = "\0".join((resource, *sorted(devices)))
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


def make_root(root: Path) -> None:
    """Creates the root if needed, accessible only to this process's user. Raises OSError."""
    root.mkdir(mode=CLOSED, parents=True, exist_ok=True)
    with open_directory(root) as at:
        if (found := os.fstat(at)).st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != CLOSED:
            os.fchmod(at, CLOSED)


def list_own_directories(root: Path, name: re.Pattern[str]) -> list[str]:
    """Lists this user's directories with such a name in the root; empty without a root. Raises OSError."""
    try:
        with open_directory(root) as at:
            return [each for each in list_entries(at) if name.fullmatch(each) and is_own_directory(at, each)]
    except FileNotFoundError:
        return []


def remove_own_directory(root: Path, name: str) -> None:
    """Renames a directory of this user to free its name; `remove_leftovers` removes its content. Raises OSError."""
    with suppress(FileNotFoundError), open_directory(root) as at:
        discard(at, name)


def remove_leftovers(root: Path) -> None:
    """Removes up to `MOST_REMOVED` entries, split equally among the renamed directories. Raises OSError if any fail."""
    failure: OSError | None = None
    with suppress(FileNotFoundError), open_directory(root) as at:
        names = [each for each in list_entries(at) if GONE.fullmatch(each)]
        left = MOST_REMOVED
        for place, each in enumerate(names):
            part = max(LEAST_REMOVED, left // (len(names) - place))
            try:
                left -= remove_tree(at, each, part)
            except OSError as error:
                if error.errno == errno.ENOTEMPTY:  # the next cleanup continues
                    left -= part
                else:
                    failure = error  # a protected directory does not reduce the others' batch
            if left <= 0:
                break
    if failure is not None:
        raise failure


def discard(at: int, name: str) -> str:
    """Renames a directory and returns its new name; empty if there is none. Raises OSError if another user owns it."""
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return ""
    if not is_own_directory(at, name):
        raise FileExistsError(17, "a file or a directory of another user has this name", name)
    return put_aside(at, name, at)


def put_aside(directory: int, name: str, at: int) -> str:
    """Moves a directory to `at`, to be removed later, and returns its name there. Raises OSError."""
    gone = f".gone-{token_hex(8)}"
    os.rename(name, gone, src_dir_fd=directory, dst_dir_fd=at)
    return gone


def remove_tree(at: int, name: str, most: int = MOST_REMOVED) -> int:
    """
    Removes at most `most` entries of a directory tree, and returns their number. Directories on the second level are
    moved up, so that at most two are open at any depth. Raises OSError if the directory is not empty afterwards.
    """
    left = most
    names = (f"{token_hex(8)}-{number}" for number in range(most))
    unlock(at, name)
    with open_directory(name, at) as top:
        while left > 0 and (found := list_entries(top, left)):
            for each in found:
                left -= 1
                if is_real_directory(top, each):
                    left -= remove_level(top, each, names, left)
                else:
                    os.unlink(each, dir_fd=top)
    os.rmdir(name, dir_fd=at)
    return most - left


def remove_level(top: int, name: str, names: Iterator[str], most: int) -> int:
    """
    Removes at most `most` entries of a directory, and the directory itself if these are all. Its subdirectories are
    moved up instead, and named with the next of `names`. Returns the number of entries. Raises OSError.
    """
    unlock(top, name)
    with open_directory(name, top) as directory:
        found = list_entries(directory, max(0, most))
        for each in found:
            if is_real_directory(directory, each):
                unlock(directory, each)
                os.rename(each, next(names), src_dir_fd=directory, dst_dir_fd=top)
            else:
                os.unlink(each, dir_fd=directory)
    if len(found) < most:
        os.rmdir(name, dir_fd=top)
    return len(found)


def unlock(at: int, name: str) -> None:
    """Restores the owner's permissions on this user's directory. Root in containers may remove them. Raises OSError."""
    with open_directory(name, at, os.O_PATH) as directory:
        found = os.fstat(directory)
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{directory}", stat.S_IRWXU)


def is_own_directory(at: int, name: str) -> bool:
    """Whether this is a directory of this process's user, and not a symbolic link."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def is_real_directory(directory: int, name: str) -> bool:
    """Whether this is a directory of any user, and not a symbolic link. Raises OSError."""
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


@contextmanager
def open_directory(path: Path | str, at: int | None = None, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Opens a directory and yields its descriptor. With `at`, a symbolic link is not followed. Raises OSError."""
    flags |= os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if at is not None else 0)
    directory = os.open(path, flags, dir_fd=at)
    try:
        yield directory
    finally:
        os.close(directory)


def list_entries(directory: int, most: int = MOST_LISTED) -> list[str]:
    """Returns at most `most` names in a directory. Raises OSError."""
    with os.scandir(directory) as found:
        return [entry.name for entry in islice(found, most)]


def open_regular(directory: int, name: str, flags: int = os.O_RDONLY) -> int:
    """Opens a regular file and returns its descriptor. Raises OSError, including for any other type of file."""
    # Opening a device could have effects, and opening a pipe could block. With O_NONBLOCK it does not wait for a lease.
    found = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", name)
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(found)


def read_file(directory: int, name: str) -> bytes:
    """Returns the content of a file; empty if there is no regular file of this name."""
    try:
        file = open_regular(directory, name)
    except OSError:
        return b""
    try:
        return os.read(file, LARGEST)
    finally:
        os.close(file)
