"""
One run of a cluster: 3 to 12 nodes, two registries, a scheduler, and pods, in the same virtual time.

    deeds drawn by the seed, each begun before the one before it has ended  ->  every invariant after each
    -> all faults end  ->  within `CALM_SECONDS` all views agree, and what fits is bound

Product code are the registries, from the bus and the API server's watch to the answers of the extender, and the allocators
of the nodes (`cluster_nodes`). Simulated are the kubelets, the API server, kube-scheduler
(`topoalign.testing.fake_scheduler`), and the network between all of them. Work that gives the event loop turns takes some
milliseconds from one to the next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch

import anyio
import anyio.lowlevel
from simulation.cluster_checks import ClusterChecks
from simulation.cluster_deeds import AWAY_SECONDS, CLUSTER_DEEDS
from simulation.cluster_nodes import Node, hardware_facts
from simulation.cluster_plants import planted
from simulation.cluster_pods import COUNTED, NAMESPACE, Pods
from simulation.cluster_registries import Registry, Service
from simulation.cluster_world import SETTLES_SECONDS, ClusterWorld
from simulation.kubelets import Kubelets
from simulation.loop import Process, SimulatedLoop, simulate
from simulation.outcome import Outcome
from simulation.scenario import first, quietly
from simulation.scheduled_cluster import CYCLE_SECONDS
from simulation.world import Violation

from topoalign.core import wire
from topoalign.core.model.ids import NodeName
from topoalign.registry.scheduling.cluster_state import view
from topoalign.runtime.request_turns import TaskTurns
from topoalign.testing.fake_scheduler.preemption import Preemption
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler

STEPS = (40, 60)
NODES = (3, 3, 3, 4, 4, 5, 6, 7, 9, 12)
POLICIES = ("none", "none", "best-effort", "restricted", "single-numa-node")
PASSING = (0.0, 0.02, 0.3, 1.0, 2.0, 4.0, 8.0)
"""Seconds between two steps, one of these."""
READY_SECONDS = 60.0
"""For all to be ready at first."""
TURN_SECONDS = (0.0005, 0.005)
"""For one of these, by the seed, long work runs between two turns that it gives to others."""
CALM_SECONDS, POLL_SECONDS = 700.0, 5.0
T = TypeVar("T", Registry, Node)


class ClusterScenario:
    """The run of one seed."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.world = world = ClusterWorld(seed, loop)
        self.loop = loop
        self.step = 0
        policies = POLICIES if world.division == "whole" else ("none",)
        names = [NodeName(f"node-{number}") for number in range(world.chance.choice(NODES))]
        self.nodes = {name: Node(world, name, world.chance.choice(policies)) for name in names}
        self.registries = [Registry(world, name) for name in ("r1", "r2")]
        self.kubelets = Kubelets(loop, world.api, world.bus, world.chance, self.nodes)
        self.pods = Pods(world, self.kubelets.seconds.__setitem__)
        self.service = Service(world, self.registries)
        self.checks = ClusterChecks(world, self.nodes, self.registries, self.pods, self._set_quota(), self.service)
        self.troubled: set[str] = set()
        """Processes that are dead, stopped or cut off."""
        self._preemptions: list[Preemption] = []
        loop.set_exception_handler(self._unhandled)

    def _set_quota(self) -> int:
        """The limit of the namespace's quota; 0: it has none."""
        world = self.world
        if world.division not in COUNTED or world.chance.random() < 0.5:
            return 0
        limit = 50 * len(self.nodes) * len(world.hardware.gpus)
        hard = {f"limits.{COUNTED[world.division]}": str(limit)}
        world.api.quotas.create((NAMESPACE, "gpus"), {"spec": {"hard": hard}})
        return limit

    async def run(self) -> None:
        """Raises Violation, in a group."""
        world = self.world
        world.note("cluster", len(self.nodes), world.division, world.compat, world.rate, self.checks.limit)
        for node in self.nodes.values():
            self._register(node)
            for fact in hardware_facts(node):
                await world.bus.publish(wire.encode_event(fact, world.clock.wall()))
        try:
            async with anyio.create_task_group() as self.world.tasks:
                world.tasks.start_soon(self.kubelets.follow_pods, world.tasks)
                world.tasks.start_soon(self.checks.follow_reservations)
                with anyio.fail_after(READY_SECONDS):
                    while not all(each.is_ready for each in self.registries):  # noqa: ASYNC110  # virtual time costs nothing
                        await anyio.sleep(0.1)
                self.start_scheduler()
                await self._live()
                await self._calm()
                world.tasks.cancel_scope.cancel()
        finally:
            for process in self._processes():
                self.loop.kill(process)
            await anyio.lowlevel.checkpoint()

    def _register(self, node: Node) -> None:
        """The API server has the node, with what its device plugin and the kubelet report."""
        api, hardware = self.world.api, self.world.hardware
        api.add_node(node.name)
        allocatable = {resource: str(len(devices)) for resource, devices in hardware.devices.items()}
        api.nodes.merge(("", node.name), {"status": {"allocatable": allocatable}})

    async def _live(self) -> None:
        chance = self.world.chance
        weights = [deed.weight for deed in CLUSTER_DEEDS]
        for self.step in range(chance.randint(*STEPS)):
            deed = chance.choices(CLUSTER_DEEDS, weights)[0]
            self.world.note("step", self.step, deed.name)
            deed.do(self)
            await anyio.sleep(chance.choice(PASSING))
            self.checks.after_step(self._new_preemptions())
        self.step += 1

    async def _calm(self) -> None:
        """The faults are over."""
        self.world.note("calm")
        self.world.clear()
        difference: tuple[str, str] | None = None
        for _ in range(int(CALM_SECONDS / POLL_SECONDS)):
            await anyio.sleep(POLL_SECONDS)
            self.checks.after_step(self._new_preemptions())
            difference = ("K7", f"{self.troubled} are not back") if self.troubled else self.checks.difference()
            if difference is None:
                self.world.note("converged")
                return
        assert difference is not None
        raise Violation(*difference)

    def _new_preemptions(self) -> list[Preemption]:
        found, self._preemptions = [*self._preemptions, *self.scheduler.preemptions], []
        self.scheduler.preemptions.clear()
        return found

    # the processes

    def _processes(self) -> list[Process]:
        others = [each.process for each in self.nodes.values()]
        return [*(each.process for each in self.registries), *others, self.scheduler_process]

    def start_scheduler(self) -> None:
        world = self.world
        self.scheduler_process = Process("scheduler")
        self.scheduler = FakeScheduler(
            world.api, self.service, world.clock, seed=world.seed, cycle_seconds=CYCLE_SECONDS
        )
        world.network("scheduler")
        world.start(self.scheduler_process, self.scheduler.run)

    def restart_scheduler(self) -> None:
        self._preemptions += self.scheduler.preemptions
        self.loop.kill(self.scheduler_process)
        self.start_scheduler()

    def untroubled(self, those: Sequence[T]) -> T | None:
        """One of those to which nothing happens now; None: there is none."""
        found = [each for each in those if each.name not in self.troubled]
        return self.world.chance.choice(found) if found else None

    def kill(self, one: Registry | Node | None) -> None:
        if one is not None:
            self.loop.kill(one.process)
            self._trouble(one, "killed", one.start)

    def stop(self, one: Registry | Node | None) -> None:
        if one is not None:
            process = one.process
            self.loop.pause(process)
            self._trouble(one, "stopped", lambda: self.loop.carry_on(process))

    def cut_from_bus(self, one: Registry | Node | None, seconds: float | None = None) -> None:
        if one is not None:
            weather = self.world.network(one.name).broker.weather
            weather.away = True
            self._trouble(one, "without bus", lambda: setattr(weather, "away", False), seconds)

    def cut_from_api(self, one: Registry | None) -> None:
        if one is not None:
            network = self.world.network(one.name)
            network.api_is_away = True
            self._trouble(one, "without API server", lambda: setattr(network, "api_is_away", False))

    def _trouble(self, one: Registry | Node, what: str, end: Callable[[], None], seconds: float | None = None) -> None:
        """Something happens to a process, and ends after a while."""
        world, name = self.world, one.name
        seconds = world.chance.choice(AWAY_SECONDS) if seconds is None else seconds
        world.note(what, name, seconds)
        self.troubled.add(name)
        world.begin_outage()

        def end_trouble() -> None:
            world.note("back", name)
            end()
            self.troubled.discard(name)
            self.later(SETTLES_SECONDS, world.end_outage)

        self.later(seconds, end_trouble)

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        async def wait() -> None:
            await anyio.sleep(seconds)
            do()

        self.world.tasks.start_soon(wait)

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        if "asyncgen" not in context:  # a generator of a process that was killed
            what = context.get("exception") or context.get("message")
            self.world.violate("K0", f"nobody handled {what!r}")


def run_cluster(seed: int, plant: str | None = None) -> Outcome:
    """The same seed gives the same outcome, to the byte. `plant`: the name of a planted defect."""

    async def main(loop: SimulatedLoop) -> Outcome:
        scenario = ClusterScenario(seed, loop)
        violation = None
        try:
            await scenario.run()
        except* Violation as violations:
            violation = first(violations)
        return Outcome(seed, scenario.world.trace, scenario.step, violation, of_cluster=True)

    turns = giving_turns(Random(f"turns-{seed}").choice(TURN_SECONDS))
    with quietly(), turns, keeping_what_is_computed(), planted(plant):
        return simulate(seed, main)


@contextmanager
def giving_turns(seconds: float) -> Iterator[None]:
    """Long work of a registry takes time while the context is open, and others go on meanwhile."""

    async def give(self: TaskTurns) -> None:
        await anyio.sleep(seconds)

    had = TaskTurns.give
    TaskTurns.give = give  # type: ignore[method-assign]  # for the time of the run
    try:
        yield
    finally:
        TaskTurns.give = had  # type: ignore[method-assign]  # as it was


@contextmanager
def keeping_what_is_computed() -> Iterator[None]:
    """
    A registry keeps what it has computed of a node's hardware and allocations while the context is open. It is the same each
    time; a registry computes it anew because of the memory that thousands of nodes would take.
    """
    with patch.object(view, "bare", lambda state: state):
        yield
