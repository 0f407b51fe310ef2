"""
How good the sets of GPUs are that pods get, and how full a cluster gets: the measure of the product.

- `<machine>/<policy>`: three streams of 400 pods on one node under topology policy `none` (`streams`). Of each pod with at
  least two GPUs the bandwidth across the weakest seam of its set is divided by that of the best set of the empty machine:
  `mean`, `worst`, and `below_half`, the share of pods with less than half. `optimum`: pods that fill the machine in a random
  order, 20 times; the sum of these ratios divided by the most that could be reached, which is proven; up to nine GPUs.
- `shares/<method>`: the part of the capacity of 8 nodes that is given when the first pod finds no place (`filling`), for
  pods with tenths of a GPU and pods with 1, 2, 4 or 8 GPUs, 10 times.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean, stdev

from topoalign.core.model.requests import Placement
from topoalign.core.placement.gpus.bandwidth import Members, SetScorer
from topoalign.core.placement.gpus.topology import by_topology
from topoalign.core.placement.preference import set_scorer
from topoalign.machines import load_machine
from topoalign.tools.bench.placement_quality import filling, streams
from topoalign.tools.bench.placement_quality.filling import Task, Workload

MACHINES = (
    "dgx1-volta",
    "dgx2",
    "hgx-h100",
    "hgx-b200-gpu0-off",
    "hgx-b200-gpu0-half",
    "gb200-tray",
    "a100-missing-bridge",
    "8x-nvlink-pairs",
    "8x-l40s",
    "8x-rtx4090",
    "two-socket-8xpcie",
)
POLICIES = (Placement.TOPOLOGY.value, Placement.BEST_EFFORT.value, Placement.SIMPLE.value, streams.RANDOM)
SEEDS = 3
SHORT_SEEDS = 20
FILL_SEEDS = 10
MOST_PROVEN = 9
"""GPUs of which the optimum is proven."""
WORKLOAD: Workload = (
    *((Task(1, 100 * tenths), 1.0) for tenths in range(1, 10)),
    *((Task(gpus, 1000), weight) for gpus, weight in ((1, 5.0), (2, 1.0), (4, 1.0), (8, 1.0))),
)


def cases() -> Iterator[dict[str, object]]:
    """The figures of each device policy on each machine, then those of shares."""
    for machine in MACHINES:
        scorer = set_scorer(load_machine(machine).topology)
        for policy in POLICIES:
            yield {"case": f"{machine}/{policy}", **Machine(scorer).figures(policy)}
    methods: dict[str, Callable[[int], float]] = {
        "ours": partial(filling.filled_by_us, WORKLOAD),
        "fgd": partial(filling.filled, WORKLOAD, filling.gradient_descent(WORKLOAD)),
        "best-fit": partial(filling.filled, WORKLOAD, filling.best_fit),
    }
    for method, fill in methods.items():
        ratios = [fill(seed) for seed in range(FILL_SEEDS)]
        yield {
            "case": f"shares/{method}",
            "mean": round(fmean(ratios), 4),
            "worst": round(min(ratios), 4),
            "se": round(stdev(ratios) / len(ratios) ** 0.5, 4),
            "n": len(ratios),
        }


class Machine:
    """One machine, and what sets of its GPUs are worth."""

    def __init__(self, scorer: SetScorer) -> None:
        self.scorer = scorer
        self.gpus = len(scorer.scores)
        every = tuple(range(self.gpus))
        sizes = [size for size in streams.SIZES if 1 < size <= self.gpus]
        self.best = {size: self.bandwidth(by_topology(scorer, every, (), size)) for size in sizes}

    def bandwidth(self, members: Members) -> float:
        """GB/s across the weakest seam."""
        return self.scorer.seam(members).bandwidth(self.scorer.links.model)

    def ratio(self, members: Members) -> float:
        """The bandwidth of a set relative to the best set of its size."""
        return self.bandwidth(members) / self.best[len(members)]

    def figures(self, policy: str) -> dict[str, object]:
        """The figures of a device policy."""
        ratios = [
            self.ratio(members)
            for seed in range(SEEDS)
            for members in streams.granted(self.gpus, seed, streams.chooser(self.scorer, policy, seed))
        ]
        return {
            "mean": round(fmean(ratios), 4),
            "worst": round(min(ratios), 4),
            "below_half": round(sum(ratio < 0.5 for ratio in ratios) / len(ratios), 4),
            "optimum": self.of_optimum(policy) if self.gpus <= MOST_PROVEN else "-",
            "n": len(ratios),
        }

    def of_optimum(self, policy: str) -> float:
        """What the policy reaches of the proven optimum of short streams, on average."""
        found = []
        for seed in range(SHORT_SEEDS):
            sizes = streams.filling(self.gpus, seed)
            best = streams.best_sum(self.gpus, sizes, self.ratio)
            choose = streams.chooser(self.scorer, policy, seed)
            if best:
                found.append(streams.sum_of_choices(self.gpus, sizes, choose, self.ratio) / best)
        return round(fmean(found), 4)
