"""
The MIG instances of one container on one card: HAMi can give it several.

They are placed one after another, each as `topology.mig.find_place` has it, so that a later one goes beside those before
it. On an empty A100 of 40 GB two shares of 4000 MiB become instances `1g.5gb` at the slices 6 and 5.

Source: HAMi 4707fb02, dynamic MIG.
"""

from collections.abc import Iterable, Sequence

from topoalign.core.model.topology.mig import MigPlacement, MigProfile, find_place

MIG_MODE = "mig"
"""Mode of a card that is divided into instances."""


def find_instances(
    profiles: Sequence[MigProfile], taken: Iterable[MigPlacement], memories: Iterable[int]
) -> tuple[tuple[MigProfile, MigPlacement], ...] | None:
    """The instances for shares of so many bytes of one card, in their order; None where one of them has no place."""
    beside = list(taken)
    found = []
    for memory in memories:
        instance = find_place(profiles, beside, memory)
        if instance is None:
            return None
        found.append(instance)
        beside.append(instance[1])
    return tuple(found)
