"""The suite `koordinator/small_rules`: single rules of request validation, counting and ordering."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from topoalign.cli.conformance.case_files import results
from topoalign.cli.conformance.koordinator_cases import Inventories, Pod, refused
from topoalign.cli.conformance.suite import CaseResult, Outcome
from topoalign.core.errors import TopoalignError
from topoalign.core.joint.candidates import Asked, Candidate, wanted
from topoalign.core.joint.inventory import Device, Place
from topoalign.core.joint.names import HINT_ANNOTATION, DeviceType
from topoalign.core.joint.picking import by_minor, by_preferred_pcie
from topoalign.core.joint.quantities import check, gpu_demand, normalised
from topoalign.core.joint.refusals import NotMeant


class Ranked(msgspec.Struct, frozen=True, rename={"pcie": "pcieID"}):
    minor: int
    score: int
    pcie: str = ""

    @property
    def read(self) -> Candidate:
        device = Device(kind=DeviceType.RDMA, minor=self.minor, place=Place(pcie=self.pcie))
        return Candidate(device, {}, self.score)


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


class RuleCase(msgspec.Struct, frozen=True):
    id: str
    kind: str
    input: Input
    expect: dict[str, Any]


def valid(given: Input, inventories: Inventories) -> Mapping[str, object]:
    try:
        check(given.requests)
    except NotMeant as error:
        return {"valid": False, "error": error.reasons[0]}
    return {"valid": True, "error": None}


def converted(given: Input, inventories: Inventories) -> Mapping[str, object]:
    return {"normalized": normalised(given.requests)}


def counted(given: Input, inventories: Inventories) -> Mapping[str, object]:
    pod = Pod(given.requests, {HINT_ANNOTATION: {given.device_type.value: given.hint}})
    try:
        want = wanted(Asked(demand=pod.demand, inventory=inventories.read(given.device)), given.device_type)
    except TopoalignError as error:
        return {"ok": False, "count": 0, "per_instance": {}, "error": msgspec.to_builtins(refused(error))}
    return {"ok": True, "count": want.count, "per_instance": want.each, "error": None}


def gpus_counted(given: Input, inventories: Inventories) -> Mapping[str, object]:
    demand = gpu_demand(given.normalized_requests)
    return {"count": demand.count, "per_instance": demand.each, "shared": demand.shared}


def ordered_by_minor(given: Input, inventories: Inventories) -> Mapping[str, object]:
    order = by_minor([each.read for each in given.devices], given.preferred_minors or ())
    return {"order": [each.minor for each in order]}


def ordered_by_pcie(given: Input, inventories: Inventories) -> Mapping[str, object]:
    order = by_preferred_pcie([each.read for each in given.devices], given.preferred_pcie)
    return {"order": [each.minor for each in order]}


RULES: dict[str, Callable[[Input, Inventories], Mapping[str, object]]] = {
    "validate_request": valid,
    "convert_request": converted,
    "count_per_instance": counted,
    "gpu_count_per_instance": gpus_counted,
    "order_by_minor": ordered_by_minor,
    "order_by_preferred_pcie": ordered_by_pcie,
}


def small_rules(path: Path) -> Iterator[CaseResult]:
    inventories = Inventories(path)

    def outcome(case: RuleCase) -> Outcome:
        rule = RULES.get(case.kind)
        return case.expect, f"no rule {case.kind}" if rule is None else rule(case.input, inventories)

    return results(path, RuleCase, outcome)
