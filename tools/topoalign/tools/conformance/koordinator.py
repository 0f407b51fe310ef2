"""The suites `koordinator/…`: device hints and joint allocation of Koordinator a7a1b76b, its oddities included."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from topoalign.core.deviceshare.candidates import JointRequest, count_wanted
from topoalign.core.deviceshare.demand import JointDemand
from topoalign.core.deviceshare.device_scores import DeviceScorer, score_node
from topoalign.core.deviceshare.joint_allocation import allocate_all_types
from topoalign.core.deviceshare.koordinator_names import DeviceType
from topoalign.core.model.errors import TopoalignError
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.koordinator_answers import Answer, outcome, refused
from topoalign.tools.conformance.koordinator_cases import Inventories, NodeCase, Part, Pod, parts, without_nulls
from topoalign.tools.conformance.koordinator_numa_hints import numa_hints
from topoalign.tools.conformance.koordinator_rules import small_rules
from topoalign.tools.conformance.suite import CaseResult, Outcome, Suite


class AnsweredCase(Protocol):
    """Any case with an expected answer."""

    @property
    def expect(self) -> Answer:
        """The expected answer."""


A = TypeVar("A", bound=Answer)
C = TypeVar("C", bound=AnsweredCase)


class Allocations(Answer, frozen=True, kw_only=True):
    """The expected devices by type."""

    allocations: dict[DeviceType, list[Part] | None] | UnsetType | None = UNSET


def allocations(asked: JointRequest) -> Allocations:
    """`koordinator/allocate`: what is given."""
    return Allocations(allocations={kind: parts(each) for kind, each in allocate_all_types(asked).items()}, error=None)


class NumaHint(msgspec.Struct, frozen=True):
    """A hint as Koordinator returns it, with its score."""

    numa: list[int] | UnsetType | None = UNSET
    preferred: bool | UnsetType = UNSET
    score: int | UnsetType = UNSET


class Hints(Answer, frozen=True, kw_only=True):
    """The expected hints by device type."""

    hints: dict[DeviceType, list[NumaHint] | None] | UnsetType | None = UNSET


def hints(asked: JointRequest) -> Hints:
    """`koordinator/numa_hints`: the hints of each device type."""
    got: dict[DeviceType, list[NumaHint] | None] = {
        kind: [NumaHint(list(hint.nodes), hint.preferred, hint.score) for hint in each]
        for kind, each in numa_hints(asked).items()
    }
    return Hints(hints=got, error=None)


class Score(Answer, frozen=True, kw_only=True):
    """The expected score of a node."""

    node_score: int | UnsetType | None = UNSET


def score(asked: JointRequest) -> Score:
    """`koordinator/node_score`: the higher, the better the pod fits on the node."""
    wants = [(asked.inventory.by_type[kind], count_wanted(asked, kind).each) for kind in asked.demand.requests]
    return Score(node_score=score_node(asked.scorer or DeviceScorer(), wants), error=None)


def on_node(kind: type[NodeCase[A]], answer: Callable[[JointRequest], A]) -> Suite:
    """A suite of pods that are put to the nodes of `devices.json`."""

    def cases(path: Path) -> Iterator[CaseResult]:
        inventories = Inventories(path)
        return results(path, kind, answered(lambda case: answer(case.asked(inventories))), without_nulls)

    return cases


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
    "koordinator/allocate": on_node(NodeCase[Allocations], allocations),
    "koordinator/prepare": prepare,
    "koordinator/small_rules": small_rules,
    "koordinator/numa_hints": on_node(NodeCase[Hints], hints),
    "koordinator/node_score": on_node(NodeCase[Score], score),
}
