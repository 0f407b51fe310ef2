"""
Handles the connections of a kube-scheduler.

It keeps an idle connection for 90 s; a server that closes it earlier may do so just when the next call is sent, and that
call is an error of scheduling. A request whose head is not complete in time is answered and ended, and each error is JSON.
"""

import asyncio
from http import HTTPStatus

import msgspec

from topoalign.runtime.httptools_connections import HttpToolsConnection

IDLE_SECONDS = 120
"""After how long without a call a connection is closed: more than the 90 s of Go's client."""
HEAD_SECONDS = 4.0
"""How long the head of a request may take, from its first byte."""
MOST_HEAD_BYTES = 64 * 1024
"""Of the head of a request, its address and its headers, with the trailers; and of the framing of a body in chunks."""


class SchedulerConnection(HttpToolsConnection):
    """A connection with limits on the head of a request, and errors in JSON."""

    head_seconds = HEAD_SECONDS
    head_timer: asyncio.TimerHandle | None = None
    is_idle = True
    """Whether nothing of a request has come after the last one."""
    head_is_complete = True
    """Whether the head of a request has come, or nothing of it."""
    is_first = True
    """Whether no request has begun in what has come since the connection was idle."""
    is_refused = False
    """Whether the request is answered already, as its head is too long."""
    head_bytes = 0
    """Of the address and the headers that were read, and of the trailers behind a body."""
    raw_bytes = body_bytes = 0
    """What has come of the request, and what of it is its body."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """
        Read on. A head that has begun must end in time, and data other than a body must not exceed the limit of a head.
        """
        if self.is_idle:
            self._begin()
            self.is_first = True
        self.raw_bytes += len(data)
        super().data_received(data)
        if self.head_is_complete:
            self._stop_waiting()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(self.head_seconds, self.end_slow_head)
        if not self.is_idle and self.raw_bytes - self.body_bytes > MOST_HEAD_BYTES + self.body_bytes:
            self._refuse()  # as chunks with long extensions, or with a byte each

    def on_message_begin(self) -> None:
        """A request has begun, after lines without text perhaps; in what came with the one before only it is counted."""
        if not self.is_first:
            self._begin()
        self.is_first = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the address has come."""
        self.head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer has come."""
        self.head_bytes += len(name) + len(value) + len(b": \r\n")
        if self.head_bytes > MOST_HEAD_BYTES:
            self._refuse()
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self.head_is_complete = True
        if not self.is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body has come."""
        self.body_bytes += len(body)
        if not self.is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come."""
        self.is_idle = True
        if not self.is_refused:
            super().on_message_complete()

    def end_slow_head(self) -> None:
        """Answer a request whose head does not come."""
        self.end_with(408, "TooSlow", f"the head of a request did not come within {self.head_seconds:g} s")

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self.end_with(400, "BadRequest", msg.rstrip("."))

    def end_with(self, status: int, code: str, finding: str) -> None:
        """Answer with an error, and close, if the connection is not ending anyway."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode({"code": code, "finding": finding, "remedy": "send a whole HTTP/1.1 request"})
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _begin(self) -> None:
        self.is_idle = self.head_is_complete = False
        self.head_bytes = self.raw_bytes = self.body_bytes = 0

    def _refuse(self) -> None:
        """Answer a request whose head is too long, and pass on nothing more of it."""
        self.is_refused = True
        self.end_with(431, "TooLarge", f"the head of a request has more than {MOST_HEAD_BYTES} bytes")

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
