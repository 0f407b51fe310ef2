"""
The connections of a kube-scheduler.

It keeps an idle connection for 90 s; a server that closes it earlier may do so just when the next call is sent, and that
call is an error of scheduling. An answer leaves in one segment: in two, the second could wait 40 ms for the
acknowledgement of the first. A request whose head is not complete in time is answered and ended, and each error is JSON.
"""

import asyncio
from typing import Any

import h11
import msgspec

from topoalign.runtime.connections import Connection

IDLE_SECONDS = 120
"""After how long without a call a connection is closed: more than the 90 s of Go's client."""
HEAD_SECONDS = 4.0
"""How long the head of a request may take, from its first byte."""


class OneSegment:
    """A transport that sends all that is written in one turn of the loop at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send this with what else is written in this turn."""
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(data)

    def close(self) -> None:
        """Send what is written, then close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        written = b"".join(self._written)
        self._written.clear()
        if written and not self._transport.is_closing():
            self._transport.write(written)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class SchedulerConnection(Connection):
    """uvicorn's connection with whole answers, a limit on the time of a request's head, and errors in JSON."""

    head_seconds = HEAD_SECONDS
    head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Accept the connection."""
        super().connection_made(OneSegment(transport, self.loop))  # type: ignore[arg-type]  # it has what is used

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must end in time."""
        super().data_received(data)
        begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not begun:
            self._stop_waiting()
        elif self.head_timer is None:
            self.head_timer = self.loop.call_later(self.head_seconds, self.end_slow_head)

    def end_slow_head(self) -> None:
        """Answer a request whose head does not come, if the connection is not ending anyway."""
        if self.transport.is_closing():
            return
        self.end_with(408, "TooSlow", f"the head of a request did not come within {self.head_seconds:g} s")

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP."""
        self.end_with(400, "BadRequest", msg.rstrip("."))

    def end_with(self, status: int, code: str, finding: str) -> None:
        """Answer with an error, and close."""
        body = msgspec.json.encode({"code": code, "finding": finding, "remedy": "send a whole HTTP/1.1 request"})
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None
