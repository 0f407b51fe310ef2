"""GPUs in MIG mode that a test plays: with instances of others, calls that fail, and processes that end at any step."""

from collections.abc import Callable

from fact_support import mig_device

from topoalign.allocator.mig.instances import GpuInstance, PlaceTaken
from topoalign.core.model.errors import DriverFault
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.mig import MigDevice, MigPlacement, MigProfile

GPU = DeviceID("GPU-0")
GIB = 1 << 30


def place(start: int, size: int) -> MigPlacement:
    return MigPlacement(start=start, size=size)


def profile(name: str, gib: int, slices: int, size: int, *starts: int) -> MigProfile:
    """`slices`: of the 7 of computing time."""
    cores = -(-100 * slices // 7)
    placements = tuple(place(start, size) for start in starts)
    return MigProfile(name=name, memory=gib * GIB, slices=slices, cores=cores, placements=placements)


A100 = (
    profile("1g.5gb", 5, 1, 1, *range(7)),
    profile("2g.10gb", 10, 2, 2, 0, 2, 4),
    profile("3g.20gb", 20, 3, 4, 0, 4),
    profile("4g.20gb", 20, 4, 4, 0),
    profile("7g.40gb", 40, 7, 8, 0),
)

KINDS = {1: 0, 2: 1, 3: 2, 4: 3, 7: 4}
"""Slices -> NVML's number of a profile."""


def profile_lines(gpu: int) -> list[str]:
    """Statements for the stand-in NVML (`nvml_standin.c`): the profiles of the GPU at this index."""
    return [
        f"profile {gpu} id={20 + KINDS[each.slices]} kind={KINDS[each.slices]} name=MIG_{each.name} "
        f"memory={each.memory >> 20} slices={each.slices} sms=14 "
        f"at={','.join(f'{at.start}:{at.size}' for at in each.placements)}"
        for each in A100
    ]


def instance_line(uuid: str) -> str:
    """A statement for it: GPU 0 has an instance in its last slice, of whosever making."""
    return f"mig 0 gi=1 ci=0 uuid={uuid} name=MIG_1g.5gb memory=5120 slices=1 compute=1 place=6:1 profile=20"


class PlayedGpus:
    """Instances that outlive the processes that make them."""

    def __init__(self, *foreign: MigPlacement) -> None:
        self.instances: dict[tuple[DeviceID, int], GpuInstance] = {}
        self.made = 0
        self.uuids_of_places = False
        """Whether an instance has the uuid of a former one at its place, as with the real driver."""
        self.before_step: Callable[[str], None] = lambda step: None
        """Called before each change of the GPU, by the name of the step; may raise DriverFault or Killed."""
        self.changed: Callable[[], None] = lambda: None
        """Called after each change that the driver tells discovery of."""
        for at in foreign:
            self.add(GPU, at, DeviceID(f"MIG-foreign-{at.start}"))
        self.foreign = frozenset(each.uuids for each in self.instances.values())

    def add(self, gpu: DeviceID, at: MigPlacement, *uuids: DeviceID, profile: str = "") -> int:
        """A GPU instance, with the lowest free id: ids are used again. `profile`: empty: the first for this place."""
        kind = profile or next(each.name for each in A100 if at in each.placements)
        number = next(n for n in range(1, 64) if (gpu, n) not in self.instances)
        self.instances[gpu, number] = GpuInstance(number, kind, at, frozenset(uuids))
        return number

    def devices(self, gpu: DeviceID) -> tuple[MigDevice, ...]:
        """The MIG devices of a GPU, as discovery reports them."""
        return tuple(
            mig_device(uuid, each.id, profile=each.profile, memory=1, placement=each.placement)
            for (of, _), each in self.instances.items()
            for uuid in each.uuids
            if of == gpu
        )

    async def there(self, gpu: DeviceID) -> tuple[GpuInstance, ...]:
        self.before_step("there")
        return tuple(each for (of, _), each in self.instances.items() if of == gpu)

    async def make(self, gpu: DeviceID, profile: str, placement: MigPlacement) -> MigDevice:
        self.before_step("gpu instance")
        if any(placement.overlaps(each.placement) for (of, _), each in self.instances.items() if of == gpu):
            raise PlaceTaken(gpu, profile, placement)
        number = self.add(gpu, placement, profile=profile)
        try:
            self.before_step("compute instance")
        except DriverFault:
            del self.instances[gpu, number]
            raise
        self.made += 1
        name = f"{gpu}-{placement.start}-{placement.size}" if self.uuids_of_places else str(self.made)
        uuid = DeviceID(f"MIG-{name}")
        self.instances[gpu, number] = GpuInstance(number, profile, placement, frozenset({uuid}))
        made = next(each for each in self.devices(gpu) if each.gpu_instance == number)
        self.changed()
        self.before_step("made")
        return made

    async def destroy(self, gpu: DeviceID, instance: int) -> None:
        self.before_step("destroy compute instance")
        if (known := self.instances.get((gpu, instance))) is None:
            return
        self.instances[gpu, instance] = known._replace(uuids=frozenset())
        self.before_step("destroy gpu instance")
        del self.instances[gpu, instance]
        self.changed()
        self.before_step("destroyed")
