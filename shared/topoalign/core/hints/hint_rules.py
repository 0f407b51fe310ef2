"""
Converts needs and supply to hints: a list, or a rule if the list would be long.

A provider passes its needs with the current supply of the NUMA nodes (`Supply`), and with the supply of an empty
machine. In mode `kubelet`, a hint is preferred if it has as few nodes as an empty machine would need. In mode `best`, a
hint is preferred if nothing narrower fits now.
"""

from collections.abc import Iterable
from typing import NamedTuple

from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.requests import Mode
from topoalign.core.model.topology.bitmask import EVERYWHERE, Mask, narrowness, several
from topoalign.core.numa_sets.search import Choosing, NumaSearchBudget, mask_meets_needs
from topoalign.core.numa_sets.subsets import fewest_with, hints_of_rule
from topoalign.core.profile import profile_of

MOST_LISTED = 8
"""The most NUMA nodes of a machine for which hints are listed: at most 255 hints. The kubelet has the same default."""


class Supply(NamedTuple):
    """NUMA nodes, and the needs that they must meet."""

    nodes: Mask
    needs: tuple[ResourceNeed, ...]

    def least_size(self) -> int | None:
        """The fewest nodes that meet the needs, at least one. None: all nodes together do not. Raises TooMuchWork."""
        need = self.needs[0]
        if len(self.needs) > 1 or need.amount <= 0 or any(several(near) for near in need.supply):
            return Choosing(self.nodes, self.needs, NumaSearchBudget()).least_size()
        return fewest_with((amount for near, amount in need.supply.items() if near & self.nodes), need.amount)


def hints_from(
    now: Supply, empty: Supply, mode: Mode, machine: int, besides: Iterable[Mask] = ()
) -> tuple[TopologyHint, ...] | HintRule:
    """The subsets that meet the needs `now`, and `besides`. `machine`: number of NUMA nodes. Raises TooMuchWork."""
    others = tuple(sorted(mask for mask in besides if mask & ~now.nodes or not mask_meets_needs(now.needs, mask)))
    if not others and not mask_meets_needs(now.needs, now.nodes):
        return ()
    by_empty_machine = profile_of(mode).prefers_by_empty_machine
    judged = empty.least_size() if by_empty_machine else now.least_size()
    widths = [] if judged is None else [judged]
    least = min(widths + ([] if by_empty_machine else [mask.bit_count() for mask in others]), default=0)
    needs = (
        now.needs
        if any(need.amount > 0 for need in now.needs)
        else (ResourceNeed(1, {now.nodes: 1} if now.nodes else {}),)
    )
    rule = HintRule(nodes=now.nodes, needs=needs, least=least, besides=others)
    return rule if machine > MOST_LISTED else hints_of_rule(rule)


def narrowest_hint(
    hints: tuple[TopologyHint, ...] | HintRule, around: Mask = 0, within: Mask = EVERYWHERE
) -> TopologyHint | None:
    """The best hint that contains `around` and is inside `within`: preferred, then narrowest. Raises TooMuchWork."""
    if isinstance(hints, HintRule):
        choosing = Choosing(hints.nodes & within, hints.needs, NumaSearchBudget(), fixed=around)
        size = None if around & ~(hints.nodes & within) else choosing.least_size()
        masks = [mask for mask in hints.besides if not around & ~mask and not mask & ~within]
        masks += [] if size is None else [next(choosing.masks(size))]
        hints = tuple(TopologyHint(mask, mask.bit_count() == hints.least) for mask in masks)
    fitting = [
        (not hint.preferred, narrowness(mask), hint)
        for hint in hints
        if (mask := hint.affinity) is not None and not around & ~mask and not mask & ~within
    ]
    return min(fitting, key=lambda each: each[:2])[2] if fitting else None
