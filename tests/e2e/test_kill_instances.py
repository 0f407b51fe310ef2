"""What a node agent leaves that is killed at any step of a MIG instance, the next one puts right."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from e2e.agents import IS_BUSY, TOGETHER, Agents, Life, agreeing, ended, on_disk
from faults_support import THOROUGH
from instance_support import instance_line, profile_lines
from kubelet_support import two_nodes
from nvml_support import address, host_tree
from share_support import DEFAULT

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, NodeName, PodName
from topoalign.core.model.requests import AdmissionRules, ContainerRequest, PodRequest, Policy
from topoalign.core.ports import Bus
from topoalign.runtime.directory_changes import DirectoryChanges
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.tasks import wait_for_first
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

SLOTS = 6
"""Of the GPU, which has room for as many instances beside somebody else's."""
THEIRS = DeviceID("MIG-theirs")
"""An instance that somebody has made by hand, in the last slice."""
ASKED = (ContainerRequest(name=ContainerName("main"), requests={GPU: 1}, limits={GPU: 1}),)


class Step(NamedTuple):
    """Where an agent dies: before the nth step of this name (`dying`), while a pod comes or while one ends."""

    call: str
    nth: int
    ends: bool = False


class InstanceLife(Life):
    """Pods come and go, each by an agent that dies; the next one puts right what is left."""

    def __init__(self, folder: Path, node: NodeName, nats: str, bus: Bus, agents: Agents, library: Path) -> None:
        super().__init__(folder, node, nats, bus, agents)
        self.kept = folder / "driver" / "instances"
        """What the driver has."""
        self.kept.parent.mkdir()
        gpu = f"gpu uuid=GPU-0 pci=0000{address(0).upper()} minor=0 name=NVIDIA_A100 memory={40 << 30} mig=1"
        (folder / "script").write_text("\n".join([gpu, *profile_lines(0)]))
        self.kept.write_text(instance_line(THEIRS) + "\n")
        (folder / "config.yaml").write_text(
            f"version: v1\nflags: {{migStrategy: dynamic}}\nsharing: {{slots: {{replicas: {SLOTS}}}}}\n"
        )
        del self.environment["TOPOALIGN_MACHINE"]
        self.environment |= {
            "TOPOALIGN_DRIVER": "nvml",
            "TOPOALIGN_SYSFS_ROOT": str(host_tree(folder / "host", gpus=1, nics=0)),
            "TOPOALIGN_READ_SECONDS": "0.2",
            "TOPOALIGN_CONFIG": str(folder / "config.yaml"),
            "NVML_STANDIN": str(folder / "script"),
            "NVML_STANDIN_KEPT": str(self.kept),
            "NVML_STANDIN_LIBRARY": str(library),
        }
        plugins, resources = folder / "device-plugins", folder / "pod-resources"
        self.kubelet = FakeKubelet(plugins, resources, two_nodes(), AdmissionRules(policy=Policy.NONE))
        self.offered = {GPU: SLOTS}

    async def live(self, steps: Sequence[Step]) -> list[Step]:
        """An agent dies at each of these steps. Returns those that one has survived."""
        survived, former = list[Step](), ""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.kubelet.run)
            for place, step in enumerate(steps):
                if await self.die(f"pod-{place}", step, former):
                    survived.append(step)
                former = f"pod-{place}"
            await self.finish(former)
            tasks.cancel_scope.cancel()
        return survived

    async def die(self, name: str, step: Step, former: str = "") -> bool:
        """
        An agent puts right what is left of the `former` pod, and dies at this step: of the admission of a pod of this name,
        or once one has been admitted and removed. Returns whether it has survived that.
        """
        agent = self.start(step.nth, call=step.call)
        await self.listed()
        await self.put_right(former)
        if step.ends:
            await self.give(pod(name))
            await self.check()
        self.arm.touch()
        if step.ends:
            await self.kubelet.remove(DEFAULT, PodName(name))
        else:
            decision = await self.kubelet.admit(pod(name))
            while not isinstance(decision, Admission) and IS_BUSY in decision.finding:
                decision = await self.kubelet.admit(pod(name))
            assert isinstance(decision, Admission) or (decision.code and decision.finding and decision.remedy)
        dying = partial(ended, agent)
        await (dying() if step.call else wait_for_first(dying, self.until_settled))
        survived = not self.arm.with_name("arm.died").exists()
        await self.end(agent)
        return survived

    async def put_right(self, former: str) -> None:
        """
        What an agent has to put right that starts where one has died: a container that the kubelet has admitted keeps its
        instance; a pod that was refused is created again and admitted. Nothing else is left over. Then it ends.
        """
        if former and (DEFAULT, PodName(former)) not in self.kubelet.running:
            await self.give(pod(f"{former}-again"))
        await self.check()
        await self.remove_all()

    async def finish(self, former: str) -> None:
        """What is left of the last pod is put right, and then every place is there for a pod."""
        agent = self.start()
        await self.listed()
        await self.put_right(former)
        for number in range(SLOTS):
            await self.give(pod(f"last-{number}"))
        await self.check()
        assert SLOTS + 1 == len(self.there())

        await self.remove_all()
        await self.end_in_agreement(agent)

    async def remove_all(self) -> None:
        """All pods end. What was there before they came is there then."""
        for each in [*self.kubelet.running]:
            await self.kubelet.remove(*each)
        await self.check()
        assert [instance_line(THEIRS)] == self.kept.read_text().splitlines()

    async def check(self) -> None:
        """
        Waits until kubelet, record and driver agree: an instance for each pod, which it alone is told of, and somebody
        else's.
        """
        await agreeing(self.kubelet, self.bus, self.node)
        await self.until_settled()
        told = self.told()
        state = on_disk(self.folder / "state" / "journal", self.node)
        assert told == {
            each.owner.pod: uuid
            for each in state.allocations.values()
            for uuid in each.instances.values()
            if each.owner is not None
        }
        assert len(told) == len({*told.values()} - {THEIRS})

    async def until_settled(self) -> None:
        """Waits until the driver has the instances of the pods that run, and somebody else's."""
        changes = DirectoryChanges()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(changes.run)
            await anyio.lowlevel.checkpoint()
            assert changes.watch(self.kept.parent)
            with anyio.fail_after(60):
                change = changes.next_change
                while sorted([THEIRS, *self.told().values()]) != sorted(self.there()):
                    await change.wait()
                    change = changes.next_change
            tasks.cancel_scope.cancel()

    def told(self) -> dict[PodName, DeviceID]:
        """Pod -> the instance that its container was told of."""
        return {
            name: DeviceID(answer.envs["NVIDIA_VISIBLE_DEVICES"])
            for (_, name), running in self.kubelet.running.items()
            for answer in running.responses.values()
        }

    def there(self) -> list[DeviceID]:
        """The uuids of the instances that the driver has, those without a compute instance included."""
        return [DeviceID(uuid) for uuid in re.findall(r" uuid=(\S+)", self.kept.read_text())]


def pod(name: str) -> PodRequest:
    """A pod of one container with one slot."""
    return PodRequest(namespace=DEFAULT, name=PodName(name), containers=ASKED)


pytestmark = [pytest.mark.anyio, pytest.mark.timeout(7200 if THOROUGH else 600)]

COMES = [
    Step("allocate", 1),
    Step("write .instances.new", 1),
    Step("nvmlDeviceCreateGpuInstanceWithPlacement", 1),
    Step("nvmlDeviceCreateGpuInstanceWithPlacement done", 1),
    Step("nvmlGpuInstanceCreateComputeInstance done", 1),
    Step("replace instances done", 2),
    Step("write journal", 1),
    Step("fsync journal done", 1),
    Step("allocate done", 1),
]
"""
Of an instance that is made: its Allocate has come; before and after the intent; after the GPU instance and its compute
instance are made, and are noted; before and after the grant; and before the answer.
"""
ENDS = [
    Step("write journal", 1, ends=True),
    Step("fsync journal done", 1, ends=True),
    Step("nvmlComputeInstanceDestroy", 1, ends=True),
    Step("nvmlGpuInstanceDestroy", 1, ends=True),
    Step("nvmlGpuInstanceDestroy done", 1, ends=True),
    Step("replace instances done", 1, ends=True),
]
"""
Of one whose pod ends: before and after its record ends, before the compute instance is destroyed, between that and the GPU
instance, after it, and after the note has gone.
"""
CHAIN = 10
"""Agents that die one after the other on a node, where every step is tried."""
UNNAMED = ((False, 120), (True, 60))
"""Steps of any name that are tried of an instance that is made, and of one that is destroyed: more than there are."""


def chains() -> Sequence[Sequence[Step]]:
    """Where agents die, node by node."""
    if not THOROUGH:
        return [[COMES[3], ENDS[4], COMES[7]], [COMES[2], COMES[5], ENDS[3]]]
    unnamed = [[Step("", nth, ends) for nth in range(1, count + 1)] for ends, count in UNNAMED]
    return [COMES, ENDS, *(each[at : at + CHAIN] for each in unnamed for at in range(0, len(each), CHAIN))]


async def test_an_agent_killed_at_any_step_of_an_instance_recovers(
    short_folder: Path, agents: Agents, nvml_library: Path
) -> None:
    """
    Slots become MIG instances, of a driver that lives on. After each death the next agent keeps the instance of a container
    that the kubelet has admitted, admits a pod anew that was refused, and leaves nothing else but what somebody has made by
    hand.
    """
    survived: list[Step] = []
    async with local_nats(short_folder / "nats") as nats, connect_bus(nats) as bus:
        turn = anyio.CapacityLimiter(TOGETHER)

        async def live(number: int, steps: Sequence[Step]) -> None:
            node, folder = NodeName(f"node-{number}"), short_folder / str(number)
            async with turn:
                survived.extend(await InstanceLife(folder, node, nats, bus, agents, nvml_library).live(steps))

        async with anyio.create_task_group() as tasks:
            for number, steps in enumerate(chains()):
                tasks.start_soon(live, number, steps)

    assert [] == [step for step in survived if step.call or step.nth == 1]
