"""
Who calls on a socket: what the kernel tells of the process at its other end, and nothing that this says of itself.

The process' control group has the UID of its pod and the id of its container; its mounts have the container's name. A
process that has ended, or of which this cannot be read, is nobody.
"""

from pathlib import Path, PurePosixPath
from typing import NamedTuple

from topoalign.core.usage.cgroups import container_name_of, placement_of
from topoalign.kubelet.control_groups import container_group
from topoalign.kubelet.processes import text_of


class Caller(NamedTuple):
    """The container in which a process runs."""

    pod_uid: str
    container: str
    container_id: str
    group: PurePosixPath
    """Of the container."""


def caller_of(proc: Path, pid: int) -> Caller | None:
    """The container of a process; None where it is in none, has ended, or is not visible here (0)."""
    if pid <= 0:
        return None
    try:
        placement = placement_of(text_of(proc / str(pid) / "cgroup"))
        group = container_group(placement)
        if group is None:
            return None
        container = container_name_of(text_of(proc / str(pid) / "mountinfo"), placement.pod_uid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Caller(placement.pod_uid, container, placement.container_id, group) if container else None
