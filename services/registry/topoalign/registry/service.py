"""
Runs the registry: subscribes to all nodes and folds their facts.

Two streams are read from their beginning, with the client that every subscriber uses. It drops repetitions, closes
gaps, and puts messages that cannot be decoded on the dead-letter stream. In addition, each allocator is asked at
intervals whether it is alive. Its answer identifies its newest facts. If the view here differs, the services of the
node are asked to publish again.

A node is stale after two requests in a row without an answer. One is not enough: while the event loop is blocked,
answers are not read, and afterwards all requests time out before the first answer is read.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import anyio
import structlog
from anyio.abc import TaskStatus

from topoalign.client import Client, Delivery
from topoalign.client.stored_records import has_published
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.events import LedgerFact
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Clock, Stream
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.metrics import RegistryMetrics
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime.request_turns import TaskTurns
from topoalign.runtime.tasks import for_each, wait_for_first

FOLLOWED = (Stream.NODES, Stream.ALLOCATIONS)

ASKED_AT_ONCE = 32
"""Number of concurrent requests to allocators, limited so that the answers of a large cluster do not come at once."""
TRIES = 2
"""Requests to an allocator in one round if it does not answer."""
PAUSE = 0.1
"""Seconds between two checks whether the stored facts have been read."""

log = structlog.get_logger("topoalign.registry")


class Registry:
    """The service. `run` keeps the `Cluster` up to date."""

    def __init__(
        self,
        bus: Bus,
        clock: Clock,
        client: Client,
        cluster: Cluster,
        metrics: RegistryMetrics,
        settings: RegistrySettings,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._settings = settings
        self._client = client
        self._cluster = cluster
        self._metrics = metrics
        client.kept.forgotten.append(cluster.forget)
        self._ask_now = anyio.Event()
        self._asked = False
        """Whether every allocator has been asked at least once."""

    def unasked(self) -> str | None:
        """Why it is unknown which allocators answer; None: it is known."""
        return None if self._asked else "not every allocator was asked yet"

    def behind(self) -> str | None:
        """Readiness: why stored facts have not been read yet; None: all have been read."""
        for stream in FOLLOWED:
            unread = self._client.unread.get(stream)
            if unread is None:
                return f"{stream} is not reached yet"
            if unread > 0:
                return f"up to {unread} messages of {stream} are not read yet"
        return None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Follows both streams and asks the allocators at intervals, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow, self._client.nodes())
            tasks.start_soon(self._follow, self._client.allocations(since=0, superseded=False))
            tasks.start_soon(self._ask_regularly)
            task_status.started()

    async def _follow(self, events: AsyncGenerator[Delivery, None]) -> None:
        async with aclosing(events):
            async for delivery in events:
                known = delivery.event.node in self._cluster
                self._cluster.apply(delivery)
                self._metrics.events.labels(type(delivery.event).__name__).inc()
                if self.behind() is not None:
                    continue
                if isinstance(delivery.event, LedgerFact):
                    self._cluster.answers(delivery.event.node, True)
                elif not known:
                    self._ask_now.set()

    async def _ask_regularly(self) -> None:
        """Asks all allocators in rounds, the first as soon as the stored facts have been read."""
        while self.behind() is not None:
            await self._clock.sleep(PAUSE)
        while True:
            self._ask_now = anyio.Event()
            nodes = self._cluster.nodes
            await for_each(nodes, partial(self._ask, TaskTurns(self._clock)), at_once=ASKED_AT_ONCE)
            self._asked = True
            await wait_for_first(self._ask_now.wait, partial(self._clock.sleep, self._settings.registry_ask_seconds))

    async def _ask(self, turns: TaskTurns, node: NodeName) -> None:
        """Asks the allocator and compares its answer with the view."""
        finding = ""
        was_settled = self._client.is_settled(node)
        for _ in range(TRIES):
            await turns.give()
            try:
                await self._client.verify(node, self._settings.registry_answer_seconds)
            except Unavailable as error:
                finding = error.finding
                continue
            if node in self._cluster:
                self._cluster.answers(node, True)
                if self._client.is_settled(node) != was_settled:
                    self._cluster.notify(node)
            return
        if node in self._cluster:  # otherwise it was forgotten, because too many nodes never answered
            if self._cluster.member(node).answering:
                log.warning("allocator away", node=node, finding=finding)
            self._cluster.answers(node, False)
            await self._forget_if_deleted(node)

    async def _forget_if_deleted(self, node: NodeName) -> None:
        """Forgets a node that is no longer in the streams, after `topoalign forget` or a loss of the streams."""
        before = self._cluster.member(node).state
        try:
            if await has_published(self._bus, node):
                return
        except Unavailable:  # the next round checks again
            return
        if node not in self._cluster or self._cluster.member(node).state is not before:
            return  # it was already forgotten, or has published in the meantime
        self._client.kept.forget(node)
        log.warning(
            "node forgotten",
            node=node,
            reason="it is away and the streams keep nothing of it: deleted, or lost with them",
        )
