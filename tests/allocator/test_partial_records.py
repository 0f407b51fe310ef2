"""Records that have less than the kubelet gave: found by seeds of the simulation, told here as short as they are."""

from random import Random

import anyio
import pytest
from device_allocations_support import start_allocations
from simulation.journal import Disk, FaultyJournal
from simulation.kubelet_record import KubeletRecord, owner
from simulation.loop import SimulatedLoop, simulate
from simulation.scenario import quietly
from simulation.world import HEALTHY, NODE, WHOLE, SimulatedClock

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core.model.errors import StateFault
from topoalign.core.model.events import DeviceHealthChanged, Owner, TopologyDiscovered
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.testing.memory_journal import MemoryJournal

ONE, OTHER = DeviceID("GPU-0"), DeviceID("GPU-1")


class Node:
    def __init__(self, loop: SimulatedLoop) -> None:
        clock = SimulatedClock(loop)
        self.kubelet = KubeletRecord()
        self.ledger = Ledger(NODE, MemoryJournal(), clock)
        self.ledger.take_reading(
            TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="described: test", topology=WHOLE)
        )
        health = {device: HEALTHY for devices in WHOLE.devices.values() for device in devices}
        self.ledger.take_reading(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices=health))
        self.device_allocations = start_allocations(self.ledger, self.kubelet)

    def live(self) -> list[tuple[Owner | None, tuple[DeviceID, ...]]]:
        return [(a.owner, a.devices[GPU]) for a in self.ledger.state.allocations.values()]


def test_an_init_container_stays_recorded_with_an_unreadable_checkpoint() -> None:
    """What an init container keeps stays in the record while the checkpoint cannot be read."""

    async def play(loop: SimulatedLoop) -> list[tuple[Owner | None, tuple[DeviceID, ...]]]:
        node = Node(loop)
        await node.device_allocations.allocate(GPU, [[ONE, OTHER]])  # for the init container
        node.kubelet.readable = False
        await node.device_allocations.allocate(GPU, [[ONE]])  # for the app container, which takes one of the two over
        return node.live()

    with quietly():
        assert [(None, (ONE,)), (None, (OTHER,))] == simulate(1, play)


def test_a_record_of_a_part_makes_way_for_the_whole() -> None:
    """A record with a part of what its container has makes way for the whole."""

    async def play(loop: SimulatedLoop) -> list[tuple[Owner | None, tuple[DeviceID, ...]]]:
        node = Node(loop)
        await node.device_allocations.allocate(GPU, [[ONE]])
        node.kubelet.pods["train"] = frozenset({ONE, OTHER})
        for _ in range(2):
            await node.device_allocations.reconcile()
            await anyio.sleep(5)
        return node.live()

    with quietly():
        assert [(owner("train"), (ONE, OTHER))] == simulate(1, play)


@pytest.mark.parametrize("readable", [True, False])
def test_an_init_container_keeps_its_part_of_a_contradicted_record(readable: bool) -> None:
    """
    What an init container has of a contradicted record stays recorded. The kubelet said Allocate for the init container
    again, after its app container had taken a part of it over.
    """

    async def play(loop: SimulatedLoop) -> list[tuple[Owner | None, tuple[DeviceID, ...]]]:
        node = Node(loop)
        await node.device_allocations.allocate(GPU, [[ONE, OTHER]])
        node.kubelet.pods["train"], node.kubelet.init = frozenset({ONE}), {ONE, OTHER}
        node.kubelet.readable = readable
        for _ in range(2):
            await node.device_allocations.reconcile()
            await anyio.sleep(5)
        return node.live()

    with quietly():
        assert [(owner("train"), (ONE,)), (None, (OTHER,))] == simulate(1, play)


def test_a_damaged_journal_does_not_continue_its_epoch_on_a_full_disk() -> None:
    """
    On a damaged journal the old epoch is not continued when the disk refuses a new one. Facts that the damage has taken may
    have been received under the numbers that would come next.
    """

    async def play(loop: SimulatedLoop) -> None:
        clock, disk = SimulatedClock(loop), Disk()
        ledger = Ledger(NODE, FaultyJournal(disk, Random(1)), clock)
        ledger.announce()
        disk.damage(1)
        refusing = FaultyJournal(disk, Random(1))
        refusing.refusals = 1.0
        with pytest.raises(StateFault):
            Ledger(NODE, refusing, clock)

    with quietly():
        simulate(1, play)
