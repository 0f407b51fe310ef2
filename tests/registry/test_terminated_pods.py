"""
Pods that the API server shows as terminated: what they held is free at once, whatever the node's facts show, so that a
preemption is one and a pod that waits is bound when its predecessor ends (S01, S05).
"""

from random import Random

import msgspec
import pytest
from decision_support import container, machine, pod
from fact_support import owner
from view_support import NODE, RULES, OneNode, asked, some_request

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import GPU, AllocationID, DeviceID
from topoalign.core.model.requests import PodRequest, Policy
from topoalign.core.state.terminated_pods import without_pods
from topoalign.registry.scheduling.cluster_state.view import TERMINATED_SECONDS
from topoalign.registry.scheduling.filter.scheduler import VictimsTerminating
from topoalign.registry.scheduling.scheduling_api import PodToSchedule, Victims
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

UNALIGNED = msgspec.structs.replace(RULES, policy=Policy.NONE)


def gpus(count: int, name: str) -> PodRequest:
    return pod(container("main", gpus=count), name=name)


def nominated(count: int) -> PodToSchedule:
    """A pod that has preempted others on the node."""
    return PodToSchedule(uid="new", request=gpus(count, "new"), nominated=NODE)


def full_node(*, bound: bool = True) -> OneNode:
    """Pods `a` and `b` have two of the four GPUs each. `bound`: the facts name the pods of what was granted."""
    it = OneNode(UNALIGNED)
    it.tell(it.says.all())
    for name in "ab":
        it.view.expect(NODE, asked(gpus(2, name), name))
        it.tell(it.says.admit(gpus(2, name), name, bound=bound))
    return it


def refusal(it: OneNode, question: PodToSchedule) -> str:
    found = it.scheduler.filter(question, (NODE,)).refused
    return found[NODE].code if found else ""


async def test_a_terminated_pod_holds_nothing_before_its_node_shows_that() -> None:
    it = full_node()
    before = it.code()
    it.view.end(NODE, "a")

    assert ("NotEnoughDevices", "") == (before, it.code())
    assert "NotEnoughDevices" == it.code(gpus=3)
    assert ("a",) == it.view.terminated(NODE)


async def test_the_node_counts_again_for_a_pod_that_it_shows_for_long() -> None:
    """A pod that was deleted by force may run on."""
    it = full_node()
    clock = it.view._clock
    assert isinstance(clock, ManualClock)
    it.view.end(NODE, "a")
    await clock.advance(TERMINATED_SECONDS - 1)
    it.view.expire_terminated()
    before = it.code()
    await clock.advance(1)
    it.view.expire_terminated()

    assert ("", "NotEnoughDevices") == (before, it.code())
    assert () == it.view.terminated(NODE)


async def test_what_the_node_has_freed_is_not_awaited() -> None:
    it = full_node()
    it.view.end(NODE, "a")
    it.tell(it.says.end("a"))

    assert () == it.view.terminated(NODE)
    assert ("", "NotEnoughDevices") == (it.code(), it.code(gpus=3))


async def test_a_pod_that_has_the_name_of_a_terminated_one_keeps_its_devices() -> None:
    """A pod that is created anew under its name, as of a StatefulSet, may be the one that the facts name."""
    it = OneNode(UNALIGNED)
    it.tell(it.says.all())
    it.view.expect(NODE, asked(gpus(4, "a"), "old"))
    it.view.end(NODE, "old")
    it.view.expect(NODE, asked(gpus(4, "a"), "new-a"))
    it.tell(it.says.admit(gpus(4, "a"), "new-a"))

    assert "NotEnoughDevices" == it.code()


def tell_without_uid(it: OneNode, name: str) -> None:
    """The record shows all four GPUs with a pod of which it has the name alone."""
    given = Allocation(id=AllocationID("by name"), devices={GPU: tuple(DeviceID(f"GPU-{n}") for n in range(4))})
    it.tell([it.says.grant(given), it.says.bind(given.id, owner(name, "c0"))])


async def test_a_terminated_pod_is_known_by_its_name_where_the_record_has_no_uid() -> None:
    """A record of what PodResources showed alone has none."""
    it = OneNode(UNALIGNED)
    it.tell(it.says.all())
    it.view.expect(NODE, asked(gpus(4, "a"), "a"))
    tell_without_uid(it, "a")
    before = it.code()
    it.view.end(NODE, "a")

    assert ("NotEnoughDevices", "") == (before, it.code())
    assert ("a",) == it.view.terminated(NODE)


async def test_a_record_without_a_uid_is_that_of_the_pod_that_has_the_name_now() -> None:
    it = OneNode(UNALIGNED)
    it.tell(it.says.all())
    it.view.expect(NODE, asked(gpus(4, "a"), "old"))
    it.view.end(NODE, "old")
    it.view.expect(NODE, asked(gpus(4, "a"), "new-a"))
    tell_without_uid(it, "a")

    assert "NotEnoughDevices" == it.code()


async def test_a_pod_that_preempted_others_is_not_refused_by_their_node() -> None:
    """They are being deleted. Other pods are refused, as the scheduler's own count does."""
    it = full_node()
    helped = await it.scheduler.preempt(nominated(2), {NODE: Victims(uids=("a",))})
    it.view.begin_termination(NODE, "a")

    assert [NODE] == [*helped]
    assert ("", "NotEnoughDevices") == (refusal(it, nominated(2)), it.code())


async def test_a_pod_that_was_being_deleted_is_no_longer_once_it_is_gone() -> None:
    it = full_node()
    for name in "ab":
        it.view.begin_termination(NODE, name)
    before = it.view.terminating(NODE)
    it.view.end(NODE, "a")
    between = it.view.terminating(NODE)
    it.view.end(NODE, "b")

    assert (frozenset("ab"), frozenset("b")) == (before, between)
    assert frozenset() == it.view.terminating(NODE)


async def test_a_nominated_pod_gets_an_error_where_a_refusal_may_pass() -> None:
    """This registry has not seen the deletion yet. A refusal would start another preemption; after a while it is true."""
    it = full_node()
    with pytest.raises(VictimsTerminating):
        it.scheduler.filter(nominated(2), (NODE,))
    clock = it.view._clock
    assert isinstance(clock, ManualClock)
    await clock.advance(TERMINATED_SECONDS)

    assert "NotEnoughDevices" == refusal(it, nominated(2))


async def test_a_refusal_that_cannot_pass_is_no_error() -> None:
    it = full_node()
    it.cluster.answers(NODE, False)

    assert "NodeStale" == refusal(it, nominated(2))


def test_filter_and_preempt_judge_by_the_same_facts() -> None:
    """What preempt judges with pods gone is what the filter judges when they have terminated."""
    agreed = set()
    for seed in range(60):
        chance = Random(seed)
        it = full_node()
        question = PodToSchedule(uid="new", request=some_request(chance, machine(), "new"))
        gone = chance.choice((("a",), ("b",), ("a", "b")))
        request = it.scheduler._request(question)
        judged = it.scheduler._judge_without(request, NODE, frozenset(gone))
        for uid in gone:
            it.view.end(NODE, uid)
        agreed.add(judged == "")
        assert judged == refusal(it, question)

    assert {True, False} == agreed


def test_facts_without_a_pod_are_those_of_a_node_that_never_had_it() -> None:
    it = full_node()
    left = without_pods(it.says.state, {"a"}, ())

    assert ["b"] == [each.pod_uid for each in left.allocations.values()]
    assert left.usage is not None and left.usage.kubelet is not None
    assert ["b"] == [each.pod_uid for each in left.usage.kubelet.entries]
