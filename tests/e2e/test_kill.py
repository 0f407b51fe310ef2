"""A node agent that is killed at any step of an allocation leaves nothing that its next life cannot put right."""

import os
import signal
from collections import Counter
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import anyio
import pytest
from bus_support import stopped
from e2e.agents import TOGETHER, Agents, Life, alive, kill, on_disk
from e2e_support import pod
from faults_support import sample
from grpclib.client import Stream
from grpclib.const import Cardinality
from strace_support import injected, needs_strace

from topoalign.allocator.ledger import journal_format
from topoalign.core.model.decisions import Admission
from topoalign.core.model.events import Allocation, AllocationGranted, Owner
from topoalign.core.model.ids import GPU, NIC, AllocationID, ContainerName, DeviceID, NodeName, ResourceName
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import FAILURES, call_in_own_task
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.testing.fake_kubelet.pods import Running

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

Call = Stream[v1beta1.AllocateRequest, v1beta1.AllocateResponse]

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
BATCH = 4
"""Allocates of a batch, each for a GPU of its own."""


class OnePod(Life):
    """A node whose first agent allocates for one pod."""

    async def allocate(self, agent: int) -> bool:
        """Arms the agent and has devices allocated. Returns whether all are."""
        self.arm.touch()
        return isinstance(await self.kubelet.admit(pod("first", gpus=3, nics=1)), Admission)

    async def give_the_rest(self, compact_after: int = 1_000) -> None:
        """With a second agent. What the kubelet has given to no pod is there for another, and all views agree."""
        self.arm.unlink(missing_ok=True)
        agent = self.start(compact_after=compact_after)
        await self.listed()
        held = Counter[ResourceName]()
        for running in self.kubelet.running.values():
            for _, resource, devices in running.parts():
                held[resource] += len(devices)
        decision = await self.kubelet.admit(pod("second", gpus=8 - held[GPU], nics=10 - held[NIC]))
        assert isinstance(decision, Admission), decision
        await self.end_in_agreement(agent)


class Batch(OnePod):
    """A node whose first agent gets its Allocates all at once, as no kubelet sends them. Each that is answered is a pod."""

    entries: list[int]
    """How many grants each entry of the journal had, of those with any, when the first agent had died."""

    async def allocate(self, agent: int) -> bool:
        """Returns whether all calls were answered; then the bus has all, or the agent has died."""
        self.answered: dict[DeviceID, v1beta1.ContainerAllocateResponse] = {}
        with suppress(*FAILURES):
            await call_in_own_task(partial(self.call_together, agent))
        allocated = len(self.answered) == BATCH
        await self.until_said(agent, allocated)
        return allocated

    async def call_together(self, agent: int) -> None:
        """
        The agent, armed, stands still until all calls are in its socket: first their headers and then what they ask, so that
        it reads that in one go. Raises what a call fails with.
        """
        os.kill(agent, signal.SIGSTOP)
        await stopped(agent)
        self.arm.touch()
        plugin = self.kubelet.plugins.endpoints[GPU]
        gpus, channel = sorted(plugin.devices)[:BATCH], plugin.client().channel
        types = v1beta1.AllocateRequest, v1beta1.AllocateResponse
        async with AsyncExitStack() as stack:
            calls = [channel.request(ALLOCATE, Cardinality.UNARY_UNARY, *types) for _ in gpus]
            for call in calls:
                await stack.enter_async_context(call)
                await call.send_request()
            for gpu, call in zip(gpus, calls, strict=True):
                asked = v1beta1.ContainerAllocateRequest(devices_ids=[gpu])
                await call.send_message(v1beta1.AllocateRequest(container_requests=[asked]), end=True)
            os.kill(agent, signal.SIGCONT)
            async with anyio.create_task_group() as tasks:
                for gpu, call in zip(gpus, calls, strict=True):
                    tasks.start_soon(self.hear, gpu, call)

    async def hear(self, gpu: DeviceID, call: Call) -> None:
        """Waits for an answer, which the death of the agent may cut off."""
        with suppress(*FAILURES):
            if (response := await call.recv_message()) is not None:
                self.run_pod(gpu, response.container_responses[0])

    def run_pod(self, gpu: DeviceID, response: v1beta1.ContainerAllocateResponse) -> None:
        """As the kubelet does when Allocate is answered: it writes that down, lists the devices, and starts the pod."""
        self.answered[gpu] = response
        asked, container = pod(f"batch-{len(self.answered)}", gpus=1), ContainerName("main")
        owner = Owner(namespace=asked.namespace, pod=asked.name, container=container)
        held = Allocation(id=AllocationID(asked.name), owner=owner, devices={GPU: (gpu,)})
        devices, pods = self.kubelet.managers.devices, self.kubelet._pods
        running = Running(uid=pods.new_uid(asked, ()), pod=asked, allocations=(held,))
        devices.give(running.uid, (container, GPU), (gpu,), response)
        devices.write()
        pods.admitted(running, volumes=True)

    async def give_the_rest(self, compact_after: int = 1_000) -> None:
        """
        First, what the dead agent has left: the batch is in the journal whole or not at all, with all who were answered, and
        was never marked as published in part.
        """
        journal = self.folder / "state" / "journal"
        granted = {device for each in on_disk(journal, self.node).allocations.values() for device in each.device_ids}
        assert len(granted) in (0, BATCH)
        assert self.answered.keys() <= granted
        lines = journal_format.read_journal(journal.read_bytes(), self.node, None).lines
        entries = [[fact for fact in line.entry.events if isinstance(fact, AllocationGranted)] for line in lines]
        self.entries = [len(facts) for facts in entries if facts]
        places = [(fact.epoch, fact.seq) for facts in entries for fact in facts]
        assert self.marked() not in places[:-1]
        await super().give_the_rest(compact_after)


async def killed_while_allocating(life: OnePod, step: int, compact_after: int) -> bool:
    """Returns whether the first agent survived the allocation."""
    async with anyio.create_task_group() as tasks:
        await tasks.start(life.kubelet.run)
        first = life.start(step, compact_after)
        await life.listed()
        await life.allocate(first)
        survived = not life.arm.with_name("arm.died").exists()
        kill(first)
        await life.unlisted()
        await life.give_the_rest(compact_after)
        tasks.cancel_scope.cancel()
    return survived


async def killed_while_starting(life: OnePod, step: int) -> None:
    async with anyio.create_task_group() as tasks:
        await tasks.start(life.kubelet.run)
        first = life.start()
        await life.listed()
        decision = await life.kubelet.admit(pod("first", gpus=3, nics=1))
        assert isinstance(decision, Admission), decision
        kill(first)
        await life.unlisted()

        life.arm.touch()
        second = life.start(step)
        while alive(second) and life.kubelet.allocatable(GPU) == 0:
            await anyio.lowlevel.checkpoint()
        kill(second)
        life.arm.unlink()
        await life.unlisted()

        third = life.start()
        await life.listed()
        await life.end_in_agreement(third)
        tasks.cancel_scope.cancel()


async def killed_by_kernel(life: OnePod, calls: str, nth: int) -> bool:
    """As `killed_while_allocating`, at the nth of these calls. Returns whether the first agent survived it."""
    life.environment["TOPOALIGN_RECONCILE_SECONDS"] = "3600"  # so that all calls are those of the allocation
    async with anyio.create_task_group() as tasks:
        await tasks.start(life.kubelet.run)
        first = life.start(compact_after=1)  # so that each entry costs a rename, too
        await life.listed()
        async with injected(first, calls, f"signal=SIGKILL:when={nth}", life.folder / "strace"):
            await life.until_said(first, await life.allocate(first))
            survived = alive(first)
        kill(first)
        await life.unlisted()

        life.environment["TOPOALIGN_RECONCILE_SECONDS"] = "0.05"
        await life.give_the_rest()
        tasks.cancel_scope.cancel()
    return survived


STEPS = {1_000: [*sample(range(1, 81), 12), 1_000], 1: [*sample(range(1, 91), 12), 1_000]}
"""
By `compact_after`. An allocation has about 55 steps, or 80 where each entry writes the journal anew, and on a loaded machine
more, because looks at the kubelet come in between. The last one is beyond all of them: that agent survives, and is killed
afterwards.
"""

BATCH_STEPS = [*sample(range(1, 21), 5), *sample(range(21, 61), 2), 1_000]
"""
A batch is recorded, answered and published in about 20 steps, and has its owners after 20 more. The last one is beyond all.
"""


@pytest.mark.parametrize("compact_after", [1_000, 1])
async def test_an_agent_killed_at_any_step_of_an_allocation_recovers(
    short_folder: Path, agents: Agents, compact_after: int
) -> None:
    """
    For each step N: a pod is admitted while the agent dies before its Nth write, sync, rename or send. A second agent
    starts on the same state, and a second pod takes all that is left. Then the record and the kubelet agree, no device is
    in two live allocations, and the stream holds each fact once and in order. Once with a journal that is only appended
    to, and once with one that is written anew after every entry.
    """
    survived: list[int] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                life = OnePod(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents)
                if await killed_while_allocating(life, step, compact_after):
                    survived.append(step)

        async with anyio.create_task_group() as tasks:
            for step in STEPS[compact_after]:
                tasks.start_soon(one, step)

    assert min(STEPS[compact_after]) not in survived, "the first step of an allocation kills"
    assert max(STEPS[compact_after]) in survived, "an allocation has fewer steps than are tried"


async def test_an_agent_killed_at_any_step_of_a_batch_recovers(short_folder: Path, agents: Agents) -> None:
    """
    As of an allocation; here the agent dies while it records several Allocates as one entry of the journal, answers them and
    publishes them together. The journal has all of them or none, and those that were answered.
    """
    entries: dict[int, list[int]] = {}
    survived: list[int] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                life = Batch(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents)
                if await killed_while_allocating(life, step, 1_000):
                    survived.append(step)
                entries[step] = life.entries

        async with anyio.create_task_group() as tasks:
            for step in BATCH_STEPS:
                tasks.start_soon(one, step)

    assert {} == {step: found for step, found in entries.items() if found not in ([], [BATCH])}
    assert ([], [BATCH]) == (entries[1], entries[max(BATCH_STEPS)])
    assert 1 not in survived
    assert max(BATCH_STEPS) in survived, "a batch has fewer steps than are tried"


async def test_an_agent_killed_at_any_step_of_its_start_recovers(short_folder: Path, agents: Agents) -> None:
    """Starting writes the journal anew; whatever is left of that, the allocation made before is there."""
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def one(step: int) -> None:
            async with turn:
                await killed_while_starting(
                    OnePod(short_folder / str(step), NodeName(f"node-{step}"), nats, bus, agents), step
                )

        async with anyio.create_task_group() as tasks:
            for step in sample(range(1, 13), 6):
                tasks.start_soon(one, step)


CALLS = {"fsync": range(1, 25), "rename,renameat,renameat2": range(1, 11), "sendto,sendmsg": range(1, 81)}
"""For each, up to which of them: more than an allocation or a batch has."""


@needs_strace
@pytest.mark.parametrize(
    ("asked", "calls"), [*((OnePod, calls) for calls in CALLS), (Batch, "fsync"), (Batch, "sendto,sendmsg")]
)
async def test_an_agent_killed_at_the_nth_call_of_an_allocation_recovers(
    short_folder: Path, agents: Agents, asked: type[OnePod], calls: str
) -> None:
    """An agent killed at the nth system call of an allocation, or of a batch, agrees with the kubelet afterwards."""
    survived: dict[int, bool] = {}
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(4)

        async def one(nth: int) -> None:
            async with turn:
                life = asked(short_folder / str(nth), NodeName(f"node-{nth}"), nats, bus, agents)
                survived[nth] = await killed_by_kernel(life, calls, nth)

        async with anyio.create_task_group() as tasks:
            for nth in sample(CALLS[calls], 3):
                tasks.start_soon(one, nth)

    assert not survived[1], "the first one kills"
    assert survived[max(CALLS[calls])], "an allocation has fewer than are tried"
