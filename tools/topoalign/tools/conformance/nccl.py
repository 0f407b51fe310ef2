"""
The suites `nccl`: how fast NCCL would run on the sets of GPUs that device policy `topology` chooses.

A file `<machine>.jsonl` lists sets of GPUs of one machine, each with the bandwidth of an allreduce of 1 GiB that NCCL plans
for it; the machine is `machines/<machine>.json` beside it. A case is a set of free GPUs and a size: the bandwidth of the set
that the policy chooses is divided by that of the best free set. A case with less than 0.70 fails.

- `nccl`: all free sets and all sizes from 2 to 8. Of a file that lists only a part of the sets, the free sets are the unions
  of two listed sets, and cases whose chosen set is not listed are left out;
- `nccl/two-containers`: two containers of one size, one after the other; the sum of both bandwidths against the best sum.
- `nccl/streams`: pods that arrive and leave (`bench placement-quality`). A case is a machine: the mean bandwidth of the
  pods of three streams, each relative to the best set of its size, which must not be more than 0.002 below that of device
  policy `best-effort`. `nccl/streams-best-effort` shows that policy, to compare with.

Files about two nodes (`*.two-nodes.jsonl`, `*.nics.jsonl`) have other fields and are skipped.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import combinations
from math import comb
from pathlib import Path
from statistics import fmean

import msgspec

from topoalign.core.model.decisions import PlacementContext
from topoalign.core.model.errors import InvalidMachine, clean
from topoalign.core.model.ids import GPU
from topoalign.core.model.requests import Placement
from topoalign.core.model.topology.model import Topology
from topoalign.core.placement.preference import positions_by_gpu, prefer
from topoalign.machines.document import decode_machine
from topoalign.tools.bench.placement_quality import streams
from topoalign.tools.conformance.suite import RatedResult, Suite

SKIPPED = (".two-nodes.jsonl", ".nics.jsonl")
SIZES = range(2, 9)
LEAST = 0.70
MOST_FREE_SETS = 400
"""Free sets of each size where not all sets are listed."""
MOST_LISTED = 9
"""GPUs of a machine of which all sets are listed."""
STREAMS = 3
SLACK = 0.002

Members = tuple[int, ...]
"""GPUs by their positions on the machine, ascending."""


class ListedSet(msgspec.Struct, frozen=True):
    """A line of a file: what NCCL plans for a set of GPUs."""

    gpus: list[int]
    allreduce_1GiB_GBps: float


class Machine:
    """A machine and the bandwidth of sets of its GPUs."""

    def __init__(self, topology: Topology, bandwidth: Mapping[Members, float]) -> None:
        self.topology = topology
        self.bandwidth = bandwidth
        self.gpus = tuple(topology.gpu_by_id)

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The sizes of which sets are listed."""
        return [size for size in SIZES if any(len(members) == size for members in self.bandwidth)]

    def chosen(self, free: Members, size: int, placement: str = Placement.TOPOLOGY) -> Members:
        """The set that a device policy chooses under topology policy `none`."""
        gpus = tuple(self.gpus[position] for position in free)
        context = PlacementContext(free=gpus)
        position = positions_by_gpu(self.topology)
        return tuple(position[gpu] for gpu in prefer(self.topology, GPU, gpus, (), size, placement, context=context))

    def best(self, free: Members, size: int) -> float:
        """The bandwidth of the best listed set that is free."""
        return max(self.bandwidth.get(members, 0.0) for members in combinations(free, size))

    def best_pair(self, free: Members, size: int) -> float:
        """The best sum of two disjoint free sets."""
        return max(
            self.bandwidth.get(members, 0.0) + self.best(without(free, members), size)
            for members in combinations(free, size)
        )

    def means(self, placement: str) -> list[float]:
        """Of each stream the mean bandwidth of its pods, relative to the best set of their sizes."""
        every = tuple(range(len(self.gpus)))
        best = {size: self.best(every, size) for size in self.sizes}
        return [
            fmean(
                self.bandwidth[members] / best[len(members)]
                for members in streams.granted(len(every), seed, lambda free, size: self.chosen(free, size, placement))
            )
            for seed in range(STREAMS)
        ]

    def free_sets(self, size: int) -> Iterator[Members]:
        """All sets of at least `size` GPUs, or unions of listed sets where not all sets of this size are listed."""
        listed = [members for members in self.bandwidth if len(members) == size]
        if len(listed) == comb(len(self.gpus), size):
            for count in range(size, len(self.gpus) + 1):
                yield from combinations(range(len(self.gpus)), count)
            return
        pairs = combinations(listed, 2)
        unions = sorted({tuple(sorted({*a, *b})) for a, b in pairs})
        yield from unions[:: max(1, len(unions) // MOST_FREE_SETS)]


def nccl(path: Path) -> Iterator[RatedResult]:
    """The suite `nccl`. Raises InvalidMachine for a file that does not list sets of a machine, and OSError."""
    for machine, free, size in questions(path):
        members = machine.chosen(free, size)
        if members in machine.bandwidth:
            yield rated(path, free, size, members, machine.bandwidth[members] / machine.best(free, size))


def two_containers(path: Path) -> Iterator[RatedResult]:
    """The suite `nccl/two-containers`. Raises as `nccl` does."""
    for machine, free, size in questions(path):
        if len(free) < 2 * size:
            continue
        first = machine.chosen(free, size)
        second = machine.chosen(without(free, first), size)
        if first in machine.bandwidth and second in machine.bandwidth:
            both = machine.bandwidth[first] + machine.bandwidth[second]
            yield rated(path, free, size, (*first, *second), both / machine.best_pair(free, size))


def streams_of(path: Path, placement: str) -> Iterator[RatedResult]:
    """The streams of a machine with a device policy. Machines with more than nine GPUs are skipped."""
    if path.name.endswith(SKIPPED):
        return
    machine = read(path)
    if len(machine.gpus) > MOST_LISTED:
        return
    ours = machine.means(placement)
    theirs = fmean(machine.means(Placement.BEST_EFFORT))
    expected = f"{theirs:.4f} as with best-effort"
    got = f"{fmean(ours):.4f}"
    yield RatedResult(path.stem, expected, got, path.stem, fmean(ours), theirs - SLACK)


def questions(path: Path) -> Iterator[tuple[Machine, Members, int]]:
    """Each set of free GPUs and each size of the machine of a file. Raises InvalidMachine and OSError."""
    if path.name.endswith(SKIPPED):
        return
    machine = read(path)
    for size in machine.sizes:
        for free in machine.free_sets(size):
            yield machine, free, size


def read(path: Path) -> Machine:
    """The machine of a file and its sets. Raises InvalidMachine and OSError."""
    document = path.parent / "machines" / f"{path.stem}.json"
    if not document.is_file():
        raise InvalidMachine(f"{clean(str(document))} is missing", "put the machine's document beside the file")
    bandwidth: dict[Members, float] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            listed = msgspec.json.decode(line, type=ListedSet)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMachine(
                f"line {number} of {clean(path.name)}: {clean(str(error), 200)}", "give the sets of one machine"
            ) from error
        bandwidth[tuple(sorted(listed.gpus))] = listed.allreduce_1GiB_GBps
    return Machine(decode_machine(named_neutrally(document.read_bytes()), document.stem).topology, bandwidth)


NVIDIA_NAMES = {
    b'"nvlinks"': b'"fabric_links"',
    b'"nvswitch_links"': b'"switch_links"',
    b'"nvlinks_down"': b'"links_down"',
}


def named_neutrally(document: bytes) -> bytes:
    """A published machine document, which has NVIDIA's names for the fields about links, with the names of a `Topology`."""
    for name, neutral in NVIDIA_NAMES.items():
        document = document.replace(name, neutral)
    return document


def rated(path: Path, free: Members, size: int, members: Members, ratio: float) -> RatedResult:
    """The result of one case."""
    name = f"{path.stem}: {size} of {','.join(map(str, free))}"
    return RatedResult(
        name, f"at least {LEAST}", f"{ratio:.3f} with {','.join(map(str, members))}", path.stem, ratio, LEAST
    )


def without(free: Members, gone: Members) -> Members:
    """The other free GPUs."""
    return tuple(position for position in free if position not in gone)


SUITES: dict[str, Suite] = {
    "nccl": nccl,
    "nccl/two-containers": two_containers,
    "nccl/streams": partial(streams_of, placement=Placement.TOPOLOGY),
    "nccl/streams-best-effort": partial(streams_of, placement=Placement.BEST_EFFORT),
}
