"""Discovery answers what GPUs are used for: once a second, with where processes run, and only if it is asked."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import msgspec
import pytest
from discovery_support import NODE, Hardware
from process_support import CONTAINER_ID, POD_UID, mounts, pod_cgroup, put_namespace, put_process

from topoalign.core import wire
from topoalign.core.model.errors import BadRequest, DriverFault
from topoalign.core.model.ids import ContainerName, DeviceID, NodeName
from topoalign.core.model.processes import DeviceUse, GpuProcess, Measurement, ProcessIdentity
from topoalign.core.model.requests import NodeRequest
from topoalign.discovery.use_meter import FRESH_SECONDS, MOST_PROCESSES, UseMeter
from topoalign.runtime.memory_bus import MemoryBus
from topoalign.testing.manual_clock import ManualClock

pytestmark = pytest.mark.anyio

DEADLINE = 5.0
GPU_0 = DeviceID("GPU-0")


class Metered:
    """A meter of one GPU, with a /proc of its own."""

    def __init__(self, root: Path) -> None:
        self.hardware, self.clock, self.proc = Hardware(), ManualClock(), root / "proc"
        self.meter = UseMeter(NODE, self.hardware, self.clock, root, DEADLINE)
        put_namespace(self.proc)

    def runs(self, *pids: int, device: str = "GPU-0") -> None:
        self.hardware.use = (DeviceUse(device=DeviceID(device), processes=tuple(map(process, pids))),)

    async def answer(self) -> Measurement:
        return await self.meter.answer(NodeRequest(node=NODE))


def process(pid: int, memory: int | None = None) -> GpuProcess:
    return GpuProcess(pid=pid, kinds=("compute",), memory=memory)


@pytest.fixture
def metered(tmp_path: Path) -> Metered:
    return Metered(tmp_path)


async def test_processes_say_where_they_run(metered: Metered) -> None:
    """One is in a pod, one is of the host, one has ended since the driver listed it."""
    metered.runs(41, 42, 43)
    put_process(metered.proc, 41, cgroup=pod_cgroup(), mountinfo=mounts(container="train"))
    put_process(metered.proc, 42, cgroup="0::/user.slice\n", command="Xorg")

    found = await metered.answer()

    in_pod = ProcessIdentity(
        pod_uid=POD_UID, container_id=CONTAINER_ID, container=ContainerName("train"), command="python3"
    )
    of_host = ProcessIdentity(cgroup="/user.slice", command="Xorg")
    assert (NODE, metered.clock.wall(), "", 0) == (found.node, found.time, found.finding, found.left_out)
    assert [in_pod, of_host, None] == [each.identity for each in found.devices[0].processes or ()]


async def test_in_another_pid_namespace_nobody_is_looked_up(tmp_path: Path) -> None:
    """The same number is another process there: the wrong container would be shown."""
    metered = Metered(tmp_path / "node")
    (metered.proc / "self/ns/pid").unlink()
    (metered.proc / "self/ns/pid").symlink_to("pid:[4026532201]")
    metered.runs(41)
    put_process(metered.proc, 41, cgroup=pod_cgroup(), mountinfo=mounts())

    found = await metered.answer()

    assert [None] == [each.identity for each in found.devices[0].processes or ()]
    assert "hostPID" in found.finding


async def test_a_measurement_serves_all_who_ask_within_a_second(metered: Metered) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(metered.answer)
    await metered.clock.advance(FRESH_SECONDS * 0.9)
    await metered.answer()
    assert 1 == metered.hardware.measurements

    await metered.clock.advance(FRESH_SECONDS * 0.1)
    await metered.answer()
    assert 2 == metered.hardware.measurements


async def test_a_fault_of_the_driver_is_told_and_not_kept(metered: Metered) -> None:
    metered.hardware.use = DriverFault("NVML does not work", "run nvidia-smi")
    with pytest.raises(DriverFault):
        await metered.answer()

    metered.runs()
    assert GPU_0 == (await metered.answer()).devices[0].device


async def test_a_file_of_proc_that_hangs_does_not_hold_back_the_rest(
    metered: Metered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that does not return keeps one thread, and the answer says which it was."""
    go_on = threading.Event()
    monkeypatch.setattr(os, "readlink", lambda *_: go_on.wait())
    metered.runs(41)
    found: list[Measurement] = []

    async def ask() -> None:
        found.append(await metered.answer())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        while not found:
            await metered.clock.advance(1.0)
    go_on.set()

    assert "/proc has not answered a link in /proc within 5 s" == found[0].finding
    assert [41] == [each.pid for each in found[0].devices[0].processes or ()]


async def test_too_many_processes_are_cut_to_those_with_the_most_memory(metered: Metered) -> None:
    count = MOST_PROCESSES // 2 + 1
    metered.hardware.use = tuple(
        DeviceUse(device=DeviceID(name), processes=tuple(process(pid, 10 + pid) for pid in range(1, 1 + count)))
        for name in ("GPU-0", "GPU-1")
    )
    found = await metered.answer()

    assert 2 == found.left_out
    assert [(2, count), (2, count)] == [
        ((use.processes or ())[0].pid, (use.processes or ())[-1].pid) for use in found.devices
    ]


async def test_the_largest_answer_fits_into_a_message(metered: Metered) -> None:
    path = "/" + "x" * 2000
    for pid in range(1, 1 + MOST_PROCESSES):
        put_process(metered.proc, pid, cgroup=f"0::{path}\n", command='"' * 15)
    metered.hardware.use = (
        DeviceUse(
            device=DeviceID("MIG-" + "f" * 90),
            processes=tuple(process(n, 1 << 38) for n in range(1, MOST_PROCESSES + 99)),
        ),
    )
    found = await metered.answer()

    assert MOST_PROCESSES == len(found.devices[0].processes or ())
    assert wire.LARGEST_BODY > len(wire.encode_answer(found))


async def test_the_question_comes_over_the_bus(metered: Metered) -> None:
    metered.runs(41)
    bus = MemoryBus()

    async def ask(node: str) -> Measurement:
        body = msgspec.json.encode(NodeRequest(node=NodeName(node)))
        return wire.decode_answer(await bus.ask(wire.discovery_subject(NODE, "use"), body, within=1.0), Measurement)

    async with bus.serve("topoalign-discovery", [metered.meter.endpoint()]):
        assert [41] == [each.pid for each in (await ask(NODE)).devices[0].processes or ()]
        with pytest.raises(BadRequest, match="discovery service of"):
            await ask("another")


def test_nothing_is_imported_before_somebody_asks() -> None:
    """The start of an agent is a bound: what is for this question alone comes with the question."""
    only_asked = ["core.model.processes", "core.usage.cgroups", "kubelet.processes", "discovery.drivers.nvml.use"]
    program = (
        "import sys, topoalign.discovery.main, topoalign.discovery.drivers.nvml.driver\n"
        f"print(sys.modules.keys() & {{'topoalign.' + name for name in {only_asked}}})"
    )

    assert (
        "set()\n" == subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    )
