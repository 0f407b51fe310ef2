"""The directories of pods tell which pods are gone, and never call a pod gone of which they do not tell."""

import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoalign.core.model.errors import StateFault
from topoalign.kubelet.files import pod_directories
from topoalign.kubelet.files.pod_directories import PodDirectories

PROJECTED = "kubernetes.io~projected"


def made(root: Path, *paths: str) -> PodDirectories:
    for path in paths:
        (root / "pods" / path).mkdir(parents=True)
    found = pod_directories.read_pod_directories(root)
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


@pytest.mark.parametrize("odd", ["pods/u", "pods/u/volumes", f"pods/u/volumes/{PROJECTED}"])
@pytest.mark.parametrize(
    "put", [lambda path: path.write_text(""), lambda path: path.symlink_to("/")], ids=["file", "link"]
)
def test_of_a_file_or_link_where_a_kubelet_has_a_directory_nothing_is_told(
    tmp_path: Path, odd: str, put: Callable[[Path], object]
) -> None:
    (tmp_path / odd).parent.mkdir(parents=True)
    put(tmp_path / odd)

    found = made(tmp_path)
    assert not found.is_gone("u")
    assert {"u"} == found.unreadable


def test_of_a_pod_without_a_volume_it_is_not_told_whether_it_has_ended(tmp_path: Path) -> None:
    found = made(tmp_path, "bare/volumes", "new", f"runs/volumes/{PROJECTED}/token", f"ended/volumes/{PROJECTED}")

    assert {"bare", "new"} == found.unreadable


def naive(root: Path, uid: str) -> bool:
    """The rule of spec/kubelet.md, section 12, word by word."""
    if not (root / "pods" / uid).exists():
        return True
    plugins = list((root / "pods" / uid / "volumes").glob("*"))
    return len(plugins) > 0 and sum(len(list(plugin.glob("*"))) for plugin in plugins) == 0


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.none() | st.dictionaries(st.sampled_from([PROJECTED, "kubernetes.io~csi", "x"]), st.sets(st.just("v"))),
    )
)
def test_the_rule_holds_for_any_pods_plugins_and_volumes(pods: dict[str, dict[str, set[str]] | None]) -> None:
    with TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "pods").mkdir()
        for uid, plugins in pods.items():
            (root / "pods" / uid).mkdir()
            for plugin, volumes in (plugins or {}).items():
                for volume in ("", *volumes):
                    (root / "pods" / uid / "volumes" / plugin / volume).mkdir(parents=True, exist_ok=True)
        found = made(root)

        assert {uid: naive(root, uid) for uid in "abcd"} == {uid: found.is_gone(uid) for uid in "abcd"}


def test_without_a_pods_directory_nothing_is_known(tmp_path: Path) -> None:
    assert None is pod_directories.read_pod_directories(tmp_path)
    (tmp_path / "pods").write_text("")
    assert None is pod_directories.read_pod_directories(tmp_path)


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
        pod_directories.read_pod_directories(tmp_path)

    assert "mount the kubelet's root directory whole" in fault.value.remedy
