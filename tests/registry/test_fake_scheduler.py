"""The stand-in for kube-scheduler calls its extender as often, and when, a real one was recorded to do."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.fake_api_server.objects import ApiError
from topoalign.testing.fake_scheduler.extender import ExtenderFailed
from topoalign.testing.fake_scheduler.scheduler import FakeScheduler
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

GPU = "nvidia.com/gpu"


class ScriptedExtender:
    """Answers as a test says: which nodes pass, and with what text others are refused."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.passing: set[str] | None = None
        """None: all."""
        self.text = "no"
        self.failing = False
        self.binding = anyio.Event()
        """Set: binds are answered."""
        self.binding.set()
        self.refuses_binds = False
        self.candidates: dict[str, int] = {}
        """Node -> victims, of the last preempt."""
        self.makes_room_on: set[str] | None = None
        """Nodes on which victims would help; None: all."""
        self.ending: list[str] = []
        """Pods that end while preempt is answered."""
        self.preempting = anyio.Event()
        self.filtering = anyio.Event()
        """Set: preempt and filter are answered."""
        self.preempting.set()
        self.filtering.set()
        self.filtered: list[list[str]] = []
        """The nodes of each filter."""
        self.under_way: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def ask(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        self.under_way[verb] = self.under_way.get(verb, 0) + 1
        self.most[verb] = max(self.most.get(verb, 0), self.under_way[verb])
        try:
            await anyio.lowlevel.checkpoint()
            return await self.answer(verb, arguments)
        finally:
            self.under_way[verb] -= 1

    async def answer(self, verb: str, arguments: Mapping[str, Any]) -> Any:
        if self.failing:
            raise ExtenderFailed("down")
        if verb == "bind":
            await self.binding.wait()
            if self.refuses_binds:
                return {"Error": "no"}
            key = (arguments["PodNamespace"], arguments["PodName"])
            try:
                self.cluster.bind(*key, {"target": {"name": arguments["Node"]}})
            except ApiError as error:
                return {"Error": error.message}
            return {"Error": ""}
        if verb == "preempt":
            self.candidates = {node: len(each["Pods"]) for node, each in arguments["NodeNameToMetaVictims"].items()}
            kept = self.makes_room_on
            every = arguments["NodeNameToMetaVictims"]
            for name in self.ending:
                self.cluster.delete_pod("default", name, grace=0)
            self.ending = []
            await self.preempting.wait()
            return {
                "NodeNameToMetaVictims": {node: each for node, each in every.items() if kept is None or node in kept}
            }
        if verb == "filter":
            await self.filtering.wait()
        nodes = arguments["NodeNames"]
        self.filtered.append(nodes)
        if verb == "prioritize":
            return [{"Host": node, "Score": int(node == "n2")} for node in nodes]
        passed = [node for node in nodes if self.passing is None or node in self.passing]
        return {
            "NodeNames": passed,
            "FailedAndUnresolvableNodes": {node: self.text for node in nodes if node not in passed},
        }


class World:
    """Three nodes with eight GPUs each, and a scheduler."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = FakeCluster()
        for name in ("n1", "n2", "n3"):
            self.cluster.add_node(name)
            self.cluster.nodes.merge(("", name), {"status": {"allocatable": {GPU: "8"}}})
        self.extender = ScriptedExtender(self.cluster)
        self.scheduler = FakeScheduler(self.cluster, self.extender, self.clock)

    def create(self, name: str, gpus: int = 1, **spec: Any) -> None:
        container = {"name": "main", "resources": {"limits": {GPU: str(gpus)}}}
        self.cluster.add_pod({"metadata": {"name": name}, "spec": {"containers": [container], **spec}})

    def fill(self) -> None:
        """Each node has two pods with four GPUs; those of n1 are the least important."""
        for name in ("n1", "n2", "n3"):
            for number in range(2):
                self.create(f"{name}-{number}", 4, nodeName=name, priority=10 + (name != "n1"))

    def node_of(self, name: str) -> str | None:
        node: str | None = self.cluster.pods.get(("default", name))["spec"].get("nodeName")
        return node

    async def settle(self) -> Mapping[str, int]:
        """How often each verb was called by the time nothing more happens."""
        await self.clock.advance(0)
        return dict(self.scheduler.calls)


@asynccontextmanager
async def scheduling() -> AsyncIterator[World]:
    world = World()
    async with background() as tasks:
        await tasks.start(world.scheduler.run)
        await world.clock.advance(0)
        yield world


async def test_a_pod_goes_to_the_best_node_that_passes() -> None:
    async with scheduling() as world:
        world.create("a")
        calls = await world.settle()

        assert {"filter": 1, "prioritize": 1, "bind": 1} == calls
        assert "n2" == world.node_of("a")
        assert world.scheduler.idle


async def test_one_node_left_is_bound_without_prioritize() -> None:
    async with scheduling() as world:
        world.extender.passing = {"n3"}
        world.create("a")

        assert {"filter": 1, "bind": 1} == await world.settle()
        assert "n3" == world.node_of("a")


async def test_pods_are_filtered_one_by_one_and_bound_side_by_side() -> None:
    async with scheduling() as world:
        world.extender.binding = anyio.Event()
        for name in "abcd":
            world.create(name)
        await world.settle()
        world.extender.binding.set()
        await world.settle()

        assert (1, 4) == (world.extender.most["filter"], world.extender.most["bind"])
        assert all(world.node_of(name) for name in "abcd")


async def test_a_first_refusal_is_followed_by_one_more_call() -> None:
    """The condition that is written on the pod is an event; the second refusal changes nothing, so there is no third."""
    async with scheduling() as world:
        world.extender.passing = set()
        world.create("a")

        assert {"filter": 2} == await world.settle()


async def test_a_change_of_a_node_brings_one_call_for_each_waiting_pod() -> None:
    async with scheduling() as world:
        world.extender.passing = set()
        for name in "abc":
            world.create(name)
        before = (await world.settle())["filter"]
        world.cluster.nodes.merge(("", "n1"), {"metadata": {"annotations": {"woken": "1"}}})

        assert 3 == (await world.settle())["filter"] - before


async def test_errors_are_followed_by_pauses_that_double() -> None:
    async with scheduling() as world:
        world.extender.failing = True
        world.create("a")
        found = []
        for second in range(32):
            found.append((second, (await world.settle())["filter"]))
            world.cluster.nodes.merge(("", "n1"), {"metadata": {"annotations": {"woken": str(second)}}})
            await world.clock.advance(1)

        times = [
            second for (second, calls), (_, former) in zip(found, [(0, 0), *found], strict=False) if calls > former
        ]
        assert [0, 1, 3, 7, 15, 25] == times


async def test_a_pod_for_which_no_node_has_room_is_never_filtered() -> None:
    async with scheduling() as world:
        for name in ("a", "b", "c", "d"):
            world.create(name, gpus=8)
        calls = await world.settle()
        waiting = [name for name in "abcd" if not world.node_of(name)]
        world.cluster.delete_pod("default", "a" if waiting != ["a"] else "b", grace=0)
        after = await world.settle()

        assert (3, 1) == (calls["filter"], len(waiting))
        assert 4 == after["filter"]


async def test_what_is_assumed_takes_room_until_it_is_bound_or_given_up() -> None:
    async with scheduling() as world:
        for name in ("n2", "n3"):
            world.cluster.nodes.remove(("", name))
        world.extender.binding = anyio.Event()
        world.create("a", gpus=8)
        world.create("b", gpus=8)
        meanwhile = await world.settle()
        world.cluster.delete_pod("default", "a", grace=0)
        world.extender.binding.set()
        await world.settle()

        assert {"filter": 1, "bind": 1} == meanwhile
        assert "n1" == world.node_of("b")


async def test_a_bind_that_fails_is_tried_again_with_the_whole_cycle() -> None:
    async with scheduling() as world:
        world.create("a")
        world.extender.refuses_binds = True
        first = await world.settle()
        world.extender.refuses_binds = False
        await world.clock.advance(1)

        assert {"filter": 1, "prioritize": 1, "bind": 1} == first
        assert {"filter": 2, "prioritize": 2, "bind": 2} == await world.settle()
        assert world.node_of("a")


async def test_a_bind_that_fails_wakes_pods_that_lacked_room() -> None:
    """The pod that was assumed had taken the room (kube-scheduler v1.36, handleBindingCycleError)."""
    async with scheduling() as world:
        for name in ("n2", "n3"):
            world.cluster.nodes.remove(("", name))
        world.extender.binding = anyio.Event()
        world.extender.refuses_binds = True
        world.create("a", gpus=8)
        world.create("b", gpus=8)
        await world.settle()
        world.extender.binding.set()
        calls = await world.settle()

        assert {"filter": 2, "bind": 2} == calls


async def test_a_pod_preempts_the_fewest_of_the_least_important_pods() -> None:
    """No filter is called before: no node has room. Of equally important pods the one that came last makes way."""
    async with scheduling() as world:
        world.fill()
        await world.settle()
        world.create("high", 4, priority=100)
        calls = await world.settle()

        assert {"preempt": 1} == calls
        assert {"n1": 1, "n2": 1, "n3": 1} == world.extender.candidates
        assert [(("default", "high"), "n1", (("default", "n1-1"),))] == world.scheduler.preemptions
        assert world.cluster.pods.get(("default", "n1-1"))["metadata"]["deletionTimestamp"]
        assert "n1" == world.cluster.pods.get(("default", "high"))["status"]["nominatedNodeName"]


async def test_the_nominated_node_is_filtered_alone_once_the_victims_are_gone() -> None:
    """If it passes, the pod is bound without prioritize. Others cannot take the place meanwhile."""
    async with scheduling() as world:
        world.fill()
        world.create("high", 4, priority=100)
        await world.settle()
        world.create("low", 4)
        before = await world.settle()
        world.cluster.delete_pod("default", "n1-1", grace=0)
        after = await world.settle()

        assert ({"preempt": 1}, {"preempt": 1, "filter": 1, "bind": 1}) == (before, after)
        assert [["n1"]] == world.extender.filtered
        assert ("n1", None) == (world.node_of("high"), world.node_of("low"))


@pytest.mark.parametrize(("fails", "preemptions"), [(False, 2), (True, 1)])
async def test_a_refusal_of_the_nominated_node_preempts_again_an_error_does_not(fails: bool, preemptions: int) -> None:
    async with scheduling() as world:
        world.fill()
        world.create("high", 4, priority=100)
        await world.settle()
        world.extender.passing = set()
        world.extender.failing = fails
        world.cluster.delete_pod("default", "n1-1", grace=0)
        await world.settle()

        assert preemptions == len(world.scheduler.preemptions)
        assert ["n1"] == world.extender.filtered[0] if not fails else not world.extender.filtered


async def test_a_pod_whose_victim_ends_while_it_is_filtered_preempts_no_others() -> None:
    """kube-scheduler asks its snapshot, which is as old as the cycle, whether victims are still terminating."""
    async with scheduling() as world:
        world.fill()
        world.create("high", 4, priority=100)
        await world.settle()
        world.extender.passing = {"n1"}
        world.extender.filtering = anyio.Event()
        world.cluster.delete_pod("default", "n3-0", grace=0)
        await world.settle()
        world.cluster.delete_pod("default", "n1-1", grace=0)
        await world.settle()
        world.extender.filtering.set()
        await world.settle()

        assert ["n3"] == world.extender.filtered[0]
        assert 1 == len(world.scheduler.preemptions)
        assert "n1" == world.node_of("high")


async def test_a_pod_that_is_deleted_during_its_filter_has_no_nominated_node() -> None:
    async with scheduling() as world:
        world.fill()
        world.create("high", 4, priority=100)
        await world.settle()
        world.extender.filtering = anyio.Event()
        world.cluster.delete_pod("default", "n1-1", grace=0)
        await world.settle()
        world.cluster.delete_pod("default", "high", grace=0)
        await world.settle()
        world.extender.filtering.set()
        world.create("low", 4)
        await world.settle()

        assert ["n1"] == world.extender.filtered[0]
        assert "n1" == world.node_of("low")


@pytest.mark.parametrize("seconds", [0, 1])
async def test_a_victim_may_end_while_preempt_is_answered(seconds: int) -> None:
    """The scheduler has seen the end when the answer comes, or has not."""
    async with scheduling() as world:
        world.fill()
        world.extender.ending = ["n1-0", "n1-1"]
        world.extender.preempting = anyio.Event()
        world.create("high", 4, priority=100)
        await world.settle()
        if not seconds:
            world.extender.preempting.set()
        await world.clock.advance(seconds)
        world.extender.preempting.set()
        await world.settle()

        assert "n1" == world.node_of("high")


async def test_a_pod_that_is_bound_while_it_is_filtered_keeps_its_room() -> None:
    """An earlier bind of it was taken for failed."""
    async with scheduling() as world:
        world.extender.filtering = anyio.Event()
        world.create("a", 8)
        await world.settle()
        world.cluster.bind("default", "a", {"target": {"name": "n1"}})
        await world.settle()
        world.extender.filtering.set()
        await world.settle()
        world.create("high", 8, priority=100)
        for name in ("n2", "n3"):
            world.cluster.nodes.remove(("", name))
        await world.settle()

        assert [("default", "a")] == [key for each in world.scheduler.preemptions for key in each.victims]


async def test_a_pod_takes_room_on_the_node_to_which_it_is_bound() -> None:
    """As in kube-scheduler's cache (v1.36, AddPod). An earlier bind of it was taken for failed."""
    async with scheduling() as world:
        world.extender.passing = {"n1"}
        world.extender.binding = anyio.Event()
        world.create("a", 8)
        await world.settle()
        world.cluster.bind("default", "a", {"target": {"name": "n3"}})
        await world.settle()
        world.extender.binding.set()
        world.extender.passing = None
        world.extender.filtered.clear()
        world.create("b", 8)
        await world.settle()

        assert {"n1", "n2"} == set(world.extender.filtered[0])


async def test_a_pod_preempts_only_where_the_extender_sees_room() -> None:
    async with scheduling() as world:
        world.fill()
        world.extender.makes_room_on = {"n3"}
        world.create("high", 4, priority=100)
        await world.settle()
        chosen = [each.node for each in world.scheduler.preemptions]
        world.extender.makes_room_on = set()
        world.create("higher", 8, priority=200)
        await world.settle()

        assert ["n3"] == chosen
        assert 1 == len(world.scheduler.preemptions)


async def test_a_pod_with_scheduling_gates_is_not_scheduled_before_they_are_gone() -> None:
    async with scheduling() as world:
        world.create("gated", schedulingGates=[{"name": "wait"}])
        before = await world.settle()
        world.cluster.pods.merge(("default", "gated"), {"spec": {"schedulingGates": None}})
        await world.settle()

        assert {} == before
        assert "n2" == world.node_of("gated")


async def test_a_pod_that_only_lacks_room_is_woken_by_room_alone() -> None:
    async with scheduling() as world:
        world.fill()
        world.create("waits", 4)
        refusals = dict(await world.settle()), world.scheduler.refused["default", "waits"]
        world.cluster.nodes.merge(("", "n1"), {"metadata": {"annotations": {"woken": "1"}}})
        await world.settle()
        again = world.scheduler.refused["default", "waits"]
        world.cluster.delete_pod("default", "n1-1", grace=0)
        await world.settle()

        assert ({}, again) == refusals
        assert "n1" == world.node_of("waits")


async def test_without_an_extender_the_scheduler_binds_by_its_own_counts() -> None:
    world = World()
    scheduler = FakeScheduler(world.cluster, None, world.clock)
    async with background() as tasks:
        await tasks.start(scheduler.run)
        for name in "abcd":
            world.create(name, gpus=8)
        await world.settle()

        assert 3 == len([name for name in "abcd" if world.node_of(name)])
        assert {} == scheduler.calls
