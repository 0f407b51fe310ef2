"""simple: the GPUs that must be in the set, then the lowest indexes. Knows nothing of links."""

from collections.abc import Collection, Sequence

from topoalign.core.placement.gpus.scores import Scores


def simple(scores: Scores, available: Sequence[int], required: Collection[int], size: int) -> tuple[int, ...]:
    """Chooses `size` of the available positions, ascending: all required ones, then the lowest."""
    others = sorted({*available}.difference(required))
    return tuple(sorted([*required, *others[: size - len(required)]]))
