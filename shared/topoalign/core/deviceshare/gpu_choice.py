"""
Chooses GPUs: a partition of the node's table, else the smallest scope that has enough, else one by one.

A partition is a set of GPUs that a fabric manager can isolate. Partitions of the wanted size are tried by groups of equal
`allocationScore`. Upstream's comment says that a higher score is preferred and its code tries the lowest first; the default
follows the comment. Within a group the partition is taken that leaves the most for larger requests.

A scope is a part of the machine: below one PCIe root, a NUMA node, or the node. Among equally small scopes the one is taken
that is most used already, so that whole ones stay whole. The default knows one scope more, the switches below a root port.

Rules of koordinator a7a1b76b (deviceshare: GPU allocation, partitions, topology tree), with its reasons of refusal.
Templates of vendors other than NVIDIA (Huawei vNPU) are not known: such a request is served like any other for a share of a
GPU.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from itertools import groupby
from typing import NamedTuple

import msgspec

from topoalign.core.deviceshare.annotations import parse_quantity_exactly
from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    DeviceGrant,
    JointRequest,
    Wanted,
    by_minor,
    has_requested,
    take_first,
)
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.inventory import InventoryDevice, Partition, Table
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import GPU_BYTES, RATIO, WHOLE, DeviceType, Level

NO_TABLE = "node(s) missing GPU Partition Table"
NO_SUCH_SIZE = "node(s) Unsupported number of GPU requests"
NO_PARTITION = "Insufficient Partitioned GPU Devices"
MULTI_SHARED = "node(s) Unsupported Multi-Shared GPU"
NO_TREE = "node(s) missing GPU Device Topology Tree"
NOT_IN_SCOPE = "Insufficient Topology Scoped GPU Devices"
NOT_ENOUGH = "Insufficient GPU Devices"


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
    """Minors of GPUs that are in use or not to be considered."""
    considered = {each.minor for each in candidates}
    gpus = asked.inventory.by_type[DeviceType.GPU]
    return frozenset(gpu.minor for gpu in gpus if gpu.busy or gpu.minor not in considered)


def is_honored(asked: JointRequest) -> bool:
    """Whether GPUs must be given as a partition of the table."""
    return not asked.demand.is_shared and (asked.demand.partition is not None or asked.inventory.honored)


def suitable_partitions(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> list[list[DeviceCandidate]]:
    """
    The suitable partitions, the preferred one first; none where the node has no table or the GPUs are shared.

    Raises DevicesDoNotFit where only a partition will do and there is none.
    """
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
    """What all GPUs must have in common. Raises DevicesDoNotFit for several GPUs on one device."""
    level = asked.demand.required_level
    if level is not Level.DEVICE or asked.compat:
        return level
    if wanted.count > 1:
        raise DevicesDoNotFit(NOT_IN_SCOPE)
    return Level.NONE  # a single GPU is on a single device wherever it is


def _choose_in_smallest_scope(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> Sequence[DeviceCandidate] | None:
    """Chooses GPUs by the topology tree; None without a tree, or for several shared GPUs. Raises DevicesDoNotFit."""
    level = required_level(asked, wanted)
    is_shared = asked.demand.is_shared
    has_scope = bool(asked.demand.hint(DeviceType.GPU).required_topology_scope) and (asked.compat or level > Level.NONE)
    tree = build_scope_tree(asked.inventory.by_type[DeviceType.GPU], compat=asked.compat)
    several_shared = is_shared and wanted.count > 1
    if several_shared or tree is None:
        if has_scope:
            raise DevicesDoNotFit(MULTI_SHARED if several_shared else NO_TREE, FrameworkStatus.UNRESOLVABLE)
        return None
    search = ScopeSearch(
        fitting=_candidates_with_enough(asked, wanted, candidates),
        used=_used_minors(asked, candidates),
        count=wanted.count,
        required=level,
        shared=is_shared,
    )
    found = search.best_in(tree)
    if found is None:
        raise DevicesDoNotFit(NOT_IN_SCOPE if has_scope else NOT_ENOUGH)
    return (asked.chooser(found.gpus, wanted.count) if asked.chooser else ()) or found.gpus[: wanted.count]


def complete_memory(given: DeviceGrant) -> DeviceGrant:
    """Adds the bytes that a ratio of this GPU's memory comes to, or the ratio that bytes come to, rounded down."""
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
"""Size -> what a partition of that size is worth that stays whole, times its score."""


def feasible_partitions(
    demand: JointDemand, table: Table, size: int, used: frozenset[int], usable: Set[int]
) -> Iterator[Partition]:
    """
    Yields the partitions of unused, usable GPUs, the preferred one first.

    A restricted demand looks at the first score group only. Upstream stops at the first group that has a feasible one:
    take no more than the first to be equal to it.
    """
    spec = demand.partition
    compat = demand.compat
    least = (
        parse_quantity_exactly(spec.ring_bus_bandwidth)
        if spec is not None and spec.ring_bus_bandwidth is not None
        else None
    )
    groups = _score_groups(table, size, compat=compat)
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
    """The worth of the partitions that are still whole once this one is taken, of its size and above."""
    gone = used | {*taken.minors}
    return sum(
        weight * partition.score
        for left, weight in WEIGHTS.items()
        if left >= size
        for partition in next(iter(_score_groups(table, left, compat=compat)), ())
        if gone.isdisjoint(partition.minors)
    )


class GpuScope(msgspec.Struct, frozen=True):
    """A part of the machine with the GPUs in it: the node, a NUMA node, a root complex, or its switches."""

    level: Level
    minors: tuple[int, ...]
    children: tuple["GpuScope", ...] = ()


class Found(NamedTuple):
    """A scope that has enough GPUs, with what it is compared by."""

    left: int
    """How many an init container of the pod left, of those that would be taken."""
    depth: int
    dirty: int
    """How many of the scopes around it, and it itself, hold a GPU that is in use."""
    score: int
    gpus: tuple[DeviceCandidate, ...]
    """All of it that have enough, those that were left first."""


def build_scope_tree(gpus: Sequence[InventoryDevice], *, compat: bool) -> GpuScope | None:
    """Builds the tree of a node's GPUs, by minor; None if one of them has no known place."""
    paths: dict[int, tuple[int | str, ...]] = {}
    for gpu in gpus:
        if gpu.place is None:
            return None
        has_switch = gpu.place.switch and not compat
        paths[gpu.minor] = (gpu.place.node, gpu.place.pcie, *((gpu.place.switch,) if has_switch else ()))
    return _scope((), paths)


def _scope(prefix: tuple[int | str, ...], paths: Mapping[int, tuple[int | str, ...]]) -> GpuScope:
    depth = len(prefix)
    inside = {minor: path for minor, path in paths.items() if path[:depth] == prefix}
    below = {path[: depth + 1] for path in inside.values() if len(path) > depth}
    return GpuScope(
        level=(Level.NODE, Level.NUMA_NODE, Level.PCIE, Level.PCIE)[depth],
        minors=tuple(sorted(inside)),
        children=tuple(_scope(each, inside) for each in sorted(below)),
    )


class ScopeSearch(msgspec.Struct, frozen=True, kw_only=True):
    """The search for the smallest scope of a tree that has enough GPUs."""

    fitting: Mapping[int, DeviceCandidate]
    """Minor -> the GPU, of those that have enough."""
    used: Collection[int]
    """Minors of GPUs that are in use, or not to be considered."""
    count: int
    required: Level
    """The widest scope that will do."""
    shared: bool

    def best_in(self, scope: GpuScope, depth: int = 0, dirty: int = 0) -> Found | None:
        """The best scope of those within one; None if it has not enough. `dirty` scopes around it hold used GPUs."""
        if len(scope.minors) < self.count:
            return None
        dirty += any(minor in self.used for minor in scope.minors)
        below = [self.best_in(child, depth + 1, dirty) for child in scope.children]
        best = max(filter(None, below), key=self.preference, default=None)
        if best is not None or scope.level < self.required:
            return best
        here = [self.fitting[minor] for minor in scope.minors if minor in self.fitting]
        if len(here) < self.count:
            return None
        if self.shared:
            here.sort(key=lambda each: -each.score)
        here.sort(key=lambda each: not each.device.left)
        left = sum(each.device.left for each in here[: self.count])
        return Found(left, depth, dirty, here[0].score, tuple(here))

    def preference(self, found: Found) -> tuple[int, int, int, int]:
        """The key that sorts scopes with enough GPUs; the greatest is the best."""
        return (
            found.left,  # the most that an init container left,
            found.depth,  # then the smallest scope,
            found.dirty,  # then the one that is used most already,
            found.score if self.shared else 0,  # then the best score; of equals the first
        )
