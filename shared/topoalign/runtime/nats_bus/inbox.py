"""
Sends questions on one connection, and matches the answers to them.

Each question has a reply subject of its own under one inbox, which is subscribed to with the first question. The service
that answers one question cannot guess the subject of another.

The client library has this, too: it passes each answer to a task over a queue, and keeps a timer for each question in
addition to the caller's time-out. A registry asks thousands of allocators in a round. So here an answer goes directly to its
caller, and there are no timers.
"""

import asyncio
from collections.abc import Callable, Mapping
from secrets import token_hex

from nats.errors import NoRespondersError

from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.nats_library import TolerantClient

NO_RESPONDERS = "503"
"""The status of the server's answer if nobody is subscribed to the subject of a question."""


TOKEN_BYTES = 8
"""Random bytes in the last token of a reply subject."""


Accept = Callable[[Delivered], bool]


def anything(answer: Delivered) -> bool:
    """Accepts each answer, for requests to NATS itself."""
    return True


class Inbox:
    """The questions of one connection that are under way."""

    def __init__(self, client: TolerantClient) -> None:
        self._client = client
        self._subject = ""
        """The inbox; empty before its subscription."""
        self._asked: dict[bytes, tuple[asyncio.Future[Delivered], Accept]] = {}
        """Reply subject -> the answer, and what may be one."""

    async def ask(self, subject: str, body: bytes, headers: Mapping[str, str] | None, accept: Accept) -> Delivered:
        """
        Returns the first answer to this question that `accept` takes, whenever it comes: who asks sets a time-out.
        Others are ignored: a stream that takes the subject of a question answers, too. Raises the library's errors, among
        them NoRespondersError.
        """
        if not self._subject:
            await self._subscribe()
        reply = f"{self._subject}.{token_hex(TOKEN_BYTES)}"
        answer: asyncio.Future[Delivered] = asyncio.get_running_loop().create_future()
        self._asked[reply.encode()] = answer, accept
        try:
            await self._client.publish(subject, body, reply=reply, headers=dict(headers) if headers else None)
            delivered = await answer
        finally:
            del self._asked[reply.encode()]
        if delivered.status[0] == NO_RESPONDERS:
            raise NoRespondersError
        return delivered

    async def _subscribe(self) -> None:
        """Subscribes to the inbox. Questions that come meanwhile are sent after the subscription."""
        self._subject = subject = self._client.new_inbox()
        try:
            self._client.deliver(await self._client.subscribe(f"{subject}.*"), self._take_answer)
        except BaseException:
            self._subject = ""
            raise

    def _take_answer(self, delivered: Delivered) -> None:
        """Passes an answer to its question. Late and further answers are dropped."""
        answer, accept = self._asked.get(delivered.subject, (None, anything))
        if answer is None or answer.done():
            return
        if delivered.status[0] == NO_RESPONDERS or accept(delivered):
            answer.set_result(delivered)
