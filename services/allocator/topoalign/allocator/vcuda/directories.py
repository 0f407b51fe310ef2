"""
The directories that containers see at /etc/vcuda: one for each allocation of units, below one root that is ours alone.

A directory is named after what was allocated, by a digest of the resource and the ids: not after the pod, which Allocate
does not tell, nor after a record, which is another one where the journal was lost. So the mount that the kubelet keeps, and
gives a container again whenever that starts, always finds it.

    <root>/units-2f1c…          of this process' user, mode 0755, mounted read-only
        vcuda.config            whose it is and what that is limited to; written before the container starts
        pids.config             processes of the container, since one of them has registered
        vcuda.sock
        <container id>/         the two files once more, where the library looks if there is no vcuda.config above

The same units may be another container's later. Its directory is made anew then: should the former container still run, what
it has mounted is empty from then on, and the library ends its processes, as it opens `pids.config` again and again (source:
vcuda-controller 72e0115, src/hijack_call.c).

Files are replaced as a whole, and only directories with such a name that belong to this process' user are touched. What a
process that was killed leaves (a draft, a directory that is being removed) is removed.

A container may write in its directory where its mount is not read-only. So nothing there is opened but files and
directories, and no link is followed. A directory that goes loses its name at once, and what is in it in short steps: a
pipe, a deep tree or a million files neither keep the agent busy nor keep the units from the next container.
"""

import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from secrets import token_hex

from topoalign.allocator.vcuda.limits import CONFIG_FILE, Limits, config_of, owner_in
from topoalign.core.model.ids import DeviceID, ResourceName

SOCKET = "vcuda.sock"
MODE = 0o755
NAME = re.compile(r"units-[0-9a-f]{32}")
GONE = re.compile(r"\.gone-[0-9a-f]{16}")
"""The name of a directory that is being removed, whoever made it."""
MOST_LISTED = 16_384
"""Entries of the root that are looked at."""
MOST_KEPT = 64
"""Entries of a directory that is used again: the agent makes four, and a draft."""
MOST_REMOVED = 512
"""Entries that are removed in one go: milliseconds."""
LARGEST = 1 << 16
"""Bytes of a file that are read: a whole one has 8,240 at most."""


def name_of(resource: ResourceName, units: Collection[DeviceID]) -> str:
    """The name of the directory of these units, in whatever order they are."""
    text = "\0".join((resource, *sorted(units)))
    return f"units-{hashlib.blake2s(text.encode(), digest_size=16).hexdigest()}"


def listed(root: Path) -> list[str]:
    """The names of the directories below the root that are ours; none where there is no root. Raises OSError."""
    try:
        with opened(root) as at:
            return [each for each in entries(at) if NAME.fullmatch(each) and is_ours(at, each)]
    except FileNotFoundError:
        return []


def config_in(root: Path, name: str) -> bytes:
    """The `vcuda.config` of a directory; empty where there is none."""
    try:
        with opened(root) as at, opened(name, at) as directory:
            return read_file(directory, CONFIG_FILE)
    except OSError:
        return b""


def owner_of(root: Path, name: str) -> tuple[str, str] | None:
    """Pod UID and container whose directory this is; None where it is nobody's yet."""
    return owner_in(config_in(root, name))


def prepare(root: Path, name: str, limits: Limits) -> None:
    """
    Has the directory in place for a container with these limits that is about to start. What a former container of that name
    registered goes; the directory of another one is made anew. Raises OSError; then no half file is there, and it can be
    repeated.
    """
    root.mkdir(mode=MODE, parents=True, exist_ok=True)
    with opened(root) as at:
        if owner_of(root, name) != (limits.pod_uid, limits.container) or is_crowded(at, name):
            discard(at, name)
            os.mkdir(name, MODE, dir_fd=at)
        with opened(name, at) as directory:
            os.fchmod(directory, MODE)
            for each in entries(directory):
                if is_directory(directory, each):
                    put_aside(directory, each, at)
                elif each not in (CONFIG_FILE, SOCKET):
                    os.unlink(each, dir_fd=directory)
            if read_file(directory, CONFIG_FILE) != (config := config_of(limits)):
                write_file(directory, CONFIG_FILE, config, durable=True)


def remove(root: Path, name: str) -> None:
    """Removes a directory of ours; what takes longer, `remove_leftovers` does. Raises OSError."""
    with suppress(FileNotFoundError), opened(root) as at:
        discard(at, name)


def remove_leftovers(root: Path) -> None:
    """
    Goes on removing directories that were being removed, also when a former process ended. Raises OSError, once all have had
    their turn, where some are not gone yet.
    """
    failure: OSError | None = None
    with suppress(FileNotFoundError), opened(root) as at:
        for each in entries(at):
            if GONE.fullmatch(each):
                try:
                    remove_tree(at, each)
                except OSError as error:
                    failure = error
    if failure is not None:
        raise failure


def write_registered(root: Path, name: str, container_id: str, files: dict[str, bytes], pids: str) -> None:
    """
    Writes the files of a container that has registered into the directory of its id, and that called `pids` beside it: where
    they are that already, nothing. Raises OSError, also where the directory is not there any more.
    """
    with opened(root) as at, opened(name, at) as directory:
        with suppress(FileExistsError):
            os.mkdir(container_id, MODE, dir_fd=directory)
        with opened(container_id, directory) as own:
            os.fchmod(own, MODE)
            for file, content in files.items():
                if read_file(own, file) != content:
                    write_file(own, file, content)
        if read_file(directory, pids) != files[pids]:
            write_file(directory, pids, files[pids])


def discard(at: int, name: str) -> None:
    """Takes a directory of ours below this one away: its name is free then. Raises OSError for one that is not ours."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not is_own_directory(found):
        raise FileExistsError(17, "something that is not ours is in the way", name)
    put_aside(at, name, at)


def put_aside(directory: int, name: str, at: int) -> None:
    """Moves a directory out of the way, to `at`, and removes it so far as this is done quickly. Raises OSError."""
    gone = f".gone-{token_hex(8)}"
    os.rename(name, gone, src_dir_fd=directory, dst_dir_fd=at)
    with suppress(OSError):
        remove_tree(at, gone)


def remove_tree(at: int, name: str) -> None:
    """
    Removes a directory with what is in it, `MOST_REMOVED` entries at most. A directory in one of its directories is moved
    up: so two are open, however deep the tree is. Raises OSError where it is not gone afterwards.
    """
    moved = token_hex(8)
    with opened(name, at) as top:
        for number in range(MOST_REMOVED):
            each = next(iter(entries(top, 1)), None)
            if each is None:
                break
            if not is_directory(top, each):
                os.unlink(each, dir_fd=top)
                continue
            with opened(each, top) as directory:
                below = next(iter(entries(directory, 1)), None)
                if below is None:
                    os.rmdir(each, dir_fd=top)
                elif is_directory(directory, below):
                    os.rename(below, f"{moved}-{number}", src_dir_fd=directory, dst_dir_fd=top)
                else:
                    os.unlink(below, dir_fd=directory)
    os.rmdir(name, dir_fd=at)


def is_crowded(at: int, name: str) -> bool:
    """Whether a directory has more in it than `MOST_KEPT`. Raises OSError where there is none."""
    with opened(name, at) as directory:
        return len(entries(directory, MOST_KEPT + 1)) > MOST_KEPT


def is_ours(at: int, name: str) -> bool:
    """Whether this is a directory of this process' user."""
    try:
        return is_own_directory(os.stat(name, dir_fd=at, follow_symlinks=False))
    except OSError:
        return False


def is_own_directory(found: os.stat_result) -> bool:
    """Whether this is a directory, and no link to one, of this process' user."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def is_directory(directory: int, name: str) -> bool:
    """Whether this is a directory, and no link to one. Raises OSError."""
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


@contextmanager
def opened(path: Path | str, at: int | None = None) -> Iterator[int]:
    """The descriptor of a directory; below another one no link is followed. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if at is not None else 0)
    directory = os.open(path, flags, dir_fd=at)
    try:
        yield directory
    finally:
        os.close(directory)


def entries(directory: int, most: int = MOST_LISTED) -> list[str]:
    """The names in it, so many at most. Raises OSError."""
    with os.scandir(directory) as found:
        return [entry.name for entry in islice(found, most)]


def read_file(directory: int, name: str) -> bytes:
    """The content of a file; empty where there is none. Nothing else is opened: a device could do something then."""
    try:
        found = os.open(name, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    except OSError:
        return b""
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return b""
        file = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # no lease is waited for
    except OSError:
        return b""
    finally:
        os.close(found)
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
