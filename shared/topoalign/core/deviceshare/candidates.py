"""
Selects the devices that may be considered, and counts how many are wanted of each type (koordinator a7a1b76b, sections
on hints).

A device may be considered if it is near the NUMA nodes asked for (or of no known node) and its labels match the selector.
With `exclusivePolicy` the default also considers what other pods have: `DeviceLevel` takes untouched devices only,
`PCIeLevel` only devices with no other device of their type in use next to them. Koordinator computes the latter and
discards it.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from itertools import chain, zip_longest

import msgspec

from topoalign.core.deviceshare.annotations import Hint
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.device_scores import DeviceScorer, score_device
from topoalign.core.deviceshare.inventory import ANYWHERE, InventoryDevice, InventoryFunction, NodeInventory
from topoalign.core.deviceshare.joint_refusals import refuse_missing_type
from topoalign.core.deviceshare.koordinator_names import RESOURCES, WHOLE, DeviceType, Exclusive, Strategy
from topoalign.core.deviceshare.labels import selector_matches
from topoalign.core.deviceshare.node_units import GpuUnits
from topoalign.core.deviceshare.request_combinations import Quantities
from topoalign.core.model.ids import DeviceID

Caps = Mapping[DeviceType, Mapping[int, Quantities]]
"""Type -> minor -> the most that may be taken of it; of a type listed here, other minors may not be taken."""


class Wanted(msgspec.Struct, frozen=True):
    """How many devices of one type are wanted, and what of each."""

    count: int
    each: Quantities


class DeviceCandidate(msgspec.Struct, frozen=True):
    """A device that may be considered, with what is free of it and its score."""

    device: InventoryDevice
    free: Quantities
    score: int = 0

    @property
    def minor(self) -> int:
        """The device's number among the devices of its type."""
        return self.device.minor

    @property
    def pcie(self) -> str:
        """The device's root complex; empty: unknown."""
        return self.device.place.pcie if self.device.place is not None else ""


class DeviceGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A device with what a pod gets of it."""

    device: InventoryDevice
    resources: Quantities
    functions: tuple[InventoryFunction, ...] = ()


Chooser = Callable[[Sequence[DeviceCandidate], int], Sequence[DeviceCandidate]]
"""
(GPUs by minor, those that were left first; how many of them) -> those to take, as many left ones as there can be among them;
or none where it has no preference.
"""


class JointRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The demand of a pod, the devices of a node, and how to choose among them."""

    demand: JointDemand
    inventory: NodeInventory
    nodes: frozenset[int] | None = None
    """NUMA nodes to stay on. None: anywhere."""
    scorer: DeviceScorer | None = None
    chooser: Chooser | None = None
    """Chooses the whole GPUs of a scope that has more than enough. None: the first ones."""
    caps: Caps = {}
    units: Mapping[DeviceID, GpuUnits] | None = None
    """GPU -> the units of it that may be given, where GPUs are given in units. None: they are given whole."""
    step: Callable[[], None] | None = None
    """Called at each step of a search, so that several searches can share one limit: it may raise TooMuchWork."""
    first_look: bool = False
    """
    Whether only the suitability of the node is asked, not the devices: secondary devices of a well-planned node are
    left out.
    """

    @property
    def compat(self) -> bool:
        """Whether Koordinator's answer is wanted, with its known faults."""
        return self.demand.compat


def select_devices(asked: JointRequest, kind: DeviceType) -> tuple[InventoryDevice, ...]:
    """The devices of a type that are in the NUMA nodes and match the selector, healthy or not."""
    selector = asked.demand.hint(kind).selector
    return tuple(
        device
        for device in asked.inventory.by_type[kind]
        if is_in_numa_nodes(device, asked.nodes, compat=asked.compat) and selector_matches(selector, device.labels)
    )


def is_in_numa_nodes(device: InventoryDevice, nodes: Collection[int] | None, *, compat: bool) -> bool:
    """Whether a device is in these NUMA nodes, or in an unknown one. Koordinator leaves out devices without a place."""
    if nodes is None:
        return True
    if device.place is None:
        return not compat
    return device.place.node == ANYWHERE or device.place.node in nodes


def list_candidates(asked: JointRequest, kind: DeviceType, each: Quantities) -> tuple[DeviceCandidate, ...]:
    """The candidates of a type by minor, with what is free of them and their score for a request of `each`."""
    caps = asked.caps.get(kind)
    devices = select_devices(asked, kind)
    if not asked.compat:
        devices = not_disturbed(devices, asked.inventory.by_type[kind], asked.demand.hint(kind))
    return tuple(
        DeviceCandidate(device, free, score_device(asked.scorer, device.total, free, each) if asked.scorer else 0)
        for device in devices
        if caps is None or device.minor in caps
        for free in [device.free if caps is None else cap_free(device.free, caps[device.minor])]
    )


def cap_free(free: Quantities, cap: Quantities) -> dict[str, int]:
    """Limits what is free of a device to what may be taken of it."""
    return {name: min(amount, cap.get(name, 0)) for name, amount in free.items()}


def not_disturbed(
    devices: Sequence[InventoryDevice], all_of_type: Sequence[InventoryDevice], hint: Hint
) -> tuple[InventoryDevice, ...]:
    """The devices that `exclusivePolicy` allows: unused ones, or those with none of their type in use next to them."""
    if hint.exclusive_policy == Exclusive.DEVICE:
        return tuple(device for device in devices if not device.busy)
    if hint.exclusive_policy == Exclusive.PCIE:
        taken = {pcie_neighbourhood(device) for device in all_of_type if device.busy}
        return tuple(device for device in devices if pcie_neighbourhood(device) not in taken)
    return tuple(devices)


def pcie_neighbourhood(device: InventoryDevice) -> tuple[str, str | int]:
    """The key of what a device shares with others on PCIe: the switches, else the root complex, else nothing."""
    place = device.place
    if place is not None and (place.switch or place.pcie):
        return ("switch", place.switch) if place.switch else ("pcie", place.pcie)
    return ("device", device.minor)


def has_requested(candidate: DeviceCandidate, each: Quantities, *, compat: bool) -> bool:
    """Whether a device has what is asked. Koordinator ignores a resource that the device does not have at all."""
    free = candidate.free
    if not any(free.values()):
        return False
    return all(amount <= free.get(name, amount if compat else 0) for name, amount in each.items())


def free_function(candidate: DeviceCandidate, hint: Hint) -> InventoryFunction | None:
    """The unused virtual function with the lowest address, one that an init container left first; None: no such."""
    selector = hint.vf_selector
    device = candidate.device
    unused = (
        function
        for group in device.groups
        if selector_matches(selector, group.labels)
        for function in group.functions
        if function.bus not in device.used_functions
    )
    return min(unused, key=lambda each: (each.bus not in device.left_functions, each.bus), default=None)


def count_wanted(asked: JointRequest, kind: DeviceType) -> Wanted:
    """How many devices of a type are wanted, and what of each. Raises DevicesDoNotFit where the node has none."""
    devices = asked.inventory.by_type[kind]
    if not devices:
        raise refuse_missing_type(kind)
    if kind is DeviceType.GPU:
        gpu = asked.demand.gpu
        assert gpu is not None, "only types that are asked for are looked at"
        return Wanted(gpu.count, gpu.each)
    found = wanted_units(asked, kind)
    if not found.count:
        raise refuse_missing_type(kind)
    if asked.demand.hint(kind).vf_selector is not None and not any(device.groups for device in devices):
        raise refuse_missing_type(kind, "VirtualFunctions")
    return found


def wanted_units(asked: JointRequest, kind: DeviceType) -> Wanted:
    """
    How many devices are wanted of a type that is asked for in units, and what of each: that depends on the hint.

    With `RequestsAsCount` Koordinator takes 100 units for a hundred devices; the default takes them for one, as
    without.
    """
    (name,) = RESOURCES[kind]
    hint = asked.demand.hint(kind)
    amount = asked.demand.requests[kind][name]
    alone = hint.exclusive_policy == Exclusive.DEVICE
    counted = hint.allocate_strategy == Strategy.REQUESTS_AS_COUNT
    if (amount > WHOLE and amount % WHOLE == 0) or (amount == WHOLE and counted and not asked.compat):
        return Wanted(amount // WHOLE, {name: WHOLE})
    if counted:
        return Wanted(amount, {name: WHOLE if alone else 1})
    each = {name: WHOLE if alone and not asked.compat else amount}
    if hint.allocate_strategy == Strategy.APPLY_FOR_ALL:
        return Wanted(len(all_of(asked, kind)), each)
    return Wanted(1, each)


def all_of(asked: JointRequest, kind: DeviceType) -> list[InventoryDevice]:
    """The devices that `ApplyForAll` means: healthy ones in the NUMA nodes; with Koordinator all of the node."""
    if not asked.compat:
        return [device for device in select_devices(asked, kind) if device.healthy]
    selector = asked.demand.hint(kind).selector
    return [device for device in asked.inventory.by_type[kind] if selector_matches(selector, device.labels)]


# Takes devices of a type one by one in an order, with a virtual function of each where wanted.
#
# Koordinator's order for secondary devices (a7a1b76b): devices on the primary ones' PCIe come first, one of each PCIe
# in turn, then all others.


def by_minor(candidates: Iterable[DeviceCandidate], preferred: Collection[int] = ()) -> list[DeviceCandidate]:
    """Sorts candidates: the preferred minors first, then by rank."""
    return sorted(candidates, key=lambda each: (each.minor not in preferred, *candidate_order_key(each)))


def by_preferred_pcie(candidates: Iterable[DeviceCandidate], preferred: Collection[str]) -> list[DeviceCandidate]:
    """Sorts candidates: one of each preferred PCIe in turn, then the others by rank."""
    ranked = sorted(candidates, key=candidate_order_key)
    near = [each for each in ranked if each.pcie in preferred]
    return [*in_turn(near, lambda each: each.pcie), *(each for each in ranked if each.pcie not in preferred)]


def in_turn(ranked: Sequence[DeviceCandidate], group: Callable[[DeviceCandidate], Hashable]) -> list[DeviceCandidate]:
    """Sorts candidates: the best of each group, by rank, then the second of each, and so on."""
    groups: dict[Hashable, list[DeviceCandidate]] = {}
    for each in ranked:
        groups.setdefault(group(each), []).append(each)
    rounds = zip_longest(*groups.values())
    return list(chain.from_iterable(sorted(filter(None, each), key=candidate_order_key) for each in rounds))


def candidate_order_key(candidate: DeviceCandidate) -> tuple[bool, int, int]:
    """The key that sorts candidates of one type, the best first."""
    return (
        not candidate.device.left,  # one that an init container of the pod left,
        -candidate.score,  # then the best score,
        candidate.minor,  # then the lowest minor, so that no tie is left to chance
    )


def device_share(candidate: DeviceCandidate, wanted: Wanted, hint: Hint, *, compat: bool) -> DeviceGrant | None:
    """What a pod would get of this device; None if the device does not have enough."""
    if not has_requested(candidate, wanted.each, compat=compat):
        return None
    if hint.vf_selector is None:
        return DeviceGrant(device=candidate.device, resources=wanted.each)
    function = free_function(candidate, hint)
    return DeviceGrant(device=candidate.device, resources=wanted.each, functions=(function,)) if function else None


def take_first(
    order: Iterable[DeviceCandidate], wanted: Wanted, most: int, hint: Hint, *, compat: bool
) -> list[DeviceGrant]:
    """Gives of the first devices of an order that have enough, at most `most`."""
    picked: list[DeviceGrant] = []
    for candidate in order:
        if len(picked) >= most:
            break
        if (found := device_share(candidate, wanted, hint, compat=compat)) is not None:
            picked.append(found)
    return picked
