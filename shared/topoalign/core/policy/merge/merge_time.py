"""
Estimates how long the kubelet's own merge takes: it tries every combination of one hint of each resource.

A combination takes it 0.14 to 0.3 microseconds (v1.36.3, on a whole core), with the option
prefer-closest-numa-nodes as well as without. So the product of the lengths of the lists gives the time: five resources
that each have all 255 hints of 8 NUMA nodes are 1.1e12 combinations, or three days. While it merges it admits no other
pod.
"""

from collections.abc import Mapping
from math import prod

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import Policy
from topoalign.core.policy import POLICIES

MICROSECONDS = 0.25
"""For one combination."""
MANY = 100_000_000
"""Combinations that are worth a warning: half a minute of a whole core, and minutes of a quarter of one."""
MOST = 10**24
"""Larger products count as this one, which is already millions of years."""

UNITS = {"years": 31_536_000, "days": 86_400, "hours": 3_600, "minutes": 60}
"""In seconds."""


def warn_of_combinations(lengths: Mapping[ResourceName, int]) -> str | None:
    """Returns the warning for these numbers of hints per resource; None below `MANY` combinations."""
    combinations = min(prod(lengths.values()), MOST)
    if combinations < MANY:
        return None
    product = " x ".join(f"{number} of {clean(name)}" for name, number in lengths.items() if number > 1)
    return (
        f"the kubelet merges about {combinations:.1e} combinations of hints ({product}), which takes a whole core about "
        f"{duration(combinations * MICROSECONDS / 1e6)}; it admits no other pod meanwhile"
    )


def longest(nodes: int, policy: Policy) -> int:
    """The most hints that a resource on so many NUMA nodes can have: all their subsets, or one for each node."""
    return nodes if POLICIES[policy].single_node else 2**nodes - 1


def duration(seconds: float) -> str:
    """Formats seconds in the largest unit of which there are at least two: 90 is 90 seconds, 150 is 2 minutes."""
    unit, size = next(((unit, size) for unit, size in UNITS.items() if seconds >= 2 * size), ("seconds", 1))
    return f"{int(seconds // size):,} {unit}"
