"""The HTTP pages of a process, as its sockets and its clients see them."""

import socket

from topoalign.runtime.http_server import listen


def test_an_answer_in_parts_does_not_wait_for_acknowledgements() -> None:
    """Each accepted connection sends at once (TCP_NODELAY)."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
