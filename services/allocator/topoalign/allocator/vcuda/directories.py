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

The same units may be another container's later. Its directory is made anew then: the former container, should it still run,
keeps what it has mounted, which has no name any more.

Files are replaced as a whole, and only directories with such a name that belong to this process' user are touched. Links are
not followed. What a process that was killed leaves (a draft, a directory that is being removed) is overwritten or removed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from topoalign.allocator.vcuda.limits import CONFIG_FILE, Limits, config_of, owner_in
from topoalign.core.model.ids import DeviceID, ResourceName

SOCKET = "vcuda.sock"
MODE = 0o755
NAME = re.compile(r"units-[0-9a-f]{32}")
GONE = ".gone-"
"""Before the name of a directory that is being removed."""
MOST_LISTED = 16_384
"""Entries of the root that are looked at."""


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
        if owner_of(root, name) != (limits.pod_uid, limits.container):
            discard(at, name)
            os.mkdir(name, MODE, dir_fd=at)
        with opened(name, at) as directory:
            os.fchmod(directory, MODE)
            for each in entries(directory):
                if each not in (CONFIG_FILE, SOCKET):
                    remove_entry(directory, each)
            if read_file(directory, CONFIG_FILE) != (config := config_of(limits)):
                write_file(directory, CONFIG_FILE, config, durable=True)


def remove(root: Path, name: str) -> None:
    """Removes a directory of ours, or what is left of it. Raises OSError."""
    with suppress(FileNotFoundError), opened(root) as at:
        discard(at, name)


def remove_leftovers(root: Path) -> None:
    """Removes directories of ours that were being removed when a former process ended. Raises OSError."""
    with suppress(FileNotFoundError), opened(root) as at:
        for each in entries(at):
            if each.startswith(GONE) and NAME.fullmatch(each.removeprefix(GONE)) and is_ours(at, each):
                shutil.rmtree(each, dir_fd=at)


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
    """Removes a directory of ours below this one: it loses its name first. Raises OSError for one that is not ours."""
    gone = f"{GONE}{name}"
    if is_ours(at, gone):
        shutil.rmtree(gone, dir_fd=at)
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not is_own_directory(found):
        raise FileExistsError(17, "something that is not ours is in the way", name)
    os.rename(name, gone, src_dir_fd=at, dst_dir_fd=at)
    shutil.rmtree(gone, dir_fd=at)


def is_ours(at: int, name: str) -> bool:
    """Whether this is a directory of this process' user."""
    try:
        return is_own_directory(os.stat(name, dir_fd=at, follow_symlinks=False))
    except OSError:
        return False


def is_own_directory(found: os.stat_result) -> bool:
    """Whether this is a directory, and no link to one, of this process' user."""
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def remove_entry(directory: int, name: str) -> None:
    """Removes a file, a link or a whole directory. Raises OSError."""
    if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=directory)
    else:
        os.unlink(name, dir_fd=directory)


@contextmanager
def opened(path: Path | str, at: int | None = None) -> Iterator[int]:
    """The descriptor of a directory; below another one no link is followed. Raises OSError."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if at is not None else 0)
    directory = os.open(path, flags, dir_fd=at)
    try:
        yield directory
    finally:
        os.close(directory)


def entries(directory: int) -> list[str]:
    """The names in it, `MOST_LISTED` at most. Raises OSError."""
    with os.scandir(directory) as found:
        return [entry.name for entry, _ in zip(found, range(MOST_LISTED), strict=False)]


def read_file(directory: int, name: str) -> bytes:
    """The content of a file of ours; empty where there is none."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return b""
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def write_file(directory: int, name: str, content: bytes, *, durable: bool = False) -> None:
    """
    Replaces a file as a whole: who opens it has the former content or this one. It is locked until it has its name, as its
    reader does; no lock of a reader is waited for, as a container could keep it for ever. `durable`: it is on the disk then.
    Raises OSError, and leaves the former one.
    """
    draft = f".{name}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
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
