"""
Sends requests to the API server. Every request has a timeout, and every failure is an error of the port, or Expired.

lightkube reads address, TLS and credentials from the configuration. aiohttp sends the requests, in a quarter of the
time of lightkube's own client (docs/decisions/0015-lightkube.md). Proxy settings of the environment are ignored, and
redirects are not followed.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import urlencode

import aiohttp
import anyio
import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError
from yarl import URL

from topoalign.core.model.errors import Undecodable, clean
from topoalign.registry.kubernetes import objects
from topoalign.registry.ports import ApiUnavailable


class Credentials:
    """
    The `Authorization` header of requests, built by lightkube. There is none with a client certificate or without
    credentials. The header is reused until the API server no longer accepts it. Then the token of a service account is
    read again, or the exec plugin of a kubeconfig is run again.
    """

    def __init__(self, auth: httpx2.Auth | None) -> None:
        self._auth = auth
        self._headers: Mapping[str, str] | None = None if auth is not None else {}

    async def headers(self) -> Mapping[str, str]:
        """The current header; empty if there is none. Raises ConfigError if the credentials cannot be read."""
        if self._headers is None:
            await self._ask(refused=False)
        assert self._headers is not None, "_ask sets them"
        return self._headers

    async def renew(self) -> bool:
        """Reads the credentials again after a 401. Returns whether to send the request again. Raises ConfigError."""
        return self._auth is not None and await self._ask(refused=True)

    async def _ask(self, *, refused: bool) -> bool:
        """Takes the header that lightkube would send first, or after a 401. Returns False if it would not retry."""
        assert self._auth is not None, "without it there is nothing to renew"
        async with aclosing(self._auth.async_auth_flow(httpx2.Request("GET", "https://kubernetes"))) as flow:
            request = await anext(flow)
            if refused:
                try:
                    request = await flow.asend(httpx2.Response(401))
                except StopAsyncIteration:
                    return False
        value = request.headers.get("Authorization", "")
        if not value.isprintable():
            raise ConfigError("the token is no text for a header")
        self._headers = {"Authorization": value} if value else {}
        return True


CALL_SECONDS = 3.0
"""Timeout of a request and its answer. A bind sends two and must take well under 5 s."""
LIST_SECONDS = 30.0
"""Timeout of a page of a list. A busy API server takes seconds for large pods, and a failed list starts again."""
CONNECT_SECONDS = 2.0
UNAUTHORIZED = 401
MOST_LINE_BYTES = 16 << 20
"""Maximum size of a line of a watch. etcd stores no object larger than 1.5 MiB."""


class Expired(Exception):
    """Raised if the API server no longer has the changes after a version, or the remaining pages of a list (410)."""


class Requests:
    """Sends requests to one API server."""

    def __init__(
        self, http: aiohttp.ClientSession, server: str, credentials: Credentials, call_seconds: float = CALL_SECONDS
    ) -> None:
        """`server`: its URL, which may have a path."""
        self._http, self._server, self._credentials = http, server.rstrip("/"), credentials
        self._call_seconds = call_seconds

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
        Sends a request and returns the body of the answer. `seconds`: timeout for both; None: `call_seconds`. Raises
        ApiUnavailable, ApiRefused, ApiNotFound, ApiConflict, and Expired for a page of a list.
        """
        within = seconds or self._call_seconds
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        with failures(f"{method} {path}"), anyio.fail_after(within):
            async with self._answered(method, path, parameters, headers, content) as response:
                answer = await response.read()
        if response.status // 100 != 2:
            raise answer_error(response.status, answer)
        return answer

    @asynccontextmanager
    async def lines(
        self, path: str, parameters: Mapping[str, str], silent_seconds: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """
        Yields the lines of an answer. Raises ApiRefused, ApiNotFound, Expired, and ApiUnavailable, also if no data
        comes for `silent_seconds`.
        """
        with failures(f"GET {path}"):
            async with self._answered("GET", path, parameters, silent_seconds=silent_seconds) as response:
                if response.status // 100 != 2:
                    raise answer_error(response.status, await response.read())
                yield split_lines(response)

    @asynccontextmanager
    async def _answered(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str] | None,
        headers: Mapping[str, str] = {},
        content: bytes | None = None,
        silent_seconds: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields the answer once its headers have come. Retries once with new credentials if the first are refused."""
        url = URL(f"{self._server}{path}?{urlencode(parameters)}" if parameters else self._server + path, encoded=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silent_seconds)
        for is_last in (False, True):
            async with self._http.request(
                method,
                url,
                data=content,
                headers={**headers, **await self._credentials.headers()},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status != UNAUTHORIZED or is_last or not await self._credentials.renew():
                    yield response
                    return


async def split_lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yields the lines of an answer. Raises ApiUnavailable for a line that is too long."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > MOST_LINE_BYTES:
            raise ApiUnavailable("a line of a watch does not end")


@contextmanager
def failures(what: str) -> Iterator[None]:
    """Turns any failure of a connection into ApiUnavailable."""
    try:
        yield
    except TimeoutError as error:
        raise ApiUnavailable(f"{what}: no answer in time") from error
    except (aiohttp.ClientError, ConfigError, OSError) as error:
        raise ApiUnavailable(f"{what}: {clean(str(error) or type(error).__name__, 200)}") from error


def answer_error(code: int, body: bytes | msgspec.Raw) -> Exception:
    """The error for an answer with this HTTP status, or with the Status in its body."""
    try:
        status = objects.decode_object(body, objects.ApiStatus)
    except Undecodable:
        status = objects.ApiStatus()
    if 410 in (code, status.code):
        return Expired()
    return objects.error_for_status(
        code or status.code or 500, clean(status.message or status.reason or "no reason was given", 300)
    )
