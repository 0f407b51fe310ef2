"""
Manages one connection to a NATS server, from connect to loss. A lost connection is never restored: open a new one.

So every connection passes the same checks, and no message of a lost connection is sent later without the caller's
knowledge. For this, the library's reconnection and buffering are disabled.

A request ends as soon as its result is known: it is answered, refused or timed out, or the connection is lost. NATS
reports a missing permission as an error of the connection, which is matched to the request by its subject.
"""

import asyncio
import random
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from secrets import token_hex

import anyio
import nats.errors
import structlog
from nats.aio.subscription import Subscription

from topoalign.core.model.errors import BusRefused, BusUnavailable, NobodyAnswers, clean
from topoalign.runtime.clock import until_tick
from topoalign.runtime.nats_bus.access import client_options, hide_credentials, tls_context
from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.nats_library import (
    CLOCK,
    TolerantClient,
    abandon,
    contain_cancellation,
    load_websockets,
    parked,
    socket_of,
)
from topoalign.runtime.settings import Access

OLDEST_SERVER = (2, 12)
"""Older servers silently ignore settings of our stores: atomic batches, per-message TTL (measured with 2.9.10)."""
PING_SECONDS = 2
PINGS_MISSED = 1
"""A server that no longer responds is noticed after four seconds. The default of the library is four minutes."""
NO_RESPONDERS = "503"
"""The status of the server's answer if nobody is subscribed to the subject of a request."""
TOKEN_BYTES = 8
"""Random bytes in the last token of a reply subject."""
CONNECT_SECONDS = 2
CLOSE_SECONDS = 2
UNSUBSCRIBE_SECONDS = 1

log = structlog.get_logger("topoalign.runtime.nats")

Accept = Callable[[Delivered], bool]


def anything(answer: Delivered) -> bool:
    """Accepts each answer, for requests to NATS itself."""
    return True


class Wait:
    """A pending request."""

    def __init__(self, subject: str, scope: anyio.CancelScope) -> None:
        self.subject = subject
        self.scope = scope
        self.violation = ""


class NatsConnection:
    """An established connection. `lost` is set when it is lost, and stays set."""

    def __init__(self, url: str, inbox_prefix: str) -> None:
        self.client = TolerantClient()
        self.url = url
        """The URL without credentials."""
        self.lost = anyio.Event()
        self.reason = ""
        """The library's last error: why the connection was lost or could not be established."""
        self._inbox = ""
        """The prefix of the subjects on which answers arrive."""
        self._inbox_prefix = inbox_prefix
        self._questions: dict[bytes, Callable[[Delivered], None]] = {}
        """Reply subject -> callback for the answers to a request."""
        self._violations: deque[str] = deque(maxlen=16)
        self._waits: set[Wait] = set()
        self._opening: anyio.CancelScope | None = None

    async def open(self, url: str, name: str, options: Mapping[str, str], tls: ssl.SSLContext | None) -> None:
        """Connects. Raises BusRefused for wrong credentials, and BusUnavailable for any other failure."""
        if url.startswith(("ws://", "wss://")):
            load_websockets()
        failure: Exception | None = None
        with anyio.move_on_after(CONNECT_SECONDS) as self._opening:
            try:
                with contain_cancellation():
                    await self.client.connect(
                        url,
                        name=name,
                        error_cb=self.on_error,
                        disconnected_cb=self.on_loss,
                        closed_cb=self.on_loss,
                        connect_timeout=CONNECT_SECONDS,
                        max_reconnect_attempts=1,
                        reconnect_to_server_handler=parked,
                        ping_interval=PING_SECONDS,
                        max_outstanding_pings=PINGS_MISSED,
                        pending_size=0,
                        inbox_prefix=self._inbox_prefix,
                        tls=tls,
                        **options,  # type: ignore[arg-type]  # keywords for text only
                    )
            except (nats.errors.Error, OSError, TimeoutError) as error:
                failure = error
        if failure is None and not self._opening.cancelled_caught:
            self._opening = None
            self._inbox = self.client.new_inbox()
            await self.take(f"{self._inbox}.*", self.take_answer)
            return
        reason = self.reason or clean(str(failure or ""), 200) or f"no answer within {CONNECT_SECONDS} s"
        if "authorization" in reason.lower() or "authentication" in reason.lower():
            raise BusRefused(
                f"the server at {self.url} refuses our credentials: {reason}",
                "check TOPOALIGN_NATS_CREDS or TOPOALIGN_NATS_NKEY against the server's users",
            ) from failure
        raise BusUnavailable(f"no connection to {self.url}: {reason}") from failure

    async def request(
        self,
        subject: str,
        body: bytes,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        accept: Accept = anything,
    ) -> Delivered:
        """The answer to a request. Raises NobodyAnswers, BusUnavailable for an unknown outcome, and BusRefused."""
        if not self.fits(body, headers):
            raise BusRefused(
                f"a message of {len(body)} bytes on {clean(subject, 200)} is more than the server's "
                f"max_payload of {self.client.max_payload}",
                "raise `max_payload` of nats-server to its default of 1 MiB, or publish less",
            )
        with self.waiting(subject, seconds):
            answer = await (await self.ask(subject, body, headers, accept))
            if answer.status[0] == NO_RESPONDERS:
                raise nats.errors.NoRespondersError
            return answer

    async def ask(
        self, subject: str, body: bytes, headers: Mapping[str, str] | None, accept: Accept = anything
    ) -> asyncio.Future[Delivered]:
        """
        Sends a request. The future gets the first answer that `accept` accepts, or the status that nobody answers.
        Others are ignored: a stream that stores the request answers too. (The client library returns the first.)

        The last token of the reply subject is random, so that a service that answers one request cannot guess the reply
        subject of another. Raises the library's errors.
        """
        reply = f"{self._inbox}.{token_hex(TOKEN_BYTES)}"
        answer: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()

        def take(delivered: Delivered) -> None:
            if not answer.done() and (delivered.status[0] == NO_RESPONDERS or accept(delivered)):
                answer.set_result(delivered)

        self._questions[reply.encode()] = take
        answer.add_done_callback(lambda _: self._questions.pop(reply.encode()))
        try:
            await self.client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)
        except BaseException:
            answer.cancel()
            raise
        return answer

    def take_answer(self, delivered: Delivered) -> None:
        """Passes an answer to its request. Late answers are dropped."""
        if (take := self._questions.get(delivered.subject)) is not None:
            take(delivered)

    def fits(self, body: bytes, headers: Mapping[str, str] | None = None) -> bool:
        """Whether the server accepts a message of this size with headers. It closes the connection for a larger one."""
        size = len(body) + sum(len(name) + len(value) + 4 for name, value in (headers or {}).items()) + 16
        return size <= self.client.max_payload

    async def api(self, subject: str, body: bytes) -> bytes:
        """Sends a request to the JetStream API. Raises BusRefused if the account has no JetStream."""
        try:
            return (await self.request(subject, body, 3)).body
        except NobodyAnswers as error:
            raise BusRefused(
                f"the server at {self.url} has no JetStream for this account",
                "start nats-server with `-js` or a `jetstream` block, and enable it for the account",
            ) from error

    async def send(self, subject: str, body: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Sends without waiting for an answer. Raises BusUnavailable if the connection is known to be lost."""
        with self.waiting(subject, CONNECT_SECONDS):
            await self.client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)

    async def subscribe(self, subject: str, queue: str = "") -> Subscription:
        """Subscribes; one subscriber of a queue gets each message. Raises BusUnavailable, BusRefused."""
        with self.waiting(subject, CONNECT_SECONDS):
            return await self.client.subscribe(subject, queue=queue)

    async def take(self, subject: str, take: Callable[[Delivered], None]) -> Subscription:
        """Subscribes to a subject. `take` is called with each message when it arrives. Raises as `subscribe` does."""
        subscription = await self.subscribe(subject)
        self.client.deliver(subscription, take)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription, if the server can still be reached. Never raises and never takes longer than a second."""
        with (
            anyio.CancelScope(shield=True),
            anyio.move_on_after(UNSUBSCRIBE_SECONDS),
            suppress(nats.errors.Error, OSError),
            contain_cancellation(),
        ):
            if not self.lost.is_set():
                await subscription.unsubscribe()

    @contextmanager
    def waiting(self, subject: str, seconds: float) -> Iterator[None]:
        """
        Cancels the block after this time, when the connection is lost, or without permission on the subject. Then it
        raises BusUnavailable or BusRefused. For library errors, it raises NobodyAnswers, BusRefused or BusUnavailable.
        """
        if self.lost.is_set():
            raise BusUnavailable(f"the connection to {self.url} is lost: {self.reason}")
        name = clean(subject, 200)
        try:
            with anyio.move_on_after(seconds) as scope, contain_cancellation():
                wait = Wait(subject, scope)
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except nats.errors.NoRespondersError as error:
            raise NobodyAnswers(f"nobody answers on {name}") from error
        except nats.errors.BadSubjectError as error:
            raise BusRefused(f"{name!r} is not a subject", "see the subjects of topoalign") from error
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(f"{name}: {clean(str(error), 200)}") from error
        if scope.cancelled_caught or wait.violation:
            raise self.verdict(wait, seconds)

    def verdict(self, wait: Wait, seconds: float) -> BusUnavailable | BusRefused:
        """The error for a request without an answer."""
        answers = [text for text in self._violations if self._inbox_prefix.lower() in text]
        violation = wait.violation or (answers[-1] if answers else "")
        if violation:
            return BusRefused(
                f"no permission on {clean(wait.subject, 200)}: NATS reports {clean(violation, 300)}",
                "grant it to this user in the server's `authorization` block or account",
            )
        if self.lost.is_set():
            return BusUnavailable(f"the connection was lost while waiting on {clean(wait.subject, 200)}: {self.reason}")
        return BusUnavailable(f"no answer on {clean(wait.subject, 200)} within {seconds:g} s; its outcome is unknown")

    async def until_lost(self) -> None:
        """Returns when the connection is lost. Also polls, because the library does not report every loss."""
        while not self.lost.is_set():
            with anyio.move_on_after(until_tick(CLOCK, PING_SECONDS)):
                await self.lost.wait()
            if not self.client.is_connected or self.transport_closed:
                self.lose()

    @property
    def transport_closed(self) -> bool:
        """Whether the socket is closed. The library's reader can end on another error (memory) without a report."""
        socket = socket_of(self.client)
        return socket is not None and socket.is_closing()

    def lose(self) -> None:
        """Marks the connection as lost, and ends every pending request."""
        self.lost.set()
        for wait in self._waits:
            wait.scope.cancel()

    async def close(self) -> None:
        """Flushes and closes, each within `CLOSE_SECONDS`. Never raises."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(CLOSE_SECONDS), suppress(nats.errors.Error, OSError), contain_cancellation():
                while self.client.is_connected and self.client.pending_data_size and not self.lost.is_set():
                    await anyio.lowlevel.checkpoint()  # `flush` would send its PING before the buffered data
                if self.client.is_connected and not self.lost.is_set():
                    await self.client.flush(CLOSE_SECONDS)
            self.lose()
            with anyio.move_on_after(CLOSE_SECONDS), suppress(nats.errors.Error, OSError), contain_cancellation():
                await self.client.close()
            abandon(self.client)

    async def on_error(self, error: Exception) -> None:
        """Handles an error that the server reports. A permission error ends the request on that subject."""
        text = str(error) or type(error).__name__
        if "permissions violation" in text:
            if text not in self._violations:  # a retry is refused again
                log.warning("nats refuses", finding=text)
            self._violations.append(text)
            for wait in self._waits:
                if f'"{wait.subject.lower()}"' in text:
                    wait.violation = text
                    wait.scope.cancel()
            return
        self.reason = clean(text.removeprefix("nats: "), 200)
        if self._opening is not None:  # the library would retry, and hang after a failed handshake
            self._opening.cancel()

    async def on_loss(self) -> None:
        """Handles the end of the library's connection."""
        self.lose()


async def open_connection(urls: Sequence[str], name: str, access: Access, inbox: str = "") -> NatsConnection:
    """
    Connects to one of the servers in random order, and checks its version. `inbox`: prefix of reply subjects. Raises
    InvalidField for unusable credential files, BusRefused for wrong credentials or an old server, and BusUnavailable.
    """
    options = client_options(access)
    tls = tls_context(access, urls)
    reasons: dict[str, str] = {}
    for url in random.sample(urls, len(urls)):
        connection = NatsConnection(hide_credentials(url), inbox or f"_INBOX_{name}")
        try:
            await connection.open(url, name, options, tls)
            check_server(connection, tls_wanted=tls is not None)
        except BusUnavailable as error:
            await connection.close()
            reasons[url] = error.finding
        except BaseException:
            await connection.close()
            raise
        else:
            return connection
    raise BusUnavailable("; ".join(reasons[url] for url in urls))


def check_server(connection: NatsConnection, tls_wanted: bool) -> None:
    """Raises BusRefused for a server that is older than 2.12, or that has no TLS although it is required."""
    version = connection.client.connected_server_version
    try:
        found = (version.major, version.minor)
    except ValueError:
        found = (0, 0)
    if found < OLDEST_SERVER:
        raise BusRefused(
            f"the server at {connection.url} is {clean(str(version), 60)}, older than 2.12",
            "update nats-server to 2.12 or later: older ones ignore settings that topoalign relies on",
        )
    # The library has no public attribute for it, and connects without TLS if a server of a tls:// URL offers none.
    if tls_wanted and not connection.client._server_info.get("tls_required"):
        raise BusRefused(
            f"the server at {connection.url} does not offer TLS, which is asked for",
            "add a `tls` block to its configuration, or drop tls:// and the TLS settings here",
        )
