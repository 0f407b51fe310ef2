"""
How HAMi reads a container's amounts as text, for its case files; services read manifests, and refuse what cannot be meant.

HAMi takes only what Kubernetes keeps as a plain integer. Where that fails for the number of cards or their memory, or where
there is too much memory, it takes the container for one that asks for nothing: `nvidia.com/gpu: 1` with
`nvidia.com/gpumem: 16.0Gi` is no request.

Source: HAMi 4707fb02, GenerateResourceRequests; k8s.io/apimachinery, Quantity.AsInt64.
"""

import re
from collections.abc import Mapping

import msgspec

from topoalign.core.demand.shares import HamiRequest, read_hami_request
from topoalign.core.model.ids import GPU, ResourceName
from topoalign.core.model.topology.device_offers import Slots

Amounts = Mapping[ResourceName, int | str]
"""Quantities as in a manifest."""

NAMES = Slots()
INT32 = (1 << 31) - 1
"""The most that HAMi counts: MiB of memory, cards and cores."""
INT64 = (1 << 63) - 1
FORM = re.compile(
    r"(?P<sign>[+-]?)0*(?P<whole>[0-9]*)(?:\.(?P<places>[0-9]*))?"
    r"(?:(?P<binary>[KMGTPE])i|(?P<decimal>[kMGTPE]?)|[eE](?P<exponent>[+-]?[0-9]{1,3}))"
)
BINARY = {prefix: 10 * power for power, prefix in enumerate("KMGTPE", 1)}
DECIMAL = {prefix: 3 * power for power, prefix in enumerate(("", *"kMGTPE"))}
DECIMAL_DIGITS = 18
BINARY_DIGITS = 14
"""How many digits a plain integer has at most, those after the point included; `Gi` counts as 9, three for each 2^10."""


class Defaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a container gets that asks for no amounts, by HAMi's configuration; topoalign has no such defaults."""

    memory: int = 0
    """MiB. 0: all of the GPU's."""
    cores: int = 0
    memory_factor: int = 1
    """MiB of one unit in which memory is asked for. Below 1 it is 1."""


NO_DEFAULTS = Defaults()


def read_request(limits: Amounts, requests: Amounts, defaults: Defaults = NO_DEFAULTS) -> HamiRequest:
    """What HAMi takes a container to ask for. Other amounts that are no plain integers count as not said."""
    read = [{name: plain_integer(said) for name, said in each.items()} for each in (limits, requests)]
    first = {**read[1], **read[0]}
    memory = first.get(NAMES.memory, 0)
    if first.get(GPU) is None or memory is None:
        return HamiRequest()
    if not 0 <= memory <= INT32 // max(defaults.memory_factor, 1):
        return HamiRequest()
    said, asked = (
        {name: value for name, value in each.items() if value is not None and first[name] is not None} for each in read
    )
    amounts = {NAMES.cores: defaults.cores, **asked, **said}
    amounts[NAMES.memory] = amounts.get(NAMES.memory, 0) * max(defaults.memory_factor, 1)
    if not amounts[NAMES.memory] and amounts.get(NAMES.percentage, 0) <= 0:
        amounts[NAMES.memory] = defaults.memory
    found = read_hami_request(GPU, NAMES, amounts)
    return msgspec.structs.replace(found, count=as_int32(found.count), cores=as_int32(found.cores))


def as_int32(number: int) -> int:
    """What is left of a number in 32 bits, as HAMi keeps numbers of cards and cores: 2^32 + 1 is 1."""
    return (number + INT32 + 1) % (1 << 32) - INT32 - 1


def plain_integer(amount: int | str) -> int | None:
    """
    The value of a quantity that Kubernetes keeps as a plain integer; None for every other.

    `64Gi`, `2k` and `1.5k` are plain. `16.0Gi` is not, for it has places after a point and a binary suffix, and neither are
    `2000m` and `2.0`, whose last place is below one. `1Pi` has too many digits: its own and 15 of the suffix.
    """
    if isinstance(amount, int):
        return amount
    form = FORM.fullmatch(amount)
    if form is None or not amount:
        return None
    whole = form["whole"]
    places = form["places"] or ""
    sign = -1 if form["sign"] == "-" else 1
    if form["binary"]:
        power = BINARY[form["binary"]]
        plain = not places and len(whole or "0") + power * 3 // 10 <= BINARY_DIGITS
        return sign * (int(whole or "0") << power) if plain else None
    shift = int(form["exponent"]) if form["exponent"] else DECIMAL[form["decimal"]]
    if shift < len(places) or len((whole or "0") + places) > DECIMAL_DIGITS:
        return None
    value = int(whole + places or "0") * 10 ** (shift - len(places))
    return sign * value if value <= INT64 else None
