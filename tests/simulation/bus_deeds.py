"""What is asked of a node without a kubelet, over the bus or beside it."""

from typing import TYPE_CHECKING

import anyio
import msgspec
from simulation.refusals import sound
from simulation.world import NODE, Violation

from topoalign.cli.effects import deadline_until
from topoalign.core import wire
from topoalign.core.decisions import Admission, Decision, Refusal
from topoalign.core.errors import BadRequest, NoFit, Unavailable
from topoalign.core.ids import CPU, GPU, ContainerName, PodName
from topoalign.core.requests import AllocateRequest, ContainerRequest, PodRequest, ReleaseRequest

PATIENCE_SECONDS = 2.0
HELD_UP_SECONDS = (0.0, 0.0, 0.0, 1.0, 5.0)
"""How long a request stays in some buffer; its asker may have given up by then."""

if TYPE_CHECKING:
    from simulation.scenario import Scenario


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


async def ask_for(run: "Scenario", pod: PodRequest) -> None:
    """
    Over the bus, where a service answers one question at a time and the asker gives up, or beside it, where neither is so.
    """
    request = AllocateRequest(node=NODE, pod=pod)
    try:
        if run.world.chance.random() < 0.5 and run.agent.allocator is not None:
            admissions = run.agent.allocator.admissions
            run.checks.patience.waits(pod.name)
            decision: Decision = await run.agent.door.call(lambda: admissions.allocate(request))
        else:
            run.checks.patience.waits(pod.name, PATIENCE_SECONDS)
            until = run.loop.time() + PATIENCE_SECONDS
            deadline = await deadline_until(run.client_bus, NODE, until)
            if deadline is None:
                return  # nobody is there
            subject = wire.admission_subject(NODE, "allocate")
            body = msgspec.json.encode(msgspec.structs.replace(request, deadline=deadline))
            await anyio.sleep(run.world.chance.choice(HELD_UP_SECONDS))
            answer = await run.client_bus.ask(subject, body, PATIENCE_SECONDS)
            decision = wire.answered(answer, Decision)  # type: ignore[arg-type]  # a union is fine for msgspec
    except (Unavailable, BadRequest, NoFit) as error:
        sound(run, error)
        return
    match decision:
        case Admission():
            names = frozenset(allocation.id for allocation in decision.allocations)
            run.world.note("granted", pod.name, sorted(names))
            if pod.name not in run.leaving:
                run.checks.acknowledged[pod.name] = names
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
        run.world.note("released", wire.answered(answer, list[str]))
    except (Unavailable, BadRequest, NoFit) as error:
        sound(run, error)
