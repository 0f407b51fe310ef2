"""What is reserved for a pod that is gone: until it has ended, no pod is bound that the node may mistake for it."""

from collections.abc import AsyncIterator

import pytest
from binding_support import Registry, Site, running
from reservation_support import GPU, container, ids, reservation

from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.model.holdings import Amount
from topoalign.core.model.ids import ContainerName, NodeName, ResourceName
from topoalign.core.model.requests import AdmissionRules, Mode
from topoalign.core.model.reservations import ReservedContainer
from topoalign.registry.scheduling.binding import binding
from topoalign.registry.scheduling.binding.binding import PodsPending
from topoalign.registry.scheduling.binding.cluster_reservations import ReservationChange, are_ambiguous_reservations
from topoalign.runtime.memory_bus import MemoryBus

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bind that waits for others gives up soon."""
    monkeypatch.setattr(binding, "WAIT_SECONDS", 0.5)


NODE = NodeName("node-1")
SAME_PCIE = {JOINT_ANNOTATION: '{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}'}


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
async def registry(site: Site) -> AsyncIterator[Registry]:
    bus = MemoryBus()
    one = Registry(site, bus)
    async with running(site, bus, one, rules=AdmissionRules(mode=Mode.KUBELET)):
        yield one


async def left_over(registry: Registry, co_allocated: tuple[str, ...]) -> str:
    """A GPU is reserved for a pod that no watch shows, maybe with a NIC; the UID of the pod."""
    made = reservation("gone", container("GPU-0", co_allocated=co_allocated))
    await registry.reservations.write([ReservationChange(node=NODE, position=0, made=(made,))])
    return made.pod_uid


@pytest.mark.parametrize("co_allocated", [("mlx5_0",), ()])
async def test_a_pod_waits_until_what_it_may_be_mistaken_for_has_ended(
    site: Site, registry: Registry, co_allocated: tuple[str, ...]
) -> None:
    """It asks for as many GPUs, and not for the same with them. It would get the other's NICs, or none."""
    uid = site.add("a", annotations={} if co_allocated else SAME_PCIE)
    gone = await left_over(registry, co_allocated)
    with pytest.raises(PodsPending):
        await registry.bind("a", uid)
    await registry.reservations.cancel(gone)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")


@pytest.mark.parametrize(
    ("gpus", "co_allocated", "is_shown"), [(2, ("mlx5_0",), False), (1, (), False), (1, ("mlx5_0",), True)]
)
async def test_a_pod_that_is_mistaken_for_no_other_is_bound(
    site: Site, registry: Registry, gpus: int, co_allocated: tuple[str, ...], is_shown: bool
) -> None:
    """It asks for another number of GPUs, or neither has NICs; pods that are shown are judged by the scheduler's view."""
    uid = site.add("a", gpus=gpus)
    gone = await left_over(registry, co_allocated)
    if is_shown:
        registry.shown.bind(gone, NODE)
    await registry.bind("a", uid)

    assert "node-1" == site.node_of("a")


def of_units(cores: int, blocks: int) -> ReservedContainer:
    """So much of one GPU in units."""
    units = {"tencent.com/vcuda-core": ("c", cores), "tencent.com/vcuda-memory": ("m", blocks)}
    devices = {
        ResourceName(name): ids(*(f"GPU-0::{kind}{n}" for n in range(many))) for name, (kind, many) in units.items()
    }
    return ReservedContainer(container=ContainerName("main"), devices=devices)


def of_slots(cores: int, count: int = 1) -> ReservedContainer:
    """Slots of so many GPUs with so many cores each, of whichever GPU."""
    slots = ids(*(f"GPU-{n}::0" for n in range(count)))
    amounts = dict.fromkeys(slots, Amount(cores=cores, memory=1))
    return ReservedContainer(container=ContainerName("main"), devices={GPU: slots}, slots=amounts, may_move=True)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (of_units(20, 8), of_units(20, 16), True),
        (of_units(20, 8), of_units(30, 8), True),
        (of_units(20, 8), of_units(30, 16), False),
        (of_units(20, 8), of_units(20, 8), False),
        (of_slots(20), of_slots(60), True),
        (of_slots(20), of_slots(20), False),
        (of_slots(20), of_slots(60, 2), False),
    ],
)
def test_shares_are_mistakable_that_are_asked_for_alike(
    one: ReservedContainer, other: ReservedContainer, expected: bool
) -> None:
    """As many of one resource, and something else with them."""
    assert expected is are_ambiguous_reservations(reservation("a", one), reservation("b", other))
