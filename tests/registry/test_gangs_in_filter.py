"""A gang is planned at the first filter of its pods, so that pods which are filtered one after the other fit together."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import msgspec
import pytest
from api_server_support import shown_pod
from decision_support import machine
from registry_support import World
from view_support import NODE, RULES, Says

from topoalign.core.demand.gangs import VOLCANO
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.kubernetes.objects import ShownPod
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

    def create(self, *names: str, gpus: int, size: int = 0, group: str = "") -> None:
        """Pods that wait. `size`: of their gang; `group`: name of their PodGroup."""
        annotations = {GANG: "g", GANG_SIZE: str(size)} if size else {}
        if group:
            annotations["scheduling.volcano.sh/group-name"] = group
        for name in names:
            shown = shown_pod(name, gpus=gpus)
            shown["metadata"]["annotations"] |= annotations
            made = self.world.kubernetes.add_pod(shown)
            self.pods[name] = msgspec.convert(made, ShownPod).to_seen().to_schedule()

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

    async def set_minimum(self, minimum: int) -> None:
        """The minimum of the PodGroup of Volcano."""
        group = {"metadata": {"namespace": "ml"}, "spec": {"minMember": minimum}}
        self.world.kubernetes.pod_groups[VOLCANO].apply(("ml", "g"), group)
        await all_tasks_blocked()

    def node_of(self, name: str) -> str:
        """Where the pod is bound; empty: nowhere."""
        return str(self.world.kubernetes.pods.get(("ml", name))["spec"].get("nodeName", ""))

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
    assert nodes == {name: site.node_of(name) for name in nodes}


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


async def test_a_pod_that_other_filters_keep_from_its_node_is_planned_alone(site: Site) -> None:
    """kube-scheduler leaves out a node, for example because of its CPUs. The other pods stay where they were filtered."""
    site.create("a", "b", "c", gpus=1, size=3)
    async with site.run() as scheduling:
        before = await site.passed(scheduling, "a", "b")
        (left,) = {*NODES} - {*before.values()}
        (moved,) = (await scheduling.scheduler.plan_and_filter(site.pods["c"], (left, NodeName("node-3")))).passed
        await site.bind(scheduling, {**before, "c": moved})

        assert {**before, "c": left} == {pod: site.node_of(pod) for pod in site.pods}


async def test_a_pod_that_comes_later_does_not_move_the_others(site: Site) -> None:
    """Of a PodGroup with a minimum: the pod is created when the others have been filtered."""
    site.create("b", "c", gpus=3, group="g")
    async with site.run() as scheduling:
        await site.set_minimum(2)
        before = await site.passed(scheduling, "b", "c")
        site.create("a", "d", gpus=1, group="g")
        await all_tasks_blocked()
        after = await site.passed(scheduling, "a", "d")
        await site.bind(scheduling, {**before, **after})

        assert {**before, **after} == {pod: site.node_of(pod) for pod in site.pods}


@pytest.mark.parametrize("first", ["a", "b", "c"])
async def test_the_pod_that_is_filtered_first_is_among_the_minimum(site: Site, first: str) -> None:
    """Two of three pods fit."""
    site.create("a", "b", "c", gpus=4, group="g")
    async with site.run() as scheduling:
        await site.set_minimum(2)
        nodes = await site.passed(scheduling, first)
        await site.bind(scheduling, nodes)

        assert nodes[first] == site.node_of(first)
        assert 2 == len(scheduling.reservations.pods())


async def test_a_lower_minimum_takes_effect_at_once(site: Site) -> None:
    site.create("a", "b", "c", "d", gpus=4, group="g")
    async with site.run() as scheduling:
        await site.set_minimum(3)
        with pytest.raises(GangWaits):
            await site.passed(scheduling, "a")
        await site.set_minimum(2)
        passed = await site.passed(scheduling, "a")

    assert ["a"] == [*passed]
