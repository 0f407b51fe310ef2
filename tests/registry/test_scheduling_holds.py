"""What bound and reserved pods have before their node shows it, and in which orders pods fit."""

from random import Random

import msgspec
import pytest
from decision_support import container, machine, pod
from fact_support import owner, reservation
from fact_support import reserved_container as reserved
from faults_support import THOROUGH
from view_support import NODE, RULES, OneNode, Says, asked, scheduler_of, some_request, some_says, tell_all

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import CPU, GPU, MEMORY, AllocationID, DeviceID, NodeName
from topoalign.core.model.requests import AdmissionRules, PodLevelResources, PodRequest
from topoalign.core.model.reservations import Reservation
from topoalign.core.model.topology.shapes import Shapes
from topoalign.registry.cluster_nodes import Cluster
from topoalign.registry.scheduling.cluster_state.assumed_pods import holds_something
from topoalign.registry.scheduling.scheduling_api import Filtered, Victims

pytestmark = pytest.mark.anyio
SEEDS = 600 if THOROUGH else 60
STATIC = msgspec.structs.replace(RULES, cpu_manager="static", reserved_cpus="0,8")


def gpus(amount: int, name: str = "a", cpus: int = 0) -> PodRequest:
    return pod(container("main", gpus=amount, cpus=cpus, gib=bool(cpus)), name=name)


def node(rules: AdmissionRules = RULES, places: tuple[int, ...] = (0, 0, 1, 1)) -> OneNode:
    """With GPUs near these NUMA nodes."""
    found = OneNode(rules, machine(gpus=places))
    found.tell(found.says.all())
    return found


def hold(uid: str, *devices: str) -> Reservation:
    return reservation("a", reserved(*devices), uid=uid)


def test_bound_pods_hold_what_they_will_get_until_they_are_gone() -> None:
    world = node()
    codes = [world.code()]
    for uid in ("a", "b"):
        world.view.expect(NODE, asked(gpus(2, uid), uid))
        codes.append(world.code())
    world.view.end(NODE, "a")

    assert (["", "", "NotEnoughDevices"], "") == (codes, world.code())


def test_what_the_node_shows_is_held_no_longer_and_stays_so() -> None:
    """Else a container that ended would hold its devices until its pod is deleted."""
    world = node()
    world.view.expect(NODE, asked(gpus(4), "a"))
    expected = world.code()
    world.tell(world.says.admit(gpus(4), "a"))
    shown = world.code()
    world.tell(world.says.end("a"))

    assert ("NotEnoughDevices", "NotEnoughDevices", "") == (expected, shown, world.code())


def test_cpus_are_held_until_a_checkpoint_shows_them() -> None:
    """The devices are granted at once, the checkpoint is read up to a second later."""
    world = node(STATIC)
    world.view.expect(NODE, asked(gpus(1, cpus=6), "a"))
    expected = world.code(gpus=0, cpus=6), world.code(gpus=0, cpus=9)
    facts = list(world.says.admit(gpus(1, cpus=6), "a"))
    world.tell(facts[:-1])
    granted = world.code(gpus=0, cpus=9)
    world.tell(facts[-1:])
    listed = world.code(gpus=0, cpus=9)
    world.tell(world.says.end("a"))

    assert (("", "NotEnoughCpus"), "NotEnoughCpus") == (expected, granted)
    assert ("NotEnoughCpus", "") == (listed, world.code(gpus=0, cpus=9))


def test_cpus_of_a_pod_with_pod_level_resources_stay_free() -> None:
    """Its kubelet gives its containers no exclusive CPUs: they stay free for the next pod, and its devices do not."""
    world, cpus = node(STATIC), PodLevelResources(limits={CPU: 12_000, MEMORY: 64 << 30})
    bound = msgspec.structs.replace(gpus(4, cpus=12), resources=cpus)
    world.view.expect(NODE, asked(bound, "a"))
    expected = world.code(gpus=0, cpus=12), world.code(gpus=1)
    world.tell(world.says.admit(bound, "a"))

    assert ("", "NotEnoughDevices") == expected == (world.code(gpus=0, cpus=12), world.code(gpus=1))
    assert [True, False] == [
        holds_something(each) for each in (gpus(0, cpus=2), msgspec.structs.replace(gpus(0, cpus=2), resources=cpus))
    ]


def test_a_pod_that_runs_already_is_not_held_a_second_time() -> None:
    """As after a start of the registry, when all bound pods are told of."""
    world = node()
    world.tell(world.says.admit(gpus(2), "a"))
    world.view.expect(NODE, asked(gpus(2), "a"))
    once = world.code()
    world.tell(world.says.end("a"))

    assert ("", "") == (once, world.code(gpus=4))


def test_of_a_pod_that_fits_nowhere_the_reasons_are_counted() -> None:
    """Of one that fits on some node nothing is told."""
    world = node()
    scheduler = world.scheduler
    ghosts = [NodeName("ghost-1"), NodeName("ghost-2")]
    scheduler.filter(asked(gpus(4), "a"), [NODE, *ghosts])
    scheduler.filter(asked(gpus(9), "b"), [NODE, *ghosts])

    assert [("b", {"NotEnoughDevices (never fits)": 1, "UnknownNode": 2})] == world.refused


def test_a_node_is_renewed_only_where_something_else_is_held() -> None:
    """Not when the same is told again, or the pod is bound for which it was reserved."""
    world = node()

    def version() -> int:
        world.view.renew()
        return world.view.version

    versions = [version()]
    world.view.reserve(NODE, (hold("a", "GPU-0"),))
    versions.append(version())
    world.view.reserve(NODE, (hold("a", "GPU-0"),))
    world.view.expect(NODE, asked(gpus(1), "a"))
    versions.append(version())
    world.view.reserve(NODE, ())
    world.view.expect(NODE, asked(gpus(1), "b"))

    assert [0, 1, 1] == [each - versions[0] for each in versions]
    assert versions[0] + 2 == version()


def test_a_pod_is_known_by_its_names_where_the_node_has_no_uid() -> None:
    world = node()
    world.tell(world.says.admit(gpus(2), ""))
    world.says.entries = ()
    world.tell([world.says.usage()])
    world.view.expect(NODE, asked(gpus(2), "a"))

    assert "" == world.code()


def test_a_bound_pod_that_does_not_fit_holds_what_it_will_fit_on() -> None:
    """The pod before it has ended on the node, and the node does not say so yet."""
    world = node()
    world.tell(world.says.admit(gpus(4), "a"))
    world.view.expect(NODE, asked(gpus(2, "b"), "b"))
    full = world.code()
    world.tell(world.says.end("a"))

    assert ("NotEnoughDevices", "", "NotEnoughDevices") == (full, world.code(), world.code(gpus=4))


def test_a_bound_pod_that_does_not_fit_gets_what_victims_leave() -> None:
    """A pod that preempts comes after it."""
    world = node()
    for uid, amount in (("a", 4), ("b", 2)):
        world.view.expect(NODE, asked(gpus(amount, uid), uid))
    admitted = [world.scheduler.would_admit_without(NODE, asked(gpus(each, "c")), {"a"}) for each in (2, 4)]

    assert ("NotEnoughDevices", [True, False]) == (world.code(), admitted)


def test_a_bind_that_has_begun_does_not_count_where_others_are_to_end() -> None:
    """Binds of a node reserve one after the other: what the others will get is not reserved yet."""
    world = node()
    world.view.expect(NODE, asked(gpus(4, "a"), "a"))
    world.view.assume(NODE, asked(gpus(4, "b"), "b"))
    admitted = [world.scheduler.would_admit_without(NODE, asked(gpus(4, "c"), "c"), gone) for gone in ({"a"}, set())]

    assert [True, False] == admitted


async def test_what_is_reserved_for_a_pod_does_not_count_against_its_preemption() -> None:
    """An earlier try to bind it may have left that."""
    world = node()
    world.view.expect(NODE, asked(gpus(2, "a"), "a"))
    world.view.reserve(NODE, [hold("p", "GPU-2", "GPU-3")])
    pods = {uid: asked(gpus(4, uid), uid) for uid in ("p", "other")}
    helped = {uid: await world.scheduler.preempt(each, {NODE: Victims(uids=("a",))}) for uid, each in pods.items()}

    assert {"p": [NODE], "other": []} == {uid: [*each] for uid, each in helped.items()}


def test_a_node_that_is_gone_has_no_pending_pods() -> None:
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0")])
    world.view.renew()
    before = {*world.view.nodes_with_pending}
    world.view.forget(NODE)
    world.view.renew()

    assert ({NODE}, set()) == (before, world.view.nodes_with_pending)


async def test_a_bind_that_has_begun_does_not_count_in_the_orders_of_another_one() -> None:
    world = node()
    world.view.assume(NODE, asked(gpus(4, "b"), "b"))

    assert "" == await world.scheduler.fits_in_every_order(NODE, asked(gpus(4, "c"), "c"))


def test_a_reservation_counts_against_all_pods_but_its_own() -> None:
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0", "GPU-2")])
    codes = world.code(uid="b"), world.code(uid="a")
    world.view.reserve(NODE, [])

    assert (("NotAligned", ""), "") == (codes, world.code(uid="b"))


def test_a_bound_pod_keeps_what_its_reservation_had_when_that_ends() -> None:
    """It may expire before a slow kubelet has admitted the pod."""
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0", "GPU-2")])
    world.view.expect(NODE, asked(gpus(2), "a"))
    world.view.reserve(NODE, [])
    kept = world.code(uid="b")
    world.view.end(NODE, "a")

    assert ("NotAligned", "") == (kept, world.code(uid="b"))


def test_a_reservation_that_the_node_has_shown_holds_nothing_again() -> None:
    """Whoever reserved it repeats it for a while, and the container may have ended meanwhile."""
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0", "GPU-1")])
    world.tell(world.says.admit(gpus(2), "a"))
    shown = world.code(gpus=4)
    world.tell(world.says.end("a"))
    world.view.reserve(NODE, [hold("a", "GPU-0", "GPU-1")])

    assert ("NotEnoughDevices", "") == (shown, world.code(gpus=4))


def test_a_pod_fits_on_each_node_that_is_reserved_for_it() -> None:
    """A bind of which nothing is known keeps its reservation, and the next try may be on another node."""
    world, other = node(), Says("node-2", machine(), RULES)
    world.tell(other.all())
    for name in (NODE, other.node):
        world.view.reserve(name, [hold("a", "GPU-0", "GPU-1", "GPU-2", "GPU-3")])
    both = [world.code(name, 4, uid="a") for name in (NODE, other.node)]
    world.view.reserve(other.node, [])

    assert (["", ""], "", "NotEnoughDevices") == (both, world.code(gpus=4, uid="a"), world.code(gpus=4, uid="b"))
    world.view.end(NODE, "a")
    assert {} == world.view.reserved_on


def test_a_node_that_is_registered_again_holds_what_it_held() -> None:
    """Nobody tells again of its bound pods and reservations; they end as they do on any node."""
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0")])
    world.view.expect(NODE, asked(gpus(1, "b"), "b"))
    world.view.forget(NODE)
    world.view.label(NODE, {})
    again = world.code(gpus=4, uid="c")
    world.view.end(NODE, "b")
    world.view.reserve(NODE, [])

    assert ("NotEnoughDevices", "", {}) == (again, world.code(gpus=4, uid="c"), world.view.reserved_on)


async def test_a_pod_is_not_bound_beside_one_that_it_may_displace() -> None:
    """One GPU is taken of NUMA node 0, where three are wanted: the three fit before the one, and not after it."""
    world = node(places=(0, 0, 0, 1, 1))
    world.view.expect(NODE, asked(gpus(3, "three"), "three"))
    one = asked(gpus(1, "one"), "one")
    filtered, pending = world.code(gpus=1), await world.scheduler.fits_in_every_order(NODE, one)
    world.tell(world.says.admit(gpus(3, "three"), "three"))

    assert ("", "PodsPending", "") == (filtered, pending, await world.scheduler.fits_in_every_order(NODE, one))


async def test_a_pod_is_not_bound_where_one_that_moves_may_displace_it() -> None:
    """
    Each fits beside the other as the node is now. If a pod with CPUs of NUMA node 0 ends, the one that is aligned to node 1
    is aligned to node 0 instead, and takes the GPU without which the other one cannot be near its memory.
    """
    rules = msgspec.structs.replace(
        RULES, cpu_manager="static", reserved_cpus="0", memory_manager="Static", reserved_memory={0: {MEMORY: 1 << 30}}
    )
    world = OneNode(rules, machine(nodes=2, gpus=(0, 1)))
    world.tell(world.says.all())
    for name, cpus, gib in (("some", 1, 23), ("most", 1, 60), ("cpus", 4, 1)):
        world.tell(world.says.admit(pod(container("c0", cpus=cpus, gib=gib), name=name), name))
    moves = pod(container("main", gpus=1, cpus=4, gib=1), name="moves")
    stays = asked(pod(container("main", gpus=1, cpus=1, gib=20), name="stays"), "stays")
    alone = await world.scheduler.fits_in_every_order(NODE, stays)
    world.view.expect(NODE, asked(moves, "moves"))
    beside = await world.scheduler.fits_in_every_order(NODE, stays)
    world.tell(world.says.admit(moves, "moves"))

    assert ("", "PodsPending", "") == (alone, beside, await world.scheduler.fits_in_every_order(NODE, stays))


def test_a_node_has_others_until_it_has_shown_them() -> None:
    """Reserved or bound; the pod that is to be bound is none."""
    world, one = node(), asked(gpus(1, "one"), "one")
    world.view.reserve(NODE, [hold("a", "GPU-0")])
    reserved = world.view.pods_on(NODE).has_others("a"), world.view.pods_on(NODE).has_others("b")
    world.view.reserve(NODE, [])
    world.view.expect(NODE, one)
    bound = world.view.pods_on(NODE).has_others("one"), world.view.pods_on(NODE).has_others("b")
    world.tell(world.says.admit(gpus(1, "one"), "one"))
    world.view.renew()

    assert ((False, True), (False, True), False) == (reserved, bound, world.view.pods_on(NODE).has_others("b"))


def test_nothing_is_kept_of_nodes_on_which_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of nodes may never come twice, as an autoscaler makes them."""
    monkeypatch.setattr("topoalign.registry.scheduling.cluster_state.view.TERMINATED_SECONDS", 0)
    world = node()
    names = [NodeName(f"new-{number}") for number in range(100)]
    for name in names:
        world.view.pods_on(name)
        world.view.reserve(name, [])
        world.view.expect(name, asked(gpus(1), f"uid-{name}"))
        world.view.reserve(name, [hold("a", "GPU-0")])
    kept = len(world.view._pods)
    for name in names:
        world.view.forget(name)
        world.view.end(name, f"uid-{name}")
        world.view.reserve(name, [])
    world.view.expire_terminated()
    world.view.renew()

    assert (100, 0, {}, 0) == (kept, len(world.view._pods), world.view.reserved_on, len(world.view._deleted))


def test_of_equal_nodes_one_without_pending_pods_is_best() -> None:
    """S05. A bind beside a pending pod may have to wait. Both nodes have one GPU less; b shows later who has it."""
    world, other = node(), Says("node-2", machine(), RULES)
    world.tell(other.all())
    names = (NODE, other.node)
    world.view.expect(NODE, asked(gpus(1, "a"), "a"))
    world.tell(world.says.admit(gpus(1, "a"), "a"))
    world.view.expect(other.node, asked(gpus(1, "b"), "b"))
    before = world.scheduler.prioritize(asked(gpus(1, "new")), names)
    world.tell(other.admit(gpus(1, "b"), "b"))

    assert [10, 9] == before
    assert [10, 10] == world.scheduler.prioritize(asked(gpus(1, "new")), names)


async def test_alike_pods_come_in_one_order() -> None:
    """S05. So any number of them are bound beside one another, as far as they fit."""
    world = node()
    refusals = []
    for number in range(4):
        refusals.append(await world.scheduler.fits_in_every_order(NODE, asked(gpus(1, f"p{number}"), f"p{number}")))
        world.view.expect(NODE, asked(gpus(1, f"p{number}"), f"p{number}"))
    full = await world.scheduler.fits_in_every_order(NODE, asked(gpus(1, "p4"), "p4"))
    more = await world.scheduler.fits_in_every_order(NODE, asked(gpus(0, "p5"), "p5"))

    assert ([""] * 4, "") == (refusals, more)
    assert "NotEnoughDevices" == full


async def test_pods_that_differ_wait_where_they_may_come_in_too_many_orders() -> None:
    world = node(msgspec.structs.replace(RULES, cpu_manager="static", reserved_cpus="0"))
    found = []
    for number in range(5):
        waits = asked(pod(container("main", cpus=1, gib=number + 1), name=f"p{number}"), f"p{number}")
        found.append(await world.scheduler.fits_in_every_order(NODE, waits))
        world.view.expect(NODE, waits)

    assert ["", "", "", "", "PodsPending"] == found


async def test_what_is_reserved_for_the_pod_itself_does_not_keep_it_out() -> None:
    world = node()
    world.view.reserve(NODE, [hold("a", "GPU-0", "GPU-1", "GPU-2", "GPU-3")])

    assert "" == await world.scheduler.fits_in_every_order(NODE, asked(gpus(4), "a"))


async def test_a_refusal_waits_until_the_node_reports_whose_containers_run() -> None:
    """S15. b gets what is reserved for a, which asks for the same. Until that is reported, b holds GPU-2 and GPU-3, too."""
    world = node()
    devices = {"a": ("GPU-0", "GPU-1"), "b": ("GPU-2", "GPU-3")}
    held = [reservation(uid, reserved(*ids, name="c0"), uid=uid) for uid, ids in devices.items()]
    world.view.reserve(NODE, held)
    world.view.expect(NODE, asked(gpus(2, "b"), "b"))
    given = Allocation(id=AllocationID("1"), devices={GPU: (DeviceID("GPU-0"), DeviceID("GPU-1"))})
    world.tell([world.says.grant(given)])
    unknown = await world.scheduler.fits_in_every_order(NODE, asked(gpus(2), "a"))
    world.tell([world.says.bind(given.id, owner("b", "c0"), "b")])
    known = await world.scheduler.fits_in_every_order(NODE, asked(gpus(2), "a"))
    too_many = await world.scheduler.fits_in_every_order(NODE, asked(gpus(3), "a"))

    assert ("PodsPending", "", "NotEnoughDevices") == (unknown, known, too_many)


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_what_is_held_is_what_the_kubelet_gives_in_that_order(first: int) -> None:
    """Each node says of other pods what it says once it has admitted those that are bound, and shows it or a part of it."""
    held = 0
    for seed in range(first, first + 20):
        chance, cluster = Random(seed), Cluster(usage=True)
        scheduler, says = scheduler_of(cluster), some_says(chance, NODE, Shapes())
        tell_all(cluster, says.all())
        bound = [some_request(chance, says.hardware, f"b{number}") for number in range(3)]
        others = [some_request(chance, says.hardware, f"o{number}") for number in range(8)]
        for number, each in enumerate(bound):
            scheduler.view.expect(says.node, asked(each, f"uid-{number}"))
        before = [codes(scheduler.filter(asked(each), (says.node,))) for each in others]
        held += len(set(before)) > 1
        for number, each in enumerate(bound):
            facts = list(says.admit(each, f"uid-{number}", bound=chance.random() < 0.7))
            for fact in facts if chance.random() < 0.5 else ():
                tell_all(cluster, [fact])
                scheduler.view.renew()
            tell_all(cluster, facts)
            assert before == [codes(scheduler.filter(asked(each), (says.node,))) for each in others], (seed, number)

    assert held


def codes(filtered: Filtered) -> str:
    """The code of the one refusal; empty: there is none."""
    return next((each.code for each in filtered.refused.values()), "")
