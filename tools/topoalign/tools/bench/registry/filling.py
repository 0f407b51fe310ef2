"""
Fills the streams of a nats-server with the facts of many nodes.

It speaks the protocol of NATS itself over one socket and waits for the acknowledgements of many messages at once: a
quarter of a million messages are stored in half a minute. The facts of the nodes come in turns, as from nodes that work at
the same time.
"""

import socket
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from urllib.parse import urlsplit

from topoalign.core import wire
from topoalign.core.model.errors import Unavailable, clean
from topoalign.core.model.events import Event
from topoalign.core.ports import Message
from topoalign.tools.bench.registry.history import History

UNDER_WAY = 2000
"""Messages that are sent before their acknowledgements are waited for."""
SECONDS = 60.0
"""For all of these to be acknowledged."""
INBOX = "_INBOX_bench.filling"


class NotStored(Unavailable):
    """The server did not take what the benchmark publishes."""

    code = "NotStored"

    def __init__(self, answer: str) -> None:
        super().__init__(f"a fact was not stored: {clean(answer, 200)}", "see the log of nats-server")


def fill(url: str, events: Iterable[Event]) -> Iterator[int]:
    """Publishes these facts. Yields the number of messages stored so far. Raises NotStored."""
    messages = (wire.encode_event(event, time.time()) for event in events)
    at = urlsplit(url)
    with socket.create_connection((at.hostname or "", at.port or 4222), SECONDS) as server:
        server.sendall(f'CONNECT {{"headers":true,"verbose":false}}\r\nSUB {INBOX} 1\r\n'.encode())
        answers = server.makefile("rb")
        stored = 0
        while batch := [published(message) for message in islice(messages, UNDER_WAY)]:
            server.sendall(b"".join(batch))
            for _ in batch:
                acknowledged(answers)
            stored += len(batch)
            yield stored


def said(histories: list[History], rounds: int = 1) -> Iterator[Event]:
    """The readings of each node, then the facts of the allocators in turns; `rounds` as of `History.facts`."""
    for history in histories:
        yield from history.readings()  # type: ignore[misc]  # every reading is an event
    for turn in zip(*(history.facts(rounds) for history in histories), strict=True):
        yield from turn


def said_again(histories: list[History]) -> Iterator[Event]:
    """New readings of each node, then a snapshot of each."""
    for history in histories:
        yield from history.readings()  # type: ignore[misc]  # every reading is an event
    for history in histories:
        yield history.snapshot()


def published(message: Message) -> bytes:
    """A message with headers, in the protocol of NATS."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in message.headers.items())
    head = f"NATS/1.0\r\n{lines}\r\n".encode()
    sizes = f"HPUB {message.subject} {INBOX} {len(head)} {len(head) + len(message.body)}\r\n"
    return b"".join((sizes.encode(), head, message.body, b"\r\n"))


def acknowledged(answers: Iterator[bytes]) -> None:
    """Reads up to the next acknowledgement. Raises NotStored."""
    for line in answers:
        if line.startswith(b"MSG "):
            answer = next(answers)
            if b'"seq"' not in answer or b'"error"' in answer:
                raise NotStored(answer.decode(errors="replace"))
            return
        if line.startswith(b"-ERR"):
            raise NotStored(line.decode(errors="replace"))
    raise NotStored("the connection was closed")
