"""
The directories in which the library keeps its shared file: one for each allocation of slots, below one root.

A directory is named by a digest of the resource and the slots, as those of vcuda are: not after the record, which is another
one where the journal was lost. So the mount that the kubelet keeps, and gives a container again whenever that starts, always
finds it, and one that is gone can be made again.

    <root>/slots-2f1c…          of this process' user, mode 0755: a container cannot change what is in it
        of                      the record that it was made for and, once known, the UID of its pod
        cache/                  mode 0777, mounted read-write at /usr/local/vgpu
    <root>/vgpulock/            mode 0777, mounted at /tmp/vgpulock of all containers

The root is closed to other users of the host (mode 0700): a container's root may leave programs there that run as root, and
device nodes. Containers need no right to it, because what they see is mounted.

Allocate makes a directory anew for another record: the former one loses its name, and sweeps remove it. `cache` is the
container's, which may have changed it in every way; `vgpulock` is all containers', and where one has made it its own, the
next containers get another one.
"""

import os
import re
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import (
    MODE,
    digest_of,
    discard,
    make_root,
    opened,
    put_aside,
    read_file,
    write_file,
)
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName

NAME = re.compile(r"slots-[0-9a-f]{32}")
OWNER = "of"
CACHE = "cache"
LOCKS = "vgpulock"
OPEN = 0o777
"""Of directories in which users of all containers write."""


class Owner(NamedTuple):
    """Whose a directory is."""

    allocation: AllocationID
    pod_uid: str = ""
    """Empty: not known yet."""


def name_of(resource: ResourceName, slots: Collection[DeviceID]) -> str:
    """The name of the directory of these slots, in whatever order they are."""
    return f"slots-{digest_of(resource, slots)}"


def listed(root: Path) -> list[str]:
    """The names of the directories below the root that are ours; none where there is no root. Raises OSError."""
    return limiter_files.listed(root, NAME)


def owner_of(root: Path, name: str) -> Owner | None:
    """Whose a directory is; None where that is not written."""
    try:
        with opened(root) as at, opened(name, at) as directory:
            allocation, _, pod_uid = read_file(directory, OWNER).decode("utf-8", "replace").partition("\n")
    except OSError:
        return None
    return Owner(AllocationID(allocation), pod_uid.strip()) if allocation else None


def make_locks(root: Path) -> None:
    """Has the root, for this process' user alone, and the directory of locks. Raises OSError."""
    make_root(root)
    with opened(root) as at:
        if is_taken(at, LOCKS):
            put_aside(at, LOCKS, at)
        make_open(at, LOCKS)


def is_taken(at: int, name: str) -> bool:
    """Whether this is a directory that a container has given to another user: its rights are that user's to set."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid != os.geteuid()


def prepare(root: Path, name: str, owner: Owner) -> None:
    """
    Has the directory of this record, with nothing of a former one in it; what its own container has written stays. Raises
    OSError; then it can be repeated.
    """
    with opened(root) as at:
        former = owner_of(root, name)
        if former is not None and former.allocation == owner.allocation:
            with opened(name, at) as directory:
                make_open(directory, CACHE)
            return
        discard(at, name)
        os.mkdir(name, MODE, dir_fd=at)
        with opened(name, at) as directory:
            os.fchmod(directory, MODE)
            make_open(directory, CACHE)
            write_file(directory, OWNER, "\n".join(owner).encode())


def write_owner(root: Path, name: str, owner: Owner) -> None:
    """Notes whose a directory is; its content stays. Raises OSError."""
    with opened(root) as at, opened(name, at) as directory:
        write_file(directory, OWNER, "\n".join(owner).encode())


def make_open(at: int, name: str) -> None:
    """
    Has a directory that all users may write to, also where its container has closed it. Raises OSError, also where something
    else has the name.
    """
    with suppress(FileExistsError):
        os.mkdir(name, OPEN, dir_fd=at)
    directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        if stat.S_IMODE(os.fstat(directory).st_mode) != OPEN:
            os.chmod(f"/proc/self/fd/{directory}", OPEN)
    finally:
        os.close(directory)
