"""The scheduler's side of a whole registry, on a bus: when it answers, and what it says after streams were lost or mixed."""

from collections.abc import Mapping

import httpx
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from registry_support import World
from view_support import NODE, RULES, Says, asked

from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.ports import Stream
from topoalign.registry.ports import NotReadYet
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.registry.service import PAUSE
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio

POD = asked(pod(container("main", gpus=2)))
BODY = {
    "Pod": {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "2"}}}]},
    },
    "Nodes": None,
    "NodeNames": [NODE, "ghost"],
}


@pytest.fixture
def world() -> World:
    return World()


def code(scheduling: SchedulingService) -> str:
    """Of the node's refusal; empty: the pod fits."""
    return next((each.code for each in scheduling.scheduler.filter(POD, (NODE,)).refused.values()), "")


async def test_a_scheduler_is_answered_once_every_node_was_read_and_asked(world: World) -> None:
    """A refusal before that would let pods wait for minutes, an error is repeated at once."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        early = world.context.checks["scheduler"]()
        with pytest.raises(NotReadYet):
            scheduling.scheduler.filter(POD, (NODE,))
        await world.clock.advance(PAUSE)
        await all_tasks_blocked()
        async with httpx.AsyncClient() as client:
            answer = (await client.post(f"{url}/scheduler/filter", json=BODY)).json()

    assert early is not None
    assert ([NODE], ["ghost"]) == (answer["NodeNames"], list(answer["FailedAndUnresolvableNodes"]))


async def test_a_twin_is_told_and_not_offered_until_one_is_alone(world: World) -> None:
    """C43: a second agent begins under the node's name, with a journal of its own; then it is stopped."""
    await world.say(*world.says.all())
    twin = Says(NODE, machine(), RULES, epoch=9)
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        alone = code(scheduling)
        await world.say(twin.snapshot())
        await world.say(*world.says.admit(pod(container("main", gpus=1)), "a"))
        twins = code(scheduling)
        facts = world.context.metrics.get_sample_value("topoalign_registry_duplicate_agents_total")
        await world.rounds(4)

        assert ("", "DuplicateAgent", "") == (alone, twins, code(scheduling))
        assert facts is not None and facts >= 1
        assert world.says.state.digest == scheduling.view.facts(NODE).digest


async def test_a_node_whose_allocations_become_certain_is_offered_at_once(
    world: World,
) -> None:
    """Pods that it could take wait for that: the scheduler asks about them when the node is offered again."""
    await world.say(*world.says.all())
    twin = Says(NODE, machine(), RULES, epoch=9)
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await world.say(twin.snapshot())
        await world.say(*world.says.admit(pod(container("main", gpus=1)), "a"))
        uncertain = scheduling.view.nodes[NODE].refusal
        offered = list[NodeName]()
        scheduling.view._offered = offered.append
        await world.rounds(4)

        assert "DuplicateAgent" == uncertain
        assert ([NODE], "") == (offered, scheduling.view.nodes[NODE].refusal)


@pytest.mark.parametrize("stream", [Stream.ALLOCATIONS, Stream.NODES])
async def test_a_stream_that_is_emptied_costs_the_view_nothing(world: World, stream: Stream) -> None:
    """C38: what was read stays, and what the node says next is received."""
    await world.say(*world.says.all(), *world.says.admit(pod(container("main", gpus=2)), "a"))
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        before = code(scheduling)
        await world.bus.forget(stream, ">")
        emptied = code(scheduling)
        await world.say(*world.says.admit(pod(container("main", gpus=2)), "b"))
        await world.rounds(2)
        full = code(scheduling)
        await world.say(*world.says.end("a"))
        await world.rounds(2)

        assert ("", "", "NotEnoughDevices", "") == (before, emptied, full, code(scheduling))
        assert world.says.state.digest == scheduling.view.facts(NODE).digest


async def test_a_bound_pod_is_held_until_its_node_shows_it(world: World) -> None:
    """First by its reservation, then because Kubernetes shows the Binding; and it is gone when it is deleted."""
    await world.say(*world.says.all())
    world.kubernetes.add_node(NODE)
    uid = str(world.kubernetes.add_pod(shown_pod("p", gpus=4))["metadata"]["uid"])
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        free = code(scheduling)
        await scheduling.bind("ml", "p", uid, NODE)
        await all_tasks_blocked()
        bound = code(scheduling)
        await world.say(*world.says.admit(pod(container("main", gpus=4), name="p"), uid))
        await world.rounds()
        reserved, shown = scheduling.reservations.held(NODE), code(scheduling)
        world.kubernetes.delete_pod("ml", "p", grace=0)
        await world.say(*world.says.end(uid))

        assert ("", "NotEnoughDevices", (), "NotEnoughDevices", "") == (free, bound, reserved, shown, code(scheduling))


async def test_what_is_reserved_for_a_pod_that_is_gone_is_free_at_a_start(world: World) -> None:
    """It was deleted while no registry was there: nobody tells of it any more."""
    container = ReservedContainer(container=ContainerName("main"), devices={GPU: tuple(world.says.hardware.gpu_by_id)})
    gone = Reservation(
        pod_uid="gone", namespace=Namespace("ml"), pod=PodName("p"), containers=(container,), seconds_left=300.0
    )
    said = ReservationsChanged(node=NODE, epoch=1, seq=1, writer="r0", reservations=(gone,), made=("gone",))
    await world.say(*world.says.all(), said)
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()

        assert ((), "") == (scheduling.reservations.held(NODE), code(scheduling))


async def test_a_pod_that_another_scheduler_binds_is_held_as_predicted(world: World) -> None:
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        world.kubernetes.add_pod(shown_pod("theirs", gpus=4, node=NODE))
        await all_tasks_blocked()
        bound = code(scheduling)
        world.kubernetes.set_status("ml", "theirs", phase="Failed", reason="TopologyAffinityError")
        await all_tasks_blocked()

        assert ("NotEnoughDevices", "") == (bound, code(scheduling))


async def test_pods_of_a_planned_gang_pass_on_their_own_nodes(world: World) -> None:
    """Each passes on one node from the first bind on, and is bound there; others see what is left."""
    other, annotations = Says("node-2", machine(), RULES), {GANG: "g", GANG_SIZE: "3"}
    requests: dict[str, PodToSchedule] = {}
    for name in ("a", "b", "c"):
        shown = shown_pod(name, gpus=2)
        shown["metadata"]["annotations"] |= annotations
        request = pod(container("main", gpus=2), name=name, annotations=annotations)
        uid = str(world.kubernetes.add_pod(shown)["metadata"]["uid"])
        requests[name] = PodToSchedule(uid=uid, request=request)
    for node in (NODE, other.node):
        world.kubernetes.add_node(node)
    await world.say(*world.says.all(), *other.all())
    async with world.allocator(world.says), world.allocator(other), world.registry() as (scheduling, _):
        await world.rounds()
        scheduler, nodes = scheduling.scheduler, (NODE, other.node)
        before = scheduler.filter(requests["b"], nodes).passed
        await scheduling.bind("ml", "b", requests["b"].uid, other.node)
        await all_tasks_blocked()
        planned = {name: scheduler.filter(requests[name], nodes) for name in ("a", "c")}
        for name, filtered in planned.items():
            (node,) = filtered.passed
            await scheduling.bind("ml", name, requests[name].uid, node)
        await all_tasks_blocked()

        assert nodes == (*before,)
        assert [*nodes] == sorted(filtered.passed[0] for filtered in planned.values())
        assert {"PlannedElsewhere"} == {each.code for told in planned.values() for each in told.refused.values()}
        assert all(each["spec"]["nodeName"] for each in world.kubernetes.pods)
        assert [NODE] == [*scheduler.filter(POD, nodes).passed]


async def test_a_gang_is_planned_on_nodes_that_its_pods_may_go_to(world: World) -> None:
    """The scheduler leaves out a node that is cordoned: a pod that were planned there would wait in vain."""
    others, annotations = [Says(f"node-{n}", machine(), RULES) for n in (0, 2)], {GANG: "g", GANG_SIZE: "2"}
    requests: dict[str, PodToSchedule] = {}
    for name in ("a", "b"):
        shown = shown_pod(name, gpus=4)
        shown["metadata"]["annotations"] |= annotations
        world.kubernetes.add_pod(shown)
        seen = await MemoryKubernetes(world.kubernetes).pod("ml", name)
        assert seen is not None
        requests[name] = seen.to_schedule()
    world.kubernetes.add_node(NODE)
    await world.say(*world.says.all(), *others[0].all(), *others[1].all())
    async with (
        world.allocator(world.says),
        world.allocator(others[0]),
        world.allocator(others[1]),
        world.registry() as run,
    ):
        await world.rounds()
        scheduler, nodes = run[0].scheduler, (NODE, others[1].node)
        scheduler.filter(requests["b"], nodes)
        await run[0].bind("ml", "b", requests["b"].uid, NODE)

        assert {others[1].node} == run[0].reservations.of_pod(requests["a"].uid).keys()


TAINT = {"key": "maintenance", "effect": "NoExecute", "value": "yes"}


@pytest.mark.parametrize(
    ("spec", "labels"),
    [({"unschedulable": True}, {}), ({"taints": [TAINT]}, {}), ({}, {"pool": "other"})],
    ids=["cordoned", "tainted", "another pool"],
)
async def test_a_gang_is_planned_by_a_registry_that_was_asked_no_filter(
    world: World, spec: Mapping[str, object], labels: Mapping[str, str]
) -> None:
    """Another replica was. What Kubernetes shows of pods and nodes leaves out what its scheduler leaves out."""
    others = [Says(f"node-{n}", machine(), RULES) for n in (0, 2)]
    uids: dict[str, str] = {}
    for name in ("a", "b"):
        shown = shown_pod(name, gpus=4)
        shown["metadata"]["annotations"] |= {GANG: "g", GANG_SIZE: "2"}
        shown["spec"]["nodeSelector"] = {"pool": "gpu"}
        uids[name] = str(world.kubernetes.add_pod(shown)["metadata"]["uid"])
    for node in (NODE, others[0].node, others[1].node):
        world.kubernetes.add_node(node, {"pool": "gpu"})
    world.kubernetes.nodes.merge(("", others[0].node), {"metadata": {"labels": labels}, "spec": spec})
    await world.say(*world.says.all(), *others[0].all(), *others[1].all())
    async with (
        world.allocator(world.says),
        world.allocator(others[0]),
        world.allocator(others[1]),
        world.registry() as run,
    ):
        await world.rounds()
        await run[0].bind("ml", "b", uids["b"], NODE)

        assert {others[1].node} == run[0].reservations.of_pod(uids["a"]).keys()


async def test_waiting_pods_are_woken_when_a_node_is_offered(world: World) -> None:
    """Kubernetes shows nothing of it: a node that was away answers again."""
    world.kubernetes.add_node(NODE)
    world.kubernetes.add_pod(shown_pod("waiting"))
    await world.say(*world.says.all())
    async with world.registry() as (scheduling, _):
        await world.rounds()
        away = code(scheduling), woken(world)
        async with world.allocator(world.says):
            await world.rounds()

            assert (("NodeStale", []), "", ["NodeOffered"]) == (away, code(scheduling), woken(world))


def woken(world: World) -> list[str]:
    """Why pods were woken last."""
    annotations = (node["metadata"].get("annotations", {}) for node in world.kubernetes.nodes)
    return [each["topoalign.io/woken"].split()[0] for each in annotations if "topoalign.io/woken" in each]
