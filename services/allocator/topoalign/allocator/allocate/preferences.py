"""
Where the kubelet took other devices than were preferred.

It need not follow GetPreferredAllocation, and an Allocate does not say which preference it follows: that is the last one for
its resource, if it was given a moment ago and for such a set.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock

FOLLOWED_SECONDS = 10.0
"""For so long an Allocate may follow from a preference; the kubelet needs milliseconds."""


class Preference(NamedTuple):
    """One answer to GetPreferredAllocation: what was available, what was chosen, and when (monotonic seconds)."""

    available: Collection[DeviceID]
    chosen: tuple[DeviceID, ...]
    at: float


class Preferences:
    """Remembers the newest preference for each resource, and compares it with what the kubelet then allocates."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[ResourceName, Preference] = {}

    def give(self, resource: ResourceName, available: Collection[DeviceID], chosen: tuple[DeviceID, ...]) -> None:
        """Remembers that `chosen` was preferred among the `available` devices; it replaces the former preference."""
        self._newest[resource] = Preference(available, chosen, self._clock.monotonic())

    def deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """
        Maps an allocation to the devices that were preferred in its place; empty where the kubelet followed the preference.

        The last preference for the resource is used up by this. It counts if it is at most `FOLLOWED_SECONDS` old, one
        container was granted, and its devices are as many as were preferred and were all available.
        """
        given = self._newest.pop(resource, None)
        if given is None or len(granted) != 1 or self._clock.monotonic() - given.at > FOLLOWED_SECONDS:
            return {}
        taken = {device for ids in granted[0].from_kubelet.values() for device in ids}
        if taken == {*given.chosen} or len(taken) != len(given.chosen):
            return {}
        if not all(device in given.available for device in taken):
            return {}
        return {granted[0].id: given.chosen}
