"""A node agent has listed its devices before it has imported what it may need later, or never."""

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from e2e_support import environment

from topoalign.core.model.ids import GPU, NodeName
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import load_machine
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

AGENT = """
import json, signal, sys
from topoalign.cli import main
signal.signal(signal.SIGUSR1, lambda *_: print(json.dumps(sorted(sys.modules)), flush=True))
main()
"""
LATER = {
    "rich": "draws on terminals",
    "pygments": "comes with rich",
    "yaml": "reads configuration files",
    "starlette": "serves pages",
    "uvicorn": "serves pages",
    "h11": "serves pages",
    "prometheus_client": "writes /metrics",
    "PIL": "draws pictures",
    "defusedxml": "reads lstopo's files",
    "topoalign.registry": "runs elsewhere",
    "topoalign.testing": "plays a kubelet",
    "topoalign.tools": "measures and compares",
    "topoalign.cli.draw": "draws machines",
    "topoalign.allocator.demo": "shows an example",
}
"""Modules that a node agent has no use for when its first list is out, with what they are for."""


async def test_an_agent_that_has_listed_its_gpus_has_not_imported_the_rest(tmp_path: Path, short_folder: Path) -> None:
    plugins, resources = short_folder / "device-plugins", short_folder / "pod-resources"
    for directory in (plugins, resources):
        directory.mkdir()
    kubelet = FakeKubelet(plugins, resources, load_machine("dgx-a100").topology, AdmissionRules())
    async with local_nats(tmp_path / "nats") as nats, anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        process = await anyio.open_process(
            [sys.executable, "-c", AGENT, "node"],
            env={**os.environ, **environment(NodeName("node-1"), nats, short_folder)},
            stderr=None,
        )
        async with process:
            with anyio.fail_after(60):
                await kubelet.until(lambda k: k.allocatable(GPU) == 8)
                process.send_signal(signal.SIGUSR1)
                assert process.stdout is not None
                modules = set(json.loads(await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 1 << 20)))
                process.send_signal(signal.SIGTERM)
                status = await process.wait()
        tasks.cancel_scope.cancel()

    assert {"topoalign.allocator.main", "grpclib.server"} <= modules, "it is the agent that was asked"
    assert set() == modules & LATER.keys()
    assert 0 == status
