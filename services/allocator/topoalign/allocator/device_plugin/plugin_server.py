"""
The gRPC service of one device plugin, which the kubelet calls.

The kubelet selects a container's NUMA nodes and devices. The plugin lists the devices with their health and NUMA nodes
(ListAndWatch), and ranks them (GetPreferredAllocation). The kubelet then reports its selection (Allocate), which is
recorded before the response. Allocate does not name the container, so the owner is read from PodResources later.

The methods only convert messages. The `AllocatorPort` decides, and `transport` maps its errors to gRPC status codes.

Sources: the device plugin API v1beta1 and its use in kubelet v1.36.3 (cm/devicemanager).
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import anyio
import structlog
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.listing import DeviceListing
from topoalign.allocator.ports import AllocatorPort
from topoalign.core.model.errors import InvalidField, NoFit, UnknownDevice
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import MOST_CONTAINERS
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.grpc_connection import GrpcConnection
from topoalign.kubelet.grpc.kubelet_client import call_once
from topoalign.kubelet.grpc.plugin_api import API_VERSION, KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import Servicer, caller
from topoalign.kubelet.grpc.unix_sockets import LONGEST_PATH

# The ListAndWatch streams of one resource: the kubelet's, and those of other clients. The kubelet opens its stream
# once, right after a registration, and drops the resource when this stream ends. So the plugin must know which stream
# is the kubelet's: the one whose connection requested the plugin's options during the registration. Until there is such
# a stream, the first stream after the registration counts as the kubelet's. A few other streams are served as well.
#
# Source: kubelet v1.36.3, cm/devicemanager/plugin/v1beta1 `client.Run` and `runClient`.


MOST_OTHERS = 3
"""Maximum number of other streams: a debugging client and monitors. Each can keep a list of all devices in memory."""

END_SECONDS = 1.0


class ListAndWatchStream:
    """The state of one ListAndWatch stream."""

    def __init__(self, connection: GrpcConnection | None = None) -> None:
        self.connection = connection
        self.open = False
        self.ending = anyio.Event()
        self.ended = anyio.Event()
        self._waiting = anyio.CancelScope()

    def end(self) -> None:
        """Ends the stream at its current or next wait."""
        self.ending.set()
        self._waiting.cancel()

    async def wait(self, wait: Callable[[], Awaitable[None]]) -> None:
        """Waits until `wait` returns or the stream is ended. Starts no task, because streams wait after every fact."""
        if not self.ending.is_set():
            with anyio.CancelScope() as self._waiting:
                await wait()


class Watches:
    """The open ListAndWatch streams of a resource, and which of them is the kubelet's."""

    def __init__(self, when_ended: Callable[[], None]) -> None:
        """`when_ended` is called when a stream has ended."""
        self.kubelet = ListAndWatchStream()
        """The kubelet's stream: open, ended, or not opened yet."""
        self._when_ended = when_ended
        self._others: set[ListAndWatchStream] = set()
        self._vacant = True
        """Whether no stream counts as the kubelet's since the last registration began."""
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
        """Adds a stream during the context. Raises GRPCError (RESOURCE_EXHAUSTED) if there are too many."""
        watch = ListAndWatchStream(connection)
        if self._vacant or (self.kubelet.open and self._has_dialled(watch) and not self._has_dialled(self.kubelet)):
            if self.kubelet.open:
                self._others.add(self.kubelet)
            self.kubelet = watch
            self._vacant = False
        elif len(self._others) < MOST_OTHERS:
            self._others.add(watch)
        else:
            refusal = f"at most {MOST_OTHERS} other clients may watch in addition to the kubelet"
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
        """Records a client that requested the options, as the kubelet does while it registers a plugin."""
        if self._registering and connection is not None:
            self._dialled.add(connection)

    @contextmanager
    def registering(self) -> Iterator[None]:
        """Marks the duration of a registration with the kubelet."""
        self._vacant = True
        self._registering = True
        self._dialled.clear()
        try:
            yield
        finally:
            self._registering = False

    def favour(self, connection: GrpcConnection) -> bool:
        """Whether this connection has, or is expected to have, the kubelet's stream."""
        is_listening = self.kubelet.open and self.kubelet.connection is connection
        return is_listening or connection in self._dialled

    def _has_dialled(self, watch: ListAndWatchStream) -> bool:
        return watch.connection is not None and watch.connection in self._dialled

    async def end(self) -> None:
        """Ends all open streams. Waits at most `END_SECONDS` for them, because clients can hang."""
        for watch in self._all():
            watch.end()
        with anyio.move_on_after(END_SECONDS):
            for watch in self._all():
                if watch.open:
                    await watch.ended.wait()


log = structlog.get_logger()


class DevicePlugin(Servicer, v1beta1.DevicePluginBase):
    """The device plugin service of one resource."""

    def __init__(
        self,
        resource: ResourceName,
        allocator: AllocatorPort,
        containers: Containers | None = None,
        when_ended: Callable[[], None] = lambda: None,
    ) -> None:
        """
        `containers` builds the responses to Allocate; None: with the default configuration. `when_ended` is called when
        a ListAndWatch stream has ended.
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
        """Whether this connection is probably the kubelet's. With too many connections, the server closes it last."""
        return self.watches.favour(connection)

    async def get_device_plugin_options(self, message: v1beta1.Empty) -> v1beta1.DevicePluginOptions:
        """Answers GetDevicePluginOptions and records the caller: the kubelet calls it while it registers the plugin."""
        self.watches.dialled(caller())
        return plugin_options(by_amounts=self.by_amounts)

    @property
    def by_amounts(self) -> bool:
        """Whether the devices of the resource are units or slots of GPUs."""
        return self.allocator.state.hardware.kind_of(self.resource) in ("unit", "slot")

    async def list_and_watch(self, message: v1beta1.Empty) -> AsyncIterator[v1beta1.ListAndWatchResponse]:
        """Answers ListAndWatch: sends all devices of the resource, and again after each change."""
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
        """The preferred devices for one container; empty if there is no preference."""
        available = cast("list[DeviceID]", request.available_deviceIDs)  # thousands of shares: not converted one by one
        must_include = cast("list[DeviceID]", request.must_include_deviceIDs)
        try:
            devices = await self.allocator.prefer(self.resource, available, must_include, request.allocation_size)
        except (UnknownDevice, InvalidField, NoFit) as error:
            # an error would fail the pod; without a preference, it gets slower links at worst
            log.warning("no preference given", resource=self.resource, reason=error.finding)
            devices = ()
        return v1beta1.ContainerPreferredAllocationResponse(device_i_ds=list(devices))

    async def allocate(self, message: v1beta1.AllocateRequest) -> v1beta1.AllocateResponse:
        """
        Answers Allocate for all containers of a request or none. The allocations are on disk before the response.

        Raises ContainerUnready, before anything is recorded, if a container could not use the devices. Also raises the
        errors of `AllocatorPort.allocate`.
        """
        check_containers(message.container_requests)
        before = self.allocator.state.hardware
        listed = before.devices.get(self.resource, NO_DEVICES).listed
        sets = [listed(cast("list[DeviceID]", request.devices_ids)) for request in message.container_requests]
        writer = self.containers.now(before, self.resource)
        writer.check(before, sets)
        allocations = await self.allocator.allocate(self.resource, sets)
        hardware = self.allocator.state.hardware
        if any(each.instances for each in allocations):  # the CDI specification must contain them
            writer = self.containers.now(hardware, self.resource)
        responses = [
            writer.response(hardware, self.resource, each, self.allocator.named(self.resource, each))
            for each in allocations
        ]
        return v1beta1.AllocateResponse(container_responses=responses)

    async def pre_start_container(self, message: v1beta1.PreStartContainerRequest) -> v1beta1.PreStartContainerResponse:
        """
        Answers PreStartContainer when the owner of the devices is known, or has been read from PodResources. Raises the
        errors of `AllocatorPort.start_container`.
        """
        await self.allocator.start_container(self.resource, list(map(DeviceID, message.devices_ids)))
        return v1beta1.PreStartContainerResponse()


def check_containers(requests: Sequence[Any]) -> None:
    """Raises InvalidField for a request with more containers than a pod can have."""
    if len(requests) > MOST_CONTAINERS:
        raise InvalidField("container_requests", f"{len(requests)} containers", f"a pod has at most {MOST_CONTAINERS}")


REGISTER_SECONDS = 12.0
"""Maximum time of a registration. The kubelet allows ten seconds for its connection to the plugin."""


def socket_path(directory: Path, resource: ResourceName) -> Path:
    """
    The socket of a resource: `topoalign-nvidia.com_gpu.sock` in the kubelet's directory. If the path is too long, a
    digest replaces the resource name. No two resources share a socket, because the domain before the slash has no `_`.
    """
    plain = directory / f"topoalign-{resource.replace('/', '_')}.sock"
    return plain if len(os.fsencode(plain)) <= LONGEST_PATH else directory / digest_name(resource)


def digest_name(resource: str) -> str:
    """The shortest name of a resource's socket. It has the same length for all resources."""
    return f"topoalign-{sha256(resource.encode()).hexdigest()[:12]}.sock"


def plugin_options(*, by_amounts: bool) -> v1beta1.DevicePluginOptions:
    """
    The options of a plugin. PreStartContainer is requested only for units and slots of GPUs. These can be checked only
    after Allocate, when the container is known: cores and memory must be of the same GPU, and amounts must match those
    reserved for the container.
    """
    return v1beta1.DevicePluginOptions(pre_start_required=by_amounts, get_preferred_allocation_available=True)


async def register(path: Path, resource: ResourceName, clock: Clock, *, by_amounts: bool = False) -> None:
    """
    Registers the plugin whose socket is `path`, in the directory of the kubelet's socket. `by_amounts`: whether the
    resource has units or slots. Raises KubeletAway after at most `REGISTER_SECONDS`.

    During Register the kubelet connects to the plugin and requests its options. So the plugin must already be serving,
    and nothing may block the event loop. Source: kubelet v1.36.3, cm/devicemanager/plugin/v1beta1.
    """
    request = v1beta1.RegisterRequest(
        version=API_VERSION, endpoint=path.name, resource_name=resource, options=plugin_options(by_amounts=by_amounts)
    )
    await call_once(
        path.parent / KUBELET_SOCKET,
        lambda channel: v1beta1.RegistrationStub(channel).register(request),
        clock,
        REGISTER_SECONDS,
    )
