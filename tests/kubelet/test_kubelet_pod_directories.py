"""The directories of pods tell which pods are gone, and never call a pod gone of which they do not tell."""

import os
from pathlib import Path

import pytest

from topoalign.core.errors import StateFault
from topoalign.kubelet import pod_directories
from topoalign.kubelet.pod_directories import PodDirectories

PROJECTED = "kubernetes.io~projected"


def made(root: Path, *paths: str) -> PodDirectories:
    for path in paths:
        (root / "pods" / path).mkdir(parents=True)
    found = pod_directories.read(root)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("paths", "gone"),
    [
        ((f"u/volumes/{PROJECTED}/kube-api-access",), False),
        ((f"u/volumes/{PROJECTED}", "u/volumes/kubernetes.io~secret/token"), False),
        (("u/volumes",), False),
        (("u/containers",), False),
        ((f"u/volumes/{PROJECTED}", "u/volumes/kubernetes.io~secret"), True),
        (("another/volumes",), True),
    ],
    ids=["a volume", "a volume of another plugin", "no volume ever", "no volumes directory", "torn down", "missing"],
)
def test_a_pod_is_gone_without_a_directory_or_with_its_volumes_torn_down(
    tmp_path: Path, paths: tuple[str, ...], gone: bool
) -> None:
    assert gone == made(tmp_path, *paths).is_gone("u")


@pytest.mark.parametrize("uid", ["", ".", "..", "default/train", "\0"])
def test_a_uid_that_no_directory_can_have_is_not_gone(tmp_path: Path, uid: str) -> None:
    assert not made(tmp_path, "u/volumes").is_gone(uid)


def test_files_and_links_are_no_pods_and_no_volume_plugins(tmp_path: Path) -> None:
    made(tmp_path, "u/volumes", "v")
    (tmp_path / "pods/file").write_text("")
    (tmp_path / "pods/link").symlink_to(tmp_path / "pods/u")
    (tmp_path / "pods/u/volumes/file").write_text("")

    assert {"u": False, "v": False} == made(tmp_path).torn_down


def test_without_a_pods_directory_nothing_is_known(tmp_path: Path) -> None:
    assert None is pod_directories.read(tmp_path)
    (tmp_path / "pods").write_text("")
    assert None is pod_directories.read(tmp_path)


def test_more_directories_than_a_kubelet_can_have_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_directories, "MOST_PODS", 2)
    assert {"a": False, "b": False} == made(tmp_path, "a", "b").torn_down
    with pytest.raises(StateFault, match="more than 2"):
        made(tmp_path, "c")


def test_directories_that_may_not_be_read_are_an_error_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(StateFault, match=r"pods cannot be read: Permission denied") as fault:
        pod_directories.read(tmp_path)

    assert "mount the kubelet's root directory whole" in fault.value.remedy
