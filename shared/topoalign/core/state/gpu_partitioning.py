"""
Describes how a GPU is partitioned, who holds its parts, and what of it can still be given.

A GPU is offered by one sharing strategy: whole, in MIG instances, in time slices, by MPS, in units or in slots. Of
instances in slots the cores are hundredths of each instance: seven of them have 700. Where slots become instances, what
is left is the largest one that can be created. What is held may be of a former strategy: a GPU that a container has
whole is in units since the configuration changed, and nothing of it is left. Example, of a GPU with 80 GiB in units, of
which two containers have 20 and 30 hundredths of computing time with 8 GiB each:

    ways ("units",)   held 20, 8 GiB; 30, 8 GiB   left 50, 64 GiB
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Literal, NamedTuple

from topoalign.core.model.allocations import Allocation, Owner
from topoalign.core.model.holdings import Amount, Instance, Part, TimeSlice, Unit, Whole, base_of, holding_of
from topoalign.core.model.ids import AllocationID, DeviceID
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK, LimitedBy, Offer
from topoalign.core.model.topology.model import Topology
from topoalign.core.state.fold import NodeState
from topoalign.core.state.share_amounts import equal_part, larger_amount, lost_instances, offered_in_slots

Way = Literal["whole", "MIG", "time slices", "MPS", "units", "slots"]


class Parts(NamedTuple):
    """Parts of one GPU."""

    whole: bool = False
    """All of it."""
    instances: tuple[str, ...] = ()
    """Profiles of MIG instances, `1g.10gb`; of one that the GPU does not have any more its uuid."""
    slices: int = 0
    """Time slices, or shares by MPS; of MIG instances, too."""
    slots: int = 0
    """Each with an amount, which is in `cores` and `memory`."""
    cores: int = 0
    """Hundredths of computing time, in units or by slots; by slots of MIG instances those of each instance."""
    memory: int = 0
    """Bytes, in units or by slots."""


class UsedParts(NamedTuple):
    """What one container has of a GPU."""

    owner: Owner | None
    """None: not known yet."""
    allocation: AllocationID
    """The first that it has some of it by."""
    parts: Parts
    """What two of its records name counts once, a slot with the larger amount."""
    alone: Parts
    """
    The parts without those that later containers reuse, as from an init container. A slot counts for the newest
    container. Example: the init container had 60 cores and the app container reuses 30 of them, so the init container
    alone accounts for the other 30, without a slot. These parts add up to what is not left, with one exception: units
    that a kubelet gave to a second pod count here for the later pod, and in what is left for both.
    """
    taken_over: bool = False
    """Whether later containers of its pod have all of it as well, if not as much of a slot; as of an init container."""
    lost: tuple[DeviceID, ...] = ()
    """Uuids of MIG instances that were created for its slots and are gone: the container has to be created again."""

    @property
    def is_left(self) -> bool:
        """Whether a later container has some of it as well, as of an init container."""
        return self.alone != self.parts


class GpuPartitioning(NamedTuple):
    """How one GPU is partitioned now."""

    ways: tuple[Way, ...]
    """How it is offered; empty: it is not. Instances may be in time slices."""
    offered: Parts
    """All that it is offered in."""
    held: tuple[UsedParts, ...]
    """In the order in which the containers got the first of it."""
    left: Parts
    """What may be handed out now: nothing of a GPU that is not healthy."""
    limiter: LimitedBy | None = None
    """What limits its containers to their amounts, as of `Offer.limited_by`."""

    @property
    def is_whole(self) -> bool:
        """Whether it is offered as a whole, or not at all, and nobody has a part of it."""
        return self.ways in ((), ("whole",)) and all(each.parts.whole for each in self.held)


def partitioning_by_gpu(state: NodeState) -> Mapping[DeviceID, GpuPartitioning]:
    """Returns GPU -> its partitioning, for all GPUs of a node in the hardware's order."""
    hardware = state.hardware
    records = [
        AllocationParts(
            each,
            each.owner or each.id,
            each.id if each.owner is None else (each.owner.namespace, each.owner.pod),
            tuple(parts_of_allocation(each, hardware)),
        )
        for each in state.allocations.values()
    ]
    held: dict[DeviceID, dict[object, tuple[Allocation, dict[DeviceID, Part]]]] = {}
    lost = defaultdict[tuple[DeviceID, object], list[DeviceID]](list)
    for allocation, holder, _, its in records:
        for slot, uuid in lost_instances(allocation, hardware).items() if allocation.instances else ():
            lost[base_of(slot), holder].append(uuid)
        for device, card, part in its:
            parts = held.setdefault(card, {}).setdefault(holder, (allocation, {}))[1]
            parts[device] = _larger_part(part, parts[device]) if device in parts else part
    once = _counted_once(records)
    by_gpu: dict[DeviceID, list[tuple[Offer, DeviceID]]] = {}
    for offer in hardware.offered:
        for base in offer.devices:
            by_gpu.setdefault(hardware.card_of(base), []).append((offer, base))
    profiles = {each.uuid: each.profile for gpu in hardware.gpus for each in gpu.mig or ()}
    return {
        gpu: GpuPartitioning(
            ways=_ways_of(gpu, by_gpu.get(gpu, ())),
            offered=_offered_of(hardware, by_gpu.get(gpu, ()), profiles),
            held=tuple(
                UsedParts(
                    first.owner,
                    first.id,
                    every := _count_parts(parts.values(), profiles),
                    every if (gpu, holder) not in once.shared else once.alone(gpu, holder, parts, profiles),
                    (gpu, holder) in once.shared and once.is_taken_over(gpu, holder, parts),
                    tuple(lost.get((gpu, holder), ())),
                )
                for holder, (first, parts) in held.get(gpu, {}).items()
            ),
            left=_remaining_parts(state, gpu, by_gpu.get(gpu, ()), profiles),
            limiter=next((offer.limited_by for offer, _ in by_gpu.get(gpu, ()) if offer.by_amounts), None),
        )
        for gpu in hardware.gpu_by_id
    }


class AllocationParts(NamedTuple):
    """An allocation with what it has of GPUs and NICs (`parts_of_allocation`)."""

    allocation: Allocation
    holder: object
    pod: object
    """Its container and its pod; the allocation's id where they are not known."""
    parts: tuple[tuple[DeviceID, DeviceID, Part], ...]


class CountedOnce(NamedTuple):
    """What is in several records, as where an init container left it to later ones, and whose it is."""

    newest: Mapping[DeviceID, tuple[AllocationParts, Part]]
    """Device that is in several -> the newest of them, and what that has."""
    shared: Set[tuple[DeviceID, object]]
    """GPU and container, for each of which a later record has something as well."""
    surplus: Mapping[tuple[DeviceID, object], Parts]
    """Cores and bytes that one has by slots beyond the later ones. Of a slot with first 60 and then 30 cores 30."""
    not_of_pod: Set[tuple[DeviceID, object]]
    """Those that have something that containers of other pods alone have later, as of units that are given again."""

    def alone(
        self, gpu: DeviceID, holder: object, devices: Mapping[DeviceID, Part], names: Mapping[DeviceID, str]
    ) -> Parts:
        """What a container has of a GPU without what later ones have, of all that it has there. `names`: of profiles."""
        newest = ((device, self.newest.get(device)) for device in devices)
        own = (devices[at] if of is None else of[1] for at, of in newest if of is None or of[0].holder == holder)
        return sum_parts((_count_parts(own, names), self.surplus.get((gpu, holder), Parts())))

    def is_taken_over(self, gpu: DeviceID, holder: object, devices: Iterable[DeviceID]) -> bool:
        """Whether later containers of its pod have all of these devices as well."""
        has_some = any(each not in self.newest or self.newest[each][0].holder == holder for each in devices)
        return not has_some and (gpu, holder) not in self.not_of_pod


def _counted_once(records: Sequence[AllocationParts]) -> CountedOnce:
    """Looks at what later records have as well. `records`: the oldest first."""
    times = Counter(device for record in records for device, _, _ in record.parts)
    several = {device for device, found in times.items() if found > 1}
    newest: dict[DeviceID, tuple[AllocationParts, Part]] = {}
    largest = dict[DeviceID, Part]()
    pods = dict[DeviceID, set[object]]()
    surplus: dict[tuple[DeviceID, object], Parts] = {}
    shared = set[tuple[DeviceID, object]]()
    not_of_pod = set[tuple[DeviceID, object]]()
    for record in reversed(records) if several else ():
        for device, gpu, part in record.parts:
            if device not in several or newest.setdefault(device, (record, part))[0] is record:
                continue
            at = (gpu, record.holder)
            size = largest.get(device, newest[device][1])
            shared.add(at)
            if isinstance(part, Amount) and isinstance(size, Amount):
                more = Parts(cores=max(0, part.cores - size.cores), memory=max(0, part.memory - size.memory))
                surplus[at] = sum_parts((surplus.get(at, Parts()), more))
            largest[device] = _larger_part(part, size)
            if record.pod not in (having := pods.setdefault(device, {newest[device][0].pod})):
                not_of_pod.add(at)
                having.add(record.pod)
    return CountedOnce(newest, shared, surplus, not_of_pod)


def _larger_part(part: Part, other: Part) -> Part:
    """What two records have by one device: by a slot the larger amount of both, else `part`."""
    return larger_amount(part, other) if isinstance(part, Amount) and isinstance(other, Amount) else part


def parts_of_allocation(allocation: Allocation, hardware: Topology) -> Iterable[tuple[DeviceID, DeviceID, Part]]:
    """Device, its GPU or NIC and which part of that it is, for all that an allocation holds; by a slot an amount of it."""
    gpus = {**hardware.cards, **allocation.cards}
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
            found.append(_count_parts((holding_of(unit, hardware.cards).part for unit in handed_out), profiles))
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
            found.append(_count_parts((holding_of(each, hardware.cards).part for each in free), profiles))
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


def _count_parts(parts: Iterable[Part], profiles: Mapping[DeviceID, str]) -> Parts:
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
