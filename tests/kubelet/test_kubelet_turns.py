"""Whose bytes are worked on next, and how many at a time: counted, without sockets."""

import asyncio

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubelet_support import frame

from topoalign.kubelet.grpc.grpc_connection import (
    ACK,
    CONTROLS_PER_REQUEST,
    END_HEADERS,
    END_STREAM,
    LONGEST_FRAME,
    LONGEST_HEADERS,
    LONGEST_SETTINGS,
    MOST_CONTROLS,
    MOST_SETTINGS,
    PORTION,
    PREFACE,
    Flood,
    Frames,
    FrameType,
)
from topoalign.kubelet.grpc.turns import TurnQueue, TurnTaker

pytestmark = pytest.mark.anyio
BUSY = 40


def begun() -> Frames:
    """A connection whose peer has said that it speaks HTTP/2."""
    frames = Frames()
    frames.add(bytes(PREFACE))
    frames.take()
    return frames


class Flooder(TurnTaker):
    """Has always something to do, and asks again in each of its turns."""

    def __init__(self, turns: TurnQueue, served: list[TurnTaker]) -> None:
        self.turns, self.served = turns, served

    def step(self) -> None:
        self.served.append(self)
        self.turns.ask(self, self.step)


async def until(served: list[TurnTaker], count: int) -> None:
    while len(served) < count:
        await anyio.lowlevel.checkpoint()


async def test_one_step_runs_in_each_round_of_the_loop() -> None:
    turns, served = TurnQueue(), list[TurnTaker]()
    rounds = 0

    def count() -> None:
        nonlocal rounds
        rounds += 1
        if len(served) < 100:
            asyncio.get_running_loop().call_soon(count)

    for flooder in [Flooder(turns, served) for _ in range(BUSY)]:
        turns.ask(flooder, flooder.step)
    asyncio.get_running_loop().call_soon(count)
    await until(served, 100)

    assert rounds >= 99


class Reader(TurnTaker):
    """Has something to do in each round of the loop, and takes its turn at once where it may."""

    def __init__(self, turns: TurnQueue, served: list[TurnTaker], asked: list[TurnTaker]) -> None:
        self.turns, self.served, self.asked = turns, served, asked
        self.waits = False

    def read(self) -> None:
        if not self.waits:
            self.asked.append(self)
            if self.turns.take(self):
                self.served.append(self)
            else:
                self.waits = True
                self.turns.ask(self, self.step)

    def step(self) -> None:
        self.waits = False
        self.served.append(self)


async def rounds(readers: list[Reader], count: int) -> None:
    """So many rounds of the loop, in each of which all of them have something to read."""
    for _ in range(count):
        for reader in readers:
            reader.read()
        await asyncio.sleep(0)


async def test_who_comes_alone_has_its_turn_at_once_in_every_round() -> None:
    turns, served, asked = TurnQueue(), list[TurnTaker](), list[TurnTaker]()
    await rounds([Reader(turns, served, asked)], 10)

    assert 10 == len(asked) == len(served)


async def test_turns_that_are_taken_at_once_are_one_in_each_round_too() -> None:
    turns, served, asked = TurnQueue(), list[TurnTaker](), list[TurnTaker]()
    await rounds([Reader(turns, served, asked) for _ in range(BUSY)], 100)

    assert 101 == len(served)  # the hundredth turn of the loop ends with a step


async def test_no_turn_is_taken_in_a_round_that_has_had_a_step() -> None:
    turns, taken = TurnQueue(), list[bool]()
    turns.ask(TurnTaker(), lambda: taken.append(turns.take(TurnTaker())))
    await asyncio.sleep(0)

    assert [False] == taken


async def test_turns_that_are_taken_at_once_come_equally_often_to_all() -> None:
    turns, served, asked = TurnQueue(), list[TurnTaker](), list[TurnTaker]()
    readers = [Reader(turns, served, asked) for _ in range(BUSY)]
    await rounds(readers, 12 * BUSY)

    counts = [served[: 10 * BUSY].count(reader) for reader in readers]
    assert max(counts) - min(counts) <= 1


async def test_busy_clients_have_the_same_number_of_turns() -> None:
    turns, served = TurnQueue(), list[TurnTaker]()
    flooders = [Flooder(turns, served) for _ in range(BUSY)]
    for flooder in flooders:
        turns.ask(flooder, flooder.step)
    await until(served, 10 * BUSY)

    counts = [served[: 10 * BUSY].count(flooder) for flooder in flooders]
    assert (10, 10) == (min(counts), max(counts))


async def test_a_client_that_was_quiet_waits_for_one_step_of_forty_busy_ones() -> None:
    turns, served = TurnQueue(), list[TurnTaker]()
    quiet, done = TurnTaker(), anyio.Event()
    await turns.turn(quiet)
    for flooder in [Flooder(turns, served) for _ in range(BUSY)]:
        turns.ask(flooder, flooder.step)
    await until(served, 10 * BUSY)
    before = len(served)
    turns.ask(quiet, done.set)
    await done.wait()

    assert len(served) - before <= 2


async def test_a_stream_of_new_clients_does_not_delay_one_that_waits() -> None:
    """
    A stream of new clients does not keep one that waits from its turn. In each round comes another one that was never
    there before.
    """
    turns, served = TurnQueue(), list[TurnTaker]()
    old, done = TurnTaker(), anyio.Event()
    for _ in range(3):
        await turns.turn(old)

    def come() -> None:
        new = TurnTaker()
        turns.ask(new, lambda: served.append(new))
        turns.ask(TurnTaker(), come)

    come()
    await until(served, 3)
    for _ in range(20):
        await turns.turn(old)
    before = len(served)
    turns.ask(old, done.set)
    await done.wait()

    assert len(served) - before <= 3


async def test_a_turn_that_is_not_waited_for_any_more_passes_to_the_next() -> None:
    turns, left, next_one = TurnQueue(), TurnTaker(), TurnTaker()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await turns.turn(left)
    with anyio.fail_after(30):
        await turns.turn(next_one)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from([*FrameType, 2, 7, 8, 11]), st.integers(0, 3000)), max_size=80),
    st.lists(st.integers(1, 5000), min_size=1),
)
async def test_frames_come_out_as_they_went_in_however_they_arrive(
    kinds: list[tuple[int, int]], cuts: list[int]
) -> None:
    """Whole ones only, in order, and no more at a time than make a portion."""
    kinds = [(kind, min(length, LONGEST_SETTINGS if kind == FrameType.SETTINGS else 3000)) for kind, length in kinds]
    whole = b"".join(frame(kind, bytes(length), END_HEADERS, 1) for kind, length in kinds)
    frames, taken, at = begun(), [], 0
    while at < len(whole):
        cut = cuts[at % len(cuts)]
        frames.add(whole[at : at + cut])
        at += cut
        while frames.ready:
            taken.append(frames.take())

    assert whole == b"".join(taken)
    assert all(count(part) <= PORTION for part in taken)
    assert 0 == len(frames)


async def test_many_small_frames_are_as_much_work_as_many_large_ones() -> None:
    frames = begun()
    frames.add(frame(FrameType.PING, bytes(8)) * 1_000)

    assert [PORTION] * 5 == [count(frames.take()) for _ in range(5)]


def count(part: bytes) -> int:
    """The frames in there; raises where the last is not whole."""
    frames = 0
    while part:
        length = int.from_bytes(part[:3])
        assert len(part) >= 9 + length
        part, frames = part[9 + length :], frames + 1
    return frames


FLOODS = {
    "pings": [frame(FrameType.PING, bytes(8))] * (MOST_CONTROLS + 1),
    "windows": [frame(8, bytes(4))] * (MOST_CONTROLS + 1),
    "resets": [frame(FrameType.HEADERS, b"h", END_HEADERS, 1), frame(FrameType.RESET, bytes(4), 0, 1)]
    * (MOST_CONTROLS + 1),
    "empty data": [frame(FrameType.DATA, b"", 0, 1)] * (MOST_CONTROLS + 1),
    "empty continuations": [frame(FrameType.CONTINUATION, b"", 0, 1)] * (MOST_CONTROLS + 1),
    "continuations": [frame(FrameType.HEADERS, b"h", 0, 1)]
    + [frame(FrameType.CONTINUATION, bytes(100))] * (LONGEST_HEADERS // 100 + 1),
    "headers": [
        frame(FrameType.HEADERS, bytes(9_000), 0, 1),
        frame(FrameType.CONTINUATION, bytes(9_000), END_HEADERS, 1),
    ],
    "settings": [frame(FrameType.SETTINGS)] * (MOST_SETTINGS + 1),
    "one of many settings": [frame(FrameType.SETTINGS, bytes(LONGEST_SETTINGS + 6))],
    "a long frame": [frame(FrameType.DATA, bytes(LONGEST_FRAME + 1), 0, 1)],
    "unknown": [frame(99, b"x")] * (MOST_CONTROLS + 1),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_is_known_by_its_frames_before_they_are_handled(name: str) -> None:
    frames, handled = begun(), 0
    with pytest.raises(Flood):
        for each in FLOODS[name]:
            frames.add(each)
            while frames.ready:
                handled += len(frames.take()) > 0

    assert handled <= MOST_CONTROLS


async def test_a_long_life_of_calls_is_no_flood() -> None:
    """Each with a window, two pings and the reset of a call that the kubelet has given up, now and then."""
    frames = begun()
    call = frame(FrameType.HEADERS, bytes(300), END_HEADERS, 1) + frame(FrameType.DATA, bytes(50), END_STREAM, 1)
    more = frame(8, bytes(4)) + 2 * frame(FrameType.PING, bytes(8), ACK)
    for n in range(5_000):
        frames.add(
            call
            + more * (CONTROLS_PER_REQUEST // 4)
            + (frame(FrameType.RESET, bytes(4), 0, 1) if n % 100 == 0 else b"")
        )
        while frames.ready:
            frames.take()

    assert frames.controls < 100
