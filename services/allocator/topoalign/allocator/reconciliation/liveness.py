"""
Whether the container of an allocation has ended, by what the kubelet says in three places.

PodResources shows what active pods have; the checkpoint knows init containers and the UIDs of pods, and keeps entries of
pods that are gone until its next write; a pod that is gone has no directory, or its volumes are torn down. Each of them
alone may be wrong: a kubelet that has just started shows less than runs, and one that has lost its checkpoint shows
containers without their devices for as long as they run.

An entry of the checkpoint that was there before an allocation was granted is not the allocation's: the kubelet drops what
is over from its memory before it asks for the next devices, and from the file only when it writes that.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from topoalign.allocator.ports import KubeletListing, Place, ResourceEntry, ShownDevices
from topoalign.allocator.reconciliation.memory import Evidence, Grant, Kubelet, Rest
from topoalign.core.model.events import Allocation, Displaced, Owner
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName

NEVER: tuple[int, ...] = ()
"""The version of a checkpoint that is not there."""
UNWRITTEN_SECONDS = 5.0
"""The kubelet writes its checkpoint as soon as a container has the devices of all its resources."""


class LivenessCheck:
    """Judges by what the kubelet lists whether allocations have ended. What it remembers is not in the record."""

    def __init__(self) -> None:
        self._evidence: defaultdict[AllocationID, Evidence] = defaultdict(Evidence)

    def granted(self, new: Iterable[Allocation], asked: Collection[Allocation], grant: Grant) -> None:
        """
        Remembers when and at which checkpoint these allocations were granted. What was not `asked` for is left over of
        a record that made way: the devices of an init container are in the checkpoint since before, and go out of it
        with their pod.
        """
        names = {each.id for each in asked}
        for each in new:
            if each.id in names:
                self._evidence[each.id] = self._evidence[each.id].give(grant)
            elif each.owner is None:
                self._evidence[each.id] = self._evidence[each.id].give(grant._replace(written=NEVER))

    def inherit(self, rests: Iterable[Rest]) -> None:
        """Copies what is remembered of former allocations to what is left of them."""
        for rest in rests:
            self._evidence[rest.allocation.id] = self._evidence[rest.allocation.id].inherit(self._evidence[rest.former])

    def shown(self, allocation: AllocationID, kubelet: Kubelet) -> None:
        """Remembers that this run of the kubelet has shown the allocation."""
        self._evidence[allocation] = self._evidence[allocation].show(kubelet)

    def was_shown(self, allocation: AllocationID, kubelet: Kubelet) -> bool:
        """Whether this run of the kubelet is the last that has shown the allocation."""
        return self._evidence[allocation].shown_by == kubelet

    def note_written(self, allocations: Iterable[Allocation], listing: KubeletListing) -> None:
        """
        Remembers for which allocations this kubelet wrote entries of their pods: what it drops of them later has ended.
        """
        new = [each for each in allocations if each.pod_uid and self._evidence[each.id].written_by != listing.kubelet]
        if not listing.is_own or not new:
            return
        entries = {(part.pod_uid, part.resource, device) for part in listing.parts for device in part.devices}
        for each in new:
            if any((each.pod_uid, *place) in entries for place in kubelet_places(each)):
                self._evidence[each.id] = self._evidence[each.id].write(listing.kubelet)

    def forget_all_but(self, live: Collection[AllocationID]) -> None:
        """Forgets what is remembered of allocations that are not live any more."""
        for name in self._evidence.keys() - live:
            del self._evidence[name]

    def uid_of(self, allocation: Allocation, holdings: Sequence[ShownDevices | None], listing: KubeletListing) -> str:
        """The UID of the one pod that is shown with all devices of an allocation; empty: not known."""
        uids = {holding.pod_uid if holding is not None else "" for holding in holdings}
        return uids.pop() if len(uids) == 1 and self.is_written_since(allocation, listing) else ""

    def is_kept(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether the checkpoint gives a device of the allocation to a pod that is not gone; True where it cannot be read.
        """
        held = kubelet_places(allocation)
        if listing.checkpoint is None:
            return True
        if listing.checkpoint.isdisjoint(held):
            return False
        entries = checkpoint_entries_of(held, listing)
        directories = listing.directories
        return directories is None or not entries or not all(directories.is_gone(part.pod_uid) for part in entries)

    def is_kept_in_part(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether the checkpoint gives some devices of the allocation to pods that are not gone, and others of the same
        resource to none: the kubelet lost count, and then refused the pod. False where the checkpoint cannot be read.
        """
        directories = listing.directories
        checkpoint = listing.checkpoint
        if checkpoint is None or not self.is_written_since(allocation, listing):
            return False

        def is_given_out(place: Place) -> bool:
            entries = listing.parts_by_place.get(place, ())
            gone = [directories is not None and directories.is_gone(part.pod_uid) for part in entries]
            return not all(gone) if gone else place in checkpoint

        return any(
            0 < sum(is_given_out((resource, device)) for device in devices) < len(devices)
            for resource, devices in allocation.from_kubelet.items()
        )

    def is_gone(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """Whether the allocation's pod is known, and gone by its directory. False where the directories cannot be read."""
        directories = listing.directories
        if directories is None:
            return False
        if allocation.pod_uid:
            return directories.is_gone(allocation.pod_uid)
        if self._evidence[allocation.id].grant is None or not self.is_written_since(allocation, listing):
            return False
        entries = checkpoint_entries_of(kubelet_places(allocation), listing)
        return bool(entries) and all(directories.is_gone(part.pod_uid) for part in entries)

    def has_ended(self, allocation: Allocation, listing: KubeletListing, at: float) -> bool:
        """
        Whether a container, not shown by this listing of monotonic second `at`, has certainly ended: the same kubelet has
        shown it before, its pod is gone, or the checkpoint has given it to nobody and was written since the grant, or was
        not for `UNWRITTEN_SECONDS`: then another resource of the container was refused.
        """
        if listing.shows(allocation):
            return False
        evidence = self._evidence[allocation.id]
        if evidence.shown_by == listing.kubelet or self.is_gone(allocation, listing):
            return True
        if allocation.owner is not None or evidence.grant is None or self.is_kept(allocation, listing):
            return False
        late = at - evidence.grant.at >= UNWRITTEN_SECONDS
        return late or self.is_written_since(allocation, listing)

    def dropped(
        self,
        ended: Iterable[Allocation],
        available: Collection[DeviceID],
        must_include: Collection[DeviceID],
        at: float,
    ) -> list[Allocation]:
        """
        Those of the `ended` allocations that a kubelet has dropped, which offers these devices while it admits a pod.

        A pod has
        no directory before it is admitted, so what its first containers got seems to be of a pod that is gone; but the
        kubelet offers what it has dropped, and not what it has just given. What was bound was admitted before.
        """
        offered = {*available} - {*must_include}
        return [
            each
            for each in ended
            if each.owner is not None
            or (grant := self._evidence[each.id].grant) is None
            or at - grant.at >= UNWRITTEN_SECONDS
            or not offered.isdisjoint(each.device_ids)
        ]

    def is_forgotten(self, allocation: Allocation, listing: KubeletListing, boot: str) -> bool:
        """
        Whether the kubelet has lost what it gave to a container that is bound and was not seen to end.

        So it is if this kubelet has neither shown it nor written it down, its checkpoint has nothing of it, and its pod is
        there by its directory. Nothing from before `boot`, the node's last one, runs. False where there are no UIDs or
        directories: then a pod that was made anew under its name looks the same.
        """
        if allocation.owner is None or not allocation.pod_uid or listing.directories is None:
            return False
        return self._is_unknown(allocation, listing, boot) and not listing.directories.is_gone(allocation.pod_uid)

    def has_returned(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether a container, also one of a former boot, has its devices in this one, and the kubelet has lost them since. To
        be asked of a kubelet that has settled, and so has admitted all pods that it lists.

        One that it gives devices is shown with them, and one that it refuses is listed no more (v1.36.3 lists active pods);
        so one that it lists without devices was admitted with its former ones, and runs.
        """
        names_it = any(
            used.owner == allocation.owner
            and not any(used.devices.get(resource) for resource in allocation.from_kubelet)
            for used in listing.usage
        )
        return names_it and self.is_forgotten(allocation, listing, "")

    def is_waited_for(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether this kubelet has not listed a pod yet for which its checkpoint keeps the devices, and a volume of the pod is
        mounted: so it is while the API server is away, however long. The kubelet gives these devices to nobody else.
        """
        uid = allocation.pod_uid
        directories = listing.directories
        if not uid or directories is None or self._evidence[allocation.id].shown_by == listing.kubelet:
            return False
        is_listed = any(part.pod_uid == uid for part in checkpoint_entries_of(kubelet_places(allocation), listing))
        return is_listed and not directories.is_gone(uid) and uid not in directories.unreadable

    def is_displaced(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """
        Whether a container that is bound, and not shown, may run on although the kubelet gives its devices to another one.

        As `is_forgotten`, but of any boot: a kubelet may lose its checkpoint before a poll has shown what it admitted again
        after a reboot. Where there are no UIDs or directories, if the kubelet lists a container of its name.
        """
        owner = allocation.owner
        if owner is None or not self._is_unknown(allocation, listing, ""):
            return False
        return runs(owner, allocation.pod_uid, allocation.from_kubelet, listing)

    def _is_unknown(self, allocation: Allocation, listing: KubeletListing, boot: str) -> bool:
        """Whether the kubelet that answers has never told of an allocation of this boot, and its checkpoint does not."""
        evidence = self._evidence[allocation.id]
        if listing.kubelet in (evidence.shown_by, evidence.written_by) or is_before(allocation, boot):
            return False
        if has_other_devices(allocation.owner, allocation.pod_uid, allocation.from_kubelet, listing):
            return False
        held = kubelet_places(allocation)
        if listing.checkpoint is None or listing.checkpoint.isdisjoint(held):
            return True
        entries = checkpoint_entries_of(held, listing)
        return bool(entries and allocation.pod_uid) and all(
            part.pod_uid not in ("", allocation.pod_uid) for part in entries
        )

    def is_written_since(self, allocation: Allocation, listing: KubeletListing) -> bool:
        """Whether entries of the checkpoint can be the allocation's."""
        grant = self._evidence[allocation.id].grant
        return grant is None or grant.written != listing.written


def is_before(allocation: Allocation, boot: str) -> bool:
    """Whether an allocation was given, and last seen, before this boot of the node: its container does not run."""
    return bool(boot and allocation.boot) and allocation.boot != boot


def has_other_devices(
    owner: Owner | None, pod_uid: str, devices: Mapping[ResourceName, tuple[DeviceID, ...]], listing: KubeletListing
) -> bool:
    """
    Whether the kubelet shows this very container with none of these devices, and with others of their resources.

    A kubelet that starts gives nothing to a container that it finds running (v1.36.3, `isContainerAlreadyRunning`), so one
    that it has given other devices to was not running with these: it was admitted once more, after a lost checkpoint. It
    finds none running while the container runtime is down, which docs/limits.md tells of; the log names each such case.
    """
    return bool(pod_uid) and any(
        holding.owner == owner and holding.pod_uid == pod_uid and holding.devices.isdisjoint(devices[holding.resource])
        for holding in listing.holdings
        if holding.resource in devices
    )


def runs(
    owner: Owner, pod_uid: str, devices: Mapping[ResourceName, tuple[DeviceID, ...]], listing: KubeletListing
) -> bool:
    """
    Whether a container may run with these devices: its pod is there by its directory, or, where that is not known, by the
    names that the kubelet lists, and it is not shown with others.
    """
    if has_other_devices(owner, pod_uid, devices, listing):
        return False
    if pod_uid and listing.directories is not None:
        return not listing.directories.is_gone(pod_uid)
    return any(used.owner == owner for used in listing.usage)


def still_displaced(
    displaced: Iterable[Displaced], listing: KubeletListing | None, owner: Owner | None = None, pod_uid: str = ""
) -> tuple[Displaced, ...]:
    """
    Those of the displaced containers that may run, and all where the kubelet cannot be asked (None). One of the name
    and the UID of the new owner, or of its name and without a UID, is taken to be its former self.
    """
    if listing is None:
        return tuple(displaced)
    return tuple(
        each
        for each in displaced
        if runs(each.owner, each.pod_uid, each.devices, listing)
        and not (each.owner == owner and each.pod_uid in ("", pod_uid))
    )


def checkpoint_entries_of(held: Collection[Place], listing: KubeletListing) -> list[ResourceEntry]:
    """The entries of the checkpoint that have any of these devices, each once."""
    entries = listing.parts_by_place
    return [*dict.fromkeys(part for place in held for part in entries.get(place, ()))]


def kubelet_places(allocation: Allocation) -> list[Place]:
    """Resource and device of everything that the kubelet gave an allocation, which its companions are not."""
    return [(resource, device) for resource, ids in allocation.from_kubelet.items() for device in ids]


def shown_of(listing: KubeletListing | None) -> Set[Place]:
    """Resource and device of everything that PodResources shows with a container."""
    return listing.shown.keys() if listing is not None else frozenset()
