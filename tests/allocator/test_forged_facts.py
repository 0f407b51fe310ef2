"""What somebody else says under a node's name is believed for one period at most, and counted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from discovery_support import Hardware, discovery_with, inventory
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from topoalign.allocator.hardware_watch import ASK_SECONDS, HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.service import Allocator
from topoalign.client import Client
from topoalign.client.node_folds import Believed, Counts
from topoalign.client.verifying import Verifier
from topoalign.core import wire
from topoalign.core.model.events import (
    LARGEST_NUMBER,
    Allocation,
    AllocationGranted,
    AllocationsSnapshot,
    ContainerUsage,
    DeviceHealthChanged,
    Event,
    Owner,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules
from topoalign.core.model.topology.model import Topology
from topoalign.core.ports import Bus, Message, Stream
from topoalign.core.state.fold import NodeState
from topoalign.discovery.metrics import DiscoveryMetrics as DiscoveryMetrics
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.service import PAUSE, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.metrics import registry_of
from topoalign.runtime.node_bus import NodeBus
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio
NODE = NodeName("node-1")
PERIOD = RegistrySettings().registry_ask_seconds
FORGED = Allocation(id=AllocationID("forged"), devices={GPU: (DeviceID("GPU-1"),)})


class World:
    """A node's discovery and allocator, in two processes or in one, and a registry; all with product code."""

    def __init__(self, one_process: bool = False) -> None:
        self.bus = MemoryBus()
        self.clock = ManualClock()
        self.hardware = Hardware()
        self.own_bus: Bus = NodeBus(self.bus, NODE) if one_process else self.bus
        self.ledger = Ledger(NODE, MemoryJournal(), self.clock)
        self.cluster = Cluster()
        self.metrics = CollectorRegistry()
        counted = DiscoveryMetrics()
        self.of_discovery = registry_of(counted.figures())
        self.client = Client(self.bus, self.clock, "registry")
        self.discovery = discovery_with(
            self.hardware, self.own_bus, self.clock, counted, node=NODE, read_seconds=600.0, hub=self.bus
        )
        self.hardware_watch = HardwareWatch(self.ledger, self.own_bus, self.clock)
        self.forged = 0
        self.asked: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        admissions = Admissions(self.ledger, self.own_bus, AdmissionRules(), kubelet_owns_devices=False)
        allocator = Allocator(
            self.ledger,
            self.own_bus,
            self.hardware_watch,
            admissions,
            None,
            reconcile_seconds=5.0,
            hub=self.bus,
        )
        counts = RegistryMetrics(self.metrics, self.client)
        registry = Registry(self.bus, self.clock, self.client, self.cluster, counts, RegistrySettings())
        ask = self.bus.ask

        async def noting(subject: str, body: bytes, within: float) -> bytes:
            self.asked.append(subject.rpartition(".")[2])
            return await ask(subject, body, within)

        self.bus.ask = noting  # type: ignore[method-assign]  # as the bus does, and remembers it
        async with background() as tasks:
            await tasks.start(lambda *, task_status: self.discovery.run(task_status=task_status))
            await tasks.start(lambda *, task_status: allocator.run(task_status=task_status))
            await tasks.start(lambda *, task_status: registry.run(task_status=task_status))
            tasks.start_soon(allocator.usage.run)
            await self.clock.advance(PAUSE)
            self.grant("own", "GPU-0")
            await self.clock.advance(0)
            yield

    def grant(self, name: str, gpu: str) -> None:
        self.ledger.grant([Allocation(id=AllocationID(name), devices={GPU: (DeviceID(gpu),)})])

    async def forge(self, event: Event, wait: bool = True) -> None:
        """Under an id of its own, as whoever may publish can."""
        self.forged += 1
        message = wire.encode_event(event, self.clock.wall())
        headers = {**message.headers, "Nats-Msg-Id": f"forged-{self.forged}"}
        await self.bus.publish(msgspec.structs.replace(message, headers=headers))
        if wait:
            await all_tasks_blocked()

    @property
    def view(self) -> NodeState:
        return self.cluster.member(NODE).state

    def held(self) -> set[str]:
        return {device for held in self.view.allocations.values() for device in held.device_ids}

    def differences(self, what: str) -> float | None:
        return self.metrics.get_sample_value("topoalign_registry_differences_total", {"what": what})

    def agrees(self) -> bool:
        own, view = self.ledger.state, self.view
        return (own.epoch, own.seq, own.digest) == (view.epoch, view.seq, view.digest)


@pytest.fixture
def world() -> World:
    return World()


def snapshot(epoch: int, seq: int) -> AllocationsSnapshot:
    return AllocationsSnapshot(node=NODE, epoch=epoch, seq=seq, allocations=(FORGED,), digest="0" * 16)


@pytest.mark.parametrize("number", ["epoch", "seq"])
async def test_a_forged_snapshot_with_a_large_number_is_healed_and_counted(world: World, number: str) -> None:
    """F06: A forged snapshot with a large number is healed within one period, and counted."""
    async with world.running():
        epoch, seq = (LARGEST_NUMBER, 1) if number == "epoch" else (world.ledger.state.epoch, LARGEST_NUMBER)
        with capture_logs() as logs:
            await world.forge(snapshot(epoch, seq))
            believed = world.held()
            await world.clock.advance(PERIOD)

        assert ({"GPU-1"}, {"GPU-0"}) == (believed, world.held())
        assert world.agrees()
        assert 1 == world.differences("allocations")
        assert 1 == len([line for line in logs if line["event"].startswith("an allocator does not confirm")])
        world.grant("next", "GPU-1")
        await all_tasks_blocked()
        assert world.agrees(), "its next facts are received as ever"


async def test_a_forged_snapshot_is_healed_while_another_snapshot_is_due(world: World) -> None:
    """
    F06: A forged snapshot is healed although the node is asked for a snapshot for another reason already. The second is of
    an epoch that is over, so a snapshot is due; that has a lower seq than the first.
    """
    async with world.running():
        await world.forge(snapshot(world.ledger.state.epoch, LARGEST_NUMBER))
        await world.forge(snapshot(1, 1))
        await world.clock.advance(PERIOD)

        assert world.agrees()
        assert 1 == world.differences("allocations")


@pytest.mark.parametrize("spoken", [False, True])
async def test_a_forged_grant_with_the_next_seq_is_healed(world: World, spoken: bool) -> None:
    """
    F06: A forged grant with the next seq is healed within one period, and the node's own fact counts. Whether or not the
    node says a fact with that seq afterwards.
    """
    async with world.running():
        state = world.ledger.state
        await world.forge(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=FORGED))
        believed = world.held()
        if spoken:
            world.ledger.release([next(iter(state.allocations))], "released")
        await world.clock.advance(PERIOD)

        assert {"GPU-0", "GPU-1"} == believed
        assert (set() if spoken else {"GPU-0"}) == world.held()
        assert world.agrees()
        assert 1 == world.differences("allocations")


async def test_forged_facts_that_the_node_overtakes_are_healed_too(world: World) -> None:
    """At the next question the numbers are equal and only the digests differ."""
    async with world.running():
        state = world.ledger.state
        await world.forge(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 1, allocation=FORGED))
        other = msgspec.structs.replace(FORGED, id=AllocationID("other"))
        await world.forge(AllocationGranted(node=NODE, epoch=state.epoch, seq=state.seq + 2, allocation=other))
        for name in ("a", "b"):
            world.grant(name, "GPU-1")
            await all_tasks_blocked()
        await world.clock.advance(PERIOD)

        assert world.agrees()
        assert world.differences("allocations") == 1


async def test_facts_under_way_while_the_allocator_answers_are_no_difference(world: World) -> None:
    """
    Facts that are under way while the allocator answers do not count as a difference. The registry is behind at one
    question, and whole at the next.
    """
    async with world.running():
        log = world.bus._logs[Stream.ALLOCATIONS]
        late: list[Message] = []

        def hold(message: Message) -> int:
            late.append(message)
            return log.last + len(late)

        log.append, append = hold, log.append  # type: ignore[method-assign]  # under way
        world.grant("late", "GPU-1")
        await world.clock.advance(PERIOD)
        log.append = append  # type: ignore[method-assign]  # the fault itself
        for message in late:
            append(message)
        await world.clock.advance(PERIOD)

        assert world.agrees()
        assert (0, 0) == (world.differences("allocations"), world.asked.count("snapshot"))


async def test_facts_lost_for_good_are_asked_for_at_the_second_question(world: World) -> None:
    """Facts that were lost for good are asked for at the second question."""
    async with world.running():
        log = world.bus._logs[Stream.ALLOCATIONS]
        log.append, append = (lambda message: 1), log.append  # type: ignore[method-assign]  # the stream loses it
        world.grant("lost", "GPU-1")
        await all_tasks_blocked()
        log.append = append  # type: ignore[method-assign]  # the fault itself
        await world.clock.advance(PERIOD)
        first = world.agrees()
        await world.clock.advance(PERIOD)

        assert (False, True) == (first, world.agrees())


async def test_a_registry_under_endless_forgeries_asks_at_a_bounded_rate(world: World) -> None:
    """A registry that receives forged facts without end asks at most a few times a second."""
    async with world.running():
        state = world.ledger.state
        for number in range(100):  # a gap, then the number again with another fact, and so on
            for seq in (state.seq + 5, state.seq + 5 + number):
                await world.forge(
                    AllocationGranted(node=NODE, epoch=state.epoch, seq=seq, allocation=FORGED), wait=False
                )
            world.grant("own", "GPU-1")
            await anyio.lowlevel.checkpoint()
        await all_tasks_blocked()
        during = world.asked.count("snapshot")
        await world.clock.advance(3 * PERIOD)

        assert during <= 10
        assert world.agrees()


async def test_digests_that_never_agree_are_asked_about_ever_more_rarely(world: World) -> None:
    """
    Digests of another version that never agree are asked about ever more rarely. As where a later version digests a field
    that this one does not know.
    """
    async with world.running():
        await world.clock.advance(PERIOD)
        fold = world.client._verifier.folds[0]
        view = fold.view

        def with_another_digest(node: NodeName) -> Believed:
            state = msgspec.structs.replace(view(node).state)
            vars(state)["digest"] = "another"  # which is computed once
            return Believed(state, view(node).newest)

        fold.view = with_another_digest  # type: ignore[method-assign]  # the fault itself
        for _ in range(60):
            world.clock._now += PERIOD
            await world.client.verify(NODE)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()

        assert 2 <= world.asked.count("snapshot") <= 10


async def test_a_new_difference_is_asked_about_as_often_as_the_first_one() -> None:
    """At once and then after the first pause, however often the one before it was asked about."""
    clock, due = ManualClock(), list[int]()
    verifier = Verifier(MemoryBus(), clock, Counts(), nothing)
    for second in range(60):
        if verifier._is_due((NODE, "topology"), (1, 1 if second < 40 else 2)):
            due.append(second)
        await clock.advance(1)

    assert [0, 5, 15, 35, 40, 45, 55] == due


def test_a_forgotten_node_that_comes_back_is_asked_about_at_once() -> None:
    verifier, key = Verifier(MemoryBus(), ManualClock(), Counts(), nothing), (NODE, "topology")
    first = [verifier._is_due(key, (1, 1)) for _ in range(2)]
    verifier.forget(NODE)

    assert [True, False] == first
    assert verifier._is_due(key, (1, 1))


def no_devices(world: World, ahead: bool) -> TopologyDiscovered:
    told = world.view.topology
    assert told is not None
    revision = LARGEST_NUMBER if ahead else told.revision + 1
    return msgspec.structs.replace(told, revision=revision, topology=Topology())


async def test_a_registry_asks_discovery_for_what_it_has_not_noticed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """F07: discovery checks the stream in vain, as where it has spoken just after the forged message."""
    monkeypatch.setattr("topoalign.discovery.announcer.POLL_SECONDS", 1e9)
    world = World(one_process=True)
    async with world.running():
        with capture_logs() as logs:
            await world.forge(no_devices(world, ahead=True))
            await world.clock.advance(PERIOD)

        assert 2 == len(world.view.hardware.gpus)
        assert 1 == world.differences("topology")
        assert 1 == len(
            [line for line in logs if line["event"].startswith("discovery or the allocator does not confirm")]
        )


@pytest.mark.parametrize("again", [False, True])
async def test_a_forged_topology_whose_number_discovery_uses_next_does_not_stand(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """
    F07: the numbers are equal at the next question. `again`: because discovery was asked to say everything anew so soon that
    it could not begin a new epoch at once.
    """
    monkeypatch.setattr("topoalign.discovery.announcer.Announcer._check_before", nothing)
    world = World(one_process=True)
    async with world.running():
        await world.forge(no_devices(world, ahead=False))
        if again:
            world.discovery.announce()
        else:
            world.hardware.now = inventory(0, 1, 2)
            await world.discovery.read()
        await world.clock.advance(0)
        believed = world.view.topology
        assert believed is not None
        equal = wire_place(world, "topology") == (believed.epoch, believed.revision)
        await world.clock.advance(2 * PERIOD)

        assert (True, 2 if again else 3) == (equal, len(world.view.hardware.gpus))


async def nothing(*details: object) -> None:
    """Notices nothing."""


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("spoken", [False, True])
async def test_a_forged_topology_is_healed_by_a_new_epoch_and_counted(ahead: bool, spoken: bool) -> None:
    """
    F07: A forged topology is healed within one period by a new epoch, and counted. Whether or not discovery says something
    of its own afterwards.
    """
    world = World(one_process=True)
    async with world.running():
        before = world.view.topology
        await world.forge(no_devices(world, ahead))
        believed = len(world.view.hardware.gpus)
        if spoken:
            world.hardware.now = inventory(0, 1, 2)
            await world.discovery.read()
        await world.clock.advance(PERIOD)
        after = world.view.topology

        assert before is not None and after is not None
        assert (0, 3 if spoken else 2) == (believed, len(world.view.hardware.gpus))
        assert after.epoch > before.epoch
        assert (after.epoch, after.revision) == wire_place(world, "topology")
        assert 1 == world.of_discovery.get_sample_value("topoalign_discovery_epochs_total")


def wire_place(world: World, kind: str) -> tuple[int, int]:
    return world.discovery._newest(NODE)[kind]


async def test_an_allocator_in_another_process_never_believes_a_forged_topology(world: World) -> None:
    """F07: it asks discovery first; its devices stay offered, and what discovery says afterwards is received."""
    async with world.running():
        with capture_logs() as logs:
            for _ in range(3):
                await world.forge(no_devices(world, ahead=True))
                await world.clock.advance(0.2)
                assert 2 == len(world.ledger.state.healthy(GPU))
        world.hardware.now = inventory(0, 1, 2)
        await world.discovery.read()
        await world.clock.advance(2 * ASK_SECONDS)

        assert 3 == len(world.ledger.state.healthy(GPU))
        assert world.hardware_watch.forged >= 1
        assert 1 == len(
            [line for line in logs if line["event"].startswith("a reading was received that discovery has not")]
        )


async def test_forged_health_is_healed_within_one_period() -> None:
    world = World(one_process=True)
    async with world.running():
        told = world.view.health
        assert told is not None
        await world.forge(DeviceHealthChanged(node=NODE, epoch=told.epoch, revision=LARGEST_NUMBER, devices={}))
        believed = len(world.view.ownership.free(GPU))
        await world.clock.advance(PERIOD)

        assert (0, 1) == (believed, len(world.view.ownership.free(GPU)))
        assert 2 == len(world.ledger.state.healthy(GPU))


async def test_forged_usage_is_healed_within_one_period_by_a_new_epoch(world: World) -> None:
    """The registry keeps no usage itself, and asks for all listeners."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("p"), container=ContainerName("c"))
    said: list[UsageObserved] = []

    async def listen() -> None:
        async for delivery in Client(world.bus, world.clock).nodes():
            said.extend([delivery.event] if isinstance(delivery.event, UsageObserved) else [])

    async with world.running(), background() as tasks:
        tasks.start_soon(listen)
        world.ledger.observe(containers=(ContainerUsage(owner=owner, cpus="0-3"),))
        await world.clock.advance(PERIOD)
        told = said[-1]
        await world.forge(UsageObserved(node=NODE, epoch=told.epoch, revision=LARGEST_NUMBER, containers=()))
        await world.clock.advance(PERIOD)
        healed = said[-1]
        world.ledger.observe(containers=(ContainerUsage(owner=owner, cpus="0-7"),))
        await world.clock.advance(0)

        assert ("0-3", "0-3", "0-7") == tuple(each.containers[0].cpus for each in (told, healed, said[-1]))
        assert healed.epoch > told.epoch
        assert 1 == world.differences("usage")


async def test_forged_usage_whose_number_the_allocator_uses_next_does_not_stand(world: World) -> None:
    """The numbers are equal at the next question."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("p"), container=ContainerName("c"))
    said: list[UsageObserved] = []
    world.client = Client(world.bus, world.clock, "registry")

    async def listen() -> None:
        async for delivery in Client(world.bus, world.clock).nodes():
            said.extend([delivery.event] if isinstance(delivery.event, UsageObserved) else [])

    async with world.running(), background() as tasks:
        tasks.start_soon(listen)
        world.ledger.observe(containers=(ContainerUsage(owner=owner, cpus="0-3"),))
        await world.clock.advance(PERIOD)
        told = said[-1]
        await world.forge(UsageObserved(node=NODE, epoch=told.epoch, revision=told.revision + 1, containers=()))
        world.ledger.observe(containers=(ContainerUsage(owner=owner, cpus="0-7"),))
        await world.clock.advance(PERIOD)

        assert ["0-7"] == [each.cpus for each in said[-1].containers]
        assert said[-1].epoch > told.epoch
        assert 1 == world.differences("usage")


async def test_a_flood_of_forged_topologies_makes_discovery_take_few_epochs(world: World) -> None:
    """Each epoch is recorded on disk."""
    async with world.running():
        epochs = set()
        for _ in range(12):
            for _ in range(50):
                await world.forge(no_devices(world, ahead=True), wait=False)
            await world.clock.advance(2.5)
            epochs.add(wire_place(world, "topology")[0])
        await world.clock.advance(2 * PERIOD)

        assert 2 <= len(epochs) <= 1 + 30 / 5
        assert 2 == len(world.view.hardware.gpus)
