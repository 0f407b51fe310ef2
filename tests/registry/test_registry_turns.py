"""Long lists are shown in parts, and everything else goes on in between."""

import anyio
import httpx
import pytest
from cluster_support import allocation, announce
from starlette.applications import Starlette

from topoalign.core.state.fold import NodeState
from topoalign.registry import views
from topoalign.registry.api import ROWS_AT_ONCE, Api
from topoalign.registry.cluster import Cluster
from topoalign.registry.turns import AT_ONCE, in_turns
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio


async def test_the_loop_gets_a_turn_after_each_part() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await anyio.lowlevel.checkpoint()
            turns += 1

    async with background() as tasks:
        tasks.start_soon(count_turns)
        await anyio.lowlevel.checkpoint()
        parts, seen = [], []
        async for part in in_turns(range(7), 3):
            parts.append(list(part))
            seen.append(turns)

    assert [[0, 1, 2], [3, 4, 5], [6]] == parts
    assert sorted(set(seen)) == seen


async def test_no_answer_counts_more_than_a_few_nodes_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of nodes, and a page of allocations; in both cases of nodes that nobody has looked at yet."""
    cluster, counts = Cluster(), [0]
    for n in range(2 * ROWS_AT_ONCE):
        announce(cluster, f"node-{n:03}", allocation("a", "train", 0))

    def noting(function: object) -> object:
        def noted(state: NodeState) -> object:
            counts[-1] += 1
            return function(state)  # type: ignore[operator]

        return noted

    async def note_turns() -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            counts.append(0)

    monkeypatch.setattr(views, "counted", noting(views.counted))
    monkeypatch.setattr(views, "ailing", noting(views.ailing))
    transport = httpx.ASGITransport(Starlette(routes=[Api(cluster).mount()]))
    async with background() as tasks, httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        tasks.start_soon(note_turns)
        while len(counts) == 1:
            await anyio.lowlevel.checkpoint()
        await http.get("/v1/nodes?limit=1000")
        nodes, counts[:] = list(counts), [0]
        await http.get("/v1/allocations?limit=1000")

    assert (AT_ONCE, 2 * ROWS_AT_ONCE) == (max(nodes), sum(nodes))
    assert (ROWS_AT_ONCE, 2 * ROWS_AT_ONCE) == (max(counts), sum(counts))
