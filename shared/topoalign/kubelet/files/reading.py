"""Opens files that a kubelet or an operator has written, and distinguishes their versions."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError for any other file: reading a named pipe could block forever."""
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
    """Reads up to `most` bytes of a file whose reads can be short, as in /proc and in cgroups. Raises OSError."""
    text = b""
    with path.open("rb", buffering=0) as opened:
        while len(text) < most and (more := opened.read(most - len(text))):
            text += more
    return text


def file_version(path: Path) -> tuple[int, ...]:
    """Inode, mtime in ns and size in bytes, which together change with every write; () if there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # ValueError: a name with a null character
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size
