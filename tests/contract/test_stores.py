"""The subjects of the stores follow from the table of events, and stores of other versions are used for what they take."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from bus_support import KillableServer, killable, said
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Stream
from topoalign.runtime import stores
from topoalign.runtime.nats_bus import NatsBus, connect_bus

NODE = NodeName("node-1")
OF_NODES = ("topoalign.v1.topology.>", "topoalign.v1.health.>", "topoalign.v1.usage.>")
OF_ALLOCATIONS = ("topoalign.v1.allocation.>", "topoalign.v1.reservation.>")
HEALTH, LATER = "topoalign.v1.health.node-1", "topoalign.v1.later.node-1"
WIDE = msgspec.structs.replace(stores.NODES, subjects=(*stores.NODES.subjects, "topoalign.v1.later.>"))


def test_stores_begin_with_the_subjects_of_the_first_version() -> None:
    """These subjects, in this order, are those of every store that exists. Later events follow them."""
    assert OF_NODES == stores.NODES.subjects[: len(OF_NODES)] == stores.FIRST[stores.NODES.name]
    assert OF_ALLOCATIONS == stores.ALLOCATIONS.subjects[: len(OF_ALLOCATIONS)] == stores.FIRST[stores.ALLOCATIONS.name]


def test_reservations_leave_the_store_of_earlier_versions_as_it_is() -> None:
    """Its subjects, and that it takes atomic batches: an older service beside a newer one finds what it expects."""
    earlier = {
        "subjects": [*OF_ALLOCATIONS],
        "allow_atomic": True,
        "retention": "limits",
        "discard": "old",
        "max_msgs_per_subject": -1,
        "duplicate_window": 600 * 10**9,
        "metadata": {"topoalign.owner": "topoalign", "topoalign.schema": "1"},
    }
    now = msgspec.to_builtins(stores.ALLOCATIONS)

    assert earlier == {name: [*now[name]] if name == "subjects" else now[name] for name in earlier}
    stores.check(stores.ALLOCATIONS, {**now, **earlier}, any_replicas=False)


def test_each_subject_of_the_table_has_exactly_one_store() -> None:
    """The store is that of the event's base."""
    for event, (pattern, _) in wire.SUBJECTS.items():
        subject = f"{wire.PREFIX}.{pattern.format(node='node-1')}"
        taken = [store.name for store in stores.STORES if stores.takes(store.subjects, subject)]
        assert [wire.STORED[event]] == taken, subject
        assert all(stores.OF_EVENTS.fullmatch(each) for store in taken for each in stores.subjects_of(Stream(store)))


def test_entries_of_the_journal_have_subjects_that_every_store_takes() -> None:
    """They are published in order: one that a store of an older version refuses would hold back all that follow."""
    later = [subject for subject in stores.ALLOCATIONS.subjects if subject not in OF_ALLOCATIONS]

    assert [] == later, "begin the subject of a LedgerFact with `allocation.{node}.`"


def test_no_store_takes_a_question_or_a_self_test() -> None:
    """NATS would answer it in the place of the service, and a store that takes it counts as set up otherwise."""
    asked = [
        wire.hints_subject(NODE),
        wire.admission_subject(NODE, "alive"),
        wire.announce_subject(NODE),
        wire.devices_subject(NODE, "heal"),
        f"{wire.PREFIX}.selftest.topoalign",
    ]

    assert [] == [subject for subject in asked for store in stores.STORES if stores.takes(store.subjects, subject)]
    assert {*stores.ANSWERED} == {subject.split(".")[2] for subject in asked}


@pytest.mark.parametrize(
    "subjects",
    [
        pytest.param(OF_NODES, id="older"),
        pytest.param((*reversed(OF_NODES), "topoalign.v1.another-one.>"), id="newer"),
    ],
)
def test_a_store_of_another_version_passes(subjects: tuple[str, ...]) -> None:
    stores.check(WIDE, {**msgspec.to_builtins(WIDE), "subjects": list(subjects)}, any_replicas=False)


@pytest.mark.parametrize(
    ("store", "subjects"),
    [
        pytest.param(WIDE, OF_NODES[1:], id="a subject of the first version is missing"),
        pytest.param(WIDE, (*OF_NODES, "topoalign.v1.>"), id="all"),
        pytest.param(WIDE, (*OF_NODES, "topoalign.v1.admission.>"), id="questions"),
        pytest.param(WIDE, (*OF_NODES, "orders.>"), id="subjects of others"),
        pytest.param(stores.DEADLETTERS, (*stores.DEADLETTERS.subjects, "topoalign.v1.later.>"), id="no facts"),
    ],
)
def test_a_store_with_subjects_of_no_version_is_refused(store: stores.Store, subjects: tuple[str, ...]) -> None:
    with pytest.raises(BusRefused, match=f"store {store.name}: subjects is "):
        stores.check(store, {**msgspec.to_builtins(store), "subjects": list(subjects)}, any_replicas=False)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KillableServer]:
    async with killable(tmp_path / "nats") as running:
        yield running


def upgrade(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is a reading on `later.<node>`."""
    monkeypatch.setattr(stores, "NODES", WIDE)
    monkeypatch.setattr(stores, "STORES", (stores.ALLOCATIONS, WIDE, stores.DEADLETTERS, stores.RESERVATIONS))


async def widen(bus: NatsBus) -> None:
    """What the remedy tells the operator to do."""
    answer = await bus.live().api(f"$JS.API.STREAM.UPDATE.{WIDE.name}", msgspec.json.encode(WIDE))
    assert b'"error"' not in answer


@pytest.mark.anyio
async def test_a_store_of_an_older_version_takes_what_it_did(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A new event is refused by name, also in the log, until an operator adds its subject; nothing connects anew then. Until
    then nothing is kept of it, and there is nothing to forget.
    """
    async with connect_bus(server.url):
        pass
    upgrade(monkeypatch)
    with capture_logs() as logs:
        async with connect_bus(server.url, speaks=[HEALTH, LATER]) as bus:
            await bus.publish(said(1, HEALTH))
            with pytest.raises(BusRefused, match=r"older version and does not take topoalign\.v1\.later\.>") as caught:
                await bus.publish(said(2, LATER))
            assert f"--subjects '{','.join(WIDE.subjects)}'" in caught.value.remedy
            assert 0 == await bus.last_position(Stream.NODES, LATER)
            await bus.forget(Stream.NODES, LATER)
            await widen(bus)
            await bus.publish(said(2, LATER))
            assert 2 == await bus.last_position(Stream.NODES)

    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    assert [f"facts cannot be published on {LATER}"] == warnings


@pytest.mark.anyio
async def test_a_store_of_a_newer_version_is_used(server: KillableServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        upgrade(newer)
        async with connect_bus(server.url) as bus:
            await bus.publish(said(1, LATER))
    with capture_logs() as logs:
        async with connect_bus(server.url, speaks=[HEALTH]) as bus:
            assert 2 == await bus.publish(said(2, HEALTH))

    assert [] == [line["event"] for line in logs if line["log_level"] == "warning"]
