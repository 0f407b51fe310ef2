"""Asking the kubelet who holds what."""

import os
import shutil
import threading
from pathlib import Path

import anyio
import msgspec
import pytest
from device_allocations_support import MemoryAllocator
from kubelet_support import Node, node, pod, short_directory, two_nodes
from structlog.testing import capture_logs

from topoalign.allocator.ports import KubeletListing, ReportedDevices, ResourceEntry
from topoalign.allocator.reconciliation import pod_resources
from topoalign.allocator.reconciliation.pod_resources import PodResourcesClient
from topoalign.core.model.events import Owner
from topoalign.core.model.ids import GPU, NIC, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import ContainerRequest, PodRequest
from topoalign.kubelet.files import device_checkpoint, pod_directories
from topoalign.kubelet.files.pod_directories import PodDirectories
from topoalign.kubelet.grpc.api import v1
from topoalign.kubelet.grpc.kubelet_client import KubeletAway, call_once
from topoalign.kubelet.grpc.transport import GrpcServer, Servicer
from topoalign.runtime.clock import SystemClock
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio


def client_of(it: Node) -> PodResourcesClient:
    return PodResourcesClient(it.kubelet.pod_resources_dir / "kubelet.sock", it.kubelet.plugins_dir, ManualClock())


async def listed(it: Node) -> KubeletListing:
    """What the allocator reads of this kubelet."""
    async with client_of(it) as client:
        return await client.listing()


async def test_the_checkpoint_shows_init_containers_that_podresources_omits() -> None:
    """The checkpoint tells of init containers that PodResources does not show."""
    one = {GPU: 1}
    staged = PodRequest(
        name=PodName("staged"),
        init_containers=(ContainerRequest(name=ContainerName("load"), requests=one, limits=one),),
        containers=(ContainerRequest(name=ContainerName("main")),),
    )
    async with node(two_nodes()) as it:
        await it.kubelet.admit(staged)
        listing = await listed(it)

        assert ((), 1) == (listing.holdings, listing.pods)
        assert frozenset({(GPU, DeviceID("GPU-0"))}) == listing.checkpoint


async def test_a_checkpoint_older_than_the_socket_is_of_the_kubelet_before() -> None:
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=1))
        after = await listed(it)
        began = (it.kubelet.pod_resources_dir / "kubelet.sock").stat().st_mtime_ns
        os.utime(it.kubelet.plugins_dir / device_checkpoint.NAME, ns=(began - 1, began - 1))
        before = await listed(it)

    assert (True, False) == (after.is_own, before.is_own)


async def test_a_checkpoint_that_cannot_be_trusted_is_no_checkpoint() -> None:
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=1))
        file = it.kubelet.plugins_dir / device_checkpoint.NAME
        file.write_bytes(file.read_bytes().replace(b"GPU-0", b"GPU-1", 1))

        assert (await listed(it)).checkpoint is None


async def test_what_is_no_file_is_no_checkpoint_and_is_not_waited_for() -> None:
    """A named pipe that nobody writes to, and then the file again."""
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=1))
        async with client_of(it) as client:
            file = it.kubelet.plugins_dir / device_checkpoint.NAME
            content = file.read_bytes()
            file.unlink()
            os.mkfifo(file)
            piped = (await client.listing()).checkpoint
            file.rename(file.with_name("pipe"))
            file.write_bytes(content)

            assert (None, frozenset({(GPU, DeviceID("GPU-0"))})) == (piped, (await client.listing()).checkpoint)


async def test_a_checkpoint_that_has_changed_is_read_anew() -> None:
    async with node(two_nodes()) as it, client_of(it) as client:
        sizes = []
        for name in ("one", "two"):
            await it.kubelet.admit(pod(name, gpus=1))
            sizes.append(len((await client.listing()).checkpoint or ()))

        assert [1, 2] == sizes


async def test_a_checkpoint_that_has_changed_and_not_in_size_is_read_anew() -> None:
    """A device in place of another has a name of the same length: the file is written anew, and is as long as before."""
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=1))
        async with client_of(it) as client:
            file = it.kubelet.plugins_dir / device_checkpoint.NAME
            first = await client.listing()
            content = file.read_bytes()
            read = device_checkpoint.decode_device_checkpoint(content)
            entry = (read.pod_device_entries or [])[0]
            others = {
                name: device_checkpoint.encode_device_checkpoint(
                    msgspec.structs.replace(
                        read, pod_device_entries=[msgspec.structs.replace(entry, device_ids={0: [name]})]
                    )
                )
                for name in (f"GPU-{i}" for i in range(1, 100))
            }
            other = next(name for name, written in others.items() if len(written) == len(content))
            (file.parent / "new").write_bytes(others[other])
            (file.parent / "new").rename(file)

            assert frozenset({(GPU, DeviceID("GPU-0"))}) == first.checkpoint
            assert frozenset({(GPU, DeviceID(other))}) == (await client.listing()).checkpoint


async def test_a_checkpoint_that_is_written_while_it_is_read_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(two_nodes()) as it, client_of(it) as client:
        file = it.kubelet.plugins_dir / device_checkpoint.NAME
        contents = []
        for name in ("one", "two"):
            await it.kubelet.admit(pod(name, gpus=1))
            contents.append(file.read_bytes())
        plain = pod_resources.read_checkpoint_devices
        later = contents[1:]
        file.write_bytes(contents[0])

        def overtaken(path: Path) -> pod_resources.CheckpointDevices:
            given = plain(path)
            while later:
                path.write_bytes(later.pop())
            return given

        monkeypatch.setattr(pod_resources, "read_checkpoint_devices", overtaken)
        sizes = [len((await client.listing()).checkpoint or ()) for _ in range(2)]

        assert [1, 2] == sizes


async def test_a_disk_that_hangs_keeps_nobody_waiting_and_no_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint counts as one that cannot be read, until it can be."""
    monkeypatch.setattr(pod_resources, "READ_SECONDS", 0.05)
    go_on, begun = threading.Event(), []
    plain = pod_resources.read_checkpoint_devices

    def hanging(file: Path) -> pod_resources.CheckpointDevices | None:
        begun.append(file)
        go_on.wait()
        return plain(file)

    monkeypatch.setattr(pod_resources, "read_checkpoint_devices", hanging)
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=1))
        async with client_of(it) as client:
            with anyio.fail_after(20):
                hung = [(await client.listing()).checkpoint for _ in range(3)]
                threads = len(begun)
                go_on.set()
                while (again := (await client.listing()).checkpoint) is None:
                    pass

    assert ([None] * 3, 1) == (hung, threads)
    assert frozenset({(GPU, DeviceID("GPU-0"))}) == again


async def test_the_devices_of_a_container_are_gathered_by_resource() -> None:
    """The kubelet lists them one by one."""
    async with node(two_nodes()) as it:
        await it.kubelet.admit(pod("train", gpus=2, nics=1))

        owner = Owner(namespace=Namespace("default"), pod=PodName("train"), container=ContainerName("main"))
        (uid,) = it.kubelet.managers.devices.held

        assert {
            ReportedDevices(
                owner=owner, resource=GPU, devices=frozenset(map(DeviceID, ("GPU-0", "GPU-1"))), pod_uid=uid
            ),
            ReportedDevices(owner=owner, resource=NIC, devices=frozenset([DeviceID("mlx5_0")]), pod_uid=uid),
        } == set((await listed(it)).holdings)


async def test_pod_directories_are_read_at_every_look_and_logged_once_if_missing() -> None:
    """The directories of pods are read at every look; that they are missing is logged once."""
    async with node(two_nodes()) as it, client_of(it) as client:
        pods = it.kubelet.plugins_dir.parent / "pods"
        moved = pods.with_name("moved")
        pods.mkdir(exist_ok=True)
        pods.rename(moved)
        with capture_logs() as logs:
            missing = [(await client.listing()).directories for _ in range(3)]
            moved.rename(pods)
            (pods / "uid-1" / "volumes").mkdir(parents=True)
            found = (await client.listing()).directories

    assert [None] * 3 == missing
    assert found is not None
    assert (False, True) == (found.is_gone("uid-1"), found.is_gone("uid-2"))
    assert [
        "deleted pods cannot be recognized by their directories",
        "the directories of pods can be read again",
    ] == [line["event"] for line in logs if "directories" in line["event"]]


async def test_directories_are_read_again_after_they_could_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(two_nodes()) as it, client_of(it) as client:
        (it.kubelet.plugins_dir.parent / "pods" / "uid-1").mkdir(parents=True)
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(pod_directories, "MOST_PODS", 0)
            unreadable = (await client.listing()).directories
        found = (await client.listing()).directories

        assert (None, True) == (unreadable, found is not None)


async def test_directories_that_go_and_come_are_logged_once() -> None:
    """T08: a node that became empty and full again logged a pair of lines each time."""
    async with node(two_nodes()) as it:
        pods = it.kubelet.plugins_dir.parent / "pods"
        pods.mkdir(exist_ok=True)
        with capture_logs() as logs:
            async with client_of(it) as client:
                for _ in range(20):
                    pods.rename(pods.with_name("moved"))
                    assert (await client.listing()).directories is None
                    pods.with_name("moved").rename(pods)
                    assert (await client.listing()).directories is not None

    about = [line for line in logs if "directories" in line["event"]]
    assert ["warning", "info"] == [line["log_level"] for line in about]


async def test_an_empty_directory_of_pods_tells_nothing_while_pods_are_listed() -> None:
    """It is a file system of its own, which is not mounted here: else every pod would be taken for gone."""
    async with node(two_nodes()) as it:
        pods = it.kubelet.plugins_dir.parent / "pods"
        pods.mkdir(exist_ok=True)
        without_pods = await listed(it)
        await it.kubelet.admit(pod("train", gpus=1))
        shutil.rmtree(pods)
        pods.mkdir()
        with_pods = await listed(it)

    assert without_pods.directories is not None
    assert (1, None) == (with_pods.pods, with_pods.directories)


HELD = frozenset({DeviceID("GPU-0")})
DIRECTORIES = PodDirectories(torn_down={"uid-1": True, "uid-2": False, "uid-3": False})


@pytest.mark.parametrize(
    ("given", "directories", "uid"),
    [
        ([("uid-1", "main", HELD)], None, "uid-1"),
        ([("uid-1", "other", HELD), ("uid-2", "main", HELD)], None, "uid-2"),
        ([("uid-1", "main", frozenset())], None, ""),
        ([("uid-1", "main", HELD), ("uid-2", "main", HELD)], DIRECTORIES, "uid-2"),
        ([("uid-1", "main", HELD), ("uid-2", "main", HELD)], None, ""),
        ([("uid-2", "main", HELD), ("uid-3", "main", HELD)], DIRECTORIES, ""),
        ([], DIRECTORIES, ""),
    ],
    ids=["one", "by the container", "other devices", "one is gone", "two", "two that live", "none"],
)
def test_a_container_has_the_uid_of_the_pod_listed_with_its_devices(
    given: list[tuple[str, str, frozenset[DeviceID]]], directories: PodDirectories | None, uid: str
) -> None:
    """A container has the UID of the one pod that the checkpoint lists with its devices."""
    owner = Owner(namespace=Namespace("ml"), pod=PodName("train"), container=ContainerName("main"))
    parts = [ResourceEntry(GPU, devices, pod_uid, container) for pod_uid, container, devices in given]
    holding = ReportedDevices(owner=owner, resource=GPU, devices=HELD)

    assert [uid] == [each.pod_uid for each in pod_resources.add_pod_uids([holding], parts, directories)]


async def test_without_a_socket_the_kubelet_is_away() -> None:
    with short_directory() as directory:
        async with PodResourcesClient(directory / "kubelet.sock", directory) as client:
            with pytest.raises(KubeletAway, match="its socket is not there"):
                await client.listing()


class Mute(Servicer, v1.PodResourcesListerBase):
    async def list(self, message: v1.ListPodResourcesRequest) -> v1.ListPodResourcesResponse:
        await anyio.sleep_forever()
        raise AssertionError


async def test_a_kubelet_that_does_not_answer_is_given_up_after_a_second() -> None:
    clock = ManualClock()
    with short_directory() as directory:
        server = GrpcServer(Mute(), directory / "kubelet.sock", "directory")
        await server.listen()
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                async with PodResourcesClient(server.path, directory, clock) as client:
                    with pytest.raises(KubeletAway, match="no answer within 1 s"):
                        await client.listing()

            tasks.start_soon(call)
            await clock.advance(1)
        await server.stop(0.01)


async def test_only_containers_that_stay_are_listed() -> None:
    """An init container that ends is not: the kubelet lists app containers and sidecars (kubelet v1.36.3, podresources)."""
    one = {GPU: 1}
    staged = PodRequest(
        name=PodName("staged"),
        init_containers=(
            ContainerRequest(name=ContainerName("proxy"), requests=one, limits=one, sidecar=True),
            ContainerRequest(name=ContainerName("warm-up")),
        ),
        containers=(ContainerRequest(name=ContainerName("main"), requests=one, limits=one),),
    )
    async with node(two_nodes()) as it:
        await it.kubelet.admit(staged)

        response = await call_once(
            it.kubelet.pod_resources_dir / "kubelet.sock",
            lambda channel: v1.PodResourcesListerStub(channel).list(v1.ListPodResourcesRequest()),
            SystemClock(),
            5,
        )
        assert ["proxy", "main"] == [container.name for container in response.pod_resources[0].containers]
        assert {"proxy", "main"} == {holding.owner.container for holding in (await listed(it)).holdings}


async def test_allocatable_resources_and_single_pods_can_be_asked_for() -> None:
    async with node(two_nodes(), allocator=MemoryAllocator(two_nodes())) as it:
        await it.kubelet.admit(pod("train", gpus=1, cpus=2))

        clock = SystemClock()
        everything = await call_once(
            it.kubelet.pod_resources_dir / "kubelet.sock",
            lambda channel: v1.PodResourcesListerStub(channel).get_allocatable_resources(
                v1.AllocatableResourcesRequest()
            ),
            clock,
            5,
        )
        single = await call_once(
            it.kubelet.pod_resources_dir / "kubelet.sock",
            lambda channel: v1.PodResourcesListerStub(channel).get(
                v1.GetPodResourcesRequest(pod_name="train", pod_namespace="default")
            ),
            clock,
            5,
        )
        assert (10, 32, 2) == (len(everything.devices), len(everything.cpu_ids), len(everything.memory))
        assert single.pod_resources is not None
        assert [0, 1] == single.pod_resources.containers[0].cpu_ids
        with pytest.raises(KubeletAway, match="not found"):
            await call_once(
                it.kubelet.pod_resources_dir / "kubelet.sock",
                lambda channel: v1.PodResourcesListerStub(channel).get(v1.GetPodResourcesRequest(pod_name="none")),
                clock,
                5,
            )


async def test_devices_that_cannot_be_are_refused_for_as_long_as_they_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with node(two_nodes()) as it, client_of(it) as client:
        await it.kubelet.until(lambda kubelet: (kubelet.allocatable(GPU), kubelet.allocatable(NIC)) == (8, 2))
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(pod_resources, "MOST_OTHERS", 1)
            for _ in range(2):
                with pytest.raises(KubeletAway, match="10 devices are more than 1"):
                    await client.devices()

        assert {GPU, NIC} == (await client.devices()).keys()


async def test_the_devices_of_other_plugins_are_listed_without_ours() -> None:
    """Ours may be thousands of shares; a name that only begins like one of ours is another's."""
    async with node(two_nodes()) as it, client_of(it) as client:
        await it.kubelet.until(lambda kubelet: (kubelet.allocatable(GPU), kubelet.allocatable(NIC)) == (8, 2))

        assert {GPU, NIC} == (await client.devices()).keys()
        assert {NIC} == (await client.devices([GPU, ResourceName("topoalign.io/ni")])).keys()
        assert {} == await client.devices([GPU, NIC])
