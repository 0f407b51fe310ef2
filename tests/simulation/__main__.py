"""
Runs seeds of the simulation: `make simulate SEED=123` replays one and prints what happened, `make simulate SEEDS=0:100000`
runs many and prints the violations.
"""

import argparse
import sys
from collections.abc import Callable

from simulation.campaign import campaign, one
from simulation.plants import PLANTS

EVERYTHING = 1_000_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description="Runs seeds of the simulated node.")
    parser.add_argument("seeds", type=seeds_of, help="one seed, or FIRST:END")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="with this defect planted (for one seed)")
    parser.add_argument("--processes", type=int, help="default: one a core")
    arguments = parser.parse_args()
    seeds, broken = arguments.seeds, 0
    if isinstance(seeds, int):
        outcome = one(seeds, arguments.plant)
        print(outcome.report(EVERYTHING, arguments.plant))
        print(f"digest {outcome.digest}")
        return int(outcome.violation is not None)
    for _, report in campaign(seeds, arguments.processes, progress(len(seeds))):
        broken += 1
        print(report, flush=True)
    print(f"{len(seeds)} seeds, {broken} with a violation")
    return int(broken > 0)


def seeds_of(text: str) -> int | range:
    """Raises ValueError, of which argparse makes a sentence."""
    first, _, end = text.partition(":")
    return range(int(first), int(end)) if end else int(first)


def progress(total: int) -> Callable[[int], None]:
    def told(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {total} seeds", end="" if done < total else "\n", file=sys.stderr, flush=True)

    return told


if __name__ == "__main__":
    sys.exit(main())
