"""
Creates and removes unix sockets in a directory that this process shares with others.

The kubelet removes files from its directory when it starts. Other plugins use the directory, too, and an earlier
process of topoalign may have left its socket there. So a path is checked before it is changed: only a socket that no
process serves is removed, never a link or a file, and never a socket that another process has created since.
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
"""Maximum length of a socket's path on Linux, in bytes."""

BACKLOG = 64
UCRED = struct.Struct("3i")
"""pid, uid and gid, as SO_PEERCRED returns them."""


class Identity(NamedTuple):
    """
    Distinguishes a socket from a later one at the same path. The inode number alone is not enough, because it is soon
    reused. A change of mode, owner or label does not change the identity.
    """

    device: int
    inode: int
    made: int
    """mtime in nanoseconds: the time at which the socket was bound. Changes of its inode only change the ctime."""


class Peer(NamedTuple):
    """The process that was at the other end when it connected or began to listen."""

    pid: int
    """0: not visible to this process, for example because the peer runs outside of this container."""
    uid: int


BUSY = Peer(0, 0)
"""A live process whose connection backlog is full, so that its identity cannot be determined."""


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
    Creates a socket with this mode that listens at this path. A dead process's socket there is removed first. `guard`:
    the directory to lock meanwhile, if others can lock the socket's directory forever; None: the socket's own.

    Raises InvalidField about the setting `field` for a path that is too long, StateFault if the directory cannot be
    used, if another process serves the path, or if the file at the path is not a socket.
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
    """Raises InvalidField about the setting `field` if the path is too long for a socket on Linux."""
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
        with suppress(OSError):  # such as on a read-only disk: shutdown continues, and the next process removes it
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
    """The process that listens at this path; BUSY if its backlog is full; None if there is none."""
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
    Locks the directory, so that no other process of topoalign checks the same path between the check and the bind. The
    lock is held for microseconds. Raises StateFault if another process holds it.
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
