"""
Asks the kubelet whether it has what it was told.

A plugin that runs, has its stream open and has all its devices in nobody's books is the failure that is noticed last: pods
wait, and every part says that it is well. The kubelet's own list of what can be allocated tells. A kubelet that does not
serve that list is not asked again; one that does not answer now says nothing about us.

Source: PodResources v1 `GetAllocatableResources` of kubelet v1.36.3: the healthy devices of all plugins, held or not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import structlog
from anyio.lowlevel import checkpoint
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from topoalign.allocator.device_plugin.plugin import Plugin
from topoalign.core.ports import Clock
from topoalign.kubelet.grpc import sockets
from topoalign.kubelet.grpc.allocatable import Encoded, allocatable_devices
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.client import KubeletAway, described
from topoalign.kubelet.grpc.kept_channel import KeptChannel
from topoalign.runtime.clock import until_tick

log = structlog.get_logger()

GUARD_SECONDS = 10.0
"""Between two questions: the kubelet answers at most 100 a second for all who ask."""

ANSWER_SECONDS = 2.0

SLICE = 250
"""Messages of the answer that are read before others get their turn: a millisecond or two of work."""


class Guard:
    """Asks the kubelet regularly what it can allocate, and passes it to each plugin, which compares it with its devices."""

    def __init__(self, channel: KeptChannel, clock: Clock, plugins: Callable[[], Iterable[Plugin]]) -> None:
        """`channel`: to the kubelet's PodResources. `plugins`: those that are served now."""
        self._channel = channel
        self._clock = clock
        self._plugins = plugins
        self._unserved: sockets.Identity | None = None
        """The kubelet that has said that it does not serve the list."""

    async def run(self) -> None:
        """Polls the kubelet every `GUARD_SECONDS`, until cancelled."""
        while True:
            await self._clock.sleep(until_tick(self._clock, GUARD_SECONDS))
            await self.poll()

    async def poll(self) -> None:
        """
        Asks the kubelet once, and has every plugin compare. A kubelet that is away, or does not answer within
        `ANSWER_SECONDS`, changes nothing; one that does not serve the list is not asked again.
        """
        kubelet = sockets.identity(self._channel.path)
        if kubelet is None or kubelet == self._unserved:
            return
        try:
            answer = await self._channel.ask(allocatable, ANSWER_SECONDS, Encoded())
        except KubeletAway as away:
            log.debug("the kubelet does not say what can be allocated", reason=away.finding)
            return
        if answer is None:
            self._unserved = kubelet
            log.info("the kubelet does not serve what can be allocated: a loss of our devices will not be noticed")
            return
        try:
            await self._compare(answer)
        except GRPCError as error:
            log.debug("the kubelet does not say what can be allocated", reason=described(error))

    async def _compare(self, answer: bytes) -> None:
        """
        Has every plugin compare. One device that a plugin lists is enough to know that the kubelet shows it, so the answer
        is read to its end only where devices are missing. Raises GRPCError for what is no answer.
        """
        missing = {plugin.resource: plugin for plugin in self._plugins()}
        for number, (resource, devices) in enumerate(allocatable_devices(answer), 1):
            plugin = missing.get(resource)
            if plugin is not None and plugin.lists(devices):
                missing.pop(resource).compare(devices)
            if not missing:
                return
            if number % SLICE == 0:
                await checkpoint()
        for plugin in missing.values():
            plugin.compare(())


async def allocatable(channel: Channel) -> bytes | None:
    """
    Asks GetAllocatableResources over a channel that leaves the answer encoded. None if the kubelet does not serve it.

    Raises GRPCError for any other failure.
    """
    try:
        answer: Any = await v1.PodResourcesListerStub(channel).get_allocatable_resources(
            v1.AllocatableResourcesRequest()
        )
    except GRPCError as error:
        if error.status is Status.UNIMPLEMENTED:
            return None
        raise
    return bytes(answer)
