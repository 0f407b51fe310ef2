"""The allocator measures by itself who is above its memory, for as long as somebody holds an amount of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest
from slot_support import in_slots
from structlog.testing import capture_logs
from use_support import GIB, INFER, MACHINE, SHARED, TRAIN, UIDS, Node, held, in_pod, measurement, owner, process, use

from topoalign.allocator.metrics.use_series import UseSeries
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import Allocation, TopologyDiscovered
from topoalign.core.model.ids import GPU, DeviceID
from topoalign.core.model.processes import Measurement
from topoalign.core.model.requests import NodeRequest
from topoalign.core.model.topology.model import Topology
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

UNITS = held(1, *(f"GPU-0::c{n}" for n in range(20)), *(f"GPU-0::m{n}" for n in range(8)), of=TRAIN, uid=UIDS[0])
"""20 units of computing time, and memory of 2 GiB."""
WITHOUT_AMOUNT = (
    held(2, "GPU-1", of=INFER, uid=UIDS[1]),
    held(3, "MIG-1", of=INFER, uid=UIDS[1]),
    held(4, "GPU-2::1", of=INFER, uid=UIDS[1], resource=SHARED),
)
"""A whole GPU, an instance, and a time slice."""


class Watched(Node):
    """A node whose allocator measures by itself, beside a discovery that measures at the time of its clock."""

    def __init__(self, *allocations: Allocation, machine: Topology = MACHINE) -> None:
        super().__init__()
        self.ledger.take_reading(
            TopologyDiscovered(node=self.ledger.node, epoch=2, revision=1, boot_id="b", source="nvml", topology=machine)
        )
        self.ledger.grant(allocations)
        self.ledger.observe(containers=())
        self.clock, self.used = ManualClock(1500.0), 12 * GIB
        self.series = UseSeries(self.ledger, self.bus, (), announces=True)

    async def answer(self, request: NodeRequest) -> Measurement:
        await super().answer(request)
        return measurement(use("GPU-0", process(1, self.used, in_pod(UIDS[0]))), time=self.clock.wall())

    @property
    def exceeding(self) -> int:
        assert self.ledger.state.usage is not None
        return len(self.ledger.state.usage.exceeding)

    async def scrape(self) -> str:
        return b"".join([chunk async for chunk in self.series.write()]).decode()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.series.keep_watch, self.clock)
            yield
            tasks.cancel_scope.cancel()


async def test_an_excess_is_told_and_ended_although_nobody_scrapes() -> None:
    node, told = Watched(UNITS), []
    with capture_logs() as logs:
        async with node.answering(), node.watching():
            for second in range(15, 105, 15):
                node.used = (12 if second < 75 else 1) * GIB
                await node.clock.advance(15)
                told.append(node.exceeding)

    assert [0, 0, 1, 1, 0, 0] == told
    assert ["a container uses more memory of a GPU than it was given"] == [each["event"] for each in logs]


async def test_the_log_names_a_container_with_long_names_whole() -> None:
    """Pods of one controller differ in the last characters of their names."""
    pod = "serve-" * 20 + "x7k2p"
    node = Watched(msgspec.structs.replace(UNITS, owner=owner(pod)))
    with capture_logs() as logs:
        async with node.answering(), node.watching():
            await node.clock.advance(45)

    assert [f"ml/{pod} main"] == [each["container"] for each in logs]


async def test_nothing_is_measured_while_nobody_holds_an_amount() -> None:
    """Of an idle node, nor of whole GPUs, instances and time slices; it begins with a share and ends with the last."""
    node, asked = Watched(), []
    async with node.answering(), node.watching():
        for granted in ((), WITHOUT_AMOUNT, (UNITS,)):
            node.ledger.grant(granted)
            await node.clock.advance(60)
            asked.append(node.asked)
        node.ledger.release((UNITS.id,), "released")
        await node.clock.advance(60)
        asked.append(node.asked)

    assert [0, 0, 4, 4] == asked


async def test_slots_are_amounts_until_they_have_become_an_instance() -> None:
    slot = held(1, "GPU-0::3", of=TRAIN, uid=UIDS[0], resource=GPU)
    instance = Allocation(
        id=slot.id, owner=TRAIN, devices=slot.devices, instances={DeviceID("GPU-0::3"): DeviceID("MIG-1")}
    )
    asked = []
    for allocation in (slot, instance):
        node = Watched(allocation, machine=in_slots(MACHINE))
        async with node.answering(), node.watching():
            await node.clock.advance(15)
        asked.append(node.asked)

    assert [1, 0] == asked


async def test_a_scrape_and_a_measurement_of_its_own_count_once() -> None:
    """Scrapes 1 s after ours: two of each are two measurements, and the third comes after 30 s."""
    node, told = Watched(UNITS), []
    async with node.answering(), node.watching():
        await node.clock.advance(14)
        for _ in range(3):
            await node.clock.advance(1)
            told.append(node.exceeding)
            await node.clock.advance(1)
            page = await node.scrape()
            told.append(node.exceeding)
            await node.clock.advance(13)

    assert [0, 0, 0, 0, 1, 1] == told
    assert "topoalign_container_gpu_memory_exceeded{" in page, "although the scrape's own measurement did not count"


async def test_none_is_made_beside_somebody_who_scrapes_as_often() -> None:
    """A scrape 1 s before each of ours: there are as many measurements as without us, and three of them count."""
    node = Watched(UNITS)
    async with node.answering(), node.watching():
        await node.clock.advance(14)
        for _ in range(3):
            await node.scrape()
            await node.clock.advance(15)

    assert (3, 1) == (node.asked, node.exceeding)


async def test_a_driver_that_does_not_answer_is_logged_once() -> None:
    """And once when it answers again. An excess that was announced stays so, as nobody knows that it has ended."""
    node = Watched(UNITS)
    with capture_logs() as logs:
        async with node.watching():
            async with node.answering():
                await node.clock.advance(45)
                node.fault = DriverFault("the driver does not answer", "look into the kernel's log")
                await node.clock.advance(600)
            await node.clock.advance(600)
            during, node.fault, node.used = node.exceeding, None, GIB
            async with node.answering():
                await node.clock.advance(30)

    assert (1, 0) == (during, node.exceeding)
    assert [
        "a container uses more memory of a GPU than it was given",
        "cannot measure who is above its memory",
        "the use of memory is measured again",
    ] == [each["event"] for each in logs]
    assert "the driver does not answer" == logs[1]["finding"]
