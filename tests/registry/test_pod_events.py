"""What a pod's Events tell of its bind, and of why no node takes it."""

from collections import Counter

import pytest
from reservation_support import container, reservation

from topoalign.core.model.errors import NoFit
from topoalign.core.model.ids import ContainerName, Namespace, NodeName, PodName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.registry.ports import PodEvent
from topoalign.registry.scheduling.kubernetes.pod_events import BindEvents, refusal_event
from topoalign.registry.scheduling.scheduling_api import PodToSchedule

pytestmark = pytest.mark.anyio

NODE = NodeName("node-1")


class ScriptedBinder:
    def __init__(self) -> None:
        self.failing = False

    async def bind(self, namespace: str, name: str, uid: str, node: NodeName) -> None:
        if self.failing:
            raise NoFit("the node would refuse it", "try again")


class World:
    """A binder, one reservation, and what is told."""

    def __init__(self) -> None:
        self.told: list[PodEvent] = []
        self.binder = ScriptedBinder()
        reserved = {"uid-a": {NODE: reservation("a", container("GPU-1", "GPU-3", co_allocated=("mlx5_0",)))}}
        self.events = BindEvents(self.binder, lambda uid: reserved.get(uid, {}), self.told.append)

    async def bind(self, pod: str) -> list[tuple[str, str, str]]:
        await self.events.bind("default", pod, f"uid-{pod}", NODE)
        return [(each.kind, each.reason, each.note) for each in self.told]


async def test_a_bound_pod_is_told_its_reserved_devices() -> None:
    told = await World().bind("a")

    assert [("Normal", "DevicesReserved", "reserved on node-1: 'GPU-1', 'GPU-3', 'mlx5_0'")] == told


async def test_a_pod_without_devices_is_told_nothing() -> None:
    assert [] == await World().bind("b")


async def test_a_bind_that_fails_is_told_with_its_remedy_and_fails() -> None:
    world = World()
    world.binder.failing = True
    with pytest.raises(NoFit):
        await world.bind("a")

    (report,) = world.told
    assert ("Warning", "BindFailed", "uid-a") == (report.kind, report.reason, report.uid)
    assert report.note.endswith("the node would refuse it; try again")


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
