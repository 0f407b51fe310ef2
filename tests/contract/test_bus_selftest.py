"""The self-test of a connection finds missing permissions, and nobody who listens for facts hears it."""

import re
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import GRANTED, killable, said
from e2e_support import described, environment, in_one_process
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Stream
from topoalign.runtime.nats_bus import connect_bus

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "events.md"
SPOKEN = [GRANTED, "topoalign.v1.allocation.node-1.bound", "topoalign.v1.usage.node-1"]
ADMIN = "{ user: admin, password: x }"


def users(rules: str) -> str:
    return f"authorization {{ users: [ {ADMIN}, {{ user: node, password: x, permissions: {{ {rules} }} }} ] }}\n"


def as_user(url: str, name: str) -> str:
    return url.replace("nats://", f"nats://{name}:x@")


async def heard_by_everybody(tmp_path: Path, rules: str) -> tuple[list[str], int, list[str]]:
    """
    What a plain subscriber to everything hears while a bus connects, and how many messages are stored. The warnings that the
    second of two connections has written, after those of the first.
    """
    subjects: list[str] = []

    async def note(message: Msg) -> None:
        subjects.append(message.subject)

    async with (
        killable(tmp_path, users(rules)) as server,
        connect_bus(as_user(server.url, "admin")) as admin,
    ):
        await admin.live().subscribe("topoalign.>", note)
        with capture_logs() as logs:
            async with connect_bus(as_user(server.url, "node"), speaks=SPOKEN) as bus:
                first = bus.live()
                first.lose()
                while bus._connection in (None, first):
                    await anyio.lowlevel.checkpoint()
                await bus.last_position(Stream.ALLOCATIONS) if "GET" not in rules else None
        await admin.publish(said(1))
        while GRANTED not in subjects[-1:]:
            await anyio.lowlevel.checkpoint()
        stored = await admin.last_position(Stream.ALLOCATIONS)
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    return subjects[:-1], stored, warnings


async def test_a_self_test_is_heard_on_its_own_subject_only_and_not_stored(tmp_path: Path) -> None:
    subjects, stored, warnings = await heard_by_everybody(tmp_path, "")

    assert {"topoalign.v1.selftest.topoalign"} == set(subjects)
    assert 1 == stored
    assert ["bus lost"] == warnings


async def test_a_server_set_up_for_an_earlier_version_works_with_one_log(
    tmp_path: Path,
) -> None:
    """It may publish on what it did before the self-test had a subject; the test is heard there, as it was then."""
    allowed = ", ".join(f'"{subject}"' for subject in [*SPOKEN, "$JS.API.>"])
    subjects, stored, warnings = await heard_by_everybody(tmp_path, f"publish: {{ allow: [ {allowed} ] }}")

    assert set(SPOKEN) == set(subjects)
    assert 1 == stored
    assert 1 == warnings.count("self-test on the subjects of facts")


async def test_a_missing_permission_to_read_what_is_stored_is_said_once(tmp_path: Path) -> None:
    _, _, warnings = await heard_by_everybody(tmp_path, 'publish: { deny: ["$JS.API.STREAM.MSG.GET.>"] }')

    assert 1 == len([event for event in warnings if event.startswith("repeated ids cannot be compared")])


@pytest.mark.parametrize("subject", SPOKEN)
@pytest.mark.parametrize("own", [True, False])
async def test_each_subject_on_which_we_may_not_publish_is_named(tmp_path: Path, subject: str, own: bool) -> None:
    denied = f'"{subject}"' if own else f'"{subject}", "topoalign.v1.selftest.>"'
    async with killable(tmp_path, users(f"publish: {{ deny: [ {denied} ] }}")) as server:
        with pytest.raises(BusRefused, match=f"no permission on {re.escape(subject)}: NATS says"):
            async with connect_bus(as_user(server.url, "node"), speaks=SPOKEN):
                raise AssertionError


async def test_the_documented_permissions_are_enough_for_a_node_and_a_registry(tmp_path: Path) -> None:
    """The block in docs/events.md is what the server is told, and no service meets a refusal."""
    block = re.search(r"```\n(authorization .*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert block is not None
    text = re.sub(r"nkey: U\.\.\.(\w+)", lambda match: f"user: {match[1].lower()}, password: x", block[1])
    node = NodeName("node-1")
    async with killable(tmp_path / "nats", text) as server, AsyncExitStack() as stack:
        with capture_logs() as logs:
            for services, user in (("discovery", "hinting", "allocator"), "node"), (("registry",), "registry"):
                settings = environment(node, as_user(server.url, user), tmp_path)
                del settings["TOPOALIGN_KUBELET_DIR"]
                await stack.enter_async_context(in_one_process(None, settings, services))
            admin = await stack.enter_async_context(connect_bus(as_user(server.url, "admin")))
            await described(admin, node)
            reader = await stack.enter_async_context(connect_bus(as_user(server.url, "reader"), name="reader"))
            async with reader.follow(Stream.ALLOCATIONS, wire.allocation_subjects(node)) as messages:
                snapshot = (await anext(messages)).message
            with pytest.raises(BusRefused):
                await reader.publish(msgspec.structs.replace(snapshot, headers={}))
            refusals = [line["finding"] for line in logs if line["event"] == "nats refuses"]
        await stack.aclose()

    assert [text for text in refusals if "allocation.node-1.snapshot" not in text] == []
