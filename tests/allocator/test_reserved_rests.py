"""What is left of records that make way, of containers that have ended, beside what is reserved."""

import pytest
from share_support import NAMES, ShareNode
from unit_support import KUBELET

from topoalign.core.admission.prediction import to_kubelet_rules
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.kubelet import KubeletObserved

pytestmark = pytest.mark.anyio


def units(node: ShareNode, cores: range, blocks: range) -> dict[ResourceName, list[DeviceID]]:
    """Of the first GPU."""
    gpu = node.machine.gpus[0].id
    return {
        name: [DeviceID(f"{gpu}::{word}{number}") for number in numbers]
        for name, word, numbers in zip(NAMES, "cm", (cores, blocks), strict=True)
    }


async def leave_unbound(node: ShareNode, name: str, share: tuple[int, int]) -> None:
    """A pod ends before anybody has seen whose the record is: what makes way of it leaves a rest."""
    assert isinstance(await node.admit(name, share), Admission)
    await node.drop(name)


async def test_the_rest_of_an_ended_record_shows_no_reservation() -> None:
    """
    The record has a pod that is gone when two pods are reserved for on its units. The first one takes some of these: the
    others are nobody's, and still reserved for the second one.
    """
    async with ShareNode.running() as (node, _):
        await leave_unbound(node, "old", (10, 10))
        node.keep(a=units(node, range(5), range(4)), b=units(node, range(5, 12), range(4, 10)))
        assert isinstance(await node.admit("a", (5, 4)), Admission)
        (left,) = node.observed().held(node.clock.monotonic())

        assert "b" == left.pod
        assert {NAMES[0]: 7, NAMES[1]: 6} == {name: len(ids) for name, ids in left.containers[0].devices.items()}
        assert isinstance(await node.admit("b", (7, 6)), Admission)
        assert () == node.observed().held(node.clock.monotonic())


async def test_the_rest_of_a_rest_shows_no_reservation_either() -> None:
    """What was left of an ended record when a pod was reserved for is the rest of an earlier one, and makes way in turn."""
    async with ShareNode.running() as (node, _):
        await leave_unbound(node, "old", (10, 10))
        assert isinstance(await node.admit("first", (2, 2)), Admission)
        node.keep(a=units(node, range(6, 10), range(6, 9)))
        assert isinstance(await node.admit("second", (2, 2)), Admission)
        (left,) = node.observed().held(node.clock.monotonic())

        assert {NAMES[0]: 4, NAMES[1]: 3} == {name: len(ids) for name, ids in left.containers[0].devices.items()}
        assert isinstance(await node.admit("a", (4, 3)), Admission)
        assert () == node.observed().held(node.clock.monotonic())


async def test_what_is_left_of_an_ended_container_leaves_its_gpu_as_it_is_listed() -> None:
    """
    The kubelet counts all of it as free. If it counted here, the GPU would have nothing left, and its free units would be
    listed as unhealthy while a pod waits for some of them.
    """
    async with ShareNode.running() as (node, _):
        assert isinstance(await node.admit("old", (50, 2)), Admission)
        await node.allocations.reconcile()
        await node.drop("old")
        ended = tuple(each.id for each in await node.allocations.ended())
        node.ledger.observe(kubelet=KubeletObserved(rules=to_kubelet_rules(KUBELET), ended=ended))
        node.keep(
            a=units(node, range(40), range(2)),
            b=units(node, range(50, 100), range(4, 6)),
            c=units(node, range(40, 50), range(6, 8)),
        )
        assert isinstance(await node.admit("a", (40, 2)), Admission)
        assert isinstance(await node.admit("b", (50, 2)), Admission)
        await node.allocations.reconcile()
        state, first = node.ledger.state, node.machine.gpus[0].id

        assert 100 == sum(each.amounts[first].cores for each in state.allocations.values()), "as the record has it"
        assert {*units(node, range(0), range(6, 8))[NAMES[1]]} <= {*state.healthy(NAMES[1])}
        assert isinstance(await node.admit("c", (10, 2)), Admission)
        await node.check(["a", "b", "c"])
