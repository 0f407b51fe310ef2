"""
A node with four GPUs in slots, over real sockets: the fake kubelet, and an agent that can be started anew. Its slots are
not limited, limited by MPS or by HAMi-core, or become MIG instances.
"""

import subprocess
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any, NamedTuple

import msgspec
from anyio.abc import TaskGroup
from decision_support import pod as pod_of
from instance_support import A100, PlayedGpus
from nvml_support import compiled
from share_support import DEFAULT, GPUS, PLAIN, ShareNode
from slot_support import MIB, asks, in_slots
from slot_support import PLAIN as IN_SLOTS
from unit_support import limited

from topoalign.allocator.containers.containers import Containers
from topoalign.allocator.containers.hami_core.slot_directories import DirectoryCleanup, slots_directory_name
from topoalign.allocator.mig.instance_log import InstanceLog
from topoalign.allocator.mig.instances import Instances, live_of, unknown_of
from topoalign.cli.hook import install_library
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.decisions import Admission
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import GPU, ContainerName, DeviceID, PodName, ResourceName
from topoalign.core.model.requests import Compat, ContainerRequest, PodRequest, Policy
from topoalign.core.model.topology.device_offers import Slots
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.share_amounts import equal_part, held_by_slot, offered_in_slots, sum_amounts
from topoalign.kubelet.grpc.api import v1beta1
from topoalign.plugin_config.configuration import Configuration, Flags, GpuSlots, SharingSection
from topoalign.plugin_config.mps_files import Announcement, Serves

EACH = 16_384
"""MiB of each GPU."""
SLOTS = 8
MACHINE = msgspec.structs.replace(
    PLAIN, gpus=tuple(msgspec.structs.replace(gpu, memory=EACH * MIB) for gpu in PLAIN.gpus)
)
THREADS, MEMORY_LIMIT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
SOURCE = Path(__file__).parents[1] / "allocator" / "hami_core_region.c"
NAME = f"{'f' * 32}.cache"
LIBRARIES = {"v2.9.0": ("-DMINOR=2",), "v2.8.0": ("-DMINOR=1",), "v2.8.1": ("-DMINOR=1", "-DV2_8_1")}
"""Version of HAMi -> what its shared region is compiled with. That of v2.8.0 is the one of v2.4.1 to v2.8.0."""
LIBRARY = b"\x7fELF, as far as a test cares"
INSTANCE_SLOTS = 7


class Ask(NamedTuple):
    """What a container asks for."""

    gpus: int = 1
    memory: int = 0
    """MiB; 0: by percentage."""
    cores: int = 0
    percentage: int = 0

    def request(self, name: str) -> ContainerRequest:
        return asks(self.gpus, self.memory, self.cores, self.percentage, name=name)


class SlotNode(ShareNode):
    """The kubelet of a node whose GPUs are in slots, and the parts of its agent."""

    def __init__(
        self,
        directory: Path,
        policy: Policy = Policy.NONE,
        chance: Random | None = None,
        machine: Topology = MACHINE,
        terms: Slots = IN_SLOTS,
        compat: Compat = "",
    ) -> None:
        """`terms`: on which the GPUs are offered, in `SLOTS` slots each."""
        self.terms = terms
        super().__init__(directory, machine, (GPU,), policy, chance, compat)

    def offered(self, machine: Topology) -> Topology:
        return in_slots(machine, SLOTS, GPUS, self.terms)

    def asking(
        self, name: str, *asked: Ask, init: Sequence[Ask] = (), annotations: Mapping[str, str] = {}
    ) -> PodRequest:
        """A pod with a container for each of these, c0 first."""
        containers = [ask.request(f"c{number}") for number, ask in enumerate((*init, *asked))]
        return pod_of(*containers[len(init) :], init=containers[: len(init)], name=name, annotations=annotations)

    def records(self, name: str, container: str = "c0") -> list[Allocation]:
        """What the record has of a container."""
        owners = [(each, each.owner) for each in self.ledger.state.allocations.values()]
        return [each for each, owner in owners if owner and (owner.pod, owner.container) == (name, container)]

    def held(self, name: str, container: str = "c0") -> dict[DeviceID, Amount]:
        """GPU -> what the record says that a container holds of it."""
        (record,) = self.records(name, container)
        hardware = self.ledger.state.hardware
        return {
            base_of(slot): record.slots.get(slot) or equal_part(hardware, base_of(slot)) for slot in record.device_ids
        }

    def slots_of(self, name: str) -> dict[str, list[DeviceID]]:
        """Container of a running pod -> its slots."""
        found: dict[str, list[DeviceID]] = {}
        for container, _, devices in self.kubelet.running[DEFAULT, PodName(name)].parts():
            found.setdefault(str(container), []).extend(map(DeviceID, devices))
        return found

    def check_amounts(self) -> None:
        """Of no GPU more cores or memory is held than it has, and a GPU with all cores held has one holder."""
        hardware = self.ledger.state.hardware
        for gpu, slots in held_by_slot(hardware, self.ledger.state.allocations.values()).items():
            offered, held = offered_in_slots(hardware)[gpu], sum_amounts(slots.values())
            assert held.cores <= offered.cores, (gpu, slots)
            assert held.memory <= offered.memory, (gpu, slots)
            assert len(slots) == 1 or all(each.cores < offered.cores for each in slots.values()), (gpu, slots)

    async def check(self, names: Collection[str]) -> None:
        """Nobody has another's GPU, no GPU is above what it has, and all who tell of it tell the same."""
        await self.allocations.reconcile()
        self.check_amounts()
        shown: dict[tuple[str, str], set[str]] = {}
        for name in names:
            for container, slots in self.slots_of(name).items():
                gpus = [base_of(slot) for slot in slots]
                assert len({*gpus}) == len(gpus), (name, container, slots)
                answers = [answer for (of, _), answer in self.answers(name).items() if str(of) == container]
                assert [",".join(sorted(gpus))] == [each.envs["NVIDIA_VISIBLE_DEVICES"] for each in answers]
                shown[name, container] = {*slots}
        await self.check_records(names, shown)


class Announced:
    """The root of MPS of a node, with a daemon that is called after this resource, or none."""

    def __init__(self, root: Path, daemon: ResourceName, machine: Topology) -> None:
        self.root, self.daemon = root, daemon
        self.announcement = Announcement(root, daemon)
        self.serves = Serves(devices=frozenset(machine.gpu_by_id), replicas=0)
        (root / daemon).mkdir(parents=True)
        self.containers = Containers(lambda: Configuration(flags=Flags(mps_root=str(root))))

    @property
    def everywhere(self) -> tuple[dict[str, str], list[tuple[str, str]]]:
        """What each answer has: the variable of the pipes, and the mounts."""
        pipe = f"/mps/{self.daemon}/pipe"
        return {PIPES: pipe}, [(pipe, f"{self.root}/{self.daemon}/pipe"), ("/dev/shm", f"{self.root}/shm")]


class LimitedSlotNode(SlotNode):
    """As `SlotNode`, limited by MPS."""

    def __init__(self, directory: Path, *options: Any) -> None:
        super().__init__(directory, *options)
        self.mps = Announced(directory / "mps", GPU, MACHINE)
        self.containers = self.mps.containers

    def offered(self, machine: Topology) -> Topology:
        return limited(super().offered(machine), sharing="mps", limiter=None)

    def limits(self, name: str) -> dict[str, str]:
        (answer,) = self.answers(name).values()
        return own(answer, self.mps)


def own(answer: v1beta1.ContainerAllocateResponse, mps: Announced) -> dict[str, str]:
    """What an answer says to its container alone; the rest is as it has to be."""
    variables, mounts = mps.everywhere
    assert mounts == [(each.container_path, each.host_path) for each in answer.mounts]
    assert variables.items() <= answer.envs.items()
    assert [*answer.envs] == sorted(answer.envs)
    return {name: value for name, value in answer.envs.items() if name not in (PIPES, "NVIDIA_VISIBLE_DEVICES")}


@cache
def built(library: str) -> Path:
    return compiled(SOURCE, Path(mkdtemp(prefix="region-")) / "region", *LIBRARIES[library])


def put_region(
    path: Path, uuids: str, *processes: str, priority: int = 1, last_kernel: int = 0, library: str = "v2.9.0"
) -> Path:
    """
    The file of a container with these GPUs, separated by commas, and these processes, each
    `<status>:<contexts>:<programs>:<buffers>:<all>:<percent>` on its own GPU, as this version of HAMi writes it.
    """
    subprocess.run([built(library), path, uuids, str(priority), str(last_kernel), *processes], check=True)
    return path


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

    def offered(self, machine: Topology) -> Topology:
        return limited(super().offered(machine), limiter="hami-core")

    async def run_pod(self, name: str, *asked: Ask, init: tuple[Ask, ...] = ()) -> None:
        """A pod that a registry has reserved for runs, and is in the record."""
        pod = self.asking(name, *asked, init=init)
        self.reserve(pod)
        assert isinstance(await self.admit_pod(pod), Admission)
        await self.check([str(pod) for _, pod in self.kubelet.running])

    def answer(self, name: str, container: str = "c0") -> v1beta1.ContainerAllocateResponse:
        return self.answers(name)[ContainerName(container), GPU]

    def mounts(self, name: str, container: str = "c0") -> Mapping[str, tuple[Path, bool]]:
        """Path in the container -> on the host, and whether it is read-only."""
        return {
            each.container_path: (Path(each.host_path), each.read_only) for each in self.answer(name, container).mounts
        }

    def cache(self, name: str, container: str = "c0") -> Path:
        return self.mounts(name, container)["/usr/local/vgpu"][0]

    def named(self, name: str, container: str = "c0") -> str:
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


class InstanceNode(SlotNode):
    """As `SlotNode`, whose slots become MIG instances; its discovery sees all of them."""

    def __init__(self, directory: Path, containers: Containers | None = None) -> None:
        self.directory, self.played, self.boot = directory, PlayedGpus(), "b"
        self.played.changed = self.see
        super().__init__(directory, machine=PLAIN)
        self.containers = containers

    def offered(self, machine: Topology) -> Topology:
        gpus = tuple(msgspec.structs.replace(gpu, mig=(), mig_profiles=A100) for gpu in machine.gpus)
        return in_slots(msgspec.structs.replace(machine, gpus=gpus), INSTANCE_SLOTS, scaling=Slots(instances=True))

    async def start_agent(self, tasks: TaskGroup, machine: Topology | None = None) -> None:
        log = InstanceLog(self.directory, self.boot, self.clock.monotonic)
        self.instances = Instances(log, self.played, lambda: self.ledger.move(self.ledger.state))
        await super().start_agent(tasks, machine)

    def see(self) -> None:
        """Discovery tells of the instances that there are."""
        gpus = tuple(msgspec.structs.replace(gpu, mig=self.played.devices(gpu.id)) for gpu in self.machine.gpus)
        known = self.ledger.state.topology
        assert known is not None
        self.machine = msgspec.structs.replace(self.machine, gpus=gpus)
        self.ledger.take_reading(msgspec.structs.replace(known, revision=known.revision + 1, topology=self.machine))

    async def sweep(self) -> None:
        assert self.instances is not None
        await self.instances.destroy_unused(lambda: live_of(self.ledger.state), lambda: unknown_of(self.ledger.state))

    def told(self, name: str) -> set[str]:
        """The values of `NVIDIA_VISIBLE_DEVICES` of the containers of a running pod."""
        return {each.envs["NVIDIA_VISIBLE_DEVICES"] for each in self.answers(name).values()}

    def there(self) -> set[DeviceID]:
        return {uuid for each in self.played.instances.values() for uuid in each.uuids}
