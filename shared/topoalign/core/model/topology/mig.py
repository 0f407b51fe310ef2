"""
Describes how a GPU in MIG mode is partitioned, and finds where further instances fit.

The memory of a GPU is in slices, numbered from 0. An instance occupies a run of them, and no two overlap; its profile gives
where it can begin. Example: a GPU of eight slices with an instance `1g.10gb` at slice 6

    profile    placements (start:size)               still free
    1g.10gb    0:1 1:1 2:1 3:1 4:1 5:1 6:1           0 1 2 3 4 5
    3g.40gb    0:4 4:4                               0
    7g.80gb    0:8                                   none

Source: NVML as in nvidia-ml-py 13.615.71, nvmlGpuInstanceProfileInfo_v2_t and nvmlGpuInstancePlacement_t.
"""

from collections.abc import Collection, Iterable

import msgspec

from topoalign.core.model.ids import DeviceID


class MigPlacement(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A run of memory slices of a GPU."""

    start: int
    """The first of them, from 0."""
    size: int
    """How many they are."""

    def overlaps(self, other: "MigPlacement") -> bool:
        """Whether both have a slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


class MigProfile(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One kind of MIG instance that a GPU can be partitioned into."""

    name: str
    """As NVIDIA names it: `1g.10gb`."""
    memory: int
    """Bytes of an instance."""
    slices: int
    """Compute slices of an instance."""
    cores: int
    """Hundredths of the GPU's multiprocessors that an instance has, rounded up."""
    placements: tuple[MigPlacement, ...]
    """Where an instance can be on an empty GPU, in the driver's order."""


class MigDevice(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One MIG instance of a GPU."""

    uuid: DeviceID
    """Its own uuid, `MIG-…`."""
    profile: str
    """As NVIDIA names it: `1g.10gb`."""
    gpu_instance: int
    """NVML's id of its GPU instance."""
    compute_instance: int
    """NVML's id of its compute instance."""
    memory: int
    """Bytes."""
    index: int | None = None
    """NVML's index of it on its GPU, the 1 of `0:1`; may change when another instance goes. None: not known."""
    placement: MigPlacement | None = None
    """The memory slices of its GPU instance. None: not known, for example where the driver reports them only to root."""


def occupied_placements(instances: Iterable[MigDevice]) -> frozenset[MigPlacement] | None:
    """The runs of slices that instances of one GPU occupy. None: it is not known of all of them."""
    found = [each.placement for each in instances]
    return None if None in found else frozenset(each for each in found if each is not None)


def free_placements(profile: MigProfile, taken: Collection[MigPlacement]) -> tuple[MigPlacement, ...]:
    """Where an instance of this profile can still be created next to those that are `taken`."""
    return tuple(each for each in profile.placements if not any(map(each.overlaps, taken)))


def find_place(
    profiles: Iterable[MigProfile], taken: Collection[MigPlacement], memory: int
) -> tuple[MigProfile, MigPlacement] | None:
    """Finds the smallest profile with so many bytes that has a free place, and the place (HAMi 4707fb02)."""
    enough = [each for each in profiles if each.memory >= memory]
    for profile in sorted(enough, key=lambda each: (each.memory, each.slices)):
        place = free_mig_placement(profile, taken)
        if place is not None:
            return profile, place
    return None


def free_mig_placement(profile: MigProfile, taken: Collection[MigPlacement]) -> MigPlacement | None:
    """Finds the placement of an instance of this profile next to those that are `taken` (HAMi 4707fb02). None: no room."""
    # Profiles of one and three compute slices take the highest free start and all others the lowest, so that both ends fill
    # up and large instances keep their places: on an A100 of 40 GiB 3g, 2g, 1g and 1g start at 4, 0, 3 and 2.
    free = free_placements(profile, taken)
    if not free:
        return None
    high = profile.name.startswith(("1g.", "3g."))
    return (max if high else min)(free, key=lambda each: each.start)
