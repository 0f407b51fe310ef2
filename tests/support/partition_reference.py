"""Machines at random, whose GPUs have links of few kinds."""

from itertools import combinations
from random import Random

from topoalign.core.placement.gpus.bandwidth import Scores

PALETTES = {
    "any": range(2000),
    "few": [10, 20, 50, 110, 250],
    "two": [10, 20],
    "rare": [10] * 9 + [100],
    "none": [0, 0, 0, 100],
}


def at_random(random: Random, devices: int, palette: str) -> Scores:
    scores = [[0] * devices for _ in range(devices)]
    for a, b in combinations(range(devices), 2):
        scores[a][b] = scores[b][a] = random.choice(PALETTES[palette])
    return scores
