"""Node agents that die and start again, beside a kubelet that lives on; and what must hold afterwards."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import anyio
from e2e_support import environment

from topoalign.allocator.ledger import journal_format
from topoalign.client import Client
from topoalign.core import wire
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import AllocationGranted, AllocationsSnapshot, LedgerFact
from topoalign.core.model.ids import GPU, NIC, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, PodRequest, Policy
from topoalign.core.ports import Bus, Stream
from topoalign.core.state.fold import NodeState, replay
from topoalign.machines import load_machine
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

TOGETHER = 8
"""Agents at a time: each mostly waits."""
IS_BUSY = "no answer within"
"""In a refusal: this process, as the kubelet that it plays, has not told in time what runs."""


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

    def start(self, order: Mapping[str, object]) -> int:
        """The process id of an agent that is started by this order, as `dying.py` reads it."""
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(json.dumps(order) + "\n")
        self._program.stdin.flush()
        self.pids.append(int(self._program.stdout.readline()))
        return self.pids[-1]

    def close(self) -> None:
        for pid in self.pids:
            kill(pid)
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(60)
        self._program.stdout.close()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Life:
    """One node: its kubelet, which lives on, and its agents, which do not."""

    def __init__(self, folder: Path, node: NodeName, nats: str, bus: Bus, agents: Agents) -> None:
        self.folder, self.node, self.bus, self.agents = folder, node, bus, agents
        self.arm = folder / "arm"
        self.environment = environment(node, nats, folder)
        machine = load_machine("dgx-a100").topology
        rules = AdmissionRules(policy=Policy.BEST_EFFORT)
        self.kubelet = FakeKubelet(folder / "device-plugins", folder / "pod-resources", machine, rules)
        self.offered: Mapping[ResourceName, int] = {GPU: 8, NIC: 10}
        """Resource -> how many devices of it the kubelet hears of."""

    def start(self, step: int = 1_000_000, compact_after: int = 1_000, call: str = "") -> int:
        """An agent that dies before its `step`th step, or its `step`th of this name, once `arm` exists."""
        order = {
            "environment": self.environment,
            "arm": str(self.arm),
            "step": step,
            "call": call,
            "log": str(self.folder / "agent.log"),
            "compact_after": compact_after,
        }
        return self.agents.start(order)

    async def listed(self) -> None:
        await self.kubelet.until(lambda k: all(k.allocatable(each) == count for each, count in self.offered.items()))

    async def unlisted(self) -> None:
        """
        Waits until the kubelet has received the end of all streams of the agent that was killed: one received later ends the
        plugin that has the name by then.
        """
        await self.kubelet.until(lambda k: k.plugins.streams == 0)
        assert [] == [each for each in self.offered if self.kubelet.allocatable(each)]

    async def until_said(self, agent: int, allocated: bool) -> None:
        """Waits until the bus has all, or the agent has died; it is about to if not all is `allocated`."""
        with anyio.fail_after(60):
            while alive(agent) and not (allocated and self.all_said()):
                await anyio.lowlevel.checkpoint()

    def all_said(self) -> bool:
        """Whether the bus has all that is in the journal, the owners of all allocations included."""
        state = on_disk(self.folder / "state" / "journal", self.node)
        owners = [allocation.owner for allocation in state.allocations.values()]
        return (state.epoch, state.seq) == self.marked() and None not in owners

    def marked(self) -> tuple[int, int]:
        """(epoch, seq) of the newest fact that is marked as published."""
        epoch, seq = (self.folder / "state" / "published").read_text().split()
        return int(epoch), int(seq)

    async def give(self, pod: PodRequest) -> None:
        """
        Admits a pod that there is room for. Where the kubelet is too busy the pod is made anew, as by its controller.
        """
        while not isinstance(decision := await self.kubelet.admit(pod), Admission):
            assert IS_BUSY in decision.finding, (decision, pod)

    async def end(self, agent: int) -> None:
        """It dies now, if it has not before."""
        kill(agent)
        await self.unlisted()
        self.arm.unlink(missing_ok=True)
        self.arm.with_name("arm.died").unlink(missing_ok=True)

    async def end_in_agreement(self, agent: int) -> None:
        state = await agreeing(self.kubelet, self.bus, self.node)
        kill(agent)
        await self.unlisted()
        assert holders(state) == holders(on_disk(self.folder / "state" / "journal", self.node)), (
            "the log alone tells it"
        )
        assert [] == [*(self.folder / "state").glob("journal.corrupt-*")], "it is whole before and after any step"
        held = [device for allocation in state.allocations.values() for device in allocation.device_ids]
        assert len(set(held)) == len(held)
        await assert_said_once(self.bus, self.node, state)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ended(pid: int) -> None:
    """Waits until the process has."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(60):
            await anyio.wait_readable(process)
    finally:
        os.close(process)


def on_disk(journal: Path, node: NodeName) -> NodeState:
    """What the journal alone says."""
    found = journal_format.read_journal(journal.read_bytes(), node, None)
    assert (None, None) == (found.damage, found.unconfirmed)
    events = [event for line in found.lines for event in line.entry.events]
    return replay(node, events[max(at for at, e in enumerate(events) if isinstance(e, AllocationsSnapshot)) :])


def holders(state: NodeState) -> set[tuple[object, str, frozenset[str]]]:
    return {
        ((a.owner.namespace, a.owner.pod) if a.owner else None, resource, frozenset(devices))
        for a in state.allocations.values()
        for resource, devices in a.devices.items()
    }


async def agreeing(kubelet: FakeKubelet, bus: Bus, node: NodeName) -> NodeState:
    """Folds the node's events until they say what the kubelet says: the same devices for the same pods."""
    expected = {
        (key, resource, frozenset(devices))
        for key, running in kubelet.running.items()
        for _container, resource, devices in running.parts()
    }
    state = NodeState(node=node)
    events = Client(bus).allocations(node=node)
    with anyio.fail_after(60):
        async for delivery in events:
            state = state.apply(delivery.event)
            if holders(state) == expected:
                break
    await events.aclose()
    return state


async def assert_said_once(bus: Bus, node: NodeName, state: NodeState) -> None:
    """The stream holds the facts of the node's journal from the first on, each once, in order, without a gap."""
    places: list[tuple[int, int]] = []
    granted: list[str] = []
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(node)) as messages:
        async for received in messages:
            event = wire.decode_event(received.message)
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
