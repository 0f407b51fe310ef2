"""NICs that come with the GPUs of a container, over the sockets: given, told, listed as unhealthy, and free again."""

import msgspec
import pytest
from fact_support import ids, reservation
from kubelet_support import pod, two_nodes
from share_support import Node, fits

from topoalign.allocator.allocate.co_allocation import CoAllocatedLacking
from topoalign.allocator.containers.responses import ResponseWriter
from topoalign.core.model.errors import DeviceInUse
from topoalign.core.model.events import Allocation, AllocationDeviated, DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, AllocationID, ContainerName, DeviceID, Namespace, PodName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology, VirtualFunction
from topoalign.kubelet.grpc.api import v1beta1

pytestmark = pytest.mark.anyio
DEFAULT = Namespace("default")
MACHINE = two_nodes(nics=4)
"""GPU-0 to GPU-3 with mlx5_0 and mlx5_1 on NUMA node 0, the others on node 1."""
FUNCTIONS = ("0000:05:00.1", "0000:05:00.2")


def joint(
    name: str,
    gpus: tuple[DeviceID, ...],
    co_allocated: tuple[DeviceID, ...],
    *,
    nics: tuple[DeviceID, ...] = (),
    functions: dict[DeviceID, tuple[str, ...]] | None = None,
    needed: bool = False,
) -> Reservation:
    """What is reserved for a pod of one container: GPUs and NICs that it asks for, and NICs that come with them."""
    reserved = ReservedContainer(
        container=ContainerName("main"),
        devices={GPU: gpus, NIC: nics} if nics else {GPU: gpus},
        co_allocated={NIC: co_allocated},
        virtual_functions=functions or {},
        needs_co_allocated=needed,
    )
    return reservation(name, reserved)


def live(it: Node) -> list[Allocation]:
    return [*it.ledger.state.allocations.values()]


def told(it: Node, name: str, resource: str = GPU) -> v1beta1.ContainerAllocateResponse:
    """What the plugin of a resource told the container of this pod."""
    return next(answer for (_, of), answer in it.answers(name).items() if of == resource)


async def shown(it: Node, nics: int) -> None:
    """Returns once the kubelet counts so many NICs as healthy."""
    await it.kubelet.until(lambda kubelet: kubelet.allocatable(NIC) == nics)


async def test_companions_are_given_recorded_and_told_with_the_gpus() -> None:
    """One grant has all, and the container is told what the plugin of the NICs would have told it."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1")))
        fits(await it.kubelet.admit(pod("a", gpus=2)))
        answer, alone = (
            told(it, "a"),
            ResponseWriter().response(MACHINE, NIC, Allocation(id=AllocationID("1-1"), devices={NIC: ids("mlx5_1")})),
        )

        (held,) = live(it)
        assert {GPU: ids("GPU-2", "GPU-3"), NIC: ids("mlx5_1")} == held.devices
        assert ids("mlx5_1") == held.co_allocated
        assert ["AllocationGranted"] == it.facts()[:1]
        assert alone.envs.items() <= answer.envs.items()
        assert "GPU-2,GPU-3" == answer.envs["NVIDIA_VISIBLE_DEVICES"]
        assert all(each in answer.devices for each in alone.devices)


async def test_companions_are_unhealthy_for_the_kubelet_until_released() -> None:
    """Their cards are well all the same, and the kubelet gives them to nobody."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1")))
        fits(await it.kubelet.admit(pod("a", gpus=2)))
        await shown(it, 3)
        card = it.ledger.state.health_of(DeviceID("mlx5_1"))
        ailing = it.ledger.state.ailing(live(it)[0])
        other = fits(await it.kubelet.admit(pod("b", nics=1)))
        with pytest.raises(DeviceInUse):
            await it.allocations.allocate(NIC, [ids("mlx5_1")])
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("a"))
        await it.allocations.reconcile()
        await it.clock.advance(6)
        await it.allocations.reconcile()
        await shown(it, 4)

        assert (True, {}) == (card.usable, ailing)
        assert ids("mlx5_0") == other.allocations[0].devices[NIC]
        assert [{NIC: ids("mlx5_0")}] == [each.devices for each in live(it)]


async def test_companions_stay_through_polls_and_restarts() -> None:
    """PodResources does not list them, and neither a new agent nor a new kubelet loses them."""
    async with Node.running(machine=MACHINE) as (it, tasks):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1")))
        fits(await it.kubelet.admit(pod("a", gpus=2)))
        for _ in range(3):
            await it.clock.advance(40)
            await it.allocations.reconcile()
        (before,) = live(it)
        await it.kubelet.restart()
        await it.clock.advance(1)
        await it.allocations.reconcile()
        await it.clock.advance(1)
        await shown(it, 3)
        kept = live(it)
        await it.start_agent(tasks, MACHINE)
        await it.clock.advance(40)
        await it.allocations.reconcile()

        assert before.owner is not None
        assert "a" == before.owner.pod
        assert [before] == kept == live(it)
        assert {DeviceID("mlx5_1")} == it.ledger.state.ownership.co_allocated


async def test_gpus_that_are_reserved_for_nobody_bring_no_nics() -> None:
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1")))
        fits(await it.kubelet.admit(pod("b", gpus=1)))

        assert [()] == [each.co_allocated for each in live(it)]


async def test_a_container_with_nics_of_its_own_is_told_of_all_of_them() -> None:
    """The kubelet passes on one value of each variable: both answers have the same, and each its own device nodes."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1"), nics=ids("mlx5_0")))
        fits(await it.kubelet.admit(pod("a", gpus=2, nics=1)))
        gpus, nics = told(it, "a"), told(it, "a", NIC)

        assert [{GPU, NIC}, {NIC}] == [{*each.devices} for each in live(it)]
        assert ["mlx5_0,mlx5_1"] * 2 == [answer.envs["TOPOALIGN_NICS"] for answer in (gpus, nics)]
        assert ["uverbs1", "uverbs0"] == [
            next(node.host_path for node in answer.devices if "uverbs" in node.host_path).rpartition("/")[2]
            for answer in (gpus, nics)
        ]


async def test_virtual_functions_come_with_the_gpus_and_share_their_nic() -> None:
    """The kubelet must not give the NIC, another container may have its other function; one that is taken is replaced."""
    async with Node.running(machine=with_functions(MACHINE)) as (it, _):
        nic = DeviceID("mlx5_0")
        first = joint("a", ids("GPU-0"), (nic,), functions={nic: FUNCTIONS[:1]}, needed=True)
        it.set_reserved(first)
        fits(await it.kubelet.admit(pod("a", gpus=1)))
        it.set_reserved(first, joint("b", ids("GPU-1"), (nic,), functions={nic: FUNCTIONS[:1]}, needed=True))
        fits(await it.kubelet.admit(pod("b", gpus=1)))
        await shown(it, 3)

        assert [{nic: FUNCTIONS[:1]}, {nic: FUNCTIONS[1:]}] == [each.virtual_functions for each in live(it)]
        assert FUNCTIONS[0] == told(it, "a").envs["PCIDEVICE_TOPOALIGN_IO_NIC"]


@pytest.mark.parametrize("needed", [True, False])
async def test_a_container_without_its_companions_fails_if_it_needs_them(needed: bool) -> None:
    """Where another pod has got one of the NICs, the pod is refused, or gets the others and that is told."""
    async with Node.running(machine=MACHINE) as (it, _):
        fits(await it.kubelet.admit(pod("b", nics=1)))
        taken = live(it)[0].devices[NIC]
        other = next(nic.id for nic in MACHINE.nics if nic.id not in taken)
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), (*taken, other), needed=needed))
        decision = await it.kubelet.admit(pod("a", gpus=2))
        deviations = [event for event, _ in it.ledger.pending if isinstance(event, AllocationDeviated)]

        if needed:
            assert "NICs" not in str(decision)
            assert CoAllocatedLacking.code in str(decision)
            assert [NIC] == [name for each in live(it) for name in each.devices]
        else:
            assert [{*ids("GPU-2", "GPU-3"), *taken, other}] == [{*each.preferred} for each in deviations]
            assert (other,) == live(it)[1].co_allocated


@pytest.mark.parametrize("needed", [True, False])
async def test_where_the_kubelet_takes_other_gpus_no_nics_come_with_them(needed: bool) -> None:
    """Its own GPU became ill. A container that needs its NICs is refused; the kubelet does not say for whom it comes."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1"), needed=needed))
        health = it.ledger.state.health
        assert health is not None
        ill = {**health.devices, DeviceID("GPU-3"): DeviceHealth(state=HealthState.UNHEALTHY, reason="Xid 79")}
        it.ledger.take_reading(msgspec.structs.replace(health, revision=health.revision + 1, devices=ill))
        await it.kubelet.until(lambda kubelet: kubelet.allocatable(GPU) == 7)
        decision = await it.kubelet.admit(pod("a", gpus=2))
        fits(await it.kubelet.admit(pod("b", gpus=1)))

        if needed:
            assert CoAllocatedLacking.code in str(decision)
            assert 1 == len(live(it))
        else:
            fits(decision)
            assert [(), ()] == [each.co_allocated for each in live(it)]


async def test_pods_that_swap_their_gpus_both_have_nics() -> None:
    """The kubelet comes for the second one first, and that one is known to have the first one's before it comes for that."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(
            joint("a", ids("GPU-0", "GPU-1"), ids("mlx5_0"), needed=True),
            joint("b", ids("GPU-2", "GPU-3"), ids("mlx5_1"), needed=True),
        )
        fits(await it.kubelet.admit(pod("b", gpus=2), "uid-b"))
        await it.allocations.reconcile()
        fits(await it.kubelet.admit(pod("a", gpus=2), "uid-a"))

        assert [ids("GPU-0", "GPU-1"), ids("GPU-2", "GPU-3")] == [each.devices[GPU] for each in live(it)]
        assert [ids("mlx5_0"), ids("mlx5_1")] == [each.co_allocated for each in live(it)]


async def test_gpus_reserved_without_companions_come_alone() -> None:
    """Another container waits for as many, and for NICs."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(
            reservation("b", ReservedContainer(container=ContainerName("main"), devices={GPU: ids("GPU-0", "GPU-1")})),
            joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1"), needed=True),
        )
        fits(await it.kubelet.admit(pod("b", gpus=2)))
        fits(await it.kubelet.admit(pod("a", gpus=2)))

        assert [(), ids("mlx5_1")] == [each.co_allocated for each in live(it)]


async def test_a_reservation_on_devices_of_an_ended_pod_still_counts() -> None:
    """The record keeps what the former pod had for some seconds; its GPUs and NICs are the next one's all the same."""
    async with Node.running(machine=MACHINE) as (it, _):
        it.set_reserved(joint("a", ids("GPU-2", "GPU-3"), ids("mlx5_1")))
        fits(await it.kubelet.admit(pod("a", gpus=2)))
        await it.allocations.reconcile()
        await it.kubelet.remove(DEFAULT, PodName("a"))
        it.set_reserved(joint("b", ids("GPU-2", "GPU-3"), ids("mlx5_1"), needed=True))
        fits(await it.kubelet.admit(pod("b", gpus=2)))

        assert [ids("mlx5_1")] == [each.co_allocated for each in live(it)]


def with_functions(machine: Topology) -> Topology:
    """The machine with two virtual functions of its first NIC, which is offered as a whole."""
    functions = tuple(VirtualFunction(pci=each) for each in FUNCTIONS)
    first = msgspec.structs.replace(machine.nics[0], virtual_functions=functions)
    offers = tuple(
        Offer(resource=resource, devices=tuple(each.id for each in cards))
        for resource, cards in ((GPU, machine.gpus), (NIC, machine.nics))
    )
    return msgspec.structs.replace(machine, nics=(first, *machine.nics[1:]), offers=offers)
