"""
Which cards a container gets of those that are shared: topoalign's own decision.

The rule, among the cards that have enough (`fitting`):

- **A share of one card**: the card that has the least left: fewest cores, then least memory, then fewest processes. Of equal
  ones, mostly cards that nobody uses, the one that comes first by policy `topology`: it cuts the fewest links to other
  unused cards. So a share goes beside other shares, and if it has to open a card, this is the odd one and not one of a pair.
- **A share of several cards**: the set that comes first by policy `topology`, where links count as cut only between cards
  that nobody uses. Of equal sets the one that has the least left.
- **topology-aware**: a share of one card, too, goes by policy `topology` first, and then where the least is left. Several
  are chosen as they are without it.
- **Whole cards**: policy `topology` among the unused ones.
- **binpack, spread**: shares go to the cards that are fullest, or emptiest, with the share on them: the sum of slots, cores
  and memory as parts of what there is, each weighted. Of equally full ones those that come first by policy `topology`.

The lowest index comes last, so that no tie is left to chance. Memory left is compared in blocks of 256 MiB, since cards of
one model differ by a few pages. Up to 126 sets (nine cards have no more) are all compared; beyond that, the sets that
policy `topology` compares, the same among cards in use, and the first in order.
"""

from collections.abc import Sequence

from topoalign.core.demand.card_rules import ANY_CARD, CardOrder, CardRules, Weights
from topoalign.core.placement.gpus.set_scorer import SetScorer
from topoalign.core.placement.gpus.topology import SetOrder, by_topology, candidates
from topoalign.core.sharing.cards import WHOLE_CARD, SharedCard, ShareRequest
from topoalign.core.sharing.fitting import cards_asked, fitting
from topoalign.core.sharing.refusals import ShareFields, ShareSplit

MEMORY_BLOCK = 256 * 1024 * 1024
"""Bytes below which cards have equal memory left."""

Members = tuple[int, ...]
"""Cards by their positions, ascending."""
Key = tuple[float, ...]

FIELDS = ShareFields()


def choose(
    cards: Sequence[SharedCard],
    request: ShareRequest,
    scorer: SetScorer,
    rules: CardRules = ANY_CARD,
    fields: ShareFields = FIELDS,
) -> tuple[SharedCard, ...]:
    """
    The cards that a container gets, in the order of `cards`. `scorer`: of the same cards, by their positions there.

    Raises InvalidField for a request that cannot be meant, and ShareDoesNotFit where the cards do not have it.
    """
    size = cards_asked(request, fields)
    enough = fitting(cards, request, size, rules, fields)
    choice = Choice(cards, enough, request, scorer, rules)
    sets = (choice.best(group, size) for group in groups(cards, enough, size, rules, fields))
    return tuple(cards[at] for at in min(sets, key=choice.rank))


def groups(
    cards: Sequence[SharedCard], enough: list[int], size: int, rules: CardRules, fields: ShareFields
) -> list[list[int]]:
    """
    The cards among which a set has to be, the whole of it in one group: those of one NUMA node, or all.

    A card of an unknown NUMA node is in no group. Raises ShareSplit where no group has enough cards.
    """
    if not rules.numa_bind or size == 1:
        return [enough]
    by_node: dict[int, list[int]] = {}
    for at in enough:
        node = cards[at].numa_node
        if node is not None:
            by_node.setdefault(node, []).append(at)
    large = [group for group in by_node.values() if len(group) >= size]
    if not large:
        raise ShareSplit(
            fields.cards, f"{size} of one NUMA node are asked for, and no node has as many with enough left"
        )
    return large


class Choice:
    """What sets of cards are compared by."""

    def __init__(
        self, cards: Sequence[SharedCard], enough: list[int], asked: ShareRequest, scorer: SetScorer, rules: CardRules
    ) -> None:
        self.scorer, self.whole = scorer, asked.cores >= WHOLE_CARD
        self.unused = frozenset(
            at for at, card in enumerate(cards) if card.unused and card.healthy and card.device not in rules.cordoned
        )
        """Cards that others can still take whole."""
        self.order = SetOrder(scorer, self.unused)
        by = CardOrder.BEST_FIT if self.whole else rules.order
        self.keys = {at: key(cards[at], asked, by, rules.weights) for at in enough}
        self.by_links = self.whole or by is CardOrder.TOPOLOGY_AWARE or (asked.cards > 1 and by is CardOrder.BEST_FIT)
        """Whether links come first, before what the cards have left."""

    def best(self, group: list[int], size: int) -> Members:
        """The best set of a group of cards that have enough."""
        if self.whole:
            return by_topology(self.scorer, group, (), size, self.unused)
        return min(self.sets(group, size), key=self.rank)

    def sets(self, group: list[int], size: int) -> set[Members]:
        """The sets to compare: of the cards that come first, and where links decide also of all, and of those in use."""
        last = sorted(self.keys[at] for at in group)[size - 1]
        first = [at for at in group if self.keys[at] < last]
        sets = {*candidates(self.order, [at for at in group if self.keys[at] <= last], first, size)}
        if self.by_links:
            used = [at for at in group if at not in self.unused]
            sets.update(candidates(self.order, group, (), size))
            sets.update(candidates(self.order, used, (), size) if len(used) >= size else ())
        return sets

    def rank(self, members: Members) -> tuple[Key, tuple[object, ...], Key, Members]:
        """The key that sorts sets of the same size, the best first."""
        sums = tuple(round(sum(column), 9) for column in zip(*(self.keys[at] for at in members), strict=True))
        return (
            () if self.by_links else sums,  # the card with the least left, or the fullest or emptiest cards,
            self.order.rank(members)[:-1],  # then links, as policy `topology` compares them,
            () if self.whole else sums,  # then, where links came first, the least left,
            members,
        )


def key(card: SharedCard, asked: ShareRequest, order: CardOrder, weights: Weights) -> Key:
    """The key that sorts cards, the best first, without regard to links."""
    if order in (CardOrder.BEST_FIT, CardOrder.TOPOLOGY_AWARE):
        return (
            card.cores_left,  # the one with the fewest cores left,
            card.memory_left // MEMORY_BLOCK,  # then the least memory,
            card.processes,  # then the fewest processes
        )
    full = fullness(card, asked, weights)
    return (-full if order is CardOrder.BINPACK else full,)


def fullness(card: SharedCard, asked: ShareRequest, weights: Weights) -> float:
    """
    How full a card would be with the share on it: the weighted sum of its parts that are held, rounded to 9 digits.

    With equal weights a card without slots that has 30 of 100 cores and 2 of 8 GiB held is at 0.3 + 0.25; 20 cores and 1 GiB
    more make it 0.875.
    """
    parts = (
        (weights.slot, card.slots_held + 1, card.slots),
        (weights.core, card.cores_held + asked.cores, card.cores),
        (weights.memory, card.memory_held + max(asked.memory, card.memory * asked.percentage // 100), card.memory),
    )
    return round(sum(weight * held / offered for weight, held, offered in parts if offered), 9)
