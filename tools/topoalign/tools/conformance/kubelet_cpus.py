"""
The suites `kubelet/cpu_hints`, `kubelet/cpu_take` and `kubelet/cpu_allocate`.

The topologies that their cases name are in `cpu_topologies.json` beside the file. Where a case has a result without the
kubelet's two defects (`expect_fixed`), that one is expected.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

from topoalign.core.admission.pipeline import reason_of
from topoalign.core.cpu_assignment.distributed import take_distributed
from topoalign.core.cpu_assignment.packed import take_packed
from topoalign.core.hints.cpu import cpu_hints
from topoalign.core.model.errors import NoFit
from topoalign.core.model.requests import AdmissionRules, CpuOption, Mode
from topoalign.core.model.topology.cpu_topology import CpuTopology
from topoalign.core.model.topology.cpuset import format_cpuset, parse_cpuset
from topoalign.core.model.topology.model import Cpu
from topoalign.core.placement.exclusive_cpus import allocate_cpus
from topoalign.tools.conformance.case_files import Beside, results
from topoalign.tools.conformance.kubelet_devices import mask_or_none
from topoalign.tools.conformance.kubelet_errors import Answer
from topoalign.tools.conformance.kubelet_merge import Hint, all_written
from topoalign.tools.conformance.suite import CaseResult, Outcome

TOPOLOGIES = "cpu_topologies.json"


class Listed(msgspec.Struct, frozen=True):
    """A topology as the file has it; the numbers are what averages are taken from, and some are 0 on purpose."""

    cpus: list[tuple[int, int, int, int, int]]
    """CPU, core, socket, NUMA node, last-level cache."""
    num_cpus: int
    num_cores: int
    num_sockets: int
    num_numa_nodes: int
    num_uncore: int

    @property
    def read(self) -> CpuTopology:
        """The CPU topology in the types of the product."""
        found = CpuTopology(
            Cpu(id=cpu, core=core, socket=socket, node=node, uncore=uncore)
            for cpu, core, socket, node, uncore in self.cpus
        )
        found.cpus = self.num_cpus
        found.cores = self.num_cores
        found.sockets = self.num_sockets
        found.nodes = self.num_numa_nodes
        found.uncores = self.num_uncore
        return found


class CpuCase(msgspec.Struct, frozen=True):
    """The common fields of a case; `topology` names one in cpu_topologies.json."""

    id: str
    topology: str


C = TypeVar("C", bound=CpuCase)


def with_topologies(path: Path, kind: type[C], outcome: Callable[[C, CpuTopology], Outcome]) -> Iterator[CaseResult]:
    """The cases, each run with its topology, which is read when a case first names it."""
    listed = Beside(path, TOPOLOGIES)

    @cache
    def topology(name: str) -> CpuTopology:
        return msgspec.json.decode(listed[name], type=Listed).read

    return results(path, kind, lambda case: outcome(case, topology(case.topology)))


def known(cpus: CpuTopology, text: str) -> frozenset[int]:
    """The CPUs of a list that the topology has; the kubelet looks at no others."""
    return parse_cpuset(text) & cpus.node_of.keys()


def check_lists(*texts: str) -> None:
    """Raises ValueError, so that the line is refused which holds a list that is none."""
    for text in texts:
        parse_cpuset(text)


class Expected(Answer, frozen=True, omit_defaults=True):
    """What came out; errors by the code of ours."""

    cpus: str | None = None
    shared_pool_after: str | None = None
    reason: str | None = None
    never_returns: bool = False


class AnswerCase(CpuCase, frozen=True, kw_only=True):
    """The common fields of a case that expects CPUs."""

    expect: Expected
    expect_fixed: Expected | None = None

    @property
    def expected(self) -> Expected:
        """The result without the kubelet's defects where the case has one, with the kind of its error."""
        return (self.expect_fixed or self.expect).by_kind


class HintsOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a hints case."""

    align_by_socket: bool = False


class HintsExpected(msgspec.Struct, frozen=True):
    """The expected hints."""

    hints: list[Hint]


class HintsCase(CpuCase, frozen=True, kw_only=True):
    """A case of `kubelet/cpu_hints`."""

    available: str
    requested: int
    expect: HintsExpected
    reusable: str = ""
    options: HintsOptions = HintsOptions()

    def __post_init__(self) -> None:
        check_lists(self.available, self.reusable)


def hints(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/cpu_hints`."""
    return with_topologies(path, HintsCase, hinted)


def hinted(case: HintsCase, cpus: CpuTopology) -> Outcome:
    """Expected and actual hints of a case."""
    available = known(cpus, case.available)
    reusable = known(cpus, case.reusable)
    by_socket = case.options.align_by_socket
    got = cpu_hints(cpus, available, reusable, case.requested, Mode.KUBELET, by_socket=by_socket)
    return case.expect.hints, all_written(got)


class TakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a take case."""

    prefer_uncore: bool = False
    group_size: Annotated[int, msgspec.Meta(ge=1)] = 1


class TakeCase(AnswerCase, frozen=True, kw_only=True):
    """A case of `kubelet/cpu_take`."""

    available: str
    count: int
    strategy: Literal["packed", "spread", "distributed"]
    options: TakeOptions = TakeOptions()

    def __post_init__(self) -> None:
        check_lists(self.available)


def take(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/cpu_take`."""

    return with_topologies(path, TakeCase, lambda case, cpus: (case.expected, taken(case, cpus)))


def taken(case: TakeCase, cpus: CpuTopology) -> Expected:
    """The CPUs that are taken, or the kind of the error."""
    available = known(cpus, case.available)
    options = case.options
    try:
        if case.strategy == "distributed":
            got = take_distributed(cpus, available, case.count, options.group_size)
        else:
            spread = case.strategy == "spread"
            got = take_packed(cpus, available, case.count, spread=spread, prefer_uncore=options.prefer_uncore)
    except NoFit as misfit:
        return Expected(error=misfit.code)
    return Expected(cpus=format_cpuset(got))


class AllocateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of an allocate case."""

    align_by_socket: bool = False
    distribute_across_cores: bool = False
    distribute_across_numa: bool = False
    full_pcpus_only: bool = False
    prefer_uncore: bool = False

    @property
    def read(self) -> frozenset[CpuOption]:
        """The options in the types of the product."""
        return frozenset(CpuOption[name.upper()] for name, on in msgspec.structs.asdict(self).items() if on)


class AllocateCase(AnswerCase, frozen=True, kw_only=True):
    """A case of `kubelet/cpu_allocate`."""

    shared_pool: str
    requested: int
    reserved: str = ""
    reusable: str = ""
    hint_nodes: list[int] | None = None
    options: AllocateOptions = AllocateOptions()

    def __post_init__(self) -> None:
        check_lists(self.reserved, self.shared_pool, self.reusable)


def allocate(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `kubelet/cpu_allocate`."""

    return with_topologies(path, AllocateCase, lambda case, cpus: (case.expected, allocated(case, cpus)))


def allocated(case: AllocateCase, cpus: CpuTopology) -> Expected:
    """The CPUs that are allocated, or the kind of the error."""
    pool = known(cpus, case.shared_pool)
    try:
        got = allocate_cpus(
            cpus,
            pool,
            known(cpus, case.reserved),
            known(cpus, case.reusable),
            case.requested,
            mask_or_none(case.hint_nodes),
            AdmissionRules(mode=Mode.KUBELET, cpu_options=case.options.read),
        )
    except NoFit as misfit:
        return Expected(error=misfit.code, reason=reason_of(misfit))
    return Expected(cpus=format_cpuset(got), shared_pool_after=format_cpuset(pool - got))
