"""
The node agent as its DaemonSet starts it: uid 0 without a capability, a read-only root, and directories that belong to root.

There is no container engine here: a mount namespace has the DaemonSet's mounts, with its flags, over a read-only root, and
setpriv takes all capabilities away. Command line and environment are those of the rendered manifest.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest
from e2e_support import pod
from manifests_support import Manifest, one, rendered, values

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import AdmissionRules
from topoalign.machines import load_machine
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.ports import kept_ports

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

TOPOALIGN = str(Path(sys.executable).with_name("topoalign"))
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


def can_unshare() -> bool:
    """Whether mounts can be made here that nobody else sees."""
    if os.getuid() != 0 or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return False
    return subprocess.run(["unshare", "--mount", "mount", "--bind", "/", "/"], capture_output=True).returncode == 0


@pytest.fixture
def host() -> Iterator[Path]:
    """A host's directories that the DaemonSet mounts, owned by root."""
    if not can_unshare():
        pytest.skip("no right to make mounts")
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        host = Path(name)
        for each in ("var/lib/topoalign", "var/lib/kubelet/device-plugins", "var/lib/kubelet/pod-resources", "etc"):
            (host / each).mkdir(parents=True, mode=0o750)
        (host / "etc/config.yaml").write_text("version: v1\n")
        yield host


def mounting(agent: Manifest, volumes: dict[str, Manifest], host: Path) -> Iterator[list[str]]:
    """The commands that make the root read-only and mount the agent's volumes over it."""
    for place in ("/var/lib", "/etc"):  # where directories for mounts have to be made
        yield ["mount", "-t", "tmpfs", "tmpfs", place]
    for each in agent["volumeMounts"]:
        path = volumes[each["name"]].get("hostPath", {}).get("path")
        yield ["mkdir", "-p", each["mountPath"]]
        yield [
            "mount",
            "--rbind",
            "/sys" if path == "/sys" else str(host / (path or "/etc").lstrip("/")),
            each["mountPath"],
        ]
        if each.get("readOnly"):
            yield ["mount", "-o", "remount,bind,ro", each["mountPath"]]
    for place in ("/var/lib", "/etc", "/"):
        yield ["mount", "-o", "remount,bind,ro", place]


def command(agent: Manifest, volumes: dict[str, Manifest], host: Path) -> list[str]:
    """Starts the agent in the mounts of its container, as the user of its container, without capabilities."""
    assert (0, 0) == (agent["securityContext"]["runAsUser"], agent["securityContext"]["runAsGroup"])
    unprivileged = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    steps = [shlex.join(step) for step in mounting(agent, volumes, host)]
    steps.append(shlex.join(["exec", *unprivileged, TOPOALIGN, *agent["args"]]))
    return ["unshare", "--mount", "sh", "-ec", "\n".join(steps)]


@asynccontextmanager
async def running(host: Path, nats: str) -> AsyncIterator[tuple[anyio.abc.Process, dict[str, str]]]:
    """The agent, and its environment. Only what names a host of the cluster differs from the manifest."""
    with kept_ports(1) as (port,):
        daemon_set = one(rendered("prod", host / f"manifests-{port}"), "DaemonSet", "topoalign-node")
        spec = daemon_set["spec"]["template"]["spec"]
        (agent,) = spec["containers"]
        environment = {
            **{name: os.environ[name] for name in ("PATH",)},
            **values(agent),
            "TOPOALIGN_NODE": "node-1",
            "TOPOALIGN_MACHINE": "dgx-a100",
            "TOPOALIGN_NATS_URL": nats,
            "TOPOALIGN_HTTP_PORT": str(port),
        }
        del environment["TOPOALIGN_NATS_NKEY"]  # this NATS has no accounts
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        with (host / f"log-{port}").open("wb") as log:
            process = await anyio.open_process(command(agent, volumes, host), env=environment, stdout=log, stderr=log)
        try:
            yield process, environment
        finally:
            process.kill()
            await process.aclose()


def healthy(environment: dict[str, str], *flags: str) -> bool:
    """What a probe of the container says."""
    return (
        subprocess.run([TOPOALIGN, "health", *flags], env=environment, capture_output=True, timeout=30).returncode == 0
    )


async def until_healthy(environment: dict[str, str], *flags: str, expected: bool = True) -> None:
    with anyio.fail_after(60):
        while await anyio.to_thread.run_sync(healthy, environment, *flags) is not expected:
            await anyio.lowlevel.checkpoint()


async def test_the_agent_runs_as_its_daemon_set_starts_it(host: Path) -> None:
    """
    It registers, gives out devices, is ready and alive by its probes, and keeps its record, without any right of root. The
    pod of a new version takes over beside it, as in a rolling update with a surge.
    """
    kubelet_root = host / "var/lib/kubelet"
    kubelet = FakeKubelet(
        kubelet_root / "device-plugins",
        kubelet_root / "pod-resources",
        load_machine("dgx-a100").topology,
        AdmissionRules(),
    )
    async with local_nats(host / "nats") as nats, anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        async with running(host, nats) as (process, environment):
            await registered(kubelet, 2)
            decision = await kubelet.admit(pod("train", gpus=4))
            await until_healthy(environment)
            alive = healthy(environment, "--live")
            status = process_status(process.pid)
            options = mount_options(process.pid)
            async with running(host, nats) as (_, newer):
                await registered(kubelet, 4)
                await until_healthy(newer)
                await until_healthy(environment, expected=False)
                still_alive = healthy(environment, "--live")
        tasks.cancel_scope.cancel()

    assert isinstance(decision, Admission)
    assert (True, True) == (alive, still_alive)
    assert {"0" * 16} == {status[name] for name in CAPABILITIES}
    assert ("1", ["0"] * 4) == (status["NoNewPrivs"], status["Uid"].split())
    assert {
        "/": "ro",
        "/var/lib/kubelet": "ro",
        "/var/lib/kubelet/device-plugins": "rw",
        "/sys": "ro",
    }.items() <= options.items()
    assert recorded(host / "var/lib/topoalign", "train")


async def registered(kubelet: FakeKubelet, times: int) -> None:
    with anyio.fail_after(60):
        await kubelet.until(lambda now: now.plugins.registrations >= times and now.allocatable(GPU) == 8)


def process_status(pid: int) -> dict[str, str]:
    """What the kernel says of a process: its users and capabilities."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def recorded(state: Path, name: str) -> bool:
    """Whether the record of a node has a pod of this name."""
    return any(name.encode() in file.read_bytes() for file in state.iterdir() if file.is_file())


def mount_options(pid: int) -> dict[str, str]:
    """Where something is mounted for the process -> `ro` or `rw`; of several at one place the last one."""
    rows = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {row[4]: row[5].split(",")[0] for row in rows}
