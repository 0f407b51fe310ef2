"""
The kubelet's side of the device plugin API, with the oddities of a real kubelet.

A plugin registers; within that call the kubelet dials back and asks for its options. From then on the devices of the
plugin are known only from its ListAndWatch stream. When a stream ends, for whatever reason, the devices of that
resource are unhealthy and the kubelet does not dial again: only a new registration brings them back, and without one
the resource is dropped after five minutes. If a plugin registers a second time, the end of its old stream removes the
new client too, because the kubelet finds the client by the name of its resource.

Source: kubelet v1.36.3, cm/devicemanager/plugin/v1beta1 and devicemanager `genericDeviceUpdateCallback`, `GetCapacity`.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Literal, cast

import anyio
import structlog
from anyio.abc import TaskGroup
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.core.model.errors import quoted
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import DeviceID, ResourceName, is_native
from topoalign.core.model.topology.model import PluginDevice
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.decoding import Codec
from topoalign.kubelet.grpc.kubelet_client import FAILURES, describe_call_error
from topoalign.kubelet.grpc.plugin_api import API_VERSION, HEALTHY, UNHEALTHY
from topoalign.kubelet.grpc.transport import Servicer

log = structlog.get_logger()

DIAL_SECONDS = 10.0
"""For dialling a plugin back; there is no deadline on Allocate or GetPreferredAllocation."""

GRACE_SECONDS = 300.0
"""How long the devices of a plugin that has stopped count as capacity."""

Fault = Literal["mute", "error", "lose_subscription"]
"""What can be told to go wrong: Register never answers, or answers with an error; lists of devices are not taken in."""


class Endpoint:
    """One resource: the plugin that serves it, and its devices as they were last listed."""

    def __init__(self, resource: ResourceName) -> None:
        self.resource = resource
        self.options = v1beta1.DevicePluginOptions()
        self.devices: dict[DeviceID, v1beta1.Device] = {}
        self.plugin: v1beta1.DevicePluginStub | None = None
        """None: it stopped. Its devices stay known for a while, and are unhealthy."""
        self.stopped_at = 0.0
        """Monotonic seconds."""

    def health(self, device: DeviceID) -> HealthState:
        """The health of a device; unhealthy without a connected plugin."""
        sound = self.plugin is not None and self.devices[device].health == HEALTHY
        return HealthState.HEALTHY if sound else HealthState.UNHEALTHY

    def client(self) -> v1beta1.DevicePluginStub:
        """Raises ConnectionRefusedError where the plugin has stopped, as a call to it would."""
        if self.plugin is None:
            raise ConnectionRefusedError(f"the plugin of {self.resource} has stopped")
        return self.plugin

    def stop(self, now: float) -> None:
        """End the plugin: its devices are unhealthy from now on. `now`: monotonic seconds."""
        plugin = self.plugin
        self.plugin = None
        if plugin is not None:
            self.stopped_at = now
            self.devices = {
                name: v1beta1.Device(id=device.id, health=UNHEALTHY, topology=device.topology)
                for name, device in self.devices.items()
            }
            plugin.channel.close()


class Plugins(Servicer, v1beta1.RegistrationBase):
    """All plugins of the node."""

    def __init__(self, directory: Path, tasks: TaskGroup, changed: Callable[[], None], clock: Clock) -> None:
        """`changed` is called whenever something about a device has been received."""
        self.endpoints: dict[ResourceName, Endpoint] = {}
        self.fault: Fault | None = None
        self.registrations = 0
        """Since the kubelet started, good or bad."""
        self.streams = 0
        """ListAndWatch streams that have not ended; more than one of a resource if its plugin registered again."""
        self.preferred: list[DeviceID] = []
        """What they have answered to GetPreferredAllocation in the admission that began last."""
        self._directory = directory
        self._tasks = tasks
        self._changed = changed
        self._clock = clock

    async def register(self, message: v1beta1.RegisterRequest) -> v1beta1.Empty:
        """
        Register a plugin: dial back, ask for its options, then read its stream.
        Raises GRPCError for another API version or a name that is no extended resource.
        """
        self.registrations += 1
        self._changed()
        if self.fault == "mute":
            await anyio.sleep_forever()
        if self.fault == "error":
            raise GRPCError(Status.UNKNOWN, "the kubelet was told to refuse")
        if message.version != API_VERSION:
            raise GRPCError(Status.UNKNOWN, f"requested API version {quoted([message.version])} is not supported")
        if not is_extended(message.resource_name):
            raise GRPCError(Status.UNKNOWN, f"the ResourceName {quoted([message.resource_name])} is invalid")
        plugin, options = await self.dial(message.endpoint)
        endpoint = Endpoint(ResourceName(message.resource_name))
        endpoint.plugin = plugin
        endpoint.options = options
        if endpoint.resource in self.endpoints:  # as they were, until it lists its own
            endpoint.devices = self.endpoints[endpoint.resource].devices
        self.endpoints[endpoint.resource] = endpoint
        self.streams += 1
        self._tasks.start_soon(self.watch, endpoint)
        return v1beta1.Empty()

    async def dial(self, name: str) -> tuple[v1beta1.DevicePluginStub, v1beta1.DevicePluginOptions]:
        """The options in the request are not looked at: the plugin itself is asked."""
        channel = Channel(path=str(self._directory / Path(name).name), codec=Codec())
        plugin = v1beta1.DevicePluginStub(channel)
        with ExitStack() as unless_answered:  # also where the kubelet stops meanwhile
            unless_answered.callback(channel.close)
            try:
                options = await plugin.get_device_plugin_options(v1beta1.Empty(), timeout=DIAL_SECONDS)
            except FAILURES as error:
                raise GRPCError(
                    Status.UNKNOWN, f"failed to dial device plugin: {describe_call_error(error)}"
                ) from error
            unless_answered.pop_all()
        return plugin, options

    async def watch(self, endpoint: Endpoint) -> None:
        """Each message replaces all that was known; the end of the stream is the end of the plugin."""
        stream = cast(
            AsyncGenerator[v1beta1.ListAndWatchResponse, None], endpoint.client().list_and_watch(v1beta1.Empty())
        )
        try:
            async with aclosing(stream) as responses:
                async for response in responses:
                    heard = response.devices if self.fault != "lose_subscription" else []
                    endpoint.devices = {DeviceID(device.id): device for device in heard}
                    self._changed()
            ended = "it ended the stream"
        except FAILURES as error:
            ended = describe_call_error(error)
        self.streams -= 1
        log.info("a plugin is away", resource=endpoint.resource, reason=ended)
        known_by_its_name = self.endpoints.get(endpoint.resource)  # which may be another than `endpoint` by now
        if known_by_its_name is not None:
            known_by_its_name.stop(self._clock.monotonic())
        self._changed()

    def forget_stopped(self) -> None:
        """Resources whose plugin has been away for too long are no resources of the node any more."""
        now = self._clock.monotonic()
        for resource, endpoint in list(self.endpoints.items()):
            if endpoint.plugin is None and now - endpoint.stopped_at > GRACE_SECONDS:
                del self.endpoints[resource]

    def remember(self, registered: Iterable[str]) -> None:
        """What a kubelet knows after its start: which resources were registered, and none of their devices."""
        for name in map(ResourceName, registered):
            endpoint = self.endpoints[name] = Endpoint(name)
            endpoint.stopped_at = self._clock.monotonic()

    def forgotten(self, resource: ResourceName) -> bool:
        """Whether it was registered, and no device of it is known since the kubelet started."""
        return resource in self.endpoints and not self.endpoints[resource].devices

    def stop(self) -> None:
        """The kubelet stops: it hears no more, and writes nothing more down."""
        self._changed = lose_subscription
        for endpoint in self.endpoints.values():
            endpoint.stop(self._clock.monotonic())

    def listed(self) -> Iterator[tuple[Endpoint, DeviceID, v1beta1.Device]]:
        """Each device that some plugin listed last, with its endpoint."""
        for endpoint in self.endpoints.values():
            for name, device in endpoint.devices.items():
                yield endpoint, name, device

    def devices(self) -> tuple[PluginDevice, ...]:
        """All devices with their resources and NUMA nodes."""
        return tuple(
            PluginDevice(id=name, resource=endpoint.resource, nodes=nodes_of(device))
            for endpoint, name, device in self.listed()
        )

    def health(self) -> dict[DeviceID, DeviceHealth]:
        """Device id -> health."""
        return {name: DeviceHealth(state=endpoint.health(name)) for endpoint, name, _ in self.listed()}

    def healthy(self) -> dict[str, list[str]]:
        """Resource -> ids of its healthy devices."""
        return {
            endpoint.resource: [name for name in endpoint.devices if endpoint.health(name) is HealthState.HEALTHY]
            for endpoint in self.endpoints.values()
        }


def nodes_of(device: v1beta1.Device) -> tuple[int, ...] | None:
    """None without a topology, () with one that names no node."""
    return None if device.topology is None else tuple(node.id for node in device.topology.nodes)


def is_extended(name: str) -> bool:
    """Whether plugins may bring a resource of this name: a domain that is not Kubernetes' own, then a name."""
    domain, _, rest = name.partition("/")
    kubernetes = domain == "kubernetes.io" or domain.endswith(".kubernetes.io") or name.startswith("requests.")
    return bool(domain and rest) and not kubernetes and not is_native(ResourceName(name))


def lose_subscription() -> None:
    """The default for a callback: do nothing."""
