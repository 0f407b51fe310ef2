"""Nodes that topoalign does not run: by a label of the Node, or by a setting all those of which nothing was published."""

import httpx
import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import container, pod
from registry_support import World
from view_support import NODE, asked

from topoalign.core.demand.share_annotations import REGISTER
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.scheduling.cluster_state.reported_pods import MANAGED
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, Victims
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
OTHER = NodeName("nvidia-node")
TWO = asked(pod(container("main", gpus=2)))


@pytest.fixture
def world() -> World:
    world = World()
    world.kubernetes.add_node(NODE)
    return world


def passing(world: World) -> World:
    """A registry whose setting lets unknown nodes pass."""
    world.settings = msgspec.structs.replace(world.settings, unknown_nodes="pass")
    return world


async def label(world: World, node: str, managed: str | None) -> None:
    world.kubernetes.nodes.merge(("", node), {"metadata": {"labels": {MANAGED: managed}}})
    await all_tasks_blocked()


def code(scheduling: SchedulingService, node: NodeName = OTHER, pod: PodToSchedule = TWO) -> str:
    return next((each.code for each in scheduling.scheduler.filter(pod, (node,)).refused.values()), "")


async def bind(world: World, url: str, name: str, node: str = OTHER, uid: str = "") -> str:
    """What the scheduler is answered; empty: ok."""
    uid = uid or world.kubernetes.pods.get(("ml", name))["metadata"]["uid"]
    body = {"PodName": name, "PodNamespace": "ml", "PodUID": uid, "Node": node}
    async with httpx.AsyncClient() as client:
        answer = (await client.post(f"{url}/scheduler/bind", json=body)).json()
    await all_tasks_blocked()
    return str(answer["Error"])


def node_of(world: World, name: str) -> str | None:
    node: str | None = world.kubernetes.pods.get(("ml", name))["spec"].get("nodeName")
    return node


async def test_a_labelled_node_passes_every_call_beside_a_managed_one(world: World) -> None:
    """More pods than the managed node would take: what they get there is not counted."""
    world.kubernetes.add_node(OTHER)
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        await world.rounds()
        unlabelled = code(scheduling)
        await label(world, OTHER, "false")
        bound = []
        for number in range(3):
            world.kubernetes.add_pod(shown_pod(f"p-{number}", gpus=4))
            await all_tasks_blocked()
            bound.append(await bind(world, url, f"p-{number}"))
        wanted = {OTHER: Victims(uids=("v",), disruptions=1)}

        assert ("UnknownNode", "", "") == (unlabelled, code(scheduling), code(scheduling, NODE))
        assert (0, True) == ((scores := scheduling.scheduler.prioritize(TWO, (OTHER, NODE)))[0], scores[1] > 0)
        assert wanted == await scheduling.scheduler.preempt(TWO, wanted)
        assert ([""] * 3, [OTHER] * 3) == (bound, [node_of(world, f"p-{number}") for number in range(3)])
        assert () == scheduling.reservations.held(OTHER)


@pytest.mark.parametrize("value", ["true", "False", ""])
async def test_other_values_of_the_label_let_nothing_pass(world: World, value: str) -> None:
    world.kubernetes.add_node(OTHER, {MANAGED: value})
    async with world.registry() as (scheduling, _):
        await world.rounds()

        assert "UnknownNode" == code(scheduling)


async def test_a_bind_to_an_unmanaged_node_looks_for_this_very_pod(world: World) -> None:
    """A pod with another UID, one that is gone, and a node that Kubernetes does not have."""
    world.kubernetes.add_node(OTHER, {MANAGED: "false"})
    async with passing(world).registry() as (_, url):
        await world.rounds()
        world.kubernetes.add_pod(shown_pod("p"))
        await all_tasks_blocked()
        answers = [
            await bind(world, url, "p", uid="another"),
            await bind(world, url, "gone", uid="u"),
            await bind(world, url, "p", "no-node"),
        ]

        assert ["PodGone", "PodGone", "NodeNotAllowed"] == [answer.partition(":")[0] for answer in answers]
        assert node_of(world, "p") is None


async def test_by_the_setting_nodes_pass_of_which_nothing_was_published(world: World) -> None:
    """Not before the registry has caught up, nor a node whose allocator does not answer any more, nor one of HAMi's."""
    world.kubernetes.add_node(OTHER)
    await world.say(*world.says.all())
    async with passing(world).registry() as (scheduling, url):
        world.kubernetes.add_pod(shown_pod("p"))
        await all_tasks_blocked()
        early = await bind(world, url, "p")
        await world.rounds()
        unknown, stale, gone = code(scheduling), code(scheduling, NODE), code(scheduling, NodeName("no-node"))
        late = await bind(world, url, "p")
        world.kubernetes.nodes.merge(("", OTHER), {"metadata": {"annotations": {REGISTER: "GPU-1,1,1,1,V,0,true:"}}})
        world.kubernetes.nodes.merge(("", OTHER), {"status": {"allocatable": {"nvidia.com/gpu": "1"}}})
        await all_tasks_blocked()

        assert ("", "NodeStale", "UnknownNode") == (unknown, stale, gone)
        assert (True, "") == (early != "", late)
        assert "ForeignNode" == code(scheduling)


async def test_a_labelled_node_is_managed_while_anything_is_known_of_it(world: World) -> None:
    """Also while its allocator does not answer, for example during a roll-out. This is noted until the label is gone."""
    await world.say(*world.says.all())
    world.kubernetes.add_node(OTHER, {MANAGED: "false"})
    full = asked(pod(container("main", gpus=8)))
    async with world.registry() as (scheduling, _):
        async with world.allocator(world.says):
            await world.rounds()
            await label(world, NODE, "false")
            await world.say(world.says.usage())
            await world.rounds(2)
            answering, note = code(scheduling, NODE, full), world.context.notes["managed"]()
        await world.rounds(3)
        away = code(scheduling, NODE, full)
        await label(world, NODE, None)

        assert ("NotEnoughDevices", "NodeStale") == (answering, away)
        assert note is not None
        assert NODE in note
        assert world.context.notes["managed"]() is None


async def test_a_pod_of_a_gang_goes_only_to_managed_nodes(world: World) -> None:
    """Elsewhere nothing can be reserved for the gang as a whole."""
    world.kubernetes.add_node(OTHER, {MANAGED: "false"})
    member = shown_pod("p")
    member["metadata"]["annotations"] |= {GANG: "g", GANG_SIZE: "1"}
    world.kubernetes.add_pod(member)
    async with world.registry() as (scheduling, url):
        await world.rounds()
        annotated = msgspec.structs.replace(TWO.request, annotations={GANG: "g", GANG_SIZE: "1"})

        assert "UnknownNode" == code(scheduling, OTHER, msgspec.structs.replace(TWO, request=annotated))
        assert (await bind(world, url, "p")).startswith("GangWaits")
