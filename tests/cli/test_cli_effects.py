"""
What the command line says of requests that change something: never failed of what was done, and never done of what was not.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal

from topoalign.cli import link, root
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Explanation
from topoalign.core.model.errors import BusRefused, BusUnavailable
from topoalign.core.model.events import Allocation, DeviceHealth, HealthState, Owner, TopologyDiscovered
from topoalign.core.model.ids import GPU, AllocationID, ContainerName, DeviceID, Namespace, NodeName, PodName
from topoalign.core.model.requests import AllocateRequest, ClockReading, ReleaseRequest
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.ports import Bus, Endpoint, Stream
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats

NODE = NodeName("node-1")
OWNER = Owner(namespace=Namespace("q"), pod=PodName("x"), container=ContainerName("main"))
HELD = Allocation(id=AllocationID("a-1"), owner=OWNER, devices={GPU: (DeviceID("GPU-a"),)})
GRANTED = wire.encode_answer(Admission(allocations=(HELD,), explanation=Explanation()))
RELEASED = wire.encode_answer([HELD.id])
CORDONED = wire.encode_answer({"GPU-a": DeviceHealth(state=HealthState.HEALTHY, cordoned=True)})
CLOCK = wire.encode_answer(ClockReading(clock="c1", now=5000.0))
ALLOCATE, RELEASE = "allocate --gpus 1 --pod q/x", "release q/x"

Answers = dict[str, Callable[[], Awaitable[bytes]]]


def at_once(body: bytes) -> Callable[[], Awaitable[bytes]]:
    async def say() -> bytes:
        return body

    return say


async def never() -> bytes:
    await anyio.sleep_forever()
    return b""


async def interrupted() -> bytes:
    raise KeyboardInterrupt


async def refused() -> bytes:
    raise BusRefused("no permission", "ask whoever may give it")


class PlayedBus(MemoryBus):
    """Answers each subject as it is told, and notes what was asked; there is no stream to be read."""

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        self.answers_to = {
            (wire.devices_subject(NODE, "cordon") if verb == "cordon" else wire.admission_subject(NODE, verb)): say
            for verb, say in answers.items()
        }
        self.asked: dict[str, Any] = {}
        self.within: dict[str, float] = {}

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        if subject not in self.answers_to:
            return await super().ask(subject, body, within)
        verb = subject.rpartition(".")[2]
        self.asked[verb] = msgspec.json.decode(body)
        self.within[verb] = within
        with anyio.move_on_after(within):
            return await self.answers_to[subject]()
        raise BusUnavailable(f"no answer within {within:.1f} s")

    async def last_position(self, stream: Stream, subject: str = ">") -> int:
        raise BusUnavailable("no stream leader")


class Ran:
    def __init__(self, status: int, out: str, err: str, bus: PlayedBus) -> None:
        self.status, self.out, self.err, self.bus = status, out, err, bus


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """A command against a node that answers so; `closing`: what closing the connection raises."""
    monkeypatch.setenv("TOPOALIGN_NODE", NODE)
    monkeypatch.setenv("TOPOALIGN_NATS_URL", "nats://unused:1")
    monkeypatch.setattr(link, "ANSWER_SECONDS", 0.05)

    def command(line: str, answers: Answers, closing: BaseException | None = None) -> Ran:
        bus = PlayedBus(answers)

        @asynccontextmanager
        async def connected(url: str) -> AsyncIterator[Bus]:
            yield bus
            if closing is not None:
                raise closing

        monkeypatch.setattr(link, "connect_to_bus", connected)
        status = root.run_command_line(line.split())
        return Ran(status, *capsys.readouterr(), bus)

    return command


def test_a_grant_is_printed_without_the_topology_that_words_it(run: Callable[..., Ran]) -> None:
    """F03: two of three servers were gone, and the command said failed of a pod that holds its GPU."""
    ran = run(ALLOCATE, {"clock": at_once(CLOCK), "allocate": at_once(GRANTED)})

    assert 0 == ran.status, ran.err
    assert "GPU-a" in ran.out
    assert "error" not in ran.err


@pytest.mark.parametrize(
    ("line", "verb", "body"),
    [
        (ALLOCATE, "allocate", GRANTED),
        (RELEASE, "release", RELEASED),
        ("trust", "trust", wire.encode_answer(None)),
        ("gpu cordon GPU-a", "cordon", CORDONED),
    ],
)
@pytest.mark.parametrize("closing", [BusUnavailable("lost"), OSError(32, "pipe"), KeyboardInterrupt()])
def test_what_fails_after_the_answer_is_no_failure_of_the_request(
    run: Callable[..., Ran], line: str, verb: str, body: bytes, closing: BaseException
) -> None:
    ran = run(line, {"clock": at_once(CLOCK), verb: at_once(body)}, closing)

    assert 0 == ran.status, ran.err
    assert ran.out


@pytest.mark.parametrize(
    ("line", "verb", "words"),
    [
        (ALLOCATE, "allocate", ("allocation for pod q/x", "`topoalign explain q/x`", "`topoalign release q/x`")),
        (RELEASE, "release", ("release of q/x", "`topoalign explain q/x`")),
        ("trust", "trust", ("confirmation of the record", "`topoalign trust`")),
        ("gpu cordon GPU-a", "cordon", ("cordon of 'GPU-a'", "`topoalign gpu list`")),
    ],
)
@pytest.mark.parametrize("said", [never, at_once(b"\xff{"), at_once(b'{"ok":{"type":"LaterDecision"}}')])
def test_an_unknown_outcome_names_its_request_and_the_command_to_check(
    run: Callable[..., Ran],
    line: str,
    verb: str,
    words: tuple[str, ...],
    said: Callable[[], Awaitable[bytes]],
) -> None:
    """An error about an unknown outcome names what was requested and the command that settles it."""
    ran = run(line, {"clock": at_once(CLOCK), verb: said})

    assert 69 == ran.status
    assert "code: OutcomeUnknown" in ran.err
    assert "it is not known whether" in ran.err
    for word in words:
        assert word in ran.err


def test_an_interrupted_request_says_what_it_may_have_done(run: Callable[..., Ran]) -> None:
    ran = run(ALLOCATE, {"clock": at_once(CLOCK), "allocate": interrupted})

    assert 130 == ran.status
    assert "allocation for pod q/x" in ran.err
    assert "`topoalign explain q/x`" in ran.err


def test_a_prediction_has_no_effect_to_settle(run: Callable[..., Ran]) -> None:
    ran = run("what-if --gpus 1 --pod q/x", {"clock": at_once(CLOCK), "what-if": never})

    assert 69 == ran.status
    assert "code: NodeSilent" in ran.err
    assert {"what-if"} == ran.bus.asked.keys()
    assert "deadline" not in ran.bus.asked["what-if"]


@pytest.mark.parametrize(("line", "verb", "body"), [(ALLOCATE, "allocate", GRANTED), (RELEASE, "release", RELEASED)])
def test_a_request_has_a_deadline_on_the_allocators_clock(
    run: Callable[..., Ran], line: str, verb: str, body: bytes
) -> None:
    """The asker waits up to the deadline and no longer, however long it took to read the clock."""
    ran = run(line, {"clock": at_once(CLOCK), verb: at_once(body)})

    deadline = ran.bus.asked[verb]["deadline"]
    assert "c1" == deadline["clock"]
    assert 5000.0 < deadline["at"] <= 5000.05
    assert 0.0 < ran.bus.within[verb] <= deadline["at"] - 5000.0
    request: type[AllocateRequest | ReleaseRequest] = AllocateRequest if verb == "allocate" else ReleaseRequest
    assert msgspec.convert(ran.bus.asked[verb], request).deadline is not None


def test_without_the_right_to_read_the_clock_nothing_is_requested(run: Callable[..., Ran]) -> None:
    ran = run(ALLOCATE, {"clock": refused, "allocate": at_once(GRANTED)})

    assert 0 != ran.status
    assert {"clock"} == ran.bus.asked.keys()
    assert "code: BusRefused" in ran.err


def test_an_allocator_whose_clock_cannot_be_read_is_asked_for_nothing(run: Callable[..., Ran]) -> None:
    """It is stopped, perhaps: nothing waits for it that it could grant when it goes on."""
    ran = run(ALLOCATE, {"clock": never, "allocate": at_once(GRANTED)})

    assert 69 == ran.status
    assert {"clock"} == ran.bus.asked.keys()
    assert ran.bus.within["clock"] <= link.ANSWER_SECONDS, "the time for the clock is part of that for the answer"
    assert "code: NodeSilent" in ran.err
    assert "the allocation for pod q/x was not requested" in ran.err


def test_a_stream_lost_after_the_grant_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server answers that the store is gone, just when the topology is looked for."""

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        topology = Topology(gpus=(Gpu(id=DeviceID("GPU-a"), index=0),))
        announced = TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="s", topology=topology)
        async with local_nats(tmp_path) as url, connect_bus(url, name="test", wait=5) as bus:
            await bus.publish(wire.encode_event(announced, 1.0))

            async def grant(body: bytes) -> bytes:
                await bus.live().api(f"$JS.API.STREAM.DELETE.{Stream.NODES}", b"")
                return GRANTED

            async def read_clock(body: bytes) -> bytes:
                return CLOCK

            answers = {"clock": read_clock, "allocate": grant}
            endpoints = [
                Endpoint(name=verb, subject=wire.admission_subject(NODE, verb), answer=answer)
                for verb, answer in answers.items()
            ]
            async with bus.serve("topoalign-allocator", endpoints):
                yield url

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving()) as url:
        monkeypatch.setenv("TOPOALIGN_NATS_URL", url)
        monkeypatch.setenv("TOPOALIGN_NODE", NODE)
        status = root.run_command_line(ALLOCATE.split())
    out, err = capsys.readouterr()

    assert 0 == status, err
    assert "GPU-a" in out
