"""
How much of each GPU is left, where GPUs are offered in slots. A MIG instance in slots counts as a GPU of its memory, and
cores are hundredths of its computing time.

Slots bound how many containers are on a GPU; what each of them holds of it is an amount of cores and of memory, which is in
the record of its grant. Of a slot of which the record has no amount it is an equal part of what is offered. Example: a GPU
of 80 GiB in ten slots

    held: slot 0 with 30 cores and 20 GiB, slot 1 without an amount: 10 cores and 8 GiB
    left: 8 slots, 60 cores and 52 GiB

Two allocations may name one slot: an init container that has ended, and the container that took it over. It is held once,
with the larger amount of both.
"""

from collections.abc import Iterable, Mapping
from fractions import Fraction

import msgspec

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.mig import MigPlacement, MigProfile, find_place
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.offers import CORES
from topoalign.core.model.topology.views import made_once
from topoalign.core.state.device_health import HandedOut
from topoalign.core.state.instance_amounts import (
    amount_of,
    gpus_by_instances,
    instances_of,
    largest_of,
    smallest_of,
    taken_of,
)

MIB = 1024 * 1024
"""Bytes."""
NONE_HELD = Amount(cores=0, memory=0)


class SlotsLeft(msgspec.Struct, frozen=True):
    """What is offered of one GPU in slots, and what of it is left."""

    slots: int
    """That nobody has."""
    all_slots: int
    offered: Amount
    """What there is to hold of it, scaled."""
    held: Amount
    """It may be more than is offered: after a change of the configuration, or where a kubelet has insisted."""
    usable: bool
    """Whether it is healthy, and nobody holds it in another way."""
    profiles: tuple[MigProfile, ...] = ()
    """What a slot can become, where slots become MIG instances; empty: they do not."""
    taken: frozenset[MigPlacement] | None = None
    """Of such a GPU the places that are taken. None: that is not known, and nothing is to be had."""

    @property
    def sharers(self) -> int:
        """The slots that are held: so many containers hold some of the GPU."""
        return self.all_slots - self.slots

    def instance_for(self, memory: int) -> Amount | None:
        """What an instance with so many bytes has, where one can be made; None: none can."""
        place = None if self.taken is None else find_place(self.profiles, self.taken, memory)
        return None if place is None else amount_of(place[0])

    @property
    def left(self) -> Amount:
        """What nobody holds; of a GPU whose slots become instances the largest that can be made."""
        if not self.usable:
            return NONE_HELD
        if self.profiles:
            free = (each for each in self.profiles if self.instance_for(each.memory) is not None)
            largest = max(free, key=lambda each: (each.memory, each.slices), default=None)
            return NONE_HELD if largest is None else amount_of(largest)
        return Amount(
            cores=max(0, self.offered.cores - self.held.cores),
            memory=max(0, self.offered.memory - self.held.memory),
        )


@made_once
def offered_in_slots(topology: Topology) -> Mapping[DeviceID, Amount]:
    """
    GPU in slots -> what there is to hold of it: its cores and its memory in whole MiB, each times its scaling and rounded
    down. 81559 MiB scaled by 1.5 are 122338.
    """
    found, instances = {}, {each.uuid: each.memory for gpu in topology.gpus for each in gpu.mig or ()}
    for gpu, offer in offers_in_slots(topology).items():
        assert offer.slots is not None, "an offer in slots"
        if gpu in gpus_by_instances(topology):
            found[gpu] = largest_of(gpus_by_instances(topology)[gpu])
            continue
        memory = (instances[gpu] if gpu in instances else topology.gpu_by_id[gpu].memory or 0) // MIB
        found[gpu] = Amount(
            cores=scaled(CORES, offer.slots.core_scaling),
            memory=scaled(memory, offer.slots.memory_scaling) * MIB,
        )
    return found


def scaled(amount: int, scaling: float) -> int:
    """A multiple, rounded down, with the scaling as it is written: 1.1 times 10 is 11."""
    return int(amount * Fraction(repr(scaling)))


def equal_part(topology: Topology, gpu: DeviceID) -> Amount:
    """What a slot of a GPU in slots holds of it where nothing else is known; the smallest instance, where it becomes one."""
    if gpu in gpus_by_instances(topology):
        return smallest_of(gpus_by_instances(topology)[gpu])
    return part_of(offered_in_slots(topology)[gpu], offers_in_slots(topology)[gpu].replicas)


def part_of(offered: Amount, parts: int) -> Amount:
    """One of so many equal parts, in whole cores and MiB."""
    return Amount(cores=offered.cores // parts, memory=offered.memory // MIB // parts * MIB)


def held_by_slot(topology: Topology, allocations: Iterable[Allocation]) -> Mapping[DeviceID, Mapping[DeviceID, Amount]]:
    """GPU in slots -> slot that one of these allocations has -> what is held by it."""
    found: dict[DeviceID, dict[DeviceID, Amount]] = {}
    offers = offers_in_slots(topology)
    for allocation in allocations:
        for gpu in allocation.shared_bases & offers.keys() if allocation.shared_bases else ():
            of_gpu = found.setdefault(gpu, {})
            for slot in slots_of(allocation.device_ids, gpu):
                amount = allocation.slots.get(slot) or equal_part(topology, gpu)
                of_gpu[slot] = larger(of_gpu.get(slot, NONE_HELD), amount)
    return found


def slots_of(devices: Iterable[DeviceID], gpu: DeviceID) -> list[DeviceID]:
    """Those of the devices that are shares of this GPU."""
    return [device for device in devices if device != gpu and base_of(device) == gpu]


def larger(one: Amount, other: Amount) -> Amount:
    """As much of each kind as the larger one has."""
    return Amount(cores=max(one.cores, other.cores), memory=max(one.memory, other.memory))


def total(amounts: Iterable[Amount]) -> Amount:
    """All of them together."""
    cores = memory = 0
    for each in amounts:
        cores, memory = cores + each.cores, memory + each.memory
    return Amount(cores=cores, memory=memory)


def is_spent(offered: Amount, held: Amount) -> bool:
    """Whether nothing is left: another container needs memory, and a core, without which it would take others' time."""
    return held.cores >= offered.cores or held.memory > offered.memory - MIB


def spent_slots(
    topology: Topology, allocations: Iterable[Allocation], running: Iterable[Allocation]
) -> frozenset[DeviceID]:
    """
    The GPUs in slots of which all cores or all memory are held by `running` ones of the allocations, or all places for
    instances, which stay until a record has ended. Their free slots are not to be had.
    """
    if not offers_in_slots(topology):
        return frozenset()
    live = tuple(allocations)
    offered, by_instances = offered_in_slots(topology), gpus_by_instances(topology)
    spent = {
        gpu
        for gpu, slots in held_by_slot(topology, tuple(running)).items()
        if gpu not in by_instances and is_spent(offered[gpu], total(slots.values()))
    }
    if by_instances:
        held, made = held_by_slot(topology, live), instances_of(live)
        for gpu, each in by_instances.items():
            taken = taken_by(each, held.get(gpu, {}), made)
            if taken is None or find_place(each.mig_profiles, taken, 0) is None:
                spent.add(gpu)
    return frozenset(spent)


def taken_by(
    gpu: Gpu, held: Mapping[DeviceID, Amount], made: Mapping[DeviceID, DeviceID]
) -> frozenset[MigPlacement] | None:
    """The places of a GPU that are taken: `held` by slots, `made`: slot -> its instance. None: that is not known."""
    return taken_of(gpu, [(slot, amount, made.get(slot)) for slot, amount in held.items()])


def slots_left(
    topology: Topology, allocations: Iterable[Allocation], handed_out: HandedOut
) -> Mapping[DeviceID, SlotsLeft]:
    """GPU -> what is left of it, in the hardware's order, for those that are offered in slots."""
    if not offers_in_slots(topology):
        return {}
    live, by_instances = tuple(allocations), gpus_by_instances(topology)
    held, made = held_by_slot(topology, live), instances_of(live) if by_instances else {}
    return {
        gpu: SlotsLeft(
            slots=offer.replicas - len(held.get(gpu, ())),
            all_slots=offer.replicas,
            offered=offered_in_slots(topology)[gpu],
            held=total(held.get(gpu, {}).values()),
            usable=handed_out.health_of(gpu).usable,
            profiles=by_instances[gpu].mig_profiles if gpu in by_instances else (),
            taken=taken_by(by_instances[gpu], held.get(gpu, {}), made) if gpu in by_instances else None,
        )
        for gpu, offer in offers_in_slots(topology).items()
    }
