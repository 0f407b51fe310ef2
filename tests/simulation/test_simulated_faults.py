"""Single faults, each caused on purpose and looked at for what must happen then."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import pytest
from faults_support import THOROUGH
from simulation.deeds import only
from simulation.fault_deeds import DAY, LOST
from simulation.loop import SimulatedLoop, simulate
from simulation.node import Parts
from simulation.outcome import Outcome
from simulation.scenario import Scenario, quietly, run

from topoalign.core.model.errors import DeviceUnusable, TopoalignError
from topoalign.core.model.events import AllocationReleased
from topoalign.core.model.ids import GPU, DeviceID

T = TypeVar("T")
SEEDS = range(3_000 if THOROUGH else 40)
PODS = ("a pod comes", "two pods come", "a pod goes", "a pod is replaced", "somebody asks", "two ask at once")


def runs(*deeds: str) -> list[Outcome]:
    """The seeds' runs in which only pods and these deeds happen; each must hold all invariants and converge."""
    outcomes = [run(seed, deeds=only(*PODS, *deeds)) for seed in SEEDS]
    broken = [outcome.report() for outcome in outcomes if outcome.violation is not None]
    assert [] == broken
    return outcomes


def times(outcomes: list[Outcome], deed: str) -> int:
    """How often it was done."""
    return sum(what == "step" and details[1] == deed for o in outcomes for _, _, what, *details in o.trace)


def test_a_registry_rebuilt_while_two_ask_gives_no_device_twice() -> None:
    """C14: a registry that is rebuilt while two ask for the same devices gives none twice."""
    outcomes = runs("the registry is rebuilt", "two Allocates race")

    assert times(outcomes, "the registry is rebuilt") > len(SEEDS) // 4
    assert times(outcomes, "two Allocates race") + times(outcomes, "two ask at once") > len(SEEDS) // 4


def test_a_wall_clock_that_jumps_by_a_day_ends_no_allocation() -> None:
    """
    C29: a wall clock that jumps by a day either way ends no allocation and repeats no number. The invariants hold, and
    what is released belongs to a pod that went.
    """
    outcomes = runs("the clock jumps", "the allocator dies", "the kubelet restarts")

    assert times(outcomes, "the clock jumps") > len(SEEDS) // 4


def test_the_bus_may_deliver_late_repeatedly_in_any_order_or_never() -> None:
    """
    C34: the bus may deliver late, twice, again, in another order or not at all. In the end the registry's fold has the
    digest of the node's.
    """
    outcomes = runs("bad weather", "the bus is away", "the registry is rebuilt")

    assert times(outcomes, "bad weather") > len(SEEDS) // 4


def on_a_node(seed: int, play: Callable[[Scenario], Coroutine[Any, Any, T]], by_kubelet: bool = True) -> T:
    """Plays this on the first node from this seed on that a kubelet has, or none has, once it has discovered its devices."""

    async def main(loop: SimulatedLoop) -> T | None:
        scenario = Scenario(seed, loop, Parts())
        if (scenario.kubelet is not None) != by_kubelet:
            return None
        scenario.world.slowness = 0.0
        results: list[T] = []

        async def begin(deeds: object) -> None:
            async with anyio.create_task_group() as scenario.tasks:
                scenario.start_agent()
                scenario.start_hub()
                if not scenario.world.one_process:
                    scenario.start_discovery()
                if scenario.kubelet is not None:
                    scenario.start_kubelet()
                await anyio.sleep(2)
                results.append(await play(scenario))
                scenario.tasks.cancel_scope.cancel()

        scenario.live = begin  # type: ignore[method-assign]  # what happens is this test's
        await scenario.run(())
        return results[0]

    with quietly():
        result = simulate(seed, main)
    return result if result is not None else on_a_node(seed + 1, play, by_kubelet)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("seconds", [DAY, -DAY])
def test_a_jump_of_the_clock_is_no_time_that_passed(seed: int, seconds: float) -> None:
    """
    C29: a container that is missing from the kubelet's list for a moment during the jump is not released, facts that
    follow are later by their order although not by their time, and a start afterwards begins a later epoch.
    """

    async def play(scenario: Scenario) -> tuple[list[AllocationReleased], list[tuple[int, int]]]:
        assert scenario.kubelet is not None
        only("two pods come")[0].do(scenario)
        await anyio.sleep(20)
        assert scenario.kubelet.admitted
        scenario.kubelet.hidden = set(scenario.kubelet.admitted)
        await anyio.sleep(3)
        scenario.world.clock.offset += seconds
        await anyio.sleep(1)
        scenario.kubelet.hidden.clear()
        await anyio.sleep(60)
        scenario.world.kill(scenario.agent.process)
        await anyio.sleep(20)
        only("two pods come")[0].do(scenario)
        await anyio.sleep(5)
        history = scenario.world.disk.history
        return (
            [fact for fact in history if isinstance(fact, AllocationReleased)],
            [(fact.epoch, fact.seq) for fact in history],
        )

    released, places = on_a_node(seed * 10, play)

    assert [] == released
    assert sorted(set(places)) == places
    assert 2 == len({epoch for epoch, _ in places})


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("failed", [True, False])
def test_a_process_stopped_for_a_minute_checks_device_status_first(seed: int, failed: bool) -> None:
    """
    C30: a process that was stopped for a minute asks for the device status before it gives a device. What it believed
    was confirmed a minute ago. A GPU that failed meanwhile is not given, and a healthy one is.
    """

    async def play(scenario: Scenario) -> list[str]:
        agent, results = scenario.agent, []

        async def ask(device: DeviceID) -> None:
            try:
                await agent.allocate(GPU, [device])
                results.append(f"{device} given")
            except DeviceUnusable:
                results.append(f"{device} refused")

        await anyio.sleep(15)
        scenario.loop.pause(agent.process)
        if failed:
            scenario.world.judge(DeviceID("GPU-0"), LOST)
        await anyio.sleep(60)
        scenario.soon(ask, DeviceID("GPU-0"))
        await anyio.sleep(0.5)
        scenario.loop.carry_on(agent.process)
        await anyio.sleep(5)
        await ask(DeviceID("GPU-3"))
        return results

    assert [f"GPU-0 {'refused' if failed else 'given'}", "GPU-3 given"] == on_a_node(seed * 10, play)


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_from_before_a_stop_of_the_process_decides_nothing(seed: int) -> None:
    """
    C30: an answer from before a stop of the process decides nothing. The kubelet's list from before the pause shows
    that nobody holds the device; meanwhile somebody does.
    """

    async def play(scenario: Scenario) -> str:
        agent, kubelet = scenario.agent, scenario.kubelet
        assert kubelet is not None
        only("a pod comes")[0].do(scenario)
        await anyio.sleep(20)
        key = sorted(kubelet.entries)[0]
        uid, device = key[0], sorted(kubelet.entries[key])[0]
        others = [d for d in kubelet.healthy[key[2]] if d not in kubelet.entries[key]]
        kubelet.hidden = {uid}
        results: list[str] = []

        async def ask() -> None:
            try:
                await agent.allocate(key[2], [device, *others[:1]])
                results.append("given")
            except TopoalignError as error:
                results.append(error.code)

        scenario.world.slowness, scenario.world.faults = 1.0, Always(0.4)  # type: ignore[assignment]  # every answer is late
        scenario.soon(ask)
        await anyio.sleep(0.6)  # PodResources was asked, and has answered; the answer is on its way
        scenario.loop.pause(agent.process)
        kubelet.hidden.clear()
        await anyio.sleep(60)
        scenario.loop.carry_on(agent.process)
        await anyio.sleep(10)
        return results[0]

    assert "DeviceInUse" == on_a_node(seed * 10, play)


class Always:
    """Chance without chance: everything happens that may, and takes this long."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def random(self) -> float:
        return 0.9  # below a slowness of 1, above every other likelihood: late, and the list as it was at the call

    def choice(self, options: object) -> float:
        return self._seconds
