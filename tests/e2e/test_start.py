"""A node agent lists its devices before it imports what it may need later, and stops without waiting for a deadline."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from e2e_support import environment

from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import load_machine
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.ports import kept_ports

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

MODULES = """
import json, signal, sys
from topoalign.cli import main
signal.signal(signal.SIGUSR1, lambda *_: print(json.dumps(sorted(sys.modules)), flush=True))
main()
"""
EXPIRED = """
import asyncio, json
from anyio._backends._asyncio import CancelScope
from topoalign.cli import main
from topoalign.runtime import systemd

expired, earlier, run, notify = [], set(), asyncio.TimerHandle._run, systemd.notify

def counted(handle):
    callback = handle._callback
    name, scope = callback.__qualname__, getattr(callback, "__self__", None)
    due = scope.deadline <= asyncio.get_running_loop().time() if isinstance(scope, CancelScope) else True
    if due and handle not in earlier and name in ("CancelScope._timeout", "_release_waiter", "Timeout._on_timeout"):
        expired.append(name)
    run(handle)

def began(environment, state):
    if state == "STOPPING=1":
        earlier.update(asyncio.get_running_loop()._scheduled)
        asyncio.TimerHandle._run = counted
    notify(environment, state)

systemd.notify = began
try:
    main()
finally:
    print(json.dumps(expired), flush=True)
"""
"""An agent that prints, when it has stopped, which deadlines ran out that were set after the signal to stop."""

LATER = {
    "rich": "draws on terminals",
    "pygments": "comes with rich",
    "yaml": "reads configuration files",
    "starlette": "serves pages",
    "uvicorn": "serves pages",
    "h11": "comes with uvicorn",
    "httptools": "serves pages",
    "aiohttp": "talks to Kubernetes",
    "prometheus_client": "writes /metrics",
    "PIL": "draws pictures",
    "defusedxml": "reads lstopo's files",
    "topoalign.registry": "runs elsewhere",
    "topoalign.testing": "plays a kubelet",
    "topoalign.tools": "measures and compares",
    "topoalign.tools.demo": "shows an example",
    "topoalign.mps": "runs where GPUs are shared by MPS",
}
"""Modules that a node agent has no use for when its first list is out, with what they are for."""


@asynccontextmanager
async def listed(
    script: str, folder: Path, **settings: str
) -> AsyncIterator[tuple[Process, BufferedByteReceiveStream]]:
    """A node agent that this script runs and whose GPUs a kubelet has listed; and what it prints."""
    machine = load_machine("dgx-a100").topology
    kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, AdmissionRules())
    others = {name: value for name, value in os.environ.items() if not name.startswith("TOPOALIGN_")}  # of tests
    async with local_nats(folder / "nats") as nats, anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        process = await anyio.open_process(
            [sys.executable, "-c", script, "node"],
            env={**others, **environment(NodeName("node-1"), nats, folder), **settings},
            stderr=None,
        )
        async with process:
            with anyio.fail_after(60):
                await kubelet.until(lambda k: k.allocatable(GPU) == 8)
                assert process.stdout is not None
                yield process, BufferedByteReceiveStream(process.stdout)
        tasks.cancel_scope.cancel()


async def test_an_agent_that_has_listed_its_gpus_has_not_imported_the_rest(short_folder: Path) -> None:
    async with listed(MODULES, short_folder) as (process, printed):
        process.send_signal(signal.SIGUSR1)
        modules = set(json.loads(await printed.receive_until(b"\n", 1 << 20)))
        process.send_signal(signal.SIGTERM)
        await process.wait()

    assert {"topoalign.allocator.main", "grpclib.server"} <= modules, "it is the agent that was asked"
    assert set() == modules & LATER.keys()


async def test_sigterm_waits_for_no_deadline_if_nothing_is_to_drain(short_folder: Path) -> None:
    """The kubelet listens, NATS is connected and a monitor keeps its connection: none of them is a call under way."""
    with kept_ports(1) as (port,):
        settings = {"TOPOALIGN_HTTP_PORT": str(port)}
        async with listed(EXPIRED, short_folder, **settings) as (process, printed), await monitor(port):
            process.send_signal(signal.SIGTERM)
            expired = json.loads(await printed.receive_until(b"\n", 1 << 20))
            status = await process.wait()

    assert (0, []) == (status, expired)


async def monitor(port: int) -> SocketStream:
    """A connection over which /livez was asked once, and may be asked again. It waits until the pages are served."""
    while True:
        try:
            connection = await anyio.connect_tcp("127.0.0.1", port)
        except OSError:
            await anyio.lowlevel.checkpoint()
            continue
        await connection.send(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await connection.receive()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return connection
