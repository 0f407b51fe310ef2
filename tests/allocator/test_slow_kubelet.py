"""
A kubelet that is slow to answer PodResources, or fails to answer once, has no pod refused that it would admit.

It waits for GetPreferredAllocation and Allocate without a deadline, and for PreStartContainer for 30 s.
"""

from collections.abc import Callable
from contextlib import suppress
from itertools import count

import anyio
import pytest
from anyio.abc import TaskGroup
from device_allocations_support import GPUS, Node, PassingClock, bound
from share_support import ShareNode
from slot_node_support import Ask, SlotNode

from topoalign.allocator.allocate.service import AGAIN_SECONDS, GRANT_SECONDS
from topoalign.allocator.ports import KubeletListing
from topoalign.allocator.reconciliation.pod_resources import LIST_SECONDS
from topoalign.core.model.decisions import Admission
from topoalign.core.model.errors import Unavailable
from topoalign.core.model.holdings import base_of
from topoalign.core.model.ids import GPU
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.grpc.kubelet_client import KubeletAway

pytestmark = pytest.mark.anyio


def prompt(node: ShareNode, tasks: TaskGroup) -> None:
    """It answers at once."""


def slow(node: ShareNode, tasks: TaskGroup, needs: float = 1.5) -> None:
    """From now on each answer of PodResources takes so long."""
    listing = node.pod_resources.listing

    async def late(seconds: float | None = None) -> KubeletListing:
        patience = LIST_SECONDS if seconds is None else seconds
        await node.clock.advance(min(needs, patience))
        if patience < needs:
            raise KubeletAway(f"no answer within {patience:g} s")
        return await listing(seconds)

    node.pod_resources.listing = late  # type: ignore[method-assign]  # the kubelet is slow


def failing(node: ShareNode, tasks: TaskGroup) -> None:
    """From now on every other question to PodResources fails at once; then time passes until the next one."""
    listing, asked = node.pod_resources.listing, count()

    async def fail(seconds: float | None = None) -> KubeletListing:
        if next(asked) % 2 == 0:
            tasks.start_soon(node.clock.advance, AGAIN_SECONDS)
            raise KubeletAway("UNAVAILABLE")
        return await listing(seconds)

    node.pod_resources.listing = fail  # type: ignore[method-assign]  # the kubelet fails now and then


Spoil = Callable[[ShareNode, TaskGroup], None]
HOW = pytest.mark.parametrize("spoil", [prompt, slow, failing])


@HOW
async def test_units_of_an_ended_pod_are_given_by_a_slow_kubelet(spoil: Spoil) -> None:
    """The next pod needs more memory than any other GPU has left."""
    async with ShareNode.running() as (it, tasks):
        for number in range(4):
            it.forced = it.units(number, 30, 12)
            assert isinstance(await it.admit(f"p{number}", (30, 12)), Admission)
        it.forced = {}
        await it.allocations.reconcile()
        await it.drop("p3")
        spoil(it, tasks)
        decision = await it.admit("next", (0, 8))

        assert isinstance(decision, Admission), decision.finding
        assert [{"GPU-3"}] == [{*units} for units in it.gpus("next")["c0"].values()]


@HOW
async def test_slots_of_an_ended_pod_are_given_by_a_slow_kubelet(spoil: Spoil) -> None:
    """Every GPU but that of the ended pod has no computing time left."""
    async with SlotNode.running() as (it, tasks):
        full = [it.asking(f"p{number}", Ask(cores=95, memory=100)) for number in range(4)]
        it.reserve(*full, beside=True)
        for pod in full:
            assert isinstance(await it.admit_pod(pod), Admission)
        await it.check([pod.name for pod in full])
        (gpu,) = it.held("p2")
        it.reserved = NodeReservations()
        await it.drop("p2")
        spoil(it, tasks)
        decision = await it.admit_pod(it.asking("next", Ask(1)))

        assert isinstance(decision, Admission), decision.finding
        assert [gpu] == [base_of(slot) for slot in it.slots_of("next")["c0"]]


@pytest.mark.parametrize(("fails", "granted"), [(1, True), (7, True), (8, False)])
async def test_gpus_are_given_once_the_kubelet_answers(fails: int, granted: bool) -> None:
    """A question that fails at once, as over a lost connection, is asked again every half second, for four seconds."""
    node = Node(clock=PassingClock())
    await bound(node, "former", GPUS[0])
    node.kubelet.shown.clear()
    asked, began = node.kubelet.asked, node.clock.monotonic()

    async def fail() -> None:
        node.kubelet.answering = node.kubelet.asked - asked > fails
        node.kubelet.meanwhile = fail

    node.kubelet.meanwhile = fail
    if granted:
        (allocation,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
        assert (GPUS[0],) == allocation.devices[GPU]
    else:
        with pytest.raises(Unavailable):
            await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert GRANT_SECONDS >= node.clock.monotonic() - began
    assert min(fails + 1, 8) == node.kubelet.asked - asked


async def test_the_polls_of_predictions_do_not_shorten_that_of_allocate() -> None:
    """Every half second an allocator polls which containers have ended, and gives up after a second."""
    node = Node()
    await bound(node, "former", GPUS[0])
    node.kubelet.shown.clear()
    listing = node.kubelet.listing

    async def late(seconds: float | None = None) -> KubeletListing:
        patience = LIST_SECONDS if seconds is None else seconds
        await node.clock.sleep(min(2.9, patience))
        if patience < 2.9:
            raise KubeletAway(f"no answer within {patience:g} s")
        return await listing(seconds)

    async def predict() -> None:
        while True:
            with suppress(Unavailable):
                await node.device_allocations.ended()
            await node.clock.sleep(0.5)

    node.kubelet.listing = late  # type: ignore[method-assign]  # the kubelet is slow
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(predict)
        await node.clock.advance(0.5)
        tasks.start_soon(node.clock.advance, 10.0)
        (allocation,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
        tasks.cancel_scope.cancel()

    assert (GPUS[0],) == allocation.devices[GPU]
