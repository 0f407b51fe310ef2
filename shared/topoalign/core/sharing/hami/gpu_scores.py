"""
Scores how full GPUs and nodes are: the used fractions of slots, cores and memory, each weighted, times ten.

A GPU of 10 slots, 4 cores and 8192 MiB of which 2, 1 and 2048 are used scores 10 x (0.2 + 0.25 + 0.25) = 7. With a
request for one core and 1024 MiB on top, 10 x (0.3 + 0.5 + 0.375) = 11.75, however many GPUs it asks for.

Two known faults of upstream are kept, since they change which GPU is tried first. The request counts only on GPUs
whose type is exactly its vendor: with the models of real GPUs it never does. And a percentage wins over memory here,
while in `fit` memory wins. The node's score is of what is used before the pod, although upstream's
documentation adds the request.

All arithmetic is in single precision, so that two GPUs are as full as one another when they are so upstream.

Source: HAMi 4707fb02, scheduling policies.
"""

import struct
from collections.abc import Iterable, Sequence

import msgspec

from topoalign.core.demand.share_annotations import EQUAL_WEIGHTS, MUTEX, NUMA, GpuOrder, Weights, split_list
from topoalign.core.demand.shares import UNSET, HamiRequest
from topoalign.core.sharing.hami.fit import (
    Shares,
    Surroundings,
    Unfit,
    fit,
    held_memory_in_mib,
    known_numa_node,
    memory_in_mib,
)
from topoalign.core.sharing.shared_gpus import SharedGpu

SCALE = 10.0
_SINGLE = struct.Struct("<f")


def hami_gpu_score(gpu: SharedGpu, requests: Iterable[HamiRequest], weights: Weights = EQUAL_WEIGHTS) -> float:
    """How full a GPU would be, 0 if it has no slots, no cores or no memory. `requests` are those of one container."""
    total = memory_in_mib(gpu)
    if not (gpu.all_slots and gpu.offered.cores and total):
        return 0.0
    slots = gpu.sharers
    cores = gpu.held.cores
    memory = held_memory_in_mib(gpu)
    for request in requests:
        if request.vendor == gpu.model:
            slots += 1
            cores += request.cores
            by_percent = request.percent not in (0, UNSET)
            memory += total * request.percent // 100 if by_percent else request.memory
    return _weighted(
        (weights.slot, slots, gpu.all_slots), (weights.core, cores, gpu.offered.cores), (weights.memory, memory, total)
    )


def hami_gpus_score(gpus: Sequence[SharedGpu]) -> float:
    """How full a node is, 0 if its GPUs together have no slots, no cores or no memory."""
    slots = sum(gpu.all_slots for gpu in gpus)
    cores = sum(gpu.offered.cores for gpu in gpus)
    memory = sum(map(memory_in_mib, gpus))
    if not (slots and cores and memory):
        return 0.0
    return _weighted(
        (1, sum(gpu.sharers for gpu in gpus), slots),
        (1, sum(gpu.held.cores for gpu in gpus), cores),
        (1, sum(map(held_memory_in_mib, gpus)), memory),
    )


def _weighted(*parts: tuple[int, int, int]) -> float:
    """Ten times the sum over (weight, used, total), each step rounded to single precision."""
    score = 0.0
    for weight, used, total in parts:
        ratio = _single(_single(used) / _single(total))
        score = _single(score + _single(_single(weight) * ratio))
    return _single(SCALE * score)


def _single(number: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    return rounded


# Orders the GPUs of a node for the trial.
#
# Upstream sorts its list and walks it from the end; here the order is the walk. The policies:
#
# - `binpack`: the fullest GPU first. `spread`, the default and what every unknown word means: the emptiest first.
# - `mutex`: unused GPUs first; `fit` refuses the others.
# - A list (`numa,binpack`), or `numa` alone: its keys one after another, others in it (`mutex`, `topology-aware`) are
#   none; without any key it is `spread`. Key `numa` is the highest NUMA node first.
# - Where the pod binds to one NUMA node, GPUs of one node are next to one another: the lowest node first for
#   `binpack`, the highest for `spread`, and for lists, whose first key then is `numa`.
#
# Ties go to the highest NUMA node, then to the highest index, then to the highest uuid (upstream: often undefined).
#
# Source: HAMi 4707fb02, DeviceUsageList.


SortKey = tuple[float | str, ...]


class ScoredGpu(msgspec.Struct, frozen=True):
    """A GPU and how full it is."""

    gpu: SharedGpu
    score: float


def order_of_trial(gpus: Iterable[ScoredGpu], policy: str, numa_bind: bool = False) -> tuple[SharedGpu, ...]:
    """The GPUs in the order in which they are tried."""
    ordered = sorted(gpus, key=lambda each: sort_key(each, policy, numa_bind), reverse=True)
    return tuple(each.gpu for each in ordered)


def sort_key(scored: ScoredGpu, policy: str, numa_bind: bool = False) -> SortKey:
    """Sorts GPUs as upstream's list: the one that is tried first comes last."""
    gpu = scored.gpu
    score = scored.score
    numa_node = known_numa_node(gpu)
    tie = (gpu.index, gpu.device)
    if "," in policy or policy == NUMA:
        of_key = {GpuOrder.BINPACK: score, GpuOrder.SPREAD: -score, NUMA: numa_node}
        keys = [word for word in split_list(policy) if word in of_key] or [GpuOrder.SPREAD]
        first = [NUMA] if numa_bind else []
        return (*(of_key[key] for key in dict.fromkeys((*first, *keys))), *tie)
    if policy == MUTEX:
        return (-gpu.sharers, numa_node, *tie)
    fullest_last = score if policy == GpuOrder.BINPACK else -score
    if not numa_bind:
        return (fullest_last, numa_node, *tie)
    return (-numa_node if policy == GpuOrder.BINPACK else numa_node, fullest_last, *tie)


# Chooses the GPUs of one container: they are scored, put in HAMi's order and tried one after another.
#
# Nodes on which HAMi's rules choose use this (`slots_as_hami`), and so does `place`, container by container. A
# GPU's score counts all that the container asks for, and stays as it is while its GPUs are chosen.
#
# Source: HAMi 4707fb02, scoreNode.


def score_gpus(gpus: Iterable[SharedGpu], requests: Sequence[HamiRequest], weights: Weights) -> tuple[ScoredGpu, ...]:
    """The GPUs, each with how full it would be. `requests`: all of one container."""
    return tuple(ScoredGpu(gpu, hami_gpu_score(gpu, requests, weights)) for gpu in gpus)


def choose_gpus_as_hami(scored: Iterable[ScoredGpu], request: HamiRequest, around: Surroundings) -> Shares | Unfit:
    """The GPUs for one request, in the order in which they are taken, or why not. Raises TooMuchWork."""
    return fit(order_of_trial(scored, around.rules.hami, around.rules.numa_bind), request, around)
