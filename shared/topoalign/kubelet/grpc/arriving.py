"""
Bounds the requests that are arriving, and the bytes that they hold until they are decoded.

A request may end long after it began, or never, and its bytes are kept in the meantime. So each request has a limit,
and all together have one. At the common limit the request that began first ends: a kubelet sends its requests in one
go, so the oldest incomplete request is least likely to be the kubelet's.
"""

from asyncio import get_running_loop
from dataclasses import dataclass
from functools import partial

from grpclib.const import Status
from grpclib.exceptions import GRPCError
from grpclib.protocol import Stream

from topoalign.core.model.topology.topology_checks import MOST_HANDED_OUT

LARGEST_REQUEST = 4 * 2**20
"""
Bytes of a request that names devices.

The largest that a kubelet sends is GetPreferredAllocation: it lists all devices that are free, and those that the container
has already. NVIDIA's plugin takes up to 2,500 shares of a GPU, and a machine has up to 16 GPUs: 40,000 devices. A share is
named by a UUID and its number, `GPU-5c1b3f2a-8e4d-4b7a-9f60-0d2c7e9a1b00::2499`: 46 bytes, and 2 of protobuf. So it is
2 * 40,000 * 48 = 3,840,000 bytes.
"""

MOST_NAMES = 2 * MOST_HANDED_OUT
"""Devices that a request may name, by the same rule."""

SMALL_REQUEST = 2**10
"""Bytes of any other request. Those of the device plugin API have no fields."""

MOST_BYTES = 16 * 2**20
"""Bytes of all requests that are arriving, on all connections of all resources: four of the largest."""

FRAME_BYTES = 256
"""Memory of a frame of data in addition to its content."""

MOST_FRAMES = 64
"""Frames of data that a request may have, plus one for each KiB of its limit. gRPC fills frames with 16 KiB."""

PREFIX = 5
"""Bytes that gRPC puts before a message."""

LOOKS = 2
"""Checks of a connection, 10 s apart, after which an unfinished request is ended. A whole request takes milliseconds."""


@dataclass
class Arrival:
    """A request that began."""

    most: int
    """Bytes."""
    size: int = 0
    frames: int = 0
    looks: int = 0
    taken: bool = False
    """Whether it is decoded, so that only bytes that come after it count."""

    @property
    def held(self) -> int:
        """Bytes that this request takes in memory, its frames counted."""
        return self.size + self.frames * FRAME_BYTES

    @property
    def too_large(self) -> bool:
        """Whether it has more bytes, or more frames for them, than its method may have."""
        return self.size > self.most + PREFIX or self.frames > MOST_FRAMES + self.most // 1024


class Arriving:
    """All requests whose calls have not ended, in the order in which they began."""

    def __init__(self) -> None:
        self.size = 0
        """Bytes that they hold."""
        self._arrivals: dict[Stream, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin(self, stream: Stream, most: int) -> None:
        """Registers a request of at most so many bytes that begins on this stream."""
        self._arrivals[stream] = Arrival(most)

    def add(self, stream: Stream, size: int) -> None:
        """Counts a frame of data. Ends this request if it is too large, and the oldest ones if all together are."""
        arrival = self._arrivals.get(stream)
        if arrival is None:
            return
        arrival.size += size
        arrival.frames += 1
        self.size += size + FRAME_BYTES
        if arrival.too_large:
            cut = partial(
                self._cut, stream, Status.RESOURCE_EXHAUSTED, f"a request has at most {arrival.most} bytes here"
            )
            if stream.wrapper is None:
                get_running_loop().call_soon(cut)  # its call begins to run in the next round
            else:
                cut()
        if self.size > MOST_BYTES:
            for oldest in [each for each, it in self._arrivals.items() if not it.taken]:
                self._cut(
                    oldest, Status.RESOURCE_EXHAUSTED, f"requests that arrive have at most {MOST_BYTES} bytes in all"
                )
                if self.size <= MOST_BYTES:
                    break

    def take(self, stream: Stream) -> None:
        """Frees the bytes of a decoded request."""
        arrival = self._arrivals.get(stream)
        if arrival is not None:
            self.size -= arrival.held
            arrival.size = 0
            arrival.frames = 0
            arrival.most = SMALL_REQUEST
            arrival.taken = True

    def look(self, stream: Stream) -> None:
        """Ends a request that is incomplete after `LOOKS` checks."""
        arrival = self._arrivals.get(stream)
        if arrival is not None and not arrival.taken:
            arrival.looks += 1
            if arrival.looks > LOOKS:
                self._cut(stream, Status.DEADLINE_EXCEEDED, "the request did not arrive whole in time")

    def end(self, stream: Stream) -> None:
        """Removes a request whose call has ended for any reason."""
        arrival = self._arrivals.pop(stream, None)
        if arrival is not None:
            self.size -= arrival.held

    def _cut(self, stream: Stream, status: Status, why: str) -> None:
        """Ends a call, if it has begun to run. What it held is freed in the next round of the loop."""
        if stream.wrapper is not None and not stream.wrapper.cancelled:
            stream.wrapper.cancel(GRPCError(status, why))
            self.end(stream)
