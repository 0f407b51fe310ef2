"""
Decides whether a container can start with its vGPU slots or vcuda units.

Allocate does not identify the container. So if two containers request the same number of slots, one may get the slots
reserved for the other. When a container starts, its pod is known. The start is refused if its amounts differ from its
reservation, or its slots are reserved for another pod. Example with ten slots, 100 cores and 40960 MiB per GPU:

    reserved for a: GPU-0::3 with 60 cores and 6000 MiB; b has no reservation; the kubelet calls Allocate for b first
    b gets GPU-0::3, then a gets another slot with an equal part (10 cores and 4096 MiB): neither starts

A container is checked as soon as the kubelet reports it. Before that, the reservation may end or the agent may restart.
So the allocation stores the pods of the reservation (`Allocation.reserved_for`). PodResources does not report init
containers. If only init containers have slots, their pod is known only from the checkpoint.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce

import msgspec

from topoalign.allocator.allocate.claims import NodeView
from topoalign.allocator.allocate.slots import SlotClaim
from topoalign.allocator.allocate.units import units_held
from topoalign.allocator.ledger.ledger import Binding, Ledger
from topoalign.allocator.ports import KubeletListing, Poll, ResourceEntry
from topoalign.allocator.reconciliation.liveness import checkpoint_entries_of
from topoalign.core.demand.shares import ShareFields, check_units_asked
from topoalign.core.hints.device_hints import DeviceProvider
from topoalign.core.model.allocations import Allocation, Owner, amounts_of
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.decisions import Explanation, Refusal
from topoalign.core.model.errors import NoFit, Unavailable, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.requests import PodRequest
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.queries import offers_in_slots
from topoalign.core.sharing.choosers import check_gpus
from topoalign.core.sharing.reserved_shares import bounds_for, is_within
from topoalign.core.sharing.share_refusals import WholeGpuInUse
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.share_amounts import Holder, equal_part, exclusive_conflicts, larger_amount, sum_amounts
from topoalign.runtime.recent_dict import RecentDict

STARTED_AGAIN = "the kubelet starts the container again; check that its device plugin directory can be read"
"""The remedy if the kubelet does not report the container yet."""


def reserved_owner(reserved: NodeReservations, pod_uid: str, container: str) -> Owner | None:
    """Returns the names of a container and its pod from the pod's reservation, or None if there is none."""
    kept = next((each for each in reserved.reservations if each.pod_uid == pod_uid), None)
    if kept is None or not container:
        return None
    return Owner(namespace=kept.namespace, pod=kept.pod, container=ContainerName(container))


MOST_LOGGED = 1_000
"""Maximum number of refusals to remember, so that the kubelet's retries are not recorded again."""


class ContainerStarts:
    """Records a refused start as an event of the pod, once per container and reason."""

    def __init__(self, ledger: Ledger, view: NodeView) -> None:
        self._ledger = ledger
        self._view = view
        self._logged = RecentDict[tuple[object, str], None](MOST_LOGGED)

    def _record(self, name: object, owner: Owner | None, misfit: NoFit) -> None:
        if (name, misfit.code) in self._logged or owner is None:
            return
        self._logged[name, misfit.code] = None
        refusal = Refusal(
            reason="PreStartContainer",
            code=misfit.code,
            finding=misfit.finding,
            remedy=misfit.remedy,
            container=owner.container,
            provider=DeviceProvider.name,
            explanation=Explanation(),
        )
        self._ledger.refuse(PodRequest(namespace=owner.namespace, name=owner.pod, containers=()), refusal)


class NotAsReserved(NoFit):
    """
    Raised for a container whose slots differ from its reservation or are reserved for another pod.

    Remedy: Delete the pod, and use one scheduler for all pods.
    """

    def __init__(self, slots: Sequence[DeviceID], held: Amount, reserved: str) -> None:
        super().__init__(
            f"container with {describe_amount(held)} of each of {quoted(sorted(map(base_of, slots)))}: {reserved}",
            "delete the pod; a pod that bypassed the scheduler may have taken its slots: use one scheduler for all pods",
        )


class SlotStarts(ContainerStarts):
    """Checks containers with vGPU slots that are about to start."""

    def __init__(self, ledger: Ledger, grants: SlotClaim) -> None:
        """`grants`: has the slots that replace reserved ones (`SlotClaim.moved`)."""
        super().__init__(ledger, grants.view)
        self._grants = grants
        self._judged: dict[tuple[AllocationID, str], NotAsReserved | None] = {}
        """
        Allocation and pod UID -> result of the check. If the UID is empty, only the pod's namespace and name are known.
        A pod that is created again has the same ones.
        """

    def observe(self) -> None:
        """
        Checks containers whose owners are known now. If a container has the reserved amounts, this is recorded, because
        the container may restart after the reservation has ended. Raises StateFault.
        """
        live = self._ledger.state.allocations
        for name in [each for each in self._judged if each[0] not in live]:
            del self._judged[name]
        for each in [*live.values()]:
            is_other_pods = each.reserved_for or each.denied
            name = (each.id, each.pod_uid)
            is_open = is_other_pods or name not in self._judged or self._judged[name] is not None
            if each.owner is not None and is_open and self._is_offered(each):
                misfit = self._judge(each)
                if misfit is None and is_other_pods and self._has_bounds(each):
                    self._ledger.bind([Binding(each.id, each.owner, each.pod_uid, each.displaced, as_reserved=True)])

    def check(self, devices: Sequence[DeviceID], listing: KubeletListing) -> None:
        """Checks the slots of a starting container. Raises NotAsReserved, or Unavailable if the owner is unknown."""
        self.observe()
        owned = self._ledger.state.ownership
        live = self._ledger.state.allocations
        for each in (live[name] for name in owned.overlapping(map(owned.holding, devices))):
            if each.device_ids.isdisjoint(devices):
                continue
            listed = as_listed(each, listing)
            if self._is_offered(each):
                misfit = self._judge(listed, is_read=listing.checkpoint is not None)
            else:
                misfit = self._judged.get((each.id, listed.pod_uid))
            if misfit is not None:
                owner = listed.owner
                if owner is not None and not owner.pod:  # the checkpoint has the pod's UID but not its name
                    owner = reserved_owner(self._view.reserved, listed.pod_uid, owner.container)
                self._record(listed.id, owner, misfit)
                raise misfit

    def _is_offered(self, record: Allocation) -> bool:
        return bool(record.slots) and all(
            base_of(slot) in offers_in_slots(self._ledger.state.hardware) for slot in record.slots
        )

    def _judge(self, record: Allocation, *, is_read: bool = False) -> NotAsReserved | None:
        """Checks an allocation and keeps the result after the reservation ends. A later match replaces a mismatch."""
        name = (record.id, record.pod_uid)
        found = self._misfit(record, is_read=is_read)
        if (before := self._judged.get(name)) is None or (found is None and self._has_bounds(record)):
            self._judged[name] = found
            return found
        return before

    def _misfit(self, record: Allocation, *, is_read: bool = False) -> NotAsReserved | None:
        """
        Returns why an allocation does not match the current reservations, or None if it does. `is_read`: whether the
        checkpoint, which has pod UIDs, could be read. Raises Unavailable if the owner must be known but is unknown.
        """
        for resource, slots in record.devices.items():
            amounts = {slot: record.slots[slot] for slot in slots if slot in record.slots}
            if not amounts:
                continue
            most = reduce(larger_amount, amounts.values())
            kept = [*self._kept(resource)]
            own = next((reservation for reservation, *_ in kept if is_reserved_for_owner(reservation, record)), None)
            name = None if record.owner is None else record.owner.container
            bounds = None if own is None else bounds_for(own, name, resource)
            if bounds is not None:
                least, highest = bounds
                # A MIG instance needs at least as much memory.
                if all(
                    amount.memory >= least.memory if slot in record.instances else is_within(least, amount, highest)
                    for slot, amount in amounts.items()
                ):
                    continue
                return NotAsReserved(slots, most, f"{describe_amount(bounds[1])} are reserved for it")
            unequal = () if own is not None else self._unequal(record, amounts)  # any container can have equal parts
            for reservation, container, kept_slots in kept:
                if not kept_slots.isdisjoint(unequal):  # a container that reuses slots may have fewer or more
                    if record.owner is None:
                        raise unknown_owner(slots)
                    whose = f"{reservation.namespace}/{reservation.pod}, container {container.container}"
                    return NotAsReserved(slots, most, f"they are reserved for {quoted([whose])}")
            is_other_pods = record.reserved_for and record.pod_uid not in record.reserved_for
            if is_other_pods or (record.denied and record.pod_uid in ("", record.denied)):
                if record.pod_uid:
                    before = "others were reserved for it, or " if not self._unequal(record, amounts) else ""
                    return NotAsReserved(slots, most, f"{before}they were reserved for another pod")
                if is_read:
                    raise unknown_owner(slots)
        return None

    def _unequal(self, record: Allocation, slots: Iterable[DeviceID]) -> list[DeviceID]:
        """Returns the slots whose amounts are not equal parts. Slots of MIG instances always differ and are skipped."""
        hardware = self._ledger.state.hardware
        instances = record.instances
        return [
            slot
            for slot in slots
            if slot not in instances and record.slots[slot] != equal_part(hardware, base_of(slot))
        ]

    def _has_bounds(self, record: Allocation) -> bool:
        """Whether the pod's UID is known and there is a reservation for exactly this container."""
        name = record.owner.container if record.owner is not None else None
        return record.pod_uid != "" and all(
            any(
                is_reserved_for_owner(each, record) and bounds_for(each, name, resource) is not None
                for each, *_ in self._kept(resource)
            )
            for resource, slots in record.devices.items()
            if not record.slots.keys().isdisjoint(slots)
        )

    def _kept(self, resource: ResourceName) -> Iterator[tuple[Reservation, ReservedContainer, frozenset[DeviceID]]]:
        """Yields the valid reservations with each container and its reserved slots or their replacement."""
        reserved = self._view.reserved
        now = self._view.now
        for each in reserved.reservations:
            for container in each.containers if reserved.until[each.pod_uid] > now else ():
                if slots := container.devices.get(resource):
                    moved = self._grants.moved.get((each.pod_uid, container.container))
                    yield each, container, frozenset(slots) if moved is None else moved.slots


def unknown_owner(slots: Iterable[DeviceID]) -> Unavailable:
    """Returns the error for slots whose owner is unknown."""
    finding = f"the kubelet does not report yet which container has the slots of {quoted(sorted(map(base_of, slots)))}"
    return Unavailable(finding, STARTED_AGAIN)


def as_listed(record: Allocation, listing: KubeletListing) -> Allocation:
    """
    Returns the allocation. If it has no owner, adds the owner and the pod UID from the checkpoint. This owner has no
    pod name. If several containers of the pod have the devices, it has no container name either.
    """
    if record.owner is not None:
        return record
    entries = checkpoint_entries_of(record, listing)
    holders = {(entry.pod_uid, entry.container) for entry in entries if not listing.is_gone(entry.pod_uid)}
    uids = {uid for uid, _ in holders}
    if len(uids) != 1 or "" in uids:
        return record
    container = ContainerName(next(name for _, name in holders) if len(holders) == 1 else "")
    owner = Owner(namespace=Namespace(""), pod=PodName(""), container=container)
    return msgspec.structs.replace(record, owner=owner, pod_uid=uids.pop())


def is_reserved_for_owner(reservation: Reservation, record: Allocation) -> bool:
    """Whether a reservation is for the pod of an allocation: by UID, or by namespace and name if the UID is unknown."""
    if record.pod_uid:
        return reservation.pod_uid == record.pod_uid
    owner = record.owner
    return owner is not None and (owner.namespace, owner.pod) == (reservation.namespace, reservation.pod)


def describe_amount(amount: Amount) -> str:
    """Formats an amount: `60 cores and 6000 MiB`."""
    return f"{amount.cores} cores and {amount.memory // MIB} MiB"


# A share in vcuda units has two halves: computing time and memory. The kubelet allocates them one after the other, and
# Allocate does not identify the container. When a container starts, the kubelet's checkpoint has all its devices. The
# start is refused:
# - if the halves are not on the same GPU or GPUs;
# - if the container has a whole GPU and another container has units of it, or vice versa.
#
# Checkpoint entries are used until their pods are deleted. The app containers of a pod reuse the units of its init
# containers, which PodResources does not report. So two containers of a pod conflict only if PodResources reports both.
# If the kubelet has lost the devices of a running container, those in the ledger are used.
#
# The ID of a unit contains its kind and its GPU, so the check does not depend on the current configuration.


Amounts = Mapping[DeviceID, Amount]
"""GPU -> the amount of it that a container has."""


class ShareStarts(ContainerStarts):
    """Checks containers with vcuda units that are about to start."""

    def check(self, resource: ResourceName, units: Sequence[DeviceID], poll: Poll) -> None:
        """Checks the units of a starting container. Raises ShareSplit, InvalidShare, WholeGpuInUse, Unavailable."""
        asked = frozenset(units)
        field = f"limits[{resource}]"
        listing = poll.listing
        parts = live_unit_entries(listing)
        # PreStartContainer lists only the units, and several containers of a pod may have the same ones.
        starting = dict.fromkeys(
            Holder(part.pod_uid, part.container)
            for part in parts
            if part.resource == resource and part.devices == asked
        )
        if not starting:
            raise Unavailable(
                f"the kubelet's checkpoint does not have the {len(asked)} {resource} of the container yet",
                STARTED_AGAIN,
            )
        for mine in starting:
            try:
                own = amounts_of_holder(mine, parts)
                check_units_asked(sum_amounts(own.values()), ShareFields(field, field))
                check_gpus(own, field, gpus=None)
                for name, theirs in self._others(mine, parts, poll):
                    if gpus := exclusive_conflicts(own, theirs):
                        raise WholeGpuInUse(gpus, name, field)
            except NoFit as misfit:
                names = [each.owner for each in listing.holdings if mine.pod and each.pod_uid == mine.pod]
                owner = reserved_owner(self._view.reserved, mine.pod, mine.container)
                if names:  # PodResources reports a container of the pod
                    name = ContainerName(mine.container)
                    owner = Owner(namespace=names[0].namespace, pod=names[0].pod, container=name)
                self._record(mine, owner, misfit)
                raise

    def _others(self, mine: Holder, parts: Sequence[ResourceEntry], poll: Poll) -> Iterator[tuple[str, Amounts]]:
        """Yields the name and the amounts of each other container that can conflict."""
        shown = {Holder(holding.pod_uid, holding.owner.container): holding.owner for holding in poll.listing.holdings}
        listing = poll.listing
        every = [each for each in self._ledger.state.allocations.values() if each.amounts]
        records = [each for each in every if not self._view.liveness.has_ended(each, listing, poll.at)]
        held = {holder: {*units} for holder, units in units_held(records, every, listing, self._view.liveness).items()}
        for part in parts:
            held.setdefault(Holder(part.pod_uid, part.container), set()).update(part.devices)
        for each, units in held.items():
            if each == mine or not each.pod or (each.pod == mine.pod and not {each, mine} <= shown.keys()):
                continue
            try:
                check_gpus(amounts_of_holder(each, parts), gpus=None)
            except NoFit:
                continue  # its halves are on different GPUs, so it cannot have started
            owner = shown.get(each)
            named = " ".join(each) if owner is None else f"{owner.namespace}/{owner.pod}, container {owner.container},"
            yield named, amounts_of(units)


def live_unit_entries(listing: KubeletListing) -> tuple[ResourceEntry, ...]:
    """Returns the checkpoint entries with vcuda units, except those of deleted pods."""
    return tuple(part for part in listing.parts if amounts_of(part.devices) and not listing.is_gone(part.pod_uid))


def entries_of_holder(holder: Holder, parts: Collection[ResourceEntry]) -> Iterator[ResourceEntry]:
    """Yields the entries of one container."""
    return (part for part in parts if (part.pod_uid, part.container) == holder)


def amounts_of_holder(holder: Holder, parts: Collection[ResourceEntry]) -> Amounts:
    """Returns GPU -> the amount of it that a container has according to these entries."""
    return amounts_of(unit for part in entries_of_holder(holder, parts) for unit in part.devices)
