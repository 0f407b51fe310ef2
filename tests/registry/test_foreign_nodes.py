"""Nodes that HAMi runs: a registry shows them from their annotations and offers them to no pod, until HAMi is gone."""

from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import container, pod
from registry_support import World
from starlette.applications import Starlette
from structlog.testing import capture_logs
from view_support import NODE, asked

from topoalign.client.stored_records import read_cluster
from topoalign.core.demand.share_annotations import DEVICES_ALLOCATED, HANDSHAKE, REGISTER
from topoalign.core.diagnosis.diagnosis import diagnose
from topoalign.core.diagnosis.node_decisions import Nodes
from topoalign.core.model.decisions import Resolvability
from topoalign.core.model.ids import NodeName
from topoalign.core.scoring.quality import NodePacking
from topoalign.core.scoring.scorers import Scoring, scorer_by_name
from topoalign.core.sharing.hami.node_annotations import REQUESTING
from topoalign.core.sharing.hami.registration import RegisteredGpu
from topoalign.registry.api import Api
from topoalign.registry.foreign_nodes import LOOK_SECONDS
from topoalign.registry.scheduling.binding.binding import NodeRefuses
from topoalign.registry.scheduling.filter.node_templates import INSTANCE_TYPE
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, Victims
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.runtime.clock import SystemClock
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
OTHER = NodeName("hami-node")
TWO = asked(pod(container("main", gpus=2)))
CARD = RegisteredGpu(id="GPU-h0", slots=10, memory=81559, cores=100, type="NVIDIA H100", healthy=True)
TEXT = msgspec.json.encode([CARD, msgspec.structs.replace(CARD, id="GPU-h1", index=1, numa=1)]).decode()
OLD_TEXT = "GPU-h0,10,16384,100,NVIDIA-V100,0,true:GPU-h1,10,16384,100,NVIDIA-V100,1,false:"


@pytest.fixture
def world() -> World:
    world = World()
    world.kubernetes.add_node(NODE)
    return world


async def annotate(world: World, node: str = NODE, allocatable: int = 20, **annotations: str | None) -> None:
    """As HAMi, or who deletes what it wrote (None), changes a Node. Names: `register`, `handshake`."""
    keys = {"register": REGISTER, "handshake": HANDSHAKE}
    said = {keys[name]: text for name, text in annotations.items()}
    patch: dict[str, Any] = {"metadata": {"annotations": said}}
    patch["status"] = {"allocatable": {"nvidia.com/gpu": str(allocatable)}}
    world.kubernetes.nodes.merge(("", node), patch)
    await all_tasks_blocked()


async def add_hami_node(world: World, register: str = TEXT) -> None:
    world.kubernetes.add_node(OTHER)
    await annotate(world, OTHER, register=register, handshake=ago(world, 5))


def hami_pod(name: str, text: str, node: str) -> dict[str, Any]:
    shown = shown_pod(name, node=node)
    shown["metadata"]["annotations"] = {DEVICES_ALLOCATED: text}
    return shown


def ago(world: World, seconds: float) -> str:
    """The handshake as HAMi's scheduler wrote it so long ago."""
    return f"{REQUESTING}_{datetime.fromtimestamp(world.clock.wall() - seconds, UTC):%Y-%m-%d %H:%M:%S}"


def verdict(scheduling: SchedulingService, node: NodeName = NODE, asked: PodToSchedule = TWO) -> str:
    return next((each.code for each in scheduling.scheduler.filter(asked, (node,)).refused.values()), "")


async def get(world: World, scheduling: SchedulingService, path: str) -> Any:
    api = Api(scheduling._cluster, world.clock, world.bus, scheduling.foreign)
    transport = httpx.ASGITransport(Starlette(routes=[api.mount()]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        return (await client.get(path)).json()


def metric(world: World, contested: bool) -> float | None:
    labels = {"by": "hami", "contested": str(contested).lower()}
    return world.context.metrics.get_sample_value("topoalign_registry_foreign_nodes", labels)


@pytest.mark.parametrize("register", [TEXT, OLD_TEXT])
async def test_a_node_of_hami_is_shown_and_not_offered(world: World, register: str) -> None:
    """Its cards, who holds how much of them, and that it is foreign; a pod is refused with a reason of its own."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await add_hami_node(world, register)
        world.kubernetes.add_pod(hami_pod("p", "GPU-h1,NVIDIA,4096,20:;", OTHER))
        await all_tasks_blocked()
        listed = (await get(world, scheduling, "/v1/nodes"))["items"]
        shown = (await get(world, scheduling, f"/v1/nodes/{OTHER}"))["hami"]

        assert ("ForeignNode", "") == (verdict(scheduling, OTHER), verdict(scheduling))
        assert [(OTHER, "hami", 2, 2, 1, False), (NODE, None, 4, 2, 0, False)] == [
            tuple(each.get(key) for key in ("name", "foreign", "gpus", "numa_nodes", "allocations", "stale"))
            for each in listed
        ]
        assert ("live", "", ["GPU-h0", "GPU-h1"]) == (
            shown["liveness"], shown["finding"], [card["uuid"] for card in shown["gpus"]],
        )  # fmt: skip
        (holder,) = shown["gpus"][1]["holders"]
        assert ("ml", "p", ["main"], 4096, 20) == tuple(
            holder[key] for key in ("namespace", "pod", "containers", "memory", "cores")
        )
        assert (1.0, 0.0) == (metric(world, False), metric(world, True))


async def test_pages_of_nodes_have_those_of_hami_among_the_others(world: World) -> None:
    await world.say(*world.says.all())
    async with world.registry() as (scheduling, _):
        for name in ("a", "z"):
            world.kubernetes.add_node(name)
            await annotate(world, name, register=TEXT)
        names, token = [], ""
        while token is not None:
            page = await get(world, scheduling, f"/v1/nodes?limit=1{token and '&continue=' + token}")
            names += [each["name"] for each in page["items"]]
            token = page["continue"]

        assert ["a", NODE, "z"] == names
        assert "hami" not in await get(world, scheduling, f"/v1/nodes/{NODE}")


async def test_a_whole_node_of_hami_is_not_judged_by_its_labels(world: World) -> None:
    """Its labels are those of a node that topoalign runs: without HAMi it would count as one that is to come."""
    labels = {INSTANCE_TYPE: "p5"}
    world.kubernetes.nodes.merge(("", NODE), {"metadata": {"labels": labels}})
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        without = scheduling.scheduler.filter(TWO, (OTHER,), {OTHER: labels}).refused
        await add_hami_node(world)
        refused = scheduling.scheduler.filter(TWO, (OTHER,), {OTHER: labels}).refused

        assert ({}, "ForeignNode") == (without, refused[OTHER].code)
        assert {} == await scheduling.scheduler.preempt(TWO, {OTHER: Victims(uids=())})


async def test_two_that_give_out_the_same_cards_are_told_and_not_offered(world: World) -> None:
    """An agent starts where HAMi's plugin runs; then what HAMi wrote is deleted."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        alone = verdict(scheduling)
        with capture_logs() as logs:
            await annotate(world, register=TEXT, handshake=ago(world, 5))
            await annotate(world, register=OLD_TEXT, handshake=ago(world, 1))
        both, counted = verdict(scheduling), metric(world, True)
        listed = (await get(world, scheduling, "/v1/nodes"))["items"]
        await annotate(world, register=None, handshake=None)

        assert ("", "ContestedNode", "") == (alone, both, verdict(scheduling))
        assert (1.0, 0.0) == (counted, metric(world, True))
        assert [(NODE, "hami", 4)] == [(each["name"], each["foreign"], each["gpus"]) for each in listed]
        assert 1 == sum(line["log_level"] == "warning" for line in logs)


async def test_a_node_without_an_answering_agent_is_foreign_again(world: World) -> None:
    """It is moved back: HAMi runs it, and the agent of topoalign is gone."""
    await world.say(*world.says.all())
    async with world.registry() as (scheduling, _):
        await annotate(world, register=TEXT)
        async with world.allocator(world.says):
            await world.rounds()
            answering = verdict(scheduling)
        await world.rounds()

        assert ("ContestedNode", "ForeignNode") == (answering, verdict(scheduling))


async def test_a_handshake_that_times_out_gives_the_node_free(world: World) -> None:
    """A minute after HAMi's scheduler has asked, where the kubelet has no card to allocate; nobody tells of that."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await annotate(world, register=TEXT, handshake=ago(world, 0), allocatable=4)
        await world.clock.advance(60 + LOOK_SECONDS)
        has_cards = verdict(scheduling)
        await annotate(world, register=TEXT, handshake=ago(world, 0), allocatable=0)
        young = verdict(scheduling)
        for _ in range(10):
            await world.clock.advance(8)
            await all_tasks_blocked()

        assert ("ContestedNode", "ContestedNode", "") == (has_cards, young, verdict(scheduling))


async def test_a_handshake_at_the_end_of_time_is_a_young_one(world: World) -> None:
    """Whoever may change a Node wrote it: the registry goes on, and HAMi has the node."""
    await world.say(*world.says.all())
    async with world.registry() as (scheduling, _):
        await add_hami_node(world)
        await annotate(world, OTHER, allocatable=0, handshake="Requesting_9999-12-31 23:59:59")
        await world.clock.advance(2 * LOOK_SECONDS)
        shown = (await get(world, scheduling, f"/v1/nodes/{OTHER}"))["hami"]

        assert ("ForeignNode", "live") == (verdict(scheduling, OTHER), shown["liveness"])


async def test_a_pod_of_hami_keeps_the_node_although_hami_is_gone(world: World) -> None:
    """Its container has a part of a card, which the agent does not know: the card would be given out whole."""
    await world.say(*world.says.all())
    world.kubernetes.add_pod(hami_pod("old", "GPU-h0,NVIDIA,1024,10:;", NODE))
    world.kubernetes.add_pod(hami_pod("odd", "GPU-h0,NVIDIA,x,10:;", NODE))
    world.kubernetes.add_pod(hami_pod("none", ";;", NODE))
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await annotate(world, register=TEXT, handshake="Deleted_2026.01.02 03:04:05")
        codes = [verdict(scheduling)]
        world.kubernetes.set_status("ml", "old", phase="Succeeded")
        await all_tasks_blocked()
        codes.append(verdict(scheduling))
        world.kubernetes.delete_pod("ml", "odd", grace=0)
        await all_tasks_blocked()

        assert (["ContestedNode", "ContestedNode"], "") == (codes, verdict(scheduling))


async def test_a_pod_is_not_bound_to_a_node_that_hami_runs(world: World) -> None:
    """The scheduler chose it a moment before; nothing is reserved there."""
    await world.say(*world.says.all())
    uid = str(world.kubernetes.add_pod(shown_pod("p", gpus=2))["metadata"]["uid"])
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await annotate(world, register=TEXT)
        with pytest.raises(NodeRefuses) as raised:
            await scheduling.bind("ml", "p", uid, NODE)

        assert ("ContestedNode", ()) == (raised.value.reason, scheduling.reservations.held(NODE))
        assert "nodeName" not in world.kubernetes.pods.get(("ml", "p"))["spec"]
        assert [] == await scheduling.scheduler.best(TWO, NODE)
        assert scheduling._candidate(NODE) is None


@pytest.mark.parametrize(
    "register", ["{", "x" * 2_000_000, msgspec.json.encode([msgspec.structs.replace(CARD, slots=10**9)]).decode()]
)
async def test_cards_that_cannot_be_read_are_told_once(world: World, register: str) -> None:
    """The node is HAMi's all the same."""
    await world.say(*world.says.all())
    with capture_logs() as logs:
        async with world.allocator(world.says), world.registry() as (scheduling, _):
            await world.rounds()
            await add_hami_node(world, register)
            for _ in range(3):
                await annotate(world, OTHER, register=register + " ", handshake=ago(world, 1))
                await annotate(world, OTHER, register=register, handshake=ago(world, 2))
            shown = (await get(world, scheduling, f"/v1/nodes/{OTHER}"))["hami"]
            code = verdict(scheduling, OTHER)
            await annotate(world, OTHER, register=TEXT)
            mended = (await get(world, scheduling, f"/v1/nodes/{OTHER}"))["hami"]

    assert ("ForeignNode", [], 2, "") == (code, shown["gpus"], len(mended["gpus"]), mended["finding"])
    assert REGISTER in shown["finding"] and len(shown["finding"]) < 500
    assert 1 == sum(line["log_level"] == "warning" and "cannot be read" in line["event"] for line in logs)


async def test_a_deleted_node_of_hami_is_shown_no_more(world: World) -> None:
    async with world.registry() as (scheduling, _):
        await add_hami_node(world)
        world.kubernetes.add_pod(hami_pod("p", "GPU-h1,NVIDIA,4096,20:;", OTHER))
        await all_tasks_blocked()
        before = (await get(world, scheduling, "/v1/nodes"))["items"]
        world.kubernetes.nodes.remove(("", OTHER))
        await all_tasks_blocked()

        assert (1, []) == (len(before), (await get(world, scheduling, "/v1/nodes"))["items"])
        assert "NotFound" == (await get(world, scheduling, f"/v1/nodes/{OTHER}"))["code"]
        assert 0.0 == metric(world, False)


async def test_why_counts_nodes_of_hami_with_a_reason_of_their_own(world: World) -> None:
    """It asks the registry over the bus, because it has no access to Kubernetes."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry():
        await world.rounds()
        await add_hami_node(world)
        await annotate(world, register=TEXT)
        record = await read_cluster(world.bus, SystemClock())
        answer = diagnose(Nodes(record), TWO.request, scorer_by_name(Scoring.QUALITY, NodePacking.BINPACK))
        one = await read_cluster(world.bus, SystemClock(), OTHER)

    assert [("ContestedNode", Resolvability.FOREIGN, (NODE,)), ("ForeignNode", Resolvability.FOREIGN, (OTHER,))] == [
        (each.code, each.resolvability, each.examples) for each in answer.reasons
    ]
    assert [(OTHER, "ForeignNode")] == [(each.node, each.foreign) for each in one.nodes]


async def test_without_a_registry_no_node_is_foreign(world: World) -> None:
    await world.say(*world.says.all())
    async with world.allocator(world.says):
        record = await read_cluster(world.bus, SystemClock())

    assert [""] == [each.foreign for each in record.nodes]
