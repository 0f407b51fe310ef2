"""
Orders devices by how near they are to others: the same switches, else root complexes, else NUMA nodes, else anywhere.

The rule: of the nearest tier that has enough devices, one of each switch (root complex, NUMA node) in turn. Then one more
for each switch and each root complex of the primary devices that went without, if it has one, and never one that is farther
away than that.

Koordinator gives more than was asked for, too, but counts root complexes: for `rdma: 1`, four GPUs on four switches below
two root complexes get two NICs there, and up to four here.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    Wanted,
    candidate_order_key,
    in_turn,
    take_first,
)
from topoalign.core.deviceshare.gpu_choice import pick_gpus
from topoalign.core.deviceshare.inventory import ANYWHERE, DeviceLocation, InventoryDevice, pcie_switch_id, root_complex
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import DeviceType

NOWHERE = DeviceLocation()

ANY_TIER = 3
"""The last tier: anywhere on the machine."""

GROUPS: Sequence[Callable[[DeviceCandidate], str | int]] = (
    lambda each: device_location(each.device).switch,
    lambda each: device_location(each.device).pcie,
    lambda each: device_location(each.device).node,
    lambda each: 0,
)
"""Tier -> what devices of it take turns by."""


class Around(msgspec.Struct, frozen=True):
    """The switches, root complexes and NUMA nodes that primary devices are on."""

    switches: frozenset[str]
    pcies: frozenset[str]
    nodes: frozenset[int]

    def tier(self, device: InventoryDevice) -> int:
        """How near a device is: 0 on one of the switches, 1 in one of the root complexes, 2 NUMA nodes, 3 elsewhere."""
        place = device_location(device)
        if place.switch in self.switches:
            return 0
        if place.pcie in self.pcies:
            return 1
        return 2 if place.node in self.nodes else ANY_TIER


def collect_surroundings(devices: Iterable[InventoryDevice]) -> Around:
    """Collects where these devices are; unknown places are left out."""
    places = [device_location(device) for device in devices]
    return Around(
        frozenset(place.switch for place in places) - {""},
        frozenset(place.pcie for place in places) - {""},
        frozenset(place.node for place in places) - {ANYWHERE},
    )


def device_location(device: InventoryDevice) -> DeviceLocation:
    """Where a device is; `NOWHERE` if that is not known."""
    return device.place if device.place is not None else NOWHERE


def choose_nearest(
    asked: JointRequest, kind: DeviceType, want: Wanted, offer: Sequence[DeviceCandidate], primary: Around
) -> list[DeviceGrant]:
    """Chooses devices of a type near the primary ones, by the rule of this module. Raises DevicesDoNotFit."""
    if kind is DeviceType.GPU:
        return nearest_gpus(asked, want, offer, primary)
    ranked = sorted(offer, key=candidate_order_key)
    order: list[DeviceCandidate] = []
    for tier, group in enumerate(GROUPS):
        order += in_turn([each for each in ranked if primary.tier(each.device) == tier], group)
    able = take_first(order, want, len(order), asked.demand.hint(kind), compat=asked.compat)
    if len(able) < want.count:
        raise refuse_too_few(kind)
    picked = able[: want.count]
    spare = able[want.count :]
    for scopes, scope_of in ((primary.switches, pcie_switch_id), (primary.pcies, root_complex)):
        for scope in sorted(scopes - {scope_of(device_location(each.device)) for each in picked}):
            picked += [each for each in spare if scope_of(device_location(each.device)) == scope][:1]
    return picked


def nearest_gpus(
    asked: JointRequest, want: Wanted, offer: Sequence[DeviceCandidate], primary: Around
) -> list[DeviceGrant]:
    """Chooses exactly as many GPUs as are asked for, of the nearest tier that has them. Raises DevicesDoNotFit."""
    for tier in range(ANY_TIER):
        try:
            return pick_gpus(asked, want, [each for each in offer if primary.tier(each.device) <= tier])
        except DevicesDoNotFit:
            continue
    return pick_gpus(asked, want, offer)
