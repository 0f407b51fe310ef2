"""
Chooses GPUs: a partition of the node's table, else the smallest scope that has enough, else one by one.

A partition is a set of GPUs that a fabric manager can isolate. Partitions of the requested size are tried in groups of
equal `allocationScore`. A comment in Koordinator says that a higher score is preferred, but its code tries the lowest
score first. `compat` follows the code, and the default follows the comment. Within a group, the partition is chosen
that keeps the most valuable partitions of its size or larger free.

A scope is a part of the machine: the devices below one root complex, a NUMA node, the whole node or, without `compat`,
the switches below a root port. Of equally large scopes, the most used one is chosen, so that unused ones stay unused.

Rules of koordinator a7a1b76b (deviceshare: GPU allocation, partitions, topology tree), with its refusal reasons.
Templates of vendors other than NVIDIA (Huawei vNPU) are not supported: such a request counts as one for a GPU share.
"""

from collections.abc import Iterator, Sequence, Set
from itertools import groupby

import msgspec

from topoalign.core.deviceshare.annotations import parse_quantity_exactly
from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    by_minor,
    has_requested,
    take_first,
)
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.inventory import Partition, Table
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import GPU_BYTES, RATIO, WHOLE, DeviceType, Level
from topoalign.core.deviceshare.request_combinations import Wanted

NO_TABLE = "node(s) missing GPU Partition Table"
NO_SUCH_SIZE = "node(s) Unsupported number of GPU requests"
NO_PARTITION = "Insufficient Partitioned GPU Devices"
MULTI_SHARED = "node(s) Unsupported Multi-Shared GPU"
NO_TREE = "node(s) missing GPU Device Topology Tree"
NOT_IN_SCOPE = "Insufficient Topology Scoped GPU Devices"
NOT_ENOUGH = "Insufficient GPU Devices"

ScopePath = tuple[int | str, ...]
"""The ids of the scopes that contain a GPU, without the node, the widest first: NUMA node, root complex, switches."""
LEVEL_BY_DEPTH = (Level.NODE, Level.NUMA_NODE, Level.PCIE, Level.PCIE)
"""Length of a scope path -> level of the scope."""


def pick_gpus(asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]) -> list[DeviceGrant]:
    """Chooses GPUs for a demand: a partition, else the smallest scope, else one by one. Raises DevicesDoNotFit."""
    partitions = suitable_partitions(asked, wanted, candidates)
    chosen = partitions[0] if partitions else _choose_in_smallest_scope(asked, wanted, candidates)
    if chosen is not None:
        return [DeviceGrant(device=each.device, resources=wanted.each) for each in chosen]
    picked = take_first(asked, by_minor(candidates), wanted, wanted.count)
    if len(picked) < wanted.count:
        raise refuse_too_few(DeviceType.GPU)
    return picked


def _candidates_with_enough(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> dict[int, DeviceCandidate]:
    return {each.minor: each for each in candidates if has_requested(each, wanted.each, compat=asked.compat)}


def _used_minors(asked: JointRequest, candidates: Sequence[DeviceCandidate]) -> frozenset[int]:
    """The minors of GPUs that are in use or are not candidates."""
    considered = {each.minor for each in candidates}
    gpus = asked.inventory.by_type[DeviceType.GPU]
    return frozenset(gpu.minor for gpu in gpus if gpu.busy or gpu.minor not in considered)


def is_honored(asked: JointRequest) -> bool:
    """Whether GPUs must be allocated as a partition of the table."""
    return not asked.demand.is_shared and asked.demand.partition is not None


def suitable_partitions(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> list[list[DeviceCandidate]]:
    """The suitable partitions, the preferred first. Raises DevicesDoNotFit if one is required and none is suitable."""
    if asked.demand.is_shared:
        return []
    table = asked.inventory.table
    honored = is_honored(asked)
    if table is None or wanted.count not in table:
        if honored:
            raise DevicesDoNotFit(NO_TABLE if table is None else NO_SUCH_SIZE, FrameworkStatus.UNRESOLVABLE)
        return []
    usable = _candidates_with_enough(asked, wanted, candidates)
    found = feasible_partitions(asked.demand, table, wanted.count, _used_minors(asked, candidates), usable.keys())
    feasible = [[usable[minor] for minor in partition.minors] for partition in found]
    feasible.sort(key=lambda gpus: -sum(gpu.device.left for gpu in gpus))
    if honored and not feasible:
        raise DevicesDoNotFit(NO_PARTITION)
    return feasible


def required_level(asked: JointRequest, wanted: Wanted) -> Level:
    """The level of the scope that all GPUs must share. Raises DevicesDoNotFit for several GPUs on one device."""
    level = asked.demand.required_level
    if level is not Level.DEVICE or asked.compat:
        return level
    if wanted.count > 1:
        raise DevicesDoNotFit(NOT_IN_SCOPE)
    return Level.NONE  # a single GPU is on a single device wherever it is


def _choose_in_smallest_scope(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> Sequence[DeviceCandidate] | None:
    """The GPUs in the smallest suitable scope. None: a location is unknown, or the request is several shared GPUs."""
    level = required_level(asked, wanted)
    is_shared = asked.demand.is_shared
    has_scope = bool(asked.demand.hint(DeviceType.GPU).required_topology_scope) and (asked.compat or level > Level.NONE)
    gpus = asked.inventory.by_type[DeviceType.GPU]
    is_placed = all(gpu.place is not None for gpu in gpus)
    several_shared = is_shared and wanted.count > 1
    if several_shared or not is_placed:
        if has_scope:
            raise DevicesDoNotFit(MULTI_SHARED if several_shared else NO_TREE, FrameworkStatus.UNRESOLVABLE)
        return None
    minors_of: dict[ScopePath, list[int]] = {}
    for gpu in gpus:
        place = gpu.location
        path = (place.node, place.pcie, place.switch) if place.switch and not asked.compat else (place.node, place.pcie)
        for depth in range(len(path) + 1):
            minors_of.setdefault(path[:depth], []).append(gpu.minor)
    usable = _candidates_with_enough(asked, wanted, candidates)
    suitable: dict[ScopePath, list[DeviceCandidate]] = {}
    for scope, minors in sorted(minors_of.items()):
        here = [usable[minor] for minor in minors if minor in usable]
        if len(here) >= wanted.count and LEVEL_BY_DEPTH[len(scope)] >= level:
            # first GPUs to reuse from an init container, then for shares the best score
            suitable[scope] = sorted(here, key=lambda each: (not each.device.left, -each.score if is_shared else 0))
    smallest = [
        scope
        for scope in suitable
        if not any(len(other) > len(scope) and other[: len(scope)] == scope for other in suitable)
    ]
    if not smallest:
        raise DevicesDoNotFit(NOT_IN_SCOPE if has_scope else NOT_ENOUGH)
    used = _used_minors(asked, candidates)

    def preference(scope: ScopePath) -> tuple[int, int, int, int]:
        around = [scope[:depth] for depth in range(len(scope) + 1)]
        return (
            sum(each.device.left for each in suitable[scope][: wanted.count]),  # first the most GPUs to reuse,
            len(scope),  # then the smallest scope,
            sum(not used.isdisjoint(minors_of[each]) for each in around),  # then the most used scope,
            suitable[scope][0].score if is_shared else 0,  # then the best score; the first of equal scopes
        )

    found = suitable[max(smallest, key=preference)]
    return (asked.chooser(found, wanted.count) if asked.chooser else ()) or found[: wanted.count]


def complete_memory(given: DeviceGrant) -> DeviceGrant:
    """Adds the bytes for a ratio of this GPU's memory, or the ratio for bytes, rounded down."""
    resources = given.resources
    memory = given.device.total.get(GPU_BYTES, 0)
    if not memory:
        return given
    if RATIO in resources and GPU_BYTES not in resources:
        resources = {**resources, GPU_BYTES: resources[RATIO] * memory // WHOLE}
    elif GPU_BYTES in resources and RATIO not in resources:
        resources = {**resources, RATIO: resources[GPU_BYTES] * WHOLE // memory}
    return msgspec.structs.replace(given, resources=resources)


WEIGHTS = {8: 10_000, 4: 100, 2: 1}
"""Partition size -> weight. A partition that stays free is worth this weight times its score."""


def feasible_partitions(
    demand: JointDemand, table: Table, size: int, used: frozenset[int], usable: Set[int]
) -> Iterator[Partition]:
    """Yields the partitions of unused, usable GPUs, the preferred one first."""
    spec = demand.partition
    compat = demand.compat
    bandwidth = spec.ring_bus_bandwidth if spec is not None else None
    least = parse_quantity_exactly(bandwidth) if bandwidth is not None else None
    groups = _score_groups(table, size, compat=compat)
    # Koordinator stops at the first group with a feasible partition. A caller that takes only the first one does the
    # same.
    for group in groups[:1] if demand.restricted else groups:
        found = [
            partition
            for partition in group
            if used.isdisjoint(partition.minors)
            and usable >= {*partition.minors}
            and (least is None or (partition.bandwidth is not None and partition.bandwidth >= least))
        ]
        yield from sorted(found, key=lambda partition: -_worth_left(table, size, used, partition, compat=compat))


def _score_groups(table: Table, size: int, *, compat: bool) -> list[list[Partition]]:
    """The partitions of one size by score, the preferred group first."""
    listed = sorted(table.get(size, ()), key=lambda partition: partition.score if compat else -partition.score)
    return [list(group) for _, group in groupby(listed, key=lambda partition: partition.score)]


def _worth_left(table: Table, size: int, used: frozenset[int], taken: Partition, *, compat: bool) -> int:
    """The value of the partitions of at least this size that stay free if this one is taken."""
    gone = used | {*taken.minors}
    return sum(
        weight * partition.score
        for left, weight in WEIGHTS.items()
        if left >= size
        for partition in next(iter(_score_groups(table, left, compat=compat)), ())
        if gone.isdisjoint(partition.minors)
    )
