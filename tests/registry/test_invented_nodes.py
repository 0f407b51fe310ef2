"""Names of nodes that a message on the bus or a caller invents: how many a registry keeps, and what becomes of its own."""

import httpx
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from fact_support import Writer, reservation
from fact_support import reserved_container as reserved
from registry_support import World
from view_support import NODE, RULES, Says, asked

from topoalign.client import superseded
from topoalign.core import wire
from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.ports import Message
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
MOST = 10
INVENTED = [f"invented-{number}" for number in range(10 * MOST)]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(superseded, "MOST_UNKNOWN_NODES", MOST)
    return World()


def sizes(scheduling: SchedulingService) -> dict[str, int]:
    """Of all that is kept by names of nodes, once what came last was looked at."""
    view, known = scheduling.view, scheduling.reservations
    view.renew()
    return {
        "cluster": len(scheduling._cluster.nodes),
        "view": len(view.nodes),
        "places": view.size,
        "due": len(view._due),
        "deleted": len(view._deleted),
        "holds": len(view._pods),
        "reservations": len(known._known),
        "ended": len(known._ended),
        "reserved": len(view.reserved_on),
    }


def most(name: str) -> int:
    """Of reservations those of the strangers of the cluster count, and beside them those of nodes that said nothing."""
    return MOST + 1 if name in ("cluster", "view", "places", "changed", "due") else 2 * MOST


def reserving(name: str, uid: str = "") -> ReservationsChanged:
    pods = (reservation(name, reserved("GPU-0"), seconds=600.0, uid=uid),)
    return ReservationsChanged(
        node=NodeName(name), epoch=1, seq=1, writer="forged", reservations=pods, made=(pods[0].pod_uid,)
    )


async def test_of_invented_nodes_a_registry_keeps_few(world: World) -> None:
    """They have hardware, allocations and reservations, and nobody answers for them."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        for name in INVENTED:
            await world.say(*Says(name, machine(), RULES).all(), reserving(name))
            await world.bus.publish(
                Message(subject=wire.reservation_subject(NodeName(f"{name}-unreadable")), headers={}, body=b"{")
            )
        found = sizes(scheduling)
        await world.rounds(2)
        later = sizes(scheduling)
        told = world.context.metrics.get_sample_value("topoalign_registry_unknown_nodes_forgotten_total")

        assert [] == [name for some in (found, later) for name, size in some.items() if size > most(name)], found
        assert {"cluster": MOST + 1, "view": MOST + 1, "reservations": 2 * MOST}.items() <= found.items()
        assert (NODE in scheduling.view.nodes, len(INVENTED) - MOST) == (True, told)


async def test_what_is_reserved_on_a_node_that_answers_outlasts_invented_ones(world: World) -> None:
    uid = str(world.kubernetes.add_pod(shown_pod("p", gpus=1))["metadata"]["uid"])
    await world.say(*world.says.all(), reserving(NODE, uid))
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        for name in INVENTED:
            await world.say(reserving(name))
        await world.rounds(2)

        assert [uid] == [each.pod_uid for each in scheduling.reservations.held(NODE)]
        assert len(scheduling.reservations._known) <= MOST + 1


async def test_a_forgotten_node_has_what_was_reserved_when_it_comes_back(world: World) -> None:
    """Its facts were dropped as those of a stranger, its reservation was not, as few are."""
    uid = str(world.kubernetes.add_pod(shown_pod("p", gpus=1))["metadata"]["uid"])
    await world.say(*world.says.all(), reserving(NODE, uid))
    async with world.registry() as (scheduling, _):
        await world.rounds()
        for name in INVENTED:
            await world.say(Writer(name).snapshot())
        await world.rounds()
        forgotten = NODE not in scheduling.view.nodes
        async with world.allocator(world.says):
            await world.say(world.says.topology(), world.says.health(), world.says.snapshot(), world.says.usage())
            await world.rounds(2)

            assert (True, True) == (forgotten, NODE in scheduling.view.nodes)
            assert [uid] == [each.pod_uid for each in scheduling.reservations.held(NODE)]


async def test_of_nodes_that_a_caller_invents_nothing_is_kept(world: World) -> None:
    """In a filter, as a whole Node, in a bind and in the read API; requests with a body of their own each."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url), httpx.AsyncClient() as http:
        await world.rounds()
        before = sizes(scheduling)
        for name in INVENTED:
            question = asked(pod(container("main", gpus=2)))
            labels = {NodeName(name): {"topoalign.io/machine": name}}
            scheduling.scheduler.filter(question, [NodeName(name)], labels)
            scheduling.scheduler.prioritize(question, [NodeName(name)])
            with pytest.raises(TopoalignError):
                await scheduling.bind("ml", "p", "u", NodeName(name))
        body = {"Pod": {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": []}}, "NodeNames": INVENTED}
        answer = (await http.post(f"{url}/scheduler/filter", json=body)).json()
        await all_tasks_blocked()

        assert INVENTED == [*answer["FailedAndUnresolvableNodes"]]
        assert before == sizes(scheduling)
