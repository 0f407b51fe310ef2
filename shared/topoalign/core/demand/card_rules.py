"""
What limits and orders the choice of a card, whoever decides: lists of models and uuids, and how its parts are weighed.

A model is matched as a part of the product's name, without regard to case: `h100` takes `NVIDIA H100 80GB HBM3`. A uuid is
matched exactly.
"""

from enum import StrEnum

import msgspec

from topoalign.core.model.ids import DeviceID


class Weights(msgspec.Struct, frozen=True):
    """What slots, cores and memory count in a card's score."""

    slot: int = 1
    core: int = 1
    memory: int = 1


EQUAL_WEIGHTS = Weights()


class Selection(msgspec.Struct, frozen=True):
    """A list of what is wanted and one of what is not. None: no such list."""

    wanted: tuple[str, ...] | None = None
    unwanted: tuple[str, ...] | None = None

    def takes_uuid(self, uuid: str) -> bool:
        """Whether a card of this uuid is accepted."""
        return (self.wanted is None or uuid in self.wanted) and (self.unwanted is None or uuid not in self.unwanted)

    def takes_type(self, model: str) -> bool:
        """Whether a card of this model is accepted."""
        name = model.upper()
        wanted, unwanted = self.wanted, self.unwanted
        return (wanted is None or any(_within(each, name) for each in wanted)) and (
            unwanted is None or not any(_within(each, name) for each in unwanted)
        )


ANY = Selection()
"""Says nothing."""


class CardOrder(StrEnum):
    """Which of the cards that have enough come first."""

    BEST_FIT = "best-fit"
    """The one that has the least left; several cards by their links, and by what they leave."""
    BINPACK = "binpack"
    """The one that is fullest with the share on it."""
    SPREAD = "spread"
    """The one that is emptiest with the share on it."""
    TOPOLOGY_AWARE = "topology-aware"
    """The best connected ones; a single one whose loss breaks the least of what the unused ones can be split into."""


class CardRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a container, its node or the configuration say about the cards that it may get."""

    types: Selection = Selection()
    """Parts of the names of models."""
    uuids: Selection = Selection()
    cordoned: frozenset[DeviceID] = frozenset()
    """Cards that nobody is to get."""
    mode: str | None = None
    """Modes that are accepted, of which a card's must be a part; None: all."""
    mutex: bool = False
    """Only cards of which nobody holds anything."""
    numa_bind: bool = False
    """All cards of the container on one NUMA node."""
    order: CardOrder = CardOrder.BEST_FIT
    weights: Weights = EQUAL_WEIGHTS
    """What counts how much where it matters how full a card is: with `binpack` and `spread`."""
    hami: str = ""
    """
    HAMi's policy, or several with commas in between, where its rules choose the cards instead of `order`; else empty.
    """

    @property
    def limits(self) -> bool:
        """Whether some cards would not do, whatever is left of them or wherever the others are."""
        return self.types != ANY or self.uuids != ANY or self.mutex or self.numa_bind

    def takes_mode(self, mode: str) -> bool:
        """Whether a card is accepted whose parts are kept apart in this mode; empty: in none that has a name."""
        return self.mode is None or (mode != "" and mode in self.mode)

    def accepts(self, uuid: DeviceID, model: str) -> bool:
        """Whether the lists accept a card."""
        return self.types.takes_type(model) and self.uuids.takes_uuid(uuid)


ANY_CARD = CardRules()
"""Says nothing."""


def _within(name: str, model: str) -> bool:
    return name.upper() in model
