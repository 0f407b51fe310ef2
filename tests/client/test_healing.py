"""When allocators of nodes with missing events are asked for snapshots: of thousands of nodes, too, that nobody knows."""

import msgspec
import pytest
from fact_support import Writer

from topoalign.client import healing
from topoalign.client.healing import ASK_AGAIN_SECONDS, MOST_ASKS, Healer
from topoalign.client.node_folds import Counts, Fold
from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


class Asked(MemoryBus):
    """Notes who is asked for a snapshot; those of `answering` promise one that does not come."""

    def __init__(self, *answering: str) -> None:
        super().__init__()
        self.nodes = list[str]()
        self.answering = answering

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        node = msgspec.json.decode(body, type=NodeRequest).node
        self.nodes.append(node)
        if node in self.answering:
            return wire.encode_answer((7, 9))
        raise BusUnavailable("nobody answers")


def break_nodes(fold: Fold, *names: str) -> None:
    """Each says a fact that does not follow what was received."""
    for name in names:
        writer = Writer(name)
        writer.snapshot()
        fold.apply(writer.grant("a", "GPU-0"))


async def test_an_allocator_that_is_silent_is_asked_ever_more_rarely() -> None:
    """Whoever is back says a snapshot unasked."""
    fold, bus, clock = Fold(Counts()), Asked(), ManualClock()
    healer, times = Healer(bus, clock), list[int]()
    break_nodes(fold, "n")
    for second in range(200):
        before = len(bus.nodes)
        await healer.heal(fold)
        times += [second] * (len(bus.nodes) - before)
        await clock.advance(1)

    assert [0, 6, 18, 42, 90, 150] == times


async def test_an_allocator_is_asked_for_as_long_as_its_node_is_broken() -> None:
    """So often within a while at most, and again after that."""
    fold = Fold(Counts())
    bus = Asked()
    clock = ManualClock()
    healer = Healer(bus, clock)
    asked: list[int] = []
    for _ in range(3):
        for _ in range(MOST_ASKS + 5):
            break_nodes(fold, "n")
            fold.mark_unconfirmed(NodeName("n"), None)
            await healer.heal(fold)
        asked.append(len(bus.nodes))
        await clock.advance(ASK_AGAIN_SECONDS)

    assert [MOST_ASKS, 2 * MOST_ASKS, 3 * MOST_ASKS] == asked


async def test_an_answer_ends_the_count_of_silence() -> None:
    """From then on the intervals grow from the first one, by the snapshots that were promised and did not come."""
    fold, bus, clock = Fold(Counts()), Asked(), ManualClock()
    healer, times = Healer(bus, clock), list[int]()
    break_nodes(fold, "n")
    for second in range(90):
        if second == 40:
            bus.answering = ("n",)
        before = len(bus.nodes)
        await healer.heal(fold)
        times += [second] * (len(bus.nodes) - before)
        await clock.advance(1)

    assert [0, 6, 18, 42, 54, 78] == times


@pytest.mark.parametrize("answering", [(), ("n",)])
async def test_a_node_that_is_forgotten_while_it_is_asked_stays_forgotten(answering: tuple[str, ...]) -> None:
    """Whether or not its allocator answers: nothing of the node is kept."""
    fold = Fold(Counts())

    class Forgetting(Asked):
        async def ask(self, subject: str, body: bytes, within: float) -> bytes:
            fold.forget(NodeName("n"))
            return await super().ask(subject, body, within)

    break_nodes(fold, "n")
    await Healer(Forgetting(*answering), ManualClock()).heal(fold)

    assert NodeName("n") not in fold
    assert {} == fold.broken


async def test_who_has_answered_is_asked_before_the_silent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that somebody has invented keep no real node waiting."""
    fold, bus, clock = Fold(Counts()), Asked("real"), ManualClock()
    healer = Healer(bus, clock)
    break_nodes(fold, "a", "b", "real", "c")
    await healer.heal(fold)
    first, bus.nodes = bus.nodes, []
    monkeypatch.setattr(healing, "MOST_DUE", 2)
    await clock.advance(700)
    await healer.heal(fold)

    assert (["a", "b", "real", "c"], ["real", "a"]) == (first, bus.nodes)


async def test_a_node_that_is_whole_by_its_turn_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "ASKED_AT_ONCE", 1)
    fold = Fold(Counts())

    class Healing(Asked):
        async def ask(self, subject: str, body: bytes, within: float) -> bytes:
            for node in ("a", "b"):
                fold.apply(Writer(node, epoch=9).snapshot())
            return await super().ask(subject, body, within)

    bus = Healing("a", "b")
    break_nodes(fold, "a", "b")
    await Healer(bus, ManualClock()).heal(fold)

    assert 1 == len(bus.nodes)


async def test_beside_thousands_of_broken_nodes_a_new_one_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not looked at for each event, and no later than when it is time."""
    fold, bus, clock = Fold(Counts()), Asked(), ManualClock()
    healer = Healer(bus, clock)
    monkeypatch.setattr(healing, "EACH_SECONDS", 10.0)
    break_nodes(fold, "a", "b")
    await healer.heal(fold)
    first, bus.nodes = bus.nodes, []
    await clock.advance(7)
    break_nodes(fold, "new")
    await healer.heal(fold)
    new, bus.nodes = bus.nodes, []
    await clock.advance(40)
    await healer.heal(fold)

    assert ([["a", "b"], ["new"]], {"a", "b", "new"}) == ([first, new], {*bus.nodes})


async def test_a_node_that_is_doubted_again_is_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fold, bus, clock = Fold(Counts()), Asked(), ManualClock()
    healer = Healer(bus, clock)
    monkeypatch.setattr(healing, "EACH_SECONDS", 1000.0)
    break_nodes(fold, "a", "b")
    await healer.heal(fold)
    bus.nodes.clear()
    fold.mark_unconfirmed(NodeName("a"), None)
    await healer.heal(fold)

    assert ["a"] == bus.nodes
