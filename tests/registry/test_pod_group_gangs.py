"""The PodGroup of a gang has the minimum number of pods that start together; the others are planned if they fit."""

from collections.abc import AsyncIterator

import pytest
from binding_support import Registry, Site, running

from topoalign.core.demand.gangs import VOLCANO
from topoalign.core.model.requests import GANG, GANG_SIZE
from topoalign.registry.ports import SeenPodGroup
from topoalign.registry.scheduling.binding.gang_binding import GangWaits
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio
PODS = ("a", "b", "c", "d")
ANNOTATION = {"scheduling.volcano.sh/group-name": "train"}


@pytest.fixture
def site() -> Site:
    """Two nodes with four GPUs each."""
    return Site()


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Registry]:
    bus = MemoryBus()
    one = Registry(site, bus)
    async with running(site, bus, one):
        yield one


def create(site: Site, *pods: str, gpus: int = 2, more: dict[str, str] | None = None) -> dict[str, str]:
    """Pod -> UID of these members of the group."""
    return {name: site.add(name, gpus=gpus, annotations=ANNOTATION | (more or {})) for name in pods}


def see_group(registry: Registry, minimum: int | None, uid: str = "g1", name: str = "train") -> None:
    registry.gangs.listed_pod_groups.add(VOLCANO)
    registry.gangs.see_pod_group(VOLCANO, SeenPodGroup(namespace="ml", name=name, uid=uid, minimum=minimum))


def reserved(registry: Registry) -> list[str]:
    """The pods with a reservation."""
    return sorted(pod for node in registry.site.ledgers for pod in registry.reserved(node))


async def test_a_pod_waits_for_its_pod_group(site: Site, registry: Registry) -> None:
    uids = create(site, *PODS)
    await registry.see(*PODS)
    see_group(registry, 4, name="serve")
    with pytest.raises(GangWaits, match="the API server reports no PodGroup of scheduling"):
        await registry.bind("a", uids["a"])
    see_group(registry, 4, uid="g2")
    await registry.bind("a", uids["a"])

    assert [*PODS] == reserved(registry)


async def test_a_pod_group_that_was_deleted_is_missing(site: Site, registry: Registry) -> None:
    uids = create(site, *PODS)
    await registry.see(*PODS)
    see_group(registry, 4)
    registry.gangs.lose_pod_group(VOLCANO, "ml/train")

    with pytest.raises(GangWaits, match="no PodGroup"):
        await registry.bind("b", uids["b"])


async def test_fewer_pods_than_the_minimum_wait(site: Site, registry: Registry) -> None:
    uids = create(site, "a", "b")
    await registry.see("a", "b")
    see_group(registry, 3)

    with pytest.raises(GangWaits, match="not all of its pods are there yet: 2 of 3"):
        await registry.bind("a", uids["a"])


async def test_more_pods_than_the_minimum_are_planned_as_far_as_they_fit(site: Site, registry: Registry) -> None:
    """Two of three pods with a whole node each."""
    uids = create(site, "a", "b", "c", gpus=4)
    await registry.see("a", "b", "c")
    see_group(registry, 2)
    await registry.bind("c", uids["c"], "node-2")

    assert "node-2" == site.node_of("c")
    assert 2 == len(reserved(registry))


async def test_nothing_is_reserved_if_fewer_than_the_minimum_fit(site: Site, registry: Registry) -> None:
    uids = create(site, "a", "b", "c", gpus=4)
    await registry.see("a", "b", "c")
    see_group(registry, 3)
    with pytest.raises(GangWaits, match="does not fit as a whole"):
        await registry.bind("a", uids["a"])

    assert [] == reserved(registry)


async def test_a_pod_beyond_the_minimum_is_planned_alone(site: Site, registry: Registry) -> None:
    """The gang has started: the bound pods count towards the minimum."""
    uids = create(site, "a", "b")
    await registry.see("a", "b")
    see_group(registry, 2)
    for pod in ("a", "b"):
        await registry.bind(pod, uids[pod], registry.gangs.node_of(uids[pod]) or "node-1")
    late = create(site, "c", "d", "e", gpus=4)
    await registry.see("a", "b", "c", "d", "e")
    await registry.bind("d", late["d"], "node-2")

    assert "node-2" == site.node_of("d")
    assert ["a", "b", "d"] == reserved(registry)


async def test_pods_of_a_group_without_a_minimum_are_bound_one_by_one(site: Site, registry: Registry) -> None:
    uids = create(site, "a", "b", "c", gpus=4)
    await registry.see("a", "b", "c")
    see_group(registry, None)
    await registry.bind("a", uids["a"])

    assert ["a"] == reserved(registry)
    assert [] == registry.gangs.waiting_with(uids["b"])


async def test_sizes_of_two_sources_that_differ_are_named(site: Site, registry: Registry) -> None:
    uids = create(site, *PODS, more={GANG: "train", GANG_SIZE: "4"})
    await registry.see(*PODS)
    see_group(registry, 3)
    finding = r"topoalign.io/gang-size is for 4 pods, and the PodGroup of scheduling.volcano.sh for 3 pods"
    with pytest.raises(GangWaits, match=finding):
        await registry.bind("a", uids["a"])
    see_group(registry, 4)
    await registry.bind("a", uids["a"])

    assert [*PODS] == reserved(registry)
