"""Processes of a node: in which container one runs, as its kernel tells."""

import msgspec

from topoalign.core.model.ids import ContainerName


class ProcessIdentity(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """Where a process runs and what it is called. Empty fields: not known, or, of a process in no pod, there is none."""

    pod_uid: str = ""
    """UID of its pod, as the kubelet's checkpoint has it: of a static pod 32 hex digits."""
    container_id: str = ""
    """Id that the container runtime has given to its container."""
    container: ContainerName = ContainerName("")
    """
    Name of its container in the pod, as the mounts of the container tell. A container that may mount can change it: good
    enough to show a person, and to choose between containers of one pod, but no proof.
    """
    cgroup: str = ""
    """Path of its control group, where that is none of a pod: `/system.slice/docker-….scope`."""
    command: str = ""
    """Name of its program, at most 15 bytes."""
