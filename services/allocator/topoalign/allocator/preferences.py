"""
Where the kubelet took other devices than were preferred.

It need not follow GetPreferredAllocation, and an Allocate does not say which preference it follows: that is the last one for
its resource, if it was given a moment ago and for such a set.
"""

from collections.abc import Sequence
from typing import NamedTuple

from topoalign.core.model.events import Allocation
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.ports import Clock

FOLLOWED_SECONDS = 10.0
"""For so long an Allocate may follow from a preference; the kubelet needs milliseconds."""


class Preference(NamedTuple):
    """What was preferred, of what, and when (monotonic seconds)."""

    available: frozenset[DeviceID]
    chosen: tuple[DeviceID, ...]
    at: float


class Preferences:
    """The newest preference for each resource."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[ResourceName, Preference] = {}

    def give(self, resource: ResourceName, available: Sequence[DeviceID], chosen: tuple[DeviceID, ...]) -> None:
        self._newest[resource] = Preference(frozenset(available), chosen, self._clock.monotonic())

    def deviations(
        self, resource: ResourceName, granted: Sequence[Allocation]
    ) -> dict[AllocationID, tuple[DeviceID, ...]]:
        """What was preferred, where the last preference was for such a set and another one was taken."""
        given = self._newest.pop(resource, None)
        if given is None or len(granted) != 1 or self._clock.monotonic() - given.at > FOLLOWED_SECONDS:
            return {}
        taken = granted[0].device_ids
        if len(taken) != len(given.chosen) or not taken <= given.available or taken == set(given.chosen):
            return {}
        return {granted[0].id: given.chosen}
