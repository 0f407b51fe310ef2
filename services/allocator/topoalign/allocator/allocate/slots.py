"""
Prefers and checks vGPU slots in the kubelet's calls. A call has a number of slots but no amounts.

If a container gets exactly a reservation's slots, it has the reserved amounts. Other slots are equal parts of a GPU.

- GetPreferredAllocation prefers the slots that are reserved for a request of this size. If the kubelet does not offer
  them, slots of other GPUs that have enough free replace them, unless the pod restricts its GPUs. Without a
  reservation, it prefers slots of GPUs that have an equal part free, if possible in addition to the reserved amounts.
- Allocate refuses two slots of one GPU (`InvalidShare`) and amounts that the GPU does not have free
  (`ShareDoesNotFit`). If the pod restricts its GPUs, Allocate also refuses slots of other GPUs (`ShareSplit`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from topoalign.allocator.allocate.claims import AskedContainer, Claim, NodeView
from topoalign.allocator.reconciliation.displacement import displaced_pod_name, kept_of
from topoalign.core.demand.share_annotations import InvalidShare, read_gpu_rules
from topoalign.core.demand.shares import (
    ShareFields,
    resources_in_slots,
    unknown_share,
)
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, ResourceName
from topoalign.core.placement.sparing import held_among, overlapping_devices
from topoalign.core.sharing.choosers import choose_gpus_for_share, slot_of
from topoalign.core.sharing.reserved_shares import (
    PartName,
    ShareQuestion,
    amounts_reserved,
    answering_part,
    displaced_pod,
    iterate_open_parts,
    pods_reserved_for,
    unmatched_part,
    with_reserved_shares,
)
from topoalign.core.sharing.share_refusals import (
    NotEnoughShareCores,
    NotEnoughShareMemory,
    ShareDoesNotFit,
    ShareSplit,
)
from topoalign.core.state.fold import NodeState
from topoalign.core.state.node_reservations import NodeReservations
from topoalign.core.state.share_amounts import (
    equal_part,
    gpus_by_instances,
    held_by_slot,
    offered_in_slots,
    sum_amounts,
)

FIELD = "devices_ids"
FIELDS = ShareFields(cores=FIELD, memory=FIELD, gpus=FIELD)
REMEDY = "delete the pod and let the scheduler choose again; with sharing.slots.numaTopology the kubelet aligns slots"


class MovedSlots(NamedTuple):
    """The slots that a container gets instead of its reserved slots."""

    slots: frozenset[DeviceID]
    amount: Amount | None
    """The amount of each GPU; None means an equal part."""


class SlotClaim(Claim):
    """Claims a share in vGPU slots. Prefers and checks slots based on the ledger and the reservations."""

    def __init__(self, view: NodeView) -> None:
        super().__init__(view)
        self._rules = read_gpu_rules({}, as_hami=view.compat == "hami")
        self.moved: dict[PartName, MovedSlots] = {}
        """Container -> the slots that replace its reserved slots."""

    def applies(self, resource: ResourceName) -> bool:
        """Whether the resource is offered in slots."""
        return resource in resources_in_slots(self.view.state.hardware)

    def prefer(self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """
        Returns the preferred slots; () if too few GPUs have enough free. Unreserved `displaced` devices count as held.
        """
        resource, available, must_include, size = question
        if resource not in resources_in_slots(live.hardware) or not max(1, len(must_include)) <= size <= len(available):
            return ()
        reserved = self.view.reserved
        now = self.view.now
        instead = {name: each.slots for name, each in self.moved.items()}
        parts = [*iterate_open_parts(live, reserved, now, question, instead)]
        own = answering_part(question, parts)
        # A kubelet that has lost its checkpoint offers slots of running containers again.
        holders = live.ownership.holders
        used = own.slots.difference(must_include) & holders.keys() if own is not None else ()
        if own is not None and all(live.allocations[holders[slot]].owner is None for slot in used):
            if parts[0] is not own:  # the two containers swap their slots
                self._move(parts[0].name, MovedSlots(own.slots, parts[0].amount), reserved)
                self._move(own.name, MovedSlots(parts[0].slots, parts[0].amount), reserved)
            return tuple(slot for slot in live.hardware.devices[resource] if slot in own.slots)
        if parts and not parts[0].may_move:
            return ()
        devices = live.hardware.devices[resource]
        offered = devices.some(available)
        must = {*map(base_of, must_include)}
        if len(must) < len(must_include) or (devices.some(must_include) - offered).bits:
            return ()
        if size == len(must):
            return tuple(must_include)
        offered -= overlapping_devices(live.ownership, devices, displaced)
        states = (with_reserved_shares(live, reserved, now), live) if reserved.reservations else (live,)
        amount = parts[0].amount if parts else None
        share = unknown_share(live.hardware, resource, size - len(must), self._rules)
        if amount is not None:
            share = share._replace(cores=amount.cores, memory=amount.memory, parts=0)
        for state in states:
            spare = offered - held_among(state.ownership, resource, devices)
            among = [gpu for gpu, slots in devices.by_base.items() if gpu not in must and (slots & spare).bits]
            try:
                gpus = choose_gpus_for_share(live.hardware, state.ownership.slots_left, share, among, FIELDS)
            except ShareDoesNotFit:
                continue
            chosen = (*must_include, *(slot_of(spare, gpu) for gpu in gpus))
            if parts:
                self._move(parts[0].name, MovedSlots(frozenset(chosen), amount), reserved)
            return chosen
        return ()

    def _move(self, name: PartName, moved: MovedSlots, reserved: NodeReservations) -> None:
        self.moved = {key: each for key, each in self.moved.items() if key[0] in reserved.until} | {name: moved}

    def _amounts_moved(self, slots: Collection[DeviceID]) -> Mapping[DeviceID, Amount]:
        """Returns slot -> amount if exactly these slots replace a container's reserved slots; empty otherwise."""
        until = self.view.reserved.until
        now = self.view.now
        wanted = frozenset(slots)
        for (uid, _), moved in self.moved.items():
            if moved.amount is not None and moved.slots == wanted and until.get(uid, now) > now:
                return dict.fromkeys(slots, moved.amount)
        return {}

    def check(self, resource: ResourceName, devices: Collection[DeviceID]) -> None:
        """Raises InvalidShare if there are several slots of one GPU."""
        gpus = [base_of(slot) for slot in devices]
        if twice := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
            raise InvalidShare(
                f"{FIELD}: several slots of {quoted(twice)}; a container may have one of each GPU", REMEDY
            )

    def check_reserved(self, resource: ResourceName, slots: Collection[DeviceID]) -> None:
        """
        Checks slots that do not match a reservation. If a container waits for this number of slots, these slots replace
        its reserved slots. If its pod restricts its GPUs, raises ShareSplit instead. This is needed because the kubelet
        does not request a preference if it has no choice.
        """
        reserved = self.view.reserved
        instead = {name: each.slots for name, each in self.moved.items()}
        part = unmatched_part(self.view.state, reserved, self.view.now, resource, slots, instead)
        if part is None:
            return
        if part.may_move:
            self._move(part.name, MovedSlots(frozenset(slots), part.amount), reserved)
            return
        gpus = quoted(sorted(map(base_of, slots)))
        accepted = quoted(sorted(map(base_of, part.slots)))
        raise ShareSplit(
            FIELD,
            f"slots of {gpus}, but container {quoted([part.name[1]])}, which waits for this number, accepts {accepted}",
            REMEDY,
        )

    def amounts(self, resource: ResourceName, slots: Collection[DeviceID]) -> dict[DeviceID, Amount]:
        """Returns slot -> amount for a container with these slots; empty if the resource is not offered in slots."""
        hardware = self.view.state.hardware
        if resource not in resources_in_slots(hardware):
            return {}
        kept = self.view.reserved
        now = self.view.now
        reserved = self._amounts_moved(slots) or amounts_reserved(kept, now, resource, slots)
        return {slot: reserved.get(slot) or equal_part(hardware, base_of(slot)) for slot in slots}

    def conflicts(self, asked: AskedContainer) -> Sequence[Allocation]:
        """Returns the allocations on these GPUs if too little is free for the slots. Raises as `check_reserved`."""
        self.check_reserved(asked.resource, asked.ids)
        amounts = self.amounts(asked.resource, asked.ids)
        gpus = {base_of(slot) for slot in amounts}
        sharing = [each for each in self.view.state.allocations.values() if not gpus.isdisjoint(each.shared_bases)]
        return sharing if self._lacking(amounts, (*sharing, *asked.new.granted)) is not None else ()

    def evict(self, asked: AskedContainer, conflicts: Sequence[Allocation]) -> None:
        """Releases ended allocations if the slots do not fit. Raises ShareDoesNotFit if that does not suffice."""
        if not conflicts:
            return
        poll = asked.known_poll
        stale = asked.stale
        granted = asked.new.granted
        amounts = self.amounts(asked.resource, asked.ids)
        liveness = self.view.liveness
        counted = [
            kept_of(each, poll.listing) if each.id in stale and not liveness.is_displaced(each, poll.listing) else each
            for each in conflicts
        ]
        if self._lacking(amounts, (*counted, *granted)) is None:
            return
        ended = {
            each.id: each
            for each in counted
            if each.id not in stale
            and liveness.has_ended(each, poll.listing, poll.at)
            and liveness.is_dropped(each, poll.at)
        }
        if lacking := self._lacking(amounts, (*(each for each in counted if each.id not in ended), *granted)):
            raise lacking
        asked.release(ended.values())
        asked.new.ended.update(ended)

    def complete(self, asked: AskedContainer, allocation: Allocation) -> Allocation:
        """Adds the amounts and MIG instances of the slots, and the UIDs of the pods for which they were reserved."""
        resource = asked.resource
        hardware = self.view.state.hardware
        reserved = self.view.reserved
        now = self.view.now
        slots = allocation.devices[resource]
        amounts = self.amounts(resource, slots)
        is_equal = all(amount == equal_part(hardware, base_of(slot)) for slot, amount in amounts.items())
        displaced = displaced_pod_name(asked.new.gone.values(), resource, slots, asked.listing)
        if not displaced and not self._amounts_moved(slots):
            displaced = displaced_pod(self.view.state, reserved, now, resource, slots)
        made = {slot: asked.made[slot] for slot in slots if slot in asked.made}
        return msgspec.structs.replace(
            allocation,
            slots={**amounts, **{slot: each.amount for slot, each in made.items()}},
            instances={slot: each.uuid for slot, each in made.items()},
            reserved_for=() if is_equal else pods_reserved_for(reserved, now, resource, amounts),
            denied=displaced,
        )

    def _lacking(self, amounts: Mapping[DeviceID, Amount], held: Sequence[Allocation]) -> ShareDoesNotFit | None:
        """Returns the error if a GPU does not have enough free besides these allocations, or None if all GPUs do."""
        hardware = self.view.state.hardware
        by_gpu = held_by_slot(hardware, held)
        for slot, asked in amounts.items():
            gpu = base_of(slot)
            if gpu in gpus_by_instances(hardware):
                continue  # the slot's MIG instance exists, so the GPU has enough free
            offered = offered_in_slots(hardware)[gpu]
            others = [amount for other, amount in by_gpu.get(gpu, {}).items() if other != slot]
            used = sum_amounts(others)
            cores = offered.cores - used.cores
            memory = offered.memory - used.memory
            if cores < max(1, asked.cores) or (others and asked.cores >= offered.cores):
                return NotEnoughShareCores(FIELDS, max(1, asked.cores), 1, [max(0, cores)])
            if memory < asked.memory:
                return NotEnoughShareMemory(FIELDS, asked.memory, 1, [max(0, memory)])
        return None
