"""`topoalign gpu usage` shows who is on which GPU: against discovery with a scripted driver, over a real NATS server."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import pytest
from anyio.from_thread import start_blocking_portal
from discovery_support import NODE, Hardware, discovery_with
from process_support import mounts, pod_cgroup, put_namespace, put_process
from use_support import GIB, MACHINE, SHARED, UIDS, held, owner, process, shares, state_of, use

from topoalign.cli import gpu_usage, root
from topoalign.core import wire
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.events import AllocationGranted, AllocationsSnapshot
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.processes import DeviceUse, GpuProcess, LibraryCount
from topoalign.core.model.topology.device_offers import Offer
from topoalign.core.ports import Inventory, Stream
from topoalign.core.usage.attribution import DeviceShares, HolderUse, NodeShares, OtherUse, Use
from topoalign.discovery.use_meter import UseMeter
from topoalign.runtime.clock import SystemClock
from topoalign.runtime.nats_bus import connect_bus
from topoalign.runtime.nats_server import local_nats
from topoalign.runtime.tasks import background

TRAIN, INFER = owner("train"), owner("infer\x1b[2J")
HELD = (
    held(1, "GPU-0", of=TRAIN, uid=UIDS[0]),
    held(2, "GPU-1::0", "GPU-1::3", of=INFER, uid=UIDS[1], resource=SHARED),
    held(3, "MIG-0", of=owner("small"), uid=UIDS[2]),
)
BUSY = (
    DeviceUse(
        device=DeviceID("GPU-0"),
        memory=80 * GIB,
        memory_used=14 * GIB,
        utilization=97,
        processes=(*(process(pid, 2 * GIB, None, 16) for pid in range(41, 47)), process(99, GIB, None, 1)),
    ),
    DeviceUse(
        device=DeviceID("GPU-1"),
        memory=80 * GIB,
        memory_used=5 * GIB,
        utilization=7,
        processes=(process(51, 3 * GIB // 2, None, 5), process(52, None, None, 2), process(53, GIB, None, 0)),
    ),
    DeviceUse(device=DeviceID("GPU-2"), failure="nvmlDeviceGetMemoryInfo: GPU is lost"),
)
TABLE = """\
NAME | DEVICE | WHO | HOLDS | MEMORY | TIME | PROCESSES
GPU0 | GPU-0 | (in all) | 14 GiB of 80 GiB | 97%
GPU0 | GPU-0 | ml/train/main | all of it | 12 GiB of 80 GiB | 96% | 41 python3, 42 python3, 43 python3, 44 python3 and 2 more
GPU0 | GPU-0 | host: /user.slice | nothing | 1 GiB | 1% | 99 Xorg
GPU1 | GPU-1 | (in all) | 5 GiB of 80 GiB | 7%
GPU1 | GPU-1 | ml/infer?[2J/main | 2 time slices | 1.5 GiB | 5% | 51 python3
GPU1 | GPU-1 | not known | ? | 1 GiB | 0% | 53
GPU1 | GPU-1 | pod 1b4e28ba-2fa1-11d2-883f-000000000003, container spy | nothing | ? | 2% | 52 python3
GPU2 | GPU-2 | not measured: nvmlDeviceGetMemoryInfo: GPU is lost | ? | ?
GPU2 | MIG-0 | not measured: it was not measured | ? | ?
GPU2 | MIG-0 | ml/small/main | all of it | ? of 10 GiB | ?
GPU2 | MIG-1 | not measured: it was not measured | ? | ?
"""
"""The table, with ` | ` where columns part."""


@asynccontextmanager
async def serving(folder: Path, hardware: Hardware) -> AsyncIterator[str]:
    """Yields the URL of NATS once the hardware is announced. Process 53 has ended since it was listed."""
    proc = folder / "host/proc"
    put_namespace(proc)
    for pid in range(41, 47):
        put_process(proc, pid, cgroup=pod_cgroup(UIDS[0]), mountinfo=mounts(UIDS[0]))
    put_process(proc, 51, cgroup=pod_cgroup(UIDS[1]), mountinfo=mounts(UIDS[1]))
    put_process(proc, 52, cgroup=pod_cgroup(UIDS[3]), mountinfo=mounts(UIDS[3], "spy"))
    put_process(proc, 99, cgroup="0::/user.slice\n", command="Xorg")
    clock = SystemClock()
    async with local_nats(folder / "nats") as url, connect_bus(url, name="test", wait=5) as bus, background() as tasks:
        await bus.publish(
            wire.encode_event(AllocationsSnapshot(node=NODE, epoch=9, seq=1, allocations=(), digest=""), 1.0)
        )
        for seq, allocation in enumerate(HELD, 2):
            await bus.publish(
                wire.encode_event(AllocationGranted(node=NODE, epoch=9, seq=seq, allocation=allocation), 1.0)
            )
        meter = UseMeter(NODE, hardware, clock, folder / "host", 5.0)
        discovery = discovery_with(hardware, bus, clock, answers=[meter.endpoint()])
        await tasks.start(lambda *, task_status: discovery.run(task_status=task_status))
        while await bus.last_position(Stream.NODES) < 2:
            await anyio.lowlevel.checkpoint()
        yield url


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    made = Hardware()
    made.now = Inventory(topology=MACHINE, health={})
    return made


@pytest.fixture(scope="module")
def node(hardware: Hardware, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(tmp_path_factory.mktemp("usage"), hardware)) as url,
    ):
        yield url


@pytest.fixture
def run(node: str, hardware: Hardware, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("TOPOALIGN_NATS_URL", node)
    monkeypatch.setenv("TOPOALIGN_NODE", NODE)
    monkeypatch.setattr("topoalign.discovery.use_meter.FRESH_SECONDS", 0.0)
    hardware.use = BUSY

    def command(*arguments: str) -> tuple[int, str, str]:
        status = root.run_command_line(["gpu", "usage", *arguments])
        return status, *capsys.readouterr()

    return command


def test_the_table_has_holders_first_and_then_all_others(run: Any) -> None:
    status, out, told = run()

    assert TABLE == re.sub(" {2,}", " | ", out)
    assert 1 == len({line.index("DEVICE" if n == 0 else line.split()[1]) for n, line in enumerate(out.splitlines())})
    assert (0, "") == (status, told)


def test_json_has_all_processes_and_the_same_fields_as_the_http_api(run: Any) -> None:
    status, out, _ = run("--json")
    document = json.loads(out)

    assert (0, ["GPU-0", "GPU-1", "GPU-2", "MIG-0", "MIG-1"]) == (
        status,
        [device["device"] for device in document["devices"]],
    )
    first = document["devices"][0]
    assert ("GPU0", 0, None) == (first["name"], first["index"], first["pci"])
    assert [41, 42, 43, 44, 45, 46] == [each["pid"] for each in first["holders"][0]["use"]["processes"]]
    assert "/user.slice" == first["others"][0]["cgroup"]
    assert {*NodeShares.__struct_fields__} == document.keys()
    assert (NODE, "", 0) == (document["node"], document["finding"], document["left_out"])


def test_a_driver_that_cannot_measure_ends_with_exit_code_69(run: Any, hardware: Hardware) -> None:
    hardware.use = DriverFault("nothing runs on a machine that is described", "ask a node that has GPUs")
    status, out, told = run()

    assert (69, "") == (status, out)
    assert "nothing runs on a machine that is described" in told and "ask a node that has GPUs" in told


def test_a_node_without_discovery_ends_with_exit_code_69(run: Any) -> None:
    status, _, told = run("--node", "elsewhere")

    assert 69 == status
    assert "the discovery of node elsewhere does not answer" in told


@pytest.mark.parametrize(
    ("cores", "memory", "devices", "text"),
    [
        (100, 10 * GIB, 1, "all of it"),
        (100, None, 1, "all of it"),
        (None, None, 1, "1 time slice"),
        (20, 4 * GIB, 2, "20 % and 4 GiB"),
        (100, 4 * GIB, 1, "100 % and 4 GiB"),
        (0, 4 * GIB, 1, "4 GiB"),
    ],
)
def test_what_is_held_is_said_in_words(cores: int | None, memory: int | None, devices: int, text: str) -> None:
    holder = HolderUse(
        owner=None,
        pod_uid="",
        allocations=(),
        devices=(DeviceID("GPU-0"),) * devices,
        cores=cores,
        memory=memory,
        use=Use(memory=None, utilization=None, processes=()),
    )

    assert text == gpu_usage.describe_use(holder, 10 * GIB)


@pytest.mark.parametrize(("sharing", "text"), [("mps", "2 MPS shares"), ("time-slicing", "2 time slices")])
def test_what_is_no_amount_is_called_by_its_way(sharing: Literal["mps", "time-slicing"], text: str) -> None:
    offer = Offer(resource=SHARED, devices=(DeviceID("GPU-1"),), replicas=4, sharing=sharing)
    machine = msgspec.structs.replace(MACHINE, offers=(offer,))
    state = state_of(held(2, "GPU-1::0", "GPU-1::3", of=INFER, uid=UIDS[1], resource=SHARED), machine=machine)
    row = shares(state, use("GPU-1"))["GPU-1"]

    assert [text] == [cells[3] for cells in gpu_usage.list_use_rows(row, machine)][1:]


def test_what_the_library_counts_stands_in_the_row_of_its_container() -> None:
    counted = LibraryCount(device=DeviceID("GPU-0"), memory=6 * GIB, utilization=40)
    unknown = LibraryCount(device=DeviceID("GPU-0"), memory=0)
    nothing = Use(memory=None, utilization=None, processes=())
    holders = tuple(
        HolderUse(owner=None, pod_uid="", allocations=(), devices=(), cores=1, memory=1, use=nothing, library=library)
        for library in (counted, None, unknown)
    )
    other = OtherUse(where="host", owner=None, pod_uid="", container_id="", cgroup="/x", use=nothing)
    device = DeviceShares(
        device=DeviceID("GPU-0"),
        gpu=DeviceID("GPU-0"),
        memory=None,
        memory_used=None,
        utilization=None,
        memory_utilization=None,
        failure="",
        holders=holders,
        others=(other,),
    )

    assert ["", "6 GiB, 40%", "", "0 B, ?", ""] == [row[6] for row in gpu_usage.list_use_rows(device, MACHINE)]


def test_processes_without_name_are_told_by_their_ids() -> None:
    assert "7, 8" == gpu_usage.pids([GpuProcess(pid=7, kinds=("compute",)), GpuProcess(pid=8, kinds=("mps",))])
