"""
Parses the raw bytes of messages from the connection, including messages that a store sends.

A registry reads a million messages when it starts. The client library parses the headers of each in Python and queues
it for a task, which takes three times as long as everything else (docs/decisions/0028). So the raw bytes are used here.

If a message is read directly from a store, the store adds these headers after those of the message, in this order
(nats-server 2.11 and later, ADR-31):

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
"""The beginning of the headers that a store adds to a message."""
ADDED = re.compile(
    rb"\r\nNats-Stream: ([^\r]*)\r\nNats-Subject: ([^\r]*)\r\nNats-Sequence: (\d+)(?:\r\nNats-Time-Stamp: ([^\r]*))?"
    rb"(?:\r\nNats-Num-Pending: (\d+))?(?:\r\nNats-Last-Sequence: (\d+))?\r\n"
)
"""The headers that a store adds to a message."""
END = re.compile(rb"\r\nNats-Num-Pending: (\d+)\r\nNats-Last-Sequence: (\d+)\r\n")
"""Headers of the end of a batch."""


class Delivered(NamedTuple):
    """A message as received from the connection."""

    subject: bytes
    body: bytes
    head: bytes
    """The headers, including the version line before them; empty without headers."""

    @property
    def is_of_a_store(self) -> bool:
        """Whether NATS sent a stored message or its headers: an answer to a read, or the news that it was stored."""
        return self.head.rfind(OF_A_STORE) >= 0

    @property
    def is_without_message(self) -> bool:
        """Whether it only reports the status of a read, such as its end. Then it has no body."""
        return not self.body and not self.is_of_a_store

    @property
    def status(self) -> tuple[str, str]:
        """Code and text of the status line; empty if there is none. Example: `NATS/1.0 204 EOB`."""
        line = self.head.partition(LINE)[0].removeprefix(VERSION).decode(errors="replace")
        number, _, text = line.strip().partition(" ")
        return number, text

    @property
    def after_batch(self) -> tuple[int, int]:
        """At the end of a batch: the number of messages after the batch, and its last position. Otherwise zeros."""
        end = END.search(self.head)
        return (int(end[1]), int(end[2])) if end is not None else (0, 0)

    def in_store(self) -> "InStore":
        """The place of the message in its store. Raises BusUnavailable."""
        at = self.head.rfind(OF_A_STORE)
        added = ADDED.match(self.head, at) if at >= 0 else None
        if added is None:
            raise BusUnavailable("a store answered with something else than a message of its own")
        stream, subject, position, stored, waiting, before = added.groups(b"")
        subject_text = subject.decode(errors="replace")  # the decoder puts it on the dead-letter stream
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
    """The position of the previous message in the same batch or, for news, of the same subject. 0: there is none."""
    stored: bytes
    """When it was stored, by the clock of the server; empty if the server does not report it."""
    waiting: int
    """Number of matching messages after it that have not been delivered yet."""
    subject: str
    end: int
    """The end of the published headers in `Delivered.head`."""


def parse_headers(lines: bytes) -> dict[str, str]:
    """
    The headers in `Name: value` lines, after the first line. If a name is repeated, the last value counts. A line
    without a colon is ignored. The client library has the same rules, but takes three times as long.
    """
    pairs = (line.partition(":") for line in lines.decode(errors="replace").split("\r\n")[1:])
    return {name.strip(whitespace): value.strip(whitespace) for name, colon, value in pairs if colon}
