"""
Messages as a consumer delivers them, read no further than somebody asks.

A registry that starts reads a million messages, and of most of them nothing but the position and the id: a later snapshot
stands for them. The client library makes of each message an object with all its headers and hands it to a task over a queue,
which took two thirds of the time of a start. So a follower takes the bytes themselves.

The position is in the reply subject that a consumer gives each message (NATS ADR-15):

    $JS.ACK.<stream>.<consumer>.<deliveries>.<position>.<count>.<time>.<waiting>
    $JS.ACK.<domain>.<account>.<stream>.<consumer>.<deliveries>.<position>.<count>.<time>.<waiting>[.<random>]
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Message, Received

ACKNOWLEDGED_ON = b"$JS.ACK."
"""How the reply subject of a message of a stream begins; what the server remarks about a fetch has another or none."""
SHORT = 9
"""Tokens of the short form of that subject."""
LINE, VERSION = b"\r\n", b"NATS/1.0"
"""What ends each line of the headers, and what their first line begins with."""


class Delivered(NamedTuple):
    """A message as it came over the connection."""

    subject: bytes
    reply: bytes
    body: bytes
    head: bytes
    """The headers with the line before them, or nothing."""

    @property
    def is_remark(self) -> bool:
        """Whether the server says something about a fetch, and this is no message of a stream."""
        return not self.reply.startswith(ACKNOWLEDGED_ON)

    @property
    def status(self) -> tuple[str, str]:
        """Number and text of a remark; empty where there is none. Example: `NATS/1.0 408 Request Timeout`."""
        line = self.head.partition(LINE)[0].removeprefix(VERSION).decode(errors="replace")
        number, _, text = line.strip().partition(" ")
        return number, text

    def counted(self) -> tuple[int, Received]:
        """How many messages its consumer has delivered with this one, and the message. Raises BusUnavailable."""
        tokens = self.reply.split(b".")
        at = 5 if len(tokens) == SHORT else 7
        try:
            position, count, waiting = int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 3])
        except (LookupError, ValueError) as error:
            raise BusUnavailable("a fetch brought a message that no consumer has delivered") from error
        headers = Headers(self.head)
        subject = self.subject.decode(errors="replace")  # such a message is put aside by whoever decodes it
        message = Message(subject=subject, headers=headers, body=self.body)
        return count, Received(message=message, position=position, waiting=waiting)


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
        """All of them, by the library's rules: a line without a colon, or whose name has a space in it, is passed over."""
        if self._read is None:
            pairs = (line.partition(b":") for line in self._head.split(LINE)[1:])
            named = ((name.strip(), value) for name, colon, value in pairs if colon)
            self._read = {
                name.decode(): value.strip().decode(errors="replace")
                for name, value in named
                if name.isascii() and not any(map(str.isspace, name.decode()))
            }
        return self._read
