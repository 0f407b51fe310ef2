"""A disk that is soon full, what is done to be sure that a disk has something, and a thread without the rights of root."""

import ctypes
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

VERSION = 0x20080522
"""Of the kernel's interface: two sets of 32 capabilities each."""
LIBC = ctypes.CDLL(None, use_errno=True)
Words = ctypes.Array[ctypes.c_uint32]
"""Of each 32 capabilities those that are effective, permitted and inheritable."""


@contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """This directory, which is made, on a disk of 64 KiB; skips where none can be mounted."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(directory)], capture_output=True, check=False, timeout=10
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True, timeout=10)


def fill(disk: Path) -> Path:
    """Writes until nothing more fits; returns the file."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(bytes(4096))
    return filler


def syncs_and_renames(patch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed from now on, in order: `sync FILE`, `sync directory`, `rename to FILE`."""
    calls: list[str] = []

    def noted(original: Callable[..., Any], note: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(note(*args))
            return original(*args, **kwargs)

        return call

    def synced(file: int) -> str:
        is_directory = stat.S_ISDIR(os.fstat(file).st_mode)
        return f"sync {'directory' if is_directory else Path(f'/proc/self/fd/{file}').readlink().name}"

    def renamed(source: str | Path, target: str | Path) -> str:
        return f"rename to {Path(target).name}"

    patch.setattr(os, "fsync", noted(os.fsync, synced))
    for name in ("rename", "replace"):
        patch.setattr(os, name, noted(getattr(os, name), renamed))
    return calls


def call(name: str, words: Words) -> None:
    if getattr(LIBC, name)((ctypes.c_uint32 * 2)(VERSION, 0), words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


@contextmanager
def without_capabilities() -> Iterator[None]:
    """This thread has none in the block, and those that it had afterwards."""
    had = (ctypes.c_uint32 * 6)()
    call("capget", had)
    call("capset", (ctypes.c_uint32 * 6)(0, *had[1:3], 0, *had[4:]))
    try:
        yield
    finally:
        call("capset", had)
