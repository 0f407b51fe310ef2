"""
The connections of a kube-scheduler.

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
"""Of the head of a request: its address and its headers."""


class SchedulerConnection(HttpToolsConnection):
    """A connection with limits on the head of a request, and errors in JSON."""

    head_seconds = HEAD_SECONDS
    head_timer: asyncio.TimerHandle | None = None
    is_idle = True
    """Whether nothing of a request has come after the last one."""
    head_is_complete = True
    """Whether the head of a request has come, or nothing of it."""
    head_bytes = 0
    """What has come since that of a head that is not complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must end in time, and be no longer than others are."""
        if self.is_idle:
            self._begin()
        super().data_received(data)
        if self.head_is_complete:
            self._stop_waiting()
            return
        self.head_bytes += len(data)
        if self.head_bytes > MOST_HEAD_BYTES:
            self.end_with(431, "TooLarge", f"the head of a request has more than {MOST_HEAD_BYTES} bytes")
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(self.head_seconds, self.end_slow_head)

    def on_message_begin(self) -> None:
        """A request has begun, after lines without text perhaps."""
        self._begin()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self.head_is_complete = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request has come."""
        self.is_idle = True
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
        self.is_idle, self.head_is_complete, self.head_bytes = False, False, 0

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
