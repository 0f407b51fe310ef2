"""A long past: it is read twice, the first time in part, and only as much of it as a newest snapshot does not stand for."""

import anyio
import pytest
from faults_support import THOROUGH
from prometheus_client import CollectorRegistry

from topoalign.client import Client
from topoalign.core import wire
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.tools.bench.registry.filling import said
from topoalign.tools.bench.registry.history import FACTS, History

pytestmark = pytest.mark.anyio

NODES = 2_500 if THOROUGH else 500
"""With 40 facts each: 100,000 or 20,000."""
KINDS = ("Granted", "Bound", "Released", "Refused", "Deviated", "sSnapshot")
TAIL = 16
"""Facts of each node from its newest snapshot on."""


async def test_a_long_past_is_read_in_part_and_then_again_with_the_same_result() -> None:
    """C45: the first registry ends in the middle; how far away the end of the past is can be seen all the time."""
    bus, histories = MemoryBus(), [History(number) for number in range(NODES)]
    for event in said(histories):
        await bus.publish(wire.encode_event(event, 1.0))
    read, progress = [], []
    for share in (0.5, 0.0):
        client, cluster, metrics = Client(bus, SystemClock(), "registry", usage=False), Cluster(), CollectorRegistry()
        counts = RegistryMetrics(metrics, client)
        registry = Registry(bus, SystemClock(), client, cluster, counts, RegistrySettings())
        async with background() as tasks:
            tasks.start_soon(registry.run)
            while (behind := registry.behind()) is not None:
                progress.append(behind)
                if share and sum(client.unread.values()) < share * NODES * FACTS and len(client.unread) == 2:
                    break
                await anyio.lowlevel.checkpoint()
        read.append(
            [
                metrics.get_sample_value("topoalign_registry_events_total", {"type": f"Allocation{each}"}) or 0
                for each in KINDS
            ]
        )

    assert {history.node: history.state.digest for history in histories} == {
        member.state.node: member.state.digest for member in cluster
    }
    assert sum(read[0]) < NODES * TAIL == sum(read[1])
    assert len(set(progress)) > 10
