"""
Whether pods got the devices that registries had reserved for them.

A kubelet does not say for which pod it asks, so of two pods that wait for their node and ask for as many devices, each may
get what was reserved for the other: they are swapped, and both have what was chosen. A kubelet also aligns a pod anew when
it admits it: where something of the node became free that was not known to be free when the reservation was made, it may
take other NUMA nodes than were predicted, which no device plugin can change. It then may have what was reserved for a pod
that comes after it, and has to be aligned anew as well. Any other difference is a deviation.

    a is reserved g0, a pod with g4 ends, b is reserved g4 and g5; a is aligned to g4, and b takes g0 and g1: both realigned
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from topoalign.core import wire
from topoalign.core.model.events import ReservationsChanged
from topoalign.core.model.ids import DeviceID, NodeName
from topoalign.core.ports import Bus, Stream
from topoalign.tools.simulate.cases import Devices, Reserved, Taken

NEXT = 3
"""Pods that wait for their node at the same time: a registry binds no more."""

UNKNOWN_SECONDS = 4.0
"""For so long at most a pod has ended and its node's allocator still counts what it had: the times of `node`, and calls."""


class Given(NamedTuple):
    """What a kubelet gave a pod."""

    taken: Taken
    devices: Devices
    container: str | None = None
    """The first one that got some."""


class Differences(NamedTuple):
    """How the pods of a node differ from what was reserved for them."""

    counts: Counter[str]
    """Pods by name of a field of `Report`."""
    deviated: list[Given]


class NodeRecord:
    """What was reserved on one node."""

    def __init__(self) -> None:
        self.reserved: dict[str, Reserved] = {}
        """By the UID of the pod."""
        self.freed: list[float] = []
        """When reservations ended without their pods."""

    def note(self, event: ReservationsChanged, now: float) -> None:
        """The reservations of the node have changed."""
        for each in event.reservations:
            if each.pod_uid in event.made:
                devices = (ids for container in each.containers for ids in container.devices.values())
                self.reserved[each.pod_uid] = Reserved(frozenset[DeviceID]().union(*devices), now, each.pod)
        for uid in (*event.consumed, *event.cancelled, *event.expired):
            if uid in self.reserved:
                self.reserved[uid] = self.reserved[uid]._replace(ended=now)
        if event.cancelled or event.expired:
            self.freed.append(now)


class Reservations:
    """What was reserved on all nodes."""

    def __init__(self) -> None:
        self.nodes: defaultdict[NodeName, NodeRecord] = defaultdict(NodeRecord)

    async def follow(self, bus: Bus) -> None:
        """Listens until cancelled."""
        async with bus.follow(Stream.RESERVATIONS, wire.reservation_subject()) as messages:
            async for received in messages:
                event = wire.decode_event(received.message)
                if isinstance(event, ReservationsChanged):
                    self.nodes[event.node].note(event, anyio.current_time())


def differences(record: NodeRecord, given: Sequence[Given], freed: Sequence[float]) -> Differences:
    """
    Of the pods that a node admitted, in that order: how many were `swapped` or `realigned`; how many came while nothing
    became free and no realigned pod took from theirs (`undisturbed`), and how many of these `deviated`. Those for which
    nothing was reserved do not count.
    `freed`: when pods of the node ended.
    """
    left = dict(record.reserved)
    counts = Counter[str]()
    ends = sorted((*freed, *record.freed))
    deviated: list[Given] = []
    moved: list[Given] = []  # those that were realigned
    for place, each in enumerate(given):
        expected = left.pop(each.taken.uid, None)
        if expected is None:
            continue
        freed_nothing = bisect_left(ends, expected.at - UNKNOWN_SECONDS) == bisect_left(ends, each.taken.at)
        undisturbed = freed_nothing and not any(has_taken_from(expected, other) for other in moved)
        counts["undisturbed"] += undisturbed
        if expected.devices == each.devices:
            continue
        later = (other.taken.uid for other in given[place + 1 : place + 1 + NEXT])
        other = next((uid for uid in later if uid in left and left[uid].devices == each.devices), None)
        if other is not None:
            left[other] = expected
            counts["swapped"] += 1
        elif undisturbed:
            counts["deviated"] += 1
            deviated.append(each)
        else:
            counts["realigned"] += 1
            moved.append(each)
    return Differences(counts, deviated)


def has_taken_from(expected: Reserved, other: Given) -> bool:
    """Whether another pod was given some of these devices since they were reserved."""
    return other.taken.at >= expected.at and not other.devices.isdisjoint(expected.devices)
