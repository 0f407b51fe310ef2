"""
Implements `SamePCIe`: finds sets of devices in which every device has one of each other type below the same PCIe scope.

Whether a set is suitable depends only on its PCIe scopes. Each must have all types, and all together must have enough
of each type. So the search goes over scopes, not devices. It prefers the smallest suitable part of the machine (a
switch, a root complex, a NUMA node, the whole machine). In a part, PCIe scopes are switches if possible, else root
complexes, which are all that Koordinator requires. Then it prefers the fewest scopes, then the fewest spare devices.

Koordinator chooses the primary devices without regard to the others, and rejects the node if the others do not fit.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

import msgspec

from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    able_candidates,
    candidate_order_key,
    in_turn,
    take_first,
)
from topoalign.core.deviceshare.gpu_choice import NOT_ENOUGH, is_honored, required_level, suitable_partitions
from topoalign.core.deviceshare.inventory import ROOT_COMPLEX, SWITCHES, DeviceLocation, ScopeOf
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, refuse_same_pcie, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import DeviceType, Level
from topoalign.core.model.errors import TooMuchWork

MOST_STEPS = 25_000
"""The limit on steps of one search, about 80 ms. Machines on the market need a few dozen steps."""

Needs = tuple[int, ...]
"""For each type, how many devices are still needed."""

PartOf = Callable[[DeviceLocation], tuple[str | int, ...]]

LOOKS: Sequence[tuple[Level, PartOf, ScopeOf]] = (
    (Level.PCIE, lambda place: (place.node, place.pcie, place.switch), SWITCHES),
    (Level.PCIE, lambda place: (place.node, place.pcie), SWITCHES),
    (Level.PCIE, lambda place: (place.node, place.pcie), ROOT_COMPLEX),
    (Level.NUMA_NODE, lambda place: (place.node,), SWITCHES),
    (Level.NUMA_NODE, lambda place: (place.node,), ROOT_COMPLEX),
    (Level.NODE, lambda place: (), SWITCHES),
    (Level.NODE, lambda place: (), ROOT_COMPLEX),
)
"""Level of a part of the machine, what the devices of such a part share, and what counts as the same PCIe."""


class PcieScope(msgspec.Struct, frozen=True):
    """A PCIe scope that has devices of all the types."""

    id: str
    place: DeviceLocation
    """The location of its first primary device."""
    busy: bool
    """Whether one of its primary devices is in use."""
    devices: Mapping[DeviceType, Sequence[DeviceCandidate]]
    """The candidates that have enough."""


Scopes = Mapping[ScopeOf, Sequence[PcieScope]]


def same_pcie(asked: JointRequest) -> dict[DeviceType, list[DeviceGrant]]:
    """Chooses devices of all types of the joint list, the primary one first. Raises DevicesDoNotFit, TooMuchWork."""
    joint = asked.demand.joint
    able = {kind: able_candidates(asked, kind) for kind in joint}
    for kind in joint:
        if len(able[kind]) < asked.wants[kind].count:
            raise DevicesDoNotFit(NOT_ENOUGH) if kind is DeviceType.GPU else refuse_too_few(kind)
    scopes: Scopes = {scope_of: scopes_of(asked, able, scope_of) for scope_of in (SWITCHES, ROOT_COMPLEX)}
    found = _find_by_partition(asked, scopes)
    if found is None and not (DeviceType.GPU in joint and is_honored(asked)):
        found = _find_by_search(asked, scopes)
    if found is None:
        raise refuse_same_pcie()
    return {kind: _take_from_scopes(asked, kind, found) for kind in joint}


def scopes_of(
    asked: JointRequest, able: Mapping[DeviceType, Sequence[DeviceCandidate]], scope_of: ScopeOf
) -> list[PcieScope]:
    """The scopes with devices of all types, the preferred one first. `able`: the candidates that have enough."""
    primary = asked.demand.joint[0]
    busy = {scope_of(device.location) for device in asked.inventory.by_type[primary] if device.busy}
    devices: dict[str, dict[DeviceType, list[DeviceCandidate]]] = {}
    for kind, some in able.items():
        for each in some:
            devices.setdefault(scope_of(each.device.location), {}).setdefault(kind, []).append(each)
    scopes = [
        PcieScope(id, by_type[primary][0].device.location, id in busy, by_type)
        for id, by_type in devices.items()
        if id and len(by_type) == len(able)
    ]

    def preference(scope: PcieScope) -> tuple[bool, bool, int, int]:
        return (
            not has_left(scope),  # first a scope with a device to reuse from an init container,
            not scope.busy,  # then a scope in use,
            len(scope.devices[primary]),  # then the scope with the fewest primary devices that have enough,
            scope.devices[primary][0].minor,  # then the lowest minor, so that the order is deterministic
        )

    return sorted(scopes, key=preference)


def has_left(scope: PcieScope) -> bool:
    """Whether this scope has a device to reuse from an init container of the pod."""
    return any(each.device.left for devices in scope.devices.values() for each in devices)


def _find_by_partition(asked: JointRequest, scopes: Scopes) -> Sequence[PcieScope] | None:
    """The scopes of the first suitable GPU partition, with only its GPUs. None: no partition is suitable."""
    joint = asked.demand.joint
    if DeviceType.GPU not in joint:
        return None
    for partition in suitable_partitions(asked, asked.wants[DeviceType.GPU], asked.candidates[DeviceType.GPU]):
        minors = {each.minor for each in partition}
        for scope_of, all_scopes in scopes.items():
            on = {scope_of(each.device.location) for each in partition}
            chosen = sorted((scope for scope in all_scopes if scope.id in on), key=lambda scope: scope.id)
            if (
                len(chosen) == len(on)
                and len(chosen) <= _most_scopes(asked)
                and all(sum(len(each.devices[kind]) for each in chosen) >= asked.wants[kind].count for kind in joint)
            ):
                gpus = [[each for each in scope.devices[DeviceType.GPU] if each.minor in minors] for scope in chosen]
                return [
                    msgspec.structs.replace(scope, devices={**scope.devices, DeviceType.GPU: inside})
                    for scope, inside in zip(chosen, gpus, strict=True)
                ]
    return None


def _find_by_search(asked: JointRequest, scopes: Scopes) -> Sequence[PcieScope] | None:
    steps = 0

    def count_step() -> None:
        nonlocal steps
        if asked.step is not None:
            asked.step()
        steps += 1
        if steps > MOST_STEPS:
            raise TooMuchWork(
                f"no set of devices for SamePCIe was found in {MOST_STEPS} steps, nor that there is none",
                "ask for fewer devices, or leave out requiredScope: the nearest ones are given then",
            )

    has_gpus = DeviceType.GPU in asked.demand.joint
    required = required_level(asked, asked.wants[DeviceType.GPU]) if has_gpus else Level.NONE
    for level, part_of, scope_of in LOOKS:
        if level < required:
            continue
        by_part: dict[tuple[str | int, ...], list[PcieScope]] = {}
        for scope in scopes[scope_of]:
            by_part.setdefault(part_of(scope.place), []).append(scope)
        # first the parts of the machine with devices to reuse, then those in use
        for part in sorted(
            by_part.values(), key=lambda some: (not any(map(has_left, some)), not any(s.busy for s in some))
        ):
            found = _cover(asked, part, count_step)
            if found is not None:
                return found
    return None


def _cover(
    asked: JointRequest, scopes: Sequence[PcieScope], count_step: Callable[[], None]
) -> Sequence[PcieScope] | None:
    """
    The first set of scopes, in their order, that has enough of each type. Smaller sets come first. None: no set has
    enough. `count_step` is called at each step, and can raise TooMuchWork.
    """
    joint = asked.demand.joint
    counts = [tuple(len(scope.devices[kind]) for kind in joint) for scope in scopes]
    # [first scope][type][number of scopes] -> the most devices of the type in this many scopes, from the first one on
    largest = [
        [list(accumulate(sorted(column, reverse=True), initial=0)) for column in zip(*counts[start:], strict=True)]
        for start in range(len(scopes))
    ]
    failed = set[tuple[int, int, Needs]]()

    def choose(start: int, size: int, needs: Needs) -> tuple[int, ...] | None:
        """The positions of `size` scopes, from `start` on, that together have enough for `needs`."""
        if not size:
            return () if not any(needs) else None
        if (start, size, needs) in failed:
            return None
        count_step()
        for first in range(start, len(scopes) - size + 1):
            if any(need > most[size] for need, most in zip(needs, largest[first], strict=True)):
                break
            left = tuple(max(0, need - had) for need, had in zip(needs, counts[first], strict=True))
            rest = choose(first + 1, size - 1, left)
            if rest is not None:
                return (first, *rest)
        failed.add((start, size, needs))
        return None

    for size in range(1, min(len(scopes), _most_scopes(asked)) + 1):
        found = choose(0, size, tuple(asked.wants[kind].count for kind in joint))
        if found is not None:
            return [scopes[position] for position in found]
    return None


def _most_scopes(asked: JointRequest) -> int:
    """The most scopes that a set can have: each scope gives at least one device of each type with an exact number."""
    return min(asked.wants[kind].count for kind in asked.demand.joint if _is_exact(asked, kind))


def _is_exact(asked: JointRequest, kind: DeviceType) -> bool:
    """Whether a pod gets exactly the requested number of a type: the primary type and GPUs. Others serve each scope."""
    return kind in (asked.demand.joint[0], DeviceType.GPU)


def _take_from_scopes(asked: JointRequest, kind: DeviceType, scopes: Sequence[PcieScope]) -> list[DeviceGrant]:
    """The devices of one type that a pod gets, taken from each scope in turn."""
    want = asked.wants[kind]
    scope_of = {each.minor: scope.id for scope in scopes for each in scope.devices[kind]}
    ranked = sorted(chain.from_iterable(scope.devices[kind] for scope in scopes), key=candidate_order_key)
    order = in_turn(ranked, lambda device: scope_of[device.minor])
    return take_first(asked, order, want, want.count if _is_exact(asked, kind) else max(want.count, len(scopes)))
