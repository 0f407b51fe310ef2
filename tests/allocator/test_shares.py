"""Shares of GPUs over the kubelet's protocol: no container has halves on two GPUs, and none has another's GPU."""

import pytest
from share_support import DEFAULT, NAMES, OTHER_ORDER, ShareNode
from unit_support import MEMORY

from topoalign.allocator.reconciliation import reconciliation
from topoalign.allocator.reconciliation.usage_publisher import is_recorded_here
from topoalign.core.model.decisions import Admission, Decision, Refusal
from topoalign.core.model.ids import DeviceID, PodName, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.core.sharing.share_refusals import WholeGpuInUse

pytestmark = pytest.mark.anyio

ORDERS = pytest.mark.parametrize("names", [NAMES, OTHER_ORDER], ids=["cores-first", "memory-first"])
Names = tuple[ResourceName, ResourceName]


def is_refused(decision: Decision, finding: str) -> bool:
    return isinstance(decision, Refusal) and finding in decision.finding


def without_judgement(it: ShareNode) -> None:
    """Allocate lets everything through, as if it knew of nobody."""
    it.allocations._units.conflicts = lambda *_: []  # type: ignore[method-assign]  # broken on purpose


@ORDERS
async def test_both_halves_of_a_share_are_of_one_gpu(names: Names) -> None:
    async with ShareNode.running(names=names) as (it, _):
        pods = [f"p{number}" for number in range(6)]
        for name in pods:
            assert isinstance(await it.admit(name, (30, 4), (20, 3)), Admission)

        await it.check(pods)


@ORDERS
async def test_reserved_whole_gpus_come_with_their_memory(names: Names) -> None:
    """Two GPUs with blocks of both, asked for in either order, beside a small share."""
    async with ShareNode.running(names=names) as (it, _):
        assert isinstance(await it.admit("small", (10, 1)), Admission)
        it.reserve(it.pod("large", (200, 10)))

        assert isinstance(await it.admit("large", (200, 10)), Admission)
        await it.check(["small", "large"])


@ORDERS
async def test_memory_of_a_whole_gpu_needs_a_reservation(names: Names) -> None:
    """Nothing tells whether memory belongs to the container that has just got a whole GPU, or to another one."""
    async with ShareNode.running(names=names) as (it, _):
        refusal = await it.admit("p", (100, 4))

        assert is_refused(refusal, "of 2 GPUs")
        assert [("c0", "ShareSplit")] == it.refusals("p")


@ORDERS
async def test_a_whole_gpu_is_not_given_beside_memory_of_another_pod(names: Names) -> None:
    """The memory was granted a moment ago, and its container is not known yet: it is not taken for the other half."""
    async with ShareNode.running(names=names) as (it, _):
        it.forced = it.units(1, 100, 4)
        assert isinstance(await it.admit("memory", (0, 4)), Admission)

        assert is_refused(await it.admit("whole", (100, 0)), "a whole GPU is nobody else's")
        await it.check(["memory"])


async def test_memory_is_not_given_of_a_gpu_that_another_pod_has_whole() -> None:
    """The kubelet is not offered it either, but may not have received that yet."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(1, 100)
        assert isinstance(await it.admit("whole", (100, 0)), Admission)

        with pytest.raises(WholeGpuInUse):
            await it.allocations.allocate(MEMORY, [it.units(1, 0, 4)[MEMORY]])
        await it.listed()
        assert isinstance(await it.admit("memory", (0, 4)), Admission)
        await it.check(["whole", "memory"])


@pytest.mark.parametrize("shares", [[(0, 4), (100, 0)], [(100, 0), (0, 4)]], ids=["memory-first", "whole-first"])
async def test_neither_starts_that_has_a_gpu_whole_nor_who_shares_it(shares: list[tuple[int, int]]) -> None:
    """Whatever Allocate let through; and each refusal is recorded once, however often the kubelet tries."""
    async with ShareNode.running() as (it, _):
        it.forced = it.units(1, 100, 4)
        without_judgement(it)
        for name, share in zip(("former", "later"), shares, strict=True):
            decision = await it.kubelet.admit(it.pod(name, share), f"uid-{name}", start=False)
            assert isinstance(decision, Admission)

        for name in ("later", "former", "later"):
            with pytest.raises(Exception, match="nobody else's"):
                await it.kubelet.start_containers(DEFAULT, PodName(name))
        assert [("c0", "WholeGpuInUse")] == it.refusals("later") == it.refusals("former")


@ORDERS
async def test_the_successor_of_a_whole_gpu_starts_while_its_record_lives(names: Names) -> None:
    async with ShareNode.running(names=names) as (it, _):
        it.forced = it.units(2, 100, 4)
        it.keep(first=it.units(2, 100, 4))
        assert isinstance(await it.admit("first", (100, 4)), Admission)
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("first"))
        assert 2 == len(it.ledger.state.allocations)

        assert isinstance(await it.admit("second", (100, 0)), Admission)
        await it.check(["second"])


async def test_a_whole_gpu_is_given_whose_last_share_has_ended() -> None:
    """The record has the share still, and the kubelet knows better."""
    async with ShareNode.running() as (it, _):
        for number in range(4):
            it.forced = it.units(number, 0, 10)
            await it.admit(f"small-{number}", (0, 10))
        it.forced = {}
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("small-2"))

        decision = await it.admit("large", (100, 0))

        assert isinstance(decision, Admission), decision.finding


@ORDERS
@pytest.mark.parametrize("app", [(100, 8), (20, 4), (100, 0)], ids=str)
@pytest.mark.parametrize("init", [(100, 8), (100, 0), (20, 4)], ids=str)
async def test_containers_of_one_pod_take_over_from_one_another(
    names: Names, init: tuple[int, int], app: tuple[int, int]
) -> None:
    """Init containers leave their units to app containers: of a whole GPU, these do not count against each other."""
    async with ShareNode.running(names=names) as (it, _):
        it.reserve(it.pod("p", app, init=(init,)))

        assert isinstance(await it.admit("p", app, init=(init,)), Admission)
        await it.check(["p"])


async def test_a_repeated_allocate_of_a_whole_gpu_is_given_the_same() -> None:
    async with ShareNode.running() as (it, _):
        it.keep(p=it.units(2, 100, 4))
        assert isinstance(await it.admit("p", (100, 4)), Admission)
        former = {**it.ledger.state.allocations}

        for resource, units in it.units(2, 100, 4).items():
            (again,) = await it.allocations.allocate(resource, [units])
            assert former[again.id].devices == again.devices


@pytest.mark.parametrize("names", [NAMES])
async def test_a_failed_second_half_leaves_room_after_a_moment(names: Names) -> None:
    async with ShareNode.running(names=names) as (it, _):
        await it.allocations.allocate(names[0], [it.units(0, 20)[names[0]]])
        it.forced = it.units(0, 100)
        await it.allocations.reconcile()
        await it.clock.advance(6)

        assert isinstance(await it.admit("whole", (100, 0)), Admission)
        await it.check(["whole"])


async def test_the_owner_of_hundreds_of_units_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of three whole GPUs are looked at once at most, and not each of them for every other one."""
    async with ShareNode.running() as (it, _):
        assert isinstance(await it.admit("a", (300, 0)), Admission)
        await it.check(["a"])
        looked: list[DeviceID] = []

        def counting(hardware: Topology, resource: ResourceName, unit: DeviceID) -> bool:
            looked.append(unit)
            return is_recorded_here(hardware, resource, unit)

        monkeypatch.setattr(reconciliation, "is_recorded_here", counting)
        await it.allocations.reconcile()

        assert len(looked) <= 300
