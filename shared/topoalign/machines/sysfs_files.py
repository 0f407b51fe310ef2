"""
Reads the files of a /sys and /proc tree below any root, safely.

A tree can be that of the running host, an incomplete capture, or artificial. A file that is missing, unreadable or too
long reads as None, and so does an invalid number. Links that leave the tree are not followed.
"""

import os
import re
from pathlib import Path, PurePosixPath

from topoalign.core.model.topology.cpuset import LARGEST_ID, parse_cpuset

LONGEST_FILE = 1 << 20
"""Maximum size in bytes. The largest file that is read, a node's meminfo, has a few thousand bytes."""

_HEX_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{0,8})*")


class Tree:
    """
    The files below a root on disk, `/` of the running host or a captured one, named by their path from it:
    `sys/devices/system/cpu/online`.
    """

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))

    def content(self, path: str) -> bytes | None:
        """The bytes of a file, links followed; None if it is missing, unreadable or longer than LONGEST_FILE."""
        place = self.real(path)
        if place is None:
            return None
        try:
            with open(self._root / place, "rb") as file:
                raw = file.read(LONGEST_FILE + 1)
        except (OSError, ValueError):
            return None
        return raw if len(raw) <= LONGEST_FILE else None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none if it cannot be listed."""
        place = self.real(path)
        try:
            return [] if place is None else sorted(os.listdir(self._root / place))
        except (OSError, ValueError):
            return []

    def real(self, path: str) -> PurePosixPath | None:
        """The path without links, relative to the root; None if it does not exist or leaves the root."""
        try:
            place = os.path.realpath(self._root / path, strict=True)
            return PurePosixPath(place).relative_to(self._root)
        except (OSError, ValueError):
            return None

    def text(self, path: str) -> str | None:
        """The content of a file, stripped, without the null byte with which some kernels (5.15) end a list."""
        content = self.content(path)
        if content is None:
            return None
        return content.strip(b"\0").partition(b"\0")[0].decode("utf-8", "replace").strip()

    def number(self, path: str, base: int = 10) -> int | None:
        """A number that is not negative, otherwise None: the kernel writes -1 for unknown values."""
        text = self.text(path)
        return parse_number(text, base) if text is not None else None

    def ids(self, path: str) -> frozenset[int] | None:
        """A list such as `0-3,8`."""
        text = self.text(path)
        try:
            return parse_cpuset(text) if text is not None else None
        except ValueError:
            return None

    def mask(self, path: str) -> frozenset[int] | None:
        """A mask such as `0000,00000f00`, 32 bits between commas."""
        text = self.text(path)
        if text is None or len(text) > LARGEST_ID // 3 or not _HEX_MASK.fullmatch(text):
            return None
        bits = int("".join(word.zfill(8) for word in text.split(",")), 16)
        return frozenset(i for i in range(bits.bit_length()) if bits >> i & 1)


def parse_number(text: str, base: int = 10) -> int | None:
    """Reads a number of at most 18 digits that is not negative."""
    digits = text.strip().lower().removeprefix("0x") if base == 16 else text.strip()
    allowed = "0123456789abcdef"[:base]
    return int(digits, base) if 0 < len(digits) <= 18 and all(c in allowed for c in digits) else None


def natural(name: str) -> list[tuple[int, str]]:
    """The key that sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", name) if part]
