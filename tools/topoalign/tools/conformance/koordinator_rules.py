"""The suite `koordinator/small_rules`: single rules of request validation, counting and ordering."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from topoalign.core.deviceshare.candidates import (
    DeviceCandidate,
    JointRequest,
    by_minor,
    by_preferred_pcie,
    count_wanted,
)
from topoalign.core.deviceshare.inventory import DeviceLocation, InventoryDevice
from topoalign.core.deviceshare.joint_refusals import InvalidShareRequest
from topoalign.core.deviceshare.koordinator_names import HINT_ANNOTATION, DeviceType
from topoalign.core.deviceshare.request_combinations import check_combination, gpu_demand, normalise_quantities
from topoalign.core.model.errors import TopoalignError, Undecodable, quoted
from topoalign.tools.conformance.case_files import results
from topoalign.tools.conformance.koordinator_answers import Answer, outcome, refused
from topoalign.tools.conformance.koordinator_cases import Inventories, Pod, without_nulls
from topoalign.tools.conformance.suite import CaseResult, Outcome


class Ranked(msgspec.Struct, frozen=True, rename={"pcie": "pcieID"}):
    """A candidate device of an ordering case."""

    minor: int
    score: int
    pcie: str = ""

    @property
    def read(self) -> DeviceCandidate:
        """The candidate in the types of the product."""
        device = InventoryDevice(kind=DeviceType.RDMA, minor=self.minor, place=DeviceLocation(pcie=self.pcie))
        return DeviceCandidate(device, {}, self.score)


class Input(msgspec.Struct, frozen=True):
    """What the rule of the case needs."""

    requests: dict[str, int] = {}
    normalized_requests: dict[str, int] = {}
    device: str = ""
    device_type: DeviceType = DeviceType.RDMA
    hint: dict[str, Any] = {}
    devices: list[Ranked] = []
    preferred_minors: list[int] | None = None
    preferred_pcie: list[str] = []


class RuleAnswer(Answer, frozen=True, kw_only=True):
    """The expected answer of a rule; each kind of rule has its own fields."""

    valid: bool | UnsetType = UNSET
    normalized: dict[str, int] | UnsetType | None = UNSET
    ok: bool | UnsetType = UNSET
    count: int | UnsetType = UNSET
    per_instance: dict[str, int] | UnsetType | None = UNSET
    shared: bool | UnsetType = UNSET
    order: list[int] | UnsetType | None = UNSET


class RuleCase(msgspec.Struct, frozen=True):
    """A case of `koordinator/small_rules`; `kind` names the rule."""

    id: str
    kind: str
    input: Input
    expect: RuleAnswer


def valid(given: Input, inventories: Inventories) -> RuleAnswer:
    """Whether the requests are valid."""
    try:
        check_combination(given.requests)
    except InvalidShareRequest as error:
        return RuleAnswer(valid=False, error=error.reasons[0])
    return RuleAnswer(valid=True, error=None)


def converted(given: Input, inventories: Inventories) -> RuleAnswer:
    """The requests in Koordinator's normal form."""
    return RuleAnswer(normalized=dict(normalise_quantities(given.requests)), error=None)


def counted(given: Input, inventories: Inventories) -> RuleAnswer:
    """The number of devices of a type and the amount of each."""
    pod = Pod(given.requests, {HINT_ANNOTATION: {given.device_type.value: given.hint}})
    try:
        want = count_wanted(
            JointRequest(demand=pod.demand, inventory=inventories.read(given.device, {})), given.device_type
        )
    except TopoalignError as error:
        return RuleAnswer(ok=False, count=0, per_instance={}, error=refused(error))
    return RuleAnswer(ok=True, count=want.count, per_instance=dict(want.each), error=None)


def gpus_counted(given: Input, inventories: Inventories) -> RuleAnswer:
    """The number of GPUs and the amount of each."""
    demand = gpu_demand(given.normalized_requests)
    return RuleAnswer(count=demand.count, per_instance=dict(demand.each), shared=demand.shared, error=None)


def ordered_by_minor(given: Input, inventories: Inventories) -> RuleAnswer:
    """The candidates by score, preferred numbers first."""
    order = by_minor([each.read for each in given.devices], given.preferred_minors or ())
    return RuleAnswer(order=[each.minor for each in order], error=None)


def ordered_by_pcie(given: Input, inventories: Inventories) -> RuleAnswer:
    """The candidates by score, those in preferred root complexes first."""
    order = by_preferred_pcie([each.read for each in given.devices], given.preferred_pcie)
    return RuleAnswer(order=[each.minor for each in order], error=None)


RULES: dict[str, Callable[[Input, Inventories], RuleAnswer]] = {
    "validate_request": valid,
    "convert_request": converted,
    "count_per_instance": counted,
    "gpu_count_per_instance": gpus_counted,
    "order_by_minor": ordered_by_minor,
    "order_by_preferred_pcie": ordered_by_pcie,
}


def small_rules(path: Path) -> Iterator[CaseResult]:
    """The results of a file of `koordinator/small_rules`."""
    inventories = Inventories(path)

    def run(case: RuleCase) -> Outcome:
        if case.kind not in RULES:
            raise Undecodable(f"case {quoted([case.id])}", f"no rule is named {quoted([case.kind])}")
        try:
            return outcome(case.expect, RULES[case.kind](case.input, inventories))
        except TopoalignError as error:
            return outcome(case.expect, RuleAnswer(error=refused(error)))

    return results(path, RuleCase, run, without_nulls)
