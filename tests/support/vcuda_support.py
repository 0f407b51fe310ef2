"""A node whose units are limited by vcuda: processes and control groups as files, and a client of another make."""

import struct
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
import msgspec
from anyio.abc import TaskGroup
from process_support import mounts, put_namespace, put_process
from share_support import DEFAULT, SMALL, ShareNode
from unit_support import limited

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.vcuda.limiter import VcudaLimiter
from topoalign.core.model.ids import PodName, ResourceName
from topoalign.core.model.topology.model import Topology
from topoalign.plugin_config.configuration import Configuration, Flags, SharingSection, Units
from topoalign.testing.manual_clock import all_tasks_blocked

METHOD = "/vcuda.VCUDAService/RegisterVDevice"
PARTS = {
    ("v2", "cgroupfs"): ("0::/kubepods/burstable/pod{uid}/{id}", ""),
    ("v2", "systemd"): (
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice/cri-containerd-{id}.scope",
        "",
    ),
    ("v1", "cgroupfs"): (
        "5:memory:/kubepods/besteffort/pod{uid}/{id}\n3:cpu,cpuacct:/kubepods/besteffort/pod{uid}/{id}",
        "memory",
    ),
    ("v1", "systemd"): (
        "7:memory:/kubepods.slice/kubepods-pod{slice}.slice/crio-{id}.scope\n0::/system.slice/crio.service",
        "memory",
    ),
}
"""Version and driver -> what /proc/<pid>/cgroup says, and the hierarchy in which the container's group is looked for."""


TWO = msgspec.structs.replace(SMALL, gpus=SMALL.gpus[:2])
"""A machine of two GPUs: the kubelet's lists are short."""


class Host:
    """The files of a node in which the agent finds processes: as /proc and /sys/fs/cgroup."""

    def __init__(self, root: Path, version: str = "v2", driver: str = "systemd") -> None:
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.text, self.hierarchy = PARTS[version, driver]
        put_namespace(self.proc)
        (self.cgroups / self.hierarchy).mkdir(parents=True)
        (self.cgroups / self.hierarchy / "cgroup.procs").write_text("1\n")

    def run(self, pid: int, uid: str, container: str, container_id: str, *others: int) -> Path:
        """A process of a container, beside others; returns the directory of the container's group."""
        text = self.text.format(uid=uid, slice=uid.replace("-", "_"), id=container_id)
        put_process(self.proc, pid, cgroup=f"{text}\n", mountinfo=mounts(uid, container))
        path = text.splitlines()[0].split(":", 2)[2].lstrip("/")
        group = self.cgroups / self.hierarchy / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.procs").write_text("".join(f"{each}\n" for each in (pid, *others)))
        return group


class VcudaNode(ShareNode):
    """As `ShareNode`, with the limiter."""

    def __init__(self, directory: Path, chance: Random | None = None) -> None:
        super().__init__(directory, TWO, chance=chance)
        self.host, self.root = Host(directory / "host"), directory / "vcuda"
        self.machine = with_addresses(limited(self.machine, limiter="vcuda"))
        self.configuration = Configuration(
            flags=Flags(vcuda_root=str(self.root)), sharing=SharingSection(units=Units(), limiter="vcuda")
        )
        self.containers = Containers(lambda: self.configuration, proc=self.host.proc, cgroups=self.host.cgroups)
        self.new_limiter()

    @property
    def limiter(self) -> VcudaLimiter:
        assert self.limited_by is not None
        return self.limited_by

    def new_limiter(self) -> None:
        """As of an agent that has just started."""
        self.limited_by = VcudaLimiter(
            lambda: self.configuration.flags.vcuda_root,
            lambda: self.ledger.state.hardware,
            self.host.proc,
            self.host.cgroups,
        )

    async def start(self, name: str) -> None:
        """The kubelet starts the containers of a pod."""
        await self.kubelet.start_containers(DEFAULT, PodName(name))

    def mounts(self, name: str) -> dict[tuple[str, ResourceName], Path]:
        """Container and resource -> what is mounted at /etc/vcuda, by that answer."""
        return {
            (str(container), resource): Path(mount.host_path)
            for (container, resource), answer in self.answers(name).items()
            for mount in answer.mounts
            if mount.container_path == "/etc/vcuda"
        }

    def directories(self) -> set[str]:
        return {each.name for each in self.root.iterdir()}

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        await self.end_agent()
        self.new_limiter()
        await super().start_agent(tasks, machine)
        await self.listed()

    async def end_agent(self) -> None:
        """Its sockets go with it."""
        self._agent.cancel()
        await all_tasks_blocked()

    async def sweep(self) -> None:
        await self.limiter.clean_up(self.ledger.state, self.allocations.polled)


def with_addresses(machine: Topology) -> Topology:
    gpus = tuple(msgspec.structs.replace(each, pci=f"0000:{each.index:02x}:0a.0") for each in machine.gpus)
    return msgspec.structs.replace(machine, gpus=gpus)


def request(*fields: str) -> bytes:
    """A VDeviceRequest as Google's encoding has it: strings from field 1 on."""
    return b"".join(
        bytes((number << 3 | 2, len(text))) + text.encode() for number, text in enumerate(fields, 1) if text
    )


async def register(directory: Path, *fields: str) -> str:
    """RegisterVDevice by grpcio; returns the code, and what it says of a refusal."""
    async with grpc.aio.insecure_channel(f"unix://{directory / 'vcuda.sock'}") as channel:
        return await registered(channel, *fields)


async def registered(channel: Any, *fields: str) -> str:
    unary = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    try:
        assert b"" == await unary(request(*fields), timeout=10)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


class Read(NamedTuple):
    """Fields of a vcuda.config, by their offsets."""

    pod_uid: str
    container: str
    bus_id: str
    memory: int
    utilization: int
    hard_limit: int
    enable: int


def read_config(file: Path) -> Read:
    content = file.read_bytes()
    assert 8240 == len(content)

    def text(at: int) -> str:
        return content[at : content.index(b"\0", at)].decode()

    memory, utilization, hard, enable = (
        struct.unpack_from(form, content, at)[0]
        for form, at in (("=Q", 8208), ("=i", 8216), ("=i", 8220), ("=i", 8232))
    )
    return Read(text(0), text(4096), text(8192), memory, utilization, hard, enable)
