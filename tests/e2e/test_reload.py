"""SIGHUP and a changed file, met by a real node agent and what a kubelet sees of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import Process
from e2e_support import SERVICES, as_process, environment
from kubelet_support import RESTRICTED, short_directory

from topoalign.core.model.ids import GPU, NodeName
from topoalign.machines import load_machine
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

SHARED = "version: v1\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: %d}]}}\n"
REFUSED = "configuration refused, the one before stays in use"


@dataclass
class Agent:
    """A node agent in a process of its own, without a hub: it does its work all the same."""

    process: Process
    log: Path
    config: Path
    kubelet: FakeKubelet

    def configured(self, text: str) -> None:
        """Puts another file in place, whole at any moment."""
        new = self.config.with_suffix(".new")
        new.write_text(text)
        os.rename(new, self.config)

    def lines(self) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for line in self.log.read_text().splitlines()
            if line.startswith("{") and line.endswith("}")
        ]

    async def logs(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Waits until it has logged this event so many times."""
        with anyio.fail_after(60):
            while len(found := [line for line in self.lines() if line["event"] == event]) < count:
                assert None is self.process.returncode, self.log.read_text()
                await anyio.to_thread.run_sync(int)  # the file has no event for it
        return found

    async def lists(self, gpus: int) -> None:
        """Waits until the kubelet may give so many."""
        with anyio.fail_after(60):
            await self.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == gpus)

    async def readiness(self) -> str:
        (running,) = await self.logs("running")
        async with httpx.AsyncClient(base_url=running["http"]) as http:
            return (await http.get("/readyz?verbose")).text


@asynccontextmanager
async def agent(text: str) -> AsyncIterator[Agent]:
    with short_directory() as folder:
        config, log = folder / "topoalign.yaml", folder / "log"
        config.write_text(text)
        machine = load_machine("dgx-a100").topology
        kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, RESTRICTED)
        settings = environment(NodeName("node-1"), "nats://127.0.0.1:9", folder) | {
            "TOPOALIGN_CONFIG": str(config),
            "TOPOALIGN_LOG_FORMAT": "json",
            "TOPOALIGN_HTTP_PORT": "0",
            "TOPOALIGN_CDI_DIR": str(folder / "cdi"),
        }
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            async with as_process("node", settings, log) as process:
                yield Agent(process, log, config, kubelet)
            tasks.cancel_scope.cancel()


async def test_a_wrong_configuration_on_sighup_keeps_the_old_one_and_says_why() -> None:
    """
    C57: the kubelet goes on being offered what it was, the log says once what is wrong and what to do, the
    page of readiness notes it, and a right file is used at the next SIGHUP. SIGTERM then ends the agent with exit code 0.
    """
    async with agent(SHARED % 2) as node:
        await node.lists(16)

        node.configured(SHARED % 0)
        node.process.send_signal(signal.SIGHUP)
        refused = (await node.logs(REFUSED))[0]
        page = await node.readiness()
        assert "sharing.timeSlicing.resources[0].replicas: Expected `int` >= 1" == refused["finding"]
        assert "warning" == refused["level"] and refused["remedy"]
        assert f"[!] configuration: {node.config} is not in use: {refused['finding']}" in page
        assert 16 == node.kubelet.allocatable(GPU)

        node.configured(SHARED % 3)
        node.process.send_signal(signal.SIGHUP)
        await node.lists(24)
        assert "[!] configuration" not in await node.readiness()

        node.process.send_signal(signal.SIGTERM)
        node.process.send_signal(signal.SIGHUP)
        with anyio.fail_after(60):
            assert 0 == await node.process.wait()


async def test_a_changed_file_is_used_without_being_asked() -> None:
    async with agent(SHARED % 2) as node:
        await node.lists(16)
        node.configured("version: v1\n")

        await node.lists(8)


async def test_a_wrong_first_configuration_ends_with_5_before_registration() -> None:
    """If the first configuration is invalid, the service ends with exit code 5 before anything is registered."""
    async with agent(SHARED % 0) as node:
        with anyio.fail_after(60):
            assert 5 == await node.process.wait()

        assert "sharing.timeSlicing.resources[0].replicas" in node.log.read_text()
        assert "Traceback" not in node.log.read_text()
        assert 0 == node.kubelet.allocatable(GPU)
        assert ["kubelet.sock"] == [path.name for path in node.kubelet.plugins_dir.glob("*.sock")]


async def test_sighup_ends_no_service(tmp_path: Path) -> None:
    """Not even together with SIGTERM, as systemd may send it: the end stays in order."""

    async def run(service: str) -> None:
        log = tmp_path / f"{service}.log"
        settings = {
            "TOPOALIGN_NATS_URL": "nats://127.0.0.1:9",
            "TOPOALIGN_MACHINE": "dgx-a100",
            "TOPOALIGN_STATE_DIR": str(tmp_path / service),
            "TOPOALIGN_LOG_FORMAT": "json",
        }
        async with as_process(service, settings, log) as process:
            while '"running"' not in (log.read_text() if log.exists() else ""):
                assert None is process.returncode, log.read_text()
                await anyio.to_thread.run_sync(int)  # the file has no event for it
            process.send_signal(signal.SIGHUP)
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGHUP)
            ended[service] = await process.wait()

    ended: dict[str, int] = {}
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for service in SERVICES:
                tasks.start_soon(run, service)

    assert dict.fromkeys(SERVICES, 0) == ended


def test_a_terminal_that_closes_ends_up_in_order(tmp_path: Path) -> None:
    """`up` is somebody's at a terminal; nobody could end it once that is gone."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith("TOPOALIGN_")}
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("topoalign")), "up", "--machine", "dgx-a100", "--http", "127.0.0.1:0"],
        env={**settings, "XDG_RUNTIME_DIR": str(tmp_path), "CONFIG_FILE": "/nowhere/of/another/program"},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )
    assert process.stderr is not None
    with process:
        said = next(line for line in process.stderr if "Ctrl-C" in line or "error" in line)
        process.send_signal(signal.SIGHUP)
        process.stderr.read()

        assert "Ctrl-C" in said
        assert 0 == process.wait(60)
