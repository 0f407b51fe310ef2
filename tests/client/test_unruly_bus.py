"""Whatever a broker does to the order and number of messages, who listens ends where the node is."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from fact_support import Writer
from faults_support import THOROUGH
from outage_support import Listener

from topoalign.core import wire
from topoalign.core.model.events import AllocationsSnapshot, LedgerFact
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Bus, Endpoint, Message
from topoalign.core.state.fold import NodeState, replay
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.replies import answer_with

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600 if THOROUGH else 300)]

NODE = NodeName("gpu-7.example.com")
SEEDS = 5_000 if THOROUGH else 60
FACTS = 40


class Unruly:
    """Hands messages on to a bus late, twice or not at all, and under new ids, so that the bus takes each for a new one."""

    def __init__(self, bus: Bus, seed: int) -> None:
        self.bus, self.chance = bus, random.Random(seed)
        self.held: list[Message] = []
        self.lost = 0
        self._sent = 0

    async def take(self, message: Message) -> None:
        fate = self.chance.random()
        if fate < 0.1:
            self.lost += 1
        else:
            self.held += [message] * (2 if fate < 0.25 else 1)
        while self.held and self.chance.random() < 0.7:
            await self.hand_on(self.held.pop(self.chance.randrange(len(self.held))))

    async def calm(self) -> None:
        """Hands on what is held, in any order."""
        self.chance.shuffle(self.held)
        while self.held:
            await self.hand_on(self.held.pop())

    async def hand_on(self, message: Message) -> None:
        self._sent += 1
        fresh = {**message.headers, "Nats-Msg-Id": f"fresh.{self._sent}"}
        await self.bus.publish(Message(subject=message.subject, headers=fresh, body=message.body))


def story(seed: int) -> Writer:
    """A node's facts: a snapshot, then devices that come and go."""
    chance, writer = random.Random(-seed - 1), Writer(NODE)
    writer.snapshot()
    for number in range(FACTS):
        live = sorted(writer.state.allocations)
        match chance.choice(("grant", "bind", "release", "snapshot") if live else ("grant",)):
            case "grant":
                writer.grant(str(number), f"GPU-{number}")
            case "bind":
                writer.bind(chance.choice(live), f"pod-{number}")
            case "release":
                writer.release(chance.choice(live))
            case _:
                writer.snapshot()
    return writer


@asynccontextmanager
async def announcing(bus: Bus, writer: Writer) -> AsyncIterator[list[int]]:
    """The allocator's answer to whoever misses something; yields the numbers of the snapshots that were asked for."""
    asked: list[int] = []

    async def announce(request: NodeRequest) -> tuple[int, int]:
        snapshot = writer.snapshot()
        assert isinstance(snapshot, AllocationsSnapshot)
        asked.append(snapshot.seq)
        await bus.publish(wire.encode_event(snapshot, 0))
        return snapshot.epoch, snapshot.seq

    endpoint = Endpoint(
        name="snapshot", subject=wire.admission_subject(NODE, "snapshot"), answer=answer_with(NodeRequest, announce)
    )
    async with bus.serve("topoalign-allocator", [endpoint]):
        yield asked


async def test_lost_doubled_and_reordered_messages_give_the_same_state() -> None:
    """
    C34: of each seed's forty facts one in ten is lost, one in seven comes twice, and any may be late. What the listener was
    told is folded as it came; at the end its state is that of the node, and for each gap that it saw it asked the node.
    """
    healed = 0
    for seed in range(SEEDS):
        bus, writer = MemoryBus(), story(seed)
        unruly, listener = Unruly(bus, seed), Listener(bus)
        listener.state = NodeState(node=NODE)
        async with announcing(bus, writer) as asked, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.listen)
            for fact in tuple(writer.said):
                await unruly.take(wire.encode_event(fact, 0))
                if unruly.chance.random() < 0.2:
                    await anyio.lowlevel.checkpoint()
            await unruly.calm()
            last = (
                writer.release(next(iter(writer.state.allocations))) if writer.state.allocations else writer.snapshot()
            )
            await bus.publish(wire.encode_event(last, 0))
            await until(listener, writer)
            tasks.cancel_scope.cancel()

        told = [one.event for one in listener.told]
        numbers = [event.seq for event in told if isinstance(event, LedgerFact)]
        assert writer.state.digest == listener.state.digest == replay(NODE, told).digest, seed
        assert sorted(set(numbers)) == numbers, seed
        assert bool(asked) == bool(listener.client.counts.gaps), seed
        healed += bool(asked)
    assert healed > SEEDS / 2


async def until(listener: Listener, writer: Writer) -> None:
    with anyio.fail_after(20):
        while (listener.state.seq, listener.state.digest) != (writer.state.seq, writer.state.digest):
            await anyio.lowlevel.checkpoint()
