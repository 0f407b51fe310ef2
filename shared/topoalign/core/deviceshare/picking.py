"""
Picking devices of a type one by one along an order, with a virtual function of each where wanted.

Koordinator's order for secondary devices (a7a1b76b): devices on the primary ones' PCIe come first, one of each PCIe in
turn, then all others.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import chain, zip_longest

from topoalign.core.deviceshare.annotations import Hint
from topoalign.core.deviceshare.candidates import Candidate, Given, Wanted, fits, free_function


def by_minor(candidates: Iterable[Candidate], preferred: Collection[int] = ()) -> list[Candidate]:
    """Sorts candidates: the preferred minors first, then by rank."""
    return sorted(candidates, key=lambda each: (each.minor not in preferred, *rank(each)))


def by_preferred_pcie(candidates: Iterable[Candidate], preferred: Collection[str]) -> list[Candidate]:
    """Sorts candidates: one of each preferred PCIe in turn, then the others by rank."""
    ranked = sorted(candidates, key=rank)
    near = [each for each in ranked if each.pcie in preferred]
    return [*in_turn(near, lambda each: each.pcie), *(each for each in ranked if each.pcie not in preferred)]


def in_turn(ranked: Sequence[Candidate], group: Callable[[Candidate], Hashable]) -> list[Candidate]:
    """Sorts candidates: the best of each group, by rank, then the second of each, and so on."""
    groups: dict[Hashable, list[Candidate]] = {}
    for each in ranked:
        groups.setdefault(group(each), []).append(each)
    rounds = zip_longest(*groups.values())
    return list(chain.from_iterable(sorted(filter(None, each), key=rank) for each in rounds))


def rank(candidate: Candidate) -> tuple[bool, int, int]:
    """The key that sorts candidates of one type, the best first."""
    return (
        not candidate.device.left,  # one that an init container of the pod left,
        -candidate.score,  # then the best score,
        candidate.minor,  # then the lowest minor, so that no tie is left to chance
    )


def given(candidate: Candidate, wanted: Wanted, hint: Hint, *, compat: bool) -> Given | None:
    """What a pod would get of this device; None if the device does not have enough."""
    if not fits(candidate, wanted.each, compat=compat):
        return None
    if hint.vf_selector is None:
        return Given(device=candidate.device, resources=wanted.each)
    function = free_function(candidate, hint)
    return Given(device=candidate.device, resources=wanted.each, functions=(function,)) if function else None


def pick(order: Iterable[Candidate], wanted: Wanted, most: int, hint: Hint, *, compat: bool) -> list[Given]:
    """Gives of the first devices of an order that have enough, at most `most`."""
    picked: list[Given] = []
    for candidate in order:
        if len(picked) >= most:
            break
        if (found := given(candidate, wanted, hint, compat=compat)) is not None:
            picked.append(found)
    return picked
