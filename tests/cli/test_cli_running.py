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


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_it_is_found_while_it_runs_and_its_file_is_gone_afterwards(environment: dict[str, str]) -> None:
    with running.announce_running(up(), environment):
        file = running.folder(environment) / f"up-{os.getpid()}.json"
        found, mode = running.find_running(environment), stat.S_IMODE(file.stat().st_mode)

    assert (up(), 0o600) == (found, mode)
    assert None is running.find_running(environment)
    assert [] == list(file.parent.iterdir())


def test_one_that_was_killed_is_not_found_though_its_file_is_left(environment: dict[str, str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with running.announce_running(up(gone.pid), environment):
        assert None is running.find_running(environment)


def test_of_two_the_later_is_found_and_after_its_end_the_earlier(environment: dict[str, str]) -> None:
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with running.announce_running(up(nats="nats://127.0.0.1:1"), environment):
        with running.announce_running(up(other.pid, nats="nats://127.0.0.1:2"), environment):
            os.utime(running.folder(environment) / f"up-{os.getpid()}.json", (1, 1))
            later = running.find_running(environment)
        earlier = running.find_running(environment)
    other.communicate()

    assert later is not None and earlier is not None
    assert ["nats://127.0.0.1:2", "nats://127.0.0.1:1"] == [later.nats, earlier.nats]


def test_where_no_file_can_be_written_it_runs_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with running.announce_running(up(), {"XDG_RUNTIME_DIR": str(tmp_path / "file")}):
        pass

    assert "give --nats in other terminals" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff"])
def test_a_damaged_file_counts_as_none(environment: dict[str, str], content: bytes) -> None:
    file = running.folder(environment) / f"up-{os.getpid()}.json"
    file.parent.mkdir()
    file.write_bytes(content)

    assert None is running.find_running(environment)


def test_an_option_goes_before_up_and_without_either_the_remedy_is_told(environment: dict[str, str]) -> None:
    with running.announce_running(up(), environment):
        assert ("nats://127.0.0.1:4222", "laptop") == locate_bus(None, None, environment)
        assert ("nats://127.0.0.1:4222", "other") == locate_bus(None, "other", environment)
        assert ("nats://far:1", os.uname().nodename) == locate_bus("nats://far:1", None, environment)
    with pytest.raises(NothingRuns) as refused:
        locate_bus(None, None, environment)
    assert "topoalign up" in refused.value.remedy
