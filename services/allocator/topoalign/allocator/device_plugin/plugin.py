"""
Serves one resource to the kubelet: its socket, its registration, and its ListAndWatch stream.

A kubelet that restarts loses its plugin registrations silently. The kubelet can start long after the allocator, delete
the plugin's socket together with its directory, or accept a registration and never open a stream. So a plugin does not
rely on events: it polls the actual state twice a second and reconciles it. If the kernel reports changes in the
directory (`runtime.directory_changes`), the plugin also polls after each change. While the stream is open, it otherwise
polls only every `QUIET_SECONDS`. The table in `registration` defines the reaction to each event.

The plugin ends the old stream before it registers again. If an old stream ends after the registration, the kubelet
drops its newest client (kubelet v1.36.3, devicemanager runClient).
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from random import SystemRandom

import structlog

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.device_plugin.listing import api_health
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin, register, socket_path
from topoalign.allocator.device_plugin.registration import (
    POLL_SECONDS,
    QUIET_SECONDS,
    SETTLE_SECONDS,
    Jitter,
    Registration,
    RegistrationEvent,
    RegistrationState,
)
from topoalign.allocator.ports import AllocatorPort
from topoalign.core.model.errors import StateFault
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.topology.device_sets import NO_DEVICES
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.kubelet_client import KubeletAway
from topoalign.kubelet.grpc.plugin_api import HEALTHY, KUBELET_SOCKET
from topoalign.kubelet.grpc.transport import GrpcServer, Load
from topoalign.runtime.clock import until_tick
from topoalign.runtime.directory_changes import DirectoryChanges

log = structlog.get_logger()

FIELD = "TOPOALIGN_KUBELET_DIR"

JITTER: Jitter = SystemRandom().random


class Plugin:
    """Serves one resource to the kubelet. Keeps the socket in place, the resource registered, and the stream open."""

    def __init__(
        self,
        resource: ResourceName,
        allocator: AllocatorPort,
        containers: Containers,
        directory: Path,
        clock: Clock,
        drain_seconds: float,
        jitter: Jitter,
        load: Load,
        changes: DirectoryChanges,
    ) -> None:
        """`changes` reports changes in `directory`."""
        self.resource = resource
        self.path = socket_path(directory, resource)
        self.service = DevicePlugin(resource, allocator, containers, changes.wake)
        self.reason: str | None = f"{resource} is not served yet"
        self.wanted = True
        """False: no device of the resource is offered or held, so `run` returns before its next poll."""
        self._allocator = allocator
        self._kubelet = directory / KUBELET_SOCKET
        self._clock = clock
        self._drain_seconds = drain_seconds
        self._load = load
        self._changes = changes
        self._server: GrpcServer | None = None
        self._registration = Registration(jitter)
        self._former = self.service.watch
        """The kubelet's stream before the last registration."""
        self._judges_starts: bool | None = None
        """Whether the last registration requested PreStartContainer calls from the kubelet."""

    async def run(self) -> None:
        """Polls repeatedly until cancelled or no longer `wanted`, then closes the socket."""
        try:
            while self.wanted:
                change = self._changes.next_change
                is_watched = self._changes.watch(self.path.parent)
                self.settle(await self.poll() or self.missing_devices())
                if is_watched:
                    period = QUIET_SECONDS if self._registration.state is RegistrationState.LISTENING else POLL_SECONDS
                    await self._changes.wait(change, self._clock, until_tick(self._clock, period))
                    if change.is_set():
                        await self._clock.sleep(SETTLE_SECONDS)
                else:
                    await self._clock.sleep(until_tick(self._clock, POLL_SECONDS))
        finally:
            await self.stop()

    async def poll(self) -> str | None:
        """Creates a missing socket, and registers if due. Returns why the resource is not served; None: it is."""
        if self._server is not None and not self._server.in_place:
            log.info("the socket was deleted and is created again", socket=self.path.name)
            await self.stop()
            self._registration.apply(RegistrationEvent.SOCKET_LOST, self._clock.monotonic())
        if self._server is None:
            server = GrpcServer(self.service, self.path, FIELD, self._load)
            try:
                await server.listen()
            except StateFault as fault:
                return f"{fault.finding}; {fault.remedy}"
            self._server = server
        return await self.poll_kubelet()

    async def poll_kubelet(self) -> str | None:
        """Registers with the kubelet if due. Returns why the resource is not served; None: it is."""
        kubelet = unix_sockets.identity(self._kubelet)
        now = self._clock.monotonic()
        if kubelet is None:
            self._registration.apply(RegistrationEvent.KUBELET_AWAY, now)
            there = f"no {KUBELET_SOCKET} in {self._kubelet.parent}"
            return f"the kubelet has {there}; check that it runs, and that {FIELD} is right"
        if self._registration.is_registered and self._judges_starts is not self.service.by_amounts:
            log.info("registering again because the sharing of its devices has changed", resource=self.resource)
            self._registration.apply(RegistrationEvent.LOST, now)
        if not self._registration.meet(kubelet, now):
            if self._registration.is_registered:
                return self.listen(now)
            if now < self._registration.ask_at:
                return self.reason or f"{self.resource} is about to be registered again"
        return await self.register()

    async def register(self) -> str | None:
        """Ends the open streams, then registers once. Returns why this failed; None: it succeeded."""
        await self.service.watches.end()
        if self.service.watches.open:
            await self.stop()
            self._registration.apply(RegistrationEvent.SOCKET_LOST, self._clock.monotonic())
            return "the old stream to the kubelet does not end; its connection was closed"
        self._former = self.service.watch
        self._judges_starts = self.service.by_amounts
        try:
            with self.service.watches.registering():
                await register(self.path, self.resource, self._clock, by_amounts=self._judges_starts)
        except KubeletAway as away:
            self._registration.apply(RegistrationEvent.REFUSED, self._clock.monotonic())
            return f"{away.finding}; {away.remedy}"
        self._registration.apply(RegistrationEvent.ACCEPTED, self._clock.monotonic())
        return None

    def listen(self, now: float) -> str | None:
        """Checks the stream after a registration. Returns why the resource is not served; None: it is."""
        watch = self.service.watch
        has_ended = watch is not self._former and watch.ended.is_set()
        match self._registration.listen(is_open=watch.open, has_ended=has_ended, now=now):
            case None:
                return self.reason
            case RegistrationEvent.UNWATCHED:
                # the kubelet has dropped the resource and opens a stream only after a new registration
                return f"the kubelet does not listen to {self.resource}"
            case _:
                return None

    def missing_devices(self) -> str | None:
        """Why the kubelet is assumed to have lost the devices although its stream is open; None: it is not."""
        if not self._registration.visibility.is_lost:
            return None
        return f"the kubelet listens to {self.resource}, and shows none of its healthy devices"

    def lists(self, devices: Iterable[DeviceID]) -> bool:
        """Whether any of these devices is listed for the resource."""
        listed = self._allocator.state.hardware.devices.get(self.resource, NO_DEVICES)
        return any(device in listed for device in devices)

    def compare(self, shown: Collection[DeviceID]) -> None:
        """
        Compares the kubelet's allocatable devices with those of the resource. If the kubelet's stream is open and it
        shows none of the healthy devices that it was sent, it has lost them, and only a new registration restores them.
        """
        visibility = self._registration.visibility
        if not self.service.watch.open or not self._registration.is_registered:
            visibility.stop_listening()
            return
        state = self._allocator.state
        listed = () if self.lists(shown) else state.hardware.devices.get(self.resource, ())
        healthy = sum(api_health(state, device) == HEALTHY for device in listed)
        if not healthy:
            visibility.show()
            return
        now = self._clock.monotonic()
        if visibility.hide(now):
            log.error("the kubelet has lost the devices: registering again", resource=self.resource, devices=healthy)
            self._registration.apply(RegistrationEvent.LOST, now)
            self._changes.wake()

    def settle(self, reason: str | None) -> None:
        """Sets why the resource is not served (None: it is), and logs each change once."""
        if reason != self.reason:
            self.reason = reason
            if reason is None:
                log.info("registered with the kubelet", resource=self.resource, socket=self.path.name)
            else:
                log.warning("not registered with the kubelet", resource=self.resource, reason=reason)

    async def stop(self) -> None:
        """Waits for the calls in progress, then closes and removes the socket."""
        server = self._server
        self._server = None
        self._registration.apply(RegistrationEvent.STOPPED, self._clock.monotonic())
        if server is not None:
            await server.stop(self._drain_seconds)
