"""Pods that come between the halves of others, and those that take over from init containers; nobody else suffers."""

from random import Random
from typing import Any

import anyio
import pytest
from share_support import DEFAULT, NAMES, OTHER_ORDER, ShareNode
from unit_support import CORES, MEMORY

from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, PodName, ResourceName
from topoalign.core.sharing.share_refusals import ShareSplit, WholeGpuInUse

pytestmark = pytest.mark.anyio

Names = tuple[ResourceName, ResourceName]
Amount = tuple[int, int]
ORDERS = pytest.mark.parametrize("names", [NAMES, OTHER_ORDER], ids=["cores-first", "memory-first"])


def refused_at_allocate(it: ShareNode, name: str, decision: Decision) -> bool:
    """As it is the whole GPU of another, or another's would be its own."""
    assert isinstance(decision, Refusal)
    return decision.code == "AllocateFailed" and "WholeGpuInUse" in decision.finding and not it.refusals(name)


def gpu_of(it: ShareNode, name: str) -> set[str]:
    return {gpu for halves in it.gpus(name).values() for units in halves.values() for gpu in units}


def units(gpu: int, cores: range, memory: range) -> dict[ResourceName, list[DeviceID]]:
    return {
        CORES: [DeviceID(f"GPU-{gpu}::c{n}") for n in cores],
        MEMORY: [DeviceID(f"GPU-{gpu}::m{n}") for n in memory],
    }


async def test_units_of_a_lost_whole_gpu_are_not_given() -> None:
    """The kubelet has lost its checkpoint, and believes that nobody has any units; the container of a runs on."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(0, 100)
        assert isinstance(await it.admit("a", (100, 0)), Admission)
        await it.allocations.reconcile()
        await it.restart_kubelet(knowing=False)

        for name, first in (("b", 0), ("c", 20)):
            it.forced = units(0, range(first, first + 20), range(4))
            assert refused_at_allocate(it, name, await it.admit(name, (20, 4)))


async def test_who_has_units_of_a_lost_whole_gpu_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    What a had is in three records by then, none of them of a whole GPU. Its memory may be listed as healthy still, and
    Allocate lets everything through.
    """
    monkeypatch.setattr("topoalign.core.state.ownership.spent_unit_gpus", lambda *_: frozenset())
    async with ShareNode.running() as (it, _):
        it.forced = it.units(0, 100)
        assert isinstance(await it.admit("a", (100, 0)), Admission)
        await it.allocations.reconcile()
        await it.restart_kubelet(knowing=False)
        it.allocations._units.conflicts = lambda *_: []  # type: ignore[method-assign]  # broken on purpose

        for name, first in (("b", 0), ("c", 20)):
            it.forced = units(0, range(first, first + 20), range(4))
            decision = await it.admit(name, (20, 4))
            assert [("c0", "WholeGpuInUse")] == it.refusals(name), decision


@ORDERS
@pytest.mark.parametrize("shares", [((100, 8), (100, 4)), ((20, 8), (100, 2)), ((0, 8), (100, 4))], ids=str)
async def test_a_reserved_app_takes_over_some_memory_of_an_init_container(
    names: Names, shares: tuple[Amount, Amount]
) -> None:
    """Whichever blocks the kubelet picks: they need not be those that are reserved."""
    init, app = shares
    for seed in range(3):
        async with ShareNode.running(names=names, chance=Random(seed)) as (it, _):
            it.reserve(it.pod("p", app, init=(init,)))

            decision = await it.admit("p", app, init=(init,))
            assert isinstance(decision, Admission), decision.finding
            await it.check(["p"])


@ORDERS
@pytest.mark.parametrize("reserved", [True, False], ids=["reserved", "unreserved"])
async def test_whole_gpus_are_taken_over_with_others_beside_them(names: Names, reserved: bool) -> None:
    async with ShareNode.running(names=names, chance=Random(1)) as (it, _):
        if reserved:
            it.reserve(it.pod("p", (200, 0), init=((100, 0),)))

        assert isinstance(await it.admit("p", (200, 0), init=((100, 0),)), Admission)
        await it.check(["p"])


@ORDERS
async def test_memory_of_its_own_init_container_does_not_keep_a_gpu(names: Names) -> None:
    async with ShareNode.running(names=names) as (it, _):
        assert isinstance(await it.admit("p", (100, 0), init=((20, 4),)), Admission)
        await it.check(["p"])


@ORDERS
@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
async def test_a_first_half_that_stays_alone_spoils_no_reserved_pod(names: Names, full: bool) -> None:
    """A pod has failed after it got 20 of GPU-0, of which there is memory, or none."""
    async with ShareNode.running(names=names) as (it, _):
        if full:
            it.forced = it.units(0, 0, 16)
            assert isinstance(await it.admit("memory", (0, 16)), Admission)
            it.forced = {}
        await it.allocations.allocate(names[0], [it.units(0, 20)[names[0]]])
        it.keep(p=it.units(1, 20, 8))

        decision = await it.admit("p", (20, 8))

        assert isinstance(decision, Admission), decision.finding
        await it.check(["p", "memory"] if full else ["p"])


@ORDERS
async def test_an_owner_that_is_known_between_the_halves_keeps_its_own_gpu(names: Names) -> None:
    """
    The kubelet gives a pod what is reserved for another one, lists the first half at once, and has not written it down. So
    of its owner the name is known, and of the pod that asks for the second half the UID.
    """
    async with ShareNode.running(names=names) as (it, _):
        it.keep(other=it.units(1, 100, 4), p=it.units(0, 100, 4))
        first, second = sorted(names)
        it.forced = {first: it.units(1, 100, 4)[first]}
        prefer = it.allocations.prefer

        async def known(resource: ResourceName, *asked: object) -> object:
            if resource == second:
                await it.allocations.reconcile()
                assert [("p", "")] == [
                    (each.owner and each.owner.pod, each.pod_uid) for each in it.ledger.state.allocations.values()
                ]
            return await prefer(resource, *asked)  # type: ignore[arg-type]  # passes on any question

        it.allocations.prefer = known  # type: ignore[assignment,method-assign]  # compares the record before
        decision = await it.admit("p", (100, 4))

        assert isinstance(decision, Admission), decision.finding
        await it.check(["p"])
        assert {"GPU-1"} == gpu_of(it, "p")


@ORDERS
async def test_a_half_that_a_kubelet_has_not_noted_yet_is_nothing_left_over(names: Names) -> None:
    """
    The kubelet writes its checkpoint between the grant of the first half and its own note of that, as it does whenever a
    plugin lists devices. It lists no init container.
    """
    async with ShareNode.running(names=names) as (it, _):
        it.reserve(it.pod("p", (100, 4), init=((100, 4),)))
        allocate, halves = it.allocations.allocate, list[AllocationID]()

        async def allocated(*asked: Any) -> tuple[Allocation, ...]:
            given = await allocate(*asked)
            it.kubelet.heard()
            halves.extend(each.id for each in given)
            if len(halves) == 2:
                assert {*halves} == {*it.ledger.state.allocations}
            return given

        it.allocations.allocate = allocated  # type: ignore[assignment,method-assign]  # the kubelet writes before it has the answer
        decision = await it.admit("p", (100, 4), init=((100, 4),))

        assert isinstance(decision, Admission), decision.finding
        assert 4 == len(halves)
        await it.check(["p"])


@ORDERS
async def test_what_a_pod_of_a_moment_left_keeps_a_whole_gpu_for_five_seconds(names: Names) -> None:
    """Of its init container nobody knows whose units they are, although the kubelet has dropped all of it."""
    async with ShareNode.running(names=names) as (it, _):
        it.forced = it.units(0, 30, 6)
        assert isinstance(await it.admit("old", (20, 2), init=((30, 6),)), Admission)
        await it.allocations.reconcile()
        await it.drop("old")
        it.forced = it.units(3, 10, 1)
        assert isinstance(await it.admit("other", (10, 1)), Admission)

        it.forced = it.units(0, 100)
        early = await it.admit("early", (100, 0))
        await it.remove("early")
        await it.clock.advance(5)
        decision = await it.admit("large", (100, 0))

        assert not isinstance(early, Admission)
        assert isinstance(decision, Admission), decision.finding
        it.forced = {}
        await it.check(["other", "large"])


async def test_reserved_memory_is_given_after_another_half() -> None:
    async with ShareNode.running() as (it, _):
        await it.allocations.allocate(CORES, [it.units(0, 20)[CORES]])
        it.keep(p=it.units(1, 0, 8))

        assert isinstance(await it.admit("p", (0, 8)), Admission)
        assert {"GPU-1"} == gpu_of(it, "p")


@ORDERS
async def test_who_was_given_reserved_memory_of_a_whole_gpu_starts(names: Names) -> None:
    """The pod of the reservation comes too late, and is refused: at Allocate, or as its halves are of two GPUs."""
    async with ShareNode.running(names=names) as (it, _):
        it.keep(late=it.units(2, 100, 4))
        assert isinstance(await it.kubelet.admit(it.pod("p", (0, 4)), "uid-p", start=False), Admission)

        late = await it.kubelet.admit(it.pod("late", (100, 4)), "uid-late", start=False)

        assert isinstance(late, Refusal)
        await it.kubelet.start_containers(DEFAULT, PodName("p"))
        await it.check(["p"])


async def test_a_container_that_cannot_start_keeps_nobody_from_it() -> None:
    async with ShareNode.running() as (it, _):
        it.allocations._units.conflicts = lambda *_: []  # type: ignore[method-assign]  # broken on purpose
        for name, share, forced in (
            ("p", (0, 4), it.units(2, 0, 4)),
            ("split", (100, 4), {**it.units(2, 100), **it.units(1, 0, 4)}),
        ):
            it.forced = forced
            await it.kubelet.admit(it.pod(name, share), f"uid-{name}", start=False)

        with pytest.raises(Exception, match="of 2 GPUs"):
            await it.kubelet.start_containers(DEFAULT, PodName("split"))
        await it.kubelet.start_containers(DEFAULT, PodName("p"))


async def test_two_app_containers_of_a_pod_exclude_one_another() -> None:
    """PodResources shows both, so neither has ended."""
    async with ShareNode.running() as (it, _):
        it.allocations._units.conflicts = lambda *_: []  # type: ignore[method-assign]  # broken on purpose
        it.forced = {**it.units(0, 100), **it.units(0, 0, 4)}
        decision = await it.admit("p", (100, 0), (0, 4))

        assert isinstance(decision, Refusal)
        assert [("c0", "WholeGpuInUse")] == it.refusals("p")


async def test_memory_is_not_given_of_a_gpu_that_an_init_container_has_whole() -> None:
    """By the record nobody has it whole: the app container has taken over a part."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(0, 100)
        prefer = it.allocations.prefer

        async def forced_once(resource: ResourceName, *asked: object) -> object:
            it.forced = {} if resource == MEMORY else it.forced
            return await prefer(resource, *asked)  # type: ignore[arg-type]  # passes on any question

        it.allocations.prefer = forced_once  # type: ignore[assignment,method-assign]  # forces one answer
        assert isinstance(await it.admit("p", (20, 4), init=((100, 0),)), Admission)
        it.allocations.prefer = prefer  # type: ignore[method-assign]  # as it was
        it.forced = units(0, range(0), range(4, 8))

        assert refused_at_allocate(it, "q", await it.admit("q", (0, 4)))
        (predicted,) = it.reserve(it.pod("q", (0, 4)))
        assert isinstance(predicted, Admission), "there are other GPUs"


async def test_calls_that_are_recorded_together_know_of_one_another() -> None:
    async with ShareNode.running() as (it, _):
        outcome: dict[str, object] = {}

        async def ask(resource: ResourceName, devices: list[DeviceID]) -> None:
            try:
                outcome[resource] = await it.allocations.allocate(resource, [devices])
            except ShareSplit as error:
                outcome[resource] = error

        async with anyio.create_task_group() as calls:
            calls.start_soon(ask, CORES, it.units(0, 20)[CORES])
            calls.start_soon(ask, MEMORY, it.units(1, 0, 4)[MEMORY])

        assert isinstance(outcome[MEMORY], ShareSplit)


async def test_a_share_is_not_given_beside_a_whole_gpu_that_is_in_the_checkpoint() -> None:
    """Also by an agent that has just started."""
    async with ShareNode.running() as (it, tasks):
        it.forced = it.units(0, 100)
        assert isinstance(await it.admit("p", (100, 0)), Admission)
        await it.start_agent(tasks)

        with pytest.raises(WholeGpuInUse):
            await it.allocations.allocate(MEMORY, [it.units(0, 0, 4)[MEMORY]])
