"""
Parses messages of a store lazily: each field is read at its first use.

A registry that starts reads a million messages, and of most of them nothing but the position and the id: a later snapshot
stands for them. The client library makes of each message an object with all its headers and hands it to a task over a queue,
which took two thirds of the time of a start. So a follower takes the bytes themselves.

A store adds these headers, in this order, behind those of a message that is read directly (nats-server 2.11 and later,
ADR-31):

    Nats-Stream, Nats-Subject, Nats-Sequence, Nats-Time-Stamp, and in a batch Nats-Num-Pending, Nats-Last-Sequence
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Message, Received

LINE = b"\r\n"
VERSION = b"NATS/1.0"
"""The end of each line of the headers, and the start of their first line."""
OF_A_STORE = b"\r\nNats-Stream: "
"""With what the headers begin that a store adds to a message."""
ADDED = re.compile(
    rb"\r\nNats-Stream: ([^\r]*)\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)(?:\r\nNats-Time-Stamp: ([^\r]*))?"
    rb"(?:\r\nNats-Num-Pending: (\d+))?(?:\r\nNats-Last-Sequence: (\d+))?\r\n"
)
"""These headers."""
END = re.compile(rb"\r\nNats-Num-Pending: (\d+)\r\nNats-Last-Sequence: (\d+)\r\n")
"""Headers of the end of a batch."""


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
        return self.head.rfind(OF_A_STORE) >= 0

    @property
    def is_without_message(self) -> bool:
        """Whether it says something about a read, such as its end; then it has no body."""
        return not self.body and not self.is_of_a_store

    @property
    def status(self) -> tuple[str, str]:
        """Number and text of an answer without a message; empty where there is none. Example: `NATS/1.0 204 EOB`."""
        line = self.head.partition(LINE)[0].removeprefix(VERSION).decode(errors="replace")
        number, _, text = line.strip().partition(" ")
        return number, text

    @property
    def after_batch(self) -> tuple[int, int]:
        """Of the end of a batch: the messages that wait behind it, and the position of its last message; else zeros."""
        end = END.search(self.head)
        return (int(end[1]), int(end[2])) if end is not None else (0, 0)

    def in_store(self) -> "InStore":
        """The place of the message in its store. Raises BusUnavailable."""
        at = self.head.rfind(OF_A_STORE)
        added = ADDED.match(self.head, at) if at >= 0 else None
        if added is None:
            raise BusUnavailable("a store answered with something else than a message of its own")
        stream, subject, position, stored, waiting, before = added.groups(b"")
        subject_text = subject.decode(errors="replace")  # who decodes such a message puts it aside
        end = at + len(LINE)
        return InStore(stream, int(position), int(before or 0), stored, int(waiting or 0), subject_text, end)

    def received_at(self, there: "InStore") -> Received:
        """The message as it was published."""
        message = Message(subject=there.subject, headers=Headers(self.head, there.end), body=self.body)
        return Received(message=message, position=there.position, waiting=there.waiting)


class InStore(NamedTuple):
    """The place of a message in a store."""

    stream: bytes
    position: int
    before: int
    """The position of the message before it, in the same batch; in news, of the same subject. 0: there is none."""
    stored: bytes
    """When it was stored, by the clock of the server; empty where the server does not name it."""
    waiting: int
    """Messages behind it that the batch has not delivered."""
    subject: str
    end: int
    """Where in `Delivered.head` the headers end that were published."""


@lru_cache(64)
def beginning(name: str) -> bytes:
    """How the line of a header begins, with the end of the line before."""
    return b"\r\n%b: " % name.encode()


class Headers(Mapping[str, str]):
    """Headers that are looked up where they are. Of a name that comes more than once the last counts."""

    __slots__ = ("_end", "_head", "_read")

    def __init__(self, head: bytes, end: int | None = None) -> None:
        """`head`: as of `Delivered`. `end`: where the headers end, as of `InStore`; None: with `head`."""
        self._head = head
        self._end = len(head) if end is None else end
        self._read: dict[str, str] | None = None

    def __getitem__(self, name: str) -> str:
        if self._read is None:
            wanted = beginning(name)
            start = self._head.rfind(wanted, 0, self._end) + len(wanted)
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
            pairs = (line.partition(b":") for line in self._head[: self._end].split(LINE)[1:])
            named = ((name.strip(), value) for name, colon, value in pairs if colon)
            self._read = {
                name.decode(): value.strip().decode(errors="replace")
                for name, value in named
                if name.isascii() and not any(map(str.isspace, name.decode()))
            }
        return self._read
