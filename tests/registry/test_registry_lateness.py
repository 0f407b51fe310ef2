"""A registry that stood still shows no node as stale; a node that is silent is shown as stale in time."""

from itertools import count, pairwise

import anyio
import pytest
from device_allocations_support import ShiftingClock
from prometheus_client import CollectorRegistry

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.events import AllocationsSnapshot
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import WriterPosition
from topoalign.core.ports import Stream
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.service import ASKED_AT_ONCE, PAUSE, TRIES, Registry
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import LONGEST_SECONDS
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio

SETTINGS = RegistrySettings()
WITHIN = SETTINGS.registry_answer_seconds
NODES = tuple(NodeName(f"node-{n:02}") for n in range(2 * ASKED_AT_ONCE))
SILENT = NODES[ASKED_AT_ONCE + 3]


class Allocators(MemoryBus):
    """
    All answer at once but the silent one. Each time that the registry stands still, the answers to all questions that are
    under way come too late.
    """

    def __init__(self, clock: ShiftingClock) -> None:
        super().__init__()
        self._clock = clock
        self.asked: list[str] = []
        self.stands_still: list[float] = []
        """Seconds for which the registry stands still at the next questions, as soon as the last of a group is asked."""
        self._still = anyio.Event()

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        self.asked.append(subject)
        if self.stands_still:
            if len(self.asked) % ASKED_AT_ONCE == 0:
                self._clock.stop(self.stands_still.pop(0))
                still, self._still = self._still, anyio.Event()
                still.set()
            else:
                await self._still.wait()
            raise BusUnavailable("no answer in time")
        if subject == wire.admission_subject(SILENT, "alive"):
            await self._clock.sleep(within)
            raise BusUnavailable("no answer in time")
        await anyio.lowlevel.checkpoint()
        return wire.encode_answer(WriterPosition())


class World:
    def __init__(self) -> None:
        self.clock = ShiftingClock()
        self.bus, self.cluster = Allocators(self.clock), Cluster()
        client = Client(self.bus, self.clock, "registry")
        metrics = RegistryMetrics(CollectorRegistry(), client)
        self.registry = Registry(self.bus, self.clock, client, self.cluster, metrics, SETTINGS)

    async def announce(self) -> None:
        for node in NODES:
            snapshot = AllocationsSnapshot(node=node, epoch=1, seq=1, allocations=(), digest="")
            await self.bus.publish(wire.encode_event(snapshot, 1_700_000_000.0))

    def stale(self) -> list[NodeName]:
        return [member.state.node for member in self.cluster if not member.answering]


@pytest.mark.parametrize("stands_still", [4.3, WITHIN, 60.0])
async def test_no_node_is_stale_because_the_registry_stood_still(stands_still: float) -> None:
    """It stands still with a group of questions under way, and asks those again."""
    world = World()
    await world.announce()
    world.bus.stands_still = [stands_still]
    async with background() as tasks:
        await tasks.start(lambda *, task_status: world.registry.run(task_status=task_status))
        await world.clock.advance(PAUSE)
        soon = world.stale()
        await world.clock.advance(TRIES * WITHIN)

        assert [SILENT] == soon
        assert [SILENT] == world.stale()
        assert {2} == {world.bus.asked.count(wire.admission_subject(node, "alive")) for node in NODES[:ASKED_AT_ONCE]}


async def test_a_node_that_falls_silent_is_stale_after_two_time_outs() -> None:
    world = World()
    await world.announce()
    async with background() as tasks:
        await tasks.start(lambda *, task_status: world.registry.run(task_status=task_status))
        await world.clock.advance(PAUSE)
        world.cluster.answers(SILENT, True)
        await world.clock.advance(TRIES * WITHIN - 0.01)
        before = world.stale()
        await world.clock.advance(0.01)

        assert ([], [SILENT]) == (before, world.stale())
        assert TRIES == world.bus.asked.count(wire.admission_subject(SILENT, "alive"))


async def test_a_round_of_questions_that_fail_at_once_gives_others_their_turns() -> None:
    """As while there is no connection to the bus: none of the questions waits for anything."""
    world = World()
    await world.announce()
    rounds: list[int] = []
    turns = count()

    async def refuse(subject: str, body: bytes, within: float) -> bytes:
        if not rounds:
            tasks.start_soon(run)
        world.clock.stop(LONGEST_SECONDS)
        rounds.append(next(turns))
        raise BusUnavailable("not connected")

    async def away(stream: Stream, subject: str = ">") -> int:
        raise BusUnavailable("not connected")

    async def run() -> None:
        for _ in range(1000):
            next(turns)
            await anyio.lowlevel.checkpoint()

    async with background() as tasks:
        await tasks.start(lambda *, task_status: world.registry.run(task_status=task_status))
        await all_tasks_blocked()
        world.bus.ask = refuse  # type: ignore[method-assign]  # as where there is no connection
        world.bus.last_position = away  # type: ignore[method-assign]  # the same
        await world.clock.advance(PAUSE)

    assert any(later - earlier > 1 for earlier, later in pairwise(rounds))
