"""
Allocates the devices of all types that a pod requests from a node.

Devices of the first type in the joint list (the primary type) are chosen first, and devices of the other types near
them. By default, near means on the same switch, else on the same root complex, else on the same NUMA node, else
anywhere (`_choose_nearest`). `SamePCIe` then searches for primary devices with enough devices of the other types below
the same PCIe scope (`same_pcie`). With `compat`, devices are chosen as by Koordinator a7a1b76b: on the same root
complex, else anywhere. `SamePCIe` is then checked only after all devices are chosen, without a retry.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import msgspec

from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    able_candidates,
    by_preferred_pcie,
    candidate_order_key,
    in_turn,
    take_first,
)
from topoalign.core.deviceshare.gpu_choice import complete_memory, pick_gpus
from topoalign.core.deviceshare.inventory import ANYWHERE, ROOT_COMPLEX, SWITCHES, DeviceLocation, InventoryDevice
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_same_pcie, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.deviceshare.same_pcie import same_pcie

Allocation = Mapping[DeviceType, Sequence[DeviceGrant]]
"""Type -> the granted devices, by minor."""

TIERS: Sequence[Callable[[DeviceLocation], str | int]] = (
    SWITCHES,
    ROOT_COMPLEX,
    attrgetter("node"),
    lambda place: 0,
)
"""What devices that are near each other share, the nearest tier first. The last tier is the whole machine."""


def allocate_all_types(asked: JointRequest) -> Allocation:
    """Chooses the devices of all types that a pod requests from a node. Raises DevicesDoNotFit and TooMuchWork."""
    if not asked.compat:
        # Check that there are enough devices of each type before GPUs are chosen in vain. If there are too few GPUs,
        # their choice reports it, with a more precise reason if a partition or a scope is required.
        short = [kind for kind, want in asked.wants.items() if len(able_candidates(asked, kind)) < want.count]
        if short and DeviceType.GPU not in short:
            raise refuse_too_few(short[0])
    given = _allocate_jointly(asked) if asked.demand.joint and len(asked.kinds) > 1 else {}
    for kind in asked.kinds:
        if kind not in given:
            given[kind] = _choose_as_upstream(asked, kind)
    if DeviceType.GPU in given:
        given[DeviceType.GPU] = [complete_memory(each) for each in given[DeviceType.GPU]]
    return {kind: sorted(each, key=lambda one: one.device.minor) for kind, each in given.items()}


def _allocate_jointly(asked: JointRequest) -> dict[DeviceType, list[DeviceGrant]]:
    """Chooses devices of the types of the joint list."""
    joint = asked.demand.joint
    if not asked.compat and asked.demand.same_pcie and len(joint) > 1:
        return same_pcie(asked)
    primary, *secondary = joint
    given = {primary: _choose_as_upstream(asked, primary)}
    if not given[primary]:
        raise DevicesDoNotFit("node(s) Insufficient primary device")
    choose_others = _choose_as_upstream if asked.compat else _choose_nearest
    for kind in secondary:
        given[kind] = choose_others(asked, kind, given[primary])
    if asked.compat and asked.demand.same_pcie:
        places = [_root_complexes_of(given[kind]) for kind in joint]
        if any(place != places[0] for place in places):
            raise refuse_same_pcie()
    return given


def _choose_as_upstream(
    asked: JointRequest, kind: DeviceType, primary: Sequence[DeviceGrant] = ()
) -> list[DeviceGrant]:
    """
    Chooses as Koordinator does: first devices on the root complexes of the primary devices, and up to one device for
    each of these if that is more than requested.
    """
    want = asked.wants[kind]
    candidates = asked.candidates[kind]
    preferred = _root_complexes_of(primary)
    if asked.demand.same_pcie and len(preferred) > want.count:
        want = msgspec.structs.replace(want, count=len(preferred))
    if kind is DeviceType.GPU:
        return pick_gpus(asked, want, candidates)
    most = max(want.count, len(preferred))
    picked = take_first(asked, by_preferred_pcie(candidates, preferred), want, most)
    if len(picked) < want.count:
        raise refuse_too_few(kind)
    return picked


def _root_complexes_of(given: Sequence[DeviceGrant]) -> frozenset[str]:
    return frozenset(each.device.place.pcie for each in given if each.device.place is not None)


def _choose_nearest(asked: JointRequest, kind: DeviceType, primary: Sequence[DeviceGrant]) -> list[DeviceGrant]:
    """
    Chooses devices near the primary devices: from the nearest tiers first, and within a tier one of each switch (root
    complex, NUMA node) in turn. Then it adds one device for each switch and each root complex of the primary devices
    that got none, if one is free there. It adds no devices that are farther away, and no GPUs.

    Koordinator also allocates more devices than requested, but one for each root complex. For `rdma: 1`, four GPUs on
    four switches below two root complexes get two NICs in Koordinator, and up to four here.
    """
    want = asked.wants[kind]
    near = [{key(each.device.location) for each in primary} - {"", ANYWHERE} for key in TIERS]

    def tier_of(device: InventoryDevice) -> int:
        return next(tier for tier, key in enumerate(TIERS) if key(device.location) in near[tier])

    ranked = sorted(asked.candidates[kind], key=candidate_order_key)
    if kind is DeviceType.GPU:
        for farthest in range(len(TIERS) - 1):
            try:
                return pick_gpus(
                    asked, want, [each for each in asked.candidates[kind] if tier_of(each.device) <= farthest]
                )
            except DevicesDoNotFit:
                continue
        return pick_gpus(asked, want, asked.candidates[kind])
    order: list[DeviceCandidate] = []
    for tier in range(len(TIERS)):
        of_tier = [each for each in ranked if tier_of(each.device) == tier]
        order += in_turn(of_tier, lambda device: TIERS[tier_of(device)](device.location))
    able = take_first(asked, order, want, len(order))
    if len(able) < want.count:
        raise refuse_too_few(kind)
    picked = able[: want.count]
    spare = able[want.count :]
    for scope_of in (SWITCHES, ROOT_COMPLEX):
        served = {scope_of(each.device.location) for each in picked}
        for scope in sorted({scope_of(each.device.location) for each in primary} - served - {""}):
            picked += [each for each in spare if scope_of(each.device.location) == scope][:1]
    return picked
