"""
Which cards one container gets: they are scored, put in HAMi's order and tried one after another.

Nodes on which HAMi's rules choose take this way (`slots_as_hami`), and so does `place`, container by container. A card's
score counts all that the container asks for, and stays as it is while its cards are chosen.

Source: HAMi 4707fb02, scoreNode.
"""

from collections.abc import Iterable, Sequence

from topoalign.core.demand.share_annotations import Weights
from topoalign.core.demand.shares import CardRequest
from topoalign.core.sharing.hami.fit import Shares, Surroundings, Unfit, fit
from topoalign.core.sharing.hami.order import ScoredCard, walk
from topoalign.core.sharing.hami.scores import device_score
from topoalign.core.sharing.hami.usage import CardUsage


def score_cards(
    cards: Iterable[CardUsage], requests: Sequence[CardRequest], weights: Weights
) -> tuple[ScoredCard, ...]:
    """The cards, each with how full it would be. `requests`: all of one container."""
    return tuple(ScoredCard(card, device_score(card, requests, weights)) for card in cards)


def choose_cards(scored: Iterable[ScoredCard], request: CardRequest, around: Surroundings) -> Shares | Unfit:
    """
    The cards for one request, in the order in which they are taken, or why there are too few.

    Raises TooMuchWork where the best connected cards are not found within the limit on work.
    """
    return fit(walk(scored, around.rules.policy, around.rules.numa_bind), request, around)
