"""
The directories that containers see at /etc/vcuda: one for each allocation of units, below one root that is ours alone.

A directory is named after what was allocated, by a digest of the resource and the ids: not after the pod, which Allocate
does not tell, nor after a record, which is another one where the journal was lost. So the mount that the kubelet keeps, and
gives a container again whenever that starts, always finds it.

    <root>/units-2f1c…          of this process' user, mode 0755, mounted read-only
        vcuda.config            whose it is and what that is limited to; written before the container starts
        pids.config             processes of the container, since one of them has registered
        vcuda.sock
        <container id>/         the two files once more, where the library looks if there is no vcuda.config above

The same units may be another container's later. Its directory is made anew then: should the former container still run, what
it has mounted is empty from then on, and the library ends its processes, as it opens `pids.config` again and again (source:
vcuda-controller 72e0115, src/hijack_call.c).

The root is closed to other users of the host (mode 0700): control groups and mounts tell which container calls, and a user
to whom the host leaves a control group may give it and its mounts the names of one.

Files are replaced as a whole, and only directories with such a name that belong to this process' user are touched. What a
process that was killed leaves (a draft, a directory that is being removed) is removed.

A container may write in its directory where its mount is not read-only. So nothing there is opened but files and
directories, and no link is followed. A directory that goes loses its name at once, and what is in it in short steps: a
pipe, a deep tree or a million files neither keep the agent busy nor keep the units from the next container.
"""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.limiter_files import (
    MODE,
    digest_of,
    discard,
    entries,
    is_directory,
    is_socket,
    make_root,
    opened,
    put_aside,
    read_file,
    remove_tree,
    write_file,
)
from topoalign.allocator.containers.vcuda.limits import CONFIG_FILE, Limits, config_of, owner_in
from topoalign.core.model.ids import DeviceID, ResourceName

SOCKET = "vcuda.sock"
NAME = re.compile(r"units-[0-9a-f]{32}")
MOST_KEPT = 64
"""Entries of a directory that is used again: the agent makes four, and a draft."""


def name_of(resource: ResourceName, units: Collection[DeviceID]) -> str:
    """The name of the directory of these units, in whatever order they are."""
    return f"units-{digest_of(resource, units)}"


def listed(root: Path) -> list[str]:
    """The names of the directories below the root that are ours; none where there is no root. Raises OSError."""
    return limiter_files.listed(root, NAME)


def config_in(root: Path, name: str) -> bytes:
    """The `vcuda.config` of a directory; empty where there is none."""
    try:
        with opened(root) as at, opened(name, at) as directory:
            return read_file(directory, CONFIG_FILE)
    except OSError:
        return b""


def owner_of(root: Path, name: str) -> tuple[str, str] | None:
    """Pod UID and container whose directory this is; None where it is nobody's yet."""
    return owner_in(config_in(root, name))


def prepare(root: Path, name: str, limits: Limits) -> None:
    """
    Has the directory in place for a container with these limits that is about to start. What a former container of that name
    registered goes; the directory of another one is made anew. Raises OSError; then no half file is there, and it can be
    repeated.
    """
    make_root(root)
    with opened(root) as at:
        if owner_of(root, name) != (limits.pod_uid, limits.container) or is_crowded(at, name):
            if gone := discard(at, name):
                with suppress(OSError):  # its former container, if that runs still, finds it empty at once
                    remove_tree(at, gone)
            os.mkdir(name, MODE, dir_fd=at)
        with opened(name, at) as directory:
            os.fchmod(directory, MODE)
            for each in entries(directory):
                if is_directory(directory, each):
                    put_aside(directory, each, at)
                elif each != CONFIG_FILE and not (each == SOCKET and is_socket(directory, each)):
                    os.unlink(each, dir_fd=directory)
            if read_file(directory, CONFIG_FILE) != (config := config_of(limits)):
                write_file(directory, CONFIG_FILE, config, durable=True)


def write_registered(root: Path, name: str, container_id: str, files: dict[str, bytes], pids: str) -> None:
    """
    Writes the files of a container that has registered into the directory of its id, and that called `pids` beside it: where
    they are that already, nothing. Raises OSError, also where the directory is not there any more.
    """
    with opened(root) as at, opened(name, at) as directory:
        with suppress(FileExistsError):
            os.mkdir(container_id, MODE, dir_fd=directory)
        with opened(container_id, directory) as own:
            os.fchmod(own, MODE)
            for file, content in files.items():
                if read_file(own, file) != content:
                    write_file(own, file, content)
        if read_file(directory, pids) != files[pids]:
            write_file(directory, pids, files[pids])


def is_crowded(at: int, name: str) -> bool:
    """Whether a directory has more in it than `MOST_KEPT`. Raises OSError where there is none."""
    with opened(name, at) as directory:
        return len(entries(directory, MOST_KEPT + 1)) > MOST_KEPT
