"""
Chooses the shared GPUs of a container by topoalign's own rules.

A GPU has enough (`positions_with_enough`) if it is healthy, the pod accepts its model, mode and uuid, and:

- for a whole GPU: no container holds any of it, and it has the requested memory;
- for a share: it has the requested cores and memory free and, if it is offered in slots, a free slot. A share with only
  memory needs one free core, because nothing limits its computing time. Without a free core, it would use computing
  time that other containers hold.

If too few GPUs have enough, the error names the first amount that too few of them have. If enough GPUs have each
amount, but too few have all amounts, the error is `ShareSplit`.

The GPUs are chosen as follows from those that have enough:

- **A share of one GPU**: the GPU with the fewest free cores, then the least free memory, then the fewest processes. So
  shares go to GPUs that already have shares. Of equal GPUs, which are usually unused, policy `topology` chooses the
  one with the fewest links to other unused GPUs. So a GPU without a well linked partner is used before one of a pair.
- **A share of several GPUs**: the best set by policy `topology`. Of the links that a set cuts, only those from
  its unused GPUs to other unused GPUs count. Of equal sets, the one with the least free capacity.
- **topology-aware**: policy `topology` decides first for a share of one GPU, too. Of equal GPUs, the one with the least
  free capacity.
- **Whole GPUs**: the best set of unused GPUs by policy `topology`.
- **binpack, spread**: the GPUs that would be fullest (binpack) or emptiest (spread) with the share. Fullness is the
  weighted sum of the used fractions of slots, cores and memory. Of equal GPUs, the best set by policy `topology`.

The lowest indexes break ties, so that the choice is deterministic. Free memory is compared in blocks of 256 MiB,
because the sizes of GPUs of one model differ by a few pages. If there are at most 126 sets (the number of
sets of four out of nine GPUs), all are compared. If there are more, these are compared: the sets that policy `topology`
compares, those that it compares among the GPUs in use, and sets of the GPUs that are first in the order above.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from topoalign.core.demand.share_annotations import GpuOrder, Weights
from topoalign.core.demand.shares import Share, ShareFields, enough
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.placement.gpus.bandwidth import SetScorer
from topoalign.core.placement.gpus.topology import SetOrder, by_topology, candidate_sets
from topoalign.core.sharing.share_refusals import (
    MemoryAboveGpu,
    NoGpuAccepted,
    NotEnoughShareCores,
    NotEnoughShareGpus,
    NotEnoughShareMemory,
    NotEnoughShareSlots,
    NotEnoughUnusedGpus,
    ShareDoesNotFit,
    ShareSplit,
    format_mib,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import sum_amounts


def positions_with_enough(
    gpus: Sequence[SharedGpu], request: Share, fields: ShareFields, among: Iterable[int] | None = None
) -> list[int]:
    """
    The positions of all GPUs that have enough. `among`: positions of the GPUs that may be chosen; None: all. Raises
    ShareDoesNotFit if there are fewer than requested.
    """
    size = request.gpus
    rules = request.rules
    may_be_chosen = range(len(gpus)) if among is None else among
    reasons = {
        at: rules.exclusion(gpu.gpu or gpu.device, gpu.model, gpu.mode) if gpu.usable else "not healthy"
        for at, gpu in ((at, gpus[at]) for at in may_be_chosen)
    }
    accepted = [at for at, reason in reasons.items() if reason is None]
    if not accepted:
        raise NoGpuAccepted(fields, Counter(reason for reason in reasons.values() if reason is not None))
    if len(accepted) < size:
        raise NotEnoughShareGpus(fields, size, len(accepted))
    largest = max(gpus[at].offered.memory for at in accepted)
    if request.memory > largest:
        raise MemoryAboveGpu(fields, request.memory, largest)
    if request.whole or rules.mutex:
        unused = [at for at in accepted if gpus[at].unused]
        if len(unused) < size:
            raise NotEnoughUnusedGpus(fields, size, len(unused))
        accepted = unused
    able = [at for at in accepted if enough(gpus[at], request)]
    if len(able) < size:
        if request.whole:
            raise NotEnoughShareMemory(fields, request.memory, size, [gpus[at].offered.memory for at in accepted])
        raise _explain_misfit([gpus[at] for at in accepted], request, fields)
    return able


def _explain_misfit(gpus: Sequence[SharedGpu], request: Share, fields: ShareFields) -> ShareDoesNotFit:
    """The error for a share if too few of these GPUs, which are all accepted, have enough."""
    size = request.gpus
    asked = [request.amount_of(gpu.offered) for gpu in gpus]
    cores = max(1, min(each.cores for each in asked))  # a share with only memory needs one, too
    memory = min(each.memory for each in asked)
    cores_left = [gpu.left.cores for gpu in gpus]
    memory_left = [gpu.left.memory for gpu in gpus]
    slots_left = [max(0, gpu.slots) if gpu.all_slots else 1 for gpu in gpus]

    if sum(left >= cores for left in cores_left) < size:
        return NotEnoughShareCores(fields, cores, size, cores_left)
    if sum(left >= memory for left in memory_left) < size:
        return NotEnoughShareMemory(fields, memory, size, memory_left)
    if sum(left >= 1 for left in slots_left) < size:
        return NotEnoughShareSlots(fields, size, slots_left)
    able = sum(enough(gpu, request) for gpu in gpus)
    together = f"a slot, {cores} cores and {format_mib(memory)} together"
    return ShareSplit(fields.cores, f"{together} are left on {able} GPUs, fewer than the {size} asked for")


Members = tuple[int, ...]
"""Positions of GPUs, in ascending order."""
Key = tuple[float, ...]

FIELDS = ShareFields()


def choose_gpus(
    gpus: Sequence[SharedGpu], able: list[int], request: Share, scorer: SetScorer, fields: ShareFields = FIELDS
) -> tuple[SharedGpu, ...]:
    """
    The GPUs for a container, in the order of `gpus`. `able`: the result of `positions_with_enough`. `scorer`: scores
    the same GPUs, by position. Raises ShareSplit.
    """
    choice = SetComparison(gpus, able, request, scorer)
    sets = (choice.best(group, request.gpus) for group in groups_by_numa_node(gpus, able, request, fields))
    return tuple(gpus[at] for at in min(sets, key=choice.rank))


def groups_by_numa_node(
    gpus: Sequence[SharedGpu], able: list[int], request: Share, fields: ShareFields
) -> list[list[int]]:
    """
    The groups of GPUs within which a set is chosen: one for each NUMA node that has enough GPUs, or one with all GPUs.
    Raises ShareSplit if no NUMA node has enough GPUs.
    """
    size = request.gpus
    if not request.rules.numa_bind or size == 1:
        return [able]
    by_node: dict[int, list[int]] = {}
    for at in able:
        node = gpus[at].numa_node
        if node is not None:
            by_node.setdefault(node, []).append(at)
    large = [group for group in by_node.values() if len(group) >= size]
    if not large:
        raise ShareSplit(
            fields.gpus, f"{size} GPUs of one NUMA node are asked for, and no node has {size} GPUs with enough left"
        )
    return large


class SetComparison:
    """Compares sets of GPUs that have enough. A set contains positions of GPUs."""

    def __init__(self, gpus: Sequence[SharedGpu], able: list[int], asked: Share, scorer: SetScorer) -> None:
        rules = asked.rules
        self.scorer = scorer
        self.whole = asked.whole
        self.unused = frozenset(at for at, gpu in enumerate(gpus) if gpu.unused)
        """Positions of the GPUs that no container uses."""
        self.order = SetOrder(scorer, self.unused)
        by = GpuOrder.BEST_FIT if self.whole else rules.order
        self.keys = {at: _gpu_order_key(gpus[at], asked, by, rules.weights) for at in able}
        self.by_links = self.whole or by is GpuOrder.TOPOLOGY_AWARE or (asked.gpus > 1 and by is GpuOrder.BEST_FIT)
        """Whether links are compared before free amounts."""

    def best(self, group: list[int], size: int) -> Members:
        """The best set of a group of GPUs that have enough."""
        if self.whole:
            return by_topology(self.scorer, group, (), size, self.unused)
        return min(self.sets(group, size), key=self.rank)

    def sets(self, group: list[int], size: int) -> set[Members]:
        """The sets to compare: sets of the first GPUs in order; if links decide, also sets of all and of used GPUs."""
        last = sorted(self.keys[at] for at in group)[size - 1]
        first = [at for at in group if self.keys[at] < last]
        sets = {*candidate_sets(self.order, [at for at in group if self.keys[at] <= last], first, size)}
        if self.by_links:
            used = [at for at in group if at not in self.unused]
            sets.update(candidate_sets(self.order, group, (), size))
            sets.update(candidate_sets(self.order, used, (), size) if len(used) >= size else ())
        return sets

    def rank(self, members: Members) -> tuple[Key, tuple[object, ...], Key, Members]:
        """The sort key for sets of the same size. The best set is first."""
        sums = tuple(round(sum(column), 9) for column in zip(*(self.keys[at] for at in members), strict=True))
        return (
            () if self.by_links else sums,  # the least free amounts, or the fullest or emptiest GPUs,
            self.order.rank(members)[:-1],  # then links, as policy `topology` compares them,
            () if self.whole else sums,  # then, if links came first, the least free amounts,
            members,
        )


def _gpu_order_key(gpu: SharedGpu, asked: Share, order: GpuOrder, weights: Weights) -> Key:
    if order in (GpuOrder.BEST_FIT, GpuOrder.TOPOLOGY_AWARE):
        left = gpu.left
        return (
            left.cores,  # the fewest free cores,
            left.memory // MEMORY_BLOCK,  # then the least free memory,
            gpu.processes,  # then the fewest processes
        )
    full = _gpu_fullness(gpu, asked, weights)
    return (-full if order is GpuOrder.BINPACK else full,)


def _gpu_fullness(gpu: SharedGpu, asked: Share, weights: Weights) -> float:
    """
    How full a GPU would be with the share: the weighted sum of the held fractions of its slots, cores and memory,
    rounded to 9 decimal places.

    Example with equal weights: of a GPU without slots, 30 of 100 cores and 2 of 8 GiB are held. Its fullness is 0.3 +
    0.25. With a share of 20 cores and 1 GiB, it is 0.5 + 0.375.
    """
    offered = gpu.offered
    after = sum_amounts((gpu.held, asked.amount_of(offered)))
    parts = (
        (weights.slot, gpu.sharers + 1, gpu.all_slots),
        (weights.core, after.cores, offered.cores),
        (weights.memory, after.memory, offered.memory),
    )
    return round(sum(weight * held / offered for weight, held, offered in parts if offered), 9)
