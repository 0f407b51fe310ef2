"""
What a simulated agent has for GPUs in units and slots: the answers to Allocate as the product's device plugin makes them,
what is reserved on the node, and what keeps the directories of limited containers.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simulation.limiters import LimiterFiles
from simulation.starts import Answer

from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.allocator.ports import AskedDevices, Poll
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1

if TYPE_CHECKING:
    from simulation.node import Parts


class Noted:
    """`AllocatorPort`, as one call meets it: notes what was allocated."""

    def __init__(self, allocations: DeviceAllocations) -> None:
        self._allocations = allocations
        self.granted: Sequence[Allocation] = ()

    @property
    def state(self) -> NodeState:
        return self._allocations.state

    @property
    def version(self) -> int:
        return self._allocations.version

    @property
    def faults(self) -> Mapping[DeviceID, str]:
        return self._allocations.faults

    async def wait_past(self, version: int) -> None:
        await self._allocations.wait_past(version)

    async def prefer(
        self, resource: ResourceName, available: Sequence[DeviceID], must_include: Sequence[DeviceID], size: int
    ) -> tuple[DeviceID, ...]:
        return await self._allocations.prefer(resource, available, must_include, size)

    async def allocate(self, resource: ResourceName, containers: AskedDevices) -> tuple[Allocation, ...]:
        self.granted = found = await self._allocations.allocate(resource, containers)
        return found

    def named(self, resource: ResourceName, allocation: Allocation) -> Mapping[ResourceName, tuple[DeviceID, ...]]:
        return self._allocations.named(resource, allocation)

    async def start_container(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        await self._allocations.start_container(resource, devices)


class Front:
    """Of one agent, from its start to its end."""

    def __init__(self, files: LimiterFiles, parts: "Parts") -> None:
        """Who calls it tells it later of the allocations (`serve`)."""
        self._files = files
        self._allocations: DeviceAllocations | None = None
        self._containers = Containers(
            lambda: files.configuration, proc=files.host / "proc", cgroups=files.host / "cgroup"
        )
        self._limiter = parts.limiter(
            lambda: files.named if files.limiter == "vcuda" else "",
            lambda: self.allocations.state.hardware,
            files.host / "proc",
            files.host / "cgroup",
        )
        self._sweeps = parts.sweeps(lambda: files.named)

    @property
    def allocations(self) -> DeviceAllocations:
        assert self._allocations is not None
        return self._allocations

    def serve(self, allocations: DeviceAllocations) -> None:
        """These are what it answers by."""
        self._allocations = allocations

    async def starting(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """As `ports.Starting`."""
        await self._limiter.starting(resource, units, poll)

    async def run(self, clock: Clock) -> None:
        """Keeps the directories of containers, until cancelled."""
        match self._files.limiter:
            case "vcuda":
                await self._limiter.run(self.allocations, clock)
            case "hami-core":
                await self._sweeps.run(self.allocations, clock)

    async def allocate(self, resource: ResourceName, devices: Sequence[DeviceID]) -> Answer:
        """As the device plugin answers. Raises what that raises."""
        noted = Noted(self.allocations)
        asked = v1beta1.ContainerAllocateRequest(devices_ids=[*devices])
        plugin = DevicePlugin(resource, noted, self._containers)
        told = await plugin.allocate(v1beta1.AllocateRequest(container_requests=[asked]))
        (answer,), (granted,) = told.container_responses, noted.granted
        mounts = {each.container_path: each.host_path for each in answer.mounts}
        return Answer(granted.id, granted.slots, dict(answer.envs), mounts)

    async def pre_start(self, resource: ResourceName, devices: Sequence[DeviceID]) -> None:
        """As the device plugin answers. Raises what that raises."""
        plugin = DevicePlugin(resource, Noted(self.allocations), self._containers)
        await plugin.pre_start_container(v1beta1.PreStartContainerRequest(devices_ids=[*devices]))
