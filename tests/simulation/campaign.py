"""Many seeds, over as many processes as there are cores."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

from simulation.cluster_scenario import run_cluster
from simulation.outcome import Outcome
from simulation.plants import PLANTS
from simulation.scenario import run
from simulation.world import Kind, kind_of

CHUNK = 50


class Found(NamedTuple):
    """What came of some seeds."""

    steps: int
    """That they took."""
    violations: list[tuple[int, str]]
    """The seeds that break an invariant, and what is to be said of each."""


def violations(seeds: Sequence[int], plant: str | None = None, *, of_cluster: bool = False) -> Found:
    """Runs these seeds, of single nodes or of clusters."""
    found, steps = list[tuple[int, str]](), 0
    gc.disable()  # much of what a run leaves behind are cycles, and they are cheaper to clear together
    gc.collect()
    gc.freeze()  # what was there before stays, and need not be looked through each time
    try:
        for number, seed in enumerate(seeds):
            outcome = one(seed, plant, of_cluster=of_cluster)
            steps += outcome.step
            if outcome.violation is not None:
                found.append((seed, outcome.report(plant=plant)))
            if number % 10 == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return Found(steps, found)


def one(seed: int, plant: str | None = None, *, of_cluster: bool = False) -> Outcome:
    if of_cluster:
        return run_cluster(seed, plant)
    return run(seed, PLANTS[plant].parts() if plant is not None else None)


def of_kind(seeds: range, kind: Kind | None) -> Sequence[int]:
    """The seeds among these whose worlds are of this kind; None: all."""
    return seeds if kind is None else [seed for seed in seeds if kind_of(seed) == kind]


def campaign(
    seeds: Sequence[int],
    processes: int | None = None,
    done: Callable[[int, int], None] = lambda seeds, steps: None,
    *,
    plant: str | None = None,
    of_cluster: bool = False,
) -> Iterator[tuple[int, str]]:
    """All violations, as they are found. `done` is told how many seeds have been run, and how many steps these took."""
    run_chunk = partial(violations, plant=plant, of_cluster=of_cluster)
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        finished = steps = 0
        for chunk, found in zip(chunks, pool.map(run_chunk, chunks), strict=True):
            finished += len(chunk)
            steps += found.steps
            done(finished, steps)
            yield from found.violations
