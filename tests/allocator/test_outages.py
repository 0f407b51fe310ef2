"""A node records what it gives away whether or not the bus is there, and the bus hears all of it afterwards, once."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import FailingBus, KillableServer, killable, stopped, stored
from faults_support import THOROUGH
from outage_support import NODE, Listener, come_and_go, consecutive, emptied, opened, telling

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.core import wire
from topoalign.core.model.errors import BusUnavailable
from topoalign.core.ports import Bus, Stream
from topoalign.runtime import event_stores
from topoalign.runtime.nats_bus import bus as nats_bus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.testing.manual_clock import ManualClock

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600 if THOROUGH else 300)]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KillableServer]:
    async with killable(tmp_path / "nats") as running:
        yield running


async def heard_by_a_new_listener(bus: Bus, ledger: Ledger) -> Listener:
    listener = Listener(bus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.listen)
        await listener.agrees_with(ledger)
        tasks.cancel_scope.cancel()
    return listener


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def test_ten_minutes_without_a_bus_delay_every_fact_and_lose_none(tmp_path: Path) -> None:
    """
    C31: Ten minutes without a bus at the start delay every fact and lose none. Ten minutes of virtual time, a fact a
    second; the bus is asked ever more rarely and not for each of them.
    """
    bus, clock = FailingBus(), ManualClock()
    bus.away = True
    with opened(tmp_path, clock) as ledger:
        async with telling(ledger, bus, clock):
            for _ in range(600):
                come_and_go(ledger, 1)
                await clock.advance(1)
            waiting = len(ledger.pending)
            tries = bus.tries
            bus.away = False
            await clock.advance(10)
            listener = await heard_by_a_new_listener(bus, ledger)

    assert 601 == waiting
    assert tries < 600 / 5 + 10
    assert [(ledger.state.epoch, number) for number in range(1, 602)] == listener.numbers
    assert 0 == listener.client.counts.repeated == listener.client.counts.gaps


async def test_what_waits_for_the_bus_survives_the_end_of_the_process(tmp_path: Path, server: KillableServer) -> None:
    """C31: NATS is not there at the start; the allocator starts anew three times meanwhile, each time in the middle."""
    server.kill()
    async with connect_bus(server.url, wait=None) as bus:
        for _ in range(3):
            with opened(tmp_path / "state") as ledger:
                async with telling(ledger, bus):
                    come_and_go(ledger, 25)
        with opened(tmp_path / "state") as ledger:
            come_and_go(ledger, 10)
            waiting = len(ledger.pending)
            await server.start()
            async with telling(ledger, bus):
                await emptied(ledger)
                come_and_go(ledger, 10)
                await emptied(ledger)
                listener = await heard_by_a_new_listener(bus, ledger)

    assert 3 * (1 + 25) + 1 + 10 == waiting
    assert waiting + 10 == len(listener.numbers)
    assert consecutive(listener.numbers)
    assert 0 == listener.client.counts.repeated == listener.client.counts.gaps


async def test_the_outbox_is_bounded_on_disk_and_in_memory(
    tmp_path: Path,
) -> None:
    """C31: The outbox is bounded on disk and in memory, and a snapshot stands for what was dropped."""
    bus, clock = FailingBus(), ManualClock()
    bus.away = True
    most = {"waiting": 0, "bytes": 0}
    with opened(tmp_path, clock, compact_after=50, pending_limit=100) as ledger:
        async with telling(ledger, bus, clock):
            for _ in range(500):
                come_and_go(ledger, 1)
                most["waiting"] = max(most["waiting"], len(ledger.pending))
                most["bytes"] = max(most["bytes"], size_of(tmp_path))
            bus.away = False
            await clock.advance(10)
            dropped = ledger.dropped
            listener = await heard_by_a_new_listener(bus, ledger)

    assert most["waiting"] <= 100 + 50 + 1
    assert most["bytes"] < 151 * 1_000
    assert dropped > 300
    assert ledger.state.digest == listener.state.digest


async def test_a_listener_is_whole_again_after_facts_were_dropped(tmp_path: Path) -> None:
    """
    C31: A listener that was there before is whole again after facts were dropped from the outbox. It misses facts, sees so
    by their numbers, and the snapshot tells it what they came to.
    """
    bus, clock = FailingBus(), ManualClock()
    with opened(tmp_path, clock, compact_after=5, pending_limit=10) as ledger:
        listener = Listener(bus)
        async with telling(ledger, bus, clock), anyio.create_task_group() as tasks:
            tasks.start_soon(listener.listen)
            come_and_go(ledger, 3)
            await listener.agrees_with(ledger)
            bus.away = True
            for _ in range(101):
                come_and_go(ledger, 1)
                await anyio.lowlevel.checkpoint()
            bus.away = False
            await clock.advance(10)
            await listener.agrees_with(ledger)
            tasks.cancel_scope.cancel()

    assert ledger.dropped > 0
    assert ledger.state.allocations == listener.state.allocations


async def test_a_server_killed_under_load_costs_and_doubles_no_fact(tmp_path: Path, server: KillableServer) -> None:
    """
    C32: A server killed under load costs no confirmed fact and doubles none. A node says facts as fast as the bus takes
    them, and NATS dies by SIGKILL at moments of its own.
    """
    facts, kills = (20_000, 40) if THOROUGH else (600, 3)
    with opened(tmp_path / "state") as ledger:
        async with connect_bus(server.url) as bus:
            listener = Listener(bus)
            async with telling(ledger, bus), anyio.create_task_group() as tasks:
                tasks.start_soon(listener.listen)
                for kill in range(1, kills + 1):
                    come_and_go(ledger, facts // kills)
                    while len(listener.told) < facts // kills * kill - facts // kills // 2:
                        await anyio.lowlevel.checkpoint()
                    server.kill()
                    come_and_go(ledger, 1)  # nobody waits for it
                    await server.start()
                await emptied(ledger)
                await listener.agrees_with(ledger)
                tasks.cancel_scope.cancel()
            fresh = await heard_by_a_new_listener(bus, ledger)

    expected = [(ledger.state.epoch, number) for number in range(1, ledger.state.seq + 1)]
    assert expected == listener.numbers
    assert expected == fresh.numbers
    assert 0 == listener.client.counts.gaps


async def test_a_publication_that_was_not_confirmed_in_time_is_stored_once(
    tmp_path: Path, server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    C32: A publication that was not confirmed in time may have been stored, and is stored once. The server is stopped in its
    tracks (SIGSTOP) while a fact is under way, and goes on after the time is up.
    """
    monkeypatch.setattr(nats_bus, "PUBLISH_SECONDS", 0.2)
    assert server.process is not None
    with opened(tmp_path / "state") as ledger:
        event, time = ledger.pending[0]
        async with connect_bus(server.url) as bus:
            server.process.send_signal(signal.SIGSTOP)
            await stopped(server.process.pid)
            with pytest.raises(BusUnavailable, match="its outcome is unknown"):
                await bus.publish(wire.encode_event(event, time))
            server.process.send_signal(signal.SIGCONT)
            while (position := await bus.last_position(Stream.ALLOCATIONS)) == 0:
                await anyio.lowlevel.checkpoint()  # it was stored all the same
            again = await stored(bus, wire.encode_event(event, time))
            async with telling(ledger, bus):
                await emptied(ledger)
            listener = await heard_by_a_new_listener(bus, ledger)

    assert 1 == position == again
    assert [(ledger.state.epoch, 1)] == listener.numbers


async def test_a_fact_stored_again_is_told_to_nobody_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    C35: A fact stored again after the broker has forgotten its id is told to nobody twice. On a server that remembers ids
    for a tenth of a second, the least it can.
    """
    short = msgspec.structs.replace(event_stores.ALLOCATIONS, duplicate_window=event_stores.SECOND // 10)
    monkeypatch.setattr(event_stores, "STORES", (short, *event_stores.STORES[1:]))
    with opened(tmp_path / "state") as ledger:
        come_and_go(ledger, 4)
        said = [wire.encode_event(event, time) for event, time in ledger.pending]
        async with killable(tmp_path / "nats") as server, connect_bus(server.url) as bus:
            listener = Listener(bus)
            async with telling(ledger, bus), anyio.create_task_group() as tasks:
                tasks.start_soon(listener.listen)
                await emptied(ledger)
                for message in said[:2]:
                    while await bus.publish(message) <= len(said):  # the first place it had: it is still remembered
                        await anyio.lowlevel.checkpoint()
                come_and_go(ledger, 1)
                await listener.agrees_with(ledger)
                tasks.cancel_scope.cancel()
            last = await bus.last_position(Stream.ALLOCATIONS, wire.allocation_subjects(NODE))

    assert len(said) + 2 + 1 == last
    assert [(ledger.state.epoch, number) for number in range(1, len(said) + 2)] == listener.numbers
    assert (2, 0) == (listener.client.counts.repeated, listener.client.counts.gaps)
