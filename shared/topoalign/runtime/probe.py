"""
Asks a process whether it is ready: one HTTP request over a raw socket.

A health check runs every few seconds in every container, also on a busy machine. So this module
imports only `socket` and `time`: importing an HTTP library alone costs more CPU than the whole of `topoalign health`.
"""

import socket
from time import monotonic

LONGEST_ANSWER = 65_536
"""Bytes. /readyz?verbose has a line of at most 400 characters for each of some dozen checks."""
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # asked, not listened on
"""Addresses that stand for all of the machine's own, and the one to ask instead."""


def ask(host: str, port: int, path: str, seconds: float) -> tuple[bool, str]:
    """
    Whether `path`, for example `/readyz`, answers with status 200; and the body, which is foreign text.

    `seconds` bound the whole question, from the connection to the last byte. Raises OSError where nobody listens,
    TimeoutError (an OSError) where the answer is not whole in time, ValueError where what answers does not speak HTTP.
    """
    until = monotonic() + seconds
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nAccept: text/plain\r\n\r\n"
    answer = b""
    address = ANY.get(host, host).encode("ascii")  # as bytes: text would import the codec for international names
    with socket.create_connection((address, port), timeout=seconds) as connection:  # type: ignore[arg-type]  # bytes do
        connection.sendall(request.encode("ascii"))
        while len(answer) < LONGEST_ANSWER:
            left = until - monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
            part = connection.recv(LONGEST_ANSWER - len(answer))
            if not part:
                break
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    version, _, status = head.partition(b"\r\n")[0].partition(b" ")
    if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
        raise ValueError("what listens there does not speak HTTP")
    return status[:3] == b"200", body.decode("utf-8", "replace")
