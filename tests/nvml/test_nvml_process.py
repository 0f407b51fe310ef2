"""Whole processes whose dynamic loader finds the stand-in, as it finds NVIDIA's library on a node."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from nvml_support import host_tree, script, switch_links

from topoalign.core.ports import Inventory

READ = """
import sys
from pathlib import Path
import anyio, msgspec
from topoalign.core.model.errors import DriverFault
from topoalign.discovery.drivers.nvml.driver import NvmlDriver
from topoalign.runtime.clock import SystemClock

class Nobody:
    def receive(self, event): ...
    def deaf(self, reason, gpus=frozenset()): ...

async def main():
    driver = NvmlDriver(Path(sys.argv[1]), SystemClock(), float(sys.argv[2]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(driver.watch, Nobody())
        try:
            print(msgspec.json.encode(await driver.read()).decode())
        except DriverFault as fault:
            print(fault.finding)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()

anyio.run(main)
"""


def read(library: Path, tmp_path: Path, played: str, deadline: float = 30.0) -> str:
    """What one reading in a process of its own gives."""
    (tmp_path / "script").write_text(played)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "NVML_STANDIN": str(tmp_path / "script")}
    arguments = [sys.executable, "-c", READ, str(host_tree(tmp_path / "host")), str(deadline)]
    return subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True, timeout=50).stdout


def test_pynvml_loads_the_library_by_its_name(nvml_library: Path, tmp_path: Path) -> None:
    inventory = msgspec.json.decode(read(nvml_library, tmp_path, script(more=switch_links(8, 18))), type=Inventory)

    assert [18] * 8 == [gpu.switch_links for gpu in inventory.topology.gpus]


def test_a_process_ends_although_a_wait_for_events_never_does(nvml_library: Path, tmp_path: Path) -> None:
    found = read(nvml_library, tmp_path, script(more=["hang nvmlEventSetWait_v2"]))

    assert 8 == len(msgspec.json.decode(found, type=Inventory).topology.gpus)


def test_a_process_ends_although_a_call_of_its_driver_never_does(nvml_library: Path, tmp_path: Path) -> None:
    found = read(nvml_library, tmp_path, script(more=["hang nvmlDeviceGetName"]), deadline=1.0)

    assert "NVML has not answered nvmlDeviceGetName within 1 s\n" == found
