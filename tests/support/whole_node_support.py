"""The kubelet side of a node, whole: the fake kubelet, sockets, device plugins, allocator and ledger, without a disk."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup
from device_allocations_support import Observed, start_allocations
from kubelet_support import NODE, RESTRICTED, MemoryAllocator, offers, short_directory, two_nodes
from reservation_support import changed

from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.front import KubeletFront
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Received
from topoalign.plugin_config.configuration import Configuration, DeviceList, Flags, PluginFlags
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

MACHINE = two_nodes()


@dataclass
class Node:
    kubelet: FakeKubelet
    ledger: Ledger
    device_allocations: DeviceAllocations
    clock: ManualClock
    tasks: TaskGroup
    journal: MemoryJournal
    pod_resources: PodResourcesClient
    reservations: NodeReservationList

    def reserve(self, *reserved: Reservation, seq: int = 1) -> None:
        """The node hears that this is reserved on it, and nothing else."""
        message = wire.encode_event(changed(*reserved, seq=seq), 0.0)
        self.reservations.take(Received(message=message, position=seq))

    def restarted(self) -> tuple[Ledger, DeviceAllocations]:
        """What the next process of the allocator finds and knows."""
        ledger = Ledger(NODE, self.journal, self.clock)
        assert self.ledger.state.topology is not None and self.ledger.state.health is not None
        ledger.take_reading(self.ledger.state.topology)
        ledger.take_reading(self.ledger.state.health)
        return ledger, start_allocations(ledger, self.pod_resources, settle_seconds=0)

    def facts(self) -> list[str]:
        """What the ledger has said, by name, the snapshot of its start left out."""
        return [type(event).__name__ for event, _ in self.ledger.pending][1:]


@asynccontextmanager
async def node(
    rules: AdmissionRules = RESTRICTED, machine: Topology = MACHINE, strategies: tuple[DeviceList, ...] = ("envvar",)
) -> AsyncIterator[Node]:
    plugin = PluginFlags(device_list_strategy=strategies)
    configuration = Configuration(flags=Flags(plugin=plugin))
    with short_directory() as directory:
        plugins, resources = directory / "device-plugins", directory / "pod-resources"
        plugins.mkdir()
        resources.mkdir()
        clock = ManualClock()
        journal = MemoryJournal()
        ledger = Ledger(NODE, journal, clock)
        known = MemoryAllocator(machine).state
        assert known.topology is not None and known.health is not None
        ledger.take_reading(known.topology)
        ledger.take_reading(known.health)
        pod_resources = PodResourcesClient(resources / "kubelet.sock", plugins, clock)
        reservations = NodeReservationList(ledger, MemoryBus(), clock)
        allocator = start_allocations(
            ledger,
            pod_resources,
            settle_seconds=0,
            reservations=Observed(reservations.current),
            by_variable_alone=lambda: plugin.by_variable_alone,
        )
        kubelet = FakeKubelet(plugins, resources, machine, rules)
        async with pod_resources, anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            containers = Containers(lambda: configuration)
            await tasks.start(KubeletFront(allocator, plugins, clock, containers=containers).run)
            await kubelet.until(offers(machine))
            yield Node(kubelet, ledger, allocator, clock, tasks, journal, pod_resources, reservations)
            tasks.cancel_scope.cancel()


def fits(decision: Decision) -> Admission:
    assert isinstance(decision, Admission), decision
    return decision
