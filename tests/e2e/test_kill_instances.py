"""What a node agent leaves that is killed at any step of a MIG instance, the next one puts right."""

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from faults_support import THOROUGH
from instance_life_support import InstanceLife, Step
from kill_support import TOGETHER, Agents

from topoalign.core.model.ids import NodeName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(7200 if THOROUGH else 600)]

COMES = [
    Step("allocate", 1),
    Step("write instances.new", 1),
    Step("nvmlDeviceCreateGpuInstanceWithPlacement", 1),
    Step("nvmlDeviceCreateGpuInstanceWithPlacement done", 1),
    Step("nvmlGpuInstanceCreateComputeInstance done", 1),
    Step("replace instances done", 2),
    Step("write journal", 1),
    Step("fsync journal done", 1),
    Step("allocate done", 1),
]
"""
Of an instance that is made: its Allocate has come; before and after the intent; after the GPU instance and its compute
instance are made, and are noted; before and after the grant; and before the answer.
"""
ENDS = [
    Step("write journal", 1, ends=True),
    Step("fsync journal done", 1, ends=True),
    Step("nvmlComputeInstanceDestroy", 1, ends=True),
    Step("nvmlGpuInstanceDestroy", 1, ends=True),
    Step("nvmlGpuInstanceDestroy done", 1, ends=True),
    Step("replace instances done", 1, ends=True),
]
"""
Of one whose pod ends: before and after its record ends, before the compute instance is destroyed, between that and the GPU
instance, after it, and after the note has gone.
"""
CHAIN = 10
"""Agents that die one after the other on a node, where every step is tried."""
UNNAMED = ((False, 120), (True, 60))
"""Steps of any name that are tried of an instance that is made, and of one that is destroyed: more than there are."""


def chains() -> Sequence[Sequence[Step]]:
    """Where agents die, node by node."""
    if not THOROUGH:
        return [[COMES[3], ENDS[4], COMES[7]], [COMES[2], COMES[5], ENDS[3]]]
    unnamed = [[Step("", nth, ends) for nth in range(1, count + 1)] for ends, count in UNNAMED]
    return [COMES, ENDS, *(each[at : at + CHAIN] for each in unnamed for at in range(0, len(each), CHAIN))]


async def test_an_agent_killed_at_any_step_of_an_instance_recovers(
    short_folder: Path, agents: Agents, nvml_library: Path
) -> None:
    """
    Slots become MIG instances, of a driver that lives on. After each death the next agent keeps the instance of a container
    that the kubelet has admitted, admits a pod anew that was refused, and leaves nothing else but what somebody has made by
    hand.
    """
    survived: list[Step] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def live(number: int, steps: Sequence[Step]) -> None:
            node, folder = NodeName(f"node-{number}"), short_folder / str(number)
            async with turn:
                survived.extend(await InstanceLife(folder, node, nats, bus, agents, nvml_library).live(steps))

        async with anyio.create_task_group() as tasks:
            for number, steps in enumerate(chains()):
                tasks.start_soon(live, number, steps)

    assert [] == [step for step in survived if step.call or step.nth == 1]
