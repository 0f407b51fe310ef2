"""
The time of the search of device policy `best-effort`: the slowest request size of 1 to 8 GPUs.

Only lists that depend on the number of devices and the size are kept between calls. `warm` is a whole
answer to GetPreferredAllocation, for free GPUs that differ from call to call.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, cycle

from topoalign.cli.measuring import measured
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.gpus.scores import Scores, gpu_scores
from topoalign.core.placement.partition import best_split
from topoalign.core.placement.preference import prefer
from topoalign.machines import load_machine

SIZES = range(1, 9)
CALLS = {"8": 300, "16-dgx2": 50, "16-random": 15, "72-clique": 50, "nvl72-trays": 25, "warm": 300}
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


def worst(case: str, call: Callable[[int], Callable[[], object]]) -> dict[str, object]:
    """The figures of the size that takes the longest."""
    rows = [{**measured(case, call(size), CALLS[case]), "size": size} for size in SIZES]
    return max(rows, key=lambda row: float(str(row["p50_ms"])))


def searches(scores: Scores) -> Callable[[int], Callable[[], object]]:
    """By size a search in which nothing is required and all GPUs are available."""
    return lambda size: partial(best_split, scores, range(len(scores)), (), size)


def answers(topology: Topology) -> Callable[[int], Callable[[], object]]:
    """By size a call that asks for so many GPUs, each time with others free, six at least."""
    gpus = tuple(topology.devices[GPU])

    def asking_for(size: int) -> Callable[[], object]:
        offers = [free for number in range(max(size, 6), len(gpus) + 1) for free in combinations(gpus, number)]
        random.Random(size).shuffle(offers)
        free = cycle(offers)
        return lambda: prefer(topology, GPU, next(free), (), size, Placement.BEST_EFFORT)

    return asking_for


def at_random(devices: int) -> Scores:
    """No structure at all."""
    chance = random.Random(devices)
    scores = [[0] * devices for _ in range(devices)]
    for a, b in combinations(range(devices), 2):
        scores[a][b] = scores[b][a] = chance.randint(10, 1860)
    return scores


def in_trays(devices: int, tray: int) -> Scores:
    """NVLink among all devices, and a PCIe path within each tray."""
    return [[0 if a == b else 1850 if a // tray == b // tray else 1810 for b in range(devices)] for a in range(devices)]
