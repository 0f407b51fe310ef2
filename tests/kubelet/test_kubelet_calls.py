"""What the kubelet gets for its calls to a device plugin."""

import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress

import anyio
import msgspec
import pytest
from device_allocations_support import MemoryAllocator
from grpclib.client import Channel
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import served, short_directory, two_nodes

from topoalign.allocator.device_plugin import plugin_server as watches
from topoalign.allocator.device_plugin.listing import EncodedDevices
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.errors import StateFault, TopoalignError, UnknownDevice
from topoalign.core.model.events import DeviceHealth, HealthState
from topoalign.core.model.ids import GPU, NIC, DeviceID, ResourceName
from topoalign.core.placement.device_choice import NotEnoughDevices
from topoalign.core.state.fold import NodeState
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.kubelet.grpc.transport import GrpcServer
from topoalign.testing.manual_clock import all_tasks_blocked

pytestmark = pytest.mark.anyio


def plugin(
    allocator: MemoryAllocator, resource: ResourceName = GPU
) -> AbstractAsyncContextManager[v1beta1.DevicePluginStub]:
    """A client of the plugin of one resource."""
    return served(DevicePlugin(resource, allocator))


def allocate(*containers: list[str]) -> v1beta1.AllocateRequest:
    return v1beta1.AllocateRequest(
        container_requests=[v1beta1.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    )


def prefer(available: list[str], must: list[str], size: int) -> v1beta1.PreferredAllocationRequest:
    return v1beta1.PreferredAllocationRequest(
        container_requests=[
            v1beta1.ContainerPreferredAllocationRequest(
                available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=size
            )
        ]
    )


async def test_the_options_ask_for_preferences_and_for_no_call_before_the_start() -> None:
    async with plugin(MemoryAllocator(two_nodes())) as client:
        options = await client.get_device_plugin_options(v1beta1.Empty())

        assert (False, True) == (options.pre_start_required, options.get_preferred_allocation_available)


async def test_the_first_list_has_every_device_with_its_health_and_its_numa_node() -> None:
    """A device whose NUMA node is unknown is listed without topology; one not judged yet, unhealthy or cordoned is not
    offered, and yet listed."""
    machine = two_nodes(gpus=4)
    nowhere = msgspec.structs.replace(machine.gpus[3], numa_affinity=())
    allocator = MemoryAllocator(msgspec.structs.replace(machine, gpus=(*machine.gpus[:3], nowhere)))
    allocator.judge(
        {
            DeviceID("GPU-0"): DeviceHealth(state=HealthState.UNHEALTHY, reason="Xid 79"),
            DeviceID("GPU-1"): DeviceHealth(state=HealthState.UNKNOWN),
            DeviceID("GPU-2"): DeviceHealth(state=HealthState.HEALTHY, cordoned=True),
        }
    )
    async with plugin(allocator) as client:
        first = await anext(client.list_and_watch(v1beta1.Empty()))

        listed = [
            (d.id, d.health, None if d.topology is None else [n.id for n in d.topology.nodes]) for d in first.devices
        ]
        assert [
            ("GPU-0", "Unhealthy", [0]),
            ("GPU-1", "Unhealthy", [0]),
            ("GPU-2", "Unhealthy", [1]),
            ("GPU-3", "Healthy", None),
        ] == listed


async def test_a_change_of_health_is_listed_and_an_allocation_is_not() -> None:
    """The kubelet writes its checkpoint at every message, so it hears only what is news to it."""
    allocator = MemoryAllocator(two_nodes())
    async with plugin(allocator) as client:
        stream = client.list_and_watch(v1beta1.Empty())
        await anext(stream)
        await client.allocate(allocate(["GPU-0"]))
        await all_tasks_blocked()
        allocator.judge({DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})

        second = await anext(stream)
        assert ["GPU-5"] == [device.id for device in second.devices if device.health == "Unhealthy"]


async def test_a_change_while_the_list_is_put_together_is_listed_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large list takes a while to encode, and is of the state before."""
    allocator = MemoryAllocator(two_nodes())
    service = DevicePlugin(GPU, allocator)
    put_together = service.listing.of

    async def slowly(state: NodeState) -> EncodedDevices:
        encoded = await put_together(state)
        if allocator.state is state and state.health_of(DeviceID("GPU-5")).usable:
            allocator.judge({DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})
        return encoded

    monkeypatch.setattr(service.listing, "of", slowly)
    lists = service.list_and_watch(v1beta1.Empty())
    assert isinstance(lists, AsyncGenerator)
    async with aclosing(lists) as stream:
        first = await anext(stream)
        with anyio.fail_after(30):
            second = await anext(stream)

    listed = [
        v1beta1.ListAndWatchResponse.FromString(response.SerializeToString()).devices for response in (first, second)
    ]
    assert [[], ["GPU-5"]] == [[device.id for device in one if device.health == "Unhealthy"] for one in listed]


@pytest.mark.parametrize("waits", [True, False], ids=["while it waits", "while its list is read"])
async def test_a_stream_that_is_told_to_end_ends(waits: bool) -> None:
    service = DevicePlugin(GPU, MemoryAllocator(two_nodes()))
    lists = service.list_and_watch(v1beta1.Empty())
    assert isinstance(lists, AsyncGenerator)
    async with aclosing(lists) as stream, anyio.create_task_group() as tasks:
        await anext(stream)
        if waits:
            tasks.start_soon(service.watches.end)
        else:
            service.watch.end()
        with anyio.fail_after(30):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    assert service.watch.ended.is_set()


async def test_a_stream_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client reads nothing any more. The next registration is not to depend on it."""
    monkeypatch.setattr(watches, "END_SECONDS", 0.0)
    service = DevicePlugin(GPU, MemoryAllocator(two_nodes()))
    service.watch.open = True
    await service.watches.end()

    assert service.watches.open
    assert service.watch.ending.is_set()


async def test_the_list_is_encoded_once_for_all_streams_until_it_changes() -> None:
    allocator = MemoryAllocator(two_nodes())
    service = DevicePlugin(GPU, allocator)
    before = await service.listing.of(allocator.state)
    await allocator.allocate(GPU, [[DeviceID("GPU-0")]])

    assert before is await service.listing.of(allocator.state)
    allocator.judge({DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})
    assert before is not await service.listing.of(allocator.state)


async def test_gpus_are_named_to_the_container_runtime_in_the_allocations_order() -> None:
    async with plugin(MemoryAllocator(two_nodes())) as client:
        answer = await client.allocate(allocate(["GPU-1", "GPU-0"], ["GPU-7"]))

        assert [{"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"}, {"NVIDIA_VISIBLE_DEVICES": "GPU-7"}] == [
            container.envs for container in answer.container_responses
        ]


async def test_nics_bring_their_verbs_devices_and_the_connection_manager() -> None:
    async with plugin(MemoryAllocator(two_nodes()), NIC) as client:
        (container,) = (await client.allocate(allocate(["mlx5_1", "mlx5_0"]))).container_responses

        assert {"TOPOALIGN_NICS": "mlx5_0,mlx5_1"} == container.envs
        assert [
            ("/dev/infiniband/uverbs0", "/dev/infiniband/uverbs0", "rw"),
            ("/dev/infiniband/uverbs1", "/dev/infiniband/uverbs1", "rw"),
            ("/dev/infiniband/rdma_cm", "/dev/infiniband/rdma_cm", "rw"),
        ] == [(d.container_path, d.host_path, d.permissions) for d in container.devices]


async def test_nics_of_a_described_machine_bring_no_device_files() -> None:
    async with plugin(MemoryAllocator(two_nodes(verbs=False)), NIC) as client:
        (container,) = (await client.allocate(allocate(["mlx5_0"]))).container_responses

        assert [] == container.devices


async def test_a_device_in_use_is_nobodys_fault() -> None:
    allocator = MemoryAllocator(two_nodes())
    async with plugin(allocator) as client:
        await client.allocate(allocate(["GPU-0", "GPU-1"]))
        allocator.record.show("train", DeviceID("GPU-0"), DeviceID("GPU-1"))
        with pytest.raises(GRPCError) as caught:
            await client.allocate(allocate(["GPU-0"]))

        assert Status.FAILED_PRECONDITION is caught.value.status
        assert "DeviceInUse" in (caught.value.message or "")


async def test_a_full_disk_is_the_machines_fault_and_says_the_remedy() -> None:
    allocator = MemoryAllocator(two_nodes())
    allocator.fault = StateFault("the journal cannot grow: no space left on device", "free some space")
    async with plugin(allocator) as client:
        with pytest.raises(GRPCError) as caught:
            await client.allocate(allocate(["GPU-0"]))

        assert Status.UNAVAILABLE is caught.value.status
        assert "free some space" in (caught.value.message or "")


async def test_too_many_containers_are_refused() -> None:
    async with plugin(MemoryAllocator(two_nodes())) as client:
        with pytest.raises(GRPCError) as caught:
            await client.allocate(allocate(*[["GPU-0"]] * 1_001))

        assert Status.INVALID_ARGUMENT is caught.value.status


async def test_preferences_are_the_desks() -> None:
    async with plugin(MemoryAllocator(two_nodes())) as client:
        answer = await client.get_preferred_allocation(prefer(["GPU-3", "GPU-1", "GPU-2"], ["GPU-2"], 2))

        assert [["GPU-1", "GPU-2"]] == [response.device_i_ds for response in answer.container_responses]


@pytest.mark.parametrize(
    ("available", "must", "size"),
    [
        (["GPU-0"], [], 0),
        (["GPU-0"], [], -1),
        (["GPU-0"], [], 2),
        (["GPU-0"], ["GPU-1"], 1),
        (["GPU-0", "GPU-1"], ["GPU-0", "GPU-1"], 1),
        ([], [], 1),
    ],
    ids=["size-0", "negative", "too-many", "must-not-available", "must-exceeds-size", "none-available"],
)
async def test_a_question_that_cannot_be_meant_gets_no_preference(
    available: list[str], must: list[str], size: int
) -> None:
    async with plugin(MemoryAllocator(two_nodes())) as client:
        answer = await client.get_preferred_allocation(prefer(available, must, size))

        assert [[]] == [response.device_i_ds for response in answer.container_responses]


@pytest.mark.parametrize("fault", [UnknownDevice(["GPU-9"]), NotEnoughDevices(GPU, 1, 0)], ids=["lost", "no-fit"])
async def test_a_gpu_lost_in_between_costs_the_preference_and_not_the_pod(fault: TopoalignError) -> None:
    allocator = MemoryAllocator(two_nodes())
    allocator.fault = fault
    async with plugin(allocator) as client:
        answer = await client.get_preferred_allocation(prefer(["GPU-0", "GPU-9"], [], 1))

        assert [[]] == [response.device_i_ds for response in answer.container_responses]


async def test_a_kubelet_that_calls_before_a_container_starts_is_answered() -> None:
    allocator = MemoryAllocator(two_nodes())
    async with plugin(allocator) as client:
        await client.pre_start_container(v1beta1.PreStartContainerRequest(devices_ids=["GPU-0"]))

        assert [("GPU-0",)] == allocator.starting


async def test_a_stream_whose_client_goes_while_it_is_sent_to_is_closed() -> None:
    """The generator is not left hanging until it is collected: its `finally` has run."""
    allocator = MemoryAllocator(two_nodes())
    with short_directory() as directory:
        service = DevicePlugin(GPU, allocator)
        server = GrpcServer(service, directory / "p.sock", "directory")
        await server.listen()
        channel = Channel(path=str(server.path))
        stream = v1beta1.DevicePluginStub(channel).list_and_watch(v1beta1.Empty())
        await anext(stream)
        watch = service.watch
        for connection in server.connections:
            connection.pause_writing()
        allocator.judge({DeviceID("GPU-5"): DeviceHealth(state=HealthState.UNHEALTHY)})
        await all_tasks_blocked()
        channel.close()
        with anyio.fail_after(30):
            await watch.ended.wait()

        assert not watch.open
        await server.stop(5)


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_connection_accepted_last_is_closed_when_its_server_has_stopped(turns: int) -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as client:
        server = GrpcServer(DevicePlugin(GPU, MemoryAllocator(two_nodes())), directory / "p.sock", "directory")
        await server.listen()
        client.connect(str(server.path))
        for _ in range(turns):
            await anyio.lowlevel.cancel_shielded_checkpoint()
        await server.stop(0)
        client.setblocking(False)
        with suppress(ConnectionResetError):  # the server had not read yet, or had written
            while client.recv(1024):
                pass
