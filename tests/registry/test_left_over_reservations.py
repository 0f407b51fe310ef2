"""While a reservation of a pod that is gone has not ended, no other pod is bound to the node."""

from collections.abc import AsyncIterator

import pytest
from binding_support import Registry, Site, running
from fact_support import reservation, reserved_container

from topoalign.core.model.ids import NodeName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import PodsPending
from topoalign.registry.scheduling.binding.cluster_reservations import ReservationChange
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind that waits for others gives up soon."""
    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.5)


NODE = NodeName("node-1")


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Registry]:
    bus = MemoryBus()
    one = Registry(site, bus)
    async with running(site, bus, one, rules=AdmissionRules(mode=Mode.KUBELET)):
        yield one


async def left_over(registry: Registry) -> str:
    """A GPU is reserved for a pod that the watch has not reported; the UID of the pod."""
    made = reservation("gone", reserved_container("GPU-0"))
    await registry.reservations.write([ReservationChange(node=NODE, position=0, made=(made,))])
    return made.pod_uid


async def test_a_pod_waits_until_reservations_of_unknown_pods_have_ended(site: Site, registry: Registry) -> None:
    """The node could take such a reservation for that of the pod."""
    uid = site.add("a")
    gone = await left_over(registry)
    with pytest.raises(PodsPending):
        await registry.bind("a", uid)
    await registry.reservations.cancel(gone)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")


async def test_a_pod_is_bound_beside_the_reservation_of_a_reported_pod(site: Site, registry: Registry) -> None:
    uid = site.add("a")
    registry.shown.bind(await left_over(registry), NODE)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")
