"""The API server and the registry of a cluster whose nodes have spoken."""

import gc
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.fake_scheduler.extender import Extender, HttpExtender, Verb
from topoalign.testing.ports import kept_ports
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.filter.cluster import BusyNode
from topoalign.tools.bench.registry.reader import Reader, until


class TimedExtender:
    """Asks another one, and notes how long each answer took."""

    def __init__(self, extender: Extender) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        """Verb -> milliseconds of each call, as the scheduler sees them."""
        self._extender = extender
        self._asked = 0
        self._answered = anyio.Event()

    async def all_answered(self) -> None:
        """Until no call is under way."""
        while self._asked:
            await self._answered.wait()

    async def until_answered(self, verb: str, calls: int) -> None:
        """Until so many calls of this verb are answered."""
        while len(self.took[verb]) < calls:
            await self._answered.wait()

    async def ask(self, verb: Verb, arguments: Mapping[str, Any]) -> Any:
        """As `Extender`."""
        began = time.perf_counter()
        self._asked += 1
        try:
            return await self._extender.ask(verb, arguments)
        finally:
            self._asked -= 1
            self._answered.set()
            self._answered = anyio.Event()
            self.took[verb].append((time.perf_counter() - began) * 1000)


class ControlPlane:
    """What runs beside the nodes. Made by `control_plane`."""

    def __init__(self, cluster: FakeCluster, registry: Agent, extender: TimedExtender) -> None:
        self.cluster = cluster
        self.registry = registry
        self.extender = extender


@asynccontextmanager
async def control_plane(url: str, folder: Path, nodes: Iterable[BusyNode]) -> AsyncIterator[ControlPlane]:
    """Those of nodes that have spoken on this NATS, while the context is open. Raises NotAnswered."""
    cluster = FakeCluster()
    for each in nodes:
        register(cluster, each)
    gc.freeze()  # the objects of tens of thousands of pods, which the collector would look through all the time
    async with fake_api_server(cluster) as server:
        with kept_ports(2) as (pages, port):
            settings = {
                "NATS_URL": url,
                "HTTP_PORT": str(pages),
                "SCHEDULER_PORT": str(port),
                "KUBERNETES": str(server.kubeconfig(folder / "kubeconfig")),
                "LOG_LEVEL": "error",
            }
            with running("registry", settings, observed=True) as registry:
                await to_thread.run_sync(until_ready, registry, pages)
                with closing(HttpExtender(f"http://127.0.0.1:{port}/scheduler")) as http:
                    await to_thread.run_sync(registry.longest_block_ms)
                    yield ControlPlane(cluster, registry, TimedExtender(http))


def register(cluster: FakeCluster, busy: BusyNode) -> None:
    """A node and the pods that run on it, as an API server has them."""
    cluster.add_node(busy.node)
    gpus = str(len(busy.kind.bare.gpus))
    cluster.nodes.merge(("", busy.node), {"status": {"allocatable": {"nvidia.com/gpu": gpus}}})
    for each in busy.containers:
        resources = {"limits": {"nvidia.com/gpu": str(len(each.gpus))}}
        cluster.add_pod(
            {
                "metadata": {"name": each.owner.pod, "namespace": each.owner.namespace, "uid": each.uid},
                "spec": {
                    "nodeName": busy.node,
                    "containers": [{"name": each.owner.container, "image": "none", "resources": resources}],
                },
                "status": {"phase": "Running"},
            }
        )


def until_ready(registry: Agent, pages: int) -> None:
    """Until a registry knows what its answers depend on. Raises NotAnswered."""
    with closing(Reader(pages)) as reader:
        until(lambda: reader.is_ok("/readyz"), "the registry has not read the streams", registry)
