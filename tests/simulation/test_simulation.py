"""
No seed makes the node break its word, whatever fails around it; and a simulation that is given a broken node finds it.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from faults_support import THOROUGH
from simulation.campaign import campaign, one
from simulation.deeds import DEEDS
from simulation.outcome import Outcome
from simulation.plants import PLANTS

SEEDS = range(100_000 if THOROUGH else 1_400)
LIMITED = 43
"""A seed of a node whose slots are limited, and whose disk has no room for that at times."""
TESTS = Path(__file__).parents[1]
REPLAY = """
import json, sys
from simulation.campaign import one
outcomes = [one(*run) for run in json.loads(sys.argv[1])]
print(json.dumps([(outcome.violation is not None, outcome.digest) for outcome in outcomes]))
"""


@pytest.mark.timeout(0 if THOROUGH else 900)
def test_no_seed_breaks_an_invariant(capsys: pytest.CaptureFixture[str]) -> None:
    """I1 to I9, I12 to I14 after every step, I10 in the end; steps are faults and what is ordinary, all at once."""

    def told(done: int, steps: int) -> None:
        if THOROUGH and sys.stderr.isatty():
            with capsys.disabled():
                print(f"\r{done} of {len(SEEDS)} seeds", end="", file=sys.stderr, flush=True)

    found = list(campaign(SEEDS if THOROUGH else SEEDS[::2], done=told))

    assert [] == found, "\n\n".join(report for _, report in found[:3])


@cache
def played(seed: int, plant: str | None) -> Outcome:
    """Each once, for all tests."""
    return one(seed, plant)


def broken(plant: str) -> Iterator[Outcome]:
    seeds = SEEDS[PLANTS[plant].first :]
    return (outcome for outcome in (played(seed, plant) for seed in seeds) if outcome.violation is not None)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_found_within_these_seeds_by_its_invariant(plant: str) -> None:
    """A planted defect is found within these seeds by the invariant that it breaks."""
    invariants = (outcome.violation.invariant for outcome in broken(plant) if outcome.violation is not None)

    assert PLANTS[plant].breaks in invariants


@pytest.mark.parametrize("plant", list(PLANTS)[:3])
def test_a_seed_finds_its_planted_defect_again_and_nothing_without_it(plant: str) -> None:
    """A seed that found a planted defect finds it again, and finds nothing without it."""
    found = next(broken(plant))
    again = one(found.seed, plant)

    assert found.digest == again.digest
    assert str(found.violation) == str(again.violation)
    assert found.report(plant=plant).endswith(f"replay: make simulate SEED={found.seed} PLANT={plant}")
    assert one(found.seed).violation is None


def test_the_same_seed_gives_the_same_run_to_the_byte_in_another_process() -> None:
    """Nor does it matter how that process orders its sets."""
    planted = [(next(broken(plant)).seed, plant) for plant in list(PLANTS)[:3]]
    runs = [*((seed, None) for seed in (0, 8, LIMITED)), *planted]
    here = [(played(seed, plant).violation is not None, played(seed, plant).digest) for seed, plant in runs]

    assert here == elsewhere(runs)
    assert [False] * 3 + [True] * len(planted) == [found for found, _ in here]


def elsewhere(runs: Sequence[tuple[int, str | None]]) -> list[tuple[bool, str]]:
    """Whether each of these runs broke an invariant in another process, and the digest of its trace."""
    done = subprocess.run(
        [sys.executable, "-c", REPLAY, json.dumps(runs)],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'support'}", "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [(is_broken, digest) for is_broken, digest in json.loads(done.stdout)]


def test_the_seeds_cause_everything_that_can_be_caused() -> None:
    """A simulation in which nothing happens finds nothing."""
    done: Counter[str] = Counter()
    facts: Counter[str] = Counter()
    compats = set[str]()
    for seed in range(120):
        for _, _, what, *details in played(seed, None).trace:
            if what == "step":
                done[details[1]] += 1
            if what == "fact":
                facts[type(details[0]).__name__] += 1
            if what == "node":
                compats.add(details[-1])
            if what in ("admitted", "granted", "refused", "killed", "converged", "repeated", "spread"):
                facts[what] += 1

    assert {deed.name for deed in DEEDS} == done.keys()
    assert {
        "AllocationGranted",
        "AllocationBound",
        "AllocationReleased",
        "AllocationRefused",
        "AllocationDeviated",
        "AllocationsSnapshot",
        "admitted",
        "granted",
        "refused",
        "killed",
        "converged",
        "repeated",
        "spread",
    } == facts.keys()
    assert {"", "gaia", "hami"} == compats
