"""
A node of the simulated cluster: the product's allocator in a process that can end, and a kubelet that keeps its own record.

Product code are the ledger, the outbox, what is answered over the bus, what is known of reservations, and the answers to the
kubelet. The kubelet admits pods one at a time, aligns whole GPUs by the policy of its Topology Manager, asks the plugin
which devices it prefers, and takes those. What a pod held it has free when the containers have ended; the facts of the node
show that later, as with an agent that polls.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

import anyio
from device_allocations_support import start_allocations
from simulation.cluster_world import BrokenCall, ClusterWorld, PartedBus, call
from simulation.loop import Process

from topoalign.allocator.allocate.node_reservations import NodeReservationList
from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.ledger.outbox import Outbox
from topoalign.allocator.ports import KubeletListing, ReportedDevices, ResourceEntry
from topoalign.allocator.reconciliation.usage_publisher import UsagePublisher
from topoalign.allocator.requests.admissions import Admissions, Predictions
from topoalign.allocator.requests.kubelet_files import KubeletWatch
from topoalign.allocator.service import WriterPositions
from topoalign.core import wire
from topoalign.core.admission.prediction import admission_rules, predict
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.decisions import Refusal
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import (
    DeviceHealth,
    DeviceHealthChanged,
    HealthState,
    ReservationsChanged,
    TopologyDiscovered,
    UsageObserved,
)
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName, ResourceName
from topoalign.core.model.kubelet import KubeletObserved, KubeletRules
from topoalign.core.model.requests import Placement, PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.core.state.fold import NodeState
from topoalign.core.state.terminated_pods import without_pods
from topoalign.kubelet.files.manifest import request_from_pod
from topoalign.testing.memory_journal import MemoryJournal
from topoalign.tools.bench.schedule.node import Admitted, Bound

ADMITS_SECONDS = (0.1, 4.0)
"""Between which two a kubelet admits a pod after its Binding."""
SHOWS_SECONDS = (0.05, 1.0)
"""Between which two the node shows after the end of a pod that it has ended."""
RELEASES_SECONDS = (1.0, 8.0)
"""Between which two the node has released it after that."""
READS_SECONDS = (0.001, 0.02, 0.02, 0.3)
"""For one of these an allocator reads its kubelet's files before it confirms."""
BACK_SECONDS = 0.2
"""Between two looks of the kubelet at whether the plugin is back."""
BROKEN, DELETED = "BrokenCall", "PodDeleted"
Devices = dict[ResourceName, tuple[DeviceID, ...]]


class Admission(NamedTuple):
    """A pod that a kubelet has admitted."""

    uid: str
    own: Reservation | None
    """What was reserved for it on the node as its admission began."""
    reserved: tuple[Reservation, ...]
    """What was reserved there then for any pod: by the newest message of the stream, and by the one that the node had."""
    made: tuple[Allocation, ...]
    began: float
    """Seconds of the loop."""


class Node:
    """One node. `start` begins its allocator, anew if it has ended."""

    def __init__(self, world: ClusterWorld, name: NodeName, policy: str) -> None:
        self.world = world
        self.name = name
        self.rules = KubeletRules(
            policy=policy,
            scope="container",
            cpu_manager="none",
            memory_manager="None",
            placement="topology",
            compat=world.compat,
        )
        self.used: dict[str, Devices] = {}
        """UID of each pod that runs -> what it has, as the kubelet keeps it."""
        self.ended: dict[str, None] = {}
        """UIDs of pods that have ended, and that the allocator's record still has."""
        self.admissions: list[Admission] = []
        """Of the pods that it has admitted since this was looked at last."""
        self.refusals: list[tuple[str, str]] = []
        """
        UID and code of the pods that it has refused since then without an excuse: the pod was not deleted, no call broke,
        and no reservation arrived too late.
        """
        self.late: set[str] = set()
        """UIDs of pods whose reservations the node had not received when their admission began."""
        self._journal = MemoryJournal()
        self._turn = anyio.Lock()
        self._terminated: set[str] = set()
        """UIDs of all pods whose containers have ended, or will not begin."""
        self.start()

    def start(self) -> None:
        """The allocator begins. What its record has of containers that do not run is released, as after a reading."""
        world, name = self.world, self.name
        process = self.process = Process(name)
        bus = PartedBus(world, process)
        self.ledger = ledger = Ledger(name, self._journal, world.clock)
        for fact in hardware_facts(self):
            ledger.take_reading(fact)
        gone = [each.id for each in ledger.state.allocations.values() if each.pod_uid not in self.used]
        if gone:
            ledger.release(gone, "gone")
        self.ended = {}
        self._began = int(world.clock.wall() * 1000)
        self._readings = 0
        self.read_kubelet()
        self.reservations = NodeReservationList(ledger, bus, world.clock)
        self.allocations = start_allocations(
            ledger,
            Record(self),
            placement=Placement.TOPOLOGY,
            compat=world.compat,
            reservations=self.reservations,
        )
        world.start(process, lambda: self._run(bus))

    async def _run(self, bus: Bus) -> None:
        ledger, clock = self.ledger, self.world.clock
        outbox, usage = Outbox(ledger, bus, clock), UsagePublisher(ledger, bus, clock, bus)
        rules = admission_rules(self.rules, self.name)
        predictions = Predictions(
            ledger, rules, ReadKubelet(self), kubelet_owns_devices=True, confirmed=self.reservations.expect
        )
        admissions = Admissions(ledger, bus, rules, kubelet_owns_devices=True, predictions=predictions)
        standings = WriterPositions(ledger, confirmed_hardware(ledger, bus, clock), usage)
        endpoints = [*admissions.endpoints(), *standings.endpoints()]
        async with bus.serve("topoalign-allocator", endpoints), anyio.create_task_group() as tasks:
            for each in (outbox.run, outbox.watch, usage.run, self.reservations.run):
                tasks.start_soon(each)

    def reserved(self) -> tuple[Reservation, ...]:
        """What is reserved on the node, as the newest message of the stream says."""
        newest = self.world.bus._logs[Stream.RESERVATIONS].newest.get(wire.reservation_subject(self.name))
        event = wire.decode_event(newest.message) if newest is not None else None
        return event.reservations if isinstance(event, ReservationsChanged) else ()

    @property
    def has_late_pod(self) -> bool:
        """Whether the node holds something for a pod whose reservation arrived too late."""
        return not self.late.isdisjoint(each.pod_uid for each in self.ledger.state.allocations.values())

    async def admit(self, bus: Bus, bound: Bound) -> Admitted:
        """As `KubeletNode.admit`."""
        world = self.world
        await anyio.sleep(world.chance.uniform(*ADMITS_SECONDS))
        async with self._turn:
            while self.process.dead or self.process.stopped:  # noqa: ASYNC110  # virtual time costs nothing
                await anyio.sleep(BACK_SECONDS)
            if bound.uid in self._terminated:
                return Admitted(bound.uid, DELETED)
            had_late_pod = self.has_late_pod  # it can be released during the admission
            try:
                code = await call(world, self.process, lambda: self._admit(bound.uid, request_from_pod(bound.pod)))
            except BrokenCall:
                code = BROKEN
            is_excused = code == BROKEN or bound.uid in self.late or had_late_pod or self.has_late_pod
            if code and not is_excused and bound.uid not in self._terminated:
                self.refusals.append((bound.uid, code))
            if code or bound.uid in self._terminated:
                self._terminated.add(bound.uid)
                self.used.pop(bound.uid, None)
                self.ended[bound.uid] = None
                world.tasks.start_soon(self._release, bound.uid)
        world.note("admitted" if not code else "refused", bound.uid, self.name, code, self.used.get(bound.uid))
        return Admitted(bound.uid, code)

    async def _admit(self, uid: str, pod: PodRequest) -> str:
        """The code of the refusal; empty: the pod runs."""
        limits = pod.containers[0].limits
        order = [each for each in limits if each in self.world.hardware.devices]
        self.world.chance.shuffle(order)
        reserved, began = self.reserved(), self.world.loop.time()
        delivered = tuple(self.reservations.current().reservations)
        own = next((each for each in reserved if each.pod_uid == uid), None)
        if own is not None and uid not in {each.pod_uid for each in delivered}:
            self.late.add(uid)
        made, code = list[Allocation](), ""
        try:
            for resource in order:
                made.append(await self._give(uid, pod, resource, limits[resource]))
        except (TopoalignError, Refused) as error:
            code = error.code
        owner = Owner(namespace=pod.namespace, pod=pod.name, container=ContainerName("main"))
        if made:  # of a pod that is refused, too: what it was given before is released with it
            self.ledger.bind([Binding(each.id, owner, uid) for each in made])
        if code:
            return code
        self.admissions.append(Admission(uid, own, (*reserved, *delivered), tuple(made), began))
        return ""

    async def _give(self, uid: str, pod: PodRequest, resource: ResourceName, count: int) -> Allocation:
        """What the kubelet gives of one resource. Raises Refused, and what the plugin raises."""
        free = self._free(pod, resource)
        if len(free) < count:
            raise Refused("NotEnough")
        if self.world.division != "whole":  # before it gives a share the allocator has the kubelet's list compared
            for other in [*self.ended]:
                self._release_now(other)
        preferred = await self.allocations.prefer(resource, free, [], count)
        chosen = [*preferred, *(device for device in free if device not in preferred)][:count]
        self.used.setdefault(uid, {})[resource] = tuple(chosen)
        for other in self._ended_holders(resource, chosen):
            self._release_now(other)
        (made,) = await self.allocations.allocate(resource, [chosen])
        return made

    def _free(self, pod: PodRequest, resource: ResourceName) -> list[DeviceID]:
        """The free devices that the kubelet offers the plugin: those on the NUMA nodes to which it aligns the pod."""
        state = self.ledger.state
        taken = {device for devices in self.used.values() for device in devices.get(resource, ())}
        free = [device for device in state.healthy(resource) if device not in taken]
        if self.rules.policy == "none":
            return free
        decision = predict(self.kubelet_state(), pod, self.world.clock.wall())
        if isinstance(decision, Refusal):
            raise Refused(decision.code)
        affinity = decision.allocations[0].affinity
        if affinity is None:
            return free
        near = {gpu.id for gpu in state.hardware.gpus if set(affinity).issuperset(gpu.numa_affinity)}
        return [device for device in free if device in near]

    def kubelet_state(self) -> NodeState:
        """The node without what its kubelet has free again."""
        return without_pods(self.ledger.state, self.ended, ())

    def _ended_holders(self, resource: ResourceName, devices: Iterable[DeviceID]) -> list[str]:
        wanted = set(devices)
        live = self.ledger.state.allocations.values()
        return [each.pod_uid for each in live if each.pod_uid in self.ended and wanted.intersection(each.device_ids)]

    async def terminate(self, bus: Bus, uid: str) -> None:
        """As `KubeletNode.terminate`."""
        self._terminated.add(uid)
        if self.used.pop(uid, None) is None:
            return
        self.ended[uid] = None
        self.world.note("ended", uid, self.name)
        await self._release(uid)

    async def _release(self, uid: str) -> None:
        """Shows the end of a pod, and later releases what it had."""
        chance = self.world.chance
        await anyio.sleep(chance.uniform(*SHOWS_SECONDS))
        await self._in_agent(self.read_kubelet)
        await anyio.sleep(chance.uniform(*RELEASES_SECONDS))
        await self._in_agent(lambda: self._release_now(uid))

    async def _in_agent(self, do: Callable[[], None]) -> None:
        """Does it in the allocator's process. One that ends meanwhile is followed by one that knows what has ended."""

        async def run() -> None:
            do()

        with suppress(BrokenCall):
            await call(self.world, self.process, run)

    def read_kubelet(self) -> None:
        """The allocator has read its kubelet's files: its facts show which pods have ended, if that is news."""
        live = self.ledger.state.allocations.values()
        kubelet = KubeletObserved(
            version="v1.36.2",
            rules=self.rules,
            devices={},
            registered=tuple(self.world.hardware.devices),
            ended=tuple(each.id for each in live if each.pod_uid in self.ended),
        )
        usage = self.ledger.state.usage
        if usage is not None and usage.kubelet == kubelet:
            return
        self._readings += 1
        self.ledger.take_reading(
            UsageObserved(node=self.name, epoch=self._began, revision=self._readings, containers=(), kubelet=kubelet)
        )

    def _release_now(self, uid: str) -> None:
        """The allocator releases what an ended pod had."""
        if uid in self.ended:
            del self.ended[uid]
            held = [each.id for each in self.ledger.state.allocations.values() if each.pod_uid == uid]
            if held:
                self.ledger.release(held, "gone")


class Refused(Exception):
    """The kubelet refuses the pod."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


class ReadKubelet(KubeletWatch):
    """Reads the kubelet's files at once where a registry names terminated pods. Nothing else changes in them unnoticed."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def read_all(self) -> None:
        await self.read_changed()
        self._node.read_kubelet()

    async def read_changed(self) -> None:
        await anyio.sleep(self._node.world.faults.choice(READS_SECONDS))


def confirmed_hardware(ledger: Ledger, bus: Bus, clock: Clock) -> HardwareWatch:
    """The hardware as it was published at first; discovery confirms it always."""
    watch = HardwareWatch(ledger, bus, clock)
    watch.newest = {"topology": (1, 1), "health": (1, 1)}
    return watch


class Record:
    """PodResources and the checkpoint of a node, by what its kubelet keeps."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def written(self) -> tuple[int, ...]:
        return ()

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        await anyio.lowlevel.checkpoint()
        node = self._node
        owners = {each.pod_uid: each.owner for each in node.ledger.state.allocations.values()}
        shown = tuple(
            ReportedDevices(owner=owner, resource=resource, devices=frozenset(devices), pod_uid=uid)
            for uid, held in node.used.items()
            for resource, devices in held.items()
            if (owner := owners.get(uid)) is not None
        )
        return KubeletListing(
            kubelet=(1,),
            since=0.0,
            pods=len(node.used) + 1,
            holdings=shown,
            checkpoint=frozenset((each.resource, device) for each in shown for device in each.devices),
            parts=tuple(ResourceEntry(each.resource, each.devices) for each in shown),
        )


def hardware_facts(node: Node) -> tuple[TopologyDiscovered, DeviceHealthChanged]:
    """What discovery has published of a node."""
    hardware = node.world.hardware
    cards = {hardware.parent_of(device) for devices in hardware.devices.values() for device in devices}
    health = {card: DeviceHealth(state=HealthState.HEALTHY) for card in sorted(cards)}
    return (
        TopologyDiscovered(
            node=node.name, epoch=1, revision=1, boot_id="b", source="described: simulated", topology=hardware
        ),
        DeviceHealthChanged(node=node.name, epoch=1, revision=1, devices=health),
    )
