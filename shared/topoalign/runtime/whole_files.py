"""Replaces files atomically: a reader, or a start after a power failure, finds either the old or the new content."""

import os
from contextlib import suppress
from pathlib import Path


def replace_file(
    name: str | Path, content: bytes, *, mode: int = 0o644, durable: bool = False, directory: int | None = None
) -> None:
    """
    Writes a new file and renames it to `name`. Does not follow links.

    `durable`: the content is on disk before the rename; the rename is on disk after `sync_directory`. `directory`: an
    open directory to which a relative `name` refers. Raises OSError and leaves the old file unchanged.
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
        with suppress(OSError):  # to free its space
            os.unlink(draft, dir_fd=directory)
        raise
    finally:
        os.close(file)


def sync_directory(directory: Path) -> None:
    """Syncs a directory, so that names created or replaced in it are on disk. Raises OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
