"""A gang is planned at the first filter of its pods, so that pods which are filtered one after the other fit together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import container, machine, pod
from registry_support import World
from view_support import NODE, RULES, Says

from topoalign.core.model.ids import Namespace, NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.scheduling.binding.gang_binding import AHEAD_SECONDS, GangWaits
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.registry.scheduling.service import SchedulingService
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio
OTHER = NodeName("node-2")
NODES = (NODE, OTHER)


class Site:
    """Two nodes with four GPUs each, and a registry."""

    def __init__(self) -> None:
        self.world = World()
        self.says = {NODE: self.world.says, OTHER: Says(OTHER, machine(), RULES)}
        self.pods: dict[str, PodToSchedule] = {}

    def create(self, *names: str, gpus: int, size: int = 0) -> None:
        """Pods that wait. `size`: of their gang; 0: they are in none."""
        annotations = {GANG: "g", GANG_SIZE: str(size)} if size else {}
        for name in names:
            shown = shown_pod(name, gpus=gpus)
            shown["metadata"]["annotations"] |= annotations
            uid = str(self.world.kubernetes.add_pod(shown)["metadata"]["uid"])
            request = pod(container("main", gpus=gpus), name=name, annotations=annotations)
            request = msgspec.structs.replace(request, namespace=Namespace("ml"))
            self.pods[name] = PodToSchedule(uid=uid, request=request)

    @asynccontextmanager
    async def run(self) -> AsyncIterator[SchedulingService]:
        world = self.world
        for node in NODES:
            world.kubernetes.add_node(node)
        for each in self.says.values():
            await world.say(*each.all())
        async with (
            world.allocator(self.says[NODE]),
            world.allocator(self.says[OTHER]),
            world.registry() as (scheduling, _),
        ):
            await world.rounds()
            yield scheduling

    async def passed(self, scheduling: SchedulingService, *names: str) -> Mapping[str, NodeName]:
        """Pod -> the only node on which it passes."""
        found = {}
        for name in names:
            (found[name],) = (await scheduling.scheduler.plan_and_filter(self.pods[name], NODES)).passed
        return found

    async def bind(self, scheduling: SchedulingService, nodes: Mapping[str, NodeName]) -> None:
        for name, node in nodes.items():
            await scheduling.bind("ml", name, self.pods[name].uid, node)
        await all_tasks_blocked()


@pytest.fixture
def site() -> Site:
    return Site()


async def test_pods_that_are_filtered_before_the_first_bind_pass_where_all_fit(site: Site) -> None:
    """As kube-scheduler v1.36 does for a PodGroup. Each pod alone would pass on both nodes."""
    site.create("a", "b", "c", gpus=2, size=3)
    async with site.run() as scheduling:
        nodes = await site.passed(scheduling, "c", "a", "b")
        reserved = [*scheduling.reservations.pods()]
        await site.bind(scheduling, nodes)

    assert [NODE, NODE, OTHER] == sorted(nodes.values())
    assert [] == reserved
    assert nodes == {name: site.world.kubernetes.pods.get(("ml", name))["spec"]["nodeName"] for name in nodes}


async def test_a_gang_that_does_not_fit_is_refused_by_the_filter(site: Site) -> None:
    """Its first pod alone would fit. After the cluster has changed, the gang is planned again."""
    site.create("a", "b", "c", gpus=4, size=3)
    async with site.run() as scheduling:
        for name in ("a", "b", "a"):
            with pytest.raises(GangWaits, match="does not fit as a whole"):
                await scheduling.scheduler.plan_and_filter(site.pods[name], NODES)


async def test_a_gang_is_planned_again_if_its_node_no_longer_admits_a_pod(site: Site) -> None:
    """Another pod was bound in the meantime: nothing is reserved for the gang before its first bind."""
    site.create("a", "b", gpus=2, size=2)
    site.create("other", gpus=4)
    async with site.run() as scheduling:
        before = await site.passed(scheduling, "a")
        await site.bind(scheduling, {"other": before["a"]})
        after = await site.passed(scheduling, "a", "b")
        await site.bind(scheduling, after)

    (left,) = {*NODES} - {before["a"]}
    assert {"a": left, "b": left} == after


async def test_a_plan_without_a_bind_ends(site: Site) -> None:
    """Then each pod can be planned on any node again."""
    site.create("a", "b", gpus=2, size=2)
    async with site.run() as scheduling:
        await site.passed(scheduling, "a")
        planned = [scheduling.scheduler.filter(site.pods["b"], NODES).passed]
        await site.world.clock.advance(AHEAD_SECONDS)
        planned.append(scheduling.scheduler.filter(site.pods["b"], NODES).passed)

    assert [1, 2] == [len(each) for each in planned]


async def test_a_gang_with_absent_pods_is_not_planned(site: Site) -> None:
    """The bind reports what it waits for."""
    site.create("a", gpus=2, size=2)
    async with site.run() as scheduling:
        filtered = await scheduling.scheduler.plan_and_filter(site.pods["a"], NODES)

    assert NODES == (*filtered.passed,)
