"""
Selects candidate devices, and computes the requested number of each type (koordinator a7a1b76b, sections on hints).

A device is a candidate if it is near the requested NUMA nodes, or its NUMA node is unknown, and its labels match the
selector. Without `compat`, `exclusivePolicy` also takes devices in use into account. `DeviceLevel` selects only devices
that are not in use. `PCIeLevel` selects only devices with no device of their type in use on the same switch or, if that
is unknown, on the same root complex. Koordinator computes this exclusion and discards the result.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice, zip_longest

import msgspec

from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.device_scores import DeviceScorer, score_device
from topoalign.core.deviceshare.inventory import ANYWHERE, InventoryDevice, InventoryFunction, NodeInventory
from topoalign.core.deviceshare.joint_refusals import refuse_missing_type
from topoalign.core.deviceshare.koordinator_names import RESOURCES, WHOLE, DeviceType, Exclusive, Strategy
from topoalign.core.deviceshare.labels import selector_matches
from topoalign.core.deviceshare.node_units import GpuUnits
from topoalign.core.deviceshare.request_combinations import Quantities, Wanted
from topoalign.core.model.ids import DeviceID


class DeviceCandidate(msgspec.Struct, frozen=True):
    """A device that can be chosen, with its free amounts and its score."""

    device: InventoryDevice
    free: Quantities
    score: int = 0

    @property
    def minor(self) -> int:
        """The device's number among the devices of its type."""
        return self.device.minor


class DeviceGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A device, with the amounts and virtual functions of it that a pod gets."""

    device: InventoryDevice
    resources: Quantities
    functions: tuple[InventoryFunction, ...] = ()


Chooser = Callable[[Sequence[DeviceCandidate], int], Sequence[DeviceCandidate]]
"""
(GPUs by minor, those to reuse from an init container first; how many to choose) -> the chosen GPUs, with as many GPUs
to reuse as possible. Empty: the chooser has no preference.
"""


class JointRequest(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The demand of a pod, the devices of a node, and how to choose among them."""

    demand: JointDemand
    inventory: NodeInventory
    nodes: frozenset[int] | None = None
    """The NUMA nodes to choose devices from. None: all NUMA nodes."""
    scorer: DeviceScorer | None = None
    chooser: Chooser | None = None
    """Chooses whole GPUs in a scope that has more than enough. None: the first GPUs are chosen."""
    units: Mapping[DeviceID, GpuUnits] | None = None
    """GPU -> its units that can be allocated, if GPUs are allocated in units. None: GPUs are allocated whole."""
    step: Callable[[], None] | None = None
    """Called at each step of a search, so that several searches can share one limit. It can raise TooMuchWork."""

    @property
    def compat(self) -> bool:
        """Whether to decide as Koordinator does, including its known bugs."""
        return self.demand.compat

    @cached_property
    def kinds(self) -> Sequence[DeviceType]:
        """The requested device types."""
        return [kind for kind in DeviceType if kind in self.demand.requests]

    @cached_property
    def wants(self) -> Mapping[DeviceType, Wanted]:
        """What is requested of each type. Raises DevicesDoNotFit if the node has no devices of a type."""
        return {kind: count_wanted(self, kind) for kind in self.kinds}

    @cached_property
    def candidates(self) -> Mapping[DeviceType, Sequence[DeviceCandidate]]:
        """The candidates of each type, by minor. Raises DevicesDoNotFit if `wants` does."""
        return {kind: list_candidates(self, kind, want.each) for kind, want in self.wants.items()}


def select_devices(asked: JointRequest, kind: DeviceType) -> tuple[InventoryDevice, ...]:
    """The devices of a type on the NUMA nodes, or on an unknown one, that match the selector, healthy or not."""
    selector = asked.demand.hint(kind).selector

    def is_near(device: InventoryDevice) -> bool:
        if asked.nodes is None:
            return True
        if device.place is None:
            return not asked.compat  # Koordinator skips devices without a known location
        return device.place.node == ANYWHERE or device.place.node in asked.nodes

    devices = asked.inventory.by_type[kind]
    return tuple(each for each in devices if is_near(each) and selector_matches(selector, each.labels))


def list_candidates(asked: JointRequest, kind: DeviceType, each: Quantities) -> tuple[DeviceCandidate, ...]:
    """The candidates of a type by minor, with their free amounts and their scores for a request of `each`."""
    devices = select_devices(asked, kind)
    exclusive = "" if asked.compat else asked.demand.hint(kind).exclusive_policy
    if exclusive == Exclusive.DEVICE:
        devices = tuple(device for device in devices if not device.busy)
    elif exclusive == Exclusive.PCIE:
        in_use = {_pcie_neighbourhood(device) for device in asked.inventory.by_type[kind] if device.busy}
        devices = tuple(device for device in devices if _pcie_neighbourhood(device) not in in_use)
    return tuple(
        DeviceCandidate(
            device, device.free, score_device(asked.scorer, device.total, device.free, each) if asked.scorer else 0
        )
        for device in devices
    )


def _pcie_neighbourhood(device: InventoryDevice) -> tuple[str, str | int]:
    place = device.location
    if place.switch:
        return ("switch", place.switch)
    return ("pcie", place.pcie) if place.pcie else ("device", device.minor)


def has_requested(candidate: DeviceCandidate, each: Quantities, *, compat: bool) -> bool:
    """Whether a device has enough free. Koordinator ignores a requested resource that the device does not have."""
    free = candidate.free
    if not any(free.values()):
        return False
    return all(amount <= free.get(name, amount if compat else 0) for name, amount in each.items())


def count_wanted(asked: JointRequest, kind: DeviceType) -> Wanted:
    """How many devices of a type are requested, and how much of each. Raises DevicesDoNotFit if the node has none."""
    devices = asked.inventory.by_type[kind]
    if not devices:
        raise refuse_missing_type(kind)
    if kind is DeviceType.GPU:
        gpu = asked.demand.gpu
        assert gpu is not None, "only types that are asked for are looked at"
        return gpu
    found = wanted_units(asked, kind)
    if not found.count:
        raise refuse_missing_type(kind)
    if asked.demand.hint(kind).vf_selector is not None and not any(device.groups for device in devices):
        raise refuse_missing_type(kind, "VirtualFunctions")
    return found


def wanted_units(asked: JointRequest, kind: DeviceType) -> Wanted:
    """For a type that is requested in units: how many devices are requested, and how many units of each."""
    (name,) = RESOURCES[kind]
    hint = asked.demand.hint(kind)
    amount = asked.demand.requests[kind][name]
    alone = hint.exclusive_policy == Exclusive.DEVICE
    counted = hint.allocate_strategy == Strategy.REQUESTS_AS_COUNT
    # With `RequestsAsCount`, Koordinator reads 100 units as 100 devices. Without `compat`, they are one device.
    if (amount > WHOLE and amount % WHOLE == 0) or (amount == WHOLE and counted and not asked.compat):
        return Wanted(amount // WHOLE, {name: WHOLE})
    if counted:
        return Wanted(amount, {name: WHOLE if alone else 1})
    each = {name: WHOLE if alone and not asked.compat else amount}
    if hint.allocate_strategy != Strategy.APPLY_FOR_ALL:
        return Wanted(1, each)
    # All healthy devices on the NUMA nodes. For Koordinator, all devices of the node.
    if asked.compat:
        devices = asked.inventory.by_type[kind]
        return Wanted(sum(selector_matches(hint.selector, device.labels) for device in devices), each)
    return Wanted(sum(device.healthy for device in select_devices(asked, kind)), each)


# Takes devices of a type one by one in order, with a virtual function of each if requested.  Koordinator's order for
# secondary devices (a7a1b76b): first devices on the root complexes of the primary devices, one of each root complex in
# turn, then all others.


def by_minor(candidates: Iterable[DeviceCandidate], preferred: Collection[int] = ()) -> list[DeviceCandidate]:
    """Sorts candidates: the preferred minors first, then by rank."""
    return sorted(candidates, key=lambda each: (each.minor not in preferred, *candidate_order_key(each)))


def by_preferred_pcie(candidates: Iterable[DeviceCandidate], preferred: Collection[str]) -> list[DeviceCandidate]:
    """Sorts candidates: one of each preferred root complex in turn, then the others by rank."""
    ranked = sorted(candidates, key=candidate_order_key)
    near = [each for each in ranked if each.device.location.pcie in preferred]
    others = [each for each in ranked if each.device.location.pcie not in preferred]
    return [*in_turn(near, lambda device: device.location.pcie), *others]


def in_turn(ranked: Sequence[DeviceCandidate], group: Callable[[InventoryDevice], Hashable]) -> list[DeviceCandidate]:
    """Sorts candidates: the best of each group, by rank, then the second of each, and so on."""
    groups: dict[Hashable, list[DeviceCandidate]] = {}
    for each in ranked:
        groups.setdefault(group(each.device), []).append(each)
    rounds = zip_longest(*groups.values())
    return list(chain.from_iterable(sorted(filter(None, each), key=candidate_order_key) for each in rounds))


def candidate_order_key(candidate: DeviceCandidate) -> tuple[bool, int, int]:
    """The key that sorts candidates of one type, the best first."""
    return (
        not candidate.device.left,  # first a device to reuse from an init container of the pod,
        -candidate.score,  # then the best score,
        candidate.minor,  # then the lowest minor, so that the order is deterministic
    )


def device_share(asked: JointRequest, candidate: DeviceCandidate, wanted: Wanted) -> DeviceGrant | None:
    """What a pod would get of this device; None if the device does not have enough."""
    device = candidate.device
    if not has_requested(candidate, wanted.each, compat=asked.compat):
        return None
    selector = asked.demand.hint(device.kind).vf_selector
    if selector is None or device.kind is DeviceType.GPU:  # GPUs are not given as virtual functions
        return DeviceGrant(device=device, resources=wanted.each)
    unused = (
        function
        for group in device.groups
        if selector_matches(selector, group.labels)
        for function in group.functions
        if function.bus not in device.used_functions
    )
    # first a function to reuse from an init container, then the lowest address
    function = min(unused, key=lambda each: (each.bus not in device.left_functions, each.bus), default=None)
    return None if function is None else DeviceGrant(device=device, resources=wanted.each, functions=(function,))


def able_candidates(asked: JointRequest, kind: DeviceType) -> list[DeviceCandidate]:
    """The candidates of a type that have enough, by rank."""
    ranked = sorted(asked.candidates[kind], key=candidate_order_key)
    return [each for each in ranked if device_share(asked, each, asked.wants[kind]) is not None]


def take_first(asked: JointRequest, order: Iterable[DeviceCandidate], wanted: Wanted, most: int) -> list[DeviceGrant]:
    """Grants the first devices in an order that have enough, at most `most` devices."""
    grants = (device_share(asked, candidate, wanted) for candidate in order)
    return list(islice((grant for grant in grants if grant is not None), most))
