"""
Writes the series of the nodes for /metrics: GPUs by state, allocated GPUs, stale nodes.

A cluster of thousands of nodes has more series than can be made at each scrape without holding up everything else. So the
text of a node is kept and made again only when the node has announced something, and the loop gets turns in between. The
text is what prometheus_client would write for the same values.

GPU utilisation is exported by DCGM; `topoalign_gpu_allocation_info` joins with it on the GPU's uuid. It has one series per
allocated GPU, so the number of its label values, which include pod names, is limited by the hardware.
"""

from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TypeVar

from topoalign.core.model.errors import clean
from topoalign.core.model.events import HealthState
from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.registry.cluster_nodes import Cluster, ClusterNode
from topoalign.runtime.metrics import LONGEST_LABEL, format_header, format_sample
from topoalign.runtime.request_turns import TaskTurns

# Goes through many rows with turns of the event loop in between, so that no long answer holds up the others.


T = TypeVar("T")


async def in_turns(rows: Iterable[T], clock: Clock) -> AsyncIterator[T]:
    """The rows one by one, with a turn of the loop whenever one has lasted long."""
    turns = TaskTurns(clock)
    for row in rows:
        yield row
        await turns.give()


STATES = ("free", "allocated", "unhealthy", "unknown", "cordoned")
"""Of a GPU, each in exactly one: held by an allocation first, then what keeps it from being handed out."""

NODES_PER_CHUNK = 64
"""Nodes whose text is sent together, so that the page as a whole is never in memory."""


class NodeSeries:
    """Writes the families of all nodes, each family in one piece."""

    def __init__(self, cluster: Cluster, clock: Clock, *, per_allocation: bool) -> None:
        """`per_allocation`: whether to write `topoalign_gpu_allocation_info`."""
        self._cluster = cluster
        self._clock = clock
        self._per_allocation = per_allocation

    async def write(self) -> AsyncIterator[bytes]:
        """
        The text, in chunks of a few nodes. A node that changes meanwhile is written as it is when it is its turn. One whose
        name is none for Kubernetes has no series, because made printable it may be the name of another one.
        """
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
        async for chunk in self._chunks(stale_line):
            yield chunk

    async def _chunks(self, text: Callable[[ClusterNode], bytes]) -> AsyncIterator[bytes]:
        written: list[bytes] = []
        async for member in in_turns(tuple(self._cluster), self._clock):
            if clean(member.state.node, LONGEST_LABEL) != member.state.node:
                continue
            written.append(text(member))
            if len(written) == NODES_PER_CHUNK:
                yield b"".join(written)
                written.clear()
        yield b"".join(written)


def gpu_state_lines(state: NodeState) -> bytes:
    """How many GPUs of a node are in each of STATES."""
    tally = Tally(gpu_state(state, gpu.id) for gpu in state.hardware.gpus)
    return b"".join(format_sample("topoalign_gpus", tally[name], node=state.node, state=name) for name in STATES)


def allocation_lines(state: NodeState) -> bytes:
    """Each GPU that an allocation of the node holds, or holds a part of."""
    return b"".join(
        format_sample("topoalign_gpu_allocation_info", 1, node=state.node, **labels) for labels in allocated_gpus(state)
    )


def stale_line(member: ClusterNode) -> bytes:
    """Whether the allocator of the node does not answer."""
    return format_sample("topoalign_node_stale", not member.answering, node=member.state.node)


def gpu_state(state: NodeState, device: DeviceID) -> str:
    """Which of STATES a GPU is in."""
    if state.ownership.is_held(device):
        return "allocated"
    health = state.health_of(device)
    if health.cordoned:
        return "cordoned"
    return "free" if health.state is HealthState.HEALTHY else health.state.value


def allocated_gpus(state: NodeState) -> Iterator[dict[str, str]]:
    """The labels of each GPU that an allocation has, or has a part of."""
    hardware = state.hardware
    for allocation in state.allocations.values():
        owner = allocation.owner
        labels = {
            "allocation": allocation.id,
            "namespace": owner.namespace if owner is not None else "",
            "pod": owner.pod if owner is not None else "",
            "container": owner.container if owner is not None else "",
        }
        cards = {hardware.card_of(device) for device in allocation.device_ids}
        for gpu in sorted(cards & hardware.gpu_by_id.keys()):
            yield {"gpu_uuid": gpu, **labels}
