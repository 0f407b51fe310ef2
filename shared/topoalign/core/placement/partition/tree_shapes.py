"""
Describes what is left of a tree of devices, without what does not matter for the search.

A form is a number. Two parts of the tree have the same form if they look alike: as many devices, in equal blocks with equal
scores. So a machine of 72 equal devices has 72 forms and not 2^72 sets. A form is empty, a device, a device that the next
set must hold, or a block of smaller forms in which every pair from two different ones has the same score.

The score of a set within a block is the score of that pair for every pair of the set, and what the smaller forms add to it
for the pairs that lie within one of them. So what is taken from one child is worth the same whatever is taken from others,
and children with the same form can be handled together.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from math import comb
from typing import NamedTuple

from topoalign.core.placement.partition.search_budget import PartitionSearchBudget

EMPTY, DEVICE, NEEDED = range(3)


class ChildShare(NamedTuple):
    """What a set takes from some children with one form."""

    taken: int
    """Devices."""
    rests: tuple[int, ...]
    """The forms that are left of the children that are touched."""
    extra: int
    """What it is worth beyond the block's score for each of its pairs."""


class Forms:
    """All forms that occur in one search, by number, and what sets can take from them."""

    def __init__(self, size: int, work: PartitionSearchBudget | None = None) -> None:
        self.size = size
        """The most devices in a set."""
        self.work = work or PartitionSearchBudget(sys.maxsize)
        self.numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self.values = [0, 0, 0]
        """The score of a pair from two different children."""
        self.children: list[tuple[int, ...]] = [(), (), ()]
        self.sizes = [0, 1, 1]
        self.needed = [0, 0, 1]
        """How many of its devices the next set must hold."""
        self.scores = [0, 0, 0]
        """Of all devices together."""
        self._shares: dict[tuple[int, int, int, int], list[ChildShare]] = {}
        self._best: dict[int, list[int]] = {}
        self._extras: dict[tuple[int, int, int], list[int]] = {}
        self._marked = {DEVICE: NEEDED}

    def block(self, value: int, parts: Iterable[int]) -> int:
        """The number of the form made of these parts; a single part is itself the form."""
        children = tuple(sorted(part for part in parts if part != EMPTY))
        if len(children) < 2:
            return children[0] if children else EMPTY
        number = self.numbers.get((value, children))
        if number is None:
            self.work.step(4)
            number = self.numbers[value, children] = len(self.values)
            size = sum(self.sizes[child] for child in children)
            inner = sum(self.scores[child] - value * comb(self.sizes[child], 2) for child in children)
            self.values.append(value)
            self.children.append(children)
            self.sizes.append(size)
            self.needed.append(sum(self.needed[child] for child in children))
            self.scores.append(inner + value * comb(size, 2))
        return number

    def groups(self, form: int) -> list[tuple[int, int]]:
        """The forms of the children, with the number of children that have each; the most devices first."""
        groups = Counter(self.children[form]).items()
        return sorted(groups, key=lambda group: (self.sizes[group[0]] * group[1], group), reverse=True)

    def marked(self, form: int) -> int:
        """The form with one device of its smallest child, and so on down, marked as one that the next set must hold."""
        if form not in self._marked:
            smallest = min(self.children[form], key=lambda child: (self.sizes[child], child))
            others = list(self.children[form])
            others.remove(smallest)
            self._marked[form] = self.block(self.values[form], [*others, self.marked(smallest)])
        return self._marked[form]

    def takes(self, form: int, count: int, least: int = 0) -> dict[int, int]:
        """
        Form that can be left when a set of `count` devices is taken -> the best score of such a set.

        What is taken holds all devices that the set must hold. Sets that score less than `least` may be missing.
        """
        if not self.needed[form] <= count <= self.sizes[form]:
            return {}
        if count == self.sizes[form]:
            return {EMPTY: self.scores[form]}
        if count == 0:
            return {form: 0}
        best: dict[int, int] = {}
        for rests, score in self.ways(form, count, least).items():
            rest = self.block(self.values[form], rests)
            best[rest] = max(best.get(rest, 0), score)
        return best

    def ways(self, form: int, count: int, least: int = 0) -> dict[tuple[int, ...], int]:
        """What is left of each child, in the order of `groups` -> the best score of such a set: `takes` in detail."""
        value = self.values[form]
        groups = self.groups(form)
        everywhere = value * comb(count, 2)
        later = [[0]]
        for child, number in reversed(groups[1:]):
            later.append(self.joined(later[-1], self.extras(child, number, value)))
        ways: dict[tuple[int, tuple[int, ...]], int] = {(0, ()): 0}
        for child, number in groups:
            to_come = later.pop()
            enough = [least - everywhere - extra for extra in to_come]
            shares = self.shares(child, number, count, value)
            grown: dict[tuple[int, tuple[int, ...]], int] = {}
            for (taken, rests), had in ways.items():
                self.work.step(1 + len(shares) // 8)
                for share in shares:
                    total = taken + share.taken
                    extra = had + share.extra
                    if 0 <= count - total < len(enough) and extra >= enough[count - total]:
                        key = total, (*rests, *share.rests, *(child,) * (number - len(share.rests)))
                        if grown.get(key, -1) < extra:
                            grown[key] = extra
            self.work.step(2 * len(grown))
            ways = grown
        return {rests: extra + everywhere for (_, rests), extra in ways.items()}

    def shares(self, child: int, number: int, most: int, value: int) -> list[ChildShare]:
        """What can be taken from `number` children with this form, `most` devices in all, in a block of this value."""
        key = child, min(number, most), most, value
        if key not in self._shares:
            options = [
                ChildShare(count, (rest,), score - value * comb(count, 2))
                for count in range(1, min(most, self.sizes[child]) + 1)
                for rest, score in self.takes(child, count).items()
            ]
            self._shares[key] = [
                share
                for share in self.combined(ChildShare(0, (), 0), options, number, most)
                if len(share.rests) == number or not self.needed[child]
            ]
        return self._shares[key]

    def combined(self, share: ChildShare, options: list[ChildShare], number: int, most: int) -> Iterator[ChildShare]:
        """Yields the share, and with it all repeatable choices of the options: `number` and `most` devices in all."""
        self.work.step(2)
        yield share
        if len(share.rests) < number:
            for at, option in enumerate(options):
                if share.taken + option.taken <= most:
                    more = ChildShare(
                        share.taken + option.taken, share.rests + option.rests, share.extra + option.extra
                    )
                    yield from self.combined(more, options[at:], number, most)

    def best(self, form: int) -> list[int]:
        """The best score of a set of 0, 1, … `size` devices (or all of the form's), whatever is marked."""
        if form not in self._best:
            value = self.values[form]
            extras = [0] if self.children[form] else [0] * (self.sizes[form] + 1)
            for child, number in self.groups(form):
                extras = self.joined(extras, self.extras(child, number, value))
            self._best[form] = [extra + value * comb(count, 2) for count, extra in enumerate(extras)]
        return self._best[form]

    def extras(self, child: int, number: int, value: int) -> list[int]:
        """The best scores of sets of `number` equal children, beyond the score of their block for each pair."""
        key = child, number, value
        if key not in self._extras:
            one = [score - value * comb(count, 2) for count, score in enumerate(self.best(child))]
            several = self.extras(child, number - 1, value) if number > 1 else [0]
            self._extras[key] = self.joined(several, one)
        return self._extras[key]

    def joined(self, some: list[int], more: list[int]) -> list[int]:
        """The best sum of both lists for each number of devices up to `size`."""
        few, many = sorted((some, more), key=len)
        self.work.step(1 + len(few) * len(many) // 8)
        best = [-1] * min(len(some) + len(more) - 1, self.size + 1)
        for count, extra in enumerate(few[: len(best)]):
            best[count : count + len(many)] = map(max, best[count:], map(extra.__add__, many))
        return best
