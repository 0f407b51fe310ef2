"""
Chooses the shared GPUs of a container by topoalign's own rules.

A GPU has enough (`positions_with_enough`) if it is healthy and in the lists of models, modes and uuids, and

- for a whole GPU: no container holds any of it, and it has the requested memory;
- for a share: it has the cores, the memory and, if it is offered in slots, a slot left. A share with only memory needs one
  free core: nothing limits its computing time, so it would take that of the containers that hold all cores.

The refusal names the first amount that too few GPUs have. If all GPUs together have it, the refusal is `ShareSplit`.

The rule, among the GPUs that have enough:

- **A share of one GPU**: the GPU with the least left: fewest cores, then least memory, then fewest processes. So a share
  goes to a GPU that has other shares. Of equal GPUs, usually unused ones, policy `topology` chooses the one whose use cuts
  the fewest links between unused GPUs: one without a well linked partner, not one of a pair.
- **A share of several GPUs**: the set that comes first by policy `topology`, where links count as cut only between GPUs
  that nobody uses. Of equal sets the one that has the least left.
- **topology-aware**: a share of one GPU, too, goes by policy `topology` first, and then where the least is left.
- **Whole GPUs**: policy `topology` among the unused ones.
- **binpack, spread**: shares go to the GPUs that are fullest, or emptiest, with the share on them: the sum of the
  used fractions of slots, cores and memory, each weighted. Of equally full ones those that come first by policy `topology`.

The lowest index comes last, so that no tie is left to chance. Memory left is compared in blocks of 256 MiB, since GPUs of
one model differ by a few pages. Up to 126 sets (nine GPUs have no more) are all compared; beyond that, the sets that
policy `topology` compares, the same among GPUs in use, and the first in order.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from topoalign.core.demand.share_annotations import GpuOrder, GpuRules, Weights
from topoalign.core.demand.shares import Share, ShareFields, enough
from topoalign.core.model.topology.device_offers import MEMORY_BLOCK
from topoalign.core.placement.gpus.bandwidth import SetScorer
from topoalign.core.placement.gpus.topology import SetOrder, by_topology, candidate_sets
from topoalign.core.sharing.share_refusals import (
    OTHER_MODE,
    OTHER_TYPE,
    OTHER_UUID,
    MemoryAboveGpu,
    NoGpuAccepted,
    NotEnoughShareCores,
    NotEnoughShareGpus,
    NotEnoughShareMemory,
    NotEnoughShareSlots,
    NotEnoughUnusedGpus,
    ShareDoesNotFit,
    ShareSplit,
    describe_scattered_amounts,
    format_mib,
)
from topoalign.core.sharing.shared_gpus import SharedGpu
from topoalign.core.state.share_amounts import sum_amounts


def positions_with_enough(
    gpus: Sequence[SharedGpu], request: Share, fields: ShareFields, among: Iterable[int] | None = None
) -> list[int]:
    """
    The positions of all GPUs that have enough; `among`: of those that may be chosen, None: all. Raises ShareDoesNotFit if
    there are fewer than requested.
    """
    size = request.gpus
    rules = request.rules
    reasons = {at: _explain_unaccepted(gpus[at], rules) for at in (range(len(gpus)) if among is None else among)}
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


def _explain_unaccepted(gpu: SharedGpu, rules: GpuRules) -> str | None:
    """Why a GPU may not be chosen, whatever is left of it; None: it may."""
    if not gpu.usable:
        return "not healthy"
    if not rules.types.takes_type(gpu.model):
        return OTHER_TYPE
    if not rules.takes_mode(gpu.mode):
        return OTHER_MODE
    return None if rules.uuids.takes_uuid(gpu.gpu or gpu.device) else OTHER_UUID


def _explain_misfit(gpus: Sequence[SharedGpu], request: Share, fields: ShareFields) -> ShareDoesNotFit:
    """Why a share does not fit on so many of these GPUs, which may be chosen."""
    size = request.gpus
    asked = [request.amount_of(gpu.offered) for gpu in gpus]
    cores = max(1, min(each.cores for each in asked))  # memory alone needs one as well
    memory = min(each.memory for each in asked)
    cores_left = [gpu.left.cores for gpu in gpus]
    memory_left = [gpu.left.memory for gpu in gpus]
    slots_left = [max(0, gpu.slots) if gpu.all_slots else 1 for gpu in gpus]

    def split(field: str, amount: str, able: int) -> ShareSplit:
        return ShareSplit(field, describe_scattered_amounts(amount, size, able))

    if (able := sum(left >= cores for left in cores_left)) < size:
        if sum(cores_left) < cores * size:
            return NotEnoughShareCores(fields, cores, size, cores_left)
        return split(fields.cores, f"{cores} cores", able)
    if (able := sum(left >= memory for left in memory_left)) < size:
        if sum(memory_left) < memory * size:
            return NotEnoughShareMemory(fields, memory, size, memory_left)
        return split(fields.memory, format_mib(memory), able)
    if sum(left >= 1 for left in slots_left) < size:
        return NotEnoughShareSlots(fields, size, slots_left)
    able = sum(enough(gpu, request) for gpu in gpus)
    return split(fields.cores, f"a slot, {cores} cores and {format_mib(memory)} together", able)


Members = tuple[int, ...]
"""GPUs by their positions, ascending."""
Key = tuple[float, ...]

FIELDS = ShareFields()


def choose_gpus(
    gpus: Sequence[SharedGpu], able: list[int], request: Share, scorer: SetScorer, fields: ShareFields = FIELDS
) -> tuple[SharedGpu, ...]:
    """
    The GPUs that a container gets, in the order of `gpus`. `able`: as of `positions_with_enough`; `scorer`: of the same
    GPUs, by position. Raises ShareSplit.
    """
    choice = SetComparison(gpus, able, request, scorer)
    sets = (choice.best(group, request.gpus) for group in groups_by_numa_node(gpus, able, request, fields))
    return tuple(gpus[at] for at in min(sets, key=choice.rank))


def groups_by_numa_node(
    gpus: Sequence[SharedGpu], able: list[int], request: Share, fields: ShareFields
) -> list[list[int]]:
    """The groups of GPUs for a set: those of each NUMA node, or all. Raises ShareSplit if no group has enough."""
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
            fields.gpus, f"{size} of one NUMA node are asked for, and no node has as many with enough left"
        )
    return large


class SetComparison:
    """Compares sets of the GPUs that have enough, by their positions."""

    def __init__(self, gpus: Sequence[SharedGpu], able: list[int], asked: Share, scorer: SetScorer) -> None:
        rules = asked.rules
        self.scorer = scorer
        self.whole = asked.whole
        self.unused = frozenset(at for at, gpu in enumerate(gpus) if gpu.unused)
        """GPUs that are completely free."""
        self.order = SetOrder(scorer, self.unused)
        by = GpuOrder.BEST_FIT if self.whole else rules.order
        self.keys = {at: _gpu_order_key(gpus[at], asked, by, rules.weights) for at in able}
        self.by_links = self.whole or by is GpuOrder.TOPOLOGY_AWARE or (asked.gpus > 1 and by is GpuOrder.BEST_FIT)
        """Whether links come before the amounts left."""

    def best(self, group: list[int], size: int) -> Members:
        """The best set of a group of GPUs that have enough."""
        if self.whole:
            return by_topology(self.scorer, group, (), size, self.unused)
        return min(self.sets(group, size), key=self.rank)

    def sets(self, group: list[int], size: int) -> set[Members]:
        """The sets to compare: of the GPUs that come first, and where links decide also of all, and of those in use."""
        last = sorted(self.keys[at] for at in group)[size - 1]
        first = [at for at in group if self.keys[at] < last]
        sets = {*candidate_sets(self.order, [at for at in group if self.keys[at] <= last], first, size)}
        if self.by_links:
            used = [at for at in group if at not in self.unused]
            sets.update(candidate_sets(self.order, group, (), size))
            sets.update(candidate_sets(self.order, used, (), size) if len(used) >= size else ())
        return sets

    def rank(self, members: Members) -> tuple[Key, tuple[object, ...], Key, Members]:
        """The key that sorts sets of the same size, the best first."""
        sums = tuple(round(sum(column), 9) for column in zip(*(self.keys[at] for at in members), strict=True))
        return (
            () if self.by_links else sums,  # the GPU with the least left, or the fullest or emptiest GPUs,
            self.order.rank(members)[:-1],  # then links, as policy `topology` compares them,
            () if self.whole else sums,  # then, where links came first, the least left,
            members,
        )


def _gpu_order_key(gpu: SharedGpu, asked: Share, order: GpuOrder, weights: Weights) -> Key:
    if order in (GpuOrder.BEST_FIT, GpuOrder.TOPOLOGY_AWARE):
        left = gpu.left
        return (
            left.cores,  # the one with the fewest cores left,
            left.memory // MEMORY_BLOCK,  # then the least memory,
            gpu.processes,  # then the fewest processes
        )
    full = _gpu_fullness(gpu, asked, weights)
    return (-full if order is GpuOrder.BINPACK else full,)


def _gpu_fullness(gpu: SharedGpu, asked: Share, weights: Weights) -> float:
    """
    How full a GPU would be with the share on it: the weighted sum of its parts that are held, rounded to 9 digits.

    With equal weights a GPU without slots that has 30 of 100 cores and 2 of 8 GiB held is at 0.3 + 0.25; 20 cores and 1 GiB
    more make it 0.875.
    """
    offered = gpu.offered
    after = sum_amounts((gpu.held, asked.amount_of(offered)))
    parts = (
        (weights.slot, gpu.sharers + 1, gpu.all_slots),
        (weights.core, after.cores, offered.cores),
        (weights.memory, after.memory, offered.memory),
    )
    return round(sum(weight * held / offered for weight, held, offered in parts if offered), 9)
