"""The CDI specifications: what is in them, and what happens where there can be none."""

from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from containers_support import CDI_FILE as FILE
from containers_support import DRIVER, LIBRARIES, Host, machine, nodes_of, request
from device_allocations_support import MemoryAllocator
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from kubelet_support import served

from topoalign.allocator.containers.containers import POLL_SECONDS
from topoalign.allocator.device_plugin.plugin_server import DevicePlugin
from topoalign.core.model.ids import GPU, NIC, DeviceID
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.plugin_config.configuration import Configuration
from topoalign.testing.manual_clock import ManualClock, all_tasks_blocked

pytestmark = pytest.mark.anyio


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def written(host: Host, configuration: Configuration, topology: Topology | None = None) -> dict[str, Any]:
    """The specification of GPUs that is in place by then."""
    assert None is host.containers(configuration).poll(topology or machine())
    return host.specification()


def test_every_gpu_and_instance_is_specified_by_uuid_and_by_index(host: Host) -> None:
    """
    Every GPU and every instance is in the CDI files by UUID and by index, offered or not: a running container is
    started again under a name that was handed out under a former configuration.
    """
    found = nodes_of(written(host, host.configuration("cdi-cri")))

    cards = {"GPU-a": 7, "GPU-b": 0, "GPU-c": 2, "GPU-d": 4, "GPU-e": 3, "0": 7, "2": 0, "3": 2, "4": 4, "5": 3}
    parts = {"MIG-x": (4, 21, 22), "MIG-y": (4, 30, 31), "MIG-z": (3, 40, 41)}
    parts |= {"4:0": parts["MIG-x"], "4:2": parts["MIG-y"], "5:0": parts["MIG-z"]}
    assert {
        **{name: [f"/dev/nvidia{minor}"] for name, minor in cards.items()},
        **{
            name: [f"/dev/nvidia{minor}", *(f"/dev/nvidia-caps/nvidia-cap{capability}" for capability in capabilities)]
            for name, (minor, *capabilities) in parts.items()
        },
    } == found


def test_a_container_gets_the_driver_and_what_makes_the_loader_find_it(host: Host) -> None:
    configuration = host.configuration("cdi-cri", nvidiaDriverRoot="/run/nvidia/driver")
    edits = written(host, configuration)["containerEdits"]

    libraries = [f"/{LIBRARIES}/{name}.so.{DRIVER}" for name in ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler")]
    mounted = {mount["containerPath"]: mount["hostPath"] for mount in edits["mounts"]}
    assert {path: f"/run/nvidia/driver{path}" for path in (*libraries, "/usr/bin/nvidia-smi")} == mounted
    assert all("ro" in mount["options"] for mount in edits["mounts"])
    assert [
        ["nvidia-ctk", "hook", "create-symlinks", "--link", f"libcuda.so.1::/{LIBRARIES}/libcuda.so"],
        ["nvidia-ctk", "hook", "update-ldcache", "--folder", f"/{LIBRARIES}"],
    ] == [hook["args"] for hook in edits["hooks"]]
    assert ["NVIDIA_VISIBLE_DEVICES=void"] == edits["env"], "what an image says must not add all GPUs to these"
    assert [
        (path, f"/run/nvidia/driver{path}") for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
    ] == [(node["path"], node["hostPath"]) for node in edits["deviceNodes"]]


def test_the_newer_hook_is_found_and_takes_its_own_arguments(host: Host) -> None:
    (host.root / "usr/bin/nvidia-ctk").rename(host.root / "usr/bin/nvidia-cdi-hook")
    hooks = written(host, host.configuration("cdi-cri"))["containerEdits"]["hooks"]

    assert [("/usr/bin/nvidia-cdi-hook", ["nvidia-cdi-hook", "update-ldcache", "--folder", f"/{LIBRARIES}"])] == [
        (hook["path"], hook["args"]) for hook in hooks[1:]
    ]


def test_a_configured_hook_is_used_unseen_if_the_driver_is_containerised(host: Host) -> None:
    """
    A configured hook is used without a check where the driver is in a container of its own: then the driver's root is
    not where the programs of the host are.
    """
    path = "/usr/local/nvidia/toolkit/nvidia-cdi-hook"
    configuration = host.configuration(
        "cdi-cri", nvidiaDriverRoot="/run/nvidia/driver", plugin={"nvidiaCDIHookPath": path}
    )

    assert {path} == {hook["path"] for hook in written(host, configuration)["containerEdits"]["hooks"]}


def test_extras_bring_their_nodes_and_files(host: Host) -> None:
    for path in ("dev/nvidia-fs0", "etc/cufile.json", "dev/infiniband/uverbs0", "dev/infiniband/rdma_cm"):
        host.put(path)
    written(host, host.configuration("cdi-annotations", gdsEnabled=True, mofedEnabled=True, gdrcopyEnabled=True))

    (gds,) = host.specification("gds")["devices"]
    assert ["/etc/cufile.json"] == [mount["containerPath"] for mount in gds["containerEdits"]["mounts"]]
    assert {"all": ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]} == nodes_of(host.specification("mofed"))
    assert {FILE, FILE.replace("gpu", "gds"), FILE.replace("gpu", "mofed")} == {
        path.name for path in host.cdi.iterdir()
    }, "no gdrcopy: its node is not there"


def test_a_gpu_that_cannot_be_told_does_not_take_the_others_along(host: Host) -> None:
    ill = Gpu(id=DeviceID("GPU-ill"), index=8)
    odd = Gpu(id=DeviceID("GPU/odd"), index=9, minor=9)
    topology = msgspec.structs.replace(machine(), gpus=(*machine().gpus, ill, odd))

    names = nodes_of(written(host, host.configuration("cdi-cri"), topology)).keys()
    assert names.isdisjoint({"GPU-ill", "8", "GPU/odd"})
    assert {"GPU-a", "9"} <= names


def lose_libraries(host: Host) -> None:
    (host.root / LIBRARIES / f"libcuda.so.{DRIVER}").unlink()


def add_driver(host: Host) -> None:
    host.put(f"{LIBRARIES}/libcuda.so.535.104.05")


def lose_hook(host: Host) -> None:
    (host.root / "usr/bin/nvidia-ctk").unlink()


def lose_directory(host: Host) -> None:
    host.cdi.rmdir()


def block_file(host: Host) -> None:
    (host.cdi / FILE).mkdir()


@pytest.mark.parametrize(
    ("spoil", "finding", "remedy"),
    [
        (lose_libraries, "no libcuda.so.<version> is found", "containerDriverRoot"),
        (add_driver, "libraries of drivers 535.104.05 and 550.54.15", "remove those"),
        (lose_hook, "/usr/bin/nvidia-ctk or /usr/bin/nvidia-cdi-hook", "nvidia-container-toolkit"),
        (lose_directory, "cannot write the CDI specification", "create the directory on the node"),
        (block_file, "Is a directory", "TOPOALIGN_CDI_DIR"),
    ],
)
async def test_a_container_that_would_fail_gets_no_device_and_readiness_says_why(
    host: Host, spoil: Any, finding: str, remedy: str
) -> None:
    spoil(host)
    allocator = MemoryAllocator(machine())
    containers = host.containers(host.configuration("cdi-cri"))
    reason = containers.poll(machine())
    assert reason is not None
    assert finding in reason
    assert remedy in reason

    async with served(DevicePlugin(GPU, allocator, containers)) as client:
        with pytest.raises(GRPCError) as refused:
            await client.allocate(request("GPU-a"))
    assert Status.UNAVAILABLE == refused.value.status
    assert finding in str(refused.value.message)
    assert {} == allocator.state.allocations

    async with served(DevicePlugin(NIC, allocator, containers)) as client:
        (nic,) = (await client.allocate(request("mlx5_0"))).container_responses
    assert "mlx5_0" == nic.envs["TOPOALIGN_NICS"], "NICs need none of this"


async def test_what_was_missing_is_noticed_when_it_is_there(host: Host) -> None:
    lose_directory(host)
    clock = ManualClock()
    containers = host.containers(host.configuration("cdi-cri"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(containers.run, MemoryAllocator(machine()), clock)
        await all_tasks_blocked()
        before = containers.reason()
        host.cdi.mkdir()
        await clock.advance(POLL_SECONDS)
        await all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert before is not None
    assert "create the directory on the node" in before
    assert None is containers.reason()
    host.specification()


def test_a_node_that_offers_no_gpus_is_ready_and_writes_nothing(host: Host) -> None:
    lose_libraries(host)
    offers = tuple(offer for offer in machine().offers or () if offer.resource.startswith("topoalign.io/"))
    topology = msgspec.structs.replace(machine(), offers=offers)

    assert None is host.containers(host.configuration("cdi-cri")).poll(topology)
    assert [] == list(host.cdi.iterdir())


def test_other_strategies_need_neither_driver_nor_directory(host: Host) -> None:
    lose_libraries(host)
    lose_directory(host)

    assert None is host.containers(host.configuration("envvar", "volume-mounts")).poll(machine())
