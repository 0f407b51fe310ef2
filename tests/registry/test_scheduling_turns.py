"""A request that amounts do not decide takes long on thousands of nodes: it is judged with turns of the event loop."""

from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

import anyio
import pytest
from decision_support import container, machine, pod
from view_support import RULES, SETTLED, Says, asked, tell_all

from topoalign.core.admission import feasibility
from topoalign.core.model.ids import NodeName
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state import view
from topoalign.registry.scheduling.cluster_state.view import ClusterView, NodeView
from topoalign.registry.scheduling.filter import admission_order, scheduler
from topoalign.registry.scheduling.filter.decision_cache import DecisionCache, PodClass
from topoalign.registry.scheduling.filter.scheduler import Scheduler
from topoalign.registry.scheduling.scheduling_api import Victims
from topoalign.runtime.request_turns import LONGEST_SECONDS
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

NODES = tuple(NodeName(f"node-{number:02}") for number in range(20))
NODES_IN_A_TURN = 4
"""In these tests: each node takes a quarter of a turn."""
POD = asked(pod(container("main", gpus=3), container("other", gpus=1)))


class WorkingClock(ManualClock):
    def pass_by(self, seconds: float) -> None:
        self._now += seconds


class Large:
    """A cluster of which each node takes time, and what is judged in each turn of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = WorkingClock()
        self.cluster = Cluster(usage=True)
        self.view = ClusterView(self.cluster, lambda: SETTLED, self.clock)
        self.scheduler = Scheduler(self.view)
        self.says = {name: Says(name, machine(gpus=(0, 0, 1, 1)), RULES) for name in NODES}
        for each in self.says.values():
            tell_all(self.cluster, each.all())
        self.turns: list[list[str]] = [[]]
        self.between: Callable[[], None] = lambda: None
        """Called between two turns."""
        judge = DecisionCache.judge

        def judging(verdicts: DecisionCache, request: PodClass, node: NodeView) -> str:
            self.clock.pass_by(LONGEST_SECONDS / NODES_IN_A_TURN)
            self.turns[-1].append(node.name)
            return judge(verdicts, request, node)

        monkeypatch.setattr(DecisionCache, "judge", judging)

    def note(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        """Each call of this function of a module takes the time of a node, too."""
        function = getattr(module, name)

        def noted(*args: Any) -> Any:
            self.clock.pass_by(LONGEST_SECONDS / NODES_IN_A_TURN)
            self.turns[-1].append("")
            return function(*args)

        monkeypatch.setattr(module, name, noted)

    async def note_turns(self) -> None:
        while True:
            await anyio.lowlevel.checkpoint()
            self.turns.append([])
            self.between()

    async def prepare(self) -> None:
        async with background() as tasks:
            tasks.start_soon(self.note_turns)
            await anyio.lowlevel.checkpoint()
            await self.scheduler.prepare(POD)
        self.turns.append([])

    @property
    def judged(self) -> list[str]:
        return [name for turn in self.turns for name in turn]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Large:
    return Large(monkeypatch)


async def test_a_long_filter_gives_turns_and_finds_all_done(large: Large) -> None:
    await large.prepare()
    longest, judged = max(map(len, large.turns)), sorted(large.judged)
    passed = large.scheduler.filter(POD, NODES).passed

    assert (NODES_IN_A_TURN, sorted(NODES)) == (longest, judged)
    assert ([], NODES) == (large.turns[-1], tuple(passed))


async def test_a_pod_of_many_containers_is_understood_with_turns(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """T07: what 100 containers need of a kind of machine took 100 ms at once."""
    large.note(monkeypatch, feasibility, "_need_of_part")
    many = asked(pod(*(container(f"c{number}", gpus=1) for number in range(40))))
    async with background() as tasks:
        tasks.start_soon(large.note_turns)
        await anyio.lowlevel.checkpoint()
        await large.scheduler.prepare(many)
    parts = [turn.count("") for turn in large.turns]

    assert (40, NODES_IN_A_TURN) == (sum(parts), max(parts))
    assert () == tuple(large.scheduler.filter(many, NODES).passed)


@pytest.mark.parametrize("question", ["prepare", "best", "preempt", "fits_in_every_order"])
async def test_nodes_that_changed_at_once_are_renewed_with_turns(
    large: Large, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    """A few are left, which is no long work; and those that change in the turns do not count as a few."""
    monkeypatch.setattr(view, "FEW", 1)
    changes = iter(NODES)
    renew = ClusterView._renew

    def renewing(self: ClusterView, node: NodeName) -> None:
        large.clock.pass_by(LONGEST_SECONDS / NODES_IN_A_TURN)
        large.turns[-1].append(f"renewed {node}")
        renew(self, node)

    def between() -> None:
        for node in (next(changes, None), next(changes, None)):
            if node is not None:
                large.view.mark(node)

    monkeypatch.setattr(ClusterView, "_renew", renewing)
    large.between = between
    questions: dict[str, Callable[[], Awaitable[object]]] = {
        "prepare": lambda: large.scheduler.prepare(POD),
        "best": lambda: large.scheduler.best(POD),
        "preempt": lambda: large.scheduler.preempt(POD, {}),
        "fits_in_every_order": lambda: large.scheduler.fits_in_every_order(NODES[0], POD),
    }
    async with background() as tasks:
        tasks.start_soon(large.note_turns)
        await anyio.lowlevel.checkpoint()
        await questions[question]()
    large.turns.append([])
    large.scheduler.filter(POD, NODES)
    renewed = [sum(each.startswith("renewed") for each in turn) for turn in large.turns]

    assert sum(renewed) > len(NODES)
    assert (NODES_IN_A_TURN, True) == (max(renewed), renewed[-1] <= 1)


async def test_what_a_gang_is_planned_on_gives_turns_too(large: Large) -> None:
    """A bind may be the first call about a pod that a registry gets."""
    async with background() as tasks:
        tasks.start_soon(large.note_turns)
        await anyio.lowlevel.checkpoint()
        best = await large.scheduler.best(POD)

    assert NODES_IN_A_TURN == max(map(len, large.turns))
    assert sorted(NODES) == sorted(best)


async def test_a_preemption_of_many_nodes_gives_turns(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is gone in a turn is left out, and ends nothing."""
    large.note(monkeypatch, scheduler, "decide_code")

    def between() -> None:
        if len(large.judged) == NODES_IN_A_TURN:
            large.cluster.forget(NODES[-1])

    large.between = between
    async with background() as tasks:
        tasks.start_soon(large.note_turns)
        await anyio.lowlevel.checkpoint()
        helped = await large.scheduler.preempt(POD, {name: Victims(uids=("a",)) for name in NODES})

    assert NODES_IN_A_TURN == max(map(len, large.turns))
    assert NODES[:-1] == tuple(helped)


async def test_pods_that_are_tried_in_every_order_give_turns(large: Large, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pods of which no two are alike: 64 decisions."""
    large.note(monkeypatch, admission_order, "decide_demand")
    for cpus in (1, 2, 3):
        large.view.expect(NODES[0], asked(pod(container("main", gpus=1, cpus=cpus), name=f"p{cpus}"), f"p{cpus}"))
    async with background() as tasks:
        tasks.start_soon(large.note_turns)
        await anyio.lowlevel.checkpoint()
        refusal = await large.scheduler.fits_in_every_order(NODES[0], asked(pod(container("main", gpus=1))))

    assert ("", 64) == (refusal, len(large.judged))
    assert NODES_IN_A_TURN == max(map(len, large.turns))


async def test_a_filter_that_was_given_up_is_gone_on_with(large: Large) -> None:
    """The scheduler gives up after 5 s, and tries again."""
    with anyio.CancelScope() as scope:
        large.between = lambda: scope.cancel() if len(large.judged) >= 8 else None
        await large.prepare()
    begun = len(large.judged)
    large.between = lambda: None
    await large.prepare()

    assert 8 <= begun < len(NODES)
    assert sorted(NODES) == sorted(large.judged)


@pytest.mark.parametrize("calls", [0, 1])
async def test_nodes_that_change_and_go_in_a_long_filter_are_right(large: Large, calls: int) -> None:
    """One judged before changes, one is forgotten; and another call may have all judged at once meanwhile."""
    first = large.says[NODES[0]]

    def change() -> None:
        tell_all(large.cluster, first.admit(pod(container("main", gpus=2)), "a"))
        large.cluster.forget(NODES[-1])
        large.view.renew()
        for _ in range(calls):
            large.scheduler.filter(POD, NODES)

    steps = [change]

    def between() -> None:
        if steps and len(large.judged) >= NODES_IN_A_TURN:
            steps.pop()()

    large.between = between
    await large.prepare()
    filtered = large.scheduler.filter(POD, NODES)

    assert [] == steps
    assert NODES[-1] not in large.judged
    assert NODES[1:-1] == tuple(filtered.passed)
    assert "UnknownNode" == filtered.refused[NODES[-1]].code
