"""
A cluster on one machine: the product's services, real NATS and HTTP, and stand-ins for what Kubernetes has.

    scheduler (stand-in) -> registries, a process each -> API server (stand-in) -> kubelets (stand-ins)
                                      |                                               |
                                      +------------- NATS ----- services of the nodes +

The registries answer the scheduler over HTTP, each connection the next one, as a Service has it.
"""

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http.client import HTTPConnection, HTTPException
from itertools import cycle
from pathlib import Path
from random import Random
from typing import NamedTuple

import anyio
from anyio.abc import Process

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import NodeName
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.settings import PREFIX
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.fake_scheduler.extender import HttpExtender
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.testing.ports import kept_ports
from topoalign.tools.simulate.node import SimulatedNode
from topoalign.tools.simulate.reserved import Reservations

READY_SECONDS = 120.0
"""For the registries to know all nodes; on an idle machine it takes some seconds."""
LOOK_SECONDS = 0.1
MOST_ADMITTING = 2
"""
Kubelets that admit a pod at the same time. All nodes share this process, as real ones do not: with more of them a busy
machine has each call wait for all others, until the kubelet is given up that lists its pods, and the pod is refused.
"""
STOP_SECONDS = 10.0


class NotReady(Unavailable):
    """The cluster did not come up."""

    code = "NotReady"

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} within {READY_SECONDS:g} s", "fewer nodes come up sooner; the log is on stderr")


class Replica:
    """One registry: a process with its HTTP pages and its extender."""

    def __init__(self, process: Process, pages: int, port: int) -> None:
        self.process = process
        self.pages = pages
        self.port = port

    def kill(self) -> None:
        """It ends at once."""
        self.process.send_signal(signal.SIGKILL)

    def is_ready(self) -> bool:
        """Whether /readyz says so. Raises NotReady if the process has ended."""
        if self.process.returncode is not None:
            raise NotReady(f"a registry ended with {self.process.returncode} and did not come up")
        connection = HTTPConnection("127.0.0.1", self.pages, timeout=LOOK_SECONDS * 10)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


class Tls(NamedTuple):
    """What HTTPS between scheduler and registries needs."""

    directory: Path
    """`tls.crt` and `tls.key` of the registries."""
    authority: Path
    """The certificate by which the scheduler verifies them."""


class SimulatedCluster:
    """What runs, for whoever gives it pods."""

    def __init__(
        self, api: FakeCluster, nodes: Sequence[SimulatedNode], replicas: Sequence[Replica], tls: Tls | None
    ) -> None:
        self.api = api
        self.nodes = nodes
        self.replicas = replicas
        self.reservations = Reservations()
        verified = ssl.create_default_context(cafile=str(tls.authority)) if tls is not None else None
        scheme = "http" if tls is None else "https"
        self.extender = HttpExtender(
            *(f"{scheme}://127.0.0.1:{each.port}/scheduler" for each in replicas), tls=verified
        )
        self.scheduler = FakeScheduler(api, self.extender, SystemClock())


@asynccontextmanager
async def simulated_cluster(
    names: Sequence[NodeName],
    machines: Sequence[str],
    policies: Sequence[str],
    registries: int,
    seconds: tuple[float, float],
    chance: Random,
    folder: Path,
    tls: Tls | None = None,
    *,
    shuffled: bool = False,
) -> AsyncIterator[SimulatedCluster]:
    """
    A cluster while the context is open: nodes that take turns with machines and policies, and whose pods last between the
    two numbers of `seconds`. `folder`: a short path, because sockets are made below it. `tls` None: the
    scheduler uses HTTP. `shuffled`: as for `SimulatedNode`.

    Raises NotReady, and what starting the parts raises.
    """
    api = FakeCluster()
    with kept_ports(2 * registries) as ports:
        async with local_nats(folder / "nats") as nats, fake_api_server(api) as server, background() as tasks:
            admitting = anyio.Semaphore(MOST_ADMITTING)
            turns = zip(names, cycle(machines), cycle(policies), strict=False)  # nodes take turns
            nodes = [
                SimulatedNode(
                    name, machine, policy, folder / str(n), nats, api, chance, shuffled=shuffled, turns=admitting
                )
                for n, (name, machine, policy) in enumerate(turns)
            ]
            for node in nodes:
                await tasks.start(node.run, seconds)
            kubeconfig = server.kubeconfig(folder / "kubeconfig")
            replicas = [await started(nats, kubeconfig, tls, *two) for two in zip(ports[::2], ports[1::2], strict=True)]
            try:
                await until_ready(replicas)
                cluster = SimulatedCluster(api, nodes, replicas, tls)
                await tasks.start(cluster.scheduler.run)
                try:
                    async with connect_bus(nats) as bus, background() as listening:
                        listening.start_soon(cluster.reservations.follow, bus)
                        yield cluster
                finally:
                    cluster.extender.close()
            finally:
                with anyio.CancelScope(shield=True):
                    async with anyio.create_task_group() as ending:
                        for each in replicas:
                            ending.start_soon(stopped, each.process)


async def started(nats: str, kubeconfig: Path, tls: Tls | None, pages: int, port: int) -> Replica:
    """A registry that is about to start, with these ports for its pages and its extender."""
    settings = {
        "NATS_URL": nats,
        "HTTP_PORT": str(pages),
        "SCHEDULER_PORT": str(port),
        "KUBERNETES": str(kubeconfig),
        "LOG_LEVEL": "error",
    }
    if tls is not None:
        settings["SCHEDULER_TLS_DIR"] = str(tls.directory)
    process = await anyio.open_process(
        [str(Path(sys.executable).with_name("topoalign")), "registry"],
        env={**os.environ, **{PREFIX + name: value for name, value in settings.items()}},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None,
    )
    return Replica(process, pages, port)


async def until_ready(replicas: Sequence[Replica]) -> None:
    """Raises NotReady."""
    end = anyio.current_time() + READY_SECONDS
    for each in replicas:
        while not await anyio.to_thread.run_sync(each.is_ready):
            if anyio.current_time() > end:
                raise NotReady("not every registry was ready")
            await anyio.sleep(LOOK_SECONDS)


async def stopped(process: Process) -> None:
    """Ends a process without a drain, with force where it does not end by itself."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with anyio.move_on_after(STOP_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.aclose()
