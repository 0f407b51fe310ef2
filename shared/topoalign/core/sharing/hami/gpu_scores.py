"""
Scores how full GPUs and nodes are: ten times the weighted sum of the used fractions of slots, cores and memory.

Example: a GPU with 10 slots, 4 cores and 8192 MiB, of which 2, 1 and 2048 are used, has the score
10 x (0.2 + 0.25 + 0.25) = 7. With an additional request for one core and 1024 MiB, the score is
10 x (0.3 + 0.5 + 0.375) = 11.75, regardless of the number of requested GPUs.

Two known faults of upstream are kept, because they change which GPU is tried first. First, the request counts only on
GPUs whose type is exactly the vendor of the request, which is never the case with real GPU models. Second, if a request
has a percentage and an amount of memory, the percentage counts here, but in `fit` the amount. The score of a node does
not include the request, although upstream's documentation adds it.

All arithmetic is in single precision, so two GPUs are equally full exactly if they are equally full upstream.

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
    """How full a GPU would be; 0 if it has no slots, no cores or no memory. `requests`: all of one container."""
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
    """How full a node is; 0 if all its GPUs together have no slots, no cores or no memory."""
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


# Determines the order in which the GPUs of a node are tried.
#
# Upstream sorts its list and tries the last GPU first. Here, the first GPU of the result is tried first. The policies:
#
# - `binpack`: the fullest GPU first. `spread`: the emptiest first. `spread` is the default and replaces unknown
#   policies.
# - `mutex`: unused GPUs first; `fit` refuses the others.
# - A list (`numa,binpack`), or `numa` alone: sorts by these keys in turn. Words that are not keys (`mutex`,
#   `topology-aware`) are ignored; a list without keys means `spread`. With the key `numa`, the highest NUMA node is
#   first.
# - If the pod binds to one NUMA node, the GPUs of each node are consecutive: with `binpack`, the lowest node is first;
#   with `spread` and with lists, the highest. In lists, `numa` is then the first key.
#
# Of equal GPUs, the one with the highest NUMA node, then index, then uuid is first (upstream: often undefined).
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
    """The key that sorts GPUs as in upstream's list: the GPU that is tried first is last."""
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


# Chooses the GPUs of one container: scores them, sorts them in HAMi's order, and tries them one after another.
#
# If a node applies HAMi's rules, `slots_as_hami` uses this. The score of a GPU includes all requests of the container,
# and does not change while the GPUs of the container are chosen.
#
# Source: HAMi 4707fb02, scoreNode.


def score_gpus(gpus: Iterable[SharedGpu], requests: Sequence[HamiRequest], weights: Weights) -> tuple[ScoredGpu, ...]:
    """The GPUs, each with its score. `requests`: all of one container."""
    return tuple(ScoredGpu(gpu, hami_gpu_score(gpu, requests, weights)) for gpu in gpus)


def choose_gpus_as_hami(scored: Iterable[ScoredGpu], request: HamiRequest, around: Surroundings) -> Shares | Unfit:
    """The shares for one request, in the order in which they are taken, or why there are none. Raises TooMuchWork."""
    return fit(order_of_trial(scored, around.rules.hami, around.rules.numa_bind), request, around)
