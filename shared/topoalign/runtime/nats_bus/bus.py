"""
`NatsBus`: the bus port over NATS and JetStream.

One task maintains the connection: it connects, checks server, stores and permissions, passes the connection to all
waiting callers, and starts again when it is lost. It does not create or change anything on the server
(`event_stores.create_or_change_stores` does). Publishing and asking use the current connection and fail at once if
there is none, because callers keep important facts in a journal and publish them again. Following and serving wait for
a connection and then continue.
"""

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio
import nats.errors
import structlog
from anyio.abc import TaskStatus

from topoalign.core import wire
from topoalign.core.model.errors import (
    BusRefused,
    BusUnavailable,
    InvalidField,
    NobodyAnswers,
    clean,
)
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Endpoint, Message, Received, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.clock import backoff_seconds
from topoalign.runtime.nats_bus.access import client_options, hide_credentials, split_addresses, tls_context
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.follower import NatsFollower
from topoalign.runtime.nats_bus.nats_connection import CONNECT_SECONDS, NatsConnection, open_connection
from topoalign.runtime.nats_bus.nats_library import contain_cancellation
from topoalign.runtime.nats_bus.publication import publish_atomic, publish_many, publish_one
from topoalign.runtime.nats_bus.selftest import SelfTest
from topoalign.runtime.nats_bus.stored import find_message, purge, received_of
from topoalign.runtime.replies import reply_to
from topoalign.runtime.settings import Access
from topoalign.runtime.tasks import background, run_until_cancelled

PUBLISH_SECONDS = 2.0
"""Timeout of a publication: longer than a sync to disk, but short enough to wait for a server that may be gone."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""
Seconds between attempts to connect: the first and the longest pause. It doubles each time, with jitter, so that the
clients of a cluster do not all reconnect at once.
"""
QUEUE = "q"
"""The queue group of the subscribers to a subject of requests: one of them answers each request."""
OF_A_STORE = frozenset({"Nats-Stream", "Status"})
"""
Headers of the messages that NATS sends in answer to a read: stored messages, and their end. A reader can name any reply
subject, also a subject of requests, but these messages are not requests.
"""

log = structlog.get_logger("topoalign.runtime.nats")


class NatsBus:
    """The bus over NATS. `connect_bus` creates it."""

    def __init__(self, url: str, name: str, access: Access, node: NodeName | None, publishes: Sequence[str]) -> None:
        if wire.encode_node_token(name) != name or not name:
            raise InvalidField("name", f"{clean(name)!r}", "use letters, digits, `_` and `-`")
        self.url = hide_credentials(url)
        """The URL without credentials."""
        self.reason_not_connected: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self._urls = split_addresses(url)
        self._name = name
        self._access = access
        # so that a wrong file is reported at once, and not by a task
        client_options(access)
        tls_context(access, self._urls)
        self._inbox = f"_INBOX_{name}" if node is None else f"_INBOX_{name}.{wire.encode_node_token(node)}"
        self._self_test = SelfTest(publishes)
        self._connection: NatsConnection | None = None
        self._came = anyio.Event()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that has passed all checks."""
        return self._connection is not None

    async def publish(self, message: Message, expected_last: int | None = None) -> int:
        """As `Bus.publish`."""
        event_stores.store_of(message)
        connection = self.live()
        try:
            return await publish_one(connection, message, expected_last, PUBLISH_SECONDS)
        except NobodyAnswers as error:
            raise not_taken(message) from error

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        """As `Bus.publish_batch`."""
        event_stores.store_of_batch([message for message, _ in batch])
        connection = self.live()
        try:
            return await publish_atomic(connection, batch, PUBLISH_SECONDS)
        except NobodyAnswers as error:
            raise not_taken(batch[-1][0]) from error

    async def newest(self, stream: Stream, subject: str) -> Received | None:
        """As `Bus.newest`."""
        return received_of(await find_message(self.live(), stream, {"last_by_subj": subject}))

    async def publish_all(self, messages: Sequence[Message]) -> Sequence[int | None]:
        """As `Bus.publish_all`, on one connection, so that a store receives the messages in the order of sending."""
        if self._connection is None or not messages:
            return [None] * len(messages)
        positions = await publish_many(self._connection, messages, PUBLISH_SECONDS)
        return [*positions, *[None] * (len(messages) - len(positions))]

    @asynccontextmanager
    async def follow(self, stream: Stream, subject: str, after: int = 0) -> AsyncIterator[AsyncIterator[Received]]:
        """Yields the messages of a stream on this subject after a position, across lost connections."""
        follower = NatsFollower(self.up, stream, subject, after)
        try:
            yield follower
        finally:
            await follower.end()

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        """As `Bus.last_position`."""
        last = await find_message(self.live(), stream, {"last_by_subj": subject})
        return 0 if last is None else last.in_store().position

    async def forget(self, stream: Stream, subject: str) -> None:
        """As `Bus.forget`."""
        await purge(self.live(), stream, subject)

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        """As `Bus.ask`."""
        event_stores.check_size(subject, body)
        return (await self.live().request(subject, body, within, accept=is_service_reply)).body

    @asynccontextmanager
    async def serve(self, service: str, endpoints: Sequence[Endpoint]) -> AsyncIterator[None]:
        """As `Bus.serve`, across lost connections."""
        async with background() as tasks:
            await tasks.start(self.keep_serving, service, endpoints)
            yield

    async def keep_serving(self, service: str, endpoints: Sequence[Endpoint], *, task_status: TaskStatus[None]) -> None:
        """Serves on each new connection. Reports as started once it serves, or at once without a connection."""
        started = False
        while True:
            if not started and self._connection is None:
                started = True
                task_status.started()
            connection = await self.up()
            try:
                async with background() as tasks:
                    for endpoint in endpoints:
                        await tasks.start(answer_requests, connection, endpoint)
                    with connection.waiting(service, CONNECT_SECONDS):
                        await connection.client.flush()
                    if not started:
                        started = True
                        task_status.started()
                    await connection.lost.wait()
            except (BusUnavailable, BusRefused) as error:
                log.warning("cannot serve", service=service, finding=error.finding)
                await anyio.sleep(FIRST_PAUSE)

    async def up(self) -> NatsConnection:
        """The connection, as soon as there is one."""
        while self._connection is None:
            await self._came.wait()
        return self._connection

    def live(self) -> NatsConnection:
        """The current connection. Raises BusUnavailable if there is none."""
        if self._connection is None:
            raise BusUnavailable(f"not connected to {self.url}: {self.reason_not_connected}")
        return self._connection

    async def keep_connected(self, strict: bool) -> None:
        """Keeps the bus connected until cancelled. `strict`: raises BusRefused before the first connection."""
        failures = 0
        logged: set[str] = set()
        """Findings since the last connection. If a name has several addresses, their findings alternate."""
        while True:
            try:
                connection = await self.connection()
            except (BusUnavailable, BusRefused) as error:
                if strict and isinstance(error, BusRefused):
                    raise
                if error.finding not in logged:
                    logged.add(error.finding)
                    log.warning("bus away", finding=error.finding, remedy=error.remedy)
                self.reason_not_connected = error.finding
                failures += 1
                pause = backoff_seconds(failures, FIRST_PAUSE, LONGEST_PAUSE)
                await anyio.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  # spreads load, hides nothing
                continue
            failures = 0
            strict = False
            logged.clear()
            await self.stay(connection)

    async def stay(self, connection: NatsConnection) -> None:
        """Passes the connection to all waiting callers, until it is lost."""
        log.info("bus connected", url=self.url, server=str(connection.client.connected_server_version))
        self._connection = connection
        self.reason_not_connected = None
        self._came.set()
        try:
            await connection.until_lost()
        finally:
            self._connection = None
            self._came = anyio.Event()
            self.reason_not_connected = f"connection lost: {connection.reason}"
            await connection.close()
        log.warning("bus lost", url=self.url, reason=connection.reason)

    async def connection(self) -> NatsConnection:
        """A connection whose server, stores and permissions have been checked."""
        connection = await open_connection(self._urls, self._name, self._access, self._inbox)
        try:
            await self._self_test.run(connection)
        except BaseException:
            await connection.close()
            raise
        return connection


def not_taken(message: Message) -> BusUnavailable:
    """The error for a message that no store took: the store does not exist, or has no leader at the moment."""
    return BusUnavailable(
        f"no store took {clean(message.subject, 200)}; it was not stored. If that lasts, run `topoalign stores apply`"
    )


def is_service_reply(delivered: Delivered) -> bool:
    """Whether a service has sent the answer. NATS also answers if a stream stores the request."""
    return not delivered.is_of_a_store and wire.is_service_answer(delivered.body)


async def answer_requests(connection: NatsConnection, endpoint: Endpoint, *, task_status: TaskStatus[None]) -> None:
    """
    Answers the requests on the subject of an endpoint, one at a time. Reports as started once it is subscribed.

    Requests are answered in this task and not in a task of the library. The library cancels its tasks in a way that
    task groups inside an endpoint would take for their own cancellation.
    """
    subscription = await connection.subscribe(endpoint.subject, QUEUE)
    try:
        task_status.started()
        async for request in subscription.messages:
            if OF_A_STORE.isdisjoint(request.headers or {}):
                reply = await reply_to(endpoint, request.data)
                with (
                    suppress(nats.errors.Error, OSError, ValueError),
                    contain_cancellation(),
                ):  # for example, the request has no reply subject
                    await request.respond(reply)
    finally:
        await connection.unsubscribe(subscription)


@asynccontextmanager
async def connect_bus(
    url: str,
    *,
    name: str = "topoalign",
    wait: float | None = 10.0,
    access: Access = Access(),  # noqa: B008  # frozen
    node: NodeName | None = None,
    publishes: Sequence[str] = (),
) -> AsyncIterator[NatsBus]:
    """
    The bus at `url` (separate several servers of one cluster by commas) while the context is open.

    `wait`: seconds to wait for a server. After that, raises BusUnavailable; for a server that cannot be used, raises
    BusRefused at once. None: connects in the background. `node`: its name becomes a part of the reply subjects.
    `publishes`: the subjects on which the permission to publish is tested with every connection. Raises InvalidField
    for an unusable address, name or file.
    """
    bus = NatsBus(url, name, access, node, publishes)
    async with background() as tasks:
        tasks.start_soon(run_until_cancelled, "the connection to NATS", lambda: bus.keep_connected(wait is not None))
        if wait is not None:
            with anyio.move_on_after(wait) as scope:
                await bus.up()
            if scope.cancelled_caught:
                raise BusUnavailable(f"no connection within {wait:g} s: {bus.reason_not_connected}")
        yield bus


NAME = "topoalign-stores"


async def apply_stores(url: str, access: Access = Access(), replicas: int | None = None) -> list[str]:  # noqa: B008  # frozen
    """As `event_stores.create_or_change_stores`, over a new connection. Also raises the errors of `open_connection`."""
    connection = await open_connection(split_addresses(url), NAME, access)
    try:
        return await event_stores.create_or_change_stores(connection.api, replicas)
    finally:
        await connection.close()
