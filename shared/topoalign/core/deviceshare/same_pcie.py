"""
Implements `SamePCIe`: sets of devices in which every device has one of each other type below the same PCIe scope.

Whether a set is suitable depends only on its PCIe scopes: each must have all the types, and all together enough of
each. So scopes are searched instead of devices. The rule: in the smallest suitable part of the machine (a switch, a
root complex, a NUMA node, all), on the same switches, or else on the same root complexes, which is all that Koordinator
asks for; there the fewest scopes, those with the least to spare first.

Koordinator chooses the primary devices without regard to the others, and refuses the node if the others do not fit.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

import msgspec

from topoalign.core.deviceshare.annotations import NO_HINT, Hint
from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    Wanted,
    candidate_order_key,
    device_share,
    in_turn,
    take_first,
)
from topoalign.core.deviceshare.gpu_choice import NOT_ENOUGH, NOT_IN_SCOPE, is_honored, suitable_partitions
from topoalign.core.deviceshare.inventory import DeviceLocation, pcie_switch_id, root_complex
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_same_pcie, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import DeviceType, Level
from topoalign.core.deviceshare.nearest import device_location
from topoalign.core.model.errors import TooMuchWork

MOST_STEPS = 25_000
"""Of a search, about 80 ms. Machines as they are sold need a few dozen."""

Needs = tuple[int, ...]
"""Type by type, how many devices are still needed."""

ScopeOf = Callable[[DeviceLocation], str]
Wants = Mapping[DeviceType, Wanted]
Offers = Mapping[DeviceType, Sequence[DeviceCandidate]]


LOOKS: Sequence[tuple[Level, Callable[[DeviceLocation], tuple[str | int, ...]], ScopeOf]] = (
    (Level.PCIE, lambda place: (place.node, place.pcie, place.switch), pcie_switch_id),
    (Level.PCIE, lambda place: (place.node, place.pcie), pcie_switch_id),
    (Level.PCIE, lambda place: (place.node, place.pcie), root_complex),
    (Level.NUMA_NODE, lambda place: (place.node,), pcie_switch_id),
    (Level.NUMA_NODE, lambda place: (place.node,), root_complex),
    (Level.NODE, lambda place: (), pcie_switch_id),
    (Level.NODE, lambda place: (), root_complex),
)
"""Level of a part of the machine, what devices of one such part have in common, and what counts as the same PCIe."""


class PcieScope(msgspec.Struct, frozen=True):
    """A PCIe scope that has devices of all the types."""

    id: str
    place: DeviceLocation
    """Of its first primary device."""
    busy: bool
    """Whether a primary device of it is in use."""
    devices: Mapping[DeviceType, Sequence[DeviceCandidate]]
    """Those that have enough."""


Scopes = Mapping[ScopeOf, Sequence[PcieScope]]


class PcieSearchBudget:
    """Counts the steps of a search against its limit, and reports each to the caller."""

    def __init__(self, report_step: Callable[[], None] | None) -> None:
        self.left = MOST_STEPS
        self.report_step = report_step

    def spend(self) -> None:
        """Counts one step. Raises TooMuchWork when the limit is exceeded."""
        if self.report_step is not None:
            self.report_step()
        self.left -= 1
        if self.left < 0:
            raise TooMuchWork(
                f"no set of devices for SamePCIe was found in {MOST_STEPS} steps, nor that there is none",
                "ask for fewer devices, or leave out requiredScope: the nearest ones are given then",
            )


def same_pcie(
    asked: JointRequest, joint: Sequence[DeviceType], wants: Wants, offers: Offers
) -> dict[DeviceType, list[DeviceGrant]]:
    """Chooses devices of all types of the joint list, the primary one first. Raises DevicesDoNotFit, TooMuchWork."""
    able = {kind: able_ones(asked, kind, wants[kind], offers[kind]) for kind in joint}
    for kind in joint:
        if len(able[kind]) < wants[kind].count:
            raise DevicesDoNotFit(NOT_ENOUGH) if kind is DeviceType.GPU else refuse_too_few(kind)
    scopes: Scopes = {scope_of: scopes_of(asked, joint, able, scope_of) for scope_of in (pcie_switch_id, root_complex)}
    found = by_partition(asked, joint, wants, offers, scopes)
    if found is None and not (DeviceType.GPU in joint and is_honored(asked)):
        found = by_search(asked, joint, wants, scopes)
    if found is None:
        raise refuse_same_pcie()
    return take_from_scopes(asked, joint, wants, found)


def able_ones(
    asked: JointRequest, kind: DeviceType, want: Wanted, offer: Sequence[DeviceCandidate]
) -> list[DeviceCandidate]:
    """The candidates of a type that have enough, by rank."""
    hint = hint_of(asked, kind)
    return [
        each
        for each in sorted(offer, key=candidate_order_key)
        if device_share(each, want, hint, compat=asked.compat) is not None
    ]


def hint_of(asked: JointRequest, kind: DeviceType) -> Hint:
    """The hint that counts for a type; none for GPUs, which are not given as virtual functions."""
    return NO_HINT if kind is DeviceType.GPU else asked.demand.hint(kind)


def scopes_of(asked: JointRequest, joint: Sequence[DeviceType], able: Offers, scope_of: ScopeOf) -> list[PcieScope]:
    """The scopes with devices of all types, those with the least to spare first."""
    primary = joint[0]
    busy = {scope_of(device_location(device)) for device in asked.inventory.by_type[primary] if device.busy}
    devices: dict[str, dict[DeviceType, list[DeviceCandidate]]] = {}
    for kind in joint:
        for each in able[kind]:
            devices.setdefault(scope_of(device_location(each.device)), {}).setdefault(kind, []).append(each)
    scopes = [
        PcieScope(id, device_location(by_type[primary][0].device), id in busy, by_type)
        for id, by_type in devices.items()
        if id and len(by_type) == len(joint)
    ]
    return sorted(scopes, key=lambda scope: scope_order_key(scope, primary))


def scope_order_key(scope: PcieScope, primary: DeviceType) -> tuple[bool, bool, int, int]:
    """The key that sorts scopes, the one to use first before the others."""
    return (
        not has_left(scope),  # one with what an init container left,
        not scope.busy,  # then one that is in use already,
        len(scope.devices[primary]),  # then the one with the fewest primary devices left,
        scope.devices[primary][0].minor,  # then the lowest minor, so that no tie is left to chance
    )


def has_left(scope: PcieScope) -> bool:
    """Whether an init container of the pod left a device of this scope."""
    return any(each.device.left for devices in scope.devices.values() for each in devices)


def by_partition(
    asked: JointRequest, joint: Sequence[DeviceType], wants: Wants, offers: Offers, scopes: Scopes
) -> Sequence[PcieScope] | None:
    """The scopes of the first GPU partition that will do; None: there is none. Raises DevicesDoNotFit."""
    if DeviceType.GPU not in joint:
        return None
    for partition in suitable_partitions(asked, wants[DeviceType.GPU], offers[DeviceType.GPU]):
        for scope_of, all_scopes in scopes.items():
            by_id = {scope.id: scope for scope in all_scopes}
            on = {scope_of(device_location(each.device)) for each in partition}
            if on <= by_id.keys() and enough(chosen := [by_id[id] for id in sorted(on)], joint, wants):
                return [restrict_scope(scope, partition) for scope in chosen]
    return None


def restrict_scope(scope: PcieScope, gpus: Sequence[DeviceCandidate]) -> PcieScope:
    """Returns the scope with only these of its GPUs."""
    minors = {each.minor for each in gpus}
    inside = [each for each in scope.devices[DeviceType.GPU] if each.minor in minors]
    return msgspec.structs.replace(scope, devices={**scope.devices, DeviceType.GPU: inside})


def by_search(
    asked: JointRequest, joint: Sequence[DeviceType], wants: Wants, scopes: Scopes
) -> Sequence[PcieScope] | None:
    """The first set of scopes that will do; None if there is none. Raises DevicesDoNotFit and TooMuchWork."""
    required = asked.demand.required_level if DeviceType.GPU in joint else Level.NONE
    work = PcieSearchBudget(asked.step)
    if required is Level.DEVICE:
        if wants[DeviceType.GPU].count > 1:
            raise DevicesDoNotFit(NOT_IN_SCOPE)
        required = Level.NONE  # a single GPU is on a single device wherever it is
    for level, part_of, scope_of in LOOKS:
        if level >= required:
            for part in group_scopes(scopes[scope_of], part_of):
                found = Covering(part, joint, wants, work).find()
                if found is not None:
                    return found
    return None


def group_scopes(
    scopes: Sequence[PcieScope], part_of: Callable[[DeviceLocation], tuple[str | int, ...]]
) -> list[list[PcieScope]]:
    """The scopes of each part of the machine: parts with what was left first, then those that are in use."""
    by_part: dict[tuple[str | int, ...], list[PcieScope]] = {}
    for scope in scopes:
        by_part.setdefault(part_of(scope.place), []).append(scope)
    return sorted(by_part.values(), key=lambda part: (not any(map(has_left, part)), not any(s.busy for s in part)))


class Covering:
    """Searches the first set of scopes, in their order, that has enough of each type; the fewest scopes first."""

    def __init__(
        self, scopes: Sequence[PcieScope], joint: Sequence[DeviceType], wants: Wants, work: PcieSearchBudget
    ) -> None:
        self.scopes = scopes
        self.work = work
        self.needs = tuple(wants[kind].count for kind in joint)
        self.most = most_scopes(joint, wants, len(scopes))
        self.counts = [tuple(len(scope.devices[kind]) for kind in joint) for scope in scopes]
        self.largest = [
            [
                list(accumulate(sorted(column, reverse=True), initial=0))
                for column in zip(*self.counts[start:], strict=True)
            ]
            for start in range(len(scopes))
        ]
        """From which scope on, type, number of scopes -> the most of the type that so many have."""
        self.failed: set[tuple[int, int, Needs]] = set()

    def find(self) -> list[PcieScope] | None:
        """The first set of scopes; None if there is none. Raises TooMuchWork."""
        for size in range(1, self.most + 1):
            found = self.choose(0, size, self.needs)
            if found is not None:
                return [self.scopes[i] for i in found]
        return None

    def choose(self, start: int, size: int, needs: Needs) -> tuple[int, ...] | None:
        """Positions of `size` scopes from `start` on that together have what is still needed; None: there are none."""
        if not size:
            return () if not any(needs) else None
        if (start, size, needs) in self.failed:
            return None
        self.work.spend()
        for first in range(start, len(self.scopes) - size + 1):
            if any(need > most[size] for need, most in zip(needs, self.largest[first], strict=True)):
                break
            left = tuple(max(0, need - had) for need, had in zip(needs, self.counts[first], strict=True))
            rest = self.choose(first + 1, size - 1, left)
            if rest is not None:
                return (first, *rest)
        self.failed.add((start, size, needs))
        return None


def most_scopes(joint: Sequence[DeviceType], wants: Wants, scopes: int) -> int:
    """The most scopes that a set may have: each gives at least one device of every type that is given exactly."""
    return min(scopes, *(wants[kind].count for kind in joint if is_exact(kind, joint)))


def is_exact(kind: DeviceType, joint: Sequence[DeviceType]) -> bool:
    """Whether a pod gets no more than it asks for of a type: the primary one and GPUs; others serve each scope."""
    return kind in (joint[0], DeviceType.GPU)


def enough(scopes: Sequence[PcieScope], joint: Sequence[DeviceType], wants: Wants) -> bool:
    """Whether these scopes have enough of every type, and are not too many."""
    return len(scopes) <= most_scopes(joint, wants, len(scopes)) and all(
        sum(len(scope.devices[kind]) for scope in scopes) >= wants[kind].count for kind in joint
    )


def take_from_scopes(
    asked: JointRequest, joint: Sequence[DeviceType], wants: Wants, scopes: Sequence[PcieScope]
) -> dict[DeviceType, list[DeviceGrant]]:
    """What a pod gets of scopes that have enough, by type."""
    return {
        kind: take_type_from_scopes(asked, kind, wants[kind], scopes, exact=is_exact(kind, joint)) for kind in joint
    }


def take_type_from_scopes(
    asked: JointRequest, kind: DeviceType, want: Wanted, scopes: Sequence[PcieScope], *, exact: bool
) -> list[DeviceGrant]:
    """What a pod gets of one type: one device of each scope in turn."""
    scope_of = {each.minor: scope.id for scope in scopes for each in scope.devices[kind]}
    ranked = sorted(chain.from_iterable(scope.devices[kind] for scope in scopes), key=candidate_order_key)
    order = in_turn(ranked, lambda each: scope_of[each.minor])
    most = want.count if exact else max(want.count, len(scopes))
    return take_first(order, want, most, hint_of(asked, kind), compat=asked.compat)
