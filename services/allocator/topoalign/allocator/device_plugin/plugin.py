"""
One resource's place in the kubelet: its socket, its registration, and the stream that the kubelet listens to.

The kubelet forgets its plugins when it restarts, and tells nobody. It may come up long after us, may sweep its directory
with our socket in it, may accept a registration and never listen. So nothing here waits for an event that might not come:
twice a second a plugin looks at what is there, and mends what is not as it should be. Nothing that the kubelet does ends
this process.

The order matters in one place: a stream to the kubelet is ended before a new registration, because the kubelet drops its
newest client when an old stream ends late (kubelet v1.36.3, devicemanager runClient).
"""

from collections.abc import Callable, Collection
from pathlib import Path
from random import SystemRandom

import structlog

from topoalign.allocator.device_plugin.containers import Containers
from topoalign.allocator.device_plugin.registration import register, socket_path
from topoalign.allocator.device_plugin.server import DevicePlugin
from topoalign.allocator.ports import Desk
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import sockets
from topoalign.kubelet.grpc.client import KubeletAway
from topoalign.kubelet.grpc.plugin_api import KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import Load, Server
from topoalign.runtime.backoff import backoff_seconds

log = structlog.get_logger()

FIELD = "TOPOALIGN_KUBELET_DIR"

POLL_SECONDS = 0.5
"""Between two looks. A kubelet that restarts has its resources back within a second."""

LISTEN_SECONDS = 5.0
"""How long a kubelet that has registered us may go without a ListAndWatch stream before we register anew."""

FIRST_RETRY_SECONDS = 1.0
LAST_RETRY_SECONDS = 16.0

UNSEEN_LOOKS = 2
"""So often in a row the kubelet must show nothing of ours: once may be the moment before it has read a list."""

FIRST_DOUBT_SECONDS = 10.0
LAST_DOUBT_SECONDS = 640.0
"""Between two registrations with a kubelet that listens and shows nothing."""

Jitter = Callable[[], float]
"""A number from 0 to 1."""

JITTER: Jitter = SystemRandom().random


class Plugin:
    """Serves one resource."""

    def __init__(
        self,
        resource: ResourceName,
        desk: Desk,
        containers: Containers,
        directory: Path,
        clock: Clock,
        drain_seconds: float,
        jitter: Jitter,
        load: Load | None = None,
    ) -> None:
        self.resource = resource
        self.path = socket_path(directory, resource)
        self.service = DevicePlugin(resource, desk, containers)
        self.reason: str | None = f"{resource} is not served yet"
        self.wanted = True
        """False: there is nothing of the resource any more, and `run` ends at its next look."""
        self._desk = desk
        self._directory = directory
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._jitter = jitter
        self._load = load or Load()
        self._server: Server | None = None
        self._registered: sockets.Identity | None = None
        """The kubelet that knows us. None: none does."""
        self._tried: sockets.Identity | None = None
        """The kubelet that was asked last."""
        self._failures = 0
        """Registrations in a row that were refused, or after which it did not go on listening."""
        self._again = 0.0
        """Monotonic seconds before which `_tried` is not asked again."""
        self._registered_at = 0.0
        self._heard_until = 0.0
        """Monotonic seconds until which a registered kubelet need not have a stream."""
        self._former = self.service.watch
        """The stream from before the registration."""
        self._doubt: str | None = None
        """Why a kubelet that listens is not believed to have heard. None: it is."""
        self._unseen = self._doubts = 0
        self._doubt_again = 0.0
        """Monotonic seconds before which doubt is no reason to register anew."""

    async def run(self) -> None:
        """Until cancelled, or no longer wanted."""
        try:
            while self.wanted:
                self.settle(await self.look() or self._doubt)
                await self._clock.sleep(POLL_SECONDS)
        finally:
            await self.stop()

    async def look(self) -> str | None:
        """Brings everything into place as far as it goes now; says what is missing."""
        if self._server is not None and not self._server.in_place:
            log.info("the socket has gone, made anew", socket=self.path.name)
            await self.stop()
            # the kubelet, if it lives, must see its stream end before it hears from us again
            self._again = self._clock.monotonic() + POLL_SECONDS
        if self._server is None:
            server = Server(self.service, self.path, FIELD, self._load)
            try:
                await server.listen()
            except StateFault as fault:
                return f"{fault.finding}; {fault.remedy}"
            self._server = server
        kubelet = sockets.identity(self._directory / KUBELET_SOCKET)
        if kubelet is None:
            self._registered = None
            return (
                f"the kubelet has no {KUBELET_SOCKET} in {self._directory}; see that it runs, and that {FIELD} is right"
            )
        if kubelet == self._registered:
            return self.heard()
        if kubelet != self._tried:
            self._tried, self._failures, self._doubts = kubelet, 0, 0
            self._doubt, self._doubt_again = None, 0.0
        elif self._clock.monotonic() < self._again:
            return self.reason or f"{self.resource} is about to be registered again"
        return await self.register(kubelet)

    async def register(self, kubelet: sockets.Identity) -> str | None:
        self._registered = None
        await self.service.watches.end()
        if self.service.watches.open:
            await self.stop()
            return "the old stream to the kubelet does not end; its connection was closed"
        self._former = self.service.watch
        listener = sockets.server_of(self._directory / KUBELET_SOCKET)
        try:
            with self.service.watches.registering(listener.pid if listener is not None else 0):
                await register(self.path, self.resource, self._clock)
        except KubeletAway as away:
            self.later()
            return f"{away.finding}; {away.remedy}"
        now = self._clock.monotonic()
        self._registered, self._registered_at, self._heard_until = kubelet, now, now + LISTEN_SECONDS
        return None

    def later(self) -> None:
        """The kubelet is asked again after a while, the longer the more often it was in vain."""
        self._failures += 1
        wait = backoff_seconds(self._failures, FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)
        self._again = self._clock.monotonic() + wait * (0.5 + self._jitter() / 2)

    def heard(self) -> str | None:
        """
        A kubelet that ends its stream, or never opens one, has dropped the resource and will not dial again: only a new
        registration brings it back.
        """
        now, watch = self._clock.monotonic(), self.service.watch
        if watch.open:
            self._heard_until = now + LISTEN_SECONDS
            if now >= self._registered_at + LISTEN_SECONDS:
                self._failures = 0
            return None
        ended = watch is not self._former and watch.ended.is_set()
        if now < self._heard_until and not ended:
            return self.reason
        self._registered = None
        self.later()
        return f"the kubelet does not listen to {self.resource}"

    def compare(self, shown: Collection[DeviceID]) -> None:
        """
        Judges what the kubelet shows as allocatable of this resource. One that listens, was told of healthy devices and
        shows none of them has lost us without knowing: only a new registration helps, and not at once if one did not.
        """
        if not self.service.watch.open or self._registered is None:
            self._unseen = 0
            return
        listed = self._desk.state.hardware.devices.get(self.resource, {})
        seen = any(device in listed for device in shown)
        told = [] if seen else [device for device in listed if self._desk.state.health_of(device).usable]
        if not told:
            if self._doubt is not None:
                log.info("the kubelet shows our devices again", resource=self.resource)
            self._doubt, self._unseen, self._doubts = None, 0, 0
            return
        self._unseen += 1
        if self._unseen < UNSEEN_LOOKS:
            return
        self._doubt = f"the kubelet listens to {self.resource}, and shows none of its {len(told)} healthy devices"
        now = self._clock.monotonic()
        if now >= self._doubt_again:
            log.error("the kubelet has lost our devices: registering anew", resource=self.resource, devices=len(told))
            self._doubts += 1
            self._doubt_again = now + backoff_seconds(self._doubts, FIRST_DOUBT_SECONDS, LAST_DOUBT_SECONDS)
            self._unseen = 0
            self._registered, self._again = None, now

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
