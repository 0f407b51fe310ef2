"""
One run: a node, a few steps drawn by the seed, a look at every invariant after each, and a calm end in which all must agree.

What happens is a table of deeds with weights. Some are ordinary (a pod comes, a pod goes), most are faults, and all of them
overlap: a step begins something and does not wait for it.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any

import anyio
import structlog
from anyio.abc import TaskGroup
from simulation.bus import FaultyBus
from simulation.checks import Checks
from simulation.deeds import DEEDS, Deed
from simulation.discovery import Discovery
from simulation.kubelet import Kubelet
from simulation.loop import Process, SimulatedLoop, simulate
from simulation.node import REMEMBERED, Agent, Hub, Parts
from simulation.outcome import Outcome
from simulation.refusals import sound
from simulation.world import Violation, World

from topoalign.allocator.requests import admissions

STEPS = (6, 12)
PASSING = (0.0, 0.0, 0.0, 0.003, 0.1, 0.7, 3.0, 8.0, 30.0)
"""Seconds between two steps, one of these."""
BACK_SECONDS = (0.0, 0.2, 2.0, 10.0)
"""Until a process that died is there again."""
CALM_SECONDS, POLL_SECONDS = 200.0, 5.0


class Scenario:
    """The run of one seed."""

    def __init__(self, seed: int, loop: SimulatedLoop, parts: Parts, *, shares: bool = False) -> None:
        """`shares`: some seeds have GPUs in units or in slots; these have a kubelet that admits one pod at a time."""
        self.loop = loop
        self.parts = parts
        self.world = World(seed, loop, shares=shares)
        chance, has_shares = self.world.chance, self.world.has_shares
        self.kubelet: Kubelet | None = None
        if chance.random() < 0.7 or has_shares:
            self.kubelet = Kubelet(
                calls_at_start=seed % 4 == 0,
                chance=Random(f"kubelet-{seed}"),
                clock=self.world.clock,
                serial=chance.random() < 0.5 or has_shares,
                mounted=Random(f"mounted-{seed}").random() < 0.8,
            )
        self.checks = Checks(self.world, self.kubelet)
        self.processes: list[Process] = []
        """All that were ever started."""
        self.over = False
        self.names = 0
        self.step = 0
        self.agent = Agent(self.world, self.kubelet, parts)
        self.hub = Hub(self.world, self.checks.subscriber_hears)
        self.kubelet_process = Process("kubelet")
        self.discovery_process: Process | None = None
        self.client_bus = FaultyBus(self.world.broker, self.world.faults)
        self.leaving: set[str] = set()
        """Pods whose release was asked for."""
        self.away_seconds: float | None = None
        """For so long the next agent lets wait for it; None: as chance has it."""
        self.back_at = 0.0
        """The virtual second at which it comes."""
        if self.world.driver is not None:
            self.world.driver.later = self.later
        self.tasks: TaskGroup
        loop.set_exception_handler(self._unhandled)

    async def run(self, deeds: tuple[Deed, ...]) -> None:
        """Raises Violation, in a group."""
        try:
            with self.world.limits.in_place(), self.world.book.in_place() if self.world.driver else nullcontext():
                await self.live(deeds)
        finally:
            self.over = True
            for process in self.processes:
                self.loop.kill(process)
            await asyncio.sleep(0)

    async def live(self, deeds: tuple[Deed, ...]) -> None:
        self.world.note("node", self.world.division, self.world.limiter, self.world.rules.compat)
        async with anyio.create_task_group() as self.tasks:
            self.start_agent()
            self.start_hub()
            if not self.world.one_process:
                self.start_discovery()
            if self.kubelet is not None:
                self.start_kubelet()
            await anyio.sleep(1.0)
            chance = self.world.chance
            possible = [deed for deed in deeds if deed.needs in self.abilities()]
            weights = [deed.weight for deed in possible]
            for self.step in range(chance.randint(*STEPS)):
                deed = chance.choices(possible, weights)[0]
                self.world.note("step", self.step, deed.name)
                deed.do(self)
                await self.pass_time(chance.choice(PASSING))
                self.checks.after_step(self.agent)
            self.step += 1
            await self.calm()
            self.tasks.cancel_scope.cancel()

    def abilities(self) -> set[str | None]:
        """What deeds may need, as far as this node has it."""
        world = self.world
        found = {None, "kubelet" if self.kubelet else "bus", "shares" if world.has_shares else None}
        found |= {"limits" if world.limiter != "none" else None}
        return found | {"instances" if world.driver is not None else None}

    async def pass_time(self, seconds: float) -> None:
        if seconds:
            await anyio.sleep(seconds)
        else:
            for _ in range(self.world.chance.randint(1, 6)):
                await anyio.lowlevel.checkpoint()

    async def calm(self) -> None:
        """The faults are over. Within `CALM_SECONDS` everybody must see the same."""
        world = self.world
        world.note("calm")
        world.broker.weather.clear()
        world.disk_refusals = world.disk_kills = 0.0
        self.agent.journal.refusals = self.agent.journal.kills = 0.0
        if world.limiter != "none":
            world.limits.put_right()
        if world.driver is not None:
            world.driver.put_right()
            world.book.put_right()
            await anyio.sleep(max(0.0, self.back_at - self.loop.time()))
        for process in (self.agent.process, self.hub.process, self.kubelet_process):
            self.loop.carry_on(process)
        if self.kubelet is not None:
            self.kubelet.readable = True
            self.kubelet.hidden.clear()
            if not self.kubelet.up:
                self.restart_kubelet()
        missing: str | None = "nothing was looked at"
        for look in range(int(CALM_SECONDS / POLL_SECONDS)):
            await anyio.sleep(POLL_SECONDS)
            if look % 4 == 1 and world.broker.weather.lost:  # the next fact shows a reader that it missed one
                if self.agent.ledger is not None and not self.agent.process.dead:
                    self.agent.ledger.announce()
                world.change_hardware()
            if self.kubelet is not None:
                self.kubelet.collect()
            self.checks.after_step(self.agent)
            missing = self.checks.converged(self.agent, self.hub)
            if missing is None:
                world.note("converged")
                return
        raise Violation("I10", missing or "")

    # the processes

    def start(self, process: Process, main: Callable[[], Any]) -> None:
        self.processes.append(process)
        self.loop.start(process, main)
        assert process.root is not None
        process.root.add_done_callback(lambda task: self._ended(process, task))

    def _ended(self, process: Process, task: Any) -> None:
        if not process.dead and not task.cancelled() and task.exception() is not None:
            self.world.violate(Violation("I8", f"{process.name} ended: {task.exception()!r}"))

    def start_agent(self) -> None:
        self.agent = Agent(self.world, self.kubelet, self.parts)
        self.agent.process.ended.append(self.revive_agent)
        self.start(self.agent.process, self.agent.run)

    def revive_agent(self) -> None:
        if self.over:
            return
        seconds, self.away_seconds = self.away_seconds, None
        if seconds is None:
            self.later(self.world.chance.choice(BACK_SECONDS), self.start_agent)
            return

        def come_back() -> None:
            self.checks.agent_was_away()
            self.start_agent()

        self.back_at = self.loop.time() + seconds
        self.later(seconds, come_back)

    def start_hub(self) -> None:
        self.hub = Hub(self.world, self.checks.subscriber_hears)
        self.start(self.hub.process, self.hub.run)

    def start_discovery(self) -> None:
        process = self.discovery_process = Process("discovery")
        bus = FaultyBus(self.world.broker, self.world.faults, lambda: process.dead)
        self.world.is_discovery_up = True
        process.ended.append(lambda: setattr(self.world, "is_discovery_up", False))
        self.start(process, Discovery(self.world, bus, bus).run)

    def start_kubelet(self) -> None:
        process = self.kubelet_process = Process("kubelet")

        async def live() -> None:
            assert self.kubelet is not None
            await anyio.sleep(self.world.faults.choice((0.0, 0.1, 0.9)))
            self.agent.offer()
            for uid in [uid for uid in self.kubelet.wanted if uid not in self.kubelet.admitted]:
                self.admit(uid)
            for uid in sorted(self.kubelet.admitted & self.kubelet.starts_in_turn.at.keys()):
                self.admit(uid)
            await anyio.sleep_forever()

        self.start(process, live)

    def restart_kubelet(self) -> None:
        assert self.kubelet is not None
        self.world.kill(self.kubelet_process)
        uids = sorted(self.kubelet.admitted)
        hidden = {uid for uid in uids if self.world.chance.random() < 0.5}
        self.kubelet.restart(hidden)
        self.start_kubelet()
        self.later(self.world.chance.choice((0.5, 6.0, 12.0)), self.kubelet.hidden.clear)

    def stop_kubelet(self) -> None:
        assert self.kubelet is not None
        self.world.kill(self.kubelet_process)
        self.kubelet.up = False

    def admit(self, uid: str) -> None:
        """Within the kubelet's process: if that dies, so does this."""
        kubelet, process = self.kubelet, self.kubelet_process
        assert kubelet is not None

        async def admitting() -> None:
            runs = await kubelet.admit(uid)
            self.world.note("admitted" if runs else "not admitted", uid)
            while kubelet.refusals:
                sound(self, kubelet.refusals.pop())

        task = self.loop.create_in(process, admitting)
        process.ended.append(lambda: cancel(task))
        task.add_done_callback(lambda done: self._ended(process, done))

    # small things

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        if self.over:  # what processes leave behind as they are killed in the end
            return

        async def wait() -> None:
            await anyio.sleep(seconds)
            do()

        self.tasks.start_soon(wait)

    def soon(self, do: Callable[..., Coroutine[Any, Any, None]], *details: Any) -> None:
        self.tasks.start_soon(do, *details)

    def next_name(self) -> str:
        self.names += 1
        return f"pod-{self.names}"

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        if "asyncgen" in context:
            return  # of a process that was killed: asyncio ends its generators, which nobody does for a real one
        self.world.violate(Violation("I8", f"nobody handled {context.get('exception') or context.get('message')!r}"))


def run(seed: int, parts: Parts | None = None, deeds: tuple[Deed, ...] = DEEDS) -> Outcome:
    """The same seed gives the same outcome, to the byte. Some have shares of GPUs, where all deeds may happen."""

    async def main(loop: SimulatedLoop) -> Outcome:
        scenario = Scenario(seed, loop, parts or Parts(), shares=deeds is DEEDS)
        violation = None
        try:
            await scenario.run(deeds)
        except* Violation as violations:
            violation = first(violations)
        return Outcome(seed, scenario.world.trace, scenario.step, violation)

    with quietly(), remembering(REMEMBERED):
        return simulate(seed, main)


@contextmanager
def remembering(decisions: int) -> Iterator[None]:
    """The allocator keeps so few for `explain`."""
    had, admissions.REMEMBERED = admissions.REMEMBERED, decisions
    try:
        yield
    finally:
        admissions.REMEMBERED = had


@contextmanager
def quietly() -> Iterator[None]:
    """What the product logs is not looked at, and costs time."""
    had = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), cache_logger_on_first_use=False
    )
    try:
        yield
    finally:
        structlog.configure(**had)


def cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()


def first(group: BaseExceptionGroup[Violation]) -> Violation:
    for error in group.exceptions:
        return first(error) if isinstance(error, BaseExceptionGroup) else error
    raise ValueError("an empty group")
