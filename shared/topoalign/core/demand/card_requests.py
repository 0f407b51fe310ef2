"""
What a container asks for of cards in slots: how many cards, and memory and cores of each of them.

A limit counts before a request. Memory in MiB wins over a percentage, of which 100 are all; with neither, it is the default
amount of memory, or else all of the card's. Cores that are not asked for are the default, which is none.

    nvidia.com/gpu: 2, gpumem: 4000                            4000 MiB of each of two cards
    nvidia.com/gpu: 1, gpumem: 4000, gpumem-percentage: 50     4000 MiB
    nvidia.com/gpu: 1, gpumem-percentage: 150, gpucores: 30    all memory of a card, and 30 of its cores
    nvidia.com/gpu: 1, gpumem-percentage: 0                    all memory of a card

Which amounts cannot be meant is judged elsewhere (`slots.check_amounts`).

Source: HAMi 4707fb02, GenerateResourceRequests (spec hami.md 2.2).
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from topoalign.core.demand.hami_names import VENDOR
from topoalign.core.demand.quantities import Quantities
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.topology.offers import Slots

ALL_MEMORY = 100
"""Hundredths of a card's."""
UNSET = 101
"""The percentage of a request that has none."""
NOTHING: Mapping[ResourceName, int] = MappingProxyType({})


class CardRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one container asks for. `count` 0: nothing."""

    count: int = 0
    vendor: str = ""
    memory: int = 0
    """MiB of each card. 0: by percentage."""
    percent: int = 0
    """Memory as hundredths of each card's. `UNSET`, or 0: none."""
    cores: int = 0
    """Of each card."""

    def memory_of(self, total: int) -> int:
        """MiB that it gets of a card with `total` MiB."""
        if self.memory > 0 or self.percent == UNSET:
            return self.memory
        return total * self.percent // ALL_MEMORY


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a container gets that does not say."""

    memory: int = 0
    """MiB. 0: all of the card's."""
    cores: int = 0
    memory_factor: int = 1
    """MiB of one unit in which memory is asked for. Below 1 it is 1."""


NO_DEFAULTS = Defaults()


def card_request(
    resource: ResourceName,
    slots: Slots,
    limits: Quantities,
    requests: Quantities = NOTHING,
    defaults: Defaults = NO_DEFAULTS,
) -> CardRequest:
    """What a container asks for of cards of which `resource` is a slot; without any nothing, whatever amounts it names."""
    asked = {**requests, **limits} if requests else limits
    if resource not in asked:
        return CardRequest()
    memory, percent = asked.get(slots.memory, 0), asked.get(slots.percentage, 0)
    if memory and defaults.memory_factor > 1:
        memory *= defaults.memory_factor
    if percent > 0:
        percent = min(percent, ALL_MEMORY)
    elif memory or defaults.memory:
        memory, percent = memory or defaults.memory, UNSET
    else:
        percent = ALL_MEMORY
    cores = asked.get(slots.cores, defaults.cores)
    return CardRequest(count=asked[resource], vendor=VENDOR, memory=memory, percent=percent, cores=cores)
