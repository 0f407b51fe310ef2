"""S02: the readiness of the Service of extender and webhook contains what these need, and NATS is no part of that."""

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from api_server_support import shown_pod
from bus_support import FailingBus
from decision_support import container, pod
from registry_support import World
from slot_support import in_slots
from unit_support import DGX
from view_support import NODE, RULES, Says, asked

from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.kubernetes.objects import WOKEN
from topoalign.registry.ports import GoneObject, NotReadYet, SeenPod, Synced
from topoalign.registry.scheduling.service import NATS_AWAY_SECONDS, SchedulingService
from topoalign.registry.service import PAUSE
from topoalign.registry.settings import RegistrySettings
from topoalign.runtime import health_pages
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import all_tasks_blocked
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio

OURS = "topoalign-scheduler"
POD = asked(pod(container("main", gpus=2)))


class PodsNotListed(MemoryKubernetes):
    """An API server that never lists its pods."""

    async def pods(self) -> AsyncGenerator[SeenPod | GoneObject | Synced, None]:
        await anyio.sleep_forever()
        yield Synced()


@pytest.fixture
def bus() -> FailingBus:
    """NATS cannot be reached at first."""
    bus = FailingBus()
    bus.away = True
    return bus


@pytest.fixture
def world(bus: FailingBus) -> World:
    world = World(bus=bus)
    world.settings = RegistrySettings(scheduler_port=0, scheduler_name=OURS)
    return world


@asynccontextmanager
async def pages(world: World) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP pages of the registry's process."""
    transport = httpx.ASGITransport(health_pages.build_application(world.context))
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        yield client


async def review_pod(url: str, limits: Mapping[str, str], gang: str = "", **spec: Any) -> tuple[bool, Any]:
    """
    Whether the mutating webhook allows a new pod with these limits, or that it gets the annotations of a gang; and its
    changes, or the code of the denial.
    """
    spec["containers"] = [{"name": "main", "resources": {"limits": limits}}]
    annotations = {GANG: gang, GANG_SIZE: "2"} if gang else {}
    request = {
        "uid": "r",
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "operation": "UPDATE" if gang else "CREATE",
        "namespace": "ml",
        "object": {"metadata": {"name": "p", "annotations": annotations}, "spec": spec},
        "oldObject": {"metadata": {"name": "p"}, "spec": spec} if gang else None,
    }
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    async with httpx.AsyncClient() as http:
        answer = (await http.post(f"{url}/webhook", json=body)).json()["response"]
    if not answer["allowed"]:
        return False, answer["status"]["code"]
    return True, json.loads(base64.b64decode(answer.get("patch", "W10=")))


async def until_read(world: World, scheduling: SchedulingService) -> None:
    """Until the registry knows all nodes."""
    while scheduling.behind() is not None:
        await pause(world)
    await pause(world)


async def pause(world: World) -> None:
    await world.clock.advance(PAUSE)
    await all_tasks_blocked()


async def test_a_registry_that_has_read_the_nodes_stays_ready_without_nats(world: World, bus: FailingBus) -> None:
    """The nodes turn stale within the ten seconds in which they are asked, and the pods wait; afterwards they are woken."""
    bus.away = False
    world.kubernetes.add_node(NODE)
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _), pages(world) as http:
        early = await http.get("/readyz/scheduler")
        await until_read(world, scheduling)
        known = await http.get("/readyz/scheduler")
        bus.away = True
        await world.rounds()
        away = await http.get("/readyz/scheduler")
        refused = scheduling.scheduler.filter(POD, (NODE,)).refused
        bus.away = False
        await world.rounds()
        passed = scheduling.scheduler.filter(POD, (NODE,)).passed

    assert (503, 200, 200) == (early.status_code, known.status_code, away.status_code)
    assert "[-] nodes: " in early.text
    assert {NODE: "NodeStale"} == {node: each.code for node, each in refused.items()}
    assert (NODE,) == tuple(passed)


async def test_a_registry_that_starts_without_nats_serves_the_webhook(world: World, bus: FailingBus) -> None:
    """
    Filters are answered with an error, which the scheduler repeats; and the page stays as it is while nodes are read. Pods
    that another registry refused meanwhile are woken.
    """
    world.kubernetes.add_node(NODE)
    world.kubernetes.add_pod(shown_pod("p"))
    async with world.registry() as (scheduling, url), pages(world) as http:
        await pause(world)
        early = await http.get("/readyz/scheduler")
        await world.clock.advance(NATS_AWAY_SECONDS)
        await all_tasks_blocked()
        ready = await http.get("/readyz/scheduler")
        allowed = await review_pod(url, {"nvidia.com/gpu": "1"})
        with pytest.raises(NotReadYet):
            scheduling.scheduler.filter(POD, (NODE,))
        bus.away = False
        reading = scheduling.behind(), await http.get("/readyz/scheduler")
        await until_read(world, scheduling)
        filtered = scheduling.scheduler.filter(POD, (NODE,))
        woken = world.kubernetes.nodes.get(("", NODE))["metadata"]["annotations"][WOKEN]

    assert (503, 200, 200) == (early.status_code, ready.status_code, reading[1].status_code)
    assert (True, [{"op": "add", "path": "/spec/schedulerName", "value": OURS}]) == allowed
    assert reading[0] is not None
    assert woken.startswith("NodesRead ")
    assert {NODE: "UnknownNode"} == {node: each.code for node, each in filtered.refused.items()}


async def test_every_extended_resource_counts_before_nodes_are_read(world: World) -> None:
    """No creation fails because it is not known what nodes offer, and none gets past the scheduler meanwhile."""
    mig = {"nvidia.com/mig-1g.5gb": "1"}
    async with world.registry() as (_, url):
        assert (True, [{"op": "add", "path": "/spec/schedulerName", "value": OURS}]) == await review_pod(url, mig)
        assert (False, 403) == await review_pod(url, mig, nodeName="gpu-1")
        assert (False, 422) == await review_pod(url, {"nvidia.com/gpu": "-1"})
        assert (True, []) == await review_pod(url, {"cpu": "1"}, nodeName="gpu-1")


async def test_a_part_of_the_offers_denies_nothing_and_fills_in_nothing(world: World, bus: FailingBus) -> None:
    """Another node may have more memory, or offer the same without slots. With all offers both are judged."""
    machine = in_slots(DGX)
    world.says = Says(NODE, machine, RULES)
    large, small = {"nvidia.com/gpumem": "9000000"}, {"nvidia.com/gpumem": "1000"}
    scheduler = {"op": "add", "path": "/spec/schedulerName", "value": OURS}
    bus.away = False
    await world.say(*world.says.all())
    bus.away = True
    async with world.allocator(world.says), world.registry() as (scheduling, url):
        scheduling.view.offers.note(NODE, machine)
        unread = [await review_pod(url, large), await review_pod(url, large, gang="g"), await review_pod(url, small)]
        bus.away = False
        await until_read(world, scheduling)
        denied = [await review_pod(url, large), await review_pod(url, large, gang="g")]
        allowed, changes = await review_pod(url, small)

    assert [(True, [scheduler]), (True, []), (True, [scheduler])] == unread
    assert [(False, 422), (False, 422)] == denied
    assert allowed and "/spec/containers/0/resources/limits/nvidia.com~1gpu" in [each["path"] for each in changes]


async def test_a_registry_that_has_not_listed_kubernetes_is_not_ready(bus: FailingBus) -> None:
    """Extender and webhook need the pods and nodes of Kubernetes."""
    world = World(PodsNotListed(FakeCluster()), bus)
    async with world.registry(), pages(world) as http:
        await world.clock.advance(NATS_AWAY_SECONDS)
        await all_tasks_blocked()
        page = await http.get("/readyz/scheduler")

    assert 503 == page.status_code
    assert "[-] kubernetes: pods of Kubernetes are not listed yet" in page.text
