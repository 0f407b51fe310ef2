"""A node agent that dies in the middle of a batch: Allocates that it records as one entry and publishes together."""

import os
import signal
from contextlib import AsyncExitStack, suppress
from functools import partial

import anyio
from bus_support import stopped
from e2e_support import pod
from grpclib.client import Stream
from grpclib.const import Cardinality
from kill_support import Life, on_disk

from topoalign.allocator.ledger import journal_format
from topoalign.core.model.events import Allocation, AllocationGranted, Owner
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.kubelet_client import FAILURES, call_in_own_task
from topoalign.testing.fake_kubelet.pods import Running

Call = Stream[v1beta1.AllocateRequest, v1beta1.AllocateResponse]

ALLOCATE = "/v1beta1.DevicePlugin/Allocate"
CALLS = 4
"""Allocates of a batch, each for a GPU of its own."""


class Batch(Life):
    """A node whose first agent gets its Allocates all at once, as no kubelet sends them. Each that is answered is a pod."""

    entries: list[int]
    """How many grants each entry of the journal had, of those with any, when the first agent had died."""

    async def allocate(self, agent: int) -> bool:
        """Returns whether all calls were answered; then the bus has all, or the agent has died."""
        self.answered: dict[DeviceID, v1beta1.ContainerAllocateResponse] = {}
        with suppress(*FAILURES):
            await call_in_own_task(partial(self.call_together, agent))
        allocated = len(self.answered) == CALLS
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
        gpus, channel = sorted(plugin.devices)[:CALLS], plugin.client().channel
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
        assert len(granted) in (0, CALLS)
        assert self.answered.keys() <= granted
        lines = journal_format.read_journal(journal.read_bytes(), self.node, None).lines
        entries = [[fact for fact in line.entry.events if isinstance(fact, AllocationGranted)] for line in lines]
        self.entries = [len(facts) for facts in entries if facts]
        places = [(fact.epoch, fact.seq) for facts in entries for fact in facts]
        assert self.marked() not in places[:-1]
        await super().give_the_rest(compact_after)
