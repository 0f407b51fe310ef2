"""A whole registry with an API server: what it binds is reserved and held, and what Kubernetes shows ends it."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from registry_support import World
from view_support import NODE, RULES, Says, asked

from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import GoneObject, NotReadYet, SeenPod, Synced
from topoalign.registry.scheduling.binding.binding import RESERVED_SECONDS
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.registry.settings import RegistrySettings
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
TWO = asked(pod(container("main", gpus=2)))
FOUR = asked(pod(container("main", gpus=4)))


@pytest.fixture
def world() -> World:
    world = World()
    world.kubernetes.add_node(NODE)
    return world


@pytest.fixture
def cluster(world: World) -> FakeCluster:
    return world.kubernetes


async def bind(url: str, cluster: FakeCluster, name: str, node: str = NODE) -> str:
    """What the scheduler is answered; empty: ok."""
    uid = cluster.pods.get(("ml", name))["metadata"]["uid"]
    body = {"PodName": name, "PodNamespace": "ml", "PodUID": uid, "Node": node}
    async with httpx.AsyncClient() as client:
        answer = (await client.post(f"{url}/scheduler/bind", json=body)).json()
    await all_tasks_blocked()
    return str(answer["Error"])


def verdict(scheduling: SchedulingService, asked: PodToSchedule = TWO, node: NodeName = NODE) -> str:
    return next((each.code for each in scheduling.scheduler.filter(asked, (node,)).refused.values()), "")


async def test_what_is_bound_is_held_before_the_node_shows_it(world: World, cluster: FakeCluster) -> None:
    """Two pods take the four GPUs; a third one is refused although the node has said nothing yet."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        await world.rounds()
        answers = []
        for name in ("a", "b", "c"):
            cluster.add_pod(shown_pod(name, gpus=2))
            await all_tasks_blocked()
            answers.append((verdict(scheduling), await bind(url, cluster, name)))

        assert [("", ""), ("", "")] == answers[:2]
        assert "NotEnoughDevices" == answers[2][0]
        assert answers[2][1].startswith("NodeRefuses")
        assert [NODE, NODE, None] == [cluster.pods.get(("ml", name))["spec"].get("nodeName") for name in "abc"]


async def test_a_pod_that_the_node_refused_gives_back_what_was_reserved(world: World, cluster: FakeCluster) -> None:
    """C51: the registry learns at once, the next filter is right, and it is counted."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        await world.rounds()
        cluster.add_pod(shown_pod("a", gpus=4))
        await all_tasks_blocked()
        bound = await bind(url, cluster, "a")
        before = verdict(scheduling)
        cluster.set_status("ml", "a", phase="Failed", reason="TopologyAffinityError")
        await all_tasks_blocked()

        labels = {"reason": "TopologyAffinityError", "reserved": "true"}
        counted = world.context.metrics.get_sample_value("topoalign_registry_refused_pods_total", labels)
        assert ("", "NotEnoughDevices", "", 1) == (bound, before, verdict(scheduling), counted)
        assert () == scheduling.reservations.held(NODE)


async def test_pods_wait_for_a_reservation_that_ends_in_vain(world: World, cluster: FakeCluster) -> None:
    """The pod that it was for never comes: its kubelet says nothing. Those that wait are woken."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        await world.rounds()
        for name in ("a", "b"):
            cluster.add_pod(shown_pod(name, gpus=4))
        await all_tasks_blocked()
        await bind(url, cluster, "a")
        assert scheduling.watch is not None
        woken = scheduling.watch.requeue.done
        await world.clock.advance(RESERVED_SECONDS + 5)

        assert woken < scheduling.watch.requeue.done
        assert "topoalign.io/woken" in cluster.nodes.get(("", NODE))["metadata"]["annotations"]


class Slow(MemoryKubernetes):
    """An API server that lists pods when it is let to."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self.listing = anyio.Event()

    async def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        await self.listing.wait()
        async for each in super().pods():
            yield each


async def test_nothing_is_answered_before_pods_are_listed() -> None:
    """What is bound is not known before, and would be given away."""
    cluster = FakeCluster()
    cluster.add_pod(shown_pod("foreign", gpus=4, node=NODE))
    api = Slow(cluster)
    world = World(api)
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        early = world.context.checks["scheduler"]()
        with pytest.raises(NotReadYet):
            verdict(scheduling)
        api.listing.set()
        await all_tasks_blocked()

        assert "pods of Kubernetes are not listed yet" == early
        assert scheduling.watch is not None
        assert ("NotEnoughDevices", (1, 36)) == (verdict(scheduling), scheduling.watch.version)


def events(cluster: FakeCluster, name: str) -> list[tuple[str, str]]:
    """Reason and note of each Event about a pod, in their order."""
    found = sorted(cluster.events, key=lambda each: int(each["metadata"]["resourceVersion"]))
    return [(each["reason"], each["message"]) for each in found if each["involvedObject"]["name"] == name]


async def test_a_refused_pod_has_an_event_that_says_so(world: World, cluster: FakeCluster) -> None:
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry():
        await world.rounds()
        cluster.add_pod(shown_pod("a", gpus=4, node=NODE))
        await all_tasks_blocked()
        cluster.set_status("ml", "a", phase="Failed", reason="TopologyAffinityError")
        await all_tasks_blocked()

    told = "Node node-1 refused the pod (TopologyAffinityError); it was bound without a reservation"
    assert [("RefusedByNode", told)] == events(cluster, "a")


async def test_topology_objects_follow_what_nodes_say(cluster: FakeCluster, world: World) -> None:
    """Written once, then when something changes; for nodes of Kubernetes alone, to which they belong."""
    world.settings = RegistrySettings(scheduler_port=0, publish_topologies=True)
    elsewhere = Says("n2", machine(), RULES)
    await world.say(*world.says.all(), *elsewhere.all())
    async with world.allocator(world.says), world.allocator(elsewhere), world.registry() as (scheduling, _):
        await world.rounds(3)
        first = [*cluster.topologies]
        await world.say(world.says.usage())  # again the same
        await world.rounds(2)
        assert scheduling.topologies is not None
        unchanged = scheduling.topologies.written
        await world.say(*world.says.admit(pod(container("main", gpus=2)), "u"))
        await world.rounds(2)
        second = [*cluster.topologies]

    assert [NODE] == [each["metadata"]["name"] for each in first]
    uid = cluster.nodes.get(("", NODE))["metadata"]["uid"]
    assert [{"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": uid}] == first[0]["metadata"]["ownerReferences"]
    assert (1, 4, 2) == (unchanged, free_gpus(first[0]), free_gpus(second[0]))


def free_gpus(shown: dict[str, Any]) -> int:
    return sum(
        int(resource["available"])
        for zone in shown["zones"]
        for resource in zone["resources"]
        if resource["name"] == "nvidia.com/gpu"
    )
