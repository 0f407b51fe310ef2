"""How a scheduler reaches its extender: by HTTP or HTTPS, as kube-scheduler does."""

import ssl
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import cycle
from typing import Any, Literal, Protocol
from urllib.parse import SplitResult, urlsplit

import anyio
import msgspec

Verb = Literal["filter", "prioritize", "bind", "preempt"]

TIMEOUT_SECONDS = 5.0
"""`httpTimeout` of the scheduler's configuration, where it has none."""


class ExtenderFailed(Exception):
    """Raised where the extender has not answered, or with what the scheduler does not understand."""


class Extender(Protocol):
    """What answers the scheduler's calls."""

    async def ask(self, verb: Verb, arguments: Mapping[str, Any]) -> Any:
        """The answer as decoded JSON. Raises ExtenderFailed."""


class HttpExtender:
    """
    An extender over HTTP. Connections are kept and used again; calls at the same time have one each. With several URLs each
    new connection goes to the next one that is ready, as through a Service.
    """

    def __init__(
        self, *urls: str, tls: ssl.SSLContext | None = None, is_ready: Callable[[int], bool] = lambda place: True
    ) -> None:
        """
        `urls`: with the prefix, `https://127.0.0.1:8443/scheduler`. `tls`: by which the certificate is verified. `is_ready`:
        whether the URL at this place is an endpoint of the Service now; where none is, a call fails.
        """
        self._urls = [urlsplit(url) for url in urls]
        self._places = cycle(range(len(urls)))
        self._is_ready = is_ready
        self._tls = tls
        self._prefix = self._urls[0].path.rstrip("/")
        self._idle: list[HTTPConnection] = []
        self._closed = False

    async def ask(self, verb: Verb, arguments: Mapping[str, Any]) -> Any:
        """The answer as decoded JSON. Raises ExtenderFailed."""
        return await anyio.to_thread.run_sync(self._ask, verb, msgspec.json.encode(arguments), abandon_on_cancel=True)

    def _ask(self, verb: Verb, body: bytes) -> Any:
        connection = self._idle.pop() if self._idle else self._connection()
        try:
            connection.request("POST", f"{self._prefix}/{verb}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, HTTPException) as error:
            connection.close()
            raise ExtenderFailed(f"failed {verb}: {error!r}") from error
        self._idle.append(connection)
        if self._closed:  # while this call was under way
            self.close()
        if answer.status != 200:
            raise ExtenderFailed(f"failed {verb}, code {answer.status}")
        try:
            return msgspec.json.decode(content)
        except msgspec.MsgspecError as error:
            raise ExtenderFailed(f"failed {verb}: {error}") from error

    def _connection(self) -> HTTPConnection:
        url = self._endpoint()
        assert url.hostname is not None, "a URL with a host"
        if self._tls is not None:
            return HTTPSConnection(url.hostname, url.port, timeout=TIMEOUT_SECONDS, context=self._tls)
        return HTTPConnection(url.hostname, url.port, timeout=TIMEOUT_SECONDS)

    def _endpoint(self) -> SplitResult:
        for _ in self._urls:
            place = next(self._places)
            if self._is_ready(place):
                return self._urls[place]
        raise ExtenderFailed("the Service of the extender has no endpoints")

    def close(self) -> None:
        """Closes what is kept open, and keeps nothing open from now on."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()
