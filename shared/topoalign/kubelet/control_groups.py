"""
Reads which processes are in a container's cgroup, from the host's cgroup file system.

The path of the cgroup comes from /proc/<pid>/cgroup, and its directory is below the root of a hierarchy. cgroup v2 has
one root, cgroup v1 has one for each controller, and a host with both has cgroup v2 at `unified`. The kernel reports the
path relative to the root of the reader's cgroup namespace. If the reader runs in a container, the path looks like
`/../../kubepods-burstable-pod….slice/…`, and the directory with this name is searched for, three levels deep.

A container can create cgroups below its own. Its processes are those in all of them.

Source: cgroups(7), and "Control Group v2" of the kernel's documentation.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath

from topoalign.core.model.errors import clean
from topoalign.core.model.processes import ProcessIdentity
from topoalign.core.usage.cgroups import CgroupPlacement, container_name_of, placement_of
from topoalign.kubelet.files.reading import read_beginning

HIERARCHIES = ("memory", "pids", "", "unified")
"""Directories below the root: for cgroup v1, controllers in which each container has a cgroup; then cgroup v2."""
PROCESSES = "cgroup.procs"
MOST_GROUPS = 4_096
"""Maximum number of cgroups that are read in one tree."""
MOST_BELOW = 1_024
"""Maximum number of cgroups that are read for one container, which can create any number. Takes a tenth of a second."""
LONGEST_LISTS = 1 << 18
"""Maximum number of bytes that are read of a container's process lists: about 30,000 processes."""
DEPTH = 3
"""The kubelet's cgroups above a pod's: kubelet.slice, kubelet-kubepods.slice, kubelet-kubepods-burstable.slice."""


def container_group(placement: CgroupPlacement) -> PurePosixPath | None:
    """
    The path of the container's own cgroup, without those that it created below; None if it is unknown.

    >>> container_group(Placement("uid-1", "9f86d081884c", "/kubepods/poduid-1/cri-9f86d081884c.scope/init.scope"))
    PurePosixPath('/kubepods/poduid-1/cri-9f86d081884c.scope')
    """
    if not placement.container_id:
        return None
    at = placement.path.find(placement.container_id)
    end = placement.path.find("/", at)
    return PurePosixPath(placement.path[: end if end >= 0 else None])


def processes_in(directory: Path) -> tuple[int, ...]:
    """Ids of the processes in this cgroup and those below, ascending. `LONGEST_LISTS` and `MOST_BELOW` limit them."""
    found: set[int] = set()
    left = LONGEST_LISTS
    for each in islice(walk_directories(directory), MOST_BELOW):
        try:
            text = read_beginning(each / PROCESSES, left)
        except OSError:  # the cgroup was removed meanwhile, or contains only threads
            continue
        text = text[: text.rfind(b"\n") + 1]  # only complete lines: the limit can cut one off
        left -= len(text)
        found.update(int(word) for word in text.split() if word.isdigit())
    return tuple(sorted(found - {0}))  # 0 stands for a process of another PID namespace


def directory_of(root: Path, group: PurePosixPath) -> Path | None:
    """The directory of this group; None if there is none. `root`: where the host's cgroup file system is mounted."""
    parts = [part for part in group.parts if part != "/"]
    own = [part for part in parts if part != ".."]
    if not own or parts[len(parts) - len(own) :] != own:
        return None
    for hierarchy in HIERARCHIES:
        base = root / hierarchy
        if not os.path.isfile(base / PROCESSES):  # Path.is_file raises without permission
            continue
        above = [base] if own == parts else list(walk_directories(base, DEPTH))
        for each in above:
            if os.path.isdir(found := each.joinpath(*own)):
                return found
    return None


def walk_directories(directory: Path, depth: int | None = None) -> Iterator[Path]:
    """This directory and up to `depth` levels below (None: all), breadth first; at most `MOST_GROUPS`, and no links."""
    level = [directory]
    count = 0
    while level and (depth is None or depth >= 0):
        below: list[Path] = []
        for each in level:
            count += 1
            if count > MOST_GROUPS:
                return
            yield each
            with suppress(OSError), os.scandir(each) as entries:
                found = (Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
                below += islice(found, MOST_GROUPS - len(below))
        level = below
        depth = None if depth is None else depth - 1


FIRST_NAMESPACE = "pid:[4026531836]"
"""The kernel's name of the initial PID namespace (PROC_PID_INIT_INO of Linux)."""
LONGEST_FILE = 1 << 20
"""Maximum number of bytes that are read of a file in /proc. A host with some thousand mounts has that many."""
LONGEST_PATH = 512
"""Characters of a control group's path that are kept."""


def sees_all_processes(proc: Path) -> bool:
    """Whether process ids in this container are those of the node (`hostPID`). `proc`: where /proc is mounted."""
    try:
        return str((proc / "self/ns/pid").readlink()) == FIRST_NAMESPACE
    except OSError:
        return False


def identity_of(proc: Path, pid: int) -> ProcessIdentity | None:
    """The container in which a process runs, according to /proc; None if the process has ended."""
    try:
        placement = placement_of(read_proc_text(proc / str(pid) / "cgroup"))
        command = read_proc_text(proc / str(pid) / "comm")
        mounts = read_proc_text(proc / str(pid) / "mountinfo") if placement.pod_uid else ""
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessIdentity(
        pod_uid=placement.pod_uid,
        container_id=placement.container_id,
        container=container_name_of(mounts, placement.pod_uid),
        cgroup="" if placement.pod_uid else clean(placement.path, LONGEST_PATH),
        command=clean(command.removesuffix("\n"), 64),
    )


def read_proc_text(file: Path) -> str:
    """The beginning of a file in /proc; empty if it cannot be read. Raises OSError if the process has ended."""
    try:
        return read_beginning(file, LONGEST_FILE).decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError:
        return ""
