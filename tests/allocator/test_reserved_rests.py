"""What is left of a record that made way shows nothing of what is reserved."""

from pathlib import Path

import pytest
from share_support import NAMES, SMALL, ShareNode, running

from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.model.requests import Policy

pytestmark = pytest.mark.anyio


def make(directory: Path) -> ShareNode:
    return ShareNode(directory, SMALL, NAMES, Policy.NONE, None)


def units(node: ShareNode, cores: range, blocks: range) -> dict[ResourceName, list[DeviceID]]:
    """Of the first GPU."""
    gpu = node.machine.gpus[0].id
    return {
        name: [DeviceID(f"{gpu}::{word}{number}") for number in numbers]
        for name, word, numbers in zip(NAMES, "cm", (cores, blocks), strict=True)
    }


async def test_the_rest_of_an_ended_record_shows_no_reservation() -> None:
    """
    The record has a pod that is gone when two pods are reserved for on its units. The first one takes some of these: the
    others are nobody's, and still reserved for the second one.
    """
    async with running(make) as (node, _):
        assert isinstance(await node.admit("old", (10, 10)), Admission)
        await node.allocations.reconcile()
        await node.drop("old")
        node.keep(a=units(node, range(5), range(4)), b=units(node, range(5, 12), range(4, 10)))
        assert isinstance(await node.admit("a", (5, 4)), Admission)
        (left,) = node.observed().held(node.clock.monotonic())

        assert "b" == left.pod
        assert {NAMES[0]: 7, NAMES[1]: 6} == {name: len(ids) for name, ids in left.containers[0].devices.items()}
        assert isinstance(await node.admit("b", (7, 6)), Admission)
        assert () == node.observed().held(node.clock.monotonic())


async def test_the_rest_of_a_rest_shows_no_reservation_either() -> None:
    """What was left of an ended record when a pod was reserved for is the rest of an earlier one, and makes way in turn."""
    async with running(make) as (node, _):
        assert isinstance(await node.admit("old", (10, 10)), Admission)
        await node.allocations.reconcile()
        await node.drop("old")
        assert isinstance(await node.admit("first", (2, 2)), Admission)
        node.keep(a=units(node, range(6, 10), range(6, 9)))
        assert isinstance(await node.admit("second", (2, 2)), Admission)
        (left,) = node.observed().held(node.clock.monotonic())

        assert {NAMES[0]: 4, NAMES[1]: 3} == {name: len(ids) for name, ids in left.containers[0].devices.items()}
        assert isinstance(await node.admit("a", (4, 3)), Admission)
        assert () == node.observed().held(node.clock.monotonic())
