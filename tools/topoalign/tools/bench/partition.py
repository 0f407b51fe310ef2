"""
The time of the searches of the device policies: the slowest request size of 1 to 8 GPUs.

The cases without a name in front are the search of `best-effort`. Nothing is kept between calls.
`warm` is a whole answer to GetPreferredAllocation, for free GPUs that differ from call to call.
The cases `topology-…` are choices of device policy `topology`, for free GPUs that differ from call to call: `-8` on a DGX-1V
after its sets were compared once, `-16` on a DGX-2, `-16-random` without structure, `-72` with 18 trays of 4, and
`-72-switch` at an NVSwitch; the size is that with the largest p99.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, cycle
from random import Random

from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.bandwidth import Links, Scores, SetScorer, gpu_scores
from topoalign.core.placement.gpus.device_policy import GpuChoice
from topoalign.core.placement.gpus.topology import ByTopology
from topoalign.core.placement.partition import best_split
from topoalign.core.placement.preference import prefer, set_scorer
from topoalign.machines import load_machine
from topoalign.tools.measuring import measure_calls

SIZES = range(1, 9)
CALLS = {"8": 300, "16-dgx2": 50, "16-random": 15, "72-clique": 50, "nvl72-trays": 25, "warm": 300}
TOPOLOGY_CALLS = 300
"""Of each size."""


def cases() -> Iterator[dict[str, object]]:
    """Measure each case; times in milliseconds."""
    machines = {
        "8": at_random(8),
        "16-dgx2": gpu_scores(load_machine("dgx2").topology),
        "16-random": at_random(16),
        "72-clique": in_trays(72, 72),
        "nvl72-trays": in_trays(72, 4),
    }
    for case, scores in machines.items():
        yield worst(case, searches(scores))
    yield worst("warm", answers(load_machine("hgx-h100").topology))
    trays = in_trays(72, 4)
    for case, scorer in {
        "topology-8": machine_scorer("dgx1-volta"),
        "topology-16": machine_scorer("dgx2"),
        "topology-16-random": SetScorer(at_random(16)),
        "topology-72": SetScorer(trays),
        "topology-72-switch": SetScorer(trays, Links(trays, [("switch", 18)] * 72)),
    }.items():
        yield worst(case, choices(scorer), by="p99_ms")


def machine_scorer(name: str) -> SetScorer:
    """The scorer of a machine of the catalogue."""
    return set_scorer(load_machine(name).topology)


def choices(scorer: SetScorer) -> Callable[[int], Callable[[], object]]:
    """By size a choice of so many GPUs by device policy `topology`, each time with others free."""
    gpus = len(scorer.scores)
    least = max(6, gpus - 12)

    def choosing(size: int) -> Callable[[], object]:
        chance = Random(size)

        def choose() -> object:
            free = tuple(sorted(chance.sample(range(gpus), chance.randint(max(size, least), gpus))))
            return ByTopology().choose(GpuChoice(scorer, free, (), size, frozenset(free)))

        if gpus <= 8:
            for _ in range(1_000):
                choose()
        return choose

    return choosing


def worst(case: str, call: Callable[[int], Callable[[], object]], by: str = "p50_ms") -> dict[str, object]:
    """The figures of the size that takes the longest."""
    rows = [{**measure_calls(case, call(size), CALLS.get(case, TOPOLOGY_CALLS)), "size": size} for size in SIZES]
    return max(rows, key=lambda row: float(str(row[by])))


def searches(scores: Scores) -> Callable[[int], Callable[[], object]]:
    """By size a search in which nothing is required and all GPUs are available."""
    return lambda size: partial(best_split, scores, range(len(scores)), (), size)


def answers(topology: Topology) -> Callable[[int], Callable[[], object]]:
    """By size a call that asks for so many GPUs, each time with others free, six at least."""
    gpus = tuple(topology.devices[GPU])

    def asking_for(size: int) -> Callable[[], object]:
        offers = [free for number in range(max(size, 6), len(gpus) + 1) for free in combinations(gpus, number)]
        Random(size).shuffle(offers)
        free = cycle(offers)
        return lambda: prefer(topology, GPU, next(free), (), size, Placement.BEST_EFFORT)

    return asking_for


def at_random(devices: int) -> Scores:
    """No structure at all."""
    chance = Random(devices)
    scores = [[0] * devices for _ in range(devices)]
    for a, b in combinations(range(devices), 2):
        scores[a][b] = scores[b][a] = chance.randint(10, 1860)
    return scores


def in_trays(devices: int, tray: int) -> Scores:
    """NVLink among all devices, and a PCIe path within each tray."""
    return [[0 if a == b else 1850 if a // tray == b // tray else 1810 for b in range(devices)] for a in range(devices)]
