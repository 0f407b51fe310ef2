"""Questions on one connection."""

from collections.abc import Callable, Mapping
from typing import cast

import anyio
import pytest

from topoalign.runtime.nats_bus.delivered import Delivered
from topoalign.runtime.nats_bus.inbox import Inbox, anything
from topoalign.runtime.nats_bus.nats_library import TolerantClient

pytestmark = pytest.mark.anyio


class Silent:
    """A client to whom nobody answers: who asks gives up."""

    def __init__(self) -> None:
        self.asking = anyio.CancelScope()

    def new_inbox(self) -> str:
        return "_INBOX.a"

    async def subscribe(self, subject: str) -> str:
        return subject

    def deliver(self, subscription: str, take: Callable[[Delivered], None]) -> None:
        """Never."""

    async def publish(self, subject: str, body: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        self.asking.cancel()


async def test_nothing_is_kept_of_a_question_that_was_given_up() -> None:
    """A registry asks thousands of allocators in a round, of which some are away for weeks."""
    client = Silent()
    inbox = Inbox(cast(TolerantClient, client))
    with client.asking:
        await inbox.ask("a.b", b"", None, anything)

    assert client.asking.cancelled_caught
    assert {} == inbox._asked
