"""A naive reference of which GPUs a container gets equal parts of: a look at all sets."""

from collections.abc import Mapping
from itertools import combinations

from seam_reference import naive_rank

from topoalign.core.placement.gpus.seam import Scores


class Reference:
    """The best connected set of GPUs with enough left; of equal sets the one with the least left."""

    def __init__(self, scores: Scores, left: Mapping[int, tuple[int, int]], unused: frozenset[int]) -> None:
        """
        `scores`: of all pairs of GPUs. `left`: GPU in units -> units of computing time and blocks that nobody holds;
        `unused`: those of which nobody holds anything.
        """
        self.scores, self.left, self.unused = scores, left, unused

    def chosen(self, cores: int, blocks: int, cards: int) -> tuple[int, ...] | None:
        """The best set for amounts that divide evenly; None: no set has enough."""
        time, memory = cores // cards, blocks // cards
        enough = [gpu for gpu, (c, m) in sorted(self.left.items()) if c >= max(1, time) and m >= memory]

        def rank(members: tuple[int, ...]) -> tuple[object, ...]:
            least = tuple(sum(self.left[gpu][kind] for gpu in members) for kind in (0, 1))
            sharers = sum(gpu not in self.unused for gpu in members)
            links = naive_rank(self.scores, self.scores, members, self.unused)[:-1]
            return (least, sharers, links, members) if cards == 1 else (links, least, sharers, members)

        return min(combinations(enough, cards), key=rank, default=None)
