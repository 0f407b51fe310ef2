"""Opens files that a kubelet or an operator has written, and distinguishes their versions."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """A regular file, to be read. Raises OSError for any other: a named pipe would be waited for without end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_beginning(path: Path, most: int) -> bytes:
    """At most so many bytes of a file whose reads may be short, as in /proc and the cgroup file system. Raises OSError."""
    text = b""
    with path.open("rb", buffering=0) as opened:
        while len(text) < most and (more := opened.read(most - len(text))):
            text += more
    return text


def file_version(path: Path) -> tuple[int, ...]:
    """Inode, time of change in ns and size in bytes, which differ after every write; () where there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name with a null character
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
