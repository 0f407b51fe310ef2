"""When the CDI specifications are written, and how; that nothing is removed, and nothing half written."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from containers_support import CDI_FILE as FILE
from containers_support import DRIVER, LIBRARIES, Host, check_specification, machine, nodes_of
from disk_support import fill, small_disk

from topoalign.allocator.containers import host_files
from topoalign.allocator.containers.containers import Containers
from topoalign.core.model.ids import GPU


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class Following:
    """A node whose specification follows its configuration."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.configuration = host.configuration("cdi-cri")
        self.containers = Containers(lambda: self.configuration, host.cdi, host.proc)
        self.topology = machine()
        self.allocate()

    def allocate(self) -> None:
        """What comes before every allocation."""
        self.containers.now(self.topology, GPU)

    def names(self) -> set[str]:
        return set(nodes_of(self.host.specification()))


def test_it_is_written_anew_when_the_hardware_changes(host: Host) -> None:
    node = Following(host)
    node.topology = msgspec.structs.replace(node.topology, gpus=node.topology.gpus[:2], offers=None)
    node.allocate()

    assert {"GPU-a", "GPU-b", "0", "2"} == node.names()


def test_it_is_written_anew_when_the_configuration_changes(host: Host) -> None:
    node = Following(host)
    node.configuration = host.configuration("cdi-cri", nvidiaDriverRoot="/run/nvidia/driver")
    node.allocate()

    assert "/run/nvidia/driver/dev/nvidiactl" in (host.cdi / FILE).read_text()


@pytest.mark.parametrize("how", ["removed", "emptied", "unreadable", "link"])
def test_a_changed_file_is_written_again_at_the_next_poll(host: Host, how: str, tmp_path: Path) -> None:
    """A file that was removed or changed from outside is written again within seconds."""
    node = Following(host)
    file, bystander = host.cdi / FILE, tmp_path / "bystander"
    bystander.write_text("not ours")
    right = file.read_bytes()
    match how:
        case "removed":
            file.unlink()
        case "emptied":
            file.write_bytes(b"")
        case "unreadable":
            file.chmod(0o600)
        case "link":
            file.unlink()
            file.symlink_to(bystander)
    assert None is node.containers.poll(node.topology)

    assert right == file.read_bytes()
    assert not file.is_symlink()
    assert 0o644 == file.stat().st_mode & 0o777
    assert "not ours" == bystander.read_text()


def test_a_driver_that_was_replaced_is_seen_by_the_next_look(host: Host) -> None:
    node = Following(host)
    for library in (host.root / LIBRARIES).glob(f"*.so.{DRIVER}"):
        library.rename(library.with_name(library.name.replace(DRIVER, "560.28.03")))
    assert None is node.containers.poll(node.topology)

    assert DRIVER not in (host.cdi / FILE).read_text()
    assert "libcuda.so.560.28.03" in (host.cdi / FILE).read_text()


def test_a_new_channel_is_in_the_file_before_the_next_allocation(host: Host) -> None:
    """An IMEX channel that came since the last look is in the file before the next allocation."""
    node = Following(host)
    node.configuration = host.configuration("cdi-cri", imex={"channelIDs": [0]})
    node.allocate()
    host.put("dev/nvidia-caps-imex-channels/channel0")
    node.allocate()

    assert {"0"} == set(nodes_of(host.specification("imex-channel")))


def test_the_capabilities_of_instances_are_read_anew_by_the_next_look(host: Host) -> None:
    node = Following(host)
    minors = host.proc / "driver/nvidia-caps/mig-minors"
    minors.write_text(minors.read_text().replace("access 22", "access 99"))
    assert None is node.containers.poll(node.topology)

    assert "/dev/nvidia-caps/nvidia-cap99" in nodes_of(host.specification())["MIG-x"]


def test_a_driver_that_is_not_mounted_apart_is_looked_for_on_the_host(host: Host, tmp_path: Path) -> None:
    """The driver is looked for where the host has it if it is not mounted separately."""
    node = Following(host)
    (host.cdi / FILE).unlink()
    apart = {"containerDriverRoot": str(tmp_path / "not mounted")}
    node.configuration = host.configuration("cdi-cri", plugin=apart, nvidiaDriverRoot=str(host.root))
    node.allocate()

    assert f"{host.root}/{LIBRARIES}/libcuda.so.{DRIVER}" in (host.cdi / FILE).read_text()


def test_a_link_among_the_libraries_of_the_driver_is_not_followed(host: Host) -> None:
    """It could lead to a path of another root."""
    (host.root / LIBRARIES / f"libelsewhere.so.{DRIVER}").symlink_to(f"libcuda.so.{DRIVER}")
    Following(host)

    assert "libelsewhere" not in (host.cdi / FILE).read_text()


def test_of_the_thousands_of_files_beside_the_driver_s_none_is_looked_at(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done again every few seconds, in the event loop."""
    looked_at: list[str] = []
    is_regular = host_files.is_regular

    def noting(path: Path) -> bool:
        looked_at.append(path.name)
        return is_regular(path)

    for number in range(3_000):
        (host.root / LIBRARIES / f"libother{number}.so.1").touch()
    monkeypatch.setattr(host_files, "is_regular", noting)
    Following(host)

    assert [] == [name for name in looked_at if "other" in name]
    assert f"libcuda.so.{DRIVER}" in looked_at


def test_a_root_that_cannot_be_looked_at_is_told_and_ends_nothing(host: Host) -> None:
    """Its name is longer than the system takes; of a mount that fails or is forbidden the system says as little."""
    nowhere = f"/{'x' * 300}"
    configuration = host.configuration(
        "cdi-cri", plugin={"containerDriverRoot": nowhere}, nvidiaDriverRoot=nowhere, gdrcopyEnabled=True
    )
    reason = host.containers(configuration).poll(machine())

    assert reason is not None and "no libcuda.so.<version> is found" in reason

    (host.root / "dev/nvidia-caps-imex-channels").symlink_to("x" * 300)
    required = host.configuration("envvar", imex={"channelIDs": [0], "required": True})
    reason = host.containers(required).poll(machine())

    assert reason is not None and "IMEX channel 0 is required" in reason


def test_it_is_left_alone_while_nothing_changes_also_by_a_new_process(host: Host) -> None:
    """A runtime that watches the directory has nothing to read anew."""
    node = Following(host)
    before = (host.cdi / FILE).stat()
    node.allocate()
    node.containers.poll(node.topology)
    Following(host)

    assert (before.st_ino, before.st_mtime_ns) == (
        (host.cdi / FILE).stat().st_ino,
        (host.cdi / FILE).stat().st_mtime_ns,
    )


def test_it_is_replaced_in_one_step_and_readable_for_all(host: Host) -> None:
    """Whoever has opened the old file reads all of it; no unfinished file is left, nor read by a runtime."""
    before = os.umask(0o077)
    try:
        node = Following(host)
        (host.cdi / f".{FILE}.new").write_text("of a process that was killed")
        with (host.cdi / FILE).open() as opened:
            node.topology = msgspec.structs.replace(node.topology, gpus=node.topology.gpus[:1], offers=None)
            node.allocate()
            old = msgspec.json.decode(opened.read())
    finally:
        os.umask(before)

    check_specification(old)
    assert {"GPU-a", "0"} == node.names()
    assert [FILE] == os.listdir(host.cdi)
    assert 0o644 == (host.cdi / FILE).stat().st_mode & 0o777


def test_nothing_is_removed_when_the_strategy_changes(host: Host) -> None:
    """Containers that run refer to it, and are started again by it."""
    node = Following(host)
    node.configuration = host.configuration("envvar")
    node.allocate()
    node.containers.poll(node.topology)

    assert "GPU-a" in node.names()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_a_full_disk_leaves_the_old_one_and_is_said(host: Host, full_disk: Path) -> None:
    host.cdi = full_disk
    node = Following(host)
    names = node.names()
    filler = fill(full_disk)
    node.topology = msgspec.structs.replace(node.topology, gpus=node.topology.gpus[:1], offers=None)

    assert "No space left on device" in str(node.containers.poll(node.topology))
    assert names == node.names()
    filler.unlink()
    assert None is node.containers.poll(node.topology)
    assert {"GPU-a", "0"} == node.names()
