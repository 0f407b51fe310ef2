"""
Decides whether the container of an allocation has ended. Uses three sources of the kubelet.

- PodResources reports the devices of active pods. A kubelet that has just started reports fewer pods. A kubelet that
  has lost its checkpoint reports containers without their devices.
- The checkpoint has init containers and pod UIDs. It keeps entries of deleted pods until its next write. So an entry
  that existed before a grant does not belong to the new allocation.
- The pod directories show deleted pods: a deleted pod has no directory, or none of its volumes is mounted.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from topoalign.allocator.ports import KubeletListing, Place, ReportedDevices, ResourceEntry
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName

NEVER: tuple[int, ...] = ()
"""The version of a missing checkpoint."""
UNWRITTEN_SECONDS = 5.0
"""Grant age from which an unchanged checkpoint is used. The kubelet writes it when a container has all its devices."""


Kubelet = tuple[int, ...]
"""Identifies a run of the kubelet (`KubeletListing.kubelet`)."""


class Grant(NamedTuple):
    """The time and the checkpoint version at which an allocation was granted."""

    written: tuple[int, ...]
    """The version of the checkpoint at the kubelet's call."""
    at: float
    """Monotonic seconds."""


class Rest(NamedTuple):
    """The remainder of an allocation that others have replaced."""

    allocation: Allocation
    former: AllocationID
    """The replaced allocation."""


@dataclass
class Evidence:
    """What the kubelet has reported, and has written to its checkpoint, about one allocation."""

    reported_by: Kubelet | None = None
    """The last run of the kubelet that reported it."""
    written_by: Kubelet | None = None
    """The last run of the kubelet that wrote a checkpoint entry for the pod with a device of the allocation."""
    grant: Grant | None = None
    """The grant. None if it was before the start of this process."""


class LivenessCheck:
    """Decides from the kubelet's answers whether allocations have ended. Its evidence is lost when the process ends."""

    def __init__(self) -> None:
        self._evidence: defaultdict[AllocationID, Evidence] = defaultdict(Evidence)

    def granted(self, new: Iterable[Allocation], asked: Collection[Allocation], grant: Grant) -> None:
        """
        Stores the time and the checkpoint version of these grants. An allocation without an owner that is not in
        `asked` is a remainder. Its devices are already in the checkpoint, until its pod is deleted.
        """
        names = {each.id for each in asked}
        for each in new:
            if each.id in names or each.owner is None:
                self._evidence[each.id].grant = grant if each.id in names else grant._replace(written=NEVER)

    def inherit(self, rests: Iterable[Rest]) -> None:
        """Copies the evidence of the replaced allocations to their remainders."""
        for rest in rests:
            former = self._evidence[rest.former]
            own = self._evidence[rest.allocation.id]
            own.reported_by = former.reported_by or own.reported_by
            own.written_by = former.written_by or own.written_by

    def shown(self, allocation: AllocationID, kubelet: Kubelet) -> None:
        """Stores that this run of the kubelet has reported the allocation."""
        self._evidence[allocation].reported_by = kubelet

    def was_reported(self, allocation: AllocationID, kubelet: Kubelet) -> bool:
        """Whether this run of the kubelet was the last to report the allocation."""
        return self._evidence[allocation].reported_by == kubelet

    def note_written(self, allocations: Iterable[Allocation], listing: KubeletListing) -> None:
        """Stores for which allocations this kubelet run wrote entries. Those that it later removes have ended."""
        new = [each for each in allocations if each.pod_uid and self._evidence[each.id].written_by != listing.kubelet]
        if not listing.is_own or not new:
            return
        entries = {(part.pod_uid, part.resource, device) for part in listing.parts for device in part.devices}
        for each in new:
            if any((each.pod_uid, *place) in entries for place in kubelet_places(each)):
                self._evidence[each.id].written_by = listing.kubelet

    def forget_all_but(self, live: Collection[AllocationID]) -> None:
        """Deletes the evidence of all allocations that are not in `live`."""
        for name in self._evidence.keys() - live:
            del self._evidence[name]

    def uid_of(
        self, allocation: Allocation, holdings: Sequence[ReportedDevices | None], listing: KubeletListing
    ) -> str:
        """Returns the UID of the only pod that is reported with all devices of an allocation; empty if unknown."""
        uids = {holding.pod_uid if holding is not None else "" for holding in holdings}
        return uids.pop() if len(uids) == 1 and self.is_written_since(allocation, listing) else ""

    def is_kept(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """Whether the checkpoint has a device of the allocation for an existing pod. True if it cannot be read."""
        held = kubelet_places(allocation)
        if listing.checkpoint is None:
            return True
        if listing.checkpoint.isdisjoint(held):
            return False
        entries = checkpoint_entries_of(allocation, listing)
        return not entries or not all(listing.is_gone(part.pod_uid) for part in entries)

    def is_gone(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """Whether the allocation's pod is known and is deleted. False if the pod directories cannot be read."""
        if allocation.pod_uid:
            return listing.is_gone(allocation.pod_uid)
        if self._evidence[allocation.id].grant is None or not self.is_written_since(allocation, listing):
            return False
        entries = checkpoint_entries_of(allocation, listing)
        return bool(entries) and all(listing.is_gone(part.pod_uid) for part in entries)

    def has_ended(self, allocation: Allocation, listing: KubeletListing, at: float) -> bool:
        """
        Whether the container has certainly ended. It must be missing from this listing, which was read at monotonic
        seconds `at`. In addition, one of these must be true:

        - The same run of the kubelet reported it before.
        - Its pod is deleted.
        - It has no owner, it was granted by this process, and the checkpoint has its devices for no existing pod. The
          checkpoint must have been written after the grant, or the grant must be at least `UNWRITTEN_SECONDS` old.
        """
        if listing.shows(allocation):
            return False
        evidence = self._evidence[allocation.id]
        if evidence.reported_by == listing.kubelet or self.is_gone(allocation, listing):
            return True
        if allocation.owner is not None or evidence.grant is None or self.is_kept(allocation, listing):
            return False
        late = at - evidence.grant.at >= UNWRITTEN_SECONDS
        return late or self.is_written_since(allocation, listing)

    def is_dropped(self, ended: Allocation, at: float, offered: Set[DeviceID] = frozenset()) -> bool:
        """
        Whether the kubelet has also released an ended allocation's devices. Before a pod is admitted, it has no
        directory, so its first containers look like a deleted pod's. Devices that the kubelet has `offered` are free.
        """
        grant = self._evidence[ended.id].grant
        is_late = grant is None or at - grant.at >= UNWRITTEN_SECONDS
        return ended.owner is not None or is_late or not offered.isdisjoint(ended.device_ids)

    def is_forgotten(self, allocation: Allocation, listing: KubeletListing, boot: str) -> bool:
        """
        Whether the kubelet has lost the devices of a container of this `boot` whose pod exists. False if the owner or
        the pod's UID is unknown or the pod directories cannot be read, because a pod that is created again with the
        same name would look the same.
        """
        if allocation.owner is None or not allocation.pod_uid or listing.directories is None:
            return False
        return self._is_unknown(allocation, listing, boot) and not listing.directories.is_gone(allocation.pod_uid)

    def has_returned(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether a container, including one from before a reboot, uses its devices although the kubelet has lost them. A
        settled kubelet (v1.36.3) lists active pods with their allocated devices. So a container that is listed without
        devices runs with those that it had before.
        """
        names_it = any(
            used.owner == allocation.owner
            and not any(used.devices.get(resource) for resource in allocation.from_kubelet)
            for used in listing.usage
        )
        return names_it and self.is_forgotten(allocation, listing, "")

    def is_waited_for(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether this run of the kubelet has not listed the pod yet, although the checkpoint has the pod's devices and a
        volume of the pod is mounted. An example is a kubelet that cannot reach the API server. It does not allocate
        these devices to another pod.
        """
        uid = allocation.pod_uid
        directories = listing.directories
        if not uid or directories is None or self._evidence[allocation.id].reported_by == listing.kubelet:
            return False
        is_listed = any(part.pod_uid == uid for part in checkpoint_entries_of(allocation, listing))
        return is_listed and not directories.is_gone(uid) and uid not in directories.unreadable

    def is_displaced(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether an unreported container may still run although the kubelet allocates its devices to another one. As
        `is_forgotten`, but for any boot. If the pod's UID is unknown or the pod directories cannot be read, the
        container must be listed by name.
        """
        owner = allocation.owner
        if owner is None or not self._is_unknown(allocation, listing, ""):
            return False
        return runs(owner, allocation.pod_uid, allocation.from_kubelet, listing)

    def _is_unknown(self, allocation: Allocation, listing: KubeletListing, boot: str) -> bool:
        """Whether an allocation of this `boot` was not reported by this kubelet run and is not in its checkpoint."""
        evidence = self._evidence[allocation.id]
        if listing.kubelet in (evidence.reported_by, evidence.written_by) or is_before(allocation, boot):
            return False
        if has_other_devices(allocation.owner, allocation.pod_uid, allocation.from_kubelet, listing):
            return False
        held = kubelet_places(allocation)
        if listing.checkpoint is None or listing.checkpoint.isdisjoint(held):
            return True
        entries = checkpoint_entries_of(allocation, listing)
        return bool(entries and allocation.pod_uid) and all(
            part.pod_uid not in ("", allocation.pod_uid) for part in entries
        )

    def is_written_since(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """Whether the checkpoint was written after the grant, so that its entries can belong to the allocation."""
        grant = self._evidence[allocation.id].grant
        return grant is None or grant.written != listing.written


def is_before(allocation: Allocation, boot: str) -> bool:
    """Whether an allocation was last confirmed before this boot of the node, so that its container no longer runs."""
    return bool(boot and allocation.boot) and allocation.boot != boot


def has_other_devices(
    owner: Owner | None, pod_uid: str, devices: Mapping[ResourceName, tuple[DeviceID, ...]], listing: KubeletListing
) -> bool:
    """
    Whether the kubelet reports exactly this container with other devices of these resources. In that case it was
    admitted again after the checkpoint was lost. A kubelet allocates no devices to a running container (v1.36.3,
    `isContainerAlreadyRunning`).
    """
    return bool(pod_uid) and any(
        holding.owner == owner and holding.pod_uid == pod_uid and holding.devices.isdisjoint(devices[holding.resource])
        for holding in listing.holdings
        if holding.resource in devices
    )


def runs(
    owner: Owner, pod_uid: str, devices: Mapping[ResourceName, tuple[DeviceID, ...]], listing: KubeletListing
) -> bool:
    """Whether a container may still run: its pod exists, and the kubelet does not report it with other devices."""
    if has_other_devices(owner, pod_uid, devices, listing):
        return False
    if pod_uid and listing.directories is not None:
        return not listing.directories.is_gone(pod_uid)
    return any(used.owner == owner for used in listing.usage)


def still_displaced(
    displaced: Iterable[Displaced], listing: KubeletListing | None, owner: Owner | None = None, pod_uid: str = ""
) -> tuple[Displaced, ...]:
    """Returns the displaced containers that may still run and are not `owner`. Returns all if `listing` is None."""
    if listing is None:
        return tuple(displaced)
    return tuple(
        each
        for each in displaced
        if runs(each.owner, each.pod_uid, each.devices, listing)
        and not (each.owner == owner and each.pod_uid in ("", pod_uid))
    )


def checkpoint_entries_of(allocation: Allocation, listing: KubeletListing) -> list[ResourceEntry]:
    """Returns the checkpoint entries that have any device of an allocation, without duplicates."""
    entries = listing.parts_by_place
    return [*dict.fromkeys(part for place in kubelet_places(allocation) for part in entries.get(place, ()))]


def kubelet_places(allocation: Allocation) -> list[Place]:
    """Returns the resource and ID of each device that the kubelet allocated. Co-allocated devices are not included."""
    return [(resource, device) for resource, ids in allocation.from_kubelet.items() for device in ids]


def reported_places(listing: KubeletListing | None) -> Set[Place]:
    """Returns the resource and ID of each device that PodResources reports with a container."""
    return listing.shown.keys() if listing is not None else frozenset()
