"""In which container a process runs, by control groups of all kinds that a node may have."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from process_support import CONTAINER_ID, POD_UID, mounts, pod_cgroup, put_namespace, put_process

from topoalign.core.model.ids import ContainerName
from topoalign.core.model.processes import ProcessIdentity
from topoalign.core.usage.cgroups import CgroupPlacement, container_name_of, placement_of
from topoalign.kubelet import control_groups
from topoalign.kubelet.control_groups import identity_of, sees_all_processes

STATIC_POD_UID = "0b43e8f8fbb0a0d9d7c2b43ed4dd4c5d"


SYSTEMD_UID = POD_UID.replace("-", "_")
SYSTEMD = f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD_UID}.slice"
V1_CONTROLLERS = ("cpuset", "cpu,cpuacct", "memory", "devices", "pids", "name=systemd")


def v1(path: str) -> str:
    return "".join(f"{n}:{name}:{path}\n" for n, name in enumerate(V1_CONTROLLERS, 2))


def v2(path: str) -> str:
    return f"0::{path}\n"


@pytest.mark.parametrize("version", [v1, v2], ids=["v1", "v2"])
@pytest.mark.parametrize(
    ("path", "uid"),
    [
        (f"/kubepods/burstable/pod{POD_UID}/{CONTAINER_ID}", POD_UID),
        (f"/kubepods/pod{POD_UID}/crio-{CONTAINER_ID}", POD_UID),
        (f"{SYSTEMD}/cri-containerd-{CONTAINER_ID}.scope", POD_UID),
        (f"{SYSTEMD}/crio-{CONTAINER_ID}.scope", POD_UID),
        (f"/kubepods.slice/kubepods-pod{SYSTEMD_UID}.slice/docker-{CONTAINER_ID}.scope/init.scope", POD_UID),
        (f"/system.slice/containerd.service/{SYSTEMD.rpartition('/')[2]}:cri-containerd:{CONTAINER_ID}", POD_UID),
        (f"/kubepods/burstable/pod{STATIC_POD_UID}/{CONTAINER_ID}", STATIC_POD_UID),
        (
            f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD_UID}.slice/cri-containerd-{CONTAINER_ID}.scope",
            POD_UID,
        ),
        (f"/../../kubepods-besteffort-pod{SYSTEMD_UID}.slice/cri-containerd-{CONTAINER_ID}.scope", POD_UID),
        (f"/../../pod{POD_UID}/{CONTAINER_ID}", POD_UID),
        (f"/kubepods/besteffort/podetcd-1/{CONTAINER_ID}", "etcd-1"),
        (f"/kubepods/podetcd_1/{CONTAINER_ID}", "etcd_1"),
        (f"/kubepods.slice/kubepods-podetcd_1.slice/crio-{CONTAINER_ID}.scope", "etcd-1"),
        (f"/kubepods/pod{POD_UID}/{CONTAINER_ID}/kubepods/pod{STATIC_POD_UID}/{'a' * 64}", POD_UID),
    ],
)
def test_pod_and_container_are_read_from_the_control_group(version: Callable[[str], str], path: str, uid: str) -> None:
    assert (uid, CONTAINER_ID, path) == placement_of(version(path))


def test_a_host_with_both_versions_tells_by_the_one_that_has_the_pod() -> None:
    found = placement_of(v2("/") + v1(f"/kubepods/pod{POD_UID}/{CONTAINER_ID}"))

    assert (POD_UID, CONTAINER_ID) == found[:2]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/system.slice/nvidia-persistenced.service",
        f"/system.slice/docker-{CONTAINER_ID}.scope",
        f"/machine.slice/libpod-{CONTAINER_ID}.scope",
        "/user.slice/user-1000.slice/session-4.scope",
        f"/kubepods/mypod{POD_UID}/{CONTAINER_ID}",
        f"/machine.slice/pod{POD_UID}0/{CONTAINER_ID}",
        f"/podman/{CONTAINER_ID}",
    ],
)
def test_a_process_in_no_pod_is_told_by_its_path(path: str) -> None:
    assert CgroupPlacement(path=path) == placement_of(v1("/") + v2(path))


@pytest.mark.parametrize("below", ["", "/sandbox", f"/{CONTAINER_ID}0"])
def test_a_pod_is_known_where_the_container_is_not(below: str) -> None:
    assert (POD_UID, "") == placement_of(v2(f"/kubepods/pod{POD_UID}{below}"))[:2]


@pytest.mark.parametrize("text", ["", "\n", "nonsense", "0:", "0::", "a:b:c:d\n\0"])
def test_a_text_that_no_kernel_writes_tells_nothing(text: str) -> None:
    assert ("", "") == placement_of(text)[:2]


@given(
    uid=st.uuids().map(UUID.__str__) | st.text("0123456789abcdef", min_size=32, max_size=32) | st.just("etcd-1"),
    container_id=st.text("0123456789abcdef", min_size=64, max_size=64),
    runtime=st.sampled_from(["cri-containerd", "crio", "docker"]),
    qos=st.sampled_from(["", "burstable", "besteffort"]),
    root=st.sampled_from(["", "kubelet", "a.b"]),
    seen_from=st.integers(0, 4),
    below=st.sampled_from(["", "/init.scope", "/system.slice/sshd.service", "/x"]),
    is_systemd=st.booleans(),
)
def test_what_a_kubelet_writes_is_read_again(
    uid: str, container_id: str, runtime: str, qos: str, root: str, seen_from: int, below: str, is_systemd: bool
) -> None:
    """The path is built as the kubelet builds it, part by part, and then seen from a cgroup namespace below the root."""
    parts = [part for part in (root, "kubepods", qos, f"pod{uid}") if part]
    if is_systemd:
        names = [part.replace("-", "_") for part in parts]
        groups = ["-".join(names[: n + 1]) + ".slice" for n in range(len(names))] + [f"{runtime}-{container_id}.scope"]
    else:
        groups = [*parts, container_id]
    if uid == "etcd-1":
        seen_from = 0  # such a UID is one only below the kubelet's group
    seen = groups[min(seen_from, len(parts) - 1) :]
    path = "/" + "/".join([".."] * min(seen_from, 2) + seen) + below

    assert (uid, container_id) == placement_of(v2(path))[:2]


def test_the_mounts_of_a_container_have_its_name() -> None:
    assert "train-0" == container_name_of(mounts(container="train-0"), POD_UID)
    assert "" == container_name_of(mounts(container="train-0"), STATIC_POD_UID), "of another pod"
    assert "" == container_name_of(mounts(container="../x"), POD_UID)
    assert "" == container_name_of("1 2 3\n\n", POD_UID)
    own_disk = f"9 8 7:0 /pods/{POD_UID}/containers/main/0a1b2c3d /dev/termination-log rw - xfs /dev/sdb rw"
    assert "main" == container_name_of(own_disk, POD_UID), "the kubelet's directory is a file system of its own"


def test_a_process_in_a_pod_is_known_by_pod_container_and_command(tmp_path: Path) -> None:
    put_process(tmp_path, 41, cgroup=pod_cgroup(), command="python3", mountinfo=mounts(container="train"))

    expected = ProcessIdentity(
        pod_uid=POD_UID, container_id=CONTAINER_ID, container=ContainerName("train"), command="python3"
    )
    assert expected == identity_of(tmp_path, 41)


def test_a_process_of_the_host_is_known_by_its_path_and_command(tmp_path: Path) -> None:
    put_process(tmp_path, 42, cgroup=v2("/user.slice/session-4.scope"), command="x\x1b[31m")

    assert ProcessIdentity(cgroup="/user.slice/session-4.scope", command="x?[31m") == identity_of(tmp_path, 42)


@pytest.mark.parametrize("missing", ["cgroup", "comm", "mountinfo"])
def test_a_process_that_ends_while_it_is_read_is_nobody(tmp_path: Path, missing: str) -> None:
    put_process(tmp_path, 41, cgroup=pod_cgroup(), mountinfo=mounts())
    (tmp_path / "41" / missing).unlink()

    assert identity_of(tmp_path, 41) is None


def test_a_process_that_ends_after_its_file_is_open_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers such a read with ESRCH."""

    class Ended:
        def __enter__(self) -> "Ended":
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self, size: int) -> bytes:
            raise ProcessLookupError

    monkeypatch.setattr(Path, "open", lambda *_, **__: Ended())

    assert identity_of(tmp_path, 41) is None


def test_real_processes_are_found_and_gone(tmp_path: Path) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    own, its = identity_of(Path("/proc"), os.getpid()), identity_of(Path("/proc"), child.pid)
    child.communicate()

    assert own is not None and its is not None and own.cgroup == its.cgroup
    assert identity_of(Path("/proc"), child.pid) is None


def test_a_file_without_end_is_read_to_its_bound(tmp_path: Path) -> None:
    put_process(tmp_path, 41, cgroup=pod_cgroup(), mountinfo="x" * control_groups.LONGEST_FILE + "\n" + mounts())

    found = identity_of(tmp_path, 41)
    assert found is not None and (POD_UID, "") == (found.pod_uid, found.container)


def test_ids_of_processes_mean_the_nodes_only_in_its_first_namespace(tmp_path: Path) -> None:
    put_namespace(tmp_path / "node")
    put_namespace(tmp_path / "container", "pid:[4026532201]")

    assert sees_all_processes(tmp_path / "node")
    assert not sees_all_processes(tmp_path / "container")
    assert not sees_all_processes(tmp_path / "nothing")
