"""
Handles one connection to a socket of this process, and limits the work and memory that its peer can cause.

grpclib and h2 process all requests of a chunk of bytes at once. Here, a connection reads at most 48 KiB, and reads no
more until these bytes are handled: one portion (`Frames`) in each of its turns (`turns`). While the peer does not read
its answers and too much output is buffered, its frames are not handled. The bytes of requests are counted before they
are decoded (`arriving`).

A frame of 9 bytes costs h2 as much time as one of a kilobyte, so bytes do not measure work. The length, type and flags
in its header show the cost of a frame, and whether a gRPC client would send it. This module limits three numbers that
h2 and grpclib do not limit: the frames handled at once, the length of a header block, and the frames without a request.

Source: RFC 9113, sections 3.4, 4.1 and 6.
"""

from asyncio import BaseTransport, BufferedProtocol, Task, TimerHandle, Transport, get_running_loop
from enum import IntEnum
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast
from weakref import ref

import grpclib.protocol
import grpclib.server
from grpclib.protocol import EventsProcessor, H2Protocol, Stream
from grpclib.utils import Wrapper
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived
from h2.settings import SettingCodes, Settings

from topoalign.core.model.errors import clean
from topoalign.kubelet.grpc import unix_sockets
from topoalign.kubelet.grpc.turns import TurnTaker

if TYPE_CHECKING:
    from topoalign.kubelet.grpc.transport import GrpcServer

PREFACE = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
HEADER = 9

LONGEST_FRAME = 16 * 2**10
"""Maximum payload of a frame in bytes: the default of HTTP/2, which is also the smallest permitted maximum."""

LONGEST_HEADERS = 16 * 2**10
"""Maximum size in bytes of a request's encoded headers, with all CONTINUATION frames. The kubelet's have about 300."""

PORTION = 16
"""The weight of the frames that are handled in one turn: about a millisecond of work."""

REQUEST_WEIGHT = 8
"""Extra weight of a HEADERS frame, which begins a call. Each frame weighs 1, and 1 more for each 4 KiB of payload."""

MOST_CONTROLS = 10_000
"""
Maximum number of frames in 10 s that carry no request (PING, SETTINGS, RST_STREAM, WINDOW_UPDATE, empty DATA), not
counting those that requests need.
"""

CONTROLS_PER_REQUEST = 8
"""Such frames that each request needs: window updates for its answer, pings that estimate the bandwidth, one reset."""

CONTROLS_PER_RESET = 20
"""Number of frames that a RST_STREAM counts as, because the server has started a call for nothing."""

MOST_SETTINGS = 256
"""Maximum number of SETTINGS frames per connection. A client sends one, and a few as it estimates the bandwidth."""

LONGEST_SETTINGS = 32 * 6
"""Maximum payload of a SETTINGS frame in bytes: 32 settings. HTTP/2 defines six."""


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
    """Raised for frames that no gRPC client sends. The message states the limit."""


class Frames:
    """The frames that have arrived on one connection and are not handled yet."""

    def __init__(self) -> None:
        self.spoke = False
        """Whether a frame other than PING, SETTINGS and RST_STREAM has arrived since this was set to False."""
        self.controls = 0
        """Frames without a request, not counting those that requests need. `GrpcConnection.look` resets it to 0."""
        self._waiting = bytearray()
        self._preface = PREFACE
        self._block = 0
        """Bytes received so far of the current header block."""
        self._settings = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, data: bytes | memoryview) -> None:
        """Adds received bytes. They need not end at the end of a frame."""
        self._waiting += data

    def take(self) -> bytes:
        """Removes and returns the complete frames to handle in one turn; empty if there is none. Raises Flood."""
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
        """Whether a complete frame has arrived. Raises Flood."""
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


MOST_CALLS = 32
"""Maximum number of concurrent calls on a connection, including streams. A client delays further calls."""

CHUNK = 48 * 2**10
"""Bytes that are read at once: enough for a request for 900 units, in frames of 16 KiB."""

MOST_RESET = 256
"""Maximum number of closed streams whose state a connection keeps."""

TABLE_BYTES = 4096
"""Maximum size in bytes of the table for header compression (HPACK): the HTTP/2 default. A peer can request 4 GiB."""

PING_SECONDS = 10.0
SILENT_LOOKS = 3
"""A connection is closed after this number of successive checks, `PING_SECONDS` apart, without a byte from its peer."""


class Bounded(H2Connection):
    """The HTTP/2 state of a connection, with this server's limits."""

    MAX_CLOSED_STREAMS = MOST_RESET
    DEFAULT_MAX_HEADER_LIST_SIZE = LONGEST_HEADERS

    def initiate_connection(self) -> None:
        """As h2 does, with this server's limits in the first SETTINGS frame."""
        values = {
            SettingCodes.MAX_CONCURRENT_STREAMS: MOST_CALLS,
            SettingCodes.MAX_HEADER_LIST_SIZE: self.DEFAULT_MAX_HEADER_LIST_SIZE,
        }
        self.local_settings = Settings(client=False, initial_values=values)
        super().initiate_connection()


class CallConnection(grpclib.protocol.Connection):
    """grpclib's connection object, through which a call finds its GrpcConnection."""

    ours: "ref[GrpcConnection]"
    """Weak: with a strong reference, a closed connection would stay in memory until the garbage collector runs."""


class GrpcConnection(H2Protocol, BufferedProtocol, TurnTaker):
    """grpclib's protocol with turns: it waits for a turn before it handles received bytes."""

    server: "GrpcServer"
    transport: Transport
    peer: unix_sockets.Peer
    spoke = 0
    """The number of the last message, over all connections. The peer with the lowest has been silent longest."""
    silent = 0
    """The number of successive checks without a byte received since the previous check."""
    next_look: TimerHandle | None = None
    _moments = count(1)

    def connection_made(self, transport: BaseTransport) -> None:
        """Accept the peer if the server admits it; else close the connection at once."""
        self.transport = cast(Transport, transport)
        self.frames = Frames()
        self._parked = False
        self._open = False
        self.spoke = next(self._moments)
        if not self.server.admits(self):
            self.transport.abort()
            return
        self._open = True
        self._h2 = Bounded(config=self.h2_config)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(
            self.config.http2_connection_window_size - self._h2.local_settings.initial_window_size
        )
        self.connection = CallConnection(self._h2, self.transport, config=self.config)
        self.connection.ours = ref(self)
        self.connection.flush()
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
        self.next_look = get_running_loop().call_later(PING_SECONDS, self.look)

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer for the next bytes; all connections share it."""
        return self.server.chunk

    def buffer_updated(self, nbytes: int) -> None:
        """Takes received bytes. No more are read until they are handled."""
        if not self._open:
            return
        self.silent = 0
        self.frames.add(self.server.chunk[:nbytes])
        if self.server.turns.take(self):
            self.handle()
        else:
            self._wait_for_turn()

    def _wait_for_turn(self) -> None:
        self.transport.pause_reading()
        self.server.turns.ask(self, self.handle)

    def handle(self) -> None:
        """Handles a portion of the received bytes, if the peer reads its answers."""
        if not self._open:
            return
        if not self.connection.write_ready.is_set():
            self.transport.pause_reading()
            self._parked = True
            return
        try:
            self._feed(self.frames.take())
            more = self._live and self.frames.ready
        except Exception as error:  # h2 and grpclib raise many kinds of errors for another protocol
            self.server.complaints.report(
                "connection closed", "not gRPC", error=clean(str(error) or type(error).__name__)
            )
            self.hang_up("not gRPC")
            return
        if self.frames.spoke:
            self.frames.spoke = False
            self.spoke = next(self._moments)
        if more:
            self._wait_for_turn()
        elif self._live:
            self.transport.resume_reading()

    def _feed(self, data: bytes) -> None:
        """As `H2Protocol.data_received`; also counts the bytes of requests, and frees a call that ends."""
        arriving = self.server.arriving
        events = self.connection.feed(data)
        if self._h2.encoder.header_table_size > TABLE_BYTES:  # the peer has requested a larger one
            self._h2.encoder.header_table_size = TABLE_BYTES
        self.connection.flush()
        for event in events:
            self.processor.process(event)
            if not self._live:
                return
            if isinstance(event, RequestReceived):
                stream = self.processor.streams[event.stream_id]
                arriving.begin(stream, self.server.largest(event.headers))
                task: Task[None] = cast(grpclib.server.Handler, self.handler)._tasks[stream]
                task.add_done_callback(partial(self._ended, stream))
            elif isinstance(event, DataReceived) and event.stream_id in self.processor.streams:
                arriving.add(self.processor.streams[event.stream_id], len(event.data))
        self.connection.flush()

    @property
    def _live(self) -> bool:
        return self._open and not self.transport.is_closing()

    def _ended(self, stream: Stream, task: object) -> None:
        """Removes a call that has ended. grpclib itself does not do so if the call was reset before it ran."""
        self.server.arriving.end(stream)
        forget_frames(stream.wrapper)
        if self.processor.streams.pop(cast(int, stream.id), None) is not None and self._live:
            self.connection.ack(cast(int, stream.id), stream.buffer.unacked_size())

    def resume_writing(self) -> None:
        """The peer reads again: continue with frames that waited."""
        if self._open:
            super().resume_writing()
            if self._parked:
                self._parked = False
                self.server.turns.ask(self, self.handle)

    def pause_writing(self) -> None:
        """The peer reads too slowly: stop writing."""
        if self._open:
            super().pause_writing()

    def look(self) -> None:
        """
        Closes the connection of a silent peer. One check is not enough: after this process was stopped, the check can
        run before the bytes that arrived meanwhile are read.
        """
        self.frames.controls = 0
        for stream in tuple(self.processor.streams.values()):
            self.server.arriving.look(stream)
        self.silent += 1
        if self.silent == SILENT_LOOKS:
            self.hang_up("silent")
        else:
            self.next_look = get_running_loop().call_later(PING_SECONDS, self.look)

    def hang_up(self, reason: str) -> None:
        """Closes the connection at once, even if the peer has not read everything."""
        if self._open:
            self._leave(reason)
            self.transport.abort()

    def close(self, reason: str) -> None:
        """Closes the connection after all written bytes are sent."""
        if self._open:
            self._leave(reason)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End the calls of the connection."""
        if self._open:
            self._leave("Connection lost")

    def _leave(self, reason: str) -> None:
        self._open = False
        self.server.connections.discard(self)
        if self.next_look is not None:
            self.next_look.cancel()
        self.processor.close(reason)


def forget_frames(wrapper: Wrapper | None) -> None:
    """
    Frees the stack frames of a call that was cancelled from outside. The error of the call and the stack frames
    reference each other, so only the garbage collector would free them. A flood of such calls takes megabytes, and the
    garbage collector then takes a tenth of a second.
    """
    error = wrapper._error if wrapper is not None else None
    if error is not None:
        error.__traceback__ = error.__context__ = error.__cause__ = None
