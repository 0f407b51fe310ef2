"""Which pods a node has yet to admit, although it has given to others what was reserved for them."""

import msgspec
import pytest
from decision_support import container, machine, pod
from fact_support import reservation
from fact_support import reserved_container as reserved
from view_support import NODE, RULES, OneNode, asked

from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import ReservedContainer

pytestmark = pytest.mark.anyio
STATIC = msgspec.structs.replace(RULES, cpu_manager="static", reserved_cpus="0,8")


def gpus(amount: int, name: str) -> PodRequest:
    return pod(container("main", gpus=amount, cpus=2, gib=True), name=name)


def node(places: tuple[int, ...] = (0, 0, 1, 1)) -> OneNode:
    """With GPUs near these NUMA nodes."""
    found = OneNode(STATIC, machine(gpus=places, nodes=max(places) + 1))
    found.tell(found.says.all())
    return found


def waiting(world: OneNode, given: ReservedContainer) -> list[str]:
    """UIDs of the pods that wait where this is reserved for pod a."""
    world.view.reserve(NODE, [reservation("a", given, uid="a")])
    world.view.renew()
    holds, facts = world.view.pods_on(NODE), world.view.facts(NODE)
    return [each.uid for each, _ in holds.waiting(world.view.basis_of(facts, holds.uids).state, lambda _: gpus(1, "a"))]


@pytest.mark.parametrize("what", ["cpus", "device"])
def test_a_pod_waits_whose_cpus_or_device_a_known_one_has_got(what: str) -> None:
    """Alike pods are admitted in any order: the kubelet will take other CPUs and another device for this one."""
    world = node()
    world.tell(world.says.admit(gpus(1, "b"), "b"))
    (entry,) = world.says.entries
    (device,) = entry.devices[GPU]
    given = reserved("GPU-3", cpus=entry.cpus) if what == "cpus" else reserved(device, cpus="5-6")

    assert entry.cpus and device != "GPU-3"
    assert ["a"] == waiting(world, given)


def test_a_pod_does_not_wait_that_may_be_the_unknown_one_with_its_device() -> None:
    world = node()
    granted = next(iter(world.says.admit(gpus(1, "a"), "a", bound=False)))
    world.tell([granted])
    (device,) = next(iter(world.says.state.allocations.values())).devices[GPU]

    assert [] == waiting(world, reserved(device, cpus="5-6"))
    assert ["a"] == waiting(world, reserved("GPU-3", cpus="5-6"))


async def test_no_pod_is_bound_whose_place_a_pod_takes_that_lost_its_cpus() -> None:
    """
    Of the pods a and b, which ask for the same, b came first and has the CPUs that were reserved for a, for which a GPU of
    NUMA node 2 is left. NUMA node 1 has become free: the kubelet takes a there, and no node has two GPUs for the next pod.
    """
    world = node((0, 0, 1, 1, 2))
    world.tell(world.says.admit(gpus(1, "b"), "b"))
    (entry,) = world.says.entries
    world.tell(world.says.admit(gpus(1, "c"), "c"))
    world.requests["a"] = gpus(1, "a")
    world.view.expect(NODE, asked(gpus(1, "a"), "a"))
    world.view.reserve(NODE, [reservation("a", reserved("GPU-4", cpus=entry.cpus), uid="a")])

    assert "PodsPending" == await world.scheduler.fits_in_every_order(NODE, asked(gpus(2, "d"), "d"))
