"""What is said first after a start of the allocator, while the stream has what was said before it."""

import pytest
from device_allocations_support import NODE, Node, owner

from topoalign.allocator.hardware_watch import HardwareWatch
from topoalign.allocator.reconciliation.usage_publisher import FIRST_SECONDS, HELD_SECONDS, UsagePublisher
from topoalign.allocator.service import WriterPositions
from topoalign.core import wire
from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.events import ContainerUsage, UsageObserved
from topoalign.core.model.kubelet import KubeletObserved
from topoalign.core.model.requests import AdmissionRules, AliveRequest
from topoalign.core.ports import Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio
FORMER = UsageObserved(node=NODE, epoch=1, revision=7, containers=(ContainerUsage(owner=owner("a"), cpus="0-3"),))
READ = KubeletObserved(rules=to_kubelet_rules(AdmissionRules()))


class AskedBus(MemoryBus):
    """Tells what it keeps; the teller may not be able to ask it for a while."""

    mute = False

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        if self.mute:
            raise BusUnavailable("away")
        return await super().last_position(stream, subject)

    async def said(self) -> list[UsageObserved]:
        found = []
        async with self.follow(Stream.NODES, wire.subject(FORMER)) as messages:
            for _ in range(await super().last_position(Stream.NODES)):
                event = wire.decode_event((await anext(messages)).message)
                assert isinstance(event, UsageObserved)
                found.append(event)
        return found


async def started(bus: AskedBus, *, former: bool = True) -> tuple[Node, UsagePublisher]:
    """A node that has read its kubelet's files and has not received PodResources."""
    it = Node()
    if former:
        await bus.publish(wire.encode_event(FORMER, it.clock.wall()))
    it.ledger.observe(kubelet=READ)
    return it, UsagePublisher(it.ledger, bus, it.clock, bus)


async def test_the_first_reading_waits_for_podresources() -> None:
    """Listeners that do not know `containers_known` never hear that nobody holds anything."""
    bus = AskedBus()
    it, printer = await started(bus)
    async with background() as tasks:
        tasks.start_soon(printer.run)
        await it.clock.advance(FIRST_SECONDS - 1)
        before, had_said = await bus.said(), printer.has_published
        await it.device_allocations.reconcile()
        await it.clock.advance(HELD_SECONDS)
        after = await bus.said()

    assert ([FORMER], False) == (before, had_said)
    assert [FORMER, it.ledger.state.usage] == after
    assert (True, READ) == (after[1].containers_known, after[1].kubelet)


async def test_a_kubelet_that_is_away_delays_the_first_reading_a_minute() -> None:
    """Then its rules are said, and what follows is said at once."""
    bus = AskedBus()
    it, printer = await started(bus)
    async with background() as tasks:
        tasks.start_soon(printer.run)
        await it.clock.advance(FIRST_SECONDS)
        first = await bus.said()
        it.ledger.observe(kubelet=KubeletObserved(rules=READ.rules, version="v1.36.3"))
        await it.clock.advance(0)
        second = await bus.said()

    assert [True, False] == [each.containers_known for each in first]
    assert 3 == len(second)


async def test_the_first_reading_of_a_new_node_does_not_wait() -> None:
    """Nothing of it is in the stream, so nothing is said over. A bus that cannot be asked is asked again."""
    bus = AskedBus()
    bus.mute = True
    it, printer = await started(bus, former=False)
    async with background() as tasks:
        tasks.start_soon(printer.run)
        await it.clock.advance(10)
        mute = await bus.said()
        bus.mute = False
        await it.clock.advance(HELD_SECONDS)
        asked = await bus.said()

    assert ([], [it.ledger.state.usage]) == (mute, asked)


async def test_the_allocator_stands_by_what_it_has_said() -> None:
    """What waits nobody can have heard, and nobody is to ask for it anew."""
    bus = AskedBus()
    it, printer = await started(bus)
    standings = WriterPositions(it.ledger, HardwareWatch(it.ledger, bus, it.clock), printer)
    async with background() as tasks:
        tasks.start_soon(printer.run)
        await it.clock.advance(HELD_SECONDS)
        before = (await standings.alive(AliveRequest(node=NODE))).readings
        await it.device_allocations.reconcile()
        await it.clock.advance(HELD_SECONDS)
        after = (await standings.alive(AliveRequest(node=NODE))).readings

    usage = it.ledger.state.usage
    assert usage is not None
    assert (None, (usage.epoch, usage.revision)) == (before.get("usage"), after.get("usage"))
