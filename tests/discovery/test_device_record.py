"""What operators said, and what waits for a reset, outlives the service; a damaged file is never overwritten."""

import json
import os
from pathlib import Path

import pytest
from disk_support import syncs_and_renames

from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import DeviceID
from topoalign.discovery.device_record import NAME, DeviceRecord, RecordFile

A, B = DeviceID("GPU-a"), DeviceID("GPU-b")


def written(directory: Path, boot_id: str = "boot") -> RecordFile:
    file = RecordFile(directory, boot_id)
    assert file.load() is None
    file.change(cordons={A: "fan"}, awaiting_reset={B: "XID 79"})
    return file


def read(directory: Path, boot_id: str = "boot") -> DeviceRecord:
    file = RecordFile(directory, boot_id)
    assert file.load() is None
    return file.kept


def test_a_restart_remembers_both_and_a_boot_only_the_cordons(tmp_path: Path) -> None:
    written(tmp_path / "state")

    assert ({A: "fan"}, {B: "XID 79"}) == (
        read(tmp_path / "state").cordons,
        read(tmp_path / "state").awaiting_reset,
    )
    assert ({A: "fan"}, {}) == (
        read(tmp_path / "state", "another").cordons,
        read(tmp_path / "state", "another").awaiting_reset,
    )
    assert 0o600 == (tmp_path / "state" / NAME).stat().st_mode & 0o777


def test_a_change_is_on_the_disk_when_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content before the name: after a power cut the file is the former one or this one."""
    calls = syncs_and_renames(monkeypatch)
    written(tmp_path / "state")

    assert [f"sync .{NAME}.new", f"rename to {NAME}", "sync directory"] == calls


def test_a_file_of_the_first_version_is_read_and_keeps_its_fields(tmp_path: Path) -> None:
    """So the version before can be gone back to: it reads what it knows."""
    first = {"awaiting_reset": {B: "XID 79"}, "boot_id": "boot", "cordons": {A: "fan"}, "epoch": 7, "version": 1}
    (tmp_path / NAME).write_text(json.dumps(first))
    file = RecordFile(tmp_path, "boot")
    assert file.load() is None
    assert ({A: "fan"}, {B: "XID 79"}, 7) == (file.kept.cordons, file.kept.awaiting_reset, file.kept.epoch)
    file.change(epoch=8)

    assert {**first, "epoch": 8}.items() <= json.loads((tmp_path / NAME).read_text()).items()


def test_a_wait_for_a_reset_since_the_last_boot_survives_a_restart(tmp_path: Path) -> None:
    """Devices that wait for a reset since the last boot are remembered over a restart of the service."""
    written(tmp_path)
    file = RecordFile(tmp_path, "another")
    assert (None, {}) == (file.load(), file.kept.awaiting_reset)
    file.change(awaiting_reset={A: "XID 48"})

    assert {A: "XID 48"} == read(tmp_path, "another").awaiting_reset


def test_a_file_cut_anywhere_is_set_aside_and_told_by_name(tmp_path: Path) -> None:
    """Also each time anew, so that no evidence is lost; the whole file is read."""
    written(tmp_path)
    body = (tmp_path / NAME).read_bytes()
    told = set()
    for length in range(len(body)):
        (tmp_path / NAME).write_bytes(body[:length])
        file = RecordFile(tmp_path, "boot")
        said = file.load() or ""
        told.add(said)
        assert DeviceRecord(boot_id="boot", unconfirmed=said) == file.kept
        assert not (tmp_path / NAME).exists()

    assert len(body) == len(list(tmp_path.glob(f"{NAME}.corrupt-*"))) == len(told)
    assert all("cordons are not known" in said and ".corrupt-" in said for said in told)


@pytest.mark.parametrize(
    "body", [b'{"version": 2, "cordons": {}}', b"[]", b'{"cordons": {"a": 1}}', b"\xff\xfe", b"[" * 9999]
)
def test_a_file_of_another_kind_or_version_is_set_aside_too(tmp_path: Path, body: bytes) -> None:
    (tmp_path / NAME).write_bytes(body)

    said = RecordFile(tmp_path, "boot").load()

    assert said is not None and said.isprintable()
    assert body == (tmp_path / f"{NAME}.corrupt-1").read_bytes()


def test_what_cannot_be_written_does_not_hold(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = file.kept
    (tmp_path / f".{NAME}.new").mkdir()  # in the way of the new file

    with pytest.raises(StateFault, match=NAME) as caught:
        file.change(cordons={})
    assert "TOPOALIGN_STATE_DIR" in caught.value.remedy
    assert before == file.kept == read(tmp_path)


def test_a_link_in_place_of_the_new_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".{NAME}.new").symlink_to(victim)

    written(tmp_path)

    assert "precious" == victim.read_text()
    assert not os.path.islink(tmp_path / NAME)


def test_no_change_writes_nothing(tmp_path: Path) -> None:
    file = written(tmp_path)
    before = (tmp_path / NAME).stat().st_ino
    file.change()

    assert before == (tmp_path / NAME).stat().st_ino
