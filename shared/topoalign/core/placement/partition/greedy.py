"""
Finds a good partition, which may not be the best: sets that grow, and then exchange devices.

Each set grows by the device that adds most, from every start there is, and the best of these is kept; the next one grows out
of the rest. Then devices of different sets change places while that adds to the total.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations

from topoalign.core.placement.gpus.seam import Scores, total_score

MOST_LOOKS = 40_000
"""At pairs that might change places: 20 ms. Sixty-four devices have 2,016, and a dozen rounds bring nearly all there is."""

Sets = list[list[int]]
"""Positions, ascending; sets of full size in the order in which they grew, and what is left over as the last."""


def greedy_split(scores: Scores, required: Sequence[int], size: int) -> tuple[Sequence[int], int]:
    """A good set that holds all required positions, and what the partition of the table is worth that it belongs to."""
    sets = _exchange_devices(scores, _grow_partition(scores, required, size), required)
    holding = [members for members in sets if len(members) == size and {*required} <= {*members}]
    return _best_set(scores, holding), sum(total_score(scores, members) for members in sets)


def _grow_partition(scores: Scores, required: Sequence[int], size: int) -> Sets:
    """Splits all positions into sets that grow one after the other, the first from the required ones."""
    rest = list(range(len(scores)))
    sets: Sets = []
    while len(rest) > size:
        seeds = [list(required)] if required and not sets else [[start] for start in rest]
        best = _best_set(scores, (sorted(_grow_scored_set(scores, rest, seed, size)) for seed in seeds))
        sets.append(best)
        rest = [position for position in rest if position not in best]
    return [*sets, rest] if rest else sets


def _best_set(scores: Scores, sets: Iterable[list[int]]) -> list[int]:
    """The set with the highest score; of equals the one with the lowest indexes."""
    return min(sets, key=lambda members: (-total_score(scores, members), members))


def _grow_scored_set(scores: Scores, among: Sequence[int], seed: Sequence[int], size: int) -> list[int]:
    """Adds to the seed, in this order, what raises the score most, up to `size` devices; of equals the lowest."""
    members = list(seed)
    gain = {other: sum(scores[other][member] for member in members) for other in among if other not in members}
    while len(members) < size:
        added = max(gain, key=gain.__getitem__)
        members.append(added)
        del gain[added]
        row = scores[added]
        for other in gain:
            gain[other] += row[other]
    return members


def _exchange_devices(scores: Scores, sets: Sets, fixed: Collection[int]) -> Sets:
    """
    Exchanges two devices of different sets as long as that adds to the total; the `fixed` ones stay where they are. The
    first set, which grew out of all devices, loses nothing by it.
    """
    home = {device: at for at, members in enumerate(sets) for device in members}
    links = [[sum(row[member] for member in members) for members in sets] for row in scores]
    movable = [device for device in sorted(home) if device not in fixed]
    looks = 0
    improving = True
    while improving and looks < MOST_LOOKS:
        improving = False
        for a, b in combinations(movable, 2):
            looks += 1
            ours = home[a]
            theirs = home[b]
            if ours == theirs:
                continue
            our_gain = links[b][ours] - links[a][ours] - scores[a][b]
            their_gain = links[a][theirs] - links[b][theirs] - scores[a][b]
            first_gain = our_gain if ours == 0 else their_gain if theirs == 0 else 0
            if our_gain + their_gain > 0 and first_gain >= 0:
                improving = True
                home[a] = theirs
                home[b] = ours
                for row, linked in zip(scores, links, strict=True):
                    linked[ours] += row[b] - row[a]
                    linked[theirs] += row[a] - row[b]
    return [[device for device in sorted(home) if home[device] == at] for at in range(len(sets))]
