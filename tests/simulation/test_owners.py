"""
Whose devices these are, although Allocate does not say: two pods of equal size whose calls overtake one another.

Once the kubelet's list has been read with both in it, each allocation has its owner; until then it says that it has none.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from random import Random

import anyio
from device_allocations_support import start_allocations
from faults_support import THOROUGH
from simulation.kubelet import Kubelet
from simulation.loop import SimulatedLoop, simulate
from simulation.pods import Container, Pod
from simulation.scenario import quietly
from simulation.starts import Answer
from simulation.world import HEALTHY, NODE, WHOLE, SimulatedClock

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import KubeletListing
from topoalign.core.model.events import AllocationBound, DeviceHealthChanged, TopologyDiscovered
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.ports import JournalEntry
from topoalign.testing.memory_journal import MemoryJournal

SEEDS = range(10_000 if THOROUGH else 400)
POD: "ContextVar[str]" = ContextVar("POD")
"""For whom the kubelet is calling: what Allocate does not say."""
LATE = (0.0, 0.0, 0.001, 0.02, 0.3)


class Node:
    """A ledger and its `DeviceAllocations` behind a wire with delays, and a kubelet that admits several pods at once."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.chance = Random(f"owners-{seed}")
        clock = SimulatedClock(loop)
        self.kubelet = Kubelet(chance=self.chance, clock=clock, serial=False, calls_at_start=seed % 2 == 0)
        self.bound: list[tuple[str, bool]] = []
        """Every owner that was recorded, and whether it was for that pod that the devices had been asked for."""
        self.asked_for: dict[AllocationID, str] = {}
        self.ledger = Ledger(NODE, WatchedJournal(self), clock)
        self.ledger.take_reading(
            TopologyDiscovered(
                node=NODE, epoch=1, revision=1, boot_id="b", source="described: simulated", topology=WHOLE
            )
        )
        health = {device: HEALTHY for devices in WHOLE.devices.values() for device in devices}
        self.ledger.take_reading(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=health))
        self.device_allocations = start_allocations(
            self.ledger, self, gone_seconds=2, unbound_seconds=4, settle_seconds=6
        )
        self.kubelet.plugin = self
        self.kubelet.healthy = {resource: tuple(devices) for resource, devices in WHOLE.devices.items()}

    async def late(self) -> None:
        await anyio.sleep(self.chance.choice(LATE))

    async def listing(self, seconds: float | None = None) -> KubeletListing:
        await self.late()
        listing = self.kubelet.listing()
        await self.late()
        return listing

    def written(self) -> tuple[int, ...]:
        return ()

    async def prefer(
        self, resource: ResourceName, available: list[DeviceID], must_include: list[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        await self.late()
        return await self.device_allocations.prefer(resource, available, must_include, size)

    async def allocate(self, resource: ResourceName, devices: Sequence[DeviceID]) -> Answer:
        await self.late()
        granted = await self.device_allocations.allocate(resource, [devices])
        self.asked_for[granted[0].id] = POD.get()
        await self.late()
        return Answer(granted[0].id, {}, {}, {})

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        await self.device_allocations.start_container(resource, devices)

    def right(self, event: AllocationBound) -> bool:
        """What was taken in from the kubelet's list, because its record had been replaced, was asked for by nobody."""
        return self.asked_for.get(event.allocation, event.owner.pod) == event.owner.pod


class WatchedJournal(MemoryJournal):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node

    def append(self, entry: JournalEntry) -> None:
        super().append(entry)
        self._node.bound += [
            (event.owner.pod, self._node.right(event)) for event in entry.events if isinstance(event, AllocationBound)
        ]


def pod(name: str, size: int) -> Pod:
    main = Container(name=ContainerName("main"), role="app", limits={GPU: size})
    return Pod(uid=f"uid-{name}", name=PodName(name), containers=(main,))


async def two_at_once(loop: SimulatedLoop, seed: int) -> Node:
    node = Node(seed, loop)
    size = node.chance.choice((1, 2))

    async def arrive(name: str) -> None:
        POD.set(name)
        await node.late()
        node.kubelet.wanted[f"uid-{name}"] = pod(name, size)
        await node.kubelet.admit(f"uid-{name}")

    async def look_again_and_again() -> None:
        while True:
            await anyio.sleep(node.chance.choice((0.001, 0.01, 0.5)))
            await node.device_allocations.reconcile()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look_again_and_again)
        tasks.start_soon(node.device_allocations.owner_polls.run)
        async with anyio.create_task_group() as pods:
            pods.start_soon(arrive, "first")
            pods.start_soon(arrive, "second")
            if node.chance.random() < 0.6:  # by force, and one of the same size in its place
                await anyio.sleep(node.chance.choice((0.0, 0.02, 0.3, 1.0)))
                node.kubelet.remove("uid-first")
                pods.start_soon(arrive, "third")
        node.kubelet.collect()  # as it does when the next pod comes
        await anyio.sleep(12)
        tasks.cancel_scope.cancel()
    return node


def test_every_allocation_ends_with_its_owner_and_never_had_a_wrong_one() -> None:
    """
    C13: every allocation ends with its right owner, and none ever had a wrong one. The order of the calls is drawn, and
    so is what is late.
    """
    swapped = 0
    with quietly():
        for seed in SEEDS:
            node = simulate(seed, lambda loop, seed=seed: two_at_once(loop, seed))  # type: ignore[misc]  # seed is bound now
            held = {
                (holding.owner, holding.devices)
                for pod in node.kubelet.wanted.values()
                for holding in node.kubelet.holdings(pod)
            }
            recorded = {(a.owner, a.device_ids) for a in node.ledger.state.allocations.values()}

            assert held == recorded, f"seed {seed}"
            assert all(right for _, right in node.bound), f"seed {seed}: {node.bound}"
            swapped += [name for name, _ in node.bound][:2] == ["second", "first"]

    assert swapped > len(SEEDS) // 10, "the calls must overtake one another"
