"""
Sends the frames of an answer in one piece.

An answer is up to four frames: a window update, headers, the message and trailers. grpclib writes each of them by itself:
four system calls, each of which wakes the peer. Here they wait for the last one, which ends the stream, and not for what
else is to be done in this round of the event loop: after an Allocate that is about a millisecond. What belongs to no answer
that ends, such as a list of devices, is sent at the end of the round.

Source of the frames' form: RFC 9113, 4.1, 6.1 and 6.2.
"""

from asyncio import Transport, get_running_loop
from typing import Any

MOST_BYTES = 64 * 2**10
"""That wait for the end of the round. So many are sent at once: then asyncio tells when the peer reads too slowly."""
FRAME_HEADER = 9
"""Bytes: length of what follows (3), type, flags, stream (4)."""
DATA = 0
HEADERS = 1
"""Types of frames that can end a stream."""
END_STREAM = 1
"""The flag of those that do."""


class CoalescingTransport(Transport):
    """A connection's transport, as grpclib writes to it."""

    def __init__(self, transport: Transport) -> None:
        """`transport`: the connection's own."""
        super().__init__()
        self._transport = transport
        self._loop = get_running_loop()
        self._written = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends these whole frames with all else that is written before the end of an answer, or of the round."""
        if not self._written:
            self._loop.call_soon(self.flush)
        self._written += data
        if len(self._written) >= MOST_BYTES or ends_stream(data):
            self.flush()

    def flush(self) -> None:
        """Sends what has been written."""
        written = self._written
        self._written = bytearray()
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


def ends_stream(frames: bytes | bytearray | memoryview) -> bool:
    """Whether one of these whole frames is the last one of its stream."""
    at = 0
    while at + FRAME_HEADER <= len(frames):
        if frames[at + 3] in (DATA, HEADERS) and frames[at + 4] & END_STREAM:
            return True
        at += FRAME_HEADER + int.from_bytes(frames[at : at + 3])
    return False
