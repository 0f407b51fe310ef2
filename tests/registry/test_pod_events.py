"""What a pod's Events tell of its bind, and of why no node takes it."""

from collections import Counter
from contextlib import suppress

import pytest
from binding_support import Registry, Site, running

from topoalign.core.model.ids import ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.registry.ports import PodEvent
from topoalign.registry.scheduling.binding.binding import NodeRefuses
from topoalign.registry.scheduling.kubernetes.pod_events import refusal_event
from topoalign.registry.scheduling.scheduling_api import PodToSchedule
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio


async def bind(gpus: int, fits: str = "") -> tuple[str, list[PodEvent]]:
    """Binds a pod with so many GPUs; `fits`: the code of the node's refusal. Returns its UID and the Events."""

    async def judge(node: NodeName, pod: PodToSchedule) -> str:
        return fits

    site = Site()
    bus = MemoryBus()
    registry = Registry(site, bus, fits=judge)
    uid = site.add("a", gpus)
    async with running(site, bus, registry):
        with suppress(NodeRefuses):
            await registry.bind("a", uid)
    return uid, registry.events


async def test_the_event_of_a_bound_pod_names_its_reserved_devices() -> None:
    uid, (event,) = await bind(2)

    assert (uid, "Normal", "DevicesReserved") == (event.uid, event.kind, event.reason)
    assert "reserved on node-1: 'GPU-0', 'GPU-1'" == event.note


async def test_a_bound_pod_without_devices_has_no_event() -> None:
    assert [] == (await bind(0))[1]


async def test_the_event_of_a_failed_bind_names_its_remedy() -> None:
    uid, (event,) = await bind(1, "NotAligned")

    assert (uid, "Warning", "BindFailed") == (event.uid, event.kind, event.reason)
    assert event.note.startswith("not bound to node-1: NodeRefuses: node node-1 would refuse the pod: NotAligned")
    assert event.note.endswith("; the scheduler tries again")


async def test_a_pod_that_fits_nowhere_is_told_the_counts_of_all_reasons() -> None:
    """With the nodes that were asked about and those of the cluster: filters of the scheduler leave nodes out before."""
    nodes = [NodeName(f"node-{number}") for number in range(14)]
    request = PodRequest(
        namespace=Namespace("ml"), name=PodName("p"), containers=(ContainerRequest(name=ContainerName("main")),)
    )
    codes = ["NotAligned", "NotEnoughDevices", "NotAligned"]
    report = refusal_event(PodToSchedule(uid="u", request=request), Counter(codes), nodes)

    assert (
        "none of the 3 nodes that the scheduler asked about (the cluster has 14) admits the pod: "
        "NotAligned on 2; NotEnoughDevices on 1; see `topoalign why ml/p`"
    ) == report.note
    assert "NotAligned NotEnoughDevices" == report.identity
