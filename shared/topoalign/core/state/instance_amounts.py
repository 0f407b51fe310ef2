"""
What containers hold of GPUs whose slots become MIG instances, and which places of these GPUs are taken.

What is held by a slot is one of the GPU's profiles: its memory and its hundredths of the multiprocessors. Taken are the
places of all instances that the GPU has, whoever made them, and those of slots whose instance is not there yet, because it
is reserved or has just been made: each in turn where an instance of its size would be put (`mig.find_place`). So two
decisions that follow one another never count on the same place.

    A100 of 40 GiB with an instance 3g.20gb at slice 4; a slot of 5 GiB is reserved
    taken: 4:4 and 3:1; free for 2g.10gb: 0
"""

from collections.abc import Iterable, Mapping

from topoalign.core.model.allocations import Allocation
from topoalign.core.model.holdings import Amount, base_of
from topoalign.core.model.ids import DeviceID
from topoalign.core.model.topology.by_amounts import offers_in_slots
from topoalign.core.model.topology.mig import MigPlacement, MigProfile, find_place
from topoalign.core.model.topology.model import Gpu, Topology
from topoalign.core.model.topology.views import made_once


@made_once
def gpus_by_instances(topology: Topology) -> Mapping[DeviceID, Gpu]:
    """The GPUs whose slots become instances, by id, in the hardware's order."""
    return {
        gpu: topology.gpu_by_id[gpu]
        for gpu, offer in offers_in_slots(topology).items()
        if offer.slots is not None and offer.slots.instances and gpu in topology.gpu_by_id
    }


def amount_of(profile: MigProfile) -> Amount:
    """What a container holds of a GPU by an instance of this profile."""
    return Amount(cores=profile.cores, memory=profile.memory)


def largest_of(gpu: Gpu) -> Amount:
    """What there is to hold of a GPU: its largest profile."""
    found = max(gpu.mig_profiles, key=lambda each: (each.memory, each.slices), default=None)
    return Amount(cores=0, memory=0) if found is None else amount_of(found)


def smallest_of(gpu: Gpu) -> Amount:
    """What a slot holds of which it is not known how much: the smallest profile."""
    found = min(gpu.mig_profiles, key=lambda each: (each.memory, each.slices), default=None)
    return Amount(cores=0, memory=0) if found is None else amount_of(found)


def taken_of(gpu: Gpu, slots: Iterable[tuple[DeviceID, Amount, DeviceID | None]]) -> frozenset[MigPlacement] | None:
    """
    The places of a GPU that are taken. `slots`: those that are held, each with what is held by it and the uuid of its
    instance, None: it has none yet. None: it is not known where all instances are, and nothing is to be had.
    """
    found, there = set[MigPlacement](), set[DeviceID]()
    for instance in gpu.mig or ():
        if instance.placement is None:
            return None
        found.add(instance.placement)
        there.add(instance.uuid)
    for _, amount, uuid in sorted(slots, key=lambda each: (-each[1].memory, each[0])):
        if uuid is None or uuid not in there:
            place = find_place(gpu.mig_profiles, found, amount.memory)
            if place is None:
                return None  # more is held than there is room for: nothing is to be had until that is known better
            found.add(place[1])
    return frozenset(found)


def instances_of(allocations: Iterable[Allocation]) -> Mapping[DeviceID, DeviceID]:
    """Slot -> uuid of the instance that was made for it, of all these allocations."""
    return {slot: uuid for each in allocations if each.instances for slot, uuid in each.instances.items()}


def lost_instances(allocation: Allocation, topology: Topology) -> Mapping[DeviceID, DeviceID]:
    """
    Slot -> uuid of its instance, for those instances of an allocation that its GPUs do not have any more, as after a reboot
    or a reset: its container cannot use them, nor start again, and has to be made anew.
    """
    gpus = topology.gpu_by_id
    return {
        slot: uuid
        for slot, uuid in allocation.instances.items()
        if base_of(slot) in gpus and all(uuid != each.uuid for each in gpus[base_of(slot)].mig or ())
    }
