"""Owners are learned after Allocate, by polls that nobody waits for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from device_allocations_support import GPUS, NODE, Node, bound, start_allocations
from fact_support import owner

from topoalign.allocator.allocate.grants import AllocateCall
from topoalign.allocator.allocate.service import DeviceAllocations
from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.reconciliation.owner_polls import FIRST_SECONDS, GIVE_UP_SECONDS, LONGEST_SECONDS
from topoalign.core.model.events import AllocationBound, Owner
from topoalign.core.model.ids import GPU
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def polling(node: Node, allocations: DeviceAllocations | None = None) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon((allocations or node.device_allocations).owner_polls.run)
        await all_tasks_blocked()
        yield
        tasks.cancel_scope.cancel()


def owners(node: Node) -> list[Owner | None]:
    return [each.owner for each in node.ledger.state.allocations.values()]


async def test_the_owner_is_bound_soon_after_the_grant_without_another_call() -> None:
    node = Node()
    async with polling(node):
        await node.device_allocations.allocate(GPU, [GPUS[:2]])
        node.kubelet.show("train", *GPUS[:2])
        await node.clock.advance(FIRST_SECONDS)

        assert [owner("train")] == owners(node)
        assert [owner("train")] == [e.owner for e, _ in node.ledger.pending if isinstance(e, AllocationBound)]


async def test_an_owner_that_is_shown_late_is_bound_within_a_second_of_that() -> None:
    node = Node()
    async with polling(node):
        await node.device_allocations.allocate(GPU, [GPUS[:1]])
        await node.clock.advance(3)
        assert [None] == owners(node)
        node.kubelet.show("train", *GPUS[:1])
        await node.clock.advance(LONGEST_SECONDS)

        assert [owner("train")] == owners(node)


async def test_polls_for_one_grant_are_few_and_end() -> None:
    node = Node()
    async with polling(node):
        await node.device_allocations.allocate(GPU, [GPUS[:1]])
        await node.clock.advance(100)

        assert [None] == owners(node)
        assert 4 + GIVE_UP_SECONDS // LONGEST_SECONDS >= node.kubelet.asked
        asked = node.kubelet.asked
        await node.clock.advance(100)
        assert asked == node.kubelet.asked


async def test_one_poll_serves_grants_that_came_before_it() -> None:
    node = Node()
    async with polling(node):
        for gpu in GPUS:
            await node.device_allocations.allocate(GPU, [[gpu]])
            node.kubelet.show(f"pod-{gpu}", gpu)
        await node.clock.advance(FIRST_SECONDS)

        assert 1 == node.kubelet.asked
        assert [owner(f"pod-{gpu}") for gpu in GPUS] == owners(node)


async def test_grants_one_after_the_other_do_not_shorten_the_intervals() -> None:
    """Eight grants in four seconds, whose owners are not shown, are polled for as often as one is."""
    node = Node()
    async with polling(node):
        for gpu in GPUS:
            await node.device_allocations.allocate(GPU, [[gpu]])
            await node.clock.advance(0.5)

        assert 4 + 4 // LONGEST_SECONDS >= node.kubelet.asked > 4


async def test_what_was_bound_meanwhile_is_not_polled_for() -> None:
    node = Node()
    async with polling(node):
        await node.device_allocations.allocate(GPU, [GPUS[:1]])
        node.kubelet.show("train", *GPUS[:1])
        await node.device_allocations.reconcile()
        await node.clock.advance(GIVE_UP_SECONDS)

        assert 1 == node.kubelet.asked


async def test_a_kubelet_that_does_not_answer_is_polled_again() -> None:
    node = Node()
    async with polling(node):
        await node.device_allocations.allocate(GPU, [GPUS[:1]])
        node.kubelet.show("train", *GPUS[:1])
        node.kubelet.answering = False
        await node.clock.advance(1)
        node.kubelet.answering = True
        await node.clock.advance(LONGEST_SECONDS)

        assert [owner("train")] == owners(node)


async def test_an_agent_that_starts_anew_looks_for_the_owners_that_are_missing() -> None:
    node = Node()
    await node.device_allocations.allocate(GPU, [GPUS[:1]])
    node.ledger, node.device_allocations = node.start()
    node.kubelet.show("train", *GPUS[:1])
    async with polling(node):
        await node.clock.advance(FIRST_SECONDS)

        assert [owner("train")] == owners(node)


async def test_grants_whose_owners_are_shown_at_once_are_polled_for_as_rarely() -> None:
    """Eighty grants in eight seconds, each of whose owners is there at the next poll; after a pause the next is short."""
    node = Node()
    async with polling(node):
        for number in range(80):
            gpu = GPUS[number % len(GPUS)]
            node.kubelet.shown.clear()
            if held := [each.id for each in node.ledger.state.allocations.values() if gpu in each.device_ids]:
                node.ledger.release(held, "released")
            await node.device_allocations.allocate(GPU, [[gpu]])
            node.kubelet.show(f"pod-{number}", gpu)
            await node.clock.advance(0.1)
        assert 4 + 8 // LONGEST_SECONDS >= node.kubelet.asked > 8

        await node.clock.advance(2 * GIVE_UP_SECONDS)
        asked = node.kubelet.asked
        node.ledger.release(list(node.ledger.state.allocations), "released")
        await node.device_allocations.allocate(GPU, [GPUS[:1]])
        await node.clock.advance(FIRST_SECONDS)
        assert asked + 1 == node.kubelet.asked


async def test_a_caller_that_gives_up_after_its_record_is_polled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.kubelet.show("train", *GPUS[:1])

    def give_up(call: AllocateCall) -> None:
        raise anyio.get_cancelled_exc_class()

    monkeypatch.setattr(AllocateCall, "result", give_up)
    async with polling(node):
        with pytest.raises(anyio.get_cancelled_exc_class()):
            await node.device_allocations.allocate(GPU, [GPUS[:1]])
        await node.clock.advance(FIRST_SECONDS)

        assert [owner("train")] == owners(node)


async def test_an_agent_that_starts_with_all_owners_known_polls_for_none() -> None:
    node = Node()
    await bound(node, "train", *GPUS[:1])
    node.restart()
    asked = node.kubelet.asked
    async with polling(node):
        await node.clock.advance(GIVE_UP_SECONDS)

        assert asked == node.kubelet.asked


async def test_after_a_reboot_the_pods_of_the_former_boot_are_looked_for() -> None:
    """
    After a reboot the pods of the former boot are looked for as soon as the kubelet answers, however late that is: it gives
    them what they had, and asks nobody.
    """
    node = Node()
    await bound(node, "train", *GPUS[:1])
    node.boot, node.kubelet.answering = "another boot", False
    node.restart()
    async with polling(node):
        await node.clock.advance(10 * GIVE_UP_SECONDS)
        node.kubelet.answering = True
        await node.clock.advance(LONGEST_SECONDS)

        assert () == node.ledger.state.stale


async def test_pods_of_a_former_boot_are_polled_for_once_the_boot_is_known() -> None:
    """Before discovery has told of the hardware nobody knows whether there was a reboot: the kubelet is not asked."""
    node = Node()
    await bound(node, "train", *GPUS[:1])
    node.boot = "another boot"
    node.ledger = Ledger(NODE, node.journal, node.clock)
    node.device_allocations = start_allocations(node.ledger, node.kubelet)
    asked = node.kubelet.asked
    async with polling(node):
        await node.clock.advance(10 * GIVE_UP_SECONDS)
        assert asked == node.kubelet.asked
        node.hear_topology(node.ledger, 1)
        await node.clock.advance(LONGEST_SECONDS)

        assert () == node.ledger.state.stale


async def test_pods_of_a_former_boot_that_are_not_shown_end_the_polls() -> None:
    """The kubelet answers and does not show them: after `GIVE_UP_SECONDS` the regular polls alone look for them."""
    node = Node()
    await bound(node, "train", *GPUS[:1])
    node.boot = "another boot"
    node.restart()
    node.kubelet.shown.clear()
    asked = node.kubelet.asked
    async with polling(node):
        await node.clock.advance(100)

        assert 4 + GIVE_UP_SECONDS // LONGEST_SECONDS >= node.kubelet.asked - asked > 4
        assert 1 == len(node.ledger.state.stale)
