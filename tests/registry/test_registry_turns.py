"""Long lists are shown and written with turns of the event loop in between, in which everything else goes on."""

from collections.abc import Callable, Iterator

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from view_support import allocation, announce

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, NodeName
from topoalign.core.state.fold import NodeState
from topoalign.registry import api_views, node_metrics
from topoalign.registry.api import Api
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.foreign_nodes import ForeignNodes
from topoalign.registry.node_metrics import NodeSeries, in_turns
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.request_turns import LONGEST_SECONDS
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

NODES = 50
NODES_IN_A_SLICE = 4
"""In these tests: each node takes a quarter of a slice."""


class Work:
    """Takes time, and notes how much of it was done in each turn of the loop."""

    def __init__(self) -> None:
        self.clock = WorkingClock()
        self.done = [0]

    def taking_time(self, function: Callable[[NodeState], object]) -> Callable[[NodeState], object]:
        def taken(state: NodeState) -> object:
            self.clock.pass_by(LONGEST_SECONDS / NODES_IN_A_SLICE)
            self.done[-1] += 1
            return function(state)

        return taken

    async def note_turns(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            self.done.append(0)


class WorkingClock(ManualClock):
    def pass_by(self, seconds: float) -> None:
        self._now += seconds


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    for n in range(NODES):
        announce(cluster, f"node-{n:02}", allocation("a", "train", 0))
    return cluster


async def test_the_loop_gets_a_turn_whenever_a_slice_of_time_is_spent(work: Work) -> None:
    async with background() as tasks:
        tasks.start_soon(work.note_turns)
        while len(work.done) == 1:
            await anyio.lowlevel.checkpoint()
        work.done[:] = [0]
        async for seconds in in_turns(
            [0, LONGEST_SECONDS / 2, LONGEST_SECONDS / 2, 0, 3 * LONGEST_SECONDS, 0], work.clock
        ):
            work.clock.pass_by(seconds)
            work.done[-1] += 1

    assert [3, 2, 1] == work.done


@pytest.mark.parametrize(
    ("path", "module", "function"),
    [
        ("/v1/nodes?limit=1000", api_views, "summarize"),
        ("/v1/allocations?limit=1000", api_views, "ailing"),
        ("/metrics", node_metrics, "gpu_state_lines"),
        ("/metrics", node_metrics, "allocation_lines"),
    ],
)
async def test_no_answer_about_many_nodes_takes_more_than_a_slice_at_once(
    work: Work, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, path: str, module: object, function: str
) -> None:
    """Of nodes that nobody has looked at yet."""
    monkeypatch.setattr(module, function, work.taking_time(getattr(module, function)))
    transport = httpx.ASGITransport(
        Starlette(routes=[Api(cluster, work.clock, MemoryBus(), ForeignNodes(work.clock)).mount()])
    )
    async with background() as tasks, httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        tasks.start_soon(work.note_turns)
        while len(work.done) == 1:
            await anyio.lowlevel.checkpoint()
        if path == "/metrics":
            async for _ in NodeSeries(cluster, work.clock, per_allocation=True).write():
                pass
        else:
            await http.get(path)

    assert NODES_IN_A_SLICE == max(work.done)
    assert NODES == sum(work.done)


@pytest.mark.parametrize("query", ["namespace=missing", "pod=missing"])
async def test_a_search_that_finds_nothing_takes_no_more_than_a_slice_at_once(
    work: Work, cluster: Cluster, query: str
) -> None:
    """A node that is forgotten while the search is under way is left out."""

    class Slow(dict[AllocationID, Allocation]):
        def __iter__(self) -> Iterator[AllocationID]:
            work.clock.pass_by(LONGEST_SECONDS / NODES_IN_A_SLICE)
            work.done[-1] += 1
            cluster.forget(NodeName("node-49"))
            return super().__iter__()

    for member in cluster:
        member.state = NodeState(node=member.state.node, allocations=Slow(member.state.allocations))
    api = Api(cluster, work.clock, MemoryBus(), ForeignNodes(work.clock))
    transport = httpx.ASGITransport(Starlette(routes=[api.mount()]))
    async with background() as tasks, httpx.AsyncClient(transport=transport, base_url="http://registry") as http:
        tasks.start_soon(work.note_turns)
        while len(work.done) == 1:
            await anyio.lowlevel.checkpoint()
        answer = await http.get(f"/v1/allocations?{query}")

    assert {"items": [], "continue": None} == answer.json()
    assert NODES_IN_A_SLICE == max(work.done)
    assert NODES - 1 == sum(work.done)
