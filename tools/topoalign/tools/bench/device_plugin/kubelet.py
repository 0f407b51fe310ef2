"""
A kubelet that only measures: it accepts registrations, calls the plugin, and takes the time at the last byte.

It uses gRPC's own C core (grpcio), which no other module imports, in a process without the plugin; answers are not
decoded. Like a real kubelet it dials a plugin back during its registration, then reads its devices on a stream.

Source: kubelet v1.36.3, cm/devicemanager; the APIs v1beta1 (device plugin) and v1 (PodResources).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, TypeVar

import grpc

from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import GPU, DeviceID, ResourceName
from topoalign.kubelet.grpc.api.v1beta1 import RegisterRequest
from topoalign.kubelet.grpc.decoding import field, iterate_fields, number_field

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""For each thing that is waited for; all of them take well under one, or the figures are of no use."""

NOTHING = b""
NUMA_NODE_0 = field(3, field(1, b""))
"""Field `topology` of a device that PodResources lists."""
HEALTHY_DEVICE = b"\x12\x07Healthy"
"""Field `health` of a device that is; what the message says besides is not looked at."""

Call = Callable[[bytes], bytes]


class BenchStuck(Unavailable):
    """Something that the benchmark waits for did not come."""

    code = "BenchStuck"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} within {PATIENCE_SECONDS:g} s", "run it again on a quiet machine; the agent's log is on stderr"
        )


class Came(NamedTuple):
    """The lists of devices, and when the last byte of the newest was there (monotonic seconds)."""

    at: float
    message: bytes

    @property
    def healthy(self) -> int:
        """The number of healthy devices in the list, counted in the encoded bytes."""
        return self.message.count(HEALTHY_DEVICE)


class Kubelet:
    """The kubelet of a directory. It is there from `start`, which may come again, to `stop`."""

    def __init__(self, directory: Path, resources: Sequence[ResourceName] = (GPU,)) -> None:
        """`resources`: those whose plugins are called and whose lists are read."""
        self.resources = tuple(resources)
        self.plugins_dir = directory / "device-plugins"
        self.resources_dir = directory / "pod-resources"
        for each in (self.plugins_dir, self.resources_dir):
            each.mkdir()
        self.registered: SimpleQueue[float] = SimpleQueue()
        """When a plugin of the resources did (monotonic seconds)."""
        self.lists: SimpleQueue[Came] = SimpleQueue()
        """The lists of all their devices, whenever one came."""
        self.looks = 0
        """How often PodResources was asked."""
        self.pods = NOTHING
        """What PodResources answers."""
        self._told: dict[bytes, bytes] = {}
        """The newest list of each resource."""
        self._channel_of: dict[str, grpc.Channel] = {}
        self._channels: list[grpc.Channel] = []
        self._servers: list[grpc.Server] = []

    def start(self) -> None:
        """As a kubelet does: sweeps the sockets that are there, ours included, and listens at its own."""
        for socket in self.plugins_dir.glob("*.sock"):
            socket.unlink()
        self.registered = SimpleQueue()
        self.lists = SimpleQueue()
        self._told.clear()
        lister = {"List": self._list, "GetAllocatableResources": self._allocatable}
        self._servers = [
            served(self.plugins_dir / "kubelet.sock", "v1beta1.Registration", {"Register": self._register}),
            served(self.resources_dir / "kubelet.sock", "v1.PodResourcesLister", lister),
        ]

    def stop(self) -> None:
        """Close the sockets and the connections to the plugins."""
        for server in self._servers:
            server.stop(None).wait()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def method(self, name: str, resource: ResourceName = GPU) -> Call:
        """A method of the plugin of a resource, which has registered: bytes in and bytes out."""
        call = self._channel_of[resource].unary_unary(f"/v1beta1.DevicePlugin/{name}")
        return lambda request: call(request, timeout=PATIENCE_SECONDS)

    def future(self, name: str) -> Callable[[bytes], grpc.Future]:
        """A method of the plugin of the GPUs that returns before it is answered."""
        call = self._channel_of[GPU].unary_unary(f"/v1beta1.DevicePlugin/{name}")
        return lambda request: call.future(request, timeout=PATIENCE_SECONDS)

    def until(self, enough: Callable[[Came], bool], otherwise: str) -> Came:
        """The first list of which this holds. Raises BenchStuck."""
        while True:
            came = next_of(self.lists, otherwise)
            if enough(came):
                return came

    def until_registered(self) -> float:
        """When the plugin of the GPUs has (monotonic seconds). Raises BenchStuck."""
        return next_of(self.registered, "the GPUs were not registered")

    def show(self, *containers: Sequence[DeviceID]) -> None:
        """From now on PodResources shows a pod with one container for each of these sets of GPUs."""
        self.show_parts(*({GPU: devices} for devices in containers))

    def show_parts(self, *containers: Mapping[ResourceName, Sequence[DeviceID]]) -> None:
        """The same for containers with devices of several resources: a message for each device, as a kubelet lists them."""
        pods = []
        for number, parts in enumerate(containers):
            held = b"".join(
                field(2, field(1, resource.encode()) + field(2, device.encode()) + NUMA_NODE_0)
                for resource, devices in parts.items()
                for device in devices
            )
            container = field(3, field(1, b"main") + held)
            pods.append(field(1, field(1, f"bench-{number}".encode()) + field(2, b"default") + container))
        self.pods = b"".join(pods)

    def show_nothing(self) -> None:
        """Let PodResources list no pod, so that the agent releases all devices."""
        self.pods = NOTHING

    def _register(self, request: bytes) -> bytes:
        """Options of RegisterRequest are not looked at: the plugin is asked, as a kubelet does."""
        told = dict(fields_of(request))
        channel = grpc.insecure_channel(
            f"unix:{self.plugins_dir / told[2].decode()}", options=[("grpc.max_receive_message_length", -1)]
        )
        self._channels.append(channel)
        channel.unary_unary("/v1beta1.DevicePlugin/GetDevicePluginOptions")(NOTHING, timeout=PATIENCE_SECONDS)
        if (resource := ResourceName(told[3].decode())) in self.resources:
            self._channel_of[resource] = channel
            self.registered.put(time.monotonic())
        Thread(target=self._listen, args=(channel, told[3]), daemon=True).start()
        return NOTHING

    def _listen(self, channel: grpc.Channel, resource: bytes) -> None:
        with suppress(
            grpc.RpcError, ValueError
        ):  # it ends with the plugin, or with us: the channel may be closed already
            for message in channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(NOTHING):
                self._told[resource] = message
                if resource.decode() in self.resources:
                    at = time.monotonic()
                    lists = (self._told.get(name.encode(), NOTHING) for name in self.resources)
                    self.lists.put(Came(at, b"".join(lists)))

    def _allocatable(self, request: bytes) -> bytes:
        """The healthy devices of all resources."""
        answer = []
        for resource, message in [*self._told.items()]:
            devices = [dict(fields_of(device)) for _, device in fields_of(message)]
            healthy = b"".join(field(2, device[1]) for device in devices if device[2] == b"Healthy")
            answer.append(field(1, field(1, resource) + healthy))
        return b"".join(answer)

    def _list(self, request: bytes) -> bytes:
        self.looks += 1
        return self.pods


def fields_of(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of each field of a message."""
    for each in iterate_fields(message, 0, len(message), RegisterRequest):
        yield each.number, message[each.content : each.end]


def served(socket: Path, service: str, methods: Mapping[str, Call]) -> grpc.Server:
    """A service with these methods on a socket of its own."""
    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {name: grpc.unary_unary_rpc_method_handler(partial(ignoring_context, m)) for name, m in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    socket.unlink(missing_ok=True)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def ignoring_context(answer: Call, request: bytes, context: object) -> bytes:
    """The answer to a request, in the form of grpcio's handlers."""
    return answer(request)


def next_of(queue: "SimpleQueue[T]", otherwise: str) -> T:
    """The next item of the queue. Raises BenchStuck with `otherwise` after PATIENCE_SECONDS."""
    try:
        return queue.get(timeout=PATIENCE_SECONDS)
    except Empty as error:
        raise BenchStuck(otherwise) from error


def preferred_allocation_request(available: Sequence[DeviceID], size: int) -> bytes:
    """An encoded GetPreferredAllocation for `size` of these devices."""
    return field(1, b"".join(field(1, device.encode()) for device in available) + number_field(3, size))


def allocate_request(devices: Sequence[DeviceID]) -> bytes:
    """An encoded Allocate for one container."""
    return field(1, b"".join(field(1, device.encode()) for device in devices))


def pre_start_request(devices: Sequence[DeviceID]) -> bytes:
    """An encoded PreStartContainer."""
    return b"".join(field(1, device.encode()) for device in devices)
