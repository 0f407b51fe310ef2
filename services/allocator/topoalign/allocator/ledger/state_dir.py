"""
Checks and locks the state directory, and explains errors in its use.

The directory must belong to the allocator's user or to root. Only one process can use it at a time. A symbolic link in
place of the directory or of a file in it is rejected, because it could make the allocator write elsewhere.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from topoalign.core.model.errors import InvalidField, StateFault, clean

SETTING = "TOPOALIGN_STATE_DIR"

REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space; nothing was lost, and writes succeed again once there is space",
    errno.EDQUOT: "the quota is used up: free some space; nothing was lost",
    errno.EACCES: "the directory must belong to the user that the allocator runs as, with mode 0700",
    errno.EROFS: "the file system is read-only: give the allocator a writable state directory",
    errno.ELOOP: "a symbolic link has the name of a file of the allocator: remove it",
    errno.EEXIST: "a file has the name of the directory: remove it, or configure another directory",
    errno.ENOTDIR: "a part of its path is a file: configure another directory",
    errno.EIO: "the disk reports errors: check it; the entry counts as not written",
}

UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.EISDIR, errno.ENOTDIR})
"""Errors of an incorrect setup, which persist until it is corrected."""


PID = 20
"""Length to which the pid in the file `lock` is padded, so that a new pid fully overwrites the old one."""


class StateInUse(StateFault):
    """
    Raised if another process holds the lock of the state directory.

    Remedy: Stop the other process, or start with `--take-over`.
    """


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Creates the directory if missing, and holds its lock. Raises StateInUse, and InvalidField if it is unusable."""
    with usable():
        with faults(directory, "use the state directory"):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_state_dir(directory)
        with faults(directory, "use the state directory"):
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        take_state_lock(lock, directory)
        yield
    finally:
        os.close(lock)


def check_state_dir(directory: Path) -> None:
    """Raises StateFault if other users can write to the directory, or if this process cannot."""
    with faults(directory, "use the state directory"):
        found = directory.lstat()
    shown = clean(str(directory), 200)
    if stat.S_ISLNK(found.st_mode):
        raise StateFault(f"{shown} is a symbolic link", f"set {SETTING} to the directory that it leads to")
    if found.st_uid not in (os.geteuid(), 0):  # the volume of a pod belongs to root
        raise StateFault(
            f"{shown} belongs to user {found.st_uid}, and the allocator runs as user {os.geteuid()}",
            f"chown it to user {os.geteuid()}, or give the allocator another directory",
        )
    if found.st_mode & stat.S_IWOTH:
        raise StateFault(f"other users may write in {shown}", "chmod it to 0700")
    if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
        raise StateFault(
            f"the allocator may not write in {shown}", "chmod it to 0700, on a file system that is writable"
        )


def take_state_lock(lock: int, directory: Path) -> None:
    """Takes the lock on an open lock file and writes this pid into it. Raises StateInUse with the pid of the holder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = clean(os.pread(lock, 32, 0).decode("ascii", "replace").strip(), 32) or "unknown"
        raise StateInUse(
            f"{directory} is in use by another allocator, pid {holder}",
            "one allocator runs per node: stop the other one, or start this one with --take-over",
        ) from error
    with suppress(OSError):  # the pid is only used in messages, so a full disk must not prevent the start
        os.pwrite(lock, f"{os.getpid()}".ljust(PID).encode() + b"\n", 0)


def is_in_use(directory: Path) -> bool:
    """Whether any process, including this one, holds the directory's lock."""
    try:
        lock = os.open(directory / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def check_file(path: Path) -> None:
    """Raises StateFault if the journal exists and this process cannot read and write it."""
    with faults(path, "open the journal"):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except OSError as error:
            if error.errno in UNUSABLE:
                raise


def no_link(path: str, flags: int) -> int:
    """An opener for `open` that refuses a symbolic link with ELOOP."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)


def write_whole(file: int, data: bytes) -> None:
    """Writes all of the data to an open file, in several writes if necessary. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def write_synced(path: Path, data: bytes) -> None:
    """Writes and syncs a file, but not its directory entry. Raises OSError, including for a symbolic link."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_whole(file, data)
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def faults(path: Path, deed: str) -> Iterator[None]:
    """Turns an OSError into a StateFault with the failed action, the reason and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, f"check the directory that {SETTING} names")
        raise StateFault(f"cannot {deed} at {path}: {error.strerror or error}", remedy) from error


@contextmanager
def usable() -> Iterator[None]:
    """Turns a StateFault into an InvalidField about the setting of the directory."""
    try:
        yield
    except StateFault as fault:
        raise InvalidField(SETTING, fault.finding, fault.remedy) from fault
