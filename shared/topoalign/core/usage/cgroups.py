"""
Reads from /proc/<pid>/cgroup and /proc/<pid>/mountinfo in which container of which pod a process runs.

The kubelet gives each pod a control group with the pod's UID in its name, and the container runtime puts each container
below it, in one with the container's id. How they are written depends on the driver of both:

    cgroupfs                          /kubepods/burstable/pod1b4e28ba-…/9f86d0…
    systemd                           /kubepods.slice/…/kubepods-burstable-pod1b4e28ba_….slice/cri-containerd-9f86d0….scope
    systemd, the runtime cgroupfs     /kubepods-burstable-pod1b4e28ba_….slice:cri-containerd:9f86d0…

Version 1 has a line for each controller, version 2 one line, a host with both has both; what is above the pod does not
count, so a kubelet with a root of its own (kind: `/kubelet.slice/kubelet-kubepods.slice/…`) is read, and so is a path as a
container with a cgroup namespace of its own sees it (`/../../kubepods-burstable-pod….slice/…`). A container may make
groups below its own; the pod and the container are the outermost ones.

The group does not have the name of the container. Its mounts do: the kubelet mounts a file of
`pods/<uid>/containers/<name>/` into each container, for its termination message.

Source: kubelet v1.36.3, cgroup_manager_linux and pod_container_manager_linux; kubelet_pods (makeMounts).
"""

import re
from typing import NamedTuple

from topoalign.core.model.ids import ContainerName

_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
"""Of a pod, and of a static pod, whose UID is a digest; systemd's names have `_` in place of `-`."""
_POD = rf"(?:(?:/|^|-)pod(?P<uid>{_UID})|kubepods[/-](?:(?:burstable|besteffort)[/-])?pod(?P<named>[0-9A-Za-z_-]+))"
"""A static pod's manifest may give it any UID: it is one where the kubelet's own group is above it, by its usual name."""
_PATTERNS = tuple(
    re.compile(_POD + r"(?P<slice>\.slice)?" + rest + r"(?![0-9A-Za-z_-])")
    for rest in (r"(?:/|:)(?:[a-z][a-z-]*[-:])?(?P<id>[0-9a-f]{12,64})", "(?P<id>)")
)
"""A container in a pod, and a pod alone."""
_MOUNTED = re.compile(r"(?:/|^)pods/(?P<uid>[^/]+)/containers/(?P<name>[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/[^/]+$")


class CgroupPlacement(NamedTuple):
    """What the path of a control group identifies about its processes."""

    pod_uid: str = ""
    container_id: str = ""
    """Empty in a pod: the path of the container cannot be read."""
    path: str = ""
    """The group's path as the kernel reports it; of version 1 the longest of its paths."""


def placement_of(cgroups: str) -> CgroupPlacement:
    """The placement of a process, by the text of its /proc/<pid>/cgroup: lines `<hierarchy>:<controllers>:<path>`."""
    paths = [parts[2] for line in cgroups.splitlines() if len(parts := line.split(":", 2)) == 3]
    for pattern in _PATTERNS:
        for path in paths:
            if found := pattern.search(path):
                uid = found["uid"] or found["named"]
                return CgroupPlacement(uid.replace("_", "-") if found["slice"] else uid, found["id"], path)
    return CgroupPlacement(path=max(paths, key=len, default=""))


def container_name_of(mounts: str, pod_uid: str) -> ContainerName:
    """The container of this pod with these mounts (/proc/<pid>/mountinfo, whose fourth field is the source)."""
    for line in mounts.splitlines():
        fields = line.split(" ", 4)
        found = _MOUNTED.search(fields[3]) if len(fields) == 5 else None
        if found is not None and found["uid"] == pod_uid:
            return ContainerName(found["name"])
    return ContainerName("")
