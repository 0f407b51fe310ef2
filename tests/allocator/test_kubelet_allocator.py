"""The kubelet's way in, whole: stand-in, sockets, front, hand-outs and ledger; only the disk is left out."""

from functools import partial
from typing import Any

import anyio
import msgspec
import pytest
from kubelet_files_support import basis_from
from kubelet_support import RESTRICTED, offers, pod
from share_support import MACHINE, Node, fits

from topoalign.allocator.device_plugin.registration import POLL_SECONDS
from topoalign.allocator.reconciliation.owner_polls import FIRST_SECONDS
from topoalign.allocator.requests.kubelet_files import KubeletFiles
from topoalign.core.model.decisions import Admission, Refusal
from topoalign.core.model.events import AllocationBound, AllocationGranted, AllocationReleased, Owner
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest, Policy
from topoalign.core.placement import sparing
from topoalign.core.placement.preference import prefer
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet

pytestmark = pytest.mark.anyio
DEFAULT = Namespace("default")


async def test_what_the_kubelet_gave_is_recorded_with_its_owner() -> None:
    """
    What the kubelet gave is recorded, and its owner soon after, although the kubelet calls nothing any more. It never tells
    whom it gave a device to; PodResources does, once the pod is admitted.
    """
    async with Node.running() as (it, tasks):
        tasks.start_soon(it.allocations.owner_polls.run)
        fits(await it.kubelet.admit(pod("train", gpus=2, nics=1, cpus=8)))
        await it.clock.advance(FIRST_SECONDS)
        with anyio.fail_after(30):
            while any(each.owner is None for each in it.ledger.state.allocations.values()):
                await it.ledger.wait_past(it.ledger.version)

        owner = Owner(namespace=DEFAULT, pod=PodName("train"), container=ContainerName("main"))
        live = it.ledger.state.allocations.values()
        assert [{GPU: ("GPU-0", "GPU-1")}, {NIC: ("mlx5_0",)}] == [allocation.devices for allocation in live]
        assert [owner, owner] == [allocation.owner for allocation in live]
        assert ["AllocationGranted", "AllocationGranted"] == it.facts()[:2]
        assert {"AllocationBound"} == set(it.facts()[2:])


async def test_a_pod_that_is_refused_by_the_kubelet_leaves_no_fact() -> None:
    async with Node.running() as (it, _):
        await it.kubelet.admit(pod("a", gpus=3))
        await it.kubelet.admit(pod("b", gpus=3))
        before = it.facts()
        decision = await it.kubelet.admit(pod("split", gpus=2))

        assert not isinstance(decision, Admission)
        assert before == it.facts()


async def test_the_devices_of_a_pod_that_has_gone_can_be_given_out_at_once() -> None:
    """Nobody tells a plugin that a pod has gone: Allocate over its record finds out from PodResources."""
    async with Node.running() as (it, _):
        await it.kubelet.admit(pod("first", gpus=8))
        await it.kubelet.remove(DEFAULT, PodName("first"))
        fits(await it.kubelet.admit(pod("second", gpus=8)))
        await it.allocations.reconcile()

        (live,) = it.ledger.state.allocations.values()
        assert live.owner is not None
        assert "second" == live.owner.pod
        assert 1 == it.facts().count(AllocationReleased.__name__)
        assert 2 == it.facts().count(AllocationGranted.__name__)


async def test_a_pod_that_has_gone_is_released_after_a_while() -> None:
    """A pod that has gone is released when it has been missing for a while."""
    async with Node.running() as (it, _):
        await it.kubelet.admit(pod("first", gpus=8))
        await it.kubelet.admit(pod("other", cpus=1))
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("first"))
        await it.allocations.reconcile()
        assert 1 == len(it.ledger.state.allocations)
        await it.clock.advance(5)
        await it.allocations.reconcile()

        assert {} == it.ledger.state.allocations
        assert AllocationBound.__name__ in it.facts()
        assert AllocationReleased.__name__ == it.facts()[-1]


async def test_a_kubelet_restart_costs_no_device_and_no_allocation() -> None:
    """
    After a restart of the kubelet its first list has every device, and allocations are as they were. A kubelet restarts
    with running pods: within a second it has all devices again, and nothing was given or taken.
    """
    async with Node.running() as (it, tasks):
        fits(await it.kubelet.admit(pod("train", gpus=2, nics=1, cpus=8)))
        live, before = dict(it.ledger.state.allocations), it.facts()
        await it.kubelet.restart()
        lists: list[int] = []
        tasks.start_soon(it.kubelet.until, partial(first_list, lists))
        for _ in range(2):
            await it.clock.advance(0.5)
        with anyio.fail_after(30):  # no time of the node's clock passes any more
            await it.kubelet.until(offers(MACHINE))

        assert 8 == next(length for length in lists if length)
        assert live == it.ledger.state.allocations
        assert before == it.facts()
        fits(await it.kubelet.admit(pod("more", gpus=2)))
        assert live.items() <= it.ledger.state.allocations.items()


async def test_a_wiped_plugin_directory_costs_no_device_and_no_allocation() -> None:
    """After its directory was wiped the kubelet has all devices, and allocations are as they were."""
    async with Node.running() as (it, _):
        fits(await it.kubelet.admit(pod("train", gpus=2)))
        live = dict(it.ledger.state.allocations)
        await it.kubelet.wipe()
        assert [] == list(it.kubelet.plugins_dir.glob("topoalign-*"))
        await it.clock.advance(POLL_SECONDS)
        await it.clock.advance(POLL_SECONDS)
        await it.kubelet.until(offers(MACHINE))

        assert 2 == len(list(it.kubelet.plugins_dir.glob("topoalign-*")))
        assert live == it.ledger.state.allocations


def first_list(lists: list[int], kubelet: FakeKubelet) -> bool:
    """Notes how many GPUs the kubelet has, whenever it hears something."""
    lists.append(kubelet.capacity(GPU))
    return False


async def test_the_app_container_gets_the_gpus_of_its_init_container() -> None:
    """
    The app container gets the GPUs of its init container, and never those of its sidecar. Three Allocate calls of one pod.
    What an init container had goes to those after it, a sidecar's own to nobody.
    """
    asked = [("setup", 2), ("proxy", 1), ("main", 3)]
    setup, proxy, main = (ContainerRequest(name=ContainerName(name), limits={GPU: gpus}) for name, gpus in asked)
    request = PodRequest(
        name=PodName("train"),
        init_containers=(setup, msgspec.structs.replace(proxy, sidecar=True)),
        containers=(main,),
    )
    async with Node.running() as (it, _):
        fits(await it.kubelet.admit(request))
        await it.allocations.reconcile()
        of: dict[str, frozenset[DeviceID]] = {
            str(held.owner.container): held.device_ids for held in it.ledger.state.allocations.values() if held.owner
        }
        given: dict[str, frozenset[DeviceID]] = {
            str(container): frozenset(devices)
            for container, _, devices in it.kubelet.running[DEFAULT, PodName("train")].parts()
        }

        assert {"proxy", "main"} == of.keys()
        assert {"proxy": given["proxy"], "main": given["main"]} == of
        assert given["setup"] <= of["proxy"] | of["main"]
        assert of["main"].isdisjoint(of["proxy"])
        assert 4 == it.facts().count(AllocationGranted.__name__), (
            "for setup, for proxy, what proxy left of it, for main"
        )


async def test_what_an_init_container_leaves_over_stays_held_until_its_pod_goes() -> None:
    """
    The app container takes over one GPU of three, and no pod gets the others. The kubelet has written down what the init
    container got before it asks for the next one.
    """
    request = PodRequest(
        name=PodName("train"),
        init_containers=(ContainerRequest(name=ContainerName("setup"), limits={GPU: 3}),),
        containers=(ContainerRequest(name=ContainerName("main"), limits={GPU: 1}),),
    )
    async with Node.running() as (it, _):
        fits(await it.kubelet.admit(request))
        await it.allocations.reconcile()
        held = set(it.ledger.state.ownership.holders)
        await it.kubelet.remove(DEFAULT, PodName("train"))
        for _ in range(2):
            await it.allocations.reconcile()
            await it.clock.advance(60)
        await it.allocations.reconcile()

        assert {"GPU-0", "GPU-1", "GPU-2"} == held
        assert {} == it.ledger.state.ownership.holders


async def test_what_an_init_container_left_ends_with_its_checkpoint_entry() -> None:
    """
    What an init container left over has ended once the kubelet has written its checkpoint without the pod. Nobody is shown
    with it, and its record has no owner: the checkpoint alone tells. What others have has not ended.
    """
    request = PodRequest(
        name=PodName("train"),
        init_containers=(ContainerRequest(name=ContainerName("setup"), limits={GPU: 3}),),
        containers=(ContainerRequest(name=ContainerName("main"), limits={GPU: 1}),),
    )
    async with Node.running() as (it, _):
        fits(await it.kubelet.admit(request))
        while_it_runs = await it.allocations.ended()
        await it.kubelet.remove(DEFAULT, PodName("train"))
        fits(await it.kubelet.admit(pod("next", gpus=1)))
        ended = await it.allocations.ended()

        assert [] == while_it_runs
        assert {"GPU-0", "GPU-1", "GPU-2"} > {device for each in ended for device in each.device_ids}
        assert 2 == len({device for each in ended for device in each.device_ids})


async def test_a_container_with_another_resource_refused_ends_in_five_seconds() -> None:
    """
    What a container got whose other resource was refused has ended five seconds later. The kubelet asks for the GPUs, then
    finds too few NICs and writes nothing down. Until then a prediction says so.
    """
    async with Node.running(Policy.NONE) as (it, _):
        fits(await it.kubelet.admit(pod("first", gpus=1)))
        await it.allocations.reconcile()
        refusal = await it.kubelet.admit(pod("greedy", gpus=2, nics=9))
        at_once = await it.allocations.ended()
        files = KubeletFiles(it.kubelet.root / "config.yaml", it.kubelet.root, RESTRICTED)
        notes = (await basis_from(files, it.ledger.state, at_once)).notes
        await it.clock.advance(5)
        ended = await it.allocations.ended()
        later = (await basis_from(files, it.ledger.state, ended)).notes

        assert isinstance(refusal, Refusal)
        assert ([], 2) == (at_once, len({device for each in ended for device in each.device_ids}))
        assert [True, False] == [
            any("lists no container with them" in each for each in said) for said in (notes, later)
        ]


async def test_what_a_pods_first_container_got_is_not_free_for_its_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory is made when it is admitted: until then it resembles a pod that is gone."""
    free: list[int] = []

    def spied(*args: Any, **more: Any) -> Any:
        free.append(len(more["context"].free))
        return prefer(*args, **more)

    monkeypatch.setattr(sparing, "prefer", spied)
    one = {GPU: 1}
    pair = PodRequest(
        name=PodName("pair"),
        containers=tuple(
            ContainerRequest(name=ContainerName(name), requests=one, limits=one) for name in ("a", "b", "c")
        ),
    )
    async with Node.running() as (it, _):
        fits(await it.kubelet.admit(pair))
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("pair"))
        fits(await it.kubelet.admit(pod("next", gpus=1)))

        assert [8, 7, 6, 8] == free


async def test_a_pod_that_went_while_no_allocator_ran_is_an_orphan() -> None:
    """A pod that went while no allocator ran is an orphan at the first poll."""
    async with Node.running() as (it, tasks):
        fits(await it.kubelet.admit(pod("ends", gpus=2)))
        fits(await it.kubelet.admit(pod("stays", gpus=2)))
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("ends"))
        await it.start_agent(tasks)

        released = [event for event, _ in it.ledger.pending if isinstance(event, AllocationReleased)]
        assert ["orphan"] == [event.reason for event in released]
        assert ["stays"] == [held.owner.pod for held in it.ledger.state.allocations.values() if held.owner]
