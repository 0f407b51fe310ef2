"""
Describes how a GPU in MIG mode is partitioned, and finds where more instances fit.

The memory of a GPU is divided into slices, numbered from 0. Instances occupy consecutive slices and do not overlap.
Their profiles list the possible placements. Example: a GPU with eight slices has an instance `1g.10gb` at slice 6.

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
    """Consecutive memory slices of a GPU."""

    start: int
    """The first slice, from 0."""
    size: int
    """Number of slices."""

    def overlaps(self, other: "MigPlacement") -> bool:
        """Whether both have a slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


class MigProfile(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One kind of MIG instance that a GPU can be partitioned into."""

    name: str
    """NVIDIA's name: `1g.10gb`."""
    memory: int
    """Bytes of an instance."""
    slices: int
    """Compute slices of an instance."""
    cores: int
    """Hundredths of the GPU's multiprocessors that an instance has, rounded up."""
    placements: tuple[MigPlacement, ...]
    """The possible placements of an instance on an empty GPU, in the driver's order."""


class MigDevice(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """One MIG instance of a GPU."""

    uuid: DeviceID
    """Its own uuid, `MIG-…`."""
    profile: str
    """NVIDIA's name of its profile: `1g.10gb`."""
    gpu_instance: int
    """NVML's id of its GPU instance."""
    compute_instance: int
    """NVML's id of its compute instance."""
    memory: int
    """Bytes."""
    index: int | None = None
    """Its NVML index on the GPU, the 1 of `0:1`. It can change when another instance is destroyed. None: unknown."""
    placement: MigPlacement | None = None
    """The memory slices of its GPU instance. None: unknown, for example if the driver reports them only to root."""


def occupied_placements(instances: Iterable[MigDevice]) -> frozenset[MigPlacement] | None:
    """The placements of the instances of one GPU. None: at least one is unknown."""
    found = [each.placement for each in instances]
    return None if None in found else frozenset(each for each in found if each is not None)


def free_placements(profile: MigProfile, taken: Collection[MigPlacement]) -> tuple[MigPlacement, ...]:
    """The placements where an instance of this profile can be created if those in `taken` are occupied."""
    return tuple(each for each in profile.placements if not any(map(each.overlaps, taken)))


def find_place(
    profiles: Iterable[MigProfile], taken: Collection[MigPlacement], memory: int
) -> tuple[MigProfile, MigPlacement] | None:
    """The smallest profile with at least `memory` bytes and a free placement (HAMi 4707fb02). None: there is none."""
    enough = [each for each in profiles if each.memory >= memory]
    for profile in sorted(enough, key=lambda each: (each.memory, each.slices)):
        place = free_mig_placement(profile, taken)
        if place is not None:
            return profile, place
    return None


def free_mig_placement(profile: MigProfile, taken: Collection[MigPlacement]) -> MigPlacement | None:
    """
    Finds the placement of a new instance of this profile if `taken` are occupied (HAMi 4707fb02). None: there is none.
    """
    # Profiles of one and three compute slices get the highest free start, all others the lowest. So the GPU is filled
    # from both ends, and the placements of large instances stay free: on an A100 with 40 GB, instances of 3g, 2g, 1g
    # and 1g start at 4, 0, 3 and 2.
    free = free_placements(profile, taken)
    if not free:
        return None
    high = profile.name.startswith(("1g.", "3g."))
    return (max if high else min)(free, key=lambda each: each.start)
