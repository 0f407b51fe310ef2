"""
Scores devices and nodes by usage with a request added, from 0 to 100. Under the strategy, a higher score is better.

Rules of koordinator a7a1b76b (deviceshare, scoring). All divisions round down.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from topoalign.core.deviceshare.koordinator_names import FPGA, GPU_BYTES, RATIO, RDMA
from topoalign.core.deviceshare.request_combinations import Quantities

DEFAULT_WEIGHTS: Mapping[str, int] = MappingProxyType({RATIO: 1, GPU_BYTES: 1, RDMA: 1, FPGA: 1})


class DevicePacking(StrEnum):
    """Whether more used or less used devices score higher."""

    LEAST_ALLOCATED = "LeastAllocated"
    """Spread."""
    MOST_ALLOCATED = "MostAllocated"
    """Fill up."""


class DeviceScorer(msgspec.Struct, frozen=True):
    """How devices are ranked: the strategy, and the weight of each resource."""

    strategy: DevicePacking = DevicePacking.LEAST_ALLOCATED
    weights: Mapping[str, int] = DEFAULT_WEIGHTS
    """Resource -> weight, above 0."""


def score_device(scorer: DeviceScorer, total: Quantities, free: Quantities, request: Quantities) -> int:
    """The score of a device with the request added, from 0 to 100: the weighted mean over its resources."""
    weights = {name: weight for name, weight in scorer.weights.items() if total.get(name, 0) > 0 and weight > 0}
    points = 0
    for name, weight in weights.items():
        size = total[name]
        left = free.get(name, 0)
        used = size if left > size else size - left + request.get(name, 0)
        if scorer.strategy is DevicePacking.MOST_ALLOCATED:
            points += weight * (min(used, size) * 100 // size)
        else:
            points += weight * (max(0, size - used) * 100 // size)
    return points // sum(weights.values()) if weights else 0
