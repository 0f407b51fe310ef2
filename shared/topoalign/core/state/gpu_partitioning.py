"""
Describes how a GPU is partitioned, who holds its parts, and which parts are free.

A GPU is offered in one way: whole, in MIG instances, in time slices, by MPS, in units or in slots. The cores of MIG
instances in slots are hundredths of each instance: seven instances have 700. If slots become MIG instances, `left` is
the largest instance that can be created. Held parts may come from an earlier configuration: if a container holds a
whole GPU that is now offered in units, nothing of the GPU is free. Example: a GPU with 80 GiB is offered in units. One
container holds 20 hundredths of its computing time, another holds 30, and each holds 8 GiB:

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
"""The part of a GPU that a container holds with one device id. For a slot, it is an amount."""

Way = Literal["whole", "MIG", "time slices", "MPS", "units", "slots"]


class Parts(NamedTuple):
    """Parts of one GPU."""

    whole: bool = False
    instances: tuple[str, ...] = ()
    """Profiles of MIG instances, `1g.10gb`. For an instance that no longer exists, its uuid."""
    slices: int = 0
    """Number of time slices or MPS shares, including those of MIG instances."""
    slots: int = 0
    """Number of slots. `cores` and `memory` include their amounts."""
    cores: int = 0
    """Hundredths of computing time, in units or in slots. For slots of MIG instances: hundredths of each instance."""
    memory: int = 0
    """Bytes, in units or in slots."""


class UsedParts(NamedTuple):
    """The parts of a GPU that one container holds."""

    owner: Owner | None
    """None: not known yet."""
    allocation: AllocationID
    """The oldest allocation by which the container holds a part of the GPU."""
    parts: Parts
    """The container's parts. If several containers have the same slot, the newest has the largest of their amounts."""
    alone: Parts
    """
    The parts that no later container also has. A later container may reuse parts of an init container. The sum over all
    containers is the part of the GPU that is not free, with one exception. Units that the kubelet also allocated to a
    second pod count here only for the second pod, but are subtracted from `GpuPartitioning.left` for both pods.
    """
    lost: tuple[DeviceID, ...] = ()
    """UUIDs of MIG instances that were created for its slots and no longer exist: the container must be recreated."""

    @property
    def is_left(self) -> bool:
        """Whether later containers have some of its parts."""
        return self.alone != self.parts


class GpuPartitioning(NamedTuple):
    """How one GPU is partitioned now."""

    ways: tuple[Way, ...]
    """The ways in which it is offered; empty: it is not offered. MIG instances may also be offered in time slices."""
    offered: Parts
    held: tuple[UsedParts, ...]
    """One entry per container, in the order of the containers' first allocations."""
    left: Parts
    """The parts that can be allocated now. Empty if the GPU is not healthy."""
    limiter: LimitedBy | None = None
    """What limits containers to their amounts of the GPU, as in `Offer.limited_by`."""

    @property
    def is_whole(self) -> bool:
        """Whether it is offered as a whole, or not at all, and no container holds a part of it."""
        return self.ways in ((), ("whole",)) and all(each.parts.whole for each in self.held)


def partitioning_by_gpu(state: NodeState) -> Mapping[DeviceID, GpuPartitioning]:
    """GPU -> its partitioning, for all GPUs of a node in the hardware's order."""
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
    """GPU -> its parts by container. `profiles`: uuid of a MIG instance -> name of its profile."""
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
    """For a slot that two allocations contain, the larger of their amounts; for any other device, `part`."""
    return larger_amount(part, other) if isinstance(part, Amount) and isinstance(other, Amount) else part


def parts_of_allocation(allocation: Allocation, hardware: Topology) -> Iterable[tuple[DeviceID, DeviceID, HeldPart]]:
    """Each device of an allocation, with its GPU or NIC and the device's part of it; for a slot, an amount."""
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
    """The sum of several `Parts`."""
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
    """The sum of held parts of one GPU. `profiles`: uuid of a MIG instance -> name of its profile."""
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
