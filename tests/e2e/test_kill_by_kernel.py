"""An agent that the kernel kills at a sync, a rename or a send of an allocation: seen from outside, with nothing patched."""

from pathlib import Path

import anyio
import pytest
from batch_support import Batch
from faults_support import sample
from kill_support import Agents, Life
from strace_support import needs_strace

from topoalign.core.model.ids import NodeName
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), needs_strace]

CALLS = {"fsync": range(1, 25), "rename,renameat,renameat2": range(1, 11), "sendto,sendmsg": range(1, 81)}
"""For each, up to which of them: more than an allocation or a batch has."""


@pytest.mark.parametrize(
    ("asked", "calls"), [*((Life, calls) for calls in CALLS), (Batch, "fsync"), (Batch, "sendto,sendmsg")]
)
async def test_an_agent_killed_at_the_nth_call_of_an_allocation_recovers(
    short_folder: Path, agents: Agents, asked: type[Life], calls: str
) -> None:
    """An agent killed at the nth system call of an allocation, or of a batch, agrees with the kubelet afterwards."""
    survived: dict[int, bool] = {}
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(4)

        async def one(nth: int) -> None:
            async with turn:
                life = asked(short_folder / str(nth), NodeName(f"node-{nth}"), nats, bus, agents)
                survived[nth] = await life.killed_by_kernel(calls, nth)

        async with anyio.create_task_group() as tasks:
            for nth in sample(CALLS[calls], 3):
                tasks.start_soon(one, nth)

    assert not survived[1], "the first one kills"
    assert survived[max(CALLS[calls])], "an allocation has fewer than are tried"
