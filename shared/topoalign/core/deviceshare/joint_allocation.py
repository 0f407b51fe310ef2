"""
Allocates the devices of all types that a pod asks of a node.

The first type of the joint list is decided by itself, and the others near what it got. By default near means on the same
switch, else the same root complex, else the same NUMA node, else anywhere (`choose_nearest`), and `SamePCIe` looks for
primary devices that have enough of the others below the same PCIe scope (`same_pcie`). With `compat` it decides as
Koordinator a7a1b76b: the same root complex, else anywhere. `SamePCIe` is then checked once everything is decided,
without a second try.
"""

from collections.abc import Mapping, Sequence

import msgspec

from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    Wanted,
    by_preferred_pcie,
    count_wanted,
    list_candidates,
    take_first,
)
from topoalign.core.deviceshare.gpu_choice import complete_memory, is_shared, pick_gpus
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_same_pcie, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.nearest import choose_nearest, collect_surroundings
from topoalign.core.deviceshare.same_pcie import Offers, Wants, able_ones, same_pcie

Allocation = Mapping[DeviceType, Sequence[DeviceGrant]]
"""Type -> what is given of it, by minor."""


def allocate_all_types(asked: JointRequest) -> Allocation:
    """
    Chooses the devices of all types that a pod asks of a node. Raises DevicesDoNotFit, and TooMuchWork where a search
    for `SamePCIe` does not end within its limit.
    """
    kinds = types_to_give(asked)
    wants = {kind: count_wanted(asked, kind) for kind in kinds}
    offers = {kind: list_candidates(asked, kind, wants[kind].each) for kind in kinds}
    joint = asked.demand.joint if len(kinds) > 1 else ()
    if not asked.compat:
        check_device_counts(asked, kinds, wants, offers)
    given = allocate_jointly(asked, joint, wants, offers)
    for kind in kinds:
        if kind not in given:
            given[kind] = choose_independently(asked, kind, wants[kind], offers[kind])
    if DeviceType.GPU in given:
        given[DeviceType.GPU] = [complete_memory(each) for each in given[DeviceType.GPU]]
    return {kind: sorted(each, key=lambda one: one.device.minor) for kind, each in given.items()}


def types_to_give(asked: JointRequest) -> list[DeviceType]:
    """
    The types to decide: all that something is asked of. On a well-planned node Koordinator's filter looks at the
    primary type alone, if whole GPUs are asked for; its reservation looks at all of them.
    """
    kinds = [kind for kind in DeviceType if kind in asked.demand.requests]
    joint = asked.demand.joint
    if not (joint and asked.first_look and asked.inventory.well_planned and asked.demand.gpu) or is_shared(asked):
        return kinds
    return [kind for kind in kinds if kind == joint[0]]


def check_device_counts(asked: JointRequest, kinds: Sequence[DeviceType], wants: Wants, offers: Offers) -> None:
    """
    Checks that there are enough devices of each type, before GPUs are chosen for nothing. Raises DevicesDoNotFit.

    Not for GPUs: they are counted as soon as they are looked at, and refused for better reasons where only partitions
    or scopes of them will do.
    """
    short = [kind for kind in kinds if len(able_ones(asked, kind, wants[kind], offers[kind])) < wants[kind].count]
    if short and DeviceType.GPU not in short:
        raise refuse_too_few(short[0])


def allocate_jointly(
    asked: JointRequest, joint: Sequence[DeviceType], wants: Wants, offers: Offers
) -> dict[DeviceType, list[DeviceGrant]]:
    """Chooses devices of the types of the joint list. Raises DevicesDoNotFit and TooMuchWork."""
    if not joint:
        return {}
    if not asked.compat and asked.demand.same_pcie and len(joint) > 1:
        return same_pcie(asked, joint, wants, offers)
    primary, *secondary = joint
    given = {primary: choose_independently(asked, primary, wants[primary], offers[primary])}
    if not given[primary]:
        raise DevicesDoNotFit("node(s) Insufficient primary device")
    choose_others = as_upstream if asked.compat else choose_near_primary
    for kind in secondary:
        given[kind] = choose_others(asked, kind, wants[kind], offers[kind], given[primary])
    if asked.compat and asked.demand.same_pcie:
        places = [root_complexes_of(given[kind]) for kind in joint]
        if any(place != places[0] for place in places):
            raise refuse_same_pcie()
    return given


def choose_independently(
    asked: JointRequest, kind: DeviceType, want: Wanted, offer: Sequence[DeviceCandidate]
) -> list[DeviceGrant]:
    """Chooses devices of one type, wherever they are. Raises DevicesDoNotFit."""
    return as_upstream(asked, kind, want, offer, ())


def as_upstream(
    asked: JointRequest,
    kind: DeviceType,
    want: Wanted,
    offer: Sequence[DeviceCandidate],
    primary: Sequence[DeviceGrant],
) -> list[DeviceGrant]:
    """
    Chooses devices as Koordinator does: those on the primary ones' root complexes first, as many as there are of these.
    GPUs may be anywhere. Raises DevicesDoNotFit.
    """
    preferred = root_complexes_of(primary)
    if asked.demand.same_pcie and len(preferred) > want.count:
        want = msgspec.structs.replace(want, count=len(preferred))
    if kind is DeviceType.GPU:
        return pick_gpus(asked, want, offer)
    most = max(want.count, len(preferred))
    picked = take_first(by_preferred_pcie(offer, preferred), want, most, asked.demand.hint(kind), compat=asked.compat)
    if len(picked) < want.count:
        raise refuse_too_few(kind)
    return picked


def choose_near_primary(
    asked: JointRequest,
    kind: DeviceType,
    want: Wanted,
    offer: Sequence[DeviceCandidate],
    primary: Sequence[DeviceGrant],
) -> list[DeviceGrant]:
    """Chooses devices from the tier nearest to the primary ones that has enough. Raises DevicesDoNotFit."""
    return choose_nearest(asked, kind, want, offer, collect_surroundings(each.device for each in primary))


def root_complexes_of(given: Sequence[DeviceGrant]) -> frozenset[str]:
    """The root complexes that devices are on, as far as they are known."""
    return frozenset(each.device.place.pcie for each in given if each.device.place is not None)
