"""A stand-in NVML library that plays scripted machines under the real pynvml, and a /sys tree to go with it."""

import ctypes
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_uint, c_ulonglong
from heapq import heappop
from pathlib import Path

import anyio
import pynvml
import pytest

from topoalign.core.model.ids import DeviceID
from topoalign.core.ports import Inventory
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.discovery.drivers.nvml.nvml_events import WAIT_SECONDS
from topoalign.testing.manual_clock import ManualClock

SOURCE = Path(__file__).parents[1] / "nvml" / "nvml_standin.c"
SONAME = "libnvidia-ml.so.1"
WAIT = "nvmlEventSetWait_v2"
TURNS = 40
"""Of the event loop, in which whatever a step of time wakes has its say."""
WHOLE_GPU = 0xFFFFFFFF
"""In place of the ids of a MIG instance."""

DGX1_VOLTA = (
    (0, 1, 1, 2, 2, 0, 0, 0),
    (1, 0, 2, 1, 0, 2, 0, 0),
    (1, 2, 0, 2, 0, 0, 1, 0),
    (2, 1, 2, 0, 0, 0, 0, 1),
    (2, 0, 0, 0, 0, 1, 1, 2),
    (0, 2, 0, 0, 1, 0, 2, 1),
    (0, 0, 1, 0, 1, 2, 0, 2),
    (0, 0, 0, 1, 2, 1, 2, 0),
)
"""NVLinks between the GPUs of a DGX-1 with V100, as NVIDIA publishes them."""


def compiled(source: Path, target: Path, *flags: str) -> Path:
    """Compiles a source in C; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler (cc) to build {source.name} with")
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", *flags, "-o", target, source], check=True)
    return target


def built(folder: Path, *flags: str) -> Path:
    return compiled(SOURCE, folder / SONAME, *flags, "-shared", "-fPIC", f"-Wl,-soname,{SONAME}")


class StandIn:
    """One copy of the library, with a state of its own."""

    def __init__(self, library: Path) -> None:
        self.loaded = ctypes.CDLL(str(library))

    def play(self, script: str) -> None:
        self.loaded.standin_play(script.encode())

    def calls(self, function: str) -> int:
        return int(self.loaded.standin_calls(function.encode()))

    def report(self, gpu: int, kind: int, data: int = 0, gi: int = WHOLE_GPU, ci: int = WHOLE_GPU) -> None:
        """An event of this kind (nvmlEventType…) of the GPU at this index."""
        self.loaded.standin_event(gpu, c_ulonglong(kind), c_ulonglong(data), c_uint(gi), c_uint(ci))

    def xid(self, gpu: int, xid: int, gi: int = WHOLE_GPU, ci: int = WHOLE_GPU) -> None:
        self.report(gpu, pynvml.nvmlEventTypeXidCriticalError, xid, gi, ci)

    def listened_to(self, gpu: int) -> bool:
        """Whether somebody would hear of an event of the GPU at this index."""
        return bool(self.loaded.standin_listened(gpu))

    def made(self, gpu: int) -> int:
        return int(self.loaded.standin_made(gpu))

    def hanging(self) -> int:
        """How many threads are in a call that hangs."""
        return int(self.loaded.standin_hanging())

    def waiting(self) -> int:
        """How many threads wait for an event."""
        return int(self.loaded.standin_waiting())

    def release(self) -> None:
        """Lets calls that hang go on."""
        self.loaded.standin_release()


@contextmanager
def standing_in(library: Path, folder: Path, script: str) -> Iterator[StandIn]:
    """pynvml finds this machine for as long as the context is open."""
    standin = StandIn(Path(shutil.copy(library, folder / SONAME)))
    standin.play(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", standin.loaded)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        try:
            yield standin
        finally:
            standin.release()


def address(gpu: int) -> str:
    """Of a GPU of these scripts and trees: the first half are on NUMA node 0."""
    return f"0000:{16 * gpu + 7:02x}:00.0"


def script(*, gpus: Sequence[int] = range(8), more: Sequence[str] = ()) -> str:
    """These GPUs, which have one identity each, whatever their index."""
    lines = [
        f"gpu uuid=GPU-{gpu} pci=0000{address(gpu).upper()} minor={gpu} name=NVIDIA_H100_80GB memory=85899345920"
        for gpu in gpus
    ]
    return "\n".join([*lines, *more])


def direct_links(matrix: Sequence[Sequence[int]]) -> list[str]:
    """Statements for NVLinks between the GPUs themselves."""
    lines = []
    for gpu, row in enumerate(matrix):
        peers = [peer for peer, count in enumerate(row) for _ in range(count)]
        lines += [f"link {gpu} {k} gpu {peer}" for k, peer in enumerate(peers)]
        lines.append(f"field {gpu} {pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT} {len(peers)}")
    return lines


def switch_links(gpus: int, count: int, kind: str = "switch") -> list[str]:
    """Statements for this many links of each GPU to NVSwitches."""
    return [f"link {gpu} {k} {kind}" for gpu in range(gpus) for k in range(count)]


def host_tree(root: Path, *, gpus: int = 8, nics: int = 2) -> Path:
    """A machine of two NUMA nodes with 16 CPUs each; every GPU and NIC has a PCIe switch of its own below its node."""
    put(root, "sys/devices/system/cpu/online", "0-31")
    for cpu in range(32):
        put(root, f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id", str(cpu // 16))
        put(root, f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", str(cpu))
    put(root, "sys/devices/system/node/online", "0-1")
    for node in range(2):
        folder = f"sys/devices/system/node/node{node}"
        put(root, f"{folder}/cpulist", f"{16 * node}-{16 * node + 15}")
        put(root, f"{folder}/distance", ("10 21", "21 10")[node])
        put(root, f"{folder}/meminfo", f"Node {node} MemTotal: {64 << 20} kB")
    put(root, "proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555")
    for gpu in range(gpus):
        pci_device(root, address(gpu), 2 * gpu // max(gpus, 1), "0x030200", "0x10de")
    for nic in range(nics):
        there = f"0000:{16 * nic + 9:02x}:00.0"
        pci_device(root, there, 2 * nic // max(nics, 1), "0x020700", "0x15b3")
        link(root, f"sys/class/infiniband/mlx5_{nic}/device", f"sys/bus/pci/devices/{there}")
        put(root, f"sys/class/infiniband/mlx5_{nic}/ports/1/state", "4: ACTIVE")
        put(root, f"sys/class/infiniband/mlx5_{nic}/ports/1/link_layer", "InfiniBand")
    return root


def uuid(gpu: int) -> DeviceID:
    return DeviceID(f"GPU-{gpu:08x}-0000-0000-0000-000000000000")


def told_uuids(root: Path, *gpus: int) -> None:
    """NVIDIA's driver is loaded and names these GPUs of a `host_tree`."""
    for gpu in gpus:
        put(root, f"proc/driver/nvidia/gpus/{address(gpu)}/information", f"GPU UUID: \t {uuid(gpu)}")


def pci_device(root: Path, at: str, node: int, kind: str, vendor: str) -> None:
    bridge = f"0000:00:{int(at[5:7], 16) % 32:02x}.{int(at[5:7], 16) // 32}"
    folder = f"sys/devices/pci000{node}:00/{bridge}/{at}"
    put(root, f"{folder}/class", kind)
    put(root, f"{folder}/vendor", vendor)
    put(root, f"{folder}/numa_node", str(node))
    put(root, f"{folder}/local_cpulist", f"{16 * node}-{16 * node + 15}")
    link(root, f"sys/bus/pci/devices/{at}", folder)


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def link(root: Path, path: str, target: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).symlink_to("/".join([".."] * path.count("/")) + "/" + target)


class QuickClock(ManualClock):
    """
    Gives who wakes a number of turns.

    The threads of the driver live by another time, and on a busy machine they may get no turn for long: no time passes here
    while one of them works, and nobody wakes a second after a wait for events began that was to last one before that wait
    has ended. So what takes too long by this clock hangs.
    """

    def __init__(self, standin: StandIn) -> None:
        super().__init__()
        self._standin = standin
        self._others = set(threading.enumerate())
        self._waited_at = self._now
        """No wait for events under way began before."""

    async def advance(self, seconds: float) -> None:
        await self._settle()
        until = self._now + seconds
        while self._sleepers and self._sleepers[0][0] <= until:
            await self._move(max(self._now, self._sleepers[0][0]))
            while self._sleepers and self._sleepers[0][0] <= self._now:
                heappop(self._sleepers)[2].set()
            await self._settle()
        await self._move(until)
        await self._settle()

    async def _move(self, now: float) -> None:
        """It is so late now. Who wakes only after this finds the wait for events renewed, if a second has passed."""
        self._now = now
        if now - self._waited_at < WAIT_SECONDS:
            return
        waits = self._standin.calls(WAIT)
        while len(working := self._working()) > self._standin.hanging() and self._standin.calls(WAIT) == waits:
            working[-1].join(0.001)  # it needs the interpreter, which this loop would else keep for itself
            await anyio.lowlevel.checkpoint()
        self._waited_at = now

    async def _settle(self) -> None:
        await turns()
        await self.driver_rests()
        await turns()

    async def driver_rests(self) -> None:
        """Until each thread of the driver has ended, hangs, or waits for an event."""
        while len(working := self._working()) > self._standin.hanging() + self._standin.waiting():
            working[-1].join(0.001)
            await anyio.lowlevel.checkpoint()

    def _working(self) -> list[threading.Thread]:
        """Threads of the driver that have not ended."""
        return [
            thread for thread in threading.enumerate() if thread.name.startswith("NVML") and thread not in self._others
        ]


async def turns() -> None:
    for _ in range(TURNS):
        await anyio.lowlevel.checkpoint()


DEADLINE = 5.0
GPUS = tuple(DeviceID(f"GPU-{i}") for i in range(8))


class Node:
    def __init__(self, root: Path, standin: StandIn) -> None:
        self.root, self.standin, self.clock = root, standin, QuickClock(standin)
        self.driver = NvmlDriver(root, self.clock, DEADLINE)

    async def read(self, *more: str, gpus: Sequence[int] = range(8)) -> Inventory:
        """A reading of the machine as it is from now on."""
        self.standin.play(script(gpus=gpus, more=more))
        return await self.driver.read()
