"""
Describes how a GPU is partitioned, who holds its parts, and what is left of it.

A GPU is offered by one sharing strategy: whole, in MIG instances, in time slices, by MPS, in units or in slots. The cores of
instances in slots are hundredths of each instance: seven instances have 700. If slots become instances, `left` is the
largest instance that can be created. Held parts may be of a former strategy: if a container holds a whole GPU that is now
offered in units, nothing of it is left. Example: a GPU with 80 GiB in units, of which two containers have 20 and 30
hundredths of computing time with 8 GiB each:

    ways ("units",)   held 20, 8 GiB; 30, 8 GiB   left 50, 64 GiB
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.holdings import Amount, Instance, Part, TimeSlice, Unit, Whole, base_of, holding_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, LimitedBy, Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.model.topology.queries import offers_in_slots
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import equal_part, larger_amount, lost_instances, offered_in_slots

HeldPart = Part | Amount
"""What a container holds of a GPU by one device; by a slot an amount."""

Way = Literal["whole", "MIG", "time slices", "MPS", "units", "slots"]


class Parts(NamedTuple):
    """Parts of one GPU."""

    whole: bool = False
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
    """Its parts. A slot that several containers have holds the largest of their amounts, and counts so for the newest."""
    alone: Parts
    """
    The parts without those that later containers have, as from an init container. These parts add up to what is not left,
    except for units that a kubelet gave to a second pod: they count here for the later pod, and in what is left for both.
    """
    lost: tuple[DeviceID, ...] = ()
    """Uuids of MIG instances that were created for its slots and are gone: the container has to be created again."""

    @property
    def is_left(self) -> bool:
        """Whether later containers have some of its parts."""
        return self.alone != self.parts


class GpuPartitioning(NamedTuple):
    """How one GPU is partitioned now."""

    ways: tuple[Way, ...]
    """The sharing strategies of its offers; empty: it is not offered. Instances may be in time slices."""
    offered: Parts
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


def _used_by_gpu(state: NodeState, profiles: Mapping[DeviceID, str]) -> Mapping[DeviceID, tuple[UsedParts, ...]]:
    """GPU -> what each container has of it. `profiles`: uuid of an instance -> name of its profile."""
    hardware = state.hardware
    first: dict[tuple[DeviceID, object], Allocation] = {}
    held = defaultdict[DeviceID, defaultdict[object, dict[DeviceID, HeldPart]]](lambda: defaultdict(dict))
    lost = defaultdict[tuple[DeviceID, object], list[DeviceID]](list)
    newest: dict[DeviceID, object] = {}
    largest: dict[DeviceID, HeldPart] = {}
    for each in state.allocations.values():
        holder = each.owner or each.id
        for device, gpu, part in parts_of_allocation(each, hardware):
            first.setdefault((gpu, holder), each)
            held[gpu][holder][device] = part
            newest[device] = holder
            largest[device] = _larger_part(part, largest.get(device, part))
        for slot, uuid in lost_instances(each, hardware).items() if each.instances else ():
            lost[base_of(slot), holder].append(uuid)

    def used(gpu: DeviceID, holder: object) -> UsedParts:
        parts = held[gpu][holder]
        own = {device: largest[device] for device in parts if newest[device] == holder}
        alone = _count_parts(own.values(), profiles)
        every = alone if len(own) == len(parts) else _count_parts({**parts, **own}.values(), profiles)
        allocation = first[gpu, holder]
        return UsedParts(allocation.owner, allocation.id, every, alone, tuple(lost.get((gpu, holder), ())))

    return {gpu: tuple(used(gpu, holder) for holder in by) for gpu, by in held.items()}


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
