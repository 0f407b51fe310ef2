"""
Sends what is written to a connection within one round of the event loop in one piece.

An answer is up to four frames: a window update, headers, the message and trailers. grpclib writes each of them by itself:
four system calls, each of which wakes the peer.
"""

from asyncio import Transport, get_running_loop
from typing import Any

MOST_BYTES = 64 * 2**10
"""That wait for the end of the round. So many are sent at once: then asyncio tells when the peer reads too slowly."""


class CoalescingTransport(Transport):
    """A connection's transport, as grpclib writes to it."""

    def __init__(self, transport: Transport) -> None:
        """`transport`: the connection's own."""
        super().__init__()
        self._transport = transport
        self._loop = get_running_loop()
        self._written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends this with all else that is written in this round."""
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written += data
        if len(self._written) >= MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what has been written."""
        written, self._written = self._written, bytearray()
        if written and not self._transport.is_closing():
            self._transport.write(written)

    def close(self) -> None:
        """Closes when what has been written is sent."""
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the connection's transport knows of its peer."""
        return self._transport.get_extra_info(name, default)
