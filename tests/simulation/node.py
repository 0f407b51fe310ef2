"""
The processes of a simulated cluster of one node, made of product code: only what they stand on is simulated.

The node agent has the ledger, the device allocations, the admissions, the outbox and what it hears of the hardware, as
`main.py` of the allocator puts them together; the registry is the product's service with the product's client.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
from device_allocations_support import start_allocations
from prometheus_client import CollectorRegistry
from simulation.bus import FaultyBus
from simulation.discovery import Discovery
from simulation.divisions import card
from simulation.door import Door
from simulation.front import Front
from simulation.instance_book import FaultyBook
from simulation.journal import FaultyJournal
from simulation.kubelet import Kubelet
from simulation.limiters import SocketlessLimiter
from simulation.loop import Process
from simulation.mig_calls import SimulatedMaker
from simulation.mig_driver import Driver
from simulation.starts import Answer
from simulation.world import NODE, Violation, World

from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup
from topoalign.allocator.device_plugin.front import resources_to_serve
from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.mig.instances import Instances, collect_unused_instances
from topoalign.allocator.ports import KubeletListing
from topoalign.allocator.requests.admissions import Admissions
from topoalign.allocator.service import Allocator
from topoalign.client import Client, Delivery
from topoalign.core import wire
from topoalign.core.model.errors import StateFault, Unavailable
from topoalign.core.model.events import AllocationsSnapshot, LedgerFact
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.ports import Bus, Message
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.service import Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.node_bus import NodeBus

RECONCILE_SECONDS, GONE_SECONDS, UNBOUND_SECONDS, SETTLE_SECONDS = 5.0, 5.0, 8.0, 20.0
COMPACT_AFTER, PENDING_LIMIT, REMEMBERED = 3, 6, 4
"""So little that a run of a few dozen facts comes up against it."""


class KubeletList:
    """PodResources as the allocator reads it."""

    def __init__(self, world: World, kubelet: Kubelet) -> None:
        self._world, self._kubelet = world, kubelet

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        late = self._world.faults.random() < 0.5
        if late:
            await self._world.slow()
        listing = self._kubelet.listing()
        if not late:
            await self._world.slow()
        return listing

    def written(self) -> tuple[int, ...]:
        return (self._kubelet.version,)


class Agent:
    """The allocator's process, from its start to its end."""

    def __init__(self, world: World, kubelet: Kubelet | None, parts: "Parts") -> None:
        """`kubelet` None: pods are admitted over the bus."""
        self.world, self.kubelet, self.parts = world, kubelet, parts
        self.process = Process("agent")
        self.door = Door(world, self.process)
        self.bus = parts.bus(world.broker, world.faults, lambda: self.process.dead, self._publishes)
        self.said: tuple[int, int] | None = None
        """Epoch and seq of the fact that it tried to publish last."""
        self.marked = (0, 0)
        """Of the newest that counts as published since it began."""
        self.journal = FaultyJournal(
            world.disk,
            world.faults,
            kill=lambda: world.kill(self.process),
            is_dead=lambda: self.process.dead,
            delivery=world.became_true,
            marked=self._marks,
        )
        self.ledger: Ledger | None = None
        self.device_allocations: DeviceAllocations | None = None
        self.allocator: Allocator | None = None
        self.front = Front(world.limits, parts) if world.has_shares else None
        """None: GPUs are given out whole or in time slices only, and nobody looks at what containers are told."""
        self.instances: Instances | None = None
        """The MIG instances that are ours; None: no slots become any."""

    async def run(self) -> None:
        """Until it is killed, or cannot start; a supervisor starts the next one."""
        self.journal.refusals, self.journal.kills = self.world.disk_refusals, self.world.disk_kills
        world, clock = self.world, self.world.clock
        try:
            ledger = self.parts.ledger(
                NODE, self.journal, clock, compact_after=COMPACT_AFTER, pending_limit=PENDING_LIMIT
            )
        except StateFault:
            world.kill(self.process)
            return
        bus: Bus = NodeBus(self.bus, NODE) if world.one_process else self.bus
        hardware_watch = HardwareWatch(ledger, bus, clock)
        reservations = NodeReservationList(ledger, self.bus, clock) if self.front is not None else None
        if self.kubelet is not None:
            self.device_allocations = self.allocations_for(self.kubelet, ledger, hardware_watch, reservations)
        admissions = self.parts.admissions(ledger, bus, world.rules, kubelet_owns_devices=self.kubelet is not None)
        self.allocator = Allocator(
            ledger,
            bus,
            hardware_watch,
            admissions,
            self.device_allocations,
            reconcile_seconds=RECONCILE_SECONDS,
            reservations=reservations,
        )
        self.ledger = ledger
        if self.kubelet is not None:
            self.kubelet.begin_unheard()
        world.note("agent up", ledger.state.epoch, len(ledger.state.allocations))
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.allocator.run)
            tasks.start_soon(self.door.run)
            if world.one_process:
                tasks.start_soon(Discovery(world, bus, self.bus).run)
            if self.kubelet is not None:
                tasks.start_soon(self._offer, self.kubelet)
            if self.front is not None:
                tasks.start_soon(self.front.run, clock)
            if self.instances is not None and (made := self.device_allocations) is not None:
                tasks.start_soon(collect_unused_instances, self.instances, ledger, clock, lambda: made.polled)

    def allocations_for(
        self, kubelet: Kubelet, ledger: Ledger, hardware_watch: HardwareWatch, reservations: NodeReservationList | None
    ) -> DeviceAllocations:
        """As `KubeletSide` of the allocator's `main.py` makes them."""
        more: dict[str, Any] = {}
        if self.front is not None and reservations is not None:
            more = {
                "reservations": reservations,
                "starting": self.front.starting,
            }
        if self.world.driver is not None:
            more["instances"] = self.instances = self.own_instances(self.world.driver, ledger)
        made = start_allocations(
            ledger,
            KubeletList(self.world, kubelet),
            self.parts.device_allocations,
            compat=self.world.rules.compat,
            gone_seconds=GONE_SECONDS,
            unbound_seconds=UNBOUND_SECONDS,
            settle_seconds=SETTLE_SECONDS,
            ensure_fresh=hardware_watch.ensure_fresh,
            **more,
        )
        if self.front is not None:
            self.front.serve(made)
        return made

    def own_instances(self, driver: Driver, ledger: Ledger) -> Instances:
        """As `KubeletSide` of the allocator's `main.py` makes them."""
        world = self.world
        boot, now = f"boot-{world.boot}", world.clock.monotonic
        book = FaultyBook(world.book, boot, now, world.faults, self.process, world.kill)
        return self.parts.instances(
            book, SimulatedMaker(world, driver, self.process), lambda: ledger.move(ledger.state)
        )

    def _marks(self, epoch: int, seq: int) -> None:
        self.marked = (epoch, seq)
        self.world.was_published(epoch, seq)

    def _publishes(self, message: Message) -> None:
        """
        Fact after fact; again from one that is not confirmed; and none left out but for a snapshot that stands for it.
        """
        event = wire.decode_event(message)
        if not isinstance(event, LedgerFact):
            return
        place, had = (event.epoch, event.seq), self.said
        if had is not None and not (
            place == (had[0], had[1] + 1)
            or self.marked < place <= had
            or (place > had and (event.seq == 1 or isinstance(event, AllocationsSnapshot)))
        ):
            self.world.violate(Violation("I5", f"fact {place} is published after {had}"))
        self.said = place

    async def _offer(self, kubelet: Kubelet) -> None:
        """ListAndWatch: what is listed is told again with every change, to whatever kubelet lives."""
        assert self.ledger is not None
        self.process.ended.append(kubelet.unregistered)
        while True:
            version = self.ledger.version
            self.offer()
            await self.ledger.wait_past(version)

    def offer(self) -> None:
        """Also what a kubelet asks for when it has restarted and the plugin has registered anew."""
        if self.kubelet is not None and self.device_allocations is not None and not self.process.dead:
            if self.kubelet.up and self.kubelet.plugin is None:
                self.door.hang_up()
            state = self.device_allocations.state
            served = sorted(resources_to_serve(state)) if self.front is not None else state.hardware.devices
            faults = self.device_allocations.faults
            healthy = {resource: tuple(state.healthy(resource)) for resource in served}
            if faults:
                healthy = {name: tuple(d for d in ids if card(d) not in faults) for name, ids in healthy.items()}
            self.kubelet.lists(self, healthy)

    async def prefer(
        self, resource: ResourceName, available: list[DeviceID], must_include: list[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        async def preferred() -> tuple[DeviceID, ...]:
            assert self.device_allocations is not None
            preferred = await self.device_allocations.prefer(resource, available, must_include, size)
            for told in self.world.preferences:
                told(self.device_allocations.state, available, preferred, must_include)
            return preferred

        chosen: tuple[DeviceID, ...] = await self.door.call(preferred)
        return chosen

    async def allocate(self, resource: ResourceName, devices: Sequence[DeviceID]) -> Answer:
        """What the container is told, and the name of the allocation that was recorded."""
        assert self.device_allocations is not None
        device_allocations, front = self.device_allocations, self.front
        if front is not None:
            told: Answer = await self.door.call(lambda: front.allocate(resource, devices))
            return told
        granted = await self.door.call(lambda: device_allocations.allocate(resource, [devices]))
        return Answer(granted[0].id, {}, {}, {})

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        device_allocations, front = self.device_allocations, self.front
        assert device_allocations is not None

        async def started() -> None:
            with suppress(Unavailable):
                await device_allocations.start_container(resource, devices)

        await self.door.call(started if front is None else lambda: front.pre_start(resource, devices))


class Parts:
    """Of what classes the agent is made: the product's, or some with a planted defect."""

    ledger: type[Ledger] = Ledger
    device_allocations: type[DeviceAllocations] = DeviceAllocations
    admissions: type[Admissions] = Admissions
    bus: type[FaultyBus] = FaultyBus
    limiter: type[SocketlessLimiter] = SocketlessLimiter
    sweeps: type[DirectoryCleanup] = DirectoryCleanup
    instances: type[Instances] = Instances


class WatchedCluster(Cluster):
    """The registry's fold, that tells what it was given."""

    def __init__(self, delivery: Callable[[Delivery], None]) -> None:
        super().__init__()
        self._heard = delivery

    def apply(self, delivery: Delivery) -> None:
        self._heard(delivery)
        super().apply(delivery)


class Hub:
    """The registry's process."""

    def __init__(self, world: World, delivery: Callable[["Hub", Delivery], None]) -> None:
        self.process = Process("registry")
        bus = FaultyBus(world.broker, world.faults, lambda: self.process.dead)
        self.client = Client(bus, world.clock, "registry")
        self.place = (0, 0)
        """Epoch and seq of the last fact that it received."""
        self.cluster = WatchedCluster(lambda event: None if self.process.dead else delivery(self, event))
        metrics = RegistryMetrics(CollectorRegistry(), self.client)
        self._registry = Registry(bus, world.clock, self.client, self.cluster, metrics, RegistrySettings())

    async def run(self) -> None:
        await self._registry.run()
