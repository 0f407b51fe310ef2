"""What a container is told of its devices, under every way of telling."""

import re
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from containers_support import (
    FUNCTIONS,
    INSTANCES,
    KIND,
    MIG,
    NAME,
    SHARED,
    WHOLE,
    Host,
    machine,
    request,
    told,
)
from device_allocations_support import MemoryAllocator
from hypothesis import given
from hypothesis import strategies as st
from kubelet_support import served

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.responses import (
    CdiNames,
    DeviceLists,
    NicEdits,
    OwnNodes,
    ResponseWriter,
    device_node,
)
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.ids import GPU, NIC, AllocationID, DeviceID, ResourceName
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.kubelet.grpc.api import v1beta1

STRATEGIES = ("envvar", "volume-mounts", "cdi-annotations", "cdi-cri")
INDEXES = {"GPU-a": "0", "GPU-b": "2", "GPU-c": "3", "MIG-x": "4:0", "MIG-y": "4:2", "MIG-z": "5:0"}
MINORS = {"GPU-a": 7, "GPU-b": 0, "GPU-c": 2, "MIG-x": 4, "MIG-y": 4, "MIG-z": 3}
CAPABILITIES = {"MIG-x": (21, 22), "MIG-y": (30, 31), "MIG-z": (40, 41)}
QUALIFIED = re.compile(f"({KIND.pattern})=({NAME.pattern})")


pytestmark = pytest.mark.anyio

Response = v1beta1.ContainerAllocateResponse

LIST = "/var/run/nvidia-container-devices"
GPU_KIND = "k8s.device-plugin.nvidia.com/gpu"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def paths(response: Response) -> list[str]:
    return [device.container_path for device in response.devices]


async def test_a_list_in_a_variable_names_the_uuids(host: Host) -> None:
    response = await told(host, host.configuration("envvar"), "GPU-b", "GPU-a")

    assert Response(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b"}) == response


async def test_a_list_in_mounts_is_one_that_a_container_cannot_write_itself(host: Host) -> None:
    response = await told(host, host.configuration("volume-mounts"), "GPU-b", "GPU-a")

    assert {"NVIDIA_VISIBLE_DEVICES": LIST} == response.envs
    assert [("/dev/null", f"{LIST}/GPU-a"), ("/dev/null", f"{LIST}/GPU-b")] == [
        (mount.host_path, mount.container_path) for mount in response.mounts
    ]


async def test_a_list_in_mounts_is_believed_beside_one_in_a_variable(host: Host) -> None:
    response = await told(host, host.configuration("envvar", "volume-mounts"), "GPU-a")

    assert {"NVIDIA_VISIBLE_DEVICES": LIST} == response.envs
    assert [f"{LIST}/GPU-a"] == [mount.container_path for mount in response.mounts]


async def test_cdi_annotations_have_a_separate_key_for_each_resource(host: Host) -> None:
    """
    CDI devices in annotations have a separate key for each resource: the kubelet keeps one value per key over all
    resources of a container.
    """
    configuration = host.configuration("cdi-annotations")
    whole = await told(host, configuration, "GPU-b", "GPU-a")
    parts = await told(host, configuration, "MIG-x", resource=MIG)

    (key,), (other) = whole.annotations, [*parts.annotations]
    assert key.startswith("cdi.k8s.io/topoalign_")
    assert len(key.removeprefix("cdi.k8s.io/")) <= 63, "the longest name of an annotation"
    assert key not in other
    assert f"{GPU_KIND}=GPU-a,{GPU_KIND}=GPU-b" == whole.annotations[key]
    assert ({}, [], []) == (whole.envs, whole.mounts, whole.cdi_devices)


async def test_the_prefix_of_cdi_annotations_is_configured(host: Host) -> None:
    configuration = host.configuration("cdi-annotations", plugin={"cdiAnnotationPrefix": "nvidia.cdi.k8s.io/"})

    (key,) = (await told(host, configuration, "GPU-a")).annotations
    assert key.startswith("nvidia.cdi.k8s.io/topoalign_")


async def test_cdi_devices_have_a_field_of_the_protocol(host: Host) -> None:
    response = await told(host, host.configuration("cdi-cri"), "GPU-b", "GPU-a")

    assert [f"{GPU_KIND}=GPU-a", f"{GPU_KIND}=GPU-b"] == [device.name for device in response.cdi_devices]
    assert ({}, [], {}) == (response.envs, response.mounts, response.annotations)


async def test_under_ids_by_index_nvml_s_index_is_told_and_not_the_minor(host: Host) -> None:
    configuration = host.configuration("envvar", "cdi-cri", plugin={"deviceIDStrategy": "index"})
    response = await told(host, configuration, "GPU-a", "GPU-b", "GPU-c::0")

    assert "0,2,3" == response.envs["NVIDIA_VISIBLE_DEVICES"]
    assert [f"{GPU_KIND}={index}" for index in (0, 2, 3)] == [device.name for device in response.cdi_devices]


async def test_a_mig_instance_is_told_by_its_uuid_or_by_two_indexes(host: Host) -> None:
    by_uuid = await told(host, host.configuration("envvar"), "MIG-y", "MIG-z", resource=MIG)
    by_index = await told(
        host, host.configuration("envvar", plugin={"deviceIDStrategy": "index"}), "MIG-y", "MIG-z", resource=MIG
    )

    assert "MIG-y,MIG-z" == by_uuid.envs["NVIDIA_VISIBLE_DEVICES"]
    assert "4:2,5:0" == by_index.envs["NVIDIA_VISIBLE_DEVICES"]


async def test_several_shares_of_a_gpu_are_told_as_the_gpu_and_once(host: Host) -> None:
    response = await told(host, host.configuration(*STRATEGIES), "GPU-c::2", "GPU-a", "GPU-c::0")

    assert {f"{LIST}/GPU-a", f"{LIST}/GPU-c"} == {mount.container_path for mount in response.mounts}
    assert 2 == len(response.mounts) == len(response.cdi_devices)


async def test_device_nodes_are_passed_by_minor_with_the_control_nodes(host: Host) -> None:
    """
    Device nodes are passed by minor number, together with the control nodes that exist. A container that has them in
    its cgroup keeps them when systemd or the CPU manager writes the cgroup anew.
    """
    configuration = host.configuration(
        "envvar", nvidiaDriverRoot="/run/nvidia/driver", plugin={"passDeviceSpecs": True}
    )
    response = await told(host, configuration, "GPU-a", "GPU-b")

    nodes = ["/dev/nvidia7", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]
    assert nodes == paths(response), "no nvidia-modeset: it is not there"
    assert [f"/run/nvidia/driver{node}" for node in nodes] == [device.host_path for device in response.devices]
    assert {"rw"} == {device.permissions for device in response.devices}


async def test_a_mig_instance_brings_its_gpu_and_its_two_capabilities(host: Host) -> None:
    configuration = host.configuration("envvar", plugin={"passDeviceSpecs": True})
    response = await told(host, configuration, "MIG-x", "MIG-y", resource=MIG)

    own = [path for path in paths(response) if "nvidia4" in path or "caps" in path]
    assert ["/dev/nvidia4", *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (21, 22, 30, 31))] == own


async def test_the_root_of_device_nodes_is_configured_apart_from_the_driver_s(host: Host, tmp_path: Path) -> None:
    """They are looked for below that root, not where the driver's is mounted."""
    apart = tmp_path / "apart"
    (apart / "dev").mkdir(parents=True)
    (apart / "dev/nvidia-modeset").touch()
    configuration = host.configuration("envvar", nvidiaDevRoot=str(apart), plugin={"passDeviceSpecs": True})
    response = await told(host, configuration, "GPU-a")

    assert [f"{apart}/dev/nvidia7", f"{apart}/dev/nvidia-modeset"] == [device.host_path for device in response.devices]


async def test_what_the_runtime_shall_add_is_told_in_variables(host: Host) -> None:
    configuration = host.configuration("envvar", gdsEnabled=True, mofedEnabled=True, gdrcopyEnabled=True)
    response = await told(host, configuration, "GPU-a")

    assert sorted(response.envs) == list(response.envs)
    assert {
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_GDS": "enabled",
        "NVIDIA_MOFED": "enabled",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a",
    } == response.envs


async def test_by_cdi_additions_are_devices_and_only_those_that_the_node_has(host: Host) -> None:
    host.put("dev/nvidia-fs0")
    host.put("dev/nvidia-fs1")
    host.put("dev/gdrdrv")
    configuration = host.configuration("cdi-cri", gdsEnabled=True, mofedEnabled=True, gdrcopyEnabled=True)
    response = await told(host, configuration, "GPU-a")

    assert [f"{GPU_KIND}=GPU-a", *(f"k8s.device-plugin.nvidia.com/{kind}=all" for kind in ("gdrcopy", "gds"))] == [
        device.name for device in response.cdi_devices
    ]
    assert {} == response.envs
    (everything,) = host.specification("gds")["devices"]
    assert ["/dev/nvidia-fs0", "/dev/nvidia-fs1"] == [
        node["path"] for node in everything["containerEdits"]["deviceNodes"]
    ]


async def test_imex_channels_that_are_there_are_told_in_each_way(host: Host) -> None:
    host.put("dev/nvidia-caps-imex-channels/channel0")
    configuration = host.configuration(
        "envvar", "volume-mounts", "cdi-cri", imex={"channelIDs": [0, 3]}, plugin={"passDeviceSpecs": True}
    )
    response = await told(host, configuration, "GPU-a")

    assert "0" == response.envs["NVIDIA_IMEX_CHANNELS"]
    assert f"{LIST}/imex/0" in [mount.container_path for mount in response.mounts]
    assert "k8s.device-plugin.nvidia.com/imex-channel=0" in [device.name for device in response.cdi_devices]
    assert "/dev/nvidia-caps-imex-channels/channel0" in paths(response)
    assert "channel3" not in str(response), "it is not there, and not required"
    assert ["0"] == [device["name"] for device in host.specification("imex-channel")["devices"]]


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_gpu_with_own_device_nodes_is_passed_by_them_alone(host: Host, strategy: str) -> None:
    """No strategy of NVIDIA's applies to a GPU of another vendor."""
    gpu = Gpu(id=DeviceID("GPU-x"), index=0, device_nodes=("/dev/kfd", "/dev/dri/renderD128"))
    lists = DeviceLists(host.configuration(strategy))
    writer = ResponseWriter(lists, (lists, CdiNames(lists, ()), OwnNodes(), NicEdits()))

    allocation = Allocation(id=AllocationID("1-1"), devices={GPU: (gpu.id,)})
    response = writer.response(Topology(gpus=(gpu,)), GPU, allocation)

    assert Response(devices=[device_node(path, path) for path in gpu.device_nodes]) == response


async def test_a_nic_brings_its_verbs_device_and_its_address(host: Host) -> None:
    response = await told(host, host.configuration("cdi-cri"), "mlx5_0", resource=NIC)

    assert {"PCIDEVICE_TOPOALIGN_IO_NIC": "0000:0c:00.0", "TOPOALIGN_NICS": "mlx5_0"} == response.envs
    assert ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"] == paths(response)


async def test_virtual_functions_bring_exactly_their_own_verbs_devices(host: Host) -> None:
    response = await told(host, host.configuration(), "0000:12:00.3", "0000:12:00.2", resource=FUNCTIONS)

    assert {"PCIDEVICE_TOPOALIGN_IO_VF_100G": "0000:12:00.2,0000:12:00.3", "TOPOALIGN_NICS": "mlx5_3"} == response.envs
    assert ["/dev/infiniband/uverbs3", "/dev/infiniband/rdma_cm"] == paths(response)


async def test_a_virtual_function_without_rdma_brings_its_address_alone(host: Host) -> None:
    response = await told(host, host.configuration(), "0000:12:00.3", resource=FUNCTIONS)

    assert Response(envs={"PCIDEVICE_TOPOALIGN_IO_VF_100G": "0000:12:00.3"}) == response


async def test_a_call_is_answered_by_the_configuration_it_began_with(host: Host) -> None:
    now = host.configuration("envvar", "volume-mounts")
    containers = Containers(lambda: now, host.cdi, host.proc)
    allocator = MemoryAllocator(machine())
    allocator.pause = anyio.Event()
    answers = []
    async with served(DevicePlugin(GPU, allocator, containers)) as client, anyio.create_task_group() as tasks:

        async def ask() -> None:
            answers.append(await client.allocate(request("GPU-a")))

        tasks.start_soon(ask)
        await allocator.started.wait()
        now = host.configuration("envvar")
        allocator.pause.set()

    (response,) = answers[0].container_responses
    assert {"NVIDIA_VISIBLE_DEVICES": LIST} == response.envs
    assert [f"{LIST}/GPU-a"] == [mount.container_path for mount in response.mounts]


async def test_a_repeated_call_gets_the_same_answer_byte_for_byte(host: Host) -> None:
    """Also from a process that was started anew, and where the strategies stand in another order."""
    flags = {"gdsEnabled": True, "mofedEnabled": True, "plugin": {"passDeviceSpecs": True}}
    orders: Sequence[Sequence[str]] = (STRATEGIES, STRATEGIES, STRATEGIES[::-1])
    answers = [
        bytes(await told(host, host.configuration(*order, **flags), *ids))
        for order, ids in zip(
            orders, (("GPU-a", "GPU-c::1"), ("GPU-a", "GPU-c::1"), ("GPU-c::1", "GPU-a")), strict=True
        )
    ]

    assert [answers[0]] * 3 == answers


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return Host(tmp_path_factory.mktemp("host"))


@given(
    ways=st.lists(st.sampled_from(STRATEGIES), min_size=1, unique=True),
    by=st.sampled_from(["uuid", "index"]),
    specs=st.booleans(),
    of=st.one_of(
        st.tuples(st.just(MIG), st.lists(st.sampled_from(INSTANCES), min_size=1, unique=True)),
        st.tuples(
            st.just(GPU),
            st.lists(
                st.sampled_from([*WHOLE, *(f"{base}::{n}" for base in SHARED for n in range(3))]),
                min_size=1,
                unique=True,
            ),
        ),
    ),
)
def test_a_response_names_exactly_what_was_allocated_in_every_way(
    standing: Host, ways: list[str], by: str, specs: bool, of: tuple[ResourceName, list[str]]
) -> None:
    """A response names exactly what was allocated, in every way that is configured."""
    resource, ids = of
    configuration = standing.configuration(*ways, plugin={"deviceIDStrategy": by, "passDeviceSpecs": specs})
    topology = machine()
    response = (
        standing.containers(configuration)
        .now(topology, resource)
        .response(
            topology,
            resource,
            Allocation(id=AllocationID("1-1"), devices={resource: tuple(DeviceID(id) for id in ids)}),
        )
    )

    bases = {id.split("::")[0] for id in ids}
    names = bases if by == "uuid" else {INDEXES[base] for base in bases}
    listed: dict[str, list[str]] = {}
    if value := response.envs.get("NVIDIA_VISIBLE_DEVICES", "").replace(LIST, ""):
        listed["envvar"] = value.split(",")
    if response.mounts:
        listed["volume-mounts"] = [mount.container_path.removeprefix(f"{LIST}/") for mount in response.mounts]
    if response.annotations:
        (annotated,) = response.annotations.values()
        listed["cdi-annotations"] = [unqualified(name) for name in annotated.split(",")]
    if response.cdi_devices:
        listed["cdi-cri"] = [unqualified(device.name) for device in response.cdi_devices]

    expected = set(ways) - ({"envvar"} if "volume-mounts" in ways else set())
    assert expected == set(listed)
    for way, found in listed.items():
        assert sorted(names) == sorted(found), way
    own = {f"/dev/nvidia{MINORS[base]}" for base in bases} | {
        f"/dev/nvidia-caps/nvidia-cap{minor}" for base in bases for minor in CAPABILITIES.get(base, ())
    }
    beside = {f"/dev/{name}" for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")}
    passed = specs and not set(ways) <= {"cdi-annotations", "cdi-cri"}
    assert sorted(own | beside if passed else ()) == sorted(paths(response))


def unqualified(name: str) -> str:
    """The device of a qualified name that every runtime takes."""
    named = QUALIFIED.fullmatch(name)
    assert named is not None
    assert GPU_KIND == named[1]
    return named[2]
