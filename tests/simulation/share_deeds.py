"""Pods that ask for parts of GPUs, registries that reserve for them, and what happens to the directories that limit them."""

from random import Random
from typing import TYPE_CHECKING, Literal

import msgspec
from simulation.divisions import ALL_CORES, BLOCKS, CORES, INSTANCE, MEMORY, Division, card
from simulation.pods import Container, Pod
from simulation.refusals import sound
from simulation.world import NODE

from topoalign.core import wire
from topoalign.core.admission.admit import decide_demand
from topoalign.core.demand.pod_demand import read_pod
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, NIC, ContainerName, PodName, ResourceName
from topoalign.core.model.requests import GPU_COUNT, AdmissionRules, ContainerRequest, Mode, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import reservation_of, with_reserved

if TYPE_CHECKING:
    from simulation.scenario import Scenario

RESERVED_SECONDS = 60.0
RULES = AdmissionRules(mode=Mode.KUBELET, policy=Policy.NONE)
Asked = dict[ResourceName, int]


def share_pod(run: "Scenario", size: int | None = None, spread: float = 0.2) -> Pod:
    """
    A pod that asks for GPUs as they are offered now, and for its resources in an order of the kubelet's. `spread`: how
    likely its units are spread over several GPUs, which it gets by a reservation alone.
    """
    chance, division, name = run.world.chance, run.world.division, run.next_name()
    role: Literal["init", "sidecar"] = "init" if chance.random() < 0.7 else "sidecar"
    cards = chance.choice((2, 3)) if division == "units" and size is None and chance.random() < spread else 1
    containers = [container_of("main", "app", chance, asked(division, chance, size, cards))]
    if size is None and chance.random() < 0.3:
        containers.insert(0, container_of("before", role, chance, asked(division, chance, None, cards)))
    breaks = chance.random() < 0.08
    return Pod(uid=f"uid-{name}", name=PodName(name), containers=tuple(containers), breaks=breaks, cards=cards)


def container_of(
    name: str, role: Literal["init", "sidecar", "app"], chance: Random, wanted: tuple[Asked, Asked]
) -> Container:
    """`wanted`: as `asked` says it."""
    limits, amounts = wanted
    if chance.random() < 0.1:
        limits[NIC] = 1
    order = [*limits]
    chance.shuffle(order)
    return Container(
        name=ContainerName(name), role=role, limits={each: limits[each] for each in order}, amounts=amounts
    )


def asked(division: Division, chance: Random, size: int | None, cards: int) -> tuple[Asked, Asked]:
    """What a container asks the kubelet for, and what besides; of units so much of each of so many GPUs."""
    match division:
        case "units" if cards > 1 or chance.random() < 0.9:
            if cards > 1:
                cores, blocks = cards * chance.choice((0, 5, 30)), cards * chance.randint(1, BLOCKS // 4)
            elif size is not None:
                cores, blocks = 30 * size, 2
            elif chance.random() < 0.25:
                cores, blocks = ALL_CORES * chance.choice((1, 1, 2)), chance.choice((0, 0, BLOCKS // 2))
            else:
                cores, blocks = chance.choice((0, 5, 30, 60)), chance.randint(1, BLOCKS // 2)
            return {name: amount for name, amount in ((CORES, cores), (MEMORY, blocks)) if amount}, {}
        case "slots" | "dynamic":
            slots = Slots()
            amounts = {slots.cores: chance.choice((5, 30, 60, 100)), slots.percentage: chance.choice((10, 25, 60))}
            return {GPU: size or chance.choice((1, 1, 1, 2, 3))}, {} if chance.random() < 0.1 else amounts
        case "mig" if chance.random() < 0.7:
            return {INSTANCE: 1}, {}
        case _:
            return {GPU: size or 1}, {}


def come(run: "Scenario", pod: Pod) -> None:
    """The kubelet hears of a pod."""
    assert run.kubelet is not None
    run.kubelet.wanted[pod.uid] = pod
    run.world.note("comes", pod)
    if run.kubelet.up:
        run.admit(pod.uid)


def is_reserved(run: "Scenario") -> None:
    """A registry asks the node's record what a pod would get, reserves it and binds the pod, which comes a while later."""
    world, pod = run.world, share_pod(run, spread=0.7)
    if run.agent.ledger is not None and not run.agent.process.dead:
        reserve(run, pod, run.agent.ledger.state)
    run.later(world.chance.choice((0.0, 0.3, 3.0)), lambda: come(run, pod))


def reserve(run: "Scenario", pod: Pod, state: NodeState) -> None:
    world, now, request = run.world, run.loop.time(), request_of(pod)
    world.reserved = [(until, each) for until, each in world.reserved if until > now]
    others = [msgspec.structs.replace(each, seconds_left=until - now) for until, each in world.reserved]
    rules = msgspec.structs.replace(RULES, compat=world.rules.compat)
    try:
        decision = decide_demand(with_reserved(state, state, others), read_pod(request, rules))
    except TopoalignError as error:
        sound(run, error)
        return
    if not isinstance(decision, Admission):
        return
    made = reservation_of(pod.uid, request, decision.allocations, RESERVED_SECONDS)
    world.reserved.append((now + RESERVED_SECONDS, made))
    given = [part for each in made.containers for part in each.devices.items()]
    world.reserved_parts |= {(resource, len(ids), len({*map(card, ids)})) for resource, ids in given}
    world.reservations += 1
    said = ReservationsChanged(
        node=NODE, epoch=1, writer="r1", seq=world.reservations, reservations=(*others, made), made=(pod.uid,)
    )
    world.note("reserved", made)

    async def publish() -> None:
        await world.broker.bus.publish(wire.encode_event(said, world.clock.wall()))

    run.soon(publish)


def request_of(pod: Pod) -> PodRequest:
    """As a registry reads the pod."""
    found: dict[str, list[ContainerRequest]] = {"init": [], "app": []}
    for each in pod.containers:
        both = {**each.limits, **each.amounts}
        found["app" if each.role == "app" else "init"].append(
            ContainerRequest(name=each.name, requests=both, limits=both, sidecar=each.role == "sidecar")
        )
    return PodRequest(
        name=pod.name,
        annotations={GPU_COUNT: str(pod.cards)} if pod.cards > 1 else {},
        init_containers=tuple(found["init"]),
        containers=tuple(found["app"]),
    )


def directory_spoilt(run: "Scenario") -> None:
    """Somebody removes directories that limit containers, or puts something else in their place."""
    limits = run.world.limits
    run.world.note("spoilt", limits.spoil(run.world.chance))
    limits.spoilt_at = run.loop.time()
    run.later(run.world.chance.choice((2.0, 20.0)), limits.put_right)


def no_room_for_limits(run: "Scenario") -> None:
    """The disk on which these directories are is full for a while."""
    limits = run.world.limits
    limits.full = True
    run.later(run.world.chance.choice((0.5, 8.0)), limits.put_right)


def dies_writing_limits(run: "Scenario") -> None:
    """The agent gets SIGKILL at its next write to one of these directories."""
    run.world.limits.kill = lambda: run.world.kill(run.agent.process)
