"""
Describes how a GPU is partitioned, who holds its parts, and what is left of it.

A GPU is offered by one sharing strategy: whole, in MIG instances, in time slices, by MPS, in units or in slots. The cores of
instances in slots are hundredths of each instance: seven instances have 700. If slots become instances, `left` is the
largest instance that can be created. Held parts may be of a former strategy: if a container holds a whole GPU that is now
offered in units, nothing of it is left. Example: a GPU with 80 GiB in units, of which two containers have 20 and 30
hundredths of computing time with 8 GiB each:

    ways ("units",)   held 20, 8 GiB; 30, 8 GiB   left 50, 64 GiB
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.holdings import Amount, Instance, Part, TimeSlice, Unit, Whole, base_of, holding_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, LimitedBy, Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import equal_part, larger_amount, lost_instances, offered_in_slots

HeldPart = Part | Amount
"""What a container holds of a GPU by one device; by a slot an amount."""

Way = Literal["whole", "MIG", "time slices", "MPS", "units", "slots"]


class Parts(NamedTuple):
    """Parts of one GPU."""

    whole: bool = False
    """All of it."""
    instances: tuple[str, ...] = ()
    """Profiles of MIG instances, `1g.10gb`; the uuid of an instance that no longer exists."""
    slices: int = 0
    """Time slices, or shares by MPS; of MIG instances, too."""
    slots: int = 0
    """Each with an amount, which is in `cores` and `memory`."""
    cores: int = 0
    """Hundredths of computing time, in units or by slots; by slots of MIG instances those of each instance."""
    memory: int = 0
    """Bytes, in units or by slots."""


class UsedParts(NamedTuple):
    """The parts of a GPU that one container holds."""

    owner: Owner | None
    """None: not known yet."""
    allocation: AllocationID
    """The oldest of its allocations with a part of the GPU."""
    parts: Parts
    """Its parts. A part in two of its allocations counts once, a slot with the larger amount."""
    alone: Parts
    """
    The parts without those that later containers reuse, as from an init container. A slot counts for the newest
    container. Example: the init container had 60 cores and the app container reuses 30 of them, so the init container
    alone accounts for the other 30, without a slot. These parts add up to what is not left, except for units that a kubelet
    gave to a second pod: they count here for the later pod, and in what is left for both.
    """
    taken_over: bool = False
    """Whether later containers of its pod reuse all its parts, perhaps with less of a slot, as of an init container."""
    lost: tuple[DeviceID, ...] = ()
    """Uuids of MIG instances that were created for its slots and are gone: the container has to be created again."""

    @property
    def is_left(self) -> bool:
        """Whether later containers of its pod reuse some of its parts, as those of an init container."""
        return self.alone != self.parts


class GpuPartitioning(NamedTuple):
    """How one GPU is partitioned now."""

    ways: tuple[Way, ...]
    """The sharing strategies of its offers; empty: it is not offered. Instances may be in time slices."""
    offered: Parts
    """All offered parts."""
    held: tuple[UsedParts, ...]
    """By container, in the order of their first allocations."""
    left: Parts
    """The parts that can be allocated now: none of a GPU that is not healthy."""
    limiter: LimitedBy | None = None
    """What limits its containers to their amounts, as of `Offer.limited_by`."""

    @property
    def is_whole(self) -> bool:
        """Whether it is offered as a whole, or not at all, and no container holds a part of it."""
        return self.ways in ((), ("whole",)) and all(each.parts.whole for each in self.held)


def partitioning_by_gpu(state: NodeState) -> Mapping[DeviceID, GpuPartitioning]:
    """Returns GPU -> its partitioning, for all GPUs of a node in the hardware's order."""
    hardware = state.hardware
    by_gpu: dict[DeviceID, list[tuple[Offer, DeviceID]]] = {}
    for offer in hardware.offered:
        for base in offer.devices:
            by_gpu.setdefault(hardware.parent_of(base), []).append((offer, base))
    profiles = {each.uuid: each.profile for gpu in hardware.gpus for each in gpu.mig or ()}
    held = _used_by_gpu(state, profiles)
    return {
        gpu: GpuPartitioning(
            ways=_ways_of(gpu, by_gpu.get(gpu, ())),
            offered=_offered_of(hardware, by_gpu.get(gpu, ()), profiles),
            held=held.get(gpu, ()),
            left=_remaining_parts(state, gpu, by_gpu.get(gpu, ()), profiles),
            limiter=next((offer.limited_by for offer, _ in by_gpu.get(gpu, ()) if offer.by_amounts), None),
        )
        for gpu in hardware.gpu_by_id
    }


class _Record(NamedTuple):
    """An allocation with what it has of GPUs and NICs (`parts_of_allocation`)."""

    allocation: Allocation
    holder: object
    pod: object
    """Its container and its pod; the allocation's id where they are not known."""
    parts: tuple[tuple[DeviceID, DeviceID, HeldPart], ...]


@dataclass
class _ContainerParts:
    """What one container has of a GPU by all of its records."""

    first: Allocation
    devices: dict[DeviceID, HeldPart] = field(default_factory=dict)
    lost: list[DeviceID] = field(default_factory=list)
    surplus: Parts = field(default_factory=Parts)
    """Cores and bytes by slots beyond those of later records. Of a slot with first 60 and then 30 cores 30."""
    is_reused: bool = False
    """Whether a later record has some of it as well."""
    is_given_again: bool = False
    """Whether containers of other pods alone have some of it later."""


def _used_by_gpu(state: NodeState, profiles: Mapping[DeviceID, str]) -> Mapping[DeviceID, tuple[UsedParts, ...]]:
    """GPU -> what each container has of it. `profiles`: uuid of an instance -> name of its profile."""
    hardware = state.hardware
    records = []
    held: dict[DeviceID, dict[object, _ContainerParts]] = {}
    for each in state.allocations.values():
        owner = each.owner
        pod = each.id if owner is None else (owner.namespace, owner.pod)
        record = _Record(each, owner or each.id, pod, tuple(parts_of_allocation(each, hardware)))
        records.append(record)
        for device, gpu, part in record.parts:
            mine = held.setdefault(gpu, {}).setdefault(record.holder, _ContainerParts(each))
            known = mine.devices.get(device)
            mine.devices[device] = part if known is None else _larger_part(part, known)
        for slot, uuid in lost_instances(each, hardware).items() if each.instances else ():
            if (lost := held.get(base_of(slot), {}).get(record.holder)) is not None:
                lost.lost.append(uuid)
    # Then what is in several records, the newest first. Most devices are in one alone.
    times = Counter(device for record in records for device, _, _ in record.parts)
    newest: dict[DeviceID, tuple[_Record, HeldPart]] = {}
    largest: dict[DeviceID, HeldPart] = {}
    pods: dict[DeviceID, set[object]] = {}
    for record in reversed(records):
        for device, gpu, part in record.parts:
            if times[device] < 2 or newest.setdefault(device, (record, part))[0] is record:
                continue
            mine = held[gpu][record.holder]
            mine.is_reused = True
            size = largest.get(device, newest[device][1])
            if isinstance(part, Amount) and isinstance(size, Amount):
                more = Parts(cores=max(0, part.cores - size.cores), memory=max(0, part.memory - size.memory))
                mine.surplus = sum_parts((mine.surplus, more))
            largest[device] = _larger_part(part, size)
            if record.pod not in (later := pods.setdefault(device, {newest[device][0].pod})):
                mine.is_given_again = True
                later.add(record.pod)

    def used(holder: object, mine: _ContainerParts) -> UsedParts:
        every = _count_parts(mine.devices.values(), profiles)
        if not mine.is_reused:
            return UsedParts(mine.first.owner, mine.first.id, every, every, lost=tuple(mine.lost))
        latest = ((device, newest.get(device)) for device in mine.devices)
        own = [
            mine.devices[at] if last is None else last[1] for at, last in latest if not last or last[0].holder == holder
        ]
        alone = sum_parts((_count_parts(own, profiles), mine.surplus))
        is_taken_over = not own and not mine.is_given_again
        return UsedParts(mine.first.owner, mine.first.id, every, alone, is_taken_over, tuple(mine.lost))

    return {gpu: tuple(used(holder, mine) for holder, mine in by.items()) for gpu, by in held.items()}


def _larger_part(part: HeldPart, other: HeldPart) -> HeldPart:
    """What two records have by one device: by a slot the larger amount of both, else `part`."""
    return larger_amount(part, other) if isinstance(part, Amount) and isinstance(other, Amount) else part


def parts_of_allocation(allocation: Allocation, hardware: Topology) -> Iterable[tuple[DeviceID, DeviceID, HeldPart]]:
    """Device, its GPU or NIC and which part of that it is, for all that an allocation holds; by a slot an amount of it."""
    gpus = {**hardware.parents, **allocation.parents}
    in_slots = offers_in_slots(hardware)
    for devices in allocation.devices.values():
        for device in devices:
            holding = holding_of(device, gpus)
            if isinstance(holding.part, TimeSlice) and holding.base in in_slots:
                yield device, holding.device, allocation.slots.get(device) or equal_part(hardware, holding.base)
            else:
                yield device, holding.device, holding.part


def _ways_of(gpu: DeviceID, offers: Iterable[tuple[Offer, DeviceID]]) -> tuple[Way, ...]:
    found: dict[Way, None] = {}
    for offer, base in offers:
        if base != gpu:
            found["MIG"] = None
        if offer.unit is not None:
            found["units"] = None
        elif offer.slots is not None:
            found.update({"MIG": None, "slots": None} if offer.slots.instances else {"slots": None})
        elif offer.replicas > 1:
            found["MPS" if offer.sharing == "mps" else "time slices"] = None
        elif base == gpu:
            found["whole"] = None
    return tuple(found)


def _offered_of(
    hardware: Topology, offers: Iterable[tuple[Offer, DeviceID]], profiles: Mapping[DeviceID, str]
) -> Parts:
    found = list[Parts]()
    in_slots = offered_in_slots(hardware)
    for offer, base in offers:
        if (offered := in_slots.get(base)) is not None:
            found.append(Parts(slots=offer.replicas, cores=offered.cores, memory=offered.memory))
        else:
            handed_out = offer.handed_out(base)
            found.append(_count_parts((holding_of(unit, hardware.parents).part for unit in handed_out), profiles))
    return sum_parts(found)


def _remaining_parts(
    state: NodeState, gpu: DeviceID, offers: Iterable[tuple[Offer, DeviceID]], profiles: Mapping[DeviceID, str]
) -> Parts:
    """What of a GPU may be handed out now."""
    ownership = state.ownership
    hardware = state.hardware
    if (units := ownership.units_left.get(gpu)) is not None:
        return Parts() if units.spent else Parts(cores=units.left.cores, memory=units.left.memory)
    found: list[Parts] = []
    for offer, base in offers:
        devices = hardware.devices[offer.resource].by_base.get(base)
        if (slots := ownership.slots_left.get(base)) is not None:
            if not slots.spent:
                found.append(Parts(slots=slots.slots, cores=slots.left.cores, memory=slots.left.memory))
        elif devices is not None:
            free = ownership.free(offer.resource) & devices
            found.append(_count_parts((holding_of(each, hardware.parents).part for each in free), profiles))
    return sum_parts(found)


def sum_parts(parts: Iterable[Parts]) -> Parts:
    """All of them as one."""
    found = Parts()
    for each in parts:
        found = Parts(
            found.whole or each.whole,
            (*found.instances, *each.instances),
            found.slices + each.slices,
            found.slots + each.slots,
            found.cores + each.cores,
            found.memory + each.memory,
        )
    return found


def _count_parts(parts: Iterable[HeldPart], profiles: Mapping[DeviceID, str]) -> Parts:
    """So many parts of one GPU as one. `profiles`: uuid of an instance -> name of its profile."""
    whole = False
    slices = 0
    slots = 0
    cores = 0
    memory = 0
    instances: list[str] = []
    for part in parts:
        match part:
            case Whole():
                whole = True
            case Instance():
                instances.append(profiles.get(part.uuid, part.uuid))
            case TimeSlice():
                slices += 1
            case Unit():
                cores += part.kind == "cores"
                memory += MEMORY_BLOCK if part.kind == "memory" else 0
            case Amount():
                slots = slots + 1
                cores = cores + part.cores
                memory = memory + part.memory
    return Parts(whole, tuple(instances), slices, slots, cores, memory)
