"""Which units a kubelet is told to take, and what it is told of GPUs of which nothing is left."""

from collections.abc import Sequence
from random import Random

import anyio
import pytest
from share_support import DEFAULT, PLAIN, ShareNode
from unit_support import CORES, MEMORY

from topoalign.allocator.ports import KubeletListing
from topoalign.core.demand.share_annotations import InvalidShare
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.ids import DeviceID, PodName
from topoalign.core.sharing.share_refusals import ShareSplit

pytestmark = pytest.mark.anyio


def gpus(units: Sequence[DeviceID]) -> set[str]:
    return {unit.partition("::")[0] for unit in units}


async def test_units_of_two_gpus_are_refused_at_allocate() -> None:
    async with ShareNode.running() as (it, _):
        units = [DeviceID(f"GPU-{number}::c0") for number in range(2)]

        with pytest.raises(ShareSplit, match="devices_ids"):
            await it.allocations.allocate(CORES, [units])
        with pytest.raises(InvalidShare, match="devices_ids"):
            await it.allocations.allocate(CORES, [[DeviceID(f"GPU-{n // 100}::c{n % 100}") for n in range(150)]])

        assert {} == dict(it.ledger.state.allocations)


async def test_memory_of_another_gpu_than_the_computing_time_is_refused() -> None:
    """Once: the next one may be of another container, after the first pod was refused."""
    async with ShareNode.running() as (it, _):
        await it.allocations.allocate(CORES, [it.units(0, 20)[CORES]])

        with pytest.raises(ShareSplit, match="GPU-0"):
            await it.allocations.allocate(MEMORY, [it.units(1, 0, 4)[MEMORY]])
        await it.allocations.allocate(MEMORY, [it.units(1, 0, 4)[MEMORY]])


async def test_a_container_with_halves_of_two_gpus_does_not_start() -> None:
    async with ShareNode.running() as (it, _):
        it.forced = {**it.units(0, 20), **it.units(1, 0, 4)}
        it.allocations._units.check_half = lambda *_: None  # type: ignore[method-assign]  # broken on purpose

        decision = await it.admit("p", (20, 4))

        assert isinstance(decision, Refusal)
        assert "of 2 GPUs" in decision.finding
        assert [("c0", "ShareSplit")] == it.refusals("p")


async def test_a_container_starts_once_the_checkpoint_has_its_units() -> None:
    """All of them, and no others: before, it is not known what the container has besides."""
    async with ShareNode.running() as (it, _):
        units = it.units(0, 20)[CORES]
        with pytest.raises(Unavailable, match=f"checkpoint does not have the 20 {CORES} of the container"):
            await it.allocations.start_container(CORES, units)
        it.forced = it.units(0, 20, 4)
        assert isinstance(await it.admit("p", (20, 4)), Admission)
        await it.allocations.start_container(CORES, units)

        with pytest.raises(Unavailable, match="does not have the 10"):
            await it.allocations.start_container(CORES, units[:10])


async def test_only_what_was_granted_a_moment_ago_is_followed() -> None:
    """The best GPU for memory is GPU-1, of which the least is left; the newest grant is of GPU-3."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(1, 50, 4)
        assert isinstance(await it.admit("p", (50, 4)), Admission)
        free = it.units(1, 0, 16)[MEMORY][4:] + it.units(3, 0, 16)[MEMORY]
        await it.allocations.allocate(CORES, [it.units(3, 20)[CORES]])
        it.forced = {}

        assert {"GPU-3"} == gpus(await it.allocations.prefer(MEMORY, free, (), 4))
        await it.clock.advance(6)
        assert {"GPU-1"} == gpus(await it.allocations.prefer(MEMORY, free, (), 4))


async def test_a_whole_gpu_is_followed_by_no_memory() -> None:
    async with ShareNode.running() as (it, _):
        await it.allocations.allocate(CORES, [it.units(3, 100)[CORES]])

        free = [unit for number in range(4) for unit in it.units(number, 0, 16)[MEMORY]]
        assert "GPU-3" not in gpus(await it.allocations.prefer(MEMORY, free, (), 4))


async def test_a_gpu_of_which_nothing_is_left_is_listed_so_and_given_if_asked() -> None:
    """Only once the checkpoint has all its containers: before, the kubelet may be about to ask for the other half."""
    async with ShareNode.running() as (it, _):
        rest = it.units(0, 0, 16)[MEMORY][8:]
        it.forced = it.units(0, 100, 8)
        await it.kubelet.admit(it.pod("p", (60, 4)), "uid-p", start=False)
        it.forced = {CORES: it.forced[CORES][60:], MEMORY: it.forced[MEMORY][4:]}
        await it.allocations.allocate(CORES, [it.units(0, 100)[CORES][60:]])
        await it.allocations.reconcile()
        assert {*rest} <= {*it.ledger.state.healthy(MEMORY)}
        await it.allocations.allocate(MEMORY, [rest[:1]])


async def test_units_of_a_spent_gpu_are_unhealthy_for_the_kubelet_alone() -> None:
    async with ShareNode.running() as (it, _):
        for name, cores in (("a", range(60)), ("b", range(60, 100))):
            blocks = it.units(0, 0, 8)[MEMORY][:4] if name == "a" else it.units(0, 0, 8)[MEMORY][4:]
            it.forced = {CORES: [DeviceID(f"GPU-0::c{n}") for n in cores], MEMORY: blocks}
            assert isinstance(await it.admit(name, (len(cores), 4)), Admission)
        await it.allocations.reconcile()
        rest = it.units(0, 0, 16)[MEMORY][8:]

        assert {*rest}.isdisjoint(it.ledger.state.healthy(MEMORY))
        await it.listed()
        assert {*rest}.isdisjoint(it.kubelet.state().healthy(MEMORY))
        (given,) = await it.allocations.allocate(MEMORY, [rest[:2]])
        assert {*rest[:2]} == {*given.device_ids}


async def test_the_halves_of_a_reservation_are_tied() -> None:
    """The kubelet comes for b first, and is given a's computing time: then b's memory is of another GPU."""
    async with ShareNode.running() as (it, _):
        it.keep(a=it.units(0, 20, 8), b=it.units(2, 20, 4))

        assert isinstance(await it.admit("b", (20, 4)), Admission)
        assert isinstance(await it.admit("a", (20, 8)), Admission)
        await it.check(["a", "b"])


async def test_units_of_a_pod_that_has_others_are_followed() -> None:
    """Two pods ask for the same: the first has what is reserved for the second, which is given what was for the first."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(0, 50, 4)
        assert isinstance(await it.admit("x", (50, 4)), Admission)
        both = it.units(1, 60, 8)
        first = {CORES: both[CORES][:30], MEMORY: both[MEMORY][:4]}
        second = {CORES: both[CORES][30:], MEMORY: both[MEMORY][4:]}
        it.keep(a=second, b=first)
        it.forced = first
        assert isinstance(await it.admit("a", (30, 4)), Admission)
        await it.allocations.reconcile()
        it.forced = {}

        await it.allocations.allocate(MEMORY, [second[MEMORY]])

        free = it.units(0, 100)[CORES][50:] + it.units(1, 100)[CORES][30:]
        assert {"GPU-1"} == gpus(await it.allocations.prefer(CORES, free, (), 30))


async def test_computing_time_is_put_where_least_is_left() -> None:
    async with ShareNode.running() as (it, _):
        it.forced = it.units(2, 50, 4)
        assert isinstance(await it.admit("p", (50, 4)), Admission)
        it.forced = {}
        free = [unit for number in (0, 1, 3) for unit in it.units(number, 100)[CORES]] + it.units(2, 100)[CORES][50:]

        assert {"GPU-2"} == gpus(await it.allocations.prefer(CORES, free, (), 20))


async def test_what_is_reserved_of_either_kind_is_spared() -> None:
    """GPU-1 fits best, but by its memory it is reserved."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(1, 50, 1)
        assert isinstance(await it.admit("p", (50, 1)), Admission)
        it.forced = {}
        it.keep(a={MEMORY: it.units(1, 0, 16)[MEMORY][1:]})

        assert isinstance(await it.admit("b", (20, 4)), Admission)
        assert all("GPU-1" not in units for units in it.gpus("b")["c0"].values())
        await it.check(["p", "b"])


async def test_containers_that_start_together_share_polls() -> None:
    async with ShareNode.running() as (it, _):
        assert isinstance(await it.admit("p", (20, 4)), Admission)
        listing, polls = it.pod_resources.listing, 0

        async def counted(seconds: float | None = None) -> KubeletListing:
            nonlocal polls
            polls += 1
            return await listing(seconds)

        it.pod_resources.listing = counted  # type: ignore[method-assign]  # counts the calls
        units = it.kubelet.running[DEFAULT, PodName("p")].allocations[0].devices[CORES]
        async with anyio.create_task_group() as starting:
            for _ in range(50):
                starting.start_soon(it.allocations.start_container, CORES, units)

        assert polls <= 3


async def test_units_are_judged_after_they_are_offered_no_more() -> None:
    """The configuration may have changed since they were given."""
    async with ShareNode.running() as (it, tasks):
        it.forced = {**it.units(0, 20), **it.units(1, 0, 4)}
        it.allocations._units.check_half = lambda *_: None  # type: ignore[method-assign]  # broken on purpose
        await it.kubelet.admit(it.pod("p", (20, 4)), "uid-p", start=False)
        await it.start_agent(tasks, PLAIN)

        with pytest.raises(ShareSplit):
            await it.allocations.start_container(CORES, it.units(0, 20)[CORES])


@pytest.mark.parametrize("reserved", [True, False])
async def test_an_init_container_of_split_units_is_named_by_its_reservation(reserved: bool) -> None:
    """PodResources shows no other container of its pod, and its checkpoint has no names."""
    async with ShareNode.running() as (it, _):
        if reserved:
            it.keep(p=it.units(0, 20, 4))
        it.forced = {**it.units(0, 20), **it.units(1, 0, 4)}
        it.allocations._units.check_half = lambda *_: None  # type: ignore[method-assign]  # broken on purpose
        await it.kubelet.admit(it.pod("p", (0, 0), init=((20, 4),)), "uid-p", start=False)

        for _ in range(2):
            with pytest.raises(ShareSplit):
                await it.allocations.start_container(CORES, it.units(0, 20)[CORES])

        assert [("c0", "ShareSplit")] * reserved == it.refusals("p")


@pytest.mark.parametrize("seed", range(2))
async def test_a_pod_that_is_gone_does_not_count(seed: int) -> None:
    """Its entries stay in the checkpoint until the kubelet writes that."""
    async with ShareNode.running() as (it, _):
        it.allocations._units.conflicts = lambda *_: []  # type: ignore[method-assign]  # broken on purpose
        it.forced = it.units(1, 100, 4)
        shares = Random(seed).sample([(100, 0), (0, 4)], 2)
        for name, share in zip(("gone", "stays"), shares, strict=True):
            await it.kubelet.admit(it.pod(name, share), f"uid-{name}", start=False)
        await it.kubelet.remove(DEFAULT, PodName("gone"))

        await it.kubelet.start_containers(DEFAULT, PodName("stays"))
