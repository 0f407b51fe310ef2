"""
Whether a container may start with its slots of GPUs.

Slots are of GPUs, and what a container holds of these is what is reserved with them. Allocate does not say for whom, so a
container may be given the slots of another one that waits for as many: one that came past the scheduler, say. When it
starts, its pod is known. One that has other amounts than are reserved for it, or has what is reserved for a container of
another pod, does not start. Example with ten slots, 100 cores and 40960 MiB each:

    reserved for a: GPU-0::3 with 60 cores and 6000 MiB; b has no reservation, and the kubelet asks for it first
    b is given GPU-0::3, and a then another slot with an equal part, 10 cores and 4096 MiB: neither starts

What a container has is judged as soon as the kubelet shows it, since its image may be pulled for longer than a reservation
lasts. A later container of a pod may take slots over from an init container that has more.

PodResources does not show init containers, so of slots that none but these have the checkpoint alone tells whose they are.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import msgspec

from topoalign.allocator.ledger.ledger import Ledger
from topoalign.allocator.ports import Listing
from topoalign.allocator.refused_starts import STARTED_AGAIN, record_refused_start, reserved_owner
from topoalign.allocator.slots import SlotGrants
from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.errors import NoFit, Unavailable, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, ContainerName, DeviceID, Namespace, PodName, ResourceName
from topoalign.core.model.reservations import Reservation, ReservedContainer
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.ports import Clock
from topoalign.core.state.reservations import NodeReservations
from topoalign.core.state.slot_amounts import equal_part, larger

MIB = 2**20


class NotAsReserved(NoFit):
    """Raised for a container that holds other amounts by its slots than are reserved for it, or those of another pod."""

    code = "NotAsReserved"

    def __init__(self, slots: Sequence[DeviceID], held: Amount, reserved: str) -> None:
        super().__init__(
            f"container with {amount_text(held)} of each of {quoted(sorted(map(base_of, slots)))}: {reserved}",
            "delete the pod; a pod with slots that came past the scheduler may have taken them: use one scheduler for all",
        )


class SlotStarts:
    """Judges containers with slots of GPUs that are about to start."""

    def __init__(
        self, ledger: Ledger, clock: Clock, reserved: Callable[[], NodeReservations], grants: SlotGrants
    ) -> None:
        """`reserved`: what is reserved on the node now. `grants`: what the kubelet was told instead of it."""
        self._ledger, self._clock, self._reserved, self._grants = ledger, clock, reserved, grants
        self._judged: dict[AllocationID, NotAsReserved | None] = {}
        """What was found of an allocation when its owner became known."""
        self._told = set[AllocationID]()
        """Those of which a refusal is recorded: each once, however often the kubelet tries to start the container."""

    def observe(self) -> None:
        """Judges the containers that have become known."""
        live = self._ledger.state.allocations
        for name in self._judged.keys() - live.keys():
            del self._judged[name]
        self._told &= live.keys()
        for each in live.values():
            if each.owner is not None and each.id not in self._judged and self._is_offered(each):
                self._judged[each.id] = self._misfit(each)

    def check(self, devices: Sequence[DeviceID], listing: Listing | None) -> None:
        """
        Raises NotAsReserved for a container that must not start with these slots, and records that once; and Unavailable
        where they are reserved, with other amounts than equal parts, and it is not known whose they are. Other devices are
        none of its business. `listing`: what the kubelet says; None: the record knows whose the devices are.
        """
        self.observe()
        owned, live = self._ledger.state.ownership, self._ledger.state.allocations
        for each in (live[name] for name in owned.overlapping(map(owned.holding, devices))):
            if each.device_ids.isdisjoint(devices):
                continue
            misfit, listed = self._judged.get(each.id), as_listed(each, listing)
            if misfit is None and self._is_offered(each):
                misfit = self._judged[each.id] = self._misfit(listed)
            if misfit is not None:
                self._record(listed, misfit)
                raise misfit

    def _is_offered(self, record: Allocation) -> bool:
        """Whether it is of slots that are offered now; not so before the hardware is known."""
        return bool(record.slots) and all(
            base_of(slot) in offers_in_slots(self._ledger.state.hardware) for slot in record.slots
        )

    def _misfit(self, record: Allocation) -> NotAsReserved | None:
        """What is wrong with the amounts of an allocation. Raises Unavailable where it is not known whose it is."""
        for resource, slots in record.devices.items():
            held = {slot: record.slots[slot] for slot in slots if slot in record.slots and slot not in record.instances}
            if not held:
                continue
            kept, most = [*self._kept(resource)], reduce(larger, held.values())
            own = [reservation for reservation, *_ in kept if is_of(reservation, record)]
            if own:
                bounds = bounds_for(own[0], record, resource)
                if bounds is None or all(is_within(bounds[0], amount, bounds[1]) for amount in held.values()):
                    continue
                return NotAsReserved(slots, most, f"{amount_text(bounds[1])} are reserved for it")
            hardware = self._ledger.state.hardware
            if all(amount == equal_part(hardware, base_of(slot)) for slot, amount in held.items()):
                continue  # what it has without a reservation, whoever has as much reserved
            for reservation, container, told in kept:
                if told == frozenset(slots):
                    if record.owner is None:
                        raise Unavailable(
                            f"the kubelet does not tell yet whose the slots of {quoted(sorted(map(base_of, slots)))} are",
                            STARTED_AGAIN,
                        )
                    whose = f"{reservation.namespace}/{reservation.pod}, container {container.container}"
                    return NotAsReserved(slots, most, f"they are reserved for {quoted([whose])}")
        return None

    def _kept(self, resource: ResourceName) -> Iterator[tuple[Reservation, ReservedContainer, frozenset[DeviceID]]]:
        """What lasts of the reservations, and the slots by which each container has what is reserved for it."""
        reserved, now = self._reserved(), self._clock.monotonic()
        for each in reserved.reservations:
            for container in each.containers if reserved.until[each.pod_uid] > now else ():
                if slots := container.devices.get(resource):
                    moved = self._grants.moved.get((each.pod_uid, container.container))
                    yield each, container, frozenset(slots) if moved is None else moved.slots

    def _record(self, record: Allocation, misfit: NotAsReserved) -> None:
        """Records that a container was not started, and why."""
        owner = record.owner
        if owner is not None and not owner.pod:  # the checkpoint has UIDs, and no names
            owner = reserved_owner(self._reserved(), record.pod_uid, owner.container)
        if record.id in self._told or owner is None:
            return
        self._told.add(record.id)
        record_refused_start(self._ledger, owner, misfit)


def as_listed(record: Allocation, listing: Listing | None) -> Allocation:
    """
    An allocation with its container by the kubelet's checkpoint, where the record does not know it: of a pod without a name.
    The same one where the checkpoint does not tell one pod, and without a container's name where several of it have them.
    """
    if record.owner is not None or listing is None:
        return record
    places = [(resource, device) for resource, ids in record.from_kubelet.items() for device in ids]
    parts = {part for place in places for part in listing.parts_by_place.get(place, ())}
    gone = listing.directories.is_gone if listing.directories is not None else lambda uid: False
    holders = {(part.pod_uid, part.container) for part in parts if not gone(part.pod_uid)}
    uids = {uid for uid, _ in holders}
    if len(uids) != 1 or "" in uids:
        return record
    container = ContainerName(next(name for _, name in holders) if len(holders) == 1 else "")
    owner = Owner(namespace=Namespace(""), pod=PodName(""), container=container)
    return msgspec.structs.replace(record, owner=owner, pod_uid=uids.pop())


def is_of(reservation: Reservation, record: Allocation) -> bool:
    """Whether it is of the pod of this allocation: by its UID, or by its names where that is not known."""
    if record.pod_uid:
        return reservation.pod_uid == record.pod_uid
    owner = record.owner
    return owner is not None and (owner.namespace, owner.pod) == (reservation.namespace, reservation.pod)


def bounds_for(reservation: Reservation, record: Allocation, resource: ResourceName) -> tuple[Amount, Amount] | None:
    """
    The least and the most that a container may hold of a GPU by what is reserved for its pod. A later container may have
    what an init container had by the same slot, and one that was moved has of each GPU the most that it was to have of any.
    None: nothing is reserved for it, or it is not known how much.
    """
    name = None if record.owner is None else record.owner.container
    mine = [each for each in reservation.containers if each.container == name]
    own = [amount for each in mine for slot in each.devices.get(resource, ()) for amount in [each.slots.get(slot)]]
    if not own or None in own:
        return None
    before = [amount for each in reservation.containers if each.role == "init" for amount in each.slots.values()]
    known = [each for each in own if each is not None]
    return reduce(smaller, known), reduce(larger, [*known, *before])


def smaller(one: Amount, other: Amount) -> Amount:
    """As much of each kind as the smaller one has."""
    return Amount(cores=min(one.cores, other.cores), memory=min(one.memory, other.memory))


def is_within(least: Amount, amount: Amount, most: Amount) -> bool:
    """Whether an amount is, of each kind, between two others or one of them."""
    return least.cores <= amount.cores <= most.cores and least.memory <= amount.memory <= most.memory


def amount_text(amount: Amount) -> str:
    """`60 cores and 6000 MiB`."""
    return f"{amount.cores} cores and {amount.memory // MIB} MiB"
