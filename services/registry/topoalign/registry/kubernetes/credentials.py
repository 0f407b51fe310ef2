"""
What tells the API server who asks: a token, or a name and a password, as lightkube reads or asks for them.

They are kept until the API server no longer accepts them. A service account's token is read again then, and a program that
a kubeconfig names is run again.
"""

from collections.abc import Mapping
from contextlib import aclosing

import httpx2
from lightkube.core.exceptions import ConfigError

NAME = "Authorization"


class Credentials:
    """The header of requests; none where a client certificate, or nothing, tells who asks."""

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
