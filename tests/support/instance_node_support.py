"""A node whose slots become MIG instances, over real sockets: the kubelet, an agent, and a discovery that sees all."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
from anyio.abc import TaskGroup
from instance_support import A100, PlayedGpus
from share_support import DEFAULT, PLAIN, running
from slot_node_support import SlotNode
from slot_support import in_slots

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.mig.instance_log import InstanceLog
from topoalign.allocator.mig.instances import Instances, live_of, unknown_of
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU, DeviceID, PodName
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.mig import MigDevice
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

SLOTS = 7


class InstanceNode(SlotNode):
    """The kubelet of such a node, and the parts of its agent."""

    def __init__(self, directory: Path, containers: Containers | None = None) -> None:
        self.directory, self.played, self.boot = directory, PlayedGpus(), "b"
        self.played.changed = self.see
        super().__init__(directory, machine=PLAIN)
        self.containers = containers

    def offered(self, machine: Topology) -> Topology:
        gpus = tuple(msgspec.structs.replace(gpu, mig=(), mig_profiles=A100) for gpu in machine.gpus)
        return in_slots(msgspec.structs.replace(machine, gpus=gpus), SLOTS, scaling=Slots(instances=True))

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        self.instances = Instances(InstanceLog(self.directory, self.boot, self.clock.monotonic), self.played, self.wake)
        await super().start_agent(tasks, machine)

    def wake(self) -> None:
        self.ledger.move(self.ledger.state)

    async def listed(self) -> None:
        """The kubelet has received all slots how they are now; those of a GPU whose driver fails are unhealthy."""

        def as_told(kubelet: FakeKubelet) -> bool:
            faults = self.allocations.faults
            healthy = {slot for slot in self.ledger.state.healthy(GPU) if base_of(slot) not in faults}
            return {*kubelet.state().healthy(GPU)} == healthy

        await self.kubelet.until(as_told)

    def see(self) -> None:
        """Discovery tells of the instances that there are."""
        gpus = tuple(
            msgspec.structs.replace(
                gpu,
                mig=tuple(
                    MigDevice(
                        uuid=uuid,
                        profile="x",
                        gpu_instance=each.id,
                        compute_instance=0,
                        memory=1,
                        placement=each.placement,
                    )
                    for (of, _), each in self.played.instances.items()
                    for uuid in each.uuids
                    if of == gpu.id
                ),
            )
            for gpu in self.machine.gpus
        )
        known = self.ledger.state.topology
        assert known is not None
        self.machine = msgspec.structs.replace(self.machine, gpus=gpus)
        self.ledger.take_reading(msgspec.structs.replace(known, revision=known.revision + 1, topology=self.machine))

    def miss(self) -> None:
        """Discovery tells of a reading that began before the instances were made that there are."""
        there = dict(self.played.instances)
        self.played.instances.clear()
        self.see()
        self.played.instances.update(there)

    async def sweep(self) -> None:
        assert self.instances is not None
        await self.instances.destroy_unused(lambda: live_of(self.ledger.state), lambda: unknown_of(self.ledger.state))

    def answers(self, name: str) -> list[v1beta1.ContainerAllocateResponse]:
        """What a running pod's containers were answered."""
        return [*self.kubelet.running[DEFAULT, PodName(name)].responses.values()]

    def told(self, name: str) -> set[str]:
        """What the containers of a running pod were told of their GPUs."""
        return {each.envs["NVIDIA_VISIBLE_DEVICES"] for each in self.answers(name)}

    def there(self) -> set[DeviceID]:
        """The MIG devices of all GPUs."""
        return {uuid for each in self.played.instances.values() for uuid in each.uuids}


def instance_node(
    containers: Containers | None = None,
) -> AbstractAsyncContextManager[tuple[InstanceNode, TaskGroup]]:
    """The node, with its kubelet and agent running. `containers`: None: as without a configuration."""
    return running(lambda directory: InstanceNode(directory, containers))
