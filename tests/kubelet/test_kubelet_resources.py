"""What is offered may change while containers run: the kubelet counts what is there, and nothing is handed out twice."""

from pathlib import Path

import anyio
import msgspec
import pytest
from device_allocations_support import MemoryAllocator
from kubelet_support import Node, node, offers, two_nodes

from topoalign.allocator.device_plugin.plugin_server import socket_path
from topoalign.allocator.device_plugin.registration import POLL_SECONDS
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.unix_sockets import LONGEST_PATH
from topoalign.testing.fake_kubelet.kubelet import FakeKubelet
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio

MACHINE = two_nodes(nics=0)
A100 = ResourceName("nvidia.com/a100")
SHARED = ResourceName("nvidia.com/gpu.shared")
GPUS = tuple(MACHINE.gpu_by_id)


def offering(*offered: Offer) -> Topology:
    return msgspec.structs.replace(MACHINE, offers=offered)


RENAMED = offering(Offer(resource=A100, devices=GPUS))


def counted(it: Node, resource: ResourceName) -> tuple[int, int]:
    """Capacity and allocatable."""
    return it.kubelet.capacity(resource), it.kubelet.allocatable(resource)


async def until(it: Node, resource: ResourceName, capacity: int, allocatable: int) -> None:
    with anyio.fail_after(30):
        await it.kubelet.until(lambda kubelet: counted(it, resource) == (capacity, allocatable))


async def test_resources_of_any_name_whole_and_shared_are_served_side_by_side() -> None:
    machine = msgspec.structs.replace(
        two_nodes(),
        offers=(
            Offer(resource=A100, devices=GPUS[:4]),
            Offer(resource=SHARED, devices=GPUS[4:], replicas=4),
            Offer(resource=NIC, devices=(DeviceID("mlx5_0"), DeviceID("mlx5_1"))),
        ),
    )
    async with node(machine) as it:
        assert [(4, 4), (16, 16), (2, 2)] == [counted(it, name) for name in (A100, SHARED, NIC)]
        assert {A100, SHARED, NIC} == set(it.kubelet.plugins.endpoints)
        assert it.front.reason() is None


async def test_a_resource_that_is_offered_later_is_served_at_once() -> None:
    async with node(MACHINE, clock=ManualClock()) as it:
        it.allocator.discover(offering(Offer(resource=GPU, devices=GPUS[:4]), Offer(resource=A100, devices=GPUS[4:])))
        await until(it, A100, 4, 4)
        await until(it, GPU, 4, 4)


async def test_a_resource_of_which_nothing_is_held_ends_with_an_empty_list() -> None:
    """Its capacity is gone at once, and its socket at the next look."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        it.allocator.discover(RENAMED)
        await until(it, GPU, 0, 0)
        await until(it, A100, 8, 8)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.plugins.endpoints[GPU].plugin is None)

        assert ["topoalign-nvidia.com_a100.sock"] == sockets(it)
        assert it.front.reason() is None


async def test_a_resource_renamed_while_containers_run_stays_for_them() -> None:
    """
    A resource that is renamed while containers run stays for them, and their devices are given to nobody else. The
    kubelet calls PreStartContainer when a container restarts, so somebody must serve its resource; what it holds
    becomes available under the new name when it has gone.
    """
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        await it.allocator.allocate(GPU, [[GPUS[0], GPUS[1]]])
        it.allocator.discover(RENAMED)
        await until(it, A100, 8, 6)
        await until(it, GPU, 2, 0)
        await clock.advance(3 * POLL_SECONDS)
        assert it.kubelet.plugins.endpoints[GPU].plugin is not None
        assert it.front.reason() is None

        it.allocator.release_all()
        await until(it, A100, 8, 8)
        await until(it, GPU, 0, 0)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.plugins.endpoints[GPU].plugin is None)


async def test_a_container_with_a_former_resource_is_served_after_our_restart() -> None:
    """A container that holds a former resource is served after our restart, too."""
    allocator = MemoryAllocator(MACHINE)
    await allocator.allocate(GPU, [[GPUS[0]]])
    allocator.discover(RENAMED)
    async with node(RENAMED, allocator=allocator, until=lambda kubelet: kubelet.capacity(GPU) == 1) as it:
        await until(it, GPU, 1, 0)
        await until(it, A100, 8, 7)


async def test_held_devices_are_not_all_devices_before_the_hardware_is_known() -> None:
    """
    Before the hardware is known, what is held is not taken for all that exists. After a restart the record is read
    before discovery is received: nothing is listed until then, not four GPUs of eight.
    """
    before = MemoryAllocator(MACHINE)
    await before.allocate(GPU, [list(GPUS[:4])])
    allocator = MemoryAllocator(None, before.journal)
    seen: set[int] = set()

    def look(kubelet: FakeKubelet) -> bool:
        seen.add(kubelet.capacity(GPU))
        return False

    async with node(MACHINE, allocator=allocator, until=lambda kubelet: True) as it:
        await all_tasks_blocked()
        assert "the node has no devices to offer yet" == it.front.reason()
        it.tasks.start_soon(it.kubelet.until, look)
        it.allocator.discover(MACHINE)
        await until(it, GPU, 8, 8)

    assert seen <= {0, 8}


async def test_a_resource_offered_again_before_it_has_ended_goes_on() -> None:
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        registrations = it.kubelet.plugins.registrations
        it.allocator.discover(RENAMED)
        await until(it, GPU, 0, 0)
        it.allocator.discover(MACHINE)
        await until(it, GPU, 8, 8)
        await clock.advance(2 * POLL_SECONDS)

        assert it.kubelet.plugins.endpoints[GPU].plugin is not None
        assert registrations + 1 >= it.kubelet.plugins.registrations  # that of the resource that came and went


async def test_an_ended_resource_is_served_again_when_it_is_offered_again() -> None:
    """A resource that has ended is served again when it is offered again."""
    clock = ManualClock()
    async with node(MACHINE, clock=clock) as it:
        it.allocator.discover(RENAMED)
        await until(it, GPU, 0, 0)
        await clock.advance(POLL_SECONDS)
        await it.kubelet.until(lambda kubelet: kubelet.plugins.endpoints[GPU].plugin is None)
        it.allocator.discover(MACHINE)

        await it.kubelet.until(offers(MACHINE))


def test_sockets_have_names_of_their_own_and_paths_that_linux_takes() -> None:
    names = ["a-b/c", "a/b-c", "a.b/c", f"{'d' * 60}.example/{'x' * 60}", f"{'d' * 60}.example/{'x' * 59}y"]
    for length in (10, 40, 79):
        directory = Path("/" + "d" * (length - 1))
        paths = [socket_path(directory, ResourceName(name)) for name in names]

        assert len(names) == len(set(paths))
        assert {directory} == {path.parent for path in paths}
        assert all(len(str(path)) <= LONGEST_PATH for path in paths)


def sockets(it: Node) -> list[str]:
    return sorted(path.name for path in (it.directory / "device-plugins").glob("topoalign-*"))
