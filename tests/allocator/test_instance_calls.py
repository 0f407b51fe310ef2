"""Calls for slots that become MIG instances which come at the same time, or one after another."""

from typing import Any

import anyio
import pytest
from slot_node_support import Ask, InstanceNode

from topoalign.allocator.mig.calls import SEEN_SECONDS
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission, Decision
from topoalign.core.model.errors import DeviceInUse, DriverFault
from topoalign.core.model.ids import GPU, DeviceID

pytestmark = pytest.mark.anyio


def miss(it: InstanceNode) -> None:
    """Discovery reports a reading that began before the instances were made that exist."""
    there = dict(it.played.instances)
    it.played.instances.clear()
    it.see()
    it.played.instances.update(there)


async def test_two_calls_for_one_slot_at_a_time_get_one_instance() -> None:
    """A kubelet that has started anew repeats what the former one asked for."""
    async with InstanceNode.running() as (it, _):
        slot, found = DeviceID(f"{it.machine.gpus[0].id}::0"), list[Allocation]()

        async def allocate() -> None:
            found.extend(await it.allocations.allocate(GPU, [[slot]]))

        async with anyio.create_task_group() as calls:
            calls.start_soon(allocate)
            calls.start_soon(allocate)

        assert [it.there()] * 2 == [{*each.instances.values()} for each in found]
        assert 1 == len(it.there())


async def test_the_instance_of_a_container_that_is_about_to_begin_stays() -> None:
    """
    An app container takes over the slot of its init container, which is reserved for another pod with more memory: the init
    container begins after both calls.
    """
    async with InstanceNode.running() as (it, _):
        (decision,) = it.reserve(it.asking("other", Ask(1, memory=6_000)))
        assert isinstance(decision, Admission)
        (slot,) = decision.allocations[0].devices[GPU]
        beside = next(each.id for each in it.machine.gpus if not slot.startswith(each.id))
        (before,) = await it.allocations.allocate(GPU, [[slot, DeviceID(f"{beside}::0")]])

        with pytest.raises(DeviceInUse):
            await it.allocations.allocate(GPU, [[slot]])

        await it.sweep()
        assert {*before.instances.values()} == it.there()


async def test_a_container_that_displaces_another_has_an_instance_of_its_own() -> None:
    """The kubelet has lost its checkpoint and gives the slot of a container that runs to another one."""
    async with InstanceNode.running() as (it, _):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        await it.allocations.reconcile()
        ((_, former),) = it.ledger.state.allocations.items()
        (slot,), running = former.devices[GPU], it.there()
        await it.restart_kubelet(knowing=False)

        (other,) = await it.allocations.allocate(GPU, [[slot]])

        assert {former.id} == {each.allocation for each in other.displaced}
        assert running.isdisjoint(other.instances.values())
        await it.sweep()
        assert running | {*other.instances.values()} == it.there()


async def test_an_old_reading_that_comes_during_an_allocate_fails_no_pod() -> None:
    """
    The driver uses the uuid of an instance again that discovery tells of still. Discovery's next reading began when neither
    was there, and comes when the new one is recorded.
    """
    async with InstanceNode.running() as (it, tasks):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        was, decisions, granted = it.told("a"), list[Decision](), it.ledger.grant
        it.played.changed = lambda: None
        await it.remove("a")
        await it.sweep()
        it.played.made = 0
        assert (set(), was) == (it.there(), {*it.ledger.state.hardware.parents})

        def grant(*asked: Any, **named: Any) -> None:
            granted(*asked, **named)
            miss(it)

        async def admit() -> None:
            decisions.append(await it.admit_pod(it.asking("b", Ask(1))))

        it.ledger.grant = grant  # type: ignore[method-assign]  # a reading comes at this moment
        tasks.start_soon(admit)
        while not decisions and not it.ledger.state.allocations:
            await anyio.lowlevel.checkpoint()
        it.see()
        while not decisions:
            await anyio.lowlevel.checkpoint()

        assert isinstance(decisions[0], Admission), decisions
        assert was == it.told("b")


async def test_a_recorded_call_that_fails_leaves_its_instance_to_the_next() -> None:
    """
    Discovery sees the instance after 15 s, and its next reading, when the call is recorded, lacks it: 5 s are left. A sweep
    leaves it alone, and a kubelet that asks for the slot again gets it.
    """
    async with InstanceNode.running() as (it, tasks):
        slot, faults, granted = DeviceID(f"{it.machine.gpus[0].id}::0"), list[DriverFault](), it.ledger.grant
        it.played.changed = lambda: None

        def grant(*asked: Any, **named: Any) -> None:
            granted(*asked, **named)
            miss(it)

        async def allocate() -> None:
            try:
                await it.allocations.allocate(GPU, [[slot]])
            except DriverFault as fault:
                faults.append(fault)

        it.ledger.grant = grant  # type: ignore[method-assign]  # a reading comes at this moment
        tasks.start_soon(allocate)
        while not it.there():
            await anyio.lowlevel.checkpoint()
        await it.clock.advance(SEEN_SECONDS - 5)
        it.see()
        while not it.ledger.state.allocations:
            await anyio.lowlevel.checkpoint()
        await it.clock.advance(4.9)
        early = [*faults]
        await it.clock.advance(0.2)
        ((_, record),) = it.ledger.state.allocations.items()
        await it.sweep()
        it.ledger.grant = granted  # type: ignore[method-assign]  # as it was
        it.see()
        (again,) = await it.allocations.allocate(GPU, [[slot]])

        assert ([], ["DriverFault"]) == (early, [each.code for each in faults])
        assert (record.instances, 1) == (again.instances, it.played.made)
        assert [again] == [*it.ledger.state.allocations.values()]


async def test_no_instance_is_made_for_one_that_a_reading_lacks() -> None:
    """A kubelet repeats itself, or an app container takes the slot over, while a reading has just missed the instance."""
    async with InstanceNode.running() as (it, tasks):
        assert isinstance(await it.admit_pod(it.asking("a", Ask(1))), Admission)
        await it.allocations.reconcile()
        (record,), found, made = it.records("a"), list[Allocation](), it.played.made
        miss(it)
        asked = anyio.Event()
        it.played.before_step = lambda step: asked.set()

        async def allocate() -> None:
            found.extend(await it.allocations.allocate(GPU, [[*record.device_ids]]))

        tasks.start_soon(allocate)
        await asked.wait()
        it.see()
        while not found:
            await anyio.lowlevel.checkpoint()

        assert ([record], made) == (found, it.played.made)
