"""
Which cards of the tree a container gets: part of one card, one card, or several that are near one another.

- `share` (below 100 cores): the first of all cards, by what they have left, that has enough of both. Best fit on cores;
  the tree has no say.
- `fragment` (100 cores): from the root down, always into the node with the fewest free cards that has enough.
- `link` (more): of the nearest nodes above each card that have enough, the one of the lowest level with the fewest.

Both take the first free cards of the node in NVML's order, however these are connected within it, and look neither at NVLink
nor at memory. Memory is compared in whole blocks of 256 MiB, of cards alone: an inner node counts as having none.

Source: gpu-manager 8cd842ed, algorithm/nvidia, and allocateOne for `evaluate`.
"""

from collections.abc import Iterator

from topoalign.core.sharing.cards import WHOLE_CARD, SharedCard, ShareRequest
from topoalign.core.sharing.gaia import BLOCK
from topoalign.core.sharing.gaia.tree import INTERNAL, GpuTree, Node
from topoalign.core.sharing.refusals import (
    AmountMissing,
    MemoryAboveCard,
    NothingAsked,
    NotWholeCards,
    ShareDoesNotFit,
    ShareFields,
)

Chosen = tuple[SharedCard, ...]
"""The cards in the order in which the container gets them; () if there are not enough."""

FIELDS = ShareFields()


class NoFreeCard(ShareDoesNotFit):
    """Raised when no card, or not enough cards, have what is asked for."""

    code = "NoFreeCard"

    def __init__(self, request: ShareRequest, fields: ShareFields = FIELDS) -> None:
        super().__init__(
            fields.cores,
            f"no card of the node has {request.cores} cores and {request.memory} bytes of memory left"
            if request.cores < WHOLE_CARD
            else f"the node has fewer than {request.cores // WHOLE_CARD} cards of which nobody holds anything",
        )


def evaluate(tree: GpuTree, request: ShareRequest, fields: ShareFields = FIELDS) -> Chosen:
    """
    The cards that a container gets. Above 100, cores count whole cards: 300 are three cards, whatever memory is asked for.

    Raises NothingAsked, NotWholeCards, AmountMissing, MemoryAboveCard and NoFreeCard. Memory is compared with that of the
    first card alone, and only after no card had enough, so on a machine of unequal cards a larger amount may be given.
    """
    cores = request.cores
    memory = request.memory
    if not cores and not memory:
        raise NothingAsked(fields)
    if cores > WHOLE_CARD and cores % WHOLE_CARD:
        raise NotWholeCards(fields, cores)
    if cores >= WHOLE_CARD:
        chosen = (link if cores > WHOLE_CARD else fragment)(tree, cores // WHOLE_CARD)
    elif cores and memory:
        chosen = share(tree, cores, memory)
        if not chosen and tree.cards and memory > tree.cards[0].memory:
            raise MemoryAboveCard(fields, memory, tree.cards[0].memory)
    else:
        raise AmountMissing(*((fields.memory, fields.cores) if cores else (fields.cores, fields.memory)))
    if not chosen:
        raise NoFreeCard(request, fields)
    return chosen


def share(tree: GpuTree, cores: int, memory: int) -> Chosen:
    """The card of which this many cores and bytes are given."""

    def key(card: SharedCard) -> tuple[int, int, int, int]:
        return (
            card.cores_left,  # the one with the fewest cores left,
            card.memory_left // BLOCK,  # then the least memory,
            card.processes,  # then the fewest processes,
            card.minor,
        )

    fitting = [card for card in tree.cards if card.has_left(cores, memory)]
    return (min(fitting, key=key),) if fitting else ()


def fragment(tree: GpuTree, count: int) -> Chosen:
    """So many whole cards, out of the part of the machine that is used most and has enough."""
    node: Node | None = tree.root
    narrowest = tree.root
    while node is not None:
        narrowest = node
        inner = [child for child in node.children if child.children and tree.available(child) >= count]
        node = min(inner, key=lambda child: usage(tree, child), default=None)
    return first(tree, narrowest, count)


def link(tree: GpuTree, count: int) -> Chosen:
    """
    So many whole cards that are near one another.

    Asked for a single card it returns the one with the least memory left, even if that is in use: `evaluate` never asks so.
    """
    nearest = {node for child in tree.root.children for node in nearest_with(tree, child, count)}
    best = min(nearest or {tree.root}, key=lambda node: (node.level, *usage(tree, node)))
    return first(tree, best, count)


def nearest_with(tree: GpuTree, node: Node, count: int, best: Node | None = None) -> Iterator[Node]:
    """For each card below a node the nearest node above it, itself included, with enough free cards."""
    best = node if tree.available(node) >= count else best
    if node.children:
        for child in node.children:
            yield from nearest_with(tree, child, count, best)
    elif best is not None:
        yield best


def usage(tree: GpuTree, node: Node) -> tuple[int, int, int, int]:
    """The key that sorts nodes of one level, the best first."""
    cards = [tree.cards[member] for member in node.members]
    return (
        tree.available(node),  # the fewest free cards,
        cards[0].memory_left // BLOCK if node.level == INTERNAL else 0,  # then the least memory left, of cards,
        sum(card.processes for card in cards),  # then the fewest processes,
        min((card.minor for card in cards), default=0),  # then the lowest minor; the original leaves it to chance
    )


def first(tree: GpuTree, node: Node, count: int) -> Chosen:
    """The first free cards below a node, in NVML's order."""
    leaves = tree.leaves(node)
    return tuple(leaves[:count]) if len(leaves) >= count else ()
