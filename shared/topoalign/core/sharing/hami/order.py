"""
In which order the cards of a node are tried.

Upstream sorts its list and walks it from the end; here the order is the walk. The policies:

- `binpack`: the fullest card first. `spread`, the default and what every unknown word means: the emptiest first.
- `mutex`: unused cards first; `fit` refuses the others.
- A list (`numa,binpack`), or `numa` alone: its keys one after another, others in it (`mutex`, `topology-aware`) are
  none; without any key it is `spread`. Key `numa` is the highest NUMA node first.
- Where the pod binds to one NUMA node, cards of one node are next to one another: the lowest node first for
  `binpack`, the highest for `spread`, and for lists, whose first key then is `numa`.

Ties go to the highest NUMA node, then to the highest index, then to the highest uuid (upstream: often to chance).

Source: HAMi 4707fb02, DeviceUsageList.
"""

from collections.abc import Iterable

import msgspec

from topoalign.core.demand.share_annotations import words
from topoalign.core.sharing.hami.selection import BINPACK, MUTEX, NUMA, SPREAD
from topoalign.core.sharing.hami.usage import CardUsage

SortKey = tuple[float | str, ...]


class ScoredCard(msgspec.Struct, frozen=True):
    """A card and how full it is."""

    card: CardUsage
    score: float


def walk(cards: Iterable[ScoredCard], policy: str, numa_bind: bool = False) -> tuple[CardUsage, ...]:
    """The cards in the order in which they are tried."""
    ordered = sorted(cards, key=lambda each: sort_key(each, policy, numa_bind), reverse=True)
    return tuple(each.card for each in ordered)


def sort_key(scored: ScoredCard, policy: str, numa_bind: bool = False) -> SortKey:
    """Sorts cards as upstream's list: the one that is tried first comes last."""
    card = scored.card
    score = scored.score
    tie = (card.index, card.uuid)
    if "," in policy or policy == NUMA:
        of_key = {BINPACK: score, SPREAD: -score, NUMA: card.numa}
        return (*(of_key[key] for key in _chain(policy, numa_bind)), *tie)
    if policy == MUTEX:
        return (-card.used_slots, card.numa, *tie)
    fullest_last = score if policy == BINPACK else -score
    if not numa_bind:
        return (fullest_last, card.numa, *tie)
    return (-card.numa if policy == BINPACK else card.numa, fullest_last, *tie)


def _chain(policy: str, numa_bind: bool) -> tuple[str, ...]:
    """The keys in a list of policies, each once."""
    keys = tuple(dict.fromkeys(word for word in words(policy) if word in (BINPACK, SPREAD, NUMA))) or (SPREAD,)
    return tuple(dict.fromkeys((NUMA, *keys))) if numa_bind else keys
