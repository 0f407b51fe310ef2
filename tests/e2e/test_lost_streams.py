"""
A nats-server loses the registry's streams, or comes back with older or damaged ones: the scheduler's view never has fewer
allocations than the node, and in the end has the same.
"""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from bus_support import KillableServer, disconnected, killable
from decision_support import machine
from prometheus_client import CollectorRegistry
from view_support import RULES, Says

from topoalign.allocator.ledger.journal import open_journal
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.allocator.requests.admissions import Admissions
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, DeviceID, NodeName
from topoalign.core.model.requests import NodeRequest, WriterPosition
from topoalign.core.ports import Bus, Endpoint
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.scheduling.cluster_state.view import ClusterView
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import apply_stores, connect_bus
from topoalign.runtime.replies import answer_with

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")
CLOCK = SystemClock()
IMPATIENT = RegistrySettings(registry_ask_seconds=0.2, registry_answer_seconds=1.0)
PATIENCE = 60.0
"""Seconds for all of it, on a machine that is busy."""


def nothing(store: Path, old: Path) -> None:
    """The directory is gone."""
    shutil.rmtree(store)
    store.mkdir()


def old_copy(store: Path, old: Path) -> None:
    """Somebody has restored a backup."""
    shutil.rmtree(store)
    shutil.copytree(old, store)


def truncated(store: Path, old: Path) -> None:
    """The last blocks were not on the disk yet when the machine lost its power."""
    for block in store.rglob("*.blk"):
        block.write_bytes(block.read_bytes()[: block.stat().st_size // 2])


def flipped(store: Path, old: Path) -> None:
    """Bits that a disk has lost, in the middle of each block."""
    for block in store.rglob("*.blk"):
        content = bytearray(block.read_bytes())
        for place in range(len(content) // 4, len(content), max(1, len(content) // 8)):
            content[place] ^= 0x10
        block.write_bytes(content)


class Site:
    """A node with a record on disk, whose services are connected on their own."""

    def __init__(self, ledger: Ledger, says: Says) -> None:
        self.ledger = ledger
        self.says = says

    def grant(self, gpu: str) -> None:
        self.ledger.grant([Allocation(id=self.ledger.next_id(), devices={GPU: (DeviceID(gpu),)})])

    async def say_hardware(self, bus: Bus) -> None:
        """As discovery and the allocator do once the bus is there, also where the streams have lost what they had said."""
        for event in (self.says.topology(), self.says.health(), self.says.usage()):
            message = wire.encode_event(event, CLOCK.wall())
            while True:
                try:
                    await bus.publish(message)
                    break
                except Unavailable:
                    await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def running(self, bus: Bus) -> AsyncIterator[None]:
        await self.say_hardware(bus)

        async def alive(request: NodeRequest) -> WriterPosition:
            state = self.ledger.state
            return WriterPosition(epoch=state.epoch, seq=state.seq, digest=state.digest)

        admissions = Admissions(self.ledger, bus, RULES, kubelet_owns_devices=True)
        subject = wire.admission_subject(NODE, "alive")
        asked = Endpoint(name="alive", subject=subject, answer=answer_with(NodeRequest, alive))
        endpoints = [*admissions.endpoints(), asked]
        async with bus.serve("topoalign-allocator", endpoints), anyio.create_task_group() as tasks:
            tasks.start_soon(Outbox(self.ledger, bus, CLOCK).run)
            yield
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def registry(bus: Bus) -> AsyncIterator[tuple[Cluster, ClusterView, list[int]]]:
    """With how many allocations of the node it had after each change, where a scheduler is told that it is offered."""
    client, cluster = Client(bus, CLOCK, "registry", usage=True), Cluster(usage=True)
    view = ClusterView(cluster, lambda: client.unsettled, CLOCK)
    offered: list[int] = []

    def look(node: NodeName) -> None:
        view.renew()
        if service.unasked() is None and node in view.nodes and not view.nodes[node].refusal:
            offered.append(len(view.facts(node).allocations))

    service = Registry(bus, CLOCK, client, cluster, RegistryMetrics(CollectorRegistry(), client), IMPATIENT)
    cluster.listeners.append(look)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(service.run)
        yield cluster, view, offered
        tasks.cancel_scope.cancel()


async def equal(cluster: Cluster, view: ClusterView, ledger: Ledger) -> None:
    """Returns when the view offers the node as it is."""
    while True:
        view.renew()
        at = view.nodes.get(NODE)
        if at is not None and not at.refusal and cluster.member(NODE).state.digest == ledger.state.digest:
            return
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("harm", [nothing, old_copy, truncated, flipped])
async def test_a_lost_or_damaged_stream_costs_no_allocation(tmp_path: Path, harm: Callable[[Path, Path], None]) -> None:
    """C38, C39: two allocations are newer than the old copy, and one comes after the harm."""
    store, old = tmp_path / "nats", tmp_path / "old"
    store.mkdir()
    with open_journal(tmp_path / "journal", NODE) as journal, anyio.fail_after(PATIENCE):
        site = Site(Ledger(NODE, journal, CLOCK), Says(NODE, machine(), RULES))
        async with killable(store) as server, connect_bus(server.url) as theirs, site.running(theirs):
            site.ledger.announce()
            site.grant("GPU-0")
            async with connect_bus(server.url) as ours, registry(ours) as (cluster, view, offered):
                await equal(cluster, view, site.ledger)
                await killed(server, ours, theirs)
                shutil.copytree(store, old)
                await server.start()
                for gpu in ("GPU-1", "GPU-2"):
                    site.grant(gpu)
                await equal(cluster, view, site.ledger)
                offered.clear()
                await killed(server, ours, theirs)
                harm(store, old)
                await server.start()
                await apply_stores(server.url)  # as the administrator of NATS does
                site.grant("GPU-3")
                await site.say_hardware(theirs)
                await equal(cluster, view, site.ledger)

    assert (3, 4) == (min([3, *offered]), offered[-1])


@pytest.mark.parametrize("harm", [nothing, old_copy])
async def test_a_registry_that_starts_on_an_old_stream_offers_no_less(
    tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    """C38: what the stream has is whole and old, and the node's allocator says so when it is asked."""
    store, old = tmp_path / "nats", tmp_path / "old"
    store.mkdir()
    with open_journal(tmp_path / "journal", NODE) as journal, anyio.fail_after(PATIENCE):
        site = Site(Ledger(NODE, journal, CLOCK), Says(NODE, machine(), RULES))
        async with killable(store) as server, connect_bus(server.url) as theirs, site.running(theirs):
            site.ledger.announce()
            async with connect_bus(server.url) as ours, registry(ours) as (cluster, view, _):
                await equal(cluster, view, site.ledger)
                await killed(server, ours, theirs)
                shutil.copytree(store, old)
                await server.start()
                site.grant("GPU-0")
                await equal(cluster, view, site.ledger)
            await killed(server, theirs)
            harm(store, old)
            await server.start()
            await apply_stores(server.url)
            async with connect_bus(server.url) as ours, registry(ours) as (cluster, view, offered):
                await site.say_hardware(ours)
                await equal(cluster, view, site.ledger)

    assert {0} & {*offered} == set()


async def killed(server: KillableServer, *buses: Bus) -> None:
    server.kill()
    for bus in buses:
        await disconnected(bus)
