"""
Finds the containers that wait because one of higher priority computes on one of their GPUs.

The library that limits a container notes 2 when a kernel is launched (`recent_kernel`), and lets launches wait while it
finds a number below 0. The watcher counts down, every few seconds: what is above 0 afterwards is a container that has
launched since the last but one time. It computes on all GPUs that it holds. A container waits while another one of higher
priority, which is a smaller number, computes on one of its own GPUs.

Example, of three containers on one GPU:

    priority 0, noted 2    1: it computes
    priority 1, noted 2   -1: it waits
    priority 1, noted -1  -1: it waits still; 0 once the first has launched nothing for two rounds

Source: the feedback of HAMi's monitor, HAMi 4707fb02. There, numbers above 2 are counted down one by one; the library notes
none, so they count as 2 here. What the monitor does to limits of cores is not done (docs/sharing.md).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from topoalign.core.model.ids import DeviceID

LAUNCHED = 2
WAITING = -1
"""What the library notes, and what lets it wait."""


class Launches(NamedTuple):
    """The contents of one container's file, and the GPUs that the container holds."""

    gpus: Collection[DeviceID]
    recent_kernel: int
    priority: int
    """0 is the highest; below that no priority: such a container neither waits nor has others wait."""


def next_notes(containers: Sequence[Launches]) -> list[int]:
    """What `recent_kernel` of each container is to be now."""
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
