"""
Runs one device plugin for each resource of the node.

The configuration defines the resources, and can change at run time. A newly offered resource gets its plugin at once. A
resource that is no longer offered keeps its plugin while a container holds one of its devices, because the kubelet does
not restart such a container without the plugin. Meanwhile only the held devices are listed, as unhealthy, so that they
are not allocated again. When the last container ends, the plugin sends an empty list and stops.

Source: kubelet v1.36.3, devicemanager `callPreStartContainerIfNeeded`, `GetCapacity`.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import anyio
import structlog
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint
from grpclib.exceptions import GRPCError

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.plugin import FIELD, JITTER, Plugin
from topoalign.allocator.device_plugin.plugin_server import digest_name
from topoalign.allocator.device_plugin.registration import Jitter
from topoalign.allocator.ports import AllocatorPort
from topoalign.core.model.ids import ResourceName
from topoalign.core.ports import Clock
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.kubelet_client import KeptChannel, KubeletAway, describe_call_error
from topoalign.kubelet.grpc.pod_resources_codec import allocatable_devices
from topoalign.kubelet.grpc.transport import Load
from topoalign.runtime.clock import until_tick
from topoalign.runtime.directory_changes import DirectoryChanges

log = structlog.get_logger()

GUARD_SECONDS = 10.0
"""Poll interval. The kubelet serves at most 100 requests per second from all clients."""

ANSWER_SECONDS = 2.0

SLICE = 250
"""Number of messages of the response that are read before other tasks run: one or two milliseconds of work."""


ALLOCATABLE = v1.AllocatableResourcesRequest()


class Guard:
    """
    Polls the kubelet for its allocatable devices. Each plugin compares them with its own devices.

    If the kubelet has lost the devices of a plugin whose stream is open, pods stay pending although every component
    reports that it is healthy. Source: PodResources v1 `GetAllocatableResources` in kubelet v1.36.3, which returns the
    healthy devices of all plugins, allocated or not.
    """

    def __init__(self, channel: KeptChannel, clock: Clock, plugins: Callable[[], Iterable[Plugin]]) -> None:
        """`channel`: connection to the kubelet's PodResources API. `plugins` returns the running plugins."""
        self._channel = channel
        self._clock = clock
        self._plugins = plugins

    async def run(self) -> None:
        """Polls the kubelet every `GUARD_SECONDS`, until cancelled."""
        while True:
            await self._clock.sleep(until_tick(self._clock, GUARD_SECONDS))
            await self.poll()

    async def poll(self) -> None:
        """
        Polls the kubelet once, and passes the result to every plugin. If the kubelet does not answer within
        `ANSWER_SECONDS`, the plugins do not change.
        """
        try:
            answer = await self._channel.ask(
                lambda channel: v1.PodResourcesListerStub(channel).get_allocatable_resources(ALLOCATABLE),
                ANSWER_SECONDS,
                bytes,  # not decoded here: `_compare` reads all of it only if devices are missing
            )
            await self._compare(answer)
        except KubeletAway as away:
            log.debug("the kubelet does not report what can be allocated", reason=away.finding)
        except GRPCError as error:
            log.debug("the kubelet does not report what can be allocated", reason=describe_call_error(error))

    async def _compare(self, answer: bytes) -> None:
        """Passes the allocatable devices in `answer` to every plugin. Raises GRPCError for an invalid response."""
        missing = {plugin.resource: plugin for plugin in self._plugins()}
        for number, (resource, devices) in enumerate(allocatable_devices(answer), 1):
            plugin = missing.get(resource)
            # one device shows that the kubelet has the plugin's list
            if plugin is not None and plugin.lists(devices):
                missing.pop(resource).compare(devices)
            if not missing:
                return
            if number % SLICE == 0:
                await checkpoint()
        for plugin in missing.values():
            plugin.compare(())


class KubeletFront:
    """Starts and stops the device plugins as the resources of the node change."""

    def __init__(
        self,
        allocator: AllocatorPort,
        kubelet_dir: Path,
        clock: Clock,
        *,
        containers: Containers | None = None,
        pod_resources: KeptChannel | None = None,
        drain_seconds: float = 5.0,
        jitter: Jitter = JITTER,
        changes: DirectoryChanges | None = None,
    ) -> None:
        """
        `kubelet_dir`: the kubelet's device plugin directory. `containers` builds the responses to Allocate; None: with
        the default configuration. `pod_resources`: channel of the `Guard`; None: there is no guard. `drain_seconds`:
        maximum time for calls in progress to finish at shutdown. `jitter` spreads the retries of many nodes. `changes`
        reports changes in the directory; None: no reports.
        """
        self._allocator = allocator
        self._directory = kubelet_dir
        self._changes = changes or DirectoryChanges()
        self.plugins: dict[ResourceName, Plugin] = {}
        """The running plugins."""
        self.plugin_for = partial(
            Plugin,
            allocator=allocator,
            containers=containers or Containers(),
            directory=kubelet_dir,
            clock=clock,
            drain_seconds=drain_seconds,
            jitter=jitter,
            load=Load(),
            changes=self._changes,
        )
        self._guard = Guard(pod_resources, clock, self.plugins.values) if pod_resources is not None else None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Serves all resources of the node until cancelled. The topology and the kubelet can become available later, in
        any order. Raises InvalidField if the directory's path is too long for a Unix socket.
        """
        unix_sockets.check_path_length(self._directory / digest_name(""), FIELD)
        async with anyio.create_task_group() as tasks:
            if self._guard is not None:
                tasks.start_soon(self._guard.run)
            task_status.started()
            while True:
                version = self._allocator.version
                wanted = resources_to_serve(self._allocator.state)
                for resource, plugin in self.plugins.items():
                    if plugin.wanted != (resource in wanted):
                        plugin.wanted = not plugin.wanted
                        self._changes.wake()
                for resource in wanted - self.plugins.keys():
                    plugin = self.plugins[resource] = self.plugin_for(resource)
                    tasks.start_soon(self._serve, plugin)
                await self._allocator.wait_past(version)

    async def _serve(self, plugin: Plugin) -> None:
        while plugin.wanted:  # the resource may be offered again while the plugin stops
            await plugin.run()
        del self.plugins[plugin.resource]

    def reason(self) -> str | None:
        """Why the kubelet cannot allocate this node's devices now, for /readyz; None: it can."""
        if not self.plugins:
            return "the node has no devices to offer yet"
        return next((plugin.reason for plugin in self.plugins.values() if plugin.reason is not None), None)


def resources_to_serve(state: NodeState) -> set[ResourceName]:
    """The resources to serve: those offered, and former ones with held devices. Empty until the hardware is known."""
    if state.topology is None:
        return set()
    return state.ownership.former_resources | state.hardware.offers_of.keys()
