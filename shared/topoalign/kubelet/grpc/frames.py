"""
Cuts HTTP/2 frames into portions of bounded work as they arrive, and recognises floods of them by their headers.

A frame of 9 bytes costs h2 as much as one of a kilobyte, so bytes do not measure work. Length, type and flags in the
header show the cost of a frame, and whether a gRPC client would send it. Three numbers that h2 and grpclib do not limit
are limited here: the frames that they get at once, the length of a block of headers, and the frames that carry no request.

Source: RFC 9113, sections 3.4, 4.1 and 6.
"""

from enum import IntEnum

PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
HEADER = 9

LONGEST_FRAME = 16 * 2**10
"""Bytes of content: HTTP/2's least bound, which we do not raise."""

LONGEST_HEADERS = 16 * 2**10
"""Bytes of the headers of a request, as they arrive, all continuations together. Those of the kubelet have about 300."""

PORTION = 16
"""The weight of the frames that are handled in one turn: about a millisecond of work."""

REQUEST_WEIGHT = 8
"""Weight of a frame of headers, which begins a call. Any other frame weighs 1, and 1 more for each 4 KiB of content."""

MOST_CONTROLS = 10_000
"""Frames that carry no request (pings, settings, resets, windows, empty data), beyond what requests need, in 10 s."""

CONTROLS_PER_REQUEST = 8
"""Such frames that each request needs: a window for its answer, pings that measure the line, one reset."""

CONTROLS_PER_RESET = 20
"""How many frames a reset counts for, because a call was begun in vain."""

MOST_SETTINGS = 256
"""Frames of settings in the life of a connection: a client sends one, and a few more when it measures the line."""

LONGEST_SETTINGS = 32 * 6
"""Bytes: 32 settings. HTTP/2 defines six."""


class FrameType(IntEnum):
    """The types of frames that are handled."""

    DATA = 0
    HEADERS = 1
    RESET = 3
    SETTINGS = 4
    PING = 6
    CONTINUATION = 9


END_STREAM = ACK = 0x1
END_HEADERS = 0x4


class Flood(Exception):
    """Raised for frames that no client of gRPC sends. The message describes them."""


class Frames:
    """The frames that have arrived on one connection and are not handled yet."""

    def __init__(self) -> None:
        self.spoke = False
        """Whether there was anything but answers to our pings and settings since this was set to False."""
        self.controls = 0
        """Frames without a request, beyond what requests need. Whoever looks at the connection sets it to 0 again."""
        self._waiting = bytearray()
        self._preface = PREFACE
        self._block = 0
        """Bytes of the block of headers that is arriving."""
        self._settings = 0

    def __len__(self) -> int:
        """Bytes that wait."""
        return len(self._waiting)

    def add(self, data: bytes | memoryview) -> None:
        """Bytes have come; they need not end where a frame does."""
        self._waiting += data

    def take(self) -> bytes:
        """Whole frames, as many as are handled in one turn; empty if there is none. Raises Flood."""
        at = min(self._preface, len(self._waiting))
        self._preface -= at
        weight = 0
        while weight < PORTION and self._whole(at):
            length, kind, flags = self._header(at)
            weight += self._judge(length, kind, flags)
            at += HEADER + length
        taken = bytes(self._waiting[:at])
        del self._waiting[:at]
        return taken

    @property
    def ready(self) -> bool:
        """Whether there is something to take. Raises Flood."""
        return self._whole(0)

    def _header(self, at: int) -> tuple[int, int, int]:
        """Length, type and flags."""
        return int.from_bytes(self._waiting[at : at + 3]), self._waiting[at + 3], self._waiting[at + 4]

    def _whole(self, at: int) -> bool:
        if len(self._waiting) - at < HEADER:
            return False
        length = self._header(at)[0]
        if length > LONGEST_FRAME:
            raise Flood(f"a frame has at most {LONGEST_FRAME} bytes")
        return len(self._waiting) - at >= HEADER + length

    def _judge(self, length: int, kind: int, flags: int) -> int:
        """The weight of a frame. Raises Flood."""
        weight = 1 + (length >> 12)
        match kind:
            case FrameType.HEADERS | FrameType.CONTINUATION:
                self._block += length
                if self._block > LONGEST_HEADERS:
                    raise Flood(f"the headers of a request have at most {LONGEST_HEADERS} bytes")
                if kind == FrameType.HEADERS:
                    weight += REQUEST_WEIGHT
                    self.controls -= min(self.controls, CONTROLS_PER_REQUEST)
                else:
                    self.controls += not length
                if flags & END_HEADERS:
                    self._block = 0
                self.spoke = True
            case FrameType.DATA:
                self.controls += not length and not flags & END_STREAM
                self.spoke = True
            case FrameType.SETTINGS:
                self.controls += 1
                self._settings += not flags & ACK
                if self._settings > MOST_SETTINGS or length > LONGEST_SETTINGS:
                    raise Flood(f"there are at most {MOST_SETTINGS} frames of settings, of {LONGEST_SETTINGS} bytes")
            case FrameType.RESET:
                self.controls += CONTROLS_PER_RESET
            case _:
                self.controls += 1
                self.spoke |= kind != FrameType.PING
        if self.controls > MOST_CONTROLS:
            raise Flood(f"there are at most {MOST_CONTROLS} frames without a request")
        return weight
