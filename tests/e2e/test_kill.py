"""A node agent that is killed at any step of an allocation leaves nothing that its next life cannot put right."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from e2e_support import environment, pod

from topoalign.allocator.kubelet.standin import KubeletStandIn
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.decisions import Admission
from topoalign.core.events import AllocationGranted, LedgerFact
from topoalign.core.ids import GPU, NIC, NodeName
from topoalign.core.ports import Bus, Stream
from topoalign.core.requests import AdmissionRules, Policy
from topoalign.core.state import NodeState
from topoalign.machines import load
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

STEPS = {1_000: range(1, 61), 1: range(1, 91)}
"""By `compact_after`: more than an allocation has, so that the last agents survive it and are killed afterwards."""
TOGETHER = 8
"""Agents at a time: each mostly waits."""


class Agents:
    """Starts node agents by way of `dying.py`."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("dying.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []

    def start(self, environment: dict[str, str], arm: Path, step: int, log: Path, compact_after: int = 1_000) -> int:
        """An agent that dies before its `step`th step once `arm` exists."""
        assert self._program.stdin is not None and self._program.stdout is not None
        order = {
            "environment": environment,
            "arm": str(arm),
            "step": step,
            "log": str(log),
            "compact_after": compact_after,
        }
        self._program.stdin.write(json.dumps(order) + "\n")
        self._program.stdin.flush()
        self.pids.append(int(self._program.stdout.readline()))
        return self.pids[-1]

    def close(self) -> None:
        for pid in self.pids:
            kill(pid)
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(10)
        self._program.stdout.close()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: a unix socket's may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ta-") as name:
        yield Path(name)


@pytest.fixture
def agents() -> Iterator[Agents]:
    running = Agents()
    yield running
    running.close()


@pytest.mark.parametrize("compact_after", [1_000, 1])
async def test_an_agent_killed_at_any_step_of_an_allocation_agrees_with_the_kubelet_afterwards(
    folder: Path, agents: Agents, compact_after: int
) -> None:
    """
    For each step N: a pod is admitted while the agent dies before its Nth write, sync, rename or send. A second agent
    starts on the same state, and a second pod takes all that is left. Then the record and the kubelet agree, no device is
    in two live allocations, and the stream holds each fact once and in order. Once with a journal that is only appended
    to, and once with one that is written anew after every entry.
    """
    survived: list[int] = []
    async with local_nats(folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                life = Life(folder / str(step), NodeName(f"node-{step}"), nats, bus, agents)
                if await life.killed_while_allocating(step, compact_after):
                    survived.append(step)

        async with anyio.create_task_group() as tasks:
            for step in STEPS[compact_after]:
                tasks.start_soon(one, step)

    assert min(STEPS[compact_after]) not in survived, "the first step of an allocation kills"
    assert max(STEPS[compact_after]) in survived, "an allocation has fewer steps than are tried"


async def test_an_agent_killed_at_any_step_of_its_start_finds_everything_at_the_next(
    folder: Path, agents: Agents
) -> None:
    """Starting writes the journal anew; whatever is left of that, the allocation made before is there."""
    async with local_nats(folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                await Life(folder / str(step), NodeName(f"node-{step}"), nats, bus, agents).killed_while_starting(step)

        async with anyio.create_task_group() as tasks:
            for step in range(1, 13):
                tasks.start_soon(one, step)


class Life:
    """One node: its kubelet, which lives on, and its agents, which do not."""

    def __init__(self, folder: Path, node: NodeName, nats: str, bus: Bus, agents: Agents) -> None:
        plugins, resources = folder / "device-plugins", folder / "pod-resources"
        for directory in (plugins, resources):
            directory.mkdir(parents=True)
        self.folder, self.node, self.bus, self.agents = folder, node, bus, agents
        self.arm = folder / "arm"
        self.environment = environment(node, nats, folder)
        machine = load("dgx-a100").topology
        self.kubelet = KubeletStandIn(plugins, resources, machine, AdmissionRules(policy=Policy.BEST_EFFORT))

    def start(self, step: int = 1_000_000, compact_after: int = 1_000) -> int:
        return self.agents.start(self.environment, self.arm, step, self.folder / "agent.log", compact_after)

    async def listed(self) -> None:
        await self.kubelet.until(lambda k: k.allocatable(GPU) == 8 and k.allocatable(NIC) == 10)

    async def unlisted(self) -> None:
        await self.kubelet.until(lambda k: k.allocatable(GPU) == 0 and k.allocatable(NIC) == 0)

    async def killed_while_allocating(self, step: int, compact_after: int) -> bool:
        """Returns whether the first agent survived the allocation."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.kubelet.run)
            first = self.start(step, compact_after)
            await self.listed()
            self.arm.touch()
            admitted = isinstance(await self.kubelet.admit(pod("first", gpus=3, nics=1)), Admission)
            survived = not self.arm.with_name("arm.died").exists()
            kill(first)
            self.arm.unlink()
            await self.unlisted()

            second = self.start(compact_after=compact_after)
            await self.listed()
            rest = pod("second", gpus=5, nics=9) if admitted else pod("second", gpus=8, nics=10)
            decision = await self.kubelet.admit(rest)
            assert isinstance(decision, Admission), decision
            await self.end_in_agreement(second)
            tasks.cancel_scope.cancel()
        return survived

    async def killed_while_starting(self, step: int) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.kubelet.run)
            first = self.start()
            await self.listed()
            decision = await self.kubelet.admit(pod("first", gpus=3, nics=1))
            assert isinstance(decision, Admission), decision
            kill(first)
            await self.unlisted()

            self.arm.touch()
            second = self.start(step)
            while alive(second) and self.kubelet.allocatable(GPU) == 0:
                await anyio.lowlevel.checkpoint()
            kill(second)
            self.arm.unlink()
            await self.unlisted()

            third = self.start()
            await self.listed()
            await self.end_in_agreement(third)
            tasks.cancel_scope.cancel()

    async def end_in_agreement(self, agent: int) -> None:
        state = await agreeing(self.kubelet, self.bus, self.node)
        kill(agent)
        await self.unlisted()
        held = [device for allocation in state.allocations.values() for device in allocation.device_ids]
        assert len(set(held)) == len(held)
        await assert_said_once(self.bus, self.node, state)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def agreeing(kubelet: KubeletStandIn, bus: Bus, node: NodeName) -> NodeState:
    """Folds the node's events until they say what the kubelet says: the same devices for the same pods."""
    expected = {
        (key, resource, frozenset(devices))
        for key, running in kubelet.running.items()
        for _container, resource, devices in running.parts()
    }
    state = NodeState(node=node)
    events = Client(bus).allocations(node=node)
    with anyio.fail_after(20):
        async for heard in events:
            state = state.apply(heard.event)
            said = {
                ((a.owner.namespace, a.owner.pod) if a.owner else None, resource, frozenset(devices))
                for a in state.allocations.values()
                for resource, devices in a.devices.items()
            }
            if said == expected:
                break
    await events.aclose()
    return state


async def assert_said_once(bus: Bus, node: NodeName, state: NodeState) -> None:
    """The stream holds the facts of the node's journal from the first on, each once, in order, without a gap."""
    places: list[tuple[int, int]] = []
    granted: list[str] = []
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(node)) as messages:
        async for received in messages:
            event = wire.decode(received.message)
            assert isinstance(event, LedgerFact)
            places.append((event.epoch, event.seq))
            if isinstance(event, AllocationGranted):
                granted.append(event.allocation.id)
            if places[-1] == (state.epoch, state.seq):
                break

    assert places == sorted(set(places))
    for epoch in {epoch for epoch, _ in places}:
        numbers = [seq for each, seq in places if each == epoch]
        assert list(range(1, len(numbers) + 1)) == numbers
    assert sorted(set(granted)) == sorted(granted)
