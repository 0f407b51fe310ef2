"""
Which cards have enough for a container, each for itself, or why there are too few.

The rule, in this order:

- What is asked for can be meant: cores below 100, or a multiple of 100; with cores of a share goes memory; memory alone is a
  share, too. Whole cards are told by `cores` (300) or by `cards` (100 of each of 3).
- A card may be chosen if it is healthy, not cordoned, and in the lists of models, modes and uuids.
- A whole card is one of which nobody holds anything, and its memory is at least what is asked for.
- Of a card in use the cores, the memory and, if it is offered in slots, a slot have to be left. Memory alone needs a core
  that nobody holds: nothing limits the computing of such a share, and where all cores are held it would take theirs.

The first thing of which too few cards have enough is the refusal. If all cards together have it, it is split (`ShareSplit`).
"""

from collections import Counter
from collections.abc import Sequence

from topoalign.core.demand.card_rules import CardRules
from topoalign.core.model.errors import InvalidField
from topoalign.core.sharing.cards import WHOLE_CARD, SharedCard, ShareRequest
from topoalign.core.sharing.refusals import (
    OTHER_MODE,
    OTHER_TYPE,
    OTHER_UUID,
    AmountMissing,
    MemoryAboveCard,
    NoCardAccepted,
    NotEnoughShareCards,
    NotEnoughShareCores,
    NotEnoughShareMemory,
    NotEnoughShareSlots,
    NotEnoughUnusedCards,
    NothingAsked,
    NotWholeCards,
    ShareDoesNotFit,
    ShareFields,
    ShareSplit,
    format_mib,
    split,
)

Cards = Sequence[SharedCard]


def cards_asked(request: ShareRequest, fields: ShareFields) -> int:
    """The number of cards that are asked for. Raises InvalidField for what cannot be meant."""
    cores, memory, cards = request.cores, request.memory, request.cards
    for field, amount, least in ((fields.cores, cores, 0), (fields.memory, memory, 0), (fields.cards, cards, 1)):
        if amount < least:
            raise InvalidField(field, f"{amount} is below {least}", f"ask for {least} or more")
    if not cores and not memory:
        raise NothingAsked(fields)
    if cores < WHOLE_CARD:
        if cores and not memory:
            raise AmountMissing(fields.memory, fields.cores)
        return cards
    if cores % WHOLE_CARD:
        raise NotWholeCards(fields, cores)
    if cores > WHOLE_CARD and cards > 1:
        raise InvalidField(
            fields.cards,
            f"{cards} beside {cores} cores, which are {cores // WHOLE_CARD} cards already",
            f"ask for {WHOLE_CARD} cores of each of {cards} cards, or for one number of cores alone",
        )
    return cards * cores // WHOLE_CARD


def fitting(cards: Cards, request: ShareRequest, size: int, rules: CardRules, fields: ShareFields) -> list[int]:
    """The positions of the cards that have enough, at least `size`. Raises ShareDoesNotFit if they are fewer."""
    accepted = accepted_cards(cards, rules, fields)
    if len(accepted) < size:
        raise NotEnoughShareCards(fields, size, len(accepted))
    largest = max(cards[at].memory for at in accepted)
    if request.memory > largest:
        raise MemoryAboveCard(fields, request.memory, largest)
    if request.cores >= WHOLE_CARD or rules.mutex:
        unused = [at for at in accepted if cards[at].unused]
        if len(unused) < size:
            raise NotEnoughUnusedCards(fields, size, len(unused))
        accepted = unused
    if request.cores >= WHOLE_CARD:
        whole = [at for at in accepted if cards[at].memory >= request.memory]
        if len(whole) < size:
            raise NotEnoughShareMemory(fields, request.memory, size, [cards[at].memory for at in accepted])
        return whole
    enough = [at for at in accepted if has_enough(cards[at], request)]
    if len(enough) < size:
        raise refusal([cards[at] for at in accepted], request, size, fields)
    return enough


def accepted_cards(cards: Cards, rules: CardRules, fields: ShareFields) -> list[int]:
    """The positions of the cards that may be chosen. Raises NoCardAccepted if there are none."""
    reasons = [unaccepted(card, rules) for card in cards]
    accepted = [at for at, reason in enumerate(reasons) if reason is None]
    if not accepted:
        raise NoCardAccepted(fields, Counter(reason for reason in reasons if reason is not None))
    return accepted


def unaccepted(card: SharedCard, rules: CardRules) -> str | None:
    """Why a card may not be chosen, whatever is left of it; None if it may."""
    if not card.healthy:
        return "not healthy"
    if card.device in rules.cordoned:
        return "cordoned"
    if not rules.types.takes_type(card.model):
        return OTHER_TYPE
    if not rules.takes_mode(card.mode):
        return OTHER_MODE
    return None if rules.uuids.takes_uuid(card.device) else OTHER_UUID


def has_enough(card: SharedCard, request: ShareRequest) -> bool:
    """Whether a share is left of a card."""
    return card.has_left(cores_needed(request), request.memory) and (not card.slots or card.slots_left > 0)


def cores_needed(request: ShareRequest) -> int:
    """The cores that a card needs to have left for a share; one for memory alone."""
    return max(1, request.cores)


def refusal(cards: Cards, request: ShareRequest, size: int, fields: ShareFields) -> ShareDoesNotFit:
    """Why a share does not fit on so many of these cards, although they may be chosen."""
    cores, memory = cores_needed(request), request.memory
    cores_left, memory_left = [card.cores_left for card in cards], [card.memory_left for card in cards]
    slots_left = [card.slots_left if card.slots else 1 for card in cards]
    if too_few(cores_left, cores, size):
        if sum(cores_left) < cores * size:
            return NotEnoughShareCores(fields, cores, size, cores_left)
        return ShareSplit(fields.cores, split(f"{cores} cores", size, how_many(cores_left, cores)))
    if too_few(memory_left, memory, size):
        if sum(memory_left) < memory * size:
            return NotEnoughShareMemory(fields, memory, size, memory_left)
        return ShareSplit(fields.memory, split(format_mib(memory), size, how_many(memory_left, memory)))
    if too_few(slots_left, 1, size):
        return NotEnoughShareSlots(fields, size, slots_left)
    amounts = f"a slot, {cores} cores and {format_mib(memory)} together"
    return ShareSplit(fields.cores, split(amounts, size, sum(has_enough(card, request) for card in cards)))


def too_few(left: Sequence[int], needed: int, size: int) -> bool:
    """Whether fewer than `size` cards have as much left."""
    return how_many(left, needed) < size


def how_many(left: Sequence[int], needed: int) -> int:
    """How many cards have as much left."""
    return sum([amount >= needed for amount in left])
