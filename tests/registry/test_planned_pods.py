"""Pods that are planned to a node with their gang keep their place, though the node's kubelet does not know of them."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from random import Random

import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from registry_support import World
from view_support import NODE, RULES, TIME, OneNode, Says, asked, some_request, some_says

from topoalign.core.admission.admit import decide_demand
from topoalign.core.admission.free_amounts import count_free
from topoalign.core.admission.realignment import fit_as_counted
from topoalign.core.demand.pod_demand import pod_demand, read_pod
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.diagnosis.node_records import ClusterRecord, record_node
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import MEMORY, Namespace
from topoalign.core.model.requests import GANG, GANG_SIZE, PodRequest, Policy
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.shapes import Shapes
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import reservation_of
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import NodeRefuses, PodsPending
from topoalign.registry.scheduling.filter.admission_order import fit_in_turn
from topoalign.registry.scheduling.filter.decision_cache import PodClasses
from topoalign.registry.scheduling.filter.pending_pods import pending_pod
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, Victims
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind that waits for others gives up soon."""
    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.5)


THREE_AND_TWO = machine(gpus=(0, 0, 0, 1, 1))


def add(world: World, name: str, gpus: int, size: int = 0) -> PodToSchedule:
    """A pod that waits, of a gang of this size."""
    annotations = {GANG: "g", GANG_SIZE: str(size)} if size else {}
    shown = shown_pod(name, gpus=gpus)
    shown["metadata"].setdefault("annotations", {}).update(annotations)
    uid = str(world.kubernetes.add_pod(shown)["metadata"]["uid"])
    request = pod(container("main", gpus=gpus), name=name)
    return PodToSchedule(
        uid=uid, request=msgspec.structs.replace(request, annotations=annotations, namespace=Namespace("ml"))
    )


def refused(scheduling: SchedulingService, pod: PodToSchedule) -> dict[str, str]:
    """Node -> code, as filter says now."""
    return {name: each.code for name, each in scheduling.scheduler.filter(pod, (NODE,)).refused.items()}


async def admit(world: World, pod: PodToSchedule) -> None:
    """The kubelet admits a pod, by what it knows."""
    await world.say(*world.says.admit(pod.request, pod.uid))
    await all_tasks_blocked()


async def test_a_pod_does_not_take_the_numa_node_of_a_pod_that_is_planned() -> None:
    """Beside what is reserved it has room, and its kubelet would align it to where the planned pod was to go."""
    world = World()
    world.says, other = Says(NODE, THREE_AND_TWO, RULES), Says("node-2", machine(gpus=(0, 0, 0)), RULES)
    for name in (NODE, other.node):
        world.kubernetes.add_node(name)
    first, second = (add(world, name, 3, size=2) for name in ("a", "b"))
    await world.say(*world.says.all(), *other.all())
    async with world.allocator(world.says), world.allocator(other), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", "a", first.uid, other.node)
        single, both = add(world, "q", 1), add(world, "r", 2)
        await all_tasks_blocked()
        codes = refused(scheduling, single), refused(scheduling, both)
        victims = await scheduling.scheduler.preempt(single, {NODE: Victims(uids=())})
        with pytest.raises(NodeRefuses, match="GangFirst"):
            await scheduling.bind("ml", "q", single.uid, NODE)
        await scheduling.bind("ml", "b", second.uid, NODE)
        await admit(world, second)
        await scheduling.bind("ml", "q", single.uid, NODE)
        await admit(world, single)

        assert ({NODE: "GangFirst"}, {NODE: "GangFirst"}, {}) == (*codes, victims)
        assert [3, 1] == [len(each.device_ids) for each in world.says.state.allocations.values()]


async def test_pods_of_a_gang_are_bound_in_an_order_in_which_all_of_them_fit() -> None:
    """The one with three GPUs before the one with one, which waits until it is admitted."""
    world = World()
    world.says = Says(NODE, THREE_AND_TWO, RULES)
    world.kubernetes.add_node(NODE)
    small, large = add(world, "small", 1, size=2), add(world, "large", 3, size=2)
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", "small", small.uid, NODE)
        passed = refused(scheduling, small)
        await scheduling.bind("ml", "large", large.uid, NODE)
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", "small", small.uid, NODE)
        await admit(world, large)
        await scheduling.bind("ml", "small", small.uid, NODE)
        await admit(world, small)

        assert {} == passed
        assert [3, 1] == [len(each.device_ids) for each in world.says.state.allocations.values()]


def planned(world: OneNode, pods: Sequence[tuple[PodRequest, str]]) -> tuple[Reservation, ...]:
    """Each pod is planned after the ones before, as a gang is. Returns what is reserved for them."""
    state, holds = world.view.basis_of(world.view.facts(NODE)).state, list[Reservation]()
    for request, gang in pods:
        decision = decide_demand(state, read_pod(request, world.says.rules))
        assert isinstance(decision, Admission)
        for each in decision.allocations:
            state = state.holding(each)
        made = reservation_of(f"uid-{request.name}", request, decision.allocations, 100.0, gang)
        holds.append(msgspec.structs.replace(made, planned=True))
    world.view.reserve(NODE, holds)
    world.requests |= {request.name: request for request, _ in pods}
    return tuple(holds)


def code_of_why(world: OneNode, reserved: tuple[Reservation, ...], request: PodRequest) -> str:
    """What `why` says of the node; empty where the pod fits."""
    record = msgspec.structs.replace(record_node(world.view.facts(NODE)), reserved=reserved)
    answer = diagnose(Nodes(ClusterRecord(time=TIME, nodes=(record,))), request, world.view.scorer)
    return answer.reason.code if answer.reason is not None else ""


def test_what_is_planned_is_read_once_for_all_requests() -> None:
    """A gang is planned to hundreds of nodes, and each of hundreds of other requests is asked about on all of them."""
    read = list[str]()

    class Counting(OneNode):
        def request_of(self, reserved: Reservation) -> PodRequest | None:
            read.append(reserved.pod)
            return super().request_of(reserved)

    world = Counting(RULES, machine(gpus=(0, 0, 0, 0)))
    world.tell(world.says.all())
    planned(world, [(pod(container(gpus=1), name="a"), "g")])

    def codes() -> list[str]:
        pods = [asked(pod(container(gpus=gpus), name=f"n{gpus}")) for gpus in (1, 2, 3)]
        refused = [world.scheduler.filter(each, (NODE,)).refused for each in pods]
        return [each[NODE].code if NODE in each else "" for each in refused]

    before = codes(), len(read)
    world.view.reserve(NODE, ())
    planned(world, [(pod(container(gpus=1), name="a"), "g"), (pod(container(gpus=1), name="b"), "g")])

    assert (["", "", ""], 1) == before
    assert ["", "", "NotEnoughDevices"] == codes()


def fit_naively(state: NodeState, pods: Sequence[PodRequest], world: OneNode) -> bool:
    """Whether a kubelet admits the pods one after the other."""
    for request in pods:
        decision = decide_demand(state, pod_demand(request, world.says.rules))
        if not isinstance(decision, Admission):
            return False
        for each in decision.allocations:
            state = state.holding(each)
    return True


@pytest.mark.parametrize("seed", range(30))
async def test_whoever_is_let_through_leaves_room_for_all_that_are_planned(seed: int) -> None:
    """
    On an empty node, where nothing can end. Filter, bind and `why` agree, and one of the planned pods is always let through.
    """
    chance = Random(seed)
    rules = msgspec.structs.replace(
        RULES, policy=chance.choice([Policy.NONE, Policy.RESTRICTED, Policy.SINGLE_NUMA_NODE])
    )
    world = OneNode(rules, machine(gpus=tuple(sorted(chance.choices((0, 1), k=6)))))
    world.tell(world.says.all())
    gang, state = list[PodRequest](), world.says.state
    for number in range(chance.randint(1, 3)):
        more = pod(container(gpus=chance.randint(1, 3)), name=f"p{number}")
        if fit_naively(state, [*gang, more], world):
            gang.append(more)
    reserved = planned(world, [(each, chance.choice("gh")) for each in gang])
    single = pod(container(gpus=chance.randint(1, 3)), name="single")
    filtered = world.scheduler.filter(asked(single), (NODE,)).refused
    bound = await world.scheduler.fits_in_every_order(NODE, asked(single))
    own = [await world.scheduler.fits_in_every_order(NODE, asked(each)) for each in gang]

    assert bound == (filtered[NODE].code if filtered else "")
    assert bound == code_of_why(world, reserved, single)
    assert not (bound == "" and not fit_naively(state, [single, *gang], world))
    assert not (bound == "GangFirst" and fit_naively(state, [single, *gang], world))
    for each, code in zip(gang, own, strict=True):
        others = [other for other in gang if other is not each]
        assert fit_naively(state, [each, *others], world) is (code == "")
    assert not gang or "" == own[0]
    assert any(fit_naively(state, order, world) for order in permutations(gang))


def site_of_two() -> tuple[OneNode, PodRequest, PodRequest]:
    """A node, and two pods of which the second one takes the place of the first if others end and it comes first."""
    rules = msgspec.structs.replace(
        RULES, cpu_manager="static", reserved_cpus="0", memory_manager="Static", reserved_memory={0: {MEMORY: 1 << 30}}
    )
    world = OneNode(rules, machine(nodes=2, gpus=(0, 1)))
    world.tell(world.says.all())
    for name, cpus, gib in (("some", 1, 23), ("most", 1, 60), ("cpus", 4, 1)):
        world.tell(world.says.admit(pod(container("c0", cpus=cpus, gib=gib), name=name), name))
    stays = pod(container("main", gpus=1, cpus=1, gib=20), name="stays")
    return world, stays, pod(container("main", gpus=1, cpus=4, gib=1), name="moves")


@pytest.mark.parametrize(
    ("gangs", "expected"), [(("g", ""), "GangFirst"), (("g", "h"), "PodsPending"), (("g", "g"), ""), (("", "h"), "")]
)
async def test_a_planned_pod_keeps_its_place_whatever_ends_before(gangs: tuple[str, str], expected: str) -> None:
    """
    The two of `test_a_pod_is_not_bound_where_one_that_moves_may_displace_it`. Pods of one gang are let through, as the first
    of them would wait for ever if nothing ended; so is one beside which nothing is planned.
    """
    world, stays, moves = site_of_two()
    planned(world, [(each, gang) for each, gang in zip((stays, moves), gangs, strict=True) if gang])
    filtered = world.scheduler.filter(asked(moves), (NODE,)).refused

    assert expected == await world.scheduler.fits_in_every_order(NODE, asked(moves))
    assert ({NODE} if expected == "GangFirst" else set()) == filtered.keys()


@pytest.mark.parametrize("is_planned", [True, False])
async def test_a_pod_of_the_gang_may_preempt_where_it_is_planned(is_planned: bool) -> None:
    """The place of its gang is its own; a pod that is not of the gang would take that from it (above)."""
    world, stays, moves = site_of_two()
    planned(world, [(stays, "g"), *([(moves, "g")] if is_planned else [])])
    world.planned |= {asked(moves).uid: NODE} if is_planned else {}

    helped = await world.scheduler.preempt(asked(moves), {NODE: Victims(uids=())})

    assert is_planned == bool(helped)


async def test_a_planned_pod_does_not_wait_until_others_have_ended() -> None:
    """
    The pod of `test_a_pod_waits_while_an_end_could_part_its_containers`. What is planned would end before the other pod, and
    the same would be planned again. Beside a pod that is pending it waits for that one.
    """
    rules = msgspec.structs.replace(RULES, cpu_manager="static", reserved_cpus="0")
    world = OneNode(rules, machine(nodes=2, gpus=(0, 0, 1), nics=(1,)))
    world.tell(world.says.all())
    world.tell(world.says.admit(pod(container("c0", cpus=5, gib=1), name="cpus"), "cpus"))
    new = pod(container("a", gpus=1, cpus=4, gib=1), container("b", gpus=2, cpus=1, gib=1), name="new")
    alone = await world.scheduler.fits_in_every_order(NODE, asked(new))
    planned(world, [(new, "g")])
    gang = await world.scheduler.fits_in_every_order(NODE, asked(new))
    world.view.expect(NODE, asked(pod(container("main", nics=1), name="pending")))

    assert ("PodsPending", "") == (alone, gang)
    assert "PodsPending" == await world.scheduler.fits_in_every_order(NODE, asked(new))


def test_pods_that_fit_as_counted_are_admitted_one_after_the_other() -> None:
    """By the decisions of a kubelet, on machines and under rules by chance; some fit and are not counted."""
    chance, shapes, found = Random(18), Shapes(), Counter[tuple[bool, bool]]()
    while found.total() < 120:
        says = some_says(chance, NODE, shapes)
        world = OneNode(says.rules, says.hardware)
        world.tell(world.says.all())
        world.view.renew()
        view, verdicts = world.view.nodes[NODE], PodClasses()
        if view.kind is None:
            continue
        state = world.view.basis(view).state
        requests = [asked(some_request(chance, says.hardware, f"p{number}")) for number in range(2)]
        classes = [verdicts.of(each) for each in requests]
        pods = [pending_pod(f"p{n}", each, each.of(view.kind, world.view)) for n, each in enumerate(classes)]
        counted = fit_as_counted(count_free(state, view.kind.rules), pods)
        found[counted, fit_in_turn(state, pods)] += 1

    assert 0 == found[True, False]
    assert all(found[each] for each in ((True, True), (False, True), (False, False)))
