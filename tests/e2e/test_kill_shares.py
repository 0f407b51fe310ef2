"""What a node agent leaves that is killed at any step of a share of a GPU, the next one puts right."""

from pathlib import Path

import anyio
import pytest
from faults_support import THOROUGH
from kill_support import TOGETHER, Agents
from pair_support import Pair, Step
from share_support import NAMES, OTHER_ORDER

from topoalign.core.model.ids import NodeName, ResourceName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(7200 if THOROUGH else 600)]

ALLOCATE = ("allocate", "write journal", "fsync journal done", "allocate done")
START = ("pre_start_container", "pre_start_container done")
PAIR = [
    *(Step(call, half) for half in (1, 2) for call in ALLOCATE),
    *(Step(call, 3) for call in ("write journal", "fsync journal done")),
    *(Step(call, half) for half in (1, 2) for call in START),
]
"""
Of either half: its Allocate has come, is about to be in the journal, is there, is about to be answered; then the owners are
about to be in the journal, and are there; and PreStartContainer of either half has come, and is about to be answered.
"""
CHAIN = 10
"""Agents that die one after the other on a node, where every step is tried."""


def pair_chains() -> list[tuple[tuple[ResourceName, ResourceName], bool, list[Step]]]:
    """Names of the two resources, whether the first pod has a reservation (then every second has), and where agents die."""
    if not THOROUGH:
        return [(NAMES, True, PAIR[1::3]), (OTHER_ORDER, False, PAIR[2::3])]
    every = [PAIR, *([Step("", nth) for nth in range(at, at + CHAIN)] for at in range(1, 161, CHAIN))]
    return [
        (names, is_reserved, steps)
        for steps in every
        for names in (NAMES, OTHER_ORDER)
        for is_reserved in (True, False)
    ]


async def test_an_agent_killed_at_any_step_of_a_pair_recovers(short_folder: Path, agents: Agents) -> None:
    """
    A container asks for units of computing time and memory, in either order, with and without a reservation, and limited by
    vcuda. After each death the next agent starts what the kubelet has admitted, and gives everything else to other pods.
    """
    survived: list[Step] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def run(
            number: int, names: tuple[ResourceName, ResourceName], is_reserved: bool, steps: list[Step]
        ) -> None:
            async with turn, anyio.create_task_group() as tasks:
                node = NodeName(f"node-{number}")
                life = Pair(short_folder / str(number), node, nats, bus, agents, names)
                await tasks.start(life.kubelet.run)
                await life.begin()
                former = ""
                for place, step in enumerate(steps):
                    name = f"pod-{place}"
                    if await life.die(name, step, is_reserved=is_reserved == (place % 2 == 0), former=former):
                        survived.append(step)
                    former = name
                await life.finish(former)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for number, chain in enumerate(pair_chains()):
                tasks.start_soon(run, number, *chain)

    assert [] == [step for step in survived if step.call or step.nth == 1]
