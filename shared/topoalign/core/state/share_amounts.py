"""
Computes the free capacity of each GPU that is offered in units or in slots (`ShareLeft`).

Cores are hundredths of a GPU's computing time. Memory is in bytes. A share needs both, so a GPU has no free capacity if
all its cores or all its memory are held. If a container reuses a unit or slot of an init container that has ended, both
allocations contain it. It counts once, and a slot counts with the larger amount.

The id of a unit determines its amount. Example: one container holds `GPU-0::c0` to `GPU-0::c99` and 40 blocks. Two
other containers each hold 50 units of computing time and 10 blocks of GPU-1. Neither GPU has free capacity, although
280 and 300 blocks are not allocated.

Slots limit the number of containers on a GPU. Each slot holds the amount in its allocation. If there is none, it holds
an equal part of the offered amount. A MIG instance in slots is treated as a GPU with the memory of the instance.
Example: a GPU of 80 GiB in ten slots

    held: slot 0 with 30 cores and 20 GiB, slot 1 without an amount: 10 cores and 8 GiB
    free: 8 slots, 60 cores and 52 GiB

If slots become MIG instances, a slot holds the amount of one of the GPU's profiles: its memory, and its hundredths of
the multiprocessors. All instances on the GPU occupy their placements, whatever created them. A slot also occupies a
placement if its instance is reserved or has just been created, and is not yet in the hardware: it is the placement that
an instance of its size would get, one slot after another (`mig.find_place`). So consecutive decisions never use the
same placement. Example: an A100 of 40 GiB has an instance 3g.20gb at slice 4, and a slot of 5 GiB is reserved

    occupied: 4:4 and 3:1; free for 2g.10gb: 0
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction
from itertools import chain
from typing import NamedTuple

import msgspec

from topoalign.core.model.allocations import Allocation, Owner, amounts_of
from topoalign.core.model.byte_sizes import MIB
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID, Namespace, PodName
from topoalign.core.model.topology.derived_tables import computed_once
from topoalign.core.model.topology.device_offers import CORES, MEMORY_BLOCK
from topoalign.core.model.topology.mig import MigPlacement, MigProfile, find_place
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.queries import offers_in_slots
from topoalign.core.state.holding_health import HandedOut

NONE_HELD = Amount(cores=0, memory=0)


class ShareLeft(msgspec.Struct, frozen=True, kw_only=True):
    """The offered and held amounts of one GPU that is offered in units or in slots."""

    offered: Amount
    held: Amount = NONE_HELD
    """May be more than is offered, after a change of the configuration or if a kubelet has allocated too much."""
    sharers: int = 0
    """Number of allocations with units of the GPU, or of held slots."""
    usable: bool = True
    """Whether it is healthy, and not held under another sharing strategy."""
    all_slots: int = 0
    """Maximum number of containers on the GPU. 0: the GPU is in units, and only amounts limit the number."""
    profiles: tuple[MigProfile, ...] = ()
    """The profiles that a slot can become, if slots become MIG instances; else empty."""
    taken: frozenset[MigPlacement] | None = None
    """Occupied placements of such a GPU. None: unknown, so the GPU has no free capacity."""

    @property
    def slots(self) -> int:
        """Number of free slots."""
        return self.all_slots - self.sharers

    @property
    def unused(self) -> bool:
        """Whether no container holds any of it, so that one can get all of it."""
        return self.usable and not self.sharers and not self.held.cores

    @property
    def spent(self) -> bool:
        """Whether no other container can get any of it."""
        is_full = self.left.memory == 0 if self.profiles else is_spent(self.offered, self.held)
        return not self.usable or is_full or (self.all_slots > 0 and self.slots < 1)

    def instance_for(self, memory: int) -> Amount | None:
        """The amount of an instance for `memory` bytes; None: none can be created."""
        place = None if self.taken is None else find_place(self.profiles, self.taken, memory)
        return None if place is None else amount_of_profile(place[0])

    @property
    def left(self) -> Amount:
        """The free amount. If slots become instances: that of the largest instance that can be created."""
        if not self.usable:
            return NONE_HELD
        if self.profiles:
            free = (each for each in self.profiles if self.instance_for(each.memory) is not None)
            largest = max(free, key=_size_of_profile, default=None)
            return NONE_HELD if largest is None else amount_of_profile(largest)
        return Amount(
            cores=max(0, self.offered.cores - self.held.cores),
            memory=max(0, self.offered.memory - self.held.memory),
        )


class HeldOfGpu(msgspec.Struct, frozen=True):
    """The held amount of one GPU in units."""

    amount: Amount
    sharers: int
    """Number of allocations. Under a kubelet, computing time and memory are separate allocations."""
    settled: bool
    """
    Whether a checkpoint of the kubelet contains the containers of all these allocations. The kubelet writes it when a
    container has all requested devices. Before that, the kubelet might still request the other half.
    """


def held_of_gpus(allocations: Iterable[Allocation]) -> Mapping[DeviceID, HeldOfGpu]:
    """GPU -> what these allocations hold of it in units, if anything. `allocations`: oldest first."""
    live = [*allocations]
    pods = {_pod_of(each) for each in live if each.role == "init" and each.amounts} - {None}
    found = dict[DeviceID, HeldOfGpu]()
    taken_over = defaultdict[object, set[DeviceID]](set)
    amounts = [each.amounts for each in live]
    for number, each in enumerate(reversed(live) if pods else (), start=1):
        # an init container holds what no later container of its pod has reused
        if (pod := _pod_of(each)) in pods:
            if each.role == "init":
                amounts[-number] = amounts_of(each.device_ids - taken_over[pod])
            taken_over[pod] |= each.device_ids
    for allocation, of_gpus in zip(live, amounts, strict=True):
        for gpu, amount in of_gpus.items():
            is_settled = bool(allocation.pod_uid)
            if (former := found.get(gpu)) is None:
                found[gpu] = HeldOfGpu(amount, 1, is_settled)
            else:
                total = sum_amounts((former.amount, amount))
                found[gpu] = HeldOfGpu(total, former.sharers + 1, former.settled and is_settled)
    return found


def _pod_of(allocation: Allocation) -> tuple[Namespace, PodName] | None:
    owner = allocation.owner
    return None if owner is None else (owner.namespace, owner.pod)


class Holder(NamedTuple):
    """A container that holds units of GPUs."""

    pod: str
    """UID of the pod, or its namespace and name if the UID is unknown. Empty: the pod is unknown."""
    container: str
    """Name of the container, or the id of the allocation if the pod is unknown."""


def container_holder(owner: Owner, pod_uid: str) -> Holder:
    """A container by its name and the UID of its pod, or by all names if the UID is empty."""
    return Holder(pod_uid or f"{owner.namespace}/{owner.pod}", owner.container)


def _units_by_holder(allocations: Iterable[Allocation]) -> Mapping[Holder, Set[DeviceID]]:
    """Container -> its devices in all of these allocations. The kubelet requests each kind of units separately."""
    found = defaultdict[Holder, set[DeviceID]](set)
    for each in allocations:
        for holder, devices in _holders_in(each):
            found[holder].update(devices)
    return found


def _holders_in(allocation: Allocation) -> Iterator[tuple[Holder, Iterable[DeviceID]]]:
    """The container of an allocation, and the containers that it displaced, each with its devices."""
    owner = allocation.owner
    yield (
        Holder("", allocation.id) if owner is None else container_holder(owner, allocation.pod_uid),
        allocation.device_ids,
    )
    for former in allocation.displaced:
        yield container_holder(former.owner, former.pod_uid), chain.from_iterable(former.devices.values())


def exclusive_conflicts(asked: Mapping[DeviceID, Amount], held: Mapping[DeviceID, Amount]) -> list[DeviceID]:
    """The GPUs of which one container holds all computing time and the other holds any units. Sorted."""
    return sorted(gpu for gpu in asked.keys() & held.keys() if CORES in (asked[gpu].cores, held[gpu].cores))


def preventing_allocations(allocations: Iterable[Allocation], asked: Mapping[DeviceID, Amount]) -> list[Allocation]:
    """
    The allocations of containers that hold all computing time of one of these GPUs. If `asked` has all computing time
    of a GPU: also the allocations of containers that hold any units of it.
    """
    near = [each for each in allocations if not asked.keys().isdisjoint(each.amounts)]
    barred = {
        holder for holder, units in _units_by_holder(near).items() if exclusive_conflicts(asked, amounts_of(units))
    }
    return [each for each in near if any(holder in barred for holder, _ in _holders_in(each))]


@computed_once
def offered_in_units(topology: Topology) -> Mapping[DeviceID, Amount]:
    """GPU in units -> its offered amount, in the hardware's order."""
    found: dict[DeviceID, Amount] = {}
    for offer in topology.offered:
        for gpu in offer.devices if offer.unit is not None else ():
            known = found.get(gpu, NONE_HELD)
            found[gpu] = (
                Amount(cores=offer.replicas, memory=known.memory)
                if offer.unit == "cores"
                else Amount(cores=known.cores, memory=offer.replicas * MEMORY_BLOCK)
            )
    return {gpu: found[gpu] for gpu in topology.gpu_by_id if gpu in found}


def spent_unit_gpus(topology: Topology, allocations: Iterable[Allocation]) -> frozenset[DeviceID]:
    """
    The GPUs of which containers in a checkpoint of the kubelet hold all computing time or all memory. This affects
    which devices are listed and preferred. It is not a reason to refuse a request of the kubelet.
    """
    offered = offered_in_units(topology)
    if not offered:
        return frozenset()
    return frozenset(
        gpu
        for gpu, held in held_of_gpus(allocations).items()
        if gpu in offered and held.settled and is_spent(offered[gpu], held.amount)
    )


def units_left(
    topology: Topology, allocations: Iterable[Allocation], handed_out: HandedOut
) -> Mapping[DeviceID, ShareLeft]:
    """GPU in units -> its offered, held and free amounts, in the hardware's order."""
    units = offered_in_units(topology)
    held = held_of_gpus(allocations) if units else {}
    found = {}
    for gpu, offered in units.items():
        taken = held.get(gpu)
        found[gpu] = ShareLeft(
            offered=offered,
            held=NONE_HELD if taken is None else taken.amount,
            sharers=0 if taken is None else taken.sharers,
            usable=handed_out.health_of(gpu).usable,
        )
    return found


@computed_once
def gpus_by_instances(topology: Topology) -> Mapping[DeviceID, Gpu]:
    """The GPUs whose slots become MIG instances, by id, in the hardware's order."""
    return {
        gpu: topology.gpu_by_id[gpu]
        for gpu, offer in offers_in_slots(topology).items()
        if offer.slots is not None and offer.slots.instances and gpu in topology.gpu_by_id
    }


def amount_of_profile(profile: MigProfile) -> Amount:
    """The amount of a GPU that an instance of this profile holds."""
    return Amount(cores=profile.cores, memory=profile.memory)


def instances_of(allocations: Iterable[Allocation]) -> Mapping[DeviceID, DeviceID]:
    """Slot -> uuid of the instance that was created for it, for all these allocations."""
    return {slot: uuid for each in allocations if each.instances for slot, uuid in each.instances.items()}


def lost_instances(allocation: Allocation, topology: Topology) -> Mapping[DeviceID, DeviceID]:
    """Slot -> uuid of its instance, for instances that no longer exist, for example after a reboot or a GPU reset."""
    gpus = topology.gpu_by_id
    return {
        slot: uuid
        for slot, uuid in allocation.instances.items()
        if base_of(slot) in gpus and all(uuid != each.uuid for each in gpus[base_of(slot)].mig or ())
    }


@computed_once
def offered_in_slots(topology: Topology) -> Mapping[DeviceID, Amount]:
    """
    GPU in slots -> its offered amount: its cores and its memory in whole MiB, each scaled and rounded down. Example:
    81559 MiB scaled by 1.5 is 122338 MiB. If slots become instances: the amount of the largest profile.
    """
    found = {}
    instances = {each.uuid: each.memory for gpu in topology.gpus for each in gpu.mig or ()}
    by_instances = gpus_by_instances(topology)
    for gpu, offer in offers_in_slots(topology).items():
        assert offer.slots is not None, "an offer in slots"
        if gpu in by_instances:
            largest = max(by_instances[gpu].mig_profiles, key=_size_of_profile, default=None)
            found[gpu] = NONE_HELD if largest is None else amount_of_profile(largest)
            continue
        # scalings are exact decimal numbers: 1.1 times 10 is 11
        memory = (instances[gpu] if gpu in instances else topology.gpu_by_id[gpu].memory or 0) // MIB
        found[gpu] = Amount(
            cores=int(CORES * Fraction(repr(offer.slots.core_scaling))),
            memory=int(memory * Fraction(repr(offer.slots.memory_scaling))) * MIB,
        )
    return found


def equal_part(topology: Topology, gpu: DeviceID) -> Amount:
    """The amount of a slot whose amount is unknown. If slots become instances: the amount of the smallest profile."""
    by_instances = gpus_by_instances(topology)
    if gpu in by_instances:
        smallest = min(by_instances[gpu].mig_profiles, key=_size_of_profile, default=None)
        return NONE_HELD if smallest is None else amount_of_profile(smallest)
    return divide_amount(offered_in_slots(topology)[gpu], offers_in_slots(topology)[gpu].replicas)


def _size_of_profile(profile: MigProfile) -> tuple[int, int]:
    return (profile.memory, profile.slices)


def divide_amount(offered: Amount, parts: int) -> Amount:
    """The amount of one of `parts` equal parts, in whole cores and whole MiB."""
    return Amount(cores=offered.cores // parts, memory=offered.memory // MIB // parts * MIB)


def held_by_slot(topology: Topology, allocations: Iterable[Allocation]) -> Mapping[DeviceID, Mapping[DeviceID, Amount]]:
    """GPU in slots -> slot in one of these allocations -> the amount that the slot holds."""
    found: dict[DeviceID, dict[DeviceID, Amount]] = {}
    offers = offers_in_slots(topology)
    for allocation in allocations:
        for gpu in allocation.shared_bases & offers.keys() if allocation.shared_bases else ():
            of_gpu = found.setdefault(gpu, {})
            for slot in (each for each in allocation.device_ids if each != gpu and base_of(each) == gpu):
                amount = allocation.slots.get(slot) or equal_part(topology, gpu)
                of_gpu[slot] = larger_amount(of_gpu.get(slot, NONE_HELD), amount)
    return found


def larger_amount(one: Amount, other: Amount) -> Amount:
    """The larger number of cores and the larger memory of the two."""
    return Amount(cores=max(one.cores, other.cores), memory=max(one.memory, other.memory))


def sum_amounts(amounts: Iterable[Amount]) -> Amount:
    """The sum of the amounts."""
    cores = memory = 0
    for each in amounts:
        cores = cores + each.cores
        memory = memory + each.memory
    return Amount(cores=cores, memory=memory)


def is_spent(offered: Amount, held: Amount) -> bool:
    """
    Whether there is no free capacity for another container. Each needs memory and a core: without a core, it would use
    computing time that others hold.
    """
    return held.cores >= offered.cores or held.memory > offered.memory - MIB


def spent_slots(
    topology: Topology, allocations: Iterable[Allocation], running: Iterable[Allocation]
) -> frozenset[DeviceID]:
    """
    The GPUs in slots without free capacity. Their free slots cannot be allocated. `running`: the allocations whose
    containers have not ended.
    """
    if not offers_in_slots(topology):
        return frozenset()
    offered = offered_in_slots(topology)
    by_instances = gpus_by_instances(topology)
    spent = {
        gpu
        for gpu, slots in held_by_slot(topology, tuple(running)).items()
        if gpu not in by_instances and is_spent(offered[gpu], sum_amounts(slots.values()))
    }
    if by_instances:
        # an instance stays until its allocation is released
        live = tuple(allocations)
        held = held_by_slot(topology, live)
        made = instances_of(live)
        for gpu, each in by_instances.items():
            taken = taken_by(each, held.get(gpu, {}), made)
            if taken is None or find_place(each.mig_profiles, taken, 0) is None:
                spent.add(gpu)
    return frozenset(spent)


def find_instances(
    profiles: Sequence[MigProfile], taken: Iterable[MigPlacement], memories: Iterable[int]
) -> tuple[tuple[MigProfile, MigPlacement], ...] | None:
    """The instances of one GPU for shares of these sizes in bytes, placed in this order. None: they do not all fit."""
    placed = list(taken)
    found = []
    for memory in memories:
        instance = find_place(profiles, placed, memory)
        if instance is None:
            return None
        found.append(instance)
        placed.append(instance[1])
    return tuple(found)


def taken_by(
    gpu: Gpu, held: Mapping[DeviceID, Amount], made: Mapping[DeviceID, DeviceID]
) -> frozenset[MigPlacement] | None:
    """
    The occupied placements of a GPU. `held`: slot -> the amount that it holds. `made`: slot -> uuid of its instance.
    None: the placement of an instance is unknown, or the held slots do not all fit, so nothing can be allocated.
    """
    found = set[MigPlacement]()
    existing = set[DeviceID]()
    for instance in gpu.mig or ():
        if instance.placement is None:
            return None
        found.add(instance.placement)
        existing.add(instance.uuid)
    largest_first = sorted(held.items(), key=lambda each: (-each[1].memory, each[0]))
    memories = (amount.memory for slot, amount in largest_first if made.get(slot) not in existing)
    placed = find_instances(gpu.mig_profiles, found, memories)
    return None if placed is None else frozenset(found.union(place for _, place in placed))


def slots_left(
    topology: Topology, allocations: Iterable[Allocation], handed_out: HandedOut
) -> Mapping[DeviceID, ShareLeft]:
    """GPU in slots -> its offered, held and free amounts, in the hardware's order."""
    if not offers_in_slots(topology):
        return {}
    live = tuple(allocations)
    by_instances = gpus_by_instances(topology)
    held = held_by_slot(topology, live)
    made = instances_of(live) if by_instances else {}
    return {
        gpu: ShareLeft(
            sharers=len(held.get(gpu, ())),
            all_slots=offer.replicas,
            offered=offered_in_slots(topology)[gpu],
            held=sum_amounts(held.get(gpu, {}).values()),
            usable=handed_out.health_of(gpu).usable,
            profiles=by_instances[gpu].mig_profiles if gpu in by_instances else (),
            taken=taken_by(by_instances[gpu], held.get(gpu, {}), made) if gpu in by_instances else None,
        )
        for gpu, offer in offers_in_slots(topology).items()
    }
