"""Numbers as people write them on the command line, refused with the name of the option where they cannot be meant."""

import re
from fractions import Fraction
from math import ceil

import click

from topoalign.core.errors import clean
from topoalign.core.requests import LARGEST_QUANTITY

MOST = 1_000_000
"""Above what any machine has of anything that is counted."""

_WHOLE = re.compile(r"[0-9]{1,19}")
_QUANTITY = re.compile(
    r"([0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:(Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E)|[eE]([+-]?[0-9]{1,2}))?"
)
FACTORS = {
    **{f"{prefix}i": Fraction(1024**power) for power, prefix in enumerate("KMGTPE", 1)},
    **{prefix: Fraction(1000**power) for power, prefix in enumerate("kMGTPE", 1)},
    "m": Fraction(1, 1000),
}


class Count(click.ParamType[int]):
    """A whole number of things, 0 or more."""

    name = "N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        if not _WHOLE.fullmatch(text) or int(text) > MOST:
            self.fail(f"{clean(text, 40)!r} is not a whole number from 0 to {MOST}", param, ctx)
        return int(text)


class Size(click.ParamType[int]):
    """Bytes, as Kubernetes writes quantities: `64Gi`, `1.5G`, `1e9` or a plain number. Parts of a byte are rounded up."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        size = bytes_of(str(value))
        if size is None:
            self.fail(
                f"{clean(str(value), 40)!r} is not a size: write 64Gi, 512Mi, 1.5G or a number of bytes", param, ctx
            )
        return size


def bytes_of(quantity: str) -> int | None:
    """The bytes of a Kubernetes quantity, rounded up; None if it is none, or more than 2^63-1."""
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        return None
    number, suffix, exponent = match.groups()
    factor = FACTORS[suffix] if suffix else Fraction(10) ** int(exponent or 0)
    size = ceil(Fraction(number) * factor)
    return size if size <= LARGEST_QUANTITY else None


def binary(size: int) -> str:
    """Bytes for people: `64 GiB`. The largest unit that leaves at least 1, with one decimal where it is not whole."""
    for power, unit in reversed(tuple(enumerate(("KiB", "MiB", "GiB", "TiB"), 1))):
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{size} B"
