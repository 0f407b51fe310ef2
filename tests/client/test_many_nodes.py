"""What a client does so that the facts of thousands of nodes neither fill the memory nor block the event loop."""

import gc
import itertools
from contextlib import aclosing

import anyio
import msgspec
import pytest
from fact_support import Writer, owner

from topoalign.client import Client, Delivery
from topoalign.core import wire
from topoalign.core.model.events import ContainerUsage, TopologyDiscovered, UsageObserved
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName
from topoalign.core.model.kubelet import CheckpointEntry, KubeletObserved, KubeletRules, ListedDevices
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.shapes import device_positions, rename_devices
from topoalign.machines import load_machine
from topoalign.registry.cluster_nodes import Cluster
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
NODES = 3


def hardware(number: int) -> Topology:
    bare = load_machine("dgx-a100").topology
    return rename_devices(bare, {uuid: DeviceID(f"{uuid}-of-{number}") for _, uuid in device_positions(bare)})


async def readings(client: Client) -> list[Delivery]:
    async with aclosing(client.nodes()) as events:
        return [await anext(events) for _ in range(NODES)]


async def discovered() -> MemoryBus:
    bus = MemoryBus()
    for number in range(NODES):
        found = TopologyDiscovered(
            node=NodeName(f"n{number}"), epoch=1, revision=1, boot_id="", source="nvml", topology=hardware(number)
        )
        await bus.publish(wire.encode_event(found, 1.0))
    return bus


async def test_topologies_of_equal_machines_share_all_that_has_no_uuid() -> None:
    delivery = await readings(Client(await discovered()))
    topologies = [each.event.topology for each in delivery if isinstance(each.event, TopologyDiscovered)]

    assert [hardware(number) for number in range(NODES)] == topologies
    assert 1 == len({id(topology.shape) for topology in topologies})
    assert 1 == len({id(topology.cpus) for topology in topologies})


async def test_the_text_of_an_event_is_kept_only_where_it_is_wanted() -> None:
    bus = await discovered()
    with_text, without = await readings(Client(bus)), await readings(Client(bus, bodies=False))

    assert [each.event for each in with_text] == [
        msgspec.json.decode(each.body, type=TopologyDiscovered) for each in with_text
    ]
    assert [(each.event, b"") for each in with_text] == [(each.event, each.body) for each in without]


class Racing(ManualClock):
    """A clock by which every look at it takes long."""

    def monotonic(self) -> float:
        self._now += 1.0
        return self._now


@pytest.mark.parametrize("kind", ["allocations", "nodes"])
async def test_other_tasks_run_while_a_known_past_is_handed_over(kind: str) -> None:
    """The snapshots, or readings, of all nodes are there at once; nothing is waited for between them."""
    bus, others, seen = await discovered(), itertools.count(), []
    for number in range(NODES):
        await bus.publish(wire.encode_event(Writer(f"n{number}").snapshot(), 1.0))

    async def run() -> None:
        while True:
            next(others)
            await anyio.lowlevel.checkpoint()

    client = Client(bus, Racing())
    async with background() as tasks, aclosing(client.nodes() if kind == "nodes" else client.allocations()) as events:
        tasks.start_soon(run)
        for _ in range(NODES):
            await anext(events)
            seen.append(next(others))

    assert all(later > earlier + 1 for earlier, later in itertools.pairwise(seen))


async def test_every_allocation_event_carries_the_allocations_after_it() -> None:
    """So a reader that keeps them need not fold them a second time: the registry has the same objects as the client."""
    bus, writer, cluster = MemoryBus(), Writer("n0"), Cluster()
    states = []
    for fact in (writer.snapshot, lambda: writer.grant("1", "GPU-0"), lambda: writer.bind("1", "p")):
        await bus.publish(wire.encode_event(fact(), 1.0))
        states.append(writer.state)
    async with aclosing(Client(bus).allocations(0)) as events:
        delivery = [await anext(events) for _ in states]
    for each in delivery:
        cluster.apply(each)

    assert states == [each.state for each in delivery]
    assert delivery[-1].state is not None
    assert delivery[-1].state.allocations is cluster.member(writer.node).state.allocations


async def first(client: Client) -> Delivery:
    async with aclosing(client.nodes()) as events:
        return await anext(events)


def usage(cpus: str) -> UsageObserved:
    container = ContainerUsage(owner=owner("p"), cpus=cpus)
    return UsageObserved(node=NodeName("n0"), epoch=1, revision=1, containers=(container,))


async def test_usage_is_left_out_where_it_is_not_wanted() -> None:
    """Its writer and number are kept. A client with the content finds a forged reading with the same number."""
    bus, asked = MemoryBus(), []
    clients = [Client(bus, usage=wanted) for wanted in (True, False)]
    repeated, forged = (
        wire.encode_event(usage("0-3"), 1.0),
        wire.with_message_mark(wire.encode_event(usage("4-7"), 1.0), "5f0c2a9e8b7d6431"),
    )
    for message in (repeated, wire.with_message_mark(repeated, "5f0c2a9e8b7d6432")):
        await bus.publish(message)
    read = [await first(client) for client in clients]
    agreed = [dict(client._verifier._conflicts) for client in clients]
    await bus.publish(forged)
    for client in clients:
        await first(client)
        asked.append(dict(client._verifier._conflicts))

    assert [usage("0-3"), msgspec.structs.replace(usage(""), containers=(), containers_known=False)] == [
        each.event for each in read
    ]
    assert [{}, {}] == agreed
    assert [{(NodeName("n0"), "usage"): (1, 1)}, {}] == asked


async def test_a_cluster_keeps_no_usage() -> None:
    bus, cluster = MemoryBus(), Cluster()
    await bus.publish(wire.encode_event(usage("0-3"), 1.0))
    cluster.apply(await first(Client(bus)))

    assert (None, 1.0) == (cluster.member(NodeName("n0")).state.usage, cluster.member(NodeName("n0")).last_event)


def test_the_collector_does_not_look_through_what_usage_says() -> None:
    """It looks at each object that may be part of a cycle, and these cannot be."""
    rules = KubeletRules(policy="none", scope="pod", cpu_manager="none", memory_manager="None", placement="topology")
    entry = CheckpointEntry(pod_uid="u", container=ContainerName("c"))
    facts = [usage("0-3").containers[0], rules, entry, ListedDevices(ids=()), KubeletObserved(rules=rules)]

    assert [False] * len(facts) == [gc.is_tracked(each) for each in facts]
