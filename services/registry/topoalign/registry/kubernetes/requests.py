"""
Requests to the API server: each ends within some seconds, and every failure is an error of the port, or Expired.

The connection is lightkube's: its configuration, TLS and credentials, the service account's token included, which is read
again when it is no longer accepted. Proxies of the environment are not used.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from topoalign.core.model.errors import Undecodable, clean
from topoalign.registry.kubernetes import objects
from topoalign.registry.ports import ApiUnavailable

CALL_SECONDS = 3.0
"""For one request, answer included: a bind makes two and has to be done well under 5 s."""
LIST_SECONDS = 30.0
"""For a page of a list: a busy API server with large pods takes seconds, and a list that is given up begins anew."""
CONNECT_SECONDS = 2.0
MOST_LINE_BYTES = 16 << 20
"""etcd stores no object above 1.5 MiB."""


class Expired(Exception):
    """The API server no longer has what came after a version, or the rest of a list (410)."""


class Requests:
    """Sends requests over one HTTP client."""

    def __init__(self, http: httpx2.AsyncClient, call_seconds: float = CALL_SECONDS) -> None:
        self._http, self._call_seconds = http, call_seconds

    async def get(self, path: str) -> bytes:
        """The body of the answer. Raises ApiUnavailable, ApiRefused and ApiNotFound."""
        return await self.send("GET", path)

    async def page(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """A page of a list. Raises as `get`, and Expired."""
        return await self.send("GET", path, parameters=parameters, seconds=LIST_SECONDS)

    async def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        parameters: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> bytes:
        """
        The body of the answer, which has to come within so many seconds. Raises ApiUnavailable, ApiRefused, ApiNotFound and
        ApiConflict.
        """
        within = seconds or self._call_seconds
        timeout = httpx2.Timeout(within, connect=CONNECT_SECONDS)
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        with failures(f"{method} {path}"), anyio.fail_after(within):
            response = await self._http.request(
                method, path, content=content, headers=headers, params=parameters, timeout=timeout
            )
        if not response.is_success:
            raise refusal(response.status_code, response.content)
        return response.content

    @asynccontextmanager
    async def lines(
        self, path: str, parameters: Mapping[str, str], silent_seconds: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """
        The lines of an answer that goes on. Raises ApiUnavailable, also when nothing comes for `silent_seconds`, and
        ApiRefused and ApiNotFound.
        """
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=silent_seconds)
        with failures(f"GET {path}"):
            async with self._http.stream("GET", path, params=parameters, timeout=timeout) as response:
                if not response.is_success:
                    raise refusal(response.status_code, await response.aread())
                yield split(response)


async def split(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """The lines of an answer. Raises ApiUnavailable for one without end."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MOST_LINE_BYTES:
            raise ApiUnavailable("a line of a watch does not end")


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Raises ApiUnavailable for all that goes wrong with a connection."""
    try:
        yield
    except TimeoutError as error:
        raise ApiUnavailable(f"{what}: no answer in time") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, ConfigError, OSError) as error:
        raise ApiUnavailable(f"{what}: {clean(str(error) or type(error).__name__, 200)}") from error


def refusal(code: int, body: bytes | msgspec.Raw) -> Exception:
    """The error that an answer with this HTTP status, or the Status in it, tells of."""
    try:
        status = objects.decoded(body, objects.Status)
    except Undecodable:
        status = objects.Status()
    if 410 in (code, status.code):
        return Expired()
    return objects.failure(
        code or status.code or 500, clean(status.message or status.reason or "no reason was given", 300)
    )
