"""
Writes the series of the nodes for /metrics: GPUs by state, allocated GPUs, stale nodes.

A cluster with thousands of nodes has too many series to write all of them at each scrape without blocking the event
loop. So the text of a node is cached until the node publishes a fact, and other tasks run in between. The text equals
the output of prometheus_client for the same values.

GPU utilisation is exported by DCGM. `topoalign_gpu_allocation_info` can be joined with it on the GPU's UUID. It has one
series per allocated GPU, so its cardinality is limited by the hardware, although its labels include pod names.
"""

from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from topoalign.core.model.errors import clean
from topoalign.core.model.events import HealthState
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster, ClusterNode
from topoalign.runtime.metrics import LONGEST_LABEL, format_header, format_sample
from topoalign.runtime.request_turns import TaskTurns

T = TypeVar("T")

STATES = ("free", "allocated", "unhealthy", "unknown", "cordoned")
"""A GPU is in exactly one state: allocated; otherwise the reason why it cannot be allocated; otherwise free."""
NODES_PER_CHUNK = 64
"""Nodes whose text is sent together, so that the whole page is never in memory."""


async def in_turns(rows: Iterable[T], clock: Clock) -> AsyncIterator[T]:
    """Yields the rows. Other tasks of the event loop run in between, so that a long response does not delay others."""
    turns = TaskTurns(clock)
    for row in rows:
        yield row
        await turns.give()


class NodeSeries:
    """Writes the metric families of all nodes, one after the other."""

    def __init__(self, cluster: Cluster, clock: Clock, *, per_allocation: bool) -> None:
        """`per_allocation`: whether to write `topoalign_gpu_allocation_info`."""
        self._cluster = cluster
        self._clock = clock
        self._per_allocation = per_allocation

    async def write(self) -> AsyncIterator[bytes]:
        """Yields the text in chunks of a few nodes."""
        yield format_header("topoalign_gpus", "GPUs of a node, by state.")
        async for chunk in self._chunks(lambda member: member.derived(gpu_state_lines)):
            yield chunk
        if self._per_allocation:
            yield format_header(
                "topoalign_gpu_allocation_info",
                "1 for each allocated GPU; gpu_uuid equals the UUID label of DCGM's exporter.",
            )
            async for chunk in self._chunks(lambda member: member.derived(allocation_lines)):
                yield chunk
        yield format_header("topoalign_node_stale", "1 while the allocator of the node does not answer.")
        async for chunk in self._chunks(
            lambda member: format_sample("topoalign_node_stale", not member.answering, node=member.state.node)
        ):
            yield chunk

    async def _chunks(self, text: Callable[[ClusterNode], bytes]) -> AsyncIterator[bytes]:
        written: list[bytes] = []
        async for member in in_turns(tuple(self._cluster), self._clock):
            # The printable form of an invalid name can be the name of another node.
            if clean(member.state.node, LONGEST_LABEL) != member.state.node:
                continue
            written.append(text(member))
            if len(written) == NODES_PER_CHUNK:
                yield b"".join(written)
                written.clear()
        yield b"".join(written)


def gpu_state_lines(state: NodeState) -> bytes:
    """The number of GPUs of a node in each of STATES."""
    tally: Tally[str] = Tally()
    for gpu in state.hardware.gpus:
        health = state.health_of(gpu.id)
        if state.ownership.is_held(gpu.id):
            tally["allocated"] += 1
        elif health.cordoned:
            tally["cordoned"] += 1
        else:
            tally["free" if health.state is HealthState.HEALTHY else health.state.value] += 1
    return b"".join(format_sample("topoalign_gpus", tally[name], node=state.node, state=name) for name in STATES)


def allocation_lines(state: NodeState) -> bytes:
    """A line for each GPU that an allocation of the node holds as a whole or in part."""
    lines: list[bytes] = []
    hardware = state.hardware
    for allocation in state.allocations.values():
        owner = allocation.owner
        labels = {
            "allocation": allocation.id,
            "namespace": owner.namespace if owner is not None else "",
            "pod": owner.pod if owner is not None else "",
            "container": owner.container if owner is not None else "",
        }
        devices = {hardware.parent_of(device) for device in allocation.device_ids}
        for gpu in sorted(devices & hardware.gpu_by_id.keys()):
            sample = {"gpu_uuid": gpu, **labels}
            lines.append(format_sample("topoalign_gpu_allocation_info", 1, node=state.node, **sample))
    return b"".join(lines)
