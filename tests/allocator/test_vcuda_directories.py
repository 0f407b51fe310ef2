"""The directories of the limiter on the disk: whole or not there, whatever ends in between, and nobody else's."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_support import fill, small_disk, syncs_and_renames
from vcuda_support import VcudaNode

from topoalign.allocator.containers import limiter_files
from topoalign.allocator.containers.vcuda import unit_directories
from topoalign.allocator.containers.vcuda.unit_directories import CONFIG_FILE, Limits, encode_config, pids_of
from topoalign.core.model.ids import DeviceID, ResourceName

NAME = f"units-{'a' * 32}"
LIMITS, ID = Limits("uid-p", "c0", 20, 4 << 30), "f" * 32
KILLED = Path(__file__).with_name("vcuda_killed.py")


def test_a_name_tells_resource_and_units_in_any_order() -> None:
    units = [DeviceID(f"GPU-0::c{n}") for n in range(20)]
    names = {
        unit_directories.units_directory_name(ResourceName("x.io/cores"), each)
        for each in (units, units[::-1], frozenset(units))
    }

    assert 1 == len(names)
    assert names == {name for name in names if unit_directories.NAME.fullmatch(name)}
    assert {unit_directories.units_directory_name(ResourceName("x.io/cores"), units[1:])}.isdisjoint(names)
    assert {unit_directories.units_directory_name(ResourceName("y.io/cores"), units)}.isdisjoint(names)


def test_processes_are_written_ascending_and_as_many_as_are_read() -> None:
    assert b"\1\0\0\0\2\0\0\0\3\0\0\0" == pids_of([3, 1, 2])
    assert 4 * 1024 == len(pids_of(range(5_000)))


def test_killed_at_any_step_each_directory_is_whole_or_is_made_anew(tmp_path: Path) -> None:
    """SIGKILL, one step later each time: no half file is ever read, and the next try leaves what belongs there alone."""
    told = subprocess.run(
        [sys.executable, KILLED, tmp_path], check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()
    between = {line.partition("; ")[0] for line in told}

    assert 10 < len(told)
    assert {"uid-p uid-p [8240] ['vcuda.config', 'vcuda.config'] True"} == {line.partition("; ")[2] for line in told}
    assert {"uid-former uid-former [8240]", "uid-p uid-former [8240]", "uid-p uid-p [8240]"} < between
    assert between <= {
        "uid-former uid-former [8240]",
        "- uid-former [8240]",
        "uid-p uid-former [8240]",
        "uid-p - [8240]",
        "uid-p uid-p [8240]",
    }


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_a_full_disk_leaves_no_half_file_and_the_next_try_succeeds(full_disk: Path) -> None:
    filler = fill(full_disk)
    os.truncate(filler, filler.stat().st_size - 4096)  # room for half of it

    with pytest.raises(OSError, match="No space") as full:
        unit_directories.prepare_units_directory(full_disk, NAME, LIMITS)
    assert errno.ENOSPC == full.value.errno
    assert [] == os.listdir(full_disk / NAME)
    assert None is unit_directories.read_config_owner(full_disk, NAME)
    filler.unlink()
    unit_directories.prepare_units_directory(full_disk, NAME, LIMITS)
    assert encode_config(LIMITS) == (full_disk / NAME / "vcuda.config").read_bytes()


def test_the_limits_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a container would start with an empty file, and so without a limit. Processes are written anew."""
    calls = syncs_and_renames(monkeypatch)
    unit_directories.prepare_units_directory(tmp_path / "vcuda", NAME, LIMITS)

    assert [f"sync .{CONFIG_FILE}.new", f"rename to {CONFIG_FILE}"] == calls


def test_a_full_disk_keeps_the_former_processes(full_disk: Path) -> None:
    unit_directories.prepare_units_directory(full_disk, NAME, LIMITS)
    unit_directories.write_registered(full_disk, NAME, ID, pids_of([1]))
    fill(full_disk)

    with pytest.raises(OSError, match="No space"):
        unit_directories.write_registered(full_disk, NAME, ID, pids_of([1, 2]))
    assert pids_of([1]) == (full_disk / NAME / "pids.config").read_bytes()
    assert {"vcuda.config", "pids.config", ID} == {*os.listdir(full_disk / NAME)}


def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for each in (root, other):
        each.mkdir()
    (other / "vcuda.config").write_bytes(encode_config(LIMITS))
    (root / NAME).symlink_to(other)

    assert None is unit_directories.read_config_owner(root, NAME)
    assert [] == limiter_files.list_own_directories(root, unit_directories.NAME)
    with pytest.raises(OSError, match="of another user"):
        unit_directories.prepare_units_directory(root, NAME, LIMITS)
    with pytest.raises(OSError, match="of another user"):
        limiter_files.remove_own_directory(root, NAME)
    assert ["vcuda.config"] == os.listdir(other)


def test_a_link_in_a_directory_of_ours_goes_and_what_it_names_stays(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)
    (tmp_path / NAME / "link").symlink_to(other)
    (tmp_path / NAME / ".vcuda.config.new").symlink_to(other / "file")
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)

    assert ["vcuda.config"] == os.listdir(tmp_path / NAME)
    assert ["file"] == os.listdir(other)


def pipes_in(*paths: Path) -> list[int]:
    """Pipes that somebody reads and writes: whoever opens one is not held up, and is noticed."""
    for path in paths:
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    return [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in paths]


def test_a_pipe_in_place_of_a_file_is_neither_read_nor_written(tmp_path: Path) -> None:
    """Opened for writing, one without a reader would hold the agent up for ever; a device would be written to."""
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)
    own, files = tmp_path / NAME / ID, {"vcuda.config": encode_config(LIMITS), "pids.config": pids_of([1])}
    own.mkdir()
    pipes = pipes_in(own / "vcuda.config", own / ".vcuda.config.new", tmp_path / NAME / ".pids.config.new")
    unit_directories.write_registered(tmp_path, NAME, ID, pids_of([1]))

    assert files == {name: (own / name).read_bytes() for name in os.listdir(own) if (own / name).is_file()}
    assert [*files] == sorted(os.listdir(own), reverse=True)
    assert pids_of([1]) == (tmp_path / NAME / "pids.config").read_bytes()
    for pipe in pipes:
        with pytest.raises(BlockingIOError):
            os.read(pipe, 1)
        os.close(pipe)


def test_a_file_in_place_of_the_socket_goes(tmp_path: Path) -> None:
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)
    (tmp_path / NAME / "vcuda.sock").write_text("")
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)

    assert ["vcuda.config"] == os.listdir(tmp_path / NAME)


def nested(top: Path, depth: int) -> None:
    """So many directories, each in the one before it."""
    at = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("x", dir_fd=at)
        below = os.open("x", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


@pytest.mark.parametrize(
    ("same", "depth", "files"), [(True, 3, 100), (False, 1_000, 3)], ids=["the same container", "another one"]
)
def test_what_a_container_has_left_keeps_its_units_from_nobody(
    tmp_path: Path, *, same: bool, depth: int, files: int
) -> None:
    """Many files, and a tree deeper than can be descended and larger than is removed at once: it goes in short steps."""
    unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)
    nested(tmp_path / NAME, depth)
    for number in range(files):
        (tmp_path / NAME / f"f{number}").touch()
    next_one = LIMITS if same else LIMITS._replace(pod_uid="uid-q")
    unit_directories.prepare_units_directory(tmp_path, NAME, next_one)

    assert ["vcuda.config"] == os.listdir(tmp_path / NAME)
    assert (next_one.pod_uid, "c0") == unit_directories.read_config_owner(tmp_path, NAME)
    for _ in range(5):
        with suppress(OSError):
            limiter_files.remove_leftovers(tmp_path)
    assert [NAME] == os.listdir(tmp_path)


@pytest.mark.anyio
async def test_what_a_container_has_left_is_removed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """T09: 3,000 directories and 20,000 files kept the event loop for 1.4 s in all."""
    plain, threads = limiter_files.remove_tree, set[int]()

    def noted(at: int, name: str, most: int = limiter_files.MOST_REMOVED) -> int:
        threads.add(threading.get_ident())
        return plain(at, name, most)

    async with VcudaNode.running() as (it, _):
        unit_directories.prepare_units_directory(it.root, NAME, LIMITS)
        nested(it.root / NAME, 100)
        monkeypatch.setattr(limiter_files, "remove_tree", noted)
        await it.sweep()
        left = it.directories()

    assert set() == left
    assert threads
    assert threading.get_ident() not in threads


def test_other_users_of_the_host_reach_no_socket(tmp_path: Path) -> None:
    """They may have control groups and mounts with the names of a container's. Containers see what is mounted."""
    (tmp_path / "vcuda").mkdir(mode=0o755)
    unit_directories.prepare_units_directory(tmp_path / "vcuda", NAME, LIMITS)
    unit_directories.prepare_units_directory(tmp_path / "new", NAME, LIMITS)

    assert {0o700} == {(tmp_path / each).stat().st_mode & 0o777 for each in ("vcuda", "new")}


def test_files_can_be_read_by_everybody_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        unit_directories.prepare_units_directory(tmp_path, NAME, LIMITS)
    finally:
        os.umask(before)

    assert 0o755 == (tmp_path / NAME).stat().st_mode & 0o777
    assert 0o644 == (tmp_path / NAME / "vcuda.config").stat().st_mode & 0o777
