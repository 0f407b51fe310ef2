"""Reads the HTTP pages of the registry over one connection that is kept."""

import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from topoalign.core.model.errors import Unavailable, clean
from topoalign.tools.bench.device_plugin.agent import Agent

PATIENCE_SECONDS = 600.0
"""For each thing that is waited for; the figures are of no use long before."""
LOOK_SECONDS = 0.05
"""Between two looks at what is waited for."""


class NotAnswered(Unavailable):
    """The registry did not answer as the benchmark expects."""

    code = "NotAnswered"

    def __init__(self, what: str, finding: str) -> None:
        super().__init__(f"{what}: {clean(finding, 500)}", "the log of the registry is on stderr")


class Reader:
    """A client of the registry on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def get(self, path: str) -> bytes:
        """The body of a page, to its last byte. Raises NotAnswered."""
        status, body = self._get(path)
        if status != HTTPStatus.OK:
            raise NotAnswered(path, f"{status} {body.decode(errors='replace')}")
        return body

    def is_ok(self, path: str) -> bool:
        """Whether a page answers 200; False while nobody listens."""
        try:
            return self._get(path)[0] == HTTPStatus.OK
        except (OSError, HTTPException):
            self.close()
            return False

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _get(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        return response.status, response.read()


def until(holds: Callable[[], bool], what: str, agent: Agent, look_seconds: float = LOOK_SECONDS) -> None:
    """
    Waits until this holds, with a look every `look_seconds`. `what`: what is so until then.

    Raises NotAnswered where the process ends before, or after PATIENCE_SECONDS.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if (ended := agent.ended()) is not None:
            raise NotAnswered(what, ended)
        if time.monotonic() > end:
            raise NotAnswered(what, f"not within {PATIENCE_SECONDS:g} s")
        time.sleep(look_seconds)
