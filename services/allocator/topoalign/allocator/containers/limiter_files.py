"""
Files and directories that limiters keep for containers, below a root that is this process' user's alone.

Directories are named after what was allocated. Files are replaced as a whole. A container may write in its directory: so
nothing there is opened but files and directories, no link is followed, and a directory that goes loses its name at once and
what is in it in short steps.
"""

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex

from topoalign.allocator.containers.host_files import ContainerUnready
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.share_amounts import equal_part, offered_in_slots

# What a container holds by a slot, for the limiters that tell it so (`mps`, `hami_core.answers`).


def amount_of_slot(slot: DeviceID, gpu: DeviceID, amounts: Mapping[DeviceID, Amount], hardware: Topology) -> Amount:
    """
    The amount that is recorded for the slot, or else an equal part of `gpu`, which it is of. Raises ContainerUnready for a
    GPU that is not in slots any more. `amounts`: slot -> what is recorded.
    """
    if gpu not in offered_in_slots(hardware):
        raise ContainerUnready(f"{gpu} is not in slots any more", "let the pod be made anew")
    return amounts.get(slot) or equal_part(hardware, gpu)


MODE = 0o755
CLOSED = 0o700
"""Of the root. Containers need no right to it, because what they see is mounted."""
GONE = re.compile(r"\.gone-[0-9a-f]{16}")
"""The name of a directory that is being removed, whoever made it."""
MOST_LISTED = 16_384
"""Entries of the root that are looked at."""
MOST_REMOVED = 512
"""Entries that are removed in one go, of all directories that go together: milliseconds."""
LEAST_REMOVED = 2
"""Of each directory in its turn: a directory in it, and one entry of that."""
LARGEST = 1 << 16
"""Bytes of a file that are read: a whole one has 8,240 at most."""


def digest_of(resource: ResourceName, devices: Collection[DeviceID]) -> str:
    """32 digits for these devices of a resource, in whatever order they are."""
    text = "\0".join((resource, *sorted(devices)))
    return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


def make_root(root: Path) -> None:
    """Has the root, for this process' user alone. Raises OSError."""
    root.mkdir(mode=CLOSED, parents=True, exist_ok=True)
    with open_directory(root) as at:
        if (found := os.fstat(at)).st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != CLOSED:
            os.fchmod(at, CLOSED)


def list_own_directories(root: Path, name: re.Pattern[str]) -> list[str]:
    """The directories of ours below the root that have such a name; none where there is no root. Raises OSError."""
    try:
        with open_directory(root) as at:
            return [each for each in list_entries(at) if name.fullmatch(each) and is_own_entry(at, each)]
    except FileNotFoundError:
        return []


def remove_own_directory(root: Path, name: str) -> None:
    """Takes a directory of ours away: its name is free then, and `remove_leftovers` does the rest. Raises OSError."""
    with suppress(FileNotFoundError), open_directory(root) as at:
        discard(at, name)


def remove_leftovers(root: Path) -> None:
    """
    Goes on removing directories that were taken away, also by a former process: `MOST_REMOVED` entries of all of them, of
    each an equal part. Raises OSError, once all have had their turn, where some are not gone yet.
    """
    failure: OSError | None = None
    with suppress(FileNotFoundError), open_directory(root) as at:
        names = [each for each in list_entries(at) if GONE.fullmatch(each)]
        left = MOST_REMOVED
        for place, each in enumerate(names):
            part = max(LEAST_REMOVED, left // (len(names) - place))
            try:
                left -= remove_tree(at, each, part)
            except PermissionError as error:
                failure = error  # what is protected takes no other one's turn
            except OSError as error:
                failure = error
                left = left - part
            if left <= 0:
                break
    if failure is not None:
        raise failure


def discard(at: int, name: str) -> str:
    """
    Takes a directory of ours below this one away, and returns what it is called now; empty where there is none. Raises
    OSError for one that is not ours.
    """
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return ""
    if not is_own_directory(found):
        raise FileExistsError(17, "something that is not ours is in the way", name)
    return put_aside(at, name, at)


def put_aside(directory: int, name: str, at: int) -> str:
    """
    Moves a directory out of the way, to `at`, whatever is in it, and returns what it is called there: how long removing that
    takes is the container's to say, and nobody waits for it. Raises OSError.
    """
    gone = f".gone-{token_hex(8)}"
    os.rename(name, gone, src_dir_fd=directory, dst_dir_fd=at)
    return gone


def remove_tree(at: int, name: str, most: int = MOST_REMOVED) -> int:
    """
    Removes a directory with what is in it, so many entries at most, and returns how many they were. A directory in one of
    its directories is moved up: so two are open, however deep the tree is. Raises OSError where it is not gone afterwards.
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
    Removes a directory with so many of its entries, where these are all; directories in it are moved up, to the next of the
    names. Returns how many they were. Raises OSError.
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
    """
    Gives this process' user the rights to a directory of its own: a container's root has the same number, and without
    capabilities an agent could not enter what that has closed. Raises OSError.
    """
    directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        found = os.fstat(directory)
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(f"/proc/self/fd/{directory}", stat.S_IRWXU)
    finally:
        os.close(directory)


def is_own_entry(at: int, name: str) -> bool:
    """Whether this is a directory of this process' user."""
    try:
        return is_own_directory(os.stat(name, dir_fd=at, follow_symlinks=False))
    except OSError:
        return False


def is_own_directory(found: os.stat_result) -> bool:
    """Whether this is a directory, and no link to one, of this process' user."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def is_real_directory(directory: int, name: str) -> bool:
    """Whether this is a directory, and no link to one. Raises OSError."""
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


def is_socket(directory: int, name: str) -> bool:
    """Whether this is a socket. Raises OSError."""
    return stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


@contextmanager
def open_directory(path: Path | str, at: int | None = None) -> Iterator[int]:
    """The descriptor of a directory; below another one no link is followed. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if at is not None else 0)
    directory = os.open(path, flags, dir_fd=at)
    try:
        yield directory
    finally:
        os.close(directory)


def list_entries(directory: int, most: int = MOST_LISTED) -> list[str]:
    """The names in it, so many at most. Raises OSError."""
    with os.scandir(directory) as found:
        return [entry.name for entry in islice(found, most)]


def open_regular(directory: int, name: str, flags: int = os.O_RDONLY) -> int:
    """
    The descriptor of a regular file. Raises OSError, also where something else has the name: nothing else is opened, because
    a device could do something then, and a pipe wait. No lease is waited for.
    """
    found = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", name)
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(found)


def read_file(directory: int, name: str) -> bytes:
    """The content of a file; empty where there is none, and where something else has the name."""
    try:
        file = open_regular(directory, name)
    except OSError:
        return b""
    try:
        return os.read(file, LARGEST)
    finally:
        os.close(file)


def write_file(directory: int, name: str, content: bytes, *, durable: bool = False) -> None:
    """
    Replaces a file as a whole: who opens it has the former content or this one. It is locked until it has its name, as its
    reader does; no lock of a reader is waited for, as a container could keep it for ever, and nothing that is there is
    written to. `durable`: it is on the disk then. Raises OSError, and leaves the former one.
    """
    draft = f".{name}.new"
    with suppress(FileNotFoundError):
        os.unlink(draft, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(draft, flags, 0o644, dir_fd=directory)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(file, 0o644)
        written = 0
        while written < len(content):
            written += os.write(file, content[written:])
        if durable:
            os.fsync(file)
        os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(file)
