"""What the kubelet chose is recorded truthfully; who holds it is learned from PodResources and never guessed."""

import anyio
import pytest
from device_allocations_support import GPUS, Node, PassingClock, bound, polled_after

from topoalign.allocator.reconciliation.reconciliation import APART_SECONDS
from topoalign.core.model.errors import DeviceInUse, DeviceUnusable, InvalidField, Unavailable, UnknownDevice
from topoalign.core.model.events import AllocationDeviated, AllocationReleased, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, DeviceID, ResourceName

pytestmark = pytest.mark.anyio


@pytest.fixture
def node() -> Node:
    return Node()


async def test_an_allocation_is_bound_to_the_pod_shown_with_its_devices(node: Node) -> None:
    """An allocation is bound to the pod that PodResources shows with its devices."""
    await node.device_allocations.allocate(GPU, [[GPUS[1], GPUS[0]]])
    node.kubelet.show("train", GPUS[0], GPUS[1])
    await node.device_allocations.reconcile()

    assert {"GPU-0,GPU-1": "train"} == node.live()


async def test_an_owner_that_was_read_too_early_is_corrected_by_the_next_reading(node: Node) -> None:
    await bound(node, "wrong", GPUS[0])
    node.kubelet.shown.clear()
    node.kubelet.show("right", GPUS[0])
    await node.device_allocations.reconcile()

    assert {"GPU-0": "right"} == node.live()


async def test_a_container_that_has_gone_is_released_after_more_than_one_poll(node: Node) -> None:
    await bound(node, "train", GPUS[0])
    node.kubelet.shown.clear()
    await node.device_allocations.reconcile()
    after_one_look = node.live()
    await node.clock.advance(5)
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == after_one_look
    assert {} == node.live()


async def test_a_kubelet_that_lists_nothing_after_its_start_costs_nothing(node: Node) -> None:
    """A kubelet that lists nothing for a moment after its start costs no allocation."""
    await bound(node, "train", GPUS[0])
    shown, node.kubelet.shown = node.kubelet.shown, []
    await node.device_allocations.reconcile()
    node.kubelet.shown = shown
    await node.clock.advance(60)
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()


async def test_an_unreachable_podresources_releases_nothing(node: Node) -> None:
    await bound(node, "train", GPUS[0])
    node.kubelet.answering = False
    await node.clock.advance(600)
    with pytest.raises(Unavailable):
        await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == node.live()


async def test_pods_replaced_by_as_many_others_are_told_apart_by_their_devices(node: Node) -> None:
    """Counting would see one pod before and one after (kubernetes 130145)."""
    await bound(node, "first", GPUS[0])
    node.kubelet.shown.clear()
    await bound(node, "second", GPUS[5])
    await node.clock.advance(5)
    await node.device_allocations.reconcile()

    assert {"GPU-5": "second"} == node.live()


async def test_allocate_again_for_held_devices_gives_the_same_allocation(node: Node) -> None:
    """Allocate again for devices that are shown as held gives the same allocation."""
    first = await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("train", GPUS[0], GPUS[1])
    again = await node.device_allocations.allocate(GPU, [[GPUS[1], GPUS[0]]])

    assert first == again


async def test_allocate_over_a_record_that_nobody_holds_any_more_takes_its_place(node: Node) -> None:
    first = await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    second = await node.device_allocations.allocate(GPU, [[GPUS[1], GPUS[2]]])

    assert first[0].id != second[0].id
    assert {"GPU-1,GPU-2": None} == node.live()


async def test_allocate_of_a_device_that_another_container_holds_is_refused(node: Node) -> None:
    """Allocate of a device that another container holds is refused, and changes nothing."""
    await bound(node, "train", GPUS[0], GPUS[1])
    before = node.ledger.state
    with pytest.raises(DeviceInUse) as refused:
        await node.device_allocations.allocate(GPU, [[GPUS[2]], [GPUS[1]]])

    assert ("GPU-1",) == refused.value.devices
    assert before == node.ledger.state


async def test_when_podresources_is_silent_an_overlap_is_not_granted() -> None:
    node = Node(clock=PassingClock())
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.kubelet.answering = False
    with pytest.raises(Unavailable):
        await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert {"GPU-0": None} == node.live()


async def test_two_allocations_of_one_device_at_the_same_time_never_both_get_it(node: Node) -> None:
    """Both are judged one after the other, so the second hears who got the first although both waited for PodResources."""
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    granted: list[DeviceID] = []

    async def ask(pod: str, *devices: DeviceID) -> None:
        try:
            await node.device_allocations.allocate(GPU, [list(devices)])
        except DeviceInUse:
            return
        node.kubelet.show(pod, *devices)
        granted.extend(devices)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "one", GPUS[0], GPUS[1])
        tasks.start_soon(ask, "two", GPUS[0], GPUS[2])

    assert sorted([GPUS[0], GPUS[1]]) == sorted(granted)


async def test_another_choice_than_the_preferred_one_is_recorded(node: Node) -> None:
    """Another choice than the preferred one is recorded as the kubelet made it."""
    preferred = await node.device_allocations.prefer(GPU, GPUS, (), 2)
    await node.device_allocations.allocate(GPU, [[GPUS[6], GPUS[7]]])

    assert {"GPU-6,GPU-7": None} == node.live()
    deviations = [event for event, _ in node.ledger.pending if isinstance(event, AllocationDeviated)]
    assert [(preferred, (GPUS[6], GPUS[7]))] == [(event.preferred, event.allocated) for event in deviations]


async def test_the_preferred_choice_is_no_deviation(node: Node) -> None:
    preferred = await node.device_allocations.prefer(GPU, GPUS, (), 2)
    await node.device_allocations.allocate(GPU, [list(reversed(preferred))])

    assert [] == [event for event, _ in node.ledger.pending if isinstance(event, AllocationDeviated)]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ([], InvalidField),
        ([[]], InvalidField),
        ([[GPUS[0], GPUS[0]]], InvalidField),
        ([[GPUS[0]], [GPUS[0]]], InvalidField),
        ([[DeviceID("GPU-x")]], UnknownDevice),
        ([[DeviceID("\x00" * 1_000_000)]], UnknownDevice),
        ([[DeviceID(f"GPU-{n}") for n in range(30_000)]], InvalidField),
    ],
)
async def test_device_ids_that_cannot_be_meant_are_refused_in_a_short_sentence(
    node: Node, asked: list[list[DeviceID]], error: type[Exception]
) -> None:
    before = node.ledger.state
    with pytest.raises(error) as refused:
        await node.device_allocations.allocate(GPU, asked)

    assert len(str(refused.value)) < 1_000
    assert str(refused.value).isprintable()
    assert before == node.ledger.state


async def test_an_unhealthy_device_is_not_granted(node: Node) -> None:
    lost = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
    healthy = dict.fromkeys(GPUS, DeviceHealth(state=HealthState.HEALTHY))
    node.hear_health(node.ledger, 2, {**healthy, GPUS[3]: lost})
    with pytest.raises(DeviceUnusable, match="GPU is lost"):
        await node.device_allocations.allocate(GPU, [[GPUS[3]]])

    assert {} == node.live()


async def test_a_gpu_that_falls_ill_while_the_kubelet_is_asked_is_not_granted(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    lost = DeviceHealth(state=HealthState.UNHEALTHY, reason="GPU is lost")
    healthy = dict.fromkeys(GPUS, DeviceHealth(state=HealthState.HEALTHY))

    async def falls_ill() -> None:
        node.hear_health(node.ledger, 2, {**healthy, GPUS[1]: lost})

    node.kubelet.meanwhile = falls_ill
    with pytest.raises(DeviceUnusable, match="GPU is lost"):
        await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])

    assert {"GPU-0": None} == node.live()


async def test_a_restart_keeps_allocations_and_their_owners(node: Node) -> None:
    await bound(node, "train", GPUS[0], GPUS[1])
    node.restart()

    assert {"GPU-0,GPU-1": "train"} == node.live()


async def test_an_orphan_is_released_after_the_restart_of_the_allocator(node: Node) -> None:
    """An orphan, whose pod went while the allocator was down, is released after the restart."""
    await bound(node, "train", GPUS[0])
    node.kubelet.shown.clear()
    node.restart()
    await node.device_allocations.reconcile()
    await node.clock.advance(5)
    await node.device_allocations.reconcile()

    assert {} == node.live()


async def test_a_kubelet_that_lists_little_after_its_restart_costs_nothing(node: Node) -> None:
    """
    A kubelet that lists few pods for a minute after its restart costs no allocation. Its API server may be away: until its
    pods are read again it shows static pods only, or none.
    """
    await bound(node, "train", GPUS[0])
    shown, node.kubelet.shown, node.kubelet.kubelet = node.kubelet.shown, [], 2
    for _ in range(10):
        await node.device_allocations.reconcile()
        await node.clock.advance(10)
    kept = node.live()
    node.kubelet.shown = shown
    await node.device_allocations.reconcile()

    assert {"GPU-0": "train"} == kept == node.live()


async def test_an_empty_list_is_believed_after_two_minutes(node: Node) -> None:
    await bound(node, "train", GPUS[0])
    node.kubelet.shown = []
    node.kubelet.pods = 0

    assert ({"GPU-0": "train"}, {}) == await polled_after(node, 119, 1)


async def test_a_container_that_is_shown_without_a_record_is_taken_in(node: Node) -> None:
    """It was there before us, or its record was released too early."""
    node.kubelet.show("old", GPUS[5], GPUS[4])
    node.kubelet.show("foreign", DeviceID("shared-0"), resource=ResourceName("other.io/shared"))
    await node.device_allocations.reconcile()
    await node.device_allocations.reconcile()

    assert {"GPU-4,GPU-5": "old"} == node.live()


async def test_a_device_of_another_resource_with_the_same_id_is_another_device(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.kubelet.show("stranger", GPUS[0], resource=ResourceName("other.io/shared"))
    await node.device_allocations.reconcile()

    assert {"GPU-0": None} == node.live()


async def test_an_answer_says_nothing_about_what_was_granted_meanwhile(node: Node) -> None:
    """
    An answer of PodResources says nothing about what was granted while it was on its way. The list still shows the pod that
    held the device before: not the owner of the new allocation.
    """
    node.kubelet.show("old", GPUS[0])
    node.kubelet.meanwhile = lambda: node.device_allocations.allocate(GPU, [[GPUS[0]]])
    await node.device_allocations.reconcile()
    unjudged = node.live()
    node.kubelet.shown.clear()
    node.kubelet.show("new", GPUS[0])
    await node.device_allocations.reconcile()

    assert {"GPU-0": None} == unjudged
    assert {"GPU-0": "new"} == node.live()


async def test_what_is_granted_during_a_poll_has_not_ended_by_its_answer(node: Node) -> None:
    """The answer cannot show it, though the checkpoint was written meanwhile, for another container."""
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    async def grant() -> None:
        await node.device_allocations.allocate(GPU, [[GPUS[1]]])
        node.kubelet.version += 1

    node.kubelet.meanwhile = grant

    assert (GPUS[2],) == await node.device_allocations.prefer(GPU, GPUS[1:3], (), 1)


async def test_an_init_container_keeps_the_gpus_that_the_checkpoint_has(node: Node) -> None:
    """
    The GPUs of an init container stay its own while the checkpoint has them. PodResources does not show init containers;
    the kubelet's checkpoint does.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.kubelet.checkpoint = frozenset({(GPU, GPUS[0])})
    await node.device_allocations.reconcile()
    await node.clock.advance(3600)
    await node.device_allocations.reconcile()
    kept = node.live()
    node.kubelet.checkpoint = frozenset()
    await node.device_allocations.reconcile()

    assert {"GPU-0": None} == kept
    assert {} == node.live()


async def test_what_was_never_shown_is_kept_for_half_a_minute(
    node: Node,
) -> None:
    """
    What was never shown is kept for half a minute where the checkpoint does not have it either. The kubelet writes its
    checkpoint when the container has all its resources, other plugins' among them.
    """
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert ({"GPU-0": None}, {}) == await polled_after(node, 29, 1)


async def test_what_was_never_shown_is_kept_while_the_checkpoint_cannot_be_read(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0]]])
    node.kubelet.checkpoint = None
    await node.device_allocations.reconcile()
    await node.clock.advance(3600)
    await node.device_allocations.reconcile()

    assert {"GPU-0": None} == node.live()


async def test_a_preference_that_led_to_nothing_is_no_deviation_of_a_later_pod(node: Node) -> None:
    await node.device_allocations.prefer(GPU, GPUS, (), 2)
    await node.clock.advance(3600)
    await node.device_allocations.allocate(GPU, [[GPUS[6], GPUS[7]]])

    assert [] == [event for event, _ in node.ledger.pending if isinstance(event, AllocationDeviated)]


async def test_a_stale_record_under_two_containers_is_released_once(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    await node.device_allocations.allocate(GPU, [[GPUS[0]], [GPUS[1]]])

    released = [event for event, _ in node.ledger.pending if isinstance(event, AllocationReleased)]
    assert 1 == len(released)
    assert {"GPU-0": None, "GPU-1": None} == node.live()


async def test_after_a_reboot_nothing_goes_until_the_kubelet_has_read_its_pods(node: Node) -> None:
    """
    After a reboot nothing is released until the kubelet has read its pods. Both are new: a kubelet that lists static pods
    only, and an allocator that has not seen it restart.
    """
    await bound(node, "train", GPUS[0])
    node.restart()
    node.kubelet.shown.clear()
    node.kubelet.kubelet = 2
    node.kubelet.since = node.clock.wall()

    assert ({"GPU-0": "train"}, {}) == await polled_after(node, 119, 1)


async def test_what_an_app_container_leaves_stays_with_the_init_container(node: Node) -> None:
    """What an app container does not take over stays with the init container."""
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.checkpoint = frozenset({(GPU, GPUS[0]), (GPU, GPUS[1])})
    await bound(node, "train", GPUS[0])

    assert {"GPU-0": "train", "GPU-1": None} == node.live()


async def test_a_record_contradicted_twice_is_replaced_by_what_is_shown(node: Node) -> None:
    """A record that the kubelet contradicts twice makes way for what it shows, once that has lasted a second."""
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("one", GPUS[0])
    node.kubelet.show("two", GPUS[1], GPUS[2])
    for seconds in (0.25, 0.5, APART_SECONDS - 0.75):
        await node.device_allocations.reconcile()
        assert {"GPU-0,GPU-1": None} == node.live()
        await node.clock.advance(seconds)
    await node.device_allocations.reconcile()

    assert {"GPU-0": "one", "GPU-1,GPU-2": "two"} == node.live()


async def test_a_record_contradicted_twice_with_accord_between_is_kept(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    for shown in (GPUS[:1], GPUS[:2], GPUS[:1]):
        node.kubelet.shown.clear()
        node.kubelet.show("train", *shown)
        await node.device_allocations.reconcile()
        await node.clock.advance(APART_SECONDS)

    assert {"GPU-0,GPU-1": "train"} == node.live()


async def test_a_free_device_of_a_record_that_is_shown_in_part_can_be_allocated(node: Node) -> None:
    await node.device_allocations.allocate(GPU, [[GPUS[0], GPUS[1]]])
    node.kubelet.show("one", GPUS[0])
    await node.device_allocations.allocate(GPU, [[GPUS[1]]])

    assert {"GPU-0": None, "GPU-1": None} == node.live()


async def test_a_device_that_is_shown_with_two_containers_is_taken_in_once(node: Node) -> None:
    node.kubelet.show("one", GPUS[0], GPUS[1])
    node.kubelet.show("two", GPUS[1], GPUS[2])
    await node.device_allocations.reconcile()

    assert {"GPU-0,GPU-1": "one"} == node.live()


async def test_a_container_with_a_vanished_device_is_taken_in(node: Node) -> None:
    """A container with a device that has vanished is taken in with its other devices."""
    node.kubelet.show("hurt", GPUS[0], DeviceID("GPU-dead"))
    await node.device_allocations.reconcile()

    assert {"GPU-0": "hurt"} == node.live()


@pytest.mark.parametrize(("needs", "granted"), [(1.5, True), (2.9, True), (3.1, False)])
async def test_a_kubelet_that_answers_late_does_not_refuse_the_next_pod(
    node: Node, needs: float, granted: bool
) -> None:
    """
    Allocate of devices that the record still holds asks PodResources. On a busy node each answer takes seconds; the
    kubelet waits for Allocate without a limit, and would refuse the pod for good. After four seconds it is refused.
    """
    await bound(node, "former", GPUS[0])
    node.kubelet.shown.clear()
    asked = node.kubelet.asked

    async def busy() -> None:
        await node.clock.advance(min(needs, node.kubelet.patience))
        node.kubelet.answering = needs <= node.kubelet.patience
        node.kubelet.meanwhile = busy

    node.kubelet.meanwhile = busy
    if granted:
        (allocation,) = await node.device_allocations.allocate(GPU, [[GPUS[0]]])
        assert (GPUS[0],) == allocation.devices[GPU]
    else:
        with pytest.raises(Unavailable):
            await node.device_allocations.allocate(GPU, [[GPUS[0]]])

    assert 2 == node.kubelet.asked - asked
