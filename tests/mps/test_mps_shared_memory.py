"""The directory that containers which share by MPS get as /dev/shm: every user may write there."""

from pathlib import Path

from topoalign.mps.daemons import make_shm


def test_shared_memory_is_for_every_user_also_where_it_is_there(tmp_path: Path) -> None:
    """A process may have ended between the making of the directory and its mode, or somebody else have made it."""
    (tmp_path / "shm").mkdir(mode=0o755)
    make_shm(tmp_path)
    assert 0o1777 == (tmp_path / "shm").stat().st_mode & 0o7777
