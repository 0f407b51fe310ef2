"""
Chooses GPUs: a partition of the node's table, else the smallest scope that has enough, else one by one.

Rules of koordinator a7a1b76b (deviceshare, GPU allocation), with its reasons of refusal. Templates of vendors other than
NVIDIA (Huawei vNPU) are not known: such a request is served like any other for a share of a GPU.
"""

from collections.abc import Iterator, Sequence, Set
from itertools import groupby

import msgspec

from topoalign.core.deviceshare.annotations import NO_HINT, parse_quantity_exactly
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
from topoalign.core.deviceshare.inventory import Partition, Table
from topoalign.core.deviceshare.joint_refusals import DevicesDoNotFit, FrameworkStatus, refuse_too_few
from topoalign.core.deviceshare.koordinator_names import GPU_BYTES, RATIO, WHOLE, DeviceType, Level
from topoalign.core.deviceshare.scope_tree import ScopeSearch, build_scope_tree

NO_TABLE = "node(s) missing GPU Partition Table"
NO_SUCH_SIZE = "node(s) Unsupported number of GPU requests"
NO_PARTITION = "Insufficient Partitioned GPU Devices"
MULTI_SHARED = "node(s) Unsupported Multi-Shared GPU"
NO_TREE = "node(s) missing GPU Device Topology Tree"
NOT_IN_SCOPE = "Insufficient Topology Scoped GPU Devices"
NOT_ENOUGH = "Insufficient GPU Devices"


def pick_gpus(asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]) -> list[DeviceGrant]:
    """Chooses GPUs for a demand: a partition, else the smallest scope, else one by one. Raises DevicesDoNotFit."""
    for partition in suitable_partitions(asked, wanted, candidates):
        return given_all(partition, wanted)
    scoped = in_smallest_scope(asked, wanted, candidates)
    if scoped is not None:
        return given_all(scoped, wanted)
    picked = take_first(by_minor(candidates), wanted, wanted.count, NO_HINT, compat=asked.compat)
    if len(picked) < wanted.count:
        raise refuse_too_few(DeviceType.GPU)
    return picked


def given_all(chosen: Sequence[DeviceCandidate], wanted: Wanted) -> list[DeviceGrant]:
    """Gives of each of these GPUs what is wanted."""
    return [DeviceGrant(device=each.device, resources=wanted.each) for each in chosen]


def candidates_with_enough(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> dict[int, DeviceCandidate]:
    """Minor -> candidate, of those that have enough."""
    return {each.minor: each for each in candidates if has_requested(each, wanted.each, compat=asked.compat)}


def used_minors(asked: JointRequest, candidates: Sequence[DeviceCandidate]) -> frozenset[int]:
    """Minors of GPUs that are in use or not to be considered."""
    considered = {each.minor for each in candidates}
    gpus = asked.inventory.by_type[DeviceType.GPU]
    return frozenset(gpu.minor for gpu in gpus if gpu.busy or gpu.minor not in considered)


def is_shared(asked: JointRequest) -> bool:
    """Whether a share of a GPU is asked for, so that other pods may have the rest."""
    return asked.demand.is_shared


def is_honored(asked: JointRequest) -> bool:
    """Whether GPUs must be given as a partition of the table."""
    return not is_shared(asked) and (asked.demand.partition is not None or asked.inventory.honored)


def suitable_partitions(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> list[list[DeviceCandidate]]:
    """
    The suitable partitions, the preferred one first; none where the node has no table or the GPUs are shared.

    Raises DevicesDoNotFit where only a partition will do and there is none.
    """
    if is_shared(asked):
        return []
    demand = asked.demand
    table = asked.inventory.table
    honored = is_honored(asked)
    if table is None or wanted.count not in table:
        if honored:
            raise DevicesDoNotFit(NO_TABLE if table is None else NO_SUCH_SIZE, FrameworkStatus.UNRESOLVABLE)
        return []
    usable = candidates_with_enough(asked, wanted, candidates)
    found = feasible_partitions(demand, table, wanted.count, used_minors(asked, candidates), usable.keys())
    feasible = [[usable[minor] for minor in partition.minors] for partition in found]
    feasible.sort(key=lambda gpus: -sum(gpu.device.left for gpu in gpus))
    if honored and not feasible:
        raise DevicesDoNotFit(NO_PARTITION)
    return feasible


def in_smallest_scope(
    asked: JointRequest, wanted: Wanted, candidates: Sequence[DeviceCandidate]
) -> Sequence[DeviceCandidate] | None:
    """Chooses GPUs by the topology tree; None without a tree, or for several shared GPUs. Raises DevicesDoNotFit."""
    scope = asked.demand.hint(DeviceType.GPU).required_topology_scope
    level = asked.demand.required_level
    if level is Level.DEVICE and not asked.compat:
        if wanted.count > 1:
            raise DevicesDoNotFit(NOT_IN_SCOPE)
        scope = ""
        level = Level.NONE  # a single GPU is on a single device wherever it is
    tree = build_scope_tree(asked.inventory.by_type[DeviceType.GPU], compat=asked.compat)
    several_shared = is_shared(asked) and wanted.count > 1
    if several_shared or tree is None:
        if scope:
            raise DevicesDoNotFit(MULTI_SHARED if several_shared else NO_TREE, FrameworkStatus.UNRESOLVABLE)
        return None
    search = ScopeSearch(
        fitting=candidates_with_enough(asked, wanted, candidates),
        used=used_minors(asked, candidates),
        count=wanted.count,
        required=level,
        shared=is_shared(asked),
        chooser=asked.chooser,
    )
    found = search.best(tree)
    if found is None:
        raise DevicesDoNotFit(NOT_IN_SCOPE if scope else NOT_ENOUGH)
    return found


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


# Chooses GPU partitions: sets of GPUs that a fabric manager can isolate, from a table of the node (koordinator a7a1b76b).
#
# Partitions of the wanted size are tried by groups of equal `allocationScore`. Upstream's comment says that a higher
# score is preferred and its code tries the lowest first; the default follows the comment. Within a group the partition
# is taken that leaves the most for larger requests.


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
    groups = score_groups(table, size, compat=compat)
    for group in groups[:1] if demand.restricted else groups:
        found = [
            partition
            for partition in group
            if used.isdisjoint(partition.minors)
            and usable >= {*partition.minors}
            and (least is None or (partition.bandwidth is not None and partition.bandwidth >= least))
        ]
        yield from sorted(found, key=lambda partition: -worth_left(table, size, used, partition, compat=compat))


def score_groups(table: Table, size: int, *, compat: bool) -> list[list[Partition]]:
    """Groups partitions of one size by score, the preferred group first."""
    listed = sorted(table.get(size, ()), key=lambda partition: partition.score if compat else -partition.score)
    return [list(group) for _, group in groupby(listed, key=lambda partition: partition.score)]


def worth_left(table: Table, size: int, used: frozenset[int], taken: Partition, *, compat: bool) -> int:
    """The worth of the partitions that are still whole once this one is taken, of its size and above."""
    gone = used | {*taken.minors}
    return sum(
        weight * partition.score
        for left, weight in WEIGHTS.items()
        if left >= size
        for partition in next(iter(score_groups(table, left, compat=compat)), ())
        if gone.isdisjoint(partition.minors)
    )
