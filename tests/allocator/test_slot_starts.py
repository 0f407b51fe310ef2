"""A container starts with the amounts that are meant for it, or not at all."""

import msgspec
import pytest
from share_support import DEFAULT, GPUS
from slot_node_support import EACH, SLOTS, Ask, InstanceNode, SlotNode
from slot_support import MIB

from topoalign.allocator.ports import KubeletListing
from topoalign.allocator.reconciliation.pod_resources import LIST_SECONDS
from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import GPU, PodName
from topoalign.core.model.requests import PodRequest
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.kubelet.grpc.kubelet_client import FAILURES, KubeletAway, describe_call_error

pytestmark = pytest.mark.anyio

PART = Amount(cores=100 // SLOTS, memory=EACH // SLOTS * MIB)
LARGE = Ask(memory=6_000, cores=60)
SMALL = Ask(memory=1_000, cores=5)


async def admit(it: SlotNode, pod: PodRequest) -> None:
    """The kubelet admits a pod; its containers start later, as when their images are pulled."""
    assert isinstance(await it.kubelet.admit(pod, f"uid-{pod.name}", start=False), Admission)
    await it.allocations.reconcile()


async def failure(it: SlotNode, name: str) -> str:
    """Why the containers of a pod do not start; empty: they do."""
    try:
        await it.kubelet.start_containers(DEFAULT, PodName(name))
    except FAILURES as error:
        return describe_call_error(error)
    return ""


async def test_a_pod_past_the_scheduler_and_one_that_it_robs_do_not_start() -> None:
    async with SlotNode.running() as (it, _):
        waiting, past = it.asking("a", LARGE), it.asking("b", SMALL)
        it.reserve(waiting)

        await admit(it, past)
        reasons = [await failure(it, "b"), await failure(it, "b")]

        assert all("they are reserved for 'default/a, container c0'" in each for each in reasons)
        assert [("c0", "NotAsReserved")] == it.refusals("b")
        await admit(it, waiting)
        assert [PART] == [*it.held("a").values()]
        assert "60 cores and 6000 MiB are reserved for it" in await failure(it, "a")


async def test_a_pod_past_the_scheduler_starts_with_equal_parts() -> None:
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", Ask(2, memory=6_000, cores=60)))

        await admit(it, it.asking("b", SMALL))

        assert ([PART], "") == ([*it.held("b").values()], await failure(it, "b"))


async def test_equal_parts_are_the_right_of_whoever_has_them() -> None:
    async with SlotNode.running() as (it, _):
        waiting = it.asking("a", Ask(memory=EACH // SLOTS, cores=100 // SLOTS))
        it.reserve(waiting)

        await admit(it, it.asking("b", SMALL))
        await admit(it, waiting)

        assert it.reserved.reservations[0].containers[0].devices[GPU] == (*it.slots_of("b")["c0"],)
        assert ("", "") == (await failure(it, "b"), await failure(it, "a"))


async def test_a_container_without_what_is_reserved_for_it_does_not_start() -> None:
    """The reservation was received after the grant."""
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", LARGE)
        it.reserve(pod)
        late, it.reserved = it.reserved, NodeReservations()
        await admit(it, pod)
        it.reserved = late

        assert "60 cores and 6000 MiB are reserved for it" in await failure(it, "a")
        assert [("c0", "NotAsReserved")] == it.refusals("a")


async def test_a_container_starts_again_after_its_reservation_has_ended() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", LARGE)
        it.reserve(pod)
        await admit(it, pod)
        first = await failure(it, "a")
        it.reserve(it.asking("other", LARGE))

        assert ("", "") == (first, await failure(it, "a"))


async def test_an_image_may_be_pulled_for_longer_than_a_reservation_lasts() -> None:
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        await admit(it, it.asking("b", SMALL))
        it.reserved = NodeReservations()

        assert "they are reserved for" in await failure(it, "b")


async def test_none_starts_with_anothers_slots_whose_reservation_ended_before() -> None:
    """As while PodResources does not answer: the reservation is over before it is known whose the slots are."""
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        assert isinstance(await it.kubelet.admit(it.asking("b", SMALL), "uid-b", start=False), Admission)

        it.reserved = NodeReservations()
        await it.allocations.reconcile()

        assert "they were reserved for another pod" in await failure(it, "b")
        assert [("c0", "NotAsReserved")] == it.refusals("b")


async def test_a_robbed_pod_does_not_start_after_its_reservation_either() -> None:
    """The record says that it has equal parts because another pod got what was reserved for it."""
    async with SlotNode.running() as (it, tasks):
        waiting = it.asking("a", LARGE)
        it.reserve(waiting)
        await admit(it, it.asking("b", SMALL))
        assert isinstance(await it.kubelet.admit(waiting, "uid-a", start=False), Admission)

        it.reserved = NodeReservations()
        await it.start_agent(tasks)

        assert "others were reserved for it" in await failure(it, "a")
        assert [("c0", "NotAsReserved")] == it.refusals("a")


async def test_a_pod_with_equal_parts_starts_beside_one_that_is_robbed() -> None:
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        await admit(it, it.asking("b", SMALL))
        await admit(it, it.asking("c", SMALL))

        assert ([PART], "") == ([*it.held("c").values()], await failure(it, "c"))


async def test_none_starts_with_anothers_slots_after_the_agent_starts_anew() -> None:
    async with SlotNode.running() as (it, tasks):
        it.reserve(it.asking("a", LARGE))
        await admit(it, it.asking("b", SMALL))

        it.reserved = NodeReservations()
        await it.start_agent(tasks)

        assert "they were reserved for another pod" in await failure(it, "b")


@pytest.mark.parametrize("is_over", [True, False])
async def test_none_starts_with_a_mig_instance_that_was_meant_for_another_pod(is_over: bool) -> None:
    async with InstanceNode.running() as (it, _):
        large = it.asking("a", Ask(1, percentage=100))
        it.reserve(large)

        await admit(it, it.asking("b", Ask(1)))
        if is_over:
            it.reserved = NodeReservations()

        assert "reserved for another pod" in await failure(it, "b")
        if not is_over:
            await admit(it, large)
            assert "are reserved for it" in await failure(it, "a")


async def test_anothers_slots_wait_until_the_checkpoint_tells_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """PodResources tells names alone, and what was reserved under them may be another pod's."""
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        before = await it.pod_resources.listing()
        assert isinstance(await it.kubelet.admit(it.asking("b", SMALL), "uid-b", start=False), Admission)
        now = await it.pod_resources.listing()
        it.reserved = NodeReservations()
        named = tuple(msgspec.structs.replace(each, pod_uid="") for each in now.holdings)
        stale = msgspec.structs.replace(now, holdings=named, parts=before.parts)

        async def listing(seconds: float | None = None) -> KubeletListing:
            return stale

        with monkeypatch.context() as patched:
            patched.setattr(it.pod_resources, "listing", listing)
            assert "does not report yet which container" in await failure(it, "b")

        assert "they were reserved for another pod" in await failure(it, "b")


async def test_equal_pods_start_with_what_was_reserved_for_each_other() -> None:
    """A kubelet does not tell them apart. Their reservations may be over when they start."""
    async with SlotNode.running() as (it, tasks):
        pods = [it.asking(name, LARGE) for name in "ab"]
        it.reserve(*pods, beside=True)
        for pod in reversed(pods):
            assert isinstance(await it.kubelet.admit(pod, f"uid-{pod.name}", start=False), Admission)

        it.reserved = NodeReservations()
        await it.start_agent(tasks)

        assert ("", "") == (await failure(it, "a"), await failure(it, "b"))
        assert all(each.reserved_for == () for name in "ab" for each in it.records(name))


async def test_an_init_container_does_not_start_with_what_is_anothers() -> None:
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))

        await admit(it, it.asking("b", SMALL, init=[SMALL]))

        assert "they are reserved for 'default/a, container c0'" in await failure(it, "b")


async def test_containers_start_with_more_that_an_init_container_left() -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", SMALL, SMALL, init=[LARGE])
        it.reserve(pod)

        await admit(it, pod)

        assert "" == await failure(it, "a")


async def test_equal_pods_start_whose_init_containers_leave_some_of_their_slots() -> None:
    """The one that comes first has what is reserved for the other one, and leaves it all of its own."""
    async with SlotNode.running() as (it, _):
        pods = [it.asking(name, Ask(2, memory=1_000, cores=5), init=[Ask(memory=6_000, cores=30)]) for name in "ab"]
        it.reserve(*pods, beside=True)

        for pod in reversed(pods):
            await admit(it, pod)

        assert ("", "") == (await failure(it, "a"), await failure(it, "b"))
        assert [{5, 30}, {5, 30}] == [{each.cores for each in it.held(name, "c1").values()} for name in "ab"]


async def test_slots_do_not_start_while_it_is_not_known_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(seconds: float | None = None) -> KubeletListing:
        await it.clock.advance(LIST_SECONDS if seconds is None else seconds)
        raise KubeletAway("PodResources does not answer")

    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        assert isinstance(await it.kubelet.admit(it.asking("b", SMALL), "uid-b", start=False), Admission)

        with monkeypatch.context() as patched:
            patched.setattr(it.pod_resources, "listing", away)
            assert "PodResources does not answer" in await failure(it, "b")

        assert "they are reserved for" in await failure(it, "b")


async def test_amounts_of_a_reservation_wait_until_it_is_known_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet may tell what it knew before the pod came. Equal parts do not wait for that."""
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))
        before = await it.pod_resources.listing()

        async def stale(seconds: float | None = None) -> KubeletListing:
            return before

        with monkeypatch.context() as patched:
            patched.setattr(it.pod_resources, "listing", stale)
            for name, asked in (("b", SMALL), ("c", Ask(2))):
                pod = it.asking(name, asked)
                assert isinstance(await it.kubelet.admit(pod, f"uid-{name}", start=False), Admission)
            assert "does not report yet which container" in await failure(it, "b")
            assert "" == await failure(it, "c")


@pytest.mark.parametrize("init", [[LARGE], [LARGE, SMALL]])
async def test_init_containers_start_with_slots_that_they_leave_to_nobody(init: list[Ask]) -> None:
    """PodResources does not show them; the checkpoint does, also when they start again after the reservation."""
    async with SlotNode.running() as (it, tasks):
        pod = it.asking("a", Ask(0), init=init)
        it.reserve(pod)
        await admit(it, pod)
        first = await failure(it, "a")
        it.reserved = NodeReservations()
        second = await failure(it, "a")

        await it.start_agent(tasks)

        assert ["", "", ""] == [first, second, await failure(it, "a")]


async def test_an_init_container_alone_does_not_start_with_what_is_anothers() -> None:
    """Nothing tells the name of its pod, so there is no event: PodResources does not show it, and nothing is reserved."""
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))

        await admit(it, it.asking("b", Ask(0), init=[SMALL]))

        assert "they are reserved for 'default/a, container c0'" in await failure(it, "b")
        assert [] == it.refusals("b")


@pytest.mark.parametrize("is_over", [True, False])
@pytest.mark.parametrize(("waiting", "init", "app"), [(2, 2, 1), (1, 1, 2)], ids=["some taken over", "all, and more"])
async def test_a_pod_does_not_start_with_what_its_init_container_took(
    waiting: int, init: int, app: int, *, is_over: bool
) -> None:
    """Neither the init container nor the app container that takes over what it has of another's."""
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", Ask(waiting, memory=6_000, cores=60)))

        pod = it.asking("b", Ask(app, memory=1_000, cores=5), init=[Ask(init, memory=1_000, cores=5)])
        assert isinstance(await it.kubelet.admit(pod, "uid-b", start=False), Admission)
        if is_over:
            it.reserved = NodeReservations()
        await it.allocations.reconcile()

        assert "reserved for" in await failure(it, "b")


async def test_who_takes_over_slots_of_a_pod_that_is_gone_starts() -> None:
    """The record knows no pod of these slots yet, and they were meant for the one that is gone."""
    async with SlotNode.running() as (it, tasks):
        await admit(it, it.asking("all-but-one", *(Ask(GPUS) for _ in range(SLOTS - 1))))
        first = it.asking("a", Ask(GPUS, memory=1_000, cores=5))
        it.reserve(first)
        assert isinstance(await it.kubelet.admit(first, "uid-a", start=False), Admission)
        taken = it.slots_of("a")
        it.reserved = NodeReservations()
        await it.kubelet.remove(first.namespace, first.name)

        assert isinstance(await it.kubelet.admit(it.asking("b", Ask(GPUS)), "uid-b", start=False), Admission)

        assert (taken, "") == (it.slots_of("b"), await failure(it, "b"))
        await it.start_agent(tasks)
        assert "" == await failure(it, "b")


async def test_an_equal_pod_whose_reservation_comes_late_starts_ever_after() -> None:
    async with SlotNode.running() as (it, tasks):
        pods = [it.asking(name, LARGE) for name in "ab"]
        it.reserve(pods[1])
        assert isinstance(await it.kubelet.admit(pods[0], "uid-a", start=False), Admission)
        it.reserve(*pods, beside=True)
        await it.allocations.reconcile()
        first = await failure(it, "a")

        it.reserved = NodeReservations()
        again = await failure(it, "a")
        await it.start_agent(tasks)

        assert ("", "", "") == (first, again, await failure(it, "a"))


async def test_a_pod_starts_whose_reservation_is_heard_after_it_was_refused() -> None:
    """It was given what is reserved for an equal one, which is told the rest."""
    async with SlotNode.running() as (it, tasks):
        pods = [it.asking(name, LARGE) for name in "ab"]
        it.reserve(*pods, beside=True)
        both = it.reserved.reservations
        it.set_reserved(*both[1:])
        await admit(it, pods[0])
        refused = await failure(it, "a")
        it.set_reserved(*both)
        starts = [await failure(it, "a")]
        await admit(it, pods[1])
        starts.append(await failure(it, "b"))

        it.reserved = NodeReservations()
        await it.start_agent(tasks)

        assert "they are reserved for 'default/b, container c0'" in refused
        assert ["", "", "", ""] == [*starts, await failure(it, "a"), await failure(it, "b")]


async def test_a_pod_starts_again_that_took_over_what_was_heard_of_late() -> None:
    """Its app container has a slot that its init container was given before the reservation was received."""
    async with SlotNode.running() as (it, tasks):
        pods = [it.asking(name, SMALL, init=[LARGE]) for name in "ab"]
        it.reserve(pods[1])
        assert isinstance(await it.kubelet.admit(pods[0], "uid-a", start=False), Admission)
        it.reserve(*pods, beside=True)
        await it.allocations.reconcile()
        starts = [await failure(it, "a")]

        it.reserved = NodeReservations()
        starts.append(await failure(it, "a"))
        await it.start_agent(tasks)

        assert ["", "", ""] == [*starts, await failure(it, "a")]


async def come_unread(it: SlotNode, monkeypatch: pytest.MonkeyPatch, pod: PodRequest, uid: str) -> None:
    """A pod comes, and PodResources names it before the kubelet has written its checkpoint."""
    before = await it.pod_resources.listing()
    assert isinstance(await it.kubelet.admit(pod, uid, start=False), Admission)
    now = await it.pod_resources.listing()
    named = tuple(msgspec.structs.replace(each, pod_uid="") for each in now.holdings)
    early = msgspec.structs.replace(now, holdings=named, parts=before.parts, checkpoint=before.checkpoint)

    async def listing(seconds: float | None = None) -> KubeletListing:
        return early

    with monkeypatch.context() as patched:
        patched.setattr(it.pod_resources, "listing", listing)
        await it.allocations.reconcile()


async def test_a_pod_made_anew_starts_beside_what_its_former_self_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SlotNode.running() as (it, _):
        former, pod = it.asking("a", Ask(2, memory=6_000, cores=60)), it.asking("a", SMALL)
        it.reserve(former)
        (left,) = it.reserved.reservations
        it.reserve(pod)
        (own,) = it.reserved.reservations
        it.set_reserved(left, msgspec.structs.replace(own, pod_uid="uid-new"))

        await come_unread(it, monkeypatch, pod, "uid-new")

        assert "" == await failure(it, "a")


async def test_a_pod_made_anew_does_not_start_with_its_former_selfs_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SlotNode.running() as (it, _):
        it.reserve(it.asking("a", LARGE))

        await come_unread(it, monkeypatch, it.asking("a", SMALL), "uid-new")
        it.reserved = NodeReservations()

        assert "they were reserved for another pod" in await failure(it, "a")


async def test_an_init_container_that_was_robbed_does_not_start() -> None:
    async with SlotNode.running() as (it, _):
        displaced_pod_of = it.asking("a", Ask(0), init=[LARGE])
        it.reserve(displaced_pod_of)
        await admit(it, it.asking("b", SMALL))

        await admit(it, displaced_pod_of)
        reasons = [await failure(it, "a"), await failure(it, "a")]

        assert all("60 cores and 6000 MiB are reserved for it" in each for each in reasons)
        assert [("c0", "NotAsReserved")] == it.refusals("a")


async def test_init_containers_start_after_their_reservation_unlisted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with SlotNode.running() as (it, _):
        pod = it.asking("a", Ask(0), init=[LARGE])
        it.reserve(pod)
        await admit(it, pod)
        unread = msgspec.structs.replace(await it.pod_resources.listing(), parts=(), checkpoint=None)

        async def listing(seconds: float | None = None) -> KubeletListing:
            return unread

        monkeypatch.setattr(it.pod_resources, "listing", listing)
        assert "does not report yet which container" in await failure(it, "a")
        it.reserved = NodeReservations()

        assert "" == await failure(it, "a")
