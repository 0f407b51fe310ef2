"""What is asked of a node without a kubelet, over the bus or beside it."""

from math import inf
from typing import TYPE_CHECKING

import anyio
import msgspec
from simulation.refusals import sound
from simulation.world import NODE, Violation

from topoalign.cli.effects import deadline_until
from topoalign.core import wire
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.errors import BadRequest, DeadlinePassed, NoFit, TopoalignError, Unavailable
from topoalign.core.model.ids import CPU, GPU, ContainerName, PodName
from topoalign.core.model.requests import AllocateRequest, ContainerRequest, PodRequest, ReleaseRequest

PATIENCE_SECONDS = 2.0
HELD_UP_SECONDS = (0.0, 0.0, 0.0, 1.0, 5.0)
"""How long a request stays in some buffer; its asker may have given up by then."""

if TYPE_CHECKING:
    from simulation.scenario import Scenario

ALLOCATE = wire.admission_subject(NODE, "allocate")


def asks(run: "Scenario") -> None:
    """Somebody asks for a pod; once in a while twice at the same time."""
    chance, name = run.world.chance, run.next_name()
    size, twice = chance.choice((1, 1, 2, 3)), chance.random() < 0.2
    for _ in range(2 if twice else 1):
        run.soon(ask_for, run, request_for(name, size))


def two_ask(run: "Scenario") -> None:
    """Two at the same moment, for more than half of the node each."""
    for size in (2, 3):
        run.soon(ask_for, run, request_for(run.next_name(), size))


def request_for(name: str, gpus: int) -> PodRequest:
    main = ContainerRequest(
        name=ContainerName("main"), requests={CPU: 1000 * gpus}, limits={GPU: gpus, CPU: 1000 * gpus}
    )
    return PodRequest(name=PodName(name), containers=(main,))


def asks_again(run: "Scenario") -> None:
    """For what was granted, perhaps just after the allocator has died: the same answer."""
    if run.checks.acknowledged:
        if run.world.chance.random() < 0.4:
            run.world.kill(run.agent.process)
        name = run.world.chance.choice(sorted(run.checks.acknowledged))
        run.later(run.world.chance.choice((0.0, 0.5, 12.0)), lambda: run.soon(ask_for, run, run.checks.asked[name]))


def asks_late(run: "Scenario") -> None:
    """A request waits somewhere on its way, perhaps until its asker has given up, and perhaps it comes twice."""
    run.soon(ask_late, run, request_for(run.next_name(), run.world.chance.choice((1, 2))))


async def ask_for(run: "Scenario", pod: PodRequest) -> None:
    """Over the bus, where a service answers one question at a time, or beside it, where it does not."""
    try:
        request = await dated(run, pod)
        if run.world.chance.random() < 0.5 and run.agent.allocator is not None:
            admissions = run.agent.allocator.admissions
            run.checks.patience.waits(pod.name)
            decision: Decision = await run.agent.door.call(lambda: admissions.allocate(request))
        else:
            body = msgspec.json.encode(request)
            await anyio.sleep(run.world.chance.choice(HELD_UP_SECONDS))
            answer = await run.client_bus.ask(ALLOCATE, body, PATIENCE_SECONDS)
            decision = wire.decode_answer(answer, Decision)  # type: ignore[arg-type]  # a union is fine for msgspec
    except (Unavailable, BadRequest, NoFit) as error:
        told(run, pod, error)
        return
    hears(run, pod, decision)


async def ask_late(run: "Scenario", pod: PodRequest) -> None:
    chance = run.world.chance
    late, times = chance.choice((0.5, 2.5, 30.0)), chance.choice((1, 1, 2))
    try:
        body = msgspec.json.encode(await dated(run, pod, always=True))
        run.checks.asks[pod.name] += times - 1
        await anyio.sleep(late)
        for _ in range(times):
            answer = await run.world.broker.bus.ask(ALLOCATE, body, 90.0)
            hears(run, pod, wire.decode_answer(answer, Decision))  # type: ignore[arg-type]  # a union is fine for msgspec
    except (Unavailable, BadRequest, NoFit) as error:
        told(run, pod, error)


async def dated(run: "Scenario", pod: PodRequest, *, always: bool = False) -> AllocateRequest:
    """With the deadline of its asker on the allocator's clock, or without. Raises Unavailable."""
    checks, deadline = run.checks, None
    is_dated = always or run.world.chance.random() < 0.7
    until = run.loop.time() + PATIENCE_SECONDS
    checks.patience.waits(pod.name, PATIENCE_SECONDS if is_dated else inf)
    if is_dated:
        deadline = await deadline_until(run.client_bus, NODE, until)
    checks.asked[pod.name] = pod
    checks.asks[pod.name] += 1
    return AllocateRequest(node=NODE, pod=pod, deadline=deadline)


def told(run: "Scenario", pod: PodRequest, error: TopoalignError) -> None:
    """That nothing of a request was done is true, if nobody else has asked for the pod."""
    sound(run, error)
    if isinstance(error, DeadlinePassed) and run.checks.asks[pod.name] == 1:
        held = [owner for owner, _ in run.checks.record.live.values() if owner is not None and owner.pod == pod.name]
        if held:
            run.world.violate(Violation("I13", f"{pod.name} was refused by its deadline and is held"))


def hears(run: "Scenario", pod: PodRequest, decision: Decision) -> None:
    match decision:
        case Admission():
            names = frozenset(allocation.id for allocation in decision.allocations)
            run.world.note("granted", pod.name, sorted(names))
            if pod.name not in run.leaving:
                had = run.checks.acknowledged.setdefault(pod.name, names)
                if had != names:
                    run.world.violate(Violation("I6", f"{pod.name} has {sorted(had)} and is told {sorted(names)}"))
        case Refusal():
            run.world.note("refused", decision.code, decision.finding)
            if not (decision.code and decision.finding and decision.remedy):
                run.world.violate(Violation("I8", f"a refusal says too little: {decision}"))
            if decision.code == "PodHasAllocations":  # all who ask for a pod ask for the same
                run.world.violate(Violation("I6", f"{pod.name} was asked for again and refused"))


def gives_back(run: "Scenario") -> None:
    if run.checks.acknowledged:
        name = run.world.chance.choice(sorted(run.checks.acknowledged))
        del run.checks.acknowledged[name]
        run.leaving.add(name)
        for _ in range(run.world.chance.choice((1, 1, 2))):
            run.soon(give_back, run, name)


async def give_back(run: "Scenario", name: str) -> None:
    question = msgspec.json.encode(ReleaseRequest(node=NODE, target=f"default/{name}"))
    try:
        answer = await run.client_bus.ask(wire.admission_subject(NODE, "release"), question, 2.0)
        run.world.note("released", wire.decode_answer(answer, list[str]))
    except (Unavailable, BadRequest, NoFit) as error:
        sound(run, error)
