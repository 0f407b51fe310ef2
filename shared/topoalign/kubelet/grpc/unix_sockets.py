"""
Creates and removes unix sockets in a directory that this process shares with others.

The kubelet removes files of its directory when it starts, other plugins use it, and an earlier process of
topoalign may have left its socket behind. So a path is checked before it is changed: only a socket that no process
serves is removed, never a link or a file, and never one that another process has created since.
"""

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from topoalign.core.model.errors import InvalidField, StateFault, clean

LONGEST_PATH = 107
"""Bytes of a socket's path that Linux takes."""

BACKLOG = 64
UCRED = struct.Struct("3i")
"""pid, uid and gid, as SO_PEERCRED gives them."""


class Identity(NamedTuple):
    """
    Distinguishes a socket from a later one with the same name: an inode number alone is soon used again. A new mode,
    owner or label makes it no other.
    """

    device: int
    inode: int
    made: int
    """mtime in nanoseconds: of a socket, the moment it was bound. What changes its inode changes the ctime alone."""


class Peer(NamedTuple):
    """The process at the other end, when it connected or began to listen."""

    pid: int
    """0: it cannot be seen from here, as of a process outside of this one's container."""
    uid: int


BUSY = Peer(0, 0)
"""A process whose queue of connections is full: it lives, and cannot be asked who it is."""


def identity(path: Path) -> Identity | None:
    """The identity of the socket at this path; None if there is none. Links are not followed."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return Identity(found.st_dev, found.st_ino, found.st_mtime_ns) if stat.S_ISSOCK(found.st_mode) else None


def peer(connection: socket.socket) -> Peer:
    """The process and user at the other end of a unix socket, as the kernel reports them."""
    pid, uid, _ = UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    return Peer(pid, uid)


def listen_on_path(path: Path, field: str, mode: int = 0o600, guard: Path | None = None) -> socket.socket:
    """
    Creates a socket that listens at this path, with this mode. A socket of a dead process there is removed first. `guard`:
    the directory that is locked meanwhile, if others may hold a lock on the socket's own for ever.

    Raises InvalidField about the setting `field` for a path that is too long, StateFault if the directory cannot be used,
    if another process serves there, or if something stands there that is not a socket.
    """
    check_path_length(path, field)
    try:
        with directory_lock(guard or path.parent):
            clear(path)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                before = os.umask(0o777 & ~mode)  # the socket has its mode from its creation
                try:
                    listening.bind(os.fspath(path))
                finally:
                    os.umask(before)
                listening.listen(BACKLOG)
            except OSError:
                listening.close()
                raise
    except OSError as error:
        raise StateFault(
            f"cannot listen at {clean(str(path), 200)}: {error.strerror}", "check the directory, its owner and its mode"
        ) from error
    return listening


def check_path_length(path: Path, field: str) -> None:
    """Raises InvalidField about the setting `field` if Linux cannot have a socket at this path."""
    size = len(os.fsencode(path))
    if size > LONGEST_PATH:
        raise InvalidField(
            field,
            f"the socket path {clean(str(path), 200)} has {size} bytes, and Linux takes at most {LONGEST_PATH}",
            "use a directory with a shorter path",
        )


def remove_socket(path: Path, mine: Identity | None) -> None:
    """Removes the socket if it is still the one that this process created."""
    if mine is not None and identity(path) == mine:
        with suppress(OSError):  # a disk became read-only: the stop must continue, and the next process finds it stale
            path.unlink(missing_ok=True)


def clear(path: Path) -> None:
    """Removes a stale socket at this path. Raises StateFault for a file or for a socket of a live process."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StateFault(
            f"{clean(str(path), 200)} is not a socket", "find out which program created it, then remove it by hand"
        )
    holder = server_of(path)
    if holder is not None:
        who = f"process {holder.pid}" if holder.pid else "another process"
        raise StateFault(f"{who} already serves {clean(str(path), 200)}", "stop it first: a node has one allocator")
    path.unlink(missing_ok=True)


def server_of(path: Path) -> Peer | None:
    """The process that listens at this path, BUSY if that cannot be found out; None if there is none."""
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            return BUSY
        except OSError:
            return None
        return peer(probe)


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """
    Locks the directory itself, so that no other process of ours checks the same path between our check and our bind. It is
    held for microseconds and never waited for.
    """
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateFault(
                f"another process is making a socket in {clean(str(directory), 200)}", "this passes by itself"
            ) from error
        yield
    finally:
        os.close(held)
