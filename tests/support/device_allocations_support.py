"""Allocators without their front, and a kubelet's record as a test writes it."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
from fact_support import HEALTHY, discovered, health_of, judged, owner

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import (
    AskedDevices,
    KubeletListing,
    PodResources,
    Poll,
    ReportedDevices,
    ResourceEntry,
    nothing_to_ask,
)
from topoalign.allocator.settings import AllocatorSettings
from topoalign.core.model.errors import TopoalignError, Unavailable
from topoalign.core.model.events import (
    Allocation,
    ContainerUsage,
    DeviceHealth,
    LedgerEvent,
)
from topoalign.core.model.ids import GPU, DeviceID, NodeName, ResourceName
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Gpu, NumaNode, Topology
from topoalign.core.ports import Clock, Journal
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

NODE = NodeName("node-1")
GPUS = tuple(DeviceID(f"GPU-{index}") for index in range(8))
MACHINE = Topology(
    nodes=(NumaNode(id=0, memory=64 << 30), NumaNode(id=1, memory=64 << 30)),
    gpus=tuple(Gpu(id=name, index=at, numa_affinity=(at // 4,)) for at, name in enumerate(GPUS)),
)


class KubeletRecord:
    """A kubelet's PodResources as the test writes it."""

    def __init__(self) -> None:
        self.shown: list[ReportedDevices] = []
        self.answering = True
        self.kubelet = 1
        self.since = 0.0
        """Wall seconds at which it began to listen: long ago."""
        self.pods = 1
        """Pods without devices."""
        self.checkpoint: frozenset[tuple[ResourceName, DeviceID]] | None = frozenset()
        self.parts: tuple[ResourceEntry, ...] = ()
        self.written_by: int | None = None
        """The kubelet that wrote the checkpoint; None: another one, long ago."""
        self.version = 0
        """Of the checkpoint."""
        self.directories: PodDirectories | None = None
        self.usage: tuple[ContainerUsage, ...] = ()
        self.asked = 0
        self.patience = 0.0
        """For how many seconds the answer is waited for, to the question that was asked last."""
        self.meanwhile: Callable[[], Awaitable[object]] | None = None
        """Happens while the answer is on its way."""

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        self.asked += 1
        self.patience = 1.0 if seconds is None else seconds
        holdings = tuple(self.shown)
        await anyio.lowlevel.checkpoint()
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
        if not self.answering:
            raise Unavailable("PodResources does not answer", "look at the kubelet")
        return KubeletListing(
            kubelet=(self.kubelet,),
            since=self.since,
            pods=self.pods + len(holdings),
            holdings=holdings,
            checkpoint=self.checkpoint,
            parts=self.parts,
            written=(self.version,),
            is_own=self.written_by == self.kubelet,
            directories=self.directories,
            usage=self.usage,
        )

    def written(self) -> tuple[int, ...]:
        return (self.version,)

    def show(self, pod: str, *devices: DeviceID, resource: ResourceName = GPU) -> None:
        self.shown.append(ReportedDevices(owner=owner(pod), resource=resource, devices=frozenset(devices)))


class Node:
    """An allocator without its front: a ledger that knows eight healthy GPUs, and a kubelet's record."""

    def __init__(self, journal: Journal | None = None, clock: ManualClock | None = None, **options: Any) -> None:
        """`options`: as those of `start_allocations`."""
        self.clock = clock or ManualClock()
        self.journal = journal or MemoryJournal()
        self.kubelet = KubeletRecord()
        self.boot = "b"
        self.topology = MACHINE
        self.options = options
        self.ledger, self.device_allocations = self.start()

    def start(self) -> tuple[Ledger, DeviceAllocations]:
        ledger = Ledger(NODE, self.journal, self.clock)
        self.hear_topology(ledger, 1)
        self.hear_health(ledger, 1, dict.fromkeys(GPUS, HEALTHY))
        return ledger, start_allocations(ledger, self.kubelet, **self.options)

    def hear_topology(self, ledger: Ledger, revision: int) -> None:
        ledger.take_reading(discovered(self.topology, NODE, revision, self.boot))

    def hear_health(self, ledger: Ledger, revision: int, devices: dict[DeviceID, DeviceHealth]) -> None:
        ledger.take_reading(judged(devices, NODE, revision))

    def restart(self) -> None:
        self.ledger, self.device_allocations = self.start()

    def live(self) -> dict[str, str | None]:
        """Devices -> pod of every live allocation."""
        return {
            ",".join(a.devices[GPU]): a.owner.pod if a.owner else None for a in self.ledger.state.allocations.values()
        }

    def said(self, kind: type[LedgerEvent]) -> list[Any]:
        """What the ledger has said of this kind since the bus heard anything last."""
        return [event for event, _ in self.ledger.pending if isinstance(event, kind)]

    def allocation(self, *devices: DeviceID) -> Allocation:
        (found,) = (a for a in self.ledger.state.allocations.values() if a.device_ids == frozenset(devices))
        return found


async def bound(node: Node, pod: str, *devices: DeviceID) -> None:
    """A container that has been given these devices, and was seen with them."""
    await node.device_allocations.allocate(GPU, [list(devices)])
    node.kubelet.show(pod, *devices)
    await node.device_allocations.reconcile()


async def polled_after(node: Node, seconds: float, more: float) -> tuple[dict[str, str | None], ...]:
    """What is live after a poll of the kubelet now and one after so many seconds, and after some more."""
    found = []
    await node.device_allocations.reconcile()
    for passed in (seconds, more):
        await node.clock.advance(passed)
        await node.device_allocations.reconcile()
        found.append(node.live())
    return tuple(found)


class PassingClock(ManualClock):
    """Time passes while somebody sleeps."""

    async def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)
        await anyio.lowlevel.checkpoint()


class ShiftingClock(ManualClock):
    """The wall and the monotonic clock apart, and time that passes while this process does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.set_by = 0.0

    def wall(self) -> float:
        return self._now + self.set_by

    def stop(self, seconds: float) -> None:
        """As SIGSTOP, and SIGCONT so many seconds later: nobody woke in between."""
        self._now += seconds


class Observed:
    """Reservations that are never waited for."""

    def __init__(self, current: Callable[[], NodeReservations] = NodeReservations) -> None:
        self._current = current

    def current(self) -> NodeReservations:
        return self._current()

    async def until_read(self) -> None:
        pass


async def nothing_to_prepare(resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
    """A `Starting` for nodes on which nothing limits units."""


def start_allocations(
    ledger: Ledger,
    pod_resources: PodResources,
    made: type[DeviceAllocations] = DeviceAllocations,
    **options: Any,
) -> DeviceAllocations:
    """
    The allocator as the kubelet's front calls it. `options`: fields of `AllocatorSettings` and parameters of
    `DeviceAllocations`. By default nothing is reserved, nothing watches the hardware, and nothing limits units.
    """
    return made(ledger, pod_resources, **parts_of(options))


def parts_of(options: dict[str, Any]) -> dict[str, Any]:
    fields = {name: options.pop(name) for name in AllocatorSettings.__struct_fields__ if name in options}
    return {
        "settings": AllocatorSettings(**{"node": NODE, "placement": Placement.BEST_EFFORT, **fields}),
        "unbound_seconds": 30.0,
        "ensure_fresh": nothing_to_ask,
        "reservations": Observed(),
        "starting": nothing_to_prepare,
        **options,
    }


class MemoryAllocator(DeviceAllocations):
    """The allocator with its record in memory and a kubelet that reports nothing; it can fail or pause."""

    def __init__(self, machine: Topology | None, journal: MemoryJournal | None = None) -> None:
        """`journal`: of the allocator before a restart."""
        self.journal = journal or MemoryJournal()
        self.ledger = Ledger(NODE, self.journal, ManualClock())
        self.starting: list[tuple[DeviceID, ...]] = []
        """The devices of containers that were about to start."""
        self.fault: TopoalignError | None = None
        self.pause: anyio.Event | None = None
        self.started = anyio.Event()
        self.record = KubeletRecord()
        super().__init__(self.ledger, self.record, **parts_of({}))
        if machine is not None:
            self.discover(machine)

    def discover(self, machine: Topology) -> None:
        revision = self.state.topology.revision + 1 if self.state.topology is not None else 1
        self.ledger.take_reading(discovered(machine, NODE, revision))
        self.judge(health_of(machine))

    def judge(self, health: dict[DeviceID, DeviceHealth]) -> None:
        before = self.state.health
        revision, known = (before.revision + 1, before.devices) if before is not None else (1, {})
        self.ledger.take_reading(judged({**known, **health}, NODE, revision))

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        self._raise()
        return await super().prefer(resource, available, must_include, size)

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        self.started.set()
        if self.pause is not None:
            await self.pause.wait()
        self._raise()
        return await super().allocate(resource, containers)

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        self.starting.append(tuple(devices))
        self._raise()

    def release_all(self) -> None:
        self.ledger.release(tuple(self.state.allocations), "released")

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault


def ledger_of(known: Topology | NodeState, clock: Clock | None = None, journal: MemoryJournal | None = None) -> Ledger:
    """A ledger with the hardware and health of this state, or of a machine whose devices are healthy."""
    state = known if isinstance(known, NodeState) else MemoryAllocator(known).state
    ledger = Ledger(state.node, journal or MemoryJournal(), clock or ManualClock())
    assert state.topology is not None and state.health is not None
    ledger.take_reading(state.topology)
    ledger.take_reading(state.health)
    return ledger


def recorded(known: Topology | NodeState, placement: str = "best-effort") -> tuple[DeviceAllocations, Ledger]:
    """The real allocator, its record in memory, with a kubelet that does not answer."""
    ledger = ledger_of(known)
    kubelet = KubeletRecord()
    kubelet.answering = False
    return start_allocations(ledger, kubelet, placement=placement), ledger
