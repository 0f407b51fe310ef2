"""NodeResourceTopology objects are written when a node has changed, and again where they could not be."""

from collections.abc import Mapping
from typing import Any

import pytest
from decision_support import machine
from view_support import NODE, RULES, OneNode, Says

from topoalign.core.model.errors import TopoalignError
from topoalign.core.model.ids import NodeName
from topoalign.registry.ports import ApiNotFound, ApiRefused, ApiUnavailable
from topoalign.registry.scheduling.kubernetes.topology_objects import ABSENT_SECONDS, PERIOD, TopologyObjects
from topoalign.runtime.tasks import background
from topoalign.testing.fake_api_server.cluster import FakeCluster
from topoalign.testing.manual_clock import ManualClock
from topoalign.testing.memory_kubernetes import MemoryKubernetes

pytestmark = pytest.mark.anyio
OTHER = NodeName("node-2")


class Failing(MemoryKubernetes):
    """An API server that fails for objects of these names."""

    def __init__(self) -> None:
        super().__init__(FakeCluster())
        self.failures: dict[str, TopoalignError] = {}
        self.asked: list[str] = []
        self.uids: list[str] = []

    async def apply_topology(self, topology: Mapping[str, Any]) -> None:
        metadata = topology["metadata"]
        self.asked.append(metadata["name"])
        if metadata["name"] in self.failures:
            raise self.failures[metadata["name"]]
        self.uids.append(metadata["ownerReferences"][0]["uid"])


class Site:
    """Two nodes whose objects are written."""

    def __init__(self) -> None:
        self.nodes, self.api, self.clock = OneNode(), Failing(), ManualClock()
        self.nodes.tell([*self.nodes.says.all(), *Says(OTHER, machine(), RULES).all()])
        self.nodes.view.renew()
        self.kubernetes = {NODE: "u-1", OTHER: "u-2"}
        self.objects = TopologyObjects(self.api, self.clock, self.nodes.view, self.kubernetes.get)

    async def periods(self, times: int = 1) -> list[str]:
        """The names that the API server was asked to write meanwhile."""
        self.api.asked.clear()
        for _ in range(times):
            await self.clock.advance(PERIOD)
            await self.clock.advance(1)  # a pause after each
        return [*self.api.asked]


async def test_an_object_is_written_anew_for_a_node_that_is_registered_anew() -> None:
    """It is deleted with the Node that it belongs to, although nothing else of it has changed."""
    site = Site()
    async with background() as tasks:
        tasks.start_soon(site.objects.run)
        first = await site.periods()
        site.nodes.view.forget(NODE)
        site.nodes.view.renew()
        site.kubernetes[NODE] = "u-3"
        site.nodes.view.label(NODE, {})
        site.nodes.view.renew()
        again = await site.periods(2)

    assert ([NODE, OTHER], [NODE]) == (first, again)
    assert ["u-1", "u-2", "u-3"] == site.api.uids


async def test_what_cannot_be_written_is_tried_again() -> None:
    site = Site()
    site.api.failures = {NODE: ApiUnavailable("away"), OTHER: ApiUnavailable("away")}
    async with background() as tasks:
        tasks.start_soon(site.objects.run)
        failed = await site.periods()
        site.api.failures.clear()
        written = await site.periods()
        nothing = await site.periods(2)

    assert (1, {NODE, OTHER}, []) == (len(failed), {*written}, nothing)


async def test_an_object_that_is_refused_keeps_no_other_one_back() -> None:
    site = Site()
    site.api.failures = {NODE: ApiRefused("invalid")}
    async with background() as tasks:
        tasks.start_soon(site.objects.run)
        await site.periods(2)
        others = [*site.api.uids]
        site.api.failures.clear()
        await site.periods()

    assert (["u-2"], ["u-2", "u-1"]) == (others, site.api.uids)


async def test_a_cluster_without_the_kind_is_asked_seldom() -> None:
    site = Site()
    site.api.failures = {NODE: ApiNotFound("no such kind")}
    async with background() as tasks:
        tasks.start_soon(site.objects.run)
        await site.periods()
        asked = await site.periods(int(ABSENT_SECONDS / (PERIOD + 1)))
        site.api.failures.clear()
        await site.periods(2)

    assert [] == asked
    assert {"u-1", "u-2"} == {*site.api.uids}
