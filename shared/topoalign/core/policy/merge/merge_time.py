"""
Estimates how long the kubelet's merge takes. The kubelet tries each combination of one hint of each resource.

A combination takes 0.14 to 0.3 microseconds (v1.36.3, on a whole core), with and without the option
prefer-closest-numa-nodes. So the time is proportional to the product of the lengths of the lists. Example: five
resources with all 255 hints of 8 NUMA nodes have 1.1e12 combinations, which take three days. During a merge, the
kubelet admits no other pod.
"""

from collections.abc import Mapping
from math import prod

from topoalign.core.model.errors import clean
from topoalign.core.model.ids import ResourceName
from topoalign.core.model.requests import Policy
from topoalign.core.policy import POLICIES

MICROSECONDS = 0.25
"""Assumed time for one combination."""
MANY = 100_000_000
"""Minimum number of combinations for a warning: half a minute on a whole core, minutes on a quarter of one."""
MOST = 10**24
"""Larger products count as this one, which already takes billions of years."""

UNITS = {"years": 31_536_000, "days": 86_400, "hours": 3_600, "minutes": 60}
"""Unit -> its length in seconds."""


def warn_of_combinations(lengths: Mapping[ResourceName, int]) -> str | None:
    """Returns the warning for these numbers of hints per resource. None: there are fewer than `MANY` combinations."""
    combinations = min(prod(lengths.values()), MOST)
    if combinations < MANY:
        return None
    product = " x ".join(f"{number} of {clean(name)}" for name, number in lengths.items() if number > 1)
    return (
        f"the kubelet merges about {combinations:.1e} combinations of hints ({product}), which takes a whole core about "
        f"{duration(combinations * MICROSECONDS / 1e6)}; it admits no other pod meanwhile"
    )


def longest(nodes: int, policy: Policy) -> int:
    """The maximum number of hints of a resource on `nodes` NUMA nodes: all their subsets, or one for each node."""
    return nodes if POLICIES[policy].single_node else 2**nodes - 1


def duration(seconds: float) -> str:
    """Formats seconds in the largest unit with a value of at least 2. Examples: `90 seconds`, `2 minutes` for 150."""
    unit, size = next(((unit, size) for unit, size in UNITS.items() if seconds >= 2 * size), ("seconds", 1))
    return f"{int(seconds // size):,} {unit}"
