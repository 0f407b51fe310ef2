"""
Parses messages of a store lazily: each field is read at its first use.

A registry that starts reads a million messages, and of most of them nothing but the position and the id: a later snapshot
stands for them. The client library makes of each message an object with all its headers and hands it to a task over a queue,
which took two thirds of the time of a start. So a follower takes the bytes themselves.

A store adds these headers behind those of a message that is read directly (nats-server 2.11 and later, ADR-31):

    Nats-Stream, Nats-Subject, Nats-Sequence, Nats-Time-Stamp, and in a batch Nats-Num-Pending, Nats-Last-Sequence
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Message, Received

LINE = b"\r\n"
VERSION = b"NATS/1.0"
"""The end of each line of the headers, and the start of their first line."""
OF_A_STORE = b"\r\nNats-Stream: "
"""With what the headers begin that a store adds to a message."""


class Delivered(NamedTuple):
    """A message as it came over the connection."""

    subject: bytes
    reply: bytes
    body: bytes
    head: bytes
    """The headers with the line before them, or nothing."""

    @property
    def is_of_a_store(self) -> bool:
        """Whether NATS sent a stored message or its headers: an answer to a read, or the news that it was stored."""
        return OF_A_STORE in self.head

    @property
    def status(self) -> tuple[str, str]:
        """Number and text of an answer without a message; empty where there is none. Example: `NATS/1.0 204 EOB`."""
        line = self.head.partition(LINE)[0].removeprefix(VERSION).decode(errors="replace")
        number, _, text = line.strip().partition(" ")
        return number, text

    def in_store(self) -> "InStore":
        """The place of the message in its store. Raises BusUnavailable."""
        at = self.head.rfind(OF_A_STORE)
        try:
            added = dict(line.split(b": ", 1) for line in self.head[at:].split(LINE) if line)
            return InStore(
                stream=added[b"Nats-Stream"].decode(),
                position=int(added[b"Nats-Sequence"]),
                before=int(added.get(b"Nats-Last-Sequence", 0)),
                stored=added.get(b"Nats-Time-Stamp", b"").decode(),
                waiting=int(added.get(b"Nats-Num-Pending", 0)),
                subject=added[b"Nats-Subject"].decode(errors="replace"),  # who decodes such a message puts it aside
                head=b"" if self.head[:at] == VERSION else self.head[:at] + LINE + LINE,
            )
        except (LookupError, ValueError) as error:
            raise BusUnavailable("a store answered with something else than a message of its own") from error

    def received_at(self, there: "InStore") -> Received:
        """The message as it was published."""
        message = Message(subject=there.subject, headers=Headers(there.head), body=self.body)
        return Received(message=message, position=there.position, waiting=there.waiting)


class InStore(NamedTuple):
    """The place of a message in a store."""

    stream: str
    position: int
    before: int
    """The position of the message before it, in the same batch; in news, of the same subject. 0: there is none."""
    stored: str
    """When it was stored, by the clock of the server."""
    waiting: int
    """Messages behind it that the batch has not delivered."""
    subject: str
    head: bytes
    """The headers as they were published, with the line before them; or nothing."""


class Headers(Mapping[str, str]):
    """Headers that are looked up where they are. Of a name that comes more than once the last counts."""

    __slots__ = ("_head", "_read")

    def __init__(self, head: bytes) -> None:
        """`head`: as of `Delivered`."""
        self._head = head
        self._read: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        if self._read is None:
            wanted = b"\r\n%s: " % name.encode()
            start = self._head.rfind(wanted) + len(wanted)
            end = self._head.find(LINE, start)
            if start >= len(wanted) and end >= 0:
                return self._head[start:end].strip().decode(errors="replace")
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return repr(self._all)

    @property
    def _all(self) -> dict[str, str]:
        """All headers by the library's rules: a line without a colon, or with a space in its name, is ignored."""
        if self._read is None:
            pairs = (line.partition(b":") for line in self._head.split(LINE)[1:])
            named = ((name.strip(), value) for name, colon, value in pairs if colon)
            self._read = {
                name.decode(): value.strip().decode(errors="replace")
                for name, value in named
                if name.isascii() and not any(map(str.isspace, name.decode()))
            }
        return self._read
