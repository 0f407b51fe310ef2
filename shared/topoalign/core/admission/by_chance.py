"""
Finds what a kubelet decides where it picks devices at random, by trying its possible picks.

If a container needs fewer devices than the init containers of its pod had, it reuses some of them, and the kubelet picks
these at random (v1.36.3, device manager: the order of a Go map). The NUMA nodes of the others affect the hints of later
containers, so one pick may admit the pod and another refuse it.

Picks that differ in NUMA nodes are tried, the most likely first, up to MOST_RUNS decisions. All devices count as equally
likely. Example: of devices on NUMA nodes 0, 0 and 1, two are picked as 0 and 0 once and as 0 and 1 twice of three times. The
more likely decision is the answer. If it is to be explained, a note has the chance of the other one. Otherwise the search
stops once one decision has more than half of the chance.
"""

from collections.abc import Callable, Collection, Iterator
from heapq import heappop, heappush
from itertools import islice
from math import comb, prod
from typing import NamedTuple

from topoalign.core.model.decisions import Admission, Decision, Refusal, with_notes
from topoalign.core.model.errors import clean
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.device_sets import DeviceSet, OfferedDevices

MOST_RUNS = 64
"""Decisions about one pod: one takes 1 ms on two NUMA nodes and 7 ms on eight."""
MOST_PICKS = 256
"""Different picks of one container. If there are more, only that of the lowest devices is tried."""
CERTAIN = 0.999
"""If the tried picks have this chance together, no others are tried."""
ROUNDING = 1e-9
"""Sums of chances that differ by less are equal."""


class Pick(NamedTuple):
    """Devices that a container may take over, and how likely it takes devices on these NUMA nodes."""

    chance: float
    devices: frozenset[DeviceID]


Run = tuple[Decision, list[list[Pick]]]
"""A decision, and for each random pick on its way the possible picks; it took those that it was given, then the first."""


def picks_of(devices: OfferedDevices, reusable: Collection[DeviceID], amount: int) -> list[Pick]:
    """The picks of so many reusable devices that differ in NUMA nodes: the lowest devices, then by chance."""
    left = devices.some(reusable)
    groups = [group for each in devices.by_nodes.values() if (group := left & each)]
    lowest = left.first(amount)
    first = tuple(len(lowest & group) for group in groups)
    counts = [each for each in islice(_counts(groups, amount), MOST_PICKS + 1) if each != first]
    if len(counts) >= MOST_PICKS:
        return [Pick(1.0, frozenset(lowest))]
    picks = [_pick(groups, each, len(left), amount) for each in counts]
    return [_pick(groups, first, len(left), amount), *sorted(picks, key=lambda pick: -pick.chance)]


def _counts(groups: list[DeviceSet], amount: int) -> Iterator[tuple[int, ...]]:
    """How many may be of each group: all tuples with this sum."""
    if not groups:
        if not amount:
            yield ()
        return
    rest = sum(map(len, groups[1:]))
    for count in range(max(0, amount - rest), min(amount, len(groups[0])) + 1):
        for others in _counts(groups[1:], amount - count):
            yield (count, *others)


def _pick(groups: list[DeviceSet], counts: tuple[int, ...], left: int, amount: int) -> Pick:
    ways = prod(comb(len(group), count) for group, count in zip(groups, counts, strict=True))
    chosen = (group.first(count) for group, count in zip(groups, counts, strict=True))
    return Pick(ways / comb(left, amount), frozenset().union(*chosen))


def decide_most_likely(run: Callable[[tuple[int, ...]], Run], *, explain: bool) -> Decision:
    """The more likely decision. `run` decides with these picks, by their places; `explain`: with a note on the other."""
    found: dict[bool, Decision] = {}
    chances = {True: 0.0, False: 0.0}
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    for _ in range(MOST_RUNS):
        _, taken = heappop(waiting)
        decision, possible = run(taken)
        chance = prod(picks[place].chance for picks, place in zip(possible, taken, strict=False))
        for depth in range(len(taken), len(possible)):
            for place, pick in enumerate(possible[depth][1:], 1):
                heappush(waiting, (-chance * pick.chance, (*taken, *[0] * (depth - len(taken)), place)))
            chance *= possible[depth][0].chance
        admitted = isinstance(decision, Admission)
        found.setdefault(admitted, decision)
        chances[admitted] += chance
        if not waiting or sum(chances.values()) >= CERTAIN or (not explain and max(chances.values()) > 0.5 + ROUNDING):
            break
    answer = chances[True] + ROUNDING >= chances[False]
    other = found.get(not answer)
    if other is None or not explain:
        return found[answer]
    percent = max(1, round(100 * chances[not answer] / sum(chances.values())))
    return with_notes(found[answer], [_other_decision(other, percent, all_tried=not waiting)])


def _other_decision(other: Decision, percent: int, *, all_tried: bool) -> str:
    """The note on the less likely decision."""
    share = f"about {percent} % of the {'picks' if all_tried else f'{MOST_RUNS} most likely picks'}"
    if isinstance(other, Refusal):
        where = f" at container {clean(other.container)}" if other.container is not None else ""
        return f"with {share} the kubelet refuses the pod{where}: {other.code}, {other.finding}"
    return f"with {share} the kubelet admits the pod"
