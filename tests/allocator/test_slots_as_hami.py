"""A kubelet of a node whose GPUs in slots are chosen by HAMi's rules, over real sockets."""

import pytest
from hami_slot_support import POLICY
from slot_node_support import Ask, SlotNode

from topoalign.core.model.decisions import Admission

pytestmark = pytest.mark.anyio


async def test_without_a_reservation_containers_are_spread() -> None:
    """HAMi's default; by our rules the second one joins the first."""
    found: list[list[str]] = []
    for a_node in (SlotNode.running(compat="hami"), SlotNode.running()):
        async with a_node as (it, _):
            for name in ("a", "b", "c"):
                assert isinstance(await it.admit_pod(it.asking(name, Ask(memory=1_000))), Admission)
            await it.check(["a", "b", "c"])
            found.append([gpu for name in ("a", "b", "c") for gpu in it.held(name)])

    assert ["GPU-3", "GPU-2", "GPU-1"] == found[0]
    assert 1 == len({*found[1]})


async def test_a_pod_that_the_registry_binds_gets_what_hami_chooses_for_it() -> None:
    """The second one by its annotation the GPU that is fuller, the third one another."""
    async with SlotNode.running(compat="hami") as (it, _):
        for name, policy in (("a", "binpack"), ("b", "binpack"), ("c", "spread")):
            pod = it.asking(name, Ask(memory=3_000, cores=10), annotations={POLICY: policy})
            it.reserve(pod)
            assert isinstance(await it.admit_pod(pod), Admission)
        await it.check(["a", "b", "c"])

        assert [{"GPU-3"}, {"GPU-3"}, {"GPU-2"}] == [{*it.held(name)} for name in ("a", "b", "c")]
