"""
Reads from /proc in which container a process runs.

Ids of processes mean the node's own only in its first PID namespace. In another one, as in a container without `hostPID`,
the same number is another process or none: `sees_all_processes` tells, and then nobody may be looked up.

A process may end at any time, also between two of its files: then there is nothing to tell, and it is no error.
"""

from pathlib import Path

from topoalign.core.model.errors import clean
from topoalign.core.model.processes import ProcessIdentity
from topoalign.core.usage.cgroups import container_name_of, placement_of

FIRST_NAMESPACE = "pid:[4026531836]"
"""What the kernel calls its first PID namespace (PROC_PID_INIT_INO of Linux)."""
LONGEST_FILE = 1 << 20
"""Bytes of a file in /proc that are read; a host of some thousand mounts has that many."""
LONGEST_PATH = 512
"""Characters of a control group's path that are kept."""


def sees_all_processes(proc: Path) -> bool:
    """Whether the ids of processes are those of the node here. `proc`: where /proc is mounted."""
    try:
        return str((proc / "self/ns/pid").readlink()) == FIRST_NAMESPACE
    except OSError:
        return False


def identity_of(proc: Path, pid: int) -> ProcessIdentity | None:
    """
    Where a process runs; None where it has ended. What may not be read is empty. `proc`: where /proc is mounted.
    """
    try:
        placement = placement_of(text_of(proc / str(pid) / "cgroup"))
        command = text_of(proc / str(pid) / "comm")
        mounts = text_of(proc / str(pid) / "mountinfo") if placement.pod_uid else ""
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessIdentity(
        pod_uid=placement.pod_uid,
        container_id=placement.container_id,
        container=container_name_of(mounts, placement.pod_uid),
        cgroup="" if placement.pod_uid else clean(placement.path, LONGEST_PATH),
        command=clean(command.removesuffix("\n"), 64),
    )


def text_of(file: Path) -> str:
    """
    The beginning of a file in /proc; empty where it may not be read. Raises FileNotFoundError and ProcessLookupError where
    the process has ended.
    """
    try:
        with file.open("rb", buffering=0) as opened:
            parts = []
            size = 0
            while size < LONGEST_FILE and (part := opened.read(LONGEST_FILE - size)):
                parts.append(part)
                size += len(part)
    except (FileNotFoundError, ProcessLookupError):
        raise
    except OSError:
        return ""
    return b"".join(parts).decode("utf-8", "replace")
