"""The directory that containers which share by MPS get as /dev/shm: every user may write there."""

from pathlib import Path

import pytest

from topoalign.mps.daemons import make_shm


def test_shared_memory_is_for_every_user_also_where_it_is_there(tmp_path: Path) -> None:
    """A process may have ended between the making of the directory and its mode, or somebody else have made it."""
    (tmp_path / "shm").mkdir(mode=0o755)
    make_shm(tmp_path)
    assert 0o1777 == (tmp_path / "shm").stat().st_mode & 0o7777


def test_shared_memory_of_another_user_is_used_if_all_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but root and its owner may change its mode, which is all right where that is wide enough."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    shm = tmp_path / "shm"
    shm.mkdir()
    shm.chmod(0o777)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", refuse)
        make_shm(tmp_path)
    shm.chmod(0o755)
    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(Path, "chmod", refuse)
        make_shm(tmp_path)
