"""Pods that are created at once, and scheduled one after another until all run."""

import time
from collections import Counter
from collections.abc import Sequence

import anyio
import msgspec
from anyio import to_thread

from topoalign.core.model.ids import NodeName
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json
from topoalign.tools.bench.registry.reader import PATIENCE_SECONDS, NotAnswered
from topoalign.tools.bench.schedule.control_plane import ControlPlane
from topoalign.tools.bench.schedule.nodes import Nodes
from topoalign.tools.measuring import summarize_times

SHAPES = (Amounts(gpus=1), Amounts(gpus=2, cpus=16, mib=64 * 1024))
"""What pods ask for, in turn."""


async def schedule(plane: ControlPlane, everywhere: Nodes, pods: int) -> Sequence[Row]:
    """The calls by verb, and the whole. Raises NotAnswered, AllocatorsEnded."""
    scheduler = FakeScheduler(plane.cluster, plane.extender, SystemClock())
    seconds, refused = await scheduled(plane, scheduler, everywhere, pods)
    case = f"{len(plane.cluster.nodes)}x{pods}"
    took = plane.extender.took
    return [
        *(summarize_times(f"{case}-{verb}", took[verb]) for verb in ("filter", "prioritize", "bind")),
        {
            "case": case,
            "n": pods,
            "pods_per_second": round(pods / seconds, 1),
            "refused": dict(refused),
            "errors": dict(Counter(scheduler.errors)),
            "longest_block_ms": plane.registry.longest_block_ms(),
            "rss_mb": plane.registry.rss_mb,
        },
    ]


async def scheduled(
    plane: ControlPlane, scheduler: FakeScheduler, everywhere: Nodes, pods: int
) -> tuple[float, Counter[str]]:
    """The seconds until all of so many new pods run, and how many their nodes refused, by code. Raises NotAnswered."""
    refused: Counter[str] = Counter()
    cluster = plane.cluster
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
                admitted = await to_thread.run_sync(everywhere.next, abandon_on_cancel=True)
                if admitted.code:
                    refused[admitted.code] += 1
                key = uids.pop(admitted.uid)
                phase = "Failed" if admitted.code else "Running"
                cluster.set_status(*key, phase=phase)
        if waiting.cancelled_caught:
            raise NotAnswered("the pods", f"{len(uids)} of {pods} do not run: {scheduler.errors[-1:]}")
        seconds = time.perf_counter() - began
        await plane.extender.all_answered()
        return seconds, refused


async def bind_all(cluster: FakeCluster, everywhere: Nodes) -> None:
    """Tells the nodes which pods are bound to them, as kubelets see it, for ever."""
    pods = cluster.pods
    seen = cluster.pods.newest
    told: set[str] = set()
    while True:
        for change in pods.since(seen):
            seen = change.version
            pod = change.object
            uid = pod["metadata"]["uid"]
            node = pod["spec"].get("nodeName")
            is_waiting = pod["status"].get("phase") == "Pending"  # those that were there before run, or have ended
            if node and is_waiting and uid not in told:
                told.add(uid)
                everywhere.bind(NodeName(node), uid, pod)
        await pods.wait()
