"""Pods with annotations about devices: where they are offered, what is held for them, and what their binds wait for."""

import json

import msgspec
import pytest
from decision_support import container, pod
from fact_support import reservation
from view_support import NODE, RULES, OneNode, asked

from topoalign.core.deviceshare.koordinator_names import JOINT_ANNOTATION
from topoalign.core.model.events import AllocationBound, AllocationGranted
from topoalign.core.model.ids import GPU, NIC, AllocationID, ContainerName, DeviceID
from topoalign.core.model.requests import PodRequest, Policy
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.machines import catalogue

pytestmark = pytest.mark.anyio
SAME_PCIE = json.dumps({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"})
MAIN = ContainerName("main")


def joint(name: str, gpus: int, nics: int = 0) -> PodRequest:
    return msgspec.structs.replace(plain(name, gpus, nics), annotations={JOINT_ANNOTATION: SAME_PCIE})


def plain(name: str, gpus: int, nics: int = 0) -> PodRequest:
    return pod(container(gpus=gpus, nics=nics), name=name)


def node() -> OneNode:
    """Four GPUs on a NUMA node each; only GPU-0 and GPU-2 have a NIC beside them."""
    rules = msgspec.structs.replace(RULES, policy=Policy.NONE)
    found = OneNode(rules, catalogue.machine("epyc-nps4-4gpu"))
    found.tell(found.says.all())
    return found


def code(world: OneNode, request: PodRequest) -> str:
    refused = world.scheduler.filter(asked(request), (NODE,)).refused
    return refused[NODE].code if NODE in refused else ""


def hold(name: str, gpus: tuple[str, ...], co_allocated: tuple[str, ...], nics: tuple[str, ...] = ()) -> Reservation:
    """What is reserved for a pod of one container."""
    given = ReservedContainer(
        container=MAIN,
        devices={GPU: tuple(map(DeviceID, gpus))} | ({NIC: tuple(map(DeviceID, nics))} if nics else {}),
        co_allocated={NIC: tuple(map(DeviceID, co_allocated))} if co_allocated else {},
    )
    return reservation(name, given)


def test_a_node_is_offered_where_nics_are_found_beside_the_gpus() -> None:
    """What is held for the first pod is held with the NICs that come with it; pods without annotations need none."""
    world = node()
    before = code(world, joint("b", 2)), code(world, joint("b", 3))
    world.view.reserve(NODE, [hold("a", ("GPU-0",), ("mlx5_0",))])

    assert ("", "DevicesDoNotFit") == before
    assert ("", "DevicesDoNotFit", "") == (
        code(world, joint("b", 1)),
        code(world, joint("b", 2)),
        code(world, plain("b", 3)),
    )


def test_a_pod_of_another_scheduler_is_expected_to_get_its_limits_alone() -> None:
    """No registry has reserved anything for it, so nothing comes with its GPU."""
    world = node()
    world.view.expect(NODE, asked(joint("foreign", 1)))
    left = code(world, plain("b", 0, nics=2))
    world.view.end(NODE, "uid-foreign")
    world.view.reserve(NODE, [hold("a", ("GPU-0",), ("mlx5_0",))])

    assert ("", "NotEnoughDevices") == (left, code(world, plain("b", 0, nics=2)))


async def test_pods_that_could_get_one_anothers_gpus_are_bound_in_turn() -> None:
    """A kubelet does not say for which pod it asks. What asks for the same, or for another number of GPUs, does not wait."""
    world = node()
    world.view.expect(NODE, asked(plain("a", 1)))
    alike = [await world.scheduler.fits_in_every_order(NODE, asked(each)) for each in (joint("b", 1), plain("b", 1))]
    world.view.end(NODE, "uid-a")
    world.view.expect(NODE, asked(plain("c", 2)))
    others = [await world.scheduler.fits_in_every_order(NODE, asked(joint("b", 1)))]
    world.view.end(NODE, "uid-c")
    world.view.reserve(NODE, [hold("a", ("GPU-0",), ("mlx5_0",))])
    world.requests["a"] = joint("a", 1)
    reserved = [await world.scheduler.fits_in_every_order(NODE, asked(each)) for each in (plain("b", 1), joint("b", 1))]

    assert (["PodsPending", ""], [""], ["PodsPending", ""]) == (alike, others, reserved)


def test_companions_are_held_until_the_gpus_are_shown() -> None:
    """The NIC of the limits is another part: its own Allocate shows it."""
    world = node()
    world.view.reserve(NODE, [hold("a", ("GPU-0",), ("mlx5_0",), nics=("mlx5_1",))])
    state, (held,) = world.says.state, world.view.pods_on(NODE).added_to(world.says.state, RULES).allocations.values()
    grant = msgspec.structs.replace(
        held, id=AllocationID("a-1"), owner=None, pod_uid="", devices={**held.devices, NIC: held.co_allocated}
    )
    owner = held.owner
    assert owner is not None
    epoch, seq = state.epoch, state.seq
    granted = AllocationGranted(node=NODE, epoch=epoch, seq=seq + 1, allocation=grant)
    bound = AllocationBound(node=NODE, epoch=epoch, seq=seq + 2, allocation=grant.id, owner=owner, pod_uid="uid-a")
    world.tell([granted, bound])
    refused = code(world, plain("b", 0, nics=1))
    (rest,) = world.view.pods_on(NODE).added_to(world.says.state, RULES).allocations.values()

    assert "NotEnoughDevices" == refused
    assert ({NIC: ("mlx5_1",)}, ()) == (rest.devices, rest.co_allocated)
