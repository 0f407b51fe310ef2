"""What is done about a view that is not what its writer stands by."""

import pytest

from topoalign.client.node_folds import Counts, Delivery, Fold
from topoalign.client.verifying import Known, Verifier, listed_while_open
from topoalign.core import wire
from topoalign.core.model.events import TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import WriterPosition
from topoalign.core.model.topology.model import Topology
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio
NODE = NodeName("n")


def topology(revision: int) -> Delivery:
    event = TopologyDiscovered(node=NODE, epoch=1, revision=revision, boot_id="b", source="test", topology=Topology())
    return Delivery(event=event, position=revision, time=None)


class Services(MemoryBus):
    """Whose discovery and allocator stand by the topology of this revision."""

    def __init__(self, revision: int) -> None:
        super().__init__()
        self.revision = revision
        self.asked: list[str] = []

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        self.asked.append(subject)
        readings = {"topology": (1, self.revision)}
        return wire.encode_answer(
            WriterPosition(readings=readings) if subject == wire.admission_subject(NODE, "alive") else readings
        )


async def ignore(fold: Fold) -> None:
    """Asks nobody."""


async def test_a_reading_that_stays_behind_its_writer_is_asked_for() -> None:
    """At the first question it may be on its way; one that has moved on since may be, too."""
    bus = Services(2)
    known = Known()
    counts = Counts()
    verifier = Verifier(bus, ManualClock(), counts, ignore)
    announcements: list[int] = []
    async with listed_while_open(verifier.known, known):
        for had in (1, 1, 2, 2, 3, 3):
            bus.revision = max(2, had + had % 2)
            known[NODE, "topology"] = topology(had)
            await verifier.verify(NODE, 1.0)
            announcements.append(bus.asked.count(wire.discovery_subject(NODE, "announce")))

    assert [0, 1, 1, 1, 1, 2] == announcements
    assert 2 == counts.differences["topology"]
