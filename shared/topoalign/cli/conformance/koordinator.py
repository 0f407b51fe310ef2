"""The suites `koordinator/…`: device hints and joint allocation as Koordinator a7a1b76b has them, traps included."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from topoalign.cli.conformance.case_files import results
from topoalign.cli.conformance.koordinator_cases import Error, Inventories, NodeCase, Parts, Pod, parts, refused
from topoalign.cli.conformance.koordinator_rules import small_rules
from topoalign.cli.conformance.suite import CaseResult, Outcome, Suite
from topoalign.core.errors import TopoalignError
from topoalign.core.joint.allocate import allocate
from topoalign.core.joint.candidates import Asked, wanted
from topoalign.core.joint.demand import Demand
from topoalign.core.joint.names import DeviceType
from topoalign.core.joint.numa_hints import numa_hints
from topoalign.core.joint.scores import Scorer, node_score


class AllocateExpected(msgspec.Struct, frozen=True):
    allocations: Parts | None = None
    error: Error | None = None


class AllocateCase(NodeCase, frozen=True, kw_only=True):
    expect: AllocateExpected


def allocations(path: Path) -> Iterator[CaseResult]:
    inventories = Inventories(path)

    def outcome(case: AllocateCase) -> Outcome:
        expected = case.expect.allocations if case.expect.error is None else case.expect.error.compared
        try:
            return expected, {kind: parts(given) for kind, given in allocate(case.asked(inventories)).items()}
        except TopoalignError as error:
            return expected, refused(error)

    return results(path, AllocateCase, outcome)


class NumaHint(msgspec.Struct, frozen=True):
    numa: list[int]
    preferred: bool
    score: int


class HintsExpected(msgspec.Struct, frozen=True):
    hints: dict[DeviceType, list[NumaHint]]


class HintsCase(NodeCase, frozen=True, kw_only=True):
    expect: HintsExpected


def hints(path: Path) -> Iterator[CaseResult]:
    inventories = Inventories(path)

    def outcome(case: HintsCase) -> Outcome:
        try:
            got = {
                kind: [NumaHint(list(hint.nodes), hint.preferred, hint.score) for hint in each]
                for kind, each in numa_hints(case.asked(inventories)).items()
            }
        except TopoalignError as error:
            return case.expect.hints, refused(error)
        return case.expect.hints, got

    return results(path, HintsCase, outcome)


class ScoreExpected(msgspec.Struct, frozen=True):
    node_score: int


class ScoreCase(NodeCase, frozen=True, kw_only=True):
    expect: ScoreExpected


def scores(path: Path) -> Iterator[CaseResult]:
    inventories = Inventories(path)

    def outcome(case: ScoreCase) -> Outcome:
        try:
            return case.expect.node_score, score_of(case.asked(inventories), case.scorer or Scorer())
        except TopoalignError as error:
            return case.expect.node_score, refused(error)

    return results(path, ScoreCase, outcome)


def score_of(asked: Asked, scorer: Scorer) -> int:
    by_type = asked.inventory.by_type
    return node_score(scorer, [(by_type[kind], wanted(asked, kind).each) for kind in asked.demand.requests])


class Gpu(msgspec.Struct, frozen=True):
    count: int
    per_gpu: dict[str, int]
    shared: bool
    required_topology_scope: str
    scope_level: int
    honor_partition: bool
    restricted: bool


class Prepared(msgspec.Struct, frozen=True, omit_defaults=True):
    skip: bool | None = None
    normalized_requests: dict[DeviceType, dict[str, int]] | None = None
    joint_device_types: list[DeviceType] | None = None
    joint_required_scope: str | None = None
    gpu: Gpu | None = None
    error: Error | None = None


class PrepareCase(msgspec.Struct, frozen=True):
    id: str
    pod: Pod
    expect: Prepared


def prepare(path: Path) -> Iterator[CaseResult]:
    return results(path, PrepareCase, demanded)


def demanded(case: PrepareCase) -> Outcome:
    expected = case.expect if case.expect.error is None else case.expect.error.compared
    try:
        return expected, only_compared(prepared(case.pod.demand), case.expect)
    except TopoalignError as error:
        return expected, refused(error)


def prepared(demand: Demand) -> Prepared:
    gpu = demand.gpu
    return Prepared(
        skip=not demand.requests,
        normalized_requests={kind: dict(each) for kind, each in demand.requests.items()},
        joint_device_types=list(demand.joint),
        joint_required_scope=demand.required_scope,
        gpu=None
        if gpu is None
        else Gpu(
            count=gpu.count,
            per_gpu=dict(gpu.each),
            shared=gpu.shared,
            required_topology_scope=demand.hint(DeviceType.GPU).required_topology_scope,
            scope_level=demand.required_level,
            honor_partition=demand.partition is not None,
            restricted=demand.restricted,
        ),
    )


def only_compared(got: Prepared, expected: Prepared) -> Prepared:
    """What the case does not say is not compared."""
    silent = {field: None for field in got.__struct_fields__ if getattr(expected, field) is None}
    return msgspec.structs.replace(got, **silent)


SUITES: dict[str, Suite] = {
    "koordinator/allocate": allocations,
    "koordinator/prepare": prepare,
    "koordinator/small_rules": small_rules,
    "koordinator/numa_hints": hints,
    "koordinator/node_score": scores,
}
