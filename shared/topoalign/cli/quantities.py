"""Numbers and sizes in options of the command line. A wrong one is refused with the name of its option."""

import re

import click

from topoalign.core.model.errors import clean
from topoalign.kubelet.files.quantities import whole

MOST = 1_000_000
"""Above what any machine has of anything that is counted."""

_WHOLE = re.compile(r"[0-9]{1,19}")


class Count(click.ParamType[int]):
    """A whole number of things, in the digits 0 to 9 and nothing else."""

    name = "N"

    def __init__(self, least: int = 0, most: int = MOST) -> None:
        self.least = least
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number. Fails with a usage error for any other text or a number out of range."""
        if isinstance(value, int):
            return value
        text = str(value)
        if not _WHOLE.fullmatch(text) or not self.least <= int(text) <= self.most:
            self.fail(f"{clean(text, 40)!r} is not a whole number from {self.least} to {self.most}", param, ctx)
        return int(text)


class Size(click.ParamType[int]):
    """Bytes, as Kubernetes writes quantities: `64Gi`, `1.5G`, `1e9` or a plain number. Parts of a byte are rounded up."""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The size in bytes, fractions rounded up. Fails with a usage error for any other text."""
        if isinstance(value, int):
            return value
        size = whole(str(value))
        if size is None:
            self.fail(
                f"{clean(str(value), 40)!r} is not a size: write 64Gi, 512Mi, 1.5G or a number of bytes", param, ctx
            )
        return size


def binary(size: int) -> str:
    """Bytes for people: `64 GiB`. The largest unit that leaves at least 1, with one decimal where it is not whole."""
    for power, unit in reversed(tuple(enumerate(("KiB", "MiB", "GiB", "TiB"), 1))):
        if size >= 1024**power:
            value = size / 1024**power
            return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"
    return f"{size} B"
