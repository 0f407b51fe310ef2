"""
Parses quantities as Kubernetes writes them: `64Gi`, `500m`, `1.5G`, `1e3`.

Source: k8s.io/apimachinery v0.36, resource.Quantity, without signs: nothing here can be negative. A fraction of the
requested unit is rounded up, as there. Example: `1.5` CPUs in whole CPUs is 2.
"""

import re
from fractions import Fraction
from functools import lru_cache
from math import ceil

from topoalign.core.model.requests import LARGEST_QUANTITY

_QUANTITY = re.compile(
    r"([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)|[eE]([+-]?[0-9]{1,2}))?"
)
FACTORS = {
    **{f"{prefix}i": Fraction(1024**power) for power, prefix in enumerate("KMGTPE", 1)},
    **{prefix: Fraction(1000**power) for power, prefix in enumerate("kMGTPE", 1)},
    **{prefix: Fraction(1, 1000**power) for power, prefix in enumerate("mun", 1)},
}


def exact(quantity: str) -> Fraction | None:
    """The value of a quantity; None if the text is not a quantity, is negative, or exceeds 2^63-1."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return None
    value = _value(*match.groups())
    return value if value <= LARGEST_QUANTITY else None


@lru_cache(maxsize=1 << 10)  # most pods write the same few quantities; after the match, a key is short
def _value(number: str, suffix: str | None, exponent: str | None) -> Fraction:
    return Fraction(number) * (FACTORS[suffix] if suffix else Fraction(10) ** int(exponent or 0))


def whole(quantity: str) -> int | None:
    """The value in whole units, such as bytes, rounded up; None if `exact` returns None."""
    value = exact(quantity)
    return None if value is None else ceil(value)


def thousandths(quantity: str) -> int | None:
    """The value in thousandths, such as millicores, rounded up; None if `exact` returns None, or above 2^63-1."""
    value = exact(quantity)
    return None if value is None or value * 1000 > LARGEST_QUANTITY else ceil(value * 1000)
