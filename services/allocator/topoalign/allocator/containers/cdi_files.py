"""
Puts CDI specifications where the container runtime reads them.

A file is replaced in one step, so that a runtime never reads half of one; it is not synced, because it is written anew at
the next start. Nothing is ever removed: containers that run refer to what is there, and are started again by it.

The directory must be there. If it were made here, then in a container that lacks the mount it would be made inside of it,
where no runtime reads.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from topoalign.allocator.containers.cdi import VENDOR, Specification
from topoalign.core.model.errors import StateFault, clean

READABLE = 0o644
"""Runtimes may run as another user than we do."""

Stamp = tuple[int, int, int, int]
"""Tells a file from what was put in its place: device, inode, time of change in nanoseconds, size."""


class SpecificationFiles:
    """Writes our CDI specification files in one directory, and checks that they stay as they were written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._written: dict[Path, Stamp] = {}

    def put(self, specifications: Mapping[str, Specification]) -> bool:
        """
        Writes the specifications (by class) that are missing or differ; returns whether it wrote any. Raises
        StateFault.
        """
        self._written = {}
        changed = False
        for kind, specification in specifications.items():
            path = self.directory / f"{VENDOR}-{kind}.json"
            content = msgspec.json.format(msgspec.json.encode(specification), indent=2) + b"\n"
            try:
                if not is_there(path, content):
                    replace(path, content)
                    changed = True
                self._written[path] = stamp(path)
            except OSError as error:
                raise StateFault(
                    f"cannot write the CDI specification {clean(str(path), 200)}: {error.strerror}", remedy(error)
                ) from error
        return changed

    def in_place(self) -> bool:
        """Whether all files are unchanged since `put`."""
        try:
            return all(stamp(path) == written for path, written in self._written.items())
        except OSError:
            return False


def is_there(path: Path, content: bytes) -> bool:
    """Whether a file of this content stands there, readable for all."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            return mode & 0o777 == READABLE and file.read(len(content) + 1) == content
    except OSError:
        return False


def replace(path: Path, content: bytes) -> None:
    """
    Replaces a file in one step. What an earlier process left unfinished is removed first. It has the ending `.new`, which
    no runtime reads.
    """
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(unfinished, flags, READABLE), "wb") as file:
        os.fchmod(file.fileno(), READABLE)  # whatever the umask says
        file.write(content)
    unfinished.replace(path)


def stamp(path: Path) -> Stamp:
    """What changes when a file is written or replaced. Raises OSError."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns, found.st_size


def remedy(error: OSError) -> str:
    """What an operator can do about a specification that cannot be written."""
    if isinstance(error, FileNotFoundError):
        return "make the directory on the node; in a container, mount the host's at the same path"
    return "see whether the directory is writable and its disk not full, or set TOPOALIGN_CDI_DIR to another one"
