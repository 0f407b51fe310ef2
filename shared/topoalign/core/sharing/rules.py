"""
What limits and orders the choice of a card, whoever decides: lists of models and uuids, and how its parts are weighed.

A model is matched as a part of the product's name, without regard to case: `h100` takes `NVIDIA H100 80GB HBM3`. A uuid is
matched exactly.
"""

import msgspec


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


def _within(name: str, model: str) -> bool:
    return name.upper() in model
