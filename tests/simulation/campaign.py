"""Many seeds, over as many processes as there are cores."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from simulation.outcome import Outcome
from simulation.plants import PLANTS
from simulation.scenario import run

CHUNK = 50


def violations(seeds: Sequence[int], plant: str | None = None) -> list[tuple[int, str]]:
    """The seeds among these that break an invariant, and what is to be said of each."""
    found: list[tuple[int, str]] = []
    gc.disable()  # much of what a run leaves behind are cycles, and they are cheaper to clear together
    gc.collect()
    gc.freeze()  # what was there before stays, and need not be looked through each time
    try:
        for seed in seeds:
            outcome = one(seed, plant)
            if outcome.violation is not None:
                found.append((seed, outcome.report(plant=plant)))
            if seed % 10 == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        gc.enable()
    return found


def one(seed: int, plant: str | None = None) -> Outcome:
    return run(seed, PLANTS[plant].parts() if plant is not None else None)


def campaign(
    seeds: range, processes: int | None = None, done: Callable[[int], None] = lambda so_many: None
) -> Iterator[tuple[int, str]]:
    """All violations, as they are found. `done` is told how many seeds have been run."""
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=get_context("spawn")) as pool:
        finished = 0
        for chunk, found in zip(chunks, pool.map(violations, chunks), strict=True):
            finished += len(chunk)
            done(finished)
            yield from found
