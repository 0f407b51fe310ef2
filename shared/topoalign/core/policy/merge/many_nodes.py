"""
Merges hints as the kubelet does on machines with so many NUMA nodes that hints come as rules.

The rule is that of `merge`, and so is its result. A mask is preferred if every rule and list prefers it: a search meets the
needs of all rules at once. If there is none, no hint is merged as preferred, and what the hints can come to is given by
`RuleIntersectionSearch` for the rules and by `combinations` for the lists.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import gcd, inf
from operator import and_
from typing import NamedTuple

from topoalign.core.model.hints import HintRule, ResourceNeed, TopologyHint
from topoalign.core.model.topology.bitmask import Mask, nodes_of, several, union
from topoalign.core.numa_sets.search import HEAVY, Choosing, Hopeless, NumaSearchBudget, mask_meets_needs
from topoalign.core.policy.merge.closest_numa import Distances, choose_narrowest_mask, closest
from topoalign.core.policy.merge.hint_combinations import Offer, combinations, narrowest_width


def merge_many_nodes(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> TopologyHint:
    """The best hint that the offers have in common; the whole machine, not preferred, if none. Raises TooMuchWork."""
    preferred = _preferred_mask(offers, machine, distances, work)
    if preferred is not None:
        return TopologyHint(preferred, True)
    common = _common_mask(offers, machine, distances, work)
    return TopologyHint(machine if common is None else common, False)


def _preferred_mask(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> Mask | None:
    """The best mask that all offers prefer; None if there is none."""
    rules = [offer for offer in offers if isinstance(offer, HintRule)]
    lists = [{hint.affinity for hint in offer if hint.preferred} for offer in offers if not isinstance(offer, HintRule)]
    named = {mask for each in lists for mask in each} | {mask for rule in rules for mask in rule.besides}
    masks = [
        mask & machine
        for mask in named
        if mask is not None
        and mask & machine
        and all(mask in each or None in each for each in lists)
        and all(_prefers(rule, mask) for rule in rules)
    ]
    sizes = {rule.least for rule in rules}
    if rules and len(sizes) == 1 and all(None in each for each in lists):
        size = sizes.pop()
        choosing = Choosing(reduce(and_, (rule.nodes for rule in rules)), [n for r in rules for n in r.needs], work)
        found = closest(choosing.masks, choosing.nodes, size, distances)
        masks += [found] if found else []
    if not rules and all(None in each for each in lists):
        masks.append(machine)
    return choose_narrowest_mask(masks, distances) if masks else None


def _prefers(rule: HintRule, mask: Mask) -> bool:
    family = not mask & ~rule.nodes and mask_meets_needs(rule.needs, mask)
    return mask.bit_count() == rule.least and (mask in rule.besides or family)


def _common_mask(
    offers: Sequence[Offer], machine: Mask, distances: Distances | None, work: NumaSearchBudget
) -> Mask | None:
    """The best AND of one hint of each offer, where none is preferred; None if there is none."""
    greediest = max((narrowest_width(offer, work) for offer in offers), default=0)
    masks = []
    families = []
    for rules, mask in combinations(offers, machine, and_, work):
        members = [offer for i, offer in enumerate(offers) if i in rules and isinstance(offer, HintRule)]
        if members and mask:
            families.append(RuleIntersectionSearch(members, mask, work))
        elif mask:
            masks.append(mask)
    sizes = [mask.bit_count() for mask in masks if mask.bit_count() <= greediest]
    sizes += [size for each in families if (size := each.size_within(greediest)) is not None]
    if sizes:
        size = max(sizes)
    else:
        sizes = [mask.bit_count() for mask in masks]
        sizes += [least for each in families if (least := each.least_size()) is not None]
        size = min(sizes, default=0)
    masks = [mask for mask in masks if mask.bit_count() == size]
    masks += [found for each in families if (found := closest(each.masks, each.nodes, size, distances)) is not None]
    return choose_narrowest_mask(masks, distances) if masks else None


# The masks that result when one hint of each of several rules are ANDed, without listing the hints.
#
# A mask is such an AND if every node that all rules offer and the mask lacks can be left out by one of them at least:
# the nodes to drop are shared out among the rules, and each rule can lose so much as it has more than it needs. If
# nodes can be dropped, fewer of them can; so the masks are closed upwards, and their sizes leave no gap. Sharing out is
# a packing problem: a bound by shares refuses, taking the nodes in turn accepts, and only what lies between is tried
# exactly.


ROUNDING = 1e-9
"""Shares are sums of fractions."""


class Left(NamedTuple):
    """What rules have left while nodes are dropped: per rule its nodes, and per need what it can still lose."""

    kept: tuple[Mask, ...]
    slack: tuple[tuple[int, ...], ...]


class RuleIntersectionSearch:
    """Searches the ANDs of one hint of each rule that lie within some nodes. `besides` are left to the caller."""

    def __init__(self, rules: Sequence[HintRule], within: Mask, work: NumaSearchBudget) -> None:
        def slack_of(need: ResourceNeed, nodes: Mask) -> int:
            # what it can lose of what these nodes have, in whole multiples of what can be lost at all
            amounts = [amount for near, amount in need.supply.items() if near & nodes]
            slack = sum(amounts) - need.amount
            return slack - slack % (gcd(*amounts) or 1)

        self.rules = rules
        self.work = work
        self.common = reduce(and_, (rule.nodes for rule in rules), within)
        self.nodes = nodes_of(self.common)
        self.start = Left(
            tuple(rule.nodes for rule in rules),
            tuple(tuple(slack_of(need, rule.nodes) for need in rule.needs) for rule in rules),
        )
        self.possible = all(slack >= 0 for each in self.start.slack for slack in each)
        self.tangled = tuple(
            union(near for need in rule.needs for near in need.supply if several(near)) for rule in rules
        )
        self.near = {  # for each node, rule and need the supply that is near the node, as (mask, amount)
            node: [
                [[each for each in need.supply.items() if each[0] >> node & 1 and each[1]] for need in rule.needs]
                for rule in rules
            ]
            for node in self.nodes
        }
        self.shares = {node: [self.share_of(node, number) for number in range(len(rules))] for node in self.nodes}
        self.share = {node: min(shares) for node, shares in self.shares.items()}

    def share_of(self, node: int, number: int) -> float:
        """The part of what rule `number` can lose that dropping the node costs at least; 1 is all, inf impossible."""
        parts = []
        for near, slack in zip(self.near[node][number], self.start.slack[number], strict=True):
            alone = sum(amount for mask, amount in near if not several(mask))
            parts.append(alone / slack if 0 < alone <= slack else inf if alone else 0.0)
        return inf if inf in parts else sum(parts) / len(parts)

    def least_size(self) -> int | None:
        """The fewest nodes of such a mask; None: there is no mask. Raises TooMuchWork."""
        sizes = range(1, len(self.nodes) + 1) if self.possible else ()
        return next((size for size in sizes if self._has(size)), None)

    def size_within(self, most: int) -> int | None:
        """The most nodes of such a mask that has no more than `most`; None: there is no mask. Raises TooMuchWork."""
        size = min(most, len(self.nodes))
        return size if self._has(size) else None

    def _has(self, size: int) -> bool:
        drop = len(self.nodes) - size
        return self.possible and size > 0 and drop >= 0 and self._droppable((), self.nodes, drop) is not None

    def masks(self, size: int, hopeless: Hopeless | None = None) -> Iterator[Mask]:
        """Yields the masks of `size` nodes, ascending. Raises TooMuchWork."""
        drop = len(self.nodes) - size
        dropped = self._droppable((), self.nodes, drop) if self.possible and 0 < size <= len(self.nodes) else None
        if dropped is not None:
            yield from self._below(len(self.nodes), (), drop, 0, dropped, hopeless)

    def _below(
        self,
        top: int,
        gone: tuple[int, ...],
        drop: int,
        chosen: Mask,
        example: frozenset[int],
        hopeless: Hopeless | None,
    ) -> Iterator[Mask]:
        """
        Yields the masks that hold the chosen nodes and lack those that are `gone`, with `drop` more to be dropped of
        the lowest `top` nodes; `example` is one set of nodes to drop in all that can be.
        """
        self.work.step(1 if hopeless is None else max(HEAVY, HEAVY * len(self.nodes) ** 2 // 64**2))
        if not top:
            yield chosen
            return
        if hopeless is not None and top > drop and hopeless(chosen, top - drop, top):
            return
        node = self.nodes[top - 1]
        lower = self.nodes[: top - 1]
        if drop:
            without = (*gone, node)
            dropped = example if node in example else self._droppable(without, lower, drop - 1)
            if dropped is not None:
                yield from self._below(top - 1, without, drop - 1, chosen, dropped, hopeless)
        if drop < top:
            dropped = example if node not in example else self._droppable(gone, lower, drop)
            if dropped is not None:
                yield from self._below(top - 1, gone, drop, chosen | 1 << node, dropped, hopeless)

    def _droppable(self, gone: Sequence[int], lower: Sequence[int], more: int) -> frozenset[int] | None:
        """Nodes that can be dropped together: all that are `gone`, and `more` of the lower ones; None if none can."""
        shares = sorted(self.share[node] for node in lower)[:more]
        if len(shares) < more or sum(self.share[node] for node in gone) + sum(shares) > len(self.rules) + ROUNDING:
            return None
        return self._in_turn(gone, lower, more) or self._packed(gone, lower, more)

    def _in_turn(self, gone: Sequence[int], lower: Sequence[int], more: int) -> frozenset[int] | None:
        """Drops the nodes one after the other from the rule that has most left. None: not found this way."""
        self.work.step(len(gone) + len(lower))
        left = self.start
        dropped = set(gone)
        for node in (*sorted(gone, key=lambda each: -self.share[each]), *reversed(lower)):
            if len(dropped) == len(gone) + more and node not in dropped:
                break
            after = self._losses(left, node)
            if after:
                left = after[0]
                dropped.add(node)
            elif node in dropped:
                return None
        return frozenset(dropped) if len(dropped) == len(gone) + more else None

    def _packed(self, gone: Sequence[int], lower: Sequence[int], more: int) -> frozenset[int] | None:
        """Tries every way to drop the nodes, the largest shares first. None: there is none. Raises TooMuchWork."""
        must = sorted(gone, key=lambda node: -self.share[node])
        may = sorted((node for node in lower if self.share[node] < inf), key=lambda node: self.share[node])
        failed: set[tuple[int, int, Left]] = set()

        def place(position: int, more: int, left: Left) -> frozenset[int] | None:
            self.work.step()
            if position >= len(must) and not more:
                return frozenset()
            if position >= len(must) and len(must) + len(may) - position < more:
                return None
            state = (
                position,
                more,
                Left(tuple(k & t for k, t in zip(left.kept, self.tangled, strict=True)), left.slack),
            )
            if state in failed:
                return None
            forced = position < len(must)
            node = must[position] if forced else may[position - len(must)]
            for after in self._losses(left, node):
                rest = place(position + 1, more if forced else more - 1, after)
                if rest is not None:
                    return rest | {node}
            rest = None if forced else place(position + 1, more, left)
            if rest is None:
                failed.add(state)
            return rest

        return place(0, more, self.start)

    def _losses(self, left: Left, node: int) -> list[Left]:
        """
        What is left if one of the rules drops the node, for each that can, the smallest share first.

        A rule that has nothing near the node drops it for good at no cost, so no other is tried; except where something is
        near several nodes: dropping this one costs nothing while another is kept, and something once that is dropped, too.
        """
        after: list[tuple[float, int, Left]] = []
        for number, near in enumerate(self.near[node]):
            kept = left.kept[number]
            slack = left.slack[number]
            costs = [sum(amount for mask, amount in each if mask & kept == 1 << node) for each in near]
            rest = tuple(room - cost for cost, room in zip(costs, slack, strict=True))
            if min(rest, default=0) >= 0:
                one = Left(
                    (*left.kept[:number], kept & ~(1 << node), *left.kept[number + 1 :]),
                    (*left.slack[:number], rest, *left.slack[number + 1 :]),
                )
                if not any(costs) and not self.tangled[number] >> node & 1:
                    return [one]
                after.append((self.shares[node][number], number, one))
        return [each for _, _, each in sorted(after)]
