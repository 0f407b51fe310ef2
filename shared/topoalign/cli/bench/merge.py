"""How long merging the providers' hints takes: explicit lists of all hints, and no preferred hint common to all lists."""

from collections.abc import Iterator
from functools import partial

from topoalign.cli.measuring import measured
from topoalign.core.hints.model import TopologyHint
from topoalign.core.policy import POLICIES
from topoalign.core.requests import Policy
from topoalign.core.topology.bitmask import mask_of, masks_by_size

SIZES = ((8, 5, 200), (12, 5, 100))
"""NUMA nodes, providers, calls."""


def cases() -> Iterator[dict[str, object]]:
    policy = POLICIES[Policy.RESTRICTED]
    for nodes, providers, n in SIZES:
        lists = [
            [TopologyHint(mask, mask.bit_count() == width) for mask in masks_by_size(range(nodes))]
            for width in range(1, providers + 1)
        ]
        machine = mask_of(range(nodes))
        yield measured(f"{nodes}x{providers}", partial(policy.merge, lists, machine), n)
