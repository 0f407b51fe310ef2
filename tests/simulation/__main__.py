"""
Runs seeds of the simulation: `make simulate SEED=123` replays one and prints what happened, `make simulate SEEDS=0:100000`
runs many and prints the violations; WORLDS=instances only those of one kind, WORLDS=cluster the same seeds as clusters.
"""

import argparse
import sys
from typing import get_args

from simulation.campaign import campaign, of_kind, one
from simulation.cluster_plants import CLUSTER_PLANTS
from simulation.plants import PLANTS
from simulation.world import Kind

EVERYTHING = 1_000_000
CLUSTER = "cluster"


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description="Runs seeds of the simulated node, or cluster.")
    parser.add_argument("seeds", type=seeds_of, help="one seed, or FIRST:END")
    parser.add_argument("--plant", choices=sorted({*PLANTS, *CLUSTER_PLANTS}), help="with this defect planted")
    parser.add_argument(
        "--worlds",
        choices=(*get_args(Kind), CLUSTER),
        help=f"of FIRST:END only the seeds with worlds of this kind; {CLUSTER}: each seed as a cluster",
    )
    parser.add_argument("--processes", type=int, help="default: one a core")
    arguments = parser.parse_args()
    seeds, plant, broken = arguments.seeds, arguments.plant, 0
    of_cluster = arguments.worlds == CLUSTER
    if plant is not None and (plant in CLUSTER_PLANTS) != of_cluster:
        parser.error(
            f"the plant {plant} needs {'' if plant in CLUSTER_PLANTS else 'other worlds than '}--worlds {CLUSTER}"
        )
    if isinstance(seeds, int):
        outcome = one(seeds, plant, of_cluster=of_cluster)
        print(outcome.report(EVERYTHING, plant))
        print(f"digest {outcome.digest}")
        return int(outcome.violation is not None)
    chosen, steps = of_kind(seeds, None if of_cluster else arguments.worlds), 0

    def told(done: int, so_far: int) -> None:
        nonlocal steps
        steps = so_far
        if sys.stderr.isatty():
            end = "" if done < len(chosen) else "\n"
            print(f"\r{done} of {len(chosen)} seeds", end=end, file=sys.stderr, flush=True)

    for _, report in campaign(chosen, arguments.processes, told, plant=plant, of_cluster=of_cluster):
        broken += 1
        print(report, flush=True)
    print(f"{len(chosen)} seeds, {steps} steps, {broken} with a violation")
    return int(broken > 0)


def seeds_of(text: str) -> int | range:
    """Raises ValueError, of which argparse makes a sentence."""
    first, _, end = text.partition(":")
    return range(int(first), int(end)) if end else int(first)


if __name__ == "__main__":
    sys.exit(main())
