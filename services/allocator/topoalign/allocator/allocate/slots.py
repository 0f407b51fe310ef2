"""
Slots of GPUs, over the kubelet's protocol.

A kubelet asks for a number of slots, and never for the amounts of cores and memory that go with them. The slots of a
reservation are its own: who asks for just these holds what is reserved with them. All other slots count as equal parts.

- GetPreferredAllocation: the slots that are reserved for such a question. Where the kubelet does not offer them, because it
  aligns the container to other NUMA nodes, or somebody has one of them, slots of different GPUs that have as much left; who
  is given these holds what is reserved. None where the container must have its own, or no GPUs have as much left. Else slots
  of GPUs that have an equal part left. Both beside what is reserved, or at least beside what is held.
- Allocate: two slots of one GPU are refused (`InvalidShare`), and so is what a GPU has not left any more, by the record, and
  other slots than a container must have (`ShareSplit`). One that may move holds what is reserved by whatever slots it gets.
  Records of containers that have ended make way.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from topoalign.allocator.ports import AskedDevices, Poll
from topoalign.allocator.reconciliation.displacement import kept_of
from topoalign.allocator.reconciliation.liveness import Liveness
from topoalign.core.demand.share_annotations import InvalidShare, read_gpu_rules
from topoalign.core.demand.shares import (
    gpus_of_numa_nodes,
    gpus_with_slots,
    resources_in_slots,
    share_of_amount,
    unknown_share,
)
from topoalign.core.model.allocations import Allocation
from topoalign.core.model.errors import InvalidField, quoted
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import AllocationID, DeviceID, ResourceName
from topoalign.core.placement.sparing import held_among, overlapping_devices
from topoalign.core.ports import Clock
from topoalign.core.sharing.choosers import choose_gpus_for_slots, several_of_one_gpu, slot_of
from topoalign.core.sharing.reserved_shares import (
    OpenPart,
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
    ShareFields,
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
FIELDS = ShareFields(cores=FIELD, memory=FIELD, cards=FIELD)
REMEDY = "delete the pod and let the scheduler choose again"


class Moved(NamedTuple):
    """What a container was told instead of what is reserved for it."""

    slots: frozenset[DeviceID]
    amount: Amount | None
    """That it holds of each GPU; None: an equal part."""


class SlotGrants:
    """Judges what a kubelet asks for of GPUs in slots, by the record and by what is reserved."""

    def __init__(
        self,
        state: Callable[[], NodeState],
        clock: Clock,
        reserved: Callable[[], NodeReservations],
        liveness: Liveness,
        compat: str = "",
    ) -> None:
        """
        `state`: of the node now; while calls are judged, with what those before were given. `reserved`: what is reserved on
        the node now. `compat`: as in the rules of the node.
        """
        self._state = state
        self._clock = clock
        self._reserved = reserved
        self._liveness = liveness
        self._rules = read_gpu_rules((), as_hami=compat == "hami")
        self.moved: dict[PartName, Moved] = {}
        """Container -> what it was told instead of what is reserved for it."""
        self._ended = frozenset[AllocationID]()
        """Allocations of which the kubelet said that they had ended, when it asked last."""

    def prefer(self, live: NodeState, question: ShareQuestion, displaced: Collection[DeviceID]) -> tuple[DeviceID, ...]:
        """
        The slots that a container should get; () where too few GPUs have an equal part left. `live`: the state without what
        has ended; `displaced`: what counts as held besides.
        """
        resource, available, must_include, size = question
        if resource not in resources_in_slots(live.hardware) or not max(1, len(must_include)) <= size <= len(available):
            return ()
        self._ended = frozenset(self._state().allocations.keys() - live.allocations.keys())
        reserved = self._reserved()
        now = self._clock.monotonic()
        instead = {name: each.slots for name, each in self.moved.items()}
        parts = [*iterate_open_parts(live, reserved, now, question, instead)]
        own = answering_part(question, parts)
        if own is not None and not are_used(live, own.slots.difference(must_include)):
            self._swap(parts[0], own, reserved)
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
        unknown = unknown_share(live.hardware, resource, size - len(must))
        share = (unknown if amount is None else share_of_amount(unknown, amount))._replace(rules=self._rules)
        for state in states:
            spare = offered - held_among(state.ownership, resource, devices)
            among = [gpu for gpu, slots in devices.by_base.items() if gpu not in must and (slots & spare).bits]
            try:
                gpus = choose_gpus_for_slots(live.hardware, state.ownership.slots_left, share, among, FIELDS)
            except (InvalidField, ShareDoesNotFit):
                continue
            chosen = (*must_include, *(slot_of(spare, gpu) for gpu in gpus))
            if parts:
                self._move(parts[0].name, Moved(frozenset(chosen), amount), reserved)
            return chosen
        return ()

    def _swap(self, asking: OpenPart, other: OpenPart, reserved: NodeReservations) -> None:
        """The kubelet was told the slots of another part, which is to have those of this one."""
        if asking is not other:
            self._move(asking.name, Moved(other.slots, asking.amount), reserved)
            self._move(other.name, Moved(asking.slots, asking.amount), reserved)

    def _move(self, name: PartName, moved: Moved, reserved: NodeReservations) -> None:
        """A container is to have these slots instead of those that are reserved for it."""
        self.moved = {key: each for key, each in self.moved.items() if key[0] in reserved.until} | {name: moved}

    def _amounts_moved(self, slots: Collection[DeviceID]) -> Mapping[DeviceID, Amount]:
        """What a container holds that is given just the slots that were told instead of a part; else empty."""
        until = self._reserved().until
        now = self._clock.monotonic()
        wanted = frozenset(slots)
        for (uid, _), moved in self.moved.items():
            if moved.amount is not None and moved.slots == wanted and until.get(uid, now) > now:
                return dict.fromkeys(slots, moved.amount)
        return {}

    def check(self, resource: ResourceName, containers: AskedDevices) -> None:
        """
        Raises InvalidShare for several slots of one GPU, which are no more of it than one, and ShareSplit for slots of GPUs
        that the container which waits for as many must not have.
        """
        if resource not in resources_in_slots(self._state().hardware):
            return
        for slots in containers:
            gpus = [base_of(slot) for slot in slots]
            if twice := sorted({gpu for gpu in gpus if gpus.count(gpu) > 1}):
                live = self._live()
                share = unknown_share(live.hardware, resource, len(slots))
                able = gpus_with_slots(live.ownership.slots_left, share, live.hardware)
                cause, remedy = several_of_one_gpu(live.hardware, resource, gpus, able)
                raise InvalidShare(
                    f"{FIELD}: several slots of {quoted(twice)}, of which a container has one: {cause}", remedy
                )
            if not all(map(self._state().ownership.is_held, slots)):  # else the kubelet may repeat itself
                self.check_told(resource, slots)

    def check_told(self, resource: ResourceName, slots: Collection[DeviceID]) -> None:
        """
        Raises ShareSplit for slots, not given by now, which are not those that the container must have that waits for as
        many. One that may move has these instead of its own: a kubelet that offers no more than it needs asks for none.
        """
        if resource not in resources_in_slots(self._state().hardware):
            return
        reserved = self._reserved()
        instead = {name: each.slots for name, each in self.moved.items()}
        part = unmatched_part(self._live(), reserved, self._clock.monotonic(), resource, slots, instead)
        if part is None:
            return
        if part.may_move:
            self._move(part.name, Moved(frozenset(slots), part.amount), reserved)
            return
        gpus = quoted(sorted(map(base_of, slots)))
        accepted = quoted(sorted(map(base_of, part.slots)))
        raise ShareSplit(
            FIELD,
            f"slots of {gpus}, and container {quoted([part.name[1]])}, which waits for as many, accepts {accepted}",
            REMEDY + self._aligned(resource),
        )

    def _aligned(self, resource: ResourceName) -> str:
        """What to add to a remedy where the kubelet may have aligned the slots; empty: it aligns none."""
        on_nodes = gpus_of_numa_nodes(self._state().hardware).get(resource)
        most = max(on_nodes.values()) if on_nodes else 0
        return f"; by sharing.slots.numaTopology it aligns slots to NUMA nodes, of {most} GPUs at most" if most else ""

    def _live(self) -> NodeState:
        """The state without what had ended when the kubelet asked last."""
        state = self._state()
        for name in self._ended & state.allocations.keys():
            state = state.without(name)
        return state

    def amounts(self, resource: ResourceName, slots: Collection[DeviceID]) -> dict[DeviceID, Amount]:
        """What a container that is given these devices holds by them; empty where they are no slots."""
        hardware = self._state().hardware
        if resource not in resources_in_slots(hardware):
            return {}
        kept = self._reserved()
        now = self._clock.monotonic()
        reserved = self._amounts_moved(slots) or amounts_reserved(kept, now, resource, slots)
        return {slot: reserved.get(slot) or equal_part(hardware, base_of(slot)) for slot in slots}

    def reserved_for(self, resource: ResourceName, amounts: Mapping[DeviceID, Amount]) -> tuple[str, ...]:
        """
        UIDs of the pods for which as much is reserved as a container gets by these slots, `amounts` of them; () of equal
        parts, and of others.
        """
        hardware = self._state().hardware
        if all(amount == equal_part(hardware, base_of(slot)) for slot, amount in amounts.items()):
            return ()
        return pods_reserved_for(self._reserved(), self._clock.monotonic(), resource, amounts)

    def displaced_pod_of(self, resource: ResourceName, slots: Collection[DeviceID]) -> str:
        """UID of a pod that must not start with these slots: others have got what is reserved for it. Empty: none is."""
        is_moved = bool(self._amounts_moved(slots))
        return (
            "" if is_moved else displaced_pod(self._state(), self._reserved(), self._clock.monotonic(), resource, slots)
        )

    def beside(
        self, resource: ResourceName, slots: Collection[DeviceID], granted: Sequence[Allocation] = ()
    ) -> list[Allocation]:
        """
        The records of these GPUs, where the slots do not fit beside all of them: the kubelet has to tell then which have
        ended. `granted`: what counts as held besides.
        """
        amounts = self.amounts(resource, slots)
        state = self._state()
        if not amounts:
            return []
        near = self._near(state, amounts)
        is_full = self._lacking(amounts, (*near, *granted)) is not None
        return near if is_full else []

    def making_room(
        self,
        resource: ResourceName,
        slots: Collection[DeviceID],
        beside: Sequence[Allocation],
        way: Mapping[AllocationID, Allocation],
        granted: Sequence[Allocation],
        poll: Poll | None,
    ) -> dict[AllocationID, Allocation]:
        """
        Those of the records `beside` that make way, by id: the slots do not fit beside them, and their containers have
        ended. `way`: records that make way already, of which what the kubelet has still given out stays. Raises
        NotEnoughShareCores and NotEnoughShareMemory where that is not enough.
        """
        if not beside:
            return {}
        assert poll is not None, "a record is known to the poll"
        amounts = self.amounts(resource, slots)
        liveness = self._liveness
        counted = [
            kept_of(each, poll.listing) if each.id in way and not liveness.is_displaced(each, poll.listing) else each
            for each in beside
        ]
        if self._lacking(amounts, (*counted, *granted)) is None:
            return {}
        gone = [each for each in counted if each.id not in way and liveness.has_ended(each, poll.listing, poll.at)]
        ended = {each.id: each for each in liveness.dropped(gone, (), (), poll.at)}
        if lacking := self._lacking(amounts, (*(each for each in counted if each.id not in ended), *granted)):
            raise self._refusal(resource, slots, lacking)
        return ended

    def _refusal(
        self, resource: ResourceName, slots: Collection[DeviceID], lacking: ShareDoesNotFit
    ) -> ShareDoesNotFit:
        """Why slots are refused of GPUs that lack this; those that a container was to have instead are its no more."""
        moved = [name for name, each in self.moved.items() if each.slots == frozenset(slots)]
        if not moved:
            return lacking
        self.moved = {name: each for name, each in self.moved.items() if name not in moved}
        gpus = quoted(sorted(map(base_of, slots)))
        return ShareSplit(
            FIELD,
            f"slots of {gpus} for container {quoted([moved[0][1]])}: {lacking.finding}",
            REMEDY + self._aligned(resource),
        )

    def _near(self, state: NodeState, amounts: Mapping[DeviceID, Amount]) -> list[Allocation]:
        """The live allocations that have something of the GPUs of these slots."""
        gpus = {base_of(slot) for slot in amounts}
        return [each for each in state.allocations.values() if not gpus.isdisjoint(each.shared_bases)]

    def _lacking(self, amounts: Mapping[DeviceID, Amount], held: Sequence[Allocation]) -> ShareDoesNotFit | None:
        """What a GPU has too little of beside what these allocations hold by other slots; None: of nothing."""
        hardware = self._state().hardware
        by_gpu = held_by_slot(hardware, held)
        for slot, asked in amounts.items():
            gpu = base_of(slot)
            if gpu in gpus_by_instances(hardware):
                continue  # its instance is there: nothing else tells whether there is room
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


def are_used(live: NodeState, slots: Collection[DeviceID]) -> bool:
    """Whether a container that is known has one of these, which a kubelet offers that has lost its checkpoint."""
    holders = live.ownership.holders
    return any(slot in holders and live.allocations[holders[slot]].owner is not None for slot in slots)
