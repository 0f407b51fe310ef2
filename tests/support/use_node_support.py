"""An allocator whose GPUs are used, and a discovery that says what it is told to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from use_support import GIB, MACHINE, NODE, SHARED, UIDS, held, in_pod, measurement, on_host, owner, process, use

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import Allocation, TopologyDiscovered
from topoalign.core.model.processes import Measurement
from topoalign.core.model.requests import UseRequest
from topoalign.core.ports import Endpoint
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

TRAIN, INFER = owner("train"), owner("infer", 'a"b\n')
ALLOCATIONS = (
    held(1, "GPU-0", of=TRAIN, uid=UIDS[0]),
    held(2, "GPU-1::0", of=INFER, uid=UIDS[1], resource=SHARED),
    held(3, "MIG-1", of=TRAIN, uid=UIDS[0]),
    held(4, "GPU-1::1", of=None, resource=SHARED),
)
MEASURED = measurement(
    use(
        "GPU-0",
        process(1, 12 * GIB, in_pod(UIDS[0]), 60),
        process(2, GIB, on_host(), 0),
        used=14 * GIB,
        utilization=61,
        memory_utilization=17,
    ),
    use("GPU-1", process(3, 2 * GIB, in_pod(UIDS[1], 'a"b\n'), 5), used=2 * GIB),
    use("GPU-2", used=3 * GIB),
    use("MIG-0"),
    use("MIG-1", process(4, 3 * GIB, in_pod(UIDS[0]))),
)


class Node:
    """An allocator's ledger, and a discovery that says what it is told to."""

    def __init__(self, *allocations: Allocation) -> None:
        self.bus, self.measured = MemoryBus(), MEASURED
        self.fault: DriverFault | None = None
        self.asked = 0
        self.ledger = Ledger(NODE, MemoryJournal(), ManualClock())
        self.ledger.take_reading(
            TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="boot", source="nvml", topology=MACHINE)
        )
        self.ledger.grant(allocations)

    async def answer(self, request: UseRequest) -> Measurement:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        return self.measured

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        endpoint = Endpoint(name="use", subject=wire.use_subject(NODE), answer=answer_with(UseRequest, self.answer))
        async with self.bus.serve("topoalign-discovery", [endpoint]):
            yield
