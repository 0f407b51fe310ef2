"""`up` is found by other terminals while it runs, and not afterwards."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from topoalign.cli import running
from topoalign.cli.link import NothingRuns, locate_bus
from topoalign.cli.running import RunningUp
from topoalign.core.model.ids import NodeName


def up(pid: int | None = None, nats: str = "nats://127.0.0.1:4222") -> RunningUp:
    return RunningUp(
        pid=os.getpid() if pid is None else pid, nats=nats, http="http://127.0.0.1:8000", node=NodeName("laptop")
    )


@pytest.fixture(autouse=True)
def run_time_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_it_is_found_while_it_runs_and_its_file_is_gone_afterwards() -> None:
    with running.announce_running(up()):
        file = running.running_file()
        found, mode = running.find_running(), stat.S_IMODE(file.stat().st_mode)

    assert (up(), 0o600) == (found, mode)
    assert None is running.find_running()
    assert [] == list(file.parent.iterdir())


def test_one_that_was_killed_is_not_found_though_its_file_is_left() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with running.announce_running(up(gone.pid)):
        assert None is running.find_running()


def test_of_two_the_later_is_found() -> None:
    with (
        running.announce_running(up(nats="nats://127.0.0.1:1")),
        running.announce_running(up(nats="nats://127.0.0.1:2")),
    ):
        later = running.find_running()

    assert later is not None
    assert "nats://127.0.0.1:2" == later.nats


def test_the_end_of_the_earlier_leaves_the_later() -> None:
    earlier, later = up(nats="nats://127.0.0.1:1"), up(nats="nats://127.0.0.1:2")
    with running.announce_running(earlier):
        second = running.announce_running(later)
        second.__enter__()

    assert later == running.find_running()
    second.__exit__(None, None, None)
    assert None is running.find_running()


def test_where_no_file_can_be_written_it_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with running.announce_running(up()):
        pass

    assert "give --nats in other terminals" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"pid": "x"}', b'{"pid": 0, "nats": "n", "http": "h", "node": "n"}', b"\xff"]
)
def test_a_damaged_file_counts_as_none(content: bytes) -> None:
    file = running.running_file()
    file.parent.mkdir()
    file.write_bytes(content)

    assert None is running.find_running()


def test_an_option_goes_before_up_and_without_either_the_remedy_is_told() -> None:
    with running.announce_running(up()):
        assert ("nats://127.0.0.1:4222", "laptop") == locate_bus(None, None)
        assert ("nats://127.0.0.1:4222", "other") == locate_bus(None, "other")
        assert ("nats://far:1", os.uname().nodename) == locate_bus("nats://far:1", None)
    with pytest.raises(NothingRuns) as refused:
        locate_bus(None, None)
    assert "topoalign up" in refused.value.remedy
