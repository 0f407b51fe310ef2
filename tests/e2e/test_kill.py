"""A node agent that is killed at any step of an allocation leaves nothing that its next life cannot put right."""

from pathlib import Path

import anyio
import pytest
from batch_support import CALLS, Batch
from faults_support import sample
from kill_support import TOGETHER, Agents, Life

from topoalign.core.model.ids import NodeName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

STEPS = {1_000: [*sample(range(1, 81), 12), 1_000], 1: [*sample(range(1, 91), 12), 1_000]}
"""
By `compact_after`. An allocation has about 55 steps, or 80 where each entry writes the journal anew, and on a loaded machine
more, because looks at the kubelet come in between. The last one is beyond all of them: that agent survives, and is killed
afterwards.
"""

BATCH_STEPS = [*sample(range(1, 21), 5), *sample(range(21, 61), 2), 1_000]
"""
A batch is recorded, answered and published in about 20 steps, and has its owners after 20 more. The last one is beyond all.
"""


@pytest.mark.parametrize("compact_after", [1_000, 1])
async def test_an_agent_killed_at_any_step_of_an_allocation_recovers(
    short_folder: Path, agents: Agents, compact_after: int
) -> None:
    """
    For each step N: a pod is admitted while the agent dies before its Nth write, sync, rename or send. A second agent
    starts on the same state, and a second pod takes all that is left. Then the record and the kubelet agree, no device is
    in two live allocations, and the stream holds each fact once and in order. Once with a journal that is only appended
    to, and once with one that is written anew after every entry.
    """
    survived: list[int] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                life = Life(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents)
                if await life.killed_while_allocating(step, compact_after):
                    survived.append(step)

        async with anyio.create_task_group() as tasks:
            for step in STEPS[compact_after]:
                tasks.start_soon(one, step)

    assert min(STEPS[compact_after]) not in survived, "the first step of an allocation kills"
    assert max(STEPS[compact_after]) in survived, "an allocation has fewer steps than are tried"


async def test_an_agent_killed_at_any_step_of_a_batch_recovers(short_folder: Path, agents: Agents) -> None:
    """
    As of an allocation; here the agent dies while it records several Allocates as one entry of the journal, answers them and
    publishes them together. The journal has all of them or none, and those that were answered.
    """
    entries: dict[int, list[int]] = {}
    survived: list[int] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                life = Batch(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents)
                if await life.killed_while_allocating(step, 1_000):
                    survived.append(step)
                entries[step] = life.entries

        async with anyio.create_task_group() as tasks:
            for step in BATCH_STEPS:
                tasks.start_soon(one, step)

    assert {} == {step: found for step, found in entries.items() if found not in ([], [CALLS])}
    assert ([], [CALLS]) == (entries[1], entries[max(BATCH_STEPS)])
    assert 1 not in survived
    assert max(BATCH_STEPS) in survived, "a batch has fewer steps than are tried"


async def test_an_agent_killed_at_any_step_of_its_start_recovers(short_folder: Path, agents: Agents) -> None:
    """Starting writes the journal anew; whatever is left of that, the allocation made before is there."""
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                await Life(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents).killed_while_starting(
                    step
                )

        async with anyio.create_task_group() as tasks:
            for step in sample(range(1, 13), 6):
                tasks.start_soon(one, step)
