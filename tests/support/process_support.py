"""A /proc of processes in containers, as kubelets and container runtimes make it."""

from pathlib import Path

from topoalign.kubelet.control_groups import FIRST_NAMESPACE

CONTAINER_ID = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
POD_UID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"


def pod_cgroup(uid: str = POD_UID, container_id: str = CONTAINER_ID) -> str:
    """The text of /proc/<pid>/cgroup in a pod: version 2, systemd driver."""
    slices = f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    return f"0::/{slices}/cri-containerd-{container_id}.scope\n"


def mounts(uid: str = POD_UID, container: str = "main") -> str:
    """The text of /proc/<pid>/mountinfo in a container."""
    pod = f"/var/lib/kubelet/pods/{uid}"
    return (
        "1170 1005 0:251 / / rw,relatime - overlay overlay rw,lowerdir=/l1:/l2\n"
        f"1185 1170 259:1 {pod}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/root rw\n"
        f"1186 1170 259:1 {pod}/containers/{container}/4bc0f2d1 /dev/termination-log rw - ext4 /dev/root rw\n"
    )


def put_process(proc: Path, pid: int, *, cgroup: str, command: str = "python3", mountinfo: str = "") -> None:
    """Makes a process; one of an empty `mountinfo` is in no container."""
    folder = proc / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "comm").write_text(command + "\n")
    (folder / "mountinfo").write_text(mountinfo)


def put_namespace(proc: Path, name: str = FIRST_NAMESPACE) -> None:
    """Makes the PID namespace of whoever reads this /proc."""
    (proc / "self/ns").mkdir(parents=True)
    (proc / "self/ns/pid").symlink_to(name)
