"""Parses and formats lists of ids as the kernel writes them: `0-3,8` is 0, 1, 2, 3 and 8. For CPUs and NUMA nodes."""

import re
from collections.abc import Iterable

LARGEST_ID = 65_535
"""Larger than any CPU or node id of a real machine, and small enough that a malicious range needs little memory."""

MOST_LISTED = 2 * (LARGEST_ID + 1)
"""
Maximum number of ids in one list, including repetitions. A list of all possible ids has half as many. A list that
repeats the same range a thousand times is an attack.
"""

_PART = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")


def parse_cpuset(text: str) -> frozenset[int]:
    """Parses a list such as `0-3,8`; blank text is the empty set. Raises ValueError, which names the wrong part."""
    ids: set[int] = set()
    listed = 0
    if not text.strip():
        return frozenset()
    for part in text.strip().split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part[:40]!r} is neither a number nor a range like 0-3")
        first = int(match[1])
        last = int(match[2] or match[1])
        if last < first or last > LARGEST_ID:
            raise ValueError(f"{part[:40]!r} is not an ascending range up to {LARGEST_ID}")
        listed += last + 1 - first
        if listed > MOST_LISTED:
            raise ValueError(f"more than {MOST_LISTED} ids, repetitions counted")
        ids.update(range(first, last + 1))
    return frozenset(ids)


def format_cpuset(ids: Iterable[int]) -> str:
    """Formats ids like the kernel, with ranges for consecutive ids: {0, 1, 2, 8} becomes `0-2,8`."""
    runs: list[list[int]] = []
    for number in sorted(set(ids)):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
