"""
The node's place in the kubelet: one device plugin per resource, kept there for as long as this process lives.

The kubelet forgets its plugins when it restarts, and tells nobody. It may come up long after us, may sweep its directory
with our sockets in it, may accept a registration and never listen. So nothing here waits for an event that might not come:
twice a second each plugin looks at what is there, and mends what is not as it should be. Nothing that the kubelet does
ends this process.

The order matters in one place: a stream to the kubelet is ended before a new registration, because the kubelet drops its
newest client when an old stream ends late (kubelet v1.36.3, devicemanager runClient).
"""

from collections.abc import Callable
from pathlib import Path
from random import SystemRandom

import anyio
import structlog
from anyio.abc import TaskStatus

from topoalign.allocator.kubelet import sockets
from topoalign.allocator.kubelet.client import KubeletAway
from topoalign.allocator.kubelet.desk import Desk
from topoalign.allocator.kubelet.registration import KUBELET_SOCKET, register, socket_name
from topoalign.allocator.kubelet.server import DevicePlugin
from topoalign.allocator.kubelet.transport import Server
from topoalign.core.errors import StateFault
from topoalign.core.ids import GPU, NIC, ResourceName
from topoalign.core.ports import Clock

log = structlog.get_logger()

RESOURCES = (GPU, NIC)
FIELD = "TOPOALIGN_KUBELET_DIR"

LOOK_SECONDS = 0.5
"""Between two looks. A kubelet that restarts has its resources back within a second."""

LISTEN_SECONDS = 5.0
"""How long a kubelet that has registered us may go without a ListAndWatch stream before we register anew."""

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 16.0

Jitter = Callable[[], float]
"""A number from 0 to 1."""

JITTER: Jitter = SystemRandom().random


class KubeletFront:
    """All plugins of the node."""

    def __init__(
        self,
        desk: Desk,
        kubelet_dir: Path,
        clock: Clock,
        *,
        drain_seconds: float = 5.0,
        jitter: Jitter = JITTER,
    ) -> None:
        """
        `kubelet_dir`: the kubelet's device plugin directory. `drain_seconds`: how long calls that have begun may go on
        when this is stopped. `jitter` spreads the retries of many nodes.
        """
        self._desk = desk
        self._plugins = {
            resource: Plugin(resource, desk, kubelet_dir, clock, drain_seconds, jitter) for resource in RESOURCES
        }
        self._served: dict[ResourceName, Plugin] = {}

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """
        Serves every resource that the node has devices of, from when it has them, until cancelled.

        Started at once: the topology and the kubelet may come later, in any order, and `reason` says what is missing.
        Raises InvalidField if the directory's path is too long for a socket.
        """
        for plugin in self._plugins.values():
            sockets.check_length(plugin.path, FIELD)
        async with anyio.create_task_group() as tasks:
            task_status.started()
            while True:
                version = self._desk.version
                for resource, plugin in self._plugins.items():
                    if resource not in self._served and self._desk.state.hardware.devices.get(resource):
                        self._served[resource] = plugin
                        tasks.start_soon(plugin.run)
                await self._desk.beyond(version)

    def reason(self) -> str | None:
        """Why the kubelet cannot hand out this node's devices now; None if it can."""
        if not self._served:
            return "the node has no devices to offer yet"
        return next((plugin.reason for plugin in self._served.values() if plugin.reason is not None), None)


class Plugin:
    """One resource's socket and registration."""

    def __init__(
        self,
        resource: ResourceName,
        desk: Desk,
        directory: Path,
        clock: Clock,
        drain_seconds: float,
        jitter: Jitter,
    ) -> None:
        self.resource = resource
        self.path = directory / socket_name(resource)
        self.service = DevicePlugin(resource, desk)
        self.reason: str | None = f"{resource} is not served yet"
        self._directory = directory
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._jitter = jitter
        self._server: Server | None = None
        self._registered: sockets.Identity | None = None
        """The kubelet that knows us. None: none does."""
        self._tried: sockets.Identity | None = None
        """The kubelet that was asked last."""
        self._failures = 0
        self._again = 0.0
        """Monotonic seconds before which `_tried` is not asked again."""
        self._heard_until = 0.0
        """Monotonic seconds until which a registered kubelet need not have a stream."""

    async def run(self) -> None:
        try:
            while True:
                self.settle(await self.look())
                await self._clock.sleep(LOOK_SECONDS)
        finally:
            await self.stop()

    async def look(self) -> str | None:
        """Brings everything into place as far as it goes now; says what is missing."""
        if self._server is not None and not self._server.in_place:
            log.info("the socket has gone, made anew", socket=self.path.name)
            await self.stop()
            # the kubelet, if it lives, must see its stream end before it hears from us again
            self._again = self._clock.monotonic() + LOOK_SECONDS
        if self._server is None:
            server = Server(self.service, self.path, FIELD)
            try:
                await server.listen()
            except StateFault as fault:
                return fault.finding
            self._server = server
        kubelet = sockets.identity(self._directory / KUBELET_SOCKET)
        if kubelet is None:
            self._registered = None
            return f"the kubelet has no {KUBELET_SOCKET} in {self._directory}"
        if kubelet == self._registered:
            return self.heard()
        if kubelet != self._tried:
            self._tried, self._failures = kubelet, 0
        elif self._clock.monotonic() < self._again:
            return self.reason or f"{self.resource} is about to be registered again"
        return await self.register(kubelet)

    async def register(self, kubelet: sockets.Identity) -> str | None:
        self._registered = None
        await self.service.end_watch()
        if self.service.watch.open:
            await self.stop()
            return "the old stream to the kubelet does not end; its connection was closed"
        try:
            await register(self._directory, self.resource, self._clock)
        except KubeletAway as away:
            wait = min(FIRST_RETRY_SECONDS * 2**self._failures, LAST_RETRY_SECONDS)
            self._again = self._clock.monotonic() + wait * (0.5 + self._jitter() / 2)
            self._failures += 1
            return away.finding
        self._registered, self._failures = kubelet, 0
        self._heard_until = self._clock.monotonic() + LISTEN_SECONDS
        return None

    def heard(self) -> str | None:
        """
        A kubelet that ends its stream, or never opens one, has dropped the resource and will not dial again: only a new
        registration brings it back.
        """
        now = self._clock.monotonic()
        if self.service.watch.open:
            self._heard_until = now + LISTEN_SECONDS
            return None
        if now < self._heard_until:
            return self.reason
        self._registered, self._again = None, now
        return f"the kubelet does not listen to {self.resource}"

    def settle(self, reason: str | None) -> None:
        """Logs once per change of state, not once per look."""
        if reason != self.reason:
            self.reason = reason
            if reason is None:
                log.info("registered with the kubelet", resource=self.resource, socket=self.path.name)
            else:
                log.warning("not registered with the kubelet", resource=self.resource, reason=reason)

    async def stop(self) -> None:
        """Lets calls that have begun end, then closes and removes the socket."""
        server, self._server, self._registered = self._server, None, None
        if server is not None:
            await server.stop(self._drain_seconds)
