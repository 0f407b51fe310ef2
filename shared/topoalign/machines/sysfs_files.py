"""
Reads the files of a /sys and /proc tree below any root, safely.

A tree may be the running host's, a captured one that lost half its files, or an invented one; it may be a folder or an
archive (`sysfs_archive`). A file that is missing, unreadable, too long or not text reads as None; so does a number that
is not a number. No link is followed out of the tree.
"""

import os
import re
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

from topoalign.core.model.topology.cpuset import LARGEST_ID, parse_cpuset

LONGEST_FILE = 1 << 20
"""Bytes. The longest that is read is a node's meminfo, a few thousand."""

_HEX_MASK = re.compile(r"[0-9a-fA-F]{1,8}(?:,[0-9a-fA-F]{0,8})*")


class Tree(ABC):
    """The files below a root, named by their path from it: `sys/devices/system/cpu/online`."""

    @abstractmethod
    def content(self, path: str) -> bytes | None:
        """The content of a file, links followed."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if it does not exist."""

    @abstractmethod
    def real(self, path: str) -> PurePosixPath | None:
        """The target of links, as a path from the root. None: there is none, or it is outside the tree."""

    def text(self, path: str) -> str | None:
        """The content of a file, stripped, without the null with which some kernels (5.15) end a list."""
        content = self.content(path)
        if content is None:
            return None
        return content.strip(b"\0").partition(b"\0")[0].decode("utf-8", "replace").strip()

    def number(self, path: str, base: int = 10) -> int | None:
        """A number that is not negative. The kernel writes -1 for what it does not know."""
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


class Folder(Tree):
    """A tree on disk: `/` of the running host, or a captured one."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))

    def content(self, path: str) -> bytes | None:
        """The bytes of a file; None if it is missing, unreadable or longer than LONGEST_FILE."""
        place = self.real(path)
        if place is None:
            return None
        try:
            with open(self.root / place, "rb") as file:
                raw = file.read(LONGEST_FILE + 1)
        except (OSError, ValueError):
            return None
        return raw if len(raw) <= LONGEST_FILE else None

    def names(self, path: str) -> list[str]:
        """The names in a folder, sorted; none if it cannot be listed."""
        place = self.real(path)
        try:
            return [] if place is None else sorted(os.listdir(self.root / place))
        except (OSError, ValueError):
            return []

    def real(self, path: str) -> PurePosixPath | None:
        """The path without links, relative to the root; None if it does not exist or leaves the root."""
        try:
            place = os.path.realpath(self.root / path, strict=True)
            return PurePosixPath(place).relative_to(self.root)
        except (OSError, ValueError):
            return None


def open_tree(root: Path | Tree) -> Tree:
    """A folder as a tree; a tree stays as it is."""
    return root if isinstance(root, Tree) else Folder(root)


def parse_number(text: str, base: int = 10) -> int | None:
    """Reads a number of at most 18 digits that is not negative."""
    digits = text.strip().lower().removeprefix("0x") if base == 16 else text.strip()
    allowed = "0123456789abcdef"[:base]
    return int(digits, base) if 0 < len(digits) <= 18 and all(c in allowed for c in digits) else None


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts mlx5_2 before mlx5_10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]{1,18})", name) if part]
