"""
Which GPUs: a partition of the node's table, else the smallest scope that has enough, else one by one.

Rules of koordinator a7a1b76b (deviceshare, GPU allocation), with its reasons of refusal. Templates of vendors other than
NVIDIA (Huawei vNPU) are not known: such a request is served like any other for a share of a GPU.
"""

from collections.abc import Sequence

import msgspec

from topoalign.core.deviceshare.annotations import NO_HINT
from topoalign.core.deviceshare.candidates import Asked, Candidate, Given, Wanted, fits
from topoalign.core.deviceshare.names import GPU_BYTES, RATIO, WHOLE, DeviceType, Level
from topoalign.core.deviceshare.partitions import feasible_partitions
from topoalign.core.deviceshare.picking import by_minor, pick
from topoalign.core.deviceshare.refusals import DevicesDoNotFit, Status, insufficient
from topoalign.core.deviceshare.tree import Search, tree_of

NO_TABLE = "node(s) missing GPU Partition Table"
NO_SUCH_SIZE = "node(s) Unsupported number of GPU requests"
NO_PARTITION = "Insufficient Partitioned GPU Devices"
MULTI_SHARED = "node(s) Unsupported Multi-Shared GPU"
NO_TREE = "node(s) missing GPU Device Topology Tree"
NOT_IN_SCOPE = "Insufficient Topology Scoped GPU Devices"
NOT_ENOUGH = "Insufficient GPU Devices"


def pick_gpus(asked: Asked, wanted: Wanted, candidates: Sequence[Candidate]) -> list[Given]:
    """Chooses GPUs for a demand: a partition, else the smallest scope, else one by one. Raises DevicesDoNotFit."""
    for partition in partitions(asked, wanted, candidates):
        return given_all(partition, wanted)
    scoped = in_smallest_scope(asked, wanted, candidates)
    if scoped is not None:
        return given_all(scoped, wanted)
    picked = pick(by_minor(candidates), wanted, wanted.count, NO_HINT, compat=asked.compat)
    if len(picked) < wanted.count:
        raise insufficient(DeviceType.GPU)
    return picked


def given_all(chosen: Sequence[Candidate], wanted: Wanted) -> list[Given]:
    """Gives of each of these GPUs what is wanted."""
    return [Given(device=each.device, resources=wanted.each) for each in chosen]


def fitting(asked: Asked, wanted: Wanted, candidates: Sequence[Candidate]) -> dict[int, Candidate]:
    """Minor -> candidate, of those that have enough."""
    return {each.minor: each for each in candidates if fits(each, wanted.each, compat=asked.compat)}


def used_minors(asked: Asked, candidates: Sequence[Candidate]) -> frozenset[int]:
    """Minors of GPUs that are in use or not to be considered."""
    considered = {each.minor for each in candidates}
    gpus = asked.inventory.by_type[DeviceType.GPU]
    return frozenset(gpu.minor for gpu in gpus if gpu.busy or gpu.minor not in considered)


def is_shared(asked: Asked) -> bool:
    """Whether a part of a GPU is asked for, so that other pods may have the rest."""
    return asked.demand.is_shared


def is_honored(asked: Asked) -> bool:
    """Whether GPUs must be given as a partition of the table."""
    return not is_shared(asked) and (asked.demand.partition is not None or asked.inventory.honored)


def partitions(asked: Asked, wanted: Wanted, candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """
    The partitions that would do, the preferred one first; none where the node has no table or the GPUs are shared.

    Raises DevicesDoNotFit where only a partition will do and there is none.
    """
    if is_shared(asked):
        return []
    demand = asked.demand
    table = asked.inventory.table
    honored = is_honored(asked)
    if table is None or wanted.count not in table:
        if honored:
            raise DevicesDoNotFit(NO_TABLE if table is None else NO_SUCH_SIZE, Status.UNRESOLVABLE)
        return []
    usable = fitting(asked, wanted, candidates)
    found = feasible_partitions(demand, table, wanted.count, used_minors(asked, candidates), usable.keys())
    feasible = [[usable[minor] for minor in partition.minors] for partition in found]
    feasible.sort(key=lambda gpus: -sum(gpu.device.left for gpu in gpus))
    if honored and not feasible:
        raise DevicesDoNotFit(NO_PARTITION)
    return feasible


def in_smallest_scope(asked: Asked, wanted: Wanted, candidates: Sequence[Candidate]) -> Sequence[Candidate] | None:
    """Chooses GPUs by the topology tree; None without a tree, or for several shared GPUs. Raises DevicesDoNotFit."""
    scope = asked.demand.hint(DeviceType.GPU).required_topology_scope
    level = asked.demand.required_level
    if level is Level.DEVICE and not asked.compat:
        if wanted.count > 1:
            raise DevicesDoNotFit(NOT_IN_SCOPE)
        scope = ""
        level = Level.NONE  # a single GPU is on a single device wherever it is
    tree = tree_of(asked.inventory.by_type[DeviceType.GPU], compat=asked.compat)
    several_shared = is_shared(asked) and wanted.count > 1
    if several_shared or tree is None:
        if scope:
            raise DevicesDoNotFit(MULTI_SHARED if several_shared else NO_TREE, Status.UNRESOLVABLE)
        return None
    search = Search(
        fitting=fitting(asked, wanted, candidates),
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


def completed(given: Given) -> Given:
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
