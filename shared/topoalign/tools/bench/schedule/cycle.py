"""One cluster: its pods are created at once, and scheduled one after another until all run."""

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio import to_thread

from topoalign.cli.measuring import summary
from topoalign.core.model.ids import NodeName
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.server import fake_api_server
from topoalign.testing.fake_scheduler.extender import Extender, HttpExtender, Verb
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.tools.bench.device_plugin.agent import Agent, running
from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.filter.cluster import HALF, BusyNode
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json
from topoalign.tools.bench.registry.reader import (
    PATIENCE_SECONDS,
    NotAnswered,
    Reader,
    free_port,
    until,
)
from topoalign.tools.bench.schedule.nodes import Nodes

SHAPES = (Amounts(gpus=1), Amounts(gpus=2, cpus=16, mib=64 * 1024))
"""What pods ask for, in turn."""


class TimedExtender:
    """Asks another one, and notes how long each answer took."""

    def __init__(self, extender: Extender) -> None:
        self.took: defaultdict[str, list[float]] = defaultdict(list)
        """Verb -> milliseconds of each call, as the scheduler sees them."""
        self._extender, self._asked = extender, 0
        self._answered = anyio.Event()

    async def all_answered(self) -> None:
        """Until no call is under way."""
        while self._asked:
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


async def schedule(url: str, folder: Path, everywhere: Nodes, size: int, pods: int) -> Sequence[Row]:
    """The rows of a cluster whose nodes have spoken on this NATS. Raises NotAnswered, AllocatorsEnded."""
    cluster = FakeCluster()
    for number in range(size):
        register(cluster, BusyNode(number, HALF))
    gc.freeze()  # the objects of tens of thousands of pods, which the collector would look through all the time
    pages, port = free_port(), free_port()
    async with fake_api_server(cluster) as server:
        settings = {
            "NATS_URL": url,
            "HTTP_PORT": str(pages),
            "SCHEDULER_PORT": str(port),
            "KUBERNETES": str(server.kubeconfig(folder / "kubeconfig")),
            "LOG_LEVEL": "error",
        }
        with running("registry", settings, observed=True) as registry:
            await to_thread.run_sync(until_ready, pages)
            http = HttpExtender(f"http://127.0.0.1:{port}/scheduler")
            with closing(http):
                extender = TimedExtender(http)
                scheduler = FakeScheduler(cluster, extender, SystemClock())
                await to_thread.run_sync(registry.longest_block_ms)
                seconds, refused = await scheduled(cluster, scheduler, extender, everywhere, pods)
                return rows(f"{size}x{pods}", seconds, refused, extender, scheduler, registry)


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


def until_ready(pages: int) -> None:
    """Until a registry knows what its answers depend on. Raises NotAnswered."""
    with closing(Reader(pages)) as reader:
        until(lambda: reader.is_ok("/readyz"), "the registry has not read the streams")


async def scheduled(
    cluster: FakeCluster, scheduler: FakeScheduler, extender: TimedExtender, everywhere: Nodes, pods: int
) -> tuple[float, Counter[str]]:
    """The seconds until all of so many new pods run, and how many their nodes refused, by code. Raises NotAnswered."""
    refused: Counter[str] = Counter()
    async with background() as tasks:
        tasks.start_soon(bind_all, cluster, everywhere)
        await tasks.start(scheduler.run)
        began = time.perf_counter()
        uids = {}
        for number in range(pods):
            made = cluster.add_pod(msgspec.json.decode(pod_json(number, SHAPES[number % len(SHAPES)])))
            uids[made["metadata"]["uid"]] = (made["metadata"]["namespace"], made["metadata"]["name"])
        with anyio.move_on_after(PATIENCE_SECONDS) as waiting:
            while uids:
                admitted = await to_thread.run_sync(everywhere.next)
                if admitted.code:
                    refused[admitted.code] += 1
                key, phase = uids.pop(admitted.uid), "Failed" if admitted.code else "Running"
                cluster.set_status(*key, phase=phase)
        if waiting.cancelled_caught:
            raise NotAnswered("the pods", f"{len(uids)} of {pods} do not run: {scheduler.errors[-1:]}")
        seconds = time.perf_counter() - began
        await extender.all_answered()
        return seconds, refused


async def bind_all(cluster: FakeCluster, everywhere: Nodes) -> None:
    """Tells the nodes which pods are bound to them, as kubelets see it, for ever."""
    pods, seen = cluster.pods, cluster.pods.newest
    told: set[str] = set()
    while True:
        for change in pods.since(seen):
            seen, pod = change.version, change.object
            uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
            if node and uid not in told:
                told.add(uid)
                everywhere.bind(NodeName(node), uid, pod)
        await pods.wait()


def rows(
    case: str, seconds: float, refused: Counter[str], extender: TimedExtender, scheduler: FakeScheduler, registry: Agent
) -> Sequence[Row]:
    """The calls by verb, and the whole."""
    pods = len(extender.took["bind"]) - len(scheduler.errors)
    return [
        *(summary(f"{case}-{verb}", extender.took[verb]) for verb in ("filter", "prioritize", "bind")),
        {
            "case": case,
            "n": pods,
            "pods_per_second": round(pods / seconds, 1),
            "refused": dict(refused),
            "errors": dict(Counter(scheduler.errors)),
            "longest_block_ms": registry.longest_block_ms(),
            "rss_mb": registry.rss_mb,
        },
    ]
