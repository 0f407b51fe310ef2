"""
The device plugin of one resource, as the kubelet calls it.

The kubelet decides which NUMA nodes and which devices a container gets; from the plugin it knows which devices there are,
their health and the NUMA nodes of each (ListAndWatch), it asks which ones belong together (GetPreferredAllocation), and it
reports what it has allocated (Allocate), which is recorded before it gets its answer. It never reports for which container:
that is read from PodResources afterwards, and no container waits for it.

Each method only translates: the allocator's `AllocatorPort` decides, and `transport` turns its errors into statuses.

Sources: the device plugin API v1beta1 and its use in kubelet v1.36.3 (cm/devicemanager).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from weakref import WeakSet

import anyio
import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.listing import DeviceListing
from topoalign.allocator.device_plugin.registration_states import plugin_options
from topoalign.allocator.ports import AllocatorPort
from topoalign.core.model.errors import InvalidField, NoFit, Unavailable, UnknownDevice
from topoalign.core.model.holdings import unit_kind
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.grpc_connection import GrpcConnection
from topoalign.kubelet.grpc.transport import Servicer, caller

# The ListAndWatch streams of one resource: the kubelet's, and those of other clients.
#
# The kubelet opens its stream once, right after a registration, and drops the resource when that ends, whatever else is
# open. So which stream is its own must be known. Every peer runs as root, but the kubelet is the process that serves
# `kubelet.sock`, as far as its process ID is visible here (it is not in a container with its own process IDs), and it is
# the peer that connects during a registration. The stream with most of these properties, and among equals the first since
# the registration, is taken for the kubelet's. A few others are served as well, and none ends another.
#
# Source: kubelet v1.36.3, cm/devicemanager/plugin/v1beta1 `client.Run` and `runClient`.


MOST_OTHERS = 3
"""Streams in addition to the kubelet's: a debugging client and a monitor or two. Each may hold a list of all devices."""

END_SECONDS = 1.0


class ListAndWatchStream:
    """The state of one ListAndWatch stream, for those who wait for it or end it."""

    def __init__(self, connection: GrpcConnection | None = None, likeness: tuple[bool, bool] = (False, False)) -> None:
        """`likeness`: whether its peer is the kubelet's process, and whether it connected during a registration."""
        self.connection = connection
        self.likeness = likeness
        self.open = False
        self.ending = anyio.Event()
        self.ended = anyio.Event()
        self._waiting = anyio.CancelScope()

    def end(self) -> None:
        """Has the stream end where it waits, or before it waits again."""
        self.ending.set()
        self._waiting.cancel()

    async def wait(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Returns when `wait` does, or when the stream is to end. It costs no task: a stream waits after every fact."""
        if not self.ending.is_set():
            with anyio.CancelScope() as self._waiting:
                await wait()


class Watches:
    """The open ListAndWatch streams of a resource, and which of them is the kubelet's."""

    def __init__(self, when_ended: Callable[[], None]) -> None:
        """`when_ended` is called when a stream has ended."""
        self.kubelet = ListAndWatchStream()
        """The kubelet's: open, or ended, or none yet."""
        self._when_ended = when_ended
        self._others: set[ListAndWatchStream] = set()
        self._vacant = True
        """No stream has been taken for the kubelet's since the last registration began."""
        self._pid = 0
        self._registering = False
        self._dialled: WeakSet[GrpcConnection] = WeakSet()

    @property
    def open(self) -> bool:
        """Whether any stream is open."""
        return any(watch.open for watch in self._all())

    def _all(self) -> list[ListAndWatchStream]:
        return [self.kubelet, *self._others]

    @contextmanager
    def opened(self, connection: GrpcConnection | None) -> Iterator[ListAndWatchStream]:
        """Registers a stream for as long as the context is open. Raises GRPCError (RESOURCE_EXHAUSTED) for one too many."""
        is_kubelet = connection is not None and connection.peer.pid == self._pid != 0
        watch = ListAndWatchStream(connection, (is_kubelet, connection is not None and connection in self._dialled))
        if self._vacant or (self.kubelet.open and watch.likeness > self.kubelet.likeness):
            if self.kubelet.open:
                self._others.add(self.kubelet)
            self.kubelet = watch
            self._vacant = False
        elif len(self._others) < MOST_OTHERS:
            self._others.add(watch)
        else:
            refusal = f"at most {MOST_OTHERS} clients listen in addition to the kubelet"
            raise GRPCError(Status.RESOURCE_EXHAUSTED, refusal)
        watch.open = True
        try:
            yield watch
        finally:
            watch.open = False
            watch.ended.set()
            self._others.discard(watch)
            self._when_ended()

    def dialled(self, connection: GrpcConnection | None) -> None:
        """Notes that this peer has asked for the options, as the kubelet does while it registers a plugin."""
        if self._registering and connection is not None:
            self._dialled.add(connection)

    @contextmanager
    def registering(self, pid: int) -> Iterator[None]:
        """Marks the time in which the kubelet, the process `pid` (0: not known), is asked to register the plugin."""
        self._pid = pid
        self._vacant = True
        self._registering = True
        self._dialled.clear()
        try:
            yield
        finally:
            self._registering = False

    def favour(self, connection: GrpcConnection) -> bool:
        """Whether the kubelet listens on this connection, or is about to."""
        dialling = self._registering and connection.peer.pid == self._pid != 0
        listening = self.kubelet.open and self.kubelet.connection is connection
        return dialling or listening or connection in self._dialled

    async def end(self) -> None:
        """Ends all open streams, and waits until they have ended, at most `END_SECONDS` because clients may hang."""
        for watch in self._all():
            watch.end()
        with anyio.move_on_after(END_SECONDS):
            for watch in self._all():
                if watch.open:
                    await watch.ended.wait()


log = structlog.get_logger()


class DevicePlugin(Servicer, v1beta1.DevicePluginBase):
    """One resource of the node, as the kubelet sees it."""

    def __init__(
        self,
        resource: ResourceName,
        allocator: AllocatorPort,
        containers: Containers | None = None,
        when_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `containers` knows what containers get; None: by the defaults of the configuration. `when_ended` is called when a
        ListAndWatch stream has ended.
        """
        self.resource = resource
        self.allocator = allocator
        self.containers = containers or Containers()
        self.listing = DeviceListing(resource, lambda: allocator.faults)
        self.watches = Watches(when_ended)

    @property
    def watch(self) -> ListAndWatchStream:
        """The kubelet's stream."""
        return self.watches.kubelet

    def favours(self, connection: GrpcConnection) -> bool:
        """Whether this connection is the kubelet's, as far as is known: the server closes it last when it has too many."""
        return self.watches.favour(connection)

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        """Answers GetDevicePluginOptions. The kubelet asks it while it registers the plugin, so the caller is noted."""
        self.watches.dialled(caller())
        return plugin_options(by_amounts=self.by_amounts)

    @property
    def by_amounts(self) -> bool:
        """Whether the resource is of units or slots of GPUs."""
        return self.allocator.state.hardware.kind_of(self.resource) in ("unit", "slot")

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        """Answers ListAndWatch: all devices of the resource at once, and again whenever one of them has changed."""
        with self.watches.opened(caller()) as watch:
            is_kubelets = watch is self.watch
            if is_kubelets:
                log.info("the kubelet listens", resource=self.resource)
            sent = None
            try:
                while not watch.ending.is_set():
                    version = self.allocator.version
                    response = await self.listing.of(self.allocator.state)
                    if response is not sent:
                        sent = response
                        yield response
                    await watch.wait(partial(self.allocator.wait_past, version))
            finally:
                if is_kubelets:
                    log.info("the kubelet does not listen any more", resource=self.resource)

    async def get_preferred_allocation(
        self, message: v1beta1.PreferredAllocationRequest
    ) -> v1beta1.PreferredAllocationResponse:
        """Answers GetPreferredAllocation, one preference per container. Raises InvalidField for too many containers."""
        check_containers(message.container_requests)
        return v1beta1.PreferredAllocationResponse(
            container_responses=[await self.preferred(request) for request in message.container_requests]
        )

    async def preferred(
        self, request: v1beta1.ContainerPreferredAllocationRequest
    ) -> v1beta1.ContainerPreferredAllocationResponse:
        """
        The devices that are preferred for one container; empty where none can be named.

        An error here would fail the pod, and no preference only costs it the best links: the kubelet chooses by itself
        then. So a device that was lost in between, or an invalid question, gets the empty answer.
        """
        available = cast("list[DeviceID]", request.available_deviceIDs)  # thousands of shares: not one by one
        must_include = cast("list[DeviceID]", request.must_include_deviceIDs)
        try:
            devices = await self.allocator.prefer(self.resource, available, must_include, request.allocation_size)
        except (UnknownDevice, InvalidField, NoFit) as error:
            log.warning("no preference given", resource=self.resource, reason=error.finding)
            devices = ()
        return v1beta1.ContainerPreferredAllocationResponse(device_i_ds=list(devices))

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        """
        Answers Allocate, for all containers of the request or none; what is answered is on disk before.

        Raises ContainerUnready, before anything is recorded, where a container could not use the devices, and what
        `AllocatorPort.allocate` raises.
        """
        check_containers(message.container_requests)
        before = self.allocator.state.hardware
        listed = before.devices.get(self.resource, NO_DEVICES).listed
        sets = [listed(cast("list[DeviceID]", request.devices_ids)) for request in message.container_requests]
        writer = self.containers.now(before, self.resource)
        writer.check(before, sets)
        allocations = await self.allocator.allocate(self.resource, sets)
        hardware = self.allocator.state.hardware
        if any(each.instances for each in allocations):  # a CDI specification has to have them
            writer = self.containers.now(hardware, self.resource)
        responses = [
            writer.response(hardware, self.resource, each, self.allocator.named(self.resource, each))
            for each in allocations
        ]
        return v1beta1.AllocateResponse(container_responses=responses)

    async def pre_start_container(self, message: v1beta1.PreStartContainerRequest) -> v1beta1.PreStartContainerResponse:
        """
        Answers PreStartContainer: at once if the owner of the devices is known, else after it was read from PodResources. If
        that does not answer, the container starts all the same, and its allocation is bound later; not so with units of
        GPUs, which may be of two, and with slots, which may be another pod's. Raises what `AllocatorPort.start_container`
        raises.
        """
        devices = list(map(DeviceID, message.devices_ids))
        try:
            await self.allocator.start_container(self.resource, devices)
        except Unavailable as error:
            if self.by_amounts or any(map(unit_kind, devices)):
                raise
            log.warning(
                "the owner is not known yet",
                resource=self.resource,
                devices=len(message.devices_ids),
                reason=error.finding,
            )
        return v1beta1.PreStartContainerResponse()


def check_containers(requests: Sequence[Any]) -> None:
    """Raises InvalidField for a request with more containers than a pod can have."""
    if len(requests) > MOST_CONTAINERS:
        raise InvalidField("container_requests", f"{len(requests)} containers", f"a pod has at most {MOST_CONTAINERS}")
