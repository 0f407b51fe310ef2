"""
The device plugin of one resource, as the kubelet calls it.

The kubelet decides which NUMA nodes a container gets and which devices; it knows from us which devices there are, how they
are and near which NUMA node each is (ListAndWatch), it asks which ones belong together (GetPreferredAllocation), and it
says what it has given (Allocate), which is recorded before it gets its answer. It never says to whom: that is asked of
PodResources when the container is about to start (PreStartContainer).

Each method only translates: the allocator's `Desk` decides, and `transport` turns its errors into statuses.

Sources: the device plugin API v1beta1 and its use in kubelet v1.36.3 (cm/devicemanager).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import structlog

from topoalign.allocator.kubelet.api import v1beta1
from topoalign.allocator.kubelet.desk import Desk
from topoalign.allocator.kubelet.registration import OPTIONS
from topoalign.allocator.kubelet.transport import Servicer
from topoalign.core.errors import InvalidField, NoFit, Unavailable, UnknownDevice
from topoalign.core.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.requests import MOST_CONTAINERS
from topoalign.core.state import NodeState

log = structlog.get_logger()

HEALTHY = "Healthy"
UNHEALTHY = "Unhealthy"
END_SECONDS = 1.0
RDMA_CM = "/dev/infiniband/rdma_cm"


class DevicePlugin(Servicer, v1beta1.DevicePluginBase):
    """One resource of the node, as the kubelet sees it."""

    def __init__(self, resource: ResourceName, desk: Desk) -> None:
        self.resource = resource
        self.desk = desk
        self.listing = Listing(resource)
        self.watch = Watch()
        """Of the stream that is served. The kubelet drops its newest client when an old stream ends: there is one."""

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        return OPTIONS

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        """All devices, anew whenever one of them is not as it was. A new stream ends the one before."""
        stuck = None
        while self.watch.open and self.watch is not stuck:
            stuck = self.watch
            await self.end_watch()
        watch = self.watch = Watch()
        watch.open = True
        log.info("the kubelet listens", resource=self.resource)
        said = None
        try:
            while not watch.ending.is_set():
                version, response = self.desk.version, self.listing.of(self.desk.state)
                if response is not said:
                    said = response
                    yield response
                await either(partial(self.desk.beyond, version), watch.ending.wait)
        finally:
            watch.open = False
            watch.ended.set()
            log.info("the kubelet does not listen any more", resource=self.resource)

    async def end_watch(self) -> None:
        """Ends the stream, if one is served, and waits until it has ended; not for ever, as its client may be stuck."""
        watch = self.watch
        watch.ending.set()
        with anyio.move_on_after(END_SECONDS):
            if watch.open:
                await watch.ended.wait()

    async def get_preferred_allocation(
        self, message: v1beta1.PreferredAllocationRequest
    ) -> v1beta1.PreferredAllocationResponse:
        check_containers(message.container_requests)
        return v1beta1.PreferredAllocationResponse(
            container_responses=[self.preferred(request) for request in message.container_requests]
        )

    def preferred(
        self, request: v1beta1.ContainerPreferredAllocationRequest
    ) -> v1beta1.ContainerPreferredAllocationResponse:
        """
        An error here would fail the pod, and no preference only costs it the best links: the kubelet fills up itself. So
        a device that was lost in between, or a question that cannot be meant, gets the empty answer.
        """
        available = [DeviceID(device) for device in request.available_deviceIDs]
        must_include = [DeviceID(device) for device in request.must_include_deviceIDs]
        try:
            devices = self.desk.prefer(self.resource, available, must_include, request.allocation_size)
        except (UnknownDevice, InvalidField, NoFit) as error:
            log.warning("no preference given", resource=self.resource, reason=error.finding)
            devices = ()
        return v1beta1.ContainerPreferredAllocationResponse(device_i_ds=list(devices))

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        """All containers of the request or none; what is answered is on disk."""
        check_containers(message.container_requests)
        sets = [[DeviceID(device) for device in request.devices_ids] for request in message.container_requests]
        allocations = await self.desk.allocate(self.resource, sets)
        return v1beta1.AllocateResponse(
            container_responses=[
                given(self.desk.state, self.resource, allocation.devices[self.resource]) for allocation in allocations
            ]
        )

    async def pre_start_container(self, message: v1beta1.PreStartContainerRequest) -> v1beta1.PreStartContainerResponse:
        """Learns who the owner is. If PodResources is silent the container starts all the same, and is bound later."""
        try:
            await self.desk.reconcile()
        except Unavailable as error:
            log.warning(
                "the owner is not known yet",
                resource=self.resource,
                devices=len(message.devices_ids),
                reason=error.finding,
            )
        return v1beta1.PreStartContainerResponse()


class Watch:
    """One ListAndWatch stream, as seen from outside of it."""

    def __init__(self) -> None:
        self.open = False
        self.ending = anyio.Event()
        self.ended = anyio.Event()


class Listing:
    """What ListAndWatch says, made once per change: 17,500 shares of GPUs take half a second to encode."""

    def __init__(self, resource: ResourceName) -> None:
        self.resource = resource
        self.made_of: tuple[TopologyDiscovered | None, DeviceHealthChanged | None] | None = None
        self.response = EncodedDevices(b"")

    def of(self, state: NodeState) -> "EncodedDevices":
        """The same object for as long as there is nothing new to say."""
        if self.made_of is None or self.made_of[0] is not state.topology or self.made_of[1] is not state.health:
            self.made_of = (state.topology, state.health)
            encoded = bytes(v1beta1.ListAndWatchResponse(devices=devices_of(state, self.resource)))
            if encoded != self.response.encoded:
                self.response = EncodedDevices(encoded)
        return self.response


class EncodedDevices(v1beta1.ListAndWatchResponse):
    """
    A response that is encoded already. It has no fields: a generated message that is subclassed elsewhere cannot look up
    the types of its own, and all that is asked of this one is its bytes.
    """

    encoded: bytes

    def __init__(self, encoded: bytes) -> None:
        self.__dict__["encoded"] = encoded

    def SerializeToString(self) -> bytes:
        return self.encoded


def devices_of(state: NodeState, resource: ResourceName) -> list[v1beta1.Device]:
    """A device whose NUMA node is unknown is listed without a topology: that is not node 0."""
    return [
        v1beta1.Device(
            id=device,
            health=HEALTHY if state.health_of(device).usable else UNHEALTHY,
            topology=None
            if nodes is None
            else v1beta1.TopologyInfo(nodes=[v1beta1.NumaNode(id=node) for node in nodes]),
        )
        for device, nodes in state.hardware.devices.get(resource, {}).items()
    ]


def given(state: NodeState, resource: ResourceName, devices: Sequence[DeviceID]) -> v1beta1.ContainerAllocateResponse:
    """What the container runtime is told, so that the container finds its devices and no others."""
    if resource == GPU:
        return v1beta1.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(devices)})
    if resource == NIC:
        return v1beta1.ContainerAllocateResponse(
            envs={"TOPOALIGN_NICS": ",".join(devices)}, devices=rdma_devices(state, devices)
        )
    raise InvalidField("resource", f"{resource} is not served here", "ask the device plugin that registered it")


def rdma_devices(state: NodeState, nics: Sequence[DeviceID]) -> list[v1beta1.DeviceSpec]:
    """The verbs devices of these NICs and the connection manager they share; none for NICs of a described machine."""
    known = (state.hardware.nic_by_id.get(nic) for nic in nics)
    paths = [f"/dev/infiniband/{nic.verbs}" for nic in known if nic is not None and nic.verbs is not None]
    return [
        v1beta1.DeviceSpec(container_path=path, host_path=path, permissions="rw")
        for path in (*paths, *([RDMA_CM] if paths else []))
    ]


def check_containers(requests: Sequence[Any]) -> None:
    if len(requests) > MOST_CONTAINERS:
        raise InvalidField("container_requests", f"{len(requests)} containers", f"a pod has at most {MOST_CONTAINERS}")


async def either(*waits: Callable[[], Awaitable[None]]) -> None:
    """Returns when the first of these does. Opens and closes its task group between two `yield`s of its caller."""
    async with anyio.create_task_group() as tasks:

        async def run(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(run, wait)
