"""Whoever may publish can invent names of nodes: how many of them a client keeps anything of."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest
from fact_support import Writer
from structlog.testing import capture_logs

from topoalign.client import Client, superseded
from topoalign.client.healing import ASK_AGAIN_SECONDS
from topoalign.client.superseded import KeptNodes, newest_snapshots
from topoalign.core import wire
from topoalign.core.model.events import DeviceHealthChanged, LedgerEvent
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import WriterPosition
from topoalign.core.ports import Endpoint, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import TaskTurns
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
REAL, MOST = NodeName("node-1"), 10
INVENTED = [f"invented-{number}" for number in range(10 * MOST)]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superseded, "MOST_UNKNOWN_NODES", MOST)


def test_the_stranger_is_forgotten_that_was_silent_for_longest() -> None:
    forgotten = list[NodeName]()
    kept = KeptNodes(forgotten.append)
    names = [NodeName(f"n{number}") for number in range(MOST + 2)]
    for name in (*names[:MOST], names[0], *names[MOST:]):
        kept.note(name)

    assert (names[1:3], 2) == (forgotten, kept.dropped)


def test_a_node_that_has_answered_is_kept_until_it_is_doubted() -> None:
    """A stranger that answers makes room for another one."""
    forgotten = list[NodeName]()
    kept = KeptNodes(forgotten.append)
    for name in (REAL, *map(NodeName, INVENTED[:MOST])):
        kept.note(name)
        if name == REAL:
            kept.confirm(name)
    before = list(forgotten)
    kept.unconfirm(REAL)
    kept.forget(REAL)

    assert ([], [NodeName(INVENTED[0]), REAL]) == (before, forgotten)


def test_that_there_are_too_many_is_logged_once() -> None:
    kept = KeptNodes()
    with capture_logs() as logs:
        for name in INVENTED:
            kept.note(NodeName(name))

    assert (1, len(INVENTED) - MOST) == (len(logs), kept.dropped)


class World:
    """A client that reads all there is, and a node whose allocator answers."""

    def __init__(self) -> None:
        self.bus, self.clock, self.writer = MemoryBus(), ManualClock(), Writer(REAL)
        self.client = Client(self.bus, self.clock)
        self.asked = 0

    async def say(self, *facts: LedgerEvent) -> None:
        for fact in facts:
            await self.bus.publish(wire.encode_event(fact, 1.0))

    async def health(self, node: str, revision: int = 1) -> None:
        said = DeviceHealthChanged(node=NodeName(node), epoch=1, revision=revision, devices={})
        await self.bus.publish(wire.encode_event(said, 1.0))

    async def stands_by(self, body: bytes) -> bytes:
        state = self.writer.state
        return wire.encode_answer(
            WriterPosition(epoch=state.epoch, seq=state.seq, digest=state.digest, readings={"health": (1, 1)})
        )

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        endpoint = Endpoint(name="alive", subject=wire.admission_subject(REAL, "alive"), answer=self.stands_by)

        async def read(kind: str) -> None:
            async with aclosing(self.client.nodes() if kind == "nodes" else self.client.allocations()) as events:
                async for _ in events:
                    pass

        async with self.bus.serve("topoalign-allocator", [endpoint]), background() as tasks:
            tasks.start_soon(read, "nodes")
            tasks.start_soon(read, "allocations")
            await all_tasks_blocked()
            yield

    def sizes(self) -> dict[str, int]:
        """Of all that is kept by names of nodes."""
        verifier, (fold,), (known,) = self.client._verifier, self.client._verifier.folds, self.client._verifier.known
        return {
            "nodes": len(fold._nodes),
            "broken": len(fold.broken),
            "behind": len(fold.behind),
            "duplicate_agents": len(fold.duplicate_agents),
            "readings": len(known),
            "asked": len(self.client._healer._asked),
            "verified": len(verifier._behind) + len(verifier._conflicts) + len(verifier._questions),
        }


async def test_of_invented_nodes_a_client_keeps_few_whatever_they_say() -> None:
    """Facts with a gap before them, of two epochs, and readings that differ; the real node stays as it is."""
    world = World()
    await world.say(world.writer.snapshot())
    await world.health(REAL)
    async with world.reading():
        await world.client.verify(REAL)
        for name in INVENTED:
            old, new = Writer(name, epoch=1), Writer(name, epoch=2)
            old.snapshot()
            await world.say(
                new.snapshot(), old.grant("a", "GPU-0"), msgspec.structs.replace(new.grant("b", "G"), seq=9)
            )
            await world.health(name)
            await world.health(name, 2)
        await all_tasks_blocked()
        await world.clock.advance(ASK_AGAIN_SECONDS)
        sizes = world.sizes()
        await world.client.verify(REAL)
        fold = world.client._verifier.folds[0]

        assert [] == [name for name, size in sizes.items() if size > MOST + 1], sizes
        assert {"broken": MOST, "duplicate_agents": MOST, "asked": MOST}.items() <= sizes.items()
        assert (world.writer.state.seq, False) == (fold.of(REAL).state.seq, REAL in fold.broken)


async def test_invented_nodes_of_the_past_are_not_kept_either() -> None:
    """Nor while the newest snapshots are looked for, before the past is read."""
    world = World()
    for name in INVENTED:
        await world.say(Writer(name).snapshot())
    async with world.bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(None, "snapshot")) as messages:
        newest = await newest_snapshots(messages, len(INVENTED), 1.0, TaskTurns(world.clock))
    delivery = []
    async with aclosing(world.client.allocations(superseded=False)) as events:
        for _ in range(MOST):
            delivery.append((await anext(events)).event.node)

    assert sorted(INVENTED[-MOST:]) == delivery == sorted(newest)


async def test_a_node_that_was_forgotten_is_heard_again() -> None:
    """What it says next is a gap, as after a lost message, and its allocator is asked."""
    world = World()
    await world.say(world.writer.snapshot())
    async with world.reading():
        for name in INVENTED:
            await world.say(Writer(name).snapshot())
        await all_tasks_blocked()
        (fold,) = world.client._verifier.folds
        forgotten = REAL not in fold
        await world.say(world.writer.grant("a", "GPU-0"))
        await all_tasks_blocked()
        broken = REAL in fold.broken
        await world.say(world.writer.snapshot())
        await all_tasks_blocked()

        assert (True, True) == (forgotten, broken)
        assert (["a"], False) == ([*fold.of(REAL).state.allocations], REAL in fold.broken)
