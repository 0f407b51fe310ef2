"""
Answers `topoalign health` as health checks call it: `health`, `health --live`, `health URL`.

The `topoalign` script calls `quick` before it imports the command line, because a check runs every few seconds in every
container, also on a busy machine. So this module imports only `socket` and `time`: importing an HTTP library costs more
CPU than the whole check. `topoalign.core.model.errors` is imported only if a check fails. All other forms (help, mistakes,
--json) are left to `topoalign.cli.health_command`, which gives the same answers.
"""

import os
import socket
import sys
from collections.abc import Mapping
from time import monotonic

SECONDS = 2.0
"""Time-out of the answer. A loaded machine takes tenths of a second; a blocked event loop never answers."""
READY = "/readyz"
LIVE = "/livez"
UNAVAILABLE = 69
"""The exit code for an unavailable service, as in `topoalign.cli.exit_codes`, which would import the command line."""
URL_PREFIX = "http://"

Page = tuple[str, int, str]
"""Host, port and path of a page."""


def quick(arguments: list[str]) -> int | None:
    """Runs a health check and returns its exit code. For any other command line, prints nothing and returns None."""
    match arguments:
        case ["health"]:
            page = find_configured_page(os.environ, READY)
        case ["health", "--live"]:
            page = find_configured_page(os.environ, LIVE)
        case ["health", url]:
            page = page_at(url, READY)
        case _:
            return None
    if page is None:
        return None
    ready, lines = check_page(page)
    print(*lines, sep="\n", file=sys.stdout if ready else sys.stderr, flush=True)
    return 0 if ready else UNAVAILABLE


def find_configured_page(environment: Mapping[str, str], path: str) -> Page | None:
    """The page of the service that these settings configure; None if they have no valid port."""
    port = port_of(environment.get("TOPOALIGN_HTTP_PORT", ""))
    return None if port is None else (environment.get("TOPOALIGN_HTTP_HOST") or "127.0.0.1", port, path)


def page_at(url: str, path: str) -> Page | None:
    """The page of a URL such as `http://127.0.0.1:8222/healthz`, by default `path`; None for anything else."""
    address, slash, rest = url.removeprefix(URL_PREFIX).partition("/")
    host, _, digits = address.rpartition(":")
    port = port_of(digits)
    if not url.startswith(URL_PREFIX) or not host or port is None or not (url.isascii() and url.isprintable()):
        return None
    return None if " " in url else (host.strip("[]"), port, slash + rest if slash else path)


def port_of(text: str) -> int | None:
    """A port from 1 to 65535; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 and 0 < int(text) < 65_536 else None


def check_page(page: Page) -> tuple[bool, list[str]]:
    """Whether the page reports ready, and its text in lines that are safe to print."""
    host, port, path = page
    try:
        ready, text = request_page(host, port, path, SECONDS)
    except (OSError, ValueError) as error:
        ready = False
        text = str(error)
    if ready and text.isascii() and text.strip().isprintable():  # the usual `ok`
        return True, [text.strip()]
    from topoalign.core.model.errors import clean  # only now, because a good answer does not need it

    lines = [clean(line, 400) for line in text.splitlines() if line.strip()]
    return ready, lines if ready else [f"http://{host}:{port}{path}: {line}" for line in lines]


LONGEST_ANSWER = 65_536
"""Bytes. /readyz?verbose has a line of at most 400 characters for each of some dozen checks."""
ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  # connected to, not listened on
"""Wildcard address -> the address to connect to instead."""


def request_page(host: str, port: int, path: str, seconds: float) -> tuple[bool, str]:
    """
    Whether `path`, such as `/readyz`, answers with status 200 within `seconds`; and the body, which is untrusted text.

    Raises OSError if nothing listens or the answer is not complete in time, ValueError for an answer that is not HTTP.
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
        raise ValueError("the listener there is no HTTP server")
    return status[:3] == b"200", body.decode("utf-8", "replace")
