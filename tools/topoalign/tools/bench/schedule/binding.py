"""Filters and binds one pod after another, each to another node, while nothing else happens. The bind is timed."""

import time
from collections.abc import Sequence

import msgspec
from anyio import to_thread

from topoalign.core.model.ids import NodeName
from topoalign.testing.fake_api_server.objects import Object
from topoalign.testing.fake_scheduler.scheduler import as_sent
from topoalign.tools.bench.device_plugin.node import Row
from topoalign.tools.bench.filter.cluster import BusyNode
from topoalign.tools.bench.filter.scheduler import Amounts, pod_json
from topoalign.tools.bench.registry.reader import NotAnswered
from topoalign.tools.bench.schedule.control_plane import ControlPlane
from topoalign.tools.bench.schedule.nodes import Nodes
from topoalign.tools.measuring import summarize_times


async def bind(plane: ControlPlane, nodes: Sequence[BusyNode], everywhere: Nodes, calls: int) -> Sequence[Row]:
    """
    The row of so many binds. Each of these nodes has admitted a pod before, and so decides as one that runs for a while; no
    pod is admitted meanwhile. Raises NotAnswered, AllocatorsEnded.
    """
    chosen = [each.node for each in nodes[:calls]]
    for number, node in enumerate(chosen):
        _, pod = await bound(plane, number, node)
        everywhere.bind(node, pod["metadata"]["uid"], pod)
        await to_thread.run_sync(everywhere.next)
    await to_thread.run_sync(plane.registry.longest_block_ms)
    milliseconds = [(await bound(plane, len(chosen) + number, node))[0] for number, node in enumerate(chosen)]
    block = plane.registry.longest_block_ms()
    return [summarize_times("bind", milliseconds) | {"longest_block_ms": block, "rss_mb": plane.registry.rss_mb}]


async def bound(plane: ControlPlane, number: int, node: NodeName) -> tuple[float, Object]:
    """
    Binds a new pod, which is filtered before, as a scheduler does it. Returns the milliseconds that the bind took, and the
    pod. Raises NotAnswered.
    """
    pod = plane.cluster.add_pod(msgspec.json.decode(pod_json(number, Amounts())))
    metadata = pod["metadata"]
    filtered = await plane.extender.ask("filter", {"Pod": as_sent(pod), "Nodes": None, "NodeNames": [node]})
    if filtered["NodeNames"] != [node]:
        raise NotAnswered("/scheduler/filter", "the node does not admit the pod")
    arguments = {
        "PodName": metadata["name"],
        "PodNamespace": metadata["namespace"],
        "PodUID": metadata["uid"],
        "Node": node,
    }
    began = time.perf_counter()
    answer = await plane.extender.ask("bind", arguments)
    took = (time.perf_counter() - began) * 1000
    if answer["Error"]:
        raise NotAnswered("/scheduler/bind", answer["Error"])
    return took, pod
