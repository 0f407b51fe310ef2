"""The users of NATS in deploy/kubernetes can do what they have to, and nothing that is another's, on a real server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from bus_support import KillableServer, killable
from e2e_support import described, environment, in_one_process
from manifests_support import DEPLOY, NATS_USERS
from structlog.testing import capture_logs

from topoalign.client import records
from topoalign.client.records import foreign_nodes
from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Stream
from topoalign.core.sharing.hami.foreign import NodeAnnotations
from topoalign.registry.foreign import ForeignNodes
from topoalign.registry.foreign_questions import serve_foreign
from topoalign.registry.ports import SeenNode
from topoalign.runtime.clock import ManualClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.tasks import background

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
NODE = NodeName("node-1")
RESERVED = wire.encode(ReservationsChanged(node=NODE, epoch=1, seq=1, writer="w", reservations=()), 1.0)


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KillableServer]:
    """With the users of the manifest; their passwords are in its environment, as the Secret puts them there."""
    for user in NATS_USERS:
        monkeypatch.setenv(f"{user}_PASSWORD", f"p{user.lower()}")
    _, found, users = (DEPLOY / "base" / "nats.conf").read_text().partition("authorization {")
    assert found
    async with killable(tmp_path / "nats", found + users) as running:
        yield running


def url_of(server: KillableServer, user: str) -> str:
    return server.url.replace("nats://", f"nats://{user}:p{user}@")


async def refused(bus: Bus) -> list[str]:
    """What of these a user may not do: reserve on a node, repeat a node's fact, forget a node."""
    found: list[str] = []
    newest = await bus.newest(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))
    assert newest is not None
    repeated = msgspec.structs.replace(newest.message, headers={})
    for name, tried in (
        ("reserve", lambda: bus.publish(RESERVED)),
        ("speak", lambda: bus.publish(repeated)),
        ("forget", lambda: bus.forget(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))),
    ):
        try:
            await tried()
        except BusRefused:
            found.append(name)
    return found


async def test_the_users_of_the_manifest_can_do_what_they_have_to(server: KillableServer, tmp_path: Path) -> None:
    """A node agent and a registry meet no refusal; each user is refused what is another's."""
    async with AsyncExitStack() as stack:
        with capture_logs() as logs:
            for services, user in (("discovery", "hinting", "allocator"), "node"), (("registry",), "registry"):
                settings = environment(NODE, url_of(server, user), tmp_path)
                del settings["TOPOALIGN_KUBELET_DIR"]
                await stack.enter_async_context(in_one_process(None, settings, services))
            admin = await stack.enter_async_context(connect_bus(url_of(server, "admin")))
            await described(admin, NODE)
        names = {"node": "topoalign", "registry": "topoalign-registry", "subscriber": "subscriber"}
        told = {}
        for user, name in names.items():
            bus = await stack.enter_async_context(connect_bus(url_of(server, user), name=name))
            told[user] = await refused(bus)
        reader = await stack.enter_async_context(connect_bus(url_of(server, "subscriber"), name="subscriber"))
        async with reader.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NODE)) as messages:
            heard = wire.decode((await anext(messages)).message)

        assert [] == [line["finding"] for line in logs if line["event"] == "nats refuses"]
        assert {"node": ["reserve", "forget"], "registry": ["speak", "forget"]} | {
            "subscriber": ["reserve", "speak", "forget"]
        } == told
        assert NODE == getattr(heard, "node", None)


async def test_a_registry_of_the_manifest_may_tell_what_hami_runs(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        records, "ANSWER_SECONDS", 60.0
    )  # a loaded machine may need more than the two seconds of a command
    foreign = ForeignNodes(ManualClock())
    foreign.behind = lambda: None
    annotations = NodeAnnotations(register="[]")
    foreign.see(SeenNode(name=NODE, uid="u", labels={}, hami=annotations))
    async with (
        connect_bus(url_of(server, "registry"), name="topoalign-registry") as registry,
        connect_bus(url_of(server, "admin")) as admin,
        background() as tasks,
    ):
        await tasks.start(serve_foreign, registry, foreign)

        assert {NODE: "ForeignNode"} == await foreign_nodes(admin)


async def test_nobody_is_let_in_without_a_password_of_the_manifest(server: KillableServer) -> None:
    for url in (server.url, url_of(server, "node").replace(":pnode", ":other")):
        with pytest.raises((BusRefused, BusUnavailable)):
            async with connect_bus(url, wait=2.0):
                raise AssertionError
