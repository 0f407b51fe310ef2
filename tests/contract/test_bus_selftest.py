"""The self-test of a connection finds missing permissions, and nobody who listens for facts hears it."""

import re
from pathlib import Path

import anyio
import pytest
from bus_support import GRANTED, as_user, killable, said
from structlog.testing import capture_logs

from topoalign.core.model.errors import BusRefused
from topoalign.core.ports import Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus import connect_bus

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "events.md"
SPOKEN = [GRANTED, "topoalign.v1.allocation.node-1.bound", "topoalign.v1.usage.node-1"]
ADMIN = "{ user: admin, password: x }"


def users(rules: str) -> str:
    return f"authorization {{ users: [ {ADMIN}, {{ user: node, password: x, permissions: {{ {rules} }} }} ] }}\n"


async def test_a_self_test_is_not_stored_and_no_news(tmp_path: Path) -> None:
    """Plain subscribers receive it on the subjects of facts, on each connection; those who follow a store do not."""
    received: list[str] = []

    async with killable(tmp_path) as server, connect_bus(server.url) as admin:
        await admin.live().take("topoalign.>", lambda message: received.append(message.subject.decode()))
        with capture_logs() as logs:
            async with connect_bus(server.url, publishes=SPOKEN) as bus:
                first = bus.live()
                first.lose()
                while bus._connection in (None, first):
                    await anyio.lowlevel.checkpoint()
        await admin.publish(said(1))
        while GRANTED not in received[2 * len(SPOKEN) :]:
            await anyio.lowlevel.checkpoint()
        positions = [await admin.last_position(stream) for stream in (Stream.ALLOCATIONS, Stream.NODES)]

    assert [*SPOKEN, *SPOKEN, GRANTED] == [subject for subject in received if not subject.startswith(event_stores.NEWS)]
    assert [1, 0] == positions
    assert ["bus lost"] == [line["event"] for line in logs if line["log_level"] == "warning"]


@pytest.mark.parametrize("subject", SPOKEN)
async def test_each_subject_on_which_we_may_not_publish_is_named(tmp_path: Path, subject: str) -> None:
    async with killable(tmp_path, users(f'publish: {{ deny: [ "{subject}" ] }}'), administrator="admin:x") as server:
        with pytest.raises(BusRefused, match=f"no permission on {re.escape(subject)}: NATS reports"):
            async with connect_bus(as_user(server.url, "node:x"), publishes=SPOKEN):
                raise AssertionError
