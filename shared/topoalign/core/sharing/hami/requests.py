"""
What a container asks for in HAMi's resources, which the kubelet never sees: cards, and memory and cores of each of
them.

A limit counts before a request. Memory in MiB wins over a percentage; with neither, the share has the default amount
of memory, or else all of the card's. `nvidia.com/gpu: 2, nvidia.com/gpumem: 4000` are two cards with 4000 MiB of
each.

Memory that is not a plain integer (`16.0Gi`), or too large, makes the container one that asks for no card at all:
upstream rather gives nothing than another amount. A webhook refuses it before that.

Source: HAMi 4707fb02, GenerateResourceRequests.
"""

import re
from collections.abc import Mapping

import msgspec

from topoalign.core.demand.hami_names import DEFAULT_NAMES, VENDOR, ResourceNames
from topoalign.core.deviceshare.annotations import quantity
from topoalign.core.model.ids import ResourceName

UNSET = 101
"""The percentage of a request that has none."""
_LARGEST_MEMORY = (1 << 31) - 1
_LARGEST = (1 << 63) - 1

Amounts = Mapping[ResourceName, int | str]
"""Quantities as in a manifest."""

_FORM = re.compile(r"[+-]?[0-9]*(?:\.(?P<places>[0-9]*))?(?:[eE](?P<exponent>[+-]?[0-9]+)|(?P<suffix>.*))")
_DECIMAL_PLACES = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


class CardRequest(msgspec.Struct, frozen=True, kw_only=True):
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
        return total * self.percent // 100


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a container gets that does not say."""

    memory: int = 0
    """MiB. 0: all of the card's."""
    cores: int = 0
    memory_factor: int = 1
    """MiB of one unit in which memory is asked for. Below 1 it is 1."""


NO_DEFAULTS = Defaults()


def read_request(
    limits: Amounts,
    requests: Amounts,
    defaults: Defaults = NO_DEFAULTS,
    names: ResourceNames = DEFAULT_NAMES,
) -> CardRequest:
    """What a container asks for. Amounts that the API server would not accept count as none."""

    def asked(name: ResourceName) -> int | str | None:
        return limits[name] if name in limits else requests.get(name)

    count, memory = plain_integer(asked(names.count)), asked(names.memory)
    if count is None:
        return CardRequest()
    factor = max(defaults.memory_factor, 1)
    units = 0 if memory is None else plain_integer(memory)
    if units is None or not 0 <= units <= _LARGEST_MEMORY // factor:
        return CardRequest()
    mib, percent = units * factor, plain_integer(asked(names.percentage)) or 0
    percent = min(percent, 100) if percent > 0 else UNSET
    if percent == UNSET and mib == 0:
        mib, percent = (defaults.memory, UNSET) if defaults.memory else (0, 100)
    cores = plain_integer(asked(names.cores))
    return CardRequest(
        count=count,
        vendor=VENDOR,
        memory=mib,
        percent=percent,
        cores=defaults.cores if cores is None else cores,
    )


def plain_integer(amount: int | str | None) -> int | None:
    """
    The value of a quantity that Kubernetes keeps as a plain integer; None for every other.

    `64Gi`, `2k` and `1.5k` are plain. `16.0Gi` is not, for it has a point before a binary suffix, and neither are
    `2000m` and `2.0`, whose last place is below one. Source: k8s.io/apimachinery, Quantity.AsInt64.
    """
    if amount is None or isinstance(amount, int):
        return amount
    value, form = quantity(amount.removeprefix("-")), _FORM.fullmatch(amount)
    if value is None or form is None or value.denominator != 1 or value > _LARGEST:
        return None
    places, suffix = len(form["places"] or ""), form["suffix"] or ""
    shift = int(form["exponent"] or 0) or _DECIMAL_PLACES.get(suffix, 0 if suffix.endswith("i") else -1)
    if shift < places:
        return None
    return -int(value) if amount.startswith("-") else int(value)
