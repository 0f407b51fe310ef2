"""`topoalign mps` as a whole process: its pages, its end at SIGTERM, and what is left where it is killed."""

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import Process
from e2e_support import as_process
from mps_support import MpsNode
from nvml_support import script

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def started(node: MpsNode, library: Path, *more: str) -> AsyncIterator[Process]:
    """The command on this node; the dynamic loader finds the stand-in of NVML. `more`: statements for that."""
    (node.folder / "script").write_text(script(gpus=range(2), more=more))
    environment = {
        **node.environment,
        "LD_LIBRARY_PATH": str(library.parent),
        "NVML_STANDIN": str(node.folder / "script"),
        "TOPOALIGN_HTTP_PORT": "0",
        "TOPOALIGN_LOG_FORMAT": "json",
    }
    async with as_process("mps", environment, node.folder / "log") as process:
        yield process


async def until(true: Callable[[], object]) -> None:
    with anyio.fail_after(60):
        while not true():
            await anyio.lowlevel.checkpoint()
            await anyio.sleep(0.01)


def url(node: MpsNode) -> str:
    lines = (node.folder / "log").read_text().split('"http": "')
    return lines[-1].split('"')[0]


async def test_a_process_is_ready_while_its_daemon_serves_and_ends_in_order(node: MpsNode, nvml_library: Path) -> None:
    node.share("name: gpu, replicas: 4")
    async with started(node, nvml_library) as process:
        await until(lambda: '"http": "' in (node.folder / "log").read_text() and node.serving())
        async with httpx.AsyncClient(base_url=url(node)) as http:
            assert 200 == (await http.get("/readyz")).status_code
            assert 'topoalign_mps_ready{resource="nvidia.com/gpu"} 1.0' in (await http.get("/metrics")).text
            os.kill(node.pid(), signal.SIGKILL)
            await until(lambda: node.serving() is None)
            ready = await http.get("/readyz")
            assert 503 == ready.status_code and "mps" in ready.text
            await until(node.serving)
        process.send_signal(signal.SIGTERM)

        assert 0 == await process.wait()
    assert ["quit", "GPU-0 0", "GPU-1 0"] == node.events[-3:]
    assert node.serving() is None


async def test_a_killed_process_is_noticed_at_once_and_its_successor_serves(node: MpsNode, nvml_library: Path) -> None:
    """The daemon that it leaves has the right limits, but nobody would see its end: no container gets it any more."""
    node.share("name: gpu, replicas: 4")
    async with started(node, nvml_library) as process:
        await until(node.serving)
        left = node.pid()
        process.kill()
        await process.wait()

        assert (node.root / "nvidia.com/gpu/serves").exists()
        assert node.serving() is None
        os.kill(left, 0)
    async with started(node, nvml_library):
        await until(node.serving)

        assert left != node.pid()
        assert 1 == node.count("quit")


async def test_a_process_ends_although_a_call_of_the_driver_never_does(node: MpsNode, nvml_library: Path) -> None:
    node.share("name: gpu, replicas: 4")
    async with started(node, nvml_library, "hang nvmlDeviceGetName") as process:
        await until(lambda: '"http": "' in (node.folder / "log").read_text())
        async with httpx.AsyncClient(base_url=url(node)) as http:
            assert 503 == (await http.get("/readyz")).status_code
        process.send_signal(signal.SIGTERM)

        with anyio.fail_after(30):
            assert 0 == await process.wait()
