"""A subscriber has what the node has, whatever becomes of the messages on their way."""

from random import Random

import anyio
import pytest
from fact_support import Writer
from faults_support import THOROUGH
from simulation.bus import Broker, FaultyBus, forgotten
from simulation.loop import SimulatedLoop, simulate
from simulation.scenario import quietly
from simulation.world import NODE

from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.events import LedgerFact
from topoalign.core.ports import Endpoint, Stream
from topoalign.core.state.fold import NodeState


def test_a_subscriber_in_bad_weather_ends_where_one_in_good_weather_does() -> None:
    """C34: the states are equal. A gap leads to a request for a snapshot, unless one is on its way already."""
    missed = requests = 0
    for seed in range(2_000 if THOROUGH else 40):
        stormy, sunny, gaps, asked = in_bad_weather(seed)
        missed, requests = missed + gaps, requests + asked

        assert (sunny.digest, sunny.epoch, sunny.seq) == (stormy.digest, stormy.epoch, stormy.seq), f"seed {seed}"
        assert (gaps > 0) >= (asked > 0), f"seed {seed}: a snapshot was asked for and nothing was missed"
    assert missed > 40
    assert requests > missed // 2


def in_bad_weather(seed: int) -> tuple[NodeState, NodeState, int, int]:
    """What two subscribers have in the end, how many gaps the one in bad weather met, how many snapshots were asked for."""

    async def main(loop: SimulatedLoop) -> tuple[NodeState, NodeState, int, int]:
        chance = Random(f"weather-{seed}")
        broker, calm, writer = Broker(), Broker(), Writer("node-1")
        calm.bus = broker.bus
        asked = 0

        async def snapshot(body: bytes) -> bytes:
            nonlocal asked
            asked += 1
            said = writer.snapshot()
            await broker.bus.publish(wire.encode_event(said, 0.0))
            return wire.encode_answer((said.epoch, said.seq))

        async def fold(client: Client, states: list[NodeState]) -> None:
            states.append(NodeState(node=NODE))
            async for delivery in client.allocations():
                states.append(states[-1].apply(delivery.event))

        weather = broker.weather
        weather.late, weather.repeat, weather.swap, weather.lose = 0.2, 0.3, 0.2, 0.2
        stormy, sunny = Client(FaultyBus(broker, chance)), Client(FaultyBus(calm, chance))
        one: list[NodeState] = []
        other: list[NodeState] = []
        endpoint = Endpoint(name="snapshot", subject=wire.admission_subject(NODE, "snapshot"), answer=snapshot)
        async with broker.bus.serve("topoalign-allocator", [endpoint]), anyio.create_task_group() as tasks:
            tasks.start_soon(fold, stormy, one)
            tasks.start_soon(fold, sunny, other)
            await broker.bus.publish(wire.encode_event(writer.snapshot(), 0.0))
            await anyio.sleep(1)
            for number in range(12):
                await broker.bus.publish(wire.encode_event(writer.grant(f"a{number}", f"GPU-{number}"), 0.0))
                await anyio.sleep(chance.choice((0.0, 0.3, 9.0)))
                if number % 3 == 2:
                    await broker.bus.publish(wire.encode_event(writer.release(f"a{number}"), 0.0))
            weather.clear()
            await broker.bus.publish(wire.encode_event(writer.snapshot(), 0.0))
            await anyio.sleep(60)
            tasks.cancel_scope.cancel()
        return one[-1], other[-1], stormy.counts.gaps, asked

    with quietly():
        return simulate(seed, main)


@pytest.mark.parametrize("seed", range(10))
def test_a_fact_that_comes_again_after_its_id_was_forgotten_is_heard_once(seed: int) -> None:
    """C35: the stream has stored it twice; the subscriber goes by node, epoch and seq."""

    async def main(loop: SimulatedLoop) -> tuple[list[int], int, int]:
        broker, writer = Broker(), Writer("node-1")
        client = Client(broker.bus)
        seqs: list[int] = []
        facts = [writer.snapshot(), writer.grant("a", "GPU-0"), writer.grant("b", "GPU-1"), writer.release("a")]
        messages = [wire.encode_event(fact, 0.0) for fact in facts]

        async def listen() -> None:
            async for delivery in client.allocations(since=0):
                assert isinstance(delivery.event, LedgerFact)
                seqs.append(delivery.event.seq)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listen)
            for number, message in enumerate(messages):
                await broker.bus.publish(message)
                await broker.bus.publish(forgotten(messages[number // 2], number))
                await broker.bus.publish(message)
            await anyio.sleep(5)
            tasks.cancel_scope.cancel()
        return seqs, client.counts.repeated, await broker.bus.last_position(Stream.ALLOCATIONS)

    with quietly():
        seqs, repeated, stored = simulate(seed, main)

    assert [1, 2, 3, 4] == seqs
    assert (4, 8) == (repeated, stored)
