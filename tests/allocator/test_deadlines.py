"""A request that comes after its asker has given up does nothing, and one that is asked again gets the same answer."""

from dataclasses import dataclass, field

import anyio
import msgspec
import pytest
from decision_support import container, machine
from decision_support import pod as pod_of
from e2e_support import allocate, pod, release
from hypothesis import given, settings
from hypothesis import strategies as st

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.requests.admissions import Admissions
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import BusUnavailable, DeadlinePassed, PodAlreadyAllocated, TopoalignError
from topoalign.core.model.events import DeviceHealth, DeviceHealthChanged, HealthState, TopologyDiscovered
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import (
    AdmissionRules,
    AllocateRequest,
    ClockReading,
    Deadline,
    NodeRequest,
    PodRequest,
    ReleaseRequest,
)
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_journal import MemoryJournal

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")


class Node:
    """An allocator with four GPUs, without a kubelet and without a hinting service."""

    def __init__(self, bus: MemoryBus | None = None) -> None:
        self.bus, self.clock, self.journal = bus or MemoryBus(), ManualClock(), MemoryJournal()
        self.start()

    def start(self) -> None:
        """Anew on the same journal."""
        self.ledger = Ledger(NODE, self.journal, self.clock)
        topology = machine()
        healthy = DeviceHealth(state=HealthState.HEALTHY)
        self.ledger.take_reading(
            TopologyDiscovered(node=NODE, epoch=1, revision=1, boot_id="b", source="test", topology=topology)
        )
        self.ledger.take_reading(
            DeviceHealthChanged(
                node=NODE,
                epoch=1,
                revision=1,
                devices=dict.fromkeys((*topology.gpu_by_id, *topology.nic_by_id), healthy),
            )
        )
        self.admissions = Admissions(self.ledger, self.bus, AdmissionRules(), kubelet_owns_devices=False)

    async def deadline(self, seconds: float = 10.0) -> Deadline:
        reading = await self.admissions.clock(NodeRequest(node=NODE))
        return Deadline(clock=reading.clock, at=reading.now + seconds)

    async def allocate(self, asked: PodRequest, deadline: Deadline | None = None) -> Decision:
        return await self.admissions.allocate(AllocateRequest(node=NODE, pod=asked, deadline=deadline))

    @property
    def held(self) -> int:
        return len(self.ledger.state.allocations)


async def test_requests_that_waited_while_the_allocator_was_stopped_are_refused() -> None:
    """F04: five askers gave up after 10 s, the allocator went on after 30 s, and all five were granted."""
    node = Node()
    deadlines = [await node.deadline() for _ in range(5)]
    facts = node.ledger.state.seq
    await node.clock.advance(30)

    for i, deadline in enumerate(deadlines):
        with pytest.raises(DeadlinePassed, match=rf"pod default/p{i} was refused: it came 20\.0 s after"):
            await node.allocate(pod(f"p{i}", gpus=1), deadline)

    assert (0, facts) == (node.held, node.ledger.state.seq)
    assert 5 == node.admissions.deadlines.missed


@pytest.mark.parametrize(("waited", "granted"), [(0.0, True), (10.0, True), (10.001, False)])
async def test_a_request_is_granted_up_to_its_deadline(waited: float, granted: bool) -> None:
    node = Node()
    deadline = await node.deadline()
    await node.clock.advance(waited)
    try:
        decision: Decision | None = await node.allocate(pod("p", gpus=1), deadline)
    except DeadlinePassed:
        decision = None

    assert granted == isinstance(decision, Admission)
    assert int(granted) == node.held


class SlowBus(MemoryBus):
    """A hinting service that says nothing for so long."""

    seconds = 0.0
    clock: ManualClock

    async def ask(self, subject: str, body: bytes, within: float) -> bytes:
        await self.clock.advance(self.seconds)
        raise BusUnavailable("no answer")


@pytest.mark.parametrize(("seconds", "held"), [(9.0, 1), (11.0, 0)])
async def test_a_deadline_that_passes_while_the_pod_is_decided_is_missed_too(seconds: float, held: int) -> None:
    bus = SlowBus()
    node = Node(bus)
    bus.clock, bus.seconds = node.clock, seconds
    deadline = await node.deadline()
    try:
        await node.allocate(pod("p", gpus=1), deadline)
    except DeadlinePassed:
        assert 0 == held

    assert held == node.held


async def test_a_late_release_leaves_the_pod_what_it_was_given_since() -> None:
    node = Node()
    await node.allocate(pod("p", gpus=1))
    deadline = await node.deadline()
    await node.clock.advance(11)

    with pytest.raises(DeadlinePassed, match="the release of default/p was refused"):
        await node.admissions.release(ReleaseRequest(node=NODE, target="default/p", deadline=deadline))

    assert 1 == node.held


async def test_a_request_to_the_process_before_is_refused() -> None:
    """Its clock tells nothing of this one's, whatever the numbers are."""
    node = Node()
    deadline = await node.deadline()
    await node.clock.advance(0.01)
    node.start()

    with pytest.raises(DeadlinePassed, match="before this allocator started"):
        await node.allocate(pod("p", gpus=1), deadline)

    assert 0 == node.held


async def test_two_starts_in_one_moment_have_two_clocks() -> None:
    node = Node()
    first = (await node.deadline()).clock
    node.start()

    assert first != (await node.deadline()).clock


async def test_a_request_asked_again_gets_no_second_allocation() -> None:
    """The same request asked again gets the same answer and no second allocation."""
    node = Node()
    asked = pod("p", gpus=2)
    first = await node.allocate(asked, await node.deadline())
    again = await node.allocate(asked, await node.deadline())

    assert isinstance(first, Admission)
    assert first == again
    assert first.explanation.alignments
    assert 1 == node.held


async def test_a_request_that_two_bring_at_once_is_granted_once() -> None:
    node = Node()
    answers: list[Decision] = []

    async def ask() -> None:
        answers.append(await node.allocate(pod("p", gpus=2)))

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask)

    assert 1 == node.held
    assert 5 == len(answers)
    assert all(answers[0] == each for each in answers)


async def test_an_answer_lost_with_the_process_is_given_again() -> None:
    """
    An answer that was lost with the process is given again after its restart. The journal has what was granted; how it was
    decided is remembered by the process alone.
    """
    node = Node()
    first = await node.allocate(pod("p", gpus=2), await node.deadline())
    await node.clock.advance(1)
    node.start()
    again = await node.allocate(pod("p", gpus=2), await node.deadline())

    assert isinstance(first, Admission) and isinstance(again, Admission)
    assert first.allocations == again.allocations
    assert 1 == node.held
    with pytest.raises(PodAlreadyAllocated):
        await node.allocate(pod("p", gpus=1))


async def test_requests_of_earlier_versions_are_never_late() -> None:
    node = Node()
    async with node.bus.serve("topoalign-allocator", node.admissions.endpoints()):
        await node.clock.advance(1000)
        decision = await allocate(node.bus, NODE, pod("p", gpus=1))
        released = await release(node.bus, NODE, "default/p")

    assert isinstance(decision, Admission)
    assert (decision.allocations[0].id,) == released
    assert b"deadline" not in msgspec.json.encode(AllocateRequest(node=NODE, pod=pod("p", gpus=1)))
    assert b"deadline" not in msgspec.json.encode(ReleaseRequest(node=NODE, target="p"))


async def test_the_clock_is_read_over_the_bus() -> None:
    """The clock is read over the bus, and a refusal after the deadline has a code of its own."""
    node = Node()
    async with node.bus.serve("topoalign-allocator", node.admissions.endpoints()):
        body = await node.bus.ask(wire.admission_subject(NODE, "clock"), b'{"node":"node-1"}', 1)
        reading = wire.decode_answer(body, ClockReading)
        late = AllocateRequest(
            node=NODE, pod=pod("p", gpus=1), deadline=Deadline(clock=reading.clock, at=reading.now - 1)
        )
        answer = await node.bus.ask(wire.admission_subject(NODE, "allocate"), msgspec.json.encode(late), 1)

    failure = msgspec.json.decode(answer)["failure"]
    assert ("service", "DeadlinePassed") == (failure["fault"], failure["code"])
    assert "send it again if it is still wanted" in failure["remedy"]


PODS = st.sampled_from(["a", "b", "c"])
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.floats(0.5, 20)),
        st.tuples(st.just("wait"), st.floats(0, 15)),
        st.tuples(st.just("allocate"), PODS, st.integers(1, 3), st.integers(0, 3)),
        st.tuples(st.just("release"), PODS, st.integers(0, 3)),
        st.tuples(st.just("start")),
    ),
    max_size=14,
)


@dataclass
class Reference:
    """Who holds how many, and which deadlines still hold, from the words of the rule."""

    held: dict[str, int] = field(default_factory=dict)
    deadlines: list[tuple[float, int]] = field(default_factory=list)
    now: float = 0.0
    starts: int = 0

    def late(self, nth: int) -> bool:
        at, start = self.deadlines[nth]
        return start != self.starts or self.now > at

    def allocate(self, name: str, amount: int, nth: int | None) -> str:
        if nth is not None and self.late(nth):
            return "DeadlinePassed"
        if name in self.held:
            return "Admission" if self.held[name] == amount else "PodAlreadyAllocated"
        if sum(self.held.values()) + amount > 4:
            return "Refusal"
        self.held[name] = amount
        return "Admission"

    def release(self, name: str, nth: int | None) -> str:
        if nth is not None and self.late(nth):
            return "DeadlinePassed"
        return "released" if self.held.pop(name, None) else "NotFound"


@settings(max_examples=60)
@given(DEEDS)
def test_whatever_comes_late_or_again_nothing_is_given_twice(
    deeds: list[tuple[object, ...]],
) -> None:
    """Whatever comes late or again, nothing is given twice, and nothing after its deadline."""
    anyio.run(follow, deeds)


async def follow(deeds: list[tuple[object, ...]]) -> None:
    node, reference = Node(), Reference()
    deadlines: list[Deadline] = []

    def nth(number: object) -> int | None:
        """One of the deadlines; 0 is none."""
        assert isinstance(number, int)
        return (number - 1) % len(deadlines) if number and deadlines else None

    for deed in deeds:
        match deed:
            case ("read", float() as seconds):
                deadlines.append(await node.deadline(seconds))
                reference.deadlines.append((reference.now + seconds, reference.starts))
            case ("wait", float() as seconds):
                await node.clock.advance(seconds)
                reference.now += seconds
            case ("start",):
                node.start()
                reference.starts += 1
            case ("allocate", str() as name, int() as amount, number):
                which = nth(number)
                if which is not None and abs(reference.deadlines[which][0] - reference.now) < 1e-3:
                    continue  # floats decide
                deadline = deadlines[which] if which is not None else None
                asked = pod_of(container(gpus=amount), name=name)

                assert reference.allocate(name, amount, which) == await outcome(node, asked, deadline)
            case ("release", str() as name, number):
                which = nth(number)
                if which is not None and abs(reference.deadlines[which][0] - reference.now) < 1e-3:
                    continue
                deadline = deadlines[which] if which is not None else None
                request = ReleaseRequest(node=NODE, target=f"default/{name}", deadline=deadline)

                assert reference.release(name, which) == await released(node, request)
        live = node.ledger.state.allocations.values()
        assert reference.held == {each.owner.pod: len(each.device_ids) for each in live if each.owner is not None}


async def outcome(node: Node, asked: PodRequest, deadline: Deadline | None) -> str:
    try:
        decision = await node.allocate(asked, deadline)
    except TopoalignError as error:
        return error.code
    return "Refusal" if isinstance(decision, Refusal) else "Admission"


async def released(node: Node, request: ReleaseRequest) -> str:
    try:
        await node.admissions.release(request)
    except TopoalignError as error:
        return error.code
    return "released"
