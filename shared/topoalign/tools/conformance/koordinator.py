"""The suites `koordinator/…`: device hints and joint allocation of Koordinator a7a1b76b, its oddities included."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from topoalign.core.deviceshare.allocate import allocate
from topoalign.core.deviceshare.candidates import Asked, wanted
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.names import DeviceType
from topoalign.core.deviceshare.numa_hints import numa_hints
from topoalign.core.deviceshare.scores import Scorer, node_score
from topoalign.core.model.errors import TopoalignError
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.koordinator_answers import Answer, outcome, refused
from topoalign.tools.conformance.koordinator_cases import Inventories, NodeCase, Part, Pod, parts, without_nulls
from topoalign.tools.conformance.koordinator_rules import small_rules
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite


class AnsweredCase(Protocol):
    """Any case with an expected answer."""

    @property
    def expect(self) -> Answer:
        """The expected answer."""


C = TypeVar("C", bound=AnsweredCase)


class Allocations(Answer, frozen=True, kw_only=True):
    """The expected devices by type."""

    allocations: dict[DeviceType, list[Part] | None] | UnsetType | None = UNSET


class AllocateCase(NodeCase, frozen=True, kw_only=True):
    """A case of `koordinator/allocate`."""

    expect: Allocations


def allocations(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `koordinator/allocate`."""
    inventories = Inventories(path)

    def answer(case: AllocateCase) -> Allocations:
        given = allocate(case.asked(inventories))
        return Allocations(allocations={kind: parts(each) for kind, each in given.items()}, error=None)

    return results(path, AllocateCase, answered(answer), without_nulls)


class NumaHint(msgspec.Struct, frozen=True):
    """A hint as Koordinator returns it, with its score."""

    numa: list[int] | UnsetType | None = UNSET
    preferred: bool | UnsetType = UNSET
    score: int | UnsetType = UNSET


class Hints(Answer, frozen=True, kw_only=True):
    """The expected hints by device type."""

    hints: dict[DeviceType, list[NumaHint] | None] | UnsetType | None = UNSET


class HintsCase(NodeCase, frozen=True, kw_only=True):
    """A case of `koordinator/numa_hints`."""

    expect: Hints


def hints(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `koordinator/numa_hints`."""
    inventories = Inventories(path)

    def answer(case: HintsCase) -> Hints:
        got: dict[DeviceType, list[NumaHint] | None] = {
            kind: [NumaHint(list(hint.nodes), hint.preferred, hint.score) for hint in each]
            for kind, each in numa_hints(case.asked(inventories)).items()
        }
        return Hints(hints=got, error=None)

    return results(path, HintsCase, answered(answer), without_nulls)


class Score(Answer, frozen=True, kw_only=True):
    """The expected score of a node."""

    node_score: int | UnsetType | None = UNSET


class ScoreCase(NodeCase, frozen=True, kw_only=True):
    """A case of `koordinator/node_score`."""

    expect: Score


def scores(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `koordinator/node_score`."""
    inventories = Inventories(path)

    def answer(case: ScoreCase) -> Score:
        return Score(node_score=score_of(case.asked(inventories), case.scorer or Scorer()), error=None)

    return results(path, ScoreCase, answered(answer), without_nulls)


def score_of(asked: Asked, scorer: Scorer) -> int:
    """The score of a node for a pod: the higher, the better it fits."""
    by_type = asked.inventory.by_type
    return node_score(scorer, [(by_type[kind], wanted(asked, kind).each) for kind in asked.demand.requests])


class Gpu(msgspec.Struct, frozen=True):
    """The expected request for GPUs of a prepared pod."""

    count: int | UnsetType = UNSET
    per_gpu: dict[str, int] | UnsetType | None = UNSET
    shared: bool | UnsetType = UNSET
    required_topology_scope: str | UnsetType | None = UNSET
    scope_level: int | UnsetType = UNSET
    honor_partition: bool | UnsetType = UNSET
    restricted: bool | UnsetType = UNSET


class Prepared(Answer, frozen=True, kw_only=True):
    """The expected state of a pod after Koordinator's PreFilter."""

    skip: bool | UnsetType | None = UNSET
    normalized_requests: dict[DeviceType, dict[str, int] | None] | UnsetType | None = UNSET
    joint_device_types: list[DeviceType] | UnsetType | None = UNSET
    joint_required_scope: str | UnsetType | None = UNSET
    gpu: Gpu | UnsetType | None = UNSET


class PrepareCase(msgspec.Struct, frozen=True):
    """A case of `koordinator/prepare`."""

    id: str
    pod: Pod
    expect: Prepared


def prepare(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `koordinator/prepare`."""
    return results(path, PrepareCase, answered(lambda case: prepared(case.pod.demand)), without_nulls)


def prepared(demand: JointDemand) -> Prepared:
    """A demand in the fields of a case."""
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
        error=None,
    )


def answered(answer: Callable[[C], Answer]) -> Callable[[C], Outcome]:
    """Runs a case; where an error is expected, it is all that is compared."""

    def run(case: C) -> Outcome:
        expected = case.expect if not case.expect.error else type(case.expect)(error=case.expect.error)
        try:
            return outcome(expected, answer(case))
        except TopoalignError as error:
            return outcome(expected, type(expected)(error=refused(error)))

    return run


SUITES: dict[str, Suite] = {
    "koordinator/allocate": allocations,
    "koordinator/prepare": prepare,
    "koordinator/small_rules": small_rules,
    "koordinator/numa_hints": hints,
    "koordinator/node_score": scores,
}
