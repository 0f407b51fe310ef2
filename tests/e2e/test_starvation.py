"""A node agent that runs out of file descriptors or memory does less for as long as that lasts, and then all again."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec
import pytest
from e2e_support import allocate, answering, pod, release

from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="limits a process that runs, which needs Linux's prlimit"),
]

NODE = NodeName("node-1")
FILES = 64
SPARE = 12 << 20
"""Bytes of address space: enough for what a node agent does all day."""


class Agent:
    """A node agent as its own process, limited from its start."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process, self.log = process, log
        self.http = ""

    async def serving(self) -> None:
        """Until its log says where its pages are."""
        while not self.http:
            said = await anyio.Path(self.log).read_text()
            assert self.process.poll() is None, said
            for line in said.splitlines():
                with suppress(ValueError):
                    self.http = json.loads(line).get("http") or self.http
            await anyio.lowlevel.checkpoint()


def started(arguments: Sequence[str], environment: dict[str, str], log: Path) -> Agent:
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, env={**os.environ, **environment}, stdout=output, stderr=output)
    return Agent(process, log)


@asynccontextmanager
async def agent(nats: str, folder: Path, files: int = 1_024) -> AsyncIterator[Agent]:
    program = str(Path(sys.executable).with_name("topoalign"))
    environment = {
        "TOPOALIGN_NATS_URL": nats,
        "TOPOALIGN_NODE": NODE,
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(folder / "state"),
        "TOPOALIGN_LOG_FORMAT": "json",
    }
    options = ["node", "--kubelet-dir", "", "--http", "127.0.0.1:0"]
    shell = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", program, *options]
    running = started(shell, environment, folder / "log")
    try:
        await running.serving()
        yield running
    finally:
        running.process.terminate()
        await anyio.to_thread.run_sync(running.process.wait)


@contextmanager
def connections(url: str, count: int) -> Iterator[None]:
    """So many that say nothing, to the agent's pages."""
    parts = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(count):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex((parts.hostname, parts.port))  # it may have to wait until it is let in
        yield


async def all_is_well(agent: Agent, bus: Bus) -> None:
    """Until it is ready and gives and takes back devices, as it did before."""
    async with httpx.AsyncClient(base_url=agent.http) as http:
        while True:
            with suppress(httpx.HTTPError):
                if (await http.get("/readyz")).status_code == 200:
                    break
            await anyio.lowlevel.checkpoint()
    await answering(bus, NODE)
    decision = await allocate(bus, NODE, pod("afterwards", gpus=8))
    assert isinstance(decision, Admission), decision
    await release(bus, NODE, "default/afterwards")


async def test_silent_connections_leave_descriptors_for_everything_else(tmp_path: Path) -> None:
    """C56: `ulimit -n 64` and twice as many idle connections. The pages answer, devices are given, and no log overflows."""
    async with local_nats(tmp_path / "nats") as nats, connect_bus(nats) as bus, agent(nats, tmp_path, FILES) as running:
        await answering(bus, NODE)
        with connections(running.http, 2 * FILES):
            await all_is_well(running, bus)
            used = len(descriptors(running))
        status = running.process.poll()

    assert None is status
    assert used < FILES
    assert "out of system resource" not in await anyio.Path(running.log).read_text()


async def test_an_agent_without_descriptors_gives_devices_and_recovers(
    tmp_path: Path,
) -> None:
    """C56: it may have no more than it has, somebody keeps knocking, and NATS is asked for devices all the while."""
    async with local_nats(tmp_path / "nats") as nats, connect_bus(nats) as bus, agent(nats, tmp_path, FILES) as running:
        await answering(bus, NODE)
        pid = running.process.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(descriptors(running)) + 1, FILES))
        with connections(running.http, 20):
            answers = []
            for number in range(20):
                try:
                    answers.append(await allocate(bus, NODE, pod(f"pod-{number}", gpus=1)))
                    await release(bus, NODE, f"default/pod-{number}")
                except TopoalignError as error:
                    assert error.remedy  # refused, with what to do
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (FILES, FILES))
        await all_is_well(running, bus)
        status = running.process.poll()
        said = await anyio.Path(running.log).read_text()

    assert None is status
    assert any(isinstance(answer, Admission) for answer in answers)
    assert 1 == said.count("out of system resource"), "said once, not for each try"
    assert "Logging error" not in said
    assert len(said) < 100_000


def descriptors(agent: Agent) -> list[int]:
    """Those that it has open."""
    return [int(name) for name in os.listdir(f"/proc/{agent.process.pid}/fd")]


async def test_an_agent_without_memory_refuses_what_is_large_and_goes_on(tmp_path: Path) -> None:
    """C56: a few megabytes more of address space than it has (RLIMIT_AS), and requests whose contents take dozens."""
    large = msgspec.json.encode({"node": NODE, "pod": pod("large", gpus=1), "rules": [{"": 0}] * 140_000})
    async with local_nats(tmp_path / "nats") as nats, connect_bus(nats) as bus, agent(nats, tmp_path) as running:
        await answering(bus, NODE)
        pid = running.process.pid
        unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (size_of(pid) + SPARE, unlimited[1]))
        told = []
        for _ in range(5):
            with suppress(TopoalignError):
                told.append(await bus.ask(wire.admission_subject(NODE, "what-if"), large, 5))
        resource.prlimit(pid, resource.RLIMIT_AS, unlimited)
        await all_is_well(running, bus)
        status = running.process.poll()
        said = await anyio.Path(running.log).read_text()

    assert len(large) < wire.LARGEST_BODY
    assert None is status
    assert told and all(b'"failure"' in body for body in told)
    assert "MemoryError" in said


def size_of(pid: int) -> int:
    """Bytes of address space that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
