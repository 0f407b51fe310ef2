"""Pods that are reserved and not shown yet, by this registry or another: the kubelet may take them in any order."""

import pytest
from api_server_support import shown_pod
from decision_support import machine
from registry_support import World
from view_support import NODE, RULES, Says

from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import GPU, ContainerName, Namespace, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.registry.ports import NotReadYet
from topoalign.registry.scheduling.binding.binding import PodsPending

pytestmark = pytest.mark.anyio


@pytest.fixture
def world() -> World:
    made = World()
    made.kubernetes.add_node(NODE)
    return made


async def test_a_registry_that_has_just_reserved_tries_every_order(world: World) -> None:
    """Before Kubernetes has shown the Binding: the kubelet may hear of either pod first."""
    await world.say(*world.says.all())
    first, second = (
        str(world.kubernetes.add_pod(shown_pod(name, gpus=gpus))["metadata"]["uid"])
        for name, gpus in (("a", 3), ("b", 1))
    )
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        await scheduling.bind("ml", "a", first, NODE)
        assert scheduling.watch is not None
        (waiting,) = scheduling.view.pods_on(NODE).waiting(
            scheduling.view.facts(NODE), scheduling.watch.pods.request_of
        )
        await scheduling.bind("ml", "b", second, NODE)

        assert (first, True) == (waiting[0].uid, waiting[1])
        assert [first, second] == [each.pod_uid for each in scheduling.reservations.held(NODE)]


@pytest.mark.parametrize("gang", ["", "ml/gang"])
async def test_a_pod_fits_in_every_order_with_one_that_another_reserved(world: World, gang: str) -> None:
    """
    Three GPUs of NUMA node 0 are reserved for a pod that is not bound yet. The kubelet may take a pod with one GPU first:
    it takes one of them, and the three are not left on one NUMA node. The same holds for a
    pod of a gang.
    """
    world.says = Says(NODE, machine(gpus=(0, 0, 0, 1, 1)), RULES)
    await world.say(*world.says.all())
    theirs, ours = (
        str(world.kubernetes.add_pod(shown_pod(name, gpus=gpus))["metadata"]["uid"])
        for name, gpus in (("theirs", 3), ("ours", 1))
    )
    container = ReservedContainer(
        container=ContainerName("main"), devices={GPU: tuple(world.says.hardware.gpu_by_id)[:3]}
    )
    reserved = Reservation(
        pod_uid=theirs,
        namespace=Namespace("ml"),
        pod=PodName("theirs"),
        containers=(container,),
        seconds_left=300.0,
        gang=gang,
    )
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        await world.rounds()
        said = ReservationsChanged(node=NODE, epoch=1, seq=1, writer="r0", reservations=(reserved,), made=(theirs,))
        await world.say(said)
        with pytest.raises(PodsPending):
            await scheduling.bind("ml", "ours", ours, NODE)

        assert [theirs] == [each.pod_uid for each in scheduling.reservations.held(NODE)]


async def test_a_registry_that_has_not_read_all_yet_binds_no_pod(world: World) -> None:
    """It knows of no pods that are pending. A pod that is bound is answered with ok all the same."""
    one = str(world.kubernetes.add_pod(shown_pod("a", gpus=1))["metadata"]["uid"])
    await world.say(*world.says.all())
    async with world.allocator(world.says), world.registry() as (scheduling, _):
        with pytest.raises(NotReadYet):
            await scheduling.bind("ml", "a", one, NODE)
        reserved = scheduling.reservations.held(NODE)
        bound = str(world.kubernetes.add_pod(shown_pod("b", gpus=1))["metadata"]["uid"])
        world.kubernetes.bind("ml", "b", {"target": {"name": NODE}, "metadata": {"uid": bound}})
        await scheduling.bind("ml", "b", bound, NODE)
        await world.rounds()
        await scheduling.bind("ml", "a", one, NODE)

        assert ((), [one]) == (reserved, [each.pod_uid for each in scheduling.reservations.held(NODE)])
