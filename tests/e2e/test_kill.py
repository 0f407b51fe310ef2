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
from e2e_support import pod

from topoalign.allocator.kubelet.standin import KubeletStandIn
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.decisions import Admission
from topoalign.core.events import AllocationGranted
from topoalign.core.ids import GPU, NIC, NodeName
from topoalign.core.ports import Bus, Stream
from topoalign.core.requests import AdmissionRules, Policy
from topoalign.core.state import NodeState
from topoalign.machines import load
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

STEPS = range(1, 61)
"""More than an allocation has, so that the last agents survive it and are killed afterwards."""
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

    def start(self, environment: dict[str, str], arm: Path, step: int, log: Path) -> int:
        assert self._program.stdin is not None and self._program.stdout is not None
        order = {"environment": environment, "arm": str(arm), "step": step, "log": str(log)}
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


async def test_an_agent_killed_at_any_step_of_an_allocation_agrees_with_the_kubelet_afterwards(
    folder: Path, agents: Agents
) -> None:
    """
    For each step N: a pod is admitted while the agent dies before its Nth write, sync, rename or send. A second agent
    starts on the same state, and a second pod takes all that is left. Then the record and the kubelet agree, no device is
    in two live allocations, and the stream holds each fact once and in order.
    """
    survived: list[int] = []
    async with local_nats(folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                if await killed_at(step, folder / str(step), nats, bus, agents):
                    survived.append(step)

        async with anyio.create_task_group() as tasks:
            for step in STEPS:
                tasks.start_soon(one, step)

    assert min(STEPS) not in survived, "the first step of an allocation kills"
    assert max(STEPS) in survived, "an allocation has fewer steps than are tried"


async def killed_at(step: int, folder: Path, nats: str, bus: Bus, agents: Agents) -> bool:
    """Plays one life and the next; returns whether the first agent survived the allocation."""
    node = NodeName(f"node-{step}")
    plugins, resources, arm = folder / "device-plugins", folder / "pod-resources", folder / "arm"
    for directory in (plugins, resources):
        directory.mkdir(parents=True)
    environment = {
        "TOPOALIGN_NODE": node,
        "TOPOALIGN_NATS_URL": nats,
        "TOPOALIGN_MACHINE": "dgx-a100",
        "TOPOALIGN_STATE_DIR": str(folder / "state"),
        "TOPOALIGN_KUBELET_DIR": str(plugins),
        "TOPOALIGN_RECONCILE_SECONDS": "0.1",
    }
    machine = load("dgx-a100").topology
    kubelet = KubeletStandIn(plugins, resources, machine, AdmissionRules(policy=Policy.BEST_EFFORT))
    async with anyio.create_task_group() as tasks:
        await tasks.start(kubelet.run)
        first = agents.start(environment, arm, step, folder / "first.log")
        await kubelet.until(lambda k: k.allocatable(GPU) == 8 and k.allocatable(NIC) == 10)
        arm.touch()
        admitted = isinstance(await kubelet.admit(pod("first", gpus=3, nics=1)), Admission)
        survived = alive(first)
        kill(first)
        arm.unlink()
        await kubelet.until(lambda k: k.allocatable(GPU) == 0)

        after = agents.start(environment, arm, 1_000_000, folder / "second.log")
        await kubelet.until(lambda k: k.allocatable(GPU) == 8 and k.allocatable(NIC) == 10)
        left = 5 if admitted else 8
        second = await kubelet.admit(pod("second", gpus=left, nics=9 if admitted else 10))
        assert isinstance(second, Admission), second
        state = await agreeing(kubelet, bus, node)
        kill(after)
        await kubelet.until(lambda k: k.allocatable(GPU) == 0)
        tasks.cancel_scope.cancel()

    held = [device for allocation in state.allocations.values() for device in allocation.device_ids]
    assert len(set(held)) == len(held)
    await assert_said_once(bus, node, state)
    return survived


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
    numbers: list[int] = []
    granted: list[str] = []
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(node)) as messages:
        async for received in messages:
            event = wire.decode(received.message)
            numbers.append(getattr(event, "seq", 0))
            if isinstance(event, AllocationGranted):
                granted.append(event.allocation.id)
            if numbers[-1] >= state.seq:
                break

    assert list(range(1, state.seq + 1)) == numbers
    assert sorted(set(granted)) == sorted(granted)
