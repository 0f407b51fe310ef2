"""
Finds the containers that must wait because a container of higher priority computes on one of their GPUs.

The library that limits a container sets `recent_kernel` to 2 at each kernel launch. While the number is below 0, the
library delays launches. Every few seconds, the watcher decrements the number. If it is still above 0, the container has
launched a kernel since the previous round, and counts as computing on all GPUs that it holds. A container waits while
another container of higher priority, which is a smaller number, computes on one of its GPUs.

Example with three containers on one GPU, with the old and the new value of `recent_kernel`:

    priority 0, 2 becomes 1: it computes
    priority 1, 2 becomes -1: it waits
    priority 1, -1 stays -1: it still waits; 0 in the first round in which the first has launched no new kernel

Source: the feedback of HAMi's monitor, HAMi 4707fb02. There, numbers above 2 are decremented one by one. The library
does not write such numbers, so they count as 2 here. The changes that the monitor makes to core limits are not
implemented (docs/sharing.md).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID

LAUNCHED = 2
WAITING = -1
"""The value that the library sets at a launch, and the value that makes it wait."""


class Launches(NamedTuple):
    """The contents of one container's file, and the GPUs that the container holds."""

    gpus: Collection[DeviceID]
    recent_kernel: int
    priority: int
    """0 is the highest. Negative: no priority; the container does not wait, and other containers do not wait for it."""


def next_notes(containers: Sequence[Launches]) -> list[int]:
    """The new value of `recent_kernel` for each container."""
    counted = [max(0, min(each.recent_kernel, LAUNCHED) - 1) for each in containers]
    highest: dict[DeviceID, int] = {}
    for each, left in zip(containers, counted, strict=True):
        if left > 0 and each.priority >= 0:
            for gpu in each.gpus:
                highest[gpu] = min(each.priority, highest.get(gpu, each.priority))
    return [
        WAITING if any(highest.get(gpu, each.priority) < each.priority for gpu in each.gpus) else left
        for each, left in zip(containers, counted, strict=True)
    ]
