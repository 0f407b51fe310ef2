"""A node whose slots are limited by HAMi-core, and the directories of its containers."""

import shutil
import subprocess
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest
from anyio.abc import TaskGroup
from share_support import DEFAULT, running
from slot_node_support import Ask, SlotNode

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup, slots_directory_name
from topoalign.cli.hook import install_library
from topoalign.core.model.decisions import Admission
from topoalign.core.model.ids import GPU, ContainerName, PodName
from topoalign.core.model.topology.model import Topology
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration, Flags, GpuSlots, SharingSection

SOURCE = Path(__file__).parents[1] / "allocator" / "hami_core_region.c"
NAME = f"{'f' * 32}.cache"
LIBRARIES = {"v2.9.0": ("-DMINOR=2",), "v2.8.0": ("-DMINOR=1",), "v2.8.1": ("-DMINOR=1", "-DV2_8_1")}
"""Version of HAMi -> what its shared region is compiled with. That of v2.8.0 is the one of v2.4.1 to v2.8.0."""


@cache
def built(library: str) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to write a shared region with")
    program = Path(mkdtemp(prefix="region-")) / "region"
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", *LIBRARIES[library], "-o", program, SOURCE], check=True)
    return program


def put_region(
    path: Path, uuids: str, *processes: str, priority: int = 1, last_kernel: int = 0, library: str = "v2.9.0"
) -> Path:
    """
    The file of a container with these GPUs, separated by commas, and these processes, each
    `<status>:<contexts>:<programs>:<buffers>:<all>:<percent>` on its own GPU, as this version of HAMi writes it.
    """
    subprocess.run([built(library), path, uuids, str(priority), str(last_kernel), *processes], check=True)
    return path


LIBRARY = b"\x7fELF, as far as a test cares"


class HamiCoreNode(SlotNode):
    """As `SlotNode`, with the limiter; the library is in place."""

    def __init__(self, directory: Path, *options: Any, **more: Any) -> None:
        super().__init__(directory, *options, **more)
        self.root = directory / "hami"
        install_library(LIBRARY, self.root)
        self.configuration = Configuration(
            flags=Flags(hami_root=str(self.root)), sharing=SharingSection(slots=GpuSlots(), limiter="hami-core")
        )
        self.containers = Containers(lambda: self.configuration)
        self.sweeps = DirectoryCleanup(lambda: self.configuration.flags.hami_root)

    def offered(self, machine: Topology) -> Topology:
        found = super().offered(machine)
        offers = tuple(msgspec.structs.replace(each, limiter="hami-core") for each in found.offered)
        return msgspec.structs.replace(found, offers=offers)

    async def run_pod(self, name: str, *asked: Ask, init: tuple[Ask, ...] = ()) -> None:
        """A pod that a registry has reserved for runs, and is in the record."""
        pod = self.asking(name, *asked, init=init)
        self.reserve_beside(pod)
        assert isinstance(await self.admit_pod(pod), Admission)
        await self.check([str(pod) for _, pod in self.kubelet.running])

    def answer(self, name: str, container: str = "c0") -> v1beta1.ContainerAllocateResponse:
        """What the kubelet was told for a container."""
        return self.kubelet.running[DEFAULT, PodName(name)].responses[ContainerName(container), GPU]

    def mounts(self, name: str, container: str = "c0") -> Mapping[str, tuple[Path, bool]]:
        """Path in the container -> on the host, and whether it is read-only."""
        return {
            each.container_path: (Path(each.host_path), each.read_only) for each in self.answer(name, container).mounts
        }

    def cache(self, name: str, container: str = "c0") -> Path:
        """The container's own directory on the host."""
        return self.mounts(name, container)["/usr/local/vgpu"][0]

    def directories(self) -> set[str]:
        """What is below the root beside the installed files and the locks."""
        return {each.name for each in self.root.iterdir()} - {"libvgpu.so", "ld.so.preload", "vgpulock"}

    def named(self, name: str, container: str = "c0") -> str:
        """What the directory of a container is called."""
        return slots_directory_name(GPU, self.slots_of(name)[container])

    def sweep(self) -> None:
        try:
            self.sweeps.clean_up(self.ledger.state, self.allocations.polled)
        finally:
            self.sweeps.remove_leftovers()

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        """With nothing in memory of what it has swept."""
        self.sweeps = DirectoryCleanup(lambda: self.configuration.flags.hami_root)
        await super().start_agent(tasks, machine)


def hami_core_node() -> AbstractAsyncContextManager[tuple[HamiCoreNode, TaskGroup]]:
    return running(HamiCoreNode)
