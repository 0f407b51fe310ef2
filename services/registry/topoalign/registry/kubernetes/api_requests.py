"""
Requests to the API server: each ends within some seconds, and every failure is an error of the port, or Expired.

Address, TLS and credentials are what lightkube makes of its configuration. Requests go through aiohttp, which takes a
quarter of the time that lightkube's own client takes (docs/decisions/0015-lightkube.md). Proxies of the environment are not
used, and redirections are not followed.
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

# The credentials for the API server: a token, or a name and a password, as lightkube reads or asks for them.
#
# They are kept until the API server no longer accepts them. A service account's token is read again then, and a program
# that a kubeconfig names is run again.


NAME = "Authorization"


class Credentials:
    """The header of requests; none with a client certificate or without credentials."""

    def __init__(self, auth: httpx2.Auth | None) -> None:
        self._auth = auth
        self._headers: Mapping[str, str] | None = None if auth is not None else {}

    async def headers(self) -> Mapping[str, str]:
        """The header as it was accepted last. Raises ConfigError where there is nothing to be read."""
        if self._headers is None:
            await self._ask(refused=False)
        assert self._headers is not None, "it has been asked for"
        return self._headers

    async def renew(self) -> bool:
        """After a 401: whether `headers` is to be tried anew. Raises ConfigError as it does."""
        return self._auth is not None and await self._ask(refused=True)

    async def _ask(self, *, refused: bool) -> bool:
        """Takes what lightkube sends first, or after an answer with 401; False: it sends nothing more."""
        assert self._auth is not None, "there is somebody to ask"
        async with aclosing(self._auth.async_auth_flow(httpx2.Request("GET", "https://kubernetes"))) as flow:
            request = await anext(flow)
            if refused:
                try:
                    request = await flow.asend(httpx2.Response(401))
                except StopAsyncIteration:
                    return False
        value = request.headers.get(NAME, "")
        if not value.isprintable():
            raise ConfigError("the token is no text for a header")
        self._headers = {NAME: value} if value else {}
        return True


CALL_SECONDS = 3.0
"""For one request, answer included: a bind makes two and has to be done well under 5 s."""
LIST_SECONDS = 30.0
"""For a page of a list: a busy API server with large pods takes seconds, and a list that is given up begins anew."""
CONNECT_SECONDS = 2.0
UNAUTHORIZED = 401
MOST_LINE_BYTES = 16 << 20
"""etcd stores no object above 1.5 MiB."""


class Expired(Exception):
    """The API server no longer has what came after a version, or the rest of a list (410)."""


class Requests:
    """Sends requests to one API server."""

    def __init__(
        self, http: aiohttp.ClientSession, server: str, credentials: Credentials, call_seconds: float = CALL_SECONDS
    ) -> None:
        """`server`: its URL, which may have a path."""
        self._http, self._server, self._credentials = http, server.rstrip("/"), credentials
        self._call_seconds = call_seconds

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
        content = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": content_type}
        with failures(f"{method} {path}"), anyio.fail_after(within):
            async with self._answered(method, path, parameters, headers, content) as response:
                answer = await response.read()
        if not is_success(response):
            raise answer_error(response.status, answer)
        return answer

    @asynccontextmanager
    async def lines(
        self, path: str, parameters: Mapping[str, str], silent_seconds: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """
        The lines of an answer that goes on. Raises ApiUnavailable, also when nothing comes for `silent_seconds`, and
        ApiRefused and ApiNotFound.
        """
        with failures(f"GET {path}"):
            async with self._answered("GET", path, parameters, silent_seconds=silent_seconds) as response:
                if not is_success(response):
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
        """The answer, up to its headers; the second one where the first is that the credentials are not accepted."""
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


def is_success(response: aiohttp.ClientResponse) -> bool:
    """Whether what was asked for was done."""
    return response.status // 100 == 2


async def split_lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """The lines of an answer. Raises ApiUnavailable for one without end."""
    rest = b""
    async for chunk in response.content.iter_any():
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
    except (aiohttp.ClientError, ConfigError, OSError) as error:
        raise ApiUnavailable(f"{what}: {clean(str(error) or type(error).__name__, 200)}") from error


def answer_error(code: int, body: bytes | msgspec.Raw) -> Exception:
    """The error for an answer with this HTTP status, or with the Status in it."""
    try:
        status = objects.decode_object(body, objects.ApiStatus)
    except Undecodable:
        status = objects.ApiStatus()
    if 410 in (code, status.code):
        return Expired()
    return objects.error_for_status(
        code or status.code or 500, clean(status.message or status.reason or "no reason was given", 300)
    )
