"""What only a real nats-server can do to the bus: die, come back, be old, be set up otherwise."""

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_support import (
    GRANTED,
    KillableServer,
    bodies,
    disconnected,
    killable,
    raw_nats,
    receive,
    said,
    stopped,
    stored,
)
from structlog.testing import capture_logs

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable, IdTaken
from topoalign.core.ports import Bus, Endpoint, Stream
from topoalign.runtime.nats_bus import NatsBus, apply_stores, bus, connect_bus, follower
from topoalign.runtime.nats_bus.nats_connection import NatsConnection, open_connection
from topoalign.runtime.settings import Access

pytestmark = pytest.mark.anyio
ALL = "topoalign.v1.>"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[KillableServer]:
    async with killable(tmp_path / "nats") as running:
        yield running


async def api(bus: NatsBus, subject: str, body: object = None) -> dict[str, object]:
    answer = await bus.live().api(f"$JS.API.{subject}", b"" if body is None else msgspec.json.encode(body))
    return dict(msgspec.json.decode(answer))


async def test_a_server_killed_under_load_loses_doubles_and_disorders_nothing(server: KillableServer) -> None:
    """C32: three times killed while one publishes with retries and another follows."""
    async with connect_bus(server.url) as bus, bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        received = []
        async with anyio.create_task_group() as tasks:

            async def publish() -> None:
                for number in range(400):
                    await stored(bus, said(number))

            tasks.start_soon(publish)
            for number in range(400):
                received.append(await anext(messages))
                if number in (50, 150, 250):
                    server.kill()
                    await server.start()

    assert [said(number).body for number in range(400)] == bodies(received)
    assert sorted({one.position for one in received}) == [one.position for one in received]


async def test_publishing_on_a_lost_connection_fails_instead_of_waiting(server: KillableServer) -> None:
    async with connect_bus(server.url) as bus:
        await bus.publish(said(1))
        server.kill()
        with pytest.raises(BusUnavailable, match=r"the connection was lost|not connected"):
            for number in range(100):
                await bus.publish(said(number))
        await disconnected(bus)

        with anyio.fail_after(30), pytest.raises(BusUnavailable, match=r"not connected to nats://127\.0\.0\.1"):
            await bus.publish(said(2))
        with anyio.fail_after(30), pytest.raises(BusUnavailable):
            await bus.ask("test.x", b"", 60)
        await server.start()

        assert 2 == await stored(bus, said(2))


async def test_a_question_under_way_ends_with_its_connection(server: KillableServer) -> None:
    asked = anyio.Event()

    async def hang(body: bytes) -> bytes:
        asked.set()
        await anyio.sleep_forever()
        return b""

    async def kill() -> None:
        await asked.wait()
        server.kill()

    async with (
        connect_bus(server.url) as bus,
        bus.serve("topoalign-test", [Endpoint(name="hang", subject="test.hang", answer=hang)]),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(kill)
        with anyio.fail_after(30), pytest.raises(BusUnavailable, match="the connection was lost while waiting"):
            await bus.ask("test.hang", b"", 60)


async def test_a_bus_can_be_entered_before_there_is_a_server(tmp_path: Path) -> None:
    """C31: publishing fails meanwhile, following and serving wait, and all go on once the server comes up."""

    async def shout(body: bytes) -> bytes:
        return wire.encode_answer(body.decode().upper())

    async with killable(tmp_path) as server:
        server.kill()
        with anyio.fail_after(30):
            async with (
                connect_bus(server.url, wait=None) as bus,
                bus.follow(Stream.ALLOCATIONS, ALL) as messages,
                bus.serve("topoalign-test", [Endpoint(name="shout", subject="test.shout", answer=shout)]),
            ):
                with pytest.raises(BusUnavailable):
                    await bus.publish(said(1))
                assert not bus.connected
                await server.start()
                await stored(bus, said(1))

                assert said(1) == (await anext(messages)).message
                assert "HELLO" == wire.decode_answer(await answered(bus, "test.shout", b"hello"), str)


async def answered(bus: Bus, subject: str, body: bytes) -> bytes:
    """The service comes back in its own time after a new connection."""
    while True:
        try:
            return await bus.ask(subject, body, 5)
        except BusUnavailable:
            await anyio.lowlevel.checkpoint()


async def test_a_service_serves_again_after_the_server_was_killed(
    server: KillableServer,
) -> None:
    async def shout(body: bytes) -> bytes:
        return wire.encode_answer(body.decode().upper())

    endpoints = [Endpoint(name="shout", subject="test.shout", answer=shout)]
    async with connect_bus(server.url) as bus, bus.serve("topoalign-test", endpoints):
        server.kill()
        await server.start()
        answer = await answered(bus, "test.shout", b"again")

    assert "AGAIN" == wire.decode_answer(answer, str)


async def test_an_acknowledgement_of_a_stream_is_no_answer(server: KillableServer) -> None:
    """A stream that takes the subject of a request answers first; the service's answer counts."""

    async def shout(body: bytes) -> bytes:
        return wire.encode_answer(body.decode().upper())

    async with connect_bus(server.url) as bus:
        stream = {"name": "EAVESDROPPER", "subjects": ["test.>"], "storage": "memory"}
        await api(bus, "STREAM.CREATE.EAVESDROPPER", stream)
        async with bus.serve("topoalign-test", [Endpoint(name="shout", subject="test.shout", answer=shout)]):
            answers = {await bus.ask("test.shout", b"hello", 60) for _ in range(20)}

    assert {wire.encode_answer("HELLO")} == answers


async def test_a_message_that_a_store_sends_is_no_request(server: KillableServer) -> None:
    """Whoever may read a store may have it send a message to any subject, as if that were the subject of the answer."""
    requests: list[bytes] = []

    async def note(body: bytes) -> bytes:
        requests.append(body)
        return wire.encode_answer(None)

    async with (
        connect_bus(server.url) as bus,
        bus.serve("topoalign-test", [Endpoint(name="note", subject="test.note", answer=note)]),
    ):
        await bus.publish(said(1))
        for wanted in ({"seq": 1}, {"seq": 1, "batch": 1}):
            source = "$JS.API.DIRECT.GET.TOPOALIGN_ALLOCATIONS"
            await bus.live().send(source, msgspec.json.encode(wanted), reply="test.note")
        await bus.ask("test.note", b"a request", 60)

    assert [b"a request"] == requests


async def test_a_server_that_stops_moving_is_noticed_and_outcomes_are_unknown(server: KillableServer) -> None:
    """C33: a partition looks like this from inside: the connection stands, and nothing comes."""
    assert server.process is not None
    async with connect_bus(server.url) as bus, bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        await bus.publish(said(1))
        server.process.send_signal(signal.SIGSTOP)
        await stopped(server.process.pid)
        with pytest.raises(BusUnavailable, match="outcome is unknown"):
            await bus.publish(said(2))
        with anyio.fail_after(30):
            await disconnected(bus)
        server.process.send_signal(signal.SIGCONT)
        await stored(bus, said(2))
        await stored(bus, said(3))

        assert [said(1).body, said(2).body, said(3).body] == bodies(await receive(messages, 3))


async def test_no_server_in_time_names_the_address_without_the_password() -> None:
    """C58."""
    with pytest.raises(BusUnavailable) as caught:
        async with connect_bus("nats://user:canary@127.0.0.1:9", wait=0.3):
            raise AssertionError

    assert "nats://127.0.0.1:9" in str(caught.value)
    assert "canary" not in str(caught.value)


async def test_an_older_server_is_refused() -> None:
    """A stand-in says what nats-server 2.9.10 says of itself."""

    async def greet(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.send(b'INFO {"server_id":"x","version":"2.9.10","headers":true,"max_payload":1048576}\r\n')
            async for data in stream:
                if b"PING" in data:
                    await stream.send(b"PONG\r\n")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, greet)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(BusRefused, match=r"2\.9\.10>?, older than 2\.12"):
            async with connect_bus(f"nats://127.0.0.1:{port}"):
                raise AssertionError
        tasks.cancel_scope.cancel()


async def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    async with killable(tmp_path, whole="listen: 127.0.0.1:-1\n", administrator=None) as server:
        with pytest.raises(BusRefused, match="does not exist, or not for this user"):
            async with connect_bus(server.url):
                raise AssertionError


async def test_a_stream_that_was_deleted_in_use_is_followed_from_its_start(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C38. The administrator creates it again; until then followers wait, and the reason is logged once."""
    monkeypatch.setattr(follower, "REFUSED_PAUSE", 0.02)
    monkeypatch.setattr(follower, "LOOK", 0.1)
    async with connect_bus(server.url) as bus, bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        for number in range(5):
            await bus.publish(said(number))
        await receive(messages, 5)
        await api(bus, "STREAM.DELETE.TOPOALIGN_ALLOCATIONS")
        with capture_logs() as logs, anyio.move_on_after(0.5):
            await anext(messages)
            raise AssertionError
        with pytest.raises(BusRefused, match="does not exist"):
            await bus.last_position(Stream.ALLOCATIONS)
        with pytest.raises(BusUnavailable, match="no store took"):
            await bus.publish(said(99))
        await apply_stores(server.url)
        for number in range(100, 103):
            await stored(bus, said(number))

        assert [said(number).body for number in range(100, 103)] == bodies(await receive(messages, 3))
    refusals = [line for line in logs if line["event"] == "cannot follow"]
    assert ["store TOPOALIGN_ALLOCATIONS does not exist, or not for this user"] == [
        line["finding"] for line in refusals
    ]


async def test_a_stream_that_is_replaced_and_grows_is_followed_whole(server: KillableServer) -> None:
    """C38: the messages of the new stream pass the position of the follower before it looks at the store."""
    async with connect_bus(server.url) as bus, bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        for number in range(5):
            await bus.publish(said(number))
            await anext(messages)
        await api(bus, "STREAM.DELETE.TOPOALIGN_ALLOCATIONS")
        await apply_stores(server.url)
        for number in range(100, 110):
            await stored(bus, said(number))

        assert [said(number).body for number in range(100, 110)] == bodies(await receive(messages, 10))


async def test_an_id_whose_message_is_gone_from_the_store_is_taken(server: KillableServer) -> None:
    """Whoever may delete messages could otherwise leave nothing of a fact but its id."""
    async with connect_bus(server.url) as bus:
        position = await bus.publish(said(1))
        await api(bus, "STREAM.MSG.DELETE.TOPOALIGN_ALLOCATIONS", {"seq": position})
        with pytest.raises(IdTaken, match="message 1 of TOPOALIGN_ALLOCATIONS cannot be read: no message found"):
            await bus.publish(said(1))


async def test_headers_that_no_client_would_send_are_another_message(server: KillableServer) -> None:
    async with connect_bus(server.url) as bus, raw_nats(server.port or 0) as raw:
        await raw.publish(GRANTED, said(1).body, b"Nats-Msg-Id: test.1\r\nce-type: y\r\nce-type: x")
        await raw.publish(GRANTED, said(2).body, b"Nats-Msg-Id: test.2\r\nce-type: \xff")
        await raw.done()
        for number in (1, 2):
            mine = msgspec.structs.replace(said(number), headers={"Nats-Msg-Id": f"test.{number}", "ce-type": "x"})
            with pytest.raises(IdTaken, match="is another one"):
                await bus.publish(mine)


async def test_a_server_with_too_little_room_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """C37."""
    settings = f'listen: 127.0.0.1:-1\njetstream {{ store_dir: "{tmp_path}", max_file_store: 1MB }}\n'
    async with killable(tmp_path, whole=settings, administrator=None) as server:
        with pytest.raises(BusRefused, match="TOPOALIGN_ALLOCATIONS") as caught:
            await apply_stores(server.url)

    assert "max_file_store" in caught.value.remedy


async def test_an_error_inside_the_context_comes_out_as_itself(server: KillableServer) -> None:
    with pytest.raises(KeyError):
        async with connect_bus(server.url):
            raise KeyError("mine")


async def test_unreachable_servers_are_reported_in_the_same_words() -> None:
    """Words that differ are taken for news by whoever writes a log."""
    nowhere = [f"nats://127.0.0.1:{port}" for port in (1, 2, 3)]
    findings = set()
    for _ in range(10):
        with pytest.raises(BusUnavailable) as caught:
            await open_connection(nowhere, "test", Access())
        findings.add(caught.value.finding)

    assert 1 == len(findings)


async def test_a_bus_away_for_long_is_logged_once_for_each_reason(
    server: KillableServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a name stands for several addresses, and each look names another one first."""
    monkeypatch.setattr(bus, "FIRST_PAUSE", 0.0)
    tries = 0

    class Unlucky(NatsBus):
        async def connection(self) -> NatsConnection:
            nonlocal tries
            tries += 1
            if tries % 20:
                raise BusUnavailable(f"no way to {tries % 2}")
            return await super().connection()

    unlucky = Unlucky(server.url, "test", Access(), node=None, publishes=())
    with capture_logs() as logs:
        for outage in (1, 2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(unlucky.keep_connected, False)
                await unlucky.up()
                tasks.cancel_scope.cancel()

            assert outage * 20 == tries
    told = [line["finding"] for line in logs if line["event"] == "bus away"]
    assert ["no way to 1", "no way to 0"] * 2 == told


async def test_a_server_that_refuses_us_later_on_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the first connection has the refusal of that one alone: servers are set up anew at any time."""
    monkeypatch.setattr(bus, "FIRST_PAUSE", 0.0)
    outcomes = iter([None, BusRefused("no permission", "grant it"), None])
    stays = 0

    class Refused(NatsBus):
        async def connection(self) -> NatsConnection:
            outcome = next(outcomes)
            if outcome is not None:
                raise outcome
            return NatsConnection("x", "_INBOX_x")

        async def stay(self, connection: NatsConnection) -> None:
            nonlocal stays
            stays += 1
            if stays == 2:
                tasks.cancel_scope.cancel()
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Refused("nats://127.0.0.1:1", "test", Access(), None, ()).keep_connected, True)

    assert 2 == stays
