"""How allocations ended, kept in memory for `explain`: the record has only those that live."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from topoalign.core.model.allocations import OWNER_CHARACTERS
from topoalign.core.model.errors import clean
from topoalign.core.model.events import Allocation, AllocationGranted, AllocationReleased, LedgerEvent, Owner
from topoalign.core.model.ids import AllocationID

REMEMBERED = 1_000
"""Allocations."""
TOLD = 3
"""Of one pod, the newest."""

REASONS = {
    "released": "it was released on request",
    "gone": "its container ended",
    "orphan": "its container ended while the allocator did not run",
    "superseded": "the kubelet gave its devices anew",
    "displaced": "the kubelet gave its devices to another container although its own was not seen to end",
}


class Release(NamedTuple):
    """One allocation that has ended."""

    allocation: Allocation
    reason: str
    successors: tuple[AllocationID, ...]
    """Who was granted its devices in its place."""


class Endings:
    """Remembers the `REMEMBERED` newest endings, for `explain`. They are lost with the process."""

    def __init__(self) -> None:
        self._ended: OrderedDict[AllocationID, Release] = OrderedDict()
        self.origins: OrderedDict[AllocationID, AllocationID] = OrderedDict()
        """What is left of a record that made way in part -> that record, maybe a rest itself; the newest of them."""

    def left_over(self, rests: Mapping[AllocationID, AllocationID]) -> None:
        """Remembers what is left of which records."""
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

    def told(self, target: str, live: Mapping[AllocationID, Allocation]) -> tuple[str, ...]:
        """A sentence for each allocation of this id, or of a pod of this name, that has ended; newest first."""
        found = [each for each in reversed(self._ended.values()) if target in names_of(each.allocation)]
        return tuple(self._sentence(each, live) for each in found[:TOLD])

    def _sentence(self, ending: Release, live: Mapping[AllocationID, Allocation]) -> str:
        gone = ending.allocation
        devices = ", ".join(sorted(gone.device_ids))
        uid = f", pod UID {gone.pod_uid}" if gone.pod_uid else ""
        ended = f"{container_title(gone.owner)} had {devices} (allocation {gone.id}{uid}), and no longer holds it: "
        ended += REASONS.get(ending.reason, ending.reason)
        successors = [live[name] for name in ending.successors if name in live]
        if successors and ending.reason in ("superseded", "displaced"):
            ended += "; now " + " and ".join(
                f"{container_title(new.owner)} has it (allocation {new.id})" for new in successors
            )
        return clean(ended, 500)


def names_of(allocation: Allocation) -> set[str]:
    """The names that `explain` finds an allocation by: its id, and `namespace/pod` where its owner is known."""
    owner = allocation.owner
    return {allocation.id} if owner is None else {allocation.id, f"{owner.namespace}/{owner.pod}"}


def container_title(owner: Owner | None) -> str:
    """The text that names a container in logs, readiness and explanations: `NAMESPACE/POD CONTAINER`."""
    if owner is None:
        return "a container not known yet"
    return clean(f"{owner.namespace}/{owner.pod} {owner.container}", OWNER_CHARACTERS)
