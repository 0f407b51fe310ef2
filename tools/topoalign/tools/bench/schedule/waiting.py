"""
Pods that fit nowhere and wait, while containers of other pods end: each end wakes all of them.

They ask for half of the GPUs of a node within one NUMA node, which few of the nodes have free: those get one of the pods.
"""

import time
from collections.abc import Sequence

import anyio
import msgspec
from anyio import to_thread

from topoalign.runtime.clock import SystemClock
from topoalign.runtime.tasks import background
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.filter.cluster import BusyNode
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json
from topoalign.tools.bench.schedule.control_plane import ControlPlane
from topoalign.tools.bench.schedule.cycle import bind_all
from topoalign.tools.bench.schedule.nodes import Nodes
from topoalign.tools.measuring import summarize_times

RATE = 20
"""Events a second."""
SETTLED_SECONDS = 1.0
"""Without a call: the first refusal of each pod is over."""


async def wait(
    plane: ControlPlane, nodes: Sequence[BusyNode], everywhere: Nodes, pods: int, seconds: float
) -> Sequence[Row]:
    """The row of so many pods that wait so long."""
    cluster = plane.cluster
    calls = plane.extender.took["filter"]
    scheduler = FakeScheduler(cluster, plane.extender, SystemClock())
    async with background() as tasks:
        tasks.start_soon(bind_all, cluster, everywhere)
        await tasks.start(scheduler.run)
        for number in range(pods):
            cluster.add_pod(msgspec.json.decode(pod_json(number, Amounts(gpus=4))))
        before = -1
        while before != len(calls):
            before = len(calls)
            await anyio.sleep(SETTLED_SECONDS)
        await to_thread.run_sync(plane.registry.longest_block_ms)
        used = plane.registry.cpu_seconds
        began = time.monotonic()
        for number in range(int(RATE * seconds)):
            ended = nodes[number % len(nodes)]
            gone = ended.containers.pop(0)
            everywhere.terminate(ended.node, gone.uid)
            cluster.set_status(gone.owner.namespace, gone.owner.pod, phase="Succeeded")
            await anyio.sleep(max(0.0, began + (number + 1) / RATE - time.monotonic()))
        used = plane.registry.cpu_seconds - used
        took = time.monotonic() - began
        await plane.extender.until_answered("filter", before + 1)  # on a busy machine the first one may be late
        measured = list(calls[before:])
        await plane.extender.all_answered()
    return [
        summarize_times(f"waiting-{pods}", measured)
        | {
            "calls_per_second": round(len(measured) / took, 1),
            "longest_ms": round(max(measured), 1),
            "cpu_percent": round(100 * used / took, 1),
            "longest_block_ms": plane.registry.longest_block_ms(),
            "rss_mb": plane.registry.rss_mb,
        }
    ]
