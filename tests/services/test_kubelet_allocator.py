"""The kubelet's way in, whole: stand-in, sockets, front, hand-outs and ledger; only the disk is left out."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from kubelet_support import NODE, RESTRICTED, MemoryDesk, offers, pod, short_directory, two_nodes

from topoalign.allocator.handouts import Handouts
from topoalign.allocator.journal import MemoryJournal
from topoalign.allocator.kubelet.front import KubeletFront
from topoalign.allocator.kubelet.podresources import PodResourcesClient
from topoalign.allocator.kubelet.standin import KubeletStandIn
from topoalign.allocator.ledger import Ledger
from topoalign.core.decisions import Admission, Decision
from topoalign.core.events import AllocationBound, AllocationGranted, AllocationReleased, Owner
from topoalign.core.ids import GPU, NIC, ContainerName, Namespace, PodName
from topoalign.runtime.clock import ManualClock

pytestmark = pytest.mark.anyio
MACHINE = two_nodes()
DEFAULT = Namespace("default")


@dataclass
class Node:
    kubelet: KubeletStandIn
    ledger: Ledger
    handouts: Handouts
    clock: ManualClock

    def facts(self) -> list[str]:
        """What the ledger has said, by name, the snapshot of its start left out."""
        return [type(event).__name__ for event, _ in self.ledger.pending][1:]


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    with short_directory() as directory:
        plugins, resources = directory / "device-plugins", directory / "pod-resources"
        plugins.mkdir()
        resources.mkdir()
        clock = ManualClock()
        ledger = Ledger(NODE, MemoryJournal(), clock)
        known = MemoryDesk(MACHINE).state
        assert known.topology is not None and known.health is not None
        ledger.hear(known.topology)
        ledger.hear(known.health)
        handouts = Handouts(
            ledger, clock, PodResourcesClient(resources / "kubelet.sock", plugins, clock), settle_seconds=0
        )
        kubelet = KubeletStandIn(plugins, resources, MACHINE, RESTRICTED)
        async with anyio.create_task_group() as tasks:
            await tasks.start(kubelet.run)
            await tasks.start(KubeletFront(handouts, plugins, clock).run)
            await kubelet.until(offers(MACHINE))
            yield Node(kubelet, ledger, handouts, clock)
            tasks.cancel_scope.cancel()


def fits(decision: Decision) -> Admission:
    assert isinstance(decision, Admission), decision
    return decision


async def test_what_the_kubelet_gave_is_recorded_and_its_owner_is_known_when_it_starts() -> None:
    """The kubelet never tells whom it gave a device to; PodResources does, once the pod is admitted."""
    async with node() as it:
        fits(await it.kubelet.admit(pod("train", gpus=2, nics=1, cpus=8)))

        owner = Owner(namespace=DEFAULT, pod=PodName("train"), container=ContainerName("main"))
        live = it.ledger.state.allocations.values()
        assert [{GPU: ("GPU-0", "GPU-1")}, {NIC: ("mlx5_0",)}] == [allocation.devices for allocation in live]
        assert [owner, owner] == [allocation.owner for allocation in live]
        assert ["AllocationGranted", "AllocationGranted"] == it.facts()[:2]
        assert {"AllocationBound"} == set(it.facts()[2:])


async def test_a_pod_that_is_refused_by_the_kubelet_leaves_no_fact() -> None:
    async with node() as it:
        await it.kubelet.admit(pod("a", gpus=3))
        await it.kubelet.admit(pod("b", gpus=3))
        before = it.facts()
        decision = await it.kubelet.admit(pod("split", gpus=2))

        assert not isinstance(decision, Admission)
        assert before == it.facts()


async def test_the_devices_of_a_pod_that_has_gone_can_be_given_out_at_once() -> None:
    """Nobody tells a plugin that a pod has gone: Allocate over its record finds out from PodResources."""
    async with node() as it:
        await it.kubelet.admit(pod("first", gpus=8))
        await it.kubelet.remove(DEFAULT, PodName("first"))
        fits(await it.kubelet.admit(pod("second", gpus=8)))

        (live,) = it.ledger.state.allocations.values()
        assert live.owner is not None
        assert "second" == live.owner.pod
        assert 1 == it.facts().count(AllocationReleased.__name__)
        assert 2 == it.facts().count(AllocationGranted.__name__)


async def test_a_pod_that_has_gone_is_released_when_it_has_been_missed_for_a_while() -> None:
    async with node() as it:
        await it.kubelet.admit(pod("first", gpus=8))
        await it.kubelet.admit(pod("other", cpus=1))
        await it.kubelet.remove(DEFAULT, PodName("first"))
        await it.handouts.reconcile()
        assert 1 == len(it.ledger.state.allocations)
        await it.clock.advance(5)
        await it.handouts.reconcile()

        assert {} == it.ledger.state.allocations
        assert AllocationBound.__name__ in it.facts()
        assert AllocationReleased.__name__ == it.facts()[-1]
