"""The subjects of the stores follow from the table of events, and stores of other versions are used for what they take."""

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import KillableServer, killable, said
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus import apply_stores, connect_bus
from topoalign.runtime.nats_bus.nats_connection import open_connection
from topoalign.runtime.settings import Access

NODE = NodeName("node-1")
OF_NODES = ("topoalign.v1.topology.>", "topoalign.v1.health.>", "topoalign.v1.usage.>")
OF_ALLOCATIONS = ("topoalign.v1.allocation.>",)
HEALTH, LATER = "topoalign.v1.health.node-1", "topoalign.v1.later.node-1"
WIDE = msgspec.structs.replace(event_stores.NODES, subjects=(*event_stores.NODES.subjects, "topoalign.v1.later.>"))


def test_only_reservations_are_stored_in_batches() -> None:
    """Registries write them: a node that may not begin a batch cannot use up the batches that a server has at once."""
    assert [event_stores.RESERVATIONS] == [store for store in event_stores.STORES if store.allow_atomic]


def test_each_subject_of_the_table_has_exactly_one_store() -> None:
    """The store is that of the event's base."""
    for event, (pattern, _) in wire.SUBJECTS.items():
        subject = f"{wire.PREFIX}.{pattern.format(node='node-1')}"
        taken = [
            store.name
            for store in event_stores.STORES
            if any(event_stores.matches_subject(each, subject) for each in store.subjects)
        ]
        assert [wire.STORED[event]] == taken, subject


def test_entries_of_the_journal_have_subjects_that_every_store_takes() -> None:
    """They are published in order: one that a store of an older version refuses would hold back all that follow."""
    later = [subject for subject in event_stores.ALLOCATIONS.subjects if subject not in OF_ALLOCATIONS]

    assert [] == later, "begin the subject of a LedgerFact with `allocation.{node}.`"


@pytest.mark.parametrize(
    ("code", "err_code", "passes"),
    [
        (503, 10008, True),
        (408, 0, True),
        (503, 10023, False),
        (503, event_stores.NO_JETSTREAM, False),
        (400, 10047, False),
        (500, 0, False),
    ],
)
def test_a_server_that_elects_is_waited_for_and_one_without_room_is_not(code: int, err_code: int, passes: bool) -> None:
    """NATS answers 503 for both."""
    error = event_stores.store_error("store", event_stores.StoreRefusal(code=code, err_code=err_code))

    assert passes == isinstance(error, BusUnavailable)
    assert (err_code in (10023, 10047)) == ("increase `max_file_store`" in error.remedy)


def test_no_store_takes_a_request_or_news() -> None:
    """NATS would answer it in the place of the service, and a store that takes it counts as set up otherwise."""
    asked = [
        wire.hints_subject(NODE),
        wire.admission_subject(NODE, "allocate"),
        wire.admission_subject(NODE, "alive"),
        wire.discovery_subject(NODE, "announce"),
        wire.devices_subject(NODE, "heal"),
        wire.foreign_subject(),
        f"{event_stores.NEWS}.allocation.node-1.granted",
    ]

    assert [] == [
        subject
        for subject in asked
        for store in event_stores.STORES
        if any(event_stores.matches_subject(each, subject) for each in store.subjects)
    ]
    assert {*event_stores.ANSWERED} == {subject.split(".")[2] for subject in asked}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KillableServer]:
    async with killable(tmp_path / "nats") as running:
        yield running


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is a reading on `later.<node>`."""
    monkeypatch.setattr(event_stores, "NODES", WIDE)
    monkeypatch.setattr(
        event_stores, "STORES", (event_stores.ALLOCATIONS, event_stores.RESERVATIONS, WIDE, event_stores.DEADLETTERS)
    )


@pytest.mark.anyio
async def test_a_store_of_an_older_version_takes_what_it_did(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A new event is refused by name, also in the log, until the administrator applies the stores of its version; nothing
    connects again then.
    """
    upgrade(monkeypatch)
    with capture_logs() as logs:
        async with connect_bus(server.url, publishes=[HEALTH, LATER]) as bus:
            await bus.publish(said(1, HEALTH))
            with pytest.raises(BusUnavailable, match=r"no store took topoalign\.v1\.later\.node-1.*stores apply"):
                await bus.publish(said(2, LATER))
            assert 0 == await bus.last_position(Stream.NODES, LATER)
            assert ["changed subjects of TOPOALIGN_NODES"] == await apply_stores(server.url)
            await bus.publish(said(2, LATER))
            assert 2 == await bus.last_position(Stream.NODES)

    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert [f"facts cannot be published on {LATER}"] == warnings


@pytest.mark.anyio
async def test_a_store_of_a_newer_version_is_used(server: KillableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        upgrade(newer)
        await apply_stores(server.url)
        async with connect_bus(server.url) as bus:
            await bus.publish(said(1, LATER))
    with capture_logs() as logs:
        async with connect_bus(server.url, publishes=[HEALTH]) as bus:
            assert 2 == await bus.publish(said(2, HEALTH))

    assert [] == [line["event"] for line in logs if line["log_level"] == "warning"]


async def config_of(url: str, name: str) -> dict[str, object]:
    connection = await open_connection([url], "operator", Access())
    info = await event_stores.stream_info(connection.api, name)
    await connection.close()
    return info.config


async def update(url: str, config: dict[str, object]) -> None:
    """As an operator does with another tool."""
    connection = await open_connection([url], "operator", Access())
    answer = await connection.api(f"$JS.API.STREAM.UPDATE.{config['name']}", msgspec.json.encode(config))
    await connection.close()
    assert b'"error"' not in answer


@pytest.mark.anyio
async def test_apply_creates_what_is_missing_and_then_changes_nothing(tmp_path: Path) -> None:
    async with killable(tmp_path / "nats", administrator=None) as server:
        first = await apply_stores(server.url)
        again = await apply_stores(server.url)
        config = await config_of(server.url, "TOPOALIGN_ALLOCATIONS")

    assert [f"created {store.name}" for store in event_stores.STORES] == first
    assert [] == again
    assert (["topoalign.v1.allocation.>"], 30 * 86400 * 10**9, True) == (
        config["subjects"],
        config["max_age"],
        config["allow_direct"],
    )


@pytest.mark.anyio
async def test_many_who_apply_at_once_create_the_stores_together(tmp_path: Path) -> None:
    async with killable(tmp_path / "nats", administrator=None) as server:
        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(apply_stores, server.url)
        async with connect_bus(server.url):
            pass


@pytest.mark.anyio
async def test_a_store_that_another_creates_meanwhile_is_left_as_it_is() -> None:
    async def request(subject: str, body: bytes) -> bytes:
        code = event_stores.NOT_FOUND if ".INFO." in subject else event_stores.NAME_IN_USE
        return msgspec.json.encode({"error": {"code": 400, "err_code": code}})

    assert [] == await event_stores.create_or_change_stores(request, None)


@pytest.mark.anyio
async def test_a_service_creates_nothing(tmp_path: Path) -> None:
    async with killable(tmp_path / "nats", administrator=None) as server:
        with pytest.raises(BusRefused, match="store TOPOALIGN_NODES does not exist") as caught:
            async with connect_bus(server.url):
                raise AssertionError

    assert "topoalign stores apply" in caught.value.remedy


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("store", "field", "value"),
    [
        ("TOPOALIGN_NODES", "allow_direct", False),
        ("TOPOALIGN_ALLOCATIONS", "republish", {"src": "topoalign.v1.allocation.node-1.>", "dest": "elsewhere.>"}),
        ("TOPOALIGN_ALLOCATIONS", "sources", [{"name": "TOPOALIGN_DEADLETTERS"}]),
        ("TOPOALIGN_RESERVATIONS", "allow_atomic", False),
        ("TOPOALIGN_DEADLETTERS", "discard", "new"),
    ],
)
async def test_a_store_with_other_settings_is_changed(
    server: KillableServer, store: str, field: str, value: object
) -> None:
    """What makes a store another one; see `test_bounds_are_the_administrators`."""
    await update(server.url, {**await config_of(server.url, store), field: value})

    assert [f"changed {field} of {store}"] == await apply_stores(server.url)
    assert [] == await apply_stores(server.url)


@pytest.mark.anyio
async def test_bounds_are_the_administrators(server: KillableServer) -> None:
    """Services accept them, and `apply` leaves them as they are."""
    config = await config_of(server.url, "TOPOALIGN_NODES")
    bounds = {"max_bytes": 2 * 1024**3, "max_msgs_per_subject": 7, "max_age": 3600 * 10**9}
    await update(server.url, {**config, **bounds, "allow_direct": False})
    await apply_stores(server.url)
    now = await config_of(server.url, "TOPOALIGN_NODES")

    assert bounds | {"allow_direct": True} == {field: now[field] for field in (*bounds, "allow_direct")}


@pytest.mark.anyio
async def test_a_stream_of_somebody_else_is_left_alone(server: KillableServer) -> None:
    """Also one of a later schema, which `apply` of this version would damage."""
    config = await config_of(server.url, "TOPOALIGN_DEADLETTERS")
    await update(server.url, {**config, "metadata": {"topoalign.owner": "topoalign", "topoalign.schema": "3"}})

    with pytest.raises(BusRefused, match=r"TOPOALIGN_DEADLETTERS: metadata\[topoalign\.schema\] is '3'"):
        await apply_stores(server.url)


@pytest.mark.anyio
async def test_copies_that_a_single_server_cannot_keep_are_refused(tmp_path: Path) -> None:
    async with killable(tmp_path / "nats", administrator=None) as server:
        with pytest.raises(BusRefused, match="store TOPOALIGN_ALLOCATIONS: NATS refuses: replicas > 1"):
            await apply_stores(server.url, replicas=3)


@pytest.mark.anyio
async def test_subjects_that_another_stream_takes_are_refused_with_a_remedy(tmp_path: Path) -> None:
    async with killable(tmp_path / "nats", administrator=None) as server:
        connection = await open_connection([server.url], "operator", Access())
        body = {"name": "ANOTHER", "subjects": ["topoalign.v1.allocation.>"], "storage": "memory"}
        await connection.api("$JS.API.STREAM.CREATE.ANOTHER", msgspec.json.encode(body))
        await connection.close()
        with pytest.raises(BusRefused, match="subjects overlap") as caught:
            await apply_stores(server.url)

    assert "another stream has these subjects" in caught.value.remedy
