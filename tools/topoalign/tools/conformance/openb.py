"""
The suite `openb`: how full a cluster gets with pod sizes from production, compared with fragmentation gradient descent.

The file has named workloads: how many pods ask for `gpus` GPUs with `milli` thousandths of each. A case is a workload, drawn
20 times (`bench placement-quality`, `filling`): the part of the capacity that is given when the first pod finds no place,
with the default settings. It must not be more than 0.01 below that of FGD, which knows the workload.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import msgspec

from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.tools.bench.placement_quality.filling import Task, filled, filled_by_us, gradient_descent
from topoalign.tools.conformance.suite import RatedResult, Suite

SEEDS = 20
SLACK = 0.01


class Size(msgspec.Struct, frozen=True):
    """How many pods ask for so much."""

    gpus: int
    milli: int
    pods: float


def openb(path: Path) -> Iterator[RatedResult]:
    """The suite. Raises InvalidMachine for a file without workloads, and OSError."""
    try:
        workloads = msgspec.json.decode(path.read_bytes(), type=dict[str, list[Size]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMachine(f"{clean(path.name)}: {clean(str(error), 200)}", "give workloads by name") from error
    for name, sizes in workloads.items():
        workload = [(Task(size.gpus, size.milli), size.pods) for size in sizes]
        descent = gradient_descent(workload)
        ours = fmean(filled_by_us(workload, seed) for seed in range(SEEDS))
        theirs = fmean(filled(workload, descent, seed) for seed in range(SEEDS))
        yield RatedResult(
            name, f"{theirs:.4f} as with FGD", f"{ours:.4f}", f"{name} (FGD {theirs:.4f})", ours, theirs - SLACK
        )


SUITES: dict[str, Suite] = {"openb": openb}
