"""
The MIG instances that the GPUs of a simulated node have, whoever made them, and what goes wrong with the driver's calls.

As with NVML, a GPU instance has a compute instance in it, or none where making it was broken off; no two overlap; and id and
uuid follow from the place, so that what is made at a place looks like whatever was there before.

    size    start    id
    8       0        0
    4       4, 0     1, 2
    2       0, 2, 4  3, 4, 5
    1       0 to 6   7 to 13
"""

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import msgspec
from simulation.divisions import ALL_MEMORY, SLICES_OF_MEMORY
from simulation.loop import PROCESS

from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile
from topoalign.core.model.topology.model import Topology

Call = Literal[
    "nvmlDeviceGetGpuInstances",
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlGpuInstanceGetInfo",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
]
CHANGES: tuple[Call, ...] = (
    "nvmlDeviceCreateGpuInstanceWithPlacement",
    "nvmlGpuInstanceCreateComputeInstance",
    "nvmlComputeInstanceDestroy",
    "nvmlGpuInstanceDestroy",
)
"""The calls that change a GPU."""
SEEN_SECONDS = (0.1, 1.0, 1.0, 3.0, 30.0)
"""From a change until discovery reads it: an event of the driver may get lost."""


@dataclass(eq=False)
class Instance:
    """A GPU instance; one that is made again at its place is another one."""

    gpu: DeviceID
    profile: MigProfile
    placement: MigPlacement
    is_ours: bool
    """Whether an agent has made it, and not somebody by hand."""
    has_compute: bool = False
    """Whether there is a compute instance in it, without which nobody can use it."""
    is_mistakable: bool = False
    """Whether it was made by hand where an agent had noted that an instance of ours is, or is to be (docs/sharing.md)."""

    @property
    def id(self) -> int:
        return id_of(self.placement)

    @property
    def uuid(self) -> DeviceID:
        return DeviceID(f"MIG-{self.gpu}-{self.id}")

    def __repr__(self) -> str:
        return f"{self.profile.name} {self.uuid} of {'ours' if self.is_ours else 'somebody'}"


@dataclass
class Driver:
    """Outlives all processes."""

    chance: Random
    see: Callable[[], None]
    """Has discovery read the hardware."""
    later: Callable[[float, Callable[[], None]], None] = lambda seconds, do: None
    """Does something after so many virtual seconds, once the run has begun."""
    instances: list[Instance] = field(default_factory=list)
    failing: float = 0.0
    """How likely a call fails."""
    hangs: Call | None = None
    """The next such call does not answer."""
    kills: tuple[Call, bool] | None = None
    """The agent is killed at the next such call; True: after the driver has done it."""
    watched: set[Instance] = field(default_factory=set)
    """In which a process of a monitor is, so that they cannot be destroyed."""
    destroyed: list[Callable[[Instance], None]] = field(default_factory=list)
    """Told each instance that an agent destroys, just before."""

    def of(self, gpu: DeviceID) -> list[Instance]:
        return [each for each in self.instances if each.gpu == gpu]

    def called(self, uuid: DeviceID) -> Instance | None:
        """The instance with this uuid that can be used now."""
        return next((each for each in self.instances if each.uuid == uuid and each.has_compute), None)

    def add(self, instance: Instance) -> None:
        self.instances.append(instance)
        self.changed()

    def remove(self, instance: Instance) -> None:
        self.instances.remove(instance)
        self.watched.discard(instance)
        self.changed()

    def changed(self) -> None:
        """Discovery reads it some time later."""
        outside(lambda: self.later(self.chance.choice(SEEN_SECONDS), self.see))

    def reboot(self) -> None:
        self.instances.clear()
        self.watched.clear()

    def put_right(self) -> None:
        """The driver is well from now on, and no monitor looks."""
        self.failing, self.hangs, self.kills = 0.0, None, None
        self.watched.clear()

    def shown(self, topology: Topology) -> Topology:
        """The machine with the instances that a reader sees now."""
        gpus = tuple(
            msgspec.structs.replace(gpu, mig=tuple(self._devices(gpu.id)), mig_profiles=PROFILES)
            for gpu in topology.gpus
        )
        return msgspec.structs.replace(topology, gpus=gpus)

    def _devices(self, gpu: DeviceID) -> list[MigDevice]:
        usable = sorted((each for each in self.of(gpu) if each.has_compute), key=lambda each: each.id)
        return [
            MigDevice(
                uuid=each.uuid,
                profile=each.profile.name,
                gpu_instance=each.id,
                compute_instance=0,
                memory=each.profile.memory,
                index=index,
                placement=each.placement,
            )
            for index, each in enumerate(usable)
        ]


def id_of(placement: MigPlacement) -> int:
    """As the driver numbers the instances of one GPU."""
    match placement.size:
        case 1:
            return 7 + placement.start
        case 2:
            return 3 + placement.start // 2
        case 4:
            return 2 - placement.start // 4
        case _:
            return 0


def outside(do: Callable[[], None]) -> None:
    """Does something as nobody's process, which goes on whoever is killed or stopped."""
    context = copy_context()
    context.run(PROCESS.set, None)
    context.run(do)


def profile(name: str, cores: int, size: int, *starts: int) -> MigProfile:
    return MigProfile(
        name=name,
        memory=ALL_MEMORY // SLICES_OF_MEMORY * size,
        slices=int(name[0]),
        cores=cores,
        placements=tuple(MigPlacement(start=start, size=size) for start in starts),
    )


PROFILES = (
    profile("1g.256mb", 12, 1, *range(7)),
    profile("2g.512mb", 25, 2, 0, 2, 4),
    profile("3g.1gb", 40, 4, 0, 4),
    profile("4g.1gb", 50, 4, 0),
    profile("7g.2gb", 100, 8, 0),
)
