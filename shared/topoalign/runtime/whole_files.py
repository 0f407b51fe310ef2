"""Replaces files as a whole, so that a reader, and a start after a power cut, finds the former content or the new one."""

import os
from contextlib import suppress
from pathlib import Path


def replace_file(
    name: str | Path, content: bytes, *, mode: int = 0o644, durable: bool = False, directory: int | None = None
) -> None:
    """
    Writes a new file, and gives it the name of this one. Links are not followed.

    `durable`: the content is on the disk before it has the name; the name is on the disk after `sync_directory`.
    `directory`: an open directory to which a relative `name` refers. Raises OSError; then the file is as it was.
    """
    path = Path(name)
    draft = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):  # of any type: opening a pipe would block
        os.unlink(draft, dir_fd=directory)
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=directory)
    try:
        os.fchmod(file, mode)  # independent of the umask
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(file, remaining) :]
        if durable:
            os.fsync(file)
        os.replace(draft, path, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with suppress(OSError):  # it takes space that others may need
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(file)


def sync_directory(directory: Path) -> None:
    """Syncs a directory, so that names made or replaced in it are on disk. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
