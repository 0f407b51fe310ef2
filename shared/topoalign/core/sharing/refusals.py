"""Why a share is not given, or what is asked for cannot be meant."""

from typing import NamedTuple

from topoalign.core.model.errors import InvalidField, NoFit


class ShareFields(NamedTuple):
    """The paths of the fields of a request, for people who are told that one of them is wrong."""

    cores: str = "cores"
    memory: str = "memory"
    cards: str = "cards"


class NothingAsked(InvalidField):
    """Raised for a share of no cores and no memory."""

    def __init__(self, fields: ShareFields) -> None:
        super().__init__(
            fields.cores, f"0, and so is {fields.memory}", "ask for cores, for memory, or for no GPU at all"
        )


class NotWholeCards(InvalidField):
    """Raised for more than 100 cores that are not so many whole cards."""

    def __init__(self, fields: ShareFields, cores: int) -> None:
        self.cores = cores
        super().__init__(
            fields.cores,
            f"{cores} is neither a part of one card nor a number of whole cards",
            "ask for 1 to 99 cores of a card, or for whole cards in multiples of 100",
        )


class AmountMissing(InvalidField):
    """Raised for a share that needs both cores and memory, and names only one."""

    def __init__(self, missing: str, given: str) -> None:
        super().__init__(missing, f"nothing is asked for beside {given}", f"ask for an amount of both, or drop {given}")


class MemoryAboveCard(NoFit):
    """Raised for more memory than a card has, even if nobody held anything of it."""

    code = "MemoryAboveCard"

    def __init__(self, fields: ShareFields, asked: int, largest: int) -> None:
        self.asked, self.largest = asked, largest
        super().__init__(
            f"{fields.memory}: {asked} bytes are asked for of one card, and a card has {largest}",
            "ask for less memory, for memory of several cards, or choose a node with larger cards",
        )
