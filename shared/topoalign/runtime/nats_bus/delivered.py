"""
Parses messages as they came over the connection, among them those that a store sends.

A registry that starts reads a million messages. The client library parses the headers of each in Python and hands it to a
task over a queue, which takes three times as long as all else (docs/decisions/0028). So here the bytes themselves are taken.

A store adds these headers, in this order, behind those of a message that is read directly (nats-server 2.11 and later,
ADR-31):

    Nats-Stream, Nats-Subject, Nats-Sequence, Nats-Time-Stamp, and in a batch Nats-Num-Pending, Nats-Last-Sequence
"""

import re
from string import whitespace
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
        message = Message(subject=there.subject, headers=parse_headers(self.head[: there.end]), body=self.body)
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


def parse_headers(lines: bytes) -> dict[str, str]:
    """
    The headers in `Name: value` lines, after the first line. Of a name that comes more than once the last counts, and a line
    without a colon is ignored, as by the client library, which needs three times as long.
    """
    pairs = (line.partition(":") for line in lines.decode(errors="replace").split("\r\n")[1:])
    return {name.strip(whitespace): value.strip(whitespace) for name, colon, value in pairs if colon}
