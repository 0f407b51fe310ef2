"""What discovery has to say reaches the bus in the end, whatever happens to the bus, and is said anew when asked."""

from pathlib import Path

import anyio
import msgspec
import pytest
from discovery_support import NODE, QUIET_SECONDS, World, discovery_with, inventory
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, BusUnavailable, DriverFault, Unavailable
from topoalign.core.model.events import DeviceHealthChanged, TopologyDiscovered
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.model.requests import NodeRequest
from topoalign.core.ports import Message, Stream
from topoalign.discovery.announcer import POLL_SECONDS
from topoalign.discovery.device_record import RecordFile
from topoalign.discovery.health_keeper import HealthKeeper
from topoalign.discovery.xids import XidRules
from topoalign.runtime.node_bus import NodeBus
from topoalign.runtime.publisher import FIRST_PAUSE, LONGEST_PAUSE
from topoalign.runtime.tasks import background

pytestmark = pytest.mark.anyio


@pytest.fixture
def world() -> World:
    return World()


async def test_a_bus_that_was_away_gets_only_the_newest(world: World) -> None:
    """It may have stored what it did not confirm, so a repetition has the same id."""
    world.bus.refusal = BusUnavailable("cut")
    async with world.running():
        await world.becomes(inventory(0, 1, 2))
        await world.becomes(inventory(0, 1, 2, 3))
        world.bus.refusal = None
        await world.clock.advance(60.0)

        assert [(TopologyDiscovered, 3), (DeviceHealthChanged, 3)] == [
            (type(event), event.revision)
            for event in await world.said()
            if isinstance(event, TopologyDiscovered | DeviceHealthChanged)
        ]


async def test_a_bus_that_is_away_is_logged_once_for_each_reason(world: World) -> None:
    """A bus that is away for long is told once for each reason although they alternate."""
    with capture_logs() as logs:
        async with world.running():
            for _ in range(2):
                world.discovery.announce()
                for tries in range(10):
                    world.bus.refusal = BusUnavailable(f"no way to {tries % 2}")
                    await world.clock.advance(LONGEST_PAUSE)
                world.bus.refusal = None
                await world.clock.advance(LONGEST_PAUSE)

    told = [line["finding"] for line in logs if line["event"] == "bus does not confirm"]
    assert ["no way to 0", "no way to 1"] * 2 == told


async def test_news_that_comes_during_a_publication_is_published_too(world: World) -> None:
    """News that comes while the bus is storing something older is said too."""
    world.bus.open = anyio.Event()
    async with world.running():
        await world.becomes(inventory(0, 1, 2))
        world.bus.open.set()
        await world.clock.advance(0)

        assert (2, 2) == ((await world.topology()).revision, (await world.health()).revision)


async def test_a_publication_is_repeated_under_its_id_until_it_is_stored(world: World) -> None:
    world.bus.refusal = BusUnavailable("cut")
    async with world.running():
        await world.clock.advance(FIRST_PAUSE * 3)
        world.bus.refusal = None
        await world.clock.advance(FIRST_PAUSE * 16)

        assert 2 == len(await world.said())


async def test_whoever_asks_has_everything_said_anew_under_new_revisions(world: World) -> None:
    """A revision that the stream has seen would be taken for a repetition and not be stored."""
    async with world.running():
        answer = await world.bus.ask(
            wire.discovery_subject(NODE, "announce"), msgspec.json.encode(NodeRequest(node=NODE)), within=1.0
        )
        await world.clock.advance(0)

        topology, health = await world.topology(), await world.health()
        assert {"topology": (topology.epoch, 2), "health": (health.epoch, 2)} == wire.decode_answer(
            answer, dict[str, tuple[int, int]]
        )
        assert inventory(0, 1).topology == topology.topology
        assert 4 == len(await world.said())


async def test_a_question_for_liveness_is_answered_and_publishes_nothing(world: World) -> None:
    """Whoever asks whether it lives is told what is newest and nothing is said."""
    async with world.running():
        await world.becomes(inventory(0, 1, sick="XID 79"))
        answer = await world.bus.ask(
            wire.discovery_subject(NODE, "alive"), msgspec.json.encode(NodeRequest(node=NODE)), within=1.0
        )
        await world.clock.advance(0)

        epoch = (await world.topology()).epoch
        assert {"topology": (epoch, 1), "health": (epoch, 2)} == wire.decode_answer(answer, dict[str, tuple[int, int]])
        assert 3 == len(await world.said())


async def test_a_question_before_the_first_reading_is_refused(world: World) -> None:
    """A question before the first reading or for another node is refused."""
    world.hardware.now = DriverFault("NVML hangs", "restart it")
    async with world.running():
        for node, kind in ((NODE, Unavailable), (NodeName("other"), BadRequest)):
            body = msgspec.json.encode(NodeRequest(node=node))
            for subject in (wire.discovery_subject(NODE, "announce"), wire.discovery_subject(NODE, "alive")):
                answer = await world.bus.ask(subject, body, within=1.0)
                with pytest.raises(kind):
                    wire.decode_answer(answer, dict[str, tuple[int, int]])


async def test_a_stream_that_has_lost_what_was_said_is_told_anew(world: World) -> None:
    async with world.running():
        await world.clock.advance(POLL_SECONDS)
        assert 2 == len(await world.said())

        world.bus.emptied = True
        await world.clock.advance(POLL_SECONDS)
        world.bus.emptied = False

        assert [2, 2] == [event.revision for event in (await world.topology(), await world.health())]


async def test_facts_of_another_machine_of_the_same_name_are_corrected(world: World) -> None:
    """Its agent was refused, but had read its hardware by then, and it tries again and again."""
    other = World()
    other.hardware.now = inventory(5, 6, 7)
    with capture_logs() as logs:
        async with world.running():
            for _ in range(3):
                await other.clock.advance(1.0)
                other.discovery = discovery_with(other.hardware, world.bus, other.clock)
                async with other.running():
                    assert inventory(5, 6, 7).topology == (await world.topology()).topology
                await world.clock.advance(POLL_SECONDS)

                assert inventory(0, 1).topology == (await world.topology()).topology
                assert {DeviceID("GPU-0"), DeviceID("GPU-1")} == set((await world.health()).devices)
                assert "does another machine have its name" in (world.discovery.announcer.contested_by() or "")
            await world.clock.advance(POLL_SECONDS)

            assert world.discovery.announcer.contested_by() is None
            assert (4, 4) == ((await world.topology()).revision, (await world.health()).revision)
    told = [line for line in logs if line["event"].startswith("another process has published the hardware")]
    assert 1 == len(told)


async def test_another_process_is_noticed_although_this_node_spoke_since(world: World) -> None:
    """Its message is not the newest any more at the next look: it is looked for before each publication, too."""
    async with world.running():
        had = await world.topology()
        await world.bus.publish(
            wire.encode_event(msgspec.structs.replace(had, epoch=had.epoch + 1), world.clock.wall())
        )
        world.hardware.now = inventory(0, 1, 2)
        await world.discovery.read()
        await world.clock.advance(POLL_SECONDS)
        assert world.discovery.announcer.contested_by() is not None
        revision = (await world.topology()).revision
        await world.clock.advance(POLL_SECONDS)

        assert world.discovery.announcer.contested_by() is None
        assert 3 == revision == (await world.topology()).revision


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_what_is_published_during_a_look_is_not_another_process(
    world: World, monkeypatch: pytest.MonkeyPatch, is_confirmed: bool
) -> None:
    """The stream has it by the end of the look, whether or not the bus has confirmed it by then."""
    last_position = world.bus.last_position
    publish = world.bus.publish
    stored = anyio.Event()
    confirmed = anyio.Event()

    async def look(stream: Stream, subject: str = ">") -> int:
        if inventory(0, 1, 2) != world.hardware.now:
            world.hardware.now = inventory(0, 1, 2)
            await world.discovery.read()
            await stored.wait()
        return await last_position(stream, subject)

    async def store(message: Message, expected_last: int | None = None) -> int:
        position = await publish(message, expected_last)
        if position == (4 if is_confirmed else 3):  # the health is published once the topology is confirmed
            stored.set()
        await confirmed.wait()
        return position

    if is_confirmed:
        confirmed.set()
    async with world.running():
        monkeypatch.setattr(world.bus, "last_position", look)
        monkeypatch.setattr(world.bus, "publish", store)
        await world.clock.advance(POLL_SECONDS)

        assert world.discovery.announcer.contested_by() is None
        assert 2 == (await world.topology()).revision, "it is not published again"


async def test_a_restart_begins_a_new_epoch(world: World) -> None:
    async with world.running():
        before = await world.topology()
    await world.clock.advance(1.0)
    world.discovery = discovery_with(world.hardware, world.bus, world.clock)
    async with world.running():
        after = await world.topology()

    assert (before.epoch + 1000, 1) == (after.epoch, after.revision)


async def test_a_restart_at_a_repeated_time_of_the_clock_is_heard(tmp_path: Path) -> None:
    """A clock was set back; under the numbers of the run before it, the news would be dropped as a repetition."""
    world = World(tmp_path)
    async with world.running():
        before = await world.health()
    world.hardware.now = inventory(0, 1, sick="XID 79")
    remembering = HealthKeeper(RecordFile(tmp_path, "boot"), XidRules(), QUIET_SECONDS, world.clock)
    world.discovery = discovery_with(world.hardware, world.bus, world.clock, health_keeper=remembering)
    async with world.running():
        after = await world.health()

    assert (before.epoch + 1, 1) == (after.epoch, after.revision)
    assert "XID 79" == after.devices[DeviceID("GPU-0")].reason


async def test_the_services_of_its_process_hear_the_news_without_the_bus(world: World) -> None:
    """Whether the bus is away, or takes a publication and does not answer: the kubelet is told at once."""
    own = NodeBus(world.bus, NODE)
    heard: list[int] = []
    subject = wire.subject(DeviceHealthChanged(node=NODE, epoch=1, revision=1, devices={}))

    async def hear() -> None:
        async with own.follow(Stream.NODES, subject) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                assert isinstance(event, DeviceHealthChanged)
                heard.append(len(event.devices))

    world.discovery = discovery_with(world.hardware, own, world.clock, hub=world.bus)
    async with world.running(), background() as tasks:
        tasks.start_soon(hear)
        await world.clock.advance(POLL_SECONDS)
        world.bus.away = True
        await world.becomes(inventory(0, 1, 2))
        world.bus.away = False
        world.bus.open = anyio.Event()
        await world.becomes(inventory(0, 1, 2, 3))
        await world.becomes(inventory(0, 1, 2, 3, 4))

    assert [2, 3, 4, 5] == heard
