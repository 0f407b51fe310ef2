"""Remembers how allocations ended, for `explain`: the record has live allocations only."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.allocations import OWNER_CHARACTERS
from topoalign.core.model.errors import clean
from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased, LedgerEvent, Owner
from topoalign.core.model.ids import AllocationID

REMEMBERED = 1_000
"""Ended allocations that are kept."""
MOST_EXPLAINED = 3
"""Ended allocations of one pod that `explain` names, the newest."""

REASONS = {
    "released": "it was released on request",
    "gone": "its container ended",
    "orphan": "its container ended while the allocator did not run",
    "superseded": "the kubelet allocated its devices again",
    "displaced": "the kubelet allocated its devices to another container although its own was not seen to end",
}


class Release(NamedTuple):
    """One allocation that has ended."""

    allocation: Allocation
    reason: str
    successors: tuple[AllocationID, ...]
    """Allocations that got its devices instead."""


class ReleaseLog:
    """Remembers the `REMEMBERED` newest releases, for `explain`. They are lost with the process."""

    def __init__(self) -> None:
        self._ended: OrderedDict[AllocationID, Release] = OrderedDict()
        self.origins: OrderedDict[AllocationID, AllocationID] = OrderedDict()
        """Remainder of a partly released record -> that record, which may be a remainder itself; the newest of them."""

    def left_over(self, rests: Mapping[AllocationID, AllocationID]) -> None:
        """Remembers the remainders of records."""
        self.origins.update(rests)
        while len(self.origins) > REMEMBERED:
            self.origins.popitem(last=False)

    def note(self, live: Mapping[AllocationID, Allocation], events: Sequence[LedgerEvent]) -> None:
        """Remembers each allocation out of `live` that these facts end; the facts were recorded together."""
        granted = [event.allocation for event in events if isinstance(event, AllocationGranted)]
        for event in events:
            if isinstance(event, AllocationReleased) and (gone := live.get(event.allocation)) is not None:
                successors = tuple(new.id for new in granted if not new.device_ids.isdisjoint(gone.device_ids))
                self._ended[gone.id] = Release(gone, event.reason, successors)
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def explain(self, target: str, live: Mapping[AllocationID, Allocation]) -> tuple[str, ...]:
        """Returns a sentence for each ended allocation of this id, or of a pod of this name; newest first."""
        found = [each for each in reversed(self._ended.values()) if target in names_of(each.allocation)]
        return tuple(self._sentence(each, live) for each in found[:MOST_EXPLAINED])

    def _sentence(self, release: Release, live: Mapping[AllocationID, Allocation]) -> str:
        gone = release.allocation
        devices = ", ".join(sorted(gone.device_ids))
        uid = f", pod UID {gone.pod_uid}" if gone.pod_uid else ""
        ended = f"{container_title(gone.owner)} had {devices} (allocation {gone.id}{uid}), and no longer holds it: "
        ended += REASONS.get(release.reason, release.reason)
        successors = [live[name] for name in release.successors if name in live]
        if successors and release.reason in ("superseded", "displaced"):
            ended += "; now " + " and ".join(
                f"{container_title(new.owner)} has it (allocation {new.id})" for new in successors
            )
        return clean(ended, 500)


def names_of(allocation: Allocation) -> set[str]:
    """Returns the names by which `explain` finds an allocation: its id, and `namespace/pod` if its owner is known."""
    owner = allocation.owner
    return {allocation.id} if owner is None else {allocation.id, f"{owner.namespace}/{owner.pod}"}


def container_title(owner: Owner | None) -> str:
    """Returns the name of a container for logs, readiness and explanations: `NAMESPACE/POD CONTAINER`."""
    if owner is None:
        return "a container not known yet"
    return clean(f"{owner.namespace}/{owner.pod} {owner.container}", OWNER_CHARACTERS)
