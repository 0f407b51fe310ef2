"""Pods that were bound without asking the extender, as a resource is missing in the scheduler's managedResources."""

from collections.abc import Mapping

import httpx
import msgspec
import pytest
from api_server_support import shown_pod
from fact_support import changed, reservation, reserved_container
from registry_support import World
from view_support import NODE

from topoalign.core.model.ids import GPU
from topoalign.registry.ports import PodEvent, SeenPod
from topoalign.registry.scheduling.binding.cluster_reservations import ClusterReservations, ReservationChange
from topoalign.registry.scheduling.kubernetes import bypassed_pods
from topoalign.registry.scheduling.kubernetes.bypassed_pods import (
    CHECK_SECONDS,
    BypassedPods,
)
from topoalign.runtime.tasks import background
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


@pytest.fixture
def world() -> World:
    world = World()
    world.kubernetes.add_node(NODE)
    return world


async def add(world: World, name: str, spec: Mapping[str, object] = {}, resource: str = GPU) -> str:
    """A pod that waits and is shown; its UID."""
    shown = shown_pod(name)
    shown["spec"] |= spec
    asked = {resource: "1"}
    shown["spec"]["containers"][0]["resources"] = {"limits": asked, "requests": asked}
    uid = str(world.kubernetes.add_pod(shown)["metadata"]["uid"])
    await all_tasks_blocked()
    return uid


async def seen(world: World, name: str) -> SeenPod:
    """A pod that waits, as the API server shows it."""
    await add(world, name)
    found = await world.api.pod("ml", name)
    assert found is not None
    return found


def asking(name: str, gpus: str) -> Mapping[str, object]:
    """A container of a manifest."""
    return {"name": name, "resources": {"limits": {GPU: gpus}}}


async def bind_past(world: World, name: str, node: str = NODE) -> None:
    """The scheduler binds the pod itself, as it does where no extender is for it."""
    world.kubernetes.bind("ml", name, {"target": {"name": node}})
    await all_tasks_blocked()


async def check(world: World) -> None:
    """So long that all pods that are bound by now are looked at."""
    for _ in range(int(2 * CHECK_SECONDS) // 5):
        await world.clock.advance(5)
        await all_tasks_blocked()


def events(world: World) -> list[tuple[str, str]]:
    """Pod and text of the Events about pods that the extender was not asked about."""
    return [
        (event["involvedObject"]["name"], event["message"])
        for event in world.kubernetes.events
        if event["reason"] == "BoundWithoutExtender"
    ]


async def test_a_resource_that_managed_resources_lacks_is_named(world: World) -> None:
    """In an Event of each pod."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry():
        await world.rounds()
        for name in ("a", "b"):
            await add(world, name)
            await bind_past(world, name)
        await check(world)

        assert ["a", "b"] == [name for name, _ in events(world)]
        assert all("{name: nvidia.com/gpu}" in text for _, text in events(world))


async def test_pods_that_are_no_concern_of_the_extender_are_not_reported(world: World) -> None:
    """Of another scheduler, on a node of others, bound when first shown, or asking for what the node does not offer."""
    world.kubernetes.add_node("other-node")
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry():
        await world.rounds()
        await add(world, "foreign", {"schedulerName": "volcano"})
        await add(world, "elsewhere")
        await add(world, "fpga", resource="example.com/fpga")
        await bind_past(world, "foreign")
        await bind_past(world, "elsewhere", "other-node")
        await bind_past(world, "fpga")
        await add(world, "direct", {"nodeName": NODE})
        await check(world)

        assert [] == events(world)


async def test_a_pod_that_the_extender_bound_is_not_reported(world: World) -> None:
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (_, url):
        await world.rounds()
        body = {"PodName": "p", "PodNamespace": "ml", "PodUID": await add(world, "p"), "Node": NODE}
        async with httpx.AsyncClient() as client:
            answer = (await client.post(f"{url}/scheduler/bind", json=body)).json()
        await check(world)

        assert ("", []) == (answer["Error"], events(world))


@pytest.mark.parametrize("late", [False, True])
async def test_a_pod_that_another_registry_bound_is_not_reported(world: World, late: bool) -> None:
    """Its reservation tells, also if it comes after the Binding was shown and has ended before the pods are looked at."""
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _), background() as tasks:
        other = ClusterReservations(world.bus, world.clock, "r2", scheduling.view.facts)
        tasks.start_soon(other.run)
        await world.rounds()
        uid = await add(world, "p")
        if late:
            await bind_past(world, "p")
        position = other.of(NODE).position
        await other.write(
            [
                ReservationChange(
                    node=NODE, position=position, made=(reservation("p", reserved_container("0"), uid=uid),)
                )
            ]
        )
        await other.write([ReservationChange(node=NODE, position=other.of(NODE).position, cancelled=(uid,))])
        if not late:
            await bind_past(world, "p")
        await check(world)

        assert [] == events(world)


async def test_nothing_is_reported_while_the_node_does_not_answer(world: World) -> None:
    """Without the bus reservations of other registries do not arrive either."""
    await world.say(*world.says.all())
    async with world.registry():
        await world.rounds(2)
        await add(world, "p")
        await bind_past(world, "p")
        await check(world)

        assert [] == events(world)


async def test_the_pods_that_were_reserved_for_last_are_remembered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bypassed_pods, "MOST_REMEMBERED", 2)
    reports = list[PodEvent]()
    bypassed = BypassedPods(world.clock, reports.append, lambda node: {GPU}, lambda: None, "")
    pods = {name: await seen(world, name) for name in "abc"}
    for name in "abac":
        bypassed.observe(msgspec.structs.replace(changed(), consumed=(pods[name].uid,)))
    async with background() as tasks:
        tasks.start_soon(bypassed.run)
        for each in pods.values():
            bypassed.note_bound(each, NODE)
        await check(world)

    assert ["b"] == [each.name for each in reports]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"containers": [asking("main", "0")]}, 0),
        ({"initContainers": [asking("init", "1")], "containers": [{"name": "main"}]}, 1),
        ({"containers": [asking("main", "no number")]}, 0),
    ],
)
async def test_what_any_container_asks_for_counts(world: World, spec: Mapping[str, object], expected: int) -> None:
    """0 is nothing, and nobody can tell what an invalid pod gets."""
    shown = shown_pod("p")
    shown["spec"] = dict(spec)
    world.kubernetes.add_pod(shown)

    reports = list[PodEvent]()
    bypassed = BypassedPods(world.clock, reports.append, lambda node: {GPU}, lambda: None, "")
    found = await world.api.pod("ml", "p")
    assert found is not None
    async with background() as tasks:
        tasks.start_soon(bypassed.run)
        bypassed.note_bound(found, NODE)
        await check(world)

    assert expected == len(reports)


@pytest.mark.parametrize("comes", [False, True])
async def test_a_reservation_has_time_to_come_after_the_bind(world: World, comes: bool) -> None:
    """A pod that was bound just before a look at those that were is looked at the next time."""
    uid = await add(world, "p")
    reports = list[PodEvent]()
    bypassed = BypassedPods(world.clock, reports.append, lambda node: {GPU}, lambda: None, "")
    seen = await world.api.pod("ml", "p")
    assert seen is not None
    async with background() as tasks:
        tasks.start_soon(bypassed.run)
        await all_tasks_blocked()
        await world.clock.advance(CHECK_SECONDS - 1)
        bypassed.note_bound(seen, NODE)
        await world.clock.advance(1)
        early = len(reports)
        if comes:
            bypassed.observe(changed(reservation("p", reserved_container("0"), uid=uid)))
        await world.clock.advance(CHECK_SECONDS)

    assert (0, 0 if comes else 1) == (early, len(reports))


@pytest.mark.parametrize("how", ["reservations", "consumed", "expired", "cancelled"])
async def test_a_pod_whose_reservation_has_ended_in_any_way_is_not_reported(world: World, how: str) -> None:
    """The message may be the first one about the pod that this registry reads."""
    uid = await add(world, "p")
    reports = list[PodEvent]()
    bypassed = BypassedPods(world.clock, reports.append, lambda node: {GPU}, lambda: None, "")
    of_pod = (reservation("p", reserved_container("0"), uid=uid),) if how == "reservations" else (uid,)
    async with background() as tasks:
        tasks.start_soon(bypassed.run)
        bypassed.observe(msgspec.structs.replace(changed(), **{how: of_pod}))
        seen = await world.api.pod("ml", "p")
        assert seen is not None
        bypassed.note_bound(seen, NODE)
        await check(world)

    assert [] == reports


async def test_nothing_is_reported_until_all_reservations_are_known(world: World) -> None:
    missing = ["the reservations are not read yet"]
    reports = list[PodEvent]()
    bypassed = BypassedPods(world.clock, reports.append, lambda node: {GPU}, lambda: next(iter(missing), None), "")
    async with background() as tasks:
        tasks.start_soon(bypassed.run)
        counts = []
        for name in ("early", "late"):
            await add(world, name)
            seen = await world.api.pod("ml", name)
            assert seen is not None
            bypassed.note_bound(seen, NODE)
            await check(world)
            counts.append(len(reports))
            missing.clear()

        assert [0, 1] == counts
