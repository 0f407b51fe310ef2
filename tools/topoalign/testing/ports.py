"""Ports for processes that are told where to listen."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """
    So many TCP ports of 127.0.0.1 that the system gives to nobody else while the context is open.

    Who is told the number of one can listen there: a socket is bound to it, but does not listen, and Linux lets another one
    listen if both have SO_REUSEADDR, as the listeners of asyncio, of Go and of `socket.create_server` have.
    """
    with ExitStack() as stack:
        keepers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in keepers:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))
        yield [each.getsockname()[1] for each in keepers]
