"""
Which MIG instance a share becomes: the smallest profile with enough memory that still has a place on the card.

A card is divided into slices. A profile (`3g.20gb`) says which runs of slices an instance of it can occupy; instances
may not overlap. Profiles of one and three compute slices take the highest free start, all others the lowest, so that
both ends fill up and large instances keep their places: on an A100 of 40 GB, 3g, 2g, 1g and 1g start at 4, 0, 3 and
2.

Source: HAMi 4707fb02, dynamic MIG.
"""

from collections.abc import Iterable, Sequence

import msgspec

MIG_MODE = "mig"
"""Mode of a card that is divided into instances."""


class Placement(msgspec.Struct, frozen=True):
    """A run of slices of a card, as in the annotations."""

    start: int
    size: int

    def overlaps(self, other: "Placement") -> bool:
        """Whether both have a slice in common."""
        return self.start < other.start + other.size and other.start < self.start + self.size


class MigProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of instance, as in the register annotation."""

    name: str
    """As NVIDIA names it: `1g.5gb`."""
    memory: int = msgspec.field(default=0, name="memoryMB")
    """MiB."""
    cores: int = msgspec.field(default=0, name="core")
    """Hundredths of the card's multiprocessors, rounded up."""
    slices: int = msgspec.field(default=0, name="sliceCount")
    """Compute slices."""
    placements: tuple[Placement, ...] = ()
    """Where an instance can be, in any order."""


class Instance(msgspec.Struct, frozen=True):
    """An instance that is to be made."""

    profile: MigProfile
    placement: Placement


def find_instance(profiles: Sequence[MigProfile], occupied: Iterable[Placement], memory: int) -> Instance | None:
    """The instance for a share of `memory` MiB beside those that occupy slices; None where there is no place for any."""
    taken = tuple(occupied)
    smallest_first = sorted(
        (profile for profile in profiles if profile.memory >= memory),
        key=lambda profile: (
            profile.memory,  # the least memory,
            profile.slices,  # then the fewest compute slices; equal ones stay in the card's order
        ),
    )
    for profile in smallest_first:
        placement = find_placement(profile, taken)
        if placement is not None:
            return Instance(profile, placement)
    return None


def find_placement(profile: MigProfile, occupied: Iterable[Placement]) -> Placement | None:
    """Where an instance of this profile goes; None where each of its places overlaps one that is occupied."""
    taken = tuple(occupied)
    free = (each for each in profile.placements if not any(each.overlaps(other) for other in taken))
    from_above = profile.name.startswith(("1g.", "3g."))
    return min(free, key=lambda each: -each.start if from_above else each.start, default=None)


def find_instances(
    profiles: Sequence[MigProfile], occupied: Iterable[Placement], memories: Iterable[int]
) -> tuple[Instance, ...] | None:
    """The instances for several shares of one card, one after another; None where one of them has no place."""
    taken, found = list(occupied), []
    for memory in memories:
        instance = find_instance(profiles, taken, memory)
        if instance is None:
            return None
        found.append(instance)
        taken.append(instance.placement)
    return tuple(found)
