"""
Limits the requests that are arriving, and the memory that they use until they are decoded.

A request can end long after it began, or never, and its bytes are kept in the meantime. So each request has a limit,
and all requests together have one. At the common limit, the oldest incomplete request is ended: the kubelet sends each
request without a pause, so that one is least likely to be the kubelet's.
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
Maximum size in bytes of a request that lists device IDs.

The largest request of a kubelet is GetPreferredAllocation: it lists all free devices, and those that the container
already has. NVIDIA's plugin accepts up to 2,500 shares of a GPU, and a machine has up to 16 GPUs: 40,000 devices. The
ID of a share consists of a UUID and a number, `GPU-5c1b3f2a-8e4d-4b7a-9f60-0d2c7e9a1b00::2499`: 46 bytes, plus 2 of
protobuf. So the request has at most 2 * 40,000 * 48 = 3,840,000 bytes.
"""

MOST_NAMES = 2 * MOST_HANDED_OUT
"""Maximum number of device IDs in a request, by the same rule."""

SMALL_REQUEST = 2**10
"""Maximum size in bytes of any other request. In the device plugin API, these have no fields."""

MOST_BYTES = 16 * 2**20
"""Maximum size in bytes of all arriving requests, on all connections of all resources: four of the largest."""

FRAME_BYTES = 256
"""Memory in bytes of a DATA frame in addition to its payload."""

MOST_FRAMES = 64
"""Maximum number of DATA frames of a request, plus one for each KiB of its size limit. gRPC sends 16 KiB per frame."""

PREFIX = 5
"""Bytes of the prefix of a gRPC message."""

LOOKS = 2
"""Checks of a connection, 10 s apart, after which an incomplete request is ended. A whole one takes milliseconds."""


@dataclass
class Arrival:
    """A request that has begun to arrive."""

    most: int
    """Maximum size in bytes."""
    size: int = 0
    frames: int = 0
    looks: int = 0
    taken: bool = False
    """Whether it is decoded, so that only bytes that come after it count."""

    @property
    def held(self) -> int:
        """Memory in bytes that this request uses, including its frames."""
        return self.size + self.frames * FRAME_BYTES

    @property
    def too_large(self) -> bool:
        """Whether it has more bytes or more frames than its method permits."""
        return self.size > self.most + PREFIX or self.frames > MOST_FRAMES + self.most // 1024


class Arriving:
    """All requests whose calls have not ended, in the order in which they began."""

    def __init__(self) -> None:
        self.size = 0
        """Memory in bytes that they use."""
        self._arrivals: dict[Stream, Arrival] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin(self, stream: Stream, most: int) -> None:
        """Registers a request that begins on this stream. `most`: its maximum size in bytes."""
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
                get_running_loop().call_soon(cut)  # its call begins to run in the next iteration
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
        """Ends a call, if it has begun to run. Its memory is freed in the next iteration of the event loop."""
        if stream.wrapper is not None and not stream.wrapper.cancelled:
            stream.wrapper.cancel(GRPCError(status, why))
            self.end(stream)
