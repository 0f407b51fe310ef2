"""A gang is planned whole at the bind of its first pod, reserved at once, and given back if it stays incomplete."""

from collections.abc import AsyncIterator, Sequence

import anyio
import msgspec
import pytest
from binding_support import Registry, Site, running

from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.core.model.topology.model import Fabric
from topoalign.core.ports import Message, Stream
from topoalign.registry.scheduling.binding.cluster_reservations import TIDY_SECONDS
from topoalign.registry.scheduling.binding.gang_binding import GANG_SECONDS, GangWaits
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio
PODS = ("a", "b", "c", "d")


class CountingBus(MemoryBus):
    """Knows how many messages were published at once."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    async def publish_batch(self, batch: Sequence[tuple[Message, int]]) -> Sequence[int]:
        self.batches.append(len(batch))
        return await super().publish_batch(batch)


@pytest.fixture
def site() -> Site:
    return Site(("node-1", "node-2", "node-3"))


@pytest.fixture
def bus() -> CountingBus:
    return CountingBus()


@pytest.fixture
async def registry(site: Site, bus: CountingBus) -> AsyncIterator[Registry]:
    one = Registry(site, bus)
    async with running(site, bus, one):
        yield one


def gang(site: Site, *pods: str, size: int = 4, gpus: int = 2) -> dict[str, str]:
    """Pod -> UID of these pods, which wait."""
    annotations = {GANG: "g", GANG_SIZE: str(size)}
    return {name: site.add(name, gpus=gpus, annotations=annotations) for name in pods}


def reserved(registry: Registry) -> dict[str, list[str]]:
    """Node -> the pods for which something is reserved there."""
    found = {name: sorted(registry.reserved(name)) for name in registry.site.ledgers}
    return {name: pods for name, pods in found.items() if pods}


async def test_all_pods_of_a_gang_are_reserved_at_the_first_bind(
    site: Site, bus: CountingBus, registry: Registry
) -> None:
    """In one atomic batch; then each goes to its node and no other."""
    uids = gang(site, *PODS)
    await registry.see(*PODS)
    await registry.bind("c", uids["c"], "node-2")

    assert [2] == bus.batches
    assert ("node-2", "") == (site.node_of("c"), site.node_of("a"))
    assert {"node-1", "node-2"} == reserved(registry).keys()
    assert [*PODS] == sorted(pod for pods in reserved(registry).values() for pod in pods)
    for pod in ("a", "b", "d"):
        (planned,) = registry.reservations.of_pod(uids[pod])
        assert planned == registry.gangs.node_of(uids[pod])
        with pytest.raises(GangWaits, match="planned to another node"):
            await registry.bind(pod, uids[pod], "node-3")
        await registry.bind(pod, uids[pod], planned)
        assert planned == site.node_of(pod)
    assert [2] == bus.batches


async def test_pods_of_a_gang_are_planned_until_they_are_about_to_be_bound(site: Site, registry: Registry) -> None:
    uids = gang(site, "a", "b", size=2, gpus=1)
    await registry.see("a", "b")

    await registry.bind("b", uids["b"])

    assert {"a": True, "b": False} == {
        each.pod: each.planned for each in registry.reservations.held(NodeName("node-1"))
    }


async def test_a_gang_of_which_pods_are_missing_waits(site: Site, registry: Registry) -> None:
    uids = gang(site, "a", "b", "c")
    await registry.see("a", "b", "c")
    with pytest.raises(GangWaits, match="not all of its pods are there yet"):
        await registry.bind("a", uids["a"])

    assert ({}, "") == (reserved(registry), site.node_of("a"))
    gang(site, "d")
    await registry.see("d")
    await registry.bind("a", uids["a"])
    assert "node-1" == site.node_of("a")


async def test_a_gang_that_does_not_fit_whole_reserves_nothing(
    site: Site, bus: CountingBus, registry: Registry
) -> None:
    """Although its first pod would fit."""
    uids = gang(site, *PODS, gpus=4)
    await registry.see(*PODS)
    with pytest.raises(GangWaits, match="does not fit as a whole"):
        await registry.bind("a", uids["a"])

    assert ({}, []) == (reserved(registry), bus.batches)


async def test_an_incomplete_gang_gives_everything_back(site: Site, bus: CountingBus) -> None:
    """At its deadline; what a bound pod holds stays."""
    clock = ManualClock()
    registry = Registry(site, bus, clock=clock)
    uids = gang(site, *PODS)
    async with running(site, bus, registry):
        await registry.see(*PODS)
        await registry.bind("a", uids["a"])
        await clock.advance(GANG_SECONDS + TIDY_SECONDS)
        await all_tasks_blocked()

        assert {"node-1": ["a"]} == reserved(registry)
        assert registry.gangs.node_of(uids["b"]) is None
        newest = await bus.newest(Stream.RESERVATIONS, wire.reservation_subject(NodeName("node-2")))
        assert newest is not None
        said = wire.decode_event(newest.message)
        assert isinstance(said, ReservationsChanged)
        assert ((), 2) == (said.reservations, len(said.expired))


async def test_the_rest_of_a_gang_is_planned_beside_its_bound_pods(site: Site, bus: CountingBus) -> None:
    """Their time was over before they were bound: they are planned again, and the bound pod counts."""
    clock = ManualClock()
    registry = Registry(site, bus, clock=clock)
    uids = gang(site, *PODS)
    async with running(site, bus, registry):
        await registry.see(*PODS)
        await registry.bind("a", uids["a"])
        await clock.advance(GANG_SECONDS + TIDY_SECONDS)
        await registry.see(*PODS)
        await registry.bind("b", uids["b"], "node-3")

        assert "node-3" == site.node_of("b")
        assert [*PODS] == sorted(pod for pods in reserved(registry).values() for pod in pods)


async def test_a_gang_stays_within_one_fabric_where_it_fits(site: Site, registry: Registry) -> None:
    """node-1 alone is in another one; the pod that comes first was filtered to it, and has to come again."""
    for name, clique in (("node-1", 1), ("node-2", 2), ("node-3", 2)):
        ledger = site.ledgers[NodeName(name)]
        found = ledger.state.topology
        assert found is not None
        gpus = tuple(
            msgspec.structs.replace(gpu, fabric=Fabric(cluster="u", clique=clique)) for gpu in found.topology.gpus
        )
        topology = msgspec.structs.replace(found.topology, gpus=gpus)
        ledger.take_reading(msgspec.structs.replace(found, revision=2, topology=topology))
    uids = gang(site, *PODS)
    await registry.see(*PODS)
    await registry.bind("a", uids["a"], "node-2")

    assert {"node-2", "node-3"} == reserved(registry).keys()


async def test_two_registries_reserve_for_a_gang_once(site: Site, bus: CountingBus) -> None:
    """Each is asked to bind another pod of it at the same time, to the same node."""
    one, other = Registry(site, bus, "r1"), Registry(site, bus, "r2")
    uids = gang(site, *PODS)

    async def bind(registry: Registry, pod: str) -> None:
        try:
            await registry.bind(pod, uids[pod])
        except GangWaits:
            (planned,) = registry.reservations.of_pod(uids[pod])
            await registry.bind(pod, uids[pod], planned)

    async with running(site, bus, one, other):
        await one.see(*PODS)
        await other.see(*PODS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bind, one, "a")
            tasks.start_soon(bind, other, "b")
        await all_tasks_blocked()

        assert reserved(one) == reserved(other)
        assert [*PODS] == sorted(pod for pods in reserved(one).values() for pod in pods)


async def test_a_plan_is_written_on_the_reservations_that_it_was_made_with(
    site: Site, bus: CountingBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another registry reserves on a node that the plan has read: the write is refused, and the gang is planned again."""
    one, other = Registry(site, bus, "r1"), Registry(site, bus, "r2")
    uids = gang(site, "a", "b", size=2)
    first = site.add("x")

    async def bind_another() -> None:
        if not site.node_of("x"):
            await other.bind("x", first)
            await all_tasks_blocked()

    async with running(site, bus, one, other):
        await one.see("a", "b", "x")
        monkeypatch.setattr(one.gangs._turns, "give", bind_another)
        await one.bind("a", uids["a"])

    assert ({"node-1": ["a", "x"], "node-2": ["b"]}, 1) == (reserved(one), one.reservations.counts["conflicts"])
    assert {"x": ["GPU-0"], "a": ["GPU-2", "GPU-3"]} == one.reserved()


async def test_a_gang_is_planned_once_for_binds_at_the_same_time(
    site: Site, bus: CountingBus, registry: Registry
) -> None:
    """The second bind of a pod of the gang waits for the plan of the first."""
    uids = gang(site, "a", "b", size=2, gpus=4)
    await registry.see("a", "b")
    refused: list[str] = []

    async def bind(pod: str) -> None:
        try:
            await registry.bind(pod, uids[pod])
        except GangWaits:
            refused.append(pod)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bind, "a")
        tasks.start_soon(bind, "b")

    assert ([2], ["b"], 0) == (bus.batches, refused, registry.reservations.counts["conflicts"])


async def test_a_gang_is_forgotten_with_its_pods(site: Site, registry: Registry) -> None:
    uids = gang(site, *PODS)
    await registry.see(*PODS)
    for uid in uids.values():
        registry.gangs.lose(uid)
    with pytest.raises(GangWaits, match="does not report the pod"):
        await registry.bind("a", uids["a"])
