"""What every bus promises, held against the one in memory and the one over a real nats-server."""

from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import anyio
import msgspec
import pytest
from bus_support import GRANTED, bodies, granted, receive, said
from simulation.bus import Broker, FaultyBus

from topoalign.core import wire
from topoalign.core.model.errors import BusRefused, BusUnavailable, IdTaken, RemoteUnavailable
from topoalign.core.model.events import DeviceHealthChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Bus, Endpoint, Message, Received, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.node_bus import NodeBus
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
ALL = "topoalign.v1.>"


@pytest.fixture(params=["memory", "simulated", "nats", "node"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    if request.param == "memory":
        yield MemoryBus()
        return
    if request.param == "simulated":
        yield FaultyBus(Broker(), Random(0))
        return
    async with local_nats(tmp_path) as url, connect_bus(url, name="contract") as over_nats:
        yield over_nats if request.param == "nats" else NodeBus(over_nats, NodeName("node-1"))


async def test_positions_count_from_one(bus: Bus) -> None:
    positions = [await bus.publish(said(number)) for number in range(3)]

    assert [1, 2, 3] == positions
    assert bus.connected


async def test_a_repeated_id_is_stored_once_and_gets_the_first_position(bus: Bus) -> None:
    first = await bus.publish(said(1))
    await bus.publish(said(2))
    again = await bus.publish(said(1))

    assert first == again
    assert 2 == await bus.last_position(Stream.ALLOCATIONS)


async def test_many_under_way_are_stored_in_their_order(bus: Bus) -> None:
    """Each with its position; a listener hears them in that order."""
    messages = [said(number) for number in range(300)]

    positions = await bus.publish_all(messages)

    assert [*range(1, 301)] == positions
    async with bus.follow(Stream.ALLOCATIONS, ALL) as received:
        assert [message.body for message in messages] == bodies(await receive(received, 300))
    assert [] == [*await bus.publish_all([])]


async def test_of_many_a_repetition_has_its_first_position(bus: Bus) -> None:
    """And from what has the id of another message on there is none, while the others are stored."""
    await bus.publish(said(2))
    await bus.publish(msgspec.structs.replace(said(3), body=b"{}"))

    positions = await bus.publish_all([said(1), said(2), said(3), said(4)])

    assert [3, 1, None, None] == positions
    assert (3, 4) == (await bus.publish(said(1)), await bus.publish(said(4)))


async def test_what_is_forgotten_is_gone_and_positions_go_on(bus: Bus) -> None:
    kept = msgspec.structs.replace(
        said(1), subject="topoalign.v1.allocation.node-2.granted", headers={"Nats-Msg-Id": "o"}
    )
    for message in (said(1), kept, said(2)):
        await bus.publish(message)
    (subject,) = {said(1).subject, said(2).subject}

    await bus.forget(Stream.ALLOCATIONS, subject)
    await bus.forget(Stream.ALLOCATIONS, "topoalign.v1.allocation.nobody.*")
    position = await bus.publish(said(3))

    assert 4 == position
    async with bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        assert [kept, said(3)] == [(await anext(messages)).message for _ in range(2)]
    assert 0 == await bus.last_position(Stream.ALLOCATIONS, "topoalign.v1.allocation.nobody.*")


@pytest.mark.parametrize("other", ["body", "subject", "header", "header more", "header less"])
async def test_an_id_under_which_the_store_has_another_message_is_refused(bus: Bus, other: str) -> None:
    """Else whoever uses the ids of a writer has its facts dropped, and the writer believes that they are stored."""
    mine = msgspec.structs.replace(said(1), headers={"Nats-Msg-Id": "test.1", "ce-type": "a"})
    forged = {
        "body": msgspec.structs.replace(mine, body=b"{}"),
        "subject": msgspec.structs.replace(mine, subject="topoalign.v1.allocation.node-1.released"),
        "header": msgspec.structs.replace(mine, headers={**mine.headers, "ce-type": "b"}),
        "header more": msgspec.structs.replace(mine, headers={**mine.headers, "Nats-Rollup-Not": "sub"}),
        "header less": msgspec.structs.replace(mine, headers={"Nats-Msg-Id": "test.1"}),
    }[other]
    await bus.publish(forged)
    with pytest.raises(IdTaken, match=r"the id 'test\.1' is taken: message 1 of .* is another one"):
        await bus.publish(mine)
    position = await bus.publish(wire.with_message_mark(mine, "x"))

    assert 2 == position
    assert 2 == await bus.publish(wire.with_message_mark(mine, "x"))
    assert 1 == await bus.publish(forged)


async def test_a_repetition_may_be_encoded_later_and_belong_to_another_trace(bus: Bus) -> None:
    first = msgspec.structs.replace(said(1), headers={"Nats-Msg-Id": "test.1", "ce-time": "2026-11-22T03:00:00Z"})
    again = msgspec.structs.replace(said(1), headers={"Nats-Msg-Id": "test.1", "ce-time": "x", "traceparent": "00-y"})
    await bus.publish(first)

    assert 1 == await bus.publish(again)
    assert 1 == await bus.last_position(Stream.ALLOCATIONS)


async def test_the_largest_message_can_be_repeated(bus: Bus) -> None:
    large = msgspec.structs.replace(said(1), body=bytes(range(250)) * 4_000)
    await bus.publish(large)

    assert 1 == await bus.publish(large)


async def test_messages_arrive_as_they_were_sent(bus: Bus) -> None:
    sent = Message(subject=GRANTED, headers={"Nats-Msg-Id": "x", "ce-type": "a%20b"}, body=b"\x00\xff\r\n{")
    await bus.publish(sent)

    async with bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        received = await anext(messages)

    assert sent == received.message
    assert 1 == received.position


async def test_a_follower_hears_the_past_and_then_what_comes_in_order(bus: Bus) -> None:
    for number in range(300):
        await bus.publish(said(number))

    async with bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        past = await receive(messages, 300)
        for number in range(300, 303):
            await bus.publish(said(number))
        news = await receive(messages, 3)

    assert list(range(1, 304)) == [received.position for received in past + news]
    assert [said(number).body for number in range(303)] == bodies(past + news)


async def test_following_after_a_position_goes_on_behind_it(bus: Bus) -> None:
    for number in range(1, 6):
        await bus.publish(said(number))

    async with bus.follow(Stream.ALLOCATIONS, ALL, after=3) as messages:
        rest = await receive(messages, 2)

    assert [4, 5] == [received.position for received in rest]


async def test_a_message_whose_handling_failed_is_heard_again(bus: Bus) -> None:
    for number in range(1, 4):
        await bus.publish(said(number))
    done = 0
    with pytest.raises(ArithmeticError):
        async with bus.follow(Stream.ALLOCATIONS, ALL, after=done) as messages:
            async for received in messages:
                if received.position == 2:
                    raise ArithmeticError
                done = received.position

    async with bus.follow(Stream.ALLOCATIONS, ALL, after=done) as messages:
        again = await anext(messages)

    assert 2 == again.position


async def test_a_follower_that_was_interrupted_while_waiting_loses_nothing(bus: Bus) -> None:
    async with bus.follow(Stream.ALLOCATIONS, ALL) as messages:
        await bus.publish(said(1))
        await anext(messages)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive, messages, 1)
            await all_tasks_blocked()
            tasks.cancel_scope.cancel()
        await bus.publish(said(2))

        assert 2 == (await anext(messages)).position


async def test_wildcards_choose_among_subjects(bus: Bus) -> None:
    await bus.publish(said(1, "topoalign.v1.allocation.a.granted"))
    await bus.publish(said(2, "topoalign.v1.allocation.b.released"))
    await bus.publish(said(3, "topoalign.v1.allocation.b.granted"))
    await bus.publish(said(4, "topoalign.v1.allocation.c.bound"))

    async def chosen(subject: str, count: int) -> list[int]:
        async with bus.follow(Stream.ALLOCATIONS, subject) as messages:
            return [received.position for received in await receive(messages, count)]

    assert [1, 2, 3, 4] == await chosen("topoalign.v1.allocation.>", 4)
    assert [2, 3] == await chosen("topoalign.v1.allocation.b.*", 2)
    assert [1, 3] == await chosen("topoalign.v1.allocation.*.granted", 2)
    assert [4] == await chosen("topoalign.v1.allocation.*.bound", 1)


@pytest.mark.parametrize(
    "node", ["node-1.example.com", "UPPER_case", "x" * 253, "a b\tc", "*", ">", "größe=1", "0000:07:00.0"]
)
async def test_any_node_name_is_one_token_that_wildcards_see(bus: Bus, node: str) -> None:
    """C42: a name with dots would otherwise be several tokens, and a wildcard would not see it."""
    await bus.publish(granted(node, 1))

    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects()) as messages:
        subject = (await anext(messages)).message.subject
    async with bus.follow(Stream.ALLOCATIONS, wire.allocation_subjects(NodeName(node))) as messages:
        await anext(messages)

    assert node == wire.decode_node_token(subject.split(".")[3])


async def test_a_follower_of_all_subjects_hears_its_own_stream_alone(bus: Bus) -> None:
    """What another stream stores meanwhile has positions of its own, and may have the next one."""
    health = wire.encode_event(DeviceHealthChanged(node=NodeName("a"), epoch=1, revision=1, devices={}), 1.0)
    async with bus.follow(Stream.NODES, ">") as messages, anyio.create_task_group() as tasks:
        found: list[Received] = []

        async def hear() -> None:
            found.append(await anext(messages))

        tasks.start_soon(hear)
        await all_tasks_blocked()
        await bus.publish(said(1))
        await bus.publish(health)

    assert [health.body] == bodies(found)


async def test_two_followers_each_hear_everything(bus: Bus) -> None:
    async with (
        bus.follow(Stream.ALLOCATIONS, ALL) as one,
        bus.follow(Stream.ALLOCATIONS, ALL) as other,
    ):
        for number in range(1, 11):
            await bus.publish(said(number))

        assert await receive(one, 10) == await receive(other, 10)


async def test_only_a_nodes_newest_facts_are_kept_and_followed(bus: Bus) -> None:
    """Only the newest facts of a node are kept, and following begins with the oldest of them."""
    for number in range(1, 9):
        await bus.publish(said(number, "topoalign.v1.topology.node-1"))
    await bus.publish(said(9, "topoalign.v1.health.node-1"))

    async with bus.follow(Stream.NODES, ALL, after=1) as messages:
        kept = await receive(messages, 6)

    assert [4, 5, 6, 7, 8, 9] == [received.position for received in kept]


async def test_a_position_that_the_stream_never_had_begins_with_the_oldest(bus: Bus) -> None:
    """Such a position comes from a store that has been lost or rolled back since."""
    await bus.publish(said(1))

    async with bus.follow(Stream.ALLOCATIONS, ALL, after=1_000) as messages:
        assert 1 == (await anext(messages)).position


async def test_the_last_position_is_that_of_the_newest_matching_message(bus: Bus) -> None:
    empty = await bus.last_position(Stream.ALLOCATIONS)
    await bus.publish(granted("a", 1))
    await bus.publish(granted("b", 2))

    assert 0 == empty
    assert 2 == await bus.last_position(Stream.ALLOCATIONS)
    assert 1 == await bus.last_position(Stream.ALLOCATIONS, "topoalign.v1.allocation.a.*")
    assert 0 == await bus.last_position(Stream.ALLOCATIONS, "topoalign.v1.allocation.c.*")
    assert 0 == await bus.last_position(Stream.DEADLETTERS)


async def test_a_message_that_is_too_large_or_has_no_store_is_refused(bus: Bus) -> None:
    with pytest.raises(BusRefused, match="1000001 bytes"):
        await bus.publish(Message(subject=GRANTED, headers={}, body=b" " * 1_000_001))
    with pytest.raises(BusRefused, match=r"no store takes topoalign\.v1\.hints"):
        await bus.publish(said(1, "topoalign.v1.hints.node-1"))

    assert 1 == await bus.publish(Message(subject=GRANTED, headers={}, body=b" " * 1_000_000))


async def shout(body: bytes) -> bytes:
    return wire.encode_answer(body.decode().upper())


async def test_a_question_is_answered_by_the_service_that_serves_its_subject(bus: Bus) -> None:
    async with bus.serve("topoalign-test", [Endpoint(name="shout", subject="test.a.shout", answer=shout)]):
        answer = await bus.ask("test.a.shout", b"hello", 5)

    assert "HELLO" == wire.decode_answer(answer, str)


async def test_asking_where_nobody_answers_fails_at_once(bus: Bus) -> None:
    async with bus.serve("topoalign-test", [Endpoint(name="shout", subject="test.a.shout", answer=shout)]):
        pass
    with pytest.raises(BusUnavailable, match=r"nobody answers on test\.a\.shout"):
        await bus.ask("test.a.shout", b"hello", 60)


async def test_a_slow_answer_ends_the_asking_and_does_not_block_other_endpoints(bus: Bus) -> None:
    never = anyio.Event()

    async def hang(body: bytes) -> bytes:
        await never.wait()
        return b""

    endpoints = [
        Endpoint(name="hang", subject="test.hang", answer=hang),
        Endpoint(name="shout", subject="test.shout", answer=shout),
    ]
    async with bus.serve("topoalign-test", endpoints):
        with pytest.raises(BusUnavailable, match=r"no answer on test.hang within 0.05 s"):
            await bus.ask("test.hang", b"", 0.05)

        assert "A" == wire.decode_answer(await bus.ask("test.shout", b"a", 5), str)


async def test_answers_go_to_who_asked_in_whatever_order_they_come(bus: Bus) -> None:
    """One comes after its question has timed out, and goes to nobody."""
    let = [anyio.Event() for _ in range(4)]
    answers: list[str] = []

    def endpoint(number: int) -> Endpoint:
        async def answer(body: bytes) -> bytes:
            await let[number].wait()
            return await shout(body)

        return Endpoint(name=f"e{number}", subject=f"test.e{number}", answer=answer)

    async def ask(number: int) -> None:
        answer = await bus.ask(f"test.e{number}", b"question %d" % number, 5)
        answers.append(wire.decode_answer(answer, str))
        let[number - 1].set()

    async with bus.serve("topoalign-test", [endpoint(number) for number in range(4)]):
        with pytest.raises(BusUnavailable):
            await bus.ask("test.e0", b"question 0", 0.05)
        let[0].set()
        async with anyio.create_task_group() as tasks:
            for number in (1, 2, 3):
                tasks.start_soon(ask, number)
            let[3].set()

    assert ["QUESTION 3", "QUESTION 2", "QUESTION 1"] == answers


async def test_questions_to_one_endpoint_are_answered_one_at_a_time(bus: Bus) -> None:
    inside = most = 0

    async def count(body: bytes) -> bytes:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        inside -= 1
        return wire.encode_answer(None)

    async with (
        bus.serve("topoalign-test", [Endpoint(name="count", subject="test.count", answer=count)]),
        anyio.create_task_group() as tasks,
    ):
        for _ in range(20):
            tasks.start_soon(bus.ask, "test.count", b"", 5)

    assert 1 == most


async def test_a_defect_in_a_service_is_an_answer_without_its_text(bus: Bus) -> None:
    async def fail(body: bytes) -> bytes:
        raise ValueError("a secret")

    async with bus.serve("topoalign-test", [Endpoint(name="fail", subject="test.fail", answer=fail)]):
        answer = await bus.ask("test.fail", b"", 5)

    assert b"secret" not in answer
    with pytest.raises(RemoteUnavailable):
        wire.decode_answer(answer, str)


async def test_an_answer_or_a_question_that_is_too_large_is_said_to_be(bus: Bus) -> None:
    async def large(body: bytes) -> bytes:
        return b" " * 1_000_001

    async with bus.serve("topoalign-test", [Endpoint(name="large", subject="test.large", answer=large)]):
        with pytest.raises(RemoteUnavailable, match="1000001 bytes"):
            wire.decode_answer(await bus.ask("test.large", b"", 5), str)
        with pytest.raises(BusRefused, match="1000001 bytes"):
            await bus.ask("test.large", b" " * 1_000_001, 5)
