"""A naive reference of which GPUs a container gets equal parts of: a look at all sets, and at all splits of what is left."""

from collections.abc import Mapping
from itertools import combinations

from partition_reference import splits

from topoalign.core.placement.gpus.scores import Scores, total


class Reference:
    """The rule of docs/sharing.md read one sentence after another."""

    def __init__(self, scores: Scores, left: Mapping[int, tuple[int, int]], unused: frozenset[int]) -> None:
        """
        `scores`: of all pairs of GPUs. `left`: GPU in units -> units of computing time and blocks that nobody holds;
        `unused`: those of which nobody holds anything.
        """
        self.scores, self.left, self.unused = scores, left, unused

    def best(self, size: int) -> int:
        """The score of the best set of the machine."""
        return max(total(self.scores, members) for members in combinations(range(len(self.scores)), size))

    def worth(self, members: tuple[int, ...]) -> float:
        """Its own links, and by half what the unused GPUs can still be split into."""
        rest, found = tuple(sorted(self.unused - {*members})), 0.0
        for size in (2, 4, 8):
            if size <= len(rest):
                most = max(sum(total(self.scores, each) for each in split) for split in splits(rest, size))
                found += most / self.best(size) / 2
        own = total(self.scores, members) / self.best(len(members)) if len(members) > 1 else 0
        return round(own + found, 9)

    def chosen(self, cores: int, blocks: int, cards: int) -> tuple[int, ...] | None:
        """The best set for amounts that divide evenly; None: no set has enough."""
        time, memory = cores // cards, blocks // cards
        enough = [gpu for gpu, (c, m) in sorted(self.left.items()) if c >= max(1, time) and m >= memory]

        def rank(members: tuple[int, ...]) -> tuple[object, ...]:
            least = tuple(sum(self.left[gpu][kind] for gpu in members) for kind in (0, 1))
            sharers = sum(gpu not in self.unused for gpu in members)
            worth = -self.worth(members)
            return (least, sharers, worth, members) if cards == 1 else (worth, least, sharers, members)

        return min(combinations(enough, cards), key=rank, default=None)
