"""Which processes a container has, from a tree of control groups as files."""

from pathlib import Path, PurePosixPath

import pytest

from topoalign.core.usage.cgroups import placement_of
from topoalign.kubelet import control_groups
from topoalign.kubelet.control_groups import container_group, directory_of, processes_in

UID = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
SLICE = UID.replace("-", "_")
ID = "9f86d081884c7d659a2feaa0c55ad015"
SCOPE = f"kubepods-burstable-pod{SLICE}.slice/cri-containerd-{ID}.scope"


def group(path: Path, *pids: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return path


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (f"0::/kubepods/burstable/pod{UID}/{ID}/child/{ID}", f"/kubepods/burstable/pod{UID}/{ID}"),
        (f"0::/kubepods.slice/kubepods-burstable.slice/{SCOPE}", f"/kubepods.slice/kubepods-burstable.slice/{SCOPE}"),
        (f"0::/kubepods-burstable-pod{SLICE}.slice:cri:{ID}", f"/kubepods-burstable-pod{SLICE}.slice:cri:{ID}"),
        (f"0::/../../{SCOPE}/init.scope", f"/../../{SCOPE}"),
        (f"0::/kubepods/pod{UID}", None),
        ("0::/system.slice/ssh.service", None),
    ],
)
def test_the_group_of_a_container_is_the_outermost(cgroups: str, expected: str | None) -> None:
    assert (None if expected is None else PurePosixPath(expected)) == container_group(placement_of(cgroups))


@pytest.mark.parametrize("hierarchy", ["", "memory", "pids", "unified"])
def test_a_group_is_found_in_whatever_hierarchy_is_mounted(tmp_path: Path, hierarchy: str) -> None:
    group(tmp_path / hierarchy, 1)
    made = group(tmp_path / hierarchy / "kubepods" / f"pod{UID}" / ID, 7, 3)

    assert made == directory_of(tmp_path, PurePosixPath(f"/kubepods/pod{UID}/{ID}"))
    assert (3, 7) == processes_in(made)
    assert None is directory_of(tmp_path, PurePosixPath(f"/kubepods/pod{UID}/other"))


def test_a_path_from_another_root_is_looked_for_by_its_name(tmp_path: Path) -> None:
    group(tmp_path, 1)
    group(tmp_path / "system.slice" / "ssh.service", 2)
    made = group(tmp_path / "kubelet.slice" / "kubelet-kubepods.slice" / "kubelet-kubepods-burstable.slice" / SCOPE, 9)

    assert made == directory_of(tmp_path, PurePosixPath(f"/../../{SCOPE}"))
    assert None is directory_of(tmp_path, PurePosixPath(f"/../{SCOPE}/../../ssh.service"))
    assert None is directory_of(tmp_path, PurePosixPath("/../.."))


def test_groups_below_count_and_what_ends_meanwhile_does_not(tmp_path: Path) -> None:
    """A group without its file has just gone; 0 is a process of another PID namespace."""
    made = group(tmp_path / ID, 5, 0, 5)
    group(made / "a" / "b", 12, 4)
    (made / "gone").mkdir()
    (made / "threads").mkdir()
    (made / "threads" / "cgroup.procs").mkdir()
    (made / "link").symlink_to(group(tmp_path / "other", 99))

    assert (4, 5, 12) == processes_in(made)
    assert () == processes_in(tmp_path / "never")


def test_of_a_container_that_makes_too_many_a_bounded_number_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole ids, the nearest groups first: half of an id would be a process of somebody else."""
    monkeypatch.setattr(control_groups, "LONGEST_LISTS", 12)
    monkeypatch.setattr(control_groups, "MOST_BELOW", 3)
    made = group(tmp_path / ID, 123, 45)
    for number in range(5):
        (made / str(number)).mkdir()
        group(made / str(number) / "below", 9)

    assert (45, 123) == processes_in(made)
    group(made, 123, 4567, 890)
    assert (123, 4567) == processes_in(made)
    group(made, 1)
    assert (1,) == processes_in(made)
