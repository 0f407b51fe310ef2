"""
Finds the pod and the container of a process from /proc/<pid>/cgroup and /proc/<pid>/mountinfo.

The kubelet creates a control group (cgroup) for each pod, with the pod's UID in its name. Below it, the container
runtime creates one for each container, with the container's id in its name. The names depend on the cgroup drivers:

    cgroupfs                          /kubepods/burstable/pod1b4e28ba-…/9f86d0…
    systemd                           /kubepods.slice/…/kubepods-burstable-pod1b4e28ba_….slice/cri-containerd-9f86d0….scope
    systemd, the runtime cgroupfs     /kubepods-burstable-pod1b4e28ba_….slice:cri-containerd:9f86d0…

Version 1 of cgroups has a line for each controller, version 2 has a single line, and a host with both versions has
both. Groups above that of the pod are ignored. So these paths are also supported: those of a kubelet with its own root
(kind: `/kubelet.slice/kubelet-kubepods.slice/…`), and those that are visible in a container with its own cgroup
namespace (`/../../kubepods-burstable-pod….slice/…`). A container can create groups below its own group, so the
outermost matching groups are those of the pod and the container.

The name of the container is not in the group, but in the mounts of the container: for the termination message, the
kubelet mounts a file of `pods/<uid>/containers/<name>/` into each container.

Source: kubelet v1.36.3, cgroup_manager_linux and pod_container_manager_linux; kubelet_pods (makeMounts).
"""

import re
from typing import NamedTuple

from topoalign.core.model.ids import ContainerName

_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
"""UID of a pod, or of a static pod, whose UID is a digest. The names of systemd have `_` instead of `-`."""
_POD = rf"(?:(?:/|^|-)pod(?P<uid>{_UID})|kubepods[/-](?:(?:burstable|besteffort)[/-])?pod(?P<named>[0-9A-Za-z_-]+))"
"""
The group of a pod. The manifest of a static pod can contain any UID. Such a UID is accepted only if the parent group
has the kubelet's default name.
"""
_PATTERNS = tuple(
    re.compile(_POD + r"(?P<slice>\.slice)?" + rest + r"(?![0-9A-Za-z_-])")
    for rest in (r"(?:/|:)(?:[a-z][a-z-]*[-:])?(?P<id>[0-9a-f]{12,64})", "(?P<id>)")
)
"""For a container in a pod, and for a pod without a container."""
_MOUNTED = re.compile(r"(?:/|^)pods/(?P<uid>[^/]+)/containers/(?P<name>[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/[^/]+$")


class CgroupPlacement(NamedTuple):
    """The pod and the container that the path of a control group identifies."""

    pod_uid: str = ""
    container_id: str = ""
    """Empty although `pod_uid` is not: the group of the container is not recognized."""
    path: str = ""
    """The path of the group, as reported by the kernel. Without a pod, the longest one of all lines."""


def placement_of(cgroups: str) -> CgroupPlacement:
    """The placement of a process. `cgroups`: its /proc/<pid>/cgroup, with lines `<hierarchy>:<controllers>:<path>`."""
    paths = [parts[2] for line in cgroups.splitlines() if len(parts := line.split(":", 2)) == 3]
    for pattern in _PATTERNS:
        for path in paths:
            if found := pattern.search(path):
                uid = found["uid"] or found["named"]
                return CgroupPlacement(uid.replace("_", "-") if found["slice"] else uid, found["id"], path)
    return CgroupPlacement(path=max(paths, key=len, default=""))


def container_name_of(mounts: str, pod_uid: str) -> ContainerName:
    """
    The container of this pod that has these mounts; empty: unknown. `mounts`: /proc/<pid>/mountinfo, in which the
    fourth field is the source.
    """
    for line in mounts.splitlines():
        fields = line.split(" ", 4)
        found = _MOUNTED.search(fields[3]) if len(fields) == 5 else None
        if found is not None and found["uid"] == pod_uid:
            return ContainerName(found["name"])
    return ContainerName("")
